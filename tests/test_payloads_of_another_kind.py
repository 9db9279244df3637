"""Payloads of whose values JSON does not tell the kind, or that nobody can read again."""

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NotRequired
from uuid import UUID

import pydantic_core
import pytest
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    RootModel,
    SerializeAsAny,
    Tag,
    TypeAdapter,
    model_validator,
)
from sidings import InvalidMessage, InvalidPayload
from sidings.executor import PostgresSettings
from sidings.jobs import Job, JobType, Registry, limits, lossy
from sidings.jobs.doubts import may_be_unreadable, may_have_keys
from sidings.jobs.kinds import fields_in_doubt
from sidings.jobs.limits import may_be_nested
from sidings.kafka import Outbox
from sidings.testing import drain
from typing_extensions import TypeAliasType, TypedDict

from .support import ORIGIN, connected

# Of a deque pydantic before 2.14 takes the text.
[READ_OF_A_DEQUE] = TypeAdapter(deque[Decimal | str]).validate_json('["1.5"]')
OTHER = "1.5" if isinstance(READ_OF_A_DEQUE, Decimal) else Decimal("1.5")


class Colour(Enum):
    RED = "red"


class Lamp(Enum):
    RED = "red"
    GREEN = "green"
    OUT = "out"


class Size(StrEnum):
    LARGE = "large"


class Mixed(Enum):
    NUMBER = 1
    TEXT = "1"


class Paid(BaseModel):
    amount: Decimal | str
    more: Any = None


class Order(BaseModel):
    number: int = 0
    lines: list[Paid] = []
    by: dict[int | str, int] = {}
    at: datetime | str | None = None


class Amounts(RootModel[list[Decimal | str]]):
    pass


@dataclass
class Named:
    id: UUID | str


Price = Annotated[
    Annotated[Decimal, Tag("Decimal")] | Annotated[str, Tag("str")], Discriminator(lambda value: type(value).__name__)
]


class Priced(BaseModel):
    price: Price


AT, ID = datetime(2030, 1, 2, tzinfo=UTC), UUID(int=7)


@pytest.mark.parametrize(
    ("kind", "payload", "refused"),
    [
        (Order, Order(lines=[Paid(amount=Decimal("1.5"))]), None),
        (Order, Order(lines=[Paid(amount="by hand", more=[Decimal("1.5"), {1: AT}])]), ...),
        (Order, Order(lines=[Paid(amount="1.5")]), "in amount a str of which the handler would get a Decimal"),
        (Order, Order(by={"1": 1, "b": 2}), None),
        (Order, Order(by={1: 1}), "in by a int of which the handler would get a str"),
        (Order, Order(by={1: 1, "1": 2}), "in by keys that JSON writes alike"),  # one was lost
        (Order, Order(at=AT), None),
        (Order, Order(at="soon"), None),
        (Order, Order(at="2030-01-02T03:04:05Z"), "in at a str of which the handler would get a datetime"),
        (Order, Order(lines=[Paid(amount="by hand")]), None),
        (Amounts, Amounts([Decimal(1), "one"]), None),
        (Amounts, Amounts([Decimal(1), "1"]), "in root a str of which the handler would get a Decimal"),
        (Named, Named(ID), None),
        (Named, Named(str(ID)), "in id a str of which the handler would get a UUID"),
        (str | bytes, b"bill", "a bytes of which the handler would get a str"),
        (str | Colour, Colour.RED, "a Colour of which the handler would get a str"),
        (str | Size, Size.LARGE, None),  # it equals the text
        (set[Decimal | str], {Decimal("1.5"), "x"}, None),
        (set[Decimal | str], {"1.5", "x"}, "a str of which the handler would get a Decimal"),
        (set[Decimal | str], {"1.5", Decimal("1.50")}, "items that JSON writes alike"),  # one was lost
        (list[str] | frozenset[UUID], frozenset((ID,)), "a UUID of which the handler would get a str"),
        (deque[Decimal | str], deque((READ_OF_A_DEQUE, "x")), None),
        (
            deque[Decimal | str],
            deque((OTHER, "x")),
            f"of which the handler would get a {type(READ_OF_A_DEQUE).__name__}",
        ),
        (Mapping[str, Decimal | str], {"a": Decimal("1.5"), "b": "x"}, None),
        (Mapping[str, Decimal | str], {"a": "1.5"}, "a str of which the handler would get a Decimal"),
        (OrderedDict[str, Decimal | str], OrderedDict(a="1.5"), "a str of which the handler would get a Decimal"),
        (dict[str, Decimal] | Mapping[str, str], {"a": "1.5"}, "a str of which the handler would get a Decimal"),
        (dict[str, str] | OrderedDict[str, Decimal], {"a": "1.5"}, None),
        (OrderedDict[Mixed, int], OrderedDict({Mixed.NUMBER: 1, Mixed.TEXT: 2}), "keys that JSON writes alike"),
        (dict[Path, int], {Path("a"): 1}, None),
        (list[IPv4Address | Path], [IPv4Address("127.0.0.1"), Path("a")], None),
        (Paid | dict[str, str], {"amount": "1"}, "a dict of which the handler would get a Paid"),
        (dict[Mixed, int], {Mixed.NUMBER: 1, Mixed.TEXT: 2}, "keys that JSON writes alike"),  # one was lost
        (dict[int, int] | dict[str, int], {"a": 1}, None),
        (dict[int, int] | dict[str, int], {1: 1}, "a int of which the handler would get a str"),
        (Literal[Colour.RED] | str, "blue", None),
        (Literal[Colour.RED] | str, Colour.RED, "a Colour of which the handler would get a str"),
        (dict[str | None, int], {None: 1}, "a NoneType of which the handler would get a str"),
        (list[Decimal] | list[str], ["1.5"], "a str of which the handler would get a Decimal"),
        (list[Decimal] | list[str], ["x"], None),
        (dict[int | str, Any], {"a": [AT, {1: 2}]}, ...),
        (dict[int | str, Any], {1: AT}, "a int of which the handler would get a str"),
        (Priced, Priced(price="by hand"), None),
        (Priced, Priced(price=Decimal("1.5")), "in price a Decimal of which the handler would get a str"),
        (Decimal | int, 1, None),
        (date | datetime, AT, None),
    ],
    ids=lambda value: str(sorted(value, key=str) if isinstance(value, set) else value),  # one order in all processes
)
async def test_a_value_arrives_as_the_kind_that_it_was_or_is_refused(
    database: str, kind: Any, payload: Any, refused: Any
) -> None:
    """pydantic takes the first kind of a union that fits, and writes keys as texts: it was another one."""
    registry, got = Registry(), list[Any]()

    @registry.job(payload=kind)
    async def keep(job: Job[Any]) -> None:
        got.append(job.payload)

    async with connected(database) as connection, connection.transaction():
        if refused in (None, ...):
            await keep.enqueue(connection, payload, origin=ORIGIN)
        else:
            with pytest.raises(InvalidPayload, match=re.escape(refused)):
                await keep.enqueue(connection, payload, origin=ORIGIN)
            with pytest.raises(InvalidPayload, match=re.escape(refused)):
                await keep.enqueue_many(connection, [payload], origin=ORIGIN)
    await drain(database, registry)
    if refused is ...:  # what is declared as Any arrives as JSON has it
        assert len(got) == 1
    elif refused is not None:
        assert got == []
    else:
        assert got == [payload]


class Leg(NamedTuple):
    start: str
    end: str


class Code(Enum):
    PAIR = (1, 2)


class Number(Enum):
    ONE = 1


class Coloured(BaseModel):
    colour: Literal[Colour.RED]


class Sized(BaseModel):
    colour: Literal["blue"]


class Priced(BaseModel):
    what: Coloured | Sized = Field(discriminator="colour")


class Tree(BaseModel):
    name: str = ""
    branches: list["Tree"] = []


class Free(BaseModel):
    number: int = 0
    more: Any = None


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Opened(Closed):
    row: int = 1


class Holder(BaseModel):
    what: SerializeAsAny[Closed]


class Loaded(BaseModel):
    number: int
    loaded: int = Field(exclude=True)


@dataclass
class Counted:
    name: str
    count: int = field(default=0, init=False)


LEAVES_OUT = pytest.mark.skipif(not hasattr(pydantic_core, "MISSING"), reason="came with pydantic 2.12")
POLYMORPHIC = pytest.mark.skipif(
    "polymorphic_serialization" not in ConfigDict.__annotations__, reason="came with pydantic 2.13"
)
MISSING: Any = getattr(pydantic_core, "MISSING", None)
IF_NOTHING: Any = {"exclude_if": lambda value: not value} if MISSING is not None else {}


class Charge(BaseModel):
    fee: int = Field(default=5, **IF_NOTHING)
    note: str | None = Field(default=None, **IF_NOTHING)
    tax: float = Field(default=0, **IF_NOTHING)

    @model_validator(mode="before")
    @classmethod
    def as_it_is(cls, values: Any) -> Any:
        return values


class StoredCharge(Charge):
    row: int = 1


class Charges(BaseModel):
    all: list[Charge]


@dataclass
class Toll:
    fee: Annotated[int, Field(**IF_NOTHING)] = 5
    more: InitVar[int] = 0
    to: "int | MISSING" = 7


class Required(BaseModel):
    fee: int = Field(**IF_NOTHING)


class Discounted(BaseModel):
    discount: "int | MISSING | None" = 10
    other: "int | MISSING" = MISSING


def left_out_if(leaves: Callable[[Any], bool]) -> Any:
    return {"exclude_if": leaves} if IF_NOTHING else {}


class Meta(BaseModel):
    tags: list[str] = []
    seen: datetime = Field(default_factory=lambda: datetime.now(UTC), exclude=True)
    _looked_at: int = PrivateAttr(0)


class StoredMeta(Meta):
    row: int = 1


@dataclass
class Place:
    name: str = ""
    seen: Annotated[object, Field(exclude=True)] = field(default_factory=object)


class StoredPlace(Place):
    pass


class Loose(BaseModel, extra="allow"):
    pass


class Tags(RootModel[list[Meta]]):
    pass


class Money:
    """Equal to nothing but itself."""

    def __init__(self, cents: int = 0) -> None:
        self.cents = cents


def as_money(value: Any) -> Money:
    return value if isinstance(value, Money) else Money(value)


class Kept(BaseModel):
    meta: Meta = Field(default_factory=Meta, **left_out_if(lambda meta: not meta.tags))
    of_a_class: Meta = Field(default=StoredMeta(), **left_out_if(lambda meta: not meta.tags))
    place: Place = Field(default_factory=Place, **left_out_if(lambda place: not place.name))
    all: list[Meta] = Field(default_factory=lambda: [Meta()], **left_out_if(lambda metas: not metas[0].tags))
    by: dict[str, Meta] = Field(default_factory=lambda: {"a": Meta()}, **left_out_if(lambda by: not by["a"].tags))
    root: Tags = Field(default_factory=lambda: Tags([Meta()]), **left_out_if(lambda tags: not tags.root[0].tags))
    loose: Loose = Field(default_factory=Loose, **left_out_if(lambda _: True))
    either: Meta | Place | None = Field(default_factory=Meta, **left_out_if(lambda _: True))
    money: Annotated[Money, PlainValidator(as_money), PlainSerializer(lambda money: money.cents)] = Field(
        default_factory=Money, **left_out_if(lambda money: not money.cents)
    )
    lamp: Lamp = Field(default=Lamp.GREEN, **left_out_if(lambda lamp: lamp is not Lamp.OUT))


class Item(BaseModel, frozen=True):
    id: int
    note: str | None = Field(default=None, **IF_NOTHING)


class StoredItem(Item, frozen=True):
    row: int = 0


class SeenItem(BaseModel, frozen=True):
    id: int
    note: str | None = Field(default=None, **IF_NOTHING)
    seen: object = Field(default_factory=object, exclude=True)


@dataclass(frozen=True)
class Entry:
    id: int
    note: Annotated[str | None, Field(**IF_NOTHING)] = None


@dataclass(frozen=True)
class StoredEntry(Entry):
    row: int = 0


def with_item(**values: Any) -> tuple[int, Item]:
    return 1, StoredItem(**values)


class Stop(BaseModel, frozen=True):
    tags: frozenset[str]
    id: int
    note: str | None = Field(default=None, **IF_NOTHING)
    seen: object = Field(default_factory=object, exclude=True)


@dataclass(frozen=True)
class Visit:
    stops: frozenset[Stop]
    id: int
    note: Annotated[str | None, Field(**IF_NOTHING)] = None


@dataclass(frozen=True)
class StoredVisit(Visit):
    row: int = 0


class Trip(BaseModel, frozen=True):
    ends: tuple[Item, Item]
    seen: object = Field(default_factory=object, exclude=True)


def with_tags(*, id: int, **values: Any) -> Stop:
    return Stop(tags=frozenset(f"{n} {id}" for n in range(4)), id=id, **values)


def with_stops(*, id: int, **values: Any) -> Visit:
    return StoredVisit(stops=frozenset(with_tags(id=id + n) for n in range(3)), id=id, **values)


class SetLeftOut(BaseModel):
    all: set[Item] = Field(default_factory=lambda: {Item(id=1), Item(id=2, note="n")}, **left_out_if(lambda _: True))


class Ticket(TypedDict):
    fee: NotRequired[Annotated[int, Field(**left_out_if(lambda fee: fee == 0))]]
    seen: NotRequired[Annotated[object, Field(exclude=True)]]
    tax: NotRequired["int | MISSING"]
    first: Charge
    second: Meta
    others: NotRequired[dict[str, Any]]


class Price(TypedDict):
    fee: NotRequired[Annotated[int | None, Field(**left_out_if(lambda fee: fee == 0))]]


class Due(TypedDict):
    fee: NotRequired[Annotated[int | None, Field(**left_out_if(lambda fee: fee is None))]]


class PriceFirst(BaseModel):
    price: Price = {}
    due: Due = {}


class DueFirst(BaseModel):
    due: Due = {}
    price: Price = {}


class Departure(TypedDict):
    at: NotRequired[Annotated[int, Field(**left_out_if(lambda at: at <= 0))]]
    fee: NotRequired[Annotated[int, Field(**left_out_if(lambda fee: fee == 0))]]
    tax: NotRequired[Annotated[int, Field(default=5, **left_out_if(lambda tax: tax <= 0))]]
    labels: NotRequired[dict[str, Any]]


class Node(TypedDict):
    kids: NotRequired[Annotated[list["Node"], Field(**left_out_if(lambda kids: not kids))]]


def looked_at() -> Meta:
    meta = Meta()
    meta._looked_at = 1
    return meta


class Base(BaseModel):
    model_config: ClassVar[Any] = {"extra": "forbid", "polymorphic_serialization": True}


class Derived(Base):
    row: int = 1


def a_job_of(kind: Any) -> JobType[Any]:
    @Registry().job(payload=kind)
    async def keep(job: Job[Any]) -> None: ...

    return keep


def nested(depth: int) -> list[Any]:
    out: list[Any] = []
    for _ in range(depth - 1):
        out = [out]
    return out


def a_tree(depth: int) -> Tree:
    tree = Tree()
    for _ in range(depth):
        tree = Tree(branches=[tree])
    return tree


def a_count(number: int) -> Counted:
    counted = Counted("a")
    counted.count = number
    return counted


@pytest.mark.parametrize(
    ("kind", "payload", "refused"),
    [
        (Free, Free(more=nested(200)), None),
        (Free, Free(more=nested(201)), "more is nested deeper than by 200"),
        (dict, {"a": 1, "more": nested(220)}, "more is nested deeper than by 200"),
        (Any, nested(250), "it is nested deeper than by 200"),
        (Tree, a_tree(99), None),
        (Tree, a_tree(100), "branches is nested deeper than by 200"),
        (Free, Free(more=["[" * 1_000, {"[": "{" * 1_000}]), None),
        (Free, Free(more=[[]] * 1_000), None),
        (Free, Free(more=["]", nested(150), "[", *[[]] * 100]), None),
        (Free, Free(more=[nested(200), *["]["] * 100]), "more is nested deeper than by 200"),
        (Free, Free(number=10**4_299, more="1" * 10_000), None),
        (Free, Free(number=10**4_300), "number has a number of more than 4,300 digits"),
        (Free, Free(more={"a": ["x" * 3_000, -(10**9_000)]}), "more has a number of more than 4,300 digits"),
        (dict[tuple[int, int], int], {(1, 2): 3}, "Input should be a valid array"),
        (dict[Leg, int], {Leg("a", "b"): 3}, "a,b"),
        (Code, Code.PAIR, "Input should be"),
        (Priced, Priced(what=Coloured(colour=Colour.RED)), "'red' found using 'colour'"),
        (Literal[Size.LARGE, 1] | None, Size.LARGE, None),
        (dict[Number, int], {Number.ONE: 1}, "Input should be 1"),
        (dict[Literal[1, 2], int], {1: 1}, "Input should be 1 or 2"),
        (Holder, Holder(what=Closed()), None),
        (Holder, Holder(what=Opened()), r"what.row"),
        (Loaded, Loaded(number=1, loaded=2), "loaded"),
        (Counted, Counted("a"), None),
        (Counted, a_count(7), "other values of count"),  # the handler got 0
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
async def test_what_nobody_can_read_again_is_refused(
    database: str, kind: Any, payload: Any, refused: str | None
) -> None:
    """It was stored, and held when it came to run."""
    registry, got = Registry(), list[Any]()

    @registry.job(payload=kind)
    async def keep(job: Job[Any]) -> None:
        got.append(job.payload)

    async with connected(database) as connection, connection.transaction():
        if refused is None:
            await keep.enqueue(connection, payload, origin=ORIGIN)
        else:
            with pytest.raises(InvalidPayload, match=re.escape(refused)):
                await keep.enqueue(connection, payload, origin=ORIGIN)
            with pytest.raises(InvalidPayload, match=re.escape(refused)):
                await keep.enqueue_many(connection, [payload], origin=ORIGIN)
    await drain(database, registry)
    assert got == ([] if refused else [payload])


@LEAVES_OUT
@pytest.mark.parametrize(
    ("payload", "refused"),
    [
        (Charge(), None),
        (Charge(fee=1, note="a", tax=2), None),
        (Charge(fee=5, note=None, tax=0.0), None),  # left out, and the default
        (Charge(fee=0), "in fee a value that is left out"),  # the handler got 5
        (Charge(note=""), "in note a value that is left out"),
        (Charges(all=[Charge(), Charge(fee=0)]), "in fee a value that is left out"),
        (Charges(all=[StoredCharge()]), None),
        (Charges(all=[StoredCharge(fee=0)]), "in fee a value that is left out"),
        (Toll(), None),
        (Toll(fee=0), "in fee a value that is left out"),
        (Toll(to=MISSING), "in to a value that is left out"),
        (Required(fee=1), None),
        (Required(fee=0), "fee\n  Field required"),  # was stored, and held when it came to run
        (Discounted(), None),
        (Discounted(discount=None), None),
        (Discounted(discount=MISSING), "in discount a value that is left out"),  # the handler got 10
        pytest.param(Base(), None, marks=POLYMORPHIC),
        pytest.param(Derived(), "row\n  Extra inputs are not permitted", marks=POLYMORPHIC),
    ],
    ids=repr,
)
def test_a_value_that_is_left_out_is_refused_unless_it_is_the_default(payload: Any, refused: str | None) -> None:
    kinds = (Charge, Charges, Toll, Required, Discounted, Base)
    keep = a_job_of(next(kind for kind in kinds if isinstance(payload, kind)))
    if refused is None:
        read = keep.load(keep.dump(payload))
        assert read == payload or isinstance(payload, Charges)  # of which the derived ones arrive as their base
    else:
        with pytest.raises(InvalidPayload, match=re.escape(refused)):
            keep.dump(payload)


@LEAVES_OUT
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"meta": StoredMeta(row=2)},
        {"meta": looked_at(), "of_a_class": Meta(), "place": StoredPlace(), "all": [StoredMeta()]},
        {"by": {"a": StoredMeta()}, "root": Tags([StoredMeta()]), "either": StoredMeta()},
    ],
)
def test_what_is_left_out_is_the_default_where_json_would_have_the_same_of_both(values: dict[str, Any]) -> None:
    """Each `Kept()` was refused, for a field that never goes into the JSON, or a class without `__eq__`."""
    keep = a_job_of(Kept)
    read = keep.load(keep.dump(Kept(**values)))
    assert type(read.meta) is Meta
    assert read.meta.tags == []


@LEAVES_OUT
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loose", Loose.model_validate({"more": 1})),
        ("either", None),
        ("either", Place()),
        ("either", Meta(tags=["a"])),
        ("all", [Meta(), Meta()]),
        ("by", {"a": Meta(), "b": Meta()}),
        ("root", Tags([Meta(), Meta()])),
        ("lamp", Lamp.RED),
    ],
)
def test_what_is_left_out_is_compared_with_the_default_in_all_that_json_would_have(name: str, value: Any) -> None:
    with pytest.raises(InvalidPayload, match=f"in {name} a value that is left out"):
        a_job_of(Kept).dump(Kept.model_validate({name: value}))


@LEAVES_OUT
@pytest.mark.parametrize(
    ("declared", "item"),
    [
        *[(Item, StoredItem), (SeenItem, SeenItem), (Entry, StoredEntry), (tuple[int, Item], with_item)],
        *[(Stop, with_tags), (frozenset[Stop], lambda **values: frozenset({with_tags(**values)}))],
        (Visit, with_stops),
    ],
)
def test_items_of_a_set_are_compared_with_what_was_read_of_them(declared: Any, item: Callable[..., Any]) -> None:
    """The note of one was compared with that of another, as the sets happened to be in order: one in four was refused,
    and what is left out of one of many was found as often; of items that hold sets one in three, still."""
    keep = a_job_of(set[declared])
    for n in range(100):
        items = {item(id=n), item(id=n + 500, note="n")}
        keep.dump(items)
        with pytest.raises(InvalidPayload, match="in note a value that is left out"):
            keep.dump({*items, item(id=n + 1_000, note="")})


@LEAVES_OUT
def test_items_of_a_set_that_differ_in_the_order_of_a_list_are_not_mixed_up() -> None:
    here, there = Item(id=1, note="n"), Item(id=2)
    a_job_of(set[Trip]).dump({Trip(ends=(here, there)), Trip(ends=(there, here))})


@LEAVES_OUT
@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"fee": 1}, None),
        ({"seen": object()}, None),
        ({"tax": 1, "second": StoredMeta(), "others": {"fee": "0", "tax": None}}, None),
        ({"fee": 0}, "in fee a value that is left out"),  # the handler found none
        ({"tax": MISSING}, "in tax a value that is left out"),
        ({"seen": object(), "first": Charge(fee=0)}, "in fee a value that is left out"),
    ],
)
def test_a_value_of_a_typed_dict_that_is_left_out_is_refused(values: dict[str, Any], refused: str | None) -> None:
    """It was stored without the key; or a union was blamed that there is not, as all was compared by place."""
    keep, payload = a_job_of(Ticket), {"first": Charge(), "second": Meta(), **values}
    if refused is None:
        read = keep.load(keep.dump(payload))
        assert read.keys() == payload.keys() - {"seen"}
    else:
        with pytest.raises(InvalidPayload, match=refused):
            keep.dump(payload)


@LEAVES_OUT
@pytest.mark.parametrize("kind", [PriceFirst, DueFirst])
@pytest.mark.parametrize(
    ("values", "is_lost"),
    [
        ({"price": {"fee": 0}, "due": {}}, True),
        ({"price": {}, "due": {"fee": None}}, True),
        ({"price": {"fee": None}, "due": {"fee": 0}}, False),
    ],
)
def test_what_any_typed_dict_leaves_out_of_a_key_is_refused(kind: Any, values: dict[str, Any], is_lost: bool) -> None:
    """Of two with a key of the same name only the last was asked, and of the other the key was lost."""
    keep, payload = a_job_of(kind), kind(**values)
    if is_lost:
        with pytest.raises(InvalidPayload, match="in fee a value that is left out"):
            keep.dump(payload)
    else:
        assert keep.load(keep.dump(payload)) == payload


@LEAVES_OUT
def test_a_dict_with_a_key_of_the_name_of_a_typed_dicts_is_left_alone() -> None:
    """Its values were asked as well, of types that the author of exclude_if had never thought of."""
    keep = a_job_of(Departure)
    keep.dump({"labels": {"at": date(2026, 1, 1), "fee": Decimal(0), "tax": date(2026, 1, 1)}})
    keep.dump({"labels": {"at": 0, "fee": 0, "tax": 0}})
    for name in ("at", "fee", "tax"):
        with pytest.raises(InvalidPayload, match=f"in {name} a value that is left out"):
            keep.dump({name: 0})


@LEAVES_OUT
def test_what_a_typed_dict_does_not_leave_out_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was at each level, with all below it: 4,000 dicts, 80 deep, took two seconds."""
    tree: dict[str, Any] = {}
    for _ in range(20):
        tree = {"kids": [tree]}

    def is_changed(*_: object, **__: object) -> bool:
        raise AssertionError

    monkeypatch.setattr(lossy, "is_changed", is_changed)
    keep = a_job_of(Node)
    assert keep.load(keep.dump(tree)) == tree


@LEAVES_OUT
def test_a_set_that_is_left_out_is_the_default_whatever_its_items_hold_besides() -> None:
    keep = a_job_of(SetLeftOut)
    keep.dump(SetLeftOut())
    keep.dump(SetLeftOut(all={StoredItem(id=1), StoredItem(id=2, note="n")}))
    for other in ({Item(id=1)}, {Item(id=1), Item(id=3, note="n")}, {Item(id=1), Item(id=2, note="m")}):
        with pytest.raises(InvalidPayload, match="in all a value that is left out"):
            keep.dump(SetLeftOut(all=other))


@pytest.mark.parametrize("more", [{"rows": [{"a": [n]} for n in range(1_000)]}, [10**4_000], "1x" * 5_000], ids=type)
def test_what_can_be_read_is_not_read_to_tell_so(monkeypatch: pytest.MonkeyPatch, more: Any) -> None:
    """Each payload with more than 200 lists and dicts was, for as long as it had taken to write it."""
    registry = Registry()

    @registry.job(payload=Free)
    async def keep(job: Job[Any]) -> None: ...

    def read(text: bytes) -> None:
        raise AssertionError

    monkeypatch.setattr(limits, "from_json", read)
    assert keep.dump(Free(more=more))


class Files(BaseModel):
    sizes: dict[str, int]


@pytest.mark.parametrize("kind", [Files, dict, OrderedDict[str, int], Any], ids=str)
async def test_a_key_with_half_a_character_is_refused(database: str, kind: Any) -> None:
    """As a name of a file that was read with `surrogateescape`: JSON got another key, and of two such keys one."""
    registry, sizes = Registry(), dict(zip(("a\udcff", "a\udcfe"), (1, 2), strict=True))

    @registry.job(payload=kind)
    async def keep(job: Job[Any]) -> None: ...

    outbox = Outbox(PostgresSettings(dsn=database))
    async with connected(database) as connection, connection.transaction():
        for given, accepted in ((sizes, False), ({"a\ufffd": 1, "ä": 2}, True)):
            payload = Files(sizes=given) if kind is Files else given
            if accepted:
                await keep.enqueue(connection, payload, origin=ORIGIN)
                await outbox.publish(connection, "files", key="k", value=Files(sizes=given))
                continue
            with pytest.raises(InvalidPayload, match=r"half a character|surrogates not allowed"):
                await keep.enqueue(connection, payload, origin=ORIGIN)
            with pytest.raises(InvalidMessage, match="half a character"):
                await outbox.publish(connection, "files", key="k", value=Files(sizes=given))
    await outbox.close()


Written = TypeAliasType("Written", "list[Written] | dict[str, Written] | str | float | None")


class Plain(BaseModel):
    data: JsonValue = None
    written: Written = None
    number: int | str | None = None
    price: Decimal | float = 0.0
    where: Path = Path()
    kind: Literal["a"] | None = "a"
    colours: dict[Colour, Colour] = {}
    names: Mapping[str, list[date | None]] = {}


@pytest.mark.parametrize(
    "kind", [str, list[int], deque[str], dict[str, int], dict[date, Decimal], Closed, Named | None]
)
def test_of_most_payloads_nothing_is_in_doubt(kind: Any) -> None:
    schema = TypeAdapter(kind).core_schema
    assert kind == Named | None or not fields_in_doubt(schema)
    assert not may_be_unreadable(schema)
    assert not may_be_nested(schema)
    assert may_have_keys(schema) == (getattr(kind, "__origin__", None) is dict)


def test_unions_that_json_tells_apart_are_not_in_doubt() -> None:
    schema = TypeAdapter(Plain).core_schema
    assert not fields_in_doubt(schema)
    assert not may_be_unreadable(schema)
    assert fields_in_doubt(TypeAdapter(list[Order]).core_schema) == {
        Order: {"by": True, "at": True},
        Paid: {"amount": True},
    }

"""Payloads of which the handler would get another model, or other bytes or values, than were enqueued."""

import gc
from collections import deque
from cProfile import Profile
from dataclasses import InitVar, dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Self, cast
from zoneinfo import ZoneInfo

import pytest
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    Tag,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from sidings import InvalidPayload
from sidings.jobs import Job, Registry
from sidings.jobs.doubts import may_become_another, may_change
from sidings.testing import drain

from .support import ORIGIN, connected


class Confirm(BaseModel):
    transport: str


class Cancel(BaseModel):
    transport: str


class Delay(BaseModel):
    transport: str
    minutes: int


@dataclass
class Change:
    what: Confirm | Cancel | Delay


class Changes(BaseModel):
    all: list[Confirm | Delay | Cancel] = []
    by: dict[str, Change] = {}


class Book(BaseModel):
    kind: Literal["book"] = "book"
    transport: str


class Drop(BaseModel):
    kind: Literal["drop"] = "drop"
    transport: str


class Written(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64")

    document: bytes
    pages: list[bytes] = []


@dataclass(frozen=True)
class Taken:
    row: int


@dataclass(frozen=True)
class Freed:
    row: int


@dataclass(frozen=True)
class Moved:
    row: int
    by: int


class Both(Written):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class Pickup(BaseModel):
    stop: int = 1


class Delivery(BaseModel):
    stop: int = 1
    floor: int = Field(1, alias="FLOOR")


def by_floor(value: Any) -> str:
    is_delivery = "FLOOR" in value if isinstance(value, dict) else isinstance(value, Delivery)
    return "delivery" if is_delivery else "pickup"


class Stop(BaseModel):
    of: Annotated[Annotated[Pickup, Tag("pickup")] | Annotated[Delivery, Tag("delivery")], Discriminator(by_floor)]


class Loud(BaseModel):
    model_config = ConfigDict(alias_generator=str.upper, populate_by_name=True)


class Bus(Loud):
    kind_of: Literal["bus"] = "bus"


class Tram(Loud):
    kind_of: Literal["tram"] = "tram"


def its_kind(value: Any) -> Any:
    return value.get("KIND_OF") if isinstance(value, dict) else value.kind_of


class Ridden(BaseModel):
    by: Annotated[Annotated[Bus, Tag("bus")] | Annotated[Tram, Tag("tram")], Discriminator(its_kind)]


def its_very_kind(value: Any) -> Any:
    return value["KIND_OF"] if isinstance(value, dict) else value.kind_of


class Driven(BaseModel):
    by: Annotated[Annotated[Bus, Tag("bus")] | Annotated[Tram, Tag("tram")], Discriminator(its_very_kind)]


@pytest.mark.parametrize(
    ("kind", "payload", "arrives"),
    [
        (Confirm | Cancel, Confirm(transport="T"), True),
        (Confirm | Cancel, Cancel(transport="T"), False),  # was confirmed
        (Confirm | Delay, Delay(transport="T", minutes=3), True),
        (Change, Change(Cancel(transport="T")), False),
        (Changes, Changes(all=[Delay(transport="T", minutes=3), Cancel(transport="T")]), False),
        (Changes, Changes(by={"a": Change(Delay(transport="T", minutes=3))}), True),
        (Changes, Changes(by={"a": Change(Cancel(transport="T"))}), False),
        (deque[Confirm | Delay], deque([Delay(transport="T", minutes=3)]), True),
        (deque[Confirm | Cancel], deque([Cancel(transport="T")]), False),
        (set[Taken | Freed], {Taken(1)}, True),
        (set[Taken | Freed], {Freed(1)}, False),
        (frozenset[Taken | Freed], frozenset((Taken(1), Freed(1))), False),  # one arrived
        (Annotated[Book | Drop, Field(discriminator="kind")], Drop(transport="T"), True),
        (Book | Drop, Drop(transport="T"), True),
        (Written, Written(document=b"bill"), False),  # was base64 of it
        (Written, Written(document=b"", pages=[b"1"]), False),
        (Both, Both(document=b"\xff", pages=[b"1"]), True),
        (Stop, Stop(of=Pickup()), True),
        (Stop, Stop(of=Delivery()), False),  # names are stored, and its function looks for an alias
        (Ridden, Ridden(by=Tram()), False),  # could not be read
        (Driven, Driven(by=Tram()), False),  # the function raises a KeyError
    ],
    ids=str,
)
async def test_a_handler_gets_what_was_enqueued_or_it_is_refused(
    database: str, kind: Any, payload: Any, arrives: bool
) -> None:
    """pydantic takes the first model of a union that fits, and reads bytes as UTF-8 however they were written."""
    registry, got = Registry(), list[Any]()

    @registry.job(payload=kind)
    async def change(job: Job[Any]) -> None:
        got.append(job.payload)

    async with connected(database) as connection, connection.transaction():
        if arrives:
            await change.enqueue(connection, payload, origin=ORIGIN)
        else:
            with pytest.raises(InvalidPayload, match=r"discriminator|val_json_bytes|could not read it"):
                await change.enqueue(connection, payload, origin=ORIGIN)
    await drain(database, registry)
    assert got == ([payload] if arrives else [])


async def test_what_an_annotation_says_of_a_model_holds_as_of_payload():
    """`Annotated` was taken off: what did not say its kind passed for the first model that fits; limits were none."""
    kinds = Annotated[Book | Drop, Field(discriminator="kind")]
    registry = Registry()

    @registry.job()
    async def change(job: Job[kinds]) -> None: ...

    @registry.job(batch=2)
    async def pay(jobs: Annotated[list[Annotated[Job[Annotated[int, Field(gt=0)]], "a job"]], "all"]) -> None: ...

    assert change.load('{"kind": "drop", "transport": "T"}') == Drop(transport="T")
    with pytest.raises(ValidationError, match="discriminator"):
        change.load('{"transport": "T"}')
    with pytest.raises(ValidationError, match="greater than 0"):
        pay.load("-5")


class Kept(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64")

    what: Confirm | Delay
    by: Change | None = None
    more: Any = None
    loaded: Confirm | None = Field(default=None, exclude=True)
    image: bytes = Field(default=b"", exclude=True)


class Noted(BaseModel):
    what: Confirm
    _seen: int = PrivateAttr(default=0)

    def seen(self) -> Self:
        self._seen += 1
        return self


class Long(BaseModel):
    what: Confirm | Delay
    numbers: list[int]
    names: dict[str, str]


class StoredConfirm(Confirm):
    row: int = 1


class StoredCancel(Cancel):
    row: int = 1


class StoredKept(Kept):
    row: int = 1


class StoredTaken(Taken):
    pass


class AddedMoved(Moved):
    pass


class Rows(BaseModel):
    all: set[Taken | Moved]


@dataclass
class Other:
    n: int


WHAT = Confirm(transport="T")


@pytest.mark.parametrize(
    ("payload", "arrives"),
    [
        (Kept(what=StoredConfirm(transport="T")), Kept(what=WHAT)),
        (StoredKept(what=WHAT), Kept(what=WHAT)),
        (StoredKept(what=StoredConfirm(transport="T", row=9), row=9), Kept(what=WHAT)),
        (Noted(what=WHAT).seen(), Noted(what=WHAT)),
        (Kept(what=WHAT, more=[Other(1)]), Kept(what=WHAT, more=[{"n": 1}])),
        (Kept(what=WHAT, loaded=Confirm(transport="here"), image=b"png"), Kept(what=WHAT)),
        (Rows(all={StoredTaken(1), AddedMoved(2, 1)}), Rows(all={Taken(1), Moved(2, 1)})),
        (Kept(what=WHAT, by=Change(StoredCancel(transport="T"))), None),  # was confirmed
        (StoredKept(what=WHAT, by=Change(Cancel(transport="T"))), None),
    ],
    ids=str,
)
async def test_what_arrives_as_the_class_that_was_declared_is_not_refused(
    database: str, payload: Any, arrives: Any
) -> None:
    """It was, where another field was a union of models; as were fields that are not to be stored."""
    registry, got = Registry(), list[Any]()

    @registry.job(payload=type(payload) if isinstance(payload, Rows | Noted) else Kept)
    async def keep(job: Job[Any]) -> None:
        got.append(job.payload)

    async with connected(database) as connection, connection.transaction():
        if arrives is None:
            with pytest.raises(InvalidPayload, match="a Cancel of which the handler would get a Confirm"):
                await keep.enqueue(connection, payload, origin=ORIGIN)
        else:
            await keep.enqueue(connection, payload, origin=ORIGIN)
    await drain(database, registry)
    assert got == ([] if arrives is None else [arrives])


@pytest.mark.parametrize(
    "kind",
    [
        Confirm,
        Both,
        str | int | None,
        Confirm | None,
        list[str] | str,
        dict[str, Any],
        list[int] | dict[str, list[int]],
    ],
)
def test_only_payloads_that_may_become_another_are_read_again(kind: Any) -> None:
    assert not may_become_another(TypeAdapter(kind).core_schema)


def test_of_long_lists_that_are_read_again_numbers_and_texts_are_not_looked_at_one_by_one() -> None:
    """It took several times as long as all the rest of an enqueue."""
    registry = Registry()

    @registry.job(payload=Long)
    async def change(job: Job[Long]) -> None: ...

    def calls(size: int) -> int:
        payload = Long(what=WHAT, numbers=list(range(size)), names=dict.fromkeys(map(str, range(size)), ""))
        change.dump(payload)
        gc.disable()  # what others have left behind would be counted as it ends
        try:
            with Profile() as profile:
                change.dump(payload)
        finally:
            gc.enable()
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(10_000) == calls(1_000)


class Payment(BaseModel):
    cents: int

    @field_validator("cents", mode="before")
    @classmethod
    def of_euros(cls, euros: float) -> int:
        return round(euros * 100)


class Payments(BaseModel):
    by: dict[str, Payment] = {}
    all: list[Payment] = []


class WithFee(BaseModel):
    lines: list[int]

    @model_validator(mode="after")
    def add_fee(self) -> Self:
        self.lines.append(5)
        return self


@dataclass
class Doubled:
    number: int

    def __post_init__(self) -> None:
        self.number *= 2


@dataclass
class Sum:
    number: int
    more: InitVar[int]

    def __post_init__(self, more: int) -> None:
        self.number += more


class Crossed(BaseModel):
    start: int = Field(alias="end")
    end: int = Field(alias="start")


class Tidy(BaseModel):
    """Validators may change what has come, as long as they leave it so."""

    names: frozenset[str]
    amount: Decimal
    more: Any = None
    loaded: int = Field(default=0, exclude=True)
    _calls: int = PrivateAttr(0)

    @field_validator("names", mode="before")
    @classmethod
    def strip(cls, names: Any) -> set[str]:
        return {name.strip() for name in names}

    @model_validator(mode="after")
    def count(self) -> Self:
        self._calls += self.loaded + 1
        return self


class Weighed(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")

    names: set[Annotated[str, AfterValidator(str.strip)]]
    weight: float


class StoredTidy(Tidy):
    row: int = 1


class Mark:
    """Equal to nothing but itself."""


def a_mark(text: Any) -> Mark:
    return text if isinstance(text, Mark) else Mark()


class Marked(BaseModel):
    names: set[Annotated[str, AfterValidator(str.strip)]]
    mark: Annotated[Any, PlainValidator(a_mark), PlainSerializer(lambda _: "mark")]


def a_share(value: float) -> float:
    """Of 1, or of 100."""
    return value / 100 if value > 1 else value


class Share(BaseModel):
    of_all: Annotated[float, AfterValidator(a_share)]


class ShareOfAll(BaseModel):
    of_all: float

    @model_validator(mode="after")
    def share(self) -> Self:
        self.of_all = a_share(self.of_all)
        return self


class StoredShare(ShareOfAll):
    row: int = 1


class Revalidated(Share):
    model_config = ConfigDict(revalidate_instances="always")


class Lines(BaseModel):
    lines: Annotated[list[str], AfterValidator(lambda lines: lines[1:])]


class Account(BaseModel):
    number: Annotated[str, AfterValidator(lambda number: number[3:])]


NUMBERED = pytest.mark.skipif("ser_json_temporal" not in ConfigDict.__annotations__, reason="came with pydantic 2.12")


class Wait(BaseModel):
    model_config = ConfigDict(ser_json_temporal="milliseconds")

    pause: timedelta = timedelta()
    until: datetime | None = None


class Until(BaseModel):
    model_config = ConfigDict(ser_json_temporal="seconds")

    valid: date


class Choice(BaseModel):
    amount: int = Field(validation_alias=AliasChoices("total", "fee"))
    fee: int = Field(0, validation_alias="costs")


class Path(BaseModel):
    first: int = Field(0, validation_alias=AliasPath("all", 0))
    all: list[int] = []


class More(BaseModel):
    model_config = ConfigDict(extra="allow")

    amount: int = Field(1, alias="total")


class Many(BaseModel):
    model_config = ConfigDict(extra="allow")

    first: int = Field(0, validation_alias=AliasPath("all", 0))
    last: int = Field(0, validation_alias=AliasChoices("end", "last"))


def with_more(payload: BaseModel, **values: Any) -> BaseModel:
    for name, its in values.items():
        setattr(payload, name, its)
    return payload


class Lamp(Enum):
    RED = "red"
    GREEN = "green"
    OUT = "out"


class Switched(BaseModel):
    lamp: Lamp

    @field_validator("lamp")
    @classmethod
    def the_next(cls, lamp: Lamp) -> Lamp:
        return {Lamp.RED: Lamp.GREEN}.get(lamp, Lamp.OUT)


class Cased(BaseModel):
    name: Annotated[str, AfterValidator(str.upper)]


NAMES = frozenset(f" {number}" for number in range(100))


@pytest.mark.parametrize(
    ("kind", "payload", "arrives"),
    [
        (Payment, Payment(cents=cast(int, 12.5)), None),  # the handler got 125,000
        (Payments, Payments(by={"a": Payment(cents=1)}), None),
        (Switched, Switched(lamp=Lamp.RED), None),
        (Payments, Payments(all=[Payment(cents=1)]), None),
        (Payments, Payments(), Payments()),
        (WithFee, WithFee(lines=[1]), None),
        (Doubled, Doubled(1), None),
        (Sum, Sum(1, 2), None),  # was held
        (Crossed, Crossed(end=1, start=2), None),
        (Share, Share(of_all=50), Share(of_all=0.5)),
        (Share, Share(of_all=150), None),  # the handler got 0.015
        (Share, Share.model_construct(of_all=50), None),
        (ShareOfAll, ShareOfAll(of_all=50), ShareOfAll(of_all=0.5)),
        (ShareOfAll, ShareOfAll(of_all=150), None),  # 0.015 was stored: such a validator runs when it is enqueued, too
        (ShareOfAll, StoredShare(of_all=150), None),
        (Revalidated, Revalidated(of_all=50), Revalidated(of_all=0.5)),
        (Revalidated, Revalidated(of_all=150), None),
        (Lines, Lines(lines=["header", "1"]), None),  # the handler got none
        (Account, Account(number="ES-123456"), None),
        pytest.param(Wait, Wait(pause=timedelta(seconds=5)), None, marks=NUMBERED),  # the handler got 5,000 s
        pytest.param(Wait, Wait(until=datetime(1970, 1, 2, tzinfo=UTC)), None, marks=NUMBERED),
        pytest.param(
            Wait,
            Wait(until=datetime(2030, 1, 2, tzinfo=UTC)),
            Wait(until=datetime(2030, 1, 2, tzinfo=UTC)),
            marks=NUMBERED,
        ),
        pytest.param(Until, Until(valid=date(9999, 12, 31)), None, marks=NUMBERED),  # could not be read
        (Choice, Choice.model_validate({"total": 1, "costs": 2}), None),
        (Choice, Choice.model_validate({"total": 2, "costs": 2}), Choice.model_validate({"total": 2, "costs": 2})),
        (Path, Path(all=[1]).model_copy(update={"all": [2]}), None),
        (More, with_more(More(total=1), total=7), None),  # the handler got 7 as the amount
        (More, More.model_validate({"total": 1, "amount": 7}), None),  # both were stored as amount
        (More, with_more(More(total=1), remark="x"), ...),
        (Many, with_more(Many(), all=[7]), None),
        (Many, with_more(Many(), end=7), None),
        (Cased, Cased.model_construct(name="t-1"), Cased(name="T-1")),
        (Tidy, Tidy(names=NAMES, amount=Decimal("1.10")), Tidy(names=NAMES, amount=Decimal("1.10"))),
        (
            Tidy,
            StoredTidy(names=NAMES, amount=Decimal(1), more=Decimal("1.10"), loaded=3),
            Tidy(names=NAMES, amount=Decimal(1), more="1.10"),
        ),
        (Tidy, Tidy.model_construct(names=NAMES, amount=Decimal(1)), Tidy(names=NAMES, amount=Decimal(1))),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),  # what it holds is in any order
)
async def test_values_that_the_model_changes_again_when_they_are_read_are_refused(
    database: str, kind: Any, payload: Any, arrives: Any
) -> None:
    """Of 12.50 euros, which a validator had made 1,250 cents, the handler got 125,000."""
    registry, got = Registry(), list[Any]()

    @registry.job(payload=kind)
    async def pay(job: Job[Any]) -> None:
        got.append(job.payload)

    async with connected(database) as connection, connection.transaction():
        if arrives is None:
            with pytest.raises(InvalidPayload):
                await pay.enqueue(connection, payload, origin=ORIGIN)
            with pytest.raises(InvalidPayload):
                await pay.enqueue_many(connection, [payload], origin=ORIGIN)
        else:
            await pay.enqueue(connection, payload, origin=ORIGIN)
    await drain(database, registry)
    assert got == ([] if arrives is None else [payload if arrives is ... else arrives])


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    same: int = Field(1, validation_alias="same")
    shown: int = Field(1, serialization_alias="as")


class Aliased(BaseModel):
    amount: int = Field(1, alias="total")


@pytest.mark.parametrize(
    "kind", [Confirm, Both, Kept, Change, Book | Drop, dict[str, Any], list[Decimal], Open, Aliased]
)
def test_only_payloads_that_run_code_of_their_authors_are_read_again(kind: Any) -> None:
    assert not may_change(TypeAdapter(kind).core_schema)


def test_the_error_names_the_fields_of_which_the_handler_would_get_other_values() -> None:
    registry = Registry()

    @registry.job(payload=Share)
    async def pay(job: Job[Share]) -> None: ...

    with pytest.raises(InvalidPayload, match="other values of of_all, for its model changes them"):
        pay.dump(Share(of_all=150))


@dataclass
class Priced:
    name: Annotated[str, AfterValidator(str.strip)]
    price: Decimal


class Parts(BaseModel):
    parts: Annotated[list[float], AfterValidator(lambda parts: [part / sum(parts) for part in parts])]


class Made(BaseModel):
    """pydantic validates no defaults."""

    at: datetime = Field(default_factory=lambda: datetime(2026, 1, 2, 3, 4, 5, 678, UTC).replace(tzinfo=None))
    by: Annotated[dict[str, int], AfterValidator(lambda by: dict(sorted(by.items())))] = {"b": 1, "a": 2}
    price: Decimal = cast(Decimal, 0.1)

    @field_validator("at")
    @classmethod
    def aware(cls, at: datetime) -> datetime:
        return at if at.tzinfo else at.replace(tzinfo=UTC)


class Seconds(BaseModel):
    at: Annotated[datetime, AfterValidator(lambda at: at.replace(microsecond=0))] = datetime(
        2026, 1, 2, 3, 4, 5, 6, UTC
    )


class Rounded(BaseModel):
    names: set[Annotated[str, AfterValidator(str.strip)]]
    price: Annotated[float, PlainSerializer(lambda price: round(price, 2))]


TWICE = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    ("kind", "payload", "arrives"),
    [
        (Priced, Priced("a", cast(Decimal, 9.99)), Priced("a", Decimal("9.99"))),
        (Priced, Priced("a", cast(Decimal, float("nan"))), None),
        (Parts, Parts(parts=[0.1, 0.1, 0.6]), ...),
        (Made, Made(), Made(at=datetime(2026, 1, 2, 3, 4, 5, 678, UTC), by={"a": 2, "b": 1}, price=Decimal("0.1"))),
        (Made, Made(at=TWICE), Made(at=TWICE.astimezone(timezone(timedelta(hours=2))), price=Decimal("0.1"))),
        (Seconds, Seconds(), Seconds(at=datetime(2026, 1, 2, 3, 4, 5, 0, UTC))),
        (Seconds, Seconds().model_copy(update={"at": datetime(2026, 1, 2, tzinfo=UTC)}), ...),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_values_of_which_the_handler_gets_the_same_in_another_form_are_not_refused(
    kind: Any, payload: Any, arrives: Any
) -> None:
    """Ordinary models were: a Decimal that was set as a float, a time without a zone to which a validator gives one."""
    registry = Registry()

    @registry.job(payload=kind)
    async def keep(job: Job[Any]) -> None: ...

    if arrives is None:
        with pytest.raises(InvalidPayload):
            keep.dump(payload)
    else:
        read = keep.load(keep.dump(payload))
        assert arrives is ... or read == arrives


@dataclass
class Bill:
    number: str
    price: Decimal = Decimal(1)


class Bills(BaseModel):
    of: list[Bill] = []
    due: datetime | None = None


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (Bill(cast(str, 17)), "number"),
        (Bill("17", cast(Decimal, "1,50")), "price"),
        (Bills(of=[Bill(cast(str, 17))]), "of.0.number"),
        (Bills(of=[Bill("17")]).model_copy(update={"due": "tomorrow"}), "due"),
    ],
)
def test_what_is_not_of_the_types_of_its_model_and_cannot_be_read_is_refused(payload: Any, field: str) -> None:
    """Of a dataclass nobody looks when it is made: the job was stored, and held when it came to run."""
    registry = Registry()

    @registry.job(payload=type(payload))
    async def keep(job: Job[Any]) -> None: ...

    with pytest.raises(InvalidPayload, match=f"(?m)^{field}$"):
        keep.dump(payload)


class Login(BaseModel):
    token: str


@dataclass
class Offer:
    note: str
    price: Decimal | None = None


class Queued(BaseModel):
    tokens: deque[SecretStr] = deque()
    prices: deque[float | None] = deque()
    by: dict[SecretStr, int] = {}
    sizes: deque[dict[str, int]] = deque()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (Queued(tokens=deque([SecretStr("4711")])), "it holds a secret"),
        (Queued(by={SecretStr("4711"): 1}), "it holds a secret"),
        (Queued(prices=deque([1.5, float("nan")])), "it holds a float that is NaN or infinite"),
        (Queued(sizes=deque([{"\ud800": 1}])), "it holds a key with half a character"),
        (Login(token="").model_copy(update={"token": SecretStr("4711")}), "it holds a secret"),
        (Offer(cast(str, SecretStr("4711"))), "it holds a secret"),
        (Offer("17", cast(Decimal, float("nan"))), "it holds a float that is NaN or infinite"),
    ],
)
def test_what_json_has_no_form_for_is_refused_wherever_it_is(payload: Any, told: str) -> None:
    """The handler got asterisks, or None."""
    registry = Registry()

    @registry.job(payload=type(payload))
    async def keep(job: Job[Any]) -> None: ...

    with pytest.raises(InvalidPayload, match=told):
        keep.dump(payload)


def test_what_a_serializer_rounds_arrives_so_beside_a_set() -> None:
    """It was refused now and then, as sets come in any order."""
    registry = Registry()

    @registry.job(payload=Rounded)
    async def keep(job: Job[Rounded]) -> None: ...

    for size in range(2, 200):
        text = keep.dump(Rounded(names={f" {number}" for number in range(size)}, price=1.2345))
        assert keep.load(text).price == 1.23


def test_what_equals_nothing_is_not_taken_for_changed() -> None:
    """NaN, or what has no equality, beside a set, whose order in JSON is any, was refused now and then."""
    registry = Registry()

    @registry.job(payload=Weighed)
    async def keep(job: Job[Weighed]) -> None: ...

    @registry.job(payload=Marked)
    async def mark(job: Job[Marked]) -> None: ...

    for size in range(2, 200):
        keep.dump(Weighed(names={f" {number}" for number in range(size)}, weight=float("nan")))
        mark.dump(Marked(names={f" {number}" for number in range(size)}, mark="x"))

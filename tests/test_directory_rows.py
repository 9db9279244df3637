"""From a Kafka record to a change of a directory: what other systems write, as they write it."""

import asyncio
import json
import os
import sys
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from subprocess import run
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, TypeAdapter
from sidings import ConfigurationError, Message
from sidings.kafka.directory.rows import Rows
from sidings.kafka.message import StoredRecord

from .consumer_support import Unshowable
from .directory_support import Acquirer, row


class Snake(BaseModel):
    terminal_id: str
    acquirer_id: str


class Flagged(Acquirer):
    is_active: bool


class Place:
    """A class of the author's, for which JSON Schema has no word."""

    def __init__(self, text: str) -> None:
        self.text = text


class Own(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    place: Annotated[Place, BeforeValidator(Place)]


class Optional(BaseModel):
    """No field is required, so that anything is a valid row."""

    terminal_id: str | None = None
    acquirer_id: str | None = None


class Anything(RootModel[dict[str, Any]]):
    """Any object is a valid row."""


def a_record(key: bytes | str | None, value: Any, *, offset: int = 0) -> StoredRecord:
    raw = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    return StoredRecord("t", 0, offset, 1, key.encode() if isinstance(key, str) else key, raw, ())


def rows_of(model: Any = Acquirer, **options: Any) -> Rows[Any]:
    return Rows("t", **{"model": model, "decoder": None, "key": None, "active": "is_active", **options})


def one(rows: Rows[Any], key: bytes | str | None, value: Any) -> tuple[Any, Any]:
    """Key and value of the only change that a record makes."""
    changes, bad = rows.read_all([a_record(key, value)])
    assert not bad, bad
    (change,) = changes
    return (change[0] if change[2] is None else change[1]), change[2]


SCHEMA = {"type": "struct", "fields": [{"type": "string", "field": "terminal_id"}], "optional": False}
CAMEL = {"id": 1, "terminalId": "T", "acquirerId": "a", "isActive": True, "updatedDate": "2024-01-01 11:11:11.000"}
PLAIN = {"id": 1, "terminal_id": "T", "acquirer_id": "a", "is_active": True}
INACTIVE = {name: value for name, value in CAMEL.items() if name != "isActive"}
SOURCE = {"version": "3.0", "connector": "postgresql", "name": "db", "op": "not this one", "payload": 1}


def envelope(op: str, before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "source": SOURCE, "transaction": None, "op": op, "ts_ms": 1}


@pytest.mark.parametrize("model", [Acquirer, Flagged, Optional, Snake])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("op", [None, "c", "r", "u"])
def test_a_row_is_found_in_whatever_a_connector_writes(model: Any, wrapped: bool, op: str | None):
    data: Any = CAMEL | {"is_active": True} if model in (Acquirer, Flagged) else PLAIN
    data = data if op is None else envelope(op, None if op in "cr" else data | {"acquirerId": "old"}, data)
    data = {"schema": SCHEMA, "payload": data} if wrapped else data
    key, value = one(rows_of(model), "T", data)
    assert key == "T"
    assert type(value) is model
    assert (value.terminal_id, value.acquirer_id) == ("T", "a")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("T-1", "T-1"),
        ("17", "17"),
        ('"T-1"', "T-1"),
        ('{"id": 17}', "17"),
        ('{"schema": {"type": "int64"}, "payload": 17}', "17"),
        ('{"schema": {"type": "struct"}, "payload": {"terminal_id": "T-1"}}', "T-1"),
        ('{"schema": {"type": "string"}, "payload": "T-1"}', "T-1"),
        ("{not json", "{not json"),
    ],
)
def test_the_key_is_the_text_of_the_message_key(key: str, text: str):
    assert one(rows_of(), key, row("T"))[0] == text
    assert one(rows_of(), key, None) == (text, None)


@pytest.mark.parametrize(
    ("keys", "mixed"),
    [
        (["T-1", "{not json", "17"], False),
        (['{"id": "T-1"}', '"T-2"', '{"a": 1, "b": 2}'], False),
        (["T-1", '{"id": "T-2"}'], True),
        (['"T-1"', "T-1"], True),
    ],
)
def test_keys_of_two_kinds_are_told_from_those_of_one(keys: list[str], mixed: bool):
    rows = rows_of()
    for key in keys:
        rows.read_all([a_record(key, row("T"))])
        rows.read_all([a_record(key, None)])
    assert rows.mixed == mixed
    assert not rows_of(key="terminal_id").mixed


@pytest.mark.parametrize("model", [Acquirer, Flagged, Optional, Anything, Acquirer | None])
@pytest.mark.parametrize("key", [None, lambda value: value.terminal_id])
@pytest.mark.parametrize(
    "value",
    [
        None,
        b"null",
        {"schema": None, "payload": None},
        envelope("d", PLAIN, None),
        {"schema": SCHEMA, "payload": envelope("d", PLAIN, None)},
        CAMEL | {"isActive": False},
        INACTIVE | {"is_active": False},
        INACTIVE | {"is_active": 0},
        envelope("u", PLAIN, PLAIN | {"is_active": False}),
        {"schema": SCHEMA, "payload": CAMEL | {"isActive": False}},
        {"isActive": False},  # a row that is gone need not be valid
        b'{ "isActive" :\n false }',
    ],
)
def test_rows_are_deleted_by_tombstones_envelopes_and_flags(model: Any, key: Any, value: Any):
    changes, bad = rows_of(model, key=key).read_all([a_record("T", value)])
    assert (changes, bad) == ([("T" if key is None else b"T", None, None, None)], [])


def test_a_flag_of_another_name_and_none_at_all():
    assert one(rows_of(active="in_force"), "T", CAMEL | {"inForce": False}) == ("T", None)
    assert one(rows_of(active="in_force"), "T", CAMEL | {"isActive": False})[1] is not None
    assert one(rows_of(active=None), "T", CAMEL | {"isActive": False})[1] is not None
    assert one(rows_of(), "T", CAMEL | {"child": {"isActive": False}})[1] is not None, "a flag of something else"


def test_a_flag_that_is_a_number():
    class Numbered(Acquirer):
        is_active: int

    assert one(rows_of(Numbered), "T", CAMEL | {"isActive": 0}) == ("T", None)
    assert one(rows_of(Numbered), "T", CAMEL | {"isActive": 1})[1] is not None


def test_a_row_with_columns_that_look_like_an_envelope_is_a_row():
    data = {"terminalId": "T", "acquirerId": "a", "op": "c", "after": None, "payload": 1}
    for model in (Acquirer, Optional):
        assert one(rows_of(model), "T", data)[1] is not None


UNAVAILABLE = "__debezium_unavailable_value"
UNAVAILABLE_BYTES = b64encode(UNAVAILABLE.encode()).decode()


class Certified(Acquirer):
    certificate: Any = Field(None, validation_alias="cert")


@pytest.mark.parametrize("model", [Certified, Optional, Anything, dict])
@pytest.mark.parametrize(
    ("value", "within"),
    [
        *((UNAVAILABLE, within) for within in ("", "envelope", "wrapper", "envelope wrapper")),
        ([UNAVAILABLE], "envelope"),
        ({UNAVAILABLE: UNAVAILABLE}, "envelope"),
        *((UNAVAILABLE_BYTES, within) for within in ("", "envelope")),
    ],
)
def test_a_row_that_lacks_a_large_column_does_not_replace_the_whole_one(model: Any, value: Any, within: str):
    """Postgres does not log a large value that an update has left alone, and Debezium puts this in its place."""
    column = "acquirer_id" if model is Optional else "cert"
    data: Any = CAMEL | {column: value}
    data = envelope("u", None, data) if "envelope" in within else data
    data = {"schema": SCHEMA, "payload": data} if "wrapper" in within else data
    changes, ((_, known, bad),) = rows_of(model).read_all([a_record("T", data)])
    assert (changes, known) == ([], "T")
    assert bad.reason == (
        f"Debezium did not know the value of {column}, which is large and was not changed: set REPLICA IDENTITY FULL "
        "for the table, or its ReselectColumnsPostProcessor in the connector"
    )


@pytest.mark.parametrize("value", [UNAVAILABLE, UNAVAILABLE_BYTES])
def test_a_large_column_that_does_not_count_may_be_lacking(value: str):
    row = CAMEL | {"large": value}
    assert one(rows_of(), "T", row)[1] is not None, "the model does not read it"
    assert one(rows_of(), "T", envelope("u", None, row))[1] is not None
    assert one(rows_of(dict), "T", envelope("u", row, CAMEL))[1] is not None, "it was so before"
    assert one(rows_of(dict), "T", envelope("d", row, None)) == ("T", None)
    assert one(rows_of(dict), "T", row | {"isActive": False}) == ("T", None), "one that is off need not be valid"
    assert one(rows_of(dict), "T", CAMEL | {"large": f"not {value}"})[1] is not None


def test_bad_records_are_told_and_do_not_stop_the_others():
    records = [
        a_record("T-1", row("T-1"), offset=0),
        a_record("T-2", b"{", offset=1),
        a_record("T-3", {"terminalId": "T-3"}, offset=2),
        a_record(None, row("T-4"), offset=3),
        a_record(b"\xff", row("T-5"), offset=4),
        a_record('{"a": 1, "b": 2}', row("T-6"), offset=5),
        a_record("T-7", b"[1]", offset=6),
        a_record("T-8", row("T-8"), offset=7),
        a_record("T-9", envelope("u", None, {"terminalId": 1}), offset=8),
    ]
    changes, bad = rows_of().read_all(records)
    assert [change[1] for change in changes] == ["T-1", "T-8"]
    assert [(one.offset, index, known) for index, known, one in bad] == [
        (1, 1, "T-2"),
        (2, 1, "T-3"),
        (3, 1, None),
        (4, 1, None),
        (5, 1, None),
        (6, 1, "T-7"),
        (8, 2, "T-9"),
    ]
    reasons = {one.offset: one.reason for _, _, one in bad}
    assert reasons[2] == "acquirerId: Field required"
    assert "no key" in reasons[3]
    assert "key=" in reasons[5]
    assert "payload" not in reasons[8]
    assert "after.terminalId" in reasons[8]
    assert bad[3][2].key == repr(b"\xff")


def test_an_error_that_cannot_be_shown_is_told():
    def decode(_: Message[bytes | None]) -> Any:
        raise Unshowable

    ((_, _, bad),) = rows_of(None, decoder=decode).read_all([a_record("T", b"")])[1]
    assert bad.reason == "Unshowable: its text cannot be shown: AttributeError"


def test_a_key_from_the_value():
    for key in ("terminal_id", lambda value: value.terminal_id):
        change = rows_of(key=key).read_all([a_record('{"id": 1}', CAMEL)])[0][0]
        assert change[:2] == (b'{"id": 1}', "T")
    assert rows_of(key=lambda _: None).read_all([a_record("1", CAMEL)])[1][0][2].reason.startswith("its key")
    assert "unhashable" in rows_of(key=lambda _: []).read_all([a_record("1", CAMEL)])[1][0][2].reason
    assert rows_of(dict, key="terminalId").read_all([a_record("1", CAMEL)])[0][0][1] == "T"
    assert "no terminalId" in rows_of(dict, key="terminalId").read_all([a_record("1", {})])[1][0][2].reason


def test_a_decoder_of_ones_own():
    def decode(message: Message[bytes | None]) -> Any:
        assert message.value is not None
        terminal, _, acquirer = message.value.decode().partition("=")
        return (
            None if not acquirer else {"terminalId": terminal, "acquirerId": acquirer, "is_active": acquirer != "off"}
        )

    rows = rows_of(None, decoder=decode)
    assert one(rows, "T", b"T=a")[1] == {"terminalId": "T", "acquirerId": "a", "is_active": True}
    assert one(rows, "T", b"T=")[1] is None
    assert one(rows, "T", b"T=off")[1] is None
    assert one(rows, "T", None)[1] is None
    assert one(rows_of(Acquirer, decoder=decode), "T", b"T=a")[1] == Acquirer(terminalId="T", acquirerId="a")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": None}, "model="),
        ({"model": 5}, "model=5: give a type that pydantic can validate"),
        ({"decoder": "json"}, "decoder='json': give a plain function, which is called with the message"),
        ({"key": asyncio.sleep}, "key=.* give a plain function, which is called with the value"),
        ({"active": ""}, "active="),
        ({"active": True}, "active=True: name the field"),
        ({"key": "nonsense"}, "no field of Acquirer: give one of terminal_id, acquirer_id"),
        ({"key": ""}, "key=''"),
        ({"key": 5}, "key=5"),
    ],
)
def test_wrong_declarations_are_refused(options: Any, told: str):
    with pytest.raises(ConfigurationError, match=told):
        rows_of(**options)


def test_what_is_compared_with_a_store_tells_readings_apart():
    readings = [
        rows_of(),
        rows_of(Snake),
        rows_of(key="terminal_id"),
        rows_of(active=None),
        rows_of(key=len),
        rows_of(decoder=len),
        rows_of(Own),
    ]
    assert len({rows.describe() for rows in readings}) == len(readings)
    assert rows_of().describe() == rows_of().describe()
    assert "0x" not in rows_of(Own).describe(), "an address, another one in each process"
    assert rows_of(key="terminal_id").describe() == rows_of(key="terminal_id").describe()


SOME = ("visa", "mc", "amex", "jcb", "cup")


@dataclass(frozen=True)
class Limits:
    schemes: frozenset[str] = frozenset(SOME)


class Licence(BaseModel):
    model_config = ConfigDict(frozen=True)

    schemes: frozenset[str] = Field(default=frozenset(SOME), serialization_alias="told")
    first: str = "a"


class Sets(BaseModel):
    """Sets wherever a schema may have them."""

    model_config = ConfigDict(json_schema_extra={"x-schemes": {"of": set(SOME)}})

    plain: set[str] = set(SOME)
    mixed: set[Any] = {*SOME, 1, 2.5}
    of_sets: frozenset[frozenset[str]] = frozenset(frozenset({name, "visa"}) for name in SOME)
    of_models: frozenset[Licence] = frozenset({Licence(), Licence(first="b"), Licence(first="c")})
    by_name: dict[str, set[str]] = {"b": set(SOME), "a": set()}
    in_list: list[frozenset[str]] = [frozenset(SOME)]
    in_tuple: tuple[int, frozenset[str]] = (1, frozenset(SOME))
    place: Licence = Licence()
    limits: Limits = Limits()
    example: str = Field(default="a", examples=[set(SOME), {"b": set(SOME)}])


class NoSets(BaseModel):
    """Lists keep their order: that is theirs."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"schemes": ["visa", "mc"]}]})

    schemes: list[str] = ["visa", "mc", "amex"]
    plain: set[int] = {10, 9}
    one: list[set[str]] = [{"visa"}, set()]
    by_name: dict[str, list[str]] = {"b": ["visa", "mc"], "a": []}
    place: Snake = Snake(terminal_id="T", acquirer_id="a")
    example: list[str] = Field(default=[], examples=[["visa", "mc"], ["mc", "amex"]])


def test_a_model_is_told_alike_in_each_process():
    """Sets have another order in each; a file was built anew at each start."""
    told: set[str] = set()
    orders: set[str] = set()
    asks = (
        "from tests.test_directory_rows import SOME, Sets, rows_of\nprint(set(SOME))\nprint(rows_of(Sets).describe())"
    )
    for seed in range(1, 4):
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        found = run([sys.executable, "-c", asks], cwd=Path(__file__).parents[1], env=environment, capture_output=True)
        assert found.returncode == 0, found.stderr.decode()
        order, _, description = found.stdout.decode().partition("\n")
        orders.add(order)
        told.add(description)
    assert len(orders) > 1, "these seeds give sets the same order: the test has shown nothing"
    assert len(told) == 1, told
    assert "'x-schemes': {'of': ['amex', 'cup', 'jcb', 'mc', 'visa']}" in told.pop()


@pytest.mark.parametrize("model", [Acquirer, Flagged, Snake, Anything, NoSets])
def test_a_model_without_sets_in_its_defaults_is_told_as_pydantic_tells_it(model: Any):
    """So that files which are there fit."""
    assert repr(TypeAdapter(model).json_schema()) in rows_of(model).describe()


def test_a_set_in_a_default_is_told_from_another():
    def a_place(*schemes: str) -> type[BaseModel]:
        class Place(BaseModel):
            places: list[frozenset[str]] = [frozenset(schemes)]

        return Place

    assert rows_of(a_place("visa", "mc")).describe() == rows_of(a_place("mc", "visa")).describe()
    assert rows_of(a_place("visa", "mc")).describe() != rows_of(a_place("visa", "jcb")).describe()

"""Enqueueing: in the caller's transaction, in order, with errors that come before anything is written."""

import asyncio
import json
from contextvars import Context
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum, StrEnum
from hashlib import sha256
from secrets import token_hex
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretBytes, SecretStr, computed_field, field_serializer
from sidings.errors import (
    ConfigurationError,
    EnqueueError,
    InvalidPayload,
    MissingGroup,
    MissingOrigin,
    NotInTransaction,
    UnknownJobType,
)
from sidings.jobs import Job, Registry, Retry, Transaction
from sidings.jobs.context import correlated, work_origin
from sidings.schema import load_sql
from sidings.testing import enqueued
from tenacity import stop_after_attempt

from .support import ORIGIN, Ride, connected, drained, enqueue, eventually, fetch, outcomes, running, value

ROWS = 'SELECT id, type, origin, "group", position, run_at, priority, payload, headers FROM sidings.job ORDER BY id'


def declare(registry: Registry | None = None, **options: Any):
    """A type of grouped rides whose handler does nothing."""

    async def ride(job: Job[Ride]) -> None: ...

    registry = Registry() if registry is None else registry
    return registry.job(**{"group": "transport", **options})(ride)


# -- the transaction ----------------------------------------------------------------------------------------------


async def test_a_job_exists_if_and_only_if_the_callers_transaction_commits(database: str):
    ride = declare()
    async with connected(database) as connection, connected(database) as other:
        await connection.execute("CREATE TABLE transport (id text)")
        for ending in ("COMMIT", "ROLLBACK"):
            await connection.execute("BEGIN")
            await connection.execute("INSERT INTO transport VALUES ($1)", ending)
            await ride.enqueue(connection, Ride(transport=ending), origin=ORIGIN)
            await ride.enqueue_many(connection, [Ride(transport=ending)] * 2, origin=ORIGIN)
            assert connection.is_in_transaction()  # enqueue has not ended it
            seen = await other.fetchval('SELECT count(*) FROM sidings.job WHERE "group" = $1', ending)
            assert seen == 0
            await connection.execute(ending)
        assert [row["group"] for row in await other.fetch(ROWS)] == ["COMMIT"] * 3
        assert await other.fetchval("SELECT array_agg(id) FROM transport") == ["COMMIT"]


async def test_a_savepoint_that_is_rolled_back_takes_its_jobs_along(database: str):
    ride = declare()
    async with connected(database) as connection, connection.transaction():
        await ride.enqueue(connection, Ride(transport="kept"), origin=ORIGIN)
        inner = connection.transaction()
        await inner.start()
        await ride.enqueue(connection, Ride(transport="gone"), origin=ORIGIN)
        await inner.rollback()
    assert [row["group"] for row in await fetch(database, ROWS)] == ["kept"]


async def test_a_connection_in_autocommit_is_refused(database: str):
    ride = declare()
    async with connected(database) as connection:
        for attempt in (
            ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN),
            ride.enqueue_many(connection, [Ride(transport="a")], origin=ORIGIN),
            ride.enqueue_many(connection, [], origin=ORIGIN),
        ):
            with pytest.raises(NotInTransaction, match=r"async with connection.transaction\(\)"):
                await attempt
    assert await fetch(database, ROWS) == []


async def test_a_pools_connection_and_a_transaction_object_are_accepted(database: str):
    ride = declare()
    async with asyncpg.create_pool(database, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        with pytest.raises(NotInTransaction):
            await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
        async with connection.transaction():
            await ride.enqueue(connection, Ride(transport="pooled"), origin=ORIGIN)
            tx = Transaction(connection)
            assert not tx.enqueued
            await ride.enqueue(tx, Ride(transport="wrapped"), origin=ORIGIN)
            assert tx.enqueued
    assert [row["group"] for row in await fetch(database, ROWS)] == ["pooled", "wrapped"]


async def test_a_transaction_object_has_asyncpgs_query_methods(database: str):
    async with connected(database) as connection, connection.transaction():
        tx = Transaction(connection)
        assert await tx.execute("CREATE TEMP TABLE t (a int, b int)") == "CREATE TABLE"
        await tx.executemany("INSERT INTO t VALUES ($1, $2)", [(1, 2), (3, 4)])
        assert [tuple(row) for row in await tx.fetch("SELECT a, b FROM t WHERE a > $1 ORDER BY a", 0)] == [
            (1, 2),
            (3, 4),
        ]
        assert tuple(await tx.fetchrow("SELECT a, b FROM t WHERE a = $1", 3) or ()) == (3, 4)
        assert await tx.fetchval("SELECT a, b FROM t WHERE a = $1", 3, column=1) == 4
        assert await tx.fetchrow("SELECT a FROM t WHERE a = $1", 99) is None


# -- what is stored -----------------------------------------------------------------------------------------------


async def test_all_that_the_caller_gives_is_stored(database: str):
    ride = declare(name="drive")
    async with connected(database) as connection, connection.transaction():
        job_id = await ride.enqueue(
            connection, Ride(transport="a", number=7), origin="t/3", priority=-5, headers={"correlation_id": "c1"}
        )
    [row] = await fetch(database, ROWS)
    assert row["id"] == job_id
    assert (row["type"], row["origin"], row["group"], row["priority"]) == ("drive", "t/3", "a", -5)
    assert json.loads(row["payload"]) == {"transport": "a", "number": 7}
    assert json.loads(row["headers"]) == {"correlation_id": "c1"}
    assert row["position"] is not None
    assert row["run_at"] is None


async def test_enqueue_many_keeps_the_order_of_the_payloads(database: str):
    ride = declare()
    async with connected(database) as connection, connection.transaction():
        ids = await ride.enqueue_many(
            connection, (Ride(transport=f"t{n % 7}", number=n) for n in range(500)), origin=ORIGIN
        )
    rows = await fetch(database, ROWS.replace("ORDER BY id", "ORDER BY position"))
    assert [json.loads(row["payload"])["number"] for row in rows] == list(range(500))
    assert [row["id"] for row in rows] == ids == sorted(ids)
    assert [row["group"] for row in rows] == [f"t{n % 7}" for n in range(500)]


async def test_enqueue_many_takes_each_payload_as_it_is_when_it_is_yielded(database: str):
    def reused():
        ride = Ride(transport="", number=0)
        for number in range(3):
            ride.transport, ride.number = f"t{number}", number
            yield ride

    async with connected(database) as connection, connection.transaction():
        await declare().enqueue_many(connection, reused(), origin=ORIGIN)
        await declare(payload=dict[str, Any]).enqueue_many(connection, map(vars, reused()), origin=ORIGIN)
    rows = await fetch(database, ROWS)
    assert [json.loads(row["payload"])["number"] for row in rows] == 2 * [0, 1, 2]
    assert [row["group"] for row in rows] == 2 * ["t0", "t1", "t2"]


async def test_enqueue_many_stores_what_enqueue_stores(database: str):
    """To the letter: also what JSON escapes, what is no object, and groups that have to be told apart."""

    async def anything(job: Job[Any]) -> None: ...

    payloads: list[Any] = ["a\0b", "\x1f", ",", "][", {"a": [1.0, None, {"ä\n": "\U0001f682"}]}, [], None, 0, "null"]
    groups = ["a", "NULL", "null", "{}", ",", "ä", '"', "\\", " "]
    grouped = Registry().job(payload=Any, group=lambda payload: groups[payloads.index(payload)])(anything)
    alone = Registry().job(payload=Any)(anything)
    async with connected(database) as connection, connection.transaction():
        for declared in (grouped, alone):
            for payload in payloads:
                await declared.enqueue(connection, payload, origin=ORIGIN)
            await declared.enqueue_many(connection, payloads, origin=ORIGIN)
    rows = [(row["group"], row["payload"]) for row in await fetch(database, ROWS)]
    count = len(payloads)
    assert rows[:count] == rows[count : 2 * count]
    assert [group for group, _ in rows[:count]] == groups
    assert rows[2 * count : 3 * count] == rows[3 * count :] == [(None, text) for _, text in rows[:count]]


async def test_enqueue_many_without_payloads_does_nothing(database: str):
    async with connected(database) as connection, connection.transaction():
        assert await declare().enqueue_many(connection, [], origin=ORIGIN) == []


async def test_the_ids_of_many_jobs_are_in_the_order_of_the_payloads_whatever_their_texts_hold(database: str):
    class Note(BaseModel):
        room: int
        text: str

    note: Any = Registry().job(name="note", group="room", payload=Note)(lambda job: None)
    notes = [Note(room=n % 3, text=text * n) for n, text in enumerate(["\x1f", '","', "{}", "\0", "é\u2028"] * 3)]
    async with connected(database) as connection, connection.transaction():
        ids = await note.enqueue_many(connection, notes, origin=ORIGIN, headers={"tenant": "a"})
    rows = await fetch(database, 'SELECT id, "group", payload, headers FROM sidings.job ORDER BY position')
    assert [row["id"] for row in rows] == ids == sorted(ids)
    assert [(row["group"], note.load(row["payload"])) for row in rows] == [(str(n.room), n) for n in notes]
    assert {json.loads(row["headers"])["tenant"] for row in rows} == {"a"}


@pytest.mark.parametrize("where", ["given", "grown", "home"])
async def test_many_jobs_may_have_headers_of_their_own(database: str, where: str):
    """What is current is added to those of each: of a batch's messages, each job hands on its own correlation id."""
    registry = Registry()
    registry.has_grown = lambda _: where == "grown"
    home = "positions" if where == "home" else None
    ride: Any = registry.job(name="ride", group="transport", payload=Ride, home=home)(lambda job: None)
    own = [{"correlation_id": "c-1", "odd": "\x1f', \u2028"}, None, {}, {"tenant": "a"}]
    options: dict[str, Any] = {} if home else {"origin": ORIGIN}
    async with connected(database) as connection, connection.transaction():
        await connection.execute("INSERT INTO sidings.topic (topic, partitions) VALUES ('positions', 3)")
        ids = list[int]()
        for count, headers in ((4, own), (4, [None] * 4), (1, [None]), (1, ({"a": "b"},)), (0, [])):
            rides = [Ride(transport=str(n)) for n in range(count)]
            ids += await ride.enqueue_many(connection, rides, headers=headers, **options)
        with correlated("c-0"):
            rides = [Ride(transport=str(n)) for n in range(4)]
            ids += await ride.enqueue_many(connection, rides, headers=own, **options)
    rows = {row["id"]: row for row in await fetch(database, ROWS)}
    stored = [json.loads(rows[id]["headers"] or "null") for id in ids]
    assert stored[:10] == [own[0], None, None, own[3], *[None] * 5, {"a": "b"}]
    current = {"correlation_id": "c-0"}
    assert stored[10:] == [own[0], current, current, {**current, "tenant": "a"}]
    assert [rows[id]["group"] for id in ids] == [*"0123", *"0123", "0", "0", *"0123"]


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ([{"a": "b"}], r"headers= has 1 for 2 payloads: give one for each, in their order, or a dict for all"),
        ([None] * 3, r"headers= has 3 for 2 payloads"),
        ([{}, {"a": 5}], r"headers\[1\]: 'a'=5: give texts"),
        ([{}, {"a": "\0"}], r"headers\[1\]: 'a'='\\x00' holds NUL"),
        ([{}, "ab"], r"headers\[1\]='ab': give a dict of texts"),
        ("ab", r"headers\[0\]='a': give a dict of texts"),
        (iter([{}, {}]), r"headers=<.*>: give a dict of texts, or of many jobs a list of such"),
    ],
)
async def test_headers_of_many_jobs_that_cannot_be_stored_are_named(database: str, headers: Any, told: str):
    ride = declare()
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(EnqueueError, match=told):
            await ride.enqueue_many(connection, [Ride(transport="a")] * 2, origin=ORIGIN, headers=headers)
        await ride.enqueue(connection, Ride(transport="after"), origin=ORIGIN)
    assert [row["group"] for row in await fetch(database, ROWS)] == ["after"]


async def test_positions_follow_the_order_of_calls_and_carry_the_callers_transaction_id(database: str):
    ride = declare()
    async with connected(database) as connection, connection.transaction():
        first = await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
        [second] = await ride.enqueue_many(connection, [Ride(transport="b")], origin=ORIGIN)
        third = await ride.enqueue(connection, Ride(transport="c"), origin=ORIGIN)
        rows = await connection.fetch(
            "SELECT id, txid = pg_current_xact_id() AS mine FROM sidings.job ORDER BY position"
        )
    assert [(row["id"], row["mine"]) for row in rows] == [(first, True), (second, True), (third, True)]


WAITING = """SELECT a.backend_xid FROM pg_locks l JOIN pg_stat_activity a USING (pid)
             WHERE l.pid = $1 AND NOT l.granted AND l.relation = $2::text::regclass"""


ITS = (0, None, None, None, "{}", 0)  # priority, run_at, delay, headers, payload, policy
STATEMENTS: dict[str, tuple[str, tuple[object, ...]]] = {
    "insert_home_job": ("jobs", ("ride", "t", "a", *ITS)),
    "insert_home_jobs": ("jobs", ("ride", "t", "a", *ITS)),
    "insert_home_jobs_with_headers": ("jobs", ("ride", "t", "a", *ITS)),
    "insert_jobs_with_headers": ("jobs", ("ride", ORIGIN, "a", *ITS, 1)),
    "insert_placed_job": ("jobs", ("ride", ORIGIN, "a", *ITS, b"a")),
    "insert_placed_jobs": ("jobs", ("ride", ORIGIN, "a", *ITS, b"a")),
    "insert_placed_jobs_with_headers": ("jobs", ("ride", ORIGIN, "a", *ITS, b"a")),
    "insert_unique_job": ("jobs", ("ride", ORIGIN, "a", *ITS, "key")),
    "store_messages": ("kafka", ("message:t", [ORIGIN], ["a"], [None], ["{}"], [None], None)),
}
PUBLISHED = {
    "insert_message": ("etas", b"k", b"v", None, None, None),
    "insert_messages": ("etas", [b"k"], [b"v"], None),
    "insert_messages_with_headers": ("etas", [b"k"], [b"v"], [None]),
}
PUBLISH = "INSERT INTO sidings.outbox (slot, topic, key) VALUES (0, 'etas', 'k')"


async def until_nextval_waits(holder: asyncpg.Connection, connection: asyncpg.Connection, sequence: str):
    """Wait until `connection` does for the sequence that `holder` has, and tell its transaction's id."""
    pid = connection.get_server_pid()
    return await eventually(lambda: holder.fetchrow(WAITING, pid, sequence), "nextval() is waiting")


@pytest.mark.parametrize("way", ["enqueue", "enqueue_many", "INSERT", *STATEMENTS])
async def test_a_transaction_id_is_taken_before_the_position(database: str, way: str):
    """So a position above a reader's mark belongs to a transaction that the reader's snapshot could already name."""
    ride = declare()
    async with connected(database) as connection, connection.transaction():
        for _ in range(3):  # the first nextval() of a sequence takes an id by itself, as it writes WAL
            await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
        await connection.execute("INSERT INTO sidings.topic (topic, partitions) VALUES ('t', 1)")
    async with connected(database) as connection, connected(database) as holder, connection.transaction():
        await holder.execute("BEGIN; ALTER SEQUENCE sidings.job_position CACHE 1")  # nextval() waits from here on
        payload = Ride(transport="a")
        ways = {
            "enqueue": lambda: ride.enqueue(connection, payload, origin=ORIGIN),
            "enqueue_many": lambda: ride.enqueue_many(connection, [payload], origin=ORIGIN),
            "INSERT": lambda: connection.execute(
                "INSERT INTO sidings.job (type, origin, payload) VALUES ('ride', $1, '{}')", ORIGIN
            ),
        }
        if way in STATEMENTS:
            package, arguments = STATEMENTS[way]
            work = asyncio.ensure_future(connection.fetch(load_sql(f"sidings.{package}", way), *arguments))
        else:
            work = asyncio.ensure_future(ways[way]())
        row = await until_nextval_waits(holder, connection, "sidings.job_position")
        await holder.execute("ROLLBACK")
        await work
    assert row["backend_xid"] is not None


@pytest.mark.parametrize("way", ["INSERT", *PUBLISHED])
async def test_a_transaction_id_is_taken_before_the_number_of_a_message(database: str, way: str):
    """Else a relay passes the number of one that its snapshot could not name, and never looks there again."""
    async with connected(database) as connection, connected(database) as holder:
        await connection.execute("; ".join([PUBLISH] * 3))
        await holder.execute("BEGIN; ALTER SEQUENCE sidings.outbox_id CACHE 1")  # nextval() waits from here on
        query = PUBLISH if way == "INSERT" else load_sql("sidings.kafka.outbox", way)
        work = asyncio.ensure_future(connection.fetch(query, *PUBLISHED.get(way, ())))
        row = await until_nextval_waits(holder, connection, "sidings.outbox_id")
        await holder.execute("ROLLBACK")
        await work
    assert row["backend_xid"] is not None


@pytest.mark.parametrize("many", [False, True], ids=["enqueue", "enqueue_many"])
async def test_a_delayed_job_has_a_due_time_and_no_position(database: str, many: bool):
    ride = declare()
    at = datetime.now(UTC) + timedelta(days=1)
    whens: list[dict[str, Any]] = [{"run_at": at}, {"delay": 60}, {"delay": timedelta(hours=2)}, {"delay": 0}, {}]
    async with connected(database) as connection, connection.transaction():
        now = await connection.fetchval("SELECT clock_timestamp()")
        for when in whens:
            if many:
                await ride.enqueue_many(connection, [Ride(transport="a")], origin=ORIGIN, **when)
            else:
                await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN, **when)
        after = await connection.fetchval("SELECT clock_timestamp()")
        rows = await connection.fetch(ROWS)
    assert [row["position"] is None for row in rows] == [True, True, True, False, False]
    assert rows[0]["run_at"] == at
    assert now + timedelta(minutes=1) <= rows[1]["run_at"] <= after + timedelta(minutes=1)
    assert now + timedelta(hours=2) <= rows[2]["run_at"] <= after + timedelta(hours=2)
    assert [row["run_at"] for row in rows[3:]] == [None, None]


# -- groups and payloads ------------------------------------------------------------------------------------------


class Stop(BaseModel):
    transport: int
    place: str = ""


async def stored_groups(database: str, *payloads: Any, model: Any = Stop, group: Any = "transport", many: bool = False):
    registry = Registry()

    async def stop(job: Job[Any]) -> None: ...

    declared = registry.job(group=group, payload=model)(stop)
    async with connected(database) as connection, connection.transaction():
        if many:
            await declared.enqueue_many(connection, payloads, origin=ORIGIN)
        else:
            for payload in payloads:
                await declared.enqueue(connection, payload, origin=ORIGIN)
    return [row["group"] for row in await fetch(database, ROWS)]


@pytest.mark.parametrize("many", [False, True], ids=["enqueue", "enqueue_many"])
async def test_a_dict_and_a_model_of_the_same_content_meet_in_one_group(database: str, many: bool):
    payloads = [Stop(transport=7), {"transport": 7}, {"transport": "7"}, {"transport": "007"}]
    assert await stored_groups(database, *payloads, many=many) == ["7"] * 4
    rows = await fetch(database, ROWS)
    assert [json.loads(row["payload"]) for row in rows] == [{"transport": 7, "place": ""}] * 4


@pytest.mark.parametrize("many", [False, True], ids=["enqueue", "enqueue_many"])
async def test_a_group_may_be_a_function_of_the_payload(database: str, many: bool):
    def by_place(stop: Stop) -> str:
        return f"{stop.place}-{stop.transport % 2}"

    payloads = [Stop(transport=3, place="Riga"), {"transport": 4, "place": "Riga"}]
    assert await stored_groups(database, *payloads, group=by_place, many=many) == ["Riga-1", "Riga-0"]


class Carrier(str, Enum):  # noqa: UP042 - StrEnum is another class, and gives another text
    DHL = "dhl"


class Plain(Enum):
    DHL = "dhl"


class Depot(int, Enum):
    RIGA = 7


class Odd(Enum):
    BYTES = b"t-1"
    ID = UUID(int=1)


class Renamed(str, Enum):  # noqa: UP042
    DHL = "DHL", "dhl"

    def __new__(cls, text: str, value: str):
        made = str.__new__(cls, text)
        made._value_ = value
        return made


class Loud(str):
    def __str__(self) -> str:
        return self.upper()


GROUPS = [
    *((Carrier.DHL, "dhl"), (Plain.DHL, "dhl"), (Depot.RIGA, "7"), (Renamed.DHL, "dhl"), (Loud("dhl"), "dhl")),
    *((Odd.BYTES, "t-1"), (Odd.ID, str(UUID(int=1)))),
    *((b"t-1", "t-1"), (bytearray(b"t-1"), "t-1"), (StrEnum("S", {"DHL": "dhl"})["DHL"], "dhl"), (1.5, "1.5")),
]


@pytest.mark.parametrize("many", [False, True], ids=["enqueue", "enqueue_many"])
@pytest.mark.parametrize(("key", "group"), GROUPS, ids=repr)
async def test_bytes_and_members_of_enums_are_groups_by_what_is_stored(database: str, key: Any, group: str, many: bool):
    """They were by their text in Python, as `b't-1'` or `Carrier.DHL`: another group than that of the same text."""
    payloads = [{"transport": key}, {"transport": group}]
    assert await stored_groups(database, *payloads, model=dict[str, Any], many=many) == [group] * 2
    rows = await fetch(database, ROWS)
    assert {str(json.loads(row["payload"])["transport"]) for row in rows} == {group}


@pytest.mark.parametrize("key", [key for key, _ in GROUPS if isinstance(key, str)], ids=repr)
async def test_a_group_that_is_given_is_the_one_that_the_payload_yields(database: str, key: str):
    ride = declare()
    async with connected(database) as connection, connection.transaction():
        await ride.enqueue(connection, Ride(), origin=ORIGIN, group=key)
    assert [row["group"] for row in await fetch(database, ROWS)] == ["dhl"]


async def test_bytes_without_a_byte_are_no_group(database: str):
    with pytest.raises(MissingGroup, match="gave ''"):
        await stored_groups(database, {"transport": b""}, model=dict[str, Any])


@pytest.mark.parametrize("many", [False, True], ids=["enqueue", "enqueue_many"])
async def test_bytes_that_are_no_text_are_no_group(database: str, many: bool):
    class Scan(BaseModel):
        model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

        code: bytes

    with pytest.raises(MissingGroup, match=r"'code' gave bytes that are no UTF-8 .* \.hex\(\)"):
        await stored_groups(database, Scan(code=b"\xff"), model=Scan, group="code", many=many)


async def test_a_plain_dict_type_is_grouped_by_key(database: str):
    payloads = [{"transport": "a"}, {"transport": 5}]
    assert await stored_groups(database, *payloads, model=dict[str, Any]) == ["a", "5"]


async def test_a_type_without_group_may_be_given_one(database: str):
    ride = declare(group=None)
    async with connected(database) as connection, connection.transaction():
        await ride.enqueue(connection, Ride(), origin=ORIGIN)
        await ride.enqueue(connection, Ride(), origin=ORIGIN, group="mine")
    assert [row["group"] for row in await fetch(database, ROWS)] == [None, "mine"]


class Aliased(BaseModel):
    """Names in JSON that are not those of the fields, a field that is computed, nothing else allowed."""

    model_config = ConfigDict(extra="forbid")
    transport_id: str = Field(alias="transportId")

    @computed_field
    @property
    def length(self) -> int:
        return len(self.transport_id)


async def test_a_payload_with_aliases_and_computed_fields_comes_back_as_it_was(database: str):
    registry = Registry()
    seen: list[Aliased] = []

    @registry.job(group="transport_id")
    async def ride(job: Job[Aliased]) -> None:
        seen.append(job.payload)

    sent = Aliased(transportId="a")
    async with connected(database) as connection, connection.transaction():
        await ride.enqueue(connection, sent, origin=ORIGIN)
    async with running(database, registry):
        await eventually(lambda: seen, "the handler has got its payload")
    assert seen == [sent]


@settings(max_examples=300, deadline=None)
@given(
    st.builds(Ride, transport=st.text(st.characters(codec="utf-8"), min_size=1), number=st.integers(-(2**63), 2**63))
)
def test_whatever_a_model_holds_survives_the_way_through_json(ride: Ride):
    declared = declare()
    assert declared.load(declared.dump(ride)) == ride


class Card(BaseModel):
    number: SecretStr
    more: list[dict[str, SecretBytes]] = []
    shown: SecretStr | None = None
    text: str = "**********"

    @field_serializer("shown", when_used="unless-none")
    def reveal(self, shown: SecretStr) -> str:
        return shown.get_secret_value()


@pytest.mark.parametrize(
    ("card", "refused"),
    [
        (Card(number=SecretStr("4711")), True),
        (Card(number=SecretStr(""), more=[{"a": SecretBytes(b"4711")}]), True),
        (Card(number=SecretStr(""), shown=SecretStr("4711")), False),
    ],
)
async def test_a_secret_of_which_json_gets_asterisks_is_refused(database: str, card: Card, refused: bool):
    """The handler got the asterisks, and nobody was told."""
    registry = Registry()

    @registry.job()
    async def pay(job: Job[Card]) -> None: ...

    async with connected(database) as connection, connection.transaction():
        if refused:
            with pytest.raises(InvalidPayload, match=r"holds a secret .* of which JSON gets asterisks: give the field"):
                await pay.enqueue(connection, card, origin=ORIGIN)
        else:
            await pay.enqueue(connection, card, origin=ORIGIN)
            assert await enqueued(connection, pay) == [card]


@pytest.mark.parametrize(
    ("group", "refused"),
    [
        ("shown", True),
        (lambda card: (card.text, card.shown), True),
        (lambda card: sha256(card.shown.get_secret_value().encode()).hexdigest(), False),
    ],
    ids=["its field", "a pair with it", "its hash"],
)
async def test_a_secret_of_which_a_group_gets_asterisks_is_refused(database: str, group: Any, refused: bool):
    """The jobs of all customers were one group, and waited for each other."""
    registry = Registry()

    @registry.job(group=group)
    async def pay(job: Job[Card]) -> None: ...

    cards = [Card(number=SecretStr(""), shown=SecretStr(number)) for number in ("4711", "4712")]
    async with connected(database) as connection, connection.transaction():
        for card in cards:
            if refused:
                with pytest.raises(MissingGroup, match="a secret, of which a group gets asterisks: let group= be"):
                    await pay.enqueue(connection, card, origin=ORIGIN)
            else:
                await pay.enqueue(connection, card, origin=ORIGIN)
        if refused:
            with pytest.raises(MissingGroup, match="gave a secret"):
                await pay.enqueue_many(connection, cards, origin=ORIGIN)
        else:
            assert len({row["group"] for row in await connection.fetch(ROWS)}) == 2


async def test_text_with_nul_in_a_payload_is_stored_and_comes_back(database: str):
    registry = Registry()
    seen: list[str] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        seen.append(job.payload.transport)

    async with connected(database) as connection, connection.transaction():
        await ride.enqueue(connection, Ride(transport="a\0b"), origin=ORIGIN)
    async with running(database, registry):
        await drained(database)
    assert seen == ["a\0b"]


# -- errors -------------------------------------------------------------------------------------------------------

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
REFUSED: dict[str, tuple[type[EnqueueError], str, dict[str, Any]]] = {
    "no origin": (MissingOrigin, r"give origin=service.origin_for\(key, topic\), or .* home=topic", {"origin": None}),
    "an empty origin": (MissingOrigin, "needs an origin", {"origin": ""}),
    "a slot of the outbox": (EnqueueError, "'outbox/3': relays lease outbox/0 to outbox/15", {"origin": "outbox/3"}),
    "no group": (MissingGroup, "runs serially by group, but 'transport' gave ''", {"payload": Ride(transport="")}),
    "group None": (MissingGroup, "gave None", {"group": None}),
    "a wrong payload": (InvalidPayload, "does not fit", {"payload": {"number": "many"}}),
    "a payload of another model": (InvalidPayload, "does not fit", {"payload": Stop(transport=1)}),
    "a lone surrogate": (InvalidPayload, "does not fit", {"payload": Ride(transport="\ud800"), "group": "a"}),
    "a time that is a text": (EnqueueError, "is no time: give an aware", {"run_at": "2030-01-01T12:00:00Z"}),
    "a day": (EnqueueError, "is no time: give an aware", {"run_at": NOON.date()}),
    "a naive time": (EnqueueError, "has no time zone", {"run_at": NOON.replace(tzinfo=None)}),
    "a time at the end of all": (EnqueueError, "no time", {"run_at": datetime.max.replace(tzinfo=UTC)}),
    "a time before all": (EnqueueError, "no time", {"run_at": datetime.min.replace(tzinfo=UTC)}),
    "a time beyond UTC": (
        EnqueueError,
        "no time",
        {"run_at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=2)))},
    ),
    "delay and time": (EnqueueError, "exclude each other", {"run_at": NOON, "delay": 1}),
    "a negative delay": (EnqueueError, "give seconds between 0 and", {"delay": -1}),
    "an endless delay": (EnqueueError, "give seconds between 0 and", {"delay": float("inf")}),
    "a delay that is no number": (EnqueueError, "give seconds between 0 and", {"delay": float("nan")}),
    "NUL in the group": (EnqueueError, "control character", {"group": "a\0b"}),
    "the separator in the group": (EnqueueError, "control character", {"group": "a\x1fb"}),
    "a lone surrogate in the group": (EnqueueError, "group=", {"group": "\ud800"}),
    "a group that is too long": (EnqueueError, "longer than 1000 bytes", {"group": "x" * 1001}),
    "a group of too many bytes": (EnqueueError, "longer than 1000 bytes", {"group": "ä" * 501}),
    "NUL in the origin": (EnqueueError, "control character", {"origin": "t/\0"}),
    "an origin that is too long": (EnqueueError, "longer than 1000 bytes", {"origin": "x" * 1001}),
    "a priority out of range": (EnqueueError, "from -100 to 100", {"priority": 101}),
    "NUL in a header": (EnqueueError, "headers", {"headers": {"correlation_id": "a\0b"}}),
    "a lone surrogate in a header": (EnqueueError, "headers", {"headers": {"a": "\ud800"}}),
    "a header name with NUL": (EnqueueError, "headers", {"headers": {"\0": "a"}}),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_stored_is_refused_before_anything_is_written(database: str, case: str):
    error, text, given_options = REFUSED[case]
    ride = declare()
    options: dict[str, Any] = {"payload": Ride(transport="a"), "origin": ORIGIN, **given_options}
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(EnqueueError, match=text) as caught:
            await ride.enqueue(connection, **options)
        assert type(caught.value) is error
        if "group" not in options:
            options["payloads"] = [Ride(transport="fine"), options.pop("payload")]
            with pytest.raises(EnqueueError, match=text) as caught:
                await ride.enqueue_many(connection, **options)
            assert type(caught.value) is error
        await ride.enqueue(connection, Ride(transport="after"), origin=ORIGIN)  # the transaction is still usable
    assert [row["group"] for row in await fetch(database, ROWS)] == ["after"]


@pytest.mark.parametrize(
    "group",
    [
        lambda ride: a_group(ride),
        lambda ride: frozenset((ride.transport, "b", "c")),
        lambda ride: object(),
        lambda ride: ride.transport.lower,
        "model_dump_json",  # whose text has all of the payload's fields
    ],
    ids=["of an async function", "a set", "an object", "a method", "a method of the model"],
)
@pytest.mark.filterwarnings("ignore:coroutine")
async def test_a_group_that_reads_otherwise_each_time_is_refused(database: str, group: Any):
    """Each job was a group of its own, so that they ran in any order, and at once."""
    registry = Registry()

    @registry.job(group=group)
    async def ride(job: Job[Ride]) -> None: ...

    async with connected(database) as connection, connection.transaction():
        with pytest.raises(MissingGroup, match="reads otherwise each time"):
            await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
        with pytest.raises(MissingGroup, match="reads otherwise each time"):
            await ride.enqueue_many(connection, [Ride(transport="a")], origin=ORIGIN)


async def a_group(ride: Ride) -> str:
    return ride.transport


async def test_the_longest_names_that_are_accepted_can_be_stored(database: str):
    ride = declare()
    async with connected(database) as connection, connection.transaction():
        longest = "".join(chr(0x4E00 + n) for n in range(333))  # 999 bytes that do not compress
        origin = f"{token_hex(125)[1:]}/{2**31 - 1}"
        await ride.enqueue(connection, Ride(transport="a"), origin=origin, group=longest[::-1])
        by_sql = "SELECT sidings.enqueue('ride', '{}', origin => $1, \"group\" => $2)"  # to which any text is an origin
        await connection.execute(by_sql, longest, longest[::-1])
    assert await value(database, "SELECT count(*) FROM sidings.job") == 2


async def test_a_type_that_nobody_has_declared_is_refused_by_name(database: str):
    registry = Registry()
    declare(registry)
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(UnknownJobType, match=r"no job type 'rid' is registered \(known: ride\)"):
            await registry.enqueue(connection, "rid", Ride(transport="a"), origin=ORIGIN)
        await registry.enqueue(connection, "ride", {"transport": "a"}, origin=ORIGIN, priority=3)
    assert [(row["type"], row["priority"]) for row in await fetch(database, ROWS)] == [("ride", 3)]


# -- declaring ----------------------------------------------------------------------------------------------------


def test_a_misspelt_group_is_found_at_declaration():
    with pytest.raises(ConfigurationError, match=r"group='transprot' is no field of its payload \(transport, number\)"):
        declare(group="transprot")


def test_two_types_of_one_name_are_refused():
    registry = Registry()
    declare(registry)
    with pytest.raises(ConfigurationError, match="two job types are called 'ride'"):
        declare(registry)
    declare(registry, name="another")
    assert [job_type.name for job_type in registry] == ["ride", "another"]
    assert len(registry) == 2


def test_a_handler_without_a_payload_annotation_is_refused():
    async def bare(job) -> None: ...

    async def nothing() -> None: ...

    for handler in (bare, nothing):
        with pytest.raises(ConfigurationError, match=r"annotate the handler's first parameter as Job\[YourModel\]"):
            Registry().job()(handler)


def test_a_timeout_that_is_not_positive_is_refused():
    for timeout in (0, -1, timedelta(0)):
        with pytest.raises(ConfigurationError, match="timeout="):
            declare(timeout=timeout)


def test_an_included_registry_enqueues_into_the_schema_of_the_service():
    service, module = Registry(schema="freight_jobs"), Registry()
    ride = declare(module)
    service.include(module)
    assert service["ride"] is ride
    assert module.schema == "freight_jobs"
    with pytest.raises(ConfigurationError):
        service.include(_registry_with("ride"))


def _registry_with(name: str) -> Registry:
    registry = Registry()
    declare(registry, name=name)
    return registry


async def test_calling_a_type_calls_its_handler():
    called: list[Ride] = []
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> str:
        called.append(job.payload)
        return "done"

    assert await ride(Job(Ride(number=3))) == "done"  # type: ignore[misc]
    assert called == [Ride(number=3)]


# -- inside a handler ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_job_enqueued_by_a_handler_inherits_its_origin(database: str, kind: str):
    registry = Registry()
    follow_up = declare(registry, name="follow_up", group=None)
    seen: list[str | None] = []

    async def store(**options: Any) -> None:
        async with connected(database) as connection, connection.transaction():
            await follow_up.enqueue(connection, Ride(), delay=3600, **options)

    if kind == "async":

        @registry.job()
        async def cause(job: Job[Ride]) -> None:
            seen.append(work_origin())
            await store()
            await store(origin="elsewhere/1")
    else:

        @registry.job(name="cause")
        def cause(job: Job[Ride]) -> None:
            seen.append(work_origin())
            asyncio.run(store())
            asyncio.run(store(origin="elsewhere/1"))

    async with connected(database) as connection, connection.transaction():
        for origin in ("t/0", "t/1"):
            await cause.enqueue(connection, Ride(), origin=origin)
    assert work_origin() is None
    async with running(database, registry, ["t/0", "t/1"]):

        async def followed() -> bool:
            return await value(database, "SELECT count(*) = 4 FROM sidings.job WHERE type = 'follow_up'")

        await eventually(followed, "both handlers have enqueued")
    assert sorted(filter(None, seen)) == ["t/0", "t/1"]
    rows = await fetch(database, "SELECT origin FROM sidings.job WHERE type = 'follow_up' ORDER BY origin")
    assert [row["origin"] for row in rows] == ["elsewhere/1", "elsewhere/1", "t/0", "t/1"]


async def test_a_task_of_a_handler_has_its_origin_unless_it_has_a_context_of_its_own(database: str):
    """Also when the handler has ended: one that a handler had started for a buffer sent all to that one's origin."""
    registry, ended, tasks = Registry(), asyncio.Event(), list[asyncio.Task[str | None]]()
    follow_up = declare(registry, name="follow_up", group=None)

    async def flush() -> str | None:
        await ended.wait()
        async with connected(database) as connection, connection.transaction():
            await follow_up.enqueue(connection, Ride(), delay=3600)
        return work_origin()

    @registry.job()
    async def cause(job: Job[Ride]) -> None:
        tasks.extend([asyncio.create_task(flush()), asyncio.create_task(flush(), context=Context())])

    await enqueue(database, cause, [Ride()], origin="t/0")
    async with running(database, registry, ["t/0"]):
        await drained(database)
    ended.set()
    its, alone = await asyncio.gather(*tasks, return_exceptions=True)
    assert its == "t/0"
    assert isinstance(alone, MissingOrigin)


async def test_a_handler_of_many_jobs_may_use_its_list_up(database: str):
    """What it enqueues last belongs to their origin all the same; it failed, since there was no first job any more."""
    registry = Registry()
    follow_up = declare(registry, name="follow_up", group=None)

    @registry.job(batch=10, retry=Retry(stop=stop_after_attempt(1)))
    async def cause(jobs: list[Job[Ride]]) -> None:
        while jobs:
            jobs.pop()
        async with connected(database) as connection, connection.transaction():
            await follow_up.enqueue(connection, Ride(), delay=3600)

    async with connected(database) as connection, connection.transaction():
        await cause.enqueue_many(connection, [Ride()] * 4, origin="t/0")
    async with running(database, registry, ["t/0"]):

        async def ended() -> bool:
            return await value(database, "SELECT count(*) = 4 FROM sidings.job_history")

        await eventually(ended)
    assert await outcomes(database) == ["succeeded"] * 4
    rows = await fetch(database, "SELECT DISTINCT origin FROM sidings.job WHERE type = 'follow_up'")
    assert [row["origin"] for row in rows] == ["t/0"]


async def test_headers_that_no_cycle_could_record_cannot_get_in_by_sql_either(database: str):
    async with connected(database) as connection:
        for bad in (r'{"correlation_id": "\u0000"}', r'{"correlation_id": "\ud800"}'):
            with pytest.raises(asyncpg.DataError):
                await connection.execute("INSERT INTO sidings.job (type, origin, headers) VALUES ('x', 't/0', $1)", bad)

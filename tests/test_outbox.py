"""Publishing: in the caller's transaction, checked before anything is written, and known to be acknowledged or not."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from unittest.mock import AsyncMock, Mock
from uuid import UUID, uuid4

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, field_serializer
from sidings.errors import ConfigurationError, NotInTransaction, PostgresUnavailable
from sidings.executor import Link, PostgresSettings
from sidings.jobs import Transaction
from sidings.jobs.admin import Admin
from sidings.jobs.context import correlated
from sidings.kafka.outbox import InvalidMessage, MessageParked, Outbox, OutboxSettings, Relay, RolledBack
from sidings.kafka.outbox import recorder as recorder_module
from sidings.kafka.outbox.backlog import Backlog, Slot
from sidings.kafka.outbox.metrics import OutboxMetrics
from sidings.kafka.outbox.recorder import Recorder
from sidings.kafka.settings import KafkaSettings
from sidings.schema import load_sql, migrate

from .outbox_support import a_relay, publishing, records, relaying
from .plan_support import nodes
from .support import SECONDS, connected, eventually, fetch, value


class Eta(BaseModel):
    transport: str
    minutes: int = 5


class Unserialisable(BaseModel):
    number: int

    @field_serializer("number")
    def refuse(self, number: int) -> int:
        raise ZeroDivisionError


async def test_a_message_is_stored_if_and_only_if_the_callers_transaction_commits(database: str) -> None:
    async with publishing(database) as (outbox, connection):
        transaction = connection.transaction()
        await transaction.start()
        await outbox.publish(connection, "etas", key="a", value=b"no")
        await transaction.rollback()
        assert await value(database, "SELECT count(*) FROM sidings.outbox") == 0
        async with connection.transaction():
            await outbox.publish(Transaction(connection), "etas", key="a", value=b"yes")
            assert await value(database, "SELECT count(*) FROM sidings.outbox") == 0, "visible before the commit"
        assert [row["value"] for row in await fetch(database, "SELECT value FROM sidings.outbox")] == [b"yes"]


async def test_models_become_json_bytes_stay_and_none_is_a_tombstone(database: str) -> None:
    stamp = datetime.now(UTC) - timedelta(hours=1)
    async with publishing(database) as (outbox, connection), connection.transaction():
        await outbox.publish(connection, "etas", key="é", value=Eta(transport="t"), headers={"h": "v", "n": None})
        await outbox.publish(connection, "etas", key=b"\xff", value=b"\x00\xff", headers=[("b", b"\xff"), ("b", b"x")])
        await outbox.publish(connection, "etas", key="a", value=None, partition_key="p", timestamp=stamp)
    rows = await fetch(database, "SELECT * FROM sidings.outbox ORDER BY id")
    assert [(row["key"], row["value"], row["partition_key"]) for row in rows] == [
        ("é".encode(), b'{"transport":"t","minutes":5}', None),
        (b"\xff", b"\x00\xff", None),
        (b"a", None, b"p"),
    ]
    assert rows[0]["headers"] == '[["h", "v"], ["n", null]]'
    assert rows[1]["headers"] == '[["b", {"base64": "/w=="}], ["b", "x"]]'
    assert rows[2]["stamped_at"] == stamp


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"topic": "no spaces"}, "topic="),
        ({"topic": ""}, "topic="),
        ({"topic": None}, "topic=None: give 1 to 249 letters"),
        ({"value": Unserialisable(number=1)}, "Unserialisable"),
        ({"value": {"a": 1}}, "pydantic model, bytes, or None"),
        ({"value": None, "key": None}, "needs a key"),
        ({"value": b"x" * 2_000_000}, "max_message_bytes"),
        ({"partition_key": b"x" * 2_000_000}, "partition_key has more bytes than max_message_bytes"),
        ({"key": 5}, "key=5"),
        ({"key": "\ud800"}, "key cannot be encoded"),
        ({"headers": {"n": 5}}, "header 'n'"),
        ({"timestamp": datetime(2026, 1, 1)}, "no time zone"),  # noqa: DTZ001
        ({"timestamp": 1_800_000_000}, "no time zone: give an aware datetime"),
    ],
)
async def test_what_cannot_be_sent_is_refused_before_anything_is_written(database: str, fields, words: str) -> None:
    async with publishing(database) as (outbox, connection):
        call: dict[str, Any] = {"topic": "etas", "key": "a", "value": b"", **fields}
        async with connection.transaction():
            with pytest.raises(InvalidMessage, match=words):
                await outbox.publish(connection, **call)
            await connection.execute("CREATE TABLE public.still_usable ()")
        assert await value(database, "SELECT count(*) FROM sidings.outbox") == 0


async def test_one_bad_message_of_many_stores_none_of_them(database: str) -> None:
    async with publishing(database) as (outbox, connection), connection.transaction():
        with pytest.raises(InvalidMessage):
            await outbox.publish_many(connection, "etas", [("a", b"1"), ("b", Unserialisable(number=1))])
        assert await connection.fetchval("SELECT count(*) FROM sidings.outbox") == 0
        receipt = await outbox.publish_many(connection, "etas", [(str(n), b"1") for n in range(50)])
        assert list(receipt.ids) == sorted(receipt.ids)
        assert len(receipt.ids) == 50


async def test_of_many_messages_each_may_have_headers_of_its_own_beside_those_of_all(database: str) -> None:
    def several() -> Iterator[tuple[str, bytes]]:
        yield from [("of", b"\xff"), ("of", b"x")]

    own = [("a", b"1", {"type": "A"}), ("b", b"2", several()), ("c", None, None), ("d", b"4"), ("e", b"5", {})]
    async with publishing(database) as (outbox, connection), connection.transaction():
        await outbox.publish_many(connection, "etas", own, headers=(pair for pair in [("of", "all"), ("type", "T")]))
        with correlated("c-1"):
            await outbox.publish_many(connection, "etas", [("f", b"6", {"correlation_id": "own"}), ("g", b"7")])
            await outbox.publish_many(connection, "etas", [("h", b"8"), ("i", b"9")], headers={"type": "T"})
    rows = await fetch(database, "SELECT key, headers FROM sidings.outbox ORDER BY id")
    shared = [["of", "all"], ["type", "T"]]
    assert {row["key"].decode(): json.loads(row["headers"]) for row in rows} == {
        "a": [["of", "all"], ["type", "A"]],
        "b": [["type", "T"], ["of", {"base64": "/w=="}], ["of", "x"]],
        **dict.fromkeys("cde", shared),
        "f": [["correlation_id", "own"]],
        "g": [["correlation_id", "c-1"]],
        "h": [["type", "T"], ["correlation_id", "c-1"]],
        "i": [["type", "T"], ["correlation_id", "c-1"]],
    }


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (("b", b"2", {"h": 5}), r"^messages\[1\]: header 'h'=5: give str, bytes or None$"),
        (("b", b"2", 5), r"^messages\[1\]: headers=5: give a dict, or pairs of name and value$"),
        (("b", b"2", {"h": "\ud800"}), r"^messages\[1\]: the headers cannot be stored"),
        (("b", b"2", {"h": "x" * 1_000_000}), r"^messages\[1\]: etas: the message has about 1000\d* bytes, more than"),
        (("b", "text"), r"^messages\[1\]: value is a str: give"),
        (("b", b"2", None, None), r"^etas: messages\[1\] is no pair of key and value, nor these and headers: too many"),
        ("b2c", r"^etas: messages\[1\] is no pair of key and value, nor these and headers: too many"),
    ],
)
async def test_of_many_messages_the_wrong_one_is_named(database: str, message: Any, told: str) -> None:
    async with publishing(database) as (outbox, connection), connection.transaction():
        with pytest.raises(InvalidMessage, match=told):
            await outbox.publish_many(connection, "etas", [("a", b"1"), message, ("c", b"3")])
        with pytest.raises(InvalidMessage, match=r"^header 'h'=5: give str, bytes or None$"):
            await outbox.publish_many(connection, "etas", [], headers={"h": cast(Any, 5)})
        await connection.execute("CREATE TABLE public.still_usable ()")
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 0


async def test_a_connection_in_autocommit_is_refused(database: str) -> None:
    async with publishing(database) as (outbox, connection):
        with pytest.raises(NotInTransaction):
            await outbox.publish(connection, "etas", key="a", value=b"")
        with pytest.raises(NotInTransaction):
            await outbox.publish(None, "etas", key="a", value=b"")


async def test_sql_publishes_into_the_same_slot_as_python(database: str) -> None:
    async with publishing(database) as (outbox, connection):
        async with connection.transaction():
            receipt = await outbox.publish_many(connection, "etas", [(f"key-{n}", b"{}") for n in range(40)])
            for n in range(40):
                await connection.execute("SELECT sidings.publish('etas', $1, '{}')", f"key-{n}")
                await connection.execute("SELECT sidings.publish_bytes('etas', $1, '\\x00')", f"key-{n}".encode())
        by_key = await fetch(
            database,
            "SELECT count(DISTINCT slot) AS slots, count(*) AS n, min(slot) AS slot FROM sidings.outbox GROUP BY key",
        )
        assert [(row["slots"], row["n"]) for row in by_key] == [(1, 3)] * 40
        assert len(set(receipt.slots)) > 8, "the keys are spread"
        async with connection.transaction():
            for n in range(10):
                await outbox.publish(connection, "etas", key=f"key-{n}", value=b"", partition_key="p")
                await connection.execute("SELECT sidings.publish_bytes('etas', $1, '', NULL, 'p')", f"key-{n}".encode())
        those = "SELECT DISTINCT slot, sidings.outbox_slot('etas', 'p') FROM sidings.outbox WHERE partition_key = 'p'"
        [(slot, its)] = await fetch(database, those)
    assert slot == its


@pytest.mark.parametrize("name", ["", "..", "two words", "x" * 250, '{"id": "' + "x" * 100_000])
async def test_sql_publishes_to_no_topic_that_kafka_cannot_have(database: str, name: str) -> None:
    """It would have waited in the outbox until a relay parked it: whoever gave a wrong argument learnt nothing."""
    async with connected(database) as connection:
        for call in ("sidings.publish($1, 'k', '1')", "sidings.publish_bytes($1, 'k', '1')"):
            with pytest.raises(asyncpg.InvalidParameterValueError, match=r"^topic: .{2,102} is no name of") as caught:
                await connection.execute(f"SELECT {call}", name)
            assert "Give 1 to 249 letters, digits" in str(caught.value.hint)
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 0


async def test_the_key_of_a_message_may_have_a_collation_that_knows_no_patterns(database: str) -> None:
    """As a column has where case does not count; it holds for all arguments of the call."""
    async with connected(database) as connection:
        try:
            await connection.execute(
                "CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
            )
        except asyncpg.FeatureNotSupportedError:
            pytest.skip("this Postgres was built without ICU")
        await connection.execute(
            "CREATE TABLE customer (email text COLLATE blind);"
            "INSERT INTO customer VALUES ('A@x'); SELECT sidings.publish('etas', email, '1') FROM customer"
        )
        assert await connection.fetchval("SELECT key FROM sidings.outbox") == b"A@x"


@pytest.mark.parametrize("verb", ["release", "discard"])
async def test_a_parked_message_that_a_person_has_decided_on_passes_for_one_that_has_left(
    database: str, verb: str
) -> None:
    """As docs/outbox.md and the docstring say."""
    async with publishing(database) as (outbox, connection):
        async with connection.transaction():
            receipt = await outbox.publish(connection, "etas", key="a", value=b"")
        await connection.execute(
            """WITH refused AS (DELETE FROM sidings.outbox RETURNING *)
            INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, value, error)
            SELECT id, published_at, slot, topic, key, value, 'too large' FROM refused"""
        )
        with pytest.raises(MessageParked):
            await outbox.published(receipt, timeout=SECONDS)
        await getattr(outbox, verb)("etas", actor="test")
        await outbox.published(receipt, timeout=SECONDS)


async def test_a_trigger_publishes_each_change_of_a_table(database: str, sidings_kafka: str, topic) -> None:
    etas = await topic("etas")
    async with publishing(database) as (_, connection):
        await connection.execute(
            f"""
            CREATE TABLE public.transport (id text PRIMARY KEY, eta int);
            CREATE FUNCTION public.changed() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                PERFORM sidings.publish('{etas}', coalesce(NEW.id, OLD.id),
                                        CASE WHEN NEW.id IS NOT NULL THEN row_to_json(NEW) END,
                                        '{{"from": "trigger"}}');
                RETURN NULL;
            END $$;
            CREATE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE ON public.transport
            FOR EACH ROW EXECUTE FUNCTION public.changed();
            INSERT INTO public.transport VALUES ('t', 1);
            UPDATE public.transport SET eta = 2;
            DELETE FROM public.transport;
            """
        )
        async with relaying(database, sidings_kafka) as relay:
            assert await _sent(relay, etas, 3)
    found = await records(sidings_kafka, etas)
    assert [(r.key, r.value) for r in found] == [
        (b"t", b'{"id":"t","eta":1}'),
        (b"t", b'{"id":"t","eta":2}'),
        (b"t", None),
    ]
    assert dict(found[0].headers)["from"] == b"trigger"


async def test_published_returns_when_kafka_has_acknowledged(database: str, sidings_kafka: str, topic) -> None:
    etas = await topic("etas", partitions=3)
    async with publishing(database) as (outbox, connection):
        async with connection.transaction():
            receipt = await outbox.publish_many(connection, etas, [(str(n), b"x") for n in range(100)])
            with pytest.raises(TimeoutError):  # not committed
                await outbox.published(receipt, timeout=0.2)
        with pytest.raises(TimeoutError):  # no relay
            await outbox.published(receipt, timeout=0.2)
        async with relaying(database, sidings_kafka):
            await outbox.published(receipt, timeout=20)
            assert len(await records(sidings_kafka, etas)) == 100


async def test_a_receipt_of_a_rolled_back_transaction_or_savepoint_says_so(database: str) -> None:
    async with publishing(database) as (outbox, connection):
        transaction = connection.transaction()
        await transaction.start()
        receipt = await outbox.publish(connection, "etas", key="a", value=b"")
        await transaction.rollback()
        with pytest.raises(RolledBack):
            await outbox.published(receipt, timeout=5)
        async with connection.transaction():
            await connection.execute("CREATE TABLE public.something ()")
            savepoint = connection.transaction()
            await savepoint.start()
            receipt = await outbox.publish(connection, "etas", key="a", value=b"")
            of_many = await outbox.publish_many(connection, "etas", [("a", b"")])
            await savepoint.rollback()
        for rolled_back in (receipt, of_many):
            with pytest.raises(RolledBack):
                await outbox.published(rolled_back, timeout=5)


async def test_a_message_that_commits_while_it_is_asked_for_has_not_been_sent_yet(database: str) -> None:
    """Its transaction has committed by then and its row is not seen, as if a relay had sent it."""
    receipts = load_sql("sidings.kafka.outbox", "receipts")
    async with publishing(database) as (outbox, connection), connected(database) as asking:
        publication = connection.transaction()
        await publication.start()
        await outbox.publish(connection, "etas", key="a", value=b"v")
        written = "SELECT id, slot, txid::text::bigint AS txid, xmin::text::bigint AS xmin FROM sidings.outbox"
        arguments = [[number] for number in (await connection.fetch(written))[0]]
        async with asking.transaction(isolation="repeatable_read"):
            await asking.execute("SELECT")  # what follows sees what this one has seen
            await publication.commit()
            row = await asking.fetchrow(receipts, *arguments)
            assert row is not None
            assert (row["waiting"], row["status"]) == (False, "in progress")
        row = await asking.fetchrow(receipts, *arguments)
        assert row is not None
        assert (row["waiting"], row["status"]) == (True, "committed")


async def test_a_refused_message_is_seen_released_and_discarded(database: str, sidings_kafka: str, topic) -> None:
    small = await topic("small", config={"max.message.bytes": "2000"})
    async with publishing(database) as (outbox, connection), relaying(database, sidings_kafka):
        async with connection.transaction():
            receipt = await outbox.publish(connection, small, key="a", value=b"x" * 5_000)
        with pytest.raises(MessageParked, match="MessageSizeTooLarge"):
            await outbox.published(receipt, timeout=20)
        (parked,) = await outbox.parked(small)
        assert (parked.id, parked.key, parked.value) == (receipt.ids[0], b"a", b"x" * 5_000)
        assert await outbox.parked("another") == []
        assert await outbox.release(ids=[parked.id], actor="alice") == [parked.id]  # and it is refused again

        async def refused_again() -> bool:
            return [p.id for p in await outbox.parked(small)] not in ([], [parked.id])

        await eventually(refused_again)
        with pytest.raises(InvalidMessage):
            await outbox.discard(actor="alice")
        [message] = await outbox.parked()
        for decide in (outbox.release, outbox.discard):
            assert await decide("another topic", ids=[message.id], actor="alice") == []
        assert len(await outbox.discard(small, actor="alice")) == 1
        assert await outbox.parked() == []


async def test_parked_messages_go_back_in_the_order_that_they_had(database: str) -> None:
    """Wherever their rows stand: they were parked as the broker's answers came."""
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, value, error)
               SELECT 1 + n * 37 % 100, now(), sidings.outbox_slot('etas', 'a'), 'etas', 'a',
                      convert_to((1 + n * 37 % 100)::text, 'UTF8'), 'too large'
               FROM generate_series(0, 99) n"""
        )
        await connection.execute(
            "SET enable_indexscan = off; SET enable_bitmapscan = off"
        )  # the index has them in order
        release = load_sql("sidings.kafka.outbox", "release_parked")
        assert len(await connection.fetch(release, "etas", [*range(1, 101)], "alice", None)) == 100
        rows = await connection.fetch("SELECT value FROM sidings.outbox ORDER BY id")
        assert [int(row["value"]) for row in rows] == [*range(1, 101)]


async def test_parked_messages_are_listed_in_their_order_page_by_page(database: str) -> None:
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, error)
               SELECT 1 + n * 37 % 100, now(), 3, CASE n % 2 WHEN 0 THEN 'etas' ELSE 'others' END, 'k', 'too large'
               FROM generate_series(0, 99) n;
               SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off"""
        )
        ids, messages = (load_sql("sidings.kafka.outbox", name) for name in ("parked_ids", "parked_messages"))

        async def listed(sql: str, *arguments: object) -> list[int]:
            return [row["id"] for row in await connection.fetch(sql, *arguments)]

        etas = sorted(1 + n * 37 % 100 for n in range(0, 100, 2))
        assert await listed(messages, None, 0, 1_000) == [*range(1, 101)]
        assert await listed(ids, "etas", 0, 1_000, 1_000) == await listed(messages, "etas", 0, 1_000) == etas
        assert await listed(messages, "etas", etas[9], 20) == etas[10:30]
        assert await listed(ids, "etas", etas[9], etas[40], 20) == etas[10:30]
        assert await listed(ids, "etas", etas[29], etas[40], 20) == etas[30:41]


@pytest.mark.parametrize("statement", ["record", "park_topic"])
async def test_a_message_that_was_parked_goes_back_as_it_was(database: str, statement: str) -> None:
    """But for its id. One of another slot that has this id, since a sequence was set back, is not parked with it."""
    relay, its_own = uuid4(), "published_at, stamped_at, slot, topic, key, partition_key, value, headers::text"
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.origin (origin, owner, epoch) VALUES ('outbox/3', $1, 1)", relay)
        await connection.execute(
            """INSERT INTO sidings.outbox
                   (id, slot, topic, key, partition_key, value, headers, stamped_at, published_at)
               SELECT 7, slot, 'etas', 'a', 'p', 'v', '[["h", "v"]]', '2026-01-02', '2026-01-01'
               FROM (VALUES (3), (4)) v (slot)"""
        )
        before = await connection.fetch(f"SELECT {its_own} FROM sidings.outbox ORDER BY slot")
        arguments: tuple[Any, ...] = ([3], ["outbox/3"], [1])
        if statement == "record":
            timeline = await connection.fetchval("SELECT sidings.timeline()")
            arguments += ([1], [0], "{}", [3], [7], ["no"], timeline)
        else:
            arguments += ("etas", "no", 10, [], [0] * len(arguments[0]), 1_000)
        await connection.execute(load_sql("sidings.kafka.outbox", statement), relay, *arguments)
        assert await connection.fetch("SELECT slot, id FROM sidings.outbox") == [(4, 7)]
        release = load_sql("sidings.kafka.outbox", "release_parked")
        assert len(await connection.fetch(release, "etas", [7], "alice", None)) == 1
        assert await connection.fetch(f"SELECT {its_own} FROM sidings.outbox ORDER BY slot") == before
        assert await connection.fetchval("SELECT count(*) FROM sidings.outbox_parked") == 0


@pytest.mark.parametrize("statement", ["record", "park_topic"])
async def test_two_messages_of_one_id_in_two_slots_can_be_parked_at_once(database: str, statement: str) -> None:
    relay, slots = uuid4(), [3, 4]
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.origin (origin, owner, epoch) VALUES ('outbox/3', $1, 1), ('outbox/4', $1, 1)", relay
        )
        await connection.execute(
            "INSERT INTO sidings.outbox (id, slot, topic, value) VALUES (7, 3, 'etas', 'v'), (7, 4, 'etas', 'v')"
        )
        arguments: tuple[Any, ...] = (slots, ["outbox/3", "outbox/4"], [1, 1])
        if statement == "record":
            timeline = await connection.fetchval("SELECT sidings.timeline()")
            arguments += ([1, 1], [0, 0], "{}", slots, [7, 7], ["no", "no"], timeline)
        else:
            arguments += ("etas", "no", 10, [], [0] * len(arguments[0]), 1_000)
        await connection.execute(load_sql("sidings.kafka.outbox", statement), relay, *arguments)
        parked = await connection.fetch("SELECT slot, id = 7 AS same FROM sidings.outbox_parked ORDER BY slot")
        assert [tuple(row) for row in parked] == [(3, True), (4, False)]


@pytest.mark.parametrize("statement", ["record", "park_topic"])
async def test_only_who_holds_a_slot_takes_messages_out_and_keeps_it_until_that_is_done(
    database: str, statement: str
) -> None:
    """Who takes it over sends what is left, and must not read before."""
    relay = uuid4()
    async with connected(database) as connection, connected(database, lock_timeout="200ms") as other:
        await connection.execute("INSERT INTO sidings.origin (origin, owner, epoch) VALUES ('outbox/3', $1, 2)", relay)
        await connection.execute(
            "INSERT INTO sidings.outbox (id, slot, topic, value) VALUES (7, 3, 'etas', 'v'), (8, 3, 'etas', 'v')"
        )
        timeline = await connection.fetchval("SELECT sidings.timeline()")

        async def taken_out(relay: UUID, epoch: int, timeline: str) -> bool:
            arguments: tuple[Any, ...] = ([1], [1], "{7}", [3], [8], ["no"], timeline)
            if statement == "park_topic":
                arguments = ("etas", "no", 10, [], [0], 1_000)
            sql = load_sql("sidings.kafka.outbox", statement)
            await connection.execute(sql, relay, [3], ["outbox/3"], [epoch], *arguments)
            left = await connection.fetchval("SELECT count(*) FROM sidings.outbox")
            assert left in (0, 2)
            return left == 0

        assert not await taken_out(relay, 1, timeline)
        assert not await taken_out(uuid4(), 2, timeline)
        if statement == "record":
            assert not await taken_out(relay, 2, "another")
        async with connection.transaction():
            assert await taken_out(relay, 2, timeline)
            await other.execute("UPDATE sidings.origin SET lease_until = now()")  # it is renewed meanwhile
            with pytest.raises(asyncpg.LockNotAvailableError):
                await other.execute("UPDATE sidings.origin SET epoch = 3")


@pytest.mark.parametrize("gone", [False, True], ids=["is there", "is gone"])
async def test_of_a_directory_tables_parked_messages_those_go_back_of_which_it_says_nothing(
    database: str, gone: bool
) -> None:
    """Those without a key, and all of a table that is gone. Of the others each key is in doubt, and due at once."""
    async with connected(database) as connection:
        await connection.execute(
            f"""INSERT INTO sidings.directory (relation, topic, key, left_out, camel_case)
                VALUES ({"4000000000" if gone else "'sidings.topic'::regclass"}, 'etas', '{{id}}', '{{}}', false);
                INSERT INTO sidings.directory_doubt (topic, key, since, due_at) VALUES ('etas', 'a', now(), 'infinity');
                INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, value, error)
                SELECT id, now(), 0, 'etas', key::bytea, id::text::bytea, 'no'
                FROM (VALUES (1, 'a'), (2, 'a'), (3, NULL), (4, 'b')) v (id, key)"""
        )
        release = load_sql("sidings.kafka.outbox", "release_parked")
        assert len(await connection.fetch(release, "etas", [1, 2, 3, 4], "alice", None)) == 4
        back = await connection.fetch("SELECT value FROM sidings.outbox ORDER BY id")
        assert [row["value"] for row in back] == ([b"1", b"2", b"3", b"4"] if gone else [b"3"])
        due = await connection.fetch(
            "SELECT key, due_at - since AS after FROM sidings.directory_doubt WHERE due_at <= now() ORDER BY key"
        )
        first = timedelta(seconds=5)  # the later times are multiples of it
        assert [tuple(row) for row in due] == ([] if gone else [(b"a", first), (b"b", first)])


async def test_a_relay_that_has_died_has_no_share_and_what_it_held_can_be_had(database: str) -> None:
    """Its row stays for a minute: a slot that is left to it would be sent by nobody."""
    dead, second, first = (UUID(int=number) for number in range(3))
    attend, slots = load_sql("sidings.kafka.outbox", "attend"), ["outbox/0", "outbox/1", "outbox/2"]
    async with connected(database) as connection:
        for relay, slot, lease in ((dead, slots[0], -1.0), (first, slots[1], 30.0)):
            await connection.fetchrow(attend, relay, lease, "host", 1, slots, False)
            acquire = "SELECT sidings.acquire($1, ARRAY[$2], 0, $3 * interval '1 second', true)"
            await connection.execute(acquire, relay, slot, lease)
        for relay, place in ((second, 0), (first, 1)):
            row = await connection.fetchrow(attend, relay, 30.0, "host", 1, slots, False)
            assert row is not None
            assert (row["others"], row["place"], row["free"]) == (1, place, [slots[0], slots[2]])
        await connection.fetchrow(attend, dead, 30.0, "host", 1, slots, False)  # it was only paused
        row = await connection.fetchrow(attend, second, 30.0, "host", 1, slots, False)
        assert row is not None
        assert (row["others"], row["place"]) == (2, 1)


async def test_a_relay_that_has_been_dead_for_a_minute_takes_its_failing_topics_with_it(database: str) -> None:
    """They would fail for ever: nobody else says that they work. One that was paused for as long keeps its own, and
    what they are now."""
    dead, paused = UUID(int=1), UUID(int=2)
    attend, fails = (load_sql("sidings.kafka.outbox", name) for name in ("attend", "topic_fails"))
    async with connected(database) as connection:
        for relay in (dead, paused):
            await connection.fetchrow(attend, relay, -61.0, "host", 1, [], False)
            await connection.execute(fails, "etas", relay, 1, 3_600.0, "the first error")
        await connection.execute(fails, "etas", paused, 2, -1.0, "the second error")
        row = await connection.fetchrow(attend, paused, 30.0, "host", 1, [], True)
        assert row is not None
        assert row["due"] == ["etas"]
        topics = await connection.fetch("SELECT relay, retries, error FROM sidings.outbox_topic")
        assert [tuple(topic) for topic in topics] == [(paused, 2, "the second error")]
        await connection.execute(fails, "etas", paused, 3, 3_600.0, "the third error")
        other = UUID(int=3)
        assert (await connection.fetchrow(attend, other, 30.0, "host", 1, [], False) or {})["due"] == []
        await connection.execute(fails, "etas", other, 1, -1.0, "its own")
        row = await connection.fetchrow(attend, paused, 30.0, "host", 1, [], False)
        assert row is not None
        assert row["due"] == []


async def test_what_a_relay_tells_of_itself_and_its_topics_is_its_own(database: str) -> None:
    fails, works, leave = (load_sql("sidings.kafka.outbox", name) for name in ("topic_fails", "topic_works", "leave"))
    one, other, nobody = (UUID(int=number) for number in range(3))
    async with connected(database) as connection:

        async def failing() -> list[tuple[str, UUID]]:
            rows = await connection.fetch("SELECT topic, relay FROM sidings.outbox_topic ORDER BY topic, relay")
            return [(row["topic"], row["relay"]) for row in rows]

        for relay in (one, other):
            await connection.execute("INSERT INTO sidings.outbox_relay (id, alive_until) VALUES ($1, now())", relay)
            for topic in ("etas", "others"):
                await connection.execute(fails, topic, relay, 1, 60.0, "no")
        await connection.execute(fails, "etas", nobody, 1, 60.0, "said by one that has left")
        await connection.execute(works, "etas", one)
        assert await failing() == [("etas", other), ("others", one), ("others", other)]
        await connection.execute(leave, one)
        assert await failing() == [("etas", other), ("others", other)]


async def test_what_waits_is_counted_by_topic_in_the_slots_that_are_asked_for(database: str) -> None:
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.outbox (slot, topic, value, published_at)
               SELECT slot, topic, '', now() - ago::interval
               FROM (VALUES (3, 'etas', '1 h'), (3, 'etas', '9 h'), (4, 'etas', '2 h'), (4, 'others', '3 h'),
                            (5, 'etas', '20 h')) v (slot, topic, ago)"""
        )
        rows = await connection.fetch(load_sql("sidings.kafka.outbox", "waiting"), [3, 4], False)
    assert {row["topic"]: (row["waiting"], row["oldest"] // 3_600) for row in rows} == {
        "etas": (3, 9),
        "others": (1, 3),
    }


async def test_only_what_waits_in_the_slots_of_a_relay_waits_for_it(database: str) -> None:
    """A stop would say that messages were left, where another relay sends them."""
    waits = load_sql("sidings.kafka.outbox", "waits")
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.outbox (slot, topic, value) VALUES (3, 'etas', '')")
        asked = [([3], ["etas"]), ([3], None), ([4], ["etas"]), ([3], ["others"]), ([4], None)]
        told = [await connection.fetchval(waits, *arguments) for arguments in asked]
    assert told == [True, True, False, False, False]


async def test_of_a_topic_that_cannot_be_sent_to_all_is_parked_but_what_is_locked_or_has_been_sent(
    database: str,
) -> None:
    """What has been sent would be sent anew, behind newer ones; and what is locked would hold up all others."""
    relay, park = uuid4(), load_sql("sidings.kafka.outbox", "park_topic")
    async with connected(database) as connection, connected(database) as person, person.transaction():
        await connection.execute("INSERT INTO sidings.origin (origin, owner, epoch) VALUES ('outbox/3', $1, 1)", relay)
        await connection.execute(
            """INSERT INTO sidings.outbox (id, slot, topic, value)
               SELECT n, 3, CASE n WHEN 6 THEN 'others' ELSE 'etas' END, '' FROM generate_series(1, 7) n;
               INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, error)
               VALUES (3, now(), 3, 'etas', 'x')"""
        )
        await person.execute("SELECT FROM sidings.outbox WHERE id = 2 FOR UPDATE")
        arguments = relay, [3], ["outbox/3"], [1], "etas", "no", 2, [1], [0], 1_000
        assert [await connection.fetchval(park, *arguments) for _ in range(3)] == [2, 2, 0]
        left = await connection.fetch("SELECT id FROM sidings.outbox ORDER BY id")
        assert [row["id"] for row in left] == [1, 2, 6]
        parked = {row["id"] for row in await connection.fetch("SELECT id FROM sidings.outbox_parked")}
        assert (parked >= {3, 4, 5, 7}, len(parked)) == (True, 5), "of the two that were 3 one has another id"


async def test_of_all_slots_together_no_more_is_parked_at_once_than_was_asked_for(database: str) -> None:
    """It was so many of each slot: sixteen times as many as a statement has the time for."""
    relay, park = uuid4(), load_sql("sidings.kafka.outbox", "park_topic")
    slots, names = [3, 4], ["outbox/3", "outbox/4"]
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.origin (origin, owner, epoch) SELECT unnest($2::text[]), $1, 1", relay, names
        )
        await connection.execute(
            "INSERT INTO sidings.outbox (slot, topic, value) SELECT 3 + n % 2, 'etas', '' FROM generate_series(1, 5) n"
        )
        arguments = relay, slots, names, [1, 1], "etas", "no", 2, [], [0, 0], 1_000
        assert [await connection.fetchval(park, *arguments) for _ in range(4)] == [2, 2, 1, 0]


async def test_what_waits_for_a_topic_that_cannot_be_sent_to_is_looked_for_by_some_thousands(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each statement stepped over all that waits for other topics, millions where another one fails: it took longer
    than a statement may, nothing was parked, and meanwhile nothing was recorded."""
    monkeypatch.setattr(recorder_module, "_LOOKED_AT", 100)
    relay = a_relay(database, "localhost:1")
    recorder, parking = relay._recorder, relay._links["park"]
    recorder.relay_id, fetch, read = relay.id, Link.fetch, list[int]()

    async def watched(link: Link, query: str, *arguments: Any) -> list[Any]:
        assert link is parking, "others record meanwhile"
        async with connected(database) as looking:
            for setting in ("enable_seqscan = off", "enable_bitmapscan = off", "plan_cache_mode = force_generic_plan"):
                await looking.execute(f"SET {setting}")
            explained = "EXPLAIN (ANALYZE, FORMAT JSON) "
            transaction = looking.transaction()
            await transaction.start()
            plan = json.loads(await looking.fetchval(explained + query, *arguments))[0]["Plan"]
            await transaction.rollback()
        scans = [node for node in nodes(plan) if node.get("Relation Name") == "outbox"]
        assert all(node.get("Index Name") in (None, "outbox_pkey") for node in scans)
        assert all("Index Name" in node or node["Node Type"] == "ModifyTable" for node in scans), plan
        looked = ("Actual Rows", "Rows Removed by Filter")
        read.append(max(int(node["Actual Loops"] * sum(node.get(key, 0) for key in looked)) for node in scans))
        return await fetch(link, query, *arguments)

    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.outbox (slot, topic, value)
               SELECT n % 2, CASE n % 1000 WHEN 0 THEN 'few' ELSE 'many' END, 'x' FROM generate_series(1, 6000) n;
               ANALYZE sidings.outbox"""
        )
        for number in (0, 1):
            relay.backlog.add_slot(Slot(number, f"outbox/{number}", 1))
            await connection.execute(
                "INSERT INTO sidings.origin (origin, owner, epoch) VALUES ($1, $2, 1)", f"outbox/{number}", relay.id
            )
        monkeypatch.setattr(Link, "fetch", watched)
        try:
            assert await recorder.park_topic("few", "no") == 6
        finally:
            await relay.stop()
        assert len(read) == 31
        assert max(read) <= 250
        count = "SELECT count(*) FILTER (WHERE topic = 'few') FROM "
        assert [await connection.fetchval(f"{count} sidings.outbox{which}") for which in ("", "_parked")] == [0, 6]


async def test_while_a_topic_is_parked_others_are_recorded() -> None:
    hangs: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    parking: Any = Mock(spec=Link, fetch=Mock(return_value=hangs))
    link: Any = Mock(spec=Link, fetch=AsyncMock(return_value=[]))
    backlog, metrics, ignore = Backlog(10), Mock(spec=OutboxMetrics), lambda *_: None
    backlog.add_slot(Slot(3, "outbox/3", 1))
    recorder = Recorder(link, parking, backlog, metrics, schema="sidings", on_fenced=ignore, on_room=ignore)
    task = asyncio.create_task(recorder.park_topic("etas", "no"))
    await eventually(lambda: parking.fetch.called)
    await asyncio.wait_for(recorder.call("topic_works", "others", uuid4()), SECONDS)
    hangs.set_result([])
    assert await task == 0


async def test_what_cannot_be_parked_in_time_is_parked_by_fewer() -> None:
    asked, waiting = list[int](), 3_000

    async def fetch(_: str, *arguments: Any) -> list[Any]:
        nonlocal waiting
        asked.append(most := arguments[6])
        if most > 1_000:
            raise PostgresUnavailable("no answer within 5 s")
        parked = min(most, waiting)
        waiting -= parked
        return [{"parked": parked, "slot": 3, "upto": 7 if parked == most else None}]

    link: Any = Mock(spec=Link, fetch=fetch)
    ignore: Any = lambda *_: None  # noqa: E731
    backlog = Backlog(10)
    backlog.add_slot(Slot(3, "outbox/3", 1))
    metrics: Any = Mock(spec=OutboxMetrics)
    recorder = Recorder(Mock(), link, backlog, metrics, schema="sidings", on_fenced=ignore, on_room=ignore)
    for _ in range(20):
        try:
            await recorder.park_topic("etas", "no")
        except PostgresUnavailable:
            continue
        break
    assert waiting == 0
    assert asked[:3] == [5_000, 1_250, 312]


async def test_what_a_person_decides_about_messages_is_audited_with_it(database: str) -> None:
    async with publishing(database) as (outbox, connection):
        await connection.execute(
            "INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, error) "
            "SELECT n, now(), 0, CASE WHEN n < 5 THEN 'few' ELSE 'many' END, 'k', 'too large' "
            "FROM generate_series(1, 204) n"
        )
        assert await outbox.release(ids=[3, 2, 5, 4711], actor="alice", reason="mended") == [2, 3, 5]
        assert len(await outbox.discard("many", actor="bob")) == 199
        assert await outbox.discard("many", actor="bob") == []  # nothing is done, so nothing is written
        assert await outbox.retry("many", actor="bob") is False
        for decide in (outbox.release, outbox.discard, outbox.retry):
            with pytest.raises(ConfigurationError, match="name the person or program that does it"):
                await decide("few", actor="")
        assert [message.id for message in await outbox.parked()] == [1, 4]
        rows = await Admin(connection).audit()
    assert sorted((row.actor, row.action, row.target["topic"], row.reason, row.detail) for row in rows) == [
        ("alice", "release messages", "few", "mended", {"messages": 2, "ids": [2, 3]}),
        ("alice", "release messages", "many", "mended", {"messages": 1, "ids": [5]}),
        ("bob", "discard messages", "many", None, {"messages": 199, "ids": list(range(6, 106))}),
    ]


async def test_a_topic_that_is_tried_again_by_a_person_is_audited_once(database: str) -> None:
    async with publishing(database) as (outbox, connection):
        for relay in (uuid4(), uuid4()):  # each has its own view of the topic
            await connection.execute("INSERT INTO sidings.outbox_relay (id, alive_until) VALUES ($1, now())", relay)
            await connection.execute(
                "INSERT INTO sidings.outbox_topic (topic, relay, retries, retry_at, error) "
                "VALUES ('etas', $1, 3, now() + interval '1 hour', 'no such topic')",
                relay,
            )
        assert await outbox.retry("etas", actor="alice", reason="made it") is True
        assert await connection.fetchval("SELECT bool_and(retry_at <= clock_timestamp()) FROM sidings.outbox_topic")
        [row] = await Admin(connection).audit()
    assert (row.actor, row.action, row.target, row.reason) == ("alice", "retry topic", {"topic": "etas"}, "made it")


async def test_the_topic_that_has_failed_for_longest_is_told_first(database: str) -> None:
    async with publishing(database) as (outbox, connection):
        await connection.execute(
            """INSERT INTO sidings.outbox_relay (id, alive_until) VALUES (gen_random_uuid(), now());
               INSERT INTO sidings.outbox_topic (topic, relay, retries, failing_since, retry_at, error)
               SELECT topic, id, 1, now() - since::interval, now(), 'no'
               FROM sidings.outbox_relay, (VALUES ('b', '2 h'), ('a', '1 h'), ('c', '3 h')) v (topic, since)"""
        )
        assert [topic.topic for topic in await outbox.failing()] == ["c", "b", "a"]


async def test_a_server_that_takes_no_writes_is_none_that_does_not_answer(database: str) -> None:
    await fetch(database, f'ALTER DATABASE "{database.rpartition("/")[2]}" SET default_transaction_read_only = on')
    outbox = Outbox(PostgresSettings(dsn=database))
    with pytest.raises(PostgresUnavailable, match=r"takes no writes: .*read-only transaction"):
        await outbox.retry("etas", actor="alice")
    await outbox.close()


async def test_another_schema_name_is_used_throughout(empty_database: str, sidings_kafka: str, topic) -> None:
    etas = await topic("etas")
    await migrate(empty_database, service="test", schema="other")
    settings = PostgresSettings(dsn=empty_database, schema_name="other")
    outbox = Outbox(settings, OutboxSettings())
    relay = Relay("test", settings, KafkaSettings(bootstrap=sidings_kafka), prometheus=CollectorRegistry())
    connection = await asyncpg.connect(empty_database)
    await relay.start()
    try:
        async with connection.transaction():
            receipt = await outbox.publish(connection, etas, key="a", value=b"x")
        await outbox.published(receipt, timeout=20)
    finally:
        await relay.stop()
        await outbox.close()
        await connection.close()


async def _sent(relay, topic: str, count: int) -> bool:
    return await eventually(lambda: relay.metrics.count("sent", topic) >= count)

"""`Outbox.add`: messages that are stored together before the transaction commits, in their order, all or none."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from sidings import NotInTransaction, OutboxSettings, PostgresSettings, Transaction
from sidings.kafka import Transactions
from sidings.kafka.outbox import InvalidMessage, Outbox

from .support import connected, fetch

ROWS = """
    SELECT topic, key, value, headers::text, partition_key, stamped_at, slot FROM sidings.outbox ORDER BY id
"""
DUE = datetime(2026, 5, 1, tzinfo=UTC)


@asynccontextmanager
async def a_pool(database: str) -> AsyncIterator[tuple[Transactions, Outbox]]:
    settings = PostgresSettings(dsn=database, pool_size=1)
    pool, outbox = Transactions(settings, [].append), Outbox(settings, OutboxSettings())
    await pool.start()
    yield pool, outbox
    await pool.stop()
    await outbox.close()


async def test_those_of_a_topic_become_one_statement(database: str) -> None:
    seen: list[str] = []

    def note(record: Any) -> None:
        if "INSERT INTO" in record.query:
            seen.append(record.query)

    async with a_pool(database) as (pool, outbox), pool.open() as tx:
        with tx.opened().query_logger(note):
            for number in range(100):
                timestamp = DUE if number % 4 == 0 else None
                await outbox.add(tx, f"etas-{number % 2}", key="k", value=b"%d" % number, timestamp=timestamp)
            assert seen == []
            assert tx.published is False
            await tx.flush()
            await asyncio.sleep(0)  # the turn in which asyncpg tells of the last one
        assert len(seen) == 2
        assert tx.published is True  # so that the relay is woken
    values = defaultdict[str, list[int]](list)
    for row in await fetch(database, ROWS):
        values[row["topic"]].append(int(row["value"]))
    assert values == {"etas-0": [*range(0, 100, 2)], "etas-1": [*range(1, 100, 2)]}


async def test_each_is_as_if_it_had_been_published(database: str) -> None:
    async def store(outbox: Outbox, tx: Transaction, call: str) -> None:
        method = getattr(outbox, call)
        for number in range(3):
            await method(tx, "etas", key="a", value=b"%d" % number)
            await method(tx, "etas", key="a", value=None, headers={"n": str(number)})
            await method(tx, "etas", key="a", value=b"p", partition_key="other")
            await method(tx, "etas", key="a", value=b"t", timestamp=DUE)
            await method(tx, "others", value=b"x")

    found: dict[str, list[Any]] = {}
    async with a_pool(database) as (pool, outbox):
        for call in ("publish", "add"):
            async with pool.open() as tx:
                await store(outbox, tx, call)
            rows = await fetch(database, ROWS)
            found[call] = [[tuple(row)[:-1] for row in rows if row["topic"] == topic] for topic in ("etas", "others")]
            found[call].append(sorted(row["slot"] for row in rows if row["key"] is not None))
            await fetch(database, "DELETE FROM sidings.outbox")
    assert found["add"] == found["publish"]
    assert list(map(len, found["add"])) == [12, 3, 12]


async def test_whatever_is_done_in_a_transaction_the_order_of_a_topic_is_that_of_the_calls(database: str) -> None:
    async with a_pool(database) as (pool, outbox):
        for seed in range(60):
            await check_order(database, pool, outbox, seed)


async def check_order(database: str, pool: Transactions, outbox: Outbox, seed: int) -> None:
    """`levels` has the messages of the transaction and of each open savepoint, by topic and number."""
    rng = random.Random(seed)
    levels: list[list[tuple[str, int]]] = [[]]
    blocks: list[Any] = []

    async def leave(error: Exception | None) -> None:
        with suppress(ZeroDivisionError):
            await blocks.pop().__aexit__(type(error) if error else None, error, None)
        inner = levels.pop()
        levels[-1] += [] if error else inner

    async with pool.open() as tx:
        for number in range(40):
            topic, value = rng.choice("ab"), b"%d" % number
            match rng.choice(["add"] * 10 + ["publish", "publish_many", "begin", "release", "undo"]):
                case "begin":
                    blocks.append(tx.savepoint())
                    await blocks[-1].__aenter__()
                    levels.append([])
                case "release" | "undo" as how:
                    if blocks:
                        await leave(None if how == "release" else ZeroDivisionError())
                case "publish_many":
                    await outbox.publish_many(tx, topic, [("k", value)])
                    levels[-1].append((topic, number))
                case call:
                    timestamp = rng.choice([None, None, DUE])
                    await getattr(outbox, call)(tx, topic, key="k", value=value, timestamp=timestamp)
                    levels[-1].append((topic, number))
        while blocks:
            await leave(None)
    expected, found = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for topic, number in levels[0]:
        expected[topic].append(number)
    for row in await fetch(database, ROWS):
        found[row["topic"]].append(int(row["value"]))
    await fetch(database, "DELETE FROM sidings.outbox")
    assert found == expected, seed


async def test_those_that_are_many_are_stored_at_once(database: str) -> None:
    async with a_pool(database) as (pool, outbox), pool.open() as tx:
        for _ in range(1_001):
            await outbox.add(tx, "etas", key="k", value=b"v")
        assert await tx.fetchval("SELECT count(*) FROM sidings.outbox") == 1_000
        for _ in range(6):
            await outbox.add(tx, "etas", key="k", value=b"v" * 900_000)
        assert await tx.fetchval("SELECT count(*) FROM sidings.outbox") == 1_001 + 5


async def test_what_is_added_while_others_are_stored_comes_behind_them(database: str) -> None:
    async with a_pool(database) as (pool, outbox), pool.open() as tx:
        for topic in "ab":
            await outbox.add(tx, topic, key="k", value=b"1")
        flushing = asyncio.create_task(tx.flush())
        await asyncio.sleep(0)
        await outbox.add(tx, "b", key="k", value=b"2")
        await flushing
    assert [row["value"] for row in await fetch(database, ROWS) if row["topic"] == "b"] == [b"1", b"2"]


async def test_what_cannot_be_a_message_is_refused_at_once_and_leaves_the_others(database: str) -> None:
    async with a_pool(database) as (pool, outbox):
        async with pool.open() as tx:
            await outbox.add(tx, "etas", key="k", value=b"1")
            for wrong in ({"topic": "no topic"}, {"value": 5}, {"timestamp": DUE.replace(tzinfo=None)}, {"headers": 5}):
                with pytest.raises(InvalidMessage):
                    await outbox.add(tx, **{"topic": "etas", "value": b"2", **wrong})
        with pytest.raises(NotInTransaction):
            await outbox.add(tx, "etas", value=b"3")
    assert [row["value"] for row in await fetch(database, ROWS)] == [b"1"]


async def test_a_connection_is_refused_as_nobody_would_store_the_message(database: str) -> None:
    outbox = Outbox(PostgresSettings(dsn=database))
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(InvalidMessage, match=r"added only to a Transaction.*asyncpg.*call publish"):
            await outbox.add(connection, "etas", value=b"1")  # type: ignore[arg-type]

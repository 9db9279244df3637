"""What the stored offsets say by themselves, whatever an instance makes of it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from sidings import PostgresSettings
from sidings.executor import Link
from sidings.kafka.offsets import Move, OffsetStore
from sidings.kafka.pauses import Pauses
from sidings.schema import load_sql

from .support import SECONDS, connected, eventually

TP = TopicPartition("positions", 0)


async def test_of_instances_that_place_a_partition_at_once_the_first_decides_where_it_starts(database: str):
    """What it has handled by then the other one would pass over, or handle again."""
    settings, unknown = PostgresSettings(dsn=database), SimpleNamespace(before=lambda *_: None)
    link = Link(settings)
    epochs: Any = unknown
    first, second = (OffsetStore(link, settings, epochs, {}, Pauses([])) for _ in range(2))
    try:
        assert await first.load([TP]) == await second.load([TP]) == {}
        await first.create({TP: 5})
        for start in (9, 0):
            await second.create({TP: start})
            assert await second.load([TP]) == {TP: 5}
        await second.jump(Move(TP, 5, 7))
        await first.create({TP: 5})
        assert await first.load([TP]) == {TP: 7}
    finally:
        await link.close()


async def test_who_is_paused_between_its_offsets_and_its_commit_keeps_the_next_owner_for_seconds_only(database: str):
    """The row stayed locked for as long as the handlers' own statements may let pass, with PgBouncer for ever."""
    settings, epochs = PostgresSettings(dsn=database), SimpleNamespace(before=lambda *_: None)
    limit, link = "SHOW idle_in_transaction_session_timeout", Link(settings)
    offsets = OffsetStore(link, settings, epochs, {}, Pauses([]))  # pyright: ignore[reportArgumentType]
    try:
        await offsets.create({TP: 5})
        await offsets.load([TP])
        async with connected(database, idle_in_transaction_session_timeout="30s") as connection:
            async with connection.transaction():
                await offsets.advance(connection, [Move(TP, 5, 7)])  # pyright: ignore[reportArgumentType]
                assert await connection.fetchval(limit) == "5s"
            assert await connection.fetchval(limit) == "30s"
    finally:
        await link.close()


async def test_offsets_that_move_at_once_are_no_conflict_of_serializable_transactions(database: str):
    """As a database for money may have them. Of a small table that is analysed Postgres reads all rows, or of several
    offsets all of its index: whoever has done so is in conflict with all that move another one meanwhile."""
    advance = load_sql("sidings.kafka", "advance_offsets")
    moves = [list(range(20)), [5] * 20, [7] * 20, [0] * 20, [None] * 20]
    async with connected(database) as one, connected(database) as other:
        await one.execute(
            "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) "
            "SELECT t, n, 5 FROM unnest('{etas,rides}'::text[]) t, generate_series(0, 19) n; "
            "ANALYZE sidings.consumer_offset"
        )
        for count in (1, 3, 20):
            async with asyncio.timeout(SECONDS):
                transactions = [each.transaction(isolation="serializable") for each in (one, other)]
                for transaction in transactions:
                    await transaction.start()
                for connection, topic in ((one, "rides"), (other, "etas")):
                    arguments = [[topic] * count, *(column[:count] for column in moves)]
                    assert len(await connection.fetch(advance, *arguments)) == count
                for transaction in transactions:
                    await transaction.commit()
            await one.execute("UPDATE sidings.consumer_offset SET next_offset = 5")


ROWS = {
    "kafka/create_offsets": (
        "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ('t', $1, 5)",
        (["t", "t"], [1, 0], [5, 5]),
        (0, 1),
    ),
    "kafka/remember_topics": (
        "INSERT INTO sidings.topic (topic, partitions) VALUES ($1, 3)",
        (["b", "a"], [3, 3], ["murmur2", "murmur2"], 10.0),
        ("a", "b"),
    ),
    "kafka.outbox/doubt": (
        "INSERT INTO sidings.directory_doubt (topic, key, since, due_at) VALUES ('t', $1, now(), now())",
        ("t", [b"b", b"a"]),
        (b"a", b"b"),
    ),
}


@pytest.mark.parametrize("statement", ROWS)
async def test_who_waits_for_a_row_has_written_none_that_comes_behind_it(database: str, statement: str):
    """Else two instances could wait for each other. Whatever the order is that the rows are given in."""
    one_row, arguments, (first, second) = ROWS[statement]
    package, name = statement.split("/")
    async with (
        connected(database) as one,
        connected(database) as other,
        connected(database, lock_timeout="5s") as third,
    ):
        await one.execute(
            """INSERT INTO sidings.directory (relation, topic, key, left_out, camel_case)
               VALUES ('sidings.topic'::regclass, 't', '{id}', '{}', false)"""
        )
        async with one.transaction():
            await one.execute(one_row, first)
            waiting = asyncio.create_task(other.fetch(load_sql(f"sidings.{package}", name), *arguments))
            blocked = "SELECT cardinality(pg_blocking_pids($1)) > 0"
            await eventually(lambda: third.fetchval(blocked, other.get_server_pid()), "it waits for the first row")
            await third.execute(one_row, second)
        await waiting


async def test_only_who_expects_what_is_stored_moves_an_offset(database: str):
    """Not who was overtaken, nor who began before a reset that has come back to the same."""
    advance = load_sql("sidings.kafka", "advance_offsets")
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.consumer_offset (topic, partition, next_offset, resets) VALUES ('t', 0, 5, 1)"
        )
        for expected, resets in ((4, 1), (6, 1), (5, 0), (5, 2)):
            assert await connection.fetch(advance, ["t"], [0], [expected], [7], [resets], [None]) == []
        assert len(await connection.fetch(advance, ["t"], [0], [5], [7], [1], [None])) == 1
        assert await connection.fetchval("SELECT next_offset FROM sidings.consumer_offset") == 7

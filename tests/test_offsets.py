"""What the stored offsets say by themselves, whatever an instance makes of it."""

from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition
from sidings import PostgresSettings
from sidings.executor import Link
from sidings.kafka.offsets import Move, OffsetStore

from .support import connected

TP = TopicPartition("positions", 0)


async def test_of_instances_that_place_a_partition_at_once_the_first_decides_where_it_starts(database: str):
    """What it has handled by then the other one would pass over, or handle again."""
    settings, unknown = PostgresSettings(dsn=database), SimpleNamespace(before=lambda *_: None)
    link = Link(settings)
    epochs: Any = unknown
    first, second = (OffsetStore(link, settings, epochs, {}) for _ in range(2))
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
    offsets = OffsetStore(link, settings, epochs, {})  # pyright: ignore[reportArgumentType]
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

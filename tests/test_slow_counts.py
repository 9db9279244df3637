"""Back-pressure where counting takes long, as of hundreds of thousands of jobs in each of many partitions on a slow
disk: partitions are paused and go on all the same."""

import asyncio
from typing import Any

from aiokafka import TopicPartition
from sidings import PostgresSettings
from sidings.kafka import backlog as backlog_module
from sidings.kafka.backlog import Backlog
from sidings.kafka.partition import Partition, State
from sidings.schema import load_sql

from .support import connected, eventually

PARTITIONS, LIMIT = 8, 5


class Client:
    """What is paused."""

    def __init__(self) -> None:
        self.paused: set[TopicPartition] = set()

    def pause(self, tp: TopicPartition) -> None:
        self.paused.add(tp)

    def resume(self, tp: TopicPartition) -> None:
        self.paused.discard(tp)


def slowly(package: str, name: str, schema: str) -> str:
    """To count the jobs of one origin takes a fifth of a second, so that all together take longer than a call may."""
    sql = load_sql(package, name, schema)
    assert "count(w.position) AS waiting" in sql
    return sql.replace("count(w.position)", "count(w.position) + length(pg_sleep(0.2)::text)")


async def test_counts_that_take_longer_than_a_call_may_pause_partitions_all_the_same(database, monkeypatch):
    """No partition was ever counted, so none was paused, and those that were full never went on."""
    monkeypatch.setattr(backlog_module, "load_sql", slowly)
    monkeypatch.setattr(backlog_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(backlog_module, "_SHARE", 1)
    monkeypatch.setattr(backlog_module, "_LONG_LOOK", 0.5, raising=False)
    tps = [TopicPartition("positions", number) for number in range(PARTITIONS)]
    partitions = {tp: Partition(tp) for tp in tps}
    for partition in partitions.values():
        partition.place(0)
    client: Any = Client()
    settings = PostgresSettings(dsn=database, call_seconds=0.8)
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.job (type, origin, payload, position) "
            "SELECT 'any', 'positions/' || p, 'null', nextval('sidings.job_position') "
            f"FROM generate_series(0, {PARTITIONS - 1}) p, generate_series(1, {LIMIT + 1})"
        )
        backlog = Backlog(client, partitions, {"positions": LIMIT}, settings, on_resumed=lambda: None)
        looking = asyncio.create_task(backlog.run())
        try:
            await eventually(lambda: client.paused == set(tps), lambda: f"paused: {client.paused}", 20)
            assert {partition.state for partition in partitions.values()} == {State.FULL}
            assert backlog.waiting == dict.fromkeys(tps, LIMIT + 1)
            await connection.execute("DELETE FROM sidings.job")
            await eventually(lambda: not client.paused, lambda: f"paused: {client.paused}", 20)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

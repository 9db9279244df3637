"""Messages that are large by their headers or keys, as with a token or a baggage in each, take no more memory than
those that are large by their values."""

import asyncio
from typing import Any

import pytest
from sidings import Message, PostgresSettings
from sidings.executor import Link
from sidings.kafka.outbox import reader as reader_module
from sidings.kafka.outbox.backlog import Backlog, Slot
from sidings.kafka.outbox.reader import Reader

from .consumer_support import Number, as_json, producing
from .support import connected, eventually
from .test_stateless import a_service

LARGE = 20_000


@pytest.mark.parametrize("what", ["headers", "key"])
async def test_what_waits_behind_a_stateless_message_is_bounded(topic, sidings_kafka, monkeypatch, what):
    monkeypatch.setattr("sidings.kafka.stateless_loop._MOST_BYTES", 10 * LARGE)
    name, go_on, done = await topic(), asyncio.Event(), list[int]()
    key = b"k" * LARGE if what == "key" else b"k"
    headers = [("token", b"x" * LARGE), ("null", None)] if what == "headers" else []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        await go_on.wait()
        done.append(message.value.n)

    async with service, producing(sidings_kafka) as producer:
        partitions = service._life.consumer._stateless.partitions
        await eventually(lambda: any(partition.placed for partition in partitions.values()))
        [partition] = partitions.values()
        for n in range(30):
            await producer.send_and_wait(name, as_json(n), key=key, headers=headers)
            await eventually(lambda n=n: len(partition.window) == n + 1 or partition.state.name == "FULL")
        assert partition.state.name == "FULL", "it reads on without a bound"
        assert len(partition.window) <= 10
        go_on.set()
        await eventually(lambda: done == list(range(30)))
        assert partition.window.size == 0


@pytest.mark.parametrize("what", ["headers", "key", "partition_key"])
async def test_what_a_relay_reads_ahead_is_bounded(database, monkeypatch, what):
    monkeypatch.setattr(reader_module, "_BYTES", 50 * LARGE)
    monkeypatch.setattr(reader_module, "_MOST_BYTES", 100 * LARGE)
    monkeypatch.setattr(reader_module, "_HELD_BYTES", 200 * LARGE)
    values = {
        "headers": f"jsonb_build_array(jsonb_build_array('token', repeat('x', {LARGE})))",
        "key": f"convert_to(repeat('k', {LARGE}), 'UTF8')",
        "partition_key": f"convert_to(repeat('k', {LARGE}), 'UTF8')",
    }
    async with connected(database) as connection:
        await connection.execute(
            f"INSERT INTO sidings.outbox (topic, slot, value, {what}) "
            f"SELECT 'etas', 0, '1', {values[what]} FROM generate_series(1, 1000)"
        )
    backlog, link = Backlog(10_000), Link(PostgresSettings(dsn=database))
    quiet: Any = lambda: None  # noqa: E731
    reader = Reader(link, backlog, schema="sidings", poll_seconds=0.01, on_rows=quiet, on_new_server=quiet)
    backlog.add_slot(Slot(0, "outbox/0", 1))
    reading = asyncio.create_task(reader.run())
    try:
        await eventually(lambda: backlog.lane("etas").queue and not reader.hungry())
        held = len(backlog.lane("etas").queue)
        assert held <= 250, f"{held} messages of {LARGE} bytes are in memory"
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await link.close()

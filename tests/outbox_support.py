"""What the tests of outbox and relay share: relays that are stopped in any case, and what stands in a topic."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from prometheus_client import CollectorRegistry
from sidings.executor import PostgresSettings
from sidings.kafka import Producer
from sidings.kafka.outbox import Outbox, OutboxSettings, Relay
from sidings.kafka.settings import KafkaSettings

from .support import SECONDS, eventually, value

FAST: dict[str, Any] = {"poll_seconds": 0.02, "backoff_seconds": 0.1, "figures_seconds": 0.2, "metadata_seconds": 0.4}


def a_relay(dsn: str, kafka: str | KafkaSettings, **options: Any) -> Relay:
    """A relay that polls fast. `options`: fields of `OutboxSettings`."""
    settings = OutboxSettings(**{**FAST, **options})
    reached = KafkaSettings(bootstrap=kafka) if isinstance(kafka, str) else kafka
    return Relay("test", PostgresSettings(dsn=dsn), reached, settings, prometheus=CollectorRegistry())


@asynccontextmanager
async def relaying(dsn: str, kafka: str | KafkaSettings, **options: Any) -> AsyncIterator[Relay]:
    """A started relay; stopped at the end, whatever happens."""
    relay = a_relay(dsn, kafka, **options)
    await relay.start()
    try:
        yield relay
    finally:
        async with asyncio.timeout(SECONDS):
            await relay.stop()


@asynccontextmanager
async def publishing(dsn: str, **options: Any) -> AsyncIterator[tuple[Outbox, asyncpg.Connection]]:
    """An outbox and a connection of the test's own."""
    outbox = Outbox(PostgresSettings(dsn=dsn), OutboxSettings(**options))
    connection = await asyncpg.connect(dsn, timeout=SECONDS, command_timeout=SECONDS)
    try:
        yield outbox, connection
    finally:
        connection.terminate()
        await outbox.close()


@asynccontextmanager
async def sending(kafka: str | KafkaSettings, **options: Any) -> AsyncIterator[Producer]:
    """A producer that sends at once. `options`: fields of `OutboxSettings`."""
    reached = KafkaSettings(bootstrap=kafka) if isinstance(kafka, str) else kafka
    producer = Producer(reached, OutboxSettings(**options))
    try:
        yield producer
    finally:
        await producer.stop()


async def publish(dsn: str, topic: str, messages: Iterable[tuple[str | None, bytes | None]]) -> None:
    """Publish pairs of key and value in one transaction."""
    async with publishing(dsn) as (outbox, connection), connection.transaction():
        await outbox.publish_many(connection, topic, messages)


async def emptied(dsn: str, topic: str | None = None, seconds: float = SECONDS) -> None:
    """Wait until nothing waits in the outbox, or nothing of one topic."""

    async def empty() -> bool:
        return not await value(dsn, "SELECT count(*) FROM sidings.outbox WHERE $1::text IS NULL OR topic = $1", topic)

    await eventually(empty, f"the outbox is empty ({topic or 'all topics'})", seconds)


async def arrived(kafka: str, topic: str) -> int:
    """How many messages stand in a topic that loses none: quicker than to read them."""
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, enable_auto_commit=False)
    try:
        async with asyncio.timeout(SECONDS):
            await consumer.start()
            tps = await _partitions(consumer, topic)
            return sum((await consumer.end_offsets(tps)).values())
    finally:
        await consumer.stop()


async def records(kafka: str, topic: str) -> list[Any]:
    """All that stands in a topic now, partition by partition, in order."""
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, enable_auto_commit=False, fetch_max_wait_ms=100)
    found: list[ConsumerRecord] = []
    try:
        async with asyncio.timeout(SECONDS):
            await consumer.start()
            tps = await _partitions(consumer, topic)
            await consumer.seek_to_beginning(*tps)
            ends = await consumer.end_offsets(tps)
            while True:
                positions = {tp: await consumer.position(tp) for tp in tps}
                if all(positions[tp] >= ends[tp] for tp in tps):
                    break
                for batch in (await consumer.getmany(timeout_ms=100)).values():
                    found.extend(batch)
    finally:
        await consumer.stop()
    return sorted(found, key=lambda r: (r.partition, r.offset))


async def _partitions(consumer: AIOKafkaConsumer, topic: str) -> list[TopicPartition]:
    """All partitions of a topic, assigned to the consumer."""
    while not (partitions := consumer.partitions_for_topic(topic)):
        await consumer.topics()
        consumer.assign([TopicPartition(topic, 0)])
        await asyncio.sleep(0.02)
    tps = [TopicPartition(topic, p) for p in sorted(partitions)]
    consumer.assign(tps)
    return tps


def firsts(found: Iterable[ConsumerRecord]) -> dict[Any, list[Any]]:
    """By key, the values in the order in which they first appeared: repeats are allowed, gaps and disorder are not."""
    out: dict[Any, list[Any]] = defaultdict(list)
    seen: set[tuple[bytes | None, bytes | None]] = set()
    for record in found:
        if (record.key, record.value) not in seen:
            seen.add((record.key, record.value))
            out[record.key].append(record.value)
    return out


KEYS = 40


def numbered(first: int, count: int) -> list[tuple[str | None, bytes | None]]:
    return [(f"k{n % KEYS}", b"%d" % n) for n in range(first, first + count)]


def assert_complete(found: list[Any], count: int) -> None:
    """Every number up to `count` has arrived; by key their first occurrences are in order."""
    in_order = firsts(found)
    assert in_order == {b"k%d" % k: [b"%d" % n for n in range(k, count, KEYS)] for k in range(KEYS)}


class Writer:
    """Publishes all the time, until stopped. pause: seconds between two transactions of 40 messages."""

    def __init__(self, dsn: str, topic: str, *, pause: float = 0.01) -> None:
        self.count = 0
        self._pause = pause
        self._dsn = dsn
        self._topic = topic
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        async with publishing(self._dsn) as (outbox, connection):
            while True:
                transaction = connection.transaction()
                await transaction.start()
                await outbox.publish_many(connection, self._topic, numbered(self.count, 40))
                commit = asyncio.ensure_future(transaction.commit())
                try:
                    await asyncio.shield(commit)
                finally:
                    await commit
                    self.count += 40
                await asyncio.sleep(self._pause)


class RelayProcess:
    """A relay in a process of its own, to be killed and paused."""

    def __init__(self, dsn: str, kafka: str, **options: Any) -> None:
        self.process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "sidings.kafka.outbox",
                    "--service",
                    "test",
                    "--postgres",
                    dsn,
                    "--kafka",
                    kafka,
                ),
                *("--settings", json.dumps({**FAST, **options})),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )

    async def started(self) -> "RelayProcess":
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), SECONDS)
        assert "started" in line, line
        return self

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    async def terminate(self) -> int:
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, SECONDS)


@asynccontextmanager
async def relay_process(dsn: str, kafka: str, **options: Any) -> AsyncIterator[RelayProcess]:
    """A started relay process; killed at the end if it still runs."""
    process = RelayProcess(dsn, kafka, **options)
    try:
        yield await process.started()
    finally:
        if process.process.poll() is None:
            process.kill()
        assert process.process.stdout is not None
        process.process.stdout.close()


def never_retrieved(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log has of results that nobody has fetched."""
    gc.collect()
    return [record.getMessage() for record in caplog.records if "never retrieved" in record.getMessage()]

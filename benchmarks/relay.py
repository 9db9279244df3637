"""The relay beside a bare aiokafka producer and the Deimos algorithm; publish beside a bare INSERT; commit-to-topic
delay.

    python -m benchmarks.relay [--messages 100000] [--rounds 3]

All over one Postgres and one Kafka, in turns, so that what else the machine does hits all of them. `measure()` returns
the figures as a dict. Rates are messages a second; of several rounds the median counts.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from sidings.devstack import Endpoints, ensure
from sidings.devstack.databases import create_database, drop_database, ensure_template
from sidings.devstack.topics import create_topic, delete_topics
from sidings.executor import PostgresSettings
from sidings.kafka.outbox import Outbox, OutboxSettings, Relay
from sidings.kafka.settings import KafkaSettings

from .deimos import TABLES, Deimos

__all__ = ["measure"]

_PARTITIONS = 12
_KEYS = 1_000
_VALUE = b"x" * 200
_BARE = """CREATE TABLE bare_outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text, key bytea,
           value bytea, created_at timestamptz NOT NULL DEFAULT now())"""


class _Stage:
    """A database and topics of this run's own."""

    def __init__(self, dsn: str, kafka: str, messages: int) -> None:
        self.dsn = dsn
        self.kafka = kafka
        self.messages = messages
        self.topics: list[str] = []

    async def topic(self) -> str:
        """A new topic."""
        name = f"relay-benchmark-{time.time_ns()}"
        await create_topic(self.kafka, name, partitions=_PARTITIONS)
        self.topics.append(name)
        return name

    def relay(self) -> tuple[Relay, Outbox]:
        """A relay with default settings."""
        postgres = PostgresSettings(dsn=self.dsn)
        relay = Relay("benchmark", postgres, KafkaSettings(bootstrap=self.kafka), OutboxSettings(), prometheus=None)
        return relay, Outbox(postgres, wake=relay.wake)


async def measure(messages: int = 100_000, rounds: int = 3, endpoints: Endpoints | None = None) -> dict[str, Any]:
    """All figures. messages: in each round; rounds: of each variant, in turns."""
    ends = endpoints or await asyncio.to_thread(ensure)
    template = await ensure_template(ends.postgres, service="benchmark")
    dsn = await create_database(ends.postgres, f"relay_benchmark_{time.time_ns()}", template=template)
    stage = _Stage(dsn, ends.kafka, messages)
    try:
        connection = await asyncpg.connect(dsn)
        await connection.execute(TABLES)
        await connection.execute(_BARE)
        await connection.close()
        rates: dict[str, list[float]] = {}
        busy: dict[str, list[float]] = {}
        variants: dict[str, Callable[[_Stage], Awaitable[float]]] = {
            "bare producer": _bare_producer,
            "bare producer, idempotent": _idempotent_producer,
            "relay": _relay,
            "deimos": _deimos,
        }
        for _ in range(rounds):
            for name, variant in variants.items():
                _cpu.clear()
                rates.setdefault(name, []).append(await variant(stage))
                busy.setdefault(name, []).append((_cpu[-1] - _cpu[0]) / messages * 1e6)
        costs: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, cost in (await _publish_cost(stage)).items():
                costs.setdefault(name, []).append(cost)
        delay = await _delay(stage)
        median = {name: statistics.median(values) for name, values in rates.items()}
        cost = {name: statistics.median(values) for name, values in costs.items()}
        return {
            "messages_per_second": {name: round(rate) for name, rate in median.items()},
            "client_cpu_microseconds": {name: round(statistics.median(us), 1) for name, us in busy.items()},
            "relay_to_bare_producer": round(median["relay"] / median["bare producer"], 2),
            "relay_to_idempotent_producer": round(median["relay"] / median["bare producer, idempotent"], 2),
            "relay_to_deimos": round(median["relay"] / median["deimos"], 2),
            "publish_seconds": {name: round(seconds, 7) for name, seconds in cost.items()},
            "publish_to_bare_insert": round(cost["publish"] / cost["bare insert"], 2),
            "publish_many_to_bare_insert": round(cost["publish_many"] / cost["bare insert of many"], 2),
            "commit_to_topic_seconds": delay,
        }
    finally:
        await delete_topics(ends.kafka, stage.topics)
        await drop_database(ends.postgres, dsn)


_cpu: list[float] = []


def _clock() -> float:
    """The time; and the CPU time of this process at the beginning and the end of a measurement, in `_cpu`."""
    _cpu.append(time.process_time())
    return time.perf_counter()


# -- rates -----------------------------------------------------------------------------------------------


async def _bare(stage: _Stage, **options: Any) -> float:
    topic = await stage.topic()
    async with AIOKafkaProducer(
        bootstrap_servers=stage.kafka, acks="all", max_batch_size=512 * 1024, **options
    ) as producer:
        await producer.partitions_for(topic)
        keys = [b"k%d" % n for n in range(_KEYS)]
        started = _clock()
        for first in range(0, stage.messages, 10_000):
            count = min(10_000, stage.messages - first)
            await asyncio.gather(*[await producer.send(topic, _VALUE, keys[n % _KEYS]) for n in range(count)])
        return stage.messages / (_clock() - started)


async def _bare_producer(stage: _Stage) -> float:
    return await _bare(stage)


async def _idempotent_producer(stage: _Stage) -> float:
    return await _bare(stage, enable_idempotence=True)


async def _relay(stage: _Stage) -> float:
    topic = await stage.topic()
    relay, outbox = stage.relay()
    connection = await asyncpg.connect(stage.dsn)
    await relay.start()
    try:
        while len(relay.held) < 16:
            await asyncio.sleep(0.01)
        async with connection.transaction():
            for first in range(0, stage.messages, 10_000):
                count = min(10_000, stage.messages - first)
                await outbox.publish_many(connection, topic, [(f"k{n % _KEYS}", _VALUE) for n in range(count)])
        await connection.execute("ANALYZE sidings.outbox")
        started = _clock()
        relay.wake()
        while relay.metrics.count("sent", topic) < stage.messages or relay.backlog.held():
            await asyncio.sleep(0.002)
        return stage.messages / (_clock() - started)
    finally:
        await relay.stop()
        await outbox.close()
        await connection.close()


async def _deimos(stage: _Stage) -> float:
    topic = await stage.topic()
    connection = await asyncpg.connect(stage.dsn)
    try:
        await connection.execute(
            "INSERT INTO kafka_messages (topic, message, key) "
            "SELECT $1, $2, 'k' || n % $3 FROM generate_series(1, $4) n",
            topic,
            _VALUE,
            _KEYS,
            stage.messages,
        )
        await connection.execute("ANALYZE kafka_messages")
    finally:
        await connection.close()
    sender = Deimos(stage.dsn, stage.kafka)
    started = _clock()
    task = asyncio.create_task(sender.run())
    try:
        while sender.sent < stage.messages:
            await asyncio.sleep(0.002)
        return stage.messages / (_clock() - started)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# -- cost and delay --------------------------------------------------------------------------------------


async def _publish_cost(stage: _Stage, count: int = 3_000) -> dict[str, float]:
    """Seconds a message, in a transaction of 100 messages each, on one connection."""
    _, outbox = stage.relay()
    connection = await asyncpg.connect(stage.dsn)
    bare = "INSERT INTO bare_outbox (topic, key, value) VALUES ($1, $2, $3)"
    many = "INSERT INTO bare_outbox (topic, key, value) SELECT * FROM unnest($1::text[], $2::bytea[], $3::bytea[])"

    async def timed(step: Callable[[], Awaitable[object]], steps: int, messages: int) -> float:
        started = time.perf_counter()
        for first in range(0, steps, 100):
            async with connection.transaction():
                for _ in range(min(100, steps - first)):
                    await step()
        return (time.perf_counter() - started) / messages

    pairs = [(f"k{n}", _VALUE) for n in range(1_000)]
    columns = (["t"] * 1_000, [b"k%d" % n for n in range(1_000)], [_VALUE] * 1_000)
    try:
        return {
            "bare insert": await timed(lambda: connection.execute(bare, "t", b"k", _VALUE), count, count),
            "publish": await timed(lambda: outbox.publish(connection, "t", key=b"k", value=_VALUE), count, count),
            "bare insert of many": await timed(lambda: connection.execute(many, *columns), 20, 20_000),
            "publish_many": await timed(lambda: outbox.publish_many(connection, "t", pairs), 20, 20_000),
        }
    finally:
        await connection.execute("TRUNCATE sidings.outbox, bare_outbox")
        await connection.close()


async def _delay(stage: _Stage, count: int = 400, rate: float = 50.0) -> dict[str, dict[str, float]]:
    """Seconds from the commit to a consumer's having the message: committed by the relay's own process (which wakes
    it), and by another (which it polls for)."""
    return {
        "own commits": await _delays(stage, count, rate, wake=True),
        "others' commits": await _delays(stage, count, rate, wake=False),
    }


async def _delays(stage: _Stage, count: int, rate: float, *, wake: bool) -> dict[str, float]:
    topic = await stage.topic()
    relay, outbox = stage.relay()
    committed: dict[bytes, float] = {}
    arrived: dict[bytes, float] = {}
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=stage.kafka, auto_offset_reset="earliest", fetch_max_wait_ms=10
    )
    await consumer.start()
    await relay.start()
    connection = await asyncpg.connect(stage.dsn)

    async def consume() -> None:
        async for record in consumer:
            arrived[record.value or b""] = time.perf_counter()

    task = asyncio.create_task(consume())
    try:
        while len(relay.held) < 16:
            await asyncio.sleep(0.01)
        for n in range(count):
            value = b"%d" % n
            async with connection.transaction():
                await outbox.publish(connection, topic, key=f"k{n % 50}", value=value)
            committed[value] = time.perf_counter()
            if wake:
                relay.wake()
            await asyncio.sleep(1 / rate)
        while len(arrived) < count:
            await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await relay.stop()
        await consumer.stop()
        await outbox.close()
        await connection.close()
    delays = sorted(max(0.0, arrived[value] - committed[value]) for value in committed)
    return {
        "p50": round(delays[count // 2], 4),
        "p99": round(delays[int(count * 0.99)], 4),
        "max": round(delays[-1], 4),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.messages, arguments.rounds)), indent=2))


if __name__ == "__main__":
    main()

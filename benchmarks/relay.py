"""The relay beside a bare aiokafka producer and the Deimos algorithm; publish beside a bare INSERT; commit-to-topic
delay.

    python -m benchmarks.relay [--messages 100000] [--rounds 3]

All over one Postgres and one Kafka, in turns, so that what else the machine does hits all of them. `measure()` returns
the figures as a dict. Rates are messages a second; of several rounds the median counts.

Backlogs that are drained:

* ``one topic``         full batches of one topic
* ``many topics``       a hundred topics with a few messages each: a service that publishes all sorts of events
* ``open transaction``  one topic, while somebody's transaction (a backup, a report) keeps vacuum from its work; the
                        backlog is larger, as what such a transaction costs grows with what was deleted since it began

The bare producers show what the client library and the broker allow: message by message, and, faster, in whole batches,
which is as a relay sends.

The Deimos algorithm runs with one sender and with four, as its article says: "a specified number of threads".
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from prometheus_client import CollectorRegistry
from sidings.collector import relax_collector
from sidings.devstack import Endpoints, ensure
from sidings.devstack.databases import create_database, drop_database, ensure_template
from sidings.devstack.topics import create_topic, delete_topics
from sidings.executor import PostgresSettings
from sidings.kafka.outbox import Outbox, OutboxSettings, Relay
from sidings.kafka.settings import KafkaSettings

from .deimos import TABLES, Deimos
from .ours import until
from .server import open_transaction

__all__ = ["MANY", "measure"]

_PARTITIONS = 12
_KEYS = 1_000
_VALUE = b"x" * 200
_TOPICS = 100  # of "many topics"
_EACH = 100  # messages in each of them
_PAUSE_SECONDS = 0.002  # between looks whether all is done
MANY = _TOPICS * _EACH
_BARE = """CREATE TABLE bare_outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text, key bytea,
           value bytea, created_at timestamptz NOT NULL DEFAULT now())"""


class _Stage:
    """A database and topics of this run's own."""

    def __init__(self, dsn: str, kafka: str, messages: int, held: int) -> None:
        """held: messages while a transaction is left open."""
        self.dsn = dsn
        self.kafka = kafka
        self.messages = messages
        self.held = held
        self.topics: list[str] = []
        self.small: list[str] = []  # of one partition each

    async def topic(self, partitions: int = _PARTITIONS) -> str:
        """A new topic."""
        name = f"relay-benchmark-{time.time_ns()}-{len(self.topics)}"
        self.topics.append(name)
        await create_topic(self.kafka, name, partitions=partitions)
        return name

    def relay(self) -> tuple[Relay, Outbox]:
        """A relay with default settings."""
        postgres = PostgresSettings(dsn=self.dsn)
        relay = Relay(
            "benchmark", postgres, KafkaSettings(bootstrap=self.kafka), OutboxSettings(), prometheus=CollectorRegistry()
        )
        return relay, Outbox(postgres, wake=relay.wake)


async def measure(
    messages: int = 100_000, rounds: int = 3, endpoints: Endpoints | None = None, *, held: int | None = None
) -> dict[str, Any]:
    """All figures. messages: in each round; held: the same while a transaction is left open, default four times as
    many; rounds: of each variant, in turns."""
    ends = endpoints or await asyncio.to_thread(ensure)
    template = await ensure_template(ends.postgres, service="benchmark")
    dsn = await create_database(ends.postgres, f"relay_benchmark_{time.time_ns()}", template=template)
    stage = _Stage(dsn, ends.kafka, messages, held or 4 * messages)
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
            "bare producer, whole batches": _whole_batches,
            "relay": _relay,
            "deimos": _deimos,
            "many topics: relay": partial(_relay, many=True),
            "many topics: deimos": partial(_deimos, many=True),
            "many topics: deimos, 4 senders": partial(_deimos, many=True, senders=4),
            "open transaction: relay": partial(_relay, hold=True),
            "open transaction: deimos": partial(_deimos, hold=True),
        }
        for warm_up in (_bare_producer, _relay):  # a broker that has just been started is slow at first
            await warm_up(stage)
        for _ in range(rounds):
            for name, variant in variants.items():
                _cpu.clear()
                rates.setdefault(name, []).append(await variant(stage))
                count = _count(stage, many="many" in name, hold="open" in name)
                busy.setdefault(name, []).append((_cpu[-1] - _cpu[0]) / count * 1e6)
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
            "relay_to_whole_batches": round(median["relay"] / median["bare producer, whole batches"], 2),
            "relay_to_deimos": {
                "one topic": round(median["relay"] / median["deimos"], 2),
                "many topics": round(median["many topics: relay"] / median["many topics: deimos"], 2),
                "many topics, 4 senders": round(
                    median["many topics: relay"] / median["many topics: deimos, 4 senders"], 2
                ),
                "open transaction": round(median["open transaction: relay"] / median["open transaction: deimos"], 2),
            },
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


async def _whole_batches(stage: _Stage) -> float:
    """Batches of one partition each, packed while Kafka has those before: aiokafka's fastest public way."""
    topic = await stage.topic()
    async with AIOKafkaProducer(bootstrap_servers=stage.kafka, acks="all", max_batch_size=512 * 1024) as producer:
        await producer.partitions_for(topic)
        keys: list[list[bytes]] = [[] for _ in range(_PARTITIONS)]
        for n in range(_KEYS):
            keys[n % _PARTITIONS].append(b"k%d" % n)
        under_way: list[asyncio.Future[object]] = []
        started = _clock()
        for first in range(0, stage.messages, 10_000):
            sent: list[asyncio.Future[object]] = []
            for partition, of_partition in enumerate(keys):
                batch, share = (
                    producer.create_batch(),
                    range(partition, min(10_000, stage.messages - first), _PARTITIONS),
                )
                for n in share:
                    batch.append(timestamp=None, key=of_partition[n % len(of_partition)], value=_VALUE)
                if share:
                    batch.close()
                    sent.append(await producer.send_batch(batch, topic, partition=partition))
            await asyncio.gather(*under_way)
            under_way = sent
        await asyncio.gather(*under_way)
        return stage.messages / (_clock() - started)


def _count(stage: _Stage, *, many: bool, hold: bool = False) -> int:
    return MANY if many else stage.held if hold else stage.messages


async def _backlog(stage: _Stage, *, many: bool, hold: bool) -> dict[str, int]:
    """Topics, and how many messages wait for each."""
    if not many:
        return {await stage.topic(): _count(stage, many=many, hold=hold)}
    while len(stage.small) < _TOPICS:
        stage.small += await asyncio.gather(*(stage.topic(partitions=1) for _ in range(10)))
    return dict.fromkeys(stage.small, _EACH)


async def _relay(stage: _Stage, *, many: bool = False, hold: bool = False) -> float:
    backlog = await _backlog(stage, many=many, hold=hold)
    relay, outbox = stage.relay()
    connection = await asyncpg.connect(stage.dsn)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(connection.close)
        stack.push_async_callback(outbox.close)
        if hold:
            await stack.enter_async_context(open_transaction(stage.dsn))
        await relay.start()
        stack.push_async_callback(relay.stop)
        while len(relay.held) < 16:
            await asyncio.sleep(0.01)
        async with connection.transaction():
            for topic in backlog:  # the producer learns of the topics
                await outbox.publish(connection, topic, key="k", value=_VALUE)
        await until(lambda: _all_sent(relay, dict.fromkeys(backlog, 0)), pause=_PAUSE_SECONDS)
        async with connection.transaction():
            for topic, messages in backlog.items():
                for first in range(0, messages, 10_000):
                    count = min(10_000, messages - first)
                    await outbox.publish_many(connection, topic, [(f"k{n % _KEYS}", _VALUE) for n in range(count)])
        await connection.execute("ANALYZE sidings.outbox")
        started = _clock()
        relay.wake()
        await until(lambda: _all_sent(relay, backlog) and not _in_memory(relay), pause=_PAUSE_SECONDS)
        return sum(backlog.values()) / (_clock() - started)


def _in_memory(relay: Relay) -> int:
    return sum(len(lane.queue) + lane.unaccounted for lane in relay.backlog.lanes.values())


def _all_sent(relay: Relay, backlog: dict[str, int]) -> bool:
    return relay.metrics.count("sent") >= sum(backlog.values()) + len(backlog)  # and the first ones


async def _deimos(stage: _Stage, *, many: bool = False, hold: bool = False, senders: int = 1) -> float:
    backlog = await _backlog(stage, many=many, hold=hold)
    connection = await asyncpg.connect(stage.dsn)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(connection.close)
        if hold:
            await stack.enter_async_context(open_transaction(stage.dsn))
        await connection.executemany(_FILL, [(topic, _VALUE, _KEYS, count) for topic, count in backlog.items()])
        await connection.execute("ANALYZE kafka_messages")
        running, begin = [Deimos(stage.dsn, stage.kafka) for _ in range(senders)], asyncio.Event()
        stack.push_async_callback(
            _cancelled, [asyncio.create_task(sender.run(begin, list(backlog))) for sender in running]
        )
        for sender in running:
            await sender.ready.wait()
        started = _clock()
        begin.set()
        while sum(sender.sent for sender in running) < sum(backlog.values()):
            await asyncio.sleep(0.002)
        return sum(backlog.values()) / (_clock() - started)


_FILL = "INSERT INTO kafka_messages (topic, message, key) SELECT $1, $2, 'k' || n % $3 FROM generate_series(1, $4) n"


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- cost and delay --------------------------------------------------------------------------------------


async def _publish_cost(stage: _Stage) -> dict[str, float]:
    """Seconds a message, in a transaction of 100 messages each, on one connection."""
    count = 3_000
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
    it), and by another (which it polls for); and with the Deimos algorithm, which pauses for half a second."""
    relay, outbox = stage.relay()
    connection = await asyncpg.connect(stage.dsn)

    async def publish(topic: str, key: str, value: bytes) -> None:
        await outbox.publish(connection, topic, key=key, value=value)

    async def insert(topic: str, key: str, value: bytes) -> None:
        insert = "INSERT INTO kafka_messages (topic, message, key) VALUES ($1, $2, $3)"
        await connection.execute(insert, topic, value, key)

    await relay.start()
    try:
        while len(relay.held) < 16:
            await asyncio.sleep(0.01)
        found = {
            "own commits": await _delays(stage, connection, publish, count, rate, relay.wake),
            "others' commits": await _delays(stage, connection, publish, count, rate, lambda: None),
        }
    finally:
        await relay.stop()
        await outbox.close()
    task = asyncio.create_task(Deimos(stage.dsn, stage.kafka).run())
    try:
        found["deimos"] = await _delays(stage, connection, insert, count, rate, lambda: None)
    finally:
        await _cancelled([task])
        await connection.close()
    return found


async def _delays(
    stage: _Stage,
    connection: asyncpg.Connection,
    publish: Callable[[str, str, bytes], Awaitable[None]],
    count: int,
    rate: float,
    committed_one: Callable[[], None],
) -> dict[str, float]:
    topic = await stage.topic()
    committed: dict[bytes, float] = {}
    arrived: dict[bytes, float] = {}
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=stage.kafka, auto_offset_reset="earliest", fetch_max_wait_ms=10
    )
    await consumer.start()

    async def consume() -> None:
        async for record in consumer:
            arrived[record.value or b""] = time.perf_counter()

    task = asyncio.create_task(consume())
    try:
        async with connection.transaction():  # the producer learns of the topic
            await publish(topic, "k", b"first")
        committed_one()
        await until(lambda: bool(arrived), pause=_PAUSE_SECONDS)
        arrived.clear()
        for n in range(count):
            value = b"%d" % n
            async with connection.transaction():
                await publish(topic, f"k{n % 50}", value)
            committed[value] = time.perf_counter()
            committed_one()
            await asyncio.sleep(1 / rate)
        await until(lambda: len(arrived) >= count, pause=_PAUSE_SECONDS)
    finally:
        await _cancelled([task])
        await consumer.stop()
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
    relax_collector()  # as `python -m benchmarks` does, for all variants
    print(json.dumps(asyncio.run(measure(arguments.messages, arguments.rounds)), indent=2))


if __name__ == "__main__":
    main()

"""What the tests of the consumer and the service share: producing, a service with quick settings, its metrics."""

import asyncio
from collections.abc import Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, RecordsToDelete
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sidings import ExecutorSettings, KafkaSettings, Retry, Service
from sidings.devstack import DevstackError
from sidings.devstack.topics import create_topic, delete_topics
from tenacity import stop_after_attempt, wait_none

from .support import SECONDS, connected, fetch, value

EFFECTS = """
    CREATE TABLE effect (
        id bigserial, topic text, partition int, "offset" bigint, key text, number int,
        via text NOT NULL DEFAULT 'message'
    )
"""
TWICE_AND_PARK = Retry(wait=wait_none(), stop=stop_after_attempt(2))


class Number(BaseModel):
    """The value of most test messages."""

    n: int


class Unshowable(Exception):
    """An error that fails when it is asked for its text, as one does that looks for what it was not given."""

    def __str__(self) -> str:
        return self.response.text  # type: ignore[attr-defined]

    __repr__ = __str__


async def made_anew(kafka: str, name: str, partitions: int = 1) -> None:
    """Another topic of this name."""
    await delete_topics(kafka, [name])
    async with asyncio.timeout(SECONDS):
        while True:  # the name is free a moment after the answer
            try:
                return await create_topic(kafka, name, partitions=partitions)
            except DevstackError:
                await asyncio.sleep(0.1)


def a_service(
    dsn: Any, kafka: Any = None, *, name: str = "test", executor: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A service with quick settings that never ends the process of the test, and a Prometheus registry of its own as
    `service.samples`."""
    if isinstance(kafka, str):
        kafka = KafkaSettings(bootstrap=kafka, **options.pop("settings", {"fetch_seconds": 0.05}))
    registry = CollectorRegistry()
    quick = {"poll_seconds": 0.02, "shutdown_seconds": 3.0, "lease_seconds": 3.0, "exit_when_fenced": False}
    settings = ExecutorSettings(**quick | (executor or {}))
    service: Any = Service(name, postgres=dsn, kafka=kafka, prometheus=registry, executor=settings, **options)
    service.samples = registry
    return service


@contextmanager
def impatient(transactions: Any) -> Generator[None]:
    """Who finds no place is soon told so. To be set when a connection has been opened, which may take longer."""
    patient = transactions.settings
    transactions.settings = patient.model_copy(update={"connect_seconds": 0.4})
    try:
        yield
    finally:
        transactions.settings = patient


def sample(service: Any, name: str, **labels: str) -> float:
    """The sum of a metric over all labels that are not given."""
    found = [s for family in service.samples.collect() for s in family.samples if s.name == name]
    return sum(s.value for s in found if labels.items() <= s.labels.items())


@asynccontextmanager
async def producing(bootstrap: str, **options: Any):
    """A producer."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **{"acks": "all"} | options)
    await asyncio.wait_for(producer.start(), SECONDS)
    try:
        yield producer
    finally:
        await producer.stop()


def as_json(number: int) -> bytes:
    return Number(n=number).model_dump_json().encode()


async def produce(
    bootstrap: str, topic: str, numbers: Iterable[int], *, key: str | None = "k", partition: int = 0
) -> None:
    """Send numbers, in order, to one partition."""
    async with producing(bootstrap) as producer:
        raw = None if key is None else key.encode()
        sent = [await producer.send(topic, as_json(n), key=raw, partition=partition) for n in numbers]
        await asyncio.wait_for(asyncio.gather(*sent), SECONDS)


async def produce_raw(bootstrap: str, topic: str, *values: bytes | None, partition: int = 0, **options: Any) -> None:
    """Send values as they are, in order, to one partition."""
    async with producing(bootstrap) as producer:
        for raw in values:
            await asyncio.wait_for(producer.send_and_wait(topic, raw, partition=partition, **options), SECONDS)


@asynccontextmanager
async def administering(bootstrap: str):
    """A client for what persons do with topics, groups and rights."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def delete_records(bootstrap: str, topic: str, before: int, partitions: int = 1) -> None:
    """As retention does: all records below `before`; -1: all that there are."""
    async with administering(bootstrap) as admin:
        bound = RecordsToDelete(before_offset=before)
        await admin.delete_records({TopicPartition(topic, number): bound for number in range(partitions)})


async def add_partitions(bootstrap: str, topic: str, count: int) -> None:
    """Give a topic `count` partitions."""
    async with administering(bootstrap) as admin:
        await admin.create_partitions({topic: NewPartitions(total_count=count)})


async def effects_table(dsn: str) -> None:
    """The table that handlers write to."""
    async with connected(dsn) as connection:
        await connection.execute(EFFECTS)


async def limit_statements(dsn: str, seconds: float) -> None:
    """For all that later sessions ask, as a role or a database may have it."""
    async with connected(dsn) as connection:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE \"{name}\" SET statement_timeout = '{seconds}s'")


async def record(message: Any, tx: Any, via: str = "message") -> None:
    """What most handlers do: one row per message."""
    key = None if message.key is None else message.key.decode()
    await tx.execute(
        'INSERT INTO effect (topic, partition, "offset", key, number, via) VALUES ($1, $2, $3, $4, $5, $6)',
        *(message.topic, message.partition, message.offset, key, message.value.n, via),
    )


async def numbers(dsn: str, where: str = "true") -> list[int]:
    """The numbers that handlers have recorded, in order."""
    return [row["number"] for row in await fetch(dsn, f"SELECT number FROM effect WHERE {where} ORDER BY id")]


async def stored_offsets(dsn: str) -> dict[tuple[str, int], int]:
    """The stored offsets, by topic and partition."""
    rows = await fetch(dsn, "SELECT topic, partition, next_offset FROM sidings.consumer_offset")
    return {(row["topic"], row["partition"]): row["next_offset"] for row in rows}


def offset_reaches(dsn: str, topic: str, offset: int, partition: int = 0):
    """A condition: the stored offset has got so far."""

    async def reached() -> bool:
        query = "SELECT next_offset FROM sidings.consumer_offset WHERE topic = $1 AND partition = $2"
        return (await value(dsn, query, topic, partition) or -1) >= offset

    return reached

"""Kafka messages through a consumer: with nothing to do, with a job for each, and with jobs by the batch."""

import asyncio
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Literal

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from prometheus_client import CollectorRegistry
from sidings import Job, Message, PostgresSettings, Service, Transaction
from sidings.devstack.topics import create_topic
from sidings.jobs import OutcomeName

from .. import ours
from ..ours import Payload
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []

PARTITIONS = 16

Call = Literal["enqueue", "enqueue_many", "add"] | None

_filled: dict[tuple[str, int], str] = {}  # topics, by broker and number of messages: the variants read the same


async def _topic(bench: Bench, messages: int) -> tuple[str, str]:
    """Bootstrap servers, and a topic that holds so many messages."""
    assert bench.kafka is not None
    name = _filled.get((bench.kafka, messages))
    if name is None:
        name = f"bench-{token_hex(3)}"
        await create_topic(bench.kafka, name, partitions=PARTITIONS)
        async with AIOKafkaProducer(bootstrap_servers=bench.kafka, linger_ms=20) as producer:
            for number in range(messages):
                value = Payload(number=number, text=ours.TEXT).model_dump_json().encode()
                await producer.send(name, value, key=f"g{number % 1000}".encode())
        _filled[bench.kafka, messages] = name
    return bench.kafka, name


def _service(dsn: str, bootstrap: str, topic: str, *, call: Call, batch: int | None) -> Service:
    service = Service(ours.SERVICE, postgres=PostgresSettings(dsn=dsn), kafka=bootstrap, prometheus=CollectorRegistry())

    @service.job(group=lambda payload: f"g{payload.number % 1000}")
    async def work(job: Job[Payload]) -> None:
        pass

    if batch is not None:

        @service.consumer(topic, batch=batch)
        async def _by_batch(messages: list[Message[Payload]], tx: Transaction) -> None:
            await work.enqueue_many(tx, [message.value for message in messages])
    else:

        @service.consumer(topic)
        async def _one(message: Message[Payload], tx: Transaction) -> None:
            if call == "enqueue":
                await work.enqueue(tx, message.value)
            elif call == "add":
                await work.add(tx, message.value)

    return service


async def _consume(bench: Bench, messages: int, call: Call, *, batch: int | None = None) -> Figures:
    bootstrap, topic = await _topic(bench, messages)
    dsn = await ours.fresh(bench)
    connection = await asyncpg.connect(dsn)
    service = _service(dsn, bootstrap, topic, call=call, batch=batch)
    await bench.meter.start()
    async with service:
        if call is not None:
            count: Callable[[OutcomeName], int] = service.executor.metrics.count
            await ours.until(lambda: count(OutcomeName.SUCCEEDED) >= messages)
        else:
            while await connection.fetchval("SELECT sum(next_offset) FROM sidings.consumer_offset") != messages:
                await asyncio.sleep(0.01)
        reading = await bench.meter.stop()
    await connection.close()
    return reading.per_job(messages, rate="messages")


async def _floor(bench: Bench, messages: int) -> Figures:
    bootstrap, topic = await _topic(bench, messages)
    await bench.meter.start()
    async with AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=f"floor-{token_hex(3)}",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    ) as consumer:
        seen = 0
        while seen < messages:
            seen += sum(len(found) for found in (await consumer.getmany(timeout_ms=1_000)).values())
    return (await bench.meter.stop()).per_job(messages, rate="messages")


@scenario(
    "consumer",
    "Messages of 16 partitions through a consumer with its offsets in Postgres, one process",
    key="messages",
    compare=[
        Compare("sidings, no job", target=20_000),
        Compare("sidings, a job each in batches", target=20_000),
        Compare("sidings, a job each, added", target=20_000),
        Compare("sidings, no job", "floor: aiokafka alone"),
        Compare("sidings, a job each", "sidings, no job"),
        Compare("sidings, a job each in batches", "sidings, no job"),
        Compare("sidings, a job each, added", "sidings, a job each in batches"),
    ],
    note="The whole path, from the service's start: joining the group (a fixed cost: the rate of a longer topic is "
    "higher), poll, transaction, offset; with jobs: until the last of them has run and its outcome is committed. "
    "The floor polls and does nothing. Other cores' work includes the broker's. The target of 20,000 messages/s "
    "is that of a consumer in batches, with or without a job for each message.",
    kafka=True,
)
def consumer(size: Size) -> Sequence[Variant]:
    messages = size.jobs(200_000)
    few = size.jobs(50_000)
    return [
        Variant("floor: aiokafka alone", lambda b: _floor(b, messages), {"messages": messages}),
        Variant("sidings, no job", lambda b: _consume(b, messages, None), {"messages": messages}),
        Variant(
            "sidings, a job each in batches",
            lambda b: _consume(b, messages, "enqueue_many", batch=500),
            {"messages": messages, "batch": 500},
        ),
        Variant("sidings, a job each, added", lambda b: _consume(b, messages, "add"), {"messages": messages}),
        Variant("sidings, a job each", lambda b: _consume(b, few, "enqueue"), {"messages": few}),
    ]

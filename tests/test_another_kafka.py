"""A service moves to another cluster, to which its topics are mirrored, as docs/operations.md says."""

from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from sidings import Message, Transaction
from sidings.devstack.topics import create_topic

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    delete_records,
    numbers,
    offset_reaches,
    produce,
    record,
)
from .guide import run
from .outbox_support import records
from .support import eventually, jobs_left


async def mirror(topic: str, former: str, new: str) -> None:
    """As MirrorMaker does: what the former one still has."""
    producer = AIOKafkaProducer(bootstrap_servers=new, acks="all")
    await producer.start()
    try:
        for found in await records(former, topic):
            await producer.send_and_wait(topic, found.value, key=found.key, partition=found.partition)
    finally:
        await producer.stop()


@pytest.mark.chaos
async def test_offsets_that_are_reset_before_anything_is_produced_pass_over_and_repeat_nothing(effects, own_kafka):
    former, new = own_kafka().bootstrap, own_kafka().bootstrap
    mended = False
    for kafka in (former, new):
        await create_topic(kafka, "rides", partitions=2)

    def consuming(kafka: str) -> Any:
        service = a_service(effects, kafka)

        @service.consumer("rides", model=Number, retry=TWICE_AND_PARK)
        async def on_ride(message: Message[Number], tx: Transaction) -> None:
            if message.key == b"bad" and not mended:
                raise RuntimeError("not yet")
            await record(message, tx)

        return service

    await produce(former, "rides", range(-9, 0))
    await delete_records(former, "rides", 9)  # by retention, before the mirror began
    await produce(former, "rides", range(5))
    await produce(former, "rides", range(20, 23), key="bad", partition=1)
    async with consuming(former), consuming(former):
        await eventually(offset_reaches(effects, "rides", 14))
        await eventually(offset_reaches(effects, "rides", 3, partition=1))
    handled = await numbers(effects, "key = 'k'")
    assert handled[-5:] == list(range(5))
    await mirror("rides", former, new)
    service = consuming(new)
    async with service:
        await eventually(lambda: sum("belongs to another topic of this name" in p for p in service.problems()))
    service = consuming(new)
    names = run("operations.md", "Another Kafka", service=service)
    await names["go_on_in_the_new_cluster"](["rides"])
    await produce(new, "rides", range(5, 12))
    await produce(new, "rides", range(23, 26), key="bad", partition=1)
    async with consuming(new), consuming(new):
        await eventually(offset_reaches(effects, "rides", 12))
        await eventually(offset_reaches(effects, "rides", 6, partition=1))
        assert await jobs_left(effects) == 6
        mended = True

        async def done() -> bool:
            return await jobs_left(effects) == 0

        await eventually(done, seconds=60)
    assert await numbers(effects, "key = 'k'") == [*handled, *range(5, 12)]
    assert await numbers(effects, "key = 'bad'") == list(range(20, 26))

"""Stateless consumers whose topic was made anew, and who did not see it at once; offsets that a mirror translates."""

import asyncio
import threading
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from sidings import Message, Retry
from sidings.kafka.stateless_offsets import note_of
from tenacity import stop_after_attempt, wait_chain, wait_fixed, wait_none

from .consumer_support import Number, a_service, produce, sample
from .support import eventually
from .test_topic_ids import made_anew


def made_anew_at_once(kafka: str, name: str, numbers: Iterable[int]) -> None:
    """With these in it. The loop stands still for a moment, as that of a process that is paused."""

    async def work() -> None:
        await made_anew(kafka, name)
        await produce(kafka, name, numbers)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    thread.join()


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_a_stateless_consumer_misses_nothing_of_a_topic_that_was_made_anew_under_it(start, topic, sidings_kafka):
    """It had grown past the position: what stood in front was never handled."""
    name, dead_letters = await topic(), await topic()
    handled = []
    service = a_service(None, sidings_kafka, name="stateless", settings={"fetch_seconds": 0.05, "group": name})

    @service.consumer(name, model=Number, stateless=True, dead_letter=dead_letters, start=start)
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    async with service:
        [partition] = await eventually(lambda: service._life.consumer._stateless.partitions.values())
        await eventually(lambda: partition.placed)
        await produce(sidings_kafka, name, range(3))
        await eventually(lambda: len(handled) == 3)
        made_anew_at_once(sidings_kafka, name, range(10, 16))
        await eventually(lambda: set(handled) >= set(range(10, 16)), lambda: handled)


async def test_nor_does_the_next_instance_where_one_has_committed_into_the_new_topic_at_its_end(
    topic, sidings_kafka, monkeypatch
):
    """What it had under way was the former one's, and it ended before it looked."""
    monkeypatch.setattr("sidings.kafka.topic_ids._LOOK_SECONDS", 3_600.0)
    name, dead_letters = await topic(), await topic()
    handled, under_way, go_on = [], asyncio.Event(), asyncio.Event()

    def consuming():
        service = a_service(None, sidings_kafka, name="stateless", settings={"fetch_seconds": 0.05, "group": name})

        @service.consumer(name, model=Number, stateless=True, dead_letter=dead_letters)
        async def handle(message: Message[Number]) -> None:
            if message.value.n == 2:
                under_way.set()
                await go_on.wait()
            handled.append(message.value.n)

        return service

    await produce(sidings_kafka, name, range(3))
    async with consuming():
        await eventually(under_way.is_set)
        await made_anew(sidings_kafka, name)
        await produce(sidings_kafka, name, range(10, 16))
        go_on.set()
    async with consuming():
        await eventually(lambda: handled == [*range(3), *range(10, 16)], lambda: handled)


async def test_what_has_failed_of_a_topic_that_was_made_anew_counts_for_none_of_its_messages(
    topic, sidings_kafka, monkeypatch
):
    """The partition counted as held up until the new one had got so far; and the message that stood there then was a
    dead letter after its first failure."""
    monkeypatch.setattr("sidings.kafka.topic_ids._LOOK_SECONDS", 0.1)
    name, dead_letters, tried = await topic(), await topic(), list[int]()
    service = a_service(None, sidings_kafka, name="stateless", settings={"fetch_seconds": 0.05, "group": name})
    retry = Retry(wait=wait_chain(wait_none(), wait_fixed(600)), stop=stop_after_attempt(3))

    @service.consumer(name, model=Number, stateless=True, retry=retry, dead_letter=dead_letters)
    async def handle(message: Message[Number]) -> None:
        tried.append(message.value.n)
        if message.value.n == 2 or tried.count(12) == 1:
            raise ConnectionError

    async with service:
        [partition] = await eventually(lambda: service._life.consumer._stateless.partitions.values())
        await eventually(lambda: partition.placed)
        await produce(sidings_kafka, name, range(3))
        await eventually(lambda: sample(service, "sidings_consumer_retries_total") == 2)
        assert sample(service, "sidings_consumer_paused_partitions") == 1
        made_anew_at_once(sidings_kafka, name, [10])
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 3)
        assert service._life.consumer._stateless.partitions[partition.tp] is partition
        assert sample(service, "sidings_consumer_paused_partitions") == 0
        await produce(sidings_kafka, name, [11, 12])
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 5)
        assert sample(service, "sidings_consumer_messages_total", result="handled") == 5
    assert tried == [0, 1, 2, 2, 10, 11, 12, 12]


@pytest.mark.parametrize("stateless", [True, False], ids=["stateless", "committed"])
async def test_translated_offsets_count_once_they_are_committed_without_the_former_topics_id(
    stateless, effects, topic, sidings_kafka, caplog
):
    """Mirrors copy the id with the offset. `kafka-consumer-groups --reset-offsets --to-current` leaves it out."""
    handled = list[int]()

    async def on_number(message: Message[Number], *_: object) -> None:
        handled.append(message.value.n)

    async def began(mend: bool) -> int:
        name = await topic()
        await produce(sidings_kafka, name, range(5))
        client = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, group_id=name, enable_auto_commit=False)
        await client.start()
        try:
            client.assign([tp := TopicPartition(name, 0)])
            await client.commit({tp: (3, note_of(uuid4()))})
            if mend:
                await client.commit({tp: 3})
        finally:
            await client.stop()
        handled.clear()
        settings = {"fetch_seconds": 0.05, "group": name}
        service = a_service(None if stateless else effects, sidings_kafka, settings=settings)
        options: dict[str, Any] = {"stateless": True, "dead_letter": "dead"} if stateless else {"start": "committed"}
        service.consumer(name, model=Number, **options)(on_number)
        async with service:
            await eventually(lambda: 4 in handled)
        return handled[0]

    assert await began(mend=False) == 0
    assert ("/0 (3) are of another" if stateless else "/0: the committed offset 3 is of another") in caplog.text
    assert "docs/operations.md, Another Kafka" in caplog.text
    assert await began(mend=True) == 3

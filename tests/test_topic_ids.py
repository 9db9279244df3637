"""A topic that was deleted and made anew has the same name: nothing of it is taken for a part of the old one."""

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaConnectionError
from sidings import Admin, Message, Transaction
from sidings.kafka import topic_ids
from sidings.kafka.partition import Partition, State

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    made_anew,
    numbers,
    offset_reaches,
    produce,
    record,
    sample,
)
from .guide import perform
from .support import connected, eventually, jobs_left, value


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("sidings.kafka.placing._REFUSED_SECONDS", 0.1)
    monkeypatch.setattr("sidings.kafka.topic_ids._LOOK_SECONDS", 0.1)


def consuming(effects, kafka, name):
    service = a_service(effects, kafka, settings={"fetch_seconds": 0.05, "metadata_seconds": 0.5})
    service.consumer(name, model=Number)(record)
    return service


@asynccontextmanager
async def refusing(service, name):
    """Run the service, which refuses the partition."""
    async with service:
        why = f"{name}/0: the stored offset 3 belongs to another topic of this name"
        await eventually(lambda: any(why in problem for problem in service.problems()))
        yield


async def test_where_the_new_log_has_grown_past_the_stored_offset_nothing_is_passed_over(effects, topic, sidings_kafka):
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    async with consuming(effects, sidings_kafka, name):
        await eventually(offset_reaches(effects, name, 3))
    await made_anew(sidings_kafka, name)
    await produce(sidings_kafka, name, range(10, 16))
    service = consuming(effects, sidings_kafka, name)
    async with refusing(service, name):
        assert await numbers(effects) == [0, 1, 2]
        assert sample(service, "sidings_consumer_stopped_partitions") == 1
        await service.reset_offsets(name, "earliest", actor="alice")
        await eventually(offset_reaches(effects, name, 6))
        assert service.problems() == []
        assert sample(service, "sidings_consumer_stopped_partitions") == 0
    assert await numbers(effects) == [0, 1, 2, *range(10, 16)]


async def test_it_is_noticed_under_a_running_consumer(effects, topic, sidings_kafka):
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    service = consuming(effects, sidings_kafka, name)
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        await made_anew(sidings_kafka, name)
        why = f"{name}/0: the stored offset 3 belongs to another topic of this name"
        await eventually(lambda: any(why in problem for problem in service.problems()))
        await produce(sidings_kafka, name, range(10, 16))
        async with connected(effects) as connection:
            await connection.execute("DELETE FROM sidings.consumer_offset")
        await eventually(offset_reaches(effects, name, 6))
    assert await numbers(effects) == [0, 1, 2, *range(10, 16)]


async def test_where_all_offsets_are_the_same_a_person_says_so(effects, topic, sidings_kafka):
    """As after a move to a cluster that has copied the topic with its offsets."""
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    async with consuming(effects, sidings_kafka, name):
        await eventually(offset_reaches(effects, name, 3))
    await made_anew(sidings_kafka, name)
    await produce(sidings_kafka, name, range(5))
    async with refusing(consuming(effects, sidings_kafka, name), name), connected(effects) as connection:
        await connection.execute("UPDATE sidings.consumer_offset SET topic_id = NULL WHERE topic = $1", name)
        await eventually(offset_reaches(effects, name, 5))
        assert await value(effects, "SELECT topic_id IS NOT NULL FROM sidings.consumer_offset")
    assert await numbers(effects) == [0, 1, 2, 3, 4]


async def test_a_reset_cancels_what_is_parked_of_a_topic_that_was_copied(effects, topic, sidings_kafka):
    """It is delivered again, and would be handled twice."""
    name = await topic()
    mended = False

    def service():
        service = a_service(effects, sidings_kafka)

        @service.consumer(name, model=Number, retry=TWICE_AND_PARK)
        async def on_number(message: Message[Number], tx: Transaction) -> None:
            if message.value.n == 1 and not mended:
                raise RuntimeError("not yet")
            await record(message, tx)

        return service

    await produce(sidings_kafka, name, range(3))
    async with service():
        await eventually(offset_reaches(effects, name, 3))
    assert await jobs_left(effects) == 2
    async with connected(effects) as connection:
        await Admin(connection, actor="alice").discard(await connection.fetchval("SELECT max(id) FROM sidings.job"))
    await made_anew(sidings_kafka, name)
    await produce(sidings_kafka, name, range(3))
    await perform(effects, "Another Kafka", positions=name)
    async with service():
        await eventually(lambda: value(effects, "SELECT topic_id IS NOT NULL FROM sidings.consumer_offset"))
    mended = True
    [reset] = await service().reset_offsets(name, 1, partitions=[0], actor="alice")
    assert reset.cancelled == 1
    async with service():
        await eventually(offset_reaches(effects, name, 3))
        assert (await numbers(effects), await jobs_left(effects)) == ([0, 1, 2], 0)
    async with connected(effects) as connection:
        assert await Admin(connection).requeueable() == []


async def test_a_reset_cancels_no_parked_message_of_the_former_topic(effects, topic, sidings_kafka):
    """It would not be delivered again."""
    name = await topic()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "metadata_seconds": 0.5})

    async def refuse(message, tx):
        if message.value.n == 1:
            raise RuntimeError("not yet")
        await record(message, tx)

    service.consumer(name, model=Number, retry=TWICE_AND_PARK)(refuse)
    await produce(sidings_kafka, name, [1])
    async with service:
        await eventually(offset_reaches(effects, name, 1))
        await made_anew(sidings_kafka, name)
        [reset] = await service.reset_offsets(name, "earliest", actor="alice")
        assert reset.cancelled == 0
        await produce(sidings_kafka, name, [2], key="other")
        await eventually(lambda: numbers(effects))
        assert await value(effects, "SELECT count(*) FROM sidings.job WHERE type = $1", f"message:{name}") == 1
    assert await numbers(effects, "number = 2")


async def test_a_stateless_consumer_starts_over_since_its_offsets_have_gone_with_the_topic(topic, sidings_kafka):
    name, dead_letters = await topic(), await topic()
    handled = []

    def stateless():
        service = a_service(None, sidings_kafka, name="stateless", settings={"fetch_seconds": 0.05})

        @service.consumer(name, model=Number, stateless=True, dead_letter=dead_letters)
        async def handle(message: Message[Number]) -> None:
            handled.append(message.value.n)

        return service

    await produce(sidings_kafka, name, range(3))
    async with stateless():
        await eventually(lambda: len(handled) == 3)
    await made_anew(sidings_kafka, name)
    await produce(sidings_kafka, name, range(10, 16))
    async with stateless():
        await eventually(lambda: len(handled) == 9)
    assert handled == [0, 1, 2, *range(10, 16)]


@pytest.mark.parametrize("then", ["ordinary", "stateless"])
async def test_what_lag_tools_are_told_of_the_former_topic_is_no_place_to_begin_in_the_new_one(
    then, effects, topic, sidings_kafka, monkeypatch
):
    """Until the consumer looks at the id, it commits into the new topic: what stands before would be passed over."""
    monkeypatch.setattr("sidings.kafka.topic_ids._LOOK_SECONDS", 3_600.0)
    name, handled = await topic(), list[int]()
    settings = {"fetch_seconds": 0.05, "group": name}
    service = a_service(effects, sidings_kafka, settings=settings)
    service.consumer(name, model=Number, start="committed")(record)

    def meanwhile() -> None:
        asyncio.run(made_anew(sidings_kafka, name))
        asyncio.run(produce(sidings_kafka, name, range(10, 16)))

    await produce(sidings_kafka, name, range(3))
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()  # the loop stands still for a moment, as that of a process that is paused
        await eventually(offset_reaches(effects, name, 6))
    client = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, group_id=name, enable_auto_commit=False)
    await client.start()
    try:
        assert await client.committed(TopicPartition(name, 0)) == 6
    finally:
        await client.stop()
    assert await numbers(effects) == [0, 1, 2, 13, 14, 15]
    async with connected(effects) as connection:
        await connection.execute("DELETE FROM sidings.consumer_offset; DELETE FROM effect")
    service = a_service(effects if then == "ordinary" else None, sidings_kafka, settings=settings)
    if then == "ordinary":
        service.consumer(name, model=Number, start="committed")(record)
    else:

        @service.consumer(name, model=Number, stateless=True, dead_letter="dead")
        async def handle(message: Message[Number]) -> None:
            handled.append(message.value.n)

    await produce(sidings_kafka, name, [16])
    async with service:
        await eventually(offset_reaches(effects, name, 7) if then == "ordinary" else lambda: 16 in handled)
    assert (handled or await numbers(effects)) == [*range(10, 17)]


async def test_brokers_that_know_no_ids_are_read_as_before(effects, topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr(topic_ids._MetadataRequestV10, "API_VERSION", 99)
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    async with consuming(effects, sidings_kafka, name):
        await eventually(offset_reaches(effects, name, 3))
    assert await value(effects, "SELECT topic_id IS NULL FROM sidings.consumer_offset")


class Broker:
    """What it tells of topics, once it leads some of their partitions, and after `failures`."""

    def __init__(self, ids: dict[str, UUID], *failures: Exception) -> None:
        self.cluster = self._client = self  # what a client has
        self.ids, self.failures = ids, list(failures)
        self.leads, self.looks, self.asked = False, 0, 0

    def leader_for_partition(self, tp: TopicPartition) -> int | None:
        self.looks += 1
        return {"lost": -1, "unknown": None}.get(tp.topic, 1 if self.leads else -1)

    async def send(self, node: int, request: Any) -> Any:
        assert node == 1
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        known = [topic for topic in request._topics if topic in self.ids]
        return SimpleNamespace(topics=[(0, topic, self.ids[topic], False, 1) for topic in known])

    def partitions_for_topic(self, _: str) -> set[int]:
        return {0}


async def test_only_partitions_whose_topic_is_known_to_be_another_are_displaced_and_once(monkeypatch):
    """Whatever a broker answers meanwhile: what came out of the watch would end the consumer's connection."""
    monkeypatch.setattr(topic_ids, "_LOOK_SECONDS", 0.01)
    names = ("another", "the same", "adopted", "gone", "lost", "refused", "unplaced", "unknown")
    partitions = {TopicPartition(name, 0): Partition(TopicPartition(name, 0)) for name in names}
    for tp, partition in partitions.items():
        partition.state = {"refused": State.REFUSED, "unplaced": State.UNPLACED}.get(tp.topic, State.READY)
    stored = {tp: uuid4() for tp in partitions if tp.topic != "adopted"}
    now = {name: uuid4() for name in names if name != "gone"}
    now["the same"] = stored[TopicPartition("the same", 0)]
    broker: Any = Broker(now, KafkaConnectionError("away"), TimeoutError(), OSError("unreachable"))
    displaced = list[str]()

    def displace(found: Any) -> None:
        for partition in found:
            displaced.append(partition.tp.topic)
            partition.enter(State.REFUSED)  # as it is placed

    watching = asyncio.create_task(topic_ids.TopicIdWatch(broker, partitions, stored.get, displace).run())
    await eventually(lambda: broker.looks > 2 * len(names) or watching.done())
    broker.leads = True
    await eventually(lambda: broker.asked >= 6 or watching.done())
    assert not watching.done()
    watching.cancel()
    assert displaced == ["another", "lost", "unknown"]

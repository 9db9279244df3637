"""A topic is deleted and made anew with fewer partitions: keys move, as when it grows, and stay behind what waits."""

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from sidings.kafka import partition_for
from sidings.kafka.topic_ids import ask_topic_ids, ask_topics

from .consumer_support import TWICE_AND_PARK, Number, a_service, made_anew, numbers, produce, record
from .support import eventually, fetch, value

OLD, NEW = 3, 2
# Of a partition that is gone, and of one that is there still; both are in the other one now.
PLACES = {f"k{n}": tuple(partition_for(f"k{n}".encode(), count) for count in (OLD, NEW)) for n in range(99)}
GONE, KEPT = (next(key for key, places in PLACES.items() if places == (was, 1)) for was in (2, 0))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("sidings.kafka.placing._REFUSED_SECONDS", 0.1)
    monkeypatch.setattr("sidings.kafka.topic_ids._LOOK_SECONDS", 0.1)
    monkeypatch.setattr("sidings.kafka.topics._ANNOUNCE_SECONDS", 1.5)


@pytest.mark.parametrize("running", [True, False])
async def test_messages_stay_behind_the_parked_ones_of_their_key(effects, topic, sidings_kafka, running):
    name = await topic(partitions=OLD)

    def consuming():
        service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "metadata_seconds": 0.5})

        async def refuse(message, tx):
            if message.value.n == 1:
                raise RuntimeError("not yet")
            await record(message, tx)

        service.consumer(name, model=Number, retry=TWICE_AND_PARK)(refuse)
        return service

    async def send(number, partitions, *keys):
        for key in keys:
            await produce(sidings_kafka, name, [number], key=key, partition=partition_for(key.encode(), partitions))

    parked = f"SELECT count(*) FROM sidings.job WHERE type = 'message:{name}'"
    await send(1, OLD, GONE, KEPT)
    service = consuming()
    async with service:
        await eventually(lambda: value(effects, f"SELECT ({parked}) = 2"))
        if running:
            await made_anew(sidings_kafka, name, NEW)
            await eventually(lambda: any("another topic of this name" in problem for problem in service.problems()))
            await service.reset_offsets(name, "earliest", actor="alice")
            await send(2, NEW, GONE, KEPT, "other")
            await eventually(lambda: numbers(effects, "key = 'other'"))
            await eventually(lambda: value(effects, f"SELECT ({parked}) >= 4"))
    if not running:
        await made_anew(sidings_kafka, name, NEW)
        await send(2, NEW, GONE, KEPT, "other")
        await consuming().reset_offsets(name, "earliest", actor="alice")
        async with consuming():
            await eventually(lambda: numbers(effects, "key = 'other'"))
            await eventually(lambda: value(effects, f"SELECT ({parked}) >= 4"))
    where = await fetch(effects, f"""SELECT "group", origin FROM sidings.job WHERE type = 'message:{name}'""")
    assert sorted(tuple(row) for row in where) == sorted([(GONE, f"{name}/2"), (KEPT, f"{name}/0")] * 2)
    assert await numbers(effects, "key <> 'other'") == []


async def test_it_is_not_consumed_before_every_instance_knows_its_count(effects, topic, sidings_kafka, monkeypatch):
    """Others would enqueue for its keys without looking where their groups have jobs."""
    monkeypatch.setattr("sidings.kafka.topics._ANNOUNCE_SECONDS", 6.0)
    name = await topic(partitions=OLD)
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "metadata_seconds": 300.0})
    known_for: list[float | None] = []

    @service.consumer(name, model=Number)
    async def on_number(message, tx):
        if message.value.n == 2:
            query = "SELECT date_part('epoch', clock_timestamp() - seen_at) FROM sidings.topic WHERE topic = $1"
            known_for.append(await tx.fetchval(f"{query} AND $2 = ANY (former)", name, NEW))
        await record(message, tx)

    async with service:
        for number in range(OLD):
            await produce(sidings_kafka, name, [1], key="k", partition=number)
        await eventually(lambda: value(effects, f"SELECT count(*) = {OLD} FROM effect"))
        await made_anew(sidings_kafka, name, NEW)
        for number in range(NEW):
            await produce(sidings_kafka, name, [2], key="k", partition=number)
        await service.reset_offsets(name, "earliest", actor="alice")
        await eventually(lambda: len(known_for) >= NEW)
    assert min(seconds or 0.0 for seconds in known_for) >= 5.9, known_for


async def test_a_client_that_knows_the_former_count_is_told_with_the_topics_id(topic, sidings_kafka):
    """One that has not fetched meanwhile: its metadata are asked for now and then only."""
    name = await topic(partitions=OLD)
    client = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, metadata_max_age_ms=300_000)
    tp = TopicPartition(name, 0)
    await client.start()
    try:
        await client._client.add_topic(name)
        former = (await ask_topic_ids(client, [tp]))[name]
        assert client.partitions_for_topic(name) == set(range(OLD))
        await made_anew(sidings_kafka, name, NEW)
        id, count = (await ask_topics(client, [tp]))[name]
        assert (id != former, count) == (True, NEW)
        await eventually(lambda: client.partitions_for_topic(name) == set(range(NEW)))
    finally:
        await client.stop()

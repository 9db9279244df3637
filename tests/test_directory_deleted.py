"""A topic that is deleted where brokers make the topics that somebody asks for, as is Kafka's default."""

import asyncio
from typing import Any

import pytest
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.metadata import MetadataRequest
from sidings import ConfigurationError, Message
from sidings.devstack.topics import create_topic, delete_topics

from .consumer_support import Number, a_service, administering, produce
from .directory_support import COMPACTED, a_directory, put, quick, row
from .outbox_support import emptied, publish, relaying, sending
from .support import SECONDS, eventually


@pytest.fixture
async def kafka(own_kafka) -> str:
    """A cluster of its own with the brokers' defaults, that has a topic."""
    settings = {"auto.create.topics.enable": "true"}
    bootstrap = (await asyncio.to_thread(lambda: own_kafka(settings=settings))).bootstrap
    await create_topic(bootstrap, "other", partitions=1)
    return bootstrap


async def topics(kafka: str) -> list[str]:
    async with administering(kafka) as admin:
        return sorted(name for name in await admin.list_topics() if not name.startswith("__"))


async def asks_again(client: Any, times: int = 4) -> None:
    """Wait until one of aiokafka's inner clients has been told so many times what topics there are."""
    told = list[object]()
    client.cluster.add_listener(told.append)
    await eventually(lambda: len(told) >= times)
    client.cluster.remove_listener(told.append)


async def test_a_directory_makes_no_topic_in_place_of_its_own_that_was_deleted(kafka):
    """It was not compacted, nobody could make the right one any more, and the directory forgot its rows for the sake of
    it."""
    await create_topic(kafka, "terminals", partitions=1, config=COMPACTED)
    await put(kafka, "terminals", {"t1": row("t1")})
    async with a_directory("terminals", kafka) as directory:
        await directory.wait_until()
        await delete_topics(kafka, ["terminals"])
        follower = directory._follower
        await eventually(lambda: "there is no topic 'terminals'" in str(follower.trouble), directory.problems)
        assert await topics(kafka) == ["other"]
        assert len(directory) == 1
        await create_topic(kafka, "terminals", partitions=1, config=COMPACTED)
        await put(kafka, "terminals", {"t2": row("t2")})
        await eventually(lambda: list(directory) == ["t2"], directory.problems)


async def test_nor_does_who_has_sent_to_it_until_there_is_something_to_send(kafka, database, caplog):
    """A relay and a producer asked for each topic that they had ever sent to, as often as they looked for new
    partitions."""
    await create_topic(kafka, "terminals", partitions=1, config=COMPACTED)
    settings = quick(kafka)
    async with (
        relaying(database, settings) as relay,
        sending(settings) as producer,
        a_directory("terminals", settings) as directory,
    ):
        await publish(database, "terminals", [("t1", row("t1"))])
        await emptied(database)
        await producer.send("terminals", key="t2", value=row("t2"))
        await eventually(lambda: len(directory) == 2)
        senders: list[Any] = [relay._senders._main, *producer._current.values()]
        assert len(senders) == 2
        await delete_topics(kafka, ["terminals"])
        await asyncio.gather(*(asks_again(sender._producer.client) for sender in senders))
        assert await topics(kafka) == ["other"]
        assert sorted(directory) == ["t1", "t2"]
        caplog.clear()
        await asyncio.gather(*(asks_again(sender._producer.client) for sender in senders))
        assert "not found in cluster metadata" not in caplog.text, "it is asked for until somebody sends to it"
        await publish(database, "terminals", [("t3", row("t3"))])
        await emptied(database)
        await producer.send("terminals", key="t4", value=row("t4"))
        assert await topics(kafka) == ["other", "terminals"]


@pytest.mark.parametrize("by", ["relay", "producer"])
async def test_what_is_sent_just_after_makes_it_anew_at_once(kafka, database, by):
    """Who sends does not know yet that it is gone."""
    await create_topic(kafka, "etas", partitions=1)
    settings = quick(kafka, metadata_seconds=3_600.0)
    async with relaying(database, settings, delivery_seconds=600) as relay, sending(settings) as producer:

        async def send(value: bytes) -> None:
            if by == "producer":
                await producer.send("etas", key="k", value=value)
            else:
                await publish(database, "etas", [("k", value)])
                await emptied(database)

        await send(b"1")
        await delete_topics(kafka, ["etas"])
        await send(b"2")
        assert relay.metrics.count("failed") == 0
    assert await topics(kafka) == ["etas", "other"]


async def test_a_consumer_makes_its_topic_once(kafka):
    handled = list[int]()
    service = a_service(None, kafka, name="stateless", settings={"fetch_seconds": 0.05, "metadata_seconds": 1.0})

    @service.consumer("numbers", model=Number, stateless=True, dead_letter="other")
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    async with service:
        consumer = await eventually(lambda: service._life.consumer)
        await eventually(lambda: consumer._stateless.partitions)
        await produce(kafka, "numbers", [1])
        await eventually(lambda: handled == [1])
        await delete_topics(kafka, ["numbers"])
        client = consumer._client
        await asks_again(client._client)
        assert await topics(kafka) == ["other"]
        await create_topic(kafka, "numbers", partitions=2)
        await eventually(lambda: len(consumer._stateless.partitions) == 2)
        await produce(kafka, "numbers", [2], partition=1)
        await eventually(lambda: handled == [1, 2])
        assert consumer._client is client


async def test_who_looks_whether_a_topic_is_there_asks_for_no_other_and_makes_none(
    kafka, database, monkeypatch, caplog
):
    """With thousands of topics the answer about all of them kept the event loop for seconds, and each time."""
    asked, send = list[Any](), AIOKafkaConnection.send

    def noted(connection: Any, request: Any, **options: Any) -> Any:
        if isinstance(request, MetadataRequest):
            asked.append(request._topics)
        return send(connection, request, **options)

    service = a_service(database, kafka)

    @service.consumer("other", model=Number, stateless=True, dead_letter="dead")
    async def handle(_: Message[Number]) -> None: ...

    directory = a_directory("terminals", kafka)
    with monkeypatch.context() as patch:
        patch.setattr(AIOKafkaConnection, "send", noted)
        async with service:
            running = asyncio.create_task(directory.run())
            await eventually(lambda: "there is no topic 'terminals'" in caplog.text)
            await eventually(lambda: "there is no topic dead" in caplog.text)
            with pytest.raises(ConfigurationError, match="the topic 'numbers' does not exist"):
                await service.reset_offsets("numbers", "earliest", actor="alice")
            assert "not found in cluster metadata" not in caplog.text
            await create_topic(kafka, "terminals", partitions=1, config=COMPACTED)
            await directory.wait_ready(SECONDS)
            directory.stop()
            await running
    assert {*map(str, asked)} == {"[]", "['other']", "['terminals']", "['dead']", "['numbers']"}
    assert await topics(kafka) == ["other", "terminals"]

"""A client whose tasks have ended, over an error that aiokafka does not expect, is made anew."""

import asyncio
import gc
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import aiokafka.client
import pytest
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.commit import OffsetCommitRequest
from prometheus_client import CollectorRegistry
from sidings.errors import KafkaUnavailable
from sidings.kafka import KafkaSettings
from sidings.kafka.consumer import Consumer
from sidings.kafka.handling import BatchFailed
from sidings.kafka.partition import Item, Partition
from sidings.kafka.topic_loop import TopicLoop

from .consumer_support import Number, a_service, as_json, offset_reaches, produce, producing, record
from .outbox_support import arrived, emptied, never_retrieved, publish, relaying, sending
from .support import eventually


class Tickets:
    """While one is expired no connection can be made: GSSAPI raises an error of its own then, as does a thread that
    cannot be started. failed: so many were tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.expired, self.failed = False, 0
        create = aiokafka.client.create_conn

        async def connect(*args, **options):
            if not self.expired:
                return await create(*args, **options)
            self.failed += 1
            raise RuntimeError("ticket expired")

        monkeypatch.setattr(aiokafka.client, "create_conn", connect)

    def expire(self, client: AIOKafkaClient) -> None:
        self.expired = True
        for connection in list(client._conns.values()):
            connection.close()


@pytest.fixture
def tickets(monkeypatch):
    return Tickets(monkeypatch)


@pytest.mark.parametrize("which", ["fetch", "metadata"])
async def test_a_consumer(effects, sidings_kafka, topic, which):
    name = await topic()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": name})
    service.consumer(name, model=Number)(record)
    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(offset_reaches(effects, name, 1))
        client = service._life.consumer._client
        if which == "fetch":
            client._fetcher._get_actions_per_node = None
            await eventually(lambda: client._fetcher._fetch_task.done())
        else:
            client._client._metadata_update = None
            client._client.force_metadata_update()
            await eventually(lambda: client._client._sync_task.done())
        await eventually(lambda: service._life.consumer._client not in (client, None), service.problems, seconds=15)
        await produce(sidings_kafka, name, [1])
        await eventually(offset_reaches(effects, name, 2), service.problems)


async def test_a_commit_that_was_given_up_leaves_no_traceback_when_it_fails(
    effects, sidings_kafka, topic, monkeypatch, caplog
):
    monkeypatch.setattr("sidings.kafka.lag._COMMIT_SECONDS", 0.1)
    name, failed = await topic(), []
    service = a_service(effects, sidings_kafka, settings={"group": name})
    service.consumer(name, model=Number)(record)
    send = AIOKafkaClient.send

    async def hang(self, node_id, request, **options):
        if not isinstance(request, OffsetCommitRequest):
            return await send(self, node_id, request, **options)
        await asyncio.sleep(0.3)
        failed.append(request)
        raise KafkaConnectionError("closed")

    monkeypatch.setattr(AIOKafkaClient, "send", hang)
    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(lambda: len(failed) > 2)
    assert never_retrieved(caplog) == []


async def test_a_directory(effects, sidings_kafka, topic, tickets):
    """As GSSAPI raises where the ticket has run out, until there is another."""
    name = await topic(config={"cleanup.policy": "compact"})
    service = a_service(None, sidings_kafka)
    directory = service.directory(name, model=Number)
    async with service:
        await eventually(lambda: directory.ready)
        client = directory._follower.reader._client._client
        tickets.expire(client)
        await eventually(lambda: tickets.failed > 3)
        assert not client._sync_task.done()
        tickets.expired = False
        async with producing(sidings_kafka) as producer:
            await producer.send_and_wait(name, as_json(7), key=b"k")
        await eventually(lambda: "k" in directory, service.problems)


async def test_a_relay(database, sidings_kafka, topic, tickets):
    """The relay ended, and the service with it."""
    name = await topic()
    async with relaying(database, sidings_kafka) as relay:
        await eventually(lambda: len(relay.held) == 16)
        tickets.expire(relay._senders._main._producer.client)
        await publish(database, name, [("k", b"1")])
        await eventually(lambda: relay._senders.outage.error)
        assert "ticket expired" in str(relay._senders.outage.error)
        assert relay.problems() == []
        tickets.expired = False
        await emptied(database)
    assert await arrived(sidings_kafka, name) == 1


async def test_a_relay_whose_shared_producer_learns_no_more_who_leads_what(database, sidings_kafka, topic, tickets):
    name = await topic()
    async with relaying(database, sidings_kafka) as relay:
        await eventually(lambda: len(relay.held) == 16)
        shared = relay._senders._main
        shared._producer.client._ask = None
        shared._producer.client.force_metadata_update()
        await eventually(lambda: shared._producer.client._sync_task.done())
        await publish(database, name, [("k", b"1")])
        await emptied(database)
        await eventually(lambda: relay._senders._main not in (shared, None))


async def test_a_producer(sidings_kafka, topic, tickets):
    name = await topic()
    async with sending(sidings_kafka, metadata_seconds=1.0, delivery_seconds=2.0) as producer:
        tickets.expired = True
        with pytest.raises(KafkaUnavailable, match="ticket expired"):
            await producer.send(name, value=b"1")
        tickets.expired = False
        await producer.send(name, value=b"2")
        tickets.expire(producer._current[False]._producer.client)
        with pytest.raises(KafkaUnavailable):
            await producer.send(name, value=b"3")
        tickets.expired = False
        await producer.send(name, value=b"4")


async def test_work_of_a_consumer_that_is_cancelled_before_it_begins_leaves_no_warning(recwarn):
    """As where a message fails in the turn in which the service stops: "coroutine 'Siding.settle' was never awaited",
    which fails a test of the service's author whose warnings are errors."""

    async def settle() -> None: ...

    settings, prometheus = KafkaSettings(bootstrap="localhost:9092"), CollectorRegistry()
    consumer = Consumer("test", settings, {}, [], None, None, prometheus=prometheus)
    async with asyncio.TaskGroup() as consumer._group:
        consumer.spawn(settle())
        consumer.cancel()
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


async def test_a_client_that_is_given_up_while_a_message_has_failed_ends_nothing_else(recwarn):
    """Where a handler swallows its cancellation meanwhile, the failed message was to be set aside: in a group of tasks
    that takes no more of them, whose error ended the service. And the rest of the batch was handled first."""
    settings, prometheus = KafkaSettings(bootstrap="localhost:9092"), CollectorRegistry()
    consumer = Consumer("test", settings, {}, [], None, None, prometheus=prometheus)
    consumer.vitals.rebalance_ends()
    partitions: dict[TopicPartition, Partition] = {}
    for number, count in enumerate((1, 2)):
        partition = partitions[TopicPartition("t", number)] = Partition(TopicPartition("t", number))
        partition.place(0)
        partition.end = count
        partition.items += [Item(partition, SimpleNamespace(offset=n, key=None), None, None) for n in range(count)]
    calls, at_work = list[int](), asyncio.Event()

    async def handle(items: list[Item]) -> int:
        calls.append(len(items))
        if len(calls) == 1:
            raise BatchFailed(ValueError("bad"), 0)
        at_work.set()
        if len(calls) == 2:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return 1

    async def break_off() -> None:
        await at_work.wait()
        raise KafkaConnectionError("gone")

    async def run() -> None:
        async with asyncio.TaskGroup() as consumer._group:
            consumer.spawn(loop.run())
            consumer.spawn(break_off())

    loop = TopicLoop(
        *(SimpleNamespace(topic="t"), Mock(), partitions, SimpleNamespace(handle=handle), Mock(), consumer),
        max_records=10,
        slots=asyncio.Semaphore(1),
        paused=lambda: False,
    )
    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert [*map(repr, raised.value.exceptions)] == ["KafkaConnectionError('gone')"]
    assert calls == [3, 2]  # then not what is left of them
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []

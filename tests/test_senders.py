"""Producers that are ended with batches in them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, NotLeaderForPartitionError
from aiokafka.protocol.produce import ProduceRequest
from sidings.devstack.topics import create_topic
from sidings.executor import now
from sidings.kafka import brokers
from sidings.kafka.outbox import OutboxSettings, senders
from sidings.kafka.outbox.senders import Sender
from sidings.kafka.settings import KafkaSettings

from .outbox_support import arrived, never_retrieved
from .support import SECONDS, eventually


@pytest.mark.parametrize("idempotent", [True, False])
async def test_batches_that_have_not_had_their_turn_are_failed_without_a_word_of_asyncios(
    sidings_kafka: str, topic, caplog: pytest.LogCaptureFixture, idempotent: bool
) -> None:
    """For each, "Future exception was never retrieved" stood in the log, with ProducerClosed."""
    never_retrieved(caplog)
    caplog.clear()  # of what tests before have left
    name = await topic()
    sender = Sender(KafkaSettings(bootstrap=sidings_kafka), OutboxSettings(), idempotent=idempotent)
    await sender.start()
    sender._producer._sender.sender_task.cancel()  # as where a request before them is not answered
    await asyncio.sleep(0)
    batch = sender.batch()
    batch.append(timestamp=None, key=None, value=b"1")
    sent = await sender.send(batch, name, 0)
    await sender.kill()
    assert type(sent.exception()).__name__ == "ProducerClosed"
    del sender, batch, sent
    assert never_retrieved(caplog) == []


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_batch_has_arrived_when_all_replicas_in_sync_have_it(idempotent: bool) -> None:
    """Of one that only the leader has, the rows would be deleted, and with its broker the messages were gone."""
    sender = Sender(KafkaSettings(bootstrap="127.0.0.1:1"), OutboxSettings(), idempotent=idempotent)
    made: Any = sender._producer
    assert made._sender._acks == -1
    await sender.kill()


async def test_batches_that_wait_to_be_tried_again_are_failed_without_a_word_of_asyncios(
    own_kafka, caplog: pytest.LogCaptureFixture
) -> None:
    """For each, a traceback with the KeyError of one of aiokafka's callbacks stood in the log."""
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "etas", partitions=1)
    # Kafka has a fifth of a second for an answer.
    sender = Sender(KafkaSettings(bootstrap=kafka.bootstrap), OutboxSettings(delivery_seconds=0.4), idempotent=True)
    await sender.start()
    await sender.partitions("etas", SECONDS)
    await asyncio.to_thread(kafka.pause)
    batch = sender.batch()
    batch.append(timestamp=None, key=None, value=b"1")
    sent = await sender.send(batch, "etas", 0)
    waiting = sender._producer._message_accumulator._batches
    await eventually(lambda: any(one.retry_count for batches in waiting.values() for one in batches))
    await sender.kill()
    assert type(sent.exception()).__name__ == "ProducerClosed"
    await asyncio.sleep(0)
    assert "Exception in callback" not in caplog.text
    await asyncio.to_thread(kafka.resume)


async def test_a_producer_that_is_ended_while_it_connects_sends_nothing_when_brokers_answer(own_kafka) -> None:
    """Of several brokers to which it connected, one was given up; to the others it sent what others had sent again
    since."""
    kafka = await asyncio.to_thread(own_kafka, brokers=3)
    await create_topic(kafka.bootstrap, "etas", partitions=3)
    sender = Sender(KafkaSettings(bootstrap=kafka.bootstrap), OutboxSettings(delivery_seconds=100), idempotent=False)
    await sender.start()
    await sender.partitions("etas", SECONDS)
    client = sender._producer.client
    connected = {node for node, _ in client._conns}
    leaders = {number: client.cluster.leader_for_partition(TopicPartition("etas", number)) for number in range(3)}
    await asyncio.to_thread(kafka.pause)
    for number in (partition for partition, leader in leaders.items() if leader not in connected):
        batch = sender.batch()
        batch.append(timestamp=None, key=None, value=b"1")
        await sender.send(batch, "etas", number)
    await eventually(lambda: len(sender._producer._sender._in_flight) >= 2)
    await sender.kill()
    await asyncio.to_thread(kafka.resume)
    requests = "Sender._send_produce_req"  # aiokafka's: they have connected, and sent something or nothing
    await eventually(lambda: not any(task.get_coro().__qualname__ == requests for task in asyncio.all_tasks()))
    assert await arrived(kafka.bootstrap, "etas") == 0


async def test_requests_that_wait_for_the_brokers_of_now_end_with_their_producer(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but one waited for ever, since nobody asked any more who leads what: for each, "Task was destroyed but it is
    pending" stood in the log."""
    name, asked = await topic(partitions=2), asyncio.Event()
    sender = Sender(KafkaSettings(bootstrap=sidings_kafka), OutboxSettings(), idempotent=True)
    await sender.start()
    await sender.partitions(name, SECONDS)
    client, send = sender._producer.client, sender._producer.client.send

    async def refuse(node: Any, request: Any, **options: Any) -> Any:
        if isinstance(request, ProduceRequest):
            raise NotLeaderForPartitionError
        return await send(node, request, **options)

    async def hang(*_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(client, "send", refuse)
    monkeypatch.setattr(client, "_metadata_update", hang)
    monkeypatch.setattr(client.cluster, "leader_for_partition", lambda tp: tp.partition)  # two of them
    for number in range(2):
        batch = sender.batch()
        batch.append(timestamp=None, key=None, value=b"1")
        await sender.send(batch, name, number)
    await asked.wait()
    waiting = sender._producer._message_accumulator._batches
    await eventually(lambda: sum(map(len, waiting.values())) == 2)  # to be tried again, as soon as that is told
    requests = [task for task in asyncio.all_tasks() if "_send_produce_req" in repr(task)]
    assert len(requests) == 2
    await sender.kill()
    await asyncio.sleep(0)
    assert [task for task in requests if not task.done()] == []


async def test_a_topic_that_nobody_sends_to_for_some_minutes_is_asked_for_no_more(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question, and each answer, had all topics that had ever been sent to."""
    ahead = 0.0
    monkeypatch.setattr(senders, "now", lambda: now() + ahead)
    one, other = await topic("one"), await topic("other")
    sender = Sender(KafkaSettings(bootstrap=sidings_kafka), OutboxSettings(), idempotent=True)
    await sender.start()
    client = sender._producer.client

    async def known() -> set[str]:
        for _ in range(2):  # what it asks for, and what it asks for then
            await client.force_metadata_update()
        return client.cluster.topics()

    try:
        await sender.partitions(one, SECONDS)
        ahead += 200
        await sender.partitions(other, SECONDS)
        assert await known() == {one, other}
        ahead += 200
        assert await known() == {other}
        assert await sender.partitions(one, SECONDS) == [0]
        ahead += 400
        assert await known() == set(), "none, and not all that there are"
        assert await sender.partitions(one, SECONDS) == [0]
    finally:
        await sender.close()


async def test_a_topic_that_is_new_to_a_producer_is_asked_for_without_all_the_others(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5,000 topics with a message each five minutes, one came back six times a second, after it had been forgotten:
    each time Kafka was asked for all, which took a quarter of a core."""
    names, asked = [await topic(f"t{number}") for number in range(12)], list[list[str]]()
    ask = brokers._Client._ask

    async def noted(self: Any, node: Any, request: Any) -> Any:
        asked.append(sorted(request._topics))
        return await ask(self, node, request)

    monkeypatch.setattr(brokers._Client, "_ask", noted)
    sender = Sender(KafkaSettings(bootstrap=sidings_kafka), OutboxSettings(), idempotent=True)
    await sender.start()
    try:
        asked.clear()
        for name in names[:6]:
            assert await sender.partitions(name, SECONDS) == [0]
        assert asked == [[name] for name in names[:6]]
        asked.clear()
        assert await asyncio.gather(*(sender.partitions(name, SECONDS) for name in names)) == [[0]] * 12
        assert asked == [[names[6]], sorted(names[7:])], "together, what comes while one is asked for"
        for name in names:
            batch = sender.batch()
            batch.append(timestamp=None, key=None, value=b"1")
            await (await sender.send(batch, name, 0))
        assert sum(map(len, asked)) == 6, "who leads them is known"
        asked.clear()
        await sender._producer.client.force_metadata_update()
        assert asked == [sorted(names)], "what is in use is asked for together when the time has come"
    finally:
        await sender.close()


async def test_what_is_learnt_of_a_topic_takes_the_place_of_nothing_newer(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, client = await topic(partitions=2), None
    ask = brokers._Client._ask

    async def late(self: Any, node: Any, request: Any) -> Any:
        answer = await ask(self, node, request)
        if client is not None:
            client.cluster._partitions[name] = {7: None}  # another answer came before this one
        return answer

    monkeypatch.setattr(brokers._Client, "_ask", late)
    sender = Sender(KafkaSettings(bootstrap=sidings_kafka), OutboxSettings(), idempotent=True)
    await sender.start()
    try:
        client = sender._producer.client
        assert await sender.partitions(name, SECONDS) == [7]
    finally:
        await sender.close()


async def test_who_asks_for_a_topic_is_not_cancelled_when_its_producer_is_ended(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that comes for a producer that is ended cancels who has made it, and that is not the caller."""
    name, asking = await topic(), asyncio.Event()
    sender = Sender(KafkaSettings(bootstrap=sidings_kafka), OutboxSettings(), idempotent=True)
    await sender.start()
    ended, client = asyncio.Event(), sender._producer.client

    async def connect(*_: Any, **__: Any) -> Any:
        asking.set()
        await ended.wait()
        client._conns["a broker", 0] = SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(client, "_get_conn", connect)
    partitions = asyncio.create_task(sender.partitions(name, 0.5))
    await asking.wait()
    await sender.kill()
    ended.set()
    with pytest.raises(KafkaError):
        await partitions

"""`service.producer` when Kafka hangs, or has moved: every call ends in time, and none keeps a dead connection."""

import asyncio
import contextlib
import re
import time
from collections import Counter
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.protocol.produce import ProduceRequest
from sidings import LogContext, correlated
from sidings.devstack.topics import create_topic
from sidings.errors import KafkaUnavailable
from sidings.kafka import producer as producer_module
from sidings.kafka.brokers import _Client
from sidings.kafka.outbox import Outgoing

from .outbox_support import records, sending
from .support import SECONDS, eventually


def lead_astray(producer) -> None:
    """What its client knows of the brokers is no longer true; the addresses that it was given are."""
    inner = producer._current[False]._producer.client
    for node, broker in inner.cluster._brokers.items():
        inner.cluster._brokers[node] = broker._replace(port=1)
    for connection in list(inner._conns.values()):
        connection.close()


@pytest.mark.parametrize("known", [True, False], ids=["a known topic", "another topic"])
async def test_callers_with_less_patience_do_not_keep_a_producer_that_has_lost_its_brokers(
    sidings_kafka, topic, known: bool
):
    """It was given up only by a call that waited for `delivery_seconds`: a handler whose own timeout is shorter failed
    for ever, and its messages went to the dead letters one after another."""
    etas, sent_to = await topic("etas"), await topic("other")
    async with sending(sidings_kafka, delivery_seconds=2.0) as producer:
        await producer.send(etas, key="k", value=b"0")
        if known:
            await producer.send(sent_to, key="k", value=b"0")
        lead_astray(producer)

        async def arrives() -> bool:
            with contextlib.suppress(TimeoutError, KafkaUnavailable):
                async with asyncio.timeout(1.0):
                    await producer.send(sent_to, key="k", value=b"1")
                    return True
            return False

        await eventually(arrives, seconds=15)


async def test_callers_with_less_patience_end_no_producer_whose_brokers_answer(sidings_kafka, topic, monkeypatch):
    """An answer counted only where somebody still waited for it: after an idle hour the next one who gave up ended a
    producer that nothing was wrong with, and its partitions were shunned."""
    monkeypatch.setattr(producer_module, "_GRACE_SECONDS", 0.0)
    etas, send, answering, asked, answered = await topic("etas"), _Client.send, asyncio.Event(), Counter(), Counter()

    async def late(self: Any, node: int, request: Any, **options: Any) -> Any:
        asked[type(request)] += 1
        answer = await send(self, node, request, **options)
        if isinstance(request, ProduceRequest):
            await answering.wait()
        answered[type(request)] += 1
        return answer

    monkeypatch.setattr(_Client, "send", late)
    async with sending(sidings_kafka, delivery_seconds=2.0) as producer:
        sender = await producer._connected(alone=False)
        for number in (1, 2):
            answering.clear()
            began, impatient = time.monotonic(), asyncio.create_task(producer.send(etas, key="k", value=b"1"))
            await eventually(lambda number=number: asked[ProduceRequest] == number)
            impatient.cancel()
            await asyncio.wait([impatient])
            assert producer._current == {False: sender}
            answering.set()
            await eventually(lambda number=number: answered[ProduceRequest] == number)
            await eventually(lambda began=began: time.monotonic() - began > 2.0)


async def test_who_gives_up_a_long_list_of_which_kafka_takes_one_after_another_ends_no_producer(
    sidings_kafka, topic, monkeypatch
):
    """It counted as silent for as long as the list took."""
    etas, send, turns, answered = await topic("etas"), _Client.send, asyncio.Semaphore(0), Counter()

    async def late(self: Any, node: int, request: Any, **options: Any) -> Any:
        answer = await send(self, node, request, **options)
        if isinstance(request, ProduceRequest):
            await turns.acquire()
        answered[type(request)] += 1
        return answer

    monkeypatch.setattr(_Client, "send", late)
    async with sending(sidings_kafka, delivery_seconds=3.0, batch_bytes=1_024) as producer:
        sender = await producer._connected(alone=False)
        messages = [Outgoing(etas, b"k", b"x" * 1_000, None) for _ in range(9)]
        began, impatient = time.monotonic(), asyncio.create_task(producer.send_many(messages))
        for number in range(1, 6):
            await eventually(lambda number=number: time.monotonic() - began > 0.7 * number)
            turns.release()
            await eventually(lambda number=number: answered[ProduceRequest] == number)
        assert not impatient.done()
        impatient.cancel()
        await asyncio.wait([impatient])
        assert producer._current == {False: sender}
        for _ in messages:
            turns.release()


async def test_who_gives_up_before_anything_is_handed_over_leaves_no_silence_behind(sidings_kafka, topic, monkeypatch):
    """After an idle hour the next caller who gave up ended a producer that nothing was wrong with."""
    monkeypatch.setattr(producer_module, "_GRACE_SECONDS", 0.0)
    etas, other, send, learn = await topic("etas"), await topic("other"), _Client.send, _Client.learn
    asked, answering = Counter[object](), asyncio.Event()

    async def late(self: Any, node: int, request: Any, **options: Any) -> Any:
        answer = await send(self, node, request, **options)
        asked[type(request)] += 1
        if asked[ProduceRequest] > 1:
            await answering.wait()
        return answer

    async def learnt(self: Any, name: str) -> None:
        asked[name] += 1
        if name == other:
            await answering.wait()
        await learn(self, name)

    monkeypatch.setattr(_Client, "send", late)
    monkeypatch.setattr(_Client, "learn", learnt)
    async with sending(sidings_kafka, delivery_seconds=1.0) as producer:
        await producer.send(etas, key="k", value=b"0")
        sender, began = producer._current[False], time.monotonic()
        for name, what, count in ((other, other, 1), (etas, ProduceRequest, 2)):
            impatient = asyncio.create_task(producer.send(name, key="k", value=b"1"))
            await eventually(lambda what=what, count=count: asked[what] == count)
            impatient.cancel()
            await asyncio.wait([impatient])
            assert producer._current == {False: sender}
            await eventually(lambda: time.monotonic() - began > 1.0)
        answering.set()


async def test_callers_with_less_patience_end_no_producer_for_a_topic_that_is_not_there(
    sidings_kafka, topic, monkeypatch
):
    """Kafka says so again and again, and has nothing to acknowledge."""
    monkeypatch.setattr(producer_module, "_GRACE_SECONDS", 0.0)
    async with sending(sidings_kafka, delivery_seconds=1.0) as producer:
        sender = await producer._connected(alone=False)

        async def given_up() -> bool:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await producer.send(f"{missing}-missing", key="k", value=b"1")
            assert producer._current == {False: sender}
            return time.monotonic() - began > 2.0

        missing, began = await topic("etas"), time.monotonic()
        await eventually(given_up)


async def test_a_producer_whose_brokers_have_not_answered_in_time_is_used_no_more(sidings_kafka, topic):
    etas = await topic("etas")
    async with sending(sidings_kafka, delivery_seconds=1.0) as producer:
        await producer.send(etas, key="k", value=b"0")
        lead_astray(producer)
        with pytest.raises(KafkaUnavailable):
            await producer.send(etas, key="k", value=b"1")
        await producer.send(etas, key="k", value=b"2")


async def test_a_partition_to_which_nothing_can_be_handed_over_has_taken_nothing(sidings_kafka, topic, monkeypatch):
    """Its batch is full, and not sent: the next message without a key was to go elsewhere, and went there again."""
    etas = await topic("etas", partitions=4)
    async with sending(sidings_kafka, delivery_seconds=0.4) as producer:
        await producer.send(etas, value=b"0")
        chosen = list[int]()

        async def hang(sender: Any, partition: int, *_: Any) -> Any:
            chosen.append(partition)
            await asyncio.Event().wait()

        monkeypatch.setattr(producer, "_hand_over", hang)
        for _ in range(4):
            with pytest.raises(KafkaUnavailable):
                await producer.send(etas, value=b"1")
    assert sorted(chosen) == [0, 1, 2, 3]


async def test_an_error_says_whether_it_may_have_come_from_what_was_sent(sidings_kafka, topic, monkeypatch):
    """Only then a handler goes on for ever: with no broker there, nothing of it has been written."""
    etas = await topic("etas")
    async with sending("127.0.0.1:1") as producer:
        with pytest.raises(KafkaUnavailable, match="no broker answers") as raised:
            await producer.send(etas, key="k", value=b"1")
        assert raised.value.blameless
    async with sending(sidings_kafka, delivery_seconds=1.0) as producer:

        async def never(*_, **__):
            return asyncio.get_running_loop().create_future()

        monkeypatch.setattr("sidings.kafka.outbox.senders.Sender.append", never)
        with pytest.raises(KafkaUnavailable, match="did not acknowledge in time") as raised:
            await producer.send(etas, key="k", value=b"1")
        assert not raised.value.blameless


async def test_it_says_why_kafka_has_not_acknowledged_where_it_would_try_for_ever(own_kafka):
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    await create_topic(kafka.bootstrap, "etas", partitions=1, replicas=2, config={"min.insync.replicas": "2"})
    await create_topic(kafka.bootstrap, "lost", partitions=2, replicas=1)
    async with sending(kafka.bootstrap, delivery_seconds=2.0) as producer:

        async def refused(topic: str) -> str:
            try:
                await producer.send_many([Outgoing(topic, b"%d" % n, b"x", None) for n in range(10)])
            except KafkaUnavailable as error:
                errors.append(error)
                return str(error)
            return ""

        told, errors = list[str](), list[KafkaUnavailable]()
        assert await refused("etas") + await refused("lost") == ""
        await asyncio.to_thread(kafka.broker(2).kill)
        for topic, why in [
            ("etas", r"refused by etas/0 \(NotEnoughReplicasError\)"),
            ("lost", "nobody leads lost/[01]"),
        ]:

            async def says_so(topic: str = topic, why: str = why) -> object:
                told.append(await refused(topic))
                return re.search(f"Kafka did not acknowledge in time: {why}", told[-1])

            await eventually(says_so, lambda: told)
            # Of the other list Kafka takes what goes to the other partition, and would each time.
            assert errors[-1].blameless is (topic == "etas")
        await eventually(lambda: one_that_nobody_leads(producer))


async def one_that_nobody_leads(producer) -> bool:
    try:
        await producer.send("lost", key="0", value=b"x")
        await producer.send("lost", key="1", value=b"x")
    except KafkaUnavailable as error:
        return error.blameless
    raise AssertionError("one of them goes to each partition")


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_messages_without_a_key_go_where_somebody_leads(own_kafka):
    """Any partition was chosen. Each message for one that nobody led failed after `delivery_seconds`, and took what
    others had under way with it."""
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    await create_topic(kafka.bootstrap, "etas", partitions=4, replicas=1)
    async with sending(kafka.bootstrap, delivery_seconds=2.0) as producer:
        await producer.send("etas", value=b"first")
        client: Any = producer._current[False]._producer.client
        await asyncio.to_thread(kafka.broker(2).kill)

        async def told() -> bool:
            await client.force_metadata_update()
            leaders = {client.cluster.leader_for_partition(TopicPartition("etas", number)) for number in range(4)}
            return leaders == {1, -1}

        await eventually(told, seconds=60.0)
        for number in range(30):
            await producer.send("etas", value=b"%d" % number)
        await producer.send_many([Outgoing("etas", None, b"%d" % number, None) for number in range(30)])


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_messages_without_a_key_go_where_enough_replicas_are(own_kafka):
    """Kafka's metadata do not tell. Who has just failed there knows it, and whoever waits there."""
    kafka = await asyncio.to_thread(own_kafka, brokers=3)
    await create_topic(kafka.bootstrap, "etas", partitions=3, replicas=2, config={"min.insync.replicas": "2"})
    async with sending(kafka.bootstrap, delivery_seconds=2.0) as producer:
        await producer.send("etas", value=b"first")
        await asyncio.to_thread(kafka.broker(3).kill)
        failed = 0
        for number in range(40):
            try:
                await producer.send("etas", value=b"%d" % number)
            except KafkaUnavailable:
                failed += 1
        assert failed <= 5, "of each three messages two did"


async def test_what_the_client_logs_later_is_not_said_of_whoever_sent_first(sidings_kafka, topic, caplog):
    """Each line about a broker, for days, had the correlation id and the job of the message that had connected it."""
    etas = await topic("etas")
    caplog.handler.addFilter(LogContext())
    async with sending(sidings_kafka) as producer:
        with correlated("first"):
            await producer.send(etas, key="k", value=b"0")
        lead_astray(producer)
        producer._current[False]._producer.client.force_metadata_update()
        lines = await eventually(lambda: [each for each in caplog.records if each.name.startswith("aiokafka")])
    assert {line.correlation_id for line in lines} == {"-"}


@pytest.mark.long
async def test_many_callers_do_not_wait_for_each_other_when_kafka_hangs(own_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.outbox.senders._START_SECONDS", 2.0)
    monkeypatch.setattr("sidings.kafka.producer._CONNECT_SECONDS", 3.0, raising=False)
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "etas", partitions=1)
    await asyncio.to_thread(kafka.pause)
    took = []

    async def call() -> None:
        began = time.monotonic()
        with pytest.raises(KafkaUnavailable):
            await producer.send("etas", key="k", value=b"x")
        took.append(time.monotonic() - began)

    try:
        async with sending(kafka.bootstrap, delivery_seconds=2.0) as producer:
            await asyncio.wait_for(asyncio.gather(*[call() for _ in range(10)]), 2 * SECONDS)
            assert max(took) < 10, took
            await asyncio.to_thread(kafka.resume)
            await producer.send("etas", key="k", value=b"y")
    finally:
        await asyncio.to_thread(kafka.resume)
    assert {record.value for record in await records(kafka.bootstrap, "etas")} == {b"y"}

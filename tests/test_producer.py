"""The producer that sends at once: what one message, or one topic, does to all that others send at the same time."""

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiokafka.errors import (
    CorruptRecordException,
    OutOfOrderSequenceNumber,
    PolicyViolationError,
    TopicAuthorizationFailedError,
    UnknownError,
)
from aiokafka.protocol.produce import ProduceRequest
from sidings import ConfigurationError, KafkaSettings, KafkaUnavailable, Message
from sidings.devstack.topics import create_topic
from sidings.kafka import OutboxSettings, Producer
from sidings.kafka import producer as producer_module
from sidings.kafka.brokers import _Client
from sidings.kafka.outbox import InvalidMessage, NotPublished
from sidings.kafka.outbox.message import Outgoing
from sidings.kafka.outbox.senders import Sender

from .consumer_support import Number, a_service, produce_raw
from .outbox_support import records, sending
from .support import SECONDS, eventually


async def outcome(producer: Producer, topic: str, **message: object) -> str:
    try:
        await producer.send(topic, **message)
    except Exception as error:
        return type(error).__name__
    return "sent"


async def test_a_topic_that_does_not_exist_costs_no_message_for_others(sidings_kafka: str, topic) -> None:
    etas = await topic("etas", partitions=2)
    outcomes: Counter[str] = Counter()
    over = asyncio.Event()

    async def keep_sending(key: str) -> None:
        while not over.is_set():
            outcomes[await outcome(producer, etas, key=key, value=b"x")] += 1

    async with sending(sidings_kafka, metadata_seconds=1.0) as producer:
        await producer.send(etas, key="k0", value=b"x")  # so that none of them has to connect
        others = [asyncio.create_task(keep_sending(f"k{n}")) for n in range(8)]
        for _ in range(2):
            with pytest.raises(NotPublished, match="does not exist"):
                await producer.send(f"{etas}-missing", key="k", value=b"x")
        over.set()
        await asyncio.gather(*others)
    assert outcomes.keys() == {"sent"}, outcomes


@pytest.mark.parametrize("denied", [False, True])
async def test_a_topic_that_cannot_be_sent_to_ends_nothing_that_others_have_under_way(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch, denied: bool
) -> None:
    """What took Kafka a second or longer to acknowledge was cut off, and failed as what may have arrived. denied: the
    topic is there, but we may not write to it."""
    monkeypatch.setattr(producer_module, "_GRACE_SECONDS", 0.0)
    etas, wrong = await topic("etas"), await topic("denied")
    append, waiting, held = Sender.append, asyncio.Event(), asyncio.Event()

    async def refused(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if topic != wrong:
            return await append(self, topic, **message)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        answer.set_exception(TopicAuthorizationFailedError(topic))
        return answer

    monkeypatch.setattr(Sender, "append", refused)
    async with sending(sidings_kafka, metadata_seconds=2.0) as producer:
        client: Any = (await producer._connected(alone=False))._producer.client
        await client.force_metadata_update()  # so that it knows `etas` without having asked for it
        await producer.send(etas, key="k", value=b"0")
        send = client.send

        async def late(node: int, request: Any, **options: Any) -> Any:
            answer = await send(node, request, **options)
            if isinstance(request, ProduceRequest):
                waiting.set()
                await held.wait()
            return answer

        client.send = late
        first = asyncio.create_task(producer.send(etas, key="k", value=b"1"))
        await waiting.wait()
        with pytest.raises(NotPublished):
            await producer.send(wrong if denied else f"{etas}-missing", key="k", value=b"x")
        assert f"{etas}-missing" not in client._topics, "nobody is asked for it for ever"
        assert client.cluster.partitions_for_topic(etas), "else what waits for its turn is not sent"
        if producer._senders._closing:
            await asyncio.wait(producer._senders._closing)
        held.set()
        await first
        await producer.send(etas, key="k", value=b"2")
    assert [record.value for record in await records(sidings_kafka, etas)] == [b"0", b"1", b"2"]


async def test_a_partition_that_is_gone_when_its_turn_comes_is_an_outage(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a topic that is made anew with fewer while others are handed over: aiokafka has an AssertionError."""
    etas = await topic("etas", partitions=2)
    append = Sender.append

    async def then_made_anew(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        future = await append(self, topic, **message)
        partitions: Any = self._producer.client.cluster._partitions[topic]
        partitions.pop(message["partition"], None)
        return future

    monkeypatch.setattr(Sender, "append", then_made_anew)
    async with sending(sidings_kafka) as producer:
        with pytest.raises(KafkaUnavailable, match="has just been deleted, or made anew"):
            await producer.send_many([Outgoing(etas, b"k", value, None) for value in (b"0", b"1")])


async def test_a_message_that_kafka_refuses_takes_no_other_of_its_batch_with_it(sidings_kafka: str, topic) -> None:
    etas = await topic("etas", config={"message.timestamp.after.max.ms": "3600000"})  # as Kafka 4 has it by default
    wrong = datetime.now(UTC) + timedelta(days=1)
    async with sending(sidings_kafka) as producer:
        await producer.send(etas, key="k", value=b"connected")
        several = [outcome(producer, etas, key="k", value=b"%d" % n) for n in range(40)]
        several.insert(20, outcome(producer, etas, key="k", value=b"x", timestamp=wrong))
        outcomes = await asyncio.gather(*several)
    assert [n for n, one in enumerate(outcomes) if one != "sent"] == [20]
    assert outcomes[20] == InvalidMessage.__name__
    found = {record.value for record in await records(sidings_kafka, etas)}
    assert found == {b"connected", *(b"%d" % n for n in range(40))}


async def test_no_message_is_at_fault_where_a_clock_is_wrong(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours ahead of the broker's. It was an `InvalidMessage`, which is given up, and counts as a handler's failure."""
    append = Sender.append

    async def ahead(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        time = datetime.now(UTC) + timedelta(hours=2)
        return await append(self, topic, **message | {"timestamp_ms": round(time.timestamp() * 1000)})

    etas = await topic("etas")
    async with sending(sidings_kafka) as producer:
        with monkeypatch.context() as patched:
            patched.setattr(Sender, "append", ahead)
            with pytest.raises(KafkaUnavailable, match="clock of this machine or of a broker is wrong"):
                await producer.send(etas, key="k", value=b"1")
        await producer.send(etas, key="k", value=b"2")
    assert [record.value for record in await records(sidings_kafka, etas)] == [b"2"]


async def test_a_message_without_a_key_for_a_compacted_topic_is_invalid_and_fails_no_other(
    sidings_kafka: str, topic
) -> None:
    """aiokafka does not know this refusal: nobody's message of the batch was acknowledged, and Kafka was to blame."""
    rows = await topic("rows", config={"cleanup.policy": "compact"})
    async with sending(sidings_kafka) as producer:
        await producer.send(rows, key="k", value=b"connected")
        several = [outcome(producer, rows, key="k", value=b"%d" % n) for n in range(40)]
        several.insert(20, outcome(producer, rows, value=b"x"))
        assert Counter(await asyncio.gather(*several)) == {"sent": 40, InvalidMessage.__name__: 1}


@pytest.mark.parametrize("error", [UnknownError, PolicyViolationError, CorruptRecordException])
async def test_a_message_that_kafka_refuses_for_any_other_reason_is_not_published_and_fails_no_other(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """aiokafka does not try it again, and what it has no name for may be the message's fault. It was an outage."""
    append, etas = Sender.append, await topic("etas")

    async def refused(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if message["key"] != b"bad" and (message["value"] != b"beside" or not self.idempotent):
            return await append(self, topic, **message)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        answer.set_exception(error())
        return answer

    monkeypatch.setattr(Sender, "append", refused)
    async with sending(sidings_kafka) as producer:
        await producer.send(etas, key="k", value=b"connected")
        several = [outcome(producer, etas, key="k", value=value) for value in (b"beside", b"alone")]
        assert await asyncio.gather(*several, outcome(producer, etas, key="bad", value=b"x")) == [
            *("sent", "sent", NotPublished.__name__)
        ]
        with pytest.raises(NotPublished, match=error.__name__):
            await producer.send(etas, key="bad", value=b"x")
    found = {record.value for record in await records(sidings_kafka, etas)}
    assert found == {b"connected", b"beside", b"alone"}


async def test_what_only_its_producer_is_refused_for_is_sent_by_another_one(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idempotent one that has lost count."""
    append, etas = Sender.append, await topic("etas")

    async def refused(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if not self.idempotent:
            return await append(self, topic, **message)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        answer.set_exception(OutOfOrderSequenceNumber())
        return answer

    monkeypatch.setattr(Sender, "append", refused)
    async with sending(sidings_kafka) as producer:
        await producer.send(etas, key="k", value=b"x")
    assert [record.value for record in await records(sidings_kafka, etas)] == [b"x"]


async def test_a_producer_that_kafka_has_refused_something_is_used_no_more(
    sidings_kafka: str, topic, monkeypatch
) -> None:
    """An idempotent one has lost count: Kafka would refuse all that it sends."""
    monkeypatch.setattr("sidings.kafka.producer._CAREFUL_SECONDS", 0.0)  # the next message goes with others again
    rows = await topic("rows", config={"cleanup.policy": "compact"})
    async with sending(sidings_kafka) as producer:
        await producer.send(rows, key="k", value=b"connected")
        former = producer._current[False]
        assert await outcome(producer, rows, value=b"x") == InvalidMessage.__name__
        assert await outcome(producer, rows, key="k", value=b"y") == "sent"
        assert producer._current[False] is not former


async def test_many_small_messages_at_once_are_not_taken_for_one_that_is_too_large(sidings_kafka: str, topic) -> None:
    etas = await topic("etas", config={"max.message.bytes": "3000"})
    async with sending(sidings_kafka) as producer:
        for _ in range(2):
            several = [outcome(producer, etas, key="k", value=b"x" * 500) for _ in range(40)]
            assert Counter(await asyncio.gather(*several)) == {"sent": 40}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent takes a while, as over a narrow network."""
    send = _Client.send

    async def late(self: Any, node: int, request: Any, **options: Any) -> Any:
        if isinstance(request, ProduceRequest):
            await asyncio.sleep(0.3)
        return await send(self, node, request, **options)

    monkeypatch.setattr(_Client, "send", late)


def many(topic: str, count: int) -> list[Outgoing]:
    """Each of them a batch, with `BATCHES`."""
    return [Outgoing(topic, b"k", b"%d" % n + b" " * 1_000, None) for n in range(count)]


BATCHES: dict[str, Any] = {"batch_bytes": 1_024, "delivery_seconds": 1.0}


@pytest.mark.parametrize("alone", [False, True])
async def test_a_list_that_takes_longer_than_a_message_may_is_no_outage(
    sidings_kafka: str, topic, slow: None, alone: bool
) -> None:
    """It failed each time, with a Kafka in perfect health, and all that had left by then came again. alone: as for a
    minute after a refusal."""
    etas = await topic("etas")
    async with sending(sidings_kafka, **BATCHES) as producer:
        if alone:
            producer._careful_until[etas] = float("inf")
        await producer.send_many(many(etas, 8))
    assert [int(record.value) for record in await records(sidings_kafka, etas)] == list(range(8))


async def test_who_gives_up_ends_no_list_of_which_kafka_takes_more_all_the_time(
    sidings_kafka: str, topic, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first acknowledgement had come too long ago, so that the producer counted as one that has lost its
    brokers."""
    monkeypatch.setattr(producer_module, "_GRACE_SECONDS", 0.0)
    etas = await topic("etas")
    async with sending(sidings_kafka, **BATCHES) as producer:
        began = time.monotonic()
        sent = asyncio.create_task(producer.send_many(many(etas, 12)))
        await eventually(lambda: producer._current and time.monotonic() - began > 2 * BATCHES["delivery_seconds"])
        sender = producer._current[False]
        impatient = asyncio.create_task(producer.send(etas, key="k", value=b"100"))
        await eventually(lambda: sender.users == 2)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert not sent.done()
        await sent
        assert producer._current[False] is sender


async def test_a_list_that_kafka_has_taken_in_part_does_not_begin_anew_for_ever_where_another_message_is_late(
    sidings_kafka: str, topic, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To go on with the next producer would send what is older behind what others have sent since."""
    etas, stuck, append = await topic("etas"), await topic("stuck"), Sender.append

    async def never(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if topic == stuck:
            return asyncio.get_running_loop().create_future()
        return await append(self, topic, **message)

    monkeypatch.setattr(Sender, "append", never)
    monkeypatch.setattr(producer_module, "_GRACE_SECONDS", 0.0)
    async with sending(sidings_kafka, **BATCHES) as producer:
        await producer.send(etas, key="k", value=b"100")
        sent = asyncio.create_task(producer.send_many(many(etas, 100)))
        with pytest.raises(KafkaUnavailable):
            await producer.send(stuck, key="k", value=b"x")
        with pytest.raises(KafkaUnavailable, match="ProducerClosed") as ended:
            await sent
        assert not ended.value.blameless


async def test_what_kafka_has_taken_behind_a_message_that_it_refuses_comes_once_more_behind_it(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the batches behind the first one of a producer, of which Kafka knows nothing before: the older came last."""
    etas, append, taken = await topic("etas"), Sender.append, asyncio.Event()

    async def refused(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if message["value"] != b"old" or not self.idempotent:
            sent = await append(self, topic, **message)
            sent.add_done_callback(lambda _: taken.set())
            return sent
        return asyncio.create_task(fails())

    async def fails() -> object:
        await taken.wait()
        raise UnknownError

    monkeypatch.setattr(Sender, "append", refused)
    async with sending(sidings_kafka) as producer:
        await producer.send_many([Outgoing(etas, b"k", value, None) for value in (b"old", b"new")])
    assert [record.value for record in await records(sidings_kafka, etas)] == [b"new", b"old", b"new"]


async def test_what_is_acknowledged_is_not_sent_again_where_kafka_refuses_another_of_the_list(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood once more in the topic, behind what others had sent since."""
    etas, append, good = await topic("etas"), Sender.append, list["asyncio.Future[object]"]()

    async def refused(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if message["value"] != b"bad" or not self.idempotent:
            good.append(await append(self, topic, **message))
            return good[-1]
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        good[0].add_done_callback(lambda _: future.set_exception(UnknownError()))
        return future

    monkeypatch.setattr(Sender, "append", refused)
    async with sending(sidings_kafka) as producer:
        await producer.send_many([Outgoing(etas, b"k", value, None) for value in (b"good", b"bad")])
    assert [record.value for record in await records(sidings_kafka, etas)] == [b"good", b"bad"]


async def test_a_refusal_is_told_at_once_also_where_other_messages_of_the_list_wait(
    sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a partition that nobody leads."""
    etas, append = await topic("etas"), Sender.append

    async def refused(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if not self.idempotent:
            return await append(self, topic, **message)
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if message["value"] == b"bad":
            future.set_exception(UnknownError())
        return future

    monkeypatch.setattr(Sender, "append", refused)
    async with sending(sidings_kafka, delivery_seconds=1_000.0) as producer, asyncio.timeout(SECONDS):
        await producer.send_many([Outgoing(etas, b"k", value, None) for value in (b"late", b"bad")])
    assert [record.value for record in await records(sidings_kafka, etas)] == [b"late", b"bad"]


async def test_a_long_list_leaves_others_their_turn(sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kafka's answers: a list for many partitions was handed over in one go, and then it was late."""
    etas, append = await topic("etas", partitions=20), Sender.append
    turns, seen, over = 0, list[int](), asyncio.Event()

    async def other() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            await asyncio.sleep(0)

    async def noted(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        seen.append(turns)
        return await append(self, topic, **message)

    async with sending(sidings_kafka) as producer:
        await producer.send(etas, key="k", value=b"x")
        monkeypatch.setattr(Sender, "append", noted)
        task = asyncio.create_task(other())
        await producer.send_many([Outgoing(etas, b"%d" % n, b"x", None) for n in range(1_000)])
        over.set()
        await task
    assert len(set(seen)) >= 10


async def test_another_event_loop_is_refused_and_does_not_wait_for_ever(sidings_kafka: str, topic) -> None:
    """Its message was sent, and nobody in that loop was told."""
    etas = await topic("etas")
    async with sending(sidings_kafka) as producer:
        await producer.send(etas, key="k", value=b"1")

        async def elsewhere() -> None:
            async with asyncio.timeout(10):
                await producer.send(etas, key="k", value=b"2")

        with pytest.raises(ConfigurationError, match="event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())
        await producer.send(etas, key="k", value=b"3")
    assert [r.value for r in await records(sidings_kafka, etas)] == [b"1", b"3"]


async def test_a_dead_letter_that_was_not_acknowledged_is_sent_again(
    own_kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka's `stop` comes out as a cancellation while a request waits to be tried again, as if somebody had
    cancelled whoever sends: the message's task ended, and its partition stood still without a word."""
    kafka = own_kafka()
    for name in ("positions", "dead"):
        await create_topic(kafka.bootstrap, name, partitions=1)
    service = a_service(None, kafka.bootstrap, outbox=OutboxSettings(delivery_seconds=0.5))
    append = Sender.append

    async def paused(self: Sender, topic: str, **message: object) -> object:
        monkeypatch.setattr(Sender, "append", append)
        kafka.pause()
        return await append(self, topic, **message)

    @service.consumer("positions", stateless=True, dead_letter="dead")
    async def handle(message: Message[Number]) -> None:
        raise AssertionError("it cannot be decoded")

    await produce_raw(kafka.bootstrap, "positions", b"no number")
    monkeypatch.setattr(Sender, "append", paused)
    try:
        async with service:
            await eventually(lambda: any("cannot go to the dead-letter topic" in p for p in service.problems()))
            kafka.resume()
            await eventually(lambda: not service.problems())
    finally:
        kafka.resume()
    assert b"no number" in {record.value for record in await records(kafka.bootstrap, "dead")}


async def test_brokers_know_a_services_producer_by_its_client_id(sidings_kafka: str, topic) -> None:
    """Their logs and quotas go by it. It was the consumers' alone."""
    async with sending(KafkaSettings(bootstrap=sidings_kafka, client_id="tracker")) as producer:
        await producer.send(await topic("etas"), key="k", value=b"x")
        assert {sender._producer.client._client_id for sender in producer._current.values()} == {"tracker"}

"""Kafka producers as a relay uses them: whole batches, every wait bounded, and thrown away after a failure.

An idempotent producer counts the batches of each partition. After one that the broker refused, or whose fate is
unknown, the count is wrong and every later batch fails (aiokafka #1017): the producer is *retired*, and a new one
takes its place. Topics that fail get a producer of their own meanwhile, so that they cannot take those of the others
with them.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from contextvars import Context
from itertools import chain
from typing import Any, cast

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    DuplicateSequenceNumber,
    KafkaConnectionError,
    KafkaError,
    NoError,
    ProducerClosed,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.produce import ProduceRequest

from ...errors import KafkaUnavailable
from ...executor import Backoff, now
from ...outage import Outage
from ..brokers import go_around_hanging_brokers, throttling, unreached
from ..settings import KafkaSettings
from .settings import OutboxSettings

__all__ = ["Sender", "Senders"]

log = logging.getLogger("sidings.outbox")

_CLOSE_SECONDS = 2.0
_START_SECONDS = 10.0
_IDLE_SECONDS = 300.0  # without a message, before Kafka is asked no more for a topic


class Sender:
    """One producer. `users`: batches under way; `silent_since`: when a direct producer began to wait for an
    acknowledgement, if Kafka has given none since; `answered_at`: when it last has, or has told which topics there
    are; `batch_bytes`: most of a batch, less where the topic takes no more. Not idempotent ones serve topics that fail:
    at most one batch of a partition is under way there, so the order holds without counting."""

    def __init__(self, kafka: KafkaSettings, settings: OutboxSettings, *, idempotent: bool) -> None:
        request_ms = max(100, round(min(kafka.request_seconds, settings.delivery_seconds / 2) * 1000))
        options: dict[str, Any] = kafka.client_options() | {"request_timeout_ms": request_ms}
        self._producer = AIOKafkaProducer(
            **options,
            acks="all",
            enable_idempotence=idempotent,
            max_batch_size=settings.batch_bytes,
            max_request_size=settings.max_message_bytes,
            compression_type=settings.compression,
        )
        go_around_hanging_brokers(self._producer.client, wanted=self._wanted)
        self._producer.client.cluster.add_listener(self._forget)
        self._refusals: dict[TopicPartition, str] = {}  # the last of each partition, until it takes something
        self._note_answers()
        self._again: set[TopicPartition] = set()  # their last batch is tried again, and may stand there twice
        if not idempotent:
            self._note_repeats()
        self.idempotent = idempotent
        self.batch_bytes = settings.batch_bytes
        self.users = 0
        self.silent_since: float | None = None
        self.answered_at = 0.0
        self.closed = False
        self.retired = False
        self._asked_for: list[str] = []  # topics, by whoever is about to send
        self._asked_at: dict[str, float] = {}  # when somebody was last

    def _note_answers(self) -> None:
        """aiokafka tells nobody why it tries again, in an idempotent producer for ever; nor of an acknowledgement where
        who waited for it has given up."""
        client: Any = self._producer.client
        send = client.send

        async def noted(node_id: Any, request: Any, **options: Any) -> Any:
            answer = await send(node_id, request, **options)
            if isinstance(request, ProduceRequest):
                for topic, partitions in answer.topics:
                    for partition, code, *_ in partitions:
                        refusal = for_code(code)
                        if refusal in (NoError, DuplicateSequenceNumber):
                            self.silent_since, self.answered_at = None, time.monotonic()
                        if refusal.retriable:
                            self._refusals[TopicPartition(topic, partition)] = refusal.__name__
                        else:
                            self._refusals.pop(TopicPartition(topic, partition), None)
            return answer

        client.send = noted

    def _note_repeats(self) -> None:
        """Nor does it tell that it tries again; but it first puts back what it tries (`reenqueue`, 0.14)."""
        accumulator: Any = cast(Any, self._producer)._message_accumulator
        reenqueue = accumulator.reenqueue

        def noted(batch: Any) -> None:
            self._again.add(batch.tp)
            reenqueue(batch)

        accumulator.reenqueue = noted

    async def start(self) -> None:
        """Connect. Raises `KafkaUnavailable`."""
        try:
            async with asyncio.timeout(_START_SECONDS):  # what it logs for days is not of who sends first
                await asyncio.get_running_loop().create_task(self._producer.start(), context=Context())
        except (KafkaError, OSError) as error:  # TimeoutError is an OSError
            where = unreached(self._producer.client)
            await self.kill()
            refused = isinstance(error, ClusterAuthorizationFailedError)  # no id for an idempotent producer
            what = "its user may write to no topic" if refused else "no broker answers"
            raise KafkaUnavailable(f"{what}: {error!r}{where}", blameless=True) from error
        except BaseException:
            await self.kill()
            raise

    async def partitions(self, topic: str, timeout: float) -> list[int]:
        """The topic's partitions, sorted. After `timeout` seconds, raises aiokafka's `UnknownTopicOrPartitionError` if
        Kafka tells of none, `KafkaConnectionError` if it says nothing."""
        client: Any = self._producer.client
        told = client.cluster._last_successful_refresh_ms
        # Also where it is known: the next answer would have nothing of it otherwise, nor of who leads its partitions.
        client._topics.add(topic)
        self._asked_for.append(topic)
        self._asked_at[topic] = now()
        try:
            async with asyncio.timeout(timeout):
                if client.cluster.partitions_for_topic(topic) is None:
                    await client.learn(topic)
                return sorted(await self._producer.partitions_for(topic))
        except TimeoutError:
            if client.cluster._last_successful_refresh_ms == told:
                raise KafkaConnectionError(f"Kafka does not say which partitions {topic!r} has") from None
            raise UnknownTopicOrPartitionError(f"the topic {topic!r} does not exist") from None
        finally:
            self._asked_for.remove(topic)
            if client.cluster._last_successful_refresh_ms != told:
                self.answered_at = time.monotonic()
            if client.cluster.partitions_for_topic(topic) is None:
                self._forget(client.cluster)

    def _wanted(self) -> set[str]:
        """The topics that something is on its way to, or about to be."""
        return {*self._asked_for, *self.under_way()}

    def under_way(self) -> set[str]:
        """The topics that something is on its way to, be it that who sent it has given up."""
        accumulator = cast(Any, self._producer)._message_accumulator
        batches = chain(*accumulator._batches.values(), accumulator._pending_batches)
        return {batch.tp.topic for batch in batches}

    def _forget(self, cluster: Any) -> None:
        """Ask Kafka no more for topics that are not there, or that nobody has sent to for long, until somebody does.
        aiokafka would for ever, and log an error each time for those that are not there."""
        there, wanted, since = cluster.topics(exclude_internal_topics=False), self._wanted(), now() - _IDLE_SECONDS
        self._asked_at = {topic: at for topic, at in self._asked_at.items() if at > since or topic in wanted}
        topics: set[str] = cast(Any, self._producer.client)._topics
        topics.intersection_update(topic for topic in self._asked_at if topic in there or topic in wanted)

    def batch(self) -> Any:
        """An empty batch (aiokafka's ``BatchBuilder``)."""
        cast(Any, self._producer)._message_accumulator._batch_size = self.batch_bytes
        return self._producer.create_batch()

    async def send(self, batch: Any, topic: str, partition: int) -> "asyncio.Future[object]":
        """Hand a batch over. The future ends with the acknowledgement or the refusal."""
        batch.close()
        self._again.discard(TopicPartition(topic, partition))
        return _heard(await cast(Any, self._producer).send_batch(batch, topic, partition=partition))

    def sent_again(self, topic: str, partition: int) -> bool:
        """Whether aiokafka has tried the partition's last batch more than once, and the broker does not know it again:
        another copy of it may stand there, or come yet."""
        return TopicPartition(topic, partition) in self._again

    def late(self, topic: str, partitions: Collection[int]) -> TimeoutError:
        """What fails that these partitions have not acknowledged in time."""
        why = throttling(self._producer.client) or self.away(topic, partitions)
        return TimeoutError(f"Kafka did not acknowledge in time{why}")

    def away(self, topic: str, partitions: Collection[int]) -> str:
        """Why these partitions, or without any the brokers, take nothing at present, whatever it is: the end of a
        sentence, or nothing."""
        client, tps = self._producer.client, [TopicPartition(topic, number) for number in sorted(partitions)]
        leaders: dict[TopicPartition, Any] = {tp: client.cluster.leader_for_partition(tp) for tp in tps}
        unled = [f"{topic}/{tp.partition}" for tp, leader in leaders.items() if leader == -1]
        refused = [f"{topic}/{tp.partition} ({self._refusals[tp]})" for tp in tps if tp in self._refusals]
        return (
            (f": nobody leads {', '.join(unled[:5])}" if unled else "")
            or (f": refused by {', '.join(refused[:5])}" if refused else "")
            or unreached(client, set(leaders.values()) or None)
        )

    def stuck(self, topic: str, partitions: Collection[int]) -> frozenset[int]:
        """Those of these partitions that take nothing at present, as far as is known: nobody leads them, or the last
        batch was refused and is tried again."""
        led = cast(Collection[int], self._producer.client.cluster.available_partitions_for_topic(topic) or ())
        refused = {tp.partition for tp in self._refusals if tp.topic == topic}
        return frozenset(partitions).difference(led) | refused

    async def append(self, topic: str, **message: Any) -> "asyncio.Future[object]":
        """Hand one message over, to go with others; arguments as of aiokafka's ``send``."""
        return _heard(await cast(Any, self._producer).send(topic, **message))

    async def close(self) -> None:
        """Close in good order; what is under way has a moment to end."""
        if self.closed:
            return
        self.closed = True
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._producer.stop()
        except Exception as error:  # noqa: BLE001 - also one that has ended a task of the client
            log.warning("a producer did not close in time: %r", error)
            await self._end()

    async def kill(self) -> None:
        """Close now: nothing that is under way may be sent again, its futures fail."""
        self.closed = True
        await self._end()

    async def _end(self) -> None:
        # aiokafka 0.14 has no way to close a producer that still retries: its `stop` waits for the retries, which have
        # no end in an idempotent producer. So the two tasks that it would wait for are ended first.
        producer: Any = self._producer
        task: asyncio.Task[None] | None = producer._sender.sender_task
        if task is not None:
            task.cancel()
        accumulator = producer._message_accumulator
        waiting = list(chain.from_iterable(accumulator._batches.values()))
        for batch in waiting:
            _heard(batch._drain_waiter)  # it has not had its turn yet, and nobody waits for that
        accumulator.fail_all(ProducerClosed())
        # The callbacks of those that wait to be tried again take them from there, and raise where they are not.
        accumulator._pending_batches.update(batch for batch in waiting if batch.retry_count)
        # Requests that wait for their connection are tasks of which nobody knows: they are not sent when it is there.
        producer.client._conns = _Ended(producer.client._conns)
        accumulator.reenqueue = lambda batch: None  # pyright: ignore[reportUnknownLambdaType]
        if (synchronizer := producer.client._sync_task) is not None and synchronizer.done():
            producer.client._sync_task = None  # `close` would raise what has ended it, and close no connection
        for closing in (producer.client.close, producer.stop):
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await closing()
            except Exception as error:  # noqa: BLE001 - the other one is closed all the same
                log.debug("while closing a producer: %r", error)
            except asyncio.CancelledError:
                # Not always for us: `stop` cancels that task once more, in its wait for a request that is tried again,
                # and awaits it.
                current = asyncio.current_task()
                if current is None or current.cancelling():
                    raise
            # Requests that wait for who leads what, or come to that now, would for ever: nobody asks any more.
            producer.client.force_metadata_update()
            if not producer.client._md_update_fut.done():
                producer.client._md_update_fut.set_result(False)
        if task is not None and not task.done():
            task.cancel()


class _Ended(dict[Any, Any]):
    """The connections of a client that is ended: there are no new ones, and whoever has made one is cancelled."""

    def __setitem__(self, key: Any, connection: Any) -> None:
        connection.close()
        raise asyncio.CancelledError


def _heard(sent: "asyncio.Future[object]") -> "asyncio.Future[object]":
    """Nobody waits for an answer any more that has not come in time; asyncio would log each one that fails later."""
    sent.add_done_callback(lambda future: future.cancelled() or future.exception())
    return sent


class Senders:
    """The producer that the topics share, and its successors. connections: how many of them have reached Kafka."""

    def __init__(self, kafka: KafkaSettings, settings: OutboxSettings) -> None:
        self._kafka = kafka
        self._settings = settings
        self._main: Sender | None = None
        self._there = asyncio.Event()
        self._missing = asyncio.Event()
        self._missing.set()
        self._retired: set[Sender] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.outage = Outage(log, "the relay's producer could not be connected")

    @property
    def connected(self) -> bool:
        """Whether a producer has reached Kafka and has not failed since."""
        return self._main is not None

    async def run(self) -> None:
        """Keep a producer connected, for ever."""
        backoff, outage = Backoff(), self.outage
        while True:
            await self._missing.wait()
            sender = self.alone(idempotent=True)
            try:
                await sender.start()
            except KafkaUnavailable as error:
                outage.failed(error)
                await backoff.sleep()
                continue
            backoff.reset()
            outage.over()
            self.connections += 1
            self._main = sender
            self._missing.clear()
            self._there.set()

    async def main(self) -> Sender:
        """The shared producer, as soon as there is one."""
        while self._main is None:
            await self._there.wait()
        return self._main

    def alone(self, *, idempotent: bool = False) -> Sender:
        """A producer of its own, not started."""
        return Sender(self._kafka, self._settings, idempotent=idempotent)

    def unreachable(self) -> None:
        """A new producer has found no broker: the shared one may be connected to none, and has had nothing to send."""
        if self._main is not None:
            self.retire(self._main)

    def retire(self, sender: Sender) -> None:
        """Give it no further batches; it is closed when those under way have ended."""
        self._replace(sender)
        sender.retired = True
        if not sender.users:
            self._spawn(sender.close())
        else:
            self._retired.add(sender)

    def released(self, sender: Sender) -> None:
        """A batch has ended."""
        if not sender.users and sender in self._retired:
            self._retired.discard(sender)
            self._spawn(sender.close())

    async def kill(self, sender: Sender, grace: float = 0.0) -> None:
        """End it within `grace` seconds, whatever is under way."""
        self._replace(sender)
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        while sender.users and loop.time() < until:
            await asyncio.sleep(0.01)
        self._retired.discard(sender)
        await sender.kill()

    def end(self, sender: Sender, grace: float) -> None:
        """`kill` it, in the background."""
        self._spawn(self.kill(sender, grace))

    def kill_all(self) -> None:
        """A lease has run out under a batch: nothing may be sent any more by the producers of now."""
        for sender in ({self._main} if self._main else set[Sender]()) | self._retired:
            self._spawn(self.kill(sender))

    async def close(self) -> None:
        """Close all."""
        if self._main is not None:
            self.retire(self._main)
        for sender in list(self._retired):
            self._retired.discard(sender)
            self._spawn(sender.close())
        while self._closing:
            await asyncio.wait(self._closing)

    def _replace(self, sender: Sender) -> None:
        if self._main is sender:
            self._main = None
            self._there.clear()
            self._missing.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

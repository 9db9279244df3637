"""`service.producer`: messages that go to Kafka at once, without Postgres."""

import asyncio
import time
from collections.abc import Sequence
from datetime import datetime
from uuid import uuid4

from aiokafka.errors import (
    InvalidTimestampError,
    KafkaError,
    LeaderNotAvailableError,
    ProducerClosed,
)

from ..errors import KafkaUnavailable
from .checks import check_loop
from .outbox import MESSAGE_ID, Headers, InvalidMessage, NotPublished, OutboxSettings, Outgoing, Value
from .outbox.failures import NEVER, NO_TOPIC, ClocksApart, refuses
from .outbox.message import headers_from_text, outgoing
from .outbox.packing import Packer
from .outbox.senders import Sender, Senders
from .outbox.shunned import Shunned
from .settings import KafkaSettings

__all__ = ["Producer"]

_CAREFUL_SECONDS = 60.0  # after a refusal messages of the topic go alone for so long
_CONNECT_SECONDS = 12.0  # for a connection, be it that other calls try in vain to make one first
_AT_ONCE = 100  # messages that are handed over before others have their turn
_GRACE_SECONDS = 1.0  # for what others have under way, before a producer that has failed is closed


class Producer:
    """Sends messages directly, with ``acks=all`` and idempotent. One per service; connects at the first message.

    For services without Postgres, and for messages that need not stand or fall with a transaction. Messages of one key
    are kept in the order of the calls, as long as none fails; those of another call may stand between those of a list.
    """

    def __init__(self, kafka: KafkaSettings, settings: OutboxSettings) -> None:
        self._kafka = kafka
        self._settings = settings
        self._senders = Senders(kafka, self._settings)
        self._packer = Packer("direct", kafka.partitioners)
        self._shunned = Shunned(settings.max_backoff_seconds)
        self._current: dict[bool, Sender] = {}  # for messages that go together, and for those that go alone
        self._careful_until: dict[str, float] = {}  # by topic; its messages go alone until then
        self._lock = asyncio.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None  # that the connections belong to: the service's, if it runs
        self._stopped = False

    def begin(self) -> None:
        """The service begins, in this event loop. Connections that another one has made before lead nowhere here."""
        loop = asyncio.get_running_loop()
        if self.loop not in (None, loop):
            self._current.clear()
            self._lock = asyncio.Lock()
        self.loop = loop

    async def send(
        self,
        topic: str,
        *,
        key: str | bytes | None = None,
        value: Value = None,
        headers: Headers | None = None,
        partition_key: str | bytes | None = None,
        timestamp: datetime | None = None,
    ) -> None:
        """Send one message, and return when all in-sync replicas have it::

            await service.producer.send("etas", key="t-1", value=Eta(transport="t-1", eta=eta))

        Args:
            value: A pydantic model, bytes, or None for a tombstone. This and the others are as in `Outbox.publish`.

        Raises:
            InvalidMessage: Nothing was sent, or Kafka refused the message for what it is.
            NotPublished: There is no such topic, or no right to write to it. Or Kafka refuses the message for a reason
                that may be its own or not, as a policy of the brokers, or one that the client does not know.
            KafkaUnavailable: No acknowledgement in `OutboxSettings.delivery_seconds`: the message may have arrived. Or
                a clock is wrong, so that Kafka refuses the time of now. A handler that raises it has not failed, and
                runs again; from the third time on only where it is `blameless` (docs/policies.md).
            ConfigurationError: This is another event loop than the service's, or than that of the first call.
        """
        message = outgoing(
            topic,
            key=key,
            value=value,
            headers=headers,
            partition_key=partition_key,
            timestamp=timestamp,
            settings=self._settings,
        )
        await self.send_many([message])

    async def send_many(self, messages: Sequence[Outgoing]) -> None:
        """Send many messages of one topic, in order, and return when all are acknowledged.

        Errors are those of `send`; some messages may have arrived then. `OutboxSettings.delivery_seconds` are those
        from one acknowledgement to the next. A list that takes longer than them fails where another message does, as
        for another topic.
        """
        if not messages:
            return
        topic, left = messages[0].topic, [(message, uuid4().hex.encode()) for message in messages]
        alone = time.monotonic() < self._careful_until.get(topic, 0.0)
        try:
            sender = await self._connected(alone=alone)
            try:
                await self._send(sender, left, alone=alone)
            except KafkaError as error:
                if refuses(error):
                    self._careful_until[topic] = time.monotonic() + _CAREFUL_SECONDS
                    sender.retired = True
                if alone or not sender.retired or isinstance(error, NO_TOPIC):
                    raise
                # Kafka refuses whole batches, and an idempotent producer can send no more then: the fault may be
                # another message's, and that another caller's.
                await self._send(await self._connected(alone=True), left, alone=True)
        except NEVER as error:
            if isinstance(error, InvalidTimestampError) and all(message.timestamp is None for message in messages):
                raise KafkaUnavailable(str(ClocksApart()), blameless=True) from error
            raise InvalidMessage(f"Kafka refused the message: {error}") from error
        except NO_TOPIC as error:
            raise NotPublished(f"no message can be sent: {error}") from error
        except (KafkaError, OSError) as error:  # TimeoutError is an OSError
            if refuses(error):
                raise NotPublished(f"Kafka refuses the message: {error}") from error
            raise KafkaUnavailable(f"Kafka has not acknowledged the message: {error!r}") from error

    async def stop(self) -> None:
        """Close the connections. Safe to call twice, and when never used."""
        self._stopped = True
        for sender in self._current.values():
            self._senders.retire(sender)
        self._current.clear()
        await self._senders.close()

    async def _send(self, sender: Sender, left: list[tuple[Outgoing, bytes]], *, alone: bool) -> None:
        """Send all that is in `left`. What need not be repeated where something has failed leaves it."""
        began, topic, delivery_seconds = time.monotonic(), left[0][0].topic, self._settings.delivery_seconds
        futures, places, over = list[asyncio.Future[object]](), list[int](), asyncio.Event()
        sender.users += 1
        sender.silent_since = sender.silent_since or began
        try:
            async with asyncio.timeout(delivery_seconds) as limit:

                def answered(sent: "asyncio.Future[object]") -> None:
                    if _unacknowledged(sent):
                        over.set()
                    elif not (over.is_set() or limit.expired()):
                        limit.reschedule(asyncio.get_running_loop().time() + delivery_seconds)

                partitions = await sender.partitions(topic, self._settings.metadata_seconds)
                if not sender.under_way():  # who began to wait before has given up, or has nothing to wait for yet
                    sender.silent_since = time.monotonic()
                avoided = self._shunned.avoided(topic, partitions, sender.stuck(topic, partitions))
                open = [partition for partition in partitions if partition not in avoided] or partitions
                for message, id in left:
                    key = message.key if message.partition_key is None else message.partition_key
                    place = self._packer.partition_of(topic, key, open if key is None else partitions)
                    places.append(place)
                    futures.append(sent := await self._hand_over(sender, place, message, id))
                    if len(left) > 1:
                        sent.add_done_callback(answered)
                    if len(futures) % _AT_ONCE == 0:
                        await asyncio.sleep(0)  # Kafka's answers, and all else, have their turn
                    if over.is_set():  # one has failed
                        break
                await asyncio.gather(*futures)
        except asyncio.CancelledError:  # of a caller with less patience: its brokers may be lost all the same
            now, since = time.monotonic(), max(sender.silent_since or began, sender.answered_at)
            if now - since > delivery_seconds and now - began > _GRACE_SECONDS:
                self._drop(sender)
                self._shunned.failed(topic, _stuck(places, futures))
            raise
        except NO_TOPIC:  # it says nothing about what others have under way
            if futures and not alone:
                self._retire(sender)
            if sender.users == 1:
                sender.silent_since = None
            raise
        except (KafkaError, OSError) as error:
            if not (alone and refuses(error)):
                self._drop(sender)
            late = isinstance(error, TimeoutError | LeaderNotAvailableError)
            if not late and (refuses(error) or (sender.retired and not alone)):
                raise  # it is sent once more
            if not isinstance(error, ProducerClosed):  # another was late
                self._shunned.failed(topic, _stuck(places, futures))
            told = sender.late(topic, set(places)) if late else error
            elsewhere = isinstance(error, ProducerClosed) or bool(sender.away(topic, set(places)))
            raise KafkaUnavailable(
                f"Kafka has not acknowledged the message: {told!r}",
                blameless=elsewhere and all(map(_unacknowledged, futures)),
            ) from error
        finally:
            over.set()
            self._shunned.took(topic, set(places) - _stuck(places, futures))
            left[: len(futures)] = _to_repeat(left, places, futures)
            sender.users -= 1
            self._senders.released(sender)

    async def _connected(self, *, alone: bool) -> Sender:
        """The producer of the messages that go together; or that of those that go alone, to which a refusal does
        nothing."""
        if self._stopped:
            raise KafkaUnavailable("the producer has been stopped")
        self.loop = self.loop or asyncio.get_running_loop()
        check_loop(self.loop, "that the service runs in, or in which this producer has sent before")
        try:
            async with asyncio.timeout(_CONNECT_SECONDS), self._lock:
                if alone not in self._current:
                    settings = self._settings.model_copy(update={"batch_bytes": 1}) if alone else self._settings
                    sender = Sender(self._kafka, settings, idempotent=not alone)
                    await sender.start()
                    if self._stopped:
                        await sender.kill()
                        raise KafkaUnavailable("the producer has been stopped")
                    self._current[alone] = sender
                return self._current[alone]
        except TimeoutError as error:
            raise KafkaUnavailable("no connection to Kafka was made in time", blameless=True) from error

    async def _hand_over(
        self, sender: Sender, partition: int, message: Outgoing, id: bytes
    ) -> "asyncio.Future[object]":
        try:
            return await sender.append(
                message.topic,
                key=message.key,
                value=message.value,
                headers=[*headers_from_text(message.headers), (MESSAGE_ID, id)],
                timestamp_ms=None if message.timestamp is None else round(message.timestamp.timestamp() * 1000),
                partition=partition,
            )
        except (AssertionError, TypeError) as error:  # aiokafka's, of a partition that is not there any more
            raise KafkaError(f"the topic {message.topic!r} has just been deleted, or made anew") from error

    def _drop(self, sender: Sender) -> None:
        """After a failure an idempotent producer has lost count (aiokafka #1017): the next message gets another."""
        if self._replace(sender):
            self._senders.end(sender, _GRACE_SECONDS)

    def _retire(self, sender: Sender) -> None:
        """The same where Kafka answers: what others have under way has its time."""
        if self._replace(sender):
            self._senders.retire(sender)

    def _replace(self, sender: Sender) -> bool:
        """Whether it was in use until now."""
        for alone, current in self._current.items():
            if current is sender:
                del self._current[alone]
                return True
        return False


def _to_repeat(
    sent: Sequence[tuple[Outgoing, bytes]], places: Sequence[int], futures: Sequence["asyncio.Future[object]"]
) -> list[tuple[Outgoing, bytes]]:
    """Those that are not acknowledged, and what stands behind them in their partitions: what is older must not come
    after it."""
    behind, repeated = set[int](), list[tuple[Outgoing, bytes]]()
    for message, place, future in zip(sent, places, futures, strict=False):
        if place in behind or _unacknowledged(future):
            behind.add(place)
            repeated.append(message)
    return repeated


def _stuck(places: Sequence[int], futures: Sequence["asyncio.Future[object]"]) -> set[int]:
    """The partitions that have not taken all of what they were sent; the last one of `places` may have no future, as
    where nothing could be handed over to it any more."""
    sent = {place for place, future in zip(places, futures, strict=False) if _unacknowledged(future)}
    return sent.union(places[len(futures) :])


def _unacknowledged(sent: "asyncio.Future[object]") -> bool:
    return not sent.done() or sent.cancelled() or sent.exception() is not None

"""`service.producer`: messages that go to Kafka at once, without Postgres."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from uuid import uuid4

from aiokafka.errors import KafkaError, ProducerClosed

from ..errors import KafkaUnavailable
from .outbox import MESSAGE_ID, Headers, InvalidMessage, NotPublished, OutboxSettings, Outgoing, Value
from .outbox.failures import NEVER, NO_TOPIC
from .outbox.message import headers_from_text, outgoing
from .outbox.packing import Packer
from .outbox.senders import Sender
from .settings import KafkaSettings

__all__ = ["Producer"]


class Producer:
    """Sends directly: ``acks=all``, idempotent. One per service; connects at the first message.

    For services without Postgres, and for messages that need not stand or fall with a transaction. Messages of one key
    are kept in the order of the calls, as long as none fails.
    """

    def __init__(self, kafka: KafkaSettings, settings: OutboxSettings | None = None) -> None:
        self._kafka = kafka
        self._settings = settings or OutboxSettings()
        self._packer = Packer("direct")
        self._sender: Sender | None = None
        self._lock = asyncio.Lock()
        self._stopped = False

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
        """Send one message and return when all in-sync replicas have it; arguments as of `Outbox.publish`.

        Raises `InvalidMessage` (nothing was sent, or Kafka refused it for what it is), `NotPublished` (no such topic,
        or no right to write to it), `KafkaUnavailable` (no acknowledgement in `delivery_seconds`: it may have arrived).
        """
        message = outgoing(
            topic,
            key=key,
            value=value,
            headers=headers,
            partition_key=partition_key,
            timestamp=timestamp,
            max_bytes=self._settings.max_message_bytes,
            correlation_header=self._settings.correlation_header,
        )
        await self.send_many([message])

    async def send_many(self, messages: Sequence[Outgoing]) -> None:
        """Send many, in order; return when all are acknowledged. Raises as `send`; some may have arrived then."""
        sender = await self._connected()
        try:
            async with asyncio.timeout(self._settings.delivery_seconds):
                futures = [await self._hand_over(sender, message) for message in messages]
                await asyncio.gather(*futures)
        except NEVER as error:
            await self._drop(sender)
            raise InvalidMessage(f"Kafka refused the message: {error}") from error
        except NO_TOPIC as error:
            await self._drop(sender)
            raise NotPublished(f"no message can be sent: {error}") from error
        except (KafkaError, ProducerClosed, OSError) as error:  # TimeoutError is an OSError
            await self._drop(sender)
            raise KafkaUnavailable(f"Kafka has not acknowledged the message: {error!r}") from error

    async def stop(self) -> None:
        """Close the connection. Safe to call twice, and when never used."""
        self._stopped = True
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.close()

    async def _connected(self) -> Sender:
        if self._stopped:
            raise KafkaUnavailable("the producer has been stopped")
        async with self._lock:
            if self._sender is None:
                sender = Sender(self._kafka, self._settings, idempotent=True)
                await sender.start()
                self._sender = sender
            return self._sender

    async def _hand_over(self, sender: Sender, message: Outgoing) -> "asyncio.Future[object]":
        partitions = await sender.partitions(message.topic, self._settings.metadata_seconds)
        key = message.key if message.partition_key is None else message.partition_key
        return await sender.append(
            message.topic,
            key=message.key,
            value=message.value,
            headers=[*headers_from_text(message.headers), (MESSAGE_ID, uuid4().hex.encode())],
            timestamp_ms=None if message.timestamp is None else round(message.timestamp.timestamp() * 1000),
            partition=self._packer.partition_of(key, partitions),
        )

    async def _drop(self, sender: Sender) -> None:
        """After a failure an idempotent producer has lost count (aiokafka #1017): the next message gets another."""
        if self._sender is sender:
            self._sender = None
            await sender.kill()

"""Where messages go that a stateless consumer cannot handle: another topic, unchanged, with the reason in headers."""

from .message import Record
from .outbox import Outgoing
from .outbox.message import headers_to_text
from .producer import Producer

__all__ = ["DeadLetters"]

_MAX_ERROR_BYTES = 2_000


class DeadLetters:
    """Sends the messages of `group`'s consumer to dead-letter topics, by a producer of its own: where Kafka refuses a
    message, its producer is thrown away with all that it had under way, and what others have sent must not do that to
    results of handlers."""

    def __init__(self, group: str, producer: Producer) -> None:
        self._group = group
        self._producer = producer

    async def send(self, topic: str, record: Record, error: str) -> None:
        """Send `record` to `topic` and return when all in-sync replicas have it. Key, value and headers stay as they
        are; the place it comes from and `error` stand in further headers. Raises as `Producer.send`."""
        reason = error.encode(errors="replace")[:_MAX_ERROR_BYTES].decode(errors="ignore")
        headers: list[tuple[str, str | bytes | None]] = [
            *record.headers,
            ("sidings-error", reason),
            ("sidings-group", self._group),
            ("sidings-topic", record.topic),
            ("sidings-partition", str(record.partition)),
            ("sidings-offset", str(record.offset)),
            ("sidings-timestamp", str(record.timestamp)),
        ]
        # Not through `outgoing`, which refuses what a service should not send: this message was sent by somebody else.
        # Only one thing it could not send, for aiokafka refuses that: neither key nor value.
        value = b"" if record.key is None and record.value is None else record.value
        await self._producer.send_many([Outgoing(topic, record.key, value, headers_to_text(headers))])

    async def stop(self) -> None:
        """Close the connection, if there is one."""
        await self._producer.stop()

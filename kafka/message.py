"""What a consumer's handler gets to see of a Kafka message, and the form in which a message is stored as a job."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from pydantic import BaseModel

from ..errors import ConfigurationError
from ..jobs.context import travelling

__all__ = [
    "Message",
    "Record",
    "StoredMessage",
    "StoredRecord",
    "check_topic",
    "group_of_key",
    "origin_of",
    "possible_topic",
    "size_of",
]

T = TypeVar("T")

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_END_MS = 253_402_300_800_000  # of the year 9999
_MAX_GROUP_BYTES = 500  # longer keys are hashed: origin and group stand in one index entry


def possible_topic(name: str) -> bool:
    """Whether Kafka can have a topic of this name."""
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..")


def check_topic(topic: object, what: str, *, leased: bool = False) -> None:
    """Whether Kafka may have a topic of that name. leased: its partitions are origins of an executor, and its name is
    not that of the outbox' slots. Raises `ConfigurationError`, which names `what` declares it."""
    if not isinstance(topic, str) or not possible_topic(topic):
        given = getattr(topic, "__name__", repr(topic))  # a function, where a decorator stands without parentheses
        raise ConfigurationError(
            f"{what}({given}): name one topic, of 1 to 249 letters, digits, '.', '_' and '-', such as 'positions'"
        )
    if leased and topic == "outbox":
        raise ConfigurationError(
            f"{what}('outbox'): relays lease outbox/0 to outbox/15 as the slots of the outbox, so jobs of these "
            "partitions would never run: give the topic another name, or consume it in a service without Postgres "
            "(stateless=True)"
        )


class Record(Protocol):
    """A message as it came from Kafka; aiokafka's ``ConsumerRecord`` is one."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]: ...


@dataclass(slots=True)
class Message(Generic[T]):
    """A Kafka message with its decoded value.

    Attributes:
        timestamp_ms: Milliseconds since 1970, as the producer or the broker set it; -1 when there is none.
        headers: In the order of the message. A name may occur more than once, a value may be None.
        type: Where its topic has messages of several types (``Service.topic``): this one's, or None where it has none.
    """

    value: T
    topic: str = ""
    partition: int = 0
    offset: int = 0
    timestamp_ms: int = -1
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    type: str | None = None

    @property
    def origin(self) -> str:
        """The partition, as jobs name it: ``topic/partition``."""
        return origin_of(self.topic, self.partition)

    @property
    def timestamp(self) -> datetime | None:
        """When the message was sent (or appended, as the topic is configured), in UTC.

        None where there is none, and where it lies behind the year 9999: producers may send any number, and no
        `datetime` can be that one.
        """
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC) if 0 <= self.timestamp_ms < _END_MS else None

    @property
    def key_text(self) -> str | None:
        """The key as text; None where there is no key.

        Raises:
            UnicodeDecodeError: The key is no text.
        """
        return None if self.key is None else self.key.decode()

    def header(self, name: str) -> bytes | None:
        """The last header of that name, or None."""
        return next((value for key, value in reversed(self.headers) if key == name), None)

    def travelling(self) -> dict[str, str]:
        """The headers that go on to what the handler enqueues and publishes (docs/observability.md)."""
        return travelling(self.headers) if self.headers else {}

    def log_fields(self) -> dict[str, object]:
        """What `LogContext` adds to each line of the log."""
        return {
            "origin": self.origin,
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
        }


@dataclass(slots=True)
class StoredRecord:
    """A record that was stored as a job."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class StoredMessage(BaseModel):
    """A message as a job's payload. Bytes stand in base64, so that any message can be stored. error: why it is not
    handled in the main line; null for ``isolate=True``. topic_id: which topic of that name it is of, as far as known: a
    reset of one that was made anew is none of it."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: str | None = None
    value: str | None = None
    headers: list[tuple[str, str | None]] = []
    error: str | None = None
    topic_id: UUID | None = None

    @classmethod
    def of(cls, record: Record, error: str | None, topic_id: UUID | None) -> "StoredMessage":
        """Store `record`."""
        return cls.model_construct(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            timestamp=record.timestamp,
            key=_text(record.key),
            value=_text(record.value),
            headers=[(name, _text(value)) for name, value in record.headers],
            error=error,
            topic_id=topic_id,
        )

    def record(self) -> Record:
        """The record that was stored."""
        headers = [(name, _bytes(value)) for name, value in self.headers]
        return StoredRecord(
            self.topic, self.partition, self.offset, self.timestamp, _bytes(self.key), _bytes(self.value), headers
        )


def origin_of(topic: str, partition: int) -> str:
    """A partition as jobs name it."""
    return f"{topic}/{partition}"


def size_of(record: Record) -> int:
    """Bytes of its value, key and headers."""
    size = len(record.value or b"") + len(record.key or b"")
    return size + sum(len(name) + len(value or b"") for name, value in record.headers) if record.headers else size


def group_of_key(key: bytes | None) -> str | None:
    """The group of a message's key: the key itself where it is text, its hash otherwise, None without a key."""
    if key is None:
        return None
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or len(key) > _MAX_GROUP_BYTES or not text.isprintable():
        return f"sha256:{hashlib.sha256(key).hexdigest()}"
    return text


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else base64.b64decode(value)

"""What is sent: events and alerts, as Kafka messages."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = [
    "CORRELATION_HEADER",
    "HEADERS",
    "ID_HEADER",
    "TRANSACTION_HEADER",
    "TYPE_HEADER",
    "Json",
    "Outgoing",
    "alert",
    "correlation_id",
    "digest",
    "event",
    "text_of",
    "within",
]

Json = Mapping[str, object]

ID_HEADER = "sidings-id"  # what a consumer of Sidings with `dedup=True` looks at
TYPE_HEADER = "type"
CORRELATION_HEADER = "correlation_id"
TRANSACTION_HEADER = "transaction_id"
HEADERS = (ID_HEADER, TYPE_HEADER, CORRELATION_HEADER, TRANSACTION_HEADER)  # of a message, at most

_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
VALUE_CHARACTERS = 4_000  # of a bad record's value that its alert shows


@dataclass(frozen=True)
class Outgoing:
    """A message to be sent. Its id is a function of what it tells: a repeat has the same."""

    topic: str
    key: str
    value: str
    headers: Mapping[str, str]

    @property
    def size(self) -> int:
        """In bytes, all that a topic counts; it adds some for itself."""
        return sum(len(part.encode()) for part in (self.key, self.value, *self.headers, *self.headers.values()))


def digest(*parts: str) -> str:
    """32 hexadecimal digits of SHA-256 over the parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def correlation_id(transaction: str) -> str:
    """The same for all messages that one database transaction has caused, and of one length."""
    return digest(transaction)


def text_of(value: object) -> str:
    """As compact JSON. Raises ValueError for a number that JSON does not have."""
    return _encoder.encode(value)


def event(topic: str, type: str, key: str, body: Json, *, transaction: str | None, id: str) -> Outgoing:
    """A domain event. id: of the event; transaction: None for snapshots."""
    headers = {ID_HEADER: id, TYPE_HEADER: type}
    if transaction is not None:
        headers |= {CORRELATION_HEADER: correlation_id(transaction), TRANSACTION_HEADER: transaction}
    return Outgoing(topic, key, text_of(body), headers)


def alert(topic: str, kind: str, reason: str, *, transaction: str | None = None, **details: object) -> Outgoing:
    """Something for a person to look at. kind: one of the words of docs/cdc-transactions.md. details: further fields;
    `place` (topic/partition/offset) is the key where there is no transaction."""
    body: dict[str, object] = {"alert": kind, "reason": _cut(reason), "transaction": transaction}
    body |= {name: _cut(detail) for name, detail in details.items()}
    value = text_of(body)
    headers = {ID_HEADER: digest("alert", value), TYPE_HEADER: kind}
    if transaction is not None:
        headers |= {CORRELATION_HEADER: correlation_id(transaction), TRANSACTION_HEADER: transaction}
    return Outgoing(topic, transaction or str(details.get("place", kind)), value, headers)


def _cut(detail: object) -> object:
    if isinstance(detail, str) and len(detail) > VALUE_CHARACTERS:
        return f"{detail[:VALUE_CHARACTERS]}… ({len(detail)} characters)"
    return detail


def within(outgoing: Outgoing, most: int, alerts: str) -> Iterator[Outgoing]:
    """The message, or an alert in its stead when it has more than `most` bytes: the topic would refuse it, and nothing
    after it would be sent."""
    size = outgoing.size
    if size <= most:
        yield outgoing
        return
    yield alert(
        alerts,
        "too-large",
        f"an event of {size} bytes was not sent; max_event_bytes is {most}",
        transaction=outgoing.headers.get(TRANSACTION_HEADER),
        event=outgoing.headers[TYPE_HEADER],
        id=outgoing.key,
        event_id=outgoing.headers[ID_HEADER],
    )

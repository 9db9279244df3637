"""A message on its way into the outbox: checked and serialised, as far as that is possible without Kafka."""

import base64
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, cast

from pydantic import BaseModel
from pydantic_core import from_json

from ...jobs.context import CORRELATION_ID, missing_headers
from ...jobs.doubts import may_hold_floats
from ...jobs.lossy import HALF, MASK, STAR, has_half_characters, held_by, loses_numbers, masks_secret, told
from ..message import possible_topic
from .errors import InvalidMessage
from .settings import OutboxSettings

__all__ = [
    "Headers",
    "Outgoing",
    "Value",
    "headers_from_text",
    "headers_to_text",
    "outgoing",
    "outgoing_many",
]

Value = BaseModel | bytes | None
Headers = Mapping[str, str | bytes | None] | Iterable[tuple[str, str | bytes | None]]

_OVERHEAD_BYTES = 100  # of a record and its batch, beside key, value and headers


class Outgoing(NamedTuple):
    """A message as the outbox stores it. headers: JSON text of ``[[name, value], …]``; null without any."""

    topic: str
    key: bytes | None = None
    value: bytes | None = None
    headers: str | None = None
    partition_key: bytes | None = None
    timestamp: datetime | None = None


def outgoing(
    topic: str,
    *,
    key: str | bytes | None,
    value: Value,
    headers: Headers | None,
    partition_key: str | bytes | None,
    timestamp: datetime | None,
    settings: OutboxSettings,
) -> Outgoing:
    """Check and serialise one message, with the current correlation id and trace. Raises `InvalidMessage`."""
    _check_topic(topic)
    if timestamp is not None and getattr(timestamp, "tzinfo", None) is None:
        raise InvalidMessage(
            f"timestamp={timestamp!r} has no time zone: give an aware datetime, e.g. datetime.now(UTC)"
        )
    text, max_bytes = _headers_text(headers, settings.correlation_header), settings.max_message_bytes
    raw_key, raw_value = _content(topic, key, value, text, max_bytes)
    raw_partition_key = _raw("partition_key", partition_key)
    if len(raw_partition_key or b"") > max_bytes:
        raise InvalidMessage(
            f"{topic}: partition_key has more bytes than max_message_bytes={max_bytes}: give a shorter one"
        )
    return Outgoing(topic, raw_key, raw_value, text, raw_partition_key, timestamp)


def outgoing_many(
    topic: str, messages: Iterable[tuple[str | bytes | None, Value]], *, settings: OutboxSettings
) -> list[Outgoing]:
    """`outgoing` for pairs of key and value: what they have in common is looked at once."""
    _check_topic(topic)
    text, max_bytes = _headers_text(None, settings.correlation_header), settings.max_message_bytes
    if not hasattr(messages, "__iter__"):
        raise InvalidMessage(f"messages= is a {type(messages).__name__}: give a list of pairs of key and value")
    pairs = list(messages)
    try:
        return [Outgoing(topic, *_content(topic, key, value, text, max_bytes), text) for key, value in pairs]
    except (TypeError, ValueError) as error:  # of a pair that is none
        raise InvalidMessage(f"{topic}: the messages are no pairs of key and value: {error}") from error


def _check_topic(topic: str) -> None:
    if not (isinstance(topic, str) and possible_topic(topic)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidMessage(f"topic={topic!r}: give 1 to 249 letters, digits, '.', '_' and '-'")


def _headers_text(headers: Headers | None, correlation_header: str) -> str | None:
    pairs = _with_current(headers, correlation_header)
    return headers_to_text(cast(Headers, pairs)) if pairs else None


def _content(
    topic: str, key: str | bytes | None, value: Value, text: str | None, max_bytes: int
) -> tuple[bytes | None, bytes | None]:
    """Key and value as the outbox stores them."""
    raw_key, raw_value = _raw("key", key), _serialise(value)
    if raw_key is None and raw_value is None:
        raise InvalidMessage(f"{topic}: a tombstone (value=None) needs a key")
    size = len(raw_key or b"") + len(raw_value or b"") + len(text or "") + _OVERHEAD_BYTES
    if size > max_bytes:
        raise InvalidMessage(
            f"{topic}: the message has about {size} bytes, more than max_message_bytes={max_bytes}: make it smaller, "
            "or raise OutboxSettings.max_message_bytes where brokers and topic take more"
        )
    return raw_key, raw_value


def _with_current(headers: Headers | None, correlation_header: str) -> list[tuple[str, object]]:
    """These headers, and the current ones that are not among them."""
    given = cast(Any, headers.items() if isinstance(headers, Mapping) else headers or ())
    try:
        pairs: list[tuple[str, object]] = [(name, value) for name, value in given]
    except (TypeError, ValueError):
        raise InvalidMessage(f"headers={headers!r}: give a dict, or pairs of name and value") from None
    names = (str(name) for name, _ in pairs)
    own = correlation_header.lower()  # the id has whatever name the settings give it
    carried = missing_headers(CORRELATION_ID if name.lower() == own else name for name in names)
    return pairs + [(correlation_header if name == CORRELATION_ID else name, text) for name, text in carried.items()]


def _raw(field: str, value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"{field} cannot be encoded: {error}") from error
    raise InvalidMessage(f"{field}={value!r}: give str, bytes or None")


def _serialise(value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, BaseModel):
        try:
            data = value.model_dump_json().encode()
            lost = _lost(value, data)
        except Exception as error:  # whatever a serialiser of the model's own may raise
            raise InvalidMessage(f"{type(value).__name__} cannot be serialised to JSON: {told(error)}") from error
        if lost:
            raise InvalidMessage(f"{type(value).__name__} holds {lost}, or give bytes")
        return data
    raise InvalidMessage(f"value is a {type(value).__name__}: give a pydantic model, bytes, or None for a tombstone")


@lru_cache(1_000)
def _may_hold_floats(model: type[BaseModel]) -> bool:
    return may_hold_floats(model.__pydantic_core_schema__)


def _lost(value: BaseModel, data: bytes) -> str:
    """What in it JSON has no form for, and what to do; empty where all of it is there."""
    if STAR in data and MASK in data and masks_secret(value.model_dump):
        return "a secret (SecretStr), of which JSON gets asterisks: give the field a serializer that reveals it"
    if HALF[0] in data and HALF in data and has_half_characters(held_by(value.model_dump)):
        return "a key with half a character (a lone surrogate), of which JSON gets another one: correct its decoding"
    looked_at = _may_hold_floats(type(value)) and b"null" in data
    if looked_at and loses_numbers(held_by(value.model_dump), from_json(data)):
        return "a float that is NaN or infinite, of which JSON gets null: ConfigDict(ser_json_inf_nan='strings')"
    return ""


def headers_to_text(headers: Headers) -> str:
    """Headers as `Outgoing` has them. Raises `InvalidMessage`."""
    pairs = cast(Iterable[tuple[str, object]], headers.items() if isinstance(headers, Mapping) else headers)
    out: list[tuple[str, object]] = []
    for name, value in pairs:
        stored = value
        if isinstance(value, bytes):
            try:
                stored = value.decode()
            except UnicodeDecodeError:
                stored = {"base64": base64.b64encode(value).decode()}
        elif not isinstance(value, str | None):
            raise InvalidMessage(f"header {name!r}={value!r}: give str, bytes or None")
        out.append((name, stored))
    try:
        text = json.dumps(out, ensure_ascii=False)
        text.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidMessage(f"the headers cannot be stored: {error}") from error
    return text


def headers_from_text(text: str | None) -> list[tuple[str, bytes | None]]:
    """The headers of a stored message, as aiokafka wants them. SQL may have stored an object instead of pairs."""
    if text is None:
        return []
    stored: Any = json.loads(text)
    pairs = cast(Iterable[tuple[object, object]], cast(Any, stored).items() if isinstance(stored, dict) else stored)
    return [(str(name), _header_value(value)) for name, value in pairs]


def _header_value(value: object) -> bytes | None:
    match value:
        case None:
            return None
        case str():
            return value.encode()
        case {"base64": str(encoded)}:
            return base64.b64decode(encoded)
        case _:
            return json.dumps(value).encode()

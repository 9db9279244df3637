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
    "Item",
    "Outgoing",
    "Value",
    "headers_from_text",
    "headers_to_text",
    "outgoing",
    "outgoing_many",
]

Value = BaseModel | bytes | None
Headers = Mapping[str, str | bytes | None] | Iterable[tuple[str, str | bytes | None]]
Item = tuple[str | bytes | None, Value] | tuple[str | bytes | None, Value, Headers | None]  # key, value, own headers

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
    text, max_bytes = _headers_text(_pairs(headers), settings.correlation_header), settings.max_message_bytes
    raw_key, raw_value = _content(topic, key, value, text, max_bytes)
    raw_partition_key = _raw("partition_key", partition_key)
    if len(raw_partition_key or b"") > max_bytes:
        raise InvalidMessage(
            f"{topic}: partition_key has more bytes than max_message_bytes={max_bytes}: give a shorter one"
        )
    return Outgoing(topic, raw_key, raw_value, text, raw_partition_key, timestamp)


def outgoing_many(
    topic: str, messages: Iterable[Item], *, headers: Headers | None, settings: OutboxSettings
) -> list[Outgoing]:
    """`outgoing` for pairs of key and value, or these and headers: what they have in common is looked at once.

    Those without headers of their own share one text."""
    _check_topic(topic)
    shared, correlation_header, max_bytes = _pairs(headers), settings.correlation_header, settings.max_message_bytes
    text = _headers_text(shared, correlation_header)
    if not hasattr(messages, "__iter__"):
        raise InvalidMessage(f"messages= is a {type(messages).__name__}: give a list of pairs of key and value")
    items, made = list[Any](messages), list[Outgoing]()
    try:
        for item in items:
            if len(item) == 3 and not isinstance(item, str | bytes):
                key, value, own = item
                its = text if own is None else _headers_text(_replaced(shared, _pairs(own)), correlation_header)
            else:
                (key, value), its = cast(Any, item), text
            made.append(Outgoing(topic, *_content(topic, key, value, its, max_bytes), its))
    except InvalidMessage as error:
        raise InvalidMessage(f"messages[{len(made)}]: {error}") from error
    except (TypeError, ValueError) as error:  # of a pair that is none
        raise InvalidMessage(
            f"{topic}: messages[{len(made)}] is no pair of key and value, nor these and headers: {error}"
        ) from error
    return made


def _check_topic(topic: str) -> None:
    if not (isinstance(topic, str) and possible_topic(topic)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidMessage(f"topic={topic!r}: give 1 to 249 letters, digits, '.', '_' and '-'")


def _headers_text(given: list[tuple[str, object]], correlation_header: str) -> str | None:
    pairs = _with_current(given, correlation_header)
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


def _pairs(headers: Headers | None) -> list[tuple[str, object]]:
    given = cast(Any, headers.items() if isinstance(headers, Mapping) else headers or ())
    try:
        return [(name, value) for name, value in given]
    except (TypeError, ValueError):
        raise InvalidMessage(f"headers={headers!r}: give a dict, or pairs of name and value") from None


def _replaced(shared: list[tuple[str, object]], own: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """A message's own headers, behind the shared ones of other names: of two that mean the same, the last counts."""
    names = [name for name, _ in own]
    return [pair for pair in shared if pair[0] not in names] + own


def _with_current(pairs: list[tuple[str, object]], correlation_header: str) -> list[tuple[str, object]]:
    """These headers, and the current ones that are not among them."""
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

"""A row change, whatever form it came in, and what is asked of the fields of a form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from .messages import Json, text_of

__all__ = ["ID_CHARACTERS", "Change", "Malformed", "checked_id", "field_of", "mapping", "positive"]

ID_CHARACTERS = 1_000  # of a transaction's or a root's; they are keys and headers of messages, which topics limit


class Malformed(Exception):
    """A record is not what it should be; the text says what is wrong with it."""


@dataclass(frozen=True)
class Change:
    """A row change, whatever form it came in. transaction: None for a row of a snapshot. before: the row before an
    update, where it is known. table: as the configuration calls it; empty: of none."""

    table: str
    operation: Literal["INSERT", "UPDATE", "DELETE", "SNAPSHOT"]
    data: Json
    before: Json | None = None
    transaction: str | None = None
    ordinal: int | None = None
    last: int | None = None


def field_of(body: Json, name: str, types: type | tuple[type, ...], what: str) -> Any:
    """A field that must be there and of one of these types. what: it is in, for the message."""
    if name not in body:
        raise Malformed(f"{what} has no {name!r}")
    value = body[name]
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        raise Malformed(f"{name!r} of {what} is {text_of(value)[:100]}")
    return value


def checked_id(id: str, what: str) -> str:
    """What names a transaction."""
    if not 0 < len(id) <= ID_CHARACTERS:
        raise Malformed(f"{what} is {f'longer than {ID_CHARACTERS:,} characters' if id else 'empty'}")
    return id


def positive(value: object, name: str, *, least: int = 1) -> int:
    """A number, which may be written as text, as Debezium does for some databases."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise Malformed(f"{name} is {text_of(value)[:100]}, not a number of {least} or more")
    return value


def mapping(value: object, what: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise Malformed(f"{what} is {text_of(value)[:100]}, not an object")
    return cast(Mapping[str, Any], value)

"""Rows, keys and records as the columns of the SQLite file have them. Pure: no I/O."""

import json
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import to_json

from ...errors import ConfigurationError
from ..message import Record, StoredRecord
from .rows import Row

__all__ = ["column_of", "entry_of", "named_row", "pages_of", "record_of", "row_of"]

_PAGE = 4_096  # bytes
_EPOCH = datetime.fromtimestamp(0, UTC)
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)  # Decimals of any length


def entry_of(row: Row, key: object, record: Record) -> tuple[object, ...]:
    """A row's line of the table ``entry``, from the record that it came from."""
    headers = [(name, _hex(value)) for name, value in record.headers]
    return (
        *(row, key, record.partition, record.offset, record.timestamp, record.key, record.value),
        to_json(headers).decode() if headers else None,  # json.dumps takes twice as long as all the rest
    )


def pages_of(record: Record | None) -> int:
    """How many pages of the file its line takes, or so."""
    return 1 if record is None or record.value is None else 1 + len(record.value) // _PAGE


def record_of(topic: str, entry: tuple[Any, ...]) -> Record:
    """The record of a line, whose first columns are those of `entry_of` behind row and key."""
    partition, offset, timestamp, key, value, headers = entry[:6]
    pairs = [(name, _bytes(text)) for name, text in json.loads(headers)] if headers else ()
    return StoredRecord(topic, partition, offset, timestamp, key, value, pairs)


def column_of(key: Hashable) -> str | int | bytes:
    """A key as SQLite compares it: equal exactly where Python's are. Anything but a text or a number as Python writes
    it, which tells keys apart as long as they are of one kind, e.g. tuples of texts and numbers, dates, UUIDs. Raises
    `ConfigurationError` where that tells nothing."""
    plain = _plain(key)
    if isinstance(plain, str):
        try:
            plain.encode()
        except UnicodeEncodeError:  # lone surrogates, as `json.loads` gives them; SQLite takes none
            return plain.encode(errors="surrogatepass")
        return plain
    return plain if isinstance(plain, int) else repr(plain).encode()


def _plain(key: Hashable) -> Hashable:
    """One of those that are equal to it, which are written in several ways: members of enums and their values, tuples
    with names and without, 1.10 and 1.1, a time in two zones, dataclasses and models of these."""
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, tuple):
        return tuple(map(_plain, cast(tuple[Hashable, ...], key)))
    if isinstance(key, frozenset):
        return tuple(sorted(repr(_plain(member)) for member in cast(frozenset[Hashable], key)))
    if isinstance(key, BaseModel):
        return (type(key).__qualname__, *map(_plain, key.__dict__.values()))
    if is_dataclass(key) and not isinstance(key, type):
        return (type(key).__qualname__, *(_plain(getattr(key, field.name)) for field in fields(key) if field.compare))
    if type(key).__repr__ is object.__repr__:  # its address, which another one has a moment later
        raise ConfigurationError(
            f"SQLite keeps keys as Python writes them, and {type(key).__qualname__} has no __repr__: "
            "give key= a function whose keys are texts, numbers or tuples of them, or make it a frozen dataclass"
        )
    if isinstance(key, datetime) and key.utcoffset() is not None:
        return key - _EPOCH  # in UTC the first and the last ones would be out of range
    if isinstance(key, int | float | Decimal):
        number = Decimal(key)
        if number.is_finite() and number.copy_abs() < 2**63 and number == number.to_integral_value():
            return int(number)
        return _EXACT.normalize(number)
    return key


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def named_row(row: Row) -> tuple[str, str]:
    """A row as JSON can have it: its kind, and a text."""
    return ("text", row) if isinstance(row, str) else ("bytes", row.hex())


def row_of(named: tuple[str, str]) -> Row:
    """What `named_row` has made it of."""
    kind, text = named
    return text if kind == "text" else bytes.fromhex(text)

"""A Kafka record becomes items: what the stateful operator takes in. Nothing that a record holds stops anything."""

import json
from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

from . import debezium, header
from .changes import ID_CHARACTERS, Change, Malformed
from .combining import pack
from .config import Config, Group
from .messages import Json, alert, digest, text_of

__all__ = ["Item", "Kind", "Record", "decode"]

DEPTH = 100  # of nested JSON; Python's own limit is near 1,000, and differs from call to call

Kind = Literal["transaction", "snapshot", "alert"]


class Record(NamedTuple):
    """A Kafka record. at: its timestamp, in milliseconds."""

    topic: str
    partition: int
    offset: int
    at: int
    value: bytes | None

    @property
    def place(self) -> str:
        """Where it stands: topic/partition/offset."""
        return f"{self.topic}/{self.partition}/{self.offset}"


class Item(NamedTuple):
    """What a record means to the operator.

    | kind | id | ordinal | last | part | row |
    |---|---|---|---|---|---|
    | transaction | its id | of the row; None: an END | how many rows it has, if told | – | packed; None: no group |
    | snapshot | JSON of group and root id | – | – | tells rows of the root apart | packed |
    | alert | its key | – | – | its kind | the message, as JSON |
    """

    kind: Kind
    id: str
    ordinal: int | None
    last: int | None
    part: str | None
    row: str | None
    place: str
    at: int


def decode(config: Config, record: Record) -> Iterator[Item]:
    """The items of a record: none for a tombstone; for a bad one an alert with its place and the begin of its value."""
    if record.value is None:
        return
    try:
        body = _object(record.value)
        if config.form == "header":
            yield from _items(config, record, header.change(body))
        elif record.topic == config.boundaries:
            yield from _boundary(record, *debezium.end(config, body))
        else:
            yield from _items(config, record, debezium.change(config, body))
    except (Malformed, ValueError) as problem:  # a ValueError: a number that is none, or infinite
        yield _alert(config, record, "bad-record", str(problem), value=record.value.decode(errors="replace"))


def _boundary(record: Record, transaction: str | None, count: int) -> Iterator[Item]:
    """The end of a transaction; nothing for its begin (transaction None), or when it is empty."""
    if transaction is not None and count:
        yield Item("transaction", transaction, None, count, None, None, record.place, record.at)


def _items(config: Config, record: Record, change: Change) -> Iterator[Item]:
    """A row that belongs to no root still counts in its transaction: without it the transaction were never complete."""
    group = config.group_of.get(change.table)
    ids: list[str] = []
    packed = None
    if group is None:
        if config.unknown_tables == "alert" and change.table:
            yield _alert(
                config, record, "unknown-table", f"table {change.table!r} is in no group", change=change.transaction
            )
    else:
        # The row as it is now says to which root it belongs; as it was before, which root has lost it.
        for data in (change.data, change.before or {}):
            id = _root_id(data.get(group.key))
            if id is not None and id not in ids:
                ids.append(id)
        if not ids or _root_id(change.data.get(group.key)) is None:
            problem = f"a row of {change.table!r} has no usable {group.key!r}, the key of group {group.name!r}"
            yield _alert(
                config,
                record,
                "missing-key",
                problem,
                change=change.transaction,
                value=cast(bytes, record.value).decode(errors="replace"),
            )
        row: dict[str, object] = {"table": change.table, "operation": change.operation, "data": change.data}
        if change.before is not None:
            row["before"] = change.before
        packed = pack(group.name, ids, row) if ids else None
    if change.transaction is not None:
        yield Item(
            "transaction", change.transaction, change.ordinal, change.last, None, packed, record.place, record.at
        )
    elif packed is not None and group is not None:
        yield Item(
            "snapshot", text_of([group.name, ids[0]]), None, None, _part(group, change), packed, record.place, record.at
        )


def _part(group: Group, change: Change) -> str:
    """What tells a row of a snapshot apart from the others of its root: its primary key, or, where that is not known or
    the row lacks a column of it, all that it has, names and values. A source may leave out columns that are null."""
    key = group.primary_key(change.table)
    if key and all(column in change.data for column in key):
        return digest(change.table, text_of([change.data[column] for column in key]))
    return digest(change.table, text_of(sorted(change.data.items(), key=lambda column: column[0])))


def _root_id(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    id = str(value)
    return id if 0 < len(id) <= ID_CHARACTERS else None


def _alert(
    config: Config, record: Record, kind: str, reason: str, *, change: str | None = None, **details: object
) -> Item:
    made = alert(config.alerts, kind, reason, transaction=change, place=record.place, **details)
    row = text_of([made.topic, made.key, made.value, made.headers])
    return Item("alert", record.place, None, None, kind, row, record.place, record.at)


def _object(value: bytes) -> Json:
    try:
        # Strictly: of bytes, `json.loads` also takes UTF-16, and halves of characters, which nothing takes afterwards.
        body = json.loads(value.decode("utf-8-sig"))
    except ValueError as error:  # also UnicodeDecodeError
        raise Malformed(f"the value is not JSON: {error}") from error
    except RecursionError as error:
        raise Malformed("the value is JSON that is nested too deeply") from error
    if not isinstance(body, dict):
        raise Malformed(f"the value is {type(body).__name__}, not an object")
    # What follows would fail later, where it stopped everything.
    if value.count(b"{") + value.count(b"[") > DEPTH and _depth(cast(object, body)) > DEPTH:
        raise Malformed(f"the value is JSON that is nested too deeply, in more than {DEPTH} levels")
    if b"\\u" in value and any("\ud800" <= letter <= "\udfff" for letter in text_of(cast(object, body))):
        raise Malformed("the value has half of a character, a lone surrogate")
    return cast(Json, body)


def _depth(body: object) -> int:
    depth, level = 0, [body]
    while level := [inner for outer in level for inner in _inside(outer)]:
        depth += 1
    return depth


def _inside(body: object) -> list[object]:
    if isinstance(body, dict):
        return list(cast(dict[str, object], body).values())
    return cast(list[object], body) if isinstance(body, list) else []

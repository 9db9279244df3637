"""The rows of a complete transaction become events, one for each aggregate root."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .config import Config, Group
from .messages import Outgoing, alert, digest, event, text_of, within

__all__ = ["combine_rows", "combine_snapshot", "count_changes", "pack"]

GIVEN, TAKEN = "GIVEN", "TAKEN"  # what an update that moves a row does to the two roots


def pack(group: str, ids: Iterable[str], row: Mapping[str, object]) -> str:
    """A row as it is kept until its transaction is complete. ids: of the roots it belongs to: two, where an update
    moves it from one to another, and that which has it now is the first."""
    return text_of([group, list(ids), row])


def combine_rows(config: Config, transaction: str, rows: Iterable[tuple[int, str]]) -> Iterator[Outgoing]:
    """The events of a transaction. rows: (ordinal, packed row), each ordinal once, in any order.

    A root's rows stand in its event in the order of their ordinals; events follow the order of their first rows.
    """
    roots: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for ordinal, packed in sorted(rows):
        group, ids, row = json.loads(packed)
        moved = row["operation"] == "UPDATE" and len(ids) > 1
        for id, done in zip(ids, (GIVEN, TAKEN) if moved else [row["operation"]] * len(ids), strict=True):
            roots.setdefault((group, id), []).append((done, row | {"ordinal": ordinal}))
    for (name, id), of_root in roots.items():
        group = config.group_named.get(name)
        if group is None:
            yield _without_group(config, name, id, transaction)
            continue
        type = group.name + _ending(group, of_root)
        body = {
            "type": type,
            "group": name,
            "id": id,
            "transaction": transaction,
            "rows": [row for _, row in of_root],
        }
        made = event(group.topic, type, id, body, transaction=transaction, id=digest("event", transaction, name, id))
        yield from within(made, config.max_event_bytes, config.alerts)


def count_changes(rows: Iterable[tuple[int, str]]) -> dict[str, dict[str, int]]:
    """How many of these rows there are of each table, by operation. rows: as those of `combine_rows`."""
    counts: dict[str, dict[str, int]] = {}
    for _, packed in rows:
        _, _, row = json.loads(packed)
        of_table = counts.setdefault(row["table"], {})
        of_table[row["operation"]] = of_table.get(row["operation"], 0) + 1
    return counts


def _ending(group: Group, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """rows: of a root, each with what it did to it.

    Where keys must be unique only at the end of a statement, or of the transaction, a root may be given another row
    before its own is moved away: `before` tells which of them that is.
    """
    changes = [(done, row) for done, row in rows if row["table"] == group.root]
    given: Mapping[str, Any] | None = None  # the row that was inserted or moved there last, as it is now
    existed = False
    for done, row in changes:
        same = given is not None and _may_be(given, row.get("before"))
        if done in ("INSERT", GIVEN) or (done == "UPDATE" and same):
            given = row["data"]
        elif done == "DELETE" or (done == TAKEN and same):
            existed = existed or given is None
            given = None
        elif done == TAKEN:
            existed = True
    operations = [done for done, _ in changes]
    if operations and operations[-1] in ("DELETE", TAKEN) and given is None:
        return "Deleted"
    return "Created" if "INSERT" in operations or (GIVEN in operations and not existed) else "Modified"


def _may_be(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    """Whether this is what a row was, as far as that is told."""
    return all(row.get(column) == value for column, value in (before or {}).items())


def combine_snapshot(
    config: Config, name: str, id: str, rows: Iterable[str], times: Iterable[int] = ()
) -> Iterator[Outgoing]:
    """The event with all rows of a root that have come so far. rows: packed. times: of their records. They are in the
    event's id: rows that become again what they were have another one, else who looks at ids would pass over them."""
    group = config.group_named.get(name)
    if group is None:
        yield _without_group(config, name, id, None)
        return
    unpacked = [json.loads(row)[2] for row in rows]
    unpacked.sort(key=lambda row: (row["table"] != group.root, row["table"], text_of(row)))  # so that ids are the same
    type = f"{name}Snapshot"
    body = {"type": type, "group": name, "id": id, "rows": unpacked}
    made = event(
        group.topic, type, id, body, transaction=None, id=digest("snapshot", text_of(body), text_of(sorted(times)))
    )
    yield from within(made, config.max_event_bytes, config.alerts)


def _without_group(config: Config, name: str, id: str, transaction: str | None) -> Outgoing:
    """The configuration was changed while the rows were kept."""
    reason = f"rows were kept for group {name!r}, which the configuration does not have any more"
    return alert(config.alerts, "unknown-group", reason, transaction=transaction, id=id)

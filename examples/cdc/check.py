"""What must have come out of what went in."""

from collections.abc import Mapping, Sequence
from typing import Any

from .changes import Change

__all__ = ["Event", "expected", "problems"]

KEYS = {"Addresses": "address_id", "Customers": "customer_id", "CustomerNames": "customer_id"}
Event = Mapping[str, Any]


def expected(transactions: Mapping[str, Sequence[Change]]) -> dict[tuple[str, str, str], list[int]]:
    """The ordinals of the rows of each (transaction, type of event, root id)."""
    made: dict[tuple[str, str, str], list[int]] = {}
    for id, changes in transactions.items():
        created = {_root(change) for change in changes if change.table in ("Addresses", "Customers")}
        for ordinal, change in enumerate(changes, 1):
            group, root = _root(change)
            type = f"{group}{'Created' if (group, root) in created else 'Modified'}"
            made.setdefault((id, type, root), []).append(ordinal)
    return made


def problems(transactions: Mapping[str, Sequence[Change]], events: Sequence[Event]) -> list[str]:
    """What is wrong with the events of these transactions; nothing, if all is well."""
    made = expected(transactions)
    came = {
        (event["transaction"], event["type"], event["id"]): [row["ordinal"] for row in event["rows"]]
        for event in events
    }
    missing = [f"missing: {event}" for event in made.keys() - came.keys()]
    strange = [f"nobody caused: {event}" for event in came.keys() - made.keys()]
    wrong = [f"{event} has the rows {came[event]}, not {rows}" for event, rows in made.items()
             if event in came and came[event] != rows]  # fmt: skip
    return missing + strange + wrong


def _root(change: Change) -> tuple[str, str]:
    key = KEYS.get(change.table, "customer_id")
    return ("Address" if key == "address_id" else "Customer"), str(change.data[key])

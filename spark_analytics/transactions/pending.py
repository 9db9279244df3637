"""A transaction while its rows come in."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from .decoding import Item
from .messages import Outgoing, alert
from .ordinals import Ordinals

__all__ = ["Pending", "differing"]

MISSING = 1_000  # ordinals that an alert lists


@dataclass
class Pending:
    """What has come of a transaction, without its rows.

    since: when the first of it came, in milliseconds. last: how many rows it has, once that is known. seen: their
    ordinals. alerted: it was told that it is incomplete.
    """

    since: int
    last: int | None = None
    seen: Ordinals = field(default_factory=Ordinals)
    alerted: bool = False

    @property
    def complete(self) -> bool:
        """Every one of 1 to `last` has come: none beyond it is let in, so that their number tells."""
        return self.last is not None and len(self.seen) == self.last

    def absorb(self, alerts: str, items: Iterable[Item]) -> tuple[list[tuple[int, str]], list[Item], list[Outgoing]]:
        """Take these in. Duplicates change nothing; what contradicts something that came before is left out, and told.

        Returns the rows that are new, with their ordinals; those that have come again, which may be none of it if they
        are `differing`; and the alerts, for the topic `alerts`.
        """
        rows: list[tuple[int, str]] = []
        again: list[Item] = []
        told: list[Outgoing] = []
        for item in items:
            if (problem := self._contradiction(item)) is not None:
                told.append(alert(alerts, "contradiction", problem, transaction=item.id, place=item.place))
                continue
            self.last = self.last if item.last is None else item.last
            if item.ordinal is None:
                continue
            if not self.seen.add(item.ordinal):
                again.append(item)
            elif item.row is not None:
                rows.append((item.ordinal, item.row))
        return rows, again, told

    def _contradiction(self, item: Item) -> str | None:
        if item.last is not None and self.last not in (None, item.last):
            return f"row {item.last} is said to be the last one, but {self.last} was before"
        if item.last is not None and self.seen.highest > item.last:
            return f"row {item.last} is said to be the last one, but row {self.seen.highest} has come"
        if self.last is not None and item.ordinal is not None and item.ordinal > self.last:
            return f"row {item.ordinal} has come, but row {self.last} is the last one"
        return None

    def overdue(self, alerts: str, id: str, now: int) -> Outgoing:
        """The alert that it is incomplete; the article's `signalExpiredTransaction`."""
        seconds = round((now - self.since) / 1000)
        reason = f"no last event yet after {seconds} s" if self.last is None else self._not_come(self.last, seconds)
        return self._told(alerts, "incomplete", reason, id)

    def given_up(self, alerts: str, id: str, now: int) -> Outgoing:
        """The alert that it is waited for no more: its rows are in no event."""
        seconds = round((now - self.since) / 1000)
        reason = f"no last event within {seconds} s" if self.last is None else self._not_come(self.last, seconds)
        return self._told(alerts, "given-up", f"{reason}: the transaction is given up", id)

    def _not_come(self, last: int, seconds: int) -> str:
        return f"{last - len(self.seen)} of {last} rows have not come within {seconds} s"

    def _told(self, alerts: str, kind: str, reason: str, id: str) -> Outgoing:
        expected = self.last or self.seen.highest
        return alert(
            alerts,
            kind,
            reason,
            transaction=id,
            last=self.last,
            rows=len(self.seen),
            missing=list(islice(self.seen.missing(expected), MISSING)),
            missing_count=expected - len(self.seen),
        )


def differing(again: Iterable[Item], rows: Iterable[tuple[int, str]]) -> Item | None:
    """The first of these that is another row than the one that has its ordinal. rows: all of the transaction so far."""
    again = list(again)
    ordinals = {item.ordinal for item in again}
    known = {ordinal: row for ordinal, row in rows if ordinal in ordinals}
    return next((item for item in again if _content(item.row) != _content(known.get(item.ordinal or 0))), None)


def _content(packed: str | None) -> object:
    """Without the group and the roots, which another configuration may name otherwise. None: of no group."""
    return None if packed is None else json.loads(packed)[2]

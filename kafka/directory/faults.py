"""The records that could not be applied and still matter."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ...legible import legible
from .rows import BadRecord, Change, Row, Unreadable

__all__ = ["Faults"]

log = logging.getLogger("sidings.directory")

_MOST = 1_000


class Faults:
    """One for a row: its newest, until a good record of the row comes. len: of how many rows. total: of all times.

    Where they are too many, the oldest make room, but for the first of each partition: from there on all is to be read
    again at the next start. Their rows are kept, below 0.2 KiB each, so that it is seen when all of them are mended."""

    def __init__(self, topic: str) -> None:
        self.total = 0
        self._topic = topic
        self._now: dict[Row, BadRecord] = {}
        self._first_gone: dict[int, BadRecord] = {}  # of each partition, of those that made room
        self._gone: dict[int, set[Row | None]] = {}  # their rows; None for all whose row is not known
        self._replaced = False

    def __len__(self) -> int:
        return sum(map(len, list(self._gone.values()))) + len(self._now)  # the metrics' thread asks, too

    def __iter__(self) -> Iterator[BadRecord]:
        return iter([*self._first_gone.values(), *self._now.values()])

    def of_rows(self) -> tuple[int, BadRecord | None]:
        """How many of them tell their row, so that a good record or a deletion of it clears them; and the first one."""
        now = [record for name, record in self._now.items() if _tells_row(name, record)]
        gone = sum([len(rows) - (None in rows) for rows in self._gone.values()])
        return len(now) + gone, next(chain(self._first_gone.values() if gone else (), now), None)

    def replace(self, kept: Mapping[Row, BadRecord]) -> None:
        """Begin with these."""
        self._now, self._first_gone, self._gone, self._replaced = dict(kept), {}, {}, True

    def now(self) -> Mapping[Row, BadRecord]:
        """What is kept of them."""
        return {f"{partition}/": record for partition, record in self._first_gone.items()} | self._now

    def note(self, changes: Sequence[Change[Any]], bad: Sequence[Unreadable]) -> Mapping[Row, BadRecord] | None:
        """What is wrong after these; None where nothing has changed."""
        before = len(self)
        if not (bad or before or self._replaced):
            return None
        good = {change[0]: index for index, change in enumerate(changes)}
        for row in [row for row in self._now if row in good]:
            del self._now[row]
        newer = good.keys() | {row for _, row, _ in bad if row is not None}
        for partition, rows in list(self._gone.items()):
            rows -= newer
            if not rows:
                del self._gone[partition], self._first_gone[partition]
        for index, row, record in bad:
            if row is None or good.get(row, -1) < index:
                name = f"{record.partition}/{record.offset}" if row is None else row
                self._now.pop(name, None)  # the newest stand last
                self._now[name] = record
        while len(self._now) > _MOST:
            name, gone = next(iter(self._now.items()))
            del self._now[name]
            self._first_gone.setdefault(gone.partition, gone)
            self._gone.setdefault(gone.partition, set()).add(name if _tells_row(name, gone) else None)
        self._tell(bad)
        changed, self._replaced = bad or len(self) < before or self._replaced, False
        return self.now() if changed else None

    def _tell(self, bad: Sequence[Unreadable]) -> None:
        self.total += len(bad)
        if bad:
            first = bad[0][2]
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            log.error(
                "directory %r: the record at partition %s offset %s cannot be applied, its row stays as it is%s: %s",
                *(self._topic, first.partition, first.offset, more, legible(first.reason)),
            )


def _tells_row(name: Row, record: BadRecord) -> bool:
    return name != f"{record.partition}/{record.offset}"

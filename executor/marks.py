"""Which rows may turn up late: the bookkeeping of the one-snapshot reader. Pure, like the scheduler.

Transaction ids and positions are handed out before commit, so a row can appear behind rows that were already seen. Each
transaction that was open at a read keeps the high mark at which it was first seen possible: its rows all lie above
it (`next_position` takes the id before the position). A read looks for late rows above the lowest mark of the
transactions that have ended since the read before; when none has, there is nothing late. High marks also pass rows that
nobody has seen yet, but only up to what had been drawn when the read before was answered: ids that a read sees for the
first time stand above that. See `docs/model/reads.py`, and `read.sql` for the SQL side.
"""

from dataclasses import dataclass, field

__all__ = ["ReadMarks"]


@dataclass(slots=True)
class ReadMarks:
    """What the next read has to know of the last one that was delivered.

    snapshot: its ``pg_snapshot`` as text, None before the first. next_xid: the first id that had not been handed out
    then. open: id -> mark, of the transactions that were open. unseen: mark of the ids from `snapshot`'s xmax on.
    """

    snapshot: str | None = None
    next_xid: int = 0
    unseen: int = 0
    open: dict[int, int] = field(default_factory=dict[int, int])

    def delivered(self, snapshot: str, next_xid: int, high_before: int) -> None:
        """A read has been applied. `high_before`: the highest mark of all origins before it was."""
        _, xmax, in_progress = snapshot.split(":")
        ids = [int(i) for i in in_progress.split(",") if i]
        self.open, self.unseen, self.snapshot, self.next_xid = (
            {i: self._mark(i, high_before) for i in ids},
            self._mark(int(xmax), high_before),
            snapshot,
            next_xid,
        )

    def reset(self) -> None:
        """Forget everything: the next read starts from position 0."""
        self.snapshot, self.next_xid, self.unseen, self.open = None, 0, 0, {}

    def _mark(self, xid: int, high_before: int) -> int:
        if xid in self.open:
            return self.open[xid]
        if xid >= self.next_xid:
            return high_before
        return self.unseen

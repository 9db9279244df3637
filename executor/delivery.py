"""What a read has brought, on its way into the scheduler: late rows, refills and forward rows."""

from collections import Counter
from collections.abc import Sequence

import asyncpg

from .metrics import ExecutorMetrics
from .planning import Plan
from .queues import Entry, OriginQueue
from .scheduler import Scheduler

__all__ = ["HEADER", "Delivery"]

HEADER, _LATE, _REFILL, _FORWARD, _SCANNED = range(5)  # the parts of an answer
_LEFT = 4  # added to the part of a row that was left in the database, as its payload is too large


class Delivery:
    """The answer to one read, which was asked for by `plan`. skew: the server's epoch seconds against our clock."""

    def __init__(self, scheduler: Scheduler, metrics: ExecutorMetrics, plan: Plan, skew: float, time: float) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._plan = plan
        self._skew = skew
        self._time = time

    def apply(self, rows: list[asyncpg.Record], drawn: int) -> tuple[set[OriginQueue], int]:
        """Late rows, refills and forward rows, in this order: so nothing is taken in twice or too early. drawn: the
        last position that had been drawn when the read before was answered.

        Returns the origins whose next row was left in the database for its size, and the bytes of the largest row of
        these, or of the next one of a lane."""
        parts: list[list[asyncpg.Record]] = [[] for _ in range(_SCANNED + _LEFT)]
        for row in rows:
            parts[row[0]].append(row)
        refills, left_of_lanes = _before(parts[_REFILL], parts[_REFILL + _LEFT])
        forward, left = _before(parts[_FORWARD], parts[_FORWARD + _LEFT])
        self._take_late(parts[_LATE], parts[_LATE + _LEFT])
        self._refill(refills, left_of_lanes)
        self._forward(forward, parts[_SCANNED], left, drawn)
        largest = max((int(row[11]) for row in [*left_of_lanes.values(), *left.values()]), default=0)
        return {self._plan.origins[ref - 1][0] for ref in left}, largest

    def _take_late(self, rows: list[asyncpg.Record], left: list[asyncpg.Record]) -> None:
        if not rows and not left:
            return
        crowds = {ref for ref, count in Counter(row[1] for row in rows).items() if count >= self._plan.most_late}
        found = [self._live(ref) for ref in crowds.union(row[1] for row in left)]
        if again := [queue for queue in found if queue is not None]:
            self._scheduler.forget_waiting(*again)  # a read from 0 finds them page by page, in order
        entries = _entries(rows, self._queues(), self._skew)
        for entry in entries:
            entry.origin.first = min(entry.origin.first, entry.position)
        self._metrics.late_rows.inc(len(entries))
        self._scheduler.insert_all(entries, self._time)

    def _refill(self, rows: list[asyncpg.Record], left: dict[int, asyncpg.Record]) -> None:
        scheduler, plan, skew, time = self._scheduler, self._plan, self._skew, self._time
        refills: dict[int, list[Entry]] = {}
        queues = [None, *(lane.origin for lane, _, _ in plan.lanes)]
        for row, entry in zip(rows, _entries(rows, queues, skew), strict=True):
            refills.setdefault(row[1], []).append(entry)
        for ref, (lane, version, upto) in enumerate(plan.lanes, start=1):
            if lane.version == version and scheduler.origins.get(lane.origin.name) is lane.origin:
                entries = refills.get(ref, [])
                size = len(entries) if ref in left else plan.size
                scheduler.refilled(lane, entries, size=size, upto=upto, left_out=lane in plan.left_out, now=time)
        scheduler.refill_first(plan.lanes[ref - 1][0] for ref in left)

    def _live(self, ref: int) -> OriginQueue | None:
        """The origin of a row, unless it was dropped or is to be read anew since the read was sent."""
        queue, version = self._plan.origins[ref - 1]
        if queue.version != version or self._scheduler.origins.get(queue.name) is not queue:
            return None
        return queue

    def _queues(self) -> list[OriginQueue | None]:
        """The live ones by their numbers; there is none of the number 0."""
        return [None, *(self._live(ref) for ref in range(1, len(self._plan.origins) + 1))]

    def _forward(
        self, rows: list[asyncpg.Record], scanned: list[asyncpg.Record], left: dict[int, asyncpg.Record], drawn: int
    ) -> None:
        live = self._queues()
        counts = dict.fromkeys(live, 0)
        entries = _entries(rows, live, self._skew)
        self._scheduler.insert_all(entries, self._time)
        for entry in entries:
            queue = entry.origin
            counts[queue] += 1
            if entry.position > queue.high:
                queue.high = entry.position
        self._scheduler.memory.passed(len(row[10] or "") + len(row[11] or "") for row in rows)
        tops = {row[1]: row[5] for row in scanned}
        for ref, page in enumerate(self._plan.pages, start=1):
            queue = live[ref]
            if queue is None or not page:
                continue
            queue.backlogged = counts[queue] >= page or ref in left
            if queue.backlogged:
                continue
            # Past rows that are not committed yet, or each read would step over them. What had been drawn when the read
            # before was answered belongs to ids that this one sees, or knows to be open: it comes as late rows.
            queue.high = max(queue.high, drawn)
            if tops.get(ref) is not None:
                queue.high = max(queue.high, tops[ref])  # past the rows of lanes that were left out


def _before(
    rows: list[asyncpg.Record], left: list[asyncpg.Record]
) -> tuple[list[asyncpg.Record], dict[int, asyncpg.Record]]:
    """The rows before the first one of their origin or lane that was left for its size, and these first ones."""
    if not left:
        return rows, {}
    first: dict[int, asyncpg.Record] = {}
    for row in sorted(left, key=lambda row: row[5], reverse=True):
        first[row[1]] = row
    return [row for row in rows if row[1] not in first or row[5] < first[row[1]][5]], first


def _entries(rows: list[asyncpg.Record], queues: Sequence[OriginQueue | None], skew: float) -> list[Entry]:
    """The jobs of these rows. queues: by the second number of a row, none where its jobs do not count. All in one loop,
    and without `__init__`, which takes as long again: it is gone through for each job."""
    entries: list[Entry] = []
    new, append = Entry.__new__, entries.append
    ref: int
    for _, ref, id, type, group, position, numbers, run_at, enqueued, first, headers, payload in rows:
        queue = queues[ref]
        if queue is None:
            continue
        entry = new(Entry)
        entry.id = id
        entry.type = type
        entry.group = group
        entry.position = position
        if numbers is None:
            entry.attempt = 1
            entry.failures = entry.losses = entry.priority = entry.policy = 0
        else:
            entry.attempt, entry.failures, entry.losses, entry.priority, entry.policy = numbers
        entry.origin = queue
        entry.due = None if run_at is None else run_at - skew
        entry.enqueued = enqueued
        entry.first_started = None if first is None else first - skew
        entry.headers = headers
        entry.payload = payload
        entry.lane = None
        append(entry)
    return entries

"""Jobs that have just been committed, and of which we have been told: named by their ids, before they have been read.

To name a job takes a commit, and so the disk. Where nothing else is under way, the cycle that names them brings them as
well; else a read brings them meanwhile. Nothing else changes: a job starts when it has been read, it is its turn, and
an acknowledged cycle has named it (docs/decisions/0020-naming-early.md).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import asyncpg

from .clock import now
from .queues import Entry, OriginQueue
from .scheduler import Scheduler

__all__ = ["Early", "Expected"]

# What has not started after so long waits for something else: it is named no more, for what is named a person sees as
# running, and a takeover counts as lost.
_SECONDS = 1.0


class Early(NamedTuple):
    """A job that is named before it has been read, under the lease that its origin had then."""

    origin: OriginQueue
    until: float


class Expected:
    """The jobs that are expected, by id, and which of them the row of the executor names.

    unread: those that the next cycle is to read, since nobody has been asked to.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.unread: set[int] = set()
        self._scheduler = scheduler
        self._told: dict[int, Early] = {}
        self._named: dict[int, Early] = {}  # by the cycle acknowledged last; none has been sent since
        self._sent = 0  # how many the cycle names that has been sent since
        self._news = False

    def tell(self, jobs: Mapping[str, Sequence[int]], room: int) -> bool:
        """These have been committed, by origin. room: how many could start now; where more come, with those that are
        named already, they have to wait. Returns whether there are some, and all of them are named now."""
        until, all = now() + _SECONDS, bool(jobs)
        before = len(self._named) + self._sent
        for name, ids in jobs.items():
            queue = self._scheduler.origins.get(name)
            if ids and queue is not None and len(ids) + len(self._told) + before <= room:
                self._told.update(dict.fromkeys(ids, Early(queue, until)))
                self._news = True
            else:
                all = False
        return all

    def doubt(self) -> None:
        """A cycle has gone wrong: what the row names will not be known before the next one."""
        self._news = True

    def has_news(self, time: float) -> bool:
        """Whether a cycle is worth sending for their sake: to name some, or to name some no more."""
        return self._news or any(job.until <= time for job in self._named.values())

    def due(self) -> float | None:
        """When the next of them is to be named no more; None: there is none."""
        return min((job.until for job in self._named.values()), default=None)

    def sending(self) -> dict[int, Early]:
        """What a cycle that is about to be sent should name as well. From then on none counts as named."""
        time, knows, holds = now(), self._scheduler.knows, self._holds
        jobs = self._named | self._told
        self._told, self._named, self._news = {}, {}, False
        early = {id: job for id, job in jobs.items() if time < job.until and not knows(id) and holds(job)}
        self._sent = len(early)
        return early

    def acknowledged(self, early: dict[int, Early]) -> None:
        """The last cycle that was sent is committed, and has named these."""
        self._named, self._sent = early, 0

    def read(self, ids: Collection[int], rows: Sequence[asyncpg.Record]) -> bool:
        """The last acknowledged cycle was to read these of the jobs that it names, and has found these rows
        (``name_and_read.sql``). Returns whether all of them are known now; a read is to bring the others."""
        found, time = 0, now()
        for row in rows:
            job = self._named.get(row["id"])
            if job is None or job.origin.name != row["origin"] or not self._holds(job):
                continue
            if self._scheduler.knows_type(row["type"]):  # else the read that follows tells of it
                self._scheduler.insert(_entry(row, job.origin), time)
                found += self._scheduler.knows(row["id"])
        return found == len(ids)

    def started(self, entries: Sequence[Entry], time: float) -> list[Entry]:
        """Those of the chosen jobs that need no cycle to be named any more: they are to start. What was named when the
        origin was held under another lease does not count."""
        if not self._named:
            return []
        start = [
            entry
            for entry in entries
            if (job := self._named.get(entry.id)) and job.origin is entry.origin and time < entry.origin.deadline
        ]
        for entry in start:
            del self._named[entry.id]
        return start

    def _holds(self, job: Early) -> bool:
        return not job.origin.draining and self._scheduler.origins.get(job.origin.name) is job.origin


def _entry(row: asyncpg.Record, origin: OriginQueue) -> Entry:
    return Entry(
        row["id"],
        origin,
        row["type"],
        row["group"],
        row["position"],
        priority=row["priority"],
        policy=row["policy"],
        enqueued=row["enqueued_at"],
        headers=row["headers"],
        payload=row["payload"],
    )

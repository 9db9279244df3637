"""How this executor stands with the database: the fence that its cycles go out under, and what has happened behind its
back. A failover, takeovers, and persons who change, end or pause jobs each bump the fence; then nothing that waits in
memory can be relied on, but where the database knows of each bump which jobs or groups it concerned: then all but these
(docs/decisions/0026-concerns.md)."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import NamedTuple
from uuid import UUID

import asyncpg

from ..errors import PostgresUnavailable
from ..outage import Outage
from ..schema import load_sql
from .clock import now
from .flights import Batch
from .link import Backoff, Link
from .metrics import ExecutorMetrics
from .queues import Entry
from .recording import unless_gone
from .scheduler import Scheduler
from .workers import Workers

__all__ = ["Deposed", "Standing"]

log = logging.getLogger("sidings.executor")

_LOOK_AGAIN_SECONDS = 0.5
_MOST_ACTIONS = 5_000
_ENDING = ("cancel", "discard", "skip head", "clear group")  # actions; the others let a job run, or run sooner


class Deposed(Exception):
    """This executor's row is gone from the database: start again under a new id."""


class _Concerned(NamedTuple):
    """What persons have changed: groups (origin, group), and jobs that they have ended. cleared: of these groups any
    job may have ended. retried: these jobs are not to wait for their time any more."""

    groups: set[tuple[str, str]]
    ended: set[int]
    cleared: set[tuple[str, str]]
    retried: set[int]


class Standing:
    """fence: the one that cycles are sent under. doubtful: it has grown, and why has not been looked up yet.

    put_back: called with claimed and chosen jobs that will not start. on_fenced: called with the origins that turned
    out to be another's. on_replaced: the server has been replaced by another one, which may have lost commits.
    on_read: some of what waits has been forgotten, and is to be read. on_forgotten: all of it. signal: `doubtful` is to
    be looked at.
    """

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        workers: Workers,
        metrics: ExecutorMetrics,
        *,
        schema: str,
        put_back: Callable[[list[Entry], float], None],
        on_fenced: Callable[[list[str]], None],
        on_replaced: Callable[[], None],
        on_read: Callable[[], None],
        on_forgotten: Callable[[], None],
        signal: Callable[[], None],
    ) -> None:
        self.executor_id: UUID | None = None
        self.fence = 0
        self.doubtful = False
        self.outage = Outage(log, "what has become of cycles could not be looked up")
        self._link = link
        self._scheduler = scheduler
        self._workers = workers
        self._metrics = metrics
        self._put_back = put_back
        self._on_fenced = on_fenced
        self._on_replaced = on_replaced
        self._on_read = on_read
        self._on_forgotten = on_forgotten
        self._signal = signal
        self._standing_sql = load_sql(__package__, "standing", schema)
        self._disown_sql = load_sql(__package__, "disown", schema)

    def begin(self, executor_id: UUID) -> None:
        """Start with a fresh row."""
        self.executor_id, self.fence, self.doubtful = executor_id, 0, False
        self.outage.over()

    def fence_read(self, fence: int | None) -> bool:
        """A read has found this fence; None: there is no row of this executor. Returns whether the read counts: not
        where it is older than what has been looked up, for it may bring what was forgotten then."""
        if fence != self.fence:  # if it is smaller, too: the database may have gone back, and no read would count again
            self.doubtful = True
            self._signal()
        return fence is None or fence >= self.fence

    async def look_up(self) -> None:
        """See why the fence has grown, while no cycle is under way."""
        self.doubtful = False  # what a read tells meanwhile is to be looked up again
        try:
            await self.find_out([])
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            self.outage.failed(error)
            self.doubtful = True
            asyncio.get_running_loop().call_later(_LOOK_AGAIN_SECONDS, self._signal)

    async def disown(self, batches: list[Batch]) -> tuple[int, str]:
        """Bump our own fence: no cycle that was sent before can apply from then on, wherever it is. Returns what
        `find_out` does."""
        backoff = Backoff()
        while True:
            try:
                row = await self._link.fetchrow(self._disown_sql, self.executor_id)
                if row is None:
                    raise Deposed
                if row["fence"] == self.fence + 1:  # else somebody else has bumped it as well, and all is read anew
                    self.fence = row["fence"]
                return await self.find_out(batches)
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                self.outage.failed(error)
                await backoff.sleep()

    async def find_out(self, batches: list[Batch]) -> tuple[int, str]:
        """See what has happened: a failover, takeovers, and persons who have changed, ended or paused jobs.

        batches: of the cycles whose fate is not known. When the fence is another one, what has not started is put back.
        Where it is known of each bump which groups and jobs it concerned, these are read anew; else nothing that waits
        in memory can be relied on, and all is, together with what is paused. A read that is under way counts no more.

        Returns the number of the last cycle that has committed, and the server's timeline. Raises `Deposed`.
        """
        before = list(self._scheduler.origins.values())  # what is acquired meanwhile may be younger than the answer
        row = await self._link.fetchrow(self._standing_sql, self.executor_id, self.fence, _MOST_ACTIONS)
        self.outage.over()
        if row is None:
            raise Deposed
        if self._scheduler.timeline not in (None, row["timeline"]):
            log.warning("Postgres was replaced (timeline %s): nothing of what was read is recorded", row["timeline"])
            self._on_replaced()
        held = dict(zip(row["origins"], row["epochs"], strict=True))
        lost = [q.name for q in before if held.get(q.name) != q.epoch and self._scheduler.origins.get(q.name) is q]
        if lost:
            self._metrics.fenced.inc(len(lost))
            self._on_fenced(lost)
        self._end_gone(row["gone"], batches)
        if row["fence"] != self.fence:
            concerned, time = _concerned(row["actions"], self.fence, row["fence"]), now()
            self.fence = row["fence"]
            expired, self._workers.expired = self._workers.expired, []
            chosen = [entry for batch in batches for entry in batch.chosen]
            self._put_back([*self._workers.unclaim(), *expired, *chosen], time)
            if (
                concerned is None
                or self._scheduler.has_parallel(concerned.cleared)
                or self._scheduler.has_delayed(concerned.retried, time)
            ):
                self._scheduler.forget_waiting(*self._scheduler.origins.values())
                self._on_forgotten()
            else:
                self._scheduler.forget(concerned.groups, concerned.ended)
                self._on_read()
        for batch in batches:
            batch.chosen = [e for e in batch.chosen if self._scheduler.holds(e) and e in e.origin.running]
        return row["cycle"], row["timeline"]

    def _end_gone(self, gone: list[int], batches: list[Batch]) -> None:
        """Jobs that somebody else has ended: stop those that run, and record nothing of the others."""
        if not gone:
            return
        ids = set(gone)
        for batch in batches:
            batch.finished = unless_gone(batch.finished, ids)
        self._workers.cancel_jobs(ids)


def _concerned(actions: str | None, known: int, fence: int) -> _Concerned | None:
    """What the bumps from one fence to another concerned; None if of one of them that is not known."""
    rows: list[tuple[int | None, str, str, str | None, int | None]] = json.loads(actions or "[]")
    if len(rows) >= _MOST_ACTIONS or not known < fence <= known + len(rows):
        return None
    if {number for number, *_ in rows} != {*range(known + 1, fence + 1)}:
        return None
    return _Concerned(
        {(origin, group) for _, _, origin, group, _ in rows if group is not None},
        {job for _, action, _, _, job in rows if job is not None and action in _ENDING},
        {(origin, group) for _, action, origin, group, _ in rows if action == "clear group" and group is not None},
        {job for _, action, _, _, job in rows if action == "retry now" and job is not None},
    )

"""Slow work in the background: the audit of the reader, the history's partitions, the age of what waits."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import asyncpg

from ..errors import PostgresUnavailable
from ..outage import Outage
from ..schema import load_sql
from .clock import now
from .link import Link, rest_after
from .metrics import ExecutorMetrics
from .queues import OriginQueue
from .scheduler import Scheduler
from .settings import ExecutorSettings

__all__ = ["Upkeep"]

log = logging.getLogger("sidings.executor")

_AGES_SECONDS = 5.0
_MAINTAIN_SECONDS = 3_600.0
_MOST_GATHERED = 1_000_000_000  # bytes, as in sidings.maintain
_ARCHIVE_SECONDS = 60.0
_ORPHANS_SECONDS = 60.0
_AGAIN_SECONDS = 60.0  # a task that has failed, unless its turn comes sooner
_PAGE = 1_000
_SECOND_LOOK_SECONDS = 2.0


class Upkeep:
    """`oldest` is the age of the oldest waiting job of each held origin, in seconds, as of the last look; `unarchived`
    that of the oldest day of the history that the archive does not have, NaN as long as nobody knows; `orphans` are
    origins with jobs that nobody holds, of neighbours only the first; None where the last look for them failed."""

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        metrics: ExecutorMetrics,
        settings: ExecutorSettings,
        *,
        schema: str,
        on_found: Callable[[OriginQueue], None],
    ) -> None:
        self.oldest: dict[str, float] = {}
        self.held = 0
        self.blocked = 0
        self.unarchived = math.nan
        self.orphans: list[str] | None = []
        self._suspects: set[str] = set()  # nobody held them at the last look
        self._short: Sequence[_Task] = ()  # what an audit lets have their turn; it may take minutes
        self._warn_at = 0.0  # of days that are not archived, again
        self._link = link
        self._scheduler = scheduler
        self._metrics = metrics
        self._settings = settings
        self._on_found = on_found
        self._audit_sql = load_sql(__package__, "audit", schema)
        self._ages_sql = load_sql(__package__, "ages", schema)
        self._for_persons_sql = load_sql(__package__, "for_persons", schema)
        self._maintain_sql = load_sql(__package__, "maintain", schema)
        self._overdue_sql = load_sql(__package__, "overdue", schema)
        self._unarchived_sql = load_sql(__package__, "unarchived", schema)
        self._orphans_sql = load_sql(__package__, "orphans", schema)

    async def run(self) -> None:
        """Do each of the tasks in its time, for ever. One that fails keeps no other waiting."""
        loop = asyncio.get_running_loop()
        start, audit_seconds = loop.time(), self._settings.audit_seconds
        tasks = [
            _Task(self._maintain, _MAINTAIN_SECONDS, start, "the history could not be maintained"),
            _Task(
                self._look_at_archive,
                _ARCHIVE_SECONDS,
                start,
                "what is not archived could not be looked for",
                rests=True,
            ),
            _Task(self.look_for_orphans, _ORPHANS_SECONDS, start + _ORPHANS_SECONDS, "orphans could not be looked for"),
            _Task(self._look_at_ages, _AGES_SECONDS, start, "how long jobs have waited could not be looked at"),
            _Task(
                self._count_for_persons,
                _AGES_SECONDS,
                start,
                "what waits for a person could not be counted",
                rests=True,
            ),
            _Task(self.audit, audit_seconds, start + audit_seconds, "the reader could not be audited"),
        ]
        self._short = tasks[:-1]
        while True:
            await asyncio.sleep(max(0.0, min(task.at for task in tasks) - loop.time()))
            await self._do_what_is_due(tasks)

    async def _do_what_is_due(self, tasks: "Sequence[_Task]") -> None:
        loop = asyncio.get_running_loop()
        for task in tasks:
            if loop.time() >= task.at:
                seconds = await task.turn()
                task.at = loop.time() + seconds

    async def _maintain(self) -> None:
        try:
            await self._link.fetch(self._maintain_sql, self._settings.history_days, datetime.now(UTC).date())
        except (PostgresUnavailable, asyncpg.PostgresError):
            await self.look_at_history()  # it may say why
            raise
        await self.look_at_history()

    async def look_at_history(self) -> None:
        """Say what maintenance could not do, which it leaves for another time without an error."""
        [found] = await self._link.fetch(self._overdue_sql, self._settings.history_days)
        if found["days"]:
            log.warning(
                "%s days of the history, from %s on, are over history_days=%s and cannot be dropped: a session never "
                "lets go of them (pg_stat_activity), transactions that withdraw jobs and take seconds overlap, or a "
                "view depends on them, for which the log of Postgres has the reason; or its clock is ahead of this "
                "machine's",
                found["days"],
                found["first"],
                self._settings.history_days,
            )
        if found["gathered"] > _MOST_GATHERED:
            log.warning(
                "the default partition of the history holds %s MB: no day gets one of its own any more "
                "(docs/operations.md, The history grows)",
                found["gathered"] // 1_000_000,
            )

    async def _look_at_archive(self) -> None:
        """Note what the archive does not have, though the day is over, and say now and then which days of the history
        are kept for longer than `history_days` because of that. Where much has gathered in the default partition, the
        look takes longer than a call may."""
        try:
            [late] = await self._link.fetch_long(self._unarchived_sql, self._settings.history_days)
        except (PostgresUnavailable, asyncpg.PostgresError):
            self.unarchived = math.nan  # the last look's value would say that all is well
            raise
        self.unarchived = late["seconds"]
        if late["days"] and now() >= self._warn_at:
            self._warn_at = now() + _MAINTAIN_SECONDS
            log.warning(
                "%s days of the history, from %s on, are over history_days=%s and kept until they are archived: run "
                "`python -m sidings.spark_analytics.history archive`, or see what keeps it from running",
                late["days"],
                late["first"],
                self._settings.history_days,
            )

    async def look_for_orphans(self) -> None:
        """Note the origins with jobs that nobody has held at two looks, and name new ones in the log: a group that
        rebalances, or a takeover, is over by then."""
        try:
            rows = await self._link.fetch(self._orphans_sql, _ORPHANS_SECONDS)
        except (PostgresUnavailable, asyncpg.PostgresError):
            self.orphans = None  # those of the last look may have long had a holder
            raise
        found = {row["origin"] for row in rows}
        orphans = sorted(found & self._suspects)
        self._suspects = found
        if new := [origin for origin in orphans if origin not in (self.orphans or ())]:
            log.warning(
                "nobody holds %s, where jobs wait or are held: consume the topic, name it in topics=, move the jobs, "
                "or end them, as by `sidings jobs discard --origin ORIGIN --state held` (docs/administration.md)",
                ", ".join(new[:10]) + ("" if len(new) <= 10 else f" and {len(new) - 10} more"),
            )
        self.orphans = orphans

    async def _look_at_ages(self) -> None:
        queues = self._scheduler.origins.copy()
        begin = {name: queue.first for name, queue in queues.items()}
        for queue in queues.values():
            queue.first = max(queue.first, queue.high)  # unless a job is found before, or is read late meanwhile
        found: dict[str, int] = begin
        try:
            rows = await self._link.fetch(self._ages_sql, list(begin), list(begin.values()))
            found = {row["origin"]: row["first"] for row in rows if row["first"] is not None}
        finally:
            for name, first in found.items():
                queues[name].first = min(queues[name].first, first)
        self.oldest = {row["origin"]: row["age"] or 0.0 for row in rows}

    async def _count_for_persons(self) -> None:
        """Count what is held or blocked. Of millions that may take longer than a call may: then it is given more."""
        [row] = await self._link.fetch_long(self._for_persons_sql, list(self._scheduler.origins))
        self.held, self.blocked = row["held"], row["blocked"]

    async def audit(self) -> int:
        """Read every held origin from 0 and count the jobs that the scheduler would never have started.

        What looks missed is looked at again a little later: the reader may just have been about to deliver it. Of
        millions that wait it takes minutes, since it rests after each page.
        """
        found = 0
        for queue in list(self._scheduler.origins.values()):
            queue.first = 0
            suspects = await self._unaccounted(queue)
            if suspects:
                await asyncio.sleep(_SECOND_LOOK_SECONDS)
                missed = suspects & await self._unaccounted(queue)
                if missed:
                    found += len(missed)
                    self._metrics.audit_found.inc(len(missed))
                    log.error(
                        "the audit found jobs of %s that no read had delivered: %s",
                        queue.name,
                        sorted(missed)[:10],
                    )
                    self._on_found(queue)
        return found

    async def _unaccounted(self, queue: OriginQueue) -> set[int]:
        out: set[int] = set()
        unknown: Counter[str] = Counter()
        after = 0
        while self._scheduler.origins.get(queue.name) is queue:
            await self._do_what_is_due(self._short)
            version, began = queue.version, now()
            rows = await self._link.fetch(self._audit_sql, queue.name, after, _PAGE, queue.high)
            if queue.version != version:
                return set()
            for row in rows:
                if not self._scheduler.knows_type(row["type"]):
                    unknown[row["type"]] += 1
                    continue
                known = self._scheduler.knows(row["id"])
                known = known or self._scheduler.withholds(row["type"], queue.name, row["group"])
                if not known and not self._scheduler.accounts_for(queue.name, row["group"], row["position"]):
                    out.add(row["id"])
            if len(rows) < _PAGE:
                queue.unknown = dict(unknown)
                return out
            after = rows[-1]["position"]
            await asyncio.sleep(min(_AGES_SECONDS, rest_after(now() - began)))  # the others have their turns meanwhile
        return set()


class _Task:
    """A part of the upkeep. seconds: from one turn to the next; at: the next, by the event loop's clock; what: as of
    `Outage`; rests: for as long as `rest_after` says, at least."""

    def __init__(
        self, work: Callable[[], Awaitable[object]], seconds: float, at: float, what: str, *, rests: bool = False
    ) -> None:
        self.at = at
        self._work = work
        self._seconds = seconds
        self._rests = rests
        self._outage = Outage(log, what)

    async def turn(self) -> float:
        """Do it, and return the seconds till its next turn."""
        began, seconds = now(), self._seconds
        try:
            await self._work()
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            self._outage.failed(error)
            seconds = min(seconds, _AGAIN_SECONDS)
        else:
            self._outage.over()
        return max(seconds, rest_after(now() - began)) if self._rests else seconds

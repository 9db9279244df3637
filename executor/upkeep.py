"""Slow work in the background: the audit of the reader, the history's partitions, the age of what waits."""

import asyncio
import logging
from collections.abc import Callable

import asyncpg

from ..errors import PostgresUnavailable
from ..outage import Outage
from ..schema import load_sql
from .link import Link
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
_PAGE = 1_000
_SECOND_LOOK_SECONDS = 2.0


class Upkeep:
    """`oldest` is the age of the oldest waiting job of each held origin, in seconds, as of the last look; `unarchived`
    that of the oldest day of the history that the archive does not have; `orphans` are origins with jobs that nobody
    holds, of neighbours only the first."""

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
        self.unarchived = 0.0
        self.orphans: list[str] = []
        self._suspects: set[str] = set()  # nobody held them at the last look
        self._link = link
        self._scheduler = scheduler
        self._metrics = metrics
        self._settings = settings
        self._on_found = on_found
        self._audit_sql = load_sql(__package__, "audit", schema)
        self._ages_sql = load_sql(__package__, "ages", schema)
        self._maintain_sql = load_sql(__package__, "maintain", schema)
        self._overdue_sql = load_sql(__package__, "overdue", schema)
        self._unarchived_sql = load_sql(__package__, "unarchived", schema)
        self._orphans_sql = load_sql(__package__, "orphans", schema)

    async def run(self) -> None:
        """Do each of the tasks in its time, for ever. A failed one is logged and tried at its next turn."""
        loop, outage = asyncio.get_running_loop(), Outage(log, "upkeep could not be done")
        audit_at = loop.time() + self._settings.audit_seconds
        orphans_at = loop.time() + _ORPHANS_SECONDS
        ages_at = maintain_at = archive_at = warn_at = loop.time()
        while True:
            await asyncio.sleep(max(0.0, min(audit_at, ages_at, maintain_at, archive_at, orphans_at) - loop.time()))
            time = loop.time()
            try:
                if time >= maintain_at:
                    maintain_at = time + 60.0  # if it fails
                    await self._link.fetch(self._maintain_sql, self._settings.history_days)
                    maintain_at = time + _MAINTAIN_SECONDS
                    await self.look_at_history()
                if time >= archive_at:
                    archive_at = time + _ARCHIVE_SECONDS
                    late = await self._look_at_archive()
                    if time >= warn_at:
                        warn_at = time + _MAINTAIN_SECONDS
                        self._warn_of(late)
                if time >= orphans_at:
                    orphans_at = time + _ORPHANS_SECONDS
                    await self.look_for_orphans()
                if time >= ages_at:
                    ages_at = time + _AGES_SECONDS
                    await self._look_at_ages()
                if time >= audit_at:
                    audit_at = time + self._settings.audit_seconds
                    await self.audit()
                outage.over()
            except PostgresUnavailable as error:
                outage.failed(error)
            except asyncpg.PostgresError as error:
                log.warning("upkeep failed, trying again: %s", error)

    async def look_at_history(self) -> None:
        """Say what maintenance could not do, which it leaves for another time without an error."""
        [found] = await self._link.fetch(self._overdue_sql, self._settings.history_days)
        if found["days"]:
            log.warning(
                "%s days of the history, from %s on, are over history_days=%s and cannot be dropped: a session never "
                "lets go of them (pg_stat_activity), or a view depends on them; the log of Postgres has the reason",
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

    async def _look_at_archive(self) -> asyncpg.Record:
        """What the archive does not have, though the day is over."""
        [late] = await self._link.fetch(self._unarchived_sql, self._settings.history_days)
        self.unarchived = late["seconds"]
        return late

    def _warn_of(self, late: asyncpg.Record) -> None:
        """Say which days of the history are kept for longer than `history_days`, because they are not archived."""
        if late["days"]:
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
        rows = await self._link.fetch(self._orphans_sql, _ORPHANS_SECONDS)
        found = {row["origin"] for row in rows}
        orphans = sorted(found & self._suspects)
        self._suspects = found
        if new := [origin for origin in orphans if origin not in self.orphans]:
            log.warning(
                "nobody holds %s, where jobs wait: consume the topic, name it in topics=, or move the jobs "
                "(docs/administration.md)",
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
        self.held = sum(row["held"] for row in rows)

    async def audit(self) -> int:
        """Read every held origin from 0 and count the jobs that the scheduler would never have started.

        What looks missed is looked at again a little later: the reader may just have been about to deliver it.
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
        after = 0
        while self._scheduler.origins.get(queue.name) is queue:
            version = queue.version
            rows = await self._link.fetch(self._audit_sql, queue.name, after, _PAGE, queue.high)
            if queue.version != version:
                return set()
            for row in rows:
                known = self._scheduler.knows(row["id"]) or row["type"] in self._scheduler.unknown
                known = known or self._scheduler.withholds(row["type"], queue.name, row["group"])
                if not known and not self._scheduler.accounts_for(queue.name, row["group"], row["position"]):
                    out.add(row["id"])
            if len(rows) < _PAGE:
                return out
            after = rows[-1]["position"]
            await asyncio.sleep(0.01)
        return set()

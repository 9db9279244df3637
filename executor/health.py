"""What a health check and the gauges tell of an executor: what its parts say of themselves, put together."""

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from ..errors import PostgresUnavailable
from ..exposition import gauge
from ..legible import told
from .clock import now
from .cycles import CycleLoop
from .leases import LeaseThread
from .periodic import PeriodicLoop
from .promoter import Promoter
from .reader import Reader
from .reconcile import Reconciler
from .scheduler import Scheduler
from .settings import ExecutorSettings
from .transactional import Transactional
from .upkeep import Upkeep
from .watchdog import Watchdog
from .workers import Workers

__all__ = ["Health"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The parts that are asked. Any thread may ask."""

    service: str
    settings: ExecutorSettings
    registered: asyncio.Event
    scheduler: Scheduler
    workers: Workers
    cycles: CycleLoop
    reader: Reader
    leases: LeaseThread
    watchdog: Watchdog
    reconciler: Reconciler
    promoter: Promoter
    periodic: PeriodicLoop
    transactional: Transactional
    upkeep: Upkeep

    def problems(self, main: asyncio.Task[None] | None, refusal: Exception | None) -> list[str]:
        """What a health check should complain about; empty when all is well. main: the executor's task, once it has
        been started; refusal: why it could not be registered, the last time."""
        limit = max(5.0, self.settings.lease_seconds)
        return [
            *self._of_life(main, refusal),
            *self._of_leases(),
            *self._of_work(limit),
            *self._of_what_fails(limit),
            *self._of_reads(limit),
        ]

    def _of_life(self, main: asyncio.Task[None] | None, refusal: Exception | None) -> Iterator[str]:
        if (stalled := self.watchdog.stalled_seconds()) > self.settings.stall_warn_seconds:
            yield f"the event loop has not answered for {stalled:.1f} s"
        if main is None or main.done():
            yield "the executor does not run"
        elif not self.registered.is_set():
            if refusal is None:
                yield "the executor has not reached Postgres yet"
            elif isinstance(refusal, PostgresUnavailable):
                yield f"the executor has not reached Postgres yet: {told(refusal)}"
            else:  # of a server that answers: a right is missing, say
                yield f"Postgres refuses the executor: {told(refusal)}"

    def _of_leases(self) -> Iterator[str]:
        if self.scheduler.origins and now() - self.leases.last_renewed > self.settings.lease_seconds:
            error = self.leases.outage.error
            since = now() - self.leases.last_renewed
            yield f"leases were last renewed {since:.1f} s ago" + (f": {error}" if error is not None else "")

    def _of_work(self, limit: float) -> Iterator[str]:
        if (busy := self.cycles.busy_seconds()) > limit:
            error = self.cycles.outage.error or self.cycles.standing.outage.error
            yield f"a cycle has been under way for {busy:.1f} s" + (f": {error}" if error is not None else "")
        if (busy := self.reader.busy_seconds()) > limit:
            yield f"a read has been under way for {busy:.1f} s"
        if (starved := self.reader.starved_seconds()) > limit:
            yield (
                f"jobs may wait unread, for {starved:.1f} s: before all could be read anew, somebody has paused or "
                "resumed something, or an origin was taken over, again and again"
            )
        if self.cycles.stuck():
            yield (
                "no job starts, since the outcomes of thousands cannot be recorded: a transaction keeps their rows "
                "locked, or Postgres refuses them, for which the log has the reason"
            )
        elif refused := self.cycles.refused():
            yield f"the outcomes of jobs {[*refused][:5]} cannot be recorded: {next(iter(refused.values()))}"
        yield from map(str, self.watchdog.deaf(limit))

    def _of_what_fails(self, limit: float) -> Iterator[str]:
        loops = [
            ("origins cannot be acquired or released", self.reconciler.outage),
            ("periodic jobs cannot be fired", self.periodic.outage),
            *((f"{name} cannot be fired", outage) for name, outage in list(self.periodic.outages.items())),
        ]
        if self.scheduler.origins:  # without one there is nothing to be promoted here
            loops.append(("delayed jobs cannot be promoted", self.promoter.outage))
        for what, outage in loops:
            if (failing := outage.seconds()) > limit:
                yield f"{what}, for {failing:.1f} s: {outage.error}"
        thinning = self.reader.thinning
        if (failing := thinning.seconds()) > limit and time.monotonic() - (thinning.failed_at or 0.0) <= limit:
            yield f"superseded jobs cannot be ended, for {failing:.1f} s: {thinning.error}"
        refused = self.transactional.connections
        if (failing := refused.outage.seconds()) > limit and now() - refused.refused_at <= limit:
            yield f"transactional jobs get no connection, for {failing:.1f} s: {refused.outage.error}"

    def _of_reads(self, limit: float) -> Iterator[str]:
        unread = now() - self.reader.last_answer  # where nothing wakes it, it reads at the next poll
        if self.registered.is_set() and unread > limit + 1.2 * self.settings.poll_seconds:
            error = self.reader.outage.error
            yield f"the last read was answered {unread:.1f} s ago" + (f": {error}" if error is not None else "")

    def gauges(self) -> Iterator[Metric]:
        """What a scrape is told of the executor's present state, in the thread that asks."""
        service = (self.service,)
        scheduler = self.scheduler
        # While Postgres is away those remain here whose leases have run out: others may have them, and run their jobs.
        origins = [queue for queue in list(scheduler.origins.values()) if queue.deadline > now()]
        # Only copies, which Python makes in one go, do not change while they are counted.
        moment = now()  # a lane whose time has come waits for room in memory, or for its type
        stuck = sum(
            lane.due is not None and lane.due > moment for queue in origins for lane in list(queue.lanes.values())
        )
        yield gauge("sidings_running", "Handlers that run now.", ["service"], {service: self.workers.running()})
        deaf = len(self.watchdog.deaf())
        yield gauge("sidings_deaf_handlers", "Cancelled 5 s ago or more, and running.", ["service"], {service: deaf})
        yield gauge(
            "sidings_ready",
            "Lanes and single jobs that could run now.",
            ["service"],
            {service: scheduler.ready},
        )
        yield gauge("sidings_blocked_groups", "Groups whose head backs off.", ["service"], {service: stuck})
        oldest = self.upkeep.oldest
        held, blocked = (self.upkeep.held, self.upkeep.blocked) if origins else (0, 0)
        yield gauge("sidings_held_jobs", "Jobs that wait for a person.", ["service"], {service: held})
        yield gauge("sidings_blocked_jobs", "Heads of groups that wait for a person.", ["service"], {service: blocked})
        yield gauge(
            "sidings_held_origins",
            "Origins that this executor has leased.",
            ["service"],
            {service: len(origins)},
        )
        yield gauge(
            "sidings_orphaned_origins",
            "Origins that nobody holds, with jobs that wait or are held; of neighbours only the first counts; NaN: the "
            "last look for them failed.",
            ["service"],
            {service: math.nan if (orphans := self.upkeep.orphans) is None else len(orphans)},
        )
        yield gauge(
            "sidings_history_unarchived_seconds",
            "Since the end of the oldest day of the history that is not archived with all of its rows; 0: none waits; "
            "NaN: unknown.",
            ["service"],
            {service: self.upkeep.unarchived},
        )
        yield gauge(
            "sidings_unknown_jobs",
            "Jobs of types that this process has no handler for, in origins that it has leased.",
            ["service", "type"],
            {(self.service, kind): count for kind, count in scheduler.unknown.items()},
        )
        yield gauge(
            "sidings_oldest_waiting_seconds",
            "Age of the first waiting job of each held origin.",
            ["service", "origin"],
            {(self.service, queue.name): oldest[queue.name] for queue in origins if queue.name in oldest},
        )

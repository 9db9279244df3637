"""Desired and actual ownership, brought together by one loop.

An origin is *absent* -> acquired -> *held* -> (unassigned, wanted by a newer assignment, or its lease cannot be
renewed) -> *draining* -> released -> *absent*. An origin that is assigned again while it drains goes back to *held*
under the epoch that it still has. Kafka's assignment is routing; the lease decides.
"""

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import timedelta
from uuid import UUID

import asyncpg

from ..errors import PostgresUnavailable
from ..outage import Outage
from ..schema import load_sql
from ..waiting import set_within
from .clock import now
from .cycles import CycleLoop
from .leases import LeaseThread
from .link import Backoff, Link
from .metrics import ExecutorMetrics
from .queues import OriginQueue
from .reader import Reader
from .scheduler import Scheduler
from .settings import ExecutorSettings
from .standing import Deposed
from .worker import CancelReason
from .workers import Workers

__all__ = ["Reconciler"]

log = logging.getLogger("sidings.executor")

_ACQUIRE_AT_ONCE = 200  # origins locked by one call
_MOST_REFUSALS = 3  # of single origins in one pass; each may have waited for a lock


class Reconciler:
    """Acquires what is assigned, drains and releases what is not."""

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        workers: Workers,
        cycles: CycleLoop,
        reader: Reader,
        leases: LeaseThread,
        metrics: ExecutorMetrics,
        settings: ExecutorSettings,
        schema: str,
        on_replaced: Callable[[], None],
    ) -> None:
        self.executor_id: UUID | None = None
        self.desired: frozenset[str] = frozenset()
        self.generation = 0
        self.cancel_not_before = 0.0  # at a stop handlers have its time, also where another executor waits for them
        self._link = link
        self._scheduler = scheduler
        self._workers = workers
        self._cycles = cycles
        self._reader = reader
        self._leases = leases
        self._metrics = metrics
        self._settings = settings
        self._acquire_sql = load_sql(__package__, "acquire_origins", schema)
        self._release_sql = load_sql(__package__, "release", schema)
        # Given up to a newer assignment; not wanted again before the next of ours, or before this time: where the newer
        # one was of another consumer group, and has gone, no assignment tells.
        self._yielded: dict[str, float] = {}
        self._drain_until: dict[OriginQueue, float] = {}
        self._unreleased: dict[str, int] = {}  # let go of in memory, not yet in the database
        self.outage = Outage(log, "origins could not be reconciled")
        self._on_replaced = on_replaced
        self._trust_from = 0.0  # from when on expiry times are believed
        self._former: dict[str, float] = {}  # deadlines of what was lost: until then nobody else could have it
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()

    # -- what changes the picture -----------------------------------------------------------------------------------

    def assign(self, origins: Collection[str], generation: int) -> None:
        """A new assignment. `generation` grows with every one that Kafka makes."""
        self.desired = frozenset(origins)
        self.generation = generation
        self._yielded.clear()
        self.wake()

    def wanted(self, name: str, generation: int) -> None:
        """Another executor waits for an origin of ours."""
        if name in self._scheduler.origins and generation > self.generation and name not in self._yielded:
            log.warning("%s is assigned to another executor since generation %s: yielding it", name, generation)
            self._yielded[name] = math.inf  # until it is released
            self.wake()

    def lost(self, epochs: Mapping[str, int | None]) -> None:
        """The database says that somebody else has these origins, under newer epochs than these (None: than what is
        held): stop everything of them at once."""
        held = [(self._scheduler.origins.get(name), epoch) for name, epoch in epochs.items()]
        queues = [queue for queue, epoch in held if queue is not None and epoch in (None, queue.epoch)]
        for queue in queues:
            name = queue.name
            log.warning("%s was taken over by another executor (epoch %s is superseded)", name, queue.epoch)
            self._former[name] = queue.deadline
            self._leases.drop(name)
            self._workers.unclaim(queue)
            self._workers.cancel(queue, CancelReason.FENCED)
            self._cycles.forget(name)
            self._drain_until.pop(queue, None)
        self._scheduler.remove_origin(*(queue.name for queue in queues))
        if queues:
            self.wake()

    def distrust_expiry(self) -> None:
        """The server was restarted or replaced: others may have renewed on the old one. Wait a full lease."""
        self._trust_from = now() + self._settings.lease_seconds
        self._leases.renew_soon()
        self.wake()

    def wake(self) -> None:
        """Look at the picture again."""
        self._settled.clear()
        self._changed.set()

    async def settled(self) -> None:
        """Return when everything desired is held and everything else released."""
        await self._settled.wait()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def tend(self) -> None:
        """Look at assignments and deadlines for ever. Apart from `run`, which may be waiting for a database that hangs
        while leases run out."""
        while True:
            self._turn(self._wanted())
            await asyncio.sleep(min(0.25, self._settings.lease_seconds / 30))

    async def run(self) -> None:
        """Acquire and release for ever, at a change and now and then."""
        backoff = Backoff()
        while True:
            pause = min(1.0, self._settings.lease_seconds / 6)
            try:
                pause = min(pause, await self._reconcile())
                backoff.reset()
                self.outage.over()
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                self.outage.failed(error)
                self._changed.clear()
                await backoff.sleep()
                continue
            await set_within(self._changed, pause)
            self._changed.clear()

    async def _reconcile(self) -> float:
        """One pass; returns how long the next may wait."""
        self._forget_yielded()
        wanted = self._wanted()
        self._turn(wanted)
        released = await self._let_go_of_drained(wanted)
        failure = await self._in_spite_of_one(sorted(self._unreleased), self._release)
        # Neither a handler of a former epoch that could not be stopped, nor a cycle under way that may yet end or name
        # its jobs, may meet its successor in this very process: taking what is recorded as ours bumps no fence.
        unsettled = self._workers.busy_origins() | self._cycles.under_way()
        absent = sorted(wanted - self._scheduler.origins.keys() - unsettled)
        for start in range(0, len(absent), _ACQUIRE_AT_ONCE):
            failure = await self._in_spite_of_one(absent[start : start + _ACQUIRE_AT_ONCE], self._acquire) or failure
        if failure is not None:
            raise failure
        if self._wanted() == self._scheduler.origins.keys() and not self._drain_until:
            self._settled.set()  # by what is wanted now, which may be newer than what this pass began with
            return 1.0
        return 0.02 if released else 0.1

    def _wanted(self) -> frozenset[str]:
        return self.desired - self._yielded.keys()

    def _forget_yielded(self) -> None:
        """Whoever it was yielded to has had the time to take it, and does not give it back to an older assignment."""
        for name, until in list(self._yielded.items()):
            if now() >= until:
                del self._yielded[name]
            elif until == math.inf and name not in self._scheduler.origins and name not in self._unreleased:
                self._yielded[name] = now() + 2 * self._settings.lease_seconds

    def _turn(self, wanted: frozenset[str]) -> None:
        """Start and end drains."""
        time = now()
        ending: list[OriginQueue] = []
        for queue in list(self._scheduler.origins.values()):
            expiring = time >= queue.deadline - self._settings.soft_seconds
            if queue.name in wanted and not expiring:
                if queue.draining:
                    log.info("%s comes back while it drains", queue.name)
                    self._drain_until.pop(queue, None)
                    self._scheduler.resume(queue)
                    self._reader.wake()
                continue
            if not queue.draining:
                until = max(time + self._settings.drain_seconds, self.cancel_not_before)
                self._drain_until[queue] = time if expiring else until
                if expiring:
                    log.warning("the lease of %s cannot be renewed: stopping its jobs", queue.name)
                self._cycles.unname(self._workers.give_up(queue))
                ending.append(queue)
            if expiring or time >= self._drain_until.get(queue, time):
                self._workers.cancel(queue, CancelReason.STOPPING)
        if ending:
            self._scheduler.drain(*ending)

    async def _let_go_of_drained(self, wanted: frozenset[str]) -> bool:
        """Forget the drained origins that are not wanted, after a cycle that names none of their jobs."""
        queues = [q for q in self._drain_until if not q.running and q.name not in wanted]
        if not queues:
            return False
        until = {queue: self._drain_until[queue] for queue in queues}
        await self._cycles.barrier()
        # If it came back meanwhile and drains again, a cycle after that one may have named its jobs.
        queues = [q for q in queues if self._drain_until.get(q) == until[q] and q.draining and not q.running]
        queues = [q for q in queues if self._scheduler.origins.get(q.name) is q]
        if queues:
            for queue in queues:  # from here on nothing may renew or resume it
                self._leases.drop(queue.name)
                self._drain_until.pop(queue, None)
            self._scheduler.remove_origin(*(queue.name for queue in queues))
            self._unreleased.update((queue.name, queue.epoch) for queue in queues)
        return True

    async def _in_spite_of_one(
        self, names: list[str], call: Callable[[list[str]], Awaitable[None]]
    ) -> asyncpg.PostgresError | None:
        """Do it for all at once. Where Postgres refuses that, for each alone: a row that somebody has locked, of a lost
        job or an origin, must not hold up the others. Returns what it has refused in the end."""
        if not names:
            return None
        try:
            await call(names)
        except asyncpg.PostgresError as error:
            if len(names) == 1:
                return error
        else:
            return None
        refusals: list[asyncpg.PostgresError] = []
        for name in random.sample(names, len(names)):
            try:
                await call([name])
            except asyncpg.PostgresError as error:
                refusals.append(error)
                if len(refusals) == _MOST_REFUSALS:
                    break
        return refusals[-1] if refusals else None

    async def _release(self, names: list[str]) -> None:
        """Tell the database. What fails is repeated; the epoch keeps a late repetition from releasing too much."""
        given_up = {name: self._unreleased[name] for name in names}
        await self._link.fetch(self._release_sql, self.executor_id, list(given_up), list(given_up.values()))
        for name in given_up:
            del self._unreleased[name]
        log.info("released %s", ", ".join(given_up))

    async def _acquire(self, names: list[str]) -> None:
        wanted = self._wanted()
        names = [name for name in names if name in wanted]  # the assignment may have changed
        lease = timedelta(seconds=self._settings.lease_seconds)
        sent = now()
        believed = sent >= self._trust_from
        ours = [name for name in names if sent < self._former.get(name, 0.0)]
        rows = await self._link.fetch(
            self._acquire_sql, self.executor_id, names, self.generation, lease, believed, ours
        )
        self._meet(rows[0]["timeline"])
        if not rows[0]["registered"]:
            raise Deposed
        taken: list[OriginQueue] = []
        for row in rows:
            if row["acquired"] is None:
                continue
            queue = self._scheduler.add_origin(row["acquired"], row["acquired_epoch"])
            queue.deadline = sent + self._settings.lease_seconds - self._settings.margin_seconds
            self._former.pop(queue.name, None)
            taken.append(queue)
            if row["former"] is not None and row["former"] != self.executor_id:
                self._metrics.takeovers.inc()
                self._metrics.lost.inc(row["losses"])
                log.warning(
                    "took %s over from a dead executor (epoch %s, %s attempts lost)",
                    queue.name,
                    queue.epoch,
                    row["losses"],
                )
        if taken:
            self._leases.hold(taken)
            log.info("acquired %s", ", ".join(queue.name for queue in taken))
            self._reader.wake()

    def _meet(self, timeline: str) -> None:
        """Leases are worth something on the server from which jobs are read. Raises `PostgresUnavailable` where this
        answer is another's: one of the two is a former primary."""
        known = self._scheduler.timeline
        if known not in (None, timeline):
            self._link.drop()
            if timeline > known:
                self._on_replaced()
            raise PostgresUnavailable(f"leases were granted on timeline {timeline}, jobs were read on {known}")
        self._scheduler.read_from(timeline)

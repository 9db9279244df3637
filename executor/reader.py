"""The reader: one read in flight, for all held origins, in one snapshot."""

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable
from itertools import islice
from math import inf
from uuid import UUID

import asyncpg

from ..errors import PostgresUnavailable
from ..legible import told
from ..outage import Outage
from ..schema import load_sql
from ..waiting import poll
from .clock import now
from .delivery import HEADER, Delivery
from .glance import GLANCE_FROM, glance
from .link import Backoff, Link
from .marks import ReadMarks
from .metrics import ExecutorMetrics
from .planning import Plan, Planner
from .queues import NOTHING_PAUSED, Pauses
from .scheduler import Scheduler

__all__ = ["Reader"]

log = logging.getLogger("sidings.executor")

_CLOCK_SET = 60.0  # seconds, of the server's clock against ours, at once: somebody has set it
_THINNED = 500  # lanes of a statement that ends superseded jobs
_THIN_AGAIN_SECONDS = 1.0  # or so, until that is tried again where Postgres has refused it
_MOST_SUPERSEDED, _FEWEST_SUPERSEDED = 20_000, 40  # jobs that it ends: of all lanes, of each
_LAST_DRAWN = 2**62  # no sequence comes to it: a million a second take 146,000 years
_RENUMBERED = 10_000  # jobs of a statement


class Reader:
    """Reads until the scheduler has enough, then when woken, and at the latest every `poll_seconds`.

    on_rows: the scheduler may have something to choose. on_restarted: the server has been restarted. on_replaced: it
    has been replaced by another one, which may have lost commits. on_fence: told the fence of this executor's row, as
    every read finds it (None: there is none), and returns whether the read counts.
    """

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        metrics: ExecutorMetrics,
        *,
        schema: str,
        poll_seconds: float,
        silent: Callable[[], list[str]],
        on_rows: Callable[[], None],
        on_restarted: Callable[[], None],
        on_replaced: Callable[[], None],
        on_fence: Callable[[int | None], bool],
    ) -> None:
        self.executor_id: UUID | None = None
        self.last_answer = now()
        self.server: str | None = None
        self._link = link
        self._scheduler = scheduler
        self._metrics = metrics
        self._poll_seconds = poll_seconds
        self._on_rows = on_rows
        self._on_restarted = on_restarted
        self._on_replaced = on_replaced
        self._on_fence = on_fence
        self._complete: str | None = None  # the snapshot as of which there is nothing left to read
        # As the last read gave it: its text, the fence, the pauses and their digest.
        self._standing: tuple[str, int | None, Pauses, str | None] = "", None, NOTHING_PAUSED, None
        self._marks = ReadMarks()
        self._skews = -inf, inf  # between these were the server's epoch seconds against our clock, at the last read
        self._drawn = 0  # the last position that had been drawn when the last read was answered
        self._planner = Planner(scheduler, poll_seconds)
        self._too_long = 0  # so many reads have taken, one after the other
        self._silent = silent
        self._sql = load_sql(__package__, "read", schema)
        self._glance_sql = load_sql(__package__, "glance", schema)
        self._advance_sql = load_sql(__package__, "advance", schema)
        self._renumber_sql = load_sql(__package__, "renumber", schema)
        self._supersede_sql = load_sql(__package__, "supersede", schema)
        self.outage = Outage(log, "jobs could not be read")
        self.thinning = Outage(log, "superseded jobs could not be ended")
        self._behind = Outage(log, "jobs stand beyond the sequence of positions, and that could not be put right")
        self._woken = asyncio.Event()
        self._busy_since: float | None = None
        self._anew_since: float | None = None  # what waits was forgotten then, and has not been read to its end since
        self._times_anew = 0  # that it has been forgotten since

    def read_anew(self) -> None:
        """All that waits has been forgotten: read it again."""
        self._anew_since = now() if self._anew_since is None else self._anew_since
        self._times_anew += 1
        self.wake()

    def starved_seconds(self) -> float:
        """For how long one reading anew has been cut short by the next, so that jobs may wait that no read has come
        to; 0 when none has."""
        since = self._anew_since  # any thread may ask: it may be over between two looks
        return 0.0 if since is None or self._times_anew < 2 else now() - since

    def wake(self) -> None:
        """Something was committed, acquired or has become due: read now."""
        self._woken.set()

    def hungry(self) -> None:
        """The scheduler has used up some of what it had: read if the database is known to have more. What is under way
        already may bring it: then that is asked when it has been applied."""
        if self._busy_since is None and not self._woken.is_set() and self._planner.wants():
            self._woken.set()

    def busy_seconds(self) -> float:
        """How long the read that is under way has been waiting for its answer; 0 when none is."""
        since = self._busy_since
        return 0.0 if since is None else now() - since

    async def run(self) -> None:
        """Read for ever."""
        backoff = Backoff()
        while True:
            await poll(self._woken, self._poll_seconds)
            polled = not self._woken.is_set()
            self._woken.clear()
            if not any(not queue.draining for queue in self._scheduler.origins.values()):
                self.last_answer = now()
                continue
            if self._scheduler.learn():
                self.read_anew()
            many = len(self._scheduler.origins) >= GLANCE_FROM
            snapshot = await glance(self._link, self._glance_sql) if many else None
            if polled and snapshot is not None and snapshot == self._complete and not self._woken.is_set():
                self.last_answer = now()
                continue
            self._complete = None
            if self._scheduler.crowded:
                await self._thin_out()
            plan = self._planner.plan(now())
            self._scheduler.reading = True
            self._busy_since = sent = now()
            try:
                rows = await self._link.fetch(self._sql, *self._arguments(plan))
                self._metrics.read_seconds.observe(now() - sent)
                backoff.reset()
                self.outage.over()
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                # The previous snapshot stays: only a delivered result replaces it.
                self.outage.failed(f"{type(error).__name__}: {told(error)}")
                self._give_up(plan)
                self._woken.set()
                if now() - sent >= self._link.long_seconds:
                    await self._ask_for_less(plan)
                await backoff.sleep()
                continue
            finally:
                self._busy_since = None
            self._too_long = 0
            if not self._planner.asks_for_less():
                self._link.patience = 1
            self._deliver(plan, rows, sent)
            if (top := max((queue.high for queue in self._scheduler.origins.values()), default=0)) > self._drawn:
                await self._put_right(top)
            if not self._woken.is_set() and self._planner.saw_everything(plan):
                self._complete = snapshot
            self.last_answer = now()
            self._on_rows()

    async def _ask_for_less(self, plan: Plan) -> None:
        """The read took too long. Where the very next one did so as well, it may have looked for late rows among
        millions that stand still, behind the mark of a transaction that was open for long: from 0 on no row is late,
        and all are read page by page. Where these reads take too long, too, they may step over tens of millions of jobs
        that have ended, while somebody's transaction keeps vacuum from removing them: no smaller one would get past
        them, and it is given more time."""
        self._too_long += 1
        if self._too_long > 1:
            self._forget_all()
        self._planner.took_too_long(plan)
        if self._too_long > 2:
            await self._link.be_patient()

    async def _put_right(self, top: int) -> None:
        """A job stands beyond what the sequence of positions has drawn: bring them together, and read what may stand
        behind our marks."""
        try:
            if top > _LAST_DRAWN:
                await self._renumber()
            else:
                await self._link.fetch(self._advance_sql, top, _LAST_DRAWN)
                log.error(
                    "sequences stood behind the jobs (%s, a job at %s), as after a logical replication: moved on. Jobs "
                    "stored meanwhile run before older ones of their groups (docs/operations.md, Another server)",
                    *(self._drawn, top),
                )
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            self._behind.failed(error)
            return
        self._behind.over()
        self._forget_all()
        self._woken.set()

    async def _renumber(self) -> None:
        queues = [queue for queue in self._scheduler.origins.values() if queue.high > _LAST_DRAWN]
        rows = await self._link.fetch(
            self._renumber_sql,
            self.executor_id,
            [queue.name for queue in queues],
            [queue.epoch for queue in queues],
            _LAST_DRAWN,
            _RENUMBERED,
        )
        for queue in queues:
            for entry in queue.running:  # it may have been among them; its group is read again from it on
                entry.position = 0
        log.error(
            "jobs of %s stood at positions that no sequence comes to, as an INSERT of somebody's own may give them: %d "
            "have been given the next ones",
            *(", ".join(sorted(queue.name for queue in queues)), rows[0]["count"]),
        )

    async def _thin_out(self) -> None:
        """Have the jobs ended that a newer one of policy `latest` has superseded. Never while a read is under way: its
        answer would bring them back."""
        scheduler = self._scheduler
        lanes = list(islice(scheduler.crowded.items(), _THINNED))
        try:
            rows = await self._link.fetch(
                self._supersede_sql,
                self.executor_id,
                [lane.origin.name for lane, _ in lanes],
                [lane.origin.epoch for lane, _ in lanes],
                [lane.group for lane, _ in lanes],
                [kind for _, kind in lanes],
                self._silent(),
                max(_FEWEST_SUPERSEDED, _MOST_SUPERSEDED // len(lanes)),
            )
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            self.thinning.failed(f"{type(error).__name__}: {told(error)}")
            for lane, _ in lanes:  # not together: what is refused may be of one of them
                scheduler.read_anew(lane, now() + _THIN_AGAIN_SECONDS * random.uniform(0.5, 1.5))
            return
        failed_at = self.thinning.failed_at
        if failed_at is not None and time.monotonic() - failed_at > 2 * _THIN_AGAIN_SECONDS:
            self.thinning.over()
        for row in rows:
            ref: int = row["ref"]
            lane, kind = lanes[ref - 1]
            if scheduler.origins.get(lane.origin.name) is lane.origin:
                scheduler.thinned(lane, row["id"] or 0, row["superseded"], now())
                self._metrics.superseded(kind, row["superseded"])
        self._on_rows()

    def _arguments(self, plan: Plan) -> tuple[object, ...]:
        marks = self._marks
        deep = {lane.origin for lane in plan.left_out}
        return (
            [queue.name for queue, _ in plan.origins],
            [queue.high for queue, _ in plan.origins],
            plan.pages,
            [queue in deep for queue, _ in plan.origins],
            marks.snapshot,
            list(marks.open),
            list(marks.open.values()),
            marks.unseen,
            [lane.origin.name for lane, _, _ in plan.lanes],
            [lane.group for lane, _, _ in plan.lanes],
            [lane.last for lane, _, _ in plan.lanes],
            [upto for _, _, upto in plan.lanes],
            plan.size,
            [f"{lane.origin.name}\x1f{lane.group}" for lane in plan.left_out] or None,
            self.executor_id,
            plan.most_late,
            plan.largest,
            self._scheduler.memory.payload_budget,
            self._standing[3],
        )

    def _give_up(self, plan: Plan) -> None:
        self._scheduler.read_delivered()
        self._scheduler.still_hungry(plan.lanes)

    def _deliver(self, plan: Plan, rows: list[asyncpg.Record], sent: float) -> None:
        """Apply what it has brought, if it counts."""
        header, time = rows[0], now()
        assert header["part"] == HEADER
        if not self._counts(header):
            self._give_up(plan)
            return
        skew = header["run_at"] - (sent + time) / 2  # server's epoch seconds against our clock
        self._metrics.set_clock_skew(skew)
        if self._clock_was_set_forward(header["run_at"] - time, header["run_at"] - sent):
            self._scheduler.forget_waiting(*self._scheduler.origins.values())
            self.read_anew()
            self._give_up(plan)
            return
        high_before = max((queue.high for queue, _ in plan.origins), default=0)
        too_large, largest = Delivery(self._scheduler, self._metrics, plan, skew, time).apply(rows, self._drawn)
        self._planner.delivered(plan, time - sent, too_large, largest)
        self._drawn = header["position"] or 0
        self._marks.delivered(_text(header["payload"]), header["id"], high_before)
        self._scheduler.read_delivered()
        if not self._planner.behind_hand():
            self._anew_since, self._times_anew = None, 0
        if plan.partial or self._planner.wants():
            self._woken.set()

    def _clock_was_set_forward(self, low: float, high: float) -> bool:
        """Whether groups may wait for times that have come already, by the server's clock. low, high: of the skew."""
        (last_low, last_high), self._skews = self._skews, (low, high)
        if high < last_low - _CLOCK_SET:
            log.warning(
                "the clock of the Postgres server was set back, by %.0f s: jobs that were to be tried again, or to run "
                "later, wait for so much longer (docs/operations.md, Postgres' clock was wrong)",
                last_low - high,
            )
        if forward := low > last_high + _CLOCK_SET:
            log.warning("the clock of the Postgres server was set forward, by %.0f s", low - last_high)
        return forward

    def _counts(self, header: asyncpg.Record) -> bool:
        """Whether an answer is to be applied: not where it comes from another server, is older than what is known, or
        tells of other pauses."""
        scheduler, server = self._scheduler, header["type"]
        lived_on = self._link.lived_on(header["ref"])
        moved = scheduler.timeline not in (None, _timeline(server))  # where the leases were granted
        if server == "standby" or moved or not (lived_on or self.server in (None, server)):
            self._new_server(server)
            return False
        self.server = server
        scheduler.read_from(_timeline(server))
        if header["headers"] != self._standing[0]:
            standing, (_, _, pauses, digest) = json.loads(header["headers"]), self._standing
            if standing["paused"] != digest:  # else they were not brought
                pauses = Pauses.of(standing["pauses"])
            self._standing = header["headers"], standing["fence"], pauses, standing["paused"]
        _, fence, pauses, _ = self._standing
        if not self._on_fence(fence):
            self._woken.set()
            return False
        if scheduler.pause(pauses):
            self.read_anew()
            return False
        return True

    def _new_server(self, server: str) -> None:
        """Positions, transaction ids and leases may have gone back: nothing read so far can be relied on."""
        replaced = server == "standby" or self._scheduler.timeline not in (None, _timeline(server))
        if server == "standby":
            log.error("this database is a standby: waiting for a primary; check the DSN")
            self._link.drop()
        else:
            what = "replaced" if replaced else "restarted"
            log.warning("Postgres was %s (%s): reading everything anew", what, server)
            self.server = server
        self._forget_all()
        if replaced:
            self._on_replaced()
        else:
            self._on_restarted()

    def _forget_all(self) -> None:
        """Read everything from 0 again, and take nothing for late that is found there."""
        self._marks.reset()
        self._drawn = 0
        self._scheduler.forget_waiting(*self._scheduler.origins.values())


def _timeline(server: str) -> str:
    return server.rpartition(" ")[2]


def _text(value: str) -> str:
    return value.strip('"')

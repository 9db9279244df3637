"""Turns the ticks of periodic jobs into jobs when they are due, by the server's clock.

Every executor tries those of the service, and only the holder of an origin those of that origin; the statements see to
it that a tick becomes a job once (`fire_service.sql`). What this process believes is only a matter of when it tries.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from uuid import UUID

import asyncpg

from ..errors import PostgresUnavailable
from ..jobs import JobType, Periodic, Registry, Tick
from ..outage import Outage
from ..schema import load_sql
from .clock import now
from .link import Backoff, Link
from .queues import OriginQueue
from .scheduler import Scheduler

__all__ = ["PeriodicLoop"]

log = logging.getLogger("sidings.periodic")

_LOOK_SECONDS = 60.0  # how often to look at the rows although nothing calls for it, give or take a fifth
_LATE_LOOK_SECONDS = 10.0  # a look that comes so late: Postgres was away, or this process stood still
_WITHOUT_GAP_SECONDS = 180.0  # so long must one have looked who says that others have not
_PAUSE_SECONDS = 0.25  # longest, so that origins which have just been acquired are noticed
_LEAST_SECONDS = 0.002  # between two tries of a tick that came a moment too early for the server's clock
_BUSY_SECONDS = 0.5  # how often to see whether an earlier tick's job has ended
_LATER_SECONDS = (0.05, 0.5)  # executors that did not fire the last tick give the one that did so much time
# That a tick waits before the log says so: a start, or a takeover, is over by then, and missed="skip" still has it.
_WARN_SECONDS = 50.0
_PAUSED_SECONDS = 3_600.0  # between two lines about a tick that waits behind a pause: somebody wants it so
_AHEAD_SECONDS = 60.0  # so far ahead of the server's clock is a tick only where that has been set back
_AT_ONCE = 500  # origins of one statement
_JOBS_AT_ONCE = 5_000  # or so: with missed="all" an origin may have a thousand
_PRUNE_SECONDS = 3_600.0


@dataclass(slots=True)
class _Row:
    """What is known of a row of `periodic`. Times called `_at` are seconds of the executor's clock."""

    job_type: JobType[Tick]
    periodic: Periodic
    origin: str  # '' per service
    schedule: str  # in force
    since: datetime
    last_tick: datetime | None
    try_at: float = 0.0
    ours: bool = False  # this executor has fired the last tick
    warn_at: float | None = None  # while a tick waits for an origin, or behind a pause

    @property
    def in_force(self) -> bool:
        """Whether the schedule of this process is the one in force."""
        return self.schedule == self.periodic.schedule.text

    @property
    def last(self) -> datetime:
        """Ticks up to here are settled."""
        return self.since if self.last_tick is None else max(self.since, self.last_tick)


class PeriodicLoop:
    """on_fired: called with the origins of jobs that have just been committed."""

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        registry: Registry,
        *,
        schema: str,
        on_fired: Callable[[set[str]], None],
    ) -> None:
        self.executor_id: UUID | None = None
        self._link = link
        self._scheduler = scheduler
        self._registry = registry
        self._on_fired = on_fired
        self._schema = schema
        self._attend_sql = load_sql(__package__, "attend_periodic", schema)
        self._service_sql = load_sql(__package__, "fire_service", schema)
        self._origins_sql = load_sql(__package__, "fire_origins", schema)
        self._prune_sql = load_sql(__package__, "prune_periodic", schema)
        self._rows: dict[tuple[str, str], _Row] = {}
        self._skew = 0.0  # the server's epoch seconds minus the executor's clock
        self._started: set[str] = set()  # names whose schedule this process has put into force
        self.outage = Outage(log, "periodic jobs could not be fired")
        self.outages: dict[str, Outage] = {}  # by name: of those that have a tick due here which could not be fired
        self._look_at = -math.inf
        self._looking_since = math.inf  # without a gap
        self._prune_at = now() + _PRUNE_SECONDS

    async def run(self) -> None:
        """Fire for ever; for a process without periodic jobs, sleep."""
        backoff = Backoff()
        while True:
            declared = {t.name: t for t in self._registry if t.periodic is not None}
            try:
                if declared:
                    await self._attend(declared)
                    await self._fire()
                if now() >= self._prune_at:
                    self._prune_at = now() + _PRUNE_SECONDS
                    await self._link.fetch(self._prune_sql, datetime.now(UTC))
                backoff.reset()
                self.outage.over()
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                self.outage.failed(error)
                self._look_at = -math.inf  # what was under way may have been committed
                await backoff.sleep()
                continue
            wake_at = min((row.try_at for row in self._rows.values()), default=math.inf)
            await asyncio.sleep(min(max(0.0, wake_at - now()), _PAUSE_SECONDS if declared else 60.0))

    # -- looking ------------------------------------------------------------------------------------------------------

    async def _attend(self, declared: dict[str, JobType[Tick]]) -> None:
        """Know the row of every periodic job that this process may fire; look again now and then."""
        held = {queue.name: queue for queue in self._scheduler.origins.values() if not queue.draining}
        wanted: list[tuple[str, str]] = []
        for name, job_type in declared.items():
            per = _periodic(job_type).per
            wanted += [(name, "")] if per == "service" else [(name, origin) for origin in held]
        for key in self._rows.keys() - set(wanted):
            del self._rows[key]
        time = now()
        if time >= self._look_at:
            if time >= self._look_at + _LATE_LOOK_SECONDS:
                self._looking_since = time
            self._look_at = time + _LOOK_SECONDS * random.uniform(0.8, 1.2)
        else:
            wanted = [key for key in wanted if key not in self._rows]
        new = declared.keys() - self._started
        for starting in (True, False):
            if keys := [key for key in wanted if (key[0] in new) == starting]:
                await self._look(declared, keys, held, starting=starting)

    async def _look(
        self,
        declared: dict[str, JobType[Tick]],
        keys: Sequence[tuple[str, str]],
        held: dict[str, OriginQueue],
        *,
        starting: bool,
    ) -> None:
        sent = now()
        rows = await self._link.fetch(
            self._attend_sql,
            self.executor_id,
            [name for name, _ in keys],
            [origin for _, origin in keys],
            [held[origin].epoch if origin else 0 for _, origin in keys],
            starting,
            [_periodic(declared[name]).schedule.text for name, _ in keys],
            sent - self._looking_since >= _WITHOUT_GAP_SECONDS,
        )
        self._started.update(name for name, _ in keys)
        again = list[tuple[str, str]]()
        ahead: dict[str, _Row] = {}  # by name: an origin each would be many lines
        for row in rows:
            self._learn_clock(row["now"], sent)
            known = self._rows.get((row["name"], row["origin"]))
            job_type = declared[row["name"]]
            made = _Row(job_type, _periodic(job_type), row["origin"], row["schedule"], row["since"], row["last_tick"])
            if starting and not made.in_force:
                again.append((row["name"], row["origin"]))
                continue
            if known is None or (known.schedule, known.since, known.last_tick) != row[2:5]:
                self._rows[row["name"], row["origin"]] = made
                self._plan(made)
                if not made.in_force:
                    log.warning("%s: in force is %r, of another process", row["name"], made.schedule)
            else:
                planned = known.try_at
                self._plan(known)  # anew, if the server's clock has been set forward
                known.try_at = min(known.try_at, planned)
            if (made.last - self._time()).total_seconds() > _AHEAD_SECONDS:
                ahead[made.job_type.name] = made
        for name, made in ahead.items():  # say why nothing is fired although time passes
            log.error(
                "%s: no tick comes before %s, up to when the server's clock, which was ahead then, has settled all. To "
                "let them begin now: UPDATE %s.periodic SET since = least(since, now()), "
                "last_tick = least(last_tick, now()) WHERE name = '%s' AND greatest(since, last_tick) > now()",
                *(name, made.last.isoformat(), self._schema, name.replace("'", "''")),
            )
        if again:  # their rows were locked until another start committed: this statement has them as they were before
            await self._look(declared, again, held, starting=False)

    def _learn_clock(self, server: datetime, sent: float) -> None:
        self._skew = server.timestamp() - (sent + now()) / 2

    def _time(self) -> datetime:
        """The server's clock."""
        return datetime.fromtimestamp(now() + self._skew, UTC)

    # -- firing -------------------------------------------------------------------------------------------------------

    def _plan(self, row: _Row) -> None:
        """When to try next: at once if something is due, else at the next tick."""
        time = self._time()
        wait = 0.0
        if not row.in_force:
            wait = _LOOK_SECONDS
        elif not row.periodic.is_due(row.last, time):
            wait = (row.periodic.schedule.after(time) - time).total_seconds()
        if not row.origin and not row.ours:
            wait += random.uniform(*_LATER_SECONDS)
        row.try_at = now() + max(wait, _LEAST_SECONDS)

    async def _fire(self) -> None:
        """Try what is due."""
        time, due = self._time(), list[_Row]()
        for row in self._rows.values():
            if row.try_at <= now():
                if row.in_force and row.periodic.is_due(row.last, time):
                    due.append(row)
                else:
                    self._plan(row)
                    if row.warn_at is not None and row.warn_at < row.try_at:  # it was of a tick that is skipped now
                        row.warn_at = None
        if self.outages:
            self._forget_outages(time)
        due.sort(key=lambda row: row.job_type.name)
        for name, group in groupby(due, key=lambda row: row.job_type.name):
            of_name = list(group)
            try:
                if of_name[0].periodic.per == "service":
                    await self._fire_service(of_name[0], of_name[0].periodic.due(of_name[0].last, time))
                else:
                    for some in _pages(of_name, time):
                        await self._fire_origins(name, some)
                if name in self.outages:
                    self.outages[name].over()
            except asyncpg.PostgresError as error:  # e.g. somebody has locked its row: no reason to keep others waiting
                self.outages.setdefault(name, Outage(log, f"{name}: a tick could not be fired")).failed(error)
                for row in of_name:
                    row.try_at = now() + _BUSY_SECONDS

    def _forget_outages(self, time: datetime) -> None:
        """Those of names that have nothing due here: another holds the origin now, or another schedule is in force."""
        rows = self._rows.values()
        late = {row.job_type.name for row in rows if row.in_force and row.periodic.is_due(row.last, time)}
        for name in self.outages.keys() - late:
            del self.outages[name]

    async def _fire_service(self, row: _Row, ticks: list[datetime]) -> None:
        sent = now()
        answer = await self._link.fetchrow(
            self._service_sql,
            row.job_type.name,
            row.schedule,
            row.since,
            row.last_tick,
            ticks[-1],
            row.job_type.home,
            row.periodic.alone,
            _payloads(row.last_tick, ticks),
        )
        assert answer is not None
        self._learn_clock(answer["now"], sent)
        if answer["fired"] is not None:
            self._fired(row, ticks)
            self._on_fired({answer["fired"]})
        elif answer["busy"] is None:
            self._missed_out(row)
        elif answer["now"] < ticks[-1]:
            self._plan(row)
        else:
            row.try_at = now() + _BUSY_SECONDS
            self._warn(row, ticks, answer)

    def _warn(self, row: _Row, ticks: list[datetime], answer: asyncpg.Record) -> None:
        """Say why a tick that is due has not been fired for a while, where it is not because its predecessor runs."""
        why, level, again = "", logging.ERROR, _WARN_SECONDS
        if answer["origin"] is None:
            why = (
                "no executor holds an origin: consume a topic, name one in topics=, or give "
                "assignment=StaticAssignment([...])"
            )
            if row.job_type.home is not None:
                why = f"the partitions of its home {row.job_type.home!r} are not known yet"
        elif answer["busy"] and not answer["leased"]:
            why = (
                f"an earlier job of it waits in {answer['origin']}, which no executor holds: consume its topic, name "
                f"it in topics=, or move what waits there (`sidings origins move {answer['origin']} TO`)"
            )
        elif answer["busy"] and answer["paused"] is not None:
            why = (
                f"an earlier job of it in {answer['origin']} has not ended, and its {answer['paused']} is paused: "
                "`sidings pauses` says by whom and why"
            )
            level, again = logging.WARNING, _PAUSED_SECONDS
        if not why:
            row.warn_at = None
        elif row.warn_at is None or row.warn_at > now() + again:  # later: until now it has waited behind a pause
            row.warn_at = now() + _WARN_SECONDS
        elif now() >= row.warn_at:
            log.log(level, "%s: the tick of %s waits: %s", row.job_type.name, ticks[-1].isoformat(), why)
            row.warn_at = now() + again

    async def _fire_origins(self, name: str, due: list[tuple[_Row, list[datetime]]]) -> None:
        due = [item for item in due if item[0].origin in self._scheduler.origins]
        if not due:
            return
        first, sent = due[0][0], now()
        payloads = [(row.origin, text) for row, ticks in due for text in _payloads(row.last_tick, ticks)]
        answers = await self._link.fetch(
            self._origins_sql,
            self.executor_id,
            name,
            first.schedule,
            [row.origin for row, _ in due],
            [self._scheduler.origins[row.origin].epoch for row, _ in due],
            [row.since for row, _ in due],
            [row.last_tick for row, _ in due],
            [ticks[-1] for _, ticks in due],
            first.periodic.alone,
            [origin for origin, _ in payloads],
            [text for _, text in payloads],
        )
        by_origin = {answer["origin"]: answer for answer in answers}
        fired: set[str] = set()
        for row, ticks in due:
            answer = by_origin.get(row.origin)
            if answer is None:
                self._missed_out(row)
                continue
            self._learn_clock(answer["now"], sent)
            if answer["fired"]:
                self._fired(row, ticks)
                fired.add(row.origin)
            elif answer["busy"] and row.periodic.alone:
                row.try_at = now() + _BUSY_SECONDS
            elif answer["now"] < ticks[-1]:
                self._plan(row)
            else:
                self._missed_out(row)
        if fired:
            self._on_fired(fired)

    def _fired(self, row: _Row, ticks: list[datetime]) -> None:
        row.last_tick, row.ours, row.warn_at = ticks[-1], True, None
        self._plan(row)

    def _missed_out(self, row: _Row) -> None:
        """Another has fired it, or the origin is another's now: look before the next try."""
        self._rows.pop((row.job_type.name, row.origin), None)


def _periodic(job_type: JobType[Tick]) -> Periodic:
    assert job_type.periodic is not None
    return job_type.periodic


def _pages(rows: Iterable[_Row], time: datetime) -> Iterator[list[tuple[_Row, list[datetime]]]]:
    """Rows with the ticks that are due, as many at a time as one statement takes. Ticks of a page are reckoned when its
    turn has come: all those of a week's absence would take the event loop for seconds."""
    page, jobs = list[tuple[_Row, list[datetime]]](), 0
    for row in rows:
        ticks = row.periodic.due(row.last, time)
        page.append((row, ticks))
        jobs += len(ticks)
        if len(page) == _AT_ONCE or jobs >= _JOBS_AT_ONCE:
            yield page
            page, jobs = [], 0
    if page:
        yield page


def _payloads(previous: datetime | None, ticks: Iterable[datetime]) -> list[str]:
    """What the jobs of these ticks get."""
    out: list[str] = []
    for tick in ticks:
        out.append(Tick(scheduled_at=tick, previous=previous).model_dump_json())
        previous = tick
    return out

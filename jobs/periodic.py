"""Schedules: which ticks there are, and which of them are to become jobs. Nothing here does I/O or looks at a clock.

A tick is an aware time in UTC. The ticks of a schedule depend on nothing but its text and, with a time zone, the
host's time zone data, as it was when the process first read it. So every process with the same data computes the same
ones, after restarts and changes of owner too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any, Literal, NamedTuple, Protocol, get_args
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import AwareDatetime, BaseModel

from ..errors import ConfigurationError

__all__ = [
    "Cron",
    "Every",
    "Missed",
    "Per",
    "Periodic",
    "Schedule",
    "Tick",
    "Upcoming",
    "periodic_of",
    "schedule_of",
    "upcoming",
]

Missed = Literal["once", "skip", "all"]
Per = Literal["service", "origin"]

LATE_SECONDS = 60.0  # with missed="skip": how late a tick may be and still become a job
MOST_MISSED = 1_000  # with missed="all": how many ticks are made up for; older ones are passed over

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHORTEST_SECONDS = 0.1
_LONGEST_SECONDS = 366 * 86_400


class Tick(BaseModel):
    """The payload of a periodic job.

    Where ticks were missed, the two times are further apart than the schedule says. A job that works off what has
    happened from `previous` to `scheduled_at` leaves no gap.

    Attributes:
        scheduled_at: The time that the schedule names, in UTC. The job may run later.
        previous: The tick that the job before this one had; None for the first.
    """

    scheduled_at: AwareDatetime
    previous: AwareDatetime | None = None


class Schedule(Protocol):
    """An endless row of ticks. text: tells one schedule from another."""

    text: str

    def after(self, time: datetime) -> datetime:
        """The first tick later than `time`."""
        ...

    def latest(self, time: datetime) -> datetime:
        """The last tick up to and including `time`."""
        ...

    def back(self, time: datetime) -> Iterator[datetime]:
        """The ticks up to and including `time`, the latest first."""
        ...


class Cron:
    """Five fields of cron (minute, hour, day of the month, month, day of the week), read as Debian's cron does, in a
    time zone.

    When the clock is set forward, a time that the day skips comes at the first minute after it. When it is set back, a
    time that the day has twice comes once, the first time. Both hold for fixed times; where minute or hour begin with
    ``*``, ticks follow the clock that runs on: ``*/10 * * * *`` comes every ten minutes throughout.
    Raises `ConfigurationError`.
    """

    def __init__(self, expression: str, timezone: str) -> None:
        if len(expression.split()) != 5:
            raise ConfigurationError(
                f"cron {expression!r}: give five fields (minute, hour, day of the month, month, day of the week), "
                "or every= for a period in seconds"
            )
        try:
            self._zone = ZoneInfo(timezone)
        except (KeyError, ValueError, TypeError, OSError) as error:
            raise ConfigurationError(
                f"timezone={timezone!r} is unknown on this machine ({error}): give a name such as 'Europe/Tallinn'; "
                "where the system has no time zones, install the package tzdata"
            ) from error
        self.text = f"{' '.join(expression.split())}, {timezone}"
        self._expression = expression
        # Two neighbouring ticks: the rows of a thousand origins ask for the same ones.
        self._known = (_EPOCH, _EPOCH)
        try:
            self.after(datetime.now(UTC))
        except CronSimError as error:
            raise ConfigurationError(f"cron {expression!r}: {error}") from error

    def after(self, time: datetime) -> datetime:
        """The first tick later than `time`. Raises `ConfigurationError` if there is none in 50 years."""
        return self._around(time)[1]

    def latest(self, time: datetime) -> datetime:
        """The last tick up to and including `time`."""
        return self._around(time)[0]

    def back(self, time: datetime) -> Iterator[datetime]:
        """The ticks up to and including `time`, the latest first."""
        # In the second pass of an hour that the day has twice, CronSim goes by the first: so from beyond such changes.
        start = (time + timedelta(hours=3)).astimezone(self._zone)
        for local in CronSim(self._expression, start, reverse=True):
            if (tick := local.astimezone(UTC)) <= time:
                yield tick

    def _around(self, time: datetime) -> tuple[datetime, datetime]:
        known = self._known
        if not known[0] <= time < known[1]:
            latest, following = next(self.back(time), None), next(self._forward(time), None)
            if latest is None or following is None:
                raise ConfigurationError(f"cron {self._expression!r} never comes")
            known = self._known = latest, following
        return known

    def _forward(self, time: datetime) -> Iterator[datetime]:
        for local in CronSim(self._expression, time.astimezone(self._zone)):
            if (tick := local.astimezone(UTC)) > time:  # see `back`
                yield tick


class Every:
    """A fixed period. Its ticks are the whole multiples of the period since 1970-01-01T00:00:00Z, so that they do not
    depend on when a process started. Raises `ConfigurationError`."""

    def __init__(self, period: timedelta | float) -> None:
        if not isinstance(period, timedelta | int | float):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
            raise ConfigurationError(f"every={period!r}: give seconds, or a timedelta")
        seconds = period.total_seconds() if isinstance(period, timedelta) else period
        if not _SHORTEST_SECONDS <= seconds <= _LONGEST_SECONDS:
            raise ConfigurationError(f"every={period!r}: give 0.1 seconds to 366 days")
        self._period = timedelta(seconds=seconds)
        self.text = f"every {self._period.total_seconds():.6f}".rstrip("0").rstrip(".") + " s"

    def after(self, time: datetime) -> datetime:
        """The first tick later than `time`."""
        return self.latest(time) + self._period

    def latest(self, time: datetime) -> datetime:
        """The last tick up to and including `time`."""
        return _EPOCH + (time - _EPOCH) // self._period * self._period

    def back(self, time: datetime) -> Iterator[datetime]:
        """The ticks up to and including `time`, the latest first."""
        tick = self.latest(time)
        while True:
            yield tick
            tick -= self._period


@dataclass(frozen=True)
class Periodic:
    """A job type's schedule, and what becomes of ticks that nobody turned into a job in time."""

    schedule: Schedule
    missed: Missed = "once"
    per: Per = "service"

    @property
    def alone(self) -> bool:
        """Whether a tick waits until the job of an earlier one has ended."""
        return self.missed != "all"

    def is_due(self, last: datetime, time: datetime) -> bool:
        """Whether `due` has any; the ticks of a long absence are not reckoned for that."""
        latest = self.schedule.latest(time)
        return latest > last and (self.missed != "skip" or (time - latest).total_seconds() <= LATE_SECONDS)

    def due(self, last: datetime, time: datetime) -> list[datetime]:
        """Of the ticks later than `last`, those that are to become a job at `time`, in order."""
        if not self.is_due(last, time):
            return []
        if self.missed != "all":
            return [self.schedule.latest(time)]
        ticks = islice(takewhile(lambda tick: tick > last, self.schedule.back(time)), MOST_MISSED)
        return list(ticks)[::-1]


def schedule_of(cron: str | None, every: timedelta | float | None, timezone: str | None) -> Schedule:
    """The schedule of a declaration. Raises `ConfigurationError`."""
    if cron is not None and every is None:
        return Cron(cron, timezone or "UTC")
    if every is not None and cron is None:
        if timezone is not None:
            raise ConfigurationError("timezone= belongs to a cron expression: a period knows no time zone")
        return Every(every)
    raise ConfigurationError('periodic: give a cron expression ("0 6 * * *") or every= (seconds)')


def periodic_of(
    name: str, cron: str | None, every: timedelta | float | None, timezone: str | None, missed: Missed, per: Per
) -> Periodic:
    """Check a declaration. Raises `ConfigurationError`, which names it."""
    try:
        if missed not in get_args(Missed):
            raise ConfigurationError(f"missed={missed!r}: give 'once', 'skip' or 'all'")
        if per not in get_args(Per):
            raise ConfigurationError(f"per={per!r}: give 'service' or 'origin'")
        return Periodic(schedule_of(cron, every, timezone), missed, per)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error


class Upcoming(NamedTuple):
    """The next ticks of a periodic job type."""

    name: str
    schedule: str
    per: Per
    ticks: list[datetime]


def upcoming(job_types: Iterable[Any], after: datetime, count: int = 1) -> list[Upcoming]:
    """The next `count` ticks later than `after` (aware) of each periodic type of a registry; the next to come is first.

    Ticks that have been missed, and are made up for, are not among them.
    """
    found: list[Upcoming] = []
    for job_type in job_types:
        if (periodic := job_type.periodic) is not None:
            time, ticks = after, list[datetime]()
            for _ in range(count):
                time = periodic.schedule.after(time)
                ticks.append(time)
            found.append(Upcoming(job_type.name, periodic.schedule.text, periodic.per, ticks))
    return sorted(found, key=lambda item: (item.ticks, item.name))

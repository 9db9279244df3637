"""Which attempts an analysis is about."""

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

from ...errors import ConfigurationError

__all__ = ["Selection"]

_STEPS = (1, 5, 15, 60, 300, 900, 3_600, 21_600, 86_400)  # seconds
_MOST_BUCKETS = 200
_FIRST = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Selection:
    """Attempts that ended at or after `since` and before `until` (aware datetimes). types, origins: only these; empty:
    all. `until` in the future means now: the later part of the window would look like a standstill. `since` before 1970
    means 1970.

    Raises `ConfigurationError` for a window that is empty or has no time zone.
    """

    since: datetime
    until: datetime
    types: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    step: timedelta = field(init=False)

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            if getattr(self, name).tzinfo is None:
                raise ConfigurationError(f"{name}={getattr(self, name)} has no time zone: write e.g. 2026-03-01T00:00Z")
        # Before they are put into UTC, where the first and the last times of Python's have none of another zone.
        object.__setattr__(self, "since", max(self.since, _FIRST).astimezone(UTC))
        object.__setattr__(self, "until", min(self.until, datetime.now(UTC)).astimezone(UTC))
        if self.since >= self.until:
            raise ConfigurationError(
                f"the window is empty: it begins at {self.since:%Y-%m-%d %H:%M:%S}Z and ends at "
                f"{self.until:%Y-%m-%d %H:%M:%S}Z, or now"
            )
        fitting = (s for s in _STEPS if self.seconds / s <= _MOST_BUCKETS)
        object.__setattr__(self, "step", timedelta(seconds=next(fitting, 7 * 86_400)))

    @property
    def seconds(self) -> float:
        """The window's length."""
        return (self.until - self.since).total_seconds()

    @property
    def since_us(self) -> int:
        """Its beginning in microseconds since 1970."""
        return microseconds(self.since)

    @property
    def until_us(self) -> int:
        """Its end in microseconds since 1970."""
        return microseconds(self.until)

    @property
    def step_us(self) -> int:
        """The length of a time bucket in microseconds; buckets begin at its multiples since 1970."""
        return self.step // timedelta(microseconds=1)

    @property
    def first_bucket_us(self) -> int:
        """The beginning of the time bucket in which the window begins."""
        return self.since_us - self.since_us % self.step_us

    def days(self) -> list[date]:
        """The days (UTC) that it touches."""
        last = (self.until - timedelta(microseconds=1)).date()
        return [self.since.date() + timedelta(days=n) for n in range((last - self.since.date()).days + 1)]


def microseconds(time: datetime) -> int:
    """Since 1970, exactly."""
    return (time - _FIRST) // timedelta(microseconds=1)

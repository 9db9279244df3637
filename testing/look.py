"""What a test has enqueued, and how time passes for it."""

import math
from datetime import timedelta
from typing import TypeVar

from ..jobs import Connection, JobType, Transaction
from ..jobs.enqueue import UNSET, Unset
from ..schema import load_sql

__all__ = ["LONGEST_SECONDS", "advance", "enqueued", "seconds_of"]

P = TypeVar("P")

LONGEST_SECONDS = 1_000 * 365.25 * 86_400  # each jump moves what is stored, and before 4713 BC no time is known


async def enqueued(
    connection: Transaction | Connection,
    job_type: JobType[P],
    *,
    origin: str | None = None,
    group: str | Unset | None = UNSET,
) -> list[P]:
    """The payloads of the jobs of this type that stand in the database, in the order of their positions::

        assert await enqueued(tx, send_eta, group="t-1") == [SendEta(...)]

    That is the order in which the jobs of a group run. Between groups, and jobs without one, a larger priority comes
    first, which the list leaves out; `drain` runs them so. Delayed jobs stand last.

    Args:
        connection: asyncpg's, or a `Transaction`. The transaction that enqueued the jobs, or to
            which they were added, sees them before its commit.
        origin: Only those of it.
        group: Only those of it. None: only those without one.

    Raises:
        TypeError: The connection is of another library, or an argument is not what it should be.
    """
    if not isinstance(job_type, JobType):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
        raise TypeError(f"enqueued(..., {job_type!r}): give a connection, then the job type, as the decorator made it")
    wanted = None if isinstance(group, Unset) else group
    for name, given in (("origin", origin), ("group", wanted)):
        if not isinstance(given, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"enqueued({name}={given!r}): give a text, or None")
    if isinstance(connection, Transaction):
        await connection.flush()
    query = load_sql(__package__, "enqueued", job_type.schema)
    rows = await _asyncpg(connection).fetch(query, job_type.name, origin, not isinstance(group, Unset), wanted)
    return [job_type.load(row[0]) for row in rows]


async def advance(connection: Connection, seconds: timedelta | float, *, schema: str = "sidings") -> None:
    """Let time pass for all stored jobs: what was due in an hour is due in an hour less `seconds`.

    Their `enqueued_timestamp` and `enqueued_at` move as well: the next `drain` sees older jobs, with another
    `idempotency_key`. To test repeated effects, let one `drain` with ``until=`` run all attempts: they see the same
    one.

    Args:
        connection: asyncpg's.
        seconds: A thousand years at most.
        schema: Where Sidings' tables live.

    Raises:
        TypeError: The connection is of another library.
        ValueError: `seconds` is no such duration.
    """
    own, passed = _asyncpg(connection), seconds_of(seconds, "advance(seconds")
    if abs(passed) > LONGEST_SECONDS:
        raise ValueError(f"advance(seconds={seconds!r}): give a thousand years at most")
    await own.execute(load_sql(__package__, "advance", schema), passed)


def _asyncpg(connection: Transaction | Connection) -> Connection:
    own = connection.connection if isinstance(connection, Transaction) else connection
    if not hasattr(own, "fetch"):
        given = f"{type(own).__module__}.{type(own).__qualname__}"
        raise TypeError(f"{given} is no connection of asyncpg: give one, or that below the session (docs/testing.md)")
    return own


def seconds_of(duration: timedelta | float, given_as: str) -> float:
    """Seconds of either form. given_as: the call, and the argument. Raises `ValueError` for what is no duration."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if not isinstance(seconds, int | float) or math.isnan(seconds):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{given_as}={duration!r}): give seconds, or a timedelta")
    return float(seconds)

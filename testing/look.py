"""What a test has enqueued, and how time passes for it."""

from datetime import timedelta
from typing import TypeVar

from ..jobs import Connection, JobType, Transaction
from ..schema import load_sql

__all__ = ["advance", "enqueued", "seconds_of"]

P = TypeVar("P")


class _Any:
    """The type of "any group", where None has a meaning of its own."""


_ANY = _Any()


async def enqueued(
    connection: Transaction | Connection,
    job_type: JobType[P],
    *,
    origin: str | None = None,
    group: str | _Any | None = _ANY,
) -> list[P]:
    """The payloads of the jobs of this type that stand in the database, in the order in which they will run::

        assert await enqueued(tx, send_eta, group="t-1") == [SendEta(...)]

    connection: asyncpg's, or a `Transaction`; the transaction that enqueued them sees them before its commit. Raises
    `TypeError` for one of another library.
    origin, group: only those; group=None: only those without one.
    """
    wanted = None if isinstance(group, _Any) else group
    query = load_sql(__package__, "enqueued", job_type.schema)
    rows = await _asyncpg(connection).fetch(query, job_type.name, origin, not isinstance(group, _Any), wanted)
    return [job_type.load(row[0]) for row in rows]


async def advance(connection: Connection, seconds: timedelta | float, *, schema: str = "sidings") -> None:
    """Let time pass for all stored jobs: what was due in an hour is due in an hour less `seconds`."""
    await _asyncpg(connection).execute(load_sql(__package__, "advance", schema), seconds_of(seconds))


def _asyncpg(connection: Transaction | Connection) -> Connection:
    own = connection.connection if isinstance(connection, Transaction) else connection
    if not hasattr(own, "fetch"):
        given = f"{type(own).__module__}.{type(own).__qualname__}"
        raise TypeError(f"{given} is no connection of asyncpg: give one, or that below the session (docs/testing.md)")
    return own


def seconds_of(duration: timedelta | float) -> float:
    """Seconds of either form."""
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)

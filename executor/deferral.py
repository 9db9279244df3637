"""Outcomes that are recorded later than with their cycle: somebody else's transaction holds the row, or Postgres
refuses a value. Their groups wait, all others go on."""

from collections.abc import Callable

import asyncpg

from ..errors import PostgresUnavailable
from ..schema import load_sql
from .attempts import Finished
from .clock import now
from .link import Link
from .queues import Entry

__all__ = ["Deferral"]


class Deferral:
    """holds: whether the origin of an attempt is still ours; what is another's is dropped."""

    locked_seconds = 1.0  # until a locked row is looked at again

    def __init__(self, link: Link, *, schema: str, holds: Callable[[Entry], bool]) -> None:
        self._link = link
        self._holds = holds
        self._waiting: list[tuple[float, Finished]] = []
        self._locked_sql = load_sql(__package__, "locked", schema)

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Forget them all."""
        self._waiting.clear()

    def add(self, finished: list[Finished], seconds: float) -> list[Finished]:
        """Put these off for so long. Returns those that are still ours."""
        ours = [f for f in finished if self._holds(f[0])]
        at = now() + seconds
        self._waiting += [(at, f) for f in ours]
        return ours

    def due(self) -> float | None:
        """When some of them are to be looked at again; None without any."""
        return min((at for at, _ in self._waiting), default=None)

    async def take_due(self) -> list[Finished]:
        """Those whose time has come, unless their rows are still locked: a cycle that waits for a lock holds up all the
        others."""
        time = now()
        due = [f for at, f in self._waiting if at <= time]
        if not due:
            return []
        self._waiting = [(at, f) for at, f in self._waiting if at > time]
        locked = await self.locked(due)
        self.add([f for f in due if f[0].id in locked], self.locked_seconds)
        return [f for f in due if f[0].id not in locked]

    async def locked(self, finished: list[Finished]) -> set[int]:
        """Ids of those whose rows somebody else's transaction holds now. None where the database does not say."""
        try:
            return {row["id"] for row in await self._link.fetch(self._locked_sql, [f[0].id for f in finished])}
        except (PostgresUnavailable, asyncpg.PostgresError):
            return set()

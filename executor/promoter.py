"""Gives delayed jobs their place when they are due."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from math import inf
from uuid import UUID

import asyncpg

from ..errors import PostgresUnavailable
from ..outage import Outage
from ..schema import load_sql
from ..waiting import set_within
from .clock import now
from .glance import GLANCE_FROM, glance
from .link import Backoff, Link, rest_after
from .metrics import ExecutorMetrics
from .queues import OriginQueue
from .scheduler import Scheduler

__all__ = ["Promoter"]

log = logging.getLogger("sidings.executor")

_POLL_SECONDS = 0.25
_MOST_PER_ORIGIN = 1_000  # and twenty times as many of all: half a second of Postgres' time
_LEAST_PER_ORIGIN = 10  # fewer would save nothing: what takes long then is something else
_QUICK_LOOK = 0.05  # seconds; a whole look that takes longer is followed by shorter ones


class Promoter:
    """Promotes at the due time where it knows it, else within `_POLL_SECONDS`: others enqueue delayed jobs too.

    A whole look steps over all that has been promoted and cannot be removed yet, as while somebody's transaction keeps
    vacuum from its work: with millions it takes seconds. So where it takes long, the looks between two of them begin
    where the last one ended. What was due before it was committed waits for a whole one then.
    """

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        metrics: ExecutorMetrics,
        *,
        schema: str,
        silent: Callable[[], list[str]],
        on_promoted: Callable[[], None],
    ) -> None:
        self.executor_id: UUID | None = None
        self._link = link
        self._scheduler = scheduler
        self._metrics = metrics
        self._sql = load_sql(__package__, "promote", schema)
        self._glance_sql = load_sql(__package__, "glance", schema)
        self._done: tuple[str, dict[str, int]] | None = None  # the snapshot and the origins of the last whole look
        self._whole_at = 0.0  # when the next whole look is due
        self._whole_took = 0.0  # the last one
        self._whole_of: dict[str, int] | None = None  # the origins of the last one
        self._most = _MOST_PER_ORIGIN
        self._looked_at: tuple[datetime, int] | None = None  # of what was due before, the last look has left nothing
        self._following = inf  # when the next job was due then
        self._silent = silent
        self._on_promoted = on_promoted
        self._next = 0.0
        self.outage = Outage(log, "delayed jobs could not be promoted")
        self._sooner = asyncio.Event()

    def expect(self, due: float) -> None:
        """A job is to be promoted at `due`, seconds of the executor's clock."""
        if due < self._next:
            self._next = due
            self._sooner.set()

    async def run(self) -> None:
        """Promote for ever."""
        backoff = Backoff()
        while True:
            self._sooner.clear()
            self._next = now() + _POLL_SECONDS * random.uniform(0.8, 1.2)
            held = [queue for queue in self._scheduler.origins.values() if not queue.draining]
            if not held:
                backoff.reset()
            elif await self._look(held, backoff):
                continue
            await self._pause()

    async def _look(self, held: list[OriginQueue], backoff: Backoff) -> bool:
        """Promote what is due in these. Returns whether to look again at once."""
        epochs = {queue.name: queue.epoch for queue in held}
        whole, began = epochs != self._whole_of or now() >= self._whole_at, now()
        begin = None if whole else self._looked_at
        try:
            snapshot = await glance(self._link, self._glance_sql) if len(held) >= GLANCE_FROM else None
            if snapshot is not None and (snapshot, epochs) == self._done and now() < self._following:
                self.expect(self._following)
                return False
            row = await self._link.fetchrow(
                self._sql,
                self.executor_id,
                list(epochs),
                list(epochs.values()),
                self._most,
                self._silent(),
                *(begin or (None, None)),
            )
            backoff.reset()
            self.outage.over()
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            self.outage.failed(error)
            if not isinstance(error, asyncpg.LockNotAvailableError):
                await self._failed(now() - began, whole=whole)
            await backoff.sleep()
            return True
        assert row is not None
        took = now() - began
        self._done = (snapshot, epochs) if whole and snapshot is not None else None
        self._following = inf if row["next_due_in"] is None else now() + max(0.0, row["next_due_in"])
        for kind, count in Counter[str](row["superseded"]).items():
            self._metrics.superseded(kind, count)
        self._looked_at = row["looked_at"], row["looked_at_id"]
        if took < self._link.long_seconds:
            self._most = min(_MOST_PER_ORIGIN, 2 * self._most)
        if whole:
            self._whole_of = epochs
            self._rest(took)
            if took < self._link.long_seconds:
                self._link.patience = 1
        if row["promoted"]:
            self._on_promoted()
            if row["more"]:  # from there on where this one has ended
                return True
        self.expect(self._following)
        return False

    def _rest(self, took: float) -> None:
        """Where two whole looks in a row took long. One alone may have waited for a lock, for Postgres, or while this
        process stood still, and what is due before it is committed would wait for the next."""
        both, self._whole_took = min(took, self._whole_took), took
        self._whole_at = now() + rest_after(both) if both > _QUICK_LOOK else 0.0

    async def _failed(self, took: float, *, whole: bool) -> None:
        """A look has, perhaps since it took too long: the next one promotes half as many. A whole one may have stepped
        over too much, and also gets more time, unless the server hangs."""
        if took >= self._link.long_seconds:
            self._most = max(_LEAST_PER_ORIGIN, self._most // 2)
            if whole:
                await self._link.be_patient()
                if self._link.patience > 1:
                    self._rest(took)

    async def _pause(self) -> None:
        while (left := self._next - now()) > 0:
            if not await set_within(self._sooner, left):
                break
            self._sooner.clear()

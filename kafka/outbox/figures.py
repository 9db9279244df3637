"""How much waits, as the metrics tell it: in the slots of this relay, and in those that no relay has, which one relay
at a time counts. While none reaches Kafka all slots are such, and all instances of a service would count all that
waits."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

import asyncpg

from ...errors import PostgresUnavailable
from ...executor import Link, now, rest_after
from ...outage import Outage
from ...schema import load_sql
from .metrics import OutboxMetrics

__all__ = ["Figures"]

log = logging.getLogger("sidings.outbox")

_Waiting = dict[str, tuple[int, float]]  # topic -> messages, age of the oldest in seconds


class _Free(NamedTuple):
    """What waited in these slots, which no relay had, when we counted it last; told of until then."""

    slots: frozenset[int]
    waiting: _Waiting
    until: float


_NOTHING_FREE = _Free(frozenset(), {}, 0.0)


class Figures:
    """Counts for ever. slots, free: asked for the slots of this relay, and for those that no relay has."""

    def __init__(
        self,
        link: Link,
        metrics: OutboxMetrics,
        *,
        schema: str,
        seconds: float,
        slots: Callable[[], Collection[int]],
        free: Callable[[], Collection[int]],
    ) -> None:
        self._link = link
        self._metrics = metrics
        self._sql = load_sql(__package__, "waiting", schema)
        self._seconds = seconds
        self._slots = slots
        self._free = free
        self._of_free = _NOTHING_FREE
        self._outage = Outage(log, "the outbox could not be counted")

    async def run(self) -> None:
        """Count again and again: the longer it takes, the more seldom."""
        while True:
            await asyncio.sleep(await self.count())

    async def count(self) -> float:
        """Count once; returns after how many seconds to do so again."""
        started = now()
        mine = frozenset(self._slots())
        free = frozenset(self._free()) - mine
        try:
            waiting = await self._waiting_in(mine, in_turn=False) or {}
            of_free = await self._waiting_in(free, in_turn=True)
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            self._outage.failed(error)
            self._of_free = _NOTHING_FREE
            if not self._slots():  # others may have them, and have sent what waited
                self._metrics.waiting = {}
            return max(self._seconds, rest_after(now() - started))
        self._outage.over()
        rest = max(self._seconds, rest_after(now() - started))
        if of_free is not None:  # told of until others, who rest as long, are sure to have counted since
            self._of_free = _Free(free, of_free, now() + 2 * rest)
        elif now() > self._of_free.until or not self._of_free.slots <= free:
            self._of_free = _NOTHING_FREE
        self._metrics.waiting = _both(waiting, self._of_free.waiting)
        return rest

    async def _waiting_in(self, slots: Collection[int], *, in_turn: bool) -> _Waiting | None:
        """None: another relay is counting such slots at this moment."""
        if not slots:
            return {}
        rows = await self._link.fetch_long(self._sql, [*slots], in_turn, tells=lambda rows: not _not_ours(rows))
        if _not_ours(rows):
            return None
        return {row["topic"]: (row["waiting"], row["oldest"]) for row in rows}


def _not_ours(rows: list[asyncpg.Record]) -> bool:
    return bool(rows) and rows[0]["topic"] is None


def _both(one: _Waiting, other: _Waiting) -> _Waiting:
    both = dict(one)
    for topic, (count, age) in other.items():
        before, older = both.get(topic, (0, 0.0))
        both[topic] = before + count, max(older, age)
    return both

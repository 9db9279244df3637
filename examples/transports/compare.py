"""How long the carrier waited for its ETAs, and the two ways side by side."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import asyncpg

from .observe import Stall

__all__ = ["Delays", "Delivery", "Window", "delays", "deliveries", "stalled"]

# Every message with the time until its ETA was told first; null while it has not been.
DELIVERIES = """
SELECT p.healthy, p.partition, extract(epoch FROM p.sent_at)::float8 AS sent_at, min(a.delay_seconds) AS seconds
FROM produced p
LEFT JOIN audit a ON a.transport_id = p.transport_id AND a.sequence = p.sequence
                 AND a.event = 'end' AND a.outcome = 'succeeded'
GROUP BY p.transport_id, p.sequence
"""


@dataclass(frozen=True)
class Window:
    """A stretch of time between two wall clock seconds, on some partitions or (None) on all."""

    name: str
    start: float
    end: float
    partitions: frozenset[int] | None = None

    def holds(self, at: float, partition: int) -> bool:
        """Whether that moment of that partition lies in it."""
        return self.start <= at < self.end and (self.partitions is None or partition in self.partitions)


@dataclass(frozen=True)
class Delivery:
    """One message: when it was sent, and after how many seconds the carrier knew. Where it never did, `seconds` is how
    long it has been waiting, which is too little."""

    healthy: bool
    partition: int
    sent_at: float
    seconds: float
    arrived: bool


@dataclass(frozen=True)
class Delays:
    """Percentiles, in seconds."""

    messages: int
    unanswered: int
    p50: float
    p99: float
    worst: float

    def __str__(self) -> str:
        return f"{_seconds(self.p50)} / {_seconds(self.p99)}"


async def deliveries(connection: "asyncpg.Connection[asyncpg.Record]", until: float) -> list[Delivery]:
    """All messages. until: the wall clock second at which those without an answer stop waiting."""
    return [
        Delivery(
            row["healthy"],
            row["partition"],
            row["sent_at"],
            until - row["sent_at"] if row["seconds"] is None else row["seconds"],
            row["seconds"] is not None,
        )
        for row in await connection.fetch(DELIVERIES)
    ]


def delays(chosen: Iterable[Delivery]) -> Delays:
    """Percentiles of some deliveries."""
    some = list(chosen)
    if len(some) < 2:
        return Delays(len(some), 0, 0.0, 0.0, 0.0)
    cuts = statistics.quantiles((delivery.seconds for delivery in some), n=100, method="inclusive")
    missing = sum(not delivery.arrived for delivery in some)
    return Delays(len(some), missing, cuts[49], cuts[98], max(delivery.seconds for delivery in some))


def stalled(stalls: Sequence[Stall], within: Window, apart_from: Sequence[Window] = ()) -> tuple[int, float]:
    """How many partitions came to stand still within a window, and for how many seconds in all."""
    counted = [
        stall
        for stall in stalls
        if within.holds(stall.start, stall.partition)
        and not any(window.holds(stall.start, stall.partition) for window in apart_from)
    ]
    return len({stall.partition for stall in counted}), sum(stall.end - stall.start for stall in counted)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"

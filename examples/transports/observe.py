"""Looks at a running demo, twice a second: what Postgres and Kafka say, not what the processes claim."""

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition

from .settings import PARTITIONS, Address

__all__ = ["Observer", "PartitionState", "Snapshot", "Stall"]

RATE_SECONDS = 3.0
STALLED_SECONDS = 2.0  # a partition with messages that has not moved for so long stands still

OWNERS = """
SELECT split_part(o.origin, '/', 2)::int AS partition, o.owner, o.epoch, o.lease_until < clock_timestamp() AS expired
FROM sidings.origin o WHERE split_part(o.origin, '/', 1) = $1   -- the outbox's slots are leased in the same table
"""
EXECUTORS = "SELECT id, pid, cardinality(running) AS running FROM sidings.executor"
OFFSETS = "SELECT partition, next_offset FROM sidings.consumer_offset WHERE topic = $1"
WAITING = """
SELECT count(*) AS waiting, count(DISTINCT "group") FILTER (WHERE failures > 0) AS blocked FROM sidings.job
"""
OUTCOMES = "SELECT outcome::text, count(*) FROM sidings.job_history GROUP BY outcome"
DELAYS = """
SELECT count(*) AS calls, percentile_cont(0.99) WITHIN GROUP (ORDER BY delay_seconds) AS p99
FROM audit WHERE event = 'end' AND outcome = 'succeeded' AND transport_id = ANY ($1)
             AND at > clock_timestamp() - interval '5 seconds'
"""


@dataclass
class PartitionState:
    """One partition now. `still_since`: wall clock second since which it has messages and does not move."""

    owner: str | None = None
    epoch: int = 0
    expired: bool = False
    next_offset: int = 0
    end_offset: int = 0
    still_since: float | None = None

    @property
    def lag(self) -> int:
        return max(0, self.end_offset - self.next_offset)


@dataclass(frozen=True)
class Stall:
    """A partition stood still between two wall clock seconds."""

    partition: int
    start: float
    end: float


@dataclass(frozen=True)
class Snapshot:
    """What the view shows. Rates are per second over the last few seconds; counts are since the start."""

    at: float
    partitions: list[PartitionState]
    sent: int
    applied: int
    messages_rate: float
    jobs_rate: float
    running: int
    waiting: int
    blocked_groups: int
    outcomes: Mapping[str, int]
    healthy_p99_seconds: float | None

    @property
    def lag(self) -> int:
        return sum(partition.lag for partition in self.partitions)


@dataclass
class Observer:
    """Polls. `names` maps pids to instance names; `on_event` is told who took what over."""

    postgres: "asyncpg.Connection[asyncpg.Record]"
    kafka: AIOKafkaConsumer
    topic: str
    healthy: list[str]
    names: dict[int, str]
    on_event: Callable[[str], None]
    executors: dict[UUID, str] = field(default_factory=dict[UUID, str])
    stalls: list[Stall] = field(default_factory=list[Stall])
    snapshot: Snapshot | None = None
    _partitions: list[PartitionState] = field(default_factory=lambda: [PartitionState() for _ in range(PARTITIONS)])
    _history: deque[tuple[float, int, int]] = field(default_factory=deque[tuple[float, int, int]])

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, address: Address, healthy: list[str], names: dict[int, str], on_event: Callable[[str], None]
    ) -> AsyncGenerator["Observer"]:
        """An observer with its own connections."""
        kafka = AIOKafkaConsumer(bootstrap_servers=address.kafka, enable_auto_commit=False)
        postgres = await asyncpg.connect(address.postgres, command_timeout=10)
        try:
            await kafka.start()
            yield cls(postgres, kafka, address.topic, healthy, names, on_event)
        finally:
            await kafka.stop()
            await postgres.close(timeout=5)

    async def look(self) -> Snapshot:
        """Take a new snapshot."""
        at = time.time()
        running = await self._look_at_executors()
        await self._look_at_owners()
        await self._look_at_offsets(at)
        jobs = await self._row(WAITING)
        outcomes = {row["outcome"]: row["count"] for row in await self.postgres.fetch(OUTCOMES)}
        delays = await self._row(DELAYS, self.healthy)
        applied = sum(partition.next_offset for partition in self._partitions)
        done = outcomes.get("succeeded", 0)
        self._history.append((at, applied, done))
        while at - self._history[0][0] > RATE_SECONDS:
            self._history.popleft()
        since, applied_then, done_then = self._history[0]
        span = max(at - since, 0.001)
        self.snapshot = Snapshot(
            at=at,
            partitions=self._partitions,
            sent=sum(partition.end_offset for partition in self._partitions),
            applied=applied,
            messages_rate=(applied - applied_then) / span,
            jobs_rate=(done - done_then) / span,
            running=running,
            waiting=jobs["waiting"],
            blocked_groups=jobs["blocked"],
            outcomes=outcomes,
            healthy_p99_seconds=delays["p99"],
        )
        return self.snapshot

    def finish(self) -> None:
        """Close the stalls that are still open."""
        for number, state in enumerate(self._partitions):
            self._close_stall(number, state, time.time())

    async def _look_at_executors(self) -> int:
        running = 0
        for row in await self.postgres.fetch(EXECUTORS):
            self.executors.setdefault(row["id"], self.names.get(row["pid"], "?"))
            running += row["running"]
        return running

    async def _look_at_owners(self) -> None:
        moved: dict[tuple[str, str | None], list[int]] = {}
        for row in await self.postgres.fetch(OWNERS, self.topic):
            state = self._partitions[row["partition"]]
            owner = self.executors.get(row["owner"]) if row["owner"] else None
            if owner is not None and row["epoch"] != state.epoch:
                moved.setdefault((owner, state.owner), []).append(row["partition"])
            if owner is not None:
                state.owner = owner
            state.epoch, state.expired = row["epoch"], row["owner"] is None or row["expired"]
        for (owner, former), partitions in moved.items():
            listed = ", ".join(str(number) for number in sorted(partitions))
            source = f" from {former}" if former not in (None, owner) else ""
            self.on_event(f"{owner} took partitions {listed}{source}")

    async def _look_at_offsets(self, at: float) -> None:
        ends = await self.kafka.end_offsets([TopicPartition(self.topic, n) for n in range(PARTITIONS)])
        stored = {row["partition"]: row["next_offset"] for row in await self.postgres.fetch(OFFSETS, self.topic)}
        for number, state in enumerate(self._partitions):
            next_offset = stored.get(number, 0)
            moved = next_offset != state.next_offset
            behind = state.end_offset > next_offset  # by what was there at the last look already
            state.end_offset = ends[TopicPartition(self.topic, number)]
            if moved or not behind:
                self._close_stall(number, state, at)
            elif state.still_since is None:
                state.still_since = at
            state.next_offset = next_offset

    def _close_stall(self, number: int, state: PartitionState, at: float) -> None:
        if state.still_since is not None and at - state.still_since > STALLED_SECONDS:
            self.stalls.append(Stall(number, state.still_since, at))
        state.still_since = None

    async def _row(self, query: str, *arguments: Any) -> asyncpg.Record:
        row = await self.postgres.fetchrow(query, *arguments)
        assert row is not None
        return row

"""Back-pressure: a partition whose origin has too many waiting jobs is paused until half of them are gone."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError

from ..errors import PostgresUnavailable
from ..executor import Link, PostgresSettings
from ..outage import Outage
from ..schema import load_sql
from .partition import Partition, State

__all__ = ["Backlog"]

log = logging.getLogger("sidings.consumer")

_LOOK_SECONDS = 1.0
_SHARE = 20  # a count takes at most one part in so many of the time
_RETRY_SECONDS = 10.0  # at most, to the next count where one has failed, which mostly waited for a lock or for Postgres


class Backlog:
    """Pauses and resumes partitions. limits: most waiting jobs of an origin, by topic; on_resumed: called when one may
    be read again. `waiting`: the jobs counted at the last look, by partition, up to limit + 1. `outage`: of counts."""

    def __init__(
        self,
        client: AIOKafkaConsumer,
        partitions: Mapping[TopicPartition, Partition],
        limits: Mapping[str, int],
        settings: PostgresSettings,
        *,
        on_resumed: Callable[[], None],
    ) -> None:
        self.waiting: dict[TopicPartition, int] = {}
        self.outage = Outage(log, "waiting jobs could not be counted")
        self._client = client
        self._partitions = partitions
        self._limits = limits
        self._on_resumed = on_resumed
        self._link = Link(settings)
        self._sql = load_sql(__package__, "waiting_jobs", settings.schema_name)
        self._first: dict[Partition, int] = {}  # position of the first waiting job at the last look
        # Could not be counted, alone: the others have their turn before them, and they take turns.
        self._last: dict[Partition, None] = {}
        self._at_once: int | None = None  # partitions that one statement counts; None: all

    async def run(self) -> None:
        """Look every second, or less often where counting takes long, for ever."""
        try:
            while True:
                started, longest = time.monotonic(), math.inf
                try:
                    await self._look()
                    self.outage.over()
                except (PostgresUnavailable, asyncpg.PostgresError) as error:
                    self.outage.failed(error)
                    longest = _RETRY_SECONDS
                await asyncio.sleep(max(_LOOK_SECONDS, min(longest, (_SHARE - 1) * (time.monotonic() - started))))
        finally:
            await self._link.close()

    async def _look(self) -> None:
        looked = [p for tp, p in self._partitions.items() if tp.topic in self._limits]
        self._first = {partition: self._first.get(partition, 0) for partition in looked}
        self._last = {partition: None for partition in self._last if partition in self._first}
        looked = [partition for partition in looked if partition not in self._last] + list(self._last)
        waiting: dict[TopicPartition, int] = {}
        began = time.monotonic()
        while looked:
            some, sent = looked[: self._at_once], time.monotonic()
            try:
                waiting |= await self._count(some)
            except PostgresUnavailable:
                if time.monotonic() - sent < self._link.long_seconds:
                    raise
                if len(some) == 1:  # unless the server hangs, the next one gets more time
                    self._last.pop(some[0], None)
                    self._last[some[0]] = None
                    self.waiting = waiting
                    await self._link.be_patient()
                    raise
                await self._link.fetch("SELECT")  # which fails, too, where it hangs
                self._at_once = max(1, len(some) // 4)
            else:
                looked = looked[len(some) :]
                for partition in some:
                    self._last.pop(partition, None)
        self.waiting = waiting
        if time.monotonic() - began < self._link.long_seconds:
            self._at_once, self._link.patience = None, 1

    async def _count(self, looked: Sequence[Partition]) -> dict[TopicPartition, int]:
        """Count the jobs of these, and pause and resume them."""
        rows = await self._link.fetch(
            self._sql,
            [partition.origin for partition in looked],
            [self._first[partition] for partition in looked],
            [self._limits[partition.tp.topic] + 1 for partition in looked],
        )
        found = {row["origin"]: row for row in rows}
        for partition in looked:
            self._first[partition] = found[partition.origin]["first"] or self._first[partition]
            if self._partitions.get(partition.tp) is partition:
                self._judge(partition, found[partition.origin]["waiting"])
        return {partition.tp: found[partition.origin]["waiting"] for partition in looked}

    def _judge(self, partition: Partition, waiting: int) -> None:
        limit = self._limits[partition.tp.topic]
        try:
            if partition.state is State.READY and waiting > limit:
                self._client.pause(partition.tp)
                partition.enter(State.FULL)
                log.warning("%s: paused, since more than %s jobs of it wait", partition.origin, limit)
            elif partition.state is State.FULL and 2 * waiting <= limit:
                self._client.resume(partition.tp)
                partition.enter(State.READY)
                log.info("%s: goes on, since only %s jobs of it wait", partition.origin, waiting)
                self._on_resumed()
        except IllegalStateError:
            return  # revoked meanwhile

"""The main line of one topic: poll, handle a batch in one transaction, go on.

A batch that fails is split. Where one message's handler raised, its partition is set aside at that message, and the
rest of the batch runs again without it; where the culprit is unknown, the messages run one by one. So a bad message
fails no other, and holds up nothing but its own partition; one that hangs first holds up its batch, for one `timeout`,
in a list for two.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError

from ..errors import PostgresUnavailable
from ..executor import Backoff
from ..legible import legible
from ..outage import Outage
from .fetch_loop import FetchLoop, Roof
from .handling import BatchFailed, Handling
from .metrics import ConsumerMetrics
from .offsets import OffsetsMoved
from .partition import Item, Partition, State
from .siding import Siding
from .subscription import Subscription

__all__ = ["TopicLoop"]

log = logging.getLogger("sidings.consumer")


class TopicLoop(FetchLoop):
    """Consumes one topic, its effects in Postgres. slots: how many partitions may be set aside and tried at once.
    paused: asked whether a person has paused the topic. Its partitions stay as they are then, with what is at hand."""

    def __init__(
        self,
        subscription: Subscription[object],
        client: AIOKafkaConsumer,
        partitions: Mapping[TopicPartition, Partition],
        handling: Handling,
        metrics: ConsumerMetrics,
        roof: Roof,
        *,
        max_records: int,
        slots: asyncio.Semaphore,
        paused: Callable[[], bool],
    ) -> None:
        super().__init__(subscription, client, partitions, roof, max_records=max_records)
        self.handling = handling
        self._metrics = metrics
        self._siding = Siding(subscription, handling, metrics, slots, self._rejoin, lambda: self._resting)
        self._paused = paused
        self._backoff = Backoff()
        self._outage = Outage(log, f"{self.topic}: batches were not committed, or nobody knows")
        self.outages = *self.outages, self._outage, self._siding.outage

    @property
    def in_flight(self) -> int:
        return self.handling.in_flight

    @property
    def _resting(self) -> bool:
        return self._roof.paused or self._paused()

    # -- handling ---------------------------------------------------------------------------------------------------

    async def _handle(self, items: list[Item]) -> None:
        """Handle the batch, in as few transactions as its failures allow."""
        failing: list[Partition] = []
        done = False
        try:
            await self._split_until_done(items, failing)
            done = True
        except OffsetsMoved as moved:
            log.warning("%s; undone", moved)
            self._metrics.conflict(self.topic)
            self.displace(item.partition for item in items)
        except PostgresUnavailable as error:
            self._outage.failed(error)
            self._metrics.postgres_error()
            self.displace(item.partition for item in items)
            await self._backoff.sleep()
        for partition in failing:
            self._set_aside(partition)
        if done and failing:
            self._go_on()

    async def _split_until_done(self, items: list[Item], failing: list[Partition]) -> None:
        """`failing` takes up the partitions whose next message has failed."""
        while items and not self._resting:
            self.turned_at = time.monotonic()
            try:
                done = await self.handling.handle(items)
                items = items[done:]
                self._go_on()
            except BatchFailed as failure:
                if failure.index is None and len(items) > 1:
                    level = logging.DEBUG if self._outage.seconds() else logging.WARNING  # of which that tells
                    log.log(
                        level, "%s: a batch of %s failed, one by one now: %s", self.topic, len(items), legible(failure)
                    )
                    await self._one_by_one(items, failing)
                    return
                index = failure.index or 0
                culprit = items[index].partition
                log.warning("%s offset %s failed: %s", culprit.origin, items[index].record.offset, legible(failure))
                failing.append(culprit)
                items = items[:index] + [item for item in items[index:] if item.partition is not culprit]

    async def _one_by_one(self, items: Sequence[Item], failing: list[Partition]) -> None:
        for item in items:
            self.turned_at = time.monotonic()
            if item.partition not in failing and not self._resting:
                try:
                    await self.handling.handle([item])
                    self._go_on()
                except BatchFailed as failure:
                    log.warning("%s offset %s failed: %s", item.partition.origin, item.record.offset, legible(failure))
                    failing.append(item.partition)

    def _go_on(self) -> None:
        """A transaction was committed, or nothing but messages has failed. With slow handlers many are before all that
        was fetched is done. An outage is over when each partition that met it has moved: others may, while one cannot.
        """
        self._backoff.reset()
        undone = (p for p in self._partitions.values() if p.undone)
        if self._outage.seconds() and not any(p.state in (State.READY, State.UNPLACED) for p in undone):
            self._outage.over()
        self._look_at_unsettled()

    # -- partitions that leave the main line, and come back -----------------------------------------------------------

    def _set_aside(self, partition: Partition) -> None:
        if partition.state is State.READY and self._partitions.get(partition.tp) is partition and partition.items:
            partition.enter(State.ASIDE)
            partition.undone = False  # it is the siding's now
            try:
                self._client.pause(partition.tp)
            except IllegalStateError:
                return  # revoked; it will be placed anew or is gone
            self._roof.spawn(self._siding.settle(partition))

    def _look_at_unsettled(self) -> None:
        """A message whose transaction broke while it stood aside may have been handled in the main line since, or be
        another process's by now: nothing else would end that outage."""
        if (item := self._siding.unsettled) is not None:
            partition = self._partitions.get(item.partition.tp)
            if partition is None or partition.next_offset > item.record.offset:
                self._siding.unsettled = None
                self._siding.outage.over()

    def _rejoin(self, partition: Partition) -> None:
        if self._partitions.get(partition.tp) is not partition:
            return
        if partition.state is not State.READY:
            self._roof.place()
            return
        try:
            self._client.resume(partition.tp)
        except IllegalStateError:
            return
        self.wake()

"""The loop of one stateless topic: poll, and keep up to n messages of each partition under way, in order per key."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import cast

from aiokafka import AIOKafkaConsumer, TopicPartition

from .fetch_loop import LOOK_AGAIN_SECONDS, FetchLoop, Roof
from .partition import Item, Partition, State
from .stateless_handling import StatelessHandling
from .stateless_offsets import GroupOffsets
from .stateless_partition import StatelessPartition
from .stateless_subscription import StatelessSubscription

__all__ = ["StatelessLoop"]

log = logging.getLogger("sidings.consumer")

_MOST_BYTES = 32 * 1024 * 1024  # of unfinished messages of a partition, before no more are read
_LOOK_SECONDS = 0.2
_START_OVER_SECONDS = 10.0  # for handlers to end, before it is told that a partition waits for them


class StatelessLoop(FetchLoop):
    """Consumes one topic without a database. max_records: so many messages of a partition may lie between its first
    unfinished one and the last before no more are read; a message that fails for long holds that much in memory, and
    so much is done again after a kill."""

    aside = "goes to the dead letters"
    how_to_pass = "kafka-consumer-groups --reset-offsets to the offset behind its batch, while no instance runs"

    def __init__(
        self,
        subscription: StatelessSubscription[object],
        client: AIOKafkaConsumer,
        partitions: Mapping[TopicPartition, StatelessPartition],
        handling: StatelessHandling,
        offsets: GroupOffsets,
        roof: Roof,
        *,
        max_records: int,
    ) -> None:
        super().__init__(subscription, client, partitions, roof, max_records=max_records)
        self._mine = partitions
        self._concurrency = subscription.concurrency
        self._handling = handling
        self.outages = *self.outages, handling.outage
        self._offsets = offsets

    @property
    def in_flight(self) -> int:
        """Messages whose handler runs, or that wait for their next attempt."""
        return sum(len(p.workers) for tp, p in self._mine.items() if tp.topic == self.topic)

    async def give_up(self, partitions: Collection[StatelessPartition], timeout: float) -> None:
        """Cancel what still runs of these, wait for its end, `timeout` seconds at most, and commit what is done;
        nothing more of them is taken up, and nothing waits for its next attempt."""
        for partition in partitions:
            partition.leaving.set()
        running = {worker for partition in partitions for worker in partition.workers}
        for worker in running:
            worker.cancel()
        if running:
            log.warning("%s: cancelling %s handlers: their messages will be handled again", self.topic, len(running))
            _, pending = await asyncio.wait(running, timeout=timeout)
            if pending:
                log.error(
                    "%s: %s handlers do not end when cancelled: the next owner of their partitions may run the same "
                    "messages at once; let CancelledError pass",
                    *(self.topic, len(pending)),
                )
        await self._offsets.commit(partitions)

    def displace(self, partitions: Iterable[Partition]) -> None:
        """Where to read on is in doubt: begin again at the committed offset, when nothing runs any more. One that is
        leaving does so, or is given up: to start over a second time would displace it when its next handlers run."""
        for partition in list(partitions):
            mine = self._mine.get(partition.tp)
            if mine is not None and mine is partition and not mine.leaving.is_set():
                mine.leaving.set()
                mine.enter(State.FULL)
                self._roof.spawn(self._start_over(mine))

    async def _handle(self, items: list[Item]) -> None:
        for tp in {item.partition.tp: None for item in items}:
            partition = self._mine[tp]
            partition.take_up()
            if len(partition.window) >= self._max_records or partition.window.size >= _MOST_BYTES:
                partition.enter(State.FULL)
            for _ in range(min(self._concurrency - len(partition.workers), partition.window.startable)):
                worker = self._roof.spawn(self._work(partition))
                partition.workers.add(worker)
                worker.add_done_callback(partition.workers.discard)

    async def _work(self, partition: StatelessPartition) -> None:
        """Handle messages of `partition`, one after another, while there are some that may start."""
        try:
            await self._settle_in_turn(partition)
        except asyncio.CancelledError:
            if not partition.leaving.is_set():  # not by us
                raise

    async def _settle_in_turn(self, partition: StatelessPartition) -> None:
        while not partition.leaving.is_set() and (item := partition.window.start()) is not None:
            if not await self._handling.settle(partition, item):
                break
            partition.window.finish(item)
            if (
                partition.state is State.FULL
                and not partition.unreadable
                and partition.outside is None
                and 2 * len(partition.window) <= self._max_records
                and 2 * partition.window.size <= _MOST_BYTES
            ):
                partition.enter(State.READY)
                self.wake()
            await asyncio.sleep(0)  # handlers that wait for nothing must not keep the loop from anything else
        # At once, not when the task is found to have ended: `_handle` counts those that go on.
        partition.workers.discard(cast(asyncio.Task[None], asyncio.current_task()))

    def _hold(self, partition: Partition) -> None:
        # Else it is placed anew anyway, as where a poll ends that began before it was displaced.
        if partition.state in (State.READY, State.FULL):
            partition.enter(State.FULL)  # what was read before goes on

    def _leave_log(self, partition: Partition) -> None:
        self._hold(partition)  # nobody could read that again
        self._roof.spawn(self._start_over_when_done(partition))

    async def _look_again(self, partition: Partition) -> None:
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
        await self._start_over_when_done(partition)

    async def _start_over_when_done(self, partition: Partition) -> None:
        mine = self._mine.get(partition.tp)
        while mine is partition and mine is not None and mine.workers:
            if mine.leaving.is_set():
                return  # whoever ends it, as a stop, lets what runs have its time
            await asyncio.sleep(_LOOK_SECONDS)
        if partition.state is State.FULL:
            self.displace([partition])

    async def _start_over(self, partition: StatelessPartition) -> None:
        await self.give_up([partition], _START_OVER_SECONDS)
        if partition.workers:  # nobody else has the partition, so that it waits for them however long it takes
            partition.stuck = f"{len(partition.workers)} of its handlers do not end when cancelled"
            await asyncio.wait(list(partition.workers))
            partition.stuck = None
        if self._mine.get(partition.tp) is partition:
            self._roof.displace([partition])

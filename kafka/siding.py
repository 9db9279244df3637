"""Where a partition stands while its first message fails: tried alone, until it succeeds or is parked.

Each such partition has a task of its own, so that a message that fails, or hangs until its timeout, keeps no other
partition waiting.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from ..errors import KafkaUnavailable, PostgresUnavailable
from ..executor import MOST_CONFLICTS, MOST_CUTS, Backoff, after_conflict
from ..jobs import Again, Discard, Snooze
from ..jobs.retry import CONFLICTS, asked_seconds, that_counts
from ..legible import legible
from ..outage import Outage
from ..waiting import set_within
from .calling import failure_of, text_of
from .handling import BatchFailed, Handling, IdNotRecorded
from .metrics import ConsumerMetrics
from .offsets import OffsetsMoved
from .partition import Item, Partition, State
from .subscription import Subscription

__all__ = ["Siding"]

log = logging.getLogger("sidings.consumer")

_PARK_AGAIN_SECONDS = 1.0
_AWAY_SECONDS = 1.0  # between attempts of a message whose handler finds a server away


class Siding:
    """Settles first messages. slots: how many may be tried at once, of all topics, beside one of each; each needs a
    connection. settled: called when the partition may go on, in the main line or by being placed anew. resting: asked
    whether nothing new may be taken up of the topic; no attempt begins then."""

    def __init__(
        self,
        subscription: Subscription[object],
        handling: Handling,
        metrics: ConsumerMetrics,
        slots: asyncio.Semaphore,
        settled: Callable[[Partition], None],
        resting: Callable[[], bool],
    ) -> None:
        self._subscription = subscription
        self._handling = handling
        self._metrics = metrics
        self._slots = slots
        self._own = asyncio.Semaphore(1)
        self._settled = settled
        self._resting = resting
        self.unsettled: Item | None = None  # that `outage` has told of last
        self.outage = Outage(log, f"{subscription.topic}: messages that stand aside could not be settled")

    async def settle(self, partition: Partition) -> None:
        """Try the first message until it leaves the partition, or the partition leaves this process. Where its topic
        rests meanwhile, it waits in the main line with the others, its failures not forgotten."""
        item = partition.items[0]
        try:
            while partition.items and partition.items[0] is item and not self._resting():
                try:
                    await self._attempt(partition, item)
                except BatchFailed as failure:  # not by the handler, but by what parks or discards
                    self._not_settled(item, failure)
                    await set_within(partition.left, _PARK_AGAIN_SECONDS)
        except OffsetsMoved as moved:
            log.warning("%s; undone", moved)
            self._metrics.conflict(self._subscription.topic)
            _displace(item)
        except PostgresUnavailable as error:
            self._not_settled(item, error)
            self._metrics.postgres_error()
            await Backoff().sleep()
            _displace(item)
        if not item.void:  # else it may stand aside by now for another message
            partition.enter(State.READY)
        self._settled(partition)

    def _not_settled(self, item: Item, error: object) -> None:
        self.unsettled = item
        self.outage.failed(f"{item.partition.origin} offset {item.record.offset}: {error}")

    async def _attempt(self, partition: Partition, item: Item) -> None:
        """One attempt, and what follows from its failure."""
        started = time.monotonic()
        try:
            async with self._slot():
                if self._resting():  # while it waited
                    return
                await self._handling.handle([item])
            self.outage.over()
            return
        except BatchFailed as failure:
            error = failure.error
        if item.void:  # by now; it comes again, or another process has it
            return
        where = f"{partition.origin} offset {item.record.offset}"
        counts = that_counts(error)
        if isinstance(counts, Discard):
            await self._handling.discard(item)
            self.outage.over()
            log.warning("%s: discarded: %s", where, text_of(error))
        elif isinstance(counts, Snooze) and (seconds := asked_seconds(counts)) is not None:
            if isinstance(counts, IdNotRecorded):  # a handler that puts its message off knows of it
                self._not_settled(item, text_of(error))
            await set_within(partition.left, seconds)
        elif isinstance(counts, PostgresUnavailable) and counts.blameless:  # as of a `service.transaction()` of its own
            self._not_settled(item, text_of(error))
            self._metrics.postgres_error()
            await set_within(partition.left, _AWAY_SECONDS)
        elif isinstance(counts, KafkaUnavailable) and (counts.blameless or partition.cuts < MOST_CUTS):
            partition.cuts += not counts.blameless  # else it may be what the handler sends by itself
            self._not_settled(item, text_of(error))
            self._metrics.kafka_error()
            await set_within(partition.left, _AWAY_SECONDS)
        elif isinstance(counts, CONFLICTS) and partition.conflicts < MOST_CONFLICTS:
            partition.conflicts += 1
            delay = after_conflict(partition.conflicts)
            log.info("%s: met a conflict, no failure, again in %.1f s: %s", where, delay, text_of(error))
            await set_within(partition.left, delay)
        else:
            await self._failed(partition, item, error, started, where)

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None]:
        """One that the topics share, or the one that this topic has to itself: those of another topic may all hang."""
        taking = {asyncio.ensure_future(slots.acquire()): slots for slots in (self._own, self._slots)}
        taken: list[asyncio.Semaphore] = []
        try:
            await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
            for task in taking:
                task.cancel()  # no more than asked, where it has one already
            await asyncio.wait(taking)
            taken = [slots for task, slots in taking.items() if not task.cancelled()]
            for slots in taken[1:]:
                slots.release()
            del taken[1:]
            yield
        finally:
            for task, slots in taking.items():
                if not taken and not task.cancel() and not task.cancelled():  # we were cancelled while we waited
                    slots.release()
            for slots in taken:
                slots.release()

    async def _failed(self, partition: Partition, item: Item, error: Exception, started: float, where: str) -> None:
        topic, told = self._subscription.topic, failure_of(error)
        self._metrics.failed(topic)
        if partition.failures == 0:
            partition.first_failure = started
        elapsed = time.monotonic() - partition.first_failure
        outcome = self._subscription.outcome_of(error, partition.failures, elapsed)
        partition.failures, partition.conflicts = partition.failures + 1, 0
        if isinstance(outcome, Again):
            self._metrics.retried(topic)
            log.warning(
                "%s: attempt %s failed, again in %.1f s: %s", where, partition.failures, outcome.delay, legible(told)
            )
            await set_within(partition.left, outcome.delay)
            return
        attempts = partition.failures  # of this message; when it is parked, the next one stands first
        await self._handling.park(item, told)
        self.outage.over()
        log.error("%s: parked after %s attempts: %s", where, attempts, legible(told))


def _displace(item: Item) -> None:
    """Where that has not been done meanwhile; what has been read since is sound."""
    if not item.void:
        item.partition.displace()

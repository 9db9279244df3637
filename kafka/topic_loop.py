"""The main line of one topic: poll, handle a batch in one transaction, go on; what fails is set aside.

A batch that fails is split. Where one message's handler raised, its partition is set aside at that message and the rest
of the batch runs again without it; where the culprit is unknown, the messages run one by one. A partition that is set
aside has a task of its own, which tries its first message alone until it succeeds or is parked: so a message that fails
or hangs pauses its own partition, and no other.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError
from aiokafka.structs import ConsumerRecord

from ..errors import PostgresUnavailable, UndecodableMessage
from ..executor import Backoff
from ..jobs import Again, Discard, Snooze
from .handling import BatchFailed, Handling
from .message import group_of_key
from .metrics import ConsumerMetrics
from .offsets import OffsetsMoved
from .partition import Item, Partition, State
from .subscription import Subscription

__all__ = ["TopicLoop"]

log = logging.getLogger("sidings.consumer")

_POLL_SECONDS = 0.2  # a partition that has just been placed waits for the end of a poll that does not ask for it
_REBALANCE_SECONDS = 10.0  # how long to sit in a poll while the group rebalances, before looking around


class TopicLoop:
    """Consumes one topic. spawn: starts a task under the consumer's roof. displaced: called when partitions have to be
    placed anew. paused: True while nothing new may be taken up (a rebalance, a stop)."""

    def __init__(
        self,
        subscription: Subscription[object],
        client: AIOKafkaConsumer,
        partitions: Mapping[TopicPartition, Partition],
        handling: Handling,
        metrics: ConsumerMetrics,
        *,
        max_records: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        displaced: Callable[[], None],
        paused: Callable[[], bool],
        slots: asyncio.Semaphore,
    ) -> None:
        self.turned_at = time.monotonic()  # a health check looks at it
        self.in_flight = 0  # transactions under way
        self._subscription = subscription
        self._client = client
        self._partitions = partitions
        self._handling = handling
        self._metrics = metrics
        self._max_records = max_records
        self._spawn = spawn
        self._displaced = displaced
        self._paused = paused
        self._slots = slots
        self._changed = asyncio.Event()
        self._backoff = Backoff()

    def wake(self) -> None:
        """Partitions are ready."""
        self._changed.set()

    async def run(self) -> None:
        """Consume until cancelled. Raises `KafkaError` when the client has to be made anew."""
        while True:
            self.turned_at = time.monotonic()
            items = await self._next_batch()
            if items:
                await self._handle(items)

    async def _next_batch(self) -> list[Item]:
        ready = [p for p in self._partitions.values() if p.state is State.READY and p.tp.topic == self._topic]
        if not ready or self._paused():
            await self._wait_for_change()
            return []
        backlog = [item for partition in ready for item in partition.items]
        if not backlog:
            await self._poll(ready)
            backlog = [item for partition in ready if partition.state is State.READY for item in partition.items]
        return [] if self._paused() else backlog[: self._max_records]

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _poll(self, ready: Sequence[Partition]) -> None:
        try:
            async with asyncio.timeout(_REBALANCE_SECONDS):
                fetched: dict[TopicPartition, list[ConsumerRecord[bytes, bytes]]] = await self._client.getmany(
                    *(p.tp for p in ready), timeout_ms=round(_POLL_SECONDS * 1000), max_records=self._max_records
                )
        except TimeoutError:
            return
        # No await until the end: the positions below belong to what was just fetched.
        for tp, records in fetched.items():
            partition = self._partitions.get(tp)
            if partition is None:
                continue  # revoked meanwhile
            if partition.state is not State.READY or partition.items:
                self._displace([partition])  # assigned anew meanwhile: these records may be from any position
                continue
            try:
                partition.end = await self._client.position(tp)
            except IllegalStateError:
                continue
            partition.items.extend(self._item(partition, record) for record in records)

    def _item(self, partition: Partition, record: ConsumerRecord[bytes, bytes]) -> Item:
        group = group_of_key(record.key)
        try:
            return Item(partition, record, self._subscription.decode(record), None, group)
        except UndecodableMessage as error:
            log.error("%s offset %s cannot be decoded: %s", partition.origin, record.offset, error)
            return Item(partition, record, None, str(error), group)

    # -- a batch ----------------------------------------------------------------------------------------------------

    async def _handle(self, items: list[Item]) -> None:
        """Handle the batch, in as few transactions as its failures allow."""
        aside: list[Partition] = []
        try:
            while items and not self._paused():
                try:
                    done = await self._transact(items)
                    items = items[done:]
                except BatchFailed as failure:
                    if failure.index is None and len(items) > 1:
                        log.warning("%s: a batch of %s failed (%s): one by one", self._topic, len(items), failure)
                        aside += await self._one_by_one(items)
                        return
                    culprit = items[failure.index or 0].partition
                    log.warning("%s: %s is set aside (%s)", self._topic, culprit.origin, failure)
                    aside.append(culprit)
                    kept = items[: failure.index or 0]
                    kept += [item for item in items[failure.index or 0 :] if item.partition is not culprit]
                    items = kept
            self._backoff.reset()
        except OffsetsMoved as moved:
            log.warning("%s: %s; undone", self._topic, moved)
            self._metrics.conflict(self._topic)
            self._displace(item.partition for item in items)
        except PostgresUnavailable as error:
            log.warning("%s: a batch was not committed, or it is not known: %s", self._topic, error)
            self._metrics.postgres_error()
            self._displace(item.partition for item in items)
            await self._backoff.sleep()
        finally:
            for partition in aside:
                self._set_aside(partition)

    async def _one_by_one(self, items: list[Item]) -> list[Partition]:
        failed: list[Partition] = []
        for item in items:
            if item.partition not in failed and not self._paused():
                try:
                    await self._transact([item])
                except BatchFailed:
                    failed.append(item.partition)
        return failed

    async def _transact(self, items: Sequence[Item]) -> int:
        started = time.monotonic()
        self.in_flight += 1
        try:
            done = await self._handling.transact(items)
        finally:
            self.in_flight -= 1
        self._metrics.batch(self._topic, done, time.monotonic() - started)
        return done

    # -- aside ------------------------------------------------------------------------------------------------------

    def _set_aside(self, partition: Partition) -> None:
        if partition.state is State.READY and self._partitions.get(partition.tp) is partition and partition.items:
            partition.enter(State.ASIDE)
            try:
                self._client.pause(partition.tp)
            except IllegalStateError:
                return
            self._spawn(self._settle_first(partition))

    async def _settle_first(self, partition: Partition) -> None:
        """Try the partition's first message alone, until it succeeds or leaves the main line."""
        item = partition.items[0]
        try:
            while partition.state is State.ASIDE and partition.items and partition.items[0] is item:
                await self._attempt(partition, item)
        except OffsetsMoved as moved:
            log.warning("%s: %s; undone", self._topic, moved)
            self._metrics.conflict(self._topic)
            self._displace([partition])
        except PostgresUnavailable as error:
            log.warning("%s: %s", partition.origin, error)
            self._metrics.postgres_error()
            await self._backoff.sleep()
            self._displace([partition])
        if partition.state is State.ASIDE:
            partition.enter(State.READY)
            try:
                self._client.resume(partition.tp)
            except IllegalStateError:
                return
            self.wake()

    async def _attempt(self, partition: Partition, item: Item) -> None:
        started = time.monotonic()
        try:
            async with self._slots:
                await self._transact([item])
            return
        except BatchFailed as failure:
            error = failure.error
        self._metrics.failed(self._topic)
        where = f"{partition.origin} offset {item.record.offset}"
        if isinstance(error, Discard):
            log.warning("%s: discarded: %s", where, error)
            await self._handling.skip(item)
            self._metrics.messages(self._topic, "discarded")
            return
        if isinstance(error, Snooze):
            await asyncio.sleep(error.seconds)
            return
        if partition.failures == 0:
            partition.first_failure = started
        elapsed = time.monotonic() - partition.first_failure
        outcome = self._subscription.retry.decide(error, failures=partition.failures, elapsed=elapsed)
        if isinstance(outcome, Again):
            partition.failures += 1
            self._metrics.retried(self._topic)
            log.warning("%s: attempt %s failed, again in %.1f s: %r", where, partition.failures, outcome.delay, error)
            await asyncio.sleep(outcome.delay)
            return
        log.error("%s: parked after %s attempts: %r", where, partition.failures + 1, error)
        await self._handling.park(item, f"{type(error).__name__}: {error}")
        self._metrics.messages(self._topic, "parked")

    def _displace(self, partitions: Any) -> None:
        for partition in partitions:
            if partition.state is not State.UNPLACED:
                partition.displace()
        self._displaced()

    @property
    def _topic(self) -> str:
        return self._subscription.topic

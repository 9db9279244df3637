"""The consumer: one member of the group, all its topics, from the first connection to the last commit."""

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import IllegalStateError, KafkaError
from prometheus_client import REGISTRY, CollectorRegistry

from ..executor import Backoff, Link
from .assignment import RebalanceListener
from .handling import Handling
from .metrics import ConsumerMetrics
from .offsets import OffsetStore
from .parking import Parking
from .partition import Partition, State
from .placing import Placer, age_of
from .settings import KafkaSettings
from .subscription import Subscription
from .topic_loop import TopicLoop
from .transactions import Transactions

__all__ = ["Consumer"]

log = logging.getLogger("sidings.consumer")

_COMMIT_SECONDS = 5.0
_LEAVE_SECONDS = 5.0
_STUCK_SECONDS = 60.0
# Never leave the group for want of polls: while Postgres is away nothing is polled, and nobody could do better.
_NO_POLL_LIMIT_MS = 2**31 - 1


class Consumer(ConsumerRebalanceListener):
    """Consumes the topics of `subscriptions`, and joins the group for `topics` beside them, which it only is assigned."""

    def __init__(
        self,
        service: str,
        settings: KafkaSettings,
        subscriptions: Mapping[str, Subscription[object]],
        topics: Collection[str],
        transactions: Transactions,
        assignment: RebalanceListener,
        *,
        prometheus: CollectorRegistry | None = REGISTRY,
    ) -> None:
        self.partitions: dict[TopicPartition, Partition] = {}
        self.metrics = ConsumerMetrics(service, prometheus)
        self.metrics.gauges = self._gauges
        self._settings = settings
        self._group_id = settings.group or service
        self._subscriptions = subscriptions
        self._topics = sorted({*subscriptions, *topics})
        self._transactions = transactions
        self._assignment = assignment
        schema = transactions.settings.schema_name
        self._link = Link(transactions.settings, self.metrics.postgres_error)
        self._offsets = OffsetStore(self._link, schema)
        self._parking = Parking(schema)
        self._client: AIOKafkaConsumer | None = None
        self._loops: list[TopicLoop] = []
        self._placer: Placer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.joined = False  # has had an assignment
        self._rebalancing = True
        self._stopping = asyncio.Event()
        self._drained = asyncio.Event()
        self._leave = asyncio.Event()
        self._trouble_since: float | None = time.monotonic()
        self._trouble = "not connected yet"

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Consume until `drain`, stay in the group until `leave`. Kafka and Postgres may come and go.

        Raises `OffsetUnknown` where a subscription's start says so.
        """
        backoff = Backoff()
        try:
            while not self._stopping.is_set():
                client = self._make_client()
                try:
                    await self._connect(client)
                    await self._serve(client)
                except* (KafkaError, OSError) as errors:  # TimeoutError is an OSError
                    error = errors.exceptions[0]
                    self._note_trouble(f"Kafka: {error!r}")
                    self.metrics.kafka_error()
                    log.warning("the Kafka client is made anew after an error: %r", error)
                finally:
                    await self._close(client)
                if not self._stopping.is_set():
                    await backoff.sleep()
        finally:
            self._drained.set()
            await self._link.close()

    async def drain(self, timeout: float) -> None:
        """Take up nothing more, and return when the transactions under way have ended. Safe to call twice."""
        self._stopping.set()
        self._assignment.close()
        try:
            async with asyncio.timeout(timeout):
                await self._drained.wait()
        except TimeoutError:
            log.warning("a batch was still under way after %s s: its transaction is rolled back", timeout)

    def cancel(self) -> None:
        """Roll back what is under way and end at once: the firm part of a stop."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()

    def leave(self) -> None:
        """Leave the group: `run` returns soon."""
        self._stopping.set()
        self._leave.set()
        self.metrics.close()

    def _make_client(self) -> AIOKafkaConsumer:
        # The assignor keeps its state in its class: each consumer needs a class of its own. Sticky, because an origin
        # that stays needs neither a drain nor a new lease.
        assignor = type("Sticky", (StickyPartitionAssignor,), {})
        options = self._settings.consumer_options()
        if self._settings.client_id is not None:
            options["client_id"] = self._settings.client_id
        return AIOKafkaConsumer(
            **options,
            group_id=self._group_id,
            enable_auto_commit=False,
            auto_offset_reset="none",
            max_poll_interval_ms=_NO_POLL_LIMIT_MS,
            partition_assignment_strategy=[assignor],
        )

    async def _connect(self, client: AIOKafkaConsumer) -> None:
        starting = asyncio.ensure_future(client.start())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait(
                [starting, stopping], timeout=self._settings.request_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if starting.done():
                starting.result()
            elif not self._stopping.is_set():
                raise TimeoutError("Kafka did not answer")
        finally:
            stopping.cancel()
            starting.cancel()

    async def _serve(self, client: AIOKafkaConsumer) -> None:
        """Consume with this client until it fails or `drain` is called."""
        if self._stopping.is_set():
            return
        self._client = client
        self._assignment.follow(client)
        async with asyncio.TaskGroup() as group:

            def spawn(work: Coroutine[Any, Any, None]) -> None:
                task = group.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            self._placer = Placer(
                client,
                self.partitions,
                self._subscriptions,
                self._offsets,
                self.metrics,
                request_seconds=self._settings.request_seconds,
                on_placed=self._wake,
            )
            slots = asyncio.Semaphore(max(1, self._transactions.settings.pool_size - 2))
            self._loops = [
                TopicLoop(
                    subscription,
                    client,
                    self.partitions,
                    Handling(
                        subscription,
                        self._transactions,
                        self._offsets,
                        self._parking,
                        batch_seconds=self._settings.batch_seconds,
                        hurry=self._paused,
                    ),
                    self.metrics,
                    max_records=self._settings.max_records,
                    spawn=spawn,
                    displaced=self._placer.wake,
                    paused=self._paused,
                    slots=slots,
                )
                for subscription in self._subscriptions.values()
            ]
            client.subscribe(self._topics, listener=self)
            self._trouble_since = None
            spawn(self._placer.run())
            spawn(self._commit_now_and_then(client))
            for loop in self._loops:
                spawn(loop.run())
            await self._stopping.wait()
            while any(loop.in_flight for loop in self._loops):
                await asyncio.sleep(0.01)
            self.cancel()
        await self._commit(client)
        self._drained.set()
        await self._leave.wait()

    async def _close(self, client: AIOKafkaConsumer) -> None:
        self._client = None
        self.partitions.clear()
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await client.stop()
        except (KafkaError, OSError) as error:
            log.warning("the Kafka client was not closed in good order: %r", error)

    def _paused(self) -> bool:
        return self._rebalancing or self._stopping.is_set()

    def _wake(self) -> None:
        for loop in self._loops:
            loop.wake()

    # -- rebalances -------------------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """A rebalance begins: finish the transactions under way, so that the next owner reads what they store."""
        self._rebalancing = True
        self._assignment.on_partitions_revoked(revoked)
        until = time.monotonic() + min(5.0, self._settings.rebalance_seconds / 3)
        while any(loop.in_flight for loop in self._loops) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """A rebalance has ended: every partition has to be placed again. Nothing is awaited here, since heartbeats
        rest meanwhile."""
        former = dict(self.partitions)
        self.partitions.clear()
        for tp in assigned:
            partition = self.partitions[tp] = Partition(tp)
            if (before := former.get(tp)) is not None:  # attempts at a failing message are not forgotten
                partition.next_offset = before.next_offset
                partition.failures = before.failures
                partition.first_failure = before.first_failure
                before.displace()
        if self._client is not None and assigned:
            self._client.pause(*assigned)
        log.info("assigned: %s", ", ".join(sorted(p.origin for p in self.partitions.values())) or "nothing")
        self._assignment.on_partitions_assigned(assigned)
        self._rebalancing = False
        self.joined = True
        if self._placer is not None:
            self._placer.wake()

    # -- Kafka's offsets, for lag tools -----------------------------------------------------------------------------

    async def _commit_now_and_then(self, client: AIOKafkaConsumer) -> None:
        while True:
            await asyncio.sleep(_COMMIT_SECONDS)
            if not self._rebalancing:
                await self._commit(client)

    async def _commit(self, client: AIOKafkaConsumer) -> None:
        """Best effort: the truth is in Postgres."""
        offsets = {
            p.tp: p.next_offset
            for p in self.partitions.values()
            if p.next_offset >= 0 and p.state in (State.READY, State.ASIDE)
        }
        if not offsets:
            return
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await client.commit(offsets)
        except (KafkaError, OSError) as error:
            log.info("offsets were not committed to Kafka (they are stored in Postgres): %r", error)

    # -- seeing what goes on ----------------------------------------------------------------------------------------

    def _note_trouble(self, text: str) -> None:
        if self._trouble_since is None:
            self._trouble_since = time.monotonic()
        self._trouble = text

    def problems(self) -> list[str]:
        """What a health check should complain about; empty when all is well."""
        found: list[str] = []
        if self._trouble_since is not None and time.monotonic() - self._trouble_since > _STUCK_SECONDS / 4:
            found.append(
                f"the consumer has no connection for {time.monotonic() - self._trouble_since:.0f} s: {self._trouble}"
            )
        for loop, topic in zip(self._loops, self._subscriptions, strict=False):
            idle = time.monotonic() - loop.turned_at
            if idle > _STUCK_SECONDS:
                found.append(f"the consumer of {topic!r} is stuck: it has not polled for {idle:.0f} s")
        found += [p.reason for p in list(self.partitions.values()) if p.state is State.REFUSED]
        return found

    def _gauges(self) -> Iterator[tuple[str, str, dict[tuple[str, int | None], float]]]:
        paused: dict[tuple[str, int | None], float] = dict.fromkeys(((t, None) for t in self._subscriptions), 0.0)
        stalled = dict(paused)
        lag: dict[tuple[str, int | None], float] = {}
        for partition in list(self.partitions.values()):
            topic = partition.tp.topic
            if topic not in self._subscriptions:
                continue
            if partition.state is State.ASIDE:
                paused[topic, None] += 1
                stalled[topic, None] = max(stalled[topic, None], age_of(partition))
            if (end := self._highwater(partition.tp)) is not None and partition.next_offset >= 0:
                lag[topic, partition.tp.partition] = max(0, end - partition.next_offset)
        yield "sidings_consumer_paused_partitions", "Partitions whose first message fails.", paused
        yield "sidings_consumer_stalled_seconds", "How long the longest of them has been paused.", stalled
        yield "sidings_consumer_lag", "Messages between the stored offset and the end of the log.", lag

    def _highwater(self, tp: TopicPartition) -> int | None:
        try:
            return None if self._client is None else self._client.highwater(tp)
        except (AssertionError, AttributeError, IllegalStateError):
            return None  # revoked between two looks

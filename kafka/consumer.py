"""The consumer: one member of the group, all its topics, from the first connection to the last commit."""

import asyncio
import logging
import random
import time
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError
from prometheus_client import REGISTRY, CollectorRegistry

from ..executor import Link
from ..outage import Outage
from ..waiting import set_within
from . import membership
from .assignment import RebalanceListener
from .backlog import Backlog
from .dead_letters import DeadLetters
from .handling import Handling
from .lag import LagCommitter
from .leader_epochs import LeaderEpochs
from .message import origin_of
from .metrics import ConsumerMetrics
from .offsets import OffsetStore
from .parking import Parking
from .partition import Partition
from .placing import Placer
from .reset import ResetWatch
from .seen import Seen, SeenUpkeep
from .settings import KafkaSettings
from .stateless import Stateless
from .stateless_subscription import StatelessSubscription
from .subscription import Subscription
from .topic_ids import TopicIdWatch
from .topic_loop import FetchLoop, TopicLoop
from .topics import Topics
from .transactions import Transactions
from .vitals import Vitals

__all__ = ["Consumer"]

log = logging.getLogger("sidings.consumer")

_MAX_PAUSE_SECONDS = 15.0  # between two attempts to connect
_STABLE_SECONDS = 60.0  # a connection that has lasted so long makes the next pause short again


class Consumer(ConsumerRebalanceListener):
    """Consumes the topics of `subscriptions`, and those of `stateless`, which need no Postgres. For `topics` it only
    joins the group, so that their partitions, and with them the jobs of these origins, are assigned.

    transactions and assignment: None in a service without Postgres. dead_letters: needed by `stateless`.
    """

    def __init__(
        self,
        service: str,
        settings: KafkaSettings,
        subscriptions: Mapping[str, Subscription[object]],
        topics: Collection[str],
        transactions: Transactions | None,
        assignment: RebalanceListener | None,
        *,
        stateless: Mapping[str, StatelessSubscription[Any]] | None = None,
        dead_letters: DeadLetters | None = None,
        topic_table: Topics | None = None,
        prometheus: CollectorRegistry | None = REGISTRY,
    ) -> None:
        self.partitions: dict[TopicPartition, Partition] = {}
        self.joined = False  # has had an assignment
        self.metrics = ConsumerMetrics(service, prometheus, {*subscriptions, *(stateless or ())})
        self._stateless = None
        if stateless and dead_letters is not None:
            self._stateless = Stateless(stateless, settings, dead_letters, self.metrics, self)
        self._topics = sorted({*subscriptions, *(stateless or ()), *topics})
        self.vitals = Vitals({*subscriptions, *(stateless or ())}, self._topics, self._all_partitions)
        self.metrics.figures = self.vitals.figures
        self._settings = settings
        self._group_id = settings.group or service
        self._subscriptions = subscriptions
        self._transactions = transactions
        self._topic_table = topic_table
        self._assignment = assignment
        self._link = None if transactions is None else Link(transactions.settings, self.metrics.postgres_error)
        self._client: AIOKafkaConsumer | None = None
        self._loops: list[TopicLoop] = []
        self._placer: Placer | None = None
        self._lag: LagCommitter | None = None
        self._cuts: dict[TopicPartition, int] = {}  # what one client has found, the next one's health checks tell of
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False  # what runs with this client is being cancelled
        self._stopping = asyncio.Event()
        self._drained = asyncio.Event()
        self._leaving = asyncio.Event()
        self._connected_at: float | None = None
        self._outage = Outage(log, "the connection to Kafka failed")
        self._failures = 0  # connections in a row that did not last

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Consume until `drain`, stay in the group until `leave`. Kafka and Postgres may come and go.

        Raises `OffsetUnknown` where a subscription's start says so.
        """
        try:
            while not self._stopping.is_set():
                client = membership.make_client(self._settings, self._group_id)
                try:
                    await membership.connect(client, self._stopping, self._settings.request_seconds)
                    await self._serve(client)
                except* (KafkaError, OSError) as errors:
                    self.metrics.kafka_error()
                    self.vitals.disconnected(errors.exceptions[0])
                    self._outage.failed(repr(errors.exceptions[0]))
                finally:
                    self._client = None
                    self._loops = []
                    for partition in self._all_partitions():  # kept for what the next client's inherit, if it gets them
                        partition.displace()
                    self.vitals.disconnected()
                    await membership.close(client)
                await self._pause_before_connecting()
        finally:
            self._drained.set()
            if self._link is not None:
                await self._link.close()
            if self._stateless is not None:
                await self._stateless.stop()

    async def drain(self, timeout: float) -> None:
        """Take up nothing more, and return when the transactions under way have ended. Safe to call twice."""
        self._stopping.set()
        if not await set_within(self._drained, timeout):
            log.warning("a batch was still under way after %s s: it is rolled back", timeout)
            self.cancel()

    def renew(self) -> None:
        """Postgres was replaced: read stored offsets of the new one. A former primary that lives on would go on telling
        where it was."""
        if self._link is not None:
            self._link.renew()

    def cancel(self) -> None:
        """Roll back what is under way: the firm part of a stop."""
        self._stopping.set()
        self._end()
        for task in self._tasks:
            task.cancel()

    def leave(self) -> None:
        """Leave the group: `run` returns soon."""
        self._stopping.set()
        self._leaving.set()
        self.metrics.close()

    async def _pause_before_connecting(self) -> None:
        """Longer and longer, since each connection that fails again costs the other members a rebalance."""
        if self._connected_at is not None and time.monotonic() - self._connected_at > _STABLE_SECONDS:
            self._failures = 0
        self._connected_at = None
        self._failures = min(self._failures + 1, 10)
        await set_within(self._stopping, random.uniform(0.02, min(_MAX_PAUSE_SECONDS, 0.1 * 2**self._failures)))

    async def _serve(self, client: AIOKafkaConsumer) -> None:
        """Consume with this client until it fails, or until `leave`."""
        if self._stopping.is_set():
            return
        self._client = client
        self._ending = False
        self._connected_at = time.monotonic()
        if self._assignment is not None:
            self._assignment.follow(client)
        epochs = LeaderEpochs(client, self._cuts)
        async with asyncio.TaskGroup() as self._group:
            if self._transactions is not None and self._link is not None:
                self._build(client, epochs, self._transactions, self._link)
            if self._stateless is not None:
                self._stateless.start(client, epochs)
            self.vitals.connected(client, self._all_loops())
            client.subscribe(self._topics, listener=self)
            self.spawn(membership.watch(client))
            try:
                await self._stopping.wait()
                if self._stateless is not None:
                    self._stateless.rest()
                while self._in_flight():
                    await asyncio.sleep(0.01)
                self.cancel()
            finally:
                self._end()
        if self._lag is not None:
            await self._lag.commit()
        if self._stateless is not None:
            await self._stateless.commit()
        self._drained.set()
        await self._leaving.wait()

    def _build(self, client: AIOKafkaConsumer, epochs: LeaderEpochs, transactions: Transactions, link: Link) -> None:
        """Make the parts that work with this client and with Postgres, and start them."""
        settings = self._settings
        offsets = OffsetStore(link, transactions.settings, epochs)
        self._placer = Placer(
            client,
            self.partitions,
            self._subscriptions,
            offsets,
            epochs,
            self.metrics,
            request_seconds=settings.request_seconds,
            on_placed=self._wake,
            spawn=self.spawn,
            topics=self._topic_table,
            topic_ids=offsets,
        )
        parking = Parking(transactions.settings, self._topic_table)
        # What is set aside leaves connections to the main lines (which have one each, see Service) and to others.
        slots = asyncio.Semaphore(max(1, transactions.settings.pool_size // 2))
        for subscription in self._subscriptions.values():
            handling = Handling(
                subscription,
                transactions,
                offsets,
                parking,
                self.metrics,
                seen=Seen(transactions.settings) if subscription.dedup else None,
                batch_seconds=settings.batch_seconds,
                hurry=lambda: self.paused,
                ending=lambda: self._ending,
            )
            loop = TopicLoop(
                subscription,
                client,
                self.partitions,
                handling,
                self.metrics,
                self,
                max_records=max(settings.max_records, subscription.largest_batch),
                slots=slots,
            )
            self._loops.append(loop)
            self.spawn(loop.run())
        self.spawn(self._placer.run())
        self._lag = LagCommitter(client, self.partitions, offsets, lambda: self.vitals.rebalancing_since is not None)
        self.spawn(self._lag.run())
        self.spawn(ResetWatch(self.partitions, offsets, self._displace).run())
        self.spawn(TopicIdWatch(client, self.partitions, offsets, self._displace).run())
        if any(subscription.dedup for subscription in self._subscriptions.values()):
            self.spawn(SeenUpkeep(transactions.settings, settings.dedup_days).run())
        limits = {s.topic: s.max_waiting for s in self._subscriptions.values() if s.max_waiting is not None}
        if limits:
            backlog = Backlog(client, self.partitions, limits, transactions.settings, on_resumed=self._wake)
            self.vitals.backlog = backlog
            self.spawn(backlog.run())
        if self._topic_table is not None:
            self.spawn(self._topic_table.watch(client, self._topics, self.place))

    # -- the roof of the topics' loops ------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Nothing new may be taken up."""
        return self.vitals.rebalancing_since is not None or self._stopping.is_set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends with the consumer, and whose failure ends it."""
        assert self._group is not None
        task = self._group.create_task(self._watched(work), name=f"sidings {work.__qualname__}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Whose end cancels the others says so first. One that somebody else has cancelled would be missing unnoticed:
        all begin anew with another client."""
        try:
            await work
        except asyncio.CancelledError as error:
            if self._ending:
                raise
            self._end()
            raise KafkaError(f"{work.__qualname__} was cancelled from outside, by a handler perhaps") from error
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        """All that runs is about to be cancelled: what handlers make of that is no failure of theirs."""
        self._ending = True
        if self._stateless is not None:
            self._stateless.rest()

    def place(self) -> None:
        """Some partition has to be placed."""
        if self._placer is not None:
            self._placer.wake()
        if self._stateless is not None:
            self._stateless.place()

    def _displace(self, partitions: Collection[Partition]) -> None:
        for partition in partitions:
            partition.displace()
        self.place()

    def _wake(self) -> None:
        for loop in self._loops:
            loop.wake()

    def _in_flight(self) -> bool:
        return any(loop.in_flight for loop in self._all_loops())

    def _all_partitions(self) -> list[Partition]:  # any thread may ask
        stateless = () if self._stateless is None else tuple(self._stateless.partitions.values())
        return [*tuple(self.partitions.values()), *stateless]

    def _all_loops(self) -> list[FetchLoop]:
        return [*self._loops, *(self._stateless.loops if self._stateless is not None else ())]

    # -- rebalances -------------------------------------------------------------------------------------------------

    # aiokafka awaits what a listener returns; its annotations do not say so.
    async def on_partitions_revoked(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, revoked: Collection[TopicPartition]
    ) -> None:
        """A rebalance begins: let the transactions under way end, so that the next owner reads what they store."""
        self.vitals.rebalance_begins()
        if self._assignment is not None:
            self._assignment.on_partitions_revoked(revoked)
        if self._stateless is not None:
            self._stateless.rest()
        until = time.monotonic() + min(5.0, self._settings.rebalance_seconds / 3)
        while self._in_flight() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if self._stateless is not None:  # Postgres guards against two owners; here they must not overlap
            await self._stateless.give_up()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """A rebalance has ended: every partition has to be placed again. Heartbeats rest during this call, so that
        nothing is awaited in it."""
        former = dict(self.partitions)
        self.partitions.clear()
        if self._stateless is not None:
            self._stateless.assigned(assigned)
        for tp in assigned:
            if self._stateless is not None and tp.topic in self._stateless.subscriptions:
                continue
            self.partitions[tp] = Partition(tp)
            if (before := former.pop(tp, None)) is not None:
                self.partitions[tp].inherit(before)
        for partition in former.values():
            partition.displace()
        if self._client is not None:
            self._client.pause(*assigned)
        log.info("assigned: %s", ", ".join(sorted(origin_of(*tp) for tp in assigned)) or "nothing")
        for topic in self.vitals.missing_topics():
            log.warning(
                "there is no topic %r, or no right to see it: create it; it is taken up within %.0f s then",
                *(topic, self._settings.metadata_seconds),
            )
        if self._assignment is not None:
            self._assignment.on_partitions_assigned(assigned)
        self.vitals.rebalance_ends()
        self._outage.over()
        self.joined = True
        if self._topic_table is not None:
            self._topic_table.look()
        self.place()

"""The consumer: one member of the group, all its topics, from the first connection to the last commit."""

import asyncio
import logging
import random
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError
from prometheus_client import REGISTRY, CollectorRegistry

from ..outage import Outage
from ..waiting import set_within
from . import membership
from .assignment import RebalanceListener
from .dead_letters import DeadLetters
from .fetch_loop import FetchLoop
from .half import Half
from .leader_epochs import LeaderEpochs
from .message import origin_of
from .metrics import ConsumerMetrics
from .partition import Partition
from .settings import KafkaSettings
from .stateless import Stateless
from .stateless_subscription import StatelessSubscription
from .stored import Stored
from .subscription import Subscription
from .topics import Topics
from .transactions import Transactions
from .vitals import Vitals

__all__ = ["Consumer"]

log = logging.getLogger("sidings.consumer")

_MAX_PAUSE_SECONDS = 15.0  # between two attempts to connect
_STABLE_SECONDS = 60.0  # a connection that has lasted so long makes the next pause short again


class Consumer(ConsumerRebalanceListener):
    """Consumes the topics of `subscriptions`, and those of `stateless`, which need no Postgres. For `topics` it only
    joins the group, so that their partitions, and with them the jobs of these origins, are assigned, unless others in
    it consume them. To the loops of its halves it is the `Roof`.

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
        prometheus: CollectorRegistry = REGISTRY,
    ) -> None:
        self.joined = False  # has had an assignment
        self.ending = False
        consumed = {*subscriptions, *(stateless or ())}
        self.metrics = ConsumerMetrics(service, prometheus, consumed)
        self._stored = self._stateless = None
        if transactions is not None:
            self._stored = Stored(subscriptions, settings, transactions, topic_table, self.metrics, self)
        if stateless and dead_letters is not None:
            self._stateless = Stateless(stateless, settings, dead_letters, self.metrics, self)
        self._halves: list[Half[Any, Any, Any]] = [half for half in (self._stored, self._stateless) if half is not None]
        self._topics = sorted({*consumed, *topics})
        self._unread = {*topics} - consumed
        paused = () if self._stored is None else self._stored.pauses
        self.vitals = Vitals(consumed, self._topics, self._partitions, paused)
        self.metrics.figures = self.vitals.figures
        self._settings = settings
        self._group_id = settings.group or service
        self._topic_table = topic_table
        self._assignment = assignment
        self._client: AIOKafkaConsumer | None = None
        self._cuts: dict[TopicPartition, int] = {}  # what one client has found, the next one's health checks tell of
        self._seen: dict[str, Any] = {}  # what one client was told of the topics, for the next one
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
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
        self.vitals.begin()
        try:
            while not self._stopping.is_set():
                client = membership.make_client(self._settings, self._group_id, self._seen, unread=self._unread)
                try:
                    await membership.connect(client, self._stopping, self._settings.request_seconds)
                    await self._serve(client)
                except* (KafkaError, OSError) as errors:
                    error = membership.explained(errors.exceptions[0])
                    self.metrics.kafka_error()
                    self.vitals.disconnected(error)
                    self._outage.failed(repr(error))
                finally:
                    self._client = None
                    for half in self._halves:
                        half.disconnected()
                    self.vitals.disconnected()
                    await membership.close(client)
                if (task := asyncio.current_task()) is not None and task.cancelling():  # errors of a group hide that
                    raise asyncio.CancelledError
                await self._pause_before_connecting()
        finally:
            self._drained.set()
            for half in self._halves:
                await half.close()

    async def drain(self, timeout: float) -> None:
        """Take up nothing more, and return when the transactions under way have ended. Safe to call twice."""
        self._stopping.set()
        if not await set_within(self._drained, timeout):
            log.warning("messages were still under way after %s s: what handles them is cancelled", timeout)
            self.cancel()

    def renew(self) -> None:
        """Postgres was replaced."""
        if self._stored is not None:
            self._stored.renew()

    def cancel(self) -> None:
        """Roll back what is under way: the firm part of a stop."""
        self._stopping.set()
        self._end()
        for task in self._tasks:
            task.cancel()

    def includes(self, task: "asyncio.Task[Any] | None") -> bool:
        """Whether it is one of those that run handlers, or serve them."""
        return task in self._tasks

    def handled_now(self) -> list[str]:
        """The messages whose handlers run; of each list the first."""
        return [f"{p.origin} offset {offset}" for p in self._partitions() for offset in sorted(p.calls)]

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
        self.ending = False
        self._connected_at = time.monotonic()
        if self._assignment is not None:
            self._assignment.follow(client, self._topics)
        epochs = LeaderEpochs(client, self._cuts)
        async with asyncio.TaskGroup() as self._group:
            for half in self._halves:
                half.start(client, epochs)
            contact = membership.Contact(client)
            backlog = None if self._stored is None else self._stored.backlog
            self.vitals.connected(client, self._loops(), backlog, contact)
            if self._topic_table is not None:
                self.spawn(self._topic_table.watch(client, self._topics, self.place))
            client.subscribe(self._topics, listener=self)
            self.spawn(membership.watch(client, contact))
            self.spawn(self.vitals.watch_ends(client))
            try:
                await self._stopping.wait()
                self._rest()
                while self._in_flight():
                    await asyncio.sleep(0.01)
                self.cancel()
            finally:
                self._end()
        for half in self._halves:
            await half.commit()
        self._drained.set()
        await self._leaving.wait()

    # -- the roof of the topics' loops ------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Nothing new may be taken up."""
        return self.ending or self.vitals.rebalancing_since is not None or self._stopping.is_set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends with the consumer, and whose failure ends it. Where that is already ending, which a
        handler may have kept from whoever calls this, the caller ends instead: the group takes no more tasks."""
        if self.ending:
            work.close()
            raise asyncio.CancelledError
        assert self._group is not None
        task = self._group.create_task(self._watched(work), name=f"sidings {work.__qualname__}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # of one that was cancelled before it began, Python warns else
        return task

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Whose end cancels the others says so first. One that somebody else has cancelled would be missing unnoticed:
        all begin anew with another client."""
        try:
            await work
        except asyncio.CancelledError as error:
            if self.ending:
                raise
            self._end()
            raise KafkaError(
                f"{work.__qualname__} was cancelled from outside: by a handler perhaps, or as `asyncio.run` ends while "
                "the service runs; leave its `async with` before, or `service.stop()` and await its `run()`"
            ) from error
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self.ending = True
        self._rest()

    def _rest(self) -> None:
        for half in self._halves:
            half.rest()

    def place(self) -> None:
        """Some partition has to be placed."""
        for half in self._halves:
            half.place()

    def displace(self, partitions: Iterable[Partition]) -> None:
        """What is in memory of these may be wrong: they have to be placed anew."""
        for partition in partitions:
            partition.displace()
        self.place()

    def _in_flight(self) -> bool:
        return any(loop.in_flight for loop in self._loops())

    def _partitions(self) -> list[Partition]:  # any thread may ask
        return [partition for half in self._halves for partition in tuple(half.partitions.values())]

    def _loops(self) -> list[FetchLoop]:
        return [loop for half in self._halves for loop in half.loops]

    # -- rebalances -------------------------------------------------------------------------------------------------

    # aiokafka awaits what a listener returns; its annotations do not say so.
    async def on_partitions_revoked(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, revoked: Collection[TopicPartition]
    ) -> None:
        """A rebalance begins: let the transactions under way end, so that the next owner reads what they store. The
        executor is not told, however long it lasts, as where Kafka goes away meanwhile: whoever gets a partition asks
        for its origin under the newer generation, and that is yielded."""
        self.vitals.rebalance_begins()
        self._rest()
        until = time.monotonic() + min(5.0, self._settings.rebalance_seconds / 3)
        while self._in_flight() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for half in self._halves:
            await half.give_up()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """A rebalance has ended: every partition has to be placed again. Heartbeats rest during this call, so that
        nothing is awaited in it."""
        for half in self._halves:
            half.assigned(assigned)
        if self._client is not None:
            self._client.pause(*assigned)
        log.info("assigned: %s", ", ".join(sorted(origin_of(*tp) for tp in assigned)) or "nothing")
        for missing in self.vitals.missing_topics():
            log.warning("%s; taken up within %.0f s then", missing, self._settings.metadata_seconds)
        if self._assignment is not None:
            self._assignment.take(assigned)
        self.vitals.rebalance_ends()
        self._outage.over()
        self.joined = True
        if self._topic_table is not None:
            self._topic_table.look()
        self.place()

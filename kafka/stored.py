"""The half of a consumer whose offsets are in Postgres: effects exactly once."""

import asyncio
from collections.abc import Mapping

from aiokafka import AIOKafkaConsumer, TopicPartition

from ..executor import Link
from .backlog import Backlog
from .fetch_loop import Roof
from .half import Half
from .handling import Handling
from .lag import LagCommitter
from .leader_epochs import LeaderEpochs
from .metrics import ConsumerMetrics
from .offsets import OffsetStore
from .parking import Parking
from .partition import Partition
from .pauses import Pauses
from .placing import Placer
from .reset import ResetWatch
from .seen import Seen, SeenUpkeep
from .settings import KafkaSettings
from .subscription import Subscription
from .topic_ids import TopicIdWatch
from .topic_loop import TopicLoop
from .topics import Topics
from .transactions import Transactions

__all__ = ["Stored"]


class Stored(Half[Subscription[object], Partition, TopicLoop]):
    """Consumes the topics of `subscriptions`, as a part of the consumer `roof`. backlog: where a topic has a limit.
    pauses: of topics, by persons."""

    def __init__(
        self,
        subscriptions: Mapping[str, Subscription[object]],
        settings: KafkaSettings,
        transactions: Transactions,
        topic_table: Topics | None,
        metrics: ConsumerMetrics,
        roof: Roof,
    ) -> None:
        super().__init__(subscriptions, Partition)
        self.backlog: Backlog | None = None
        self.pauses = Pauses(subscriptions)
        self._settings = settings
        self._transactions = transactions
        self._topic_table = topic_table
        self._metrics = metrics
        self._roof = roof
        self._link = Link(transactions.settings, metrics.postgres_error)
        self._lag: LagCommitter | None = None
        self._timelines: dict[TopicPartition, str] = {}  # of what one client has loaded, for the next one

    def start(self, client: AIOKafkaConsumer, epochs: LeaderEpochs) -> None:
        """Make the parts that work with this client and with Postgres, and start them."""
        settings, postgres, spawn = self._settings, self._transactions.settings, self._roof.spawn
        offsets = OffsetStore(self._link, postgres, epochs, self._timelines, self.pauses)
        self._placer = Placer(
            client,
            self.partitions,
            self.subscriptions,
            offsets,
            epochs,
            self._metrics,
            request_seconds=settings.request_seconds,
            on_placed=self._wake,
            spawn=spawn,
            topics=self._topic_table,
            adopt=offsets.adopt,
        )
        slots = asyncio.Semaphore(self._transactions.aside)
        parking = Parking(postgres, self._topic_table, offsets.topic_id)
        self.loops = [self._loop(s, client, offsets, parking, slots) for s in self.subscriptions.values()]
        self._lag = LagCommitter(client, self.partitions, offsets, lambda: self._roof.paused)
        self.backlog = self._backlog(client)
        for loop in self.loops:
            spawn(loop.run())
        spawn(self._placer.run())
        spawn(self._lag.run())
        spawn(ResetWatch(self.partitions, offsets, self._roof.displace).run())
        spawn(TopicIdWatch(client, self.partitions, offsets.topic_id, self._roof.displace).run())
        asked = any(subscription.dedup for subscription in self.subscriptions.values())
        spawn(SeenUpkeep(postgres, settings.dedup_days, asked=asked).run())
        if self.backlog is not None:
            spawn(self.backlog.run())

    async def commit(self) -> None:
        """Tell Kafka what is stored, for the sake of lag tools."""
        if self._lag is not None:
            await self._lag.commit()

    def renew(self) -> None:
        """Postgres was replaced: read stored offsets of the new one. A former primary that lives on would go on telling
        where it was."""
        self._link.renew()

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    def _loop(
        self,
        subscription: Subscription[object],
        client: AIOKafkaConsumer,
        offsets: OffsetStore,
        parking: Parking,
        slots: asyncio.Semaphore,
    ) -> TopicLoop:
        def paused() -> bool:
            return subscription.topic in self.pauses

        handling = Handling(
            subscription,
            self._transactions,
            offsets,
            parking,
            self._metrics,
            seen=Seen(self._transactions.settings) if subscription.dedup else None,
            batch_seconds=self._settings.batch_seconds,
            hurry=lambda: self._roof.paused or paused(),
            ending=lambda: self._roof.ending,
        )
        return TopicLoop(
            subscription,
            client,
            self.of_topic[subscription.topic],
            handling,
            self._metrics,
            self._roof,
            max_records=max(self._settings.max_records, subscription.largest_batch),
            slots=slots,
            paused=paused,
        )

    def _backlog(self, client: AIOKafkaConsumer) -> Backlog | None:
        limits = {s.topic: s.max_waiting for s in self.subscriptions.values() if s.max_waiting is not None}
        if not limits:
            return None
        return Backlog(client, self.partitions, limits, self._transactions.settings, on_resumed=self._wake)

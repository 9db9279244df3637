"""The half of a consumer whose offsets are in Kafka, and that needs no Postgres: effects at least once."""

import asyncio
import logging
from collections.abc import Collection, Mapping

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from . import membership
from .dead_letters import DeadLetters
from .fetch_loop import Roof
from .half import Half
from .leader_epochs import LeaderEpochs
from .metrics import ConsumerMetrics
from .partition import Partition
from .placing import Placer
from .settings import KafkaSettings
from .stateless_handling import StatelessHandling
from .stateless_loop import StatelessLoop
from .stateless_offsets import GroupOffsets
from .stateless_partition import StatelessPartition
from .stateless_subscription import StatelessSubscription
from .topic_ids import TopicIdWatch

__all__ = ["Stateless"]

log = logging.getLogger("sidings.consumer")

_COMMIT_SECONDS = 1.0  # so much is done again after a kill, at most, beside what was under way


class Stateless(Half[StatelessSubscription[object], StatelessPartition, StatelessLoop]):
    """Consumes the topics of `subscriptions`, as a part of the consumer `roof`."""

    def __init__(
        self,
        subscriptions: Mapping[str, StatelessSubscription[object]],
        settings: KafkaSettings,
        dead_letters: DeadLetters,
        metrics: ConsumerMetrics,
        roof: Roof,
    ) -> None:
        super().__init__(subscriptions, StatelessPartition)
        self._settings = settings
        self._dead_letters = dead_letters
        self._metrics = metrics
        self._roof = roof
        self._offsets: GroupOffsets | None = None

    def start(self, client: AIOKafkaConsumer, epochs: LeaderEpochs) -> None:
        """Make the parts that work with this client, and start them."""
        settings = self._settings
        offsets = GroupOffsets(client, epochs, self._metrics, seconds=min(5.0, settings.rebalance_seconds / 4))
        self._offsets = offsets
        self._placer = Placer(
            client,
            self.partitions,
            self.subscriptions,
            offsets,
            epochs,
            self._metrics,
            request_seconds=settings.request_seconds,
            on_placed=self._wake,
            spawn=self._roof.spawn,
        )
        for subscription in self.subscriptions.values():
            handling = StatelessHandling(subscription, self._dead_letters, self._metrics)
            loop = StatelessLoop(
                subscription,
                client,
                self.of_topic[subscription.topic],
                handling,
                offsets,
                self._roof,
                max_records=settings.max_records,
            )
            self.loops.append(loop)
            self._roof.spawn(loop.run())
        self._roof.spawn(self._placer.run())
        self._roof.spawn(self._commit_now_and_then())
        self._roof.spawn(self._look_for_dead_letter_topics(client))
        self._roof.spawn(TopicIdWatch(client, self.partitions, offsets.topic_id, self._begin_anew).run())

    def rest(self) -> None:
        """Take up nothing more; nothing waits for its next attempt."""
        for partition in self.partitions.values():
            partition.leaving.set()

    async def give_up(self) -> None:
        """End what still runs, and commit what is done: the partitions may be another's in a moment."""
        self.rest()
        seconds = min(2.0, self._settings.rebalance_seconds / 4)  # so that all of it ends before the rebalance does
        await asyncio.gather(*[loop.give_up(list(self.of_topic[loop.topic].values()), seconds) for loop in self.loops])

    async def commit(self) -> None:
        """Commit what is done."""
        if self._offsets is not None:
            await self._offsets.commit(list(self.partitions.values()))

    async def close(self) -> None:
        """Close the connections."""
        await self._dead_letters.stop()

    def _begin_anew(self, partitions: Collection[Partition]) -> None:
        """Their topics were made anew, and may have grown past where we are."""
        for loop in self.loops:
            loop.displace([partition for partition in partitions if partition.tp.topic == loop.topic])

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_COMMIT_SECONDS)
            if not self._roof.paused:
                await self.commit()

    async def _look_for_dead_letter_topics(self, client: AIOKafkaConsumer) -> None:
        """Say early what would stop a partition late."""
        wanted = {subscription.dead_letter for subscription in self.subscriptions.values()}
        try:
            async with asyncio.timeout(self._settings.request_seconds):
                found = (await membership.describe(client, wanted)).to_object()
        except (KafkaError, OSError) as error:  # TimeoutError is an OSError
            log.info("it is unknown whether there are the topics %s: %r", ", ".join(sorted(wanted)), error)
            return
        if missing := wanted - {one["topic"] for one in found["topics"] if one["partitions"]}:
            log.warning(
                "there is no topic %s (or no right to see it): unless the brokers make topics by themselves, the first "
                "message that has to go there stops its partition",
                ", ".join(sorted(missing)),
            )

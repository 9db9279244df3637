"""The offsets of stateless consumers: those of the consumer group, in Kafka."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import cast

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

from ..outage import Outage
from .metrics import ConsumerMetrics
from .offsets import Move
from .stateless_partition import StatelessPartition

__all__ = ["GroupOffsets"]

log = logging.getLogger("sidings.consumer")


class GroupOffsets:
    """Reads and commits the group's offsets. seconds: how long one commit may take.

    Kafka takes commits from the partition's owner only; one that arrives late can set an offset back, which repeats
    messages, but not forward past an unfinished one, since no such offset is ever sent.
    """

    how_to_set = "commit one for the group while no instance runs (kafka-consumer-groups --reset-offsets)"
    how_to_delete = "delete the group's offset while no instance runs (kafka-consumer-groups --delete-offsets)"

    def __init__(self, client: AIOKafkaConsumer, metrics: ConsumerMetrics, *, seconds: float) -> None:
        self._client = client
        self._metrics = metrics
        self._seconds = seconds
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by topic
        self._outages: dict[str, Outage] = {}

    async def load(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The committed offsets; a partition that has none is absent. Raises `KafkaError`, `TimeoutError`."""
        async with asyncio.timeout(self._seconds):
            offsets = await asyncio.gather(*[self._committed(tp) for tp in partitions])
        return {tp: offset for tp, offset in zip(partitions, offsets, strict=True) if offset is not None}

    async def create(self, starts: Mapping[TopicPartition, int]) -> None:
        """Commit where to start, before anything is read: ``start="latest"`` must mean the same place the next time.
        Raises `KafkaError`, `TimeoutError`."""
        await self._commit(starts)

    async def jump(self, move: Move) -> None:
        """Commit one offset. Raises `KafkaError`, `TimeoutError`."""
        await self._commit({move.tp: move.next})

    def resets(self, partition: TopicPartition) -> int:
        """None that is counted: it takes that no instance runs."""
        return 0

    async def commit(self, partitions: Collection[StatelessPartition]) -> None:
        """Commit how far `partitions` are done, each topic for itself: of one that refuses it the others must not look
        as if they had failed, too. What fails is tried again with the next commit."""
        due: dict[str, list[StatelessPartition]] = {}
        for partition in partitions:
            if partition.placed:
                partition.look()
            if partition.placed and partition.next_offset != partition.committed:
                due.setdefault(partition.tp.topic, []).append(partition)
            else:
                partition.uncommitted_since = None
        await asyncio.gather(*[self._commit_topic(topic, theirs) for topic, theirs in due.items()])

    async def _commit_topic(self, topic: str, partitions: Collection[StatelessPartition]) -> None:
        due = {partition.tp: partition.next_offset for partition in partitions}
        if topic not in self._outages:
            self._outages[topic] = Outage(log, f"the offsets of {topic!r} could not be committed")
        try:
            await self._commit_one(topic, due)
        except (CommitFailedError, IllegalStateError) as error:  # what was done since the last commit is done again
            log.warning("the offsets of %s partitions came too late for this generation: %r", len(due), error)
        except (KafkaError, OSError) as error:  # TimeoutError is an OSError
            self._metrics.kafka_error()
            self._outages[topic].failed(repr(error))
            for partition in partitions:
                if partition.uncommitted_since is None:
                    partition.uncommitted_since = time.monotonic()
        else:
            self._outages[topic].over()
            for partition in partitions:
                partition.uncommitted_since = None
                partition.committed = due[partition.tp]

    async def _committed(self, tp: TopicPartition) -> int | None:
        return cast(int | None, await self._client.committed(tp))

    async def _commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        for topic in {tp.topic for tp in offsets}:
            await self._commit_one(topic, {tp: offset for tp, offset in offsets.items() if tp.topic == topic})

    async def _commit_one(self, topic: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Of one topic: aiokafka tries some refusals again for as long as it is let, and raises one error for all."""
        try:
            async with asyncio.timeout(self._seconds), self._locks[topic]:
                await self._client.commit(dict(offsets))
        except (KafkaError, OSError):
            raise
        except Exception as error:  # a mistake inside of the client is no reason to end the service
            raise KafkaError(f"the client failed unexpectedly: {error!r}") from error

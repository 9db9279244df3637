"""The offsets of stateless consumers: those of the consumer group, in Kafka."""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import cast

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

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
        self._lock = asyncio.Lock()

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
        """Commit how far `partitions` are done. What fails is tried again with the next commit."""
        for partition in partitions:
            if partition.placed:
                partition.look()
        due = {p.tp: p.next_offset for p in partitions if p.placed and p.next_offset != p.committed}
        try:
            await self._commit(due)
        except (CommitFailedError, IllegalStateError) as error:  # what was done since the last commit is done again
            log.warning("the offsets of %s partitions came too late for this generation: %r", len(due), error)
        except (KafkaError, OSError) as error:  # TimeoutError is an OSError
            self._metrics.kafka_error()
            log.warning("the offsets of %s partitions are not committed yet: %r", len(due), error)
            for partition in partitions:
                if partition.tp in due and partition.uncommitted_since is None:
                    partition.uncommitted_since = time.monotonic()
        else:
            for partition in partitions:
                partition.uncommitted_since = None
                partition.committed = due.get(partition.tp, partition.committed)

    async def _committed(self, tp: TopicPartition) -> int | None:
        return cast(int | None, await self._client.committed(tp))

    async def _commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        if offsets:
            try:
                async with asyncio.timeout(self._seconds), self._lock:
                    await self._client.commit(dict(offsets))
            except (KafkaError, OSError):
                raise
            except Exception as error:  # a mistake inside of the client is no reason to end the service
                raise KafkaError(f"the client failed unexpectedly: {error!r}") from error

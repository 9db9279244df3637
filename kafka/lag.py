"""Kafka's own offsets, for the sake of lag tools: the truth is in Postgres."""

import asyncio
import logging
from collections.abc import Callable, Mapping

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError

from ..errors import PostgresUnavailable
from ..outage import Outage
from .membership import explained
from .offsets import Move, OffsetsMoved, OffsetStore
from .partition import Partition, State
from .stateless_offsets import note_of

__all__ = ["LagCommitter"]

log = logging.getLogger("sidings.consumer")

_COMMIT_SECONDS = 5.0
_PLACED = (State.READY, State.ASIDE, State.FULL)


class LagCommitter:
    """Commits the stored offsets to Kafka now and then, as a best effort, and keeps them behind gaps in the log.

    resting: True during a rebalance, and before the end.
    """

    def __init__(
        self,
        client: AIOKafkaConsumer,
        partitions: Mapping[TopicPartition, Partition],
        offsets: OffsetStore,
        resting: Callable[[], bool],
    ) -> None:
        self._client = client
        self._partitions = partitions
        self._offsets = offsets
        self._resting = resting
        self._ends: dict[Partition, int] = {}  # of idle partitions, at the last look
        self._outage = Outage(log, "Kafka could not be told of the offsets, which are stored in Postgres")

    async def run(self) -> None:
        """Commit for ever."""
        while True:
            await asyncio.sleep(_COMMIT_SECONDS)
            if not self._resting():
                await self._pass_gaps()
                await self.commit()

    async def commit(self) -> None:
        """Tell Kafka what is stored."""
        offsets = {tp: self._noted(p) for tp, p in self._partitions.items() if p.state in _PLACED}
        if not offsets:
            return
        try:
            async with asyncio.timeout(_COMMIT_SECONDS):
                await self._client.commit(offsets)
        except (CommitFailedError, IllegalStateError) as error:  # a rebalance has begun
            log.debug("offsets were not committed to Kafka: %r", error)
        except Exception as error:  # noqa: BLE001 - whatever it is: nothing depends on it
            self._outage.failed(repr(explained(error)))
        else:
            self._outage.over()

    def _noted(self, partition: Partition) -> int | tuple[int, str]:
        """With the topic's id: it may have been made anew since, and nobody has seen that yet."""
        id = self._offsets.topic_id(partition.tp)
        return partition.next_offset if id is None else (partition.next_offset, note_of(id))

    async def _pass_gaps(self) -> None:
        """Move the stored offsets of idle partitions behind a gap at their end, such as a transaction's marker: else
        it would look like lag, and like a loss once retention has deleted it."""
        before, self._ends = self._ends, {}
        for partition in list(self._partitions.values()):
            if partition.state is not State.READY or partition.items:
                continue
            end = self._ends[partition] = partition.end  # the client's position tells not who has had what is before it
            try:
                if before.get(partition) == end > partition.next_offset:
                    await self._pass_gap(partition, end)
            except (OffsetsMoved, PostgresUnavailable, asyncpg.PostgresError) as error:  # a lock that somebody holds
                log.debug("%s: not moved behind a gap: %r", partition.origin, error)

    async def _pass_gap(self, partition: Partition, end: int) -> None:
        expected = partition.next_offset
        await self._offsets.jump(Move(partition.tp, expected, end))
        if partition.next_offset == expected:
            partition.next_offset = end

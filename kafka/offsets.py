"""The stored offsets: made at assignment, moved by a compare-and-set in the handlers' transaction."""

from collections.abc import Collection, Mapping
from typing import NamedTuple
from uuid import UUID

import asyncpg
from aiokafka import TopicPartition

from ..executor import Link, PostgresSettings
from ..jobs import Transaction
from ..schema import int_array, load_sql
from .leader_epochs import LeaderEpochs
from .pauses import Pauses

__all__ = ["Move", "OffsetStore", "OffsetsMoved"]


class OffsetsMoved(Exception):
    """The stored offset of `partitions` is not what this process expected: another one has moved it."""

    def __init__(self, partitions: Collection[TopicPartition]) -> None:
        super().__init__(
            f"the stored offsets of {', '.join(f'{p.topic}/{p.partition}' for p in partitions)} have moved"
        )
        self.partitions = frozenset(partitions)


class Move(NamedTuple):
    """The stored offset of a partition goes from `expected` to `next`."""

    tp: TopicPartition
    expected: int
    next: int


class OffsetStore:
    """Reads and writes ``consumer_offset``: with each offset goes the leader's epoch of the record before it. `link`
    serves the calls outside of handlers' transactions. timelines: of Postgres, that each offset was loaded from, by a
    client before, too. pauses: told of those of topics, with each `load` and `find_reset`."""

    how_to_set = "insert the row into consumer_offset"
    how_to_delete = "`sidings consumers reset TOPIC --to earliest`, or delete the partition's row from consumer_offset"
    how_to_move = "`sidings consumers reset {topic} --partition {partition} --to {offset}`"

    def __init__(
        self,
        link: Link,
        settings: PostgresSettings,
        epochs: LeaderEpochs,
        timelines: dict[TopicPartition, str],
        pauses: Pauses,
    ) -> None:
        schema = settings.schema_name
        self._link = link
        self._leader_epochs = epochs
        self._seconds = settings.call_seconds
        self._load_sql = load_sql(__package__, "load_offsets", schema)
        self._create_sql = load_sql(__package__, "create_offsets", schema)
        self._adopt_sql = load_sql(__package__, "adopt_topic_ids", schema)
        self._advance_sql = load_sql(__package__, "advance_offsets", schema)
        self._resets_sql = load_sql(__package__, "load_resets", schema)
        # How often each partition had been reset when its offset was loaded; the compare-and-set expects it as well.
        self._resets: dict[TopicPartition, int] = {}
        self._timelines = timelines
        self._pauses = pauses
        self._lost: set[TopicPartition] = set()  # whose row the server lacks that has replaced the one it was on
        self._topic_ids: dict[TopicPartition, UUID | None] = {}
        self._epochs: dict[TopicPartition, int | None] = {}

    async def load(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The stored offsets; a partition that has none is absent. Raises `PostgresUnavailable`."""
        topics, numbers = [p.topic for p in partitions], [p.partition for p in partitions]
        asked = await self._link.fetch(self._load_sql, topics, numbers)
        if asked:
            self._pauses.told(asked[0]["paused"])
        for row in asked:
            tp = _partition_of(row)
            if row["next_offset"] is None and self._timelines.get(tp, row["timeline"]) != row["timeline"]:
                self._lost.add(tp)
            else:
                self._lost.discard(tp)
        stored = {_partition_of(row): row for row in asked if row["next_offset"] is not None}
        self._resets |= {tp: row["resets"] for tp, row in stored.items()}
        self._timelines |= {tp: row["timeline"] for tp, row in stored.items()}
        self._topic_ids |= {tp: row["topic_id"] for tp, row in stored.items()}
        self._epochs |= {tp: row["leader_epoch"] for tp, row in stored.items()}
        return {tp: row["next_offset"] for tp, row in stored.items()}

    def resets(self, partition: TopicPartition) -> int:
        """How often a person had reset the offset when it was loaded."""
        return self._resets.get(partition, 0)

    def lost(self, partition: TopicPartition) -> bool:
        """Whether a failover has lost the stored offset, as the last look has told."""
        return partition in self._lost

    def topic_id(self, partition: TopicPartition) -> UUID | None:
        """The id of the topic that the stored offset belonged to when it was loaded, None where it is not known."""
        return self._topic_ids.get(partition)

    def epoch(self, partition: TopicPartition) -> int | None:
        """The leader's epoch of the record before the offset that was loaded, None where it is not known."""
        return self._epochs.get(partition)

    async def adopt(self, ids: Mapping[TopicPartition, UUID]) -> None:
        """Store which topic the offsets belong to, where that is not known. Raises `PostgresUnavailable`."""
        ordered = sorted(ids)
        topics, partitions = [tp.topic for tp in ordered], [tp.partition for tp in ordered]
        await self._link.fetch(self._adopt_sql, topics, partitions, [ids[tp] for tp in ordered])
        self._topic_ids |= ids

    async def find_reset(self, partitions: Collection[TopicPartition]) -> list[TopicPartition]:
        """Those of these partitions whose stored offsets may be others since they were loaded: reset by a person, or by
        a failover that has lost commits. Raises `PostgresUnavailable`."""
        known = [tp for tp in partitions if tp in self._resets]
        numbers = int_array([tp.partition for tp in known])
        rows = await self._link.fetch(self._resets_sql, [tp.topic for tp in known], numbers)
        self._pauses.told(rows[0]["paused"])
        timeline: str = rows[0]["timeline"]
        found = {_partition_of(row): row["resets"] for row in rows if row["topic"]}
        reset = {tp for tp, resets in found.items() if self._resets[tp] != resets}
        return [tp for tp in known if tp in reset or self._timelines[tp] != timeline]

    async def create(self, starts: Mapping[TopicPartition, int]) -> None:
        """Store where to start, unless another process was faster. Raises `PostgresUnavailable`."""
        topics, partitions = [p.topic for p in starts], [p.partition for p in starts]
        await self._link.fetch(self._create_sql, topics, partitions, list(starts.values()))

    async def advance(self, tx: Transaction, moves: Collection[Move]) -> None:
        """Move the offsets as a part of `tx`. Raises `OffsetsMoved`, after which `tx` must not commit."""
        rows = await tx.fetch(self._advance_sql, *self._columns(moves), timeout=self._seconds)
        try:
            _demand(moves, rows)
        except OffsetsMoved:
            self._link.renew()  # it may lead to a former primary, which would go on telling the same
            raise

    async def jump(self, move: Move) -> None:
        """Move one offset on its own. Raises `OffsetsMoved`, `PostgresUnavailable`."""
        _demand([move], await self._link.fetch(self._advance_sql, *self._columns([move])))

    def _columns(self, moves: Collection[Move]) -> tuple[list[object], ...]:
        ordered = sorted(moves)
        return (
            [move.tp.topic for move in ordered],
            [move.tp.partition for move in ordered],
            [move.expected for move in ordered],
            [move.next for move in ordered],
            [self._resets[move.tp] for move in ordered],
            [self._leader_epochs.before(move.tp, move.next) for move in ordered],
        )


def _demand(moves: Collection[Move], rows: Collection[asyncpg.Record]) -> None:
    if len(rows) != len(moves):
        moved = {_partition_of(row) for row in rows}
        raise OffsetsMoved([move.tp for move in moves if move.tp not in moved])


def _partition_of(row: asyncpg.Record) -> TopicPartition:
    return TopicPartition(row["topic"], row["partition"])

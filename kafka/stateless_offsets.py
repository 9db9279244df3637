"""The offsets of stateless consumers: those of the consumer group, in Kafka."""

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, cast
from uuid import UUID

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from ..outage import Outage
from .leader_epochs import LeaderEpochs
from .membership import explained
from .metrics import ConsumerMetrics
from .offsets import Move
from .stateless_partition import StatelessPartition
from .topic_ids import ask_topic_ids, is_another

__all__ = ["GroupOffsets", "committed_of", "committed_stateless", "note_of"]

log = logging.getLogger("sidings.consumer")

_METADATA = "leader epoch {} of topic {}, all handled from {}"
_FOUND = re.compile(r"leader epoch (\d+) of topic ([^\s,]+)(?:, all handled from (\d+))?")  # the last is new
_TOPIC = re.compile(r"(?:leader epoch \d+ of )?topic ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:, .*)?")
_ANOTHER = (
    "of another topic of this name: it was made anew, or the cluster is another one; all that it has is new (where a "
    "mirror has translated the group's offsets: docs/operations.md, Another Kafka)"
)


def note_of(id: UUID) -> str:
    """What stands beside the offsets that an ordinary consumer commits for lag tools. id: of their topic."""
    return f"topic {id}"


async def committed_of(
    client: AIOKafkaConsumer, partitions: Collection[TopicPartition], ids: Mapping[TopicPartition, UUID]
) -> dict[TopicPartition, int | None]:
    """The group's offsets; None where it was committed for another topic of this name; a partition that has none is
    absent. ids: of the topics as they are now, where these are known. Raises `KafkaError`."""
    found: dict[TopicPartition, int | None] = {}
    for tp, committed in (await _committed(client, partitions)).items():
        found[tp] = committed.offset
        if is_another(_topic_in(committed.metadata), ids.get(tp)):
            log.warning("%s/%s: the committed offset %s is %s", *(tp.topic, tp.partition, committed.offset, _ANOTHER))
            found[tp] = None
    return found


async def committed_stateless(
    client: AIOKafkaConsumer, ids: Mapping[TopicPartition, UUID]
) -> dict[TopicPartition, tuple[int, int, int]]:
    """The group's offsets that a stateless consumer was the last to commit, each with the leader's epoch of the record
    before it, and from where on stateless ones have handled all. ids: of the topics as they are now. Raises
    `KafkaError`."""
    found: dict[TopicPartition, tuple[int, int, int]] = {}
    for tp, committed in (await _committed(client, ids)).items():
        words = _note_in(committed.metadata)
        if words and words[2] == str(ids[tp]):
            found[tp] = committed.offset, int(words[1]), int(words[3] or committed.offset)
    return found


async def _committed(
    client: AIOKafkaConsumer, partitions: Collection[TopicPartition]
) -> Mapping[TopicPartition, OffsetAndMetadata]:
    """With their metadata; what aiokafka 0.14 tells in public is the offset alone."""
    coordinator: Any = client._coordinator  # pyright: ignore[reportPrivateUsage]
    return cast(Mapping[TopicPartition, OffsetAndMetadata], await coordinator.fetch_committed_offsets(list(partitions)))


def _topic_in(metadata: str | None) -> UUID | None:
    """The topic that it was committed for: Kafka deletes the offsets with it, but whoever has handled something of it
    commits into the new one until that is noticed. None where it tells none."""
    found = _TOPIC.fullmatch(metadata or "")  # null, say the brokers of some
    return UUID(found[1]) if found else None


def _note_in(metadata: str | None) -> re.Match[str] | None:
    """That of a stateless consumer; None where somebody else has committed the offset."""
    return _FOUND.fullmatch(metadata or "")  # null, say the brokers of some


def _began(committed: OffsetAndMetadata) -> int:
    found = _note_in(committed.metadata)
    return int(found[3] or committed.offset) if found else committed.offset


class GroupOffsets:
    """Reads and commits the group's offsets, and as the metadata of each the leader's epoch of the record before it,
    and from where on stateless consumers have handled all. seconds: how long one commit may take.

    Kafka takes commits from the partition's owner only; one that arrives late can set an offset back, which repeats
    messages, but not forward past an unfinished one, since no such offset is ever sent.
    """

    how_to_set = "commit one for the group while no instance runs (kafka-consumer-groups --reset-offsets)"
    how_to_delete = "delete the group's offset while no instance runs (kafka-consumer-groups --delete-offsets)"
    how_to_move = (
        "set the group's offset while no instance runs "
        "(kafka-consumer-groups --reset-offsets --topic {topic}:{partition} --to-offset {offset})"
    )

    def __init__(
        self, client: AIOKafkaConsumer, epochs: LeaderEpochs, metrics: ConsumerMetrics, *, seconds: float
    ) -> None:
        self._client = client
        self._leader_epochs = epochs
        self._topic_ids: dict[str, UUID] = {}
        self._loaded_ids: dict[TopicPartition, UUID] = {}  # the same, when each offset was loaded
        self._made_anew: set[TopicPartition] = set()  # whose topics have got other ids since
        self._epochs: dict[TopicPartition, int | None] = {}
        self._began: dict[TopicPartition, int] = {}  # from where on all was handled
        self._metrics = metrics
        self._seconds = seconds
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by topic
        self._outages: dict[str, Outage] = {}

    async def load(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The committed offsets, 0 where they are of a topic that was made anew; a partition that has none is absent.
        Raises `KafkaError`, `TimeoutError`."""
        async with asyncio.timeout(self._seconds):
            self._topic_ids |= await ask_topic_ids(self._client, partitions)
            committed = await _committed(self._client, partitions)
        for tp in partitions:
            id = self._topic_ids.get(tp.topic)
            if is_another(self._loaded_ids.get(tp), id):
                self._made_anew.add(tp)
            if id is not None:
                self._loaded_ids[tp] = id
        ids = self._topic_ids
        former = {tp for tp, found in committed.items() if is_another(_topic_in(found.metadata), ids.get(tp.topic))}
        if former:
            log.warning(
                "the committed offsets of %s are %s",
                *(", ".join(f"{tp.topic}/{tp.partition} ({committed[tp].offset})" for tp in sorted(former)), _ANOTHER),
            )
        mine = {tp: found for tp, found in committed.items() if tp not in former}
        for tp in partitions:
            self._epochs[tp] = self._epoch_in(tp, mine[tp].metadata) if tp in mine else None
            self._began[tp] = _began(mine[tp]) if tp in mine else 0
        return dict.fromkeys(former | self._made_anew & set(partitions), 0) | {
            tp: found.offset for tp, found in mine.items()
        }

    def topic_id(self, partition: TopicPartition) -> UUID | None:
        """The id of the topic when its offset was loaded, None where it is not known."""
        return self._loaded_ids.get(partition)

    def epoch(self, partition: TopicPartition) -> int | None:
        """The leader's epoch of the record before the offset that was loaded, None where it is not known."""
        return self._epochs.get(partition)

    def _epoch_in(self, tp: TopicPartition, metadata: str | None) -> int | None:
        found = _note_in(metadata)
        return int(found[1]) if found and found[2] == str(self._topic_ids.get(tp.topic)) else None

    async def create(self, starts: Mapping[TopicPartition, int]) -> None:
        """Commit where to start, before anything is read: ``start="latest"`` must mean the same place the next time.
        Raises `KafkaError`, `TimeoutError`."""
        await self._commit(starts)

    async def jump(self, move: Move) -> None:
        """Commit one offset. Raises `KafkaError`, `TimeoutError`."""
        await self._commit({move.tp: move.next})  # to what has not been read: of no epoch that is known

    def lost(self, partition: TopicPartition) -> bool:
        """Not in a failover of Postgres."""
        return False

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
            await self._commit_one(topic, {tp: self._with_epoch(tp, offset) for tp, offset in due.items()})
        except (CommitFailedError, IllegalStateError) as error:  # what was done since the last commit is done again
            log.warning("the offsets of %s partitions came too late for this generation: %r", len(due), error)
        except (KafkaError, OSError) as error:  # TimeoutError is an OSError
            self._metrics.kafka_error()
            why = repr(explained(error))
            self._outages[topic].failed(why)
            for partition in partitions:
                partition.refusal = why
                if partition.uncommitted_since is None:
                    partition.uncommitted_since = time.monotonic()
        else:
            self._outages[topic].over()
            for partition in partitions:
                partition.uncommitted_since = None
                partition.committed = due[partition.tp]

    def _with_epoch(self, tp: TopicPartition, offset: int) -> int | tuple[int, str]:
        epoch, id = self._leader_epochs.before(tp, offset), self._loaded_ids.get(tp)
        return offset if epoch is None or id is None else (offset, _METADATA.format(epoch, id, self._began[tp]))

    async def _commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        failed: Exception | None = None
        for topic in {tp.topic for tp in offsets}:
            try:
                await self._commit_one(topic, {tp: offset for tp, offset in offsets.items() if tp.topic == topic})
            except (KafkaError, OSError) as error:
                failed = error
        if failed is not None:
            raise failed

    async def _commit_one(self, topic: str, offsets: Mapping[TopicPartition, int | tuple[int, str]]) -> None:
        """Of one topic: aiokafka tries some refusals again for as long as it is let, and raises one error for all."""
        try:
            async with asyncio.timeout(self._seconds), self._locks[topic]:
                await self._client.commit(dict(offsets))
        except (KafkaError, OSError):
            raise
        except Exception as error:  # a mistake inside of the client is no reason to end the service
            raise KafkaError(f"the client failed unexpectedly: {error!r}") from error

"""Which member of the consumer group gets which partitions."""

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from io import BytesIO
from itertools import chain
from typing import ClassVar, NamedTuple

from aiokafka import TopicPartition
from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyAssignorUserDataV1, StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from aiokafka.protocol.struct import Struct
from aiokafka.protocol.types import Array, Schema, String

__all__ = ["Assignor", "share"]

log = logging.getLogger("sidings.consumer")

Shares = dict[str, list[TopicPartition]]

_GOLDEN = (5**0.5 - 1) / 2


class _Unread(Struct):
    """What a member tells behind all that aiokafka's assignor knows: that, and earlier releases, read no further."""

    topics: list[str]
    SCHEMA = Schema(("topics", Array(String("utf-8"))))


class _Told(NamedTuple):
    """What a member tells. partitions: those that it has had, in `generation`; unread: topics that it joins only for
    the jobs of their partitions."""

    topics: AbstractSet[str]
    partitions: Sequence[TopicPartition] = ()
    generation: int = StickyPartitionAssignor.DEFAULT_GENERATION_ID
    unread: AbstractSet[str] = frozenset()


class Assignor(StickyPartitionAssignor):
    """aiokafka's sticky one, whose time is the square of the number of partitions: 9,000 keep the event loop of the
    member that assigns them for seconds, more of them for longer than a lease. And here members tell which of their
    topics they do not consume: they get partitions of these only where nobody else in the group consumes them.

    Its name is the same, and each reads what the other's members tell, so that either may assign to the other; so may
    an earlier release. A member that tells nothing of it counts as consuming all its topics.

    It keeps its state in its class: each client needs a class of its own, which names its `unread` topics.
    """

    unread: ClassVar[AbstractSet[str]] = frozenset()

    @classmethod
    def metadata(cls, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        """What this member tells the one that assigns."""
        told = super().metadata(topics)
        if cls.unread:
            had = told.user_data or StickyAssignorUserDataV1([], cls.DEFAULT_GENERATION_ID).encode()
            told.user_data = had + _Unread(sorted(cls.unread)).encode()
        return told

    @classmethod
    def assign(
        cls, cluster: ClusterMetadata, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        """What each member gets; called of the one that leads the group."""
        told = {member: _told(metadata) for member, metadata in members.items()}
        topics = {topic for each in told.values() for topic in each.topics}
        consumed = {topic for each in told.values() for topic in each.topics - each.unread}
        had: dict[str, set[int]] = {topic: set() for topic in topics & cluster.unauthorized_topics}
        for topic, number in chain.from_iterable(each.partitions for each in told.values()):
            if topic in had:  # it may not be seen, and this member may have started without the right to
                had[topic].add(number)
        shares = share(
            {topic: cluster.partitions_for_topic(topic) or had.get(topic, ()) for topic in topics},
            {member: each.topics - (each.unread & consumed) for member, each in told.items()},
            # Of what two have had, the later one's word counts.
            {member: told[member].partitions for member in sorted(told, key=lambda m: (told[m].generation, m))},
        )
        return {
            member: ConsumerProtocolMemberAssignment(cls.version, _by_topic(partitions), b"")
            for member, partitions in shares.items()
        }


def _told(metadata: ConsumerProtocolMemberMetadata) -> _Told:
    """Who tells nonsense has had nothing, and consumes all its topics: aiokafka raises where that decodes to nulls, and
    the group would stand still for as long as that member is there."""
    topics = frozenset(metadata.subscription)
    if not metadata.user_data:
        return _Told(topics)
    rest = BytesIO(metadata.user_data)
    try:
        had = StickyAssignorUserDataV1.decode(rest)
        partitions = [TopicPartition(topic, number) for topic, numbers in had.previous_assignment for number in numbers]
        unread = _Unread.decode(rest).topics if rest.tell() < len(metadata.user_data) else ()
        return _Told(topics, partitions, had.generation, frozenset(unread))
    except (TypeError, ValueError) as error:
        log.error("what a member of the group says it has had cannot be read: %r", error)
        return _Told(topics)


def share(
    topics: Mapping[str, Collection[int]],
    members: Mapping[str, AbstractSet[str]],
    former: Mapping[str, Sequence[TopicPartition]],
) -> Shares:
    """Share the partitions of `topics` among the `members` that subscribe to them. former: what members have had; the
    last one that had a partition keeps it, unless it has too many.

    Where all subscribe alike, no two differ by more than one, and no partition moves but for that. Otherwise, as while
    a release that consumes one more topic is rolled out, nobody has two more than another who could take one of them,
    as long as of any two topics the subscribers of one include those of the other.
    """
    owners = {partition: member for member, had in former.items() for partition in had}
    alike: dict[tuple[str, ...], list[TopicPartition]] = defaultdict(list)
    for topic in sorted(topics):
        subscribers = tuple(sorted(member for member in members if topic in members[member]))
        alike[subscribers] += [TopicPartition(topic, number) for number in topics[topic]]
    shares: Shares = {member: [] for member in members}
    for subscribers in sorted(alike, key=lambda subscribers: (len(subscribers), subscribers)):
        if subscribers:
            _deal(_mixed(alike[subscribers]), subscribers, owners, shares)
    return shares


def _mixed(partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
    """In an order in which neighbours are of all topics: what is given up together, and taken, is some of each. Each
    topic's are spread over the line, and of topics that have few, each begins elsewhere (by the golden ratio)."""
    counts = Counter(partition.topic for partition in partitions)
    first = {topic: place * _GOLDEN % 1 for place, topic in enumerate(sorted(counts))}
    return sorted(partitions, key=lambda tp: ((tp.partition + first[tp.topic]) / counts[tp.topic], tp))


def _deal(
    line: Sequence[TopicPartition], members: Sequence[str], owners: Mapping[TopicPartition, str], shares: Shares
) -> None:
    """Add `line` to the shares of these members."""
    kept: Shares = {member: [] for member in members}
    for partition in line:
        if (owner := owners.get(partition)) in kept:
            kept[owner].append(partition)
    rooms = _rooms(len(line), {m: len(shares[m]) for m in members}, {m: len(kept[m]) for m in members})
    for member in members:
        del kept[member][rooms[member] :]
    staying = {partition for partitions in kept.values() for partition in partitions}
    free = iter([partition for partition in line if partition not in staying])
    for member in members:
        new = [next(free) for _ in range(rooms[member] - len(kept[member]))]
        shares[member] += kept[member] + new


def _rooms(count: int, filled: Mapping[str, int], kept: Mapping[str, int]) -> dict[str, int]:
    """How many of `count` partitions each member gets: those that have least are filled up to one level; where it
    cannot be the same for all, those that have most to lose get one more."""
    ordered = sorted(filled, key=lambda member: (filled[member], member))
    while count + sum(filled[member] for member in ordered) < len(ordered) * filled[ordered[-1]]:
        ordered.pop()
    level, more = divmod(count + sum(filled[member] for member in ordered), len(ordered))
    ordered.sort(key=lambda member: (-filled[member] - kept[member], member))
    rooms = dict.fromkeys(filled, 0)
    return rooms | {member: level - filled[member] + (i < more) for i, member in enumerate(ordered)}


def _by_topic(partitions: Sequence[TopicPartition]) -> list[tuple[str, list[int]]]:
    numbers: dict[str, list[int]] = defaultdict(list)
    for topic, number in sorted(partitions):
        numbers[topic].append(number)
    return list(numbers.items())

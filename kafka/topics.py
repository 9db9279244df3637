"""Which partition a key belongs to: hashed as the topic's producers do, over the partition count in Postgres.

So it works while Kafka is down. The consumers write what they see of the topics' metadata; every instance reads it.
A topic that gets more partitions, or is made anew with fewer, is known by all of them to have had others before the
new count is used anywhere (docs/decisions/0012-partitions-added.md).
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Literal, NamedTuple, cast

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka import partitioner as aiokafka_partitioner

from ..errors import EnqueueError, MissingOrigin, PostgresUnavailable
from ..executor import Link, PostgresSettings, now
from ..outage import Outage
from ..schema import load_sql
from ..waiting import set_within
from .message import origin_of

__all__ = ["Partitioner", "Topics", "key_hash", "partition_for"]

log = logging.getLogger("sidings.topics")

Partitioner = Literal["murmur2", "crc32"]

_murmur2 = cast(Callable[[bytes], int], aiokafka_partitioner.murmur2)
_LOAD_SECONDS = 5.0
_UNREAD_SECONDS = 15.0  # of failing loads, before the health check complains
_LOOK_SECONDS = 1.0
_FRESH_SECONDS = 8.0  # for so long after a load, a topic that had not grown is taken for one that has not grown yet
_ANNOUNCE_SECONDS = 10.0  # from the announcement to the use of a new count: longer than what is read may be believed
_SHRUNK_SECONDS = 180.0  # longer than any client's metadata may lag behind (`KafkaSettings.metadata_seconds`)


class _Topic(NamedTuple):
    partitions: int
    partitioner: Partitioner
    former: tuple[int, ...] = ()  # counts of before, oldest first


def partition_for(key: bytes, partitions: int, partitioner: Partitioner = "murmur2") -> int:
    """The partition that a producer chooses for a key. murmur2: the default of Java and aiokafka (Kafka's
    ``BuiltInPartitioner``); crc32: librdkafka's ``consistent`` and ``consistent_random``, its default.
    ``sidings.partition_for`` in SQL does the same."""
    return key_hash(key, partitioner) % partitions


def key_hash(key: bytes, partitioner: Partitioner) -> int:
    """Of which `partition_for` takes the remainder."""
    return zlib.crc32(key) if partitioner == "crc32" else _murmur2(key) & 0x7FFFFFFF


class Topics:
    """The topics' partition counts: in Postgres, and in memory, a few seconds old at most.

    partitioners: of topics whose producers do not use murmur2.
    """

    def __init__(self, settings: PostgresSettings, partitioners: Mapping[str, Partitioner]) -> None:
        self.outage = Outage(log, "the partition counts could not be read, and what is known counts")
        self._link = Link(settings)
        self._partitioners = partitioners
        self._load_sql = load_sql(__package__, "load_topics", settings.schema_name)
        self._begun_sql = load_sql(__package__, "begun_topics", settings.schema_name)
        self._remember_sql = load_sql(__package__, "remember_topics", settings.schema_name)
        self._known: dict[str, _Topic] = {}
        self._loaded_at: float | None = None  # when the load was begun that `_known` comes from
        self._read_at: dict[tuple[str, int], float] = {}  # topic and former count: when it was first read here
        self._unwritten = Outage(log, "the partition counts could not be written")
        self._woken = asyncio.Event()
        self._shrunk: dict[str, float] = {}  # topics that have fewer partitions than is known, since when
        self._differing: set[str] = set()  # topics for which another instance has another partitioner: told of

    def has_grown(self, topic: str) -> bool:
        """Whether a key of `topic` may have jobs in another origin than its own, because partitions were added, or it
        was made anew with fewer. True also where nothing is known for sure: the answer "no" is believed for a while
        only."""
        if self._loaded_at is None or now() - self._loaded_at > _FRESH_SECONDS:
            return True
        known = self._known.get(topic)
        return known is not None and bool(known.former)

    def origins_of(self, key: bytes, topic: str) -> list[str]:
        """All origins that a key of `topic` has ever had."""
        known = self._known.get(topic)
        if known is None:
            return []
        counts = (*known.former, known.partitions)
        return [origin_of(topic, partition_for(key, count, known.partitioner)) for count in dict.fromkeys(counts)]

    def covers(self, tp: TopicPartition) -> bool:
        """Whether messages of this partition may be handled: not before its topic is known, so that they can have jobs
        at home in it, and everybody knows that the topic has grown."""
        known = self._known.get(tp.topic)
        return known is not None and tp.partition < known.partitions

    def has_shrunk(self, topic: str, partitions: int) -> bool:
        """Whether `topic` has fewer partitions than is known, and not everybody has to know that by now."""
        known = self._known.get(topic)
        if known is None or partitions >= known.partitions:
            return False
        return now() - self._read_at.get((topic, partitions), inf) < _ANNOUNCE_SECONDS

    def was_added(self, tp: TopicPartition) -> bool:
        """Whether this partition has come since the topic was first seen."""
        known = self._known.get(tp.topic)
        return known is not None and bool(known.former) and tp.partition >= known.former[0]

    async def begun(self, topics: Collection[str]) -> set[str]:
        """Those of `topics` of which an offset is stored. Raises `PostgresUnavailable`."""
        return {row["topic"] for row in await self._link.fetch(self._begun_sql, list(topics))} if topics else set()

    def origin_for(self, key: str | bytes, topic: str) -> str:
        """The origin of a key, ``topic/partition``. Raises `MissingOrigin` while the topic's partitions are unknown,
        `EnqueueError` for what is no key."""
        known = self._known.get(topic)
        if known is None:
            raise MissingOrigin(
                f"the partitions of the topic {topic!r} are not known yet (known: {', '.join(self._known) or 'none'}): "
                "the service must be running, and some instance must have consumed the topic, or named it in topics=, "
                "while Kafka was up; else, as with a consumer of your own, insert its row into sidings.topic"
            )
        raw = key.encode() if isinstance(key, str) else key
        if not isinstance(raw, bytes):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
            raise EnqueueError(f"origin_for({key!r}): give the key as its messages have it: str or bytes")
        return origin_of(topic, partition_for(raw, known.partitions, known.partitioner))

    def problems(self) -> list[str]:
        """What a health check should complain about: no other loop asks Postgres where nothing is assigned. As long as
        it has never answered, the executor tells. Any thread may call it."""
        failing = self.outage.seconds()
        if self._loaded_at is None or failing < _UNREAD_SECONDS:
            return []
        return [f"the table of topics cannot be read, for {failing:.1f} s: {self.outage.error}"]

    async def run(self) -> None:
        """Keep the memory up to date, for ever."""
        while True:
            await self.load()
            await asyncio.sleep(_LOAD_SECONDS)

    async def load(self) -> None:
        """Read what is known, if Postgres answers."""
        began = now()
        try:
            rows = await self._link.fetch(self._load_sql)
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            self.outage.failed(error)
        else:
            self.outage.over()
            self._known = {
                row["topic"]: _Topic(row["partitions"], row["partitioner"], tuple(row["former"])) for row in rows
            }
            former = {(topic, count) for topic, known in self._known.items() for count in known.former}
            self._read_at = {each: self._read_at.get(each, now()) for each in former}
            self._loaded_at = began

    def look(self) -> None:
        """The metadata may say something new."""
        self._woken.set()

    async def watch(self, client: AIOKafkaConsumer, topics: Collection[str], on_written: Callable[[], None]) -> None:
        """Write down what this client's metadata says of `topics`, whenever it says something new. For ever."""
        written: dict[str, _Topic] = {}
        while True:
            seen = {
                topic: _Topic(len(partitions), self._partitioners.get(topic, "murmur2"))
                for topic in topics
                if (partitions := client.partitions_for_topic(topic))
            }
            if (seen != written or self._is_behind(seen)) and await self._remember(seen):
                written = seen
                on_written()
            self._look_for_shrunk(seen)
            if seen == written:
                self._look_for_differing(seen)
            await set_within(self._woken, _LOOK_SECONDS)
            self._woken.clear()

    def _is_behind(self, seen: Mapping[str, _Topic]) -> bool:
        """Whether the table lacks some of these, as where a person has deleted a row, or partitions of them."""
        return any(
            name not in self._known
            or topic.partitions > self._known[name].partitions
            or topic.partitions not in (self._known[name].partitions, *self._known[name].former)
            for name, topic in seen.items()
        )

    def _look_for_shrunk(self, seen: Mapping[str, _Topic]) -> None:
        """Partitions cannot be taken away: a topic that lastingly has fewer was deleted and made anew."""
        fewer = {name for name, topic in seen.items() if topic.partitions < self._known.get(name, topic).partitions}
        since = {name: self._shrunk.get(name, now()) for name in fewer}
        for name, start in since.items():
            if start < now() - _SHRUNK_SECONDS:
                since[name] = now()  # say it again after a while
                log.error(
                    "the topic %r has %s partitions, and had %s: it was made anew. Jobs of partitions that are gone "
                    "are run by nobody, and new ones may still be sent there. Move them (`Admin.move`), let all that "
                    "waits end, then delete the topic's row from sidings.topic; the next look writes the count of now",
                    *(name, seen[name].partitions, self._known[name].partitions),
                )
        self._shrunk = since

    def _look_for_differing(self, seen: Mapping[str, _Topic]) -> None:
        """Another instance has written another partitioner than this one has. Not in ``/health``: a restart of this one
        would only write its own again."""
        differing = {
            name for name, topic in seen.items() if topic.partitioner != self._known.get(name, topic).partitioner
        }
        for name in differing - self._differing:
            log.error(
                "the partitioner of the topic %r is %r here, and %r in an instance that has connected since, which "
                "counts for all: so jobs of one group may go to two origins. Set KafkaSettings.partitioners alike "
                "in all instances; to change it, stop them all first",
                *(name, seen[name].partitioner, self._known[name].partitioner),
            )
        self._differing = differing

    async def _remember(self, seen: Mapping[str, _Topic]) -> bool:
        counts = [topic.partitions for topic in seen.values()]
        try:
            partitioners = [topic.partitioner for topic in seen.values()]
            await self._link.fetch(self._remember_sql, list(seen), counts, partitioners, _ANNOUNCE_SECONDS)
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            self._unwritten.failed(error)
            return False
        self._unwritten.over()
        await self.load()
        return True

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

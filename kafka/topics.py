"""Which partition a key belongs to: hashed as the topic's producers do, over the partition count in Postgres.

So it works while Kafka is down. The consumers write what they see of the topics' metadata; every instance reads it.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple, cast

import asyncpg
from aiokafka import AIOKafkaConsumer
from aiokafka import partitioner as aiokafka_partitioner

from ..errors import MissingOrigin, PostgresUnavailable
from ..executor import Link, PostgresSettings
from ..schema import load_sql
from .message import origin_of

__all__ = ["Partitioner", "Topics", "partition_for"]

log = logging.getLogger("sidings.topics")

Partitioner = Literal["murmur2", "crc32"]

_murmur2 = cast(Callable[[bytes], int], aiokafka_partitioner.murmur2)
_LOAD_SECONDS = 5.0
_LOOK_SECONDS = 1.0


class _Topic(NamedTuple):
    partitions: int
    partitioner: Partitioner


def partition_for(key: bytes, partitions: int, partitioner: Partitioner = "murmur2") -> int:
    """The partition that a producer chooses for a key. murmur2: the default of Java and aiokafka (Kafka's
    ``BuiltInPartitioner``); crc32: librdkafka's ``consistent`` and ``consistent_random``, its default.
    ``sidings.partition_for`` in SQL does the same."""
    if partitioner == "crc32":
        return zlib.crc32(key) % partitions
    return (_murmur2(key) & 0x7FFFFFFF) % partitions


class Topics:
    """The topics' partition counts: in Postgres, and in memory, a few seconds old at most.

    partitioners: of topics whose producers do not use murmur2.
    """

    def __init__(self, settings: PostgresSettings, partitioners: Mapping[str, Partitioner]) -> None:
        self._link = Link(settings)
        self._partitioners = partitioners
        self._load_sql = load_sql(__package__, "load_topics", settings.schema_name)
        self._remember_sql = load_sql(__package__, "remember_topics", settings.schema_name)
        self._known: dict[str, _Topic] = {}

    def origin_for(self, key: str | bytes, topic: str) -> str:
        """The origin of a key, ``topic/partition``. Raises `MissingOrigin` while the topic's partitions are unknown."""
        known = self._known.get(topic)
        if known is None:
            raise MissingOrigin(
                f"the partitions of the topic {topic!r} are not known yet (known: {', '.join(self._known) or 'none'}): "
                "the service must be running, and some instance must have consumed the topic, or named it in topics=, "
                "while Kafka was up; or insert its row into sidings.topic"
            )
        raw = key.encode() if isinstance(key, str) else key
        return origin_of(topic, partition_for(raw, known.partitions, known.partitioner))

    async def run(self) -> None:
        """Keep the memory up to date, for ever."""
        while True:
            await self.load()
            await asyncio.sleep(_LOAD_SECONDS)

    async def load(self) -> None:
        """Read what is known, if Postgres answers."""
        try:
            rows = await self._link.fetch(self._load_sql)
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            log.warning("the partition counts could not be read, going on with what is known: %s", error)
        else:
            self._known = {row["topic"]: _Topic(row["partitions"], row["partitioner"]) for row in rows}

    async def watch(self, client: AIOKafkaConsumer, topics: Collection[str]) -> None:
        """Write down what this client's metadata says of `topics`, whenever it says something new. For ever."""
        written: dict[str, _Topic] = {}
        while True:
            seen = {
                topic: _Topic(len(partitions), self._partitioners.get(topic, "murmur2"))
                for topic in topics
                if (partitions := client.partitions_for_topic(topic))
            }
            if seen != written and await self._remember(seen):
                written = seen
            await asyncio.sleep(_LOOK_SECONDS)

    async def _remember(self, seen: Mapping[str, _Topic]) -> bool:
        counts = [topic.partitions for topic in seen.values()]
        try:
            await self._link.fetch(self._remember_sql, list(seen), counts, [t.partitioner for t in seen.values()])
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            log.warning("the partition counts could not be written, trying again: %s", error)
            return False
        self._known.update(seen)
        return True

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

"""A Kafka client that reads all partitions of one topic, without a group: positions are the caller's to keep."""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, cast

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from .. import membership
from ..message import Record
from ..settings import KafkaSettings

__all__ = ["OffsetOutOfRangeError", "Reader", "Standing"]

_PARTITION_FETCH_BYTES = 4 * 1024 * 1024  # at least: while a fetch is on its way, nothing is decoded

# aiokafka does not say so.
_Ask = Callable[[list[TopicPartition]], Coroutine[Any, Any, Mapping[TopicPartition, int]]]


class Standing(NamedTuple):
    """Where reading of a partition stands. position: what is read next. end: of what is committed, as Kafka has told
    with its last answer, at `answered` (seconds since 1970); None before the first."""

    position: int
    end: int | None
    answered: float | None


class Reader:
    """Reads what is committed. All methods raise `KafkaError` and `OSError` when the client has to be made anew."""

    def __init__(self, settings: KafkaSettings, topic: str, partitions: Collection[int]) -> None:
        options: dict[str, Any] = settings.client_options() | {
            "isolation_level": "read_committed",
            "fetch_max_wait_ms": max(1, round(settings.fetch_seconds * 1000)),
            "fetch_max_bytes": settings.fetch_bytes,
            "max_partition_fetch_bytes": max(settings.partition_fetch_bytes, _PARTITION_FETCH_BYTES),
        }
        if settings.client_id is not None:
            options["client_id"] = settings.client_id
        self.partitions: frozenset[int] = frozenset()
        self._topic = topic
        self._seconds = settings.request_seconds
        self._client = AIOKafkaConsumer(**options, enable_auto_commit=False, auto_offset_reset="none")
        self.assign(partitions)

    async def connect(self, stopping: asyncio.Event) -> None:
        """Connect, unless `stopping` is set first."""
        await membership.connect(self._client, stopping, self._seconds)

    async def close(self) -> None:
        """Close the connections."""
        await membership.close(self._client)

    def assign(self, partitions: Collection[int]) -> None:
        """Read these partitions. All positions have to be sought again."""
        self.partitions = frozenset(partitions)
        self._assigned_at = time.time()
        self._client.assign(self._tps())

    def seek(self, partition: int, offset: int) -> None:
        """Read on there."""
        self._client.seek(TopicPartition(self._topic, partition), offset)

    async def begins(self) -> dict[int, int]:
        """The first offset of each partition."""
        return await self._ask(cast(_Ask, self._client.beginning_offsets))

    async def ends(self) -> dict[int, int]:
        """The next offset behind what is committed, of each partition; an open transaction is not."""
        return await self._ask(cast(_Ask, self._client.end_offsets))

    async def fetch(self, seconds: float, most: int) -> dict[int, Sequence[Record]]:
        """The next records, `most` at most; waits for them, `seconds` at most. Raises `OffsetOutOfRangeError`."""
        fetch = cast(Callable[..., Coroutine[Any, Any, Mapping[TopicPartition, list[Record]]]], self._client.getmany)
        try:
            found = await fetch(timeout_ms=round(seconds * 1000), max_records=most)
        except (KafkaError, OSError):
            raise
        except Exception as error:  # a mistake inside of the client: a new one is sure to be in order
            raise KafkaError(f"the client failed unexpectedly: {error!r}") from error
        return {tp.partition: records for tp, records in found.items()}

    async def standings(self) -> dict[int, Standing]:
        """Where each partition stands. Positions pass what has no record: markers, what was aborted or compacted."""
        found: dict[int, Standing] = {}
        for tp in self._tps():
            position: int = await self._client.position(tp)
            answered = self._client.last_poll_timestamp(tp)
            end = self._client.last_stable_offset(tp)
            found[tp.partition] = Standing(position, end, None if answered is None else answered / 1000)
        return found

    def there(self) -> set[int]:
        """The partitions that the topic has, `KafkaSettings.metadata_seconds` ago at most."""
        return set(self._client.partitions_for_topic(self._topic) or ())

    def silence(self) -> float:
        """Seconds since Kafka has said anything about the partition that it has been silent about for longest, at most
        since all were assigned. Any thread may ask."""
        try:
            answers = [self._client.last_poll_timestamp(tp) for tp in self._tps()]
        except (AssertionError, AttributeError):
            return 0.0  # assigned anew between two looks
        begun = self._assigned_at
        return time.time() - min((begun if answer is None else answer / 1000 for answer in answers), default=begun)

    def _tps(self) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition) for partition in self.partitions]

    async def _ask(self, ask: _Ask) -> dict[int, int]:
        async with asyncio.timeout(self._seconds):
            found = await ask(self._tps())
        return {tp.partition: offset for tp, offset in found.items()}

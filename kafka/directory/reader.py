"""A Kafka client that reads all partitions of one topic, without a group: positions are the caller's to keep."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast
from uuid import UUID

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError

from ...waiting import unless_set
from .. import membership
from ..brokers import go_around_hanging_brokers
from ..leader_epochs import LeaderEpochs, ask_epoch_ends
from ..message import Record
from ..settings import KafkaSettings
from ..topic_ids import ask_topic_ids
from .topic import TopicFacts, look_at

__all__ = ["Reader", "Standing"]

log = logging.getLogger("sidings.directory")

_PARTITION_FETCH_BYTES = 4 * 1024 * 1024  # at least: while a fetch is on its way, nothing is decoded

_SUSPECT_POLL_SECONDS = 0.02  # of one partition alone, for which the others wait
_REST_SECONDS = 10.0  # between looks at a record that cannot be read

# aiokafka does not say so.
_Ask = Callable[[list[TopicPartition]], Coroutine[Any, Any, Mapping[TopicPartition, int]]]


class Standing(NamedTuple):
    """Where reading of a partition stands. position: what is read next. end: of what is committed, as Kafka has told
    with its last answer, at `answered` (seconds since 1970); None before the first. tail: the end of the log, with what
    is not committed, and all that stands behind that."""

    position: int
    end: int | None
    answered: float | None
    tail: int | None = None


class Reader:
    """Reads what is committed. All methods raise `KafkaError` and `OSError` when the client has to be made anew.

    unreadable: partitions whose next record the client cannot read, and what is to be told of it. Nothing more of them
    is read until it can; the others go on.
    """

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        options: dict[str, Any] = settings.client_options() | {
            "isolation_level": "read_committed",
            "fetch_max_wait_ms": max(1, round(settings.fetch_seconds * 1000)),
            "fetch_max_bytes": settings.fetch_bytes,
            "max_partition_fetch_bytes": max(settings.partition_fetch_bytes, _PARTITION_FETCH_BYTES),
        }
        self.partitions: frozenset[int] = frozenset()
        self.unreadable: dict[int, str] = {}
        self._next: dict[int, int] = {}  # where each partition is read on; what a fetch that failed had read is lost
        self._suspects: set[int] = set()  # may have such a record, and are read alone
        self._resting: dict[int, float] = {}  # have one, and until when that is not looked at
        self._turn = 0
        self._topic = topic
        self._seconds = settings.request_seconds
        self._client = AIOKafkaConsumer(**options, enable_auto_commit=False, auto_offset_reset="none")
        go_around_hanging_brokers(self._client._client)  # pyright: ignore[reportPrivateUsage]
        self._epochs = LeaderEpochs(self._client, {})
        self._closed = asyncio.Event()
        self._contact = membership.Contact(self._client)
        self._assigned_at = 0.0
        self._answered: dict[int, tuple[float, float]] = {}  # when Kafka has last told, and when that was first seen

    async def connect(self, stopping: asyncio.Event) -> None:
        """Connect, unless `stopping` is set first."""
        await membership.connect(self._client, stopping, self._seconds)

    async def close(self) -> None:
        """Close the connections. What is asked just then ends with a `KafkaError`."""
        self._closed.set()
        await membership.close(self._client)

    async def look_at_topic(self) -> TopicFacts:
        """What Kafka says of the topic."""
        async with asyncio.timeout(self._seconds):
            return await look_at(self._client, self._topic)

    def assign(self, partitions: Collection[int]) -> None:
        """Read these partitions. All positions have to be sought again."""
        self.partitions = frozenset(partitions)
        for state in (self.unreadable, self._next, self._suspects, self._resting, self._answered):
            state.clear()
        self._assigned_at = time.monotonic()
        self._client.assign(self._tps())

    def seek(self, partition: int, offset: int, epoch: int | None) -> None:
        """Read on there, as long as the log holds what is before, up to the last of this epoch: where it was cut off
        since, `fetch` raises `OffsetOutOfRangeError`, though it may have grown again. None: it is not known."""
        self._epochs.begin(self._tp(partition), offset, epoch)
        self._client.seek(self._tp(partition), offset)
        self._next[partition] = offset

    async def begins(self) -> dict[int, int]:
        """The first offset of each partition."""
        return await self._ask(cast(_Ask, self._client.beginning_offsets))

    async def ends(self) -> dict[int, int]:
        """The next offset behind what is committed, of each partition; an open transaction is not."""
        return await self._ask(cast(_Ask, self._client.end_offsets))

    def epoch_at(self, partition: int, offset: int) -> int | None:
        """The epoch of the leader that wrote a record which was read; None where it is not known."""
        return self._epochs.before(self._tp(partition), offset + 1)

    async def epoch_ends(self, epochs: Mapping[int, int]) -> dict[int, int]:
        """Where these epochs end in their partitions' logs; nothing of old brokers."""
        async with asyncio.timeout(self._seconds):
            found = await ask_epoch_ends(self._client, {self._tp(p): epoch for p, epoch in epochs.items()})
        return {tp.partition: end for tp, end in found.items()}

    async def topic_id(self) -> UUID | None:
        """Which topic it is that has this name now; None where Kafka does not tell. Raises `KafkaError`."""
        return (await ask_topic_ids(self._client, self._tps())).get(self._topic)

    async def fetch(self, seconds: float, most: int) -> dict[int, Sequence[Record]]:
        """The next records, `most` at most; waits for them, `seconds` at most. Raises `OffsetOutOfRangeError`."""
        polled = self._whose_turn()
        if not polled:
            await asyncio.sleep(seconds)
            return {}
        try:
            waiting = self._suspects - self._resting.keys()
            found = await self._poll(polled, _SUSPECT_POLL_SECONDS if waiting else seconds, most)
        except membership.UNREADABLE as error:
            self._go_back(polled)
            if len(polled) == 1:
                return await self._one_by_one(polled[0], most)
            log.warning("directory %r: some record cannot be read, looking for it: %r", self._topic, error)
            self._suspects.update(polled)
            return {}
        if len(polled) == 1:
            self._trust(polled[0])
        return found

    async def _poll(self, partitions: Sequence[int], seconds: float, most: int) -> dict[int, Sequence[Record]]:
        fetch = cast(Callable[..., Coroutine[Any, Any, Mapping[TopicPartition, list[Record]]]], self._client.getmany)
        wanted = membership.AnyOf(self._tp(partition) for partition in partitions)
        try:
            found = await fetch(wanted, timeout_ms=round(seconds * 1000), max_records=most)
        except (KafkaError, OSError, *membership.UNREADABLE):
            raise
        except Exception as error:  # a mistake inside of the client: a new one is sure to be in order
            raise KafkaError(f"the client failed unexpectedly: {error!r}") from error
        for partition in partitions:
            self._next[partition] = await self._client.position(self._tp(partition))
        return {tp.partition: records for tp, records in found.items()}

    # -- records that cannot be read: aiokafka does not say of which partition they are -------------------------------

    def _whose_turn(self) -> Sequence[int]:
        """All that do not rest; while some are suspect, those that are not, and each of the others alone, in turns."""
        for partition in [p for p, until in self._resting.items() if until < time.monotonic()]:
            del self._resting[partition]
            self._client.resume(self._tp(partition))
        ready = [partition for partition in self.partitions if partition not in self._resting]
        suspects = [partition for partition in ready if partition in self._suspects]
        if not suspects:
            return ready
        self._turn += 1
        if self._turn % 2 and len(suspects) < len(ready):
            return [partition for partition in ready if partition not in self._suspects]
        return [suspects[self._turn // 2 % len(suspects)]]

    def _go_back(self, partitions: Iterable[int]) -> None:
        for partition in partitions:
            self._client.seek(self._tp(partition), self._next[partition])

    async def _one_by_one(self, partition: int, most: int) -> dict[int, Sequence[Record]]:
        """The records of `partition` up to one that cannot be read."""
        records: list[Record] = []
        try:
            while len(records) < most:
                found = await self._poll([partition], _SUSPECT_POLL_SECONDS, 1)
                if partition not in found:
                    break
                records += found[partition]
        except membership.UNREADABLE as error:
            self._go_back([partition])
            if not records:
                self._rest(partition, error)
        return {partition: records} if records else {}

    def _rest(self, partition: int, error: Exception) -> None:
        offset = self._next[partition]
        told = f"partition {partition} stands still: the record at offset {offset} cannot be read ({error!r})"
        if self.unreadable.get(partition) != told:
            log.error("directory %r: %s", self._topic, told)
        self.unreadable[partition] = told
        self._suspects.add(partition)
        self._resting[partition] = time.monotonic() + _REST_SECONDS
        self._client.pause(self._tp(partition))

    def _trust(self, partition: int) -> None:
        """It was read alone: is it sound?"""
        end = self._client.last_stable_offset(self._tp(partition))
        if end is not None and self._next[partition] >= end:
            self._suspects.discard(partition)
            if self.unreadable.pop(partition, None) is not None:
                log.info("directory %r: partition %s is read again", self._topic, partition)

    # -- where things stand -------------------------------------------------------------------------------------------

    async def standings(self) -> dict[int, Standing]:
        """Where each partition stands. Positions pass what has no record: markers, what was aborted or compacted."""
        found: dict[int, Standing] = {}
        for tp in self._tps():
            position: int = await self._client.position(tp)
            answered = self._hear(tp.partition)
            end = self._client.last_stable_offset(tp)
            tail = self._client.highwater(tp)
            found[tp.partition] = Standing(position, end, None if answered is None else answered / 1000, tail)
        return found

    def there(self) -> set[int]:
        """The partitions that the topic has, `KafkaSettings.metadata_seconds` ago at most. To be asked every second."""
        self._contact.check()
        return set(self._client.partitions_for_topic(self._topic) or ())

    @property
    def lost_since(self) -> float | None:
        """Since when no broker has answered (`time.monotonic`), as far as `there` has seen; None: one has."""
        return self._contact.lost_since

    @property
    def why_silent(self) -> str:
        """As `Contact.silence`."""
        return self._contact.silence(self._tps())

    def silence(self) -> float:
        """Seconds since Kafka has said anything about the partition that it has been silent about for longest, at most
        since all were assigned; of those that are asked about. Any thread may ask."""
        try:
            for partition in (asked := [partition for partition in self.partitions if partition not in self._resting]):
                self._hear(partition)
        except (AssertionError, AttributeError):
            return 0.0  # assigned anew between two looks
        begun, now, heard = self._assigned_at, time.monotonic(), dict(self._answered)
        return now - min((heard[partition][1] if partition in heard else begun for partition in asked), default=now)

    def _hear(self, partition: int) -> int | None:
        """When Kafka has last told of it, in milliseconds since 1970, by a clock that somebody may set: how long ago
        that is, only the other one tells."""
        answered: int | None = self._client.last_poll_timestamp(self._tp(partition))
        if answered is not None and answered != self._answered.get(partition, (None,))[0]:
            self._answered[partition] = answered, time.monotonic()
        return answered

    def _tp(self, partition: int) -> TopicPartition:
        return TopicPartition(self._topic, partition)

    def _tps(self) -> list[TopicPartition]:
        return [self._tp(partition) for partition in self.partitions]

    async def _ask(self, ask: _Ask) -> dict[int, int]:
        async with asyncio.timeout(self._seconds):
            found = await unless_set(self._closed, ask(self._tps()))  # a client that is closed may leave it for ever
        if found is None:
            raise KafkaConnectionError("the client was closed meanwhile")
        return {tp.partition: offset for tp, offset in found.items()}

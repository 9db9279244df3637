"""Reads the topic: from the beginning (or from where the store stands) to the barrier, and on for ever."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar, cast

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from ...waiting import set_within
from .. import membership
from ..message import Record
from ..settings import KafkaSettings
from .callbacks import Callbacks
from .progress import Progress
from .rows import BadRecord, Change, Row, Rows, Unreadable
from .storage import Batch, Identity, Kept, Mark, Plan, Storage
from .topic import TopicFacts, look_at

__all__ = ["Follower"]

log = logging.getLogger("sidings.directory")

T = TypeVar("T")

_POLL_SECONDS = 0.2  # also how late a position is seen to have passed a transaction's marker
_LOADING_POLL_SECONDS = 0.02  # the same, while somebody waits for it
_CHUNK_RECORDS = 1_000  # decoded without a pause, some 5 ms
_PARTITION_FETCH_BYTES = 4 * 1024 * 1024  # at least: a fetch is awaited for each, and handled one by one
_LOOK_SECONDS = 1.0  # between looks for new partitions
_REPORT_SECONDS = 5.0
_SYNC_SECONDS = 10.0  # between notes in the store that nothing is missing
_MISSING_SECONDS = 2.0  # between looks for a topic that does not exist
_MAX_PAUSE_SECONDS = 10.0
_MAX_BAD = 1_000
_TOMBSTONE_SECONDS = 86_400.0  # Kafka's default, where it does not tell
_ABSENT_SECONDS = 60.0  # a shorter absence is no absence


class Follower(Generic[T]):
    """Keeps `storage` equal to `topic`. Counts are since the start."""

    def __init__(
        self,
        topic: str,
        settings: KafkaSettings,
        rows: Rows[T],
        storage: Storage[T],
        callbacks: Callbacks[T],
        on_loaded: Callable[[], None],
    ) -> None:
        self.topic = topic
        self.progress = Progress()
        self.bad: dict[Row, BadRecord] = {}
        self.stored = self.deleted = self.refused = self.rebuilds = 0
        self.contact = asyncio.Event()  # Kafka has answered once
        self.loaded = False
        self.trouble: str | None = "it has not reached Kafka yet"
        self.client: AIOKafkaConsumer | None = None
        self._settings = settings
        self._rows = rows
        self._storage = storage
        self._callbacks = callbacks
        self._on_loaded = on_loaded
        self._stopping = asyncio.Event()
        self._moved = asyncio.Event()
        self._kept: Kept | None = None
        self._identity: Identity | None = None
        self._marks: dict[int, Mark] = {}
        self._expected: dict[int, Mark] = {}  # what stands first where reading goes on, if it is still the same log
        self._seen: set[Row] | None = None  # while the topic is read again: rows that are still there
        self._synced: dict[int, float] = {}
        self._synced_at = 0.0  # when nothing was missing
        self._noted_at = 0.0
        self._tombstone_seconds = _TOMBSTONE_SECONDS
        self._reported_at = 0.0
        self._failures = 0

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow until `stop`; Kafka may come and go. Raises `StorageError`."""
        plan = Plan(self.topic, self._rows.derived, self._rows.decode, self._rows.key_of)
        self._kept = await self._storage.open(plan)
        try:
            while not self._stopping.is_set():
                try:
                    if (facts := await self._find_topic()) is not None:
                        await self._connect(facts)
                except (KafkaError, OSError) as error:  # TimeoutError is an OSError
                    self.trouble = f"{error!r}"
                    log.warning("directory %r: Kafka: %r; connecting again", self.topic, error)
                    self._failures = min(self._failures + 1, 10)
                    pause = random.uniform(0.02, min(_MAX_PAUSE_SECONDS, 0.1 * 2**self._failures))
                    await set_within(self._stopping, pause)
        finally:
            await self._storage.close()

    def stop(self) -> None:
        """`run` returns soon."""
        self._stopping.set()

    async def wait_for(self, wanted: Mapping[int, int]) -> None:
        """Return when all positions are there."""
        while not self.progress.has(wanted):
            await self._moved.wait()

    async def end_offsets(self) -> dict[int, int]:
        """The end of each partition, now; waits for a connection."""
        while (client := self.client) is None:
            await self._moved.wait()
        return await self._ask(client.end_offsets, [TopicPartition(self.topic, p) for p in self.progress.positions])

    def problems(self, silent_seconds: float) -> list[str]:
        """What a health check should complain about."""
        client = self.client
        if client is None or self.trouble is not None:
            return [self.trouble or "it is connecting"]
        try:
            polled = [client.last_poll_timestamp(TopicPartition(self.topic, p)) for p in list(self.progress.positions)]
        except (AssertionError, AttributeError):
            return []  # assigned anew between two looks
        silence = time.time() - min((stamp / 1000 for stamp in polled if stamp is not None), default=time.time())
        return [f"Kafka has not answered for {silence:.0f} s"] if silence > silent_seconds else []

    async def _find_topic(self) -> TopicFacts | None:
        """What Kafka says of the topic. None: it does not exist, or may not be seen."""
        async with asyncio.timeout(self._settings.request_seconds):
            facts = await look_at(self._settings, self.topic)
        self.contact.set()
        if facts.partitions:
            if facts.compacted is False and self._identity is None:
                log.warning(
                    "the topic %r is not compacted: Kafka forgets its old rows with time, and a directory that starts "
                    "later will not have them; set cleanup.policy=compact",
                    self.topic,
                )
            if facts.tombstone_seconds is not None:
                self._tombstone_seconds = facts.tombstone_seconds
            return facts
        trouble = f"there is no topic {self.topic!r}, or no right to see it: create it, with cleanup.policy=compact"
        if self.trouble != trouble:
            log.warning("%s", trouble)
        self.trouble = trouble
        await set_within(self._stopping, _MISSING_SECONDS)
        return None

    async def _connect(self, facts: TopicFacts) -> None:
        options = self._settings.client_options() | {
            "isolation_level": "read_committed",
            "fetch_max_wait_ms": max(1, round(self._settings.fetch_seconds * 1000)),
            "fetch_max_bytes": self._settings.fetch_bytes,
            "max_partition_fetch_bytes": max(self._settings.partition_fetch_bytes, _PARTITION_FETCH_BYTES),
        }
        if self._settings.client_id is not None:
            options["client_id"] = self._settings.client_id
        client = AIOKafkaConsumer(**options, enable_auto_commit=False, auto_offset_reset="none")
        client.assign([TopicPartition(self.topic, partition) for partition in facts.partitions])
        try:
            await membership.connect(client, self._stopping, self._settings.request_seconds)
            if not self._stopping.is_set():
                await self._follow(client, facts)
        finally:
            self.client = None
            await membership.close(client)

    # -- reading ----------------------------------------------------------------------------------------------------

    async def _follow(self, client: AIOKafkaConsumer, facts: TopicFacts) -> None:
        await self._place(client, facts)
        self.client, self.trouble, self._failures = client, None, 0
        self._wake()
        looked_at = time.monotonic()
        while not self._stopping.is_set():
            seconds = _POLL_SECONDS if self.loaded and self._seen is None else _LOADING_POLL_SECONDS
            try:
                fetched = await client.getmany(timeout_ms=round(seconds * 1000), max_records=_CHUNK_RECORDS)
            except OffsetOutOfRangeError as error:
                fetched = {}
                await self._start_over(client, f"its log no longer has what comes next ({error})")
            if (reason := self._differs(fetched)) is not None:
                await self._start_over(client, reason)
                continue
            await self._apply(client, fetched)
            if self.progress.reached and (not self.loaded or self._seen is not None):
                await self._finish()
            elif self.loaded:
                await self._note_synced(client)
            if (now := time.monotonic()) - looked_at > _LOOK_SECONDS:
                looked_at = now
                await self._look_around(client)
            await asyncio.sleep(0)  # what has been fetched is returned at once: others must have their turn

    async def _place(self, client: AIOKafkaConsumer, facts: TopicFacts) -> None:
        """Decide where to read on, and what is to be reached."""
        tps = [TopicPartition(self.topic, partition) for partition in facts.partitions]
        begins, ends = await self._ask(client.beginning_offsets, tps), await self._ask(client.end_offsets, tps)
        former, self._identity = self._identity, Identity(self.topic, facts.cluster, self._rows.describe())
        kept, self._kept = self._kept, None
        if kept is not None:  # the first time
            former = kept.identity
            self.progress.positions, self._marks = dict(kept.positions), dict(kept.marks)
            self.bad, self._synced_at = dict(kept.bad), kept.synced_at
        if former is None:
            await self._storage.reset(self._identity)
            self._synced_at = time.time()
        elif (reason := _other(former, self._identity) or self._why_not(begins, ends)) is not None:
            await self._begin_again(begins, ends, reason)
        self.progress.positions = dict(begins) | self.progress.positions
        self.progress.ends = dict(ends)
        if self.progress.barrier is None:
            self.progress.barrier = dict(ends)
        self._seek(client, begins)

    def _why_not(self, begins: Mapping[int, int], ends: Mapping[int, int]) -> str | None:
        """Why the rows cannot be those of this log; None where they can."""
        positions = self.progress.positions
        if gone := sorted(positions.keys() - ends.keys()):
            return f"the topic has no partition {gone[0]} any more: it was made anew"
        for partition, position in positions.items():
            if position > ends[partition]:
                return f"partition {partition} ends at {ends[partition]}, before {position}: the topic was made anew"
            if position < begins[partition]:
                return f"partition {partition} begins at {begins[partition]}, after {position}: the rest is gone"
        if positions and (age := time.time() - self._synced_at) > self._tombstone_seconds:
            return (
                f"it is {age:.0f} s behind, and Kafka keeps tombstones for {self._tombstone_seconds:.0f} s "
                "(delete.retention.ms): it may have missed deletions"
            )
        return None

    def _differs(self, fetched: Mapping[TopicPartition, Sequence[Record]]) -> str | None:
        """Why the log is not the one that was read before; None where nothing tells."""
        for tp, records in fetched.items() if self._expected else ():
            expected = self._expected.pop(tp.partition, None)
            if expected is not None and records[0].offset == expected.offset:
                found = records[0].timestamp
                if found != expected.timestamp_ms:
                    return f"partition {tp.partition} has another record at {expected.offset}: the topic was made anew"
        return None

    def _seek(self, client: AIOKafkaConsumer, begins: Mapping[int, int]) -> None:
        """Read on at the last record that was applied, which is applied again: it tells whether the log is the same."""
        self._expected = dict(self._marks)
        for partition, position in self.progress.positions.items():
            mark = self._marks.get(partition)
            first = position if mark is None else max(mark.offset, begins.get(partition, 0))
            client.seek(TopicPartition(self.topic, partition), first)

    async def _apply(self, client: AIOKafkaConsumer, fetched: Mapping[TopicPartition, Sequence[Record]]) -> None:
        changes, bad = self._rows.read_all(chain.from_iterable(fetched.values())) if fetched else ([], [])
        positions = await self._positions(client)
        marks = {tp.partition: Mark(records[-1].offset, records[-1].timestamp) for tp, records in fetched.items()}
        changed = self._note_bad(changes, bad)
        noting = time.monotonic() - self._noted_at > _SYNC_SECONDS
        moved = positions != self.progress.positions
        if not (moved or noting or fetched):
            return
        batch = Batch(changes, positions, marks, dict(self.bad) if changed else None, self._synced_at)
        before = self._callbacks.before(self._storage, changes) if self.loaded else {}
        await self._storage.apply(batch)
        self._noted_at = time.monotonic()
        self._marks.update(marks)
        self.progress.positions.update(positions)
        deleted = sum(1 for change in changes if change[2] is None)
        self.deleted += deleted
        self.stored += len(changes) - deleted
        self.refused += len(bad)
        if self._seen is not None:
            self._seen.update(change[0] for change in changes)
            self._seen.update(row for _, row, _ in bad if row is not None)
        if moved:
            self._wake()
        self._callbacks.after(self._storage, before)
        self._report()

    async def _positions(self, client: AIOKafkaConsumer) -> dict[int, int]:
        """The position of each partition, and with it what Kafka has said of its end."""
        positions: dict[int, int] = {}
        for partition in self.progress.positions:
            tp = TopicPartition(self.topic, partition)
            position = positions[partition] = max(await client.position(tp), self.progress.positions[partition])
            end, polled_ms = client.last_stable_offset(tp), client.last_poll_timestamp(tp)
            if end is not None and polled_ms is not None:
                self.progress.ends[partition] = end
                if position >= end:
                    self._synced[partition] = polled_ms / 1000
        return positions

    async def _note_synced(self, client: AIOKafkaConsumer) -> None:
        """Remember when nothing was missing; who was away for too long has missed deletions."""
        synced = min((self._synced.get(partition, 0.0) for partition in self.progress.positions), default=0.0)
        absent = synced - self._synced_at
        if self._seen is None and absent > max(self._tombstone_seconds, _ABSENT_SECONDS):
            await self._start_over(
                client,
                f"it was {absent:.0f} s behind, and Kafka keeps tombstones for {self._tombstone_seconds:.0f} s "
                "(delete.retention.ms)",
            )
        elif self._seen is None and absent > 0:
            self._synced_at = synced

    async def _look_around(self, client: AIOKafkaConsumer) -> None:
        """Take up partitions that have been added."""
        known = client.partitions_for_topic(self.topic) or set()
        added = sorted(known - self.progress.positions.keys())
        if not added:
            return
        log.info("directory %r: partitions were added: %s", self.topic, ", ".join(map(str, added)))
        tps = [TopicPartition(self.topic, partition) for partition in known | self.progress.positions.keys()]
        client.assign(tps)
        begins = await self._ask(client.beginning_offsets, tps)
        self.progress.positions |= {partition: begins[partition] for partition in added}
        self._seek(client, begins)

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    # -- beginning again --------------------------------------------------------------------------------------------

    async def _start_over(self, client: AIOKafkaConsumer, reason: str) -> None:
        """Read everything again, with this client."""
        tps = [TopicPartition(self.topic, partition) for partition in self.progress.positions]
        begins, ends = await self._ask(client.beginning_offsets, tps), await self._ask(client.end_offsets, tps)
        await self._begin_again(begins, ends, reason)
        self._seek(client, begins)

    async def _begin_again(self, begins: Mapping[int, int], ends: Mapping[int, int], reason: str) -> None:
        """Forget the positions. Rows of a directory that is in use stay until it is known which of them are gone."""
        assert self._identity is not None
        self.rebuilds += 1
        log.warning("directory %r is built anew: %s", self.topic, reason)
        if self.loaded:
            self._seen = set()
            await self._storage.apply(Batch(positions=begins, synced_at=0.0))  # a kill from now on begins again, too
        else:
            await self._storage.reset(self._identity)
            self.bad.clear()
        self._marks.clear()
        self._synced.clear()
        self._synced_at = time.time()
        self.progress.positions = dict(begins)
        self.progress.barrier = dict(ends)

    async def _finish(self) -> None:
        """The barrier is reached."""
        if self._seen is not None:
            gone = [row for row in self._storage.rows() if row not in self._seen]
            changes: list[Change[T]] = [(row, None, None, None) for row in gone]
            before = self._callbacks.before(self._storage, changes)
            await self._storage.apply(Batch(changes, synced_at=self._synced_at))
            self._callbacks.after(self._storage, before)
            self._seen = None
            log.info("directory %r is built anew: %s rows were gone", self.topic, len(gone))
        if not self.loaded:
            self.loaded = True
            self._on_loaded()

    async def _ask(self, offsets: Callable[[list[TopicPartition]], Any], tps: list[TopicPartition]) -> dict[int, int]:
        async with asyncio.timeout(self._settings.request_seconds):
            found = cast(Mapping[TopicPartition, int], await offsets(tps))
        return {tp.partition: offset for tp, offset in found.items()}

    # -- what is told -----------------------------------------------------------------------------------------------

    def _note_bad(self, changes: Sequence[Change[T]], bad: Sequence[Unreadable]) -> bool:
        """Keep what is wrong now: a good record of a row ends the row's error. Returns whether that has changed."""
        if not bad and not self.bad:
            return False
        good = {change[0]: index for index, change in enumerate(changes)}
        ended = [row for row in self.bad if row in good]
        for row in ended:
            del self.bad[row]
        for index, row, record in bad:
            if row is None or good.get(row, -1) < index:
                self.bad[f"{record.partition}/{record.offset}" if row is None else row] = record
        while len(self.bad) > _MAX_BAD:
            del self.bad[next(iter(self.bad))]
        if bad:
            first = bad[0][2]
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            log.error(
                "directory %r: the record at partition %s offset %s cannot be applied, its row stays as it is%s: %s",
                *(self.topic, first.partition, first.offset, more, first.reason),
            )
        return bool(bad or ended)

    def _report(self) -> None:
        """Say now and then how far the load is."""
        if self.loaded or (now := time.monotonic()) - self._reported_at < _REPORT_SECONDS:
            return
        if self._reported_at:
            barrier = self.progress.barrier
            log.info(
                "directory %r: %.0f %% loaded: %s",
                *(self.topic, 100 * self.progress.fraction, self.progress.describe(barrier)),
            )
        self._reported_at = now


def _other(kept: Identity | None, wanted: Identity) -> str | None:
    """Why rows of `kept` are of no use for `wanted`; None where they are."""
    if kept is None:
        return "it is new"
    if kept.topic != wanted.topic:
        return f"it is of the topic {kept.topic!r}"
    if kept.cluster != wanted.cluster:
        return f"it is of another Kafka cluster, {kept.cluster}"
    return None if kept.reading == wanted.reading else "the model, key=, active= or decoder= was another one"

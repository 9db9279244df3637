"""Reads the topic: from the beginning (or from where the store stands) to the barrier, and on for ever."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar, cast

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError, TopicAuthorizationFailedError

from ...collector import CollectorRest
from ...errors import DirectoryBehind
from ...jobs import Snooze
from ...jobs.retry import asked_seconds
from ...legible import legible
from ...outage import Outage
from ...waiting import set_within, unless_set
from ..calling import puts_off, text_of
from ..message import Record
from ..settings import KafkaSettings
from ..topic_ids import is_another
from .callbacks import Callbacks
from .completeness import TOMBSTONE_SECONDS, Completeness
from .faults import Faults
from .progress import Progress
from .reader import Reader
from .rows import BadRecord, Change, Row, Rows
from .same_log import SameLog, outside
from .storage import Batch, Identity, Kept, Mark, Plan, Storage
from .topic import TopicFacts

__all__ = ["Follower"]

log = logging.getLogger("sidings.directory")

T = TypeVar("T")

_POLL_SECONDS = 0.2  # also how late a position is seen to have passed a transaction's marker
_LOADING_POLL_SECONDS = 0.02  # the same, while somebody waits for it
_CHUNK_RECORDS = 1_000  # decoded without a pause, some 5 ms
_LOOK_SECONDS = 1.0  # between looks for new partitions
_STEADY_SECONDS = 5.0  # a connection that lasts so long is sound
_REPORT_SECONDS = 5.0
_NOTE_SECONDS = 10.0  # between notes in the store that nothing is missing
_MISSING_SECONDS = 1.0  # between looks for a topic that does not exist
_MAX_PAUSE_SECONDS = 10.0


class Follower(Generic[T]):
    """Keeps `storage` equal to `topic`. on_loaded: called once, when the load has ended."""

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
        self._outage = Outage(log, f"directory {topic!r}: the connection to Kafka failed")
        self._put_off = Outage(log, f"directory {topic!r}: records could not be decoded yet")
        self.faults = Faults(topic)
        self.stored = self.deleted = self.rebuilds = 0  # since the start
        self.contact = asyncio.Event()  # Kafka has answered once
        self.trouble: str | None = "it has not reached Kafka yet"
        self.failure = self.trouble  # the last trouble
        self.reader: Reader | None = None
        self.failing_since: float | None = None  # without a connection that lasts
        self.ended = False
        self._cuts = 0  # so often a log was cut off while it was read
        self._settings = settings
        self._rows = rows
        self._storage = storage
        self._callbacks = callbacks
        self._on_loaded = on_loaded
        self._collector = CollectorRest()
        self._loaded = False
        self._stopping = asyncio.Event()
        self._moved = asyncio.Event()
        self._kept: Kept | None = None  # of the store, until it is compared with the log
        self._identity: Identity | None = None
        self._log = SameLog()
        self._completeness = Completeness(topic)
        self._again: dict[Row, Change[T]] | None = None  # while the topic is read again: what it says of each row
        self._unreadable: set[Row] = set()  # the same: rows that stay as they are
        self._last_barrier = False  # it was taken when the first one had been reached
        self._noted_at = 0.0
        self._refused: set[tuple[int, int]] = set()  # records of the store that cannot be read any more
        self._refused_inside: set[tuple[int, int]] = set()  # places of this log that Kafka has refused all the same
        self._reported_at = time.monotonic()
        self._failures = 0
        self._warned = False  # of keys of two kinds
        self._from_file = False  # what it holds is of a life before, and only what came since was read
        self._told_of_none = False  # that none of the rows is good

    # -- life -------------------------------------------------------------------------------------------------------

    @property
    def stale_seconds(self) -> float:
        """How long ago Kafka last said that nothing was missing; 0 until the load has ended."""
        return self._completeness.stale_seconds if self._loaded else 0.0

    async def run(self) -> None:
        """Follow until `stop`; Kafka may come and go. Raises `StorageError`."""
        self.failing_since, opened = time.monotonic(), False
        try:
            plan = Plan(self.topic, self._rows.derived, self._kept_value, self._rows.key_of)
            self._kept = await self._storage.open(plan)
            opened = True
            self._from_file = self._kept.identity is not None
            self._log.topic_id = self._kept.topic_id
            while not self._stopping.is_set():
                try:
                    await self._connect()
                except Snooze as snooze:  # of a decoder: what was not applied is read again
                    self.failure = self.trouble = f"a record cannot be decoded yet: {text_of(snooze)}"
                    self._put_off.failed(text_of(snooze))
                    self.failing_since = self.failing_since or time.monotonic()
                    await set_within(self._stopping, max(asked_seconds(snooze) or 0.0, _POLL_SECONDS))
                except (KafkaError, OSError) as error:  # TimeoutError is an OSError
                    self.failure = self.trouble = _why(error)
                    self._outage.failed(repr(error))
                    self._failures = min(self._failures + 1, 10)
                    self.failing_since = self.failing_since or time.monotonic()
                    pause = random.uniform(0.02, min(_MAX_PAUSE_SECONDS, 0.1 * 2**self._failures))
                    await set_within(self._stopping, pause)
        finally:
            self.ended = True
            self._wake()
            if opened:  # else it may be another directory's
                await self._storage.close()

    def stop(self) -> None:
        """`run` returns soon."""
        self._stopping.set()

    async def wait_for(self, wanted: Mapping[int, int]) -> bool:
        """Return True when all positions are there, and False where they were of another log: the topic has been made
        anew meanwhile, or cut off, has been read anew, and ends before. Raises `DirectoryBehind` when nobody reads any
        more."""
        rebuilds, cuts, topic_id, tails = self.rebuilds, self._cuts, self._log.topic_id, dict(self.progress.tails)
        while self._again is not None or not self.progress.has(wanted):
            built_anew = self.rebuilds > rebuilds
            # The log may be the same, where the file was no good or deletions were missed: it may still come so far.
            another = is_another(topic_id, self._log.topic_id) or not self.progress.may_have(tails)
            replaced = (built_anew and another) or self._cuts > cuts
            if replaced and not self._loading and not self.progress.may_have(wanted):
                return False
            await self._move()
        return True

    def missing(self, wanted: Mapping[int, int] | None) -> str:
        """What `wait_for` waits for, for a person."""
        if self._again is not None:
            return f"its topic is read again: {self.progress.describe(self.progress.barrier)}"
        return self.progress.describe(wanted)

    async def end_offsets(self) -> dict[int, int]:
        """The end of each partition, now; waits for Kafka. Raises `DirectoryBehind` when nobody reads any more."""
        while True:
            if (reader := self.reader) is None:
                await self._move()
                continue
            try:
                return await reader.ends()
            except (KafkaError, OSError) as error:
                log.warning("directory %r: its end offsets are asked again: %r", self.topic, error)
                await set_within(self._moved, 1.0)

    async def _move(self) -> None:
        if self.ended:
            raise DirectoryBehind(f"directory {self.topic!r} is read no more: it has ended")
        await self._moved.wait()

    async def _find_topic(self, reader: Reader) -> TopicFacts | None:
        """What Kafka says of the topic. None: it does not exist, or may not be seen; or the directory stops."""
        if (facts := await unless_set(self._stopping, reader.look_at_topic())) is None:
            return None  # it stops
        self.contact.set()
        if facts.partitions:
            if facts.policy not in (None, "compact") and self._identity is None:
                log.warning(
                    "the topic %r has cleanup.policy=%s: Kafka forgets its old rows with time, and a "
                    "directory that starts later will not have them; set cleanup.policy=compact",
                    *(self.topic, facts.policy),
                )
            known = facts.tombstone_seconds
            self._completeness.tombstone_seconds = TOMBSTONE_SECONDS if known is None else known
            return facts
        trouble = f"there is no topic {self.topic!r}, or no right to see it: create it, with cleanup.policy=compact"
        if self.trouble != trouble:
            log.warning("%s", trouble)
        self.failure = self.trouble = trouble
        await set_within(self._stopping, _MISSING_SECONDS)
        return None

    async def _connect(self) -> None:
        reader = Reader(self._settings, self.topic)
        try:
            await reader.connect(self._stopping)
            if not self._stopping.is_set() and (facts := await self._find_topic(reader)) is not None:
                reader.assign(facts.partitions)
                await self._place(reader, facts.cluster)
                self.reader, self.trouble = reader, None
                self._wake()
                await self._follow(reader)
        except (KafkaError, OSError) as error:  # told before the reader is closed, which may take seconds
            self.failure = _why(error)
            self.failing_since = self.failing_since or reader.lost_since
            raise
        finally:
            self._collector.resume()
            self.reader = None
            await reader.close()

    # -- reading ----------------------------------------------------------------------------------------------------

    async def _follow(self, reader: Reader) -> None:
        connected_at = looked_at = time.monotonic()
        while not self._stopping.is_set():
            try:
                seconds = _LOADING_POLL_SECONDS if self._loading else _POLL_SECONDS
                fetched = await unless_set(self._stopping, reader.fetch(seconds, most=_CHUNK_RECORDS))
            except OffsetOutOfRangeError as error:
                await self._go_on_after(reader, error)
                continue
            if fetched is None:
                return
            if not self._loading and self._log.in_doubt(fetched):
                self._seek(reader, {})
                continue
            if self._loading and fetched:
                self._collector.rest()
            else:
                self._collector.resume(if_idle=self._loading)
            if (reason := self._log.differs(fetched, self.progress.positions)) is not None:
                await self._start_over(reader, reason)
                continue
            await self._apply(reader, fetched)
            if not self._loading:
                await self._remember_completeness(reader)
            elif self.progress.reached and self._is_last_barrier() and not await self._takes_none(reader):
                await self._finish()
            self._report()
            if time.monotonic() - looked_at > _LOOK_SECONDS:
                looked_at = time.monotonic()
                if looked_at - connected_at > _STEADY_SECONDS:
                    self.failing_since, self._failures = None, 0
                    self._outage.over()
                    self._put_off.over()
                await self._take_up_new_partitions(reader)
                if self._loading and self.progress.beyond_the_log:  # asked for, as a fetch may tell an older end
                    self._cuts += self.progress.lower_barrier(await reader.ends())
                if (reason := await self._log.look(reader)) is not None:
                    await self._start_over(reader, reason)
            await asyncio.sleep(0)  # a fetch that is at hand is returned at once: others must have their turn

    @property
    def _loading(self) -> bool:
        return not self._loaded or self._again is not None

    def _is_last_barrier(self) -> bool:
        """Compaction may have taken, between two fetches, what a row was at the start, for the sake of a younger record
        behind the barrier. Until that is read, the row is older than it was: so all that has come meanwhile is. That
        record lies before the end which Kafka told with the fetch that passed the gap; to ask for it would take until
        the fetches that are on their way have waited in vain for more."""
        if not self._last_barrier and self.progress.barrier is not None:
            self._last_barrier = True
            ends = self.progress.ends
            self.progress.barrier = {p: max(end, ends.get(p, 0)) for p, end in self.progress.barrier.items()}
        return self.progress.reached

    async def _takes_none(self, reader: Reader) -> bool:
        """Whether rows are bad, none is good, and the model takes none of all that was read, not of rows that are off
        either: likely it does not fit them. A directory that is ready without them lets a deployment go through after
        which nobody has any. So it follows on, until that is no more so. Records that tell no row do not count: nothing
        would ever clear them."""
        bad, first = self.faults.of_rows()
        if self._loaded or first is None or self._rows.fits or len(self._storage):
            return False
        if self._from_file:
            await self._start_over(reader, "rows are bad, none is good, and nothing is known of those that are off")
            return True
        self.trouble = (
            f"none of its rows is good ({bad} bad), the first at partition {first.partition} offset "
            f"{first.offset}: {legible(first.reason)}. Where the model does not fit them: give its new fields a "
            "default. Else publish a good row, or the bad ones anew, or tombstones for them"
        )
        if not self._told_of_none:
            self._told_of_none = True
            log.error("directory %r is not ready: %s", self.topic, self.trouble)
        return True

    async def _apply(self, reader: Reader, fetched: Mapping[int, Sequence[Record]]) -> None:
        changes, bad = self._rows.read_all(chain.from_iterable(fetched.values()))
        self._warn_of_mixed_keys()
        positions = await self._look_at_positions(reader)
        moved = positions != self.progress.positions
        if not (moved or fetched or time.monotonic() - self._noted_at > _NOTE_SECONDS):
            return
        lasts = {partition: records[-1] for partition, records in fetched.items()}
        marks = {p: Mark(last.offset, last.timestamp, reader.epoch_at(p, last.offset)) for p, last in lasts.items()}
        faults = self.faults.note(changes, bad)
        if self._again is None:
            await self._change(Batch(changes, positions, marks, faults, self._completeness.at, self._log.topic_id))
        else:  # rows that are in use do not go back to what they were once
            self._again.update((change[0], change) for change in changes)
            self._unreadable.update(row for _, row, _ in bad if row is not None)
        self._noted_at = time.monotonic()
        self._log.marks.update(marks)
        self.progress.positions = positions
        deleted = sum([change[2] is None for change in changes])
        self.deleted += deleted
        self.stored += len(changes) - deleted
        if moved:
            self._wake()

    def _warn_of_mixed_keys(self) -> None:
        if self._rows.mixed and not self._warned:
            self._warned = True
            log.warning(
                "directory %r: some message keys are JSON, others plain text. To Kafka these are different keys: "
                "records of the former kind stay for ever, and may win over newer ones at each start. Publish all rows "
                "into a new topic, with keys of one kind",
                self.topic,
            )

    async def _change(self, batch: Batch[T]) -> None:
        if self._loaded:
            self._callbacks.before(self._storage, batch.changes)
        await self._storage.apply(batch)
        self._callbacks.after(self._storage)

    async def _look_at_positions(self, reader: Reader) -> dict[int, int]:
        """What is read next of each partition; and what Kafka has said of its end."""
        positions = dict(self.progress.positions)
        self._completeness.stand_still(reader.unreadable)
        for partition, standing in (await reader.standings()).items():
            # What was applied before is read again after a pause, but has been applied.
            position = positions[partition] = max(standing.position, positions.get(partition, 0))
            if standing.end is not None and standing.answered is not None:
                self.progress.ends[partition] = standing.end
                self.progress.tails[partition] = standing.tail or standing.end
                if position >= standing.end:
                    self._completeness.at_end(partition, standing.answered)
                    self._log.at_end(partition)
        return positions

    async def _remember_completeness(self, reader: Reader) -> None:
        """Who was away for too long has missed deletions."""
        if (reason := self._completeness.look(self.progress.positions)) is not None:
            await self._start_over(reader, reason)

    async def _take_up_new_partitions(self, reader: Reader) -> None:
        there = reader.there()
        if gone := reader.partitions - there:  # all of them: the topic was deleted
            raise OSError(f"the topic has no partition {min(gone)} any more")  # look at it anew
        if added := there - reader.partitions:
            log.info("directory %r: partitions were added: %s", self.topic, ", ".join(map(str, sorted(added))))
            reader.assign(reader.partitions | added)
            begins = await reader.begins()
            self.progress.positions |= {partition: begins[partition] for partition in added}
            self._seek(reader, begins)

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def _report(self) -> None:
        """Say now and then how far the load is."""
        if self._loading and self.trouble is None and time.monotonic() - self._reported_at > _REPORT_SECONDS:
            self._reported_at = time.monotonic()
            told = self.progress.describe(self.progress.barrier)
            log.info("directory %r: %.0f %% loaded: %s", self.topic, 100 * self.progress.fraction, told)

    # -- where to begin ---------------------------------------------------------------------------------------------

    async def _place(self, reader: Reader, cluster: str) -> None:
        """Decide where to read on, and what is to be reached."""
        await self._log.ask_id(reader)
        begins, ends = await reader.begins(), await reader.ends()
        former, self._identity = self._identity, Identity(self.topic, cluster, self._rows.describe())
        if (kept := self._kept) is not None:  # the first time
            former = kept.identity
            self.progress.positions, self._log.marks = dict(kept.positions), dict(kept.marks)
            self._completeness.at = kept.complete_at
            self.faults.replace(kept.bad)
        if former is None:
            await self._storage.reset(self._identity)
            self._completeness.begin()
        elif reason := (
            _other(former, self._identity)
            or self._log.another()
            or self._why_not(begins, ends)
            or await self._log.cut(reader)
        ):
            await self._begin_again(reader, begins, ends, reason)
        elif kept is not None:
            self._look_again_at(kept.bad, begins)
        self._kept = None  # not before: where Kafka does not answer, this is done once more
        self.progress.positions = dict(begins) | self.progress.positions
        self.progress.ends, self.progress.tails = dict(ends), dict(ends)
        self._last_barrier = False
        self._refused_inside.clear()
        if self.progress.barrier is None:
            self.progress.barrier = dict(ends)
        self._seek(reader, begins)

    def _look_again_at(self, bad: Mapping[Row, BadRecord], begins: Mapping[int, int]) -> None:
        """Read what could not be applied, and what is behind it, once more: by now the service may be able to."""
        reached, positions, gone = dict(self.progress.positions), self.progress.positions, dict[Row, BadRecord]()
        for row, record in bad.items():
            partition, offset = record.partition, record.offset
            if not (partition in reached and begins[partition] <= offset < reached[partition]):
                gone[row] = record
            elif offset < positions[partition]:
                positions[partition], self._log.marks[partition] = offset, Mark(offset, record.timestamp_ms)
        self.faults.replace(gone)  # what is wrong with the others will show

    def _kept_value(self, record: Record) -> T | None:
        """The value of a record of the store. None where a validator, which no comparison of models tells, accepts it
        no more: without the store the row would not be there either."""
        try:
            return self._rows.decode(record)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as when it is read from Kafka
            if puts_off(error):
                raise
            if (place := (record.partition, record.offset)) not in self._refused:
                self._refused.add(place)
                log.exception(
                    "directory %r: a row of its store, from partition %s offset %s, cannot be read any more",
                    self.topic,
                    *place,
                )
            return None

    def _why_not(self, begins: Mapping[int, int], ends: Mapping[int, int]) -> str | None:
        """Why the rows cannot be those of this log, or may not be current; None where they are."""
        if (reason := outside(self.progress.positions, begins, ends)) is not None or not self.progress.positions:
            return reason
        return self._completeness.missed_before(self._loaded)

    def _seek(self, reader: Reader, begins: Mapping[int, int]) -> None:
        starts = self._log.starts(self.progress.positions, begins)
        for partition in reader.partitions:
            mark = self._log.marks.get(partition)
            reader.seek(partition, starts[partition], None if mark is None else mark.epoch)

    async def _go_on_after(self, reader: Reader, error: OffsetOutOfRangeError) -> None:
        """Kafka has refused a place. Where nothing else tells why, the last record is gone, and what is before it."""
        await self._log.ask_id(reader)
        begins, ends = await reader.begins(), await reader.ends()
        reason = outside(self.progress.positions, begins, ends) or await self._log.cut(reader)
        refused = cast(Mapping[TopicPartition, int], error.args[0])
        inside = {(tp.partition, offset) for tp, offset in refused.items() if offset >= begins[tp.partition]}
        if reason is None and inside:  # it would be asked for again, for ever and without a pause
            if again := sorted(inside & self._refused_inside):
                partition, offset = again[0]
                reason = f"partition {partition} is refused at {offset}, though it begins at {begins[partition]}"
            else:
                self._refused_inside |= inside
                await set_within(self._stopping, _POLL_SECONDS)
        if reason is not None:
            await self._begin_again(reader, begins, ends, reason)
        self._seek(reader, begins)

    async def _start_over(self, reader: Reader, reason: str) -> None:
        await self._log.ask_id(reader)
        begins, ends = await reader.begins(), await reader.ends()
        await self._begin_again(reader, begins, ends, reason)
        self._seek(reader, begins)

    async def _begin_again(
        self, reader: Reader, begins: Mapping[int, int], ends: Mapping[int, int], reason: str
    ) -> None:
        """Read everything again. Rows that are in use stay until it is known which of them are gone. All positions have
        to be sought."""
        assert self._identity is not None
        self.trouble = None
        self.rebuilds += 1
        log.warning("directory %r is built anew: %s", self.topic, reason)
        if self._loaded:
            self._again = {}
            self._unreadable.clear()
        else:
            await self._storage.reset(self._identity)
        self._from_file = False
        self.faults.replace({})
        self._log.read_anew()
        self._refused_inside.clear()
        self._completeness.begin()
        reader.assign(reader.partitions)  # the client knows the ends of before until a fetch is answered
        self.progress.positions = dict(begins)
        self.progress.barrier, self.progress.ends, self.progress.tails = dict(ends), dict(ends), dict(ends)
        self._last_barrier = False

    async def _finish(self) -> None:
        """The barrier is reached."""
        self._completeness.barrier_reached()
        if (again := self._again) is not None:
            gone: list[Row] = []
            for number, row in enumerate(self._storage.rows(), 1):
                if row not in again and row not in self._unreadable:
                    gone.append(row)
                if number % _CHUNK_RECORDS == 0:
                    await asyncio.sleep(0)
            changes: Iterator[Change[T]] = chain(again.values(), ((row, None, None, None) for row in gone))
            while chunk := list(islice(changes, _CHUNK_RECORDS)):
                await self._change(Batch(chunk))
                await asyncio.sleep(0)
            positions, marks = dict(self.progress.positions), dict(self._log.marks)
            complete_at, topic_id = self._completeness.at, self._log.topic_id
            await self._storage.apply(
                Batch((), positions, marks, self.faults.now(), complete_at, topic_id, read_anew=True)
            )
            self._again = None
            log.info("directory %r has been built anew: %s rows were gone", self.topic, len(gone))
        if not self._loaded:
            await self._callbacks.tell_load(self._storage)
        self._collector.resume()
        if not self._loaded:
            self._loaded, self.trouble = True, None
            self._completeness.loaded()
            self._on_loaded()
        self._wake()


def _other(kept: Identity, wanted: Identity) -> str | None:
    """Why rows of `kept` are of no use for `wanted`; None where they are."""
    if kept.topic != wanted.topic:
        return f"its rows are of the topic {kept.topic!r}"
    if kept.cluster != wanted.cluster:
        return f"its rows are of another Kafka cluster, {kept.cluster}"
    return None if kept.reading == wanted.reading else "model=, key=, active= or decoder= were others"


def _why(error: Exception) -> str:
    if isinstance(error, TopicAuthorizationFailedError):
        return "there is no right to read the topic: grant READ on it"
    return f"Kafka does not answer: {error!r}"

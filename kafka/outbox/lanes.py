"""Sends the messages of each topic, in order, and each topic for itself: in rounds of one batch for each partition.

While Kafka has a round, the next one is packed. It is handed over when all of the round is acknowledged: of a partition
there is never more than one batch under way, so that none can overtake another that has failed.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

import asyncpg
from aiokafka.errors import (
    InvalidTimestampError,
    InvalidTopicError,
    KafkaError,
    MessageSizeTooLargeError,
    ProducerClosed,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownError,
    UnknownTopicOrPartitionError,
    UnsupportedForMessageFormatError,
)

from ...errors import KafkaUnavailable, PostgresUnavailable
from ...executor import now
from .backlog import Backlog, Lane, Row
from .metrics import OutboxMetrics
from .packing import Packed, Packer
from .recorder import Recorder, clean
from .senders import Sender, Senders
from .settings import OutboxSettings

__all__ = ["NEVER", "NO_TOPIC", "LaneWorker"]

log = logging.getLogger("sidings.outbox")

# What the broker says of a batch that holds a message which it will never take.
NEVER = (MessageSizeTooLargeError, RecordListTooLargeError, InvalidTimestampError, UnsupportedForMessageFormatError)
# What it says of a topic to which no message can be sent until somebody does something about it.
NO_TOPIC = (UnknownTopicOrPartitionError, TopicAuthorizationFailedError, InvalidTopicError)
_DOUBTS = 3  # failures after which an error that aiokafka does not know is taken for the fault of a message
_CAREFUL_SECONDS = 60.0  # after a refusal the topic keeps a producer of its own for so long
_TURNS = 5  # of the event loop, after which aiokafka has written what it was handed
_GRACE_SECONDS = 1.0  # for the batches of other topics, before a producer whose batch has no answer is killed


class _Failed(Exception):
    """Some of a batch was not acknowledged. cut: by no fault of the topic; unreachable: no answer, so that it may have
    arrived."""

    def __init__(self, error: BaseException, *, cut: bool = False, unreachable: bool = False) -> None:
        super().__init__(repr(error))
        self.error = error
        self.cut = cut
        self.unreachable = unreachable


_slot_of = attrgetter("slot")


@dataclass(slots=True)
class _Prepared:
    """A round that is packed but not taken: its rows are still in the lane, and may be put behind or forgotten."""

    sender: Sender
    partitions: list[int]
    rows: list[Row]
    batches: dict[int, Packed]


class LaneWorker:
    """Sends one lane's messages, for ever. on_room: the lane wants messages back from the database."""

    def __init__(
        self,
        lane: Lane,
        backlog: Backlog,
        senders: Senders,
        recorder: Recorder,
        packer: Packer,
        metrics: OutboxMetrics,
        settings: OutboxSettings,
        on_room: Callable[[], None],
    ) -> None:
        self.lane = lane
        self.retries = 0
        self.retry_at = 0.0
        self._failing_since = 0.0
        self._unreachable = False
        self._backlog = backlog
        self._senders = senders
        self._recorder = recorder
        self._packer = packer
        self._metrics = metrics
        self._settings = settings
        self._on_room = on_room
        self._own: Sender | None = None
        self._careful_until = -inf
        self._prepared: _Prepared | None = None
        self._taken: list[Row] = []  # of the round under way
        self._settled: list[Sequence[Row]] = []  # those that were acknowledged, refused or lost
        self._accepted = 0
        self._most = settings.batch_size  # messages of a round, until the number of partitions is known
        self._kills: set[asyncio.Task[None]] = set()

    def retry_now(self) -> None:
        """A person wants it."""
        self.retry_at = 0.0
        self.lane.event.set()

    def reconnected(self) -> None:
        """Kafka has come back: what failed because it was away is tried at once."""
        if self._unreachable:
            self.retry_now()

    async def run(self) -> None:
        """Take, send, record, for ever; back off after a failure."""
        try:
            while True:
                await self._ready()
                try:
                    await self._send(self.lane.take(len(self._prepared.rows) if self._prepared else self._most))
                except _Failed as failed:
                    await self._fail(failed)
                else:
                    await self._succeeded()
        finally:
            if self._own is not None:
                await self._own.kill()

    async def _ready(self) -> None:
        """Wait until there is something to send and the topic does not back off."""
        lane = self.lane
        while True:
            lane.event.clear()
            pause = self.retry_at - now()
            if pause <= 0 and lane.paused:
                lane.paused = False
                self._on_room()
            if pause <= 0 and lane.queue:
                return
            try:
                async with asyncio.timeout(pause if pause > 0 else None):
                    await lane.event.wait()
            except TimeoutError:
                pass

    # -- sending ----------------------------------------------------------------------------------------------------

    async def _send(self, rows: list[Row]) -> None:
        """Send one round. Raises `_Failed`; what was not acknowledged is in `_outstanding()` then."""
        self._taken, self._settled, self._accepted = rows, [], 0
        prepared, self._prepared = self._prepared, None
        sender = await self._sender()
        partitions = await self._partitions(sender)
        self._metrics.batch(self.lane.topic, len(rows))
        batches: Mapping[int, Packed] = {}
        if prepared and (prepared.sender, prepared.partitions, prepared.rows) == (sender, partitions, rows):
            batches = prepared.batches
        groups = {partition: packed.all_rows for partition, packed in batches.items()}
        groups = groups or self._packer.by_partition(rows, partitions)
        sender.users += 1
        try:
            while groups:
                groups = await self._round(sender, partitions, groups, batches)
                batches = {}
        finally:
            sender.users -= 1
            self._senders.released(sender)

    async def _prepare(self, sender: Sender, partitions: list[int]) -> None:
        """Kafka has a round: pack the next one, if there are enough messages for at least half of one: those that come
        later wait for the round after it."""
        settings = self._settings
        self._most = min(len(partitions) * settings.batch_size, max(settings.batch_size, self._backlog.page))
        if self._prepared is not None or len(self.lane.queue) < self._most // 2:
            return
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        rows = self.lane.peek(self._most)
        batches: dict[int, Packed] = {}
        for partition, group in self._packer.by_partition(rows, partitions).items():
            batches[partition] = self._packer.pack(sender.batch(), group)
            await asyncio.sleep(0)  # acknowledgements, and other topics
        self._prepared = _Prepared(sender, partitions, rows, batches)

    async def _sender(self) -> Sender:
        """The shared producer; one of its own for a topic that fails, or has had a message refused."""
        if self._kills:  # its batch must not arrive after the repeat of it
            await asyncio.wait(self._kills)
        main = await self._senders.main()
        if not self.retries and now() > self._careful_until:
            if self._own is not None:
                own, self._own = self._own, None
                await own.close()
            return main
        return await self._own_sender()

    async def _own_sender(self) -> Sender:
        if self._own is None:
            sender = self._senders.alone()
            try:
                await sender.start()
            except KafkaUnavailable as error:
                raise _Failed(error, unreachable=True) from error
            self._own = sender
        return self._own

    async def _partitions(self, sender: Sender) -> list[int]:
        try:
            return await sender.partitions(self.lane.topic, self._settings.metadata_seconds)
        except KafkaError as error:
            raise _Failed(error, cut=sender.closed) from error

    async def _round(
        self, sender: Sender, partitions: list[int], groups: Mapping[int, list[Row]], batches: Mapping[int, Packed]
    ) -> dict[int, list[Row]]:
        """One batch for each partition, all at once. batches: those that are packed already. Returns what did not fit
        into them."""
        under_way: dict[asyncio.Future[object], tuple[int, list[Row]]] = {}
        rest: dict[int, list[Row]] = {}
        for partition, group in groups.items():
            packed, future = await self._hand_over(sender, partition, group, batches.get(partition))
            if future is not None:
                under_way[future] = (partition, packed.rows)
            if packed.rest:
                rest[partition] = packed.rest
        if under_way:
            await self._prepare(sender, partitions)
        unanswered = await self._answers(set(under_way))
        failure: _Failed | None = None
        refused: list[tuple[int, list[Row]]] = []
        for future, (partition, packed) in under_way.items():
            if future in unanswered:
                continue
            error = future.exception()
            if error is None:
                self._accept(packed)
            elif self._is_refusal(error):
                refused.append((partition, packed))
            else:
                failure = self._failure(sender, error)
        if unanswered:
            raise self._failure(sender, TimeoutError("Kafka did not acknowledge in time"), unreachable=True)
        if failure is not None:
            raise failure
        if refused:
            self._careful_until = now() + _CAREFUL_SECONDS
            if sender.idempotent:
                self._senders.retire(sender)
            for partition, packed in refused:
                await self._isolate(partition, packed)
            if sender.idempotent and rest:  # not with a producer that has lost count
                raise _Failed(KafkaError("the rest of the batch goes with another producer"), cut=True)
        return rest

    async def _hand_over(
        self, sender: Sender, partition: int, rows: list[Row], packed: Packed | None = None
    ) -> tuple[Packed, asyncio.Future[object] | None]:
        """One batch for one partition, packed already or now. Returns it and the future of its acknowledgement."""
        ours = self._still_ours(rows)
        if packed is None or ours is not rows:
            packed = self._packer.pack(sender.batch(), ours)
        for row, reason in packed.bad:
            self._refuse(row, reason)
        if not packed.rows:
            return packed, None
        try:
            return packed, await sender.send(packed.batch, self.lane.topic, partition)
        except (KafkaError, AssertionError, TypeError) as error:  # the topic has just been deleted or recreated
            raise self._failure(sender, error) from error

    async def _answers(self, futures: set[asyncio.Future[object]]) -> set[asyncio.Future[object]]:
        """Wait for acknowledgements and refusals. Returns the futures that had none in time."""
        if not futures:
            return futures
        settings = self._settings
        _, pending = await asyncio.wait(futures, timeout=settings.slow_seconds)
        if pending:
            # Its place in memory is for the others until it goes on.
            self.lane.paused = True
            self._prepared = None
            self.lane.shelve()
            self._on_room()
            _, pending = await asyncio.wait(
                pending, timeout=max(0.0, settings.delivery_seconds - settings.slow_seconds)
            )
        return pending

    async def _isolate(self, partition: int, rows: list[Row]) -> None:
        """Find the messages that Kafka refuses by halving, in order, and park them; all others are sent."""
        error = await self._try(partition, rows)
        if error is None:
            self._accept(self._unsettled(rows))
        elif len(rows) == 1:
            self._refuse(rows[0], _text(error))
        else:
            middle = len(rows) // 2
            await self._isolate(partition, rows[:middle])
            await self._isolate(partition, rows[middle:])

    async def _try(self, partition: int, rows: list[Row]) -> BaseException | None:
        """Send these alone. Returns the refusal; raises `_Failed` for anything else."""
        rows = self._still_ours(rows)
        if not rows:
            return None
        sender = await self._own_sender()
        _, future = await self._hand_over(sender, partition, rows)
        if future is None:
            return None
        if await self._answers({future}):
            raise self._failure(sender, TimeoutError("Kafka did not acknowledge in time"), unreachable=True)
        error = future.exception()
        if error is None or self._is_refusal(error):
            return error
        raise self._failure(sender, error)

    # -- what becomes of messages -----------------------------------------------------------------------------------

    def _still_ours(self, rows: list[Row]) -> list[Row]:
        """Leave out messages of slots that were lost; they are their new owner's. The last look before sending. The
        same list if all are ours."""
        time = now()
        lost = {slot for slot in set(map(_slot_of, rows)) if slot.deadline <= time or not self._backlog.has(slot)}
        if not lost:
            return rows
        gone = [row for row in rows if row.slot in lost]
        self._settle(gone)
        self.lane.account(gone)
        return [row for row in rows if row.slot not in lost]

    def _accept(self, rows: list[Row]) -> None:
        self._accepted += len(rows)
        self._settle(rows)
        self._recorder.acknowledged(self.lane, rows)

    def _refuse(self, row: Row, reason: str) -> None:
        self._settle((row,))
        self._recorder.refused(self.lane, row, reason)

    def _settle(self, rows: Sequence[Row]) -> None:
        self._settled.append(rows)

    def _unsettled(self, rows: Collection[Row]) -> list[Row]:
        settled = {row.id for some in self._settled for row in some}
        return [row for row in rows if row.id not in settled]

    def _outstanding(self) -> list[Row]:
        return self._unsettled(self._taken)

    # -- failing ----------------------------------------------------------------------------------------------------

    def _is_refusal(self, error: BaseException) -> bool:
        return isinstance(error, NEVER) or (isinstance(error, UnknownError) and self.retries >= _DOUBTS)

    def _failure(self, sender: Sender, error: BaseException, *, unreachable: bool = False) -> _Failed:
        """After it the producer is not used again, by us or by others."""
        cut = isinstance(error, ProducerClosed) or sender.closed
        if sender is self._own:
            self._own = None
            self._kill(sender, 0.0)
        elif unreachable:
            self._kill(sender, _GRACE_SECONDS)
        elif not cut:
            self._senders.retire(sender)
        return _Failed(error, cut=cut, unreachable=unreachable)

    def _kill(self, sender: Sender, grace: float) -> None:
        task = asyncio.create_task(self._senders.kill(sender, grace))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)

    async def _fail(self, failed: _Failed) -> None:
        """Give back what was not acknowledged, and back off."""
        lane = self.lane
        lane.paused = not failed.cut
        self._prepared = None
        outstanding = self._outstanding()
        while lane.unaccounted > len(outstanding):  # else a refill would bring what is about to be deleted
            lane.event.clear()
            await lane.event.wait()
        lane.give_back(outstanding)
        self._taken = []
        if failed.cut:
            log.info("%s: the producer was closed, sending again: %s", lane.topic, failed)
        else:
            await self._back_off(failed)
        self._on_room()

    async def _back_off(self, failed: _Failed) -> None:
        topic, error, settings = self.lane.topic, _text(failed.error), self._settings
        if not self.retries:
            self._failing_since = now()
        self.retries += 1
        self._unreachable = failed.unreachable
        longest = min(settings.max_backoff_seconds, settings.backoff_seconds * 2 ** min(self.retries - 1, 30))
        pause = longest * random.uniform(0.75, 1.0)
        self.retry_at = now() + pause
        log.warning("%s fails (%s in a row), next try in %.1f s: %s", topic, self.retries, pause, error)
        self._metrics.failed(topic)
        self._metrics.failing.add(topic)
        await self._tell("topic_fails", topic, self._recorder.relay_id, self.retries, pause, clean(error))
        patience = settings.topic_patience_seconds
        if isinstance(failed.error, InvalidTopicError) or (
            isinstance(failed.error, NO_TOPIC) and patience is not None and now() - self._failing_since >= patience
        ):
            await self._park_all(error)

    async def _park_all(self, error: str) -> None:
        try:
            count = await self._recorder.park_topic(self.lane.topic, error)
        except (PostgresUnavailable, asyncpg.PostgresError) as failure:
            log.warning("messages for %s could not be parked, trying again: %s", self.lane.topic, failure)
        else:
            log.error("%s: no message can be sent; %s messages are parked: %s", self.lane.topic, count, error)

    async def _succeeded(self) -> None:
        if self.retries and self._accepted:
            self.retries = 0
            self._unreachable = False
            self._metrics.failing.discard(self.lane.topic)
            log.warning("%s works again", self.lane.topic)
            await self._tell("topic_works", self.lane.topic, self._recorder.relay_id)

    async def _tell(self, query: str, *args: object) -> None:
        try:
            await self._recorder.call(query, *args)
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            log.warning("the state of %s could not be stored: %s", self.lane.topic, error)


def _text(error: BaseException) -> str:
    return str(error) if str(error).startswith("[Error") else f"{type(error).__name__}: {error}"

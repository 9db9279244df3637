"""Sends the messages of one topic in rounds: a batch for each partition, all at once.

While Kafka has a round, the next one is packed. It is handed over when all of the round is acknowledged: of a partition
there is never more than one batch under way, so that none can overtake another that has failed.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiokafka.errors import (
    InvalidTimestampError,
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    RequestTimedOutError,
    UnknownError,
)

from ...executor import now
from ..message import possible_topic
from .backlog import Backlog, Lane, Row, order_key_of, repeat, timestamp_ms_of
from .failures import NEVER, NO_TOPIC, TOO_LARGE, ClocksApart, Failed, text_of
from .lane_senders import LaneSenders
from .ledger import Ledger
from .metrics import OutboxMetrics
from .packing import Packed, Packer
from .recorder import Recorder
from .senders import Sender
from .settings import OutboxSettings
from .shunned import Shunned

__all__ = ["Rounds"]

_DOUBTS = 3  # failures after which an error that aiokafka does not know may be the fault of a message
_IN_A_ROW = 8  # messages refused with such an error one after the other, before it is taken for their partition's fault
_PROBE = 100  # messages with which partitions that took nothing are tried again
_LESS = 8  # so many times smaller is the round after one that was not acknowledged in time
_LEAST_BYTES = 16 * 1024  # of a round: one of no more is late for another reason, as where brokers are overloaded
_TURNS = 5  # of the event loop, after which aiokafka has written what it was handed


@dataclass(slots=True)
class _Prepared:
    """A round that is packed but not taken: its rows are still in the lane, and may be put behind or forgotten."""

    sender: Sender
    partitions: list[int]
    avoided: frozenset[int]
    rows: list[Row]
    batches: dict[int, Packed]

    def fits(self, sender: Sender, partitions: list[int], avoided: frozenset[int], rows: list[Row]) -> bool:
        """Whether it would be packed so now."""
        packed_for = (self.sender, self.partitions, self.avoided, self.rows)
        return packed_for == (sender, partitions, avoided, rows)


class Rounds:
    """The rounds of one lane. on_room: the lane has left memory to the others. ledger: of the round under way."""

    def __init__(
        self,
        lane: Lane,
        backlog: Backlog,
        senders: LaneSenders,
        recorder: Recorder,
        packer: Packer,
        metrics: OutboxMetrics,
        settings: OutboxSettings,
        on_room: Callable[[], None],
    ) -> None:
        self.lane = lane
        self.ledger = Ledger(lane, [], backlog, recorder)
        self._backlog = backlog
        self._senders = senders
        self._recorder = recorder
        self._packer = packer
        self._metrics = metrics
        self._settings = settings
        self._on_room = on_room
        self._failures = 0
        self._partitions_now: list[int] = []
        self._prepared: _Prepared | None = None
        self._most = settings.batch_size  # messages of a round, until the number of partitions is known
        self._fits: int | None = None  # fewer, where the network is too narrow for so many
        self._shunned = Shunned(settings.max_backoff_seconds)
        # Refused alone with an error that aiokafka does not know; their partition has accepted none since.
        self._doubted: list[tuple[Row, UnknownError]] = []
        self._doubted_since: dict[int, float] = {}  # by partition: it has refused all so since

    async def send_next(self, failures: int) -> None:
        """Take the next round and send it. failures: rounds in a row that have failed before it.

        Raises `Failed`; what was not acknowledged is outstanding in the ledger then.
        """
        self.ledger = Ledger(self.lane, [], self._backlog, self._recorder)
        self._failures = failures
        if not possible_topic(self.lane.topic):  # the client could not even ask for it
            raise Failed(InvalidTopicError("Kafka can have no topic of this name"))
        # Nothing is taken while Kafka is away: a slot with messages under way cannot be given to those who reach it.
        sender = await self._senders.choose(failing=failures > 0)
        partitions = self._partitions_now = await self._partitions(sender)
        prepared, self._prepared = self._prepared, None
        most = self._most if self._fits is None else min(self._most, self._fits)
        probe = min(most, _PROBE) if self.lane.owns and failures else most
        rows = self.lane.take(len(prepared.rows) if prepared else probe)
        if not rows:
            return
        self.ledger = Ledger(self.lane, rows, self._backlog, self._recorder)
        self._metrics.batch(self.lane.topic, len(rows))
        batches: Mapping[int, Packed] = {}
        avoided = self._avoided(sender, partitions)
        if prepared and prepared.fits(sender, partitions, avoided, rows):
            batches = prepared.batches
        groups = {partition: packed.all_rows for partition, packed in batches.items()}
        sender.users += 1
        began = now()
        try:
            if not groups:
                await asyncio.sleep(0)  # the next read is sent, before packing takes the event loop
                # After a failure messages without a key go everywhere, to find all partitions that take nothing.
                groups = self._packer.by_partition(self.lane.topic, rows, partitions, avoided, spread=failures > 0)
            while groups:
                groups = await self._batches(sender, partitions, groups, batches)
                batches = {}
        except Failed as failed:
            if failed.unreachable or isinstance(failed.error, RequestTimedOutError):
                self._lessen(rows)
            raise
        finally:
            sender.users -= 1
            self._senders.released(sender)
        if self._fits is not None and len(rows) >= self._fits and 4 * (now() - began) < self._settings.delivery_seconds:
            self._fits = 2 * self._fits if 2 * self._fits < self._most else None

    def _lessen(self, rows: list[Row]) -> None:
        """As many as these would take as long again."""
        size = sum(
            len(key or b"") + len(value or b"") + len(headers or "") for _, _, key, _, value, headers, *_ in rows
        )
        if size > _LEAST_BYTES:
            self._fits = max(1, len(rows) // _LESS, len(rows) * _LEAST_BYTES // size)

    def forget(self) -> list[Row]:
        """The round has failed: forget it, and the one that was packed ahead. Returns what is outstanding of it."""
        repeat(self.ledger.unanswered())
        outstanding, self._prepared = self.ledger.outstanding(), None
        self.ledger = Ledger(self.lane, [], self._backlog, self._recorder)
        return outstanding

    async def quiet(self) -> None:
        """Wait until nothing can be sent again by a producer that was killed."""
        await self._senders.quiet()

    def apart(self) -> frozenset[int]:
        """The partitions that went apart from the lane."""
        return self._backlog.apart(self.lane)

    def others_work(self) -> bool:
        """Whether something of the lane's topic is on its way that does not fail."""
        others = self._backlog.of_topic(self.lane.topic)
        return any(not (lane.paused or lane.empty) for lane in others if lane is not self.lane)

    def _some_work_again(self) -> bool:
        """Whether a part of the lane's topic has taken something since it went apart."""
        return any(not lane.failing for lane in self._backlog.of_topic(self.lane.topic) if lane is not self.lane)

    def split(self, partitions: frozenset[int]) -> Lane:
        """These go apart, as `Backlog.split`."""
        goes = self._packer.goes_to(self.lane.topic, partitions, self._partitions_now)
        return self._backlog.split(self.lane, partitions, goes)

    def cut(self) -> None:
        """What is under way through the topic's own producer may not be sent again; the round fails."""
        self._senders.end()

    async def close(self) -> None:
        """The end: what is under way may not be sent again."""
        await self._senders.close()

    async def _partitions(self, sender: Sender) -> list[int]:
        slow = asyncio.get_running_loop().call_later(self._settings.slow_seconds, self._make_room)
        try:
            return await sender.partitions(self.lane.topic, self._settings.metadata_seconds)
        except KafkaConnectionError as error:  # it may have ended to ask who leads what, for good
            raise self._senders.failure(sender, error) from error
        except KafkaError as error:
            raise Failed(error, cut=sender.closed) from error
        finally:
            slow.cancel()

    def _make_room(self) -> None:
        """The lane's place in memory is for the others until it goes on."""
        self.lane.paused = True
        self._prepared = None
        self.lane.shelve()
        self._on_room()

    async def _prepare(self, sender: Sender, partitions: list[int]) -> None:
        """Kafka has a round: pack the next one, if there are enough messages for at least half of one: those that come
        later wait for the round after it."""
        settings = self._settings
        self._most = min(len(partitions) * settings.batch_size, max(settings.batch_size, self._backlog.page))
        if self._prepared is not None or self._fits is not None or len(self.lane.queue) < self._most // 2:
            return
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        rows, avoided = self.lane.peek(self._most), self._avoided(sender, partitions)
        batches: dict[int, Packed] = {}
        for partition, group in self._packer.by_partition(self.lane.topic, rows, partitions, avoided).items():
            batches[partition] = self._packer.pack(sender.batch(), group)
            await asyncio.sleep(0)  # acknowledgements, and other topics
        self._prepared = _Prepared(sender, partitions, avoided, rows, batches)

    def _avoided(self, sender: Sender, partitions: list[int]) -> frozenset[int]:
        """Where messages without a key do not go, as little or nothing is taken there. If that leaves none, those that
        have gone apart may work again."""
        topic, apart, stuck = self.lane.topic, self.apart(), sender.stuck(self.lane.topic, partitions)
        if apart and self._shunned.leaves_none(topic, partitions, apart | stuck):
            apart = frozenset[int]()
        return self._shunned.avoided(topic, partitions, apart | stuck)

    async def _batches(
        self, sender: Sender, partitions: list[int], groups: Mapping[int, list[Row]], batches: Mapping[int, Packed]
    ) -> dict[int, list[Row]]:
        """One batch for each partition, all at once. batches: those that are packed already. Returns what has to
        follow: what did not fit into them, and what was not handed over, as one before it could not be."""
        under_way: dict[asyncio.Future[object], tuple[int, list[Row]]] = {}
        rest: dict[int, list[Row]] = {}
        coming = iter(groups.items())
        for partition, group in coming:
            packed, future = await self._hand_over(sender, partition, group, batches.get(partition))
            if packed.rest:
                rest[partition] = packed.rest
            if future is not None:
                under_way[future] = (partition, packed.rows)
                if future.done() and future.exception() is not None:
                    rest.update(coming)  # what Kafka has of the others by now is waited for, and not sent again
        if under_way:
            await self._prepare(sender, partitions)
        unanswered = await self._answers(set(under_way))
        failure: Failed | None = None
        stuck: set[int] = set()
        refused: list[tuple[int, list[Row]]] = []
        for future, (partition, packed) in under_way.items():
            if future in unanswered:
                stuck.add(partition)
                continue
            error = self._error_of(sender, partition, packed, future)
            if error is None:
                self.ledger.accept(packed)
                self._takes(partition)
            elif self._is_refusal(error):
                refused.append((partition, packed))
            else:
                stuck.add(partition)
                failure = self._senders.failure(sender, error)
        if unanswered:
            failure = self._senders.failure(sender, sender.late(self.lane.topic, stuck), unreachable=True)
        if refused and failure is None:
            self._senders.refused(sender)
            for partition, packed in refused:
                try:
                    await self._sift(partition, packed)
                except (ClocksApart, UnknownError) as error:  # it is of that partition, or of its broker
                    stuck.add(partition)
                    failure = Failed(error)
        if failure is not None:
            failure.progress = self.ledger.accepted > 0
            if not (failure.cut or isinstance(failure.error, NO_TOPIC)):
                self._shunned.failed(self.lane.topic, stuck)
                sent = [row for partition, rows in under_way.values() if partition in stuck for row in rows]
                failure.stuck = self._to_go_apart(stuck, sent, partitions, failure.progress)
            raise failure
        if refused and sender.idempotent and rest:  # not with a producer that has lost count
            raise Failed(KafkaError("the rest of the batch goes with another producer"), cut=True)
        return rest

    def _to_go_apart(self, stuck: set[int], sent: list[Row], partitions: list[int], progress: bool) -> frozenset[int]:
        """Of the partitions that took nothing those that should hold up no others of the lane: where these have taken
        something, or nobody can know of them, as it happens again in a round that has nothing for them. sent: to those
        that took nothing; messages without a key have others the next time. The last ones of a topic go as well, where
        others went before and work again: it is only messages without a key that are left."""
        own, apart = self.lane.partitions or frozenset(partitions), self.apart()
        new = frozenset(stuck) & own  # some may be apart already, with the keys that went there once
        last = not own - apart - new
        if last and (self.lane.owns or new <= apart or not self._some_work_again()):
            return frozenset()
        again = self._failures > 0 and (last or any(order_key_of(row) is not None for row in sent))
        return new if progress or again else frozenset()

    async def _hand_over(
        self,
        sender: Sender,
        partition: int,
        rows: list[Row],
        packed: Packed | None = None,
        *,
        as_of_now: bool = False,
    ) -> tuple[Packed, asyncio.Future[object] | None]:
        """One batch for one partition, packed already or now. Returns it and the future of its acknowledgement, which
        has failed already where it could not be handed over."""
        ours = self.ledger.still_ours(rows)
        if packed is None or ours is not rows:
            packed = self._packer.pack(sender.batch(), ours, as_of_now=as_of_now)
        for row, reason in packed.bad:
            self.ledger.refuse(row, reason)
        if not packed.rows:
            return packed, None
        self.ledger.hand_over(packed.rows)
        try:
            return packed, await sender.send(packed.batch, self.lane.topic, partition)
        except (KafkaError, AssertionError, TypeError) as error:  # the topic has just been deleted or recreated
            refused: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return packed, refused

    async def _answers(self, futures: set[asyncio.Future[object]]) -> set[asyncio.Future[object]]:
        """Wait for acknowledgements and refusals. Returns the futures that had none in time."""
        if not futures:
            return futures
        settings = self._settings
        _, pending = await asyncio.wait(futures, timeout=settings.slow_seconds)
        if pending:
            self._make_room()
            _, pending = await asyncio.wait(
                pending, timeout=max(0.0, settings.delivery_seconds - settings.slow_seconds)
            )
        return pending

    def _error_of(
        self, sender: Sender, partition: int, rows: list[Row], future: asyncio.Future[object]
    ) -> BaseException | None:
        """The error, if any. Where Kafka may have taken more than it says, there may be a second copy of these."""
        error = future.exception()
        if isinstance(error, UnknownError) or sender.sent_again(self.lane.topic, partition):
            repeat(rows)
        return error

    async def _sift(self, partition: int, rows: list[Row]) -> None:
        """`_isolate`, and decide what is at fault where aiokafka does not know the error: the messages, if their
        partition takes others of the batch. Raises `UnknownError` where it takes none, or refuses many in a row: they
        may be good. Only the first one is parked, when it takes none for `topic_patience_seconds`: it would hold up
        the others for ever if it is bad."""
        self._doubted, before, all_tried = [], self.ledger.accepted, True
        try:
            await self._isolate(partition, rows)
        except UnknownError:
            all_tried = False
        if self.ledger.accepted > before:
            self._takes(partition)
            if all_tried:
                self._refuse_doubted(len(self._doubted))
        elif self._doubted:
            patience = self._settings.topic_patience_seconds
            since = self._doubted_since.setdefault(partition, now())
            if patience is not None and now() - since >= patience:
                del self._doubted_since[partition]
                self._refuse_doubted(1)
        if self._doubted:
            raise self._doubted[0][1]

    def _takes(self, partition: int) -> None:
        self._doubted_since.pop(partition, None)
        self._shunned.took(self.lane.topic, [partition])

    def _refuse_doubted(self, count: int) -> None:
        for row, error in self._doubted[:count]:
            self.ledger.refuse(row, text_of(error))
        del self._doubted[:count]

    async def _isolate(self, partition: int, rows: list[Row]) -> None:
        """Find the messages that Kafka refuses by halving, in order, and park them; all others are sent. Those that
        have waited for longer than their topic takes get the time of now. Where only all together are too large, the
        next batches are smaller. Raises `ClocksApart` where that is refused, too: it is no message's fault. Those that
        are refused with an error that aiokafka does not know are doubted until a later one is accepted; raises it where
        these are too many."""
        while rows:
            accepted = self.ledger.accepted
            error, rest = await self._try(partition, rows)
            if isinstance(error, InvalidTimestampError):
                error, rest = await self._try(partition, rows, as_of_now=True)
                if isinstance(error, InvalidTimestampError) and all(timestamp_ms_of(row) is None for row in rows):
                    raise ClocksApart
            if error is None:
                if self.ledger.accepted > accepted:
                    self._refuse_doubted(len(self._doubted))
                rows = rest
                continue
            if len(rows) == 1 and isinstance(error, UnknownError):
                self._doubted.append((rows[0], error))
                if len(self._doubted) == _IN_A_ROW:
                    raise error
                return
            if len(rows) == 1:
                self.ledger.refuse(rows[0], text_of(error))
                return
            own, before, middle = await self._senders.own(), self.ledger.accepted, len(rows) // 2
            too_many = own.batch_bytes
            await self._isolate(partition, rows[:middle])
            await self._isolate(partition, rows[middle:])
            if isinstance(error, TOO_LARGE) and self.ledger.accepted - before == len(rows):
                own.batch_bytes = min(own.batch_bytes, too_many // 2)
            return

    async def _try(
        self, partition: int, rows: list[Row], *, as_of_now: bool = False
    ) -> tuple[BaseException | None, list[Row]]:
        """Send these alone. Returns the refusal, and what had no room: a batch has the first timestamp, and how far the
        others are from it, so that other ones may need more. Raises `Failed` for anything else."""
        rows = self.ledger.still_ours(rows)
        if not rows:
            return None, []
        sender = await self._senders.own()
        await self._partitions(sender)  # it asks for them otherwise when it sends, for ever where it is ended meanwhile
        packed, future = await self._hand_over(sender, partition, rows, as_of_now=as_of_now)
        if future is None:
            return None, packed.rest
        if await self._answers({future}):
            raise self._senders.failure(sender, sender.late(self.lane.topic, [partition]), unreachable=True)
        error = self._error_of(sender, partition, packed.rows, future)
        if error is None:
            self.ledger.accept(packed.rows)
        elif not self._is_refusal(error):
            raise self._senders.failure(sender, error)
        return error, packed.rest

    def _is_refusal(self, error: BaseException) -> bool:
        return isinstance(error, NEVER) or (isinstance(error, UnknownError) and self._failures >= _DOUBTS)

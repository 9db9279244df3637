"""Fetching the messages of one topic: which partitions are asked for next, and what is done about those of which
nothing can be read. What comes of the messages is said in `topic_loop` and `stateless_loop`."""

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import (
    IllegalStateError,
    KafkaError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
)

from ..errors import UndecodableMessage
from ..jobs import Snooze
from ..jobs.retry import asked_seconds
from ..outage import Outage
from ..waiting import set_within, unless_set
from .calling import text_of
from .membership import UNREADABLE, AnyOf
from .message import Record
from .partition import Item, Partition, State, tell_undecodable
from .subscription import Subscription

__all__ = ["LOOK_AGAIN_SECONDS", "FetchLoop", "Roof"]

log = logging.getLogger("sidings.consumer")

_POLL_SECONDS = 0.2  # a partition that has just been placed waits for the end of a poll that does not ask for it
LOOK_AGAIN_SECONDS = 10.0  # at a record that could not be read, or at a topic that may not be
_SUSPECT_POLL_SECONDS = 0.02  # of one partition alone, for which the others wait
_REBALANCE_SECONDS = 10.0  # how long to sit in a poll while the group rebalances, before looking around


class Roof(Protocol):
    """What a topic's loop needs of the consumer that it is a part of."""

    @property
    def paused(self) -> bool:
        """Nothing new may be taken up: a rebalance, a stop, or a client that is given up."""
        ...

    @property
    def ending(self) -> bool:
        """All that runs is being cancelled: what handlers make of that is no failure of theirs."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends with the consumer. Raises `CancelledError` while all that runs is being cancelled."""
        ...

    def place(self) -> None:
        """Some partition has to be placed anew."""
        ...

    def displace(self, partitions: Iterable[Partition]) -> None:
        """What is in memory of these may be wrong: they have to be placed anew."""
        ...


class FetchLoop(ABC):
    """Fetches one topic's messages with `client`; `partitions` are those of it that are assigned now."""

    aside = ""  # what becomes of a message that cannot be decoded, where that is sure before it is handled
    how_to_pass = "service.reset_offsets to the offset behind it"

    def __init__(
        self,
        subscription: Subscription[object],
        client: AIOKafkaConsumer,
        partitions: Mapping[TopicPartition, Partition],
        roof: Roof,
        *,
        max_records: int,
    ) -> None:
        self.topic = subscription.topic
        self.turned_at = time.monotonic()  # a health check looks at it, and at these
        self.put_off = Outage(log, f"{self.topic}: messages could not be decoded yet")
        self.outages: Sequence[Outage] = (self.put_off,)
        self._subscription = subscription
        self._client = client
        self._partitions = partitions
        self._roof = roof
        self._max_records = max_records
        self._changed = asyncio.Event()
        self._turn = 0
        self._served: set[Partition] = set()  # whose messages went before those of others, in full batches

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """What is under way."""

    @property
    def _resting(self) -> bool:
        """Nothing new may be taken up, of this topic at least."""
        return self._roof.paused

    @abstractmethod
    async def _handle(self, items: list[Item]) -> None:
        """Take up these messages, which stand first in their partitions."""

    def wake(self) -> None:
        """Partitions have become ready."""
        self._changed.set()

    def displace(self, partitions: Iterable[Partition]) -> None:
        """What is in memory of these may be wrong: they have to be placed anew."""
        self._roof.displace(partitions)

    async def run(self) -> None:
        """Consume until cancelled, also where a handler swallows that. Raises `KafkaError` when the client has to be
        made anew."""
        while not self._roof.ending:
            self.turned_at = time.monotonic()
            items = await self._next_batch()
            if items:
                await self._handle(items)

    # -- fetching ---------------------------------------------------------------------------------------------------

    async def _next_batch(self) -> list[Item]:
        self._changed.clear()
        mine = self._partitions.values()
        ready = [p for p in mine if p.state is State.READY]
        if not ready or self._resting:
            await self._wait_for_change()
            return []
        if not any(partition.items for partition in ready):
            due = [partition for partition in ready if partition.put_off <= time.monotonic()]
            await self._poll(self._whose_turn(due), interrupted=any(p.state is State.ASIDE for p in mine))
        if self._resting:
            return []
        items = [item for partition in ready if partition.state is State.READY for item in partition.items]
        return items[: self._max_records]

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await set_within(self._changed, _POLL_SECONDS)

    async def _poll(self, ready: Sequence[Partition], *, interrupted: bool) -> None:
        """Fetch messages of these partitions. interrupted: one that comes back meanwhile ends it, with what that has in
        memory: else each message of it that fails would cost as long as the others have none.

        Other errors of Kafka pass through: what had been fetched before them may be lost to us (aiokafka has moved its
        positions), so that only a new client, placed anew, is sure to miss nothing."""
        try:
            async with asyncio.timeout(_REBALANCE_SECONDS):
                ready = [partition for partition in ready if await self._in_place(partition)]
                if not ready:
                    await self._wait_for_change()  # to be told so takes aiokafka no await: the loop must not spin
                    return
                seconds = _SUSPECT_POLL_SECONDS if ready[0].suspect else 0.0 if self._served else _POLL_SECONDS
                polling = cast(
                    Coroutine[Any, Any, Mapping[TopicPartition, Sequence[Record]]],
                    self._client.getmany(
                        AnyOf(partition.tp for partition in ready),
                        timeout_ms=round(seconds * 1000),
                        max_records=1 if ready[0].careful else self._max_records,
                    ),
                )
                found = await (unless_set(self._changed, polling) if interrupted else polling)
                polled = self._own(found or {})  # before anybody else has a look at the positions
        except (TimeoutError, NoOffsetForPartitionError):
            return  # a rebalance, in which partitions have no position before they are placed; nothing was fetched
        except OffsetOutOfRangeError as error:
            log.warning("%s: out of the log's range: %s", self.topic, error)
            for tp, offset in cast(Mapping[TopicPartition, int], error.args[0]).items():
                if (partition := self._partitions.get(tp)) is not None:
                    partition.outside = offset
                    self._leave_log(partition)
            await self._pass_gaps(ready)  # where nothing but a gap was read of others, the client has moved on
            return
        except UNREADABLE as error:
            self._isolate(ready, error)
            return
        except TopicAuthorizationFailedError:  # of this topic: it concerns no other
            for partition in ready:
                self._refuse(partition, f"there is no right to read the topic {self.topic!r}: grant it")
            return
        except KafkaError:
            raise
        except Exception as error:  # a mistake inside of the client: a new one is sure to be in order
            raise KafkaError(f"the client failed unexpectedly: {error!r}") from error
        await self._take_in(ready, polled)

    async def _take_in(self, ready: Sequence[Partition], polled: Mapping[TopicPartition, Sequence[Record]]) -> None:
        """A poll of these partitions has brought this."""
        self._served.update(partition for partition in ready if partition.tp in polled)
        if sum(map(len, polled.values())) < self._max_records:
            self._served.clear()  # there was nothing else
            idle_at = time.monotonic()
            for partition in ready:
                partition.idle_at = idle_at
                if (answered := self._answered(partition)) not in (None, partition.answered):
                    partition.answered, partition.answered_at = answered, idle_at
        for tp, records in polled.items():
            partition = self._partitions.get(tp)
            if partition is None:
                continue  # revoked meanwhile
            try:
                position = await self._position(tp)
            except IllegalStateError:
                continue
            # Assigned anew, or moved, forward or back: these records may be from any position.
            moved = records[0].offset < partition.end or position <= records[-1].offset
            if partition.state is not State.READY or partition.items or moved:
                self.displace([partition])
                continue
            partition.end = position
            self._take(partition, records)
            partition.unreadable = None
            partition.careful = max(0, partition.careful - len(records))
        await self._pass_gaps(partition for partition in ready if partition.tp not in polled)
        if ready[0].suspect:
            self._look_at_suspect(ready[0])

    def _own(self, found: Mapping[TopicPartition, Sequence[Record]]) -> dict[TopicPartition, Sequence[Record]]:
        """What is this topic's. There should be nothing else; if there is, its own loop, which would take what is
        missing for a gap, reads it again."""
        for tp, records in found.items():
            if tp.topic != self.topic:
                log.error("%s: a poll brought records of %s/%s; it is put back", self.topic, tp.topic, tp.partition)
                with contextlib.suppress(IllegalStateError):  # revoked
                    self._client.seek(tp, records[0].offset)
        return {tp: records for tp, records in found.items() if tp.topic == self.topic}

    def _whose_turn(self, ready: Sequence[Partition]) -> Sequence[Partition]:
        """All; while some are suspect, those that are not, and each of the others alone, in turns.

        After a full batch only those of which it had nothing, until one is not full: aiokafka gives a megabyte of one
        partition, once that is fetched, before anything of the next, and who has much to read kept the others waiting.
        """
        suspects = [partition for partition in ready if partition.suspect]
        if not suspects:
            others = [partition for partition in ready if partition not in self._served]
            if not 0 < len(others) < len(ready):
                self._served.clear()
                return ready
            return others
        self._served.clear()
        self._turn += 1
        if self._turn % 2 and len(suspects) < len(ready):
            return [partition for partition in ready if not partition.suspect]
        return [suspects[self._turn // 2 % len(suspects)]]

    def _isolate(self, polled: Sequence[Partition], error: Exception) -> None:
        """A record of one of these cannot be read, and aiokafka does not say of which; what it had read of the others
        is lost with it. So they are read again, each alone; and that one record by record, up to the bad one."""
        if len(polled) > 1:
            log.warning("%s: some record cannot be read, looking for it: %r", self.topic, error)
        elif polled[0].careful:
            end = polled[0].end
            why = f"the record at offset {end} cannot be read ({error!r}); where that cannot be mended, pass it over: "
            self._refuse(polled[0], why + self.how_to_pass)
            return
        else:
            polled[0].careful = self._max_records
        for partition in polled:
            partition.suspect = True
        self.displace(polled)

    def _look_at_suspect(self, partition: Partition) -> None:
        """It was polled alone: is it sound?"""
        if partition.items:
            sound = not partition.careful
        else:  # nothing came: because there is nothing?
            try:
                end = self._client.last_stable_offset(partition.tp)
            except (AssertionError, AttributeError):
                return  # revoked
            sound = end is not None and partition.end >= end
        if sound:
            partition.trust()

    def _refuse(self, partition: Partition, why: str) -> None:
        """Nothing more of it can be read, and nothing else waits for that."""
        if self._partitions.get(partition.tp) is not partition:
            return  # assigned anew meanwhile, and not to be paused: whoever polls it then is told so again
        told = f"{partition.origin} stands still: {why}"
        if partition.unreadable is None:
            log.error("%s", told)
        partition.unreadable = told
        partition.answered = self._answered(partition)  # what Kafka has said before does not count
        self._hold(partition)
        self._roof.spawn(self._look_again(partition))

    def _hold(self, partition: Partition) -> None:
        partition.enter(State.REFUSED, partition.unreadable or "")
        with contextlib.suppress(IllegalStateError):  # revoked
            self._client.pause(partition.tp)

    async def _look_again(self, partition: Partition) -> None:
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
        if partition.state is State.REFUSED:
            self._roof.place()

    async def _pass_gaps(self, silent: Iterable[Partition]) -> None:
        """Nothing came of these: where the client has moved on, there was only a gap, e.g. a transaction's marker."""
        for former in silent:
            # A rebalance meanwhile may have given us back what we had, placed anew.
            partition = self._partitions.get(former.tp)
            if partition is None or partition.state is not State.READY:
                continue  # assigned anew: it has no position before it is placed, which may take for ever
            try:
                position = await self._position(partition.tp)
            except IllegalStateError:
                continue
            if not self._roof.paused and partition.state is State.READY and position > partition.end:
                partition.end, partition.put_off = position, 0.0
            # Whether Kafka has let us read of it since it was placed, be it that there is nothing.
            if not partition.suspect and partition.answered_at > partition.since:
                partition.unreadable = None

    def _answered(self, partition: Partition) -> int | None:
        """When Kafka has last told of it, in milliseconds since 1970; None where it has not."""
        try:
            return self._client.last_poll_timestamp(partition.tp)
        except (AssertionError, AttributeError):
            return None  # revoked

    async def _in_place(self, partition: Partition) -> bool:
        """Whether the client goes on reading where we are: the compare-and-set trusts that what comes next in the log
        is what comes next here."""
        try:
            position = await self._position(partition.tp)
        except IllegalStateError:
            return False  # revoked
        if position != partition.end:
            log.error("%s: the client stands at %s instead of %s", partition.origin, position, partition.end)
            self.displace([partition])
        return position == partition.end

    async def _position(self, tp: TopicPartition) -> int:
        # At hand, and not waited for, unless a rebalance is about to be announced.
        return await self._client.position(tp)

    def _take(self, partition: Partition, records: Sequence[Record]) -> None:
        """Decode them, up to one that its decoder puts off: from that on they are read again, when it is due."""
        for record in records:
            try:
                partition.items.append(self._item(partition, record))
            except Snooze as snooze:
                self.put_off.failed(f"{partition.origin} offset {record.offset}: {text_of(snooze)}")
                partition.put_off = time.monotonic() + max(asked_seconds(snooze) or 0.0, _POLL_SECONDS)
                partition.end = record.offset
                self._client.seek(partition.tp, record.offset)
                return
        partition.put_off = 0.0
        if self.put_off.seconds() and not any(p.put_off for p in self._partitions.values()):
            self.put_off.over()

    def _item(self, partition: Partition, record: Record) -> Item:
        subscription = self._subscription
        try:
            message = subscription.decode(record)
            if subscription.passes_over(message):
                return Item(partition, record, None, None)
            return Item(partition, record, message, None, subscription.id_of(record, message))
        except UndecodableMessage as error:
            if self.aside:
                tell_undecodable(partition, record, self.aside, error)
            return Item(partition, record, None, str(error), subscription.id_of(record, None))

    def _leave_log(self, partition: Partition) -> None:
        """What comes next of it is not in the log: the placer knows what that means."""
        self.displace([partition])

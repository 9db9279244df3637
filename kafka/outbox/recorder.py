"""Writes down what came of the sending: acknowledged messages are deleted, refused ones parked, in fenced
statements."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, groupby
from uuid import UUID

import asyncpg

from ...errors import PostgresUnavailable
from ...executor import Backoff, Link, now
from ...jobs.outcome import storable
from ...outage import Outage
from ...schema import int_array, load_sql
from ...waiting import set_within
from .amends import cannot
from .backlog import Backlog, Lane, Row, Slot, id_of, key_of, order_key_of, published_us_of, slot_of
from .metrics import OutboxMetrics

__all__ = ["Recorder", "clean"]

log = logging.getLogger("sidings.outbox")

_AT_ONCE = 5_000  # messages of one statement
_LOOKED_AT = 5_000  # messages of a slot, of whatever topic, that a statement looks at to find those of one to park
_FEWER = 4  # so many times fewer are parked at once after a statement that was not answered in time
_ERROR_CHARACTERS = 2_000
_LOCKED_SECONDS = 1.0  # until messages that are locked are looked at again

_Sent = list[tuple[Lane, Sequence[Row]]]
_Refused = list[tuple[Lane, Row, str]]
_Each = tuple[Lane, Row, str | None]  # with the error, if it was refused


class Recorder:
    """Gathers outcomes while a statement is under way, and repeats what was not answered: repeating is harmless. What
    somebody else's transaction keeps locked is put off, so that it holds up no other but those behind it in its order.

    parking: a connection for parking whole topics, which may look through all that waits: others record meanwhile.
    on_fenced: the database says that a slot has another owner. on_room: messages have left the memory.
    """

    def __init__(
        self,
        link: Link,
        parking: Link,
        backlog: Backlog,
        metrics: OutboxMetrics,
        *,
        schema: str,
        on_fenced: Callable[[Slot], None],
        on_room: Callable[[], None],
    ) -> None:
        self.relay_id: UUID | None = None
        self.outage = Outage(log, "acknowledgements could not be recorded")
        self._link = link
        self._parking = parking
        self._parking_lock = asyncio.Lock()
        self._backlog = backlog
        self._metrics = metrics
        self._schema = schema
        self._on_fenced = on_fenced
        self._on_room = on_room
        self._sent: _Sent = []
        self._refused: _Refused = []
        self._parks = _AT_ONCE  # of a whole topic at once
        self._locked: list[_Each] = []  # and what is behind it
        self._locked_since = self._looked_at = 0.0
        self._work = asyncio.Event()

    def acknowledged(self, lane: Lane, rows: Sequence[Row]) -> None:
        """Kafka has taken these: delete them."""
        if rows:
            oldest = min(map(published_us_of, rows))
            self._metrics.sent(lane.topic, len(rows), time.time() - oldest / 1e6)
            self._sent.append((lane, rows))
            self._work.set()

    def refused(self, lane: Lane, row: Row, error: str) -> None:
        """Kafka will never take this one: park it."""
        error = clean(error)
        log.error("a message for %s was refused and is parked (id %s): %s", lane.topic, id_of(row), error)
        self._metrics.parked(lane.topic, 1)
        self._refused.append((lane, row, error))
        self._work.set()

    async def run(self) -> None:
        """Record for ever."""
        backoff, outage = Backoff(), self.outage
        while True:
            await set_within(self._work, _LOCKED_SECONDS if self._locked else None)
            self._work.clear()
            await self._take_up()
            while self._sent or self._refused:
                sent, refused = self._next()
                if self._locked:
                    sent, refused = self._keep_back(_each(sent, refused))
                while True:
                    try:
                        await self._record(sent, refused)
                        backoff.reset()
                        outage.over()
                        break
                    except (PostgresUnavailable, asyncpg.PostgresError) as error:
                        outage.failed(error)
                        if isinstance(error, asyncpg.LockNotAvailableError):
                            sent, refused = await self._put_off(sent, refused)
                        await backoff.sleep()
                for lane, rows in [*sent, *((lane, (row,)) for lane, row, _ in refused)]:
                    lane.account(rows)
                    self._backlog.unlocked(lane.topic, rows)
                self._on_room()
                await self._take_up()

    def locked_of(self, lane: Lane) -> int:
        """How many of its messages Kafka has, and somebody keeps from being deleted."""
        return sum(other is lane for other in self._backlog.locked.values())

    def locked_seconds(self) -> float:
        """For how long some messages have been locked by now."""
        return now() - self._locked_since if self._locked else 0.0

    async def _put_off(self, sent: _Sent, refused: _Refused) -> tuple[_Sent, _Refused]:
        """Put off what is locked; the rest is returned."""
        each = _each(sent, refused)
        try:
            locked = await self._which_are_locked([row for _, row, _ in each])
        except (PostgresUnavailable, asyncpg.PostgresError):
            return sent, refused
        if not locked:
            return sent, refused
        if not self._locked:
            log.warning("somebody's transaction keeps messages locked that Kafka has, so they cannot be deleted yet")
            self._locked_since = now()
        self._looked_at = now()
        return self._keep_back(each, locked)

    async def _take_up(self) -> None:
        """Record what is locked no more, before all that has come since."""
        if not self._locked or now() < self._looked_at + _LOCKED_SECONDS:
            return
        self._looked_at = now()
        heads = {_order(lane, row) or row[:2]: row for lane, row, _ in reversed(self._locked)}
        try:
            locked = await self._which_are_locked(list(heads.values()))
        except (PostgresUnavailable, asyncpg.PostgresError):
            return
        waiting, self._locked = self._locked, []
        sent, refused = self._keep_back(waiting, locked)
        self._sent, self._refused = sent + self._sent, refused + self._refused

    def _keep_back(self, each: list[_Each], locked: Collection[tuple[int, Slot]] = ()) -> tuple[_Sent, _Refused]:
        """Put off what is locked, and what is behind it in the order of its key: were that deleted first, another relay
        would send the older one again, as the last of its key. The rest is returned."""
        orders = {_order(lane, row) for lane, row, _ in self._locked} - {None}
        sent: _Sent = []
        refused: _Refused = []
        for lane, row, error in each:
            order = _order(lane, row)
            if row[:2] in locked or order in orders:
                self._locked.append((lane, (*row[:4], None, None, *row[6:]), error))  # it may be for long
                self._backlog.locked[row[:2]] = lane
                lane.event.set()  # it may wait for what is under way
                orders |= {order} - {None}
            elif error is None:
                sent.append((lane, [row]))
            else:
                refused.append((lane, row, error))
        return sent, refused

    async def _which_are_locked(self, rows: list[Row]) -> set[tuple[int, Slot]]:
        """Ids and slots; none of slots that are not ours any more, of which nothing is recorded."""
        ours = {(slot.number, id): (id, slot) for id, slot, *_ in rows if self._backlog.has(slot)}
        answer = await self.call("locked", [number for number, _ in ours], [id for _, id in ours])
        return {ours[row["slot"], row["id"]] for row in answer}

    def _next(self) -> tuple[_Sent, _Refused]:
        count, size = 0, 0
        while count < len(self._sent) and size < _AT_ONCE:
            size += len(self._sent[count][1])
            count += 1
        sent, self._sent = self._sent[:count], self._sent[count:]
        refused, self._refused = self._refused, []
        return sent, refused

    async def _record(self, sent: _Sent, refused: _Refused) -> None:
        ids: defaultdict[Slot, list[int]] = defaultdict(list)
        for _, rows in sent:
            for slot, run in groupby(rows, slot_of):
                ids[slot].extend(map(id_of, run))
        slots = [slot for slot in ids.keys() | {slot_of(row) for _, row, _ in refused} if self._backlog.has(slot)]
        if not slots:
            return
        flat = [id for slot in slots for id in ids[slot]]
        ends = list(accumulate(len(ids[slot]) for slot in slots))
        parks = [(row, error) for _, row, error in refused if self._backlog.has(slot_of(row))]
        await self._doubt(sent)
        answer = await self.call(
            "record",
            self.relay_id,
            [slot.number for slot in slots],
            [slot.name for slot in slots],
            [slot.epoch for slot in slots],
            [end - len(ids[slot]) + 1 for slot, end in zip(slots, ends, strict=True)],
            ends,
            int_array(flat),
            [slot_of(row).number for row, _ in parks],
            [id_of(row) for row, _ in parks],
            [error for _, error in parks],
            self._backlog.timeline,
        )
        mine = {row["slot"] for row in answer}
        for slot in slots:
            if slot.number not in mine:
                self._on_fenced(slot)

    async def _doubt(self, sent: _Sent) -> None:
        """Before messages go that may have been sent before: another copy of them may yet come, behind newer ones."""
        for lane, rows in sent:
            if lane.topic in self._backlog.directories:
                keys = {key for row in rows if id_of(row) <= slot_of(row).repeated and (key := key_of(row)) is not None}
                if keys:
                    try:
                        await self.call("doubt", lane.topic, list(keys))
                    except asyncpg.PostgresError as error:
                        cannot(lane.topic, error)  # a key too large for an index: nothing else waits for that

    async def park_topic(self, topic: str, error: str) -> int:
        """Park all that waits for a topic in our slots, and return how many. Raises as `Link.fetch` does. Some at once:
        millions would take longer than a statement may. Fewer where these have, as they are large."""
        async with self._parking_lock:
            try:
                return await self._park(topic, clean(error))
            finally:
                await self._parking.close()  # it is seldom needed

    async def _park(self, topic: str, error: str) -> int:
        total, query = 0, load_sql(__package__, "park_topic", self._schema)
        after = dict.fromkeys(self._backlog.slots.values(), 0)
        while slots := [slot for slot in after if self._backlog.has(slot)]:
            most = self._parks
            sent = [id for (id, _), lane in self._backlog.locked.items() if lane.topic == topic]
            try:
                answer = await self._parking.fetch(
                    query,
                    self.relay_id,
                    [slot.number for slot in slots],
                    [slot.name for slot in slots],
                    [slot.epoch for slot in slots],
                    topic,
                    error,
                    most,
                    sent,
                    [after[slot] for slot in slots],
                    _LOOKED_AT,
                )
            except PostgresUnavailable:
                self._parks = max(1, most // _FEWER)
                raise
            self._parks = min(2 * most, _AT_ONCE)
            upto = {row["slot"]: row["upto"] for row in answer}
            after = {slot: upto[slot.number] for slot in slots if upto.get(slot.number) is not None}
            if answer:
                self._metrics.parked(topic, answer[0]["parked"])
                total += answer[0]["parked"]
        return total

    async def call(self, query: str, *args: object) -> list[asyncpg.Record]:
        """One statement over the recorder's connection."""
        return await self._link.fetch(load_sql(__package__, query, self._schema), *args)


def _each(sent: _Sent, refused: _Refused) -> list[_Each]:
    return [*((lane, row, None) for lane, rows in sent for row in rows), *refused]


def _order(lane: Lane, row: Row) -> tuple[str, bytes] | None:
    """What its order is that of: its topic and key, or partition key; None: it has none."""
    key = order_key_of(row)
    return None if key is None else (lane.topic, key)


def clean(error: str) -> str:
    """An error text that Postgres can store."""
    return storable(error, _ERROR_CHARACTERS)

"""The relay's reader: one read in flight, for all held slots, in one snapshot. The reader of jobs is its model."""

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import asyncpg

from ...errors import PostgresUnavailable
from ...executor import Backoff, Link, ReadMarks, now
from ...outage import Outage
from ...schema import load_sql
from ...waiting import poll
from .backlog import Backlog, Lane, Row, Slot, id_of

__all__ = ["Reader"]

log = logging.getLogger("sidings.outbox")

_HEADER, _LATE, _REFILL, _FORWARD, _SCANNED = range(5)
_LOOKED = 8  # a part of its own: up to which id a refill has looked
_LEFT = 4  # added to the part of a row that was left in the database, as it is too large
_IDLE_PAGE = 16
_REFILL_PAGE = 1_000
_REFILLS = 32  # shares a read refills
_LOOKED_AT = 5_000  # rows of a slot that a read looks at, to find those of a topic, or of those not left out
_ALL_LATE = 50_000  # rows of a read: they come when a transaction ends, whatever there is room for
_BYTES = 32 * 1024 * 1024  # a read should bring no more than about that
_MOST_BYTES = 2 * _BYTES  # nor may it, whatever came before; but for a single message that is larger
_HELD_BYTES = 4 * _BYTES  # memory should have no more
_TYPICAL_BYTES = 500.0  # of a message, before any has been seen
_QUICK_READ = 1.0  # seconds: one that was answered within so many may be followed by a larger one again
_STEPPING_READ = 1.0  # seconds: one that takes longer may step over millions of messages that are not committed
_SAMPLED = 16  # one row of so many is looked at for how large they are

_Run = tuple[int, int, list[asyncpg.Record]]  # part, number of the slot or share in the plan, rows

_part_and_ref: Callable[[asyncpg.Record], tuple[int, int]] = itemgetter(0, 1)


@dataclass(slots=True)
class _Plan:
    slots: list[Slot]
    highs: list[int]
    pages: list[int]
    left_out: list[str]
    shares: list[tuple[Lane, int, Slot, int, int]]  # lane, its version, slot, after, up to
    refill: int
    most_late: int
    largest: int  # bytes of a row


class Reader:
    """Reads page by page while the backlog has room, then when woken, and at the latest every `poll_seconds`.

    on_rows: lanes have something to send. on_new_server: Postgres was restarted or replaced.
    """

    def __init__(
        self,
        link: Link,
        backlog: Backlog,
        *,
        schema: str,
        poll_seconds: float,
        on_rows: Callable[[], None],
        on_new_server: Callable[[], None],
    ) -> None:
        self.last_answer = now()
        self.outage = Outage(log, "the outbox could not be read")
        self.server: str | None = None
        self._link = link
        self._backlog = backlog
        self._poll_seconds = poll_seconds
        self._on_rows = on_rows
        self._on_new_server = on_new_server
        self._marks = ReadMarks()
        self._drawn = 0  # how far ids had been drawn at the last read
        self._sql = load_sql(__package__, "read", schema)
        self._advance_sql = load_sql(__package__, "advance", schema)
        self._behind = Outage(log, "the sequence is behind the outbox, and could not be moved on")
        self._woken = asyncio.Event()
        self._row_bytes = _TYPICAL_BYTES
        self._left: dict[Slot | tuple[Lane, Slot], int] = {}  # what the last read found too large, of a slot or a share
        self._most: int | None = None  # rows of a read; None: as many as there is room for
        self._too_long = 0  # reads in a row

    def wake(self) -> None:
        """Something was committed, or there is room again: read now."""
        self._woken.set()

    async def run(self) -> None:
        """Read for ever."""
        backlog, backoff, outage = self._backlog, Backoff(), self.outage
        while True:
            await poll(self._woken, self._poll_seconds)
            self._woken.clear()
            plan = self._plan()
            if not plan.slots:
                self.last_answer = now()
                continue
            sent = now()
            try:
                rows = await self._link.fetch(self._sql, *self._arguments(plan))
                backoff.reset()
                outage.over()
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                outage.failed(error)
                self._woken.set()
                if now() - sent >= self._link.long_seconds:
                    self._ask_for_less(plan)
                    if self._too_long > 2:
                        await self._link.be_patient()  # the reader of jobs has the reason
                await backoff.sleep()
                continue
            took, self._too_long = now() - sent, 0
            if self._most is None:
                self._link.patience = 1
            elif took < _QUICK_READ:
                self._most = self._most * 2 if self._most < backlog.window else None
            self._deliver(plan, rows, passing=took > _STEPPING_READ)
            if (top := max((s.high for s in backlog.slots.values() if not s.draining), default=0)) > self._drawn:
                await self._advance(plan, top)
            self.last_answer = now()
            self._on_rows()

    async def _advance(self, plan: _Plan, top: int) -> None:
        """The sequence of ids is behind the messages: move it on, and begin at 0 with all slots: what may stand behind
        our marks comes then."""
        try:
            await self._link.fetch(self._advance_sql, top)
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            self._behind.failed(error)
            return
        self._behind.over()
        log.error(
            "the sequence stood behind the outbox (%s, a message at %s), as after a logical replication: moved on. "
            "What was stored meanwhile is sent before older messages of its keys (docs/operations.md, Another server)",
            *(self._drawn, top),
        )
        for slot in plan.slots:
            self._backlog.forget(slot)

    def _ask_for_less(self, plan: _Plan) -> None:
        """The read took too long: its rows may be large, and the way here narrow. Where the very next one took too long
        as well, it may have looked for late rows among millions that wait; from 0 on, where slots begin that are
        acquired anew, no row is late."""
        self._too_long += 1
        if self._too_long > 1:
            for slot in plan.slots:
                self._backlog.forget(slot)
        self._most = max(1, (sum(plan.pages) + len(plan.shares) * plan.refill) // 4)

    def hungry(self) -> bool:
        """Whether the database is known to have more than is in memory, and there is room for it."""
        backlog, most = self._backlog, self._most_held()
        if backlog.room(most) < min(backlog.page, max(1, most // 4)):
            return False
        return any(s.backlogged and not s.draining for s in backlog.slots.values()) or bool(backlog.hungry())

    def _most_held(self) -> int:
        """Of large messages, memory has fewer than the window."""
        return max(1, int(_HELD_BYTES / self._row_bytes))

    def _plan(self) -> _Plan:
        backlog = self._backlog
        slots = [slot for slot in backlog.slots.values() if not slot.draining]
        fitting = max(1, int(_BYTES / self._row_bytes))
        room = min(backlog.room(self._most_held()), 2 * backlog.page, fitting)
        busy = sum(slot.backlogged for slot in slots)
        left_out = backlog.left_out()
        found = backlog.to_refill(min(_REFILLS, fitting)) if room else []
        for_refills = 0 if not found else room // 2 if busy else room
        refill = min(_REFILL_PAGE, max(_IDLE_PAGE, for_refills // max(1, len(found))), fitting // max(1, len(found)))
        idle = max(1, min(_IDLE_PAGE, fitting // max(1, len(slots))))
        page = max(idle, (room - for_refills) // max(1, busy)) if room else 0
        pages = [page if slot.backlogged else min(page, idle) for slot in slots]
        most_late = max(_IDLE_PAGE, min(_ALL_LATE, fitting) // max(1, len(slots)))
        left, most = self._left, self._most
        largest = max(left.values(), default=0)
        if largest:
            most = max(1, min(most or backlog.window, _MOST_BYTES // largest))
            found.sort(key=lambda share: -left.get(share[:2], 0))
        if most is not None:
            turn = random.sample(range(len(slots)), len(slots))
            turn = sorted(turn, key=lambda n: -left.get(slots[n], 0))[:most]
            pages = [min(page, most // len(turn)) if n in turn else 0 for n, page in enumerate(pages)]
            refill = min(refill, most)
            found = found[: most // refill]
            most_late = min(most_late, most + 1)
        largest = max(largest, _MOST_BYTES // max(1, sum(pages) + len(found) * refill))
        shares = [(lane, lane.version, slot, after, slot.high) for lane, slot, after in found]
        return _Plan(slots, [slot.high for slot in slots], pages, left_out, shares, refill, most_late, largest)

    def _arguments(self, plan: _Plan) -> tuple[object, ...]:
        marks = self._marks
        return (
            [slot.number for slot in plan.slots],
            plan.highs,
            plan.pages,
            marks.snapshot,
            list(marks.open),
            list(marks.open.values()),
            marks.unseen,
            plan.left_out,
            [slot.number for _, _, slot, _, _ in plan.shares],
            [lane.topic for lane, _, _, _, _ in plan.shares],
            [after for _, _, _, after, _ in plan.shares],
            [upto for _, _, _, _, upto in plan.shares],
            plan.refill,
            plan.most_late,
            plan.largest,
            _BYTES,
            _LOOKED_AT,
        )

    def _deliver(self, plan: _Plan, rows: list[asyncpg.Record], *, passing: bool) -> None:
        """Apply late rows, refills and forward rows, in this order. passing: the marks pass what is not committed."""
        backlog = self._backlog
        header = rows[0]
        assert header[0] == _HEADER
        server: str = header["headers"]
        lived_on = self._link.lived_on(header["ref"])
        timeline = server.rpartition(" ")[2]
        elsewhere = any(slot.timeline not in (None, timeline) for slot in plan.slots if backlog.has(slot))
        if server == "standby" or elsewhere or not (lived_on or self.server in (None, server)):
            self._new_server(server, elsewhere=elsewhere)
            return
        self.server, backlog.timeline = server, timeline
        high_before = max(plan.highs)
        refills: list[list[Row]] = [[] for _ in plan.shares]
        forward: list[defaultdict[str, list[Row]]] = [defaultdict(list) for _ in plan.slots]  # by slot and topic
        tops: dict[int, tuple[int, int]] = {}  # up to which id it was looked, and at how many
        looked: dict[int, int] = {}
        runs, left = _before(rows)
        full = {ref for part, ref, run in runs if part == _LATE and len(run) >= plan.most_late}  # there may be more
        for ref in full.union(ref for part, ref in left if part == _LATE):
            if backlog.has(plan.slots[ref - 1]):
                backlog.forget(plan.slots[ref - 1])  # acquired anew, all of it is read page by page
        # Of a slot that drains what waited was forgotten: what comes now would be sent before it, which its heir sends.
        live = [backlog.has(slot) and not slot.draining for slot in plan.slots]
        for part, ref, run in runs:
            if part == _FORWARD:
                topics, slot = forward[ref - 1], plan.slots[ref - 1]  # as `_messages`, without a step for each of them
                for _, _, id, topic, key, partition_key, value, headers, timestamp_ms, published_us in run:
                    topics[topic].append((id, slot, key, partition_key, value, headers, timestamp_ms, published_us))
            elif part == _REFILL:
                refills[ref - 1] += [row for _, row in _messages(run, plan.shares[ref - 1][2])]
            elif part == _LATE and live[ref - 1]:
                for topic, row in _messages(run, plan.slots[ref - 1]):
                    backlog.late(topic, row)
            elif part == _SCANNED:
                tops[ref] = run[0][2] or 0, run[0][8]
            elif part == _LOOKED:
                looked[ref] = run[0][2]
        left_out = set(plan.left_out)
        for ref, (lane, version, share, _, upto) in enumerate(plan.shares, start=1):
            found, out = refills[ref - 1], lane.topic in left_out
            more = len(found) >= plan.refill or (_REFILL, ref) in left
            seen = None if more else looked.get(ref)
            backlog.refilled(lane, version, share, found, more=more, upto=upto, left_out=out, seen=seen)
        for topic in plan.left_out:
            for index, slot in enumerate(plan.slots):
                if live[index]:
                    backlog.skipped(topic, slot)
        cut = {ref for part, ref in left if part == _FORWARD}
        self._forward(plan, forward, tops, live, cut, self._drawn if passing else 0)
        self._left = {
            plan.slots[ref - 1] if part == _FORWARD else (plan.shares[ref - 1][0], plan.shares[ref - 1][2]): size
            for (part, ref), size in left.items()
            if part != _LATE
        }
        self._drawn = header["timestamp_ms"]
        sample = [_size_of(row) for row in rows[1::_SAMPLED] if row[0] not in (_SCANNED, _LOOKED)]
        if sample:
            mean = 100.0 + sum(sample) / len(sample)
            self._row_bytes = max(mean, self._row_bytes + 0.2 * (mean - self._row_bytes))
        self._marks.delivered(header["topic"], header["id"], high_before)
        if self.hungry():
            self._woken.set()

    def _forward(
        self,
        plan: _Plan,
        found: Sequence[Mapping[str, list[Row]]],
        tops: Mapping[int, tuple[int, int]],
        live: list[bool],
        cut: Collection[int],
        passable: int,
    ) -> None:
        """Apply the forward rows, and move the slots' marks, at the end of a slot to `passable` at least. cut: slots of
        which more rows have come than were taken."""
        for index, (slot, topics) in enumerate(zip(plan.slots, found, strict=True)):
            count = sum(map(len, topics.values()))
            page = plan.pages[index]
            if not live[index] or not page:
                continue
            for topic, rows in topics.items():
                self._backlog.forward(topic, slot, rows)
                slot.high = max(slot.high, id_of(rows[-1]))
            slot.backlogged = count >= page or index + 1 in cut
            if not slot.backlogged:
                top, looked = tops.get(index + 1, (0, 0))
                slot.backlogged = looked >= max(page, _LOOKED_AT)  # nearly all that it looked at was left out
                # Past the messages of topics that were left out; and past those that are not committed yet, where
                # each read would step over too many. They come as late ones, and of so many the slot begins anew,
                # which takes seconds. `ReadMarks` tells why the mark may go as far as that.
                slot.high = max(slot.high, top, 0 if slot.backlogged else passable)

    def _new_server(self, server: str, *, elsewhere: bool) -> None:
        """Ids and transaction ids may have gone back: nothing that was read can be relied on. elsewhere: our slots are
        another server's, so this may be the former one."""
        if server == "standby":
            log.error("this database is a standby: waiting for a primary; check the DSN")
            self._link.drop()
        else:
            log.warning("Postgres was restarted or replaced (%s): reading the outbox anew", server)
            self.server = None if elsewhere else server
        self._marks.reset()
        self._drawn = 0
        self._on_new_server()


def _before(rows: Iterable[asyncpg.Record]) -> tuple[list[_Run], dict[tuple[int, int], int]]:
    """The rows of each part, and slot or share of it, before the first one that was left in the database; and the sizes
    of these first ones."""
    runs: list[_Run] = []
    left: dict[tuple[int, int], int] = {}
    for (part, ref), run in groupby(rows, _part_and_ref):
        if _LEFT < part < _LOOKED:
            left.setdefault((part - _LEFT, ref), next(run)[8])
        elif (part, ref) not in left:
            runs.append((part, ref, list(run)))
    return runs, left


def _size_of(row: asyncpg.Record) -> int:
    """Bytes of its key, partition key, value and headers."""
    if row[0] > _LEFT:
        return row[8]
    return len(row[4] or b"") + len(row[5] or b"") + len(row[6] or b"") + len(row[7] or "")


def _messages(found: Iterable[asyncpg.Record], slot: Slot) -> Iterator[tuple[str, Row]]:
    """Rows of one slot, each behind its topic."""
    for _, _, id, topic, key, partition_key, value, headers, timestamp_ms, published_us in found:
        yield topic, (id, slot, key, partition_key, value, headers, timestamp_ms, published_us)

"""What a relay knows of the messages in its slots: pure, without I/O and without a clock of its own.

A `Lane` holds the messages of one topic, from all slots, in the order in which they are sent. A slot's share of a lane
is either *complete* (all that was read of it up to the slot's mark is in memory) or *behind*: its messages from some
id on are in the database only, and come back as refills. A topic that fails or is slow is put behind, so that it costs
no memory and no reads, and the others go on.

- Messages of a share that is behind are ignored in the forward part of a read: the refill brings them, in order.
- A share is put behind only when nothing of it is unaccounted for: every message taken out of the lane has either been
  recorded in the database or failed, or is `locked`. Else a refill would bring it twice.
- A late message of a share that is behind is ignored if the refill will find it, and queued if it lies before that.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, takewhile
from math import inf
from operator import itemgetter

__all__ = [
    "Backlog",
    "Lane",
    "Row",
    "Slot",
    "id_of",
    "key_of",
    "order_key_of",
    "published_us_of",
    "repeat",
    "slot_of",
    "timestamp_ms_of",
]


class Slot:
    """A slot that is leased. `high`: up to this id it has been read. `deadline`: until then its messages may be
    sent. `repeated`: up to this id they may have been sent before, by a former owner, or by us without an answer.
    `draining`: nothing more of it is read, as it is given away or was lost."""

    __slots__ = (
        "_over",
        "backlogged",
        "deadline",
        "draining",
        "epoch",
        "high",
        "name",
        "number",
        "repeated",
        "timeline",
        "under_way",
    )

    def __init__(self, number: int, name: str, epoch: int, timeline: str | None = None) -> None:
        self.number = number
        self.name = name
        self.epoch = epoch
        self.timeline = timeline  # of the server that has granted it; what another one says of it means nothing
        self.deadline = inf
        self.high = 0
        self.repeated = 0
        self.backlogged = True
        self.draining = False
        self.under_way = 0  # taken out of a lane and not yet accounted for
        self._over = False

    def expired(self, time: float) -> bool:
        """Whether its lease has run out. Where that was seen once it remains so, also if the answer to a renewal comes
        then: its messages were passed over, and no later ones may be sent."""
        self._over = self._over or self.deadline <= time
        return self._over


# A message as it was read: id, slot, key, partition key, value, headers as JSON, the Kafka record's timestamp in
# milliseconds (None: when it was published), when it was published in microseconds since 1970. A plain tuple: one with
# names takes four times as long to make.
Row = tuple[int, Slot, bytes | None, bytes | None, bytes | None, str | None, int | None, int]

id_of: Callable[[Row], int] = itemgetter(0)
slot_of: Callable[[Row], Slot] = itemgetter(1)
key_of: Callable[[Row], bytes | None] = itemgetter(2)
timestamp_ms_of: Callable[[Row], int | None] = itemgetter(6)
published_us_of: Callable[[Row], int] = itemgetter(7)


def order_key_of(row: Row) -> bytes | None:
    """What orders it, and takes it to its partition: its partition key, else its key; None: it has neither."""
    return row[2] if row[3] is None else row[3]


def repeat(rows: Iterable[Row]) -> None:
    """These may be sent more than once: another copy may yet come when one is acknowledged."""
    for id, slot, *_ in rows:
        slot.repeated = max(slot.repeated, id)


@dataclass(eq=False)
class Lane:
    """The messages of one topic, or of a part of it (`Backlog.split`). unaccounted: those taken out and not yet
    recorded. taken: the highest id taken, by slot."""

    topic: str
    partitions: frozenset[int] = frozenset()  # of a part
    owns: Callable[[Row], bool] | None = None  # of a part: whether a message of the topic is one of its own
    failing: bool = False  # the database says so
    queue: deque[Row] = field(default_factory=deque[Row])
    unaccounted: int = 0
    taken: dict[Slot, int] = field(default_factory=dict[Slot, int])
    behind: dict[Slot, int] = field(default_factory=dict[Slot, int])  # -> the id after which the refill begins
    caught: set[Slot] = field(default_factory=set[Slot])  # of those behind: the last refill was short
    paused: bool = False  # fails or is slow: no refills
    version: int = 0
    event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """As people are told it."""
        return f"{self.topic} {sorted(self.partitions)}" if self.partitions else self.topic

    @property
    def empty(self) -> bool:
        """Whether nothing of it waits, in memory or behind, or is under way."""
        return not (self.queue or self.behind or self.unaccounted)

    def put(self, row: Row) -> None:
        """A message to send; while the lane is paused, one that a refill will bring."""
        id, slot = row[:2]
        if self.paused and id > self.taken.get(slot, 0):
            self._put_behind(slot, id)
            self.changed()
        else:
            self.queue.append(row)

    def peek(self, count: int) -> list[Row]:
        """What `take` would return."""
        return list(islice(self.queue, count))

    def take(self, count: int) -> list[Row]:
        """The next messages to send; from now on they are unaccounted for."""
        queue, taken = self.queue, self.taken
        out = [queue.popleft() for _ in range(min(count, len(queue)))]
        for slot, run in groupby(out, slot_of):
            ids = list(map(id_of, run))
            slot.under_way += len(ids)
            taken[slot] = max(taken.get(slot, 0), *ids)
        self.unaccounted += len(out)
        return out

    def shelve(self) -> None:
        """Put behind what has not been taken: of each slot the messages above the last one taken."""
        kept: deque[Row] = deque()
        for row in self.queue:
            id, slot = row[:2]
            if id <= self.taken.get(slot, 0):
                kept.append(row)  # it came late; a refill from here would bring again what is under way
            else:
                self._put_behind(slot, id)
        self.queue = kept
        self.changed()

    def give_back(self, rows: Sequence[Row]) -> None:
        """These could not be sent, and nothing else is unaccounted for, but what is locked: put them, and all that
        waits, behind."""
        for id, slot, *_ in (*rows, *self.queue):
            if not slot.draining:  # else its next owner reads them
                self._put_behind(slot, id)
        self.queue.clear()
        self.taken.clear()
        self.account(rows)
        self.changed()

    def account(self, rows: Collection[Row]) -> None:
        """These are recorded in the database, or given up."""
        for slot, messages in Counter(map(slot_of, rows)).items():
            slot.under_way -= messages
        self.unaccounted -= len(rows)
        self.event.set()

    @property
    def closing(self) -> bool:
        """Whether the next read can bring it up to date: a refill of each share, and the forward part behind it."""
        return not self.queue and not self.paused and self.behind.keys() <= self.caught

    def _put_behind(self, slot: Slot, id: int) -> None:
        self.behind[slot] = min(self.behind.get(slot, id - 1), id - 1)

    def changed(self) -> None:
        """A refill that was asked for before is not what the lane wants now."""
        self.version += 1
        self.caught.clear()


class Backlog:
    """All lanes and slots of a relay. window: most messages in memory. page: so many of them are a round, so that some
    are sent while others are read or deleted; where there is room a read brings two. What is under way of a topic that
    hangs does not count, nor what is locked, so that these keep no other from being read."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.page = max(1, window // 4)
        self.directories: frozenset[str] = frozenset()  # topics of directory tables
        self.timeline = ""  # of the server that all this was read from
        self.slots: dict[int, Slot] = {}
        self.lanes: dict[str, Lane] = {}
        self.parts: list[Lane] = []  # each before what it is a part of
        # Of those under way: what Kafka has, and somebody's transaction keeps in the database. It is not sent again.
        self.locked: dict[tuple[int, Slot], Lane] = {}

    def all_lanes(self) -> list[Lane]:
        """Lanes and their parts."""
        return [*self.lanes.values(), *self.parts]

    def of_topic(self, topic: str) -> list[Lane]:
        """A topic's lane and its parts."""
        return [self.lane(topic), *(part for part in self.parts if part.topic == topic)]

    def split(self, lane: Lane, partitions: frozenset[int], owns: Callable[[Row], bool]) -> Lane:
        """Partitions that take nothing go apart, so that they hold up no others. Nothing of the lane is in memory or
        under way; all that waits of it is behind."""
        within = lane.owns

        def own(row: Row) -> bool:  # where partitions were added since, keys of other lanes may go to these as well
            return (within is None or within(row)) and owns(row)

        part = Lane(lane.topic, partitions, own, behind=dict(lane.behind), paused=True)
        self.parts.insert(self.parts.index(lane) if lane in self.parts else len(self.parts), part)
        return part

    def apart(self, lane: Lane) -> frozenset[int]:
        """The partitions that went apart from the lane."""
        before = takewhile(lambda part: part is not lane, self.parts)
        return frozenset(chain.from_iterable(part.partitions for part in before if part.topic == lane.topic))

    def join(self, part: Lane) -> None:
        """The part is empty: its messages go with the others again. What a read under way brings as refills of these
        may have some that the part has sent meanwhile: it is asked for again."""
        self.parts.remove(part)
        main = self.lane(part.topic)
        main.failing = main.failing or part.failing  # it tells the database
        for lane in self.of_topic(part.topic):
            lane.changed()
        main.event.set()

    def add_slot(self, slot: Slot) -> None:
        """A slot was acquired."""
        self.slots[slot.number] = slot

    def remove_slot(self, slot: Slot) -> None:
        """A slot was lost or released: forget what is not under way."""
        if self.slots.get(slot.number) is slot:
            del self.slots[slot.number]
        self.forget(slot)

    def forget(self, slot: Slot) -> None:
        """Drop what waits of a slot. What is under way may yet fail, and is not read again then."""
        slot.draining = True
        for lane in self.all_lanes():
            lane.behind.pop(slot, None)
            lane.caught.discard(slot)
            lane.taken.pop(slot, None)
            if any(slot_of(row) is slot for row in lane.queue):
                lane.queue = deque(row for row in lane.queue if slot_of(row) is not slot)

    def has(self, slot: Slot) -> bool:
        """Whether the slot is still ours, as far as this object has been told."""
        return self.slots.get(slot.number) is slot

    def unlocked(self, topic: str, rows: Iterable[Row]) -> None:
        """These are recorded now. A read under way may yet bring them as refills: it is asked for again."""
        if self.locked and [self.locked.pop(row[:2]) for row in rows if row[:2] in self.locked]:
            for lane in self.of_topic(topic):
                lane.changed()

    def room(self, most: int) -> int:
        """How many messages more may be read, where memory is to have `most`, and no more than the window."""
        held = sum(len(lane.queue) + lane.unaccounted for lane in self.all_lanes() if not lane.paused)
        locked = sum(not lane.paused for lane in self.locked.values())
        return max(0, min(self.window, most) - held + locked)

    def lane(self, topic: str) -> Lane:
        """The lane of a topic, made when missing."""
        lane = self.lanes.get(topic)
        if lane is None:
            lane = self.lanes[topic] = Lane(topic)
        return lane

    def left_out(self) -> list[str]:
        """Topics that the forward part of the next read should skip."""
        return [lane.topic for lane in self.lanes.values() if lane.paused or (lane.behind and not lane.closing)]

    def hungry(self) -> list[Lane]:
        """Lanes to refill at once. A part that is caught up while its topic is left out cannot get further."""
        left_out = set(self.left_out()) if self.parts else ()
        return [lane for lane in self._refillable() if not (lane.closing and lane.topic in left_out)]

    def _refillable(self) -> list[Lane]:
        return [lane for lane in self.all_lanes() if lane.behind and not lane.paused and not lane.queue]

    def to_refill(self, most: int) -> list[tuple[Lane, Slot, int]]:
        """Shares to refill: lane, slot, after which id. Lanes that one read can bring up to date come first, and
        wholly; of the others any, as a share that is caught up remains behind until all its lane is."""
        lanes, left_out = self._refillable(), set(self.left_out()) if self.parts else ()
        random.shuffle(lanes)
        lanes.sort(key=lambda lane: not lane.closing or lane.topic in left_out)
        found: list[tuple[Lane, Slot, int]] = []
        for lane in lanes:
            shares = random.sample(list(lane.behind.items()), min(most - len(found), len(lane.behind)))
            found += [(lane, slot, after) for slot, after in shares]
            if len(found) == most:
                break
        return found

    # -- what a read has brought, applied in this order -------------------------------------------------------------

    def late(self, topic: str, row: Row) -> None:
        """A message that became visible behind messages already read."""
        [lane] = self._shared_out(topic, [row])
        id, slot = row[:2]
        if id <= lane.behind.get(slot, id):
            lane.put(row)

    def refilled(
        self,
        lane: Lane,
        version: int,
        slot: Slot,
        rows: list[Row],
        *,
        more: bool,
        upto: int,
        left_out: bool,
        seen: int | None = None,
    ) -> None:
        """A refill of one share, asked for when the lane had that version. more: there may be more of it up to `upto`.
        left_out: as was the topic, of the forward part of the same read. seen: it has brought all up to this id, and
        looked no further."""
        if lane.version != version or not self.has(slot) or slot not in lane.behind:
            return
        to_send = [row for row in rows if row[:2] not in self.locked] if self.locked else rows
        lane.queue.extend(self._shared_out(lane.topic, to_send).get(lane, ()))
        if more or seen is not None:
            if seen is not None:
                lane.behind[slot] = seen
            elif rows:
                lane.behind[slot] = id_of(rows[-1])
            lane.caught.discard(slot)
        elif left_out:
            lane.behind[slot] = upto
            lane.caught.add(slot)
        else:
            del lane.behind[slot]
            lane.caught.discard(slot)

    def skipped(self, topic: str, slot: Slot) -> None:
        """The forward part of a read left the topic out: what it has passed is behind. Call it before the mark
        moves."""
        for lane in self.of_topic(topic):
            lane.behind.setdefault(slot, slot.high)

    def forward(self, topic: str, slot: Slot, rows: Sequence[Row]) -> None:
        """Messages of one slot above its mark, in order."""
        for lane, some in self._shared_out(topic, rows).items():
            if slot in lane.behind:
                continue
            if not lane.paused:
                lane.queue.extend(some)
                continue
            for row in some:
                if slot not in lane.behind:
                    lane.put(row)

    def _shared_out(self, topic: str, rows: Sequence[Row]) -> Mapping[Lane, Sequence[Row]]:
        """The rows of a topic by the lanes whose they are."""
        main = self.lane(topic)
        parts = [(part, part.owns) for part in self.parts if part.topic == topic and part.owns]
        if not parts:
            return {main: rows}
        found: dict[Lane, list[Row]] = {}
        for row in rows:
            found.setdefault(next((part for part, owns in parts if owns(row)), main), []).append(row)
        return found

"""What the relay keeps in memory, by properties: over a database that is simulated with its transactions and
snapshots, the real reader and backlog deliver every committed message, none twice, and in order, whatever fails or
comes late in between."""

from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sidings.kafka import topics
from sidings.kafka.outbox import reader as reader_module
from sidings.kafka.outbox.backlog import Backlog, Lane, Row, Slot, id_of, slot_of
from sidings.kafka.outbox.packing import Packer
from sidings.kafka.outbox.reader import Reader

from .outbox_world import Database

SLOTS = 3
TOPICS = ("a", "b", "c")
MOST_BYTES = 8_000  # of a read
NO_LINK: Any = SimpleNamespace(lived_on=lambda _: False)  # nobody resets statistics


class Reading(RuleBasedStateMachine):
    """Writers, one reader, lanes that send, fail, hang and record, and parts of them that go apart and come back,
    interleaved at will; some messages are too large to come with others."""

    @initialize(window=st.integers(4, 40), page=st.integers(1, 5))
    def start(self, window: int, page: int) -> None:
        self.database = Database()
        self.backlog = Backlog(window)
        quiet: Any = lambda: None  # noqa: E731
        self.reader = Reader(
            NO_LINK, self.backlog, schema="sidings", poll_seconds=1, on_rows=quiet, on_new_server=quiet
        )
        for number in range(SLOTS):
            self.backlog.add_slot(Slot(number, f"outbox/{number}", 1))
        self.page = page
        self.sizes = cycle([1] * 20 + [MOST_BYTES // 8, MOST_BYTES // 2] + [1] * 5 + [MOST_BYTES, 3 * MOST_BYTES])
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(reader_module, "_MOST_BYTES", MOST_BYTES)
        self.patch.setattr(reader_module, "_BYTES", MOST_BYTES // 2)
        self.patch.setattr(reader_module, "_HELD_BYTES", MOST_BYTES * 2)
        self.patch.setattr(reader_module, "_LOOKED_AT", 3)
        self.patch.setattr(reader_module, "_IDLE_PAGE", 2)
        self.patch.setattr(reader_module, "_ALL_LATE", 2 * SLOTS)
        self.answer: tuple[Any, list[Any]] | None = None
        self.turns: dict[str, int] = dict.fromkeys(TOPICS, 0)
        self.under_way: dict[Lane, list[Row]] = {}
        self.acknowledged: dict[Lane, list[Row]] = {}
        self.held_by: set[int] = set()  # ids in memory that are under way or acknowledged
        self.sent: dict[tuple[int, str], list[int]] = defaultdict(list)

    @rule(slot=st.integers(0, SLOTS - 1), topic=st.sampled_from(TOPICS), count=st.integers(1, 6))
    def publish_and_commit(self, slot: int, topic: str, count: int) -> None:
        xid = self.database.begin()
        for _ in range(count):
            self.database.insert(xid, slot, topic, value=b"x" * next(self.sizes))
        self.database.open.discard(xid)

    @rule(slot=st.integers(0, SLOTS - 1), topic=st.sampled_from(TOPICS[1:]))
    def publish_without_commit(self, slot: int, topic: str) -> None:
        self.database.insert(self.database.begin(), slot, topic, value=b"x" * next(self.sizes))

    @precondition(lambda self: self.answer is None)
    @rule(slot=st.integers(0, SLOTS - 1), topic=st.sampled_from(TOPICS[1:]), count=st.integers(1, 4))
    def publish_and_commit_late(self, slot: int, topic: str, count: int) -> None:
        """Behind a read that has seen later messages; there may be more late ones than the next read brings."""
        xid = self.database.begin()
        for _ in range(count):
            self.database.insert(xid, slot, topic)
        self.publish_and_commit(slot, topic, 1)
        self.send_a_read()
        self.deliver_the_read()
        self.database.open.discard(xid)

    @precondition(lambda self: self.database.open)
    @rule(data=st.data(), commit=st.booleans())
    def end_a_transaction(self, data: st.DataObject, commit: bool) -> None:
        xid = data.draw(st.sampled_from(sorted(self.database.open)))
        self.database.open.discard(xid)
        if not commit:
            self.database.aborted.add(xid)

    @precondition(lambda self: self.answer is None)
    @rule()
    def send_a_read(self) -> None:
        plan = self.reader._plan()
        if not plan.slots:  # all are being given up: as `run`, which sends nothing then
            return
        plan.refill = min(plan.refill, self.page)
        rows = self.database.read(self.reader._arguments(plan))
        self.answer = plan, rows
        size = sum(len(row[6] or b"") for row in rows[1:])
        assert size <= 2 * max(plan.largest, MOST_BYTES) + reader_module._BYTES

    @precondition(lambda self: self.answer is not None)
    @rule()
    def deliver_the_read(self) -> None:
        if self.answer is None:  # none was sent
            return
        plan, rows = self.answer
        self.answer = None
        self.reader._deliver(plan, rows, passing=True)

    @rule(topic=st.sampled_from(TOPICS), turn=st.integers(0, 3))
    def another_turn(self, topic: str, turn: int) -> None:
        """The next rules are about another lane of the topic: a part, or its own."""
        self.turns[topic] = turn

    def lane(self, topic: str) -> Lane:
        lanes = self.backlog.of_topic(topic)
        return lanes[self.turns[topic] % len(lanes)]

    @rule(topic=st.sampled_from(TOPICS), rest=st.integers(0, 3))
    def split(self, topic: str, rest: int) -> None:
        """Messages of some slots' ids go apart, which may be some that have gone before."""
        lane = self.lane(topic)
        if len(self.backlog.parts) == 3:
            return
        rows = self.under_way.pop(lane, [])
        self.record(topic)
        self.held_by.difference_update(map(id_of, rows))
        lane.give_back(rows)
        self.backlog.split(lane, frozenset({rest}), lambda row: id_of(row) % 4 == rest)
        lane.paused = False

    @rule(topic=st.sampled_from(TOPICS))
    def join(self, topic: str) -> None:
        for part in self.backlog.of_topic(topic)[1:]:
            if part.empty:
                self.backlog.join(part)

    @rule(topic=st.sampled_from(TOPICS))
    def end(self, topic: str) -> None:
        """There has been nothing of the topic for long, but for what a read under way may bring."""
        [lane, *parts] = self.backlog.of_topic(topic)
        if lane.empty and not parts:
            del self.backlog.lanes[topic]

    @rule(topic=st.sampled_from(TOPICS), count=st.integers(1, 5))
    def take(self, topic: str, count: int) -> None:
        lane = self.lane(topic)
        if lane in self.under_way or lane.paused:
            return
        rows = lane.take(count)
        for row in rows:
            assert id_of(row) not in self.held_by, f"{id_of(row)} is sent while it is under way or not yet recorded"
            assert id_of(row) in self.database.rows, f"{id_of(row)} is sent again after it was deleted"
            self.held_by.add(id_of(row))
        if rows:
            self.under_way[lane] = rows

    @rule(topic=st.sampled_from(TOPICS))
    def acknowledge(self, topic: str) -> None:
        lane = self.lane(topic)
        for row in self.under_way.get(lane, ()):
            self.sent[slot_of(row).number, topic].append(id_of(row))
        self.acknowledged.setdefault(lane, []).extend(self.under_way.pop(lane, ()))
        lane.paused = False

    @rule(topic=st.sampled_from(TOPICS))
    def hang(self, topic: str) -> None:
        lane = self.lane(topic)
        if lane in self.under_way:
            lane.paused = True
            lane.shelve()

    @rule(topic=st.sampled_from(TOPICS))
    def record(self, topic: str) -> None:
        lane = self.lane(topic)
        rows = self.acknowledged.pop(lane, [])
        for row in rows:
            del self.database.rows[id_of(row)]
            self.held_by.discard(id_of(row))
        lane.account(rows)

    @rule(topic=st.sampled_from(TOPICS), part=st.integers(0, 5))
    def fail(self, topic: str, part: int) -> None:
        lane = self.lane(topic)
        rows = self.under_way.pop(lane, None)
        if rows is None:
            return
        for row in rows[:part]:
            self.sent[slot_of(row).number, topic].append(id_of(row))
        self.acknowledged.setdefault(lane, []).extend(rows[:part])
        self.record(topic)  # as the worker does: it waits until nothing else is unaccounted for
        lane.paused = True
        for row in rows[part:]:
            self.held_by.discard(id_of(row))
        lane.give_back(rows[part:])

    @precondition(lambda self: self.answer is None)
    @rule(topic=st.sampled_from(TOPICS), slot=st.integers(0, SLOTS - 1), part=st.integers(0, 2), hangs=st.booleans())
    def trouble_under_a_read(self, topic: str, slot: int, part: int, hangs: bool) -> None:
        self.back_off_ends(topic)
        self.take(topic, 3)
        self.publish_and_commit(slot, topic, 3)
        self.send_a_read()
        if hangs:
            self.hang(topic)
        else:
            self.fail(topic, part)
        self.deliver_the_read()

    @rule()
    def acquire_anew(self) -> None:
        """As `SlotKeeper`: slots that were forgotten, as with more late messages than a read brings."""
        for slot in list(self.backlog.slots.values()):
            if slot.draining and not slot.under_way:
                self.backlog.remove_slot(slot)
                self.backlog.add_slot(Slot(slot.number, slot.name, slot.epoch + 1))

    @rule(topic=st.sampled_from(TOPICS))
    def back_off_ends(self, topic: str) -> None:
        lane = self.lane(topic)
        if lane not in self.under_way:
            lane.paused = False

    @invariant()
    def counts_agree(self) -> None:
        for lane in self.backlog.all_lanes():
            count = len(self.under_way.get(lane, ())) + len(self.acknowledged.get(lane, ()))
            assert lane.unaccounted == count

    @invariant()
    def a_paused_lane_keeps_no_room_from_others(self) -> None:
        for lane in self.backlog.all_lanes():
            if lane.paused:
                waiting = [id_of(row) for row in lane.queue if id_of(row) > lane.taken.get(slot_of(row), 0)]
                assert not waiting, f"{lane.topic} hangs, and keeps {waiting} in memory"

    def teardown(self) -> None:
        if not hasattr(self, "database"):
            return
        if self.answer is not None:  # it was asked for by the limits that are taken back now
            self.deliver_the_read()
        self.patch.undo()
        for xid in sorted(self.database.open):
            self.database.open.discard(xid)
        for _ in range(400):
            if self.answer is None:
                self.send_a_read()
            self.deliver_the_read()
            for topic in TOPICS:
                for turn in range(len(self.backlog.of_topic(topic))):
                    self.turns[topic] = turn
                    self.back_off_ends(topic)
                    self.take(topic, 5)
                    self.acknowledge(topic)
                    self.record(topic)
                self.join(topic)
            self.acquire_anew()
            left = [row for row in self.database.rows.values() if row.xid not in self.database.aborted]
            if not (left or self.backlog.parts):
                break
        assert not left, f"never sent: {left}"
        for slot in range(SLOTS):  # of the first topic each message has committed before the next was published
            for rest in range(4):  # as if they were keys
                firsts = [id for id in dict.fromkeys(self.sent[slot, TOPICS[0]]) if id % 4 == rest]
                assert firsts == sorted(firsts), f"out of order: {firsts}"
        assert not self.backlog.parts


Reading.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestReading = Reading.TestCase


def test_a_share_is_not_shelved_below_what_is_under_way() -> None:
    backlog = Backlog(10)
    slot = Slot(0, "outbox/0", 1)
    backlog.add_slot(slot)
    lane = backlog.lane("a")
    for id in (5, 6, 3):
        lane.queue.append((id, slot, None, None, None, None, 0, 0))
    assert [id_of(row) for row in lane.take(1)] == [5]
    lane.shelve()
    assert [id_of(row) for row in lane.queue] == [3], "it came late; a refill from 2 on would bring 5 again"
    assert lane.behind == {slot: 5}


def test_the_highest_message_under_way_counts_also_where_a_late_one_was_taken_behind_it() -> None:
    backlog = Backlog(10)
    slot = Slot(0, "outbox/0", 1)
    backlog.add_slot(slot)
    lane = backlog.lane("a")
    for id in (5, 6, 3, 4):
        lane.queue.append((id, slot, None, None, None, None, 0, 0))
    lane.take(3)
    lane.shelve()
    assert ([id_of(row) for row in lane.queue], lane.behind) == ([4], {}), (
        "a refill from 3 on would bring 5 and 6 again"
    )
    assert slot.under_way == 3


def a_reader(window: int, *, slots: int = SLOTS) -> tuple[Database, Backlog, Reader]:
    """A reader over a simulated database, with all its slots."""
    backlog = Backlog(window)
    quiet: Any = lambda: None  # noqa: E731
    reader = Reader(NO_LINK, backlog, schema="sidings", poll_seconds=1, on_rows=quiet, on_new_server=quiet)
    for number in range(slots):
        backlog.add_slot(Slot(number, f"outbox/{number}", 1))
    return Database(), backlog, reader


def fill(database: Database, topic: str, count: int, *, slots: int = SLOTS) -> None:
    """Messages in all slots, committed."""
    xid = database.begin()
    for n in range(count):
        database.insert(xid, n % slots, topic)
    database.open.discard(xid)


def read(database: Database, reader: Reader) -> None:
    plan = reader._plan()
    reader._deliver(plan, database.read(reader._arguments(plan)), passing=True)


def test_what_a_read_brings_for_a_topic_that_has_begun_to_hang_leaves_the_memory_to_others() -> None:
    """The read was on its way when the topic was found to hang."""
    database, backlog, reader = a_reader(window=300)
    fill(database, "a", 60)
    read(database, reader)
    hanging = backlog.lane("a")
    hanging.take(60)
    fill(database, "a", 600)
    plan = reader._plan()
    answer = database.read(reader._arguments(plan))
    hanging.paused = True
    hanging.shelve()
    reader._deliver(plan, answer, passing=True)
    assert not hanging.queue
    fill(database, "b", 3)
    read(database, reader)
    assert len(backlog.lane("b").queue) == 3


def test_topics_that_hang_do_not_fill_the_window_with_what_is_under_way() -> None:
    database, backlog, reader = a_reader(window=30)
    for topic in ("a", "b", "c"):
        fill(database, topic, 30)
        read(database, reader)
        lane = backlog.lane(topic)
        assert lane.take(30)
        lane.paused = True
        lane.shelve()
    fill(database, "d", 90)
    read(database, reader)
    assert backlog.lane("d").queue


def test_a_read_brings_half_of_the_window_at_most_and_the_next_one_follows_as_soon_as_a_quarter_has_left_it() -> None:
    """So that some are sent, and others deleted, while more are read; and one round can be packed while Kafka has the
    one before."""
    database, backlog, reader = a_reader(window=300)
    fill(database, "a", 900)
    lane = backlog.lane("a")
    for reads in (1, 2):
        assert reader.hungry()
        read(database, reader)
        assert len(lane.queue) == reads * 150
    assert not reader.hungry()
    lane.account(lane.take(74))
    assert not reader.hungry()
    lane.account(lane.take(1))
    assert reader.hungry()
    read(database, reader)
    assert len(lane.queue) == 300


def test_of_a_slot_that_has_begun_to_drain_a_read_under_way_brings_nothing() -> None:
    """What waited was forgotten, and is sent by the slot's heir: newer messages must not be sent before it."""
    database, backlog, reader = a_reader(window=300)
    slot, other = backlog.slots[0], backlog.slots[1]
    fill(database, "a", 20)
    read(database, reader)
    late = database.begin()
    database.insert(late, slot.number, "a")
    fill(database, "a", 20)
    read(database, reader)
    database.open.discard(late)
    fill(database, "a", 20)
    plan = reader._plan()
    answer = database.read(reader._arguments(plan))
    backlog.forget(slot)  # as `SlotKeeper` does it
    reader._deliver(plan, answer, passing=True)
    assert {slot_of(row) for row in backlog.lane("a").queue} == {s for s in backlog.slots.values() if s is not slot}
    assert other in {slot_of(row) for row in backlog.lane("a").queue}


def test_of_a_slot_that_was_lost_what_fails_is_not_asked_for_again() -> None:
    """Its messages under way failed when their producer was closed, and were asked for ever after: read upon read, and
    in the end no other share of any topic was refilled."""
    database, backlog, reader = a_reader(window=300)
    fill(database, "a", 20)
    read(database, reader)
    lane, lost = backlog.lane("a"), backlog.slots[0]
    rows = lane.take(20)
    backlog.remove_slot(lost)
    lane.give_back(rows)
    assert lane.behind.keys() == set(backlog.slots.values())
    for _ in range(3):
        read(database, reader)
        lane.account(lane.take(20))
    assert (reader.hungry(), backlog.left_out(), lane.behind) == (False, [], {})


@pytest.mark.parametrize("large", [1, 40])
def test_messages_larger_than_a_read_should_be_keep_no_others_from_being_read(large: int) -> None:
    """SQL takes up to a gigabyte; the relay parks it. Then there was room for none, and nothing was read any more."""
    database, backlog, reader = a_reader(window=300)
    for _ in range(large):
        xid = database.begin()
        database.insert(xid, 0, "a", value=bytes(40 * 2**20 if large > 1 else 200 * 2**20))
        database.open.discard(xid)
        lane = backlog.lane("a")
        while not lane.queue:
            read(database, reader)
        lane.account(lane.take(10))
    fill(database, "b", 3)
    read(database, reader)
    assert {slot_of(row).number for row in backlog.lane("b").queue} == set(range(SLOTS))


def test_topics_that_work_again_come_back_no_faster_than_there_is_room() -> None:
    """A refill was 1,000 messages, of 32 shares at once, whether there was room or not."""
    most = 300 + 32 * 16  # a few of each share come in any case
    database, backlog, reader = a_reader(window=300)
    topics = [f"topic-{n}" for n in range(12)]
    for topic in topics:
        backlog.lane(topic).paused = True
        fill(database, topic, 600)
    while any(slot.backlogged for slot in backlog.slots.values()):
        read(database, reader)
    for topic in topics:
        backlog.lane(topic).paused = False
    for _ in range(5):
        read(database, reader)
        assert sum(len(lane.queue) for lane in backlog.lanes.values()) <= most
    fill(database, "other", 90)
    sent: list[int] = []
    for _ in range(200):
        for lane in backlog.lanes.values():
            rows = lane.take(100)
            sent += [id_of(row) for row in rows]
            for row in rows:
                del database.rows[id_of(row)]
            lane.account(rows)
        read(database, reader)
        assert sum(len(lane.queue) for lane in backlog.lanes.values()) <= most
    assert (len(sent), len(set(sent)), database.rows) == (12 * 600 + 90, len(sent), {})
    assert (reader.hungry(), backlog.left_out()) == (False, [])


@pytest.mark.parametrize("kilobytes", [100, 5_000])
def test_refills_of_large_messages_bring_no_more_bytes_than_a_read_should_and_their_topic_comes_back(
    kilobytes: int,
) -> None:
    """Of the larger ones a read refills six shares of the topic's 32."""
    database, backlog, reader = a_reader(window=10_000, slots=32)
    backlog.lane("a").paused = True
    fill(database, "a", 3_200, slots=32)
    while any(slot.backlogged for slot in backlog.slots.values()):
        read(database, reader)
    lane = backlog.lane("a")
    lane.paused = False
    for _ in range(1_000):
        reader._row_bytes = 1_000.0 * kilobytes
        plan = reader._plan()
        assert len(plan.shares) * plan.refill * 1_000 * kilobytes <= reader_module._BYTES
        reader._deliver(plan, database.read(reader._arguments(plan)), passing=True)
        for row in (rows := lane.take(10_000)):
            del database.rows[id_of(row)]
        lane.account(rows)
        if not lane.behind:
            break
    assert (database.rows, lane.behind, reader.hungry()) == ({}, {}, False)


def test_large_messages_take_no_more_memory_than_small_ones() -> None:
    database, backlog = Database(), Backlog(10_000)
    value = b"x" * 102_400
    xid = database.begin()
    for n in range(12_000):
        database.insert(xid, n % 4, "etas", value=value)
    database.open.discard(xid)
    quiet: Any = lambda: None  # noqa: E731
    reader = Reader(NO_LINK, backlog, schema="sidings", poll_seconds=1, on_rows=quiet, on_new_server=quiet)
    for number in range(4):
        backlog.add_slot(Slot(number, f"outbox/{number}", 1))
    lane, largest, most = backlog.lane("etas"), 0, 0
    under_way: list[Any] = []
    for turn in range(1_000):
        if reader.hungry() or turn == 0:
            plan = reader._plan()
            rows = database.read(reader._arguments(plan))
            largest = max(largest, sum(len(row[6] or b"") for row in rows[1:]))
            reader._deliver(plan, rows, passing=True)
        most = max(most, 102_400 * (len(lane.queue) + lane.unaccounted))
        lane.account(under_way)
        for row in under_way:
            del database.rows[row[0]]
        under_way = lane.take(100)  # a slow Kafka
    assert not database.rows
    assert most < 200e6


def test_a_part_of_a_part_takes_no_messages_from_the_others() -> None:
    """Partitions were added meanwhile: by their number of now, its partitions are those of other keys as well."""
    database, backlog, reader = a_reader(window=300, slots=1)
    fill(database, "a", 12, slots=1)
    lane = backlog.lane("a")
    part = backlog.split(lane, frozenset({1, 3}), lambda row: id_of(row) % 2 == 1)
    part.paused = False
    read(database, reader)
    lane.give_back(lane.take(6))
    inner = backlog.split(part, frozenset({3}), lambda row: id_of(row) % 3 == 0)
    inner.paused = False
    for _ in range(3):
        read(database, reader)
    assert [id_of(row) for row in lane.queue] == [2, 4, 6, 8, 10, 12]


def test_a_long_key_is_hashed_once_however_many_parts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the event loop, and long keys are not remembered: with 29 parts a read stopped it for seconds."""
    usual, hashed = topics._murmur2, list[bytes]()

    def murmur2(key: bytes) -> int:
        hashed.append(key)
        return usual(key)

    monkeypatch.setattr(topics, "_murmur2", murmur2)
    backlog, packer, slot = Backlog(100), Packer("test", {}), Slot(0, "outbox/0", 1)
    backlog.add_slot(slot)
    lane = backlog.lane("a")
    for partition in range(29):
        backlog.split(lane, frozenset({partition}), packer.goes_to(lane.topic, {partition}, range(60)))
    keys = [b"%300d" % n for n in range(50)]
    backlog.forward("a", slot, [(n, slot, key, None, None, None, 0, 0) for n, key in enumerate(keys)])
    assert hashed == keys
    assert 0 < len(lane.queue) < 50


def test_what_was_locked_is_not_sent_again_by_a_refill_that_was_under_way_when_it_was_recorded() -> None:
    """A message before it has failed, so that the refill begins there. That read had still seen it in the database."""
    database, backlog, reader = a_reader(window=20, slots=1)
    fill(database, "a", 3, slots=1)
    read(database, reader)
    lane = backlog.lane("a")
    failed, locked, other = lane.take(3)
    backlog.locked[locked[:2]] = lane
    lane.give_back([failed, other])
    plan = reader._plan()
    rows = database.read(reader._arguments(plan))
    del database.rows[id_of(locked)]
    lane.account([locked])
    backlog.unlocked("a", [locked])
    reader._deliver(plan, rows, passing=True)
    read(database, reader)
    assert list(map(id_of, lane.queue)) == [id_of(failed), id_of(other)]


def fails(lane: Lane, rows: list[Row]) -> None:
    lane.give_back(rows)


def begins_to_fail_and_a_late_message_comes(lane: Lane, rows: list[Row]) -> None:
    lane.paused = True
    lane.put(rows[0])


@pytest.mark.parametrize("happens", [fails, begins_to_fail_and_a_late_message_comes])
def test_a_refill_that_was_asked_for_behind_what_now_waits_before_it_is_void(
    happens: Callable[[Lane, list[Row]], None],
) -> None:
    """Else the share would be taken for read up to the end of that refill, and what waits before it never be sent."""
    backlog, slot = Backlog(10), Slot(0, "outbox/0", 1)
    backlog.add_slot(slot)
    first, second = [(id, slot, b"k", None, b"v", None, None, 0) for id in (3, 7)]
    lane = backlog.lane("a")
    if happens is fails:
        lane.put(first)
        lane.take(1)
    lane.behind[slot] = 5
    version = lane.version
    happens(lane, [first])
    backlog.refilled(lane, version, slot, [second], more=False, upto=7, left_out=False)
    assert lane.behind == {slot: 2}
    assert not lane.queue


def test_a_late_message_of_a_topic_that_hangs_brings_nothing_again_that_is_under_way() -> None:
    backlog, slot = Backlog(10), Slot(0, "outbox/0", 1)
    backlog.add_slot(slot)
    late, under_way = [(id, slot, b"k", None, b"v", None, None, 0) for id in (3, 7)]
    lane = backlog.lane("a")
    lane.put(under_way)
    lane.take(1)
    lane.paused = True
    lane.shelve()
    backlog.late("a", late)
    assert list(lane.queue) == [late]
    assert not lane.behind, "a refill from 2 on would bring 7 again"


def test_a_late_message_just_before_what_a_refill_will_bring_is_not_left_to_that():
    """It would be passed over for good: the refill begins behind it."""
    backlog, slot = Backlog(10), Slot(0, "outbox/0", 1)
    backlog.add_slot(slot)
    slot.high = 8
    rows: list[Row] = [(id, slot, b"k", None, b"v", None, None, 0) for id in (6, 7, 8)]
    lane = backlog.lane("a")
    lane.put(rows[1])
    lane.shelve()
    backlog.late("a", rows[0])
    backlog.late("a", rows[2])
    assert list(lane.queue) == [rows[0]]
    assert lane.behind == {slot: 6}

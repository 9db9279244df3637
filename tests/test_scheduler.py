"""The scheduler by examples: who runs next, who waits, and what is kept in memory. Its properties are tested apart."""

import tracemalloc
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from random import Random
from typing import Any

import pytest
from sidings.executor import ready
from sidings.executor.queues import Entry, OriginQueue, Pauses
from sidings.executor.scheduler import Scheduler
from sidings.jobs import Policy

from .support import stuck_lanes

UNKNOWN_SECONDS = 60.0


class Rig:
    """A scheduler with one origin, and short words for what a reader and a cycle do to it."""

    def __init__(self, **options: Any) -> None:
        self.unknown_types = {"unknown"}
        self.scheduler = Scheduler(lambda kind: kind not in self.unknown_types, **options)
        self.queue = self.scheduler.add_origin("t/0", 1)
        self.now = 0.0

    def entry(self, position: int, group: str | None = "a", queue: OriginQueue | None = None, **fields: Any) -> Entry:
        return Entry(
            fields.pop("id", position), queue or self.queue, fields.pop("type", "x"), group, position, **fields
        )

    def put(self, positions: int | Iterable[int], group: str | None = "a", **fields: Any) -> None:
        """A read delivers rows; their ids are their positions."""
        for position in (positions,) if isinstance(positions, int) else positions:
            self.scheduler.insert(self.entry(position, group, **fields), self.now)
            self.queue.high = max(self.queue.high, position)

    def choose(self, limit: int = 100) -> list[Entry]:
        return self.scheduler.choose(limit, self.now)

    def hand_over(self, ending: Entry) -> Entry | None:
        return next(iter(self.scheduler.hand_over([ending], 1, self.now)), None)

    def run(self, limit: int = 100) -> list[int]:
        """Choose and end at once, until nothing is ready; the positions in the order in which they ran."""
        ran: list[int] = []
        while chosen := self.choose(1):
            ran.append(chosen[0].position)
            self.scheduler.ended(chosen[0], self.now)
            if len(ran) == limit:
                break
        return ran

    def refill(self, rows: Iterable[int] = (), group: str = "a", size: int = 4, left_out: bool = False) -> None:
        """A read delivers what is behind `last` of a hungry lane."""
        lane = self.queue.lanes[group]
        assert lane in self.scheduler.hungry, "nobody asked for a refill"
        del self.scheduler.hungry[lane]
        behind = [row for row in rows if lane.last < row <= self.queue.high][:size]
        entries = [self.entry(position, group) for position in behind]
        self.scheduler.refilled(lane, entries, size=size, upto=self.queue.high, left_out=left_out, now=self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.wake_due(self.now)

    @property
    def in_memory(self) -> int:
        return len(self.scheduler.memory.jobs)


def positions(entries: Iterable[Entry]) -> list[int]:
    return [entry.position for entry in entries]


# -- order --------------------------------------------------------------------------------------------------------


def test_jobs_of_a_group_run_one_at_a_time_in_their_order():
    rig = Rig()
    rig.put([3, 1, 2])
    for position in (1, 2, 3):
        [entry] = rig.choose()
        assert entry.position == position
        assert rig.choose() == []  # its successor waits until the outcome is committed
        rig.scheduler.ended(entry, 0)
    assert rig.choose() == []
    assert rig.queue.lanes == {}
    assert rig.in_memory == 0


def test_jobs_without_a_group_run_side_by_side():
    rig = Rig()
    rig.put([1, 2, 3], group=None)
    assert positions(rig.choose(2)) == [1, 2]
    assert positions(rig.choose(2)) == [3]


def test_a_row_that_is_delivered_twice_is_taken_in_once():
    rig = Rig()
    for group in ("a", None):
        base = 10 if group else 20
        rig.put([base, base], group=group)
        [entry] = rig.choose()
        rig.put(base, group=group)
        assert rig.choose() == []
        rig.scheduler.ended(entry, 0)
    assert rig.in_memory == 0


def many(rig: Rig, random: Random, types: Sequence[str]) -> list[Entry]:
    """Jobs as a read may bring them: nearly all are plain ones, but not quite."""
    entries: list[Entry] = []
    for position in range(1, 60):
        odd: dict[str, Any] = random.choice(
            (
                *({},) * 12,
                {"attempt": 2},
                {"priority": 1},
                {"due": 5.0},
                {"losses": 1},
                {"policy": Policy.PARALLEL.value},
            )
        )
        group = random.choice((None, None, None, "a", "b"))
        kind = random.choice(types)
        payload, headers = random.choice(((None, None), ("x" * position, "y")))
        entries.append(rig.entry(position, group, type=kind, payload=payload, headers=headers, **odd))
        if random.random() < 0.1:  # it has been given another place
            entries.append(rig.entry(100 + position, group, id=position, type=kind))
    return entries


@pytest.mark.parametrize("seed", range(20))
def test_many_rows_are_taken_in_together_as_they_are_one_by_one(seed: int):
    rigs = Rig(keep=4), Rig(keep=4)
    for rig in rigs:
        rig.queue.high = 1_000
        rig.scheduler.pause(Pauses(frozenset({"paused"} if seed % 2 else ()), frozenset(), frozenset()))
        rig.scheduler.reading = True
        rig.put((7, 8), None)
        rig.scheduler.all_ended(rig.choose(), 0.0)
    together, apart = (many(rig, Random(seed), ("x", "y", "paused", "unknown")) for rig in rigs)
    rigs[0].scheduler.insert_all(together, 0.0)
    for entry in apart:
        rigs[1].scheduler.insert(entry, 0.0)
    for rig in rigs:
        memory = rig.scheduler.memory
        assert memory.payload == sum(entry.size for entry in memory.jobs.values())
    first, second = (rig.scheduler for rig in rigs)
    assert (first.ready, first.memory.payload, first.unknown) == (second.ready, second.memory.payload, second.unknown)
    chosen = [rig.choose() for rig in rigs]
    assert positions(chosen[0]) == positions(chosen[1])
    again = [entry for entry in chosen[0] if entry.id in (7, 8) and entry.attempt == 1]
    assert not again, "they have ended while the read was under way"


@pytest.mark.parametrize("seed", range(20))
def test_jobs_run_in_the_same_order_whether_or_not_they_are_taken_out_one_by_one(seed: int):
    """While any type is slow they are; else all at once, where nothing has to take turns."""
    rigs, random = (Rig(), Rig()), Random(seed)
    for rig in rigs:
        rig.scheduler.insert_all(many(rig, Random(seed), ["x", "y"] if seed % 4 == 0 else ["x"]), 0.0)
    rigs[1].scheduler.share_out({"slow": 1_000}, {})
    for late in range(1_000, 1_100):
        limit, more, attempt = random.randrange(1, 6), random.randrange(5), random.choice((1, 1, 2))
        chosen = [rig.choose(limit) for rig in rigs]
        assert positions(chosen[0]) == positions(chosen[1])
        assert len(chosen[0]) <= limit
        assert rigs[0].scheduler.ready == rigs[1].scheduler.ready
        for rig, ran in zip(rigs, chosen, strict=True):
            for entry in ran:
                rig.scheduler.ended(entry, 0.0)
            for position in range(10 * late, 10 * late + more if late < 1_020 else 0):
                rig.scheduler.insert(rig.entry(position, "a" if position % 3 else None, attempt=attempt), 0.0)
    assert not rigs[0].scheduler.runnable()


def test_a_row_that_turns_up_late_takes_its_place_by_position():
    rig = Rig()
    rig.put([5, 6, 9])
    [running] = rig.choose()
    rig.put([7, 2])
    rig.scheduler.ended(running, 0)
    assert rig.run() == [2, 6, 7, 9]


def test_groups_of_the_same_name_in_two_origins_are_two_groups():
    rig = Rig()
    other = rig.scheduler.add_origin("t/1", 1)
    rig.put([1, 2])
    for position in (3, 4):
        rig.scheduler.insert(rig.entry(position, queue=other), 0)
    assert positions(rig.choose()) == [1, 3]


def test_groups_take_turns_however_deep_they_are():
    rig = Rig(keep=1000, window=5000)
    rig.put(range(1, 501), group="deep")
    for number, group in enumerate("abcdefghi"):
        rig.put(range(1001 + 20 * number, 1021 + 20 * number), group=group)
    rig.put(range(2001, 2021), group=None)
    counts: Counter[str | None] = Counter()
    for _ in range(200):
        [entry] = rig.choose(1)
        counts[entry.group] += 1
        rig.scheduler.ended(entry, 0)
    assert counts[None] == 20  # each is a group of its own
    assert all(counts[group] in (18, 19, 20) for group in ("deep", *"abcdefghi")), counts


def test_larger_priorities_go_first_between_groups_but_never_inside_one():
    rig = Rig()
    rig.put(1, group="low", priority=-5)
    rig.put(2, group=None, priority=0)
    rig.put(3, group="high", priority=7)
    rig.put(4, group=None, priority=100)
    rig.put(5, group="low", priority=100)  # behind its group's head
    assert rig.run() == [4, 3, 2, 1, 5]


def test_choose_takes_no_more_than_it_may():
    rig = Rig()
    rig.put(range(1, 11), group=None)
    rig.put(range(11, 21), group=None, losses=1)
    assert rig.choose(0) == []
    assert len(rig.choose(3)) == 3
    assert len(rig.choose(100)) == 8  # seven others, and one that may have killed an executor


# -- memory -------------------------------------------------------------------------------------------------------


def test_a_group_keeps_a_few_jobs_in_memory_and_gets_the_rest_by_refills():
    rig = Rig(keep=4)
    rig.put(range(1, 11))
    assert rig.in_memory == 4
    assert rig.run() == [1, 2, 3, 4]
    rig.refill(range(5, 11))
    assert rig.run() == [5, 6, 7, 8]
    rig.refill(range(9, 11))
    assert rig.run() == [9, 10]
    assert rig.queue.lanes == {}
    assert rig.scheduler.hungry == {}


def test_a_refill_is_asked_for_before_the_group_has_run_dry():
    rig = Rig(keep=8)
    rig.put(range(1, 20))
    assert rig.run(5) == [1, 2, 3, 4, 5]
    assert rig.scheduler.hungry == {}
    assert rig.run(1) == [6]
    assert list(rig.scheduler.hungry) == [rig.queue.lanes["a"]]


def test_rows_behind_the_last_known_one_wait_for_the_refill():
    rig = Rig(keep=4)
    rig.put(range(1, 7))
    rig.put([20, 21])  # their predecessors 5 and 6 are only in the database
    assert rig.run() == [1, 2, 3, 4]
    rig.refill([5, 6, 20, 21])
    rig.put(22)
    assert rig.run() == [5, 6, 20, 21]
    rig.refill([22])
    assert rig.run() == [22]


def test_a_refill_of_exactly_its_size_may_not_have_been_all():
    rig = Rig(keep=4)
    rig.put(range(1, 10))
    rig.run()
    rig.refill(range(5, 10))
    assert rig.queue.lanes["a"].more
    rig.run()
    rig.refill([9])
    assert rig.run() == [9]


def test_a_group_whose_rows_the_server_left_out_still_has_more():
    rig = Rig(keep=4)
    rig.put(range(1, 7))
    rig.run()
    rig.refill([5, 6], left_out=True)  # whatever stands above the mark was kept back
    assert rig.run() == [5, 6]
    rig.queue.high = 9
    rig.refill([7, 8, 9])
    assert rig.run() == [7, 8, 9]


def test_a_late_row_that_does_not_fit_pushes_the_last_one_out():
    rig = Rig(keep=4)
    rig.put([10, 11, 12, 13])
    rig.put([5, 6])
    assert rig.in_memory == 4
    assert rig.run() == [5, 6, 10, 11]
    rig.refill([12, 13])
    assert rig.run() == [12, 13]


def test_a_refill_that_was_sent_before_the_last_row_was_pushed_out_is_void():
    rig = Rig(keep=4)
    rig.put(range(1, 10))
    rig.run()
    rig.refill(range(5, 9))  # exactly its size, so the lane still believes that there is more
    assert rig.run(3) == [5, 6, 7]
    lane = rig.queue.lanes["a"]
    version = lane.version  # a refill behind 8 is on its way
    rig.put([1.1, 1.2, 1.3, 1.4])  # and late rows push 8 out
    assert lane.version != version


def test_a_group_with_many_rows_behind_it_is_left_out_by_the_server_until_it_is_done():
    rig = Rig(keep=4)
    rig.put(range(1, 4 + 256))
    assert rig.scheduler.heavy == {}
    rig.put(range(4 + 256, 300))
    lane = rig.queue.lanes["a"]
    assert list(rig.scheduler.heavy) == [lane]
    while lane.more:
        rig.run()
        rig.refill(range(1, 300))
        rig.scheduler.read_delivered()
    assert rig.scheduler.heavy == {}


def test_a_hundred_thousand_stuck_groups_hold_no_jobs_in_memory_and_stand_in_nobodys_way():
    rig = Rig(window=1000)
    for number in range(1, 100_001):
        group = f"g{number}"
        rig.put([number, number + 200_000], group=group)
        [entry] = rig.choose(1)
        rig.scheduler.again(entry, 1000.0)
    assert rig.in_memory == 0
    assert rig.scheduler.ready == 0
    assert rig.scheduler.memory.room() > 0
    assert len(stuck_lanes(rig.scheduler)) == 100_000
    rig.put(500_000, group="healthy")
    assert rig.run() == [500_000]


def test_room_shrinks_with_what_is_ready_and_with_what_is_in_memory():
    rig = Rig(window=100, budget=150, keep=64)
    rig.put(range(1, 41), group=None)
    assert rig.scheduler.memory.room() == 60
    rig.put(range(101, 141), group="a")
    rig.put(range(201, 241), group="b")
    rig.put(range(301, 341), group="c")
    assert rig.scheduler.ready == 43
    assert rig.in_memory == 160
    assert rig.scheduler.memory.room() == 0  # enough runnable ones, and all the memory is used


def test_what_is_read_and_not_kept_says_how_large_the_next_payloads_are():
    rig = Rig(window=1000, payload_budget=256_000)
    assert rig.scheduler.memory.room() == 256  # nothing is known yet
    rig.scheduler.memory.passed([300, 0, 600])
    assert rig.scheduler.memory.room() == 213  # of 300 each, and up to four times as large
    rig.scheduler.memory.passed([2000])
    assert rig.scheduler.memory.room() == 32
    rig.scheduler.memory.passed([])  # there is nothing more: what comes next is something else
    assert rig.scheduler.memory.room() == 256
    rig.scheduler.memory.passed([1])
    rig.put(1, group=None, payload="x" * 4000)
    rig.scheduler.memory.passed(["x" * 4000])  # it is kept
    assert rig.scheduler.memory.room() == 15
    rig.run()
    assert rig.scheduler.memory.room() == 256


def test_memory_used_up_by_deep_groups_does_not_stop_reading_while_too_few_are_runnable():
    rig = Rig(window=100, budget=100, keep=64)
    rig.put(range(1, 61), group="a")
    rig.put(range(101, 161), group="b")
    assert rig.in_memory > 100
    assert rig.scheduler.memory.room() > 0


def test_memory_full_of_large_payloads_does_not_stop_reading_while_none_of_them_is_runnable():
    rig = Rig(window=1000, payload_budget=64_000)
    rig.put(range(1, 5), group="a", payload="x" * 16_000)
    assert len(rig.choose()) == 1
    assert rig.scheduler.memory.room() == 1
    rig.put(9, group=None, payload="x" * 16_000)
    assert rig.scheduler.memory.room() == 0


def test_many_groups_share_the_memory():
    rig = Rig(keep=64, budget=1000)
    rig.scheduler.memory.adjust_keep()
    assert rig.scheduler.memory.keep == 64
    for number in range(99):
        rig.put(number + 1, group=f"g{number}")
    rig.scheduler.memory.adjust_keep()
    assert rig.scheduler.memory.keep == 10
    for number in range(1000):
        rig.put(number + 1001, group=f"h{number}")
    rig.scheduler.memory.adjust_keep()
    assert rig.scheduler.memory.keep == 4


# -- failures -----------------------------------------------------------------------------------------------------


def test_a_group_whose_head_has_failed_waits_with_it_and_goes_on_in_order():
    rig = Rig(keep=4)
    rig.put([1, 2, 3])
    rig.put([11, 12], group="b")
    first, other = rig.choose()
    rig.scheduler.again(first, due=30.0)
    rig.scheduler.ended(other, 0)
    assert rig.run() == [12]
    assert rig.in_memory == 0  # the database is the only truth about the jobs of a group that waits
    assert rig.scheduler.next_due() == 30.0
    rig.wait(29.9)
    assert rig.scheduler.hungry == {}
    rig.put([4, 5])  # behind the head
    assert rig.in_memory == 0
    rig.wait(0.1)
    rig.refill([1, 2, 3, 4, 5])
    assert rig.run() == [1, 2, 3, 4]
    rig.refill([5])
    assert rig.run() == [5]


def test_a_group_that_waits_takes_some_hundred_bytes():
    rig, groups = Rig(), 5_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(groups):
            rig.put(number, group=f"group {number}")
            for head in rig.choose():
                rig.scheduler.again(head, due=5.0 + number)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(stuck_lanes(rig.scheduler)) == groups
    assert (after - before) / groups < 700


def test_a_refill_that_was_sent_before_the_group_began_to_wait_is_void():
    rig = Rig(keep=4)
    rig.put(range(1, 7))
    rig.run(3)
    lane = rig.queue.lanes["a"]
    version = lane.version  # a refill behind 4 is on its way
    [head] = rig.choose()
    rig.scheduler.again(head, due=10.0)
    assert lane.version != version


def test_a_late_row_before_a_head_that_backs_off_waits_with_its_group_and_goes_first():
    rig = Rig()
    rig.put([5, 6])
    [head] = rig.choose()
    rig.scheduler.again(head, due=10.0)
    rig.put(3)
    assert rig.choose() == []
    rig.wait(10.0)
    [late] = rig.choose()
    assert late.position == 3
    rig.refill([5, 6])
    rig.scheduler.ended(late, rig.now)
    assert rig.run() == [5, 6]


@pytest.mark.parametrize("late_row_comes", ["while the head runs", "when the head is blocked"])
def test_a_late_row_before_a_blocked_head_goes_first_and_then_its_group_is_blocked_again(late_row_comes: str):
    """It waited for ever, and since the head was not the first of its group any more, no person could release it."""
    rig = Rig()
    rig.put([5, 6])
    [head] = rig.choose()
    if late_row_comes == "while the head runs":
        rig.put(3)
    rig.scheduler.again(head, due=inf)
    if late_row_comes == "when the head is blocked":
        rig.put(3)
    rig.wait(0.0)

    def refill() -> None:
        lane = rig.queue.lanes["a"]
        del rig.scheduler.hungry[lane]
        rows = [rig.entry(3), rig.entry(5, attempt=2, due=inf), rig.entry(6)]
        rows = [row for row in rows if row.position > lane.last and row.id not in ran]
        rig.scheduler.refilled(lane, rows, size=4, upto=6, left_out=False, now=rig.now)

    ran: list[int] = []
    for _ in range(3):
        if rig.scheduler.hungry:
            refill()
        ran += rig.run()
    assert ran == [3]
    assert stuck_lanes(rig.scheduler) == [rig.queue.lanes["a"]]
    assert (rig.scheduler.next_due(), rig.in_memory) == (None, 0)


def test_a_late_row_before_a_head_of_a_paused_type_goes_first_unless_it_is_paused_itself():
    rig = Rig()
    rig.scheduler.pause(Pauses(frozenset({"paused"}), frozenset(), frozenset()))
    rig.put(5, type="paused")
    rig.put(4, type="paused")
    assert (rig.choose(), rig.in_memory) == ([], 0)
    rig.put(3)
    assert rig.run() == [3]


def test_a_failed_job_without_a_group_leaves_memory_until_it_is_promoted():
    rig = Rig()
    rig.put(1, group=None)
    [entry] = rig.choose()
    rig.scheduler.again(entry, due=5.0)
    assert rig.in_memory == 0
    rig.put(9, group=None, id=1, attempt=2)
    [entry] = rig.choose()
    assert (entry.id, entry.attempt) == (1, 2)


def test_a_head_that_is_read_before_its_time_waits_for_it():
    rig = Rig()
    rig.put(1, due=7.0, attempt=2)
    rig.put(2)
    rig.put(3, group=None, due=8.0)
    assert rig.choose() == []
    assert rig.scheduler.next_due() == 7.0
    rig.wait(7.0)
    rig.refill([1, 2])
    assert rig.run() == [1, 2]
    rig.wait(1.0)
    assert rig.run() == [3]
    assert rig.scheduler.next_due() is None


def test_of_what_is_in_no_lane_only_what_is_not_due_yet_is_delayed():
    """Else each retry of a delayed job would have everything read anew, if a read has brought that job already."""
    rig = Rig()
    rig.put(1, due=7.0, attempt=2)
    rig.put(2, group=None, due=8.0)
    rig.put(3, group=None, due=0.0)
    rig.put(4, group=None)
    assert rig.scheduler.has_delayed([1, 2, 3], 7.0)
    assert not rig.scheduler.has_delayed([1, 3, 4, 5], 0.0)
    assert not rig.scheduler.has_delayed([2], 8.0)


def test_first_attempts_and_what_runs_again_take_turns():
    rig = Rig()
    rig.put([1, 2, 3], group=None, attempt=2)
    rig.put(4, attempt=2)
    rig.put([11, 12], group=None)
    rig.put(13, group="b")
    assert rig.run() == [11, 1, 12, 2, 13, 3, 4]


def test_of_groups_that_come_back_in_crowds_some_are_read_again_at_once_and_the_rest_when_these_have_run():
    rig = Rig(window=40)
    for number in range(1, 36):
        rig.put(number, group=f"group {number}")
    for head in rig.choose():
        rig.scheduler.again(head, due=5.0)
    rig.wait(5.0)
    back: list[int] = []
    while rig.scheduler.hungry:
        assert len(rig.scheduler.hungry) <= 10  # a quarter of the window
        for lane in list(rig.scheduler.hungry):
            del rig.scheduler.hungry[lane]
            row = rig.entry(lane.last + 1, lane.group, attempt=2)
            rig.scheduler.refilled(lane, [row], size=4, upto=rig.queue.high, left_out=False, now=rig.now)
        rig.wait(0.0)
        assert rig.scheduler.hungry == {}
        for head in rig.choose():
            back.append(head.position)
            rig.scheduler.again(head, due=50.0)
        rig.wait(0.0)
    assert back == list(range(1, 36))
    rig.wait(50.0)
    rig.scheduler.forget_waiting(rig.queue)
    rig.wait(0.0)
    assert rig.scheduler.hungry == {}
    rig.put([1], group="group 1", attempt=3)
    assert rig.run() == [1]


def test_crowds_of_a_low_priority_that_have_come_back_keep_no_group_of_a_high_one_waiting():
    rig = Rig(window=16)

    def read(attempt: int) -> None:
        for lane in list(rig.scheduler.hungry):
            del rig.scheduler.hungry[lane]
            priority = 1 if lane.group == "high" else 0
            row = rig.entry(lane.last + 1, lane.group, attempt=attempt, priority=priority)
            rig.scheduler.refilled(lane, [row], size=4, upto=rig.queue.high, left_out=False, now=rig.now)

    for number in range(1, 9):
        rig.put(number, group=f"low {number}")
    rig.put(9, group="high", priority=1)
    for head in rig.choose():
        rig.scheduler.again(head, due=5.0 if head.group == "high" else 4.0)
    rig.wait(4.0)
    read(attempt=2)
    rig.wait(1.0)
    read(attempt=2)
    assert positions(rig.choose(1)) == [9], "the others may wait for as long as there are new ones of its priority"
    assert rig.scheduler.next_due() is None, "there is no room"
    assert positions(rig.choose(1)) == [1]
    assert rig.scheduler.next_due() == 4.0, "the fifth may come back"
    rig.wait(0.0)
    assert [lane.group for lane in rig.scheduler.hungry] == ["low 5"]


def test_crowds_of_many_priorities_that_have_come_back_keep_no_new_job_from_being_read():
    """Four of them filled the window; whatever ran made room for one that came back, and never for anything new."""
    rig = Rig(window=16)
    crowds = [(priority, f"{priority} {number}") for priority in range(-3, 3) for number in range(8)]
    for position, (priority, group) in enumerate(crowds, start=1):
        rig.put(position, group=group, priority=priority)
    for head in rig.choose():
        rig.scheduler.again(head, due=4.0)
    rig.wait(4.0)
    for lane in list(rig.scheduler.hungry):
        del rig.scheduler.hungry[lane]
        row = rig.entry(lane.last + 1, lane.group, attempt=2, priority=lane.line[0])
        rig.scheduler.refilled(lane, [row], size=4, upto=rig.queue.high, left_out=False, now=rig.now)
    assert rig.scheduler.ready == 24, "a quarter of the window each"
    assert rig.scheduler.memory.space() == 16
    rig.put(100, group="new", priority=2)
    assert 100 in positions(rig.choose(2))


def test_crowds_of_very_many_priorities_share_the_window_but_for_a_few_of_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ready, "_FEW", 2)
    rig = Rig(window=16)
    for priority in range(10):
        for number in range(8):
            rig.put(100 * priority + number, group=f"{priority} {number}", priority=priority, attempt=2)
    assert rig.scheduler.ready == 4 * 4 + 6 * 2


def test_a_read_from_the_beginning_gets_past_crowds_of_groups_that_have_failed():
    rig = Rig(window=40)
    for number in range(1, 36):
        rig.put(number, group=f"group {number}", attempt=2)
    assert rig.in_memory == 10
    assert rig.scheduler.memory.room() == 40, "what has come back has room of its own"
    rig.put(36, group="healthy")
    assert positions(rig.choose(2)) == [36, 1]
    rig.wait(0.0)
    assert [lane.group for lane in rig.scheduler.hungry] == ["group 11"]


def test_a_group_that_is_gone_while_it_waits_for_room_takes_none_when_there_is_some():
    """It would never give it back, and in time no group that has failed would run again."""
    rig = Rig(window=4)
    for number in (1, 2):
        rig.put(number, group=f"group {number}", attempt=2)
    rig.wait(0.0)  # the second one's time has come
    [first] = rig.choose()
    rig.put(9, group="group 9", attempt=2)
    rig.scheduler.forget([("t/0", "group 2")], [2])
    rig.refill(group="group 2")
    assert set(rig.queue.lanes) == {"group 1", "group 9"}
    rig.scheduler.ended(first, 0)
    assert rig.run() == [9]
    rig.wait(0.0)
    rig.put(10, group="group 10", attempt=2)
    assert rig.run() == [10]


def test_a_job_that_has_been_followed_runs_where_somebody_keeps_it_locked():
    """It cannot be ended as superseded then; to ask again and again would keep its group waiting."""
    rig = Rig()
    rig.put([1, 2], policy=Policy.LATEST.value)
    assert rig.choose() == []
    [lane] = rig.scheduler.crowded
    rig.scheduler.thinned(lane, newest=2, superseded=0, now=rig.now)
    assert rig.run() == [1, 2]


# -- suspects -----------------------------------------------------------------------------------------------------


def test_one_suspect_runs_at_a_time_beside_the_innocent():
    rig = Rig()
    rig.put([1, 2, 3], group=None, losses=1)
    rig.put(4, losses=2)
    rig.put(5)
    rig.put(6, group=None)
    first = rig.choose()
    assert positions(first) == [1, 6]
    assert rig.choose() == []
    assert not rig.scheduler.runnable()
    rig.scheduler.ended(first[0], 0)
    ran = [1]
    while rig.scheduler.runnable():
        [suspect] = rig.choose()
        assert rig.choose() == []
        ran.append(suspect.position)
        rig.scheduler.ended(suspect, 0)
    assert ran == [1, 2, 3, 4, 5]  # 5 comes after 4, which is of its group


def test_a_list_is_filled_up_with_nothing_that_has_failed_or_may_have_killed_an_executor():
    """Each of these is tried alone, so that it fails no other."""
    rig = Rig()
    rig.put(1, group=None)
    [first] = rig.choose()
    rig.put(2, group=None, losses=1)
    rig.put(3, group=None, failures=1, attempt=2)
    rig.put(4, losses=1)
    rig.put(5, group="b", failures=1, attempt=2)
    rig.put(6, group=None)
    more = rig.scheduler.choose_more({(rig.queue, first.type): 10}, 10, rig.now)
    assert positions(more) == [6]
    assert sorted(positions(rig.choose())) == [2, 3, 5], "one suspect at a time"


def test_a_list_is_filled_up_with_few_looks_at_what_it_does_not_take_and_what_it_passes_over_keeps_its_turn():
    """All that was ready was gone through each time, also where nothing was wanted: a millisecond of the event loop."""

    class Wanted(dict[tuple[OriginQueue, str], int]):
        looks = 0

        def get(self, key: Any, default: Any = None) -> Any:
            self.looks += 1
            return super().get(key, default)

    rig = Rig()
    other = rig.scheduler.add_origin("t/1", 1)
    rig.put([1, 2], group=None)
    rig.put([3, 4, *range(5, 100)], group=None, queue=other)
    rig.put(range(100, 200), group=None, type="y")
    wanted = Wanted({(other, "x"): 2, (rig.queue, "z"): 0})
    assert positions(rig.scheduler.choose_more(wanted, 10, rig.now)) == [3, 4]
    assert wanted.looks == 4
    assert rig.scheduler.choose_more(wanted, 10, rig.now) == []
    assert wanted.looks == 4
    assert positions(entry for entry in rig.choose() if entry.type == "x")[:4] == [1, 2, 5, 6]


def test_a_suspect_that_fails_or_is_put_back_makes_room_for_the_next():
    rig = Rig()
    rig.put([1, 2], group=None, losses=1)
    [one] = rig.choose()
    rig.scheduler.put_back(one, 0)
    [two] = rig.choose()
    assert two.position == 2
    rig.scheduler.again(two, due=5.0)
    assert positions(rig.choose()) == [1]


def test_a_suspect_that_has_been_running_for_long_makes_room_for_the_next():
    """One that hangs would keep all the others, and their groups, for ever."""
    rig = Rig()

    def at(now: float) -> list[int]:
        rig.now = now
        rig.scheduler.wake_due(now)
        return positions(rig.choose()) if rig.scheduler.runnable() else []

    rig.put([1, 2, 3], group=None, losses=1)
    assert at(10.0) == [1]
    due = rig.scheduler.next_due()
    assert due is not None
    assert due > 10.0
    assert at(due - 0.1) == []
    first = rig.scheduler.suspects.running
    assert first is not None
    assert at(due) == [2]
    rig.scheduler.ended(first, due)
    assert at(due + 1) == []  # the second has its time as well
    second = rig.scheduler.suspects.running
    assert second is not None
    rig.scheduler.ended(second, due + 1)
    assert at(due + 2) == [3]
    assert rig.scheduler.next_due() is None  # nobody waits for the last


def test_a_suspect_that_ends_after_its_time_alone_makes_room_for_one_that_has_just_come():
    rig = Rig()
    rig.put(1, group=None, losses=1)
    [first] = rig.choose()
    rig.now = 1_000.0
    rig.put(2, group=None, losses=1)
    assert rig.choose() == []
    rig.scheduler.ended(first, rig.now)
    assert rig.scheduler.next_due() is None  # it waits for a worker, and for no time
    rig.scheduler.wake_due(rig.now)
    assert positions(rig.choose()) == [2]


def test_suspects_of_other_origins_wait_on_where_one_is_lost():
    rig = Rig()
    rig.put([1, 2], group=None, losses=1)
    rig.put(3, group=None, losses=1, queue=rig.scheduler.add_origin("t/1", 1))
    assert positions(rig.choose()) == [1]
    rig.scheduler.remove_origin("t/0")
    assert positions(rig.choose()) == [3]


def test_groups_that_back_off_come_back_in_the_order_of_their_times_also_where_an_origin_is_lost():
    rig = Rig()
    other = rig.scheduler.add_origin("t/1", 1)
    for position, queue in ((1, rig.queue), (5, other), (2, other)):
        rig.put(position, group=str(position), queue=queue)
    for entry in rig.choose():
        rig.scheduler.again(entry, due=float(entry.position))
    rig.scheduler.remove_origin("t/0")
    assert rig.scheduler.next_due() == 2.0


def test_groups_that_back_off_come_back_where_timers_are_dropped_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ready, "_FEW_TIMERS", 3)
    rig = Rig()
    for position in (1, 5, 2):
        rig.put(position, group=str(position))
    for entry in rig.choose():
        rig.scheduler.again(entry, due=float(entry.position))
    rig.scheduler.forget([("t/0", "1")], [])
    rig.put(9, group="9")
    [last] = rig.choose()
    rig.scheduler.again(last, due=9.0)
    assert rig.scheduler.next_due() == 2.0
    rig.wait(10.0)
    assert sorted(lane.group for lane in rig.scheduler.hungry) == ["1", "2", "5", "9"]


def test_a_suspect_that_waits_does_not_overtake_a_job_that_a_read_brings_meanwhile():
    rig = Rig()
    rig.put(1, group="a", losses=1)
    rig.put(7, group="b", losses=1)
    [first] = rig.choose()
    rig.put(5, group="b")  # a late commit
    rig.scheduler.ended(first, rig.now)
    [late] = rig.choose()
    assert late.position == 5
    rig.scheduler.ended(late, rig.now)
    assert positions(rig.choose()) == [7]


def test_a_suspect_that_waits_holds_its_group():
    rig = Rig()
    rig.put(1, group="a", losses=1)
    rig.put(2, group="b", losses=1)
    rig.put(3, group="b")
    [first] = rig.choose()
    assert rig.choose() == []
    rig.put(4, group="b")
    assert rig.choose() == []
    rig.scheduler.ended(first, 0)
    assert rig.run() == [2, 3, 4]


# -- types that this process does not know ------------------------------------------------------------------------


def test_a_job_of_an_unknown_type_is_counted_and_left_alone():
    rig = Rig()
    rig.put(1, group=None, type="unknown")
    rig.put(2, group=None)
    assert rig.run() == [2]
    assert rig.scheduler.unknown == {"unknown": 1}
    assert rig.in_memory == 0
    rig.scheduler.forget_waiting(rig.queue)
    rig.put(1, group=None, type="unknown")
    assert rig.scheduler.unknown == {"unknown": 1}  # it is read again


def test_a_group_waits_behind_a_job_of_an_unknown_type_and_others_go_on():
    rig = Rig()
    rig.put(1)
    rig.put(2, type="unknown")
    rig.put(3)
    rig.put([11, 12], group="b")
    assert rig.run() == [1, 11, 12]
    assert rig.scheduler.unknown == {"unknown": 1}
    assert [lane.group for lane in stuck_lanes(rig.scheduler)] == ["a"]


def test_a_group_behind_an_unknown_type_is_looked_at_again_in_case_that_somebody_has_removed_the_job():
    rig = Rig()
    rig.put(1, type="unknown")
    rig.put(2)
    assert rig.run() == []
    rig.wait(UNKNOWN_SECONDS)
    lane = rig.queue.lanes["a"]
    assert lane in rig.scheduler.hungry
    del rig.scheduler.hungry[lane]
    again = rig.entry(1, type="unknown")
    rig.scheduler.refilled(lane, [again, rig.entry(2)], size=4, upto=2, left_out=False, now=rig.now)
    assert rig.run() == []
    assert rig.scheduler.unknown == {"unknown": 1}  # it is the same job
    rig.wait(UNKNOWN_SECONDS)
    rig.refill([2])
    assert rig.run() == [2]


def test_what_was_left_of_a_type_is_read_anew_when_it_has_been_declared():
    rig = Rig()
    rig.put(1, group=None, type="unknown")
    rig.put(2, type="unknown")
    rig.put(3, group=None)
    assert not rig.scheduler.learn()
    rig.unknown_types.clear()
    rig.put(4, group=None, type="unknown")  # of a read that was under way: what is before it was left
    assert not rig.scheduler.knows_type("unknown")
    assert rig.run() == [3]
    rig.queue.high = 4
    assert rig.scheduler.learn()
    assert rig.queue.high == 0
    assert rig.scheduler.unknown == {}
    rig.put([1, 4], group=None, type="unknown")
    rig.put(2, type="unknown")
    assert sorted(rig.run()) == [1, 2, 4]
    assert not rig.scheduler.learn()


def test_a_late_row_of_an_unknown_type_is_never_chosen_although_its_group_was_ready():
    rig = Rig()
    rig.put(5)
    rig.put(3, type="unknown")
    assert rig.choose() == []
    assert rig.scheduler.unknown == {"unknown": 1}
    assert rig.scheduler.ready == 0


# -- handed over: the successor is named by the cycle that records a success ---------------------------------------


def test_a_group_is_handed_over_from_one_job_to_the_next():
    rig = Rig()
    rig.put([1, 2, 3])
    [entry] = rig.choose()
    for position in (2, 3):
        following = rig.hand_over(entry)
        assert following is not None
        assert following.position == position
        assert rig.hand_over(entry) is None  # it has been
        assert rig.choose() == []
        rig.scheduler.ended(entry, 0)
        assert rig.choose() == []
        entry = following
    assert rig.hand_over(entry) is None
    rig.scheduler.ended(entry, 0)
    assert rig.queue.lanes == {}
    assert rig.in_memory == 0


@pytest.mark.parametrize("draining", [False, True], ids=["", "draining"])
def test_a_successor_that_is_put_back_leaves_the_group_to_the_job_before_it(draining: bool):
    rig = Rig()
    rig.put([1, 2, 3])
    [first] = rig.choose()
    second = rig.hand_over(first)
    assert second is not None
    if draining:
        rig.scheduler.drain(rig.queue)
    rig.scheduler.put_back(second, 0)
    if draining:
        rig.scheduler.resume(rig.queue)
        rig.put([1, 2, 3])
    assert rig.choose() == []
    rig.scheduler.ended(first, 0)
    assert rig.run() == [2, 3]
    assert rig.in_memory == 0


def test_everything_is_forgotten_while_a_group_is_handed_over():
    rig = Rig()
    rig.put([1, 2, 3])
    [first] = rig.choose()
    second = rig.hand_over(first)
    assert second is not None
    rig.scheduler.put_back(second, 0)
    rig.scheduler.forget_waiting(rig.queue)
    rig.put([1, 2, 3])  # the outcome of the first is not recorded yet
    assert rig.choose() == []
    rig.scheduler.ended(first, 0)
    assert rig.run() == [2, 3]


@pytest.mark.parametrize(
    "fields",
    [{"losses": 1}, {"due": 5.0}, {"policy": Policy.LATEST.value}, {"type": "unknown"}],
    ids=lambda fields: next(iter(fields)),
)
def test_a_job_that_has_to_be_looked_at_is_not_handed_anything(fields: dict[str, Any]):
    rig = Rig()
    rig.put(1)
    rig.put(2, **fields)
    [first] = rig.choose()
    assert rig.hand_over(first) is None


def test_a_group_is_handed_over_to_a_job_whose_time_has_come():
    rig = Rig()
    rig.put(1)
    rig.put(2, due=5.0)
    [first] = rig.choose()
    rig.now = 5.0
    assert [entry.position for entry in rig.scheduler.hand_over([first], 1, rig.now)] == [2]


def test_no_more_groups_are_handed_over_than_fit_into_the_cycle():
    rig = Rig()
    rig.put([1, 2], group="a")
    rig.put([3, 4], group="b")
    rig.put([5, 6], group="c")
    running = rig.choose()
    handed = rig.scheduler.hand_over(running, 2, rig.now)
    assert [entry.group for entry in handed] == ["a", "b"]
    rig.scheduler.all_ended(running, 0)
    assert [(entry.group, entry.position) for entry in rig.choose()] == [("c", 6)]


@pytest.mark.parametrize(
    "pause",
    [["type", "paused", None, None], ["origin", None, "t/1", None], ["group", None, "t/1", "a"]],
    ids=lambda pause: pause[0],
)
def test_only_what_is_paused_is_not_handed_over(pause: list[str | None]):
    """One paused group anywhere took the hand-over from all groups of all instances."""
    rig = Rig()
    other = rig.scheduler.add_origin("t/1", 1)
    rig.put(1)
    rig.put(2, queue=other)
    first, withheld = rig.choose()
    rig.scheduler.pause(Pauses.of([pause]))
    rig.put(3)
    rig.put(4, queue=other, type="paused")
    handed = rig.scheduler.hand_over([withheld, first], 2, rig.now)
    assert positions(handed) == [3]
    rig.scheduler.all_ended([withheld, first], 0)
    assert rig.choose() == []
    rig.scheduler.all_ended(handed, 0)
    assert rig.in_memory == 0


def test_a_pause_of_what_others_hold_forgets_nothing_and_withholds_what_is_acquired_later():
    """One paused group of one origin had all executors of the service read everything anew."""
    rig = Rig()
    rig.put(range(1, 11), group=None)
    elsewhere = Pauses.of([["group", None, "t/2", "g"], ["origin", None, "t/3", None]])
    assert not rig.scheduler.pause(elsewhere)
    assert rig.in_memory == 10
    rig.put([11, 12], group="g", queue=rig.scheduler.add_origin("t/2", 1))
    rig.put(13, group=None, queue=rig.scheduler.add_origin("t/3", 1))
    assert positions(rig.choose()) == list(range(1, 11)), "what is paused runs"


@pytest.mark.parametrize(
    "pause",
    [["type", "paused", None, None], ["origin", None, "t/0", None], ["group", None, "t/0", "b"]],
    ids=lambda pause: pause[0],
)
def test_a_pause_of_what_is_held_and_its_end_forget_what_waits(pause: list[str | None]):
    rig = Rig()
    elsewhere: list[str | None] = ["group", None, "t/2", "g"]
    for pauses in [[pause], [elsewhere]]:  # its end, as another one begins
        rig.put(range(1, 11), group=None, type="another")
        assert rig.scheduler.pause(Pauses.of(pauses))
        assert rig.in_memory == 0


def test_a_job_without_a_group_hands_nothing_over():
    rig = Rig()
    rig.put([1, 2], group=None)
    [first] = rig.choose(1)
    assert rig.hand_over(first) is None


def test_a_group_that_is_handed_over_is_refilled():
    rig = Rig(keep=4)
    rig.put(range(1, 7))
    [entry] = rig.choose()
    for _ in range(3):
        following = rig.hand_over(entry)
        assert following is not None
        rig.scheduler.ended(entry, 0)
        entry = following
    rig.refill([5, 6])
    rig.scheduler.ended(entry, 0)
    assert rig.run() == [5, 6]


# -- put back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["a", None])
def test_a_job_that_was_chosen_but_not_started_runs_later(group: str | None):
    rig = Rig()
    rig.put([1, 2], group=group)
    chosen = rig.choose(1)
    rig.scheduler.put_back(chosen[0], 0)
    assert sorted(rig.run()) == [1, 2]
    assert rig.in_memory == 0


@pytest.mark.parametrize("group", [None, "a"])
def test_a_job_that_is_put_back_after_its_type_was_paused_and_all_was_read_anew_does_not_run(group: str | None):
    rig = Rig()
    rig.put(1, group)
    [job] = rig.choose()
    rig.scheduler.pause(Pauses(frozenset({"x"}), frozenset(), frozenset()))
    rig.put(1, group)  # what has been chosen is not taken in again
    rig.scheduler.put_back(job, rig.now)
    assert not rig.choose()


def test_a_job_that_is_put_back_goes_behind_late_rows_that_have_come_before_it():
    rig = Rig()
    rig.put([10, 11])
    [chosen] = rig.choose()
    rig.put([3, 4])
    rig.scheduler.put_back(chosen, 0)
    assert rig.run() == [3, 4, 10, 11]


def test_a_job_that_is_put_back_does_not_overtake_late_rows_that_did_not_fit_into_memory():
    rig = Rig(keep=4)
    rig.put([10])
    [chosen] = rig.choose()
    rig.put(range(3, 9))
    rig.scheduler.put_back(chosen, 0)
    assert rig.run() == [3, 4, 5, 6]
    rig.refill([7, 8, 10])
    assert rig.run() == [7, 8, 10]


def test_a_job_that_is_put_back_while_its_origin_is_read_anew_does_not_overtake_what_has_not_been_read_yet():
    """As where so many rows turn up late that they are to be found by reading from 0."""
    rig = Rig()
    rig.put([10])
    [chosen] = rig.choose()
    rig.scheduler.forget_waiting(rig.queue)
    rig.put([3])
    rig.scheduler.put_back(chosen, 0)
    assert rig.run() == [3]
    rig.put([4, 10, 11])
    assert rig.run() == [4, 10, 11]
    assert rig.in_memory == 0


def test_a_group_goes_on_where_the_suspect_that_held_it_has_got_another_place():
    """It stood still: nobody looked at it again, as the new place is behind what memory has of it."""
    rig = Rig(keep=4)
    rig.put(1, group="b", losses=1)
    rig.put(2, losses=1)
    assert positions(rig.choose()) == [1]
    rig.put(range(3, 9))
    rig.put(9, id=2)
    assert positions(rig.choose()) == [3]


def test_a_group_is_refilled_where_what_memory_had_of_it_has_got_other_places():
    rig = Rig(keep=4)
    rig.put(range(1, 9))
    [first] = rig.choose()
    for position in (2, 3, 4):
        rig.put(position + 10, id=position)
    rig.scheduler.ended(first, 0)
    rig.refill([5, 6, 7, 8])
    assert rig.run(4) == [5, 6, 7, 8]


# -- while a read is under way ------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["a", None])
def test_a_job_that_ends_while_a_read_is_under_way_is_not_taken_in_again(group: str | None):
    rig = Rig()
    rig.put(1, group=group)
    [entry] = rig.choose()
    rig.scheduler.reading = True  # the read has seen the row
    rig.scheduler.ended(entry, 0)
    rig.put(1, group=group)
    rig.put(7, group=group, id=1)  # nor at another place that a person had given it
    assert rig.choose() == []
    rig.scheduler.read_delivered()
    assert rig.in_memory == 0


def test_the_end_of_a_job_that_was_lost_in_a_failover_hides_no_other_job_of_its_id():
    rig = Rig()
    rig.put(1)
    [lost] = rig.choose()
    rig.scheduler.remove_origin("t/0")  # the former primary's answer, that it has ended, is still on its way
    rig.queue = rig.scheduler.add_origin("t/1", 1)
    rig.scheduler.reading = True
    rig.scheduler.ended(lost, rig.now)
    rig.put(1)
    assert [entry.id for entry in rig.choose()] == [1]


def test_the_next_attempt_may_come_with_the_read_during_which_the_last_one_ended():
    rig = Rig()
    rig.put(1, group=None)
    [entry] = rig.choose()
    rig.scheduler.reading = True
    rig.scheduler.again(entry, due=0.0)
    rig.put(5, group=None, id=1, attempt=2)
    rig.scheduler.read_delivered()
    [entry] = rig.choose()
    assert entry.attempt == 2


def test_the_next_attempt_may_be_read_before_the_outcome_of_the_last_one_is_acknowledged():
    rig = Rig()
    rig.put(1, group=None)
    [entry] = rig.choose()
    rig.put(5, group=None, id=1, attempt=2)  # committed, promoted and read; the cycle's answer is still on its way
    assert rig.choose() == []
    rig.scheduler.again(entry, due=0.0)
    [entry] = rig.choose()
    assert (entry.position, entry.attempt) == (5, 2)
    rig.scheduler.ended(entry, 0)
    assert rig.in_memory == 0


def test_a_next_attempt_that_was_read_too_early_is_forgotten_with_all_that_waits():
    """Somebody may have ended it since."""
    rig = Rig()
    rig.put(1, group=None)
    [entry] = rig.choose()
    rig.put(5, group=None, id=1, attempt=2)
    rig.scheduler.forget_waiting(rig.queue)
    rig.scheduler.again(entry, due=0.0)
    assert rig.choose() == []
    rig.put(5, group=None, id=1, attempt=2)
    assert rig.run() == [5]


def test_a_held_job_that_is_released_may_be_read_before_its_outcome_is_acknowledged():
    rig = Rig()
    rig.put([1, 2])
    [entry] = rig.choose()
    rig.put(5, id=1, attempt=2)
    rig.scheduler.ended(entry, 0)
    assert rig.run() == [2, 5]


def test_a_job_that_was_given_another_place_leaves_its_old_one():
    rig = Rig()
    rig.put([1, 2])
    rig.put(3, group=None)
    rig.put(4, group="b")
    rig.put(11, id=1)
    rig.put(13, id=3, group=None)
    rig.put(14, id=4, group="b")
    chosen: list[int] = []
    while entries := rig.choose():
        chosen += positions(entries)
        for entry in entries:
            rig.scheduler.ended(entry, 0)
    assert sorted(chosen) == [2, 11, 13, 14]
    assert chosen.index(2) < chosen.index(11)
    assert rig.in_memory == 0
    assert rig.scheduler.ready == 0
    assert rig.queue.lanes == {}


def test_a_waiting_suspect_may_be_given_another_place():
    rig = Rig()
    rig.put([1], group=None, losses=1)
    rig.put([2], group="b", losses=1)
    [first] = rig.choose()
    assert rig.choose() == []
    rig.put(9, id=2, group="b", losses=1)
    rig.scheduler.ended(first, 0)
    assert rig.run() == [9]


def test_a_running_job_that_was_given_another_place_goes_on():
    rig = Rig()
    rig.put([1, 2])
    [entry] = rig.choose()
    rig.put(9, id=1)
    rig.scheduler.ended(entry, 0)
    assert rig.run() == [2]


# -- origins that come and go -------------------------------------------------------------------------------------


def test_a_draining_origin_lets_its_jobs_end_and_starts_no_others():
    rig = Rig()
    rig.put([1, 2])
    rig.put(3, group=None)
    other = rig.scheduler.add_origin("t/1", 1)
    rig.scheduler.insert(rig.entry(9, queue=other), 0)
    [running] = rig.choose(1)
    rig.scheduler.drain(rig.queue)
    assert positions(rig.choose()) == [9]
    assert rig.queue.running == {running}
    rig.scheduler.ended(running, 0)
    assert rig.choose() == []
    assert not rig.queue.running
    assert rig.queue.lanes == {}


@pytest.mark.parametrize("group", ["a", None])
def test_a_job_that_is_put_back_while_its_origin_drains_is_not_chosen_again(group: str | None):
    rig = Rig()
    rig.put(1, group=group)
    [entry] = rig.choose()
    rig.scheduler.drain(rig.queue)
    rig.scheduler.put_back(entry, 0)
    assert rig.choose() == []
    assert rig.in_memory == 0
    rig.scheduler.resume(rig.queue)
    rig.put(1, group=group)  # read again from 0
    assert rig.run() == [1]


def test_a_job_that_fails_while_its_origin_drains_is_found_again_if_the_origin_stays():
    rig = Rig()
    rig.put([1, 2])
    [entry] = rig.choose()
    rig.scheduler.drain(rig.queue)
    rig.scheduler.again(entry, due=5.0)
    assert rig.queue.lanes == {}
    rig.wait(6.0)
    assert rig.scheduler.hungry == {}  # nothing asks for reads of an origin that is not read
    rig.scheduler.resume(rig.queue)
    assert rig.queue.high == 0
    rig.put(1, attempt=2, due=5.0)
    rig.put(2)
    assert rig.run() == [1, 2]


def test_an_origin_that_comes_back_while_it_drains_goes_on_where_it_is():
    rig = Rig()
    rig.put([1, 2, 3])
    [running] = rig.choose()
    rig.scheduler.drain(rig.queue)
    rig.scheduler.resume(rig.queue)
    rig.put([1, 2, 3])  # the read begins again
    assert rig.choose() == []
    rig.scheduler.ended(running, 0)
    assert rig.run() == [2, 3]


def test_an_origin_that_was_lost_takes_all_of_it_along_and_outcomes_change_nothing_any_more():
    rig = Rig()
    rig.put([1, 2])
    rig.put([3, 4], group=None, losses=1)
    one, suspect = rig.choose()
    rig.scheduler.remove_origin("t/0")
    assert rig.choose() == []
    assert rig.scheduler.suspects.running is None
    assert rig.in_memory == 0
    again = rig.scheduler.add_origin("t/0", 3)
    for position in (1, 2):
        rig.scheduler.insert(rig.entry(position, queue=again, attempt=2), 0)
    rig.scheduler.ended(one, 0)  # of the old epoch
    rig.scheduler.again(suspect, 0.0)
    [entry] = rig.choose()
    assert (entry.position, entry.attempt) == (1, 2)
    assert not rig.scheduler.holds(one)
    assert rig.scheduler.holds(entry)
    rig.scheduler.ended(entry, 0)
    assert rig.run() == [2]


def test_what_is_forgotten_is_read_again_and_what_runs_stays_known():
    rig = Rig(keep=4)
    rig.put(range(1, 9))
    rig.put([21, 22], group=None)
    rig.put(31, group="stuck")
    running = rig.choose()
    rig.scheduler.again(next(e for e in running if e.group == "stuck"), due=50.0)
    version = rig.queue.version
    rig.scheduler.forget_waiting(rig.queue)
    assert (rig.queue.version, rig.queue.high, rig.queue.backlogged) == (version + 1, 0, True)
    assert rig.choose() == []
    rig.put(range(1, 9))
    rig.put([21, 22], group=None)
    rig.put(31, group="stuck", attempt=2, due=50.0)
    assert rig.choose() == []
    for entry in running:
        if entry.group != "stuck":
            rig.scheduler.ended(entry, 0)
    assert rig.run() == [2, 3, 4, 5]
    rig.wait(50.0)
    rig.refill([31], group="stuck")
    assert rig.run() == [31]


@pytest.mark.parametrize(
    ("group", "ended"), [(None, [1]), ("a", [1]), ("a", [])], ids=["alone", "in a group", "with its group"]
)
def test_a_next_attempt_that_has_been_read_does_not_start_after_a_person_has_ended_it(
    group: str | None, ended: list[int]
):
    """It was held, released and cancelled before the answer to its first attempt's cycle came."""
    rig = Rig()
    rig.put(1, group)
    [first] = rig.choose()
    rig.put(2, group, id=1, attempt=2)
    rig.scheduler.forget([("t/0", group)] if group else [], ended)
    if group:
        rig.refill()
    rig.scheduler.ended(first, 0)
    assert (rig.run(), rig.scheduler.knows(1)) == ([], False)


def test_jobs_that_a_person_has_ended_are_taken_out_together(monkeypatch: pytest.MonkeyPatch):
    """Of 2,000 that were cancelled among 4,000 each was looked for by itself, and nothing else went on for 0.1 s."""
    rig = Rig()
    rig.put([1, 2, 3, 4], group=None, losses=1)
    rig.put(range(5, 100), group=None)
    rig.put(range(100, 110))
    looks, lines = 0, rig.scheduler._ready.lines

    def looked(*types: Any) -> Any:
        nonlocal looks
        looks += 1
        return lines(*types)

    [running, *_] = rig.choose(6)
    monkeypatch.setattr(rig.scheduler._ready, "lines", looked)
    rig.scheduler.forget([("t/0", "a")], [running.id, 3, *range(50, 100), 1_000])
    assert looks == 1
    rig.refill(range(100, 104))
    rig.scheduler.ended(running, 0)
    assert sorted(rig.run()) == [2, 4, *range(10, 50), *range(100, 104)]


def test_a_group_that_an_action_concerns_while_its_origin_drains_goes_on_when_that_comes_back():
    rig = Rig()
    rig.put([1, 2])
    [running] = rig.choose()
    rig.scheduler.drain(rig.queue)
    rig.scheduler.forget([("t/0", "a")], [])
    assert rig.scheduler.hungry == {}  # nothing asks for reads of an origin that is not read
    rig.scheduler.resume(rig.queue)
    rig.put([1, 2])  # the read begins again
    rig.scheduler.ended(running, 0)
    assert rig.run() == [2]


def test_groups_that_back_off_for_long_cost_no_memory_each_time_that_all_is_forgotten():
    """Each action of a person has everything read anew, and there may be thousands."""
    rig = Rig()
    for _ in range(100):
        for group in "abc":
            rig.put(1, group=group, id=ord(group), attempt=2, due=50.0)
        rig.scheduler.forget_waiting(rig.queue)
    rig.put(1, attempt=2, due=50.0)
    assert len(rig.scheduler._ready._timers) == 1
    assert rig.scheduler.next_due() == 50.0
    rig.scheduler.remove_origin("t/0")
    assert rig.scheduler.next_due() is None


def test_groups_that_back_off_cost_next_to_nothing_where_persons_act_on_others_again_and_again():
    """Each action went through what all of 40,000 groups wait for: for as long as somebody cancelled jobs in a loop,
    nothing started."""
    rig = Rig()
    for _ in range(5_000):
        rig.put(1, group="acted on", attempt=2, due=50.0)
        rig.scheduler.forget([("t/0", "acted on")], [])
        rig.refill(group="acted on")
    rig.put(2, group="still", attempt=2, due=40.0)
    assert len(rig.scheduler._ready._timers) <= 1_001
    rig.wait(40.0)
    assert [lane.group for lane in rig.scheduler.hungry] == ["still"]
    rig.wait(10.0)
    assert rig.run() == []


# -- the audit's questions ----------------------------------------------------------------------------------------


def test_the_scheduler_knows_which_rows_it_is_going_to_read():
    rig = Rig(keep=4)
    rig.put(range(1, 9))
    scheduler = rig.scheduler
    assert scheduler.knows(4)
    assert not scheduler.knows(5)
    assert scheduler.accounts_for("t/0", "a", 5)  # by a refill
    assert scheduler.accounts_for("t/0", "b", 9)  # by the next forward read
    assert not scheduler.accounts_for("t/0", "b", 8)
    assert not scheduler.accounts_for("t/0", None, 3)
    assert scheduler.accounts_for("elsewhere/0", None, 3)
    scheduler.drain(rig.queue)
    assert scheduler.accounts_for("t/0", None, 3)


def test_types_of_one_priority_take_turns():
    """A crowd of one kept what came after it waiting until all of it had run."""
    rig = Rig()
    rig.put(range(1, 7), group=None, type="crowd")
    rig.put((7, 8), group=None, type="other")
    rig.put(9, group=None, type="third", priority=1)
    assert positions(rig.choose(3)) == [9, 1, 7]
    assert rig.run() == [2, 8, 3, 4, 5, 6], "and the turns go on where they were"


def test_of_a_slow_type_no_more_than_its_share_is_chosen():
    rig = Rig()
    rig.put(range(1, 6), group=None, type="slow")
    rig.put(range(6, 10), group=None, type="quick")
    rig.scheduler.share_out({"slow": 2}, {})
    assert positions(rig.choose(4)) == [1, 6, 2, 7]
    assert positions(rig.choose()) == [8, 9], "those of other types, one after the other"
    assert rig.choose() == []
    rig.scheduler.share_out({"slow": 1}, {})
    assert positions(rig.choose()) == [3]
    rig.scheduler.share_out({}, {})
    assert positions(rig.choose()) == [4, 5]


def test_of_a_type_with_a_limit_no_more_is_chosen_than_that_leaves():
    rig = Rig()
    rig.put(range(1, 6), group=None, type="limited")
    rig.put(range(6, 10), group=None, type="slow")
    rig.scheduler.share_out({"slow": 2}, {"limited": 2})
    assert positions(rig.choose()) == [1, 6, 2, 7], "neither counts for the other"
    rig.scheduler.share_out({}, {"limited": -1})
    assert positions(rig.choose()) == [8, 9]
    for slow, limited in ((1, 5), (5, 1)):
        rig.scheduler.share_out({"limited": slow}, {"limited": limited})
        assert len(rig.choose()) == 1


def test_a_late_job_of_a_type_that_is_full_waits_with_its_group():
    """The group had its turn as one of another type, the one of the job that was its first until then."""
    rig = Rig()
    rig.put(5, group="g", type="quick")
    rig.put(1, group="g", type="limited")
    rig.put(6, group=None, type="quick")
    rig.scheduler.share_out({}, {"limited": 0})
    assert positions(rig.choose()) == [6]
    assert rig.choose() == []
    rig.scheduler.share_out({}, {"limited": 1})
    [head] = rig.choose()
    assert head.position == 1
    rig.scheduler.ended(head, rig.now)
    assert positions(rig.choose()) == [5]


def test_while_all_that_stands_here_is_of_full_types_nothing_can_be_chosen():
    """So a job that comes alone is named early all the same."""
    rig = Rig()
    rig.put(1, group=None, type="limited")
    rig.scheduler.share_out({}, {"limited": 0})
    assert not rig.scheduler.runnable()
    rig.put(2, group=None, type="quick", attempt=2)
    assert rig.scheduler.runnable()
    assert positions(rig.choose()) == [2]
    rig.scheduler.share_out({}, {"limited": 1})
    assert rig.scheduler.runnable()


def test_a_late_job_does_not_wait_for_the_turn_of_a_full_type_whose_job_it_stands_before():
    rig = Rig()
    rig.scheduler.share_out({}, {"limited": 0})
    rig.put(5, group="g", type="limited")
    rig.put(1, group="g", type="quick")
    [head] = rig.choose()
    assert head.position == 1
    rig.scheduler.ended(head, rig.now)
    assert rig.choose() == []
    rig.scheduler.share_out({}, {"limited": 1})
    assert positions(rig.choose()) == [5]


def test_a_late_job_before_one_of_a_full_type_runs_although_that_type_has_no_room_for_more():
    rig = Rig(payload_budget=16_000)
    rig.scheduler.share_out({}, {"limited": 0})
    rig.put(50, group="g", type="limited", payload="x" * 4_000)
    rig.put(40, group="g", type="quick", priority=5, payload="x" * 1_000)
    assert positions(rig.choose()) == [40]
    assert [lane.group for lane in rig.scheduler.hungry] == ["g"], "the other is read again"


def test_a_late_job_does_not_wait_for_room_for_the_full_type_whose_job_it_stands_before():
    rig = Rig(window=4)
    rig.scheduler.share_out({}, {"limited": 0})
    rig.put(49, group="in memory", type="limited")
    rig.put(50, group="g", type="limited")
    rig.wait(1.0)
    rig.put(40, group="g", type="quick")
    [late] = rig.choose()
    assert late.position == 40
    [lane] = rig.scheduler.hungry
    rig.scheduler.hungry.clear()
    rows = [rig.entry(50, "g", type="limited")]
    rig.scheduler.refilled(lane, rows, size=4, upto=50, left_out=False, now=rig.now)
    rig.scheduler.ended(late, rig.now)
    rig.wait(1.0)
    assert rig.choose() == []
    rig.scheduler.share_out({}, {"limited": 2})
    assert positions(rig.choose()) == [49]
    rig.wait(0.0)
    assert list(rig.scheduler.hungry) == [lane], "there is room for it now"


def test_large_payloads_of_groups_of_full_types_leave_half_of_the_memory_to_others():
    """They took all of it: only the first job of each group was counted, and nothing behind them was read for hours."""
    rig, types = Rig(payload_budget=160_000), ["one", "two", "three", "four", "five"]
    rig.scheduler.share_out({}, dict.fromkeys(types, 0))
    for position in range(5_000):
        rig.put(position, group=f"group {position % 500}", type=types[position % 5], payload="x" * 1_000)
    assert rig.scheduler.memory.payload <= 80_000 + 5 * 1_000
    assert rig.scheduler.memory.space() > 0


def test_a_group_of_a_full_type_that_has_more_than_its_first_job_in_memory_counts_with_all_of_them():
    rig = Rig(payload_budget=16_000)
    for group in ("a", "b"):  # each has started, and so its jobs have been read
        rig.put(range(1, 5) if group == "a" else range(5, 9), group=group, type="limited", payload="x" * 1_000)
    heads = rig.choose()
    rig.scheduler.share_out({}, {"limited": 0})
    for head in heads:
        rig.scheduler.ended(head, rig.now)
    assert rig.in_memory == 3, "the second has no room, and is read again in its turn"


def test_a_group_that_has_no_room_for_more_than_its_first_job_is_not_read_again_and_again():
    rig = Rig(payload_budget=16_000)
    rig.scheduler.share_out({}, {"limited": 0})
    rig.put(1, group="filling", type="limited", payload="x" * 3_600)
    rig.put(2, group="a", type="limited", payload="x" * 600, attempt=2, due=5.0)
    rig.queue.high = 8
    rig.wait(5.0)
    [lane] = rig.scheduler.hungry
    rig.scheduler.hungry.clear()
    rows = [rig.entry(p, "a", type="limited", payload="x" * 600, attempt=2 if p == 2 else 1) for p in range(2, 9)]
    rig.scheduler.refilled(lane, rows, size=64, upto=8, left_out=False, now=rig.now)
    assert (rig.in_memory, list(rig.scheduler.hungry)) == (2, [])
    rig.scheduler.share_out({}, {"limited": 2})
    assert sorted(positions(rig.choose())) == [1, 2]
    assert list(rig.scheduler.hungry) == [lane], "what is behind it is read while it runs"


def test_of_groups_that_come_back_with_large_payloads_fewer_jobs_are_read():
    rig = Rig(window=16, keep=64, payload_budget=1_000_000)
    rig.put(range(1, 5), group=None, type="limited", payload="x" * 10_000)
    rig.scheduler.memory.adjust_keep()
    assert rig.scheduler.memory.keep == 64
    rig.scheduler.share_out({}, {"limited": 0})
    rig.put(5, group="a", type="limited", payload="x" * 10_000)
    rig.scheduler.memory.adjust_keep()
    assert rig.scheduler.memory.keep == 12, "a quarter of all payloads for one group, of two"


def test_a_late_job_finds_its_turn_where_its_group_stands_in_the_line_of_a_job_that_has_moved():
    rig = Rig()
    rig.put(5, group="g", type="one")
    rig.put(6, group="g", type="two")
    rig.put(9, group="g", type="one", id=5)
    rig.put(3, group="g", type="three")
    assert rig.scheduler.ready == 1
    assert rig.run() == [3, 6, 9]
    assert rig.scheduler.ready == 0


def test_a_crowd_finds_room_beside_others_that_have_filled_what_they_may():
    """Its groups came back one at a time, each with a read of its own, for as long as the others waited."""
    rig = Rig(window=400, payload_budget=160_000)
    rig.scheduler.share_out({}, dict.fromkeys(["one", "two", "three"], 0))
    for number, type in enumerate(["one", "two", "three"]):
        for position in range(number * 100, number * 100 + 100):
            rig.put(position, group=f"group {position}", type=type, payload="x" * 1_000)
    rig.scheduler.share_out({}, {"three": 100})
    assert len(rig.choose()) > 5


def test_so_many_groups_of_a_full_type_may_wait_before_no_more_is_read():
    """Half a kilobyte for each, and nothing is read of a backlog of any size."""
    rig = Rig(window=4)
    rig.scheduler.share_out({}, {"limited": 0})
    for position in range(64 * 4):
        rig.put(position, group=f"group {position}", type="limited")
    rig.wait(0.0)
    assert rig.scheduler.memory.room() > 0
    for position in range(1_000, 1_005):
        rig.put(position, group=f"group {position}", type="limited")
    rig.wait(0.0)
    assert rig.scheduler.memory.room() == 0


def test_groups_of_a_slow_type_take_turns():
    """One with many jobs would keep the worker that it has, for good."""
    rig = Rig()
    rig.put((1, 2), group="long", type="slow")
    rig.put(3, group="short", type="slow")
    rig.scheduler.share_out({"slow": 1}, {})
    [head] = rig.choose()
    rig.scheduler.share_out({"slow": 0}, {})
    assert rig.hand_over(head) is None
    rig.scheduler.ended(head, rig.now)
    rig.scheduler.share_out({"slow": 1}, {})
    assert positions(rig.choose()) == [3]


def test_first_attempts_of_a_slow_type_beyond_a_quarter_of_the_window_are_not_kept_in_memory():
    rig = Rig(window=16)
    rig.scheduler.share_out({"slow": 0}, {})
    for position in range(1, 21):
        rig.put(position, group=f"group {position}", type="slow")
    assert (rig.scheduler.ready, len(rig.scheduler.memory.jobs)) == (4, 4)
    assert rig.scheduler.memory.space() == 16, "there is room for others"
    rig.scheduler.share_out({"slow": 1}, {})
    assert positions(rig.choose()) == [1]
    rig.wait(0.0)
    assert [lane.group for lane in rig.scheduler.hungry] == ["group 5"], "the next one may come"

"""What a read asks for, by examples: as much as there is room for, and less after one that took too long."""

from sidings.executor.planning import Plan, Planner
from sidings.executor.queues import Entry
from sidings.executor.scheduler import Scheduler


class Rig:
    """A planner over a few origins, all of which the database has more of."""

    def __init__(self, origins: int = 3, **options: int) -> None:
        self.scheduler = Scheduler(lambda kind: True, **options)
        self.queues = [self.scheduler.add_origin(f"t/{number}", 1) for number in range(origins)]
        self.planner = Planner(self.scheduler, poll_seconds=1.0)
        self.time = 100.0

    def plan(self) -> Plan:
        return self.planner.plan(self.time)

    def put(self, number: int, group: str | None, payload: str = "") -> None:
        for position in range(1, number + 1):
            self.scheduler.insert(Entry(position, self.queues[0], "x", group, position, payload=payload), self.time)
            self.queues[0].high = position

    def deliver(self, plan: Plan, took: float = 0.0, *, too_large: int = 0, largest: int = 0) -> None:
        self.planner.delivered(plan, took, set(self.queues[:too_large]), largest)


def test_the_room_is_shared_by_the_origins_that_have_more():
    rig = Rig(4, window=160)
    rig.put(40, None, "x" * 100)  # so that sizes are known
    assert rig.plan().pages == [30] * 4
    for queue in rig.queues[2:]:
        queue.backlogged = False
    assert rig.plan().pages == [60, 60, 30, 30]


def test_at_a_poll_some_rows_are_read_although_memory_is_full():
    rig = Rig(1, window=80, budget=40)
    rig.put(20, None)
    assert rig.plan().pages == [60]
    rig.time += 0.5
    assert rig.plan().pages == [0]
    rig.time += 1.0
    assert rig.plan().pages == [60]


def test_after_a_read_that_took_too_long_origins_take_turns_until_all_are_read_at_once_again():
    rig = Rig(8)
    rig.planner.took_too_long(first := rig.plan())
    assert not first.partial
    turns: list[list[int]] = []
    while (plan := rig.plan()).partial:
        turns.append([number for number, page in enumerate(plan.pages) if page])
        rig.deliver(plan)
    assert turns == [[0, 1], [2, 3, 4, 5]]
    assert all(plan.pages)


def test_reads_become_larger_again_as_long_as_they_are_answered_soon():
    rig = Rig(1)
    rig.planner.took_too_long(first := rig.plan())
    rig.deliver(smaller := rig.plan())
    rig.deliver(rig.plan(), took=2.0)
    rig.deliver(rig.plan(), took=2.0)
    assert sum(smaller.pages) == sum(first.pages) // 4
    assert rig.plan().pages == [2 * smaller.pages[0]]
    assert rig.planner.asks_for_less()
    for _ in range(10):
        rig.deliver(rig.plan())
    assert not rig.planner.asks_for_less()
    assert rig.plan().pages == first.pages


def test_what_was_left_for_its_size_comes_first_and_alone():
    rig = Rig(3, payload_budget=1_000)
    rig.deliver(rig.plan(), too_large=1, largest=400)
    plan = rig.plan()
    assert plan.pages == [2, 0, 0]
    assert plan.partial
    assert plan.largest >= 400
    rig.deliver(plan)
    assert all(rig.plan().pages)


def test_deep_lanes_are_left_out_until_a_read_that_did_so_took_too_long():
    rig = Rig(1, keep=4)
    rig.put(300, "deep")
    assert rig.plan().left_out
    rig.planner.took_too_long(rig.plan())
    rig.deliver(plan := rig.plan())
    assert not plan.left_out
    rig.queues[0].backlogged = False
    rig.deliver(plan)
    assert rig.plan().left_out


def test_no_paused_or_draining_origin_is_read():
    rig = Rig(3)
    rig.scheduler.drain(rig.queues[0])
    rig.scheduler.pauses = rig.scheduler.pauses._replace(origins=frozenset({"t/1"}))
    assert rig.plan().origins == [(rig.queues[2], 0)]


def test_a_lane_is_refilled_by_one_read_only_and_by_the_next_where_that_came_to_nothing():
    rig = Rig(1, keep=4)
    rig.put(9, "deep")
    [first] = rig.scheduler.choose(1, rig.time)
    for _ in range(3):
        rig.scheduler.ended(first, rig.time)
        [first] = rig.scheduler.choose(1, rig.time)
    lane = rig.queues[0].lanes["deep"]
    plan = rig.plan()
    assert plan.lanes == [(lane, lane.version, 9)]
    assert rig.plan().lanes == []
    rig.scheduler.still_hungry(plan.lanes)
    assert rig.plan().lanes == plan.lanes

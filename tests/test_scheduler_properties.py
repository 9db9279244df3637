"""The scheduler, the reader and the cycle loop in worlds where anything may happen at any time.

What must hold (invariants 3, 4 and 7): nothing is lost, nothing runs twice, no two of a group run at once, no job
overtakes one of its group that a read had shown by then, memory stays bounded, the audit finds nothing.
"""

import logging
from collections.abc import Iterator
from random import Random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sidings.executor import scheduler
from sidings.jobs import SUCCEEDED

from .scheduler_world import LIVES, STEPS, Clocks, World, life


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    monkeypatch.setattr(scheduler, "_HEAVY", 6)  # so that groups are left out of forward reads all the time
    logging.disable(logging.CRITICAL)
    try:
        with Clocks() as clocks:
            yield clocks
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", LIVES)
def test_nothing_is_lost_or_run_twice_or_out_of_order_whatever_happens(name: str, clocks: Clocks):
    """About 20,000 steps each, in many short lives: a bug shows in a short one as well, and is easier to see there."""
    steps = 0
    for seed in range(100_000):
        random = Random(f"{name} {seed}")
        clocks.world = World(random, LIVES[name])
        length = random.choice((60, 200, 600))
        try:
            clocks.world.live(length)
        except AssertionError as error:
            error.add_note(f"in the life {name!r} with the seed {seed}, at step {clocks.world.step} of {length}")
            raise
        steps += length
        if steps > 20_000:
            break


class Life(RuleBasedStateMachine):
    """The same steps, chosen and shrunk by hypothesis."""

    clocks: ClassVar[Clocks]

    @initialize(random=st.randoms(use_true_random=False), name=st.sampled_from(sorted(LIVES)))
    def begin(self, random: Random, name: str) -> None:
        self.world = self.clocks.world = World(random, LIVES[name])

    @rule(name=st.sampled_from([name for name in STEPS if name not in ("insert", "start", "finish")]))
    def take(self, name: str) -> None:
        self.world.take(name)

    @rule(times=st.integers(1, 3))
    def write(self, times: int) -> None:
        for _ in range(times):
            self.world.take("insert")

    @rule(times=st.integers(1, 3))
    def work(self, times: int) -> None:
        for _ in range(times):
            self.world.take("start")
            self.world.take("finish")

    @rule()
    def read(self) -> None:
        self.world.take("send_read")
        self.world.take("deliver_read")

    @rule()
    def cycle(self) -> None:
        self.world.take("send_cycle")
        self.world.take("acknowledge_cycle")

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish_everything()


def test_hypothesis_finds_no_sequence_of_steps_that_breaks_the_rules(clocks: Clocks):
    Life.clocks = clocks
    chosen = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    run_state_machine_as_test(Life, settings=chosen)


def test_a_refill_that_begins_behind_a_job_that_late_rows_have_pushed_out_loses_nothing(clocks: Clocks):
    """Rare in random worlds: a group that believes to have more in the database, but has not, and is hungry, while a
    transaction of more rows than fit into memory turns up late."""
    clocks.world = world = World(Random(0), life(groups=("a",), origins=("t/0",), keep=4, failing=0, concurrency=4))

    def insert(count: int, xid: int | None = None) -> None:
        own = world.database.begin() if xid is None else xid
        for _ in range(count):
            row = world._insert(own, "a")
            if row.position is None:
                row.position, row.run_at = world.database.position(), None
            row.priority = 0
        if xid is None:
            world.commit(own)

    def read() -> None:
        world.send_read()
        world.deliver_read()

    def run_one() -> None:
        for step in ("send_cycle", "acknowledge_cycle", "start"):
            world.take(step)
        assert world.handlers.busy
        world.finish(SUCCEEDED)
        for step in ("send_cycle", "acknowledge_cycle"):
            world.take(step)

    late = world.database.begin()
    insert(4, late)
    insert(8)
    read()
    for _ in range(4):
        run_one()
    read()
    lane = world.scheduler.origins["t/0"].lanes["a"]
    for _ in range(4):
        if len(lane.queue) + (lane.running is not None) > 1:
            run_one()
    assert lane.more
    assert lane in world.scheduler.hungry
    world.commit(late)
    read()
    world.check()
    world.finish_everything()
    assert world.database.rows == {}

"""What is read for groups that come back, or whose head may have been superseded, as memory is full or not."""

from random import Random

from sidings.jobs import Again, OutcomeName

from .scheduler_world import LATEST, Clocks, Row, World, life


def test_payloads_of_groups_that_come_back_take_what_the_budget_has():
    groups = 300
    with Clocks() as clocks:
        world = clocks.world = World(
            Random(1),
            life(groups=("a",), origins=("t/0",), window=4_000, keep=64, budget=8_000, concurrency=10),
        )
        memory = world.scheduler.memory
        memory.payload_budget = world.scheduler._ready._payload_budget = 640
        memory.size_ahead = 640 / 1024
        database = world.database
        xid = database.begin()
        for n in range(groups):
            database.insert(xid, Row(database.next_id, "t/0", f"g{n}", "known", xid, database.position(), size=10))
            database.next_id += 1
        world.commit(xid)
        most, failed = 0, set[int]()
        for _ in range(3_000):
            for step in ("send_read", "deliver_read", "send_cycle", "acknowledge_cycle"):
                getattr(world, step)()
            most = max(most, memory.payload)
            while world.handlers.claimed and len(world.handlers.busy) < 10:
                world.start()
            if len(failed) < groups:  # each fails once, and all come back at the same time
                for entry in list(world.handlers.busy):
                    failed.add(entry.id)
                    world.finish(Again(OutcomeName.RETRIED, 100.0 - world.clock + 100.0))
            else:
                world.clock = 201.0  # nothing ends any more
            most = max(most, memory.payload)
        assert len(failed) == groups
        assert most <= 2 * 640


def test_a_crowded_group_wakes_the_reader_where_memory_is_full():
    with Clocks() as clocks:
        world = clocks.world = World(Random(1), life(groups=("a",), origins=("t/0",)))
        database = world.database
        xid = database.begin()
        for id in (1, 2):
            database.insert(xid, Row(id, "t/0", "a", "known", xid, database.position(), policy=LATEST))
        world.commit(xid)
        world.send_read()
        world.deliver_read()
        asked: list[bool] = []
        world.cycles._on_hungry = lambda: asked.append(True)
        world.scheduler.memory.low = lambda: False  # type: ignore[method-assign]
        world.send_cycle()
        assert list(world.scheduler.crowded)
        assert asked, "it waits for the next poll"

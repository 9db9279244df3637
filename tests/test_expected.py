"""Jobs that are named in the executor's row while they are read, on a real Postgres."""

import asyncio
from typing import Any

import asyncpg
import pytest
from sidings import Admin
from sidings.errors import PostgresUnavailable
from sidings.executor.expected import Expected
from sidings.executor.link import Link
from sidings.executor.queues import Entry
from sidings.executor.scheduler import Scheduler
from sidings.jobs import Job, Registry

from .support import ORIGIN, Ride, connected, enqueue, eventually, running


async def naming(connection: asyncpg.Connection, ids: list[int]) -> bool:
    """Whether the executor's row names these jobs now."""
    return await connection.fetchval("SELECT running FROM sidings.executor") == ids


async def test_a_job_that_has_been_named_starts_as_soon_as_it_is_read(database: str, monkeypatch: pytest.MonkeyPatch):
    registry, started = Registry(), asyncio.Queue[int]()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        started.put_nowait(executor.cycles._cycle)

    async with running(database, registry, poll_seconds=60.0) as executor, connected(database) as connection:
        reader = executor.reader
        await eventually(
            lambda: reader.server and not reader.busy_seconds() and not reader._woken.is_set(), "it is idle"
        )
        with monkeypatch.context() as without_reads:
            without_reads.setattr(reader, "wake", lambda: None)
            [id] = await enqueue(database, ride, [Ride()])
            executor.committed({ORIGIN: [id]})
            await eventually(lambda: naming(connection, [id]), "the job is named")
            assert started.empty()
        cycle = await connection.fetchval("SELECT cycle FROM sidings.executor")
        reader.wake()
        async with asyncio.timeout(20):
            assert await started.get() == cycle, "another cycle was sent before it started"
        await eventually(lambda: naming(connection, []), "it has ended")


@pytest.mark.parametrize("lost", [False, True], ids=["", "the answer is lost"])
async def test_what_does_not_start_is_named_no_more(database: str, monkeypatch: pytest.MonkeyPatch, lost: bool):
    fetchrow = Link.fetchrow
    losses = 1 if lost else 0

    async def losing(*call: Any) -> asyncpg.Record | None:
        nonlocal losses
        row = await fetchrow(*call)
        if losses and "begin_cycle" in call[1]:
            losses -= 1
            raise PostgresUnavailable("the answer is lost")
        return row

    # Nothing else wakes the loop.
    async with running(database, Registry(), poll_seconds=3_600) as executor, connected(database) as connection:
        monkeypatch.setattr(Link, "fetchrow", losing)
        executor.committed({ORIGIN: [999]})
        await eventually(lambda: naming(connection, [999]), "it is named")
        await eventually(lambda: naming(connection, []), "it is named no more")
    assert not losses


def test_neither_more_than_could_start_nor_of_origins_that_are_not_held():
    scheduler = Scheduler(lambda kind: True)
    scheduler.add_origin("t/0", 1)
    expected = Expected(scheduler)
    expected.tell({"t/0": [1, 2], "t/1": [3]}, 1)
    assert not expected.has_news(0.0)
    expected.tell({"t/0": [1, 2]}, 2)
    expected.tell({"t/0": [4]}, 2)
    assert expected.sending().keys() == {1, 2}


def test_only_what_the_last_acknowledged_cycle_has_named_under_the_same_lease_starts():
    scheduler = Scheduler(lambda kind: True)
    queue = scheduler.add_origin("t/0", 1)
    queue.deadline = 10.0
    expected = Expected(scheduler)
    job = Entry(1, queue, "ride", None, 1)

    def name() -> None:
        expected.tell({"t/0": [1]}, 5)
        early = expected.sending()
        assert expected.started([job], 1.0) == []  # the cycle is on its way
        expected.acknowledged(early)

    name()
    assert expected.started([job], 11.0) == []  # the lease is over
    assert expected.started([job], 1.0) == [job]
    assert expected.started([job], 1.0) == []
    name()
    expected.sending()
    assert expected.started([job], 1.0) == []  # another cycle has been sent, which may not have named it
    name()
    scheduler.remove_origin("t/0")
    again = scheduler.add_origin("t/0", 2)
    again.deadline = 10.0
    assert expected.started([Entry(1, again, "ride", None, 1)], 1.0) == []
    expected.tell({"t/0": [1]}, 5)
    scheduler.drain(again)
    assert expected.sending() == {}


async def test_what_is_committed_while_something_is_paused_is_not_named_before_its_turn(database: str, admin: Admin):
    """It passed for running: a group that was paused could not be cleared of it, and a kill charged it with a loss."""
    registry, started = Registry(), list[int]()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry) as executor:
        await admin.pause(origin=ORIGIN, group="a", reason="the carrier is down")
        await eventually(lambda: executor.scheduler.pauses.groups, "it knows of the pause")
        [id] = await enqueue(database, ride, [Ride(transport="a", number=1)])
        executor.committed({ORIGIN: [id]})
        await executor.cycles.barrier()
        assert await admin.clear_group(ORIGIN, "a") == 1
        await admin.resume(origin=ORIGIN, group="a")
        await enqueue(database, ride, [Ride(transport="a", number=2)])
        await eventually(lambda: started)
    assert started == [2]

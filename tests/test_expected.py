"""Jobs that are named in the executor's row before they have been read, on a real Postgres."""

import asyncio
import random
import time
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel
from sidings import Admin
from sidings.errors import PostgresUnavailable
from sidings.executor import Executor, cycles
from sidings.executor.clock import now
from sidings.executor.expected import Expected
from sidings.executor.link import Link
from sidings.executor.planning import Plan, Planner
from sidings.executor.queues import Entry, Lane
from sidings.executor.scheduler import Scheduler
from sidings.jobs import Job, Registry, Retry, Transaction
from sidings.jobs.job_type import PolicyName
from sidings.jobs.transaction import note_jobs
from sidings.schema import load_sql
from tenacity import wait_none

from .support import ORIGIN, Ride, connected, drained, enqueue, eventually, fetch, jobs_left, running, value


class Note(BaseModel):
    text: str


async def naming(connection: asyncpg.Connection, ids: list[int]) -> bool:
    """Whether the executor's row names these jobs now."""
    return await connection.fetchval("SELECT running FROM sidings.executor") == ids


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine some cycles take longer; the next ones would bring nothing."""
    monkeypatch.setattr(cycles, "_QUICK_READ", 60.0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the reader sent its reads."""
    sent, plan = list[float](), Planner.plan

    def noted(self: Planner, time: float) -> Plan:
        sent.append(time)
        return plan(self, time)

    monkeypatch.setattr(Planner, "plan", noted)
    return sent


def loses_answers(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Of the next cycles so many are committed and not heard. Returns their statements, as they are lost."""
    fetch, lost = Link.fetch, list[str]()

    async def losing(*call: Any) -> list[asyncpg.Record]:
        rows = await fetch(*call)
        if len(lost) < count and "begin_cycle" in call[1]:
            lost.append(call[1])
            raise PostgresUnavailable("the answer is lost")
        return rows

    monkeypatch.setattr(Link, "fetch", losing)
    return lost


async def idle(executor: Executor) -> None:
    """Wait until it has read all that was there, and nothing makes it read again."""
    reader = executor.reader
    await eventually(lambda: reader.server and not reader.busy_seconds() and not reader._woken.is_set(), "it is idle")


async def test_a_job_that_comes_alone_is_brought_by_the_cycle_that_names_it(database: str, reads: list[float]):
    registry, started = Registry(), asyncio.Queue[tuple[Job[Ride], int]]()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        started.put_nowait((job, executor.cycles._cycle))

    async with running(database, registry, poll_seconds=3_600) as executor, connected(database) as connection:
        await idle(executor)
        before, cycle = len(reads), executor.cycles._cycle
        [id] = await enqueue(database, ride, [Ride(transport="a", number=7)], headers={"shift": "night"})
        executor.committed({ORIGIN: [id]})
        async with asyncio.timeout(20):
            job, at = await started.get()
        assert (job.id, job.group, job.attempt, job.payload.number) == (id, "a", 1, 7)
        assert job.headers["shift"] == "night"
        assert abs(job.enqueued_at.timestamp() - time.time()) < 3600
        assert at == cycle + 1, "another cycle was sent before it started"
        await eventually(lambda: naming(connection, []), "it has ended")
        assert len(reads) == before
        assert await jobs_left(database) == 0


@pytest.mark.parametrize("policy", ["serial", "parallel"])
async def test_a_cycle_brings_priorities_and_parallel_jobs_and_minds_no_other_origins(
    database: str, reads: list[float], policy: PolicyName
):
    registry, started = Registry(), asyncio.Queue[tuple[int, int]]()

    @registry.job(group="transport", policy=policy)
    async def ride(job: Job[Ride]) -> None:
        started.put_nowait((job.payload.number, job.priority))
        await asyncio.Event().wait() if job.payload.number == 1 else None

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        before = len(reads)
        for number in (1, 2) if policy == "parallel" else (3,):
            [id] = await enqueue(database, ride, [Ride(transport="a", number=number)], priority=7)
            [other] = await enqueue(database, ride, [Ride(transport="b", number=9)], origin="elsewhere/0")
            executor.committed({"elsewhere/0": [other], ORIGIN: [id]})
            async with asyncio.timeout(20):
                assert await started.get() == (number, 7)
            await executor.cycles.barrier()
        assert len(reads) == before
        executor.committed({"elsewhere/0": [other]})
        await executor.cycles.barrier()
        assert len(reads) == before


async def test_a_job_of_a_type_that_nobody_knows_counts_once(database: str, reads: list[float]):
    registry = Registry()

    @Registry().job()
    async def ride(job: Job[Ride]) -> None: ...

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        before = len(reads)
        [id] = await enqueue(database, ride, [Ride()])
        executor.committed({ORIGIN: [id]})
        await eventually(lambda: len(reads) > before and not executor.reader.busy_seconds())
        await eventually(lambda: executor.scheduler.unknown)
        assert executor.scheduler.unknown == {"ride": 1}


async def test_a_job_that_has_been_named_starts_as_soon_as_it_is_read(database: str, monkeypatch: pytest.MonkeyPatch):
    registry, started = Registry(), asyncio.Queue[int]()

    @registry.job(group="transport", policy="latest")
    async def ride(job: Job[Ride]) -> None:
        started.put_nowait(executor.cycles._cycle)

    async with running(database, registry, poll_seconds=60.0) as executor, connected(database) as connection:
        reader = executor.reader
        await idle(executor)
        with monkeypatch.context() as without_reads:
            without_reads.setattr(reader, "wake", lambda: None)
            [id] = await enqueue(
                database, ride, [Ride(transport="a")]
            )  # of policy latest, which a cycle does not bring
            executor.committed({ORIGIN: [id]})
            await eventually(lambda: naming(connection, [id]), "the job is named")
            assert started.empty()
        cycle = await connection.fetchval("SELECT cycle FROM sidings.executor")
        reader.wake()
        async with asyncio.timeout(20):
            assert await started.get() == cycle, "another cycle was sent before it started"
        await eventually(lambda: naming(connection, []), "it has ended")


@pytest.mark.parametrize(
    ("policy", "size"),
    [("latest", 1), ("serial", 9_000), ("serial", 90_000)],
    ids=["of policy latest", "large", "so large that it is compressed"],
)
async def test_what_the_cycle_does_not_bring_a_read_does(
    database: str, reads: list[float], policy: PolicyName, size: int
):
    registry, started = Registry(), asyncio.Queue[Job[Note]]()

    @registry.job(group=lambda note: "a", policy=policy)
    async def note(job: Job[Note]) -> None:
        started.put_nowait(job)

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        before, text = len(reads), "".join(random.choices("abcdefgh", k=size))
        [id] = await enqueue(database, note, [Note(text=text)])
        executor.committed({ORIGIN: [id]})
        async with asyncio.timeout(20):
            job = await started.get()
        assert (job.id, job.payload.text) == (id, text)
        assert len(reads) > before


async def test_a_job_waits_for_those_of_its_group_that_nobody_has_told_of(database: str):
    registry, started = Registry(), list[int]()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        await enqueue(database, ride, [Ride(transport="a", number=1)])  # by another process
        ids = await enqueue(database, ride, [Ride(transport="a", number=2), Ride(transport="a", number=3)])
        executor.committed({ORIGIN: ids})
        await eventually(lambda: len(started) == 3)
    assert started == [1, 2, 3]


@pytest.mark.parametrize("group", ["transport", None])
async def test_one_that_fails_beyond_what_has_been_read_runs_again(database: str, group: str | None):
    registry, started = Registry(), list[tuple[int, int]]()

    @registry.job(group=group, retry=Retry(wait=wait_none()))
    async def ride(job: Job[Ride]) -> None:
        started.append((job.payload.number, job.attempt))
        if job.attempt == 1:
            raise RuntimeError("not yet")

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        for number in (1, 2):
            [id] = await enqueue(database, ride, [Ride(transport="a", number=number)])
            executor.committed({ORIGIN: [id]})
            await eventually(lambda: len(started) == 2 * number, started)  # noqa: B023 - it is over by then
            await eventually(lambda: not executor.scheduler.memory.jobs, "it has ended")
    assert started == [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize("action", ["cancel", "pause"])
async def test_what_a_person_changes_while_the_cycle_waits_for_its_lock_does_not_start(
    database: str, admin: Admin, action: str
):
    """The cycle's snapshot still shows the job, and what it has read comes to nothing with it."""
    registry, started = Registry(), list[int]()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry, poll_seconds=0.2) as executor, connected(database) as person:
        await idle(executor)
        transaction = person.transaction()
        await transaction.start()
        await person.execute("SELECT FROM sidings.executor FOR UPDATE")
        [id] = await enqueue(database, ride, [Ride(transport="a", number=1)])
        executor.committed({ORIGIN: [id]})
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%begin_cycle%'"
        await eventually(lambda: value(database, waiting), "the cycle waits")
        if action == "cancel":
            await person.execute(load_sql("sidings.jobs.admin", "cancel_job"), id, "me", "why")
        else:
            await person.execute(load_sql("sidings.jobs.admin", "pause_jobs"), "me", "why", "ride", None, None)
        await transaction.commit()
        [second] = await enqueue(database, ride, [Ride(transport="b", number=2)], origin=ORIGIN)
        executor.committed({ORIGIN: [second]})
        if action == "pause":
            await eventually(lambda: executor.scheduler.pauses.types, "it knows of the pause")
            await executor.cycles.barrier()
            assert started == []
            await admin.resume(type="ride")
        await eventually(lambda: 2 in started)
        await executor.cycles.barrier()
    assert sorted(started) == ([2] if action == "cancel" else [1, 2])


async def test_nothing_is_brought_while_something_is_paused_that_no_read_has_told_of(
    database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
):
    registry, started = Registry(), list[int]()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry, poll_seconds=3_600) as executor, connected(database) as connection:
        await idle(executor)
        with monkeypatch.context() as without_reads:
            without_reads.setattr(executor.reader, "wake", lambda: None)
            without_reads.setattr(executor.reader, "_busy_since", now())
            await admin.pause(type="ride", reason="the carrier is down")
            for number in (1, 2):  # the first cycle is void, and meets the fence of the pause
                [id] = await enqueue(database, ride, [Ride(number=number)])
                executor.committed({ORIGIN: [id]})
                await executor.cycles.barrier()
            await eventually(lambda: naming(connection, [id]), "the job is named")
            await executor.cycles.barrier()
            assert started == []
        executor.wake()
        await eventually(lambda: executor.scheduler.pauses.types, "it knows of the pause")
        await admin.resume(type="ride")
        executor.wake()
        await eventually(lambda: sorted(started) == [1, 2])


@pytest.mark.parametrize("beside", ["many", "unique", "delayed"])
async def test_what_one_transaction_has_stored_beside_a_single_job_starts_at_once(
    database: str, reads: list[float], beside: str
):
    registry, started = Registry(), list[int]()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry, poll_seconds=3_600) as executor, connected(database) as connection:
        await idle(executor)
        async with connection.transaction():
            tx = Transaction(connection)
            await ride.enqueue(tx, Ride(number=1), origin=ORIGIN)
            if beside == "many":
                await ride.enqueue_many(tx, [Ride(number=2), Ride(number=3)], origin=ORIGIN)
            elif beside == "unique":
                await ride.enqueue(tx, Ride(number=2), origin=ORIGIN, unique_key="a")
            else:
                await ride.enqueue(tx, Ride(number=2), origin=ORIGIN, delay=3_600)
            await ride.enqueue(tx, Ride(number=4), origin=ORIGIN)
        executor.committed(tx.enqueued)
        at_once = {"many": [1, 2, 3, 4], "unique": [1, 2, 4], "delayed": [1, 4]}[beside]
        await eventually(lambda: sorted(started) == at_once, started)


def test_ids_are_told_only_where_they_are_all_that_has_been_stored():
    jobs = dict[str, list[int]]()
    for origin, ids in [("a", [1]), ("a", [2, 3]), ("b", [4]), ("b", []), ("b", [5]), ("c", []), ("c", [6])]:
        note_jobs(jobs, origin, ids)
    assert jobs == {"a": [1, 2, 3], "b": [], "c": []}


def test_what_memory_does_not_take_in_was_not_brought():
    """A refill is to bring it that is under way, in a snapshot from before its commit."""
    scheduler = Scheduler(lambda kind: True)
    queue = scheduler.add_origin("t/0", 1)
    lane = queue.lanes["a"] = Lane(queue, "a")
    lane.more, lane.last = True, 5
    expected = Expected(scheduler)
    assert expected.tell({"t/0": [1, 2]}, 5)
    expected.acknowledged(expected.sending())
    row = {"id": 1, "type": "ride", "origin": "t/0", "position": 9, "enqueued_at": 0.0, "headers": None, "payload": "1"}
    row |= {"priority": 0, "policy": 0}
    assert not expected.read([1], [row | {"group": "a"}])  # type: ignore[list-item]
    assert not expected.read([1, 2], [row | {"group": "b"}])  # type: ignore[list-item]
    assert expected.read([1], [row | {"group": "b"}])  # type: ignore[list-item]


async def test_after_a_cycle_that_took_long_to_read_jobs_are_left_to_reads(
    database: str, reads: list[float], monkeypatch: pytest.MonkeyPatch
):
    """As beside a long transaction, where it steps over all of the group that has ended."""
    registry, started = Registry(), list[int]()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    monkeypatch.setattr(cycles, "_QUICK_READ", 0.0)
    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        before, before_all = len(reads), now()
        for number in (1, 2):
            [id] = await enqueue(database, ride, [Ride(number=number)])
            executor.committed({ORIGIN: [id]})
            await eventually(lambda: len(started) == number)  # noqa: B023 - it is over by then
            await eventually(lambda: not executor.scheduler.memory.jobs, "it has ended")
            await executor.cycles.barrier()
            assert len(reads) - before == number - 1
            assert executor.cycles._reads_from > before_all
            monkeypatch.setattr(executor.cycles, "_reads_from", 1e9)  # however quick it was


async def test_what_is_put_back_beyond_what_has_been_read_is_read(database: str, monkeypatch: pytest.MonkeyPatch):
    registry, started, woken = Registry(), list[int](), list[int]()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        queue = executor.scheduler.origins[ORIGIN]
        executor.scheduler.insert(Entry(7, queue, "ride", None, queue.high + 1), now())
        [entry] = executor.scheduler.choose(1, now())
        monkeypatch.setattr(executor.reader, "wake", lambda: woken.append(1))
        executor.cycles.unname([entry])
        assert woken
        assert not executor.scheduler.knows(7)


async def test_one_that_goes_out_with_the_end_of_another_is_read(database: str, reads: list[float]):
    """A cycle that records something brings nothing, and when it was told of there was nothing to record."""
    registry, started, gate = Registry(), list[int](), asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)
        if job.payload.number == 1:
            await gate.wait()

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        [first] = await enqueue(database, ride, [Ride(number=1)])
        executor.committed({ORIGIN: [first]})
        await eventually(lambda: started == [1])
        await executor.cycles.barrier()
        [second] = await enqueue(database, ride, [Ride(number=2)])
        before = len(reads)
        gate.set()  # its handler goes on before the cycle loop does
        executor.committed({ORIGIN: [second]})
        assert executor.cycles._expected.unread == {second}
        await eventually(lambda: started == [1, 2])
        assert len(reads) > before


async def test_one_whose_cycle_was_void_is_read(database: str, reads: list[float]):
    registry, started = Registry(), list[int]()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        before = len(reads)
        await fetch(database, "UPDATE sidings.executor SET fence = fence + 1")
        [id] = await enqueue(database, ride, [Ride(number=1)])
        executor.committed({ORIGIN: [id]})
        await eventually(lambda: started == [1])
        assert len(reads) > before


async def test_one_whose_cycle_was_not_answered_runs_once(database: str, monkeypatch: pytest.MonkeyPatch):
    registry, started = Registry(), list[int]()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        lost = loses_answers(monkeypatch, 1)
        [id] = await enqueue(database, ride, [Ride(number=1)])
        executor.committed({ORIGIN: [id]})
        await eventually(lambda: started == [1])
        await eventually(lambda: not executor.scheduler.memory.jobs)
    assert (started, len(lost)) == ([1], 1)
    assert await jobs_left(database) == 0


@pytest.mark.parametrize("lost", [False, True], ids=["", "the answer is lost"])
async def test_what_does_not_start_is_named_no_more(database: str, monkeypatch: pytest.MonkeyPatch, lost: bool):
    # Nothing else wakes the loop.
    async with running(database, Registry(), poll_seconds=3_600) as executor, connected(database) as connection:
        not_heard = loses_answers(monkeypatch, int(lost))
        executor.committed({ORIGIN: [999]})
        await eventually(lambda: naming(connection, [999]), "it is named")
        await eventually(lambda: naming(connection, []), "it is named no more")
    assert len(not_heard) == lost


def test_neither_more_than_could_start_nor_of_origins_that_are_not_held():
    scheduler = Scheduler(lambda kind: True)
    scheduler.add_origin("t/0", 1)
    expected = Expected(scheduler)
    assert not expected.tell({"t/0": [1, 2], "t/1": [3]}, 1)
    assert not expected.has_news(0.0)
    assert expected.tell({"t/0": [1, 2]}, 2)
    assert not expected.tell({"t/0": [4]}, 2)
    assert not expected.tell({"t/0": []}, 2)
    assert not expected.tell({}, 2)
    assert expected.sending().keys() == {1, 2}


def test_what_is_named_already_leaves_room_only_when_it_has_started():
    scheduler = Scheduler(lambda kind: True)
    queue = scheduler.add_origin("t/0", 1)
    queue.deadline = 1e9
    expected = Expected(scheduler)
    assert expected.tell({"t/0": [1]}, 2)
    early = expected.sending()
    assert not expected.tell({"t/0": [2, 3]}, 2)
    assert expected.tell({"t/0": [2]}, 2)
    expected.acknowledged(early)
    assert not expected.tell({"t/0": [3]}, 2)
    expected.acknowledged(expected.sending())
    assert not expected.tell({"t/0": [3]}, 2)
    assert expected.started([Entry(1, queue, "ride", None, 1)], 0.0)
    assert expected.tell({"t/0": [3]}, 2)
    assert expected.sending().keys() == {2, 3}


async def test_no_more_is_named_early_than_there_are_free_workers_however_many_cycles_go_out(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sidings.executor.expected._SECONDS", 60.0)
    async with (
        running(database, Registry(), poll_seconds=3_600, concurrency=3) as executor,
        connected(database) as connection,
    ):
        for id in range(901, 910):  # of a type that is full, say, whose group finds no room in memory
            executor.committed({ORIGIN: [id]})
            await executor.cycles.barrier()
        assert await naming(connection, [901, 902, 903])


async def test_while_groups_of_a_full_type_wait_for_room_nothing_is_named_early(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """None of what came could start, hundreds of them passed for running, and a kill charged each with a loss."""
    registry, started, gate = Registry(), list[int](), asyncio.Event()
    monkeypatch.setattr("sidings.executor.expected._SECONDS", 60.0)

    @registry.job(group="transport", concurrency=1)
    async def book(job: Job[Ride]) -> None:
        started.append(job.payload.number)
        await gate.wait()

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry, poll_seconds=3_600) as executor, connected(database) as connection:
        await idle(executor)
        monkeypatch.setattr(executor.scheduler._ready, "_window", 8)  # room for two groups of a type
        ids = await enqueue(database, book, [Ride(transport=str(n), number=n) for n in range(6)])
        executor.wake()
        await eventually(lambda: started == [0] and len(executor.scheduler.origins[ORIGIN].lanes) == 6)
        await executor.cycles.barrier()
        for n in range(6, 12):
            [id] = await enqueue(database, book, [Ride(transport=str(n), number=n)])
            executor.committed({ORIGIN: [id]})
            await executor.cycles.barrier()
        assert await naming(connection, ids[:1])
        [id] = await enqueue(database, quick, [Ride(number=100)])
        executor.committed({ORIGIN: [id]})
        await eventually(lambda: started == [0, 100], started)
        gate.set()
        await drained(database)
    assert sorted(started) == [*range(12), 100]


async def test_beside_a_full_type_whose_groups_find_room_a_job_is_brought_by_the_cycle_that_names_it(
    database: str, reads: list[float]
):
    registry, started, gate = Registry(), list[int](), asyncio.Event()

    @registry.job(group="transport", concurrency=1)
    async def book(job: Job[Ride]) -> None:
        started.append(job.payload.number)
        await gate.wait()

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry, poll_seconds=3_600) as executor:
        await idle(executor)
        await enqueue(database, book, [Ride(transport=str(n), number=n) for n in range(3)])
        executor.wake()
        await eventually(lambda: started == [0] and executor.scheduler.ready == 2)
        await executor.cycles.barrier()
        await idle(executor)
        before = len(reads)
        [id] = await enqueue(database, quick, [Ride(number=100)])
        executor.committed({ORIGIN: [id]})
        await eventually(lambda: started == [0, 100], started)
        assert len(reads) == before
        gate.set()


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

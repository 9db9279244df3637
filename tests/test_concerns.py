"""What a person does to one job or group makes its executor read that anew, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from sidings import Admin, Job, Registry, Retry
from sidings.errors import PostgresUnavailable
from sidings.executor import Executor
from sidings.schema import load_sql
from tenacity import stop_after_attempt, stop_never, wait_fixed

from .support import ORIGIN, Ride, connected, drained, enqueue, eventually, running, value

OTHER = "transports/1"
Memory = dict[int, object]


class Rides:
    """Jobs of one type; those of the transport "gate" keep the only worker until it opens, those of "broken" fail."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.gate = asyncio.Event()
        self.registry = Registry()
        options: dict[str, Any] = {"payload": Ride, "retry": Retry(wait=wait_fixed(3_600))}
        self.ride = self.registry.job(name="ride", group="transport", **options)(self.run)
        self.alone = self.registry.job(name="alone", **options)(self.run)
        self.side = self.registry.job(name="side", group="transport", policy="parallel", **options)(self.run)

    async def run(self, job: Job[Ride]) -> None:
        self.started.append(job.payload.number)
        if job.payload.transport == "gate":
            await self.gate.wait()
        if job.payload.transport == "broken":
            raise ValueError("broken")


@pytest.fixture
def rides() -> Rides:
    return Rides()


@pytest_asyncio.fixture
async def executor(database: str, rides: Rides) -> AsyncIterator[Executor]:
    """Its only worker is busy, one group backs off, all else waits in memory."""
    async with running(database, rides.registry, (ORIGIN, OTHER), concurrency=1) as executor:
        await enqueue(database, rides.ride, [Ride(transport="broken", number=1), Ride(transport="broken", number=2)])
        lanes = executor.scheduler.origins[ORIGIN].lanes
        await eventually(lambda: any(lane.due for lane in lanes.values()), "the group backs off")
        await enqueue(database, rides.alone, [Ride(transport="gate", number=0)])
        await eventually(lambda: 0 in rides.started, "the worker is busy")
        for origin in (ORIGIN, OTHER):
            waiting = [Ride(transport=transport, number=number) for transport in "ab" for number in (10, 11, 12)]
            await enqueue(database, rides.ride, waiting, origin=origin)
            await enqueue(database, rides.alone, waiting, origin=origin)
        await eventually(lambda: len(in_memory(executor)) >= 25, "all is in memory")
        yield executor


def in_memory(executor: Executor) -> Memory:
    return dict(executor.scheduler.memory.jobs)


async def acts(executor: Executor, database: str, action: Awaitable[object]) -> None:
    """The action, until the executor knows why its fence has grown and has read what it was to."""
    await action
    scheduler, standing = executor.scheduler, executor.cycles.standing
    fence = await value(database, "SELECT fence FROM sidings.executor")

    def settled() -> bool:
        read = not scheduler.hungry and not any(queue.backlogged for queue in scheduler.origins.values())
        return standing.fence == fence and not standing.doubtful and read

    await eventually(settled, "the executor knows of it")


async def ids(database: str, kind: str, group: str | None, origin: str = ORIGIN) -> list[int]:
    where = "type = $1 AND origin = $2 AND payload ->> 'transport' = $3"
    async with connected(database) as connection:
        rows = await connection.fetch(f"SELECT id FROM sidings.job WHERE {where} ORDER BY id", kind, origin, group)
    return [row["id"] for row in rows]


@pytest.mark.parametrize(
    "action", ["cancel", "cancel alone", "release group", "retry now", "skip head", "clear group", "each"]
)
async def test_what_is_done_to_a_job_or_a_group_leaves_all_else_in_memory(
    database: str, admin: Admin, rides: Rides, executor: Executor, action: str
):
    own = await ids(database, "ride", "a")
    alone = await ids(database, "alone", "a")
    broken = await ids(database, "ride", "broken")
    before = in_memory(executor)

    async def each() -> None:
        async for _ in admin.each("discard", [own[0], alone[2]]):
            pass

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "cancel": lambda: admin.cancel(own[1]),
        "cancel alone": lambda: admin.cancel(alone[1]),
        "release group": lambda: admin.release_group(ORIGIN, "broken"),
        "retry now": lambda: admin.retry_now(broken[0]),
        "skip head": lambda: admin.skip_head(ORIGIN, "broken"),
        "clear group": lambda: admin.clear_group(ORIGIN, "a"),
        "each": each,
    }
    left_out = {
        "cancel": own,
        "cancel alone": [alone[1]],
        "clear group": own,
        "each": [*own, alone[2]],
    }.get(action, broken)
    await acts(executor, database, calls[action]())
    after = in_memory(executor)
    assert {id for id in before if id not in left_out and after.get(id) is not before[id]} == set()
    assert not set(after) - set(await in_database(database)), "of what is over nothing is left"
    assert len(set(before) - set(left_out)) >= 20
    rides.gate.set()
    await eventually(lambda: idle(database), "all that can has run")
    more = {"cancel": -1, "cancel alone": -1, "clear group": -3, "each": -2}.get(
        action, 1
    )  # one of the group that backed off
    assert len(rides.started) == 2 + 24 + more


async def in_database(database: str) -> list[int]:
    async with connected(database) as connection:
        return [row["id"] for row in await connection.fetch("SELECT id FROM sidings.job")]


async def idle(database: str) -> bool:
    return not await value(
        database, "SELECT count(*) FROM sidings.job WHERE run_at IS NULL AND payload ->> 'number' <> '2'"
    )


@pytest.mark.parametrize(
    "unexplained",
    [
        "before",
        "after",
        "alone",
        "by a pause in the same transaction",
        "forgotten",
        "erased",
        "another's of that number",
    ],
)
async def test_where_it_is_not_known_of_each_bump_what_it_concerned_everything_is_read_anew(
    database: str, admin: Admin, rides: Rides, executor: Executor, unexplained: str
):
    bump = "UPDATE sidings.executor SET fence = fence + 1"
    cancel = f"SELECT sidings.cancel_job({(await ids(database, 'ride', 'a'))[0]}, 'alice')"
    pause = "SELECT sidings.pause_jobs('alice', 'why', origin => 'elsewhere/0')"
    pause_here = f"SELECT sidings.pause_jobs('alice', 'why', origin => '{OTHER}', \"group\" => 'c')"
    statements = {
        "before": f"BEGIN; {bump}; {cancel}; COMMIT",
        "after": f"BEGIN; {cancel}; {bump}; COMMIT",
        "alone": bump,
        "by a pause in the same transaction": f"BEGIN; {pause_here}; {cancel}; {pause}; COMMIT",
        "forgotten": f"BEGIN; {cancel}; DELETE FROM sidings.audit; COMMIT",
        "erased": f"BEGIN; {cancel}; UPDATE sidings.audit SET target = target - 'group'; COMMIT",
        "another's of that number": f"""BEGIN; {bump};
            INSERT INTO sidings.audit (actor, action, target, executor, fence)
            SELECT 'alice', 'cancel', '{{"job": 0, "origin": "elsewhere/0", "group": "c"}}', gen_random_uuid(), e.fence
            FROM sidings.executor e; COMMIT""",
    }
    before, versions = in_memory(executor), [queue.version for queue in executor.scheduler.origins.values()]
    async with connected(database) as connection:
        await acts(executor, database, connection.execute(statements[unexplained]))
    assert all(
        queue.version > version for queue, version in zip(executor.scheduler.origins.values(), versions, strict=True)
    )
    after = in_memory(executor)
    assert [id for id in before if after.get(id) is before[id] and before[id] not in running_now(executor)] == []
    rides.gate.set()
    await eventually(lambda: idle(database), "all that can has run")


def running_now(executor: Executor) -> set[object]:
    return {entry for queue in executor.scheduler.origins.values() for entry in queue.running}


async def test_a_read_of_before_brings_back_nothing_that_was_forgotten(database: str, admin: Admin, rides: Rides):
    """A job stands in the answer to a read that is under way, and is cancelled before that is heard."""
    async with running(database, rides.registry, concurrency=1) as executor:
        fetch, hold, held, met = executor.reader._link.fetch, asyncio.Event(), asyncio.Event(), asyncio.Event()
        standing = executor.cycles.standing

        async def slow(query: str, *args: object) -> list[asyncpg.Record]:
            met.set()
            rows = await fetch(query, *args)
            if (
                query == executor.reader._sql
                and any(row["part"] and row["type"] == "alone" for row in rows)
                and not held.is_set()
            ):
                held.set()
                await hold.wait()
            return rows

        executor.reader._link.fetch = slow  # type: ignore[method-assign]
        await asyncio.wait_for(met.wait(), 30)  # no read is under way any more that passes by
        first, second = await enqueue(database, rides.alone, [Ride(number=1), Ride(number=2)])
        await asyncio.wait_for(held.wait(), 30)
        await admin.cancel(first)
        standing.doubtful = True
        executor.cycles.signal()
        await eventually(lambda: standing.fence == 1, "the executor knows of it")
        hold.set()
        await drained(database)
    assert (rides.started, second > first) == ([2], True)


@pytest.mark.parametrize("exhausted", [False, True], ids=["backs off", "blocked"])
async def test_a_group_goes_on_that_is_released_before_the_answer_to_its_failure_is_heard(
    database: str, admin: Admin, rides: Rides, exhausted: bool
):
    """The failure is committed, its answer is lost, and a person releases the group: what the executor then found out
    about the release it forgot over the failure, and the group stood still, for ever if its head had been blocked."""
    again = Retry(wait=wait_fixed(3_600), stop=stop_after_attempt(1) if exhausted else stop_never, on_exhausted="block")
    fails = True

    @rides.registry.job(name="fails", group="transport", payload=Ride, retry=again)
    async def failing(job: Job[Ride]) -> None:
        if fails:
            raise ValueError("broken")

    async with running(database, rides.registry, concurrency=1) as executor:
        ask, released = executor.cycles._link.fetchrow, asyncio.Event()

        async def lost(query: str, *args: object) -> asyncpg.Record | None:
            nonlocal fails
            row = await ask(query, *args)
            if query == executor.cycles._sql and not released.is_set():
                released.set()
                fails = False
                await admin.release_group(ORIGIN, "a")
                raise PostgresUnavailable("no answer")
            return row

        executor.cycles._link.fetchrow = lost  # type: ignore[method-assign]
        await enqueue(database, failing, [Ride(transport="a", number=1)])
        await asyncio.wait_for(released.wait(), 30)
        await drained(database)


async def test_a_cleared_group_takes_with_it_its_jobs_that_run_side_by_side(
    database: str, admin: Admin, rides: Rides, executor: Executor
):
    await enqueue(database, rides.side, [Ride(transport="a", number=n) for n in (50, 51)])
    spared = await ids(database, "alone", "a")
    await eventually(lambda: len(in_memory(executor)) >= 27, "all is in memory")
    await acts(executor, database, admin.clear_group(ORIGIN, "a"))
    assert set(in_memory(executor)) >= set(spared)
    rides.gate.set()
    await eventually(lambda: idle(database), "all that can has run")
    assert not {50, 51} & set(rides.started)


async def test_an_executor_that_comes_to_the_end_of_no_reading_says_so(
    database: str, rides: Rides, executor: Executor, monkeypatch: pytest.MonkeyPatch
):
    fetch, answer = executor.reader._link.fetch, asyncio.Event()

    async def slow(query: str, *args: object) -> list[asyncpg.Record]:
        if query == executor.reader._sql:
            await answer.wait()
        return await fetch(query, *args)

    monkeypatch.setattr(executor.reader._link, "fetch", slow)
    async with connected(database) as connection:
        for number in (1, 2):
            await connection.execute("UPDATE sidings.executor SET fence = fence + 1")
            executor.cycles.standing.fence_read(number)
            await eventually(lambda number=number: executor.cycles.standing.fence == number, "it knows")
    assert executor.reader.starved_seconds() > 0 == len(executor.problems())
    assert executor.reader._anew_since is not None
    executor.reader._anew_since -= 3_600
    assert [problem for problem in executor.problems() if "jobs may wait unread, for 36" in problem]
    answer.set()
    await eventually(lambda: not executor.problems(), "all has been read")
    rides.gate.set()
    await eventually(lambda: idle(database), "all that can has run")


async def test_an_executor_hears_of_each_of_its_origins_which_epoch_it_has(database: str):
    """It would take those that it holds for another's, and begin anew with what runs there."""
    async with connected(database) as connection:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        epochs = {"rides/1": 2, "rides/0": 9, "rides/10": 4}
        for origin, epoch in (epochs | {"rides/2": 7}).items():
            insert = "INSERT INTO sidings.origin (origin, epoch, owner) VALUES ($1, $2, $3)"
            await connection.execute(insert, origin, epoch, me if origin in epochs else None)
        row = await connection.fetchrow(load_sql("sidings.executor", "standing"), me, 0, 10)
    assert row is not None
    assert dict(zip(row["origins"], row["epochs"], strict=True)) == epochs

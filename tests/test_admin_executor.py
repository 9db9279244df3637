"""Administration while an executor runs the jobs: what it stops, what it lets go on, and how soon."""

import asyncio
import threading
from contextlib import suppress
from typing import Any, Literal

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from sidings import ActionRefused, Admin, Discard, Job, JobNotFound, Registry, Retry
from sidings.jobs.admin import JobState
from tenacity import stop_after_attempt, wait_fixed

from .admin_support import patient
from .cli_support import cli_json
from .support import (
    ORIGIN,
    Ride,
    connected,
    drained,
    enqueue,
    eventually,
    fetch,
    history,
    jobs_left,
    outcomes,
    running,
    value,
    without_place,
)

OTHER = "transports/1"
LONG = Retry(wait=wait_fixed(3_600))


class Trips:
    """Handlers that tests steer: a job of a closed transport waits, one of a broken transport fails."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.cancelled: list[int] = []
        self.closed: dict[str, asyncio.Event] = {}
        self.broken: set[str] = set()
        self.registry = Registry()
        options: dict[str, Any] = {"group": "transport", "payload": Ride, "retry": LONG}
        self.ride = self.registry.job(name="ride", **options)(self.run)
        self.other = self.registry.job(name="other", **options)(self.run)
        self.alone = self.registry.job(name="alone", payload=Ride, retry=LONG)(self.run)
        limited = Retry(wait=wait_fixed(0), stop=stop_after_attempt(2), on_exhausted="block")
        self.limited = self.registry.job(name="limited", **{**options, "retry": limited})(self.run)

    async def run(self, job: Job[Ride]) -> None:
        self.started.append(job.payload.number)
        try:
            if job.payload.transport in self.closed:
                await self.closed[job.payload.transport].wait()
        except asyncio.CancelledError:
            self.cancelled.append(job.payload.number)
            raise
        if job.payload.transport in self.broken:
            raise ValueError(f"{job.payload.transport} is broken")

    def close(self, transport: str) -> asyncio.Event:
        self.closed[transport] = asyncio.Event()
        return self.closed[transport]

    async def has_started(self, *numbers: int) -> None:
        await eventually(lambda: set(numbers) <= set(self.started), lambda: (numbers, self.started))


@pytest.fixture
def trips() -> Trips:
    return Trips()


def ride(number: int, transport: str = "a") -> Ride:
    return Ride(transport=transport, number=number)


async def in_state(admin: Admin, id: int, state: str) -> None:
    async def there() -> bool:
        row = (await admin.show(id)).row
        return row is not None and row.state == state

    await eventually(there, f"job {id} is {state}")


async def test_a_waiting_job_that_is_cancelled_never_starts(database: str, admin: Admin, trips: Trips):
    gate = trips.close("a")
    async with running(database, trips.registry, concurrency=1):
        await enqueue(database, trips.alone, [ride(1)])
        await trips.has_started(1)
        [waiting] = await enqueue(database, trips.alone, [ride(2)])
        [last] = await enqueue(database, trips.alone, [ride(3)])
        assert await admin.cancel(waiting) is JobState.WAITING
        gate.set()
        await drained(database)
    assert trips.started == [1, 3]
    assert {row["job_id"]: row["outcome"] for row in await history(database)}[waiting] == "cancelled"
    assert last > waiting


async def test_the_handler_of_a_cancelled_job_is_cancelled_and_its_group_goes_on(
    database: str, admin: Admin, trips: Trips
):
    trips.close("a")
    async with running(database, trips.registry) as executor:
        first, second = await enqueue(database, trips.ride, [ride(1), ride(2)])
        await trips.has_started(1)
        assert await admin.cancel(first, reason="wrong address") is JobState.RUNNING
        await trips.has_started(2)
        assert trips.cancelled == [1]
        [attempt] = (await admin.show(first)).attempts
        assert (attempt.outcome, attempt.executor) == ("cancelled", executor.id)
        trips.closed["a"].set()
        await drained(database)
    assert sorted(await outcomes(database)) == ["cancelled", "succeeded"]
    assert second


async def test_a_job_that_is_cancelled_while_the_cycle_that_starts_it_is_in_flight_never_starts(
    database: str, admin: Admin, trips: Trips
):
    async with running(database, trips.registry) as executor, connected(database) as person:
        async with person.transaction():
            await person.execute("SELECT FROM sidings.executor WHERE id = $1 FOR UPDATE", executor.id)
            [id] = await enqueue(database, trips.ride, [ride(1)])
            await rows_are_waited_for(database)
            assert await person.fetchval("SELECT sidings.cancel_job($1, 'alice')", id) == "waiting"
        await enqueue(database, trips.ride, [ride(2)])
        await drained(database)
    assert trips.started == [2]
    assert sorted(await outcomes(database)) == ["cancelled", "succeeded"]


async def test_a_cancellation_that_comes_behind_the_cycle_in_flight_stops_the_handler(
    database: str, admin: Admin, trips: Trips
):
    trips.close("a")
    await patient(database)
    async with running(database, trips.registry) as executor, connected(database) as blocker:
        async with blocker.transaction():
            await blocker.execute("SELECT FROM sidings.executor WHERE id = $1 FOR UPDATE", executor.id)
            [id] = await enqueue(database, trips.ride, [ride(1)])
            await rows_are_waited_for(database)
            cancelling = asyncio.create_task(admin.cancel(id))
            await rows_are_waited_for(database, by=2)
        assert await cancelling in (JobState.RUNNING, JobState.WAITING)  # had the cycle given up waiting meanwhile
        # Either it was stopped in time, or its handler was cancelled; it does not go on.
        await eventually(lambda: trips.cancelled == trips.started)
        trips.closed["a"].set()
        await enqueue(database, trips.ride, [ride(2)])
        await trips.has_started(2)
        await drained(database)
    assert sorted(await outcomes(database)) == ["cancelled", "succeeded"]


async def rows_are_waited_for(database: str, by: int = 1) -> None:
    """Return when so many connections wait for a row. (At its start an executor may also wait for a table.)"""
    query = """SELECT count(*) FROM pg_stat_activity
               WHERE datname = current_database() AND wait_event IN ('tuple', 'transactionid')"""
    async with connected(database) as connection:

        async def waiting() -> bool:
            return await connection.fetchval(query) >= by

        await eventually(waiting, f"{by} connections wait for a row")


async def test_the_effects_of_a_cancelled_transactional_handler_are_rolled_back(database: str, admin: Admin):
    registry, begun, gate = Registry(), asyncio.Event(), asyncio.Event()

    @registry.job(name="book", transactional=True)
    async def book(job: Job[Ride]) -> None:
        await job.tx.execute("INSERT INTO booking VALUES (1)")
        begun.set()
        await gate.wait()

    await fetch(database, "CREATE TABLE booking (number integer)")
    async with running(database, registry):
        [id] = await enqueue(database, book, [ride(1)])
        await begun.wait()
        assert await admin.cancel(id) is JobState.RUNNING

        async def over() -> bool:
            busy = await fetch(database, "SELECT FROM sidings.executor WHERE running <> '{}'")
            return not busy

        await eventually(over)
        gate.set()
    assert await value(database, "SELECT count(*) FROM booking") == 0
    assert await outcomes(database) == ["cancelled"]


async def test_a_cancelled_plain_function_runs_to_its_end_and_counts_for_nothing(database: str, admin: Admin):
    registry, begun, gate, ended = Registry(), threading.Event(), threading.Event(), threading.Event()

    @registry.job(name="plain")
    def plain(job: Job[Ride]) -> None:
        begun.set()
        gate.wait(30)
        ended.set()

    async with running(database, registry):
        [id] = await enqueue(database, plain, [ride(1)])
        await eventually(begun.is_set)
        await admin.cancel(id)
        gate.set()
        await eventually(ended.is_set)
        [after] = await enqueue(database, plain, [ride(2)])
        await drained(database)
    rows = {row["job_id"]: row["outcome"] for row in await history(database)}
    assert rows == {id: "cancelled", after: "succeeded"}


TARGETS: list[dict[str, str]] = [{"type": "ride"}, {"origin": ORIGIN}, {"origin": ORIGIN, "group": "a"}]


@pytest.mark.parametrize("target", TARGETS, ids=["type", "origin", "group"])
async def test_what_is_paused_starts_nothing_more_and_goes_on_in_order(
    database: str, admin: Admin, trips: Trips, target: dict[str, str]
):
    """The head that runs goes on; what waits, and what is enqueued meanwhile, waits; others are not touched."""
    gate = trips.close("a")
    async with running(database, trips.registry, [ORIGIN, OTHER]):
        ids = await enqueue(database, trips.ride, [ride(1), ride(2)])
        await trips.has_started(1)
        await admin.pause(reason="carrier down", **target)
        ids += await enqueue(database, trips.ride, [ride(3)])
        gate.set()
        await in_history(database, ids[0])
        elsewhere = {
            "type": (trips.other, ORIGIN, "b"),
            "origin": (trips.ride, OTHER, "a"),
            "group": (trips.ride, ORIGIN, "b"),
        }
        job_type, origin, transport = elsewhere["group" if "group" in target else next(iter(target))]
        sentinels = await enqueue(database, job_type, [ride(n, transport) for n in range(100, 110)], origin=origin)
        await in_history(database, *sentinels)
        assert trips.started[:1] == [1]
        assert not {2, 3} & set(trips.started)
        assert [row.id for row in await admin.jobs(state="waiting", type="ride", origin=ORIGIN)][:2] == ids[1:]
        await admin.resume(**target)
        await drained(database)
    assert [number for number in trips.started if number < 100] == [1, 2, 3]


async def in_history(database: str, *ids: int) -> None:
    query = "SELECT count(DISTINCT job_id) FROM sidings.job_history WHERE job_id = ANY ($1)"
    async with connected(database) as connection:

        async def there() -> bool:
            return await connection.fetchval(query, list(ids)) == len(ids)

        await eventually(there, f"{ids} have ended")


async def test_what_was_named_ahead_of_a_pause_passes_for_running_no_more(database: str, admin: Admin, trips: Trips):
    """The row named it until a handler ended: the group could not be cleared of it, and it ran when it was resumed."""
    gate = trips.close("a")
    side = trips.registry.job(name="side", group="transport", policy="parallel", payload=Ride)(trips.run)
    async with running(database, trips.registry, concurrency=1) as executor, connected(database) as connection:
        ids = await enqueue(database, side, [ride(0, "b"), ride(1), ride(2), ride(3)])  # the first lets others follow
        await trips.has_started(1)
        await eventually(lambda: executor.workers.claimed, "one is named ahead")
        await admin.pause(origin=ORIGIN, group="a", reason="carrier down")

        async def only_one() -> bool:
            return await connection.fetchval("SELECT running FROM sidings.executor") == [ids[1]]

        await eventually(only_one, "nothing is named but what runs")
        cycle = await connection.fetchval("SELECT cycle FROM sidings.executor")
        for _ in range(3):
            answered = executor.reader.last_answer
            await eventually(lambda: executor.reader.last_answer > answered, "a read")  # noqa: B023
        assert await connection.fetchval("SELECT cycle FROM sidings.executor") == cycle, "and that is told once"
        assert await admin.clear_group(ORIGIN, "a") == 2
        await admin.resume(origin=ORIGIN, group="a")
        gate.set()
        await drained(database)
    assert trips.started == [0, 1]


async def test_a_pause_stands_before_the_executor_that_starts_later(database: str, admin: Admin, trips: Trips):
    await admin.pause(type="alone", reason="carrier down")
    await enqueue(database, trips.alone, [ride(1)])
    async with running(database, trips.registry):
        last = await enqueue(database, trips.ride, [ride(2)])
        await in_history(database, *last)
        assert trips.started == [2]
        await admin.resume(type="alone")
        await drained(database)
    assert trips.started == [2, 1]


async def test_the_head_of_a_failing_group_is_released_and_its_order_is_kept(database: str, admin: Admin, trips: Trips):
    trips.broken.add("a")
    async with running(database, trips.registry):
        first, _ = await enqueue(database, trips.ride, [ride(1), ride(2)])
        await in_state(admin, first, "backing off")
        [group] = await admin.blocked_groups()
        assert (group.head, group.behind) == (first, 1)
        assert without_place(group.error or "") == "ValueError: a is broken"
        trips.broken.clear()
        assert await admin.release_group(ORIGIN, "a", reason="mended") == first
        await drained(database)
    assert trips.started == [1, 1, 2]


async def test_the_head_of_a_failing_group_is_skipped(database: str, admin: Admin, trips: Trips):
    trips.broken.add("a")
    async with running(database, trips.registry):
        first, second = await enqueue(database, trips.ride, [ride(1), ride(2)])
        await in_state(admin, first, "backing off")
        trips.broken.clear()
        await admin.skip_head(ORIGIN, "a", head=first)
        await drained(database)
    assert trips.started == [1, 2]
    assert {row["job_id"]: row["outcome"] for row in await history(database)} == {
        first: "discarded",
        second: "succeeded",
    }


async def test_a_group_that_was_blocked_for_good_starts_its_policy_anew(database: str, admin: Admin, trips: Trips):
    trips.broken.add("a")
    async with running(database, trips.registry):
        first, _ = await enqueue(database, trips.limited, [ride(1), ride(2)])
        await in_state(admin, first, "blocked")
        assert trips.started == [1, 1]
        await admin.release_group(ORIGIN, "a")
        await eventually(lambda: trips.started == [1, 1, 1, 1])
        await in_state(admin, first, "blocked")
        trips.broken.clear()
        await admin.retry_now(first)
        await drained(database)
    assert trips.started == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("it_commits", ["while the head runs", "when the head is blocked"])
async def test_a_job_that_commits_late_runs_before_the_blocked_head_of_its_group(
    database: str, admin: Admin, trips: Trips, it_commits: str
):
    """It waited for ever. No person could release the group, whose first job neither backed off nor was blocked."""
    go_on, prometheus = asyncio.Event(), CollectorRegistry()
    if it_commits == "when the head is blocked":
        go_on.set()

    @trips.registry.job(group="transport", retry=Retry(stop=stop_after_attempt(1), on_exhausted="block"))
    async def blocks(job: Job[Ride]) -> None:
        trips.started.append(job.payload.number)
        await go_on.wait()
        if "a" in trips.broken:
            raise ValueError("a is broken")

    @trips.registry.job(group="transport")
    async def well(job: Job[Ride]) -> None:
        trips.started.append(job.payload.number)

    def late_rows() -> float | None:
        return prometheus.get_sample_value("sidings_late_rows_total", {"service": "test"})

    trips.broken.add("a")
    async with running(database, trips.registry, prometheus=prometheus), connected(database) as late:
        transaction = late.transaction()
        await transaction.start()
        [first] = await well.enqueue_many(late, [ride(1)], origin=ORIGIN)
        head, _ = await enqueue(database, blocks, [ride(2), ride(3)])
        await trips.has_started(2)
        if it_commits == "when the head is blocked":
            await in_state(admin, head, "blocked")
        await transaction.commit()
        await eventually(late_rows, "it is read")
        go_on.set()
        await in_history(database, first)
        [group] = await admin.blocked_groups()
        assert (group.head, group.state, group.behind) == (head, "blocked", 1)
        trips.broken.clear()
        assert await admin.release_group(ORIGIN, "a", reason="mended") == head
        await drained(database)
    assert trips.started == [2, 1, 2, 3]


async def test_a_cleared_group_starts_nothing_of_what_was_there(database: str, admin: Admin, trips: Trips):
    trips.broken.add("a")
    async with running(database, trips.registry):
        ids = await enqueue(database, trips.ride, [ride(number) for number in range(1, 200)])
        await in_state(admin, ids[0], "backing off")
        trips.broken.clear()
        assert await admin.clear_group(ORIGIN, "a") == len(ids)
        await enqueue(database, trips.ride, [ride(1_000)])
        await drained(database)
    assert trips.started == [1, 1_000]


async def test_a_group_is_cleared_while_its_head_runs(database: str, admin: Admin, trips: Trips):
    gate = trips.close("a")
    async with running(database, trips.registry):
        ids = await enqueue(database, trips.ride, [ride(1), ride(2), ride(3)])
        await trips.has_started(1)
        assert await admin.clear_group(ORIGIN, "a") == 2
        assert await jobs_left(database) == 1
        gate.set()
        await drained(database)
        gate.clear()
        ids += await enqueue(database, trips.ride, [ride(4), ride(5)])
        await trips.has_started(4)
        assert await admin.clear_group(ORIGIN, "a", running=True) == 2
        await eventually(lambda: trips.cancelled == [4])
    assert trips.started == [1, 4]
    assert sorted(await outcomes(database)) == ["cancelled"] * 4 + ["succeeded"]


async def test_delayed_jobs_and_failed_ones_without_a_group_run_when_they_are_told_to(
    database: str, admin: Admin, trips: Trips
):
    trips.broken.add("a")
    async with running(database, trips.registry):
        [failed] = await enqueue(database, trips.alone, [ride(1)])
        [delayed] = await enqueue(database, trips.ride, [ride(2, "b")], delay=3_600)
        await in_state(admin, failed, "delayed")
        assert (await admin.show(failed)).attempts[0].outcome == "retried"
        trips.broken.clear()
        for id in (failed, delayed):
            assert await admin.retry_now(id) is JobState.DELAYED
        await drained(database)
    assert sorted(trips.started) == [1, 1, 2]


async def test_a_held_job_runs_once_it_is_released(database: str, admin: Admin, trips: Trips):
    async with running(database, trips.registry):
        id = await value(database, "SELECT sidings.enqueue('ride', '{\"number\": \"none\"}'::json, $1, 'a')", ORIGIN)
        await in_state(admin, id, "held")
        [row] = await admin.jobs(state="held")
        assert row.held is not None
        assert "does not validate" in row.held
        await fetch(database, "UPDATE sidings.job SET payload = '{\"number\": 7}'")
        await admin.release(id)
        await drained(database)
    assert trips.started == [7]
    held, ran = await history(database)
    assert held["finished_at"] < ran["due_at"] <= ran["started_at"], "it has not waited while it was held"


class Gone(Discard):
    """A program's own."""


async def test_what_its_handler_has_ended_on_purpose_comes_back_only_where_that_is_asked_for(
    database: str, admin: Admin
):
    """The alert names a command that brings back what was given up: it took along what there is no carrier for."""
    registry = Registry()

    @registry.job(group="transport", payload=Ride, retry=Retry(stop=stop_after_attempt(1)))
    async def once(job: Job[Ride]) -> None:
        declined = Discard("no such carrier")
        raise {0: ConnectionError("x"), 1: declined, 2: Gone("x"), 3: ExceptionGroup("of a task group", [declined])}[
            job.payload.number
        ]

    @registry.job(batch=5, payload=Ride)
    async def lists(jobs: list[Job[Ride]]) -> list[Exception]:
        return [Discard("no such carrier") for _ in jobs]

    failed, declined, gone, grouped = await enqueue(database, once, [ride(0), ride(1), ride(2), ride(3)])
    [listed] = await enqueue(database, lists, [ride(1)])
    async with running(database, registry):
        await drained(database)

    async def found(**options: Any) -> list[int]:
        return [row.job_id for row in await admin.requeueable(**options)]

    assert await found() == [failed, gone]
    assert await found(declined=True) == [failed, declined, gone, grouped, listed]
    assert await found(declined="only") == [declined, grouped, listed]
    assert await found(type="lists") == []
    await admin.requeue(declined)  # by its number always
    assert await found(declined="only") == [grouped, listed]
    with pytest.raises(ActionRefused, match="declined='all': give False, True or 'only'"):
        await found(declined="all")


async def test_a_discarded_job_is_requeued_and_runs(database: str, admin: Admin):
    registry, seen = Registry(), list[tuple[int, int, dict[str, str]]]()

    @registry.job(name="once", group="transport", payload=Ride)
    async def once(job: Job[Ride]) -> None:
        seen.append((job.id, job.payload.number, job.headers))
        if len(seen) == 1:
            raise Discard("no such carrier")

    async with running(database, registry):
        [old] = await enqueue(database, once, [ride(1)], headers={"correlation_id": "c-1"})
        await in_history(database, old)
        [row] = await admin.ended(type="once")
        new = await admin.requeue(row.job_id, reason="there is one now")
        await drained(database)
    assert seen == [(old, 1, {"correlation_id": "c-1"}), (new, 1, {"correlation_id": "c-1"})]
    assert (await admin.show(old)).actions[0].detail == {"found": "discarded", "new_job": new}


@pytest.mark.parametrize("policy", ["latest", "parallel"])
async def test_a_requeued_job_runs_whatever_the_policy_of_its_type_says(database: str, admin: Admin, policy: Any):
    registry, seen = Registry(), list[int]()

    @registry.job(name="position", group="transport", payload=Ride, policy=policy)
    async def position(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    [old, *_] = await enqueue(database, position, [ride(1)])
    await admin.cancel(old)
    await admin.requeue(old)
    await enqueue(database, position, [ride(2)])
    async with running(database, registry):
        await drained(database)
    assert sorted(seen) == [1, 2]


async def test_orphaned_jobs_run_at_the_origin_that_they_were_moved_to(database: str, admin: Admin, trips: Trips):
    await enqueue(database, trips.ride, [ride(1), ride(2)], origin="old/3")
    await enqueue(database, trips.ride, [ride(3)], origin="old/3", delay=3_600)
    async with running(database, trips.registry):
        await enqueue(database, trips.ride, [ride(0)])
        await trips.has_started(0)
        [orphan] = await admin.orphans()
        assert (orphan.origin, orphan.waiting, orphan.delayed) == ("old/3", 2, 1)
        assert await admin.move("old/3", ORIGIN) == 3
        await trips.has_started(1, 2)
        [delayed] = await admin.jobs(state="delayed")
        await admin.retry_now(delayed.id)
        await drained(database)
        assert await admin.orphans() == []
    assert trips.started == [0, 1, 2, 3]


async def test_actions_beside_a_busy_executor_lose_no_job_and_run_none_twice(database: str, admin: Admin, trips: Trips):
    """Every job ends exactly once: it ran, or it was cancelled, and what was cancelled while it waited did not run."""
    numbers = list(range(600))
    waiting: set[int] = set()
    async with running(database, trips.registry, [ORIGIN, OTHER], concurrency=4):
        ids: dict[int, int] = {}
        for number in numbers:
            if number % 50 == 0:
                batch = [ride(n, f"g{n % 20}") for n in numbers[number : number + 50]]
                origin = ORIGIN if number % 100 else OTHER
                made = await enqueue(database, trips.ride, batch, origin=origin)
                ids.update(zip((r.number for r in batch), made, strict=True))
                await act(admin, made, ids, waiting)
        await drained(database)
    rows = await history(database)
    assert sorted(row["job_id"] for row in rows if row["outcome"] in ("succeeded", "cancelled")) == sorted(ids.values())
    assert len(trips.started) == len(set(trips.started))
    assert not {number for number, id in ids.items() if id in waiting} & set(trips.started)


async def act(admin: Admin, made: list[int], ids: dict[int, int], waiting: set[int]) -> None:
    for id in made[::7]:
        with suppress(JobNotFound):  # it has ended already
            if await admin.cancel(id) is JobState.WAITING:
                waiting.add(id)
    await admin.pause(type="ride", reason="for a moment")
    await admin.resume(type="ride")


@pytest.mark.parametrize("call", ["discard_job($1, 'alice')", "pause_jobs('alice', $1::text, type => 'alone')"])
async def test_a_person_who_leaves_a_transaction_open_stops_nothing_for_long(database: str, trips: Trips, call: str):
    """Nothing started any more, and what ran was stopped because its lease could not be renewed, until it ended."""
    long = trips.close("long")
    async with running(database, trips.registry), connected(database) as person:
        await enqueue(database, trips.ride, [Ride(transport="long", number=1)])
        [delayed] = await enqueue(database, trips.other, [Ride(transport="late", number=2)], delay=3_600)
        await trips.has_started(1)
        await person.execute("BEGIN")
        await person.execute(f"SELECT sidings.{call}", str(delayed) if "text" in call else delayed)
        await enqueue(database, trips.ride, [Ride(transport="b", number=3)])
        await trips.has_started(3)
        await eventually(person.is_closed, "the session is ended")
        long.set()
        await eventually(lambda: outcomes(database), "the outcome is recorded")
        assert (await jobs_left(database), trips.cancelled) == (1, [])
        assert await value(database, "SELECT count(*) FROM sidings.audit") == 0


async def test_jobs_whose_lease_runs_out_before_they_start_run_later_although_somebody_acts_meanwhile(database: str):
    """Between the question what has happened, and its answer; they passed for running, for ever."""
    registry, asked, called = Registry(), asyncio.Event(), list[int]()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        called.append(job.payload.number)
        if len(called) != 10:
            return
        await connection.execute("UPDATE sidings.executor SET fence = fence + 1")
        await asked.wait()
        assert executor.workers.claimed
        [queue] = executor.scheduler.origins.values()
        deadline, queue.deadline = queue.deadline, 0.0

        def go_on() -> None:  # the worker has come to all the others
            queue.deadline = deadline
            answer.set()

        asyncio.get_running_loop().call_soon(go_on)

    async with connected(database) as connection, running(database, registry, concurrency=1) as executor:
        standing, answer = executor.cycles.standing, asyncio.Event()
        fetchrow = standing._link.fetchrow

        async def ask(query: str, *args: object) -> asyncpg.Record | None:
            row = await fetchrow(query, *args)
            if query == standing._standing_sql:
                asked.set()
                await answer.wait()
            return row

        standing._link.fetchrow = ask
        await enqueue(database, ride, [Ride(number=n) for n in range(100)])
        await drained(database)
    assert sorted(called) == list(range(100))


async def test_pages_of_what_has_ended_leave_out_none_of_a_list(database: str, admin: Admin):
    """Jobs of one list end in one instant, before which the next page begins."""
    registry, seen, before = Registry(), list[int](), None

    @registry.job(batch=20)
    async def lot(jobs: list[Job[Ride]]) -> None:
        raise Discard("half of the file is missing")

    async with running(database, registry):
        ids = await enqueue(database, lot, [ride(number) for number in range(50)])
        await drained(database)
    while page := await admin.ended(limit=15, before=before):
        assert len(page) <= 15 + 20
        seen += [row.job_id for row in page]
        before = page[-1].finished_at
    assert sorted(seen) == ids
    newest = await cli_json(database, "jobs", "ended", "--limit", 15)
    older = await cli_json(database, "jobs", "ended", "--before", newest["next"])
    assert len(newest["jobs"] + older["jobs"]) == 50


HANDLERS = ["a list", "a plain function", "its cleanup fails", "transactional"]


@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize("then", ["block", "wait"])
async def test_what_a_handler_says_of_a_job_that_was_ended_does_not_hold_up_its_group(
    database: str, admin: Admin, kind: str, then: Literal["block", "wait"]
):
    """Its failure counted in memory: the group backed off, or was blocked for ever, behind a job that was no more."""
    registry, started, gate = Registry(), list[int](), threading.Event()
    retry = LONG if then == "wait" else Retry(stop=stop_after_attempt(1), on_exhausted="block")
    options: dict[str, Any] = {"name": "ride", "group": "transport", "payload": Ride, "retry": retry}

    def fail(job: Job[Ride]) -> None:
        if job.payload.number == 1:
            raise ValueError("the carrier is down")

    async def fails_anyway(job: Job[Ride]) -> None:
        started.append(job.payload.number)
        try:
            while not gate.is_set() and job.payload.number == 1:
                await asyncio.sleep(0.01)
        finally:
            fail(job)

    async def many(jobs: list[Job[Ride]]) -> None:
        for job in jobs:
            await fails_anyway(job)

    def plain(job: Job[Ride]) -> None:
        started.append(job.payload.number)
        gate.wait(30)
        fail(job)

    if kind == "a list":
        ride_type = registry.job(**options, batch=10)(many)
    else:
        handler = plain if kind == "a plain function" else fails_anyway
        ride_type = registry.job(**options, transactional=kind == "transactional")(handler)
    async with running(database, registry) as executor:
        first, second = await enqueue(database, ride_type, [ride(1), ride(2)])
        await eventually(lambda: started)
        assert await admin.cancel(first) is JobState.RUNNING
        await eventually(lambda: executor.cycles.standing.fence == 1, "the executor has heard of it")
        gate.set()
        await drained(database)
    assert started == [1, 2]
    assert {row["job_id"]: row["outcome"] for row in await history(database)} == {
        first: "cancelled",
        second: "succeeded",
    }

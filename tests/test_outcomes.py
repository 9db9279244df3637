"""What becomes of an attempt: its outcome, its row in the history, and what the job's group does next."""

import asyncio
import hashlib
import json
import linecache
import logging
import re
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import asyncpg
import pytest
from prometheus_client import CollectorRegistry, Histogram
from pydantic import BaseModel, field_validator
from sidings.errors import ConfigurationError, Fenced
from sidings.executor import Executor, cycles
from sidings.jobs import Discard, Job, OutcomeName, Registry, Retry, Snooze
from sidings.jobs.admin import Admin
from sidings.jobs.middleware import Call, Next
from tenacity import (
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    stop_after_delay,
    wait_chain,
    wait_fixed,
    wait_none,
)

from .support import (
    ORIGIN,
    Ride,
    connected,
    drained,
    enqueue,
    eventually,
    fetch,
    history,
    outcomes,
    running,
    value,
    without_place,
)

AT_ONCE = Retry(wait=wait_none())
PATIENT = Retry(wait=wait_fixed(3600))


async def ended(database: str, count: int) -> list[asyncpg.Record]:
    """The history, once it has `count` rows."""

    async def enough() -> list[asyncpg.Record]:
        rows = await history(database)
        return rows if len(rows) >= count else []

    rows = await eventually(enough, f"{count} attempts have ended")
    assert len(rows) == count
    return rows


async def run_one(database: str, handler: Callable[[Job[Ride]], Any], attempts: int, **options: Any):
    """The history of one job of the group "a", after `attempts` attempts."""
    registry = Registry()
    declared = registry.job(**{"group": "transport", "name": "ride", "retry": AT_ONCE, **options})(handler)
    await enqueue(database, declared, [Ride(transport="a", number=1)])
    async with running(database, registry):
        return await ended(database, attempts)


async def the_job(database: str) -> asyncpg.Record:
    [row] = await fetch(database, "SELECT *, run_at - clock_timestamp() AS due_in FROM sidings.job")
    return row


# -- success and failure ------------------------------------------------------------------------------------------


async def test_a_success_leaves_one_row_with_all_that_is_known(database: str):
    registry = Registry()
    seen: list[Job[Ride]] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        seen.append(job)

    await enqueue(database, ride, [Ride(transport="a")], priority=3, headers={"correlation_id": "c1", "x": "y"})
    async with running(database, registry) as executor:
        [row] = await ended(database, 1)
        assert row["executor"] == executor.id
        assert row["epoch"] == executor.held[ORIGIN]
    [job] = seen
    assert (job.id, job.type, job.origin, job.group) == (row["job_id"], row["type"], row["origin"], row["group"])
    assert (job.attempt, job.failures, job.priority) == (1, 0, 3) == (row["attempt"], 0, row["priority"])
    assert job.headers == {"correlation_id": "c1", "x": "y"}
    assert job.fence == (ORIGIN, row["epoch"])
    assert abs(job.enqueued_at - row["enqueued_at"]) < timedelta(milliseconds=1)
    assert row["outcome"] == "succeeded"
    assert row["correlation_id"] == "c1"
    assert row["enqueued_at"] <= row["started_at"] <= row["finished_at"]
    for empty in ("due_at", "error_class", "error_message", "error_fingerprint", "payload"):
        assert row[empty] is None
    assert await value(database, "SELECT count(*) FROM sidings.job") == 0


async def test_every_attempt_leaves_a_row_with_its_error(database: str):
    seen: list[tuple[int, int]] = []

    async def ride(job: Job[Ride]) -> None:
        seen.append((job.attempt, job.failures))
        if job.attempt < 3:
            raise ConnectionError(f"carrier {job.attempt}7 did not answer")

    rows = await run_one(database, ride, 3)
    assert [(row["attempt"], row["outcome"]) for row in rows] == [(1, "retried"), (2, "retried"), (3, "succeeded")]
    assert seen == [(1, 0), (2, 1), (3, 2)]
    assert [row["error_class"] for row in rows] == ["ConnectionError", "ConnectionError", None]
    messages = [without_place(row["error_message"]) for row in rows[:2]]
    assert messages == ["carrier 17 did not answer", "carrier 27 did not answer"]
    assert rows[0]["error_fingerprint"] == rows[1]["error_fingerprint"] != rows[2]["error_fingerprint"]
    assert len({row["job_id"] for row in rows}) == 1
    assert rows[0]["due_at"] is None
    assert rows[0]["finished_at"] <= rows[1]["started_at"]
    assert [row["payload"] for row in rows] == [None] * 3


def parse(text: str) -> Any:
    return json.loads(text)


async def parses(job: Job[Ride]) -> None:
    parse("{")


def parses_in_a_thread(job: Job[Ride]) -> None:
    parse("{")


async def hangs(job: Job[Ride]) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(asyncio.sleep(60))


async def exits(job: Job[Ride]) -> None:
    sys.exit(3)


async def cancels_itself(job: Job[Ride]) -> None:
    raise asyncio.CancelledError


async def parses_several(jobs: list[Job[Ride]]) -> None:
    parse("{")


async def returns_an_error(jobs: list[Job[Ride]]) -> list[Exception]:
    return [ValueError("no")]


async def pass_on(call: Call, call_next: Next) -> object:
    return await call_next()


@pytest.mark.parametrize("middleware", [[], [pass_on]], ids=["plain", "in a middleware"])
@pytest.mark.parametrize(
    ("handler", "where", "options"),
    [
        (parses, "in parse", {}),
        (parses_in_a_thread, "in parse", {}),
        (hangs, "in hangs", {"timeout": 0.1}),
        (exits, "in exits", {}),
        (cancels_itself, "in cancels_itself", {}),
        (parses_several, "in parse", {"batch": 2}),
        (returns_an_error, None, {"batch": 2}),
    ],
)
async def test_the_history_and_the_log_tell_where_a_handler_raised(
    database: str, caplog: Any, handler: Any, where: str | None, options: dict[str, Any], middleware: list[Any]
):
    """In its own code, not in the library that it called."""
    registry = Registry()
    registry.middleware += middleware
    options = {"group": None if "batch" in options else "transport", "name": "ride", "retry": PATIENT, **options}
    await enqueue(database, registry.job(**options)(handler), [Ride(transport="a")])
    async with running(database, registry):
        [row] = await ended(database, 1)
    told = re.search(r" \(([\w.]+):(\d+) (in \w+)\)$", row["error_message"])
    assert (told and told[3]) == where
    if told:
        assert told[1] == __name__
        assert linecache.getline(__file__, int(told[2])).strip().startswith(WORDS[handler])
        assert told[0] in caplog.text


WORDS = {
    parses: "return json",
    parses_in_a_thread: "return json",
    parses_several: "return json",
    hangs: "await asyncio.gather",
    exits: "sys.exit",
    cancels_itself: "raise asyncio",
}


async def test_a_failed_jobs_row_remembers_what_the_policy_needs(database: str):
    async def ride(job: Job[Ride]) -> None:
        raise ValueError("x")

    [row] = await run_one(database, ride, 1, retry=PATIENT)
    job = await the_job(database)
    assert (job["attempt"], job["failures"], job["losses"], job["held"]) == (2, 1, 0, None)
    assert timedelta(seconds=3500) < job["due_in"] <= timedelta(seconds=3600)
    assert abs(job["first_started_at"] - row["started_at"]) < timedelta(milliseconds=200)
    assert job["position"] is not None  # it keeps its place, and its group waits


async def test_a_failing_jobs_clock_runs_since_its_first_failure(database: str):
    """Where it is read anew, as behind a takeover, a policy that stops after so long would begin anew each time."""

    async def ride(job: Job[Ride]) -> None:
        raise ValueError("x")

    rows = await run_one(database, ride, 2, retry=Retry(wait=wait_chain(wait_none(), wait_fixed(3600))))
    job = await the_job(database)
    assert job["failures"] == 2
    assert job["first_started_at"] == rows[0]["started_at"] < rows[1]["started_at"]


async def test_a_failed_job_that_snoozes_shows_what_it_failed_with(database: str):
    async def ride(job: Job[Ride]) -> None:
        raise ValueError("x") if job.attempt == 1 else Snooze(3600)

    await run_one(database, ride, 2)
    assert (await the_job(database))["error"].startswith("ValueError: x")


async def test_a_failed_job_without_a_group_leaves_the_order_until_it_is_due(database: str):
    async def ride(job: Job[Ride]) -> None:
        raise ValueError("x")

    await run_one(database, ride, 1, retry=PATIENT, group=None)
    job = await the_job(database)
    assert job["position"] is None
    assert job["run_at"] is not None


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "single"])
async def test_waits_of_a_chain_follow_each_other_across_attempts(database: str, grouped: bool):
    registry = Registry()
    policy = Retry(wait=wait_chain(wait_fixed(0.01), wait_fixed(0.02), wait_fixed(3600)))

    @registry.job(group="transport" if grouped else None, retry=policy)
    async def ride(job: Job[Ride]) -> None:
        raise ValueError("x")

    await enqueue(database, ride, [Ride(transport="a")])
    async with running(database, registry):
        await ended(database, 3)
    job = await the_job(database)
    assert job["failures"] == 3
    assert timedelta(seconds=3500) < job["due_in"] <= timedelta(seconds=3600)


# -- what a handler may raise -------------------------------------------------------------------------------------


async def test_a_discarded_job_is_over_and_keeps_its_payload_in_the_history(database: str):
    async def ride(job: Job[Ride]) -> None:
        raise Discard("the transport was cancelled")

    [row] = await run_one(database, ride, 1)
    assert (row["outcome"], row["error_message"]) == ("discarded", "the transport was cancelled")
    assert row["error_class"] == "sidings.jobs.retry.Discard"
    assert Ride.model_validate_json(row["payload"]) == Ride(transport="a", number=1)
    assert await value(database, "SELECT count(*) FROM sidings.job") == 0


async def test_a_snooze_burns_no_failure_and_starts_no_clock(database: str):
    async def ride(job: Job[Ride]) -> None:
        if job.attempt <= 3:
            raise Snooze(0, "not yet")
        raise ValueError("x")

    policy = Retry(stop=stop_after_attempt(2), wait=wait_fixed(3600))
    rows = await run_one(database, ride, 4, retry=policy)
    assert [row["outcome"] for row in rows] == ["snoozed"] * 3 + ["retried"]
    assert [without_place(row["error_message"]) for row in rows] == ["not yet"] * 3 + ["x"]
    job = await the_job(database)
    assert (job["attempt"], job["failures"]) == (5, 1)
    assert job["first_started_at"] >= rows[2]["finished_at"]  # of the first attempt that failed


async def test_retry_after_says_when(database: str):
    async def ride(job: Job[Ride]) -> None:
        raise Retry.after(0 if job.attempt == 1 else 7200, "429")

    rows = await run_one(database, ride, 2, retry=PATIENT)
    assert [row["outcome"] for row in rows] == ["retried", "retried"]
    assert timedelta(seconds=7100) < (await the_job(database))["due_in"] <= timedelta(seconds=7200)


@pytest.mark.parametrize("asks", ["busy", None], ids=["a value", "None"])
@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_result_may_ask_for_a_retry(database: str, asks: str | None, kind: str):
    async def asynchronous(job: Job[Ride]) -> object:
        return asks if job.attempt == 1 else "done"

    def plain(job: Job[Ride]) -> object:
        return asks if job.attempt == 1 else "done"

    policy = Retry(wait=wait_none(), retry=retry_if_result(lambda result: result == asks))
    rows = await run_one(database, asynchronous if kind == "async" else plain, 2, retry=policy)
    assert [row["outcome"] for row in rows] == ["retried", "succeeded"]
    assert rows[0]["error_message"] == f"the handler returned {asks!r}"


# -- giving up ----------------------------------------------------------------------------------------------------


async def group_after(database: str, first_fails: Callable[[Job[Ride]], Any], **options: Any):
    """Three jobs of one group, the first of which fails: the numbers whose handlers were called, and the history."""
    registry = Registry()
    called: list[int] = []

    @registry.job(**{"group": "transport", **options})
    async def ride(job: Job[Ride]) -> None:
        called.append(job.payload.number)
        if job.payload.number == 1:
            await first_fails(job)

    await enqueue(database, ride, [Ride(transport="a", number=n) for n in (1, 2, 3)])
    async with running(database, registry):

        async def over() -> bool:
            return called[-2:] == [2, 3] and (await outcomes(database)).count("succeeded") == 2

        await eventually(over, lambda: f"the rest of the group has run: {called}")
    return called, await history(database)


async def test_an_exhausted_job_is_skipped_and_its_group_goes_on_in_order(database: str):
    async def fail(job: Job[Ride]) -> None:
        raise ValueError("x")

    called, rows = await group_after(database, fail, retry=Retry(wait=wait_none(), stop=stop_after_attempt(3)))
    assert called == [1, 1, 1, 2, 3]
    assert [row["outcome"] for row in rows] == ["retried", "retried", "discarded", "succeeded", "succeeded"]
    assert rows[2]["payload"] is not None
    assert await value(database, "SELECT count(*) FROM sidings.job") == 0


async def test_an_exhausted_job_is_held_where_that_is_asked_and_its_group_goes_on_in_order(database: str):
    async def fail(job: Job[Ride]) -> None:
        raise ValueError("x")

    policy = Retry(wait=wait_none(), stop=stop_after_attempt(2), on_exhausted="hold")
    called, rows = await group_after(database, fail, retry=policy)
    assert called == [1, 1, 2, 3]
    assert [row["outcome"] for row in rows] == ["retried", "held", "succeeded", "succeeded"]
    job = await the_job(database)
    assert (job["held"], job["position"]) == ("gave up after 2 failures", None)
    assert Ride.model_validate_json(job["payload"]).number == 1


async def test_an_exhausted_job_that_has_no_group_to_block_is_held(database: str):
    """SQL stores one without its type's group. It waited for a time that never comes, and nobody was told of it."""
    registry = Registry()

    @registry.job(group="transport", retry=Retry(stop=stop_after_attempt(1), on_exhausted="block"))
    async def ride(job: Job[Ride]) -> None:
        raise ValueError("x")

    async with connected(database) as connection:
        await connection.execute("SELECT sidings.enqueue('ride', '{}', $1)", ORIGIN)
    async with running(database, registry):
        await ended(database, 1)
    job = await the_job(database)
    assert (job["held"], job["position"], job["run_at"]) == ("gave up after 1 failures", None, None)


async def test_a_job_that_is_never_due_keeps_no_other_from_being_promoted(database: str):
    """PostgreSQL before 17 does not calculate with infinity: beside one as above, of an earlier release, none was."""
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async with connected(database) as connection:
        never = "INSERT INTO sidings.job (type, origin, run_at, position) VALUES ('ride', $1, 'infinity', NULL)"
        await connection.execute(never, ORIGIN)
    await enqueue(database, ride, [Ride()], delay=0.1)
    async with running(database, registry):
        [row] = await ended(database, 1)
    assert row["outcome"] == "succeeded"


async def test_a_failure_that_is_not_worth_a_retry_is_not_retried(database: str):
    async def fail(job: Job[Ride]) -> None:
        raise KeyError("x") if job.attempt > 1 else ConnectionError("y")

    policy = Retry(wait=wait_none(), retry=retry_if_exception_type(ConnectionError))
    called, rows = await group_after(database, fail, retry=policy)
    assert called == [1, 1, 2, 3]
    assert [row["outcome"] for row in rows[:2]] == ["retried", "discarded"]


async def test_stop_after_delay_counts_the_first_attempt_as_well(database: str):
    async def ride(job: Job[Ride]) -> None:
        await asyncio.sleep(0.1)
        raise ValueError("x")

    [row] = await run_one(database, ride, 1, retry=Retry(wait=wait_none(), stop=stop_after_delay(0.05)))
    assert row["outcome"] == "discarded"


async def test_stop_after_delay_counts_over_attempts(database: str):
    async def ride(job: Job[Ride]) -> None:
        raise ValueError("x")

    rows = await run_one(database, ride, 2, retry=Retry(wait=wait_fixed(0.6), stop=stop_after_delay(0.5)))
    assert [row["outcome"] for row in rows] == ["retried", "discarded"]


# -- payloads -----------------------------------------------------------------------------------------------------


class Strict(BaseModel):
    transport: str
    number: int

    @field_validator("number")
    @classmethod
    def known(cls, number: int) -> int:
        if number == 13:
            raise KeyError("a validator may raise anything")
        return number


@pytest.mark.parametrize(
    "stored", ['{"transport": "a"}', '"text"', "null", '{"transport": "a", "number": 13}', '{"transport": "\\ud800"}']
)
async def test_a_payload_that_no_longer_validates_is_held_with_its_error_and_its_group_goes_on(
    database: str, stored: str
):
    registry = Registry()
    called: list[int] = []

    @registry.job(group="transport")
    async def ride(job: Job[Strict]) -> None:
        called.append(job.payload.number)

    async with connected(database) as connection:
        insert = "INSERT INTO sidings.job (type, origin, \"group\", payload) VALUES ('ride', $1, 'a', $2)"
        await connection.execute(insert, ORIGIN, stored)
    await enqueue(database, ride, [Strict(transport="a", number=2)])
    async with running(database, registry):
        rows = await ended(database, 2)
    assert called == [2]
    assert [row["outcome"] for row in rows] == ["held", "succeeded"]
    job = await the_job(database)
    assert (job["held"], job["payload"]) == ("the payload does not validate", stored)
    assert rows[0]["error_class"]


@pytest.mark.parametrize("batch", [None, 5])
async def test_a_payload_that_no_longer_validates_blocks_its_group_where_its_type_says_so(
    database: str, caplog: pytest.LogCaptureFixture, batch: int | None
):
    """As while a deployment rolls: one that the other release takes. None of such a type is passed by a later one."""
    called: list[int] = []

    def release(model: Any) -> tuple[Registry, Any]:
        async def ride(job: Any) -> None:
            called.extend(each.payload.number for each in (job if batch else [job]))

        registry = Registry()
        declare = registry.job(payload=model, group="transport", batch=batch, retry=Retry(on_exhausted="block"))
        return registry, declare(ride)

    earlier, _ = release(Strict)
    later, ride = release(Ride)
    await enqueue(database, ride, [Ride(transport="a", number=number) for number in (13, 14)])
    await enqueue(database, ride, [Ride(transport="b", number=15)])
    async with running(database, earlier):
        rows = await ended(database, 2)
    assert called == [15]
    assert sorted(row["outcome"] for row in rows) == ["held", "succeeded"]
    [id] = re.findall(r"held, and its group blocked, until `sidings jobs retry (\d+)`", caplog.text)
    async with running(database, later), connected(database) as connection:
        assert await Admin(connection, actor="alice").retry_now(int(id))
        await drained(database)
    assert called == [15, 13, 14]


async def test_a_job_stored_by_sql_without_a_payload_is_run_where_the_model_allows_it(database: str):
    registry = Registry()
    seen: list[Any] = []

    @registry.job()
    async def tick(job: Job) -> None:
        seen.append(job.payload)

    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.job (type, origin) VALUES ('tick', $1)", ORIGIN)
    async with running(database, registry):
        await drained(database)
    assert seen == [None]


# -- timeouts and cancellation ------------------------------------------------------------------------------------


async def test_an_attempt_that_takes_too_long_is_cancelled_and_fails(database: str):
    cancelled: list[int] = []

    async def ride(job: Job[Ride]) -> None:
        if job.attempt == 1:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(job.attempt)

    rows = await run_one(database, ride, 2, timeout=0.05)
    assert cancelled == [1]
    assert [row["outcome"] for row in rows] == ["retried", "succeeded"]
    assert rows[0]["error_class"] == "TimeoutError"
    assert without_place(rows[0]["error_message"]) == "the handler ran longer than 0.05 s"


async def test_a_plain_function_over_its_timeout_keeps_its_group_until_it_returns(
    database: str, caplog: pytest.LogCaptureFixture
):
    registry = Registry()
    called: list[int] = []
    go_on = threading.Event()

    @registry.job(group="transport", timeout=0.05)
    def ride(job: Job[Ride]) -> None:
        called.append(job.payload.number)
        if job.payload.number == 1:
            assert go_on.wait(30)

    @registry.job(name="other", payload=Ride)
    async def other(job: Job[Ride]) -> None:
        called.append(job.payload.number)

    await enqueue(database, ride, [Ride(transport="a", number=n) for n in (1, 2)])
    try:
        async with running(database, registry):
            await eventually(lambda: "a plain function cannot be cancelled" in caplog.text, "its timeout is over")
            await enqueue(database, other, [Ride(number=99)])
            await eventually(lambda: 99 in called, "a later job of no group has run")
            assert called == [1, 99]
            go_on.set()
            rows = await ended(database, 3)
    finally:
        go_on.set()
    assert called == [1, 99, 2]
    assert [row["outcome"] for row in rows] == ["succeeded"] * 3  # its own end counts


@pytest.mark.parametrize("batch", [None, 2])
async def test_a_plain_function_for_which_there_is_no_thread_has_not_run_and_does_not(
    database: str, caplog: pytest.LogCaptureFixture, batch: int | None
):
    """Python's pool says that it could not start a thread, and keeps the call for the next that is free. The attempt
    counted as failed, and the function ran all the same: after the job was discarded, or beside its next attempt."""
    registry = Registry()
    called: list[int] = []
    go_on = threading.Event()

    def work(given: Any) -> None:
        [job] = given if batch else [given]
        called.append(job.payload.number)
        if job.payload.number == 1:
            assert go_on.wait(30)

    ride = registry.job(
        name="ride", payload=Ride, group="transport", retry=Retry(stop=stop_after_attempt(1)), batch=batch
    )(work)
    before = threading.stack_size()
    try:
        async with running(database, registry):
            await enqueue(database, ride, [Ride(transport="a", number=1)])
            await eventually(lambda: called == [1], "the first has its thread")
            threading.stack_size(1 << 46)  # more than there is: so no thread can be started
            await enqueue(database, ride, [Ride(transport="b", number=2)])
            await eventually(lambda: "no thread for it" in caplog.text or "discarded" in caplog.text)
            threading.stack_size(before)
            go_on.set()
            rows = await ended(database, 3)
    finally:
        threading.stack_size(before)
        go_on.set()
    assert called == [1, 2]
    assert sorted(row["outcome"] for row in rows) == ["snoozed", "succeeded", "succeeded"]


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("kind", ["async def", "lambda", "timed"])
async def test_whatever_a_handler_raises_when_its_executor_stops_is_no_failure(
    database: str, kind: str, batch: int | None
):
    """Of one whose task group could not be cleaned up each deployment cost an attempt, and at last the job. And so of
    one behind a plain wrapper, which runs in a thread and returns what is awaited here."""
    registry, began = Registry(), asyncio.Event()

    async def part() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("it could not be closed")

    async def ride(job: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(part())

    seconds = Histogram("ride_seconds", "", registry=CollectorRegistry())
    wrapped: dict[str, Any] = {"lambda": lambda job: ride(job), "timed": seconds.time()(ride)}
    job_type = registry.job(name="ride", payload=Ride, batch=batch, retry=Retry(stop=stop_after_attempt(1)))(
        wrapped.get(kind, ride)
    )
    await enqueue(database, job_type, [Ride()])
    async with running(database, registry, shutdown_seconds=0.1):
        await began.wait()
    [row] = await ended(database, 1)
    assert (row["outcome"], row["error_class"]) == ("snoozed", "Interrupted")
    assert (await the_job(database))["failures"] == 0


async def test_a_handler_that_swallows_its_cancellation_and_returns_has_succeeded(database: str):
    registry = Registry()
    cancelling: list[int] = []

    @registry.job(group="transport", timeout=0.05)
    async def ride(job: Job[Ride]) -> None:
        if job.payload.number == 1:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        cancelling.append(task.cancelling())
        async with asyncio.timeout(20):  # works only in a task that is not being cancelled
            await asyncio.sleep(0)

    await enqueue(database, ride, [Ride(transport="a", number=n) for n in (1, 2)])
    async with running(database, registry, concurrency=1):
        rows = await ended(database, 2)
    assert [row["outcome"] for row in rows] == ["succeeded", "succeeded"]
    assert cancelling == [1, 0]


class Unusual(BaseException):
    """Neither an Exception nor one of the exits."""


class Sulky(Exception):
    def __str__(self) -> str:
        raise RuntimeError("I will not say")


class Cancelling(Exception):
    def __str__(self) -> str:
        raise asyncio.CancelledError


class Exiting(Exception):
    def __str__(self) -> str:
        raise SystemExit


class Unnamed(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__qualname__":
            raise RuntimeError("I will not say")
        return type.__getattribute__(cls, name)


class Nameless(Exception, metaclass=Unnamed):
    """Its class does not tell its name."""


class Leaving(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__module__":
            raise SystemExit
        return type.__getattribute__(cls, name)


class Exited(Exception, metaclass=Leaving):
    """Its class ends the process when it is asked for its module."""


class Unsaid(Snooze):
    """A subclass that does not call the constructor of its base."""

    def __init__(self, reason: str) -> None:
        Exception.__init__(self, reason)


class Until(Snooze):
    """A subclass with a time of its own."""

    def __init__(self, seconds: Any) -> None:
        super().__init__(1)
        self.seconds = seconds


class SulkyDiscard(Discard):
    def __str__(self) -> str:
        raise RuntimeError("I will not say")


def _raise(error: BaseException) -> None:
    raise error


def deep(error: Exception) -> Exception:
    """Deeper than Python's recursion may go."""
    for _ in range(2_000):
        error = ExceptionGroup("of a task group", [error])
    return error


ODD_ENDS: dict[str, tuple[Callable[[Job[Ride]], Any], bool, str, str]] = {
    "CancelledError": (lambda job: _raise(asyncio.CancelledError()), True, "retried", "raised CancelledError"),
    "a BaseException": (lambda job: _raise(Unusual("odd")), True, "retried", "odd"),
    "a BaseException in a thread": (lambda job: _raise(Unusual("odd")), False, "retried", "odd"),
    "StopIteration in a thread": (lambda job: next(iter([])), False, "retried", "StopIteration"),
    "SystemExit in a thread": (lambda job: _raise(SystemExit(3)), False, "retried", "SystemExit(3)"),
    "SystemExit": (lambda job: _raise(SystemExit(3)), True, "retried", "the handler raised SystemExit: 3"),
    "GeneratorExit": (lambda job: _raise(GeneratorExit()), True, "retried", "the handler raised GeneratorExit"),
    "GeneratorExit in a thread": (lambda job: _raise(GeneratorExit()), False, "retried", "raised GeneratorExit"),
    "KeyboardInterrupt in a thread": (lambda job: _raise(KeyboardInterrupt()), False, "retried", "KeyboardInterrupt"),
    "an error that raises SystemExit": (lambda job: _raise(Exiting()), True, "retried", "cannot be shown"),
    "an error without words": (lambda job: _raise(Sulky()), True, "retried", "cannot be shown"),
    "a Discard without words": (lambda job: _raise(SulkyDiscard()), True, "discarded", "cannot be shown"),
    "an error that raises CancelledError": (lambda job: _raise(Cancelling()), True, "retried", "cannot be shown"),
    "an error without a name": (lambda job: _raise(Nameless("odd")), True, "retried", ""),
    "an error whose name raises SystemExit": (lambda job: _raise(Exited("odd")), True, "retried", "odd"),
    "a receiver that is fenced": (lambda job: _raise(Fenced("odd")), True, "retried", "odd"),
    "a Snooze without seconds": (lambda job: _raise(Unsaid("x")), True, "retried", "seconds"),
    "a Snooze for NaN": (lambda job: _raise(Until(float("nan"))), True, "retried", "nan seconds"),
    "a Snooze for ever": (lambda job: _raise(Until(float("inf"))), True, "retried", "inf seconds"),
    "a Snooze for a text": (lambda job: _raise(Until("soon")), True, "retried", "'soon' seconds"),
    "a Snooze for a Decimal": (lambda job: _raise(Until(Decimal(1))), True, "retried", "seconds"),
    "a Snooze for True": (lambda job: _raise(Until(True)), True, "snoozed", ""),
    "NUL": (lambda job: _raise(ValueError("a\0b")), True, "retried", "a\\0b"),
    "a lone surrogate": (lambda job: _raise(ValueError("a\ud800b")), True, "retried", "a\\ud800b"),
    "a megabyte": (lambda job: _raise(ValueError("x" * 2**20)), True, "retried", "xxx"),
    "an exception group": (lambda job: _raise(ExceptionGroup("two", [ValueError("v")])), True, "retried", "two"),
    "a group of a Discard": (lambda job: _raise(ExceptionGroup("one", [Discard("d")])), True, "discarded", "one"),
    "a group of a Snooze": (lambda job: _raise(ExceptionGroup("one", [Snooze(9)])), True, "snoozed", "one"),
    "a group of a Snooze for a text": (
        lambda job: _raise(ExceptionGroup("one", [Until("soon"), Snooze(9)])),
        True,
        "retried",
        "'soon' seconds",
    ),
    "groups in groups": (lambda job: _raise(deep(Discard("d"))), True, "discarded", ""),
    "a group of a BaseException": (
        lambda job: _raise(BaseExceptionGroup("two", [Unusual("odd"), Discard("d")])),
        True,
        "retried",
        "the handler raised BaseExceptionGroup: two",
    ),
}


@pytest.mark.parametrize("case", ODD_ENDS)
async def test_however_a_handler_ends_its_attempt_is_recorded_and_others_go_on(database: str, case: str):
    end, is_async, outcome, text = ODD_ENDS[case]
    registry = Registry()

    if is_async:

        @registry.job(name="odd", retry=PATIENT)
        async def odd(job: Job[Ride]) -> None:
            end(job)
    else:

        @registry.job(name="odd", retry=PATIENT)
        def odd(job: Job[Ride]) -> None:
            end(job)

    @registry.job()
    async def even(job: Job[Ride]) -> None: ...

    await enqueue(database, odd, [Ride()])
    async with running(database, registry, concurrency=1) as executor:
        [row] = await ended(database, 1)
        assert row["outcome"] == outcome
        assert text in row["error_message"]
        assert len(row["error_message"]) <= 4000
        await enqueue(database, even, [Ride()])
        rows = await ended(database, 2)
        assert rows[1]["outcome"] == "succeeded"
        assert executor.problems() == []


async def test_a_failing_handler_ends_no_executor_where_a_filter_of_the_log_raises(database: str):
    """With each instance in turn it ended: a job that fails leaves a line in the log, wherever it runs."""
    registry = Registry()

    @registry.job(retry=PATIENT)
    async def odd(job: Job[Ride]) -> None:
        raise ValueError("odd")

    @registry.job()
    async def even(job: Job[Ride]) -> None: ...

    def broken(record: logging.LogRecord) -> bool:
        raise LookupError(f"a field is missing in {record.msg!r}")

    logging.getLogger("sidings.executor").addFilter(broken)
    try:
        await enqueue(database, odd, [Ride()])
        async with running(database, registry) as executor:
            [row] = await ended(database, 1)
            assert (row["outcome"], row["error_class"]) == ("retried", "LookupError")
            await enqueue(database, even, [Ride()])
            assert (await ended(database, 2))[1]["outcome"] == "succeeded"
            assert executor.problems() == []
    finally:
        logging.getLogger("sidings.executor").removeFilter(broken)


@pytest.mark.parametrize("listed", [False, True], ids=["of one", "of a list"])
async def test_a_filter_of_the_log_may_ask_for_the_text_whatever_a_handler_has_raised(database: str, listed: bool):
    """As one does that removes passwords: what it raises would come out of the executor's own line of the log."""

    class Unprintable(Exception):
        def __repr__(self) -> str:
            raise RuntimeError("I will not say")

    registry = Registry()
    if listed:

        @registry.job(name="odd", retry=PATIENT, batch=2)
        async def many(jobs: list[Job[Ride]]) -> list[Exception]:
            return [Unprintable("odd") for _ in jobs]
    else:

        @registry.job(name="odd", retry=PATIENT)
        async def one(job: Job[Ride]) -> None:
            raise Unprintable("odd")

    def read(record: logging.LogRecord) -> bool:
        return bool(record.getMessage())

    await enqueue(database, registry["odd"], [Ride()])
    logging.getLogger("sidings.executor").addFilter(read)
    try:
        async with running(database, registry) as executor:
            [row] = await ended(database, 1)
            assert executor.problems() == []
    finally:
        logging.getLogger("sidings.executor").removeFilter(read)
    assert (row["outcome"], without_place(row["error_message"])) == ("retried", "odd")


async def test_an_async_handler_behind_a_plain_wrapper_is_awaited(database: str):
    done: list[int] = []

    async def real(job: Job[Ride]) -> None:
        await asyncio.sleep(0)
        done.append(job.attempt)
        if job.attempt == 1:
            raise ValueError("x")

    def wrapper(job: Job[Ride]) -> Any:
        return real(job)

    rows = await run_one(database, wrapper, 2)
    assert done == [1, 2]
    assert [row["outcome"] for row in rows] == ["retried", "succeeded"]


@pytest.mark.parametrize("kind", ["alone", "transactional", "in a list", "inside of middleware"])
async def test_an_async_handler_behind_an_async_wrapper_that_does_not_await_it_is_awaited(database: str, kind: str):
    """Its job passed for done, and nothing had run."""
    registry, done = Registry(), list[object]()

    async def real(job: object) -> None:
        await asyncio.sleep(0)
        done.append(job)

    async def wrapper(job: object) -> Any:
        return real(job)

    async def around(call: Call, call_next: Next) -> None:
        await call_next()

    if kind == "inside of middleware":
        registry.middleware.append(around)
    options: dict[str, Any] = {"transactional": kind == "transactional", "batch": 2 if kind == "in a list" else None}
    ride = registry.job(name="ride", payload=Ride, **options)(wrapper)
    await enqueue(database, ride, [Ride()])
    async with running(database, registry):
        [row] = await ended(database, 1)
    assert (row["outcome"], len(done)) == ("succeeded", 1)


def _broken(*_: Any) -> Any:
    raise ZeroDivisionError("in the strategy")


@pytest.mark.parametrize(
    ("options", "returns"),
    [
        ({"wait": _broken}, False),
        ({"stop": _broken}, False),
        ({"retry": _broken}, False),
        ({"wait": lambda state: float("nan")}, False),
        ({"wait": lambda state: "soon"}, False),
        ({"retry": retry_if_result(_broken)}, True),
    ],
    ids=["wait", "stop", "retry", "wait gives NaN", "wait gives text", "retry_if_result"],
)
async def test_a_strategy_that_is_broken_itself_loses_no_job(database: str, options: dict[str, Any], returns: bool):
    registry = Registry()

    @registry.job(retry=Retry(**options))
    async def ride(job: Job[Ride]) -> int:
        if not returns:
            raise KeyError("x")
        return 1

    @registry.job()
    async def even(job: Job[Ride]) -> None: ...

    await enqueue(database, ride, [Ride()])
    async with running(database, registry, concurrency=1) as executor:
        [row] = await ended(database, 1)
        assert row["outcome"] == "retried"
        assert row["error_class"] in ("ZeroDivisionError", "ValueError")
        await enqueue(database, even, [Ride()])
        await ended(database, 2)
        assert executor.problems() == []
    due_in = (await the_job(database))["due_in"]
    assert timedelta(seconds=50) < due_in <= timedelta(seconds=60)


# -- history ------------------------------------------------------------------------------------------------------


async def test_a_type_may_leave_no_history_but_of_what_is_discarded(database: str):
    registry = Registry()
    called: list[str] = []

    @registry.job(history=False, retry=Retry(wait=wait_none(), stop=stop_after_attempt(2), on_exhausted="hold"))
    async def quiet(job: Job[Ride]) -> None:
        called.append(job.payload.transport)
        match job.payload.transport:
            case "fails":
                raise ValueError("x")
            case "discards":
                raise Discard("x")
            case "snoozes" if job.attempt == 1:
                raise Snooze(0)

    @registry.job()
    async def loud(job: Job[Ride]) -> None: ...

    await enqueue(database, quiet, [Ride(transport=name) for name in ("fails", "discards", "snoozes", "works")])
    async with running(database, registry) as executor:
        await eventually(lambda: executor.metrics.count(OutcomeName.SUCCEEDED, "quiet") == 2)
        await eventually(lambda: executor.metrics.count(OutcomeName.HELD, "quiet") == 1)
        await enqueue(database, loud, [Ride()])
        rows = await ended(database, 2)
    assert {(row["type"], row["outcome"]) for row in rows} == {("loud", "succeeded"), ("quiet", "discarded")}
    assert sorted(called) == ["discards", "fails", "fails", "snoozes", "snoozes", "works"]
    assert (await the_job(database))["held"] == "gave up after 2 failures"


async def test_a_job_that_somebody_removes_while_it_runs_is_counted_and_its_group_goes_on(database: str):
    registry = Registry()
    called: list[int] = []
    go_on = asyncio.Event()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        called.append(job.payload.number)
        await go_on.wait()

    [first, _] = await enqueue(database, ride, [Ride(transport="a", number=n) for n in (1, 2)])
    async with running(database, registry) as executor:
        await eventually(lambda: called)
        async with connected(database) as connection:
            await connection.execute("DELETE FROM sidings.job WHERE id = $1", first)
        go_on.set()
        [row] = await ended(database, 1)
        assert called == [1, 2]
        assert row["job_id"] != first
        unmatched = executor.metrics.unmatched._value.get()
        assert unmatched == 1


async def test_an_outcome_of_an_attempt_that_is_not_the_present_one_changes_nothing(database: str):
    registry = Registry()
    started: list[int] = []
    go_on = asyncio.Event()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        started.append(job.id)
        await go_on.wait()
        if job.payload.number == 2:
            raise ValueError("x")

    payloads = [Ride(transport=name, number=number) for number, name in ((1, "a"), (2, "b"), (3, "c"))]
    ids = await enqueue(database, ride, payloads)
    async with running(database, registry) as executor:
        await eventually(lambda: len(started) == 3)
        later = "run_at = now() + interval '1 hour'"  # or the attempt that is the present one would begin at once
        async with connected(database) as connection:  # as a takeover does
            await connection.execute(f"UPDATE sidings.job SET attempt = attempt + 1, {later} WHERE id <> $1", ids[2])
        go_on.set()
        [row] = await ended(database, 1)
        await eventually(lambda: executor.metrics.unmatched._value.get() == 2)
        assert row["job_id"] == ids[2]
    rows = await fetch(database, "SELECT attempt, failures, run_at > now() FROM sidings.job")
    assert [tuple(row) for row in rows] == [(2, 0, True)] * 2


UNWANTED = "unwanted" + "".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(60))  # does not compress well
REFUSALS = {
    "a constraint": "ALTER TABLE sidings.job_history ADD CONSTRAINT picky CHECK (error_message NOT LIKE 'unwanted%')",
    "an index for shorter texts": "CREATE INDEX picky ON sidings.job_history (error_message)",
    "a trigger": """
        CREATE FUNCTION public.picky() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF new.error_message LIKE 'unwanted%' THEN RAISE EXCEPTION 'no'; END IF;
            RETURN new;
        END $$;
        CREATE TRIGGER picky BEFORE INSERT ON sidings.job_history FOR EACH ROW EXECUTE FUNCTION public.picky()
    """,
}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_an_outcome_that_postgres_refuses_does_not_hold_up_the_others(
    database: str, caplog: pytest.LogCaptureFixture, refusal: str
):
    """Some errors' texts are refused: the batch is halved until the culprits stand alone."""
    registry = Registry()
    gathered = asyncio.Event()

    @registry.job(retry=PATIENT)
    async def ride(job: Job[Ride]) -> None:
        await gathered.wait()
        if job.payload.number % 5 == 0:
            raise ValueError(UNWANTED)

    async with connected(database) as connection:
        await connection.execute(REFUSALS[refusal])
    ids = await enqueue(database, ride, [Ride(number=n) for n in range(20)])
    async with running(database, registry) as executor:
        await eventually(lambda: executor.workers.running() == 20, "all handlers run")
        gathered.set()  # so that all of them are recorded by one cycle
        rows = await ended(database, 20)
        assert executor.problems() == []
    by_job = {row["job_id"]: row for row in rows}
    assert [by_job[id]["outcome"] for id in ids] == ["retried" if n % 5 == 0 else "succeeded" for n in range(20)]
    assert {row["error_message"] for row in rows if row["outcome"] == "retried"} == {
        "the error's text could not be stored"
    }
    assert "a cycle was refused" in caplog.text


async def test_an_outcome_waits_with_its_text_while_postgres_has_no_transaction_ids_left(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """It was taken for a refused value, since the code is that of a row that is too long for an index."""
    monkeypatch.setattr("sidings.executor.link._GIVE_IDS", ("exec_stmt_raise",))  # the function that RAISE names
    registry = Registry()

    @registry.job(retry=PATIENT)
    async def ride(job: Job[Ride]) -> None:
        raise ValueError("the vehicle is gone")

    async with connected(database) as connection:
        await connection.execute(
            """CREATE TABLE no_ids ();
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF to_regclass('no_ids') IS NOT NULL THEN RAISE program_limit_exceeded; END IF; RETURN NEW; END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON sidings.job_history FOR EACH ROW EXECUTE FUNCTION refuse()"""
        )
        await enqueue(database, ride, [Ride(number=1)])
        async with running(database, registry):
            await eventually(lambda: "ProgramLimitExceededError" in caplog.text)
            await connection.execute("DROP TABLE no_ids")
            [row] = await ended(database, 1)
    assert row["error_message"].startswith("the vehicle is gone")
    assert "a cycle was refused" not in caplog.text


async def test_an_outcome_that_postgres_refuses_in_any_form_stalls_only_its_own_group(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("sidings.executor.cycles._REFUSED_RETRY_SECONDS", 0.1)
    registry = Registry()
    called: list[int] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        called.append(job.payload.number)

    def told(executor: Executor) -> list[str]:
        return [problem for problem in executor.problems() if "picky" in problem]

    async with connected(database) as connection:
        await connection.execute("ALTER TABLE sidings.job_history ADD CONSTRAINT picky CHECK (\"group\" <> 'bad')")
        groups = ("a", "bad", "b", "bad", "c")
        ids = await enqueue(database, ride, [Ride(transport=name, number=n) for n, name in enumerate(groups)])
        async with running(database, registry) as executor:
            await ended(database, 3)
            await enqueue(database, ride, [Ride(transport="d", number=5)])
            rows = await ended(database, 4)
            assert "bad" not in [row["group"] for row in rows]
            assert sorted(called) == [0, 1, 2, 4, 5]  # the second of "bad" waits for the outcome of the first
            [problem] = await eventually(lambda: told(executor), "it says so")
            assert f"of jobs [{ids[1]}] cannot be recorded" in problem
            assert "a cycle was refused (CheckViolationError: new row" in caplog.text
            assert "Failing row contains" not in problem + caplog.text
            # Until it is recorded, a death of the process would be a loss of it.
            assert await connection.fetchval("SELECT running FROM sidings.executor") == [ids[1]]
            await connection.execute("ALTER TABLE sidings.job_history DROP CONSTRAINT picky")
            rows = await ended(database, 6)
            assert told(executor) == []
    assert sorted(row["group"] for row in rows) == ["a", "b", "bad", "bad", "c", "d"]
    assert called[-1] == 3


async def test_of_a_job_that_somebody_has_made_due_since_ever_failures_are_recorded(database: str):
    """Of a time that is infinite there is no number in JSON: Postgres refused the outcome for ever."""
    registry = Registry()

    @registry.job(group="transport", retry=Retry(stop=stop_after_attempt(1)))
    async def ride(job: Job[Ride]) -> None:
        raise ValueError

    await enqueue(database, ride, [Ride(transport="a")])
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.job SET run_at = '-infinity'")
    async with running(database, registry) as executor:
        [row] = await ended(database, 1)
        assert row["outcome"] == "discarded"
        assert executor.problems() == []
    assert await value(database, "SELECT due_at = '-infinity' FROM sidings.job_history")


async def test_an_executor_whose_own_row_is_refused_waits_and_goes_on(database: str, caplog: pytest.LogCaptureFixture):
    """As by a trigger that notes each change in a table whose partition for this month nobody has made."""
    registry, gate, called = Registry(), asyncio.Event(), list[int]()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        called.append(job.payload.number)
        await gate.wait()

    async with connected(database) as connection, running(database, registry) as executor:
        await enqueue(database, ride, [Ride(number=0)])
        await eventually(lambda: called)
        await connection.execute(
            """CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
               BEGIN RAISE 'no partition of relation "note" found for row' USING ERRCODE = 'check_violation'; END $$;
               CREATE TRIGGER note AFTER UPDATE ON sidings.executor FOR EACH ROW EXECUTE FUNCTION public.note()"""
        )
        await enqueue(database, ride, [Ride(number=1)])
        await eventually(lambda: "no partition of relation" in caplog.text)
        gate.set()
        await eventually(lambda: not executor.workers.running())
        executor.cycles._flights[0].sent -= 60
        [problem] = executor.problems()
        assert problem.startswith("a cycle has been under way for 6")
        assert "no partition of relation" in problem
        assert caplog.text.count("could not be recorded") == 1
        await connection.execute("DROP TRIGGER note ON sidings.executor")
        rows = await ended(database, 2)
    assert [row["outcome"] for row in rows] == ["succeeded"] * 2
    assert called == [0, 1]


async def test_no_more_jobs_start_when_too_many_outcomes_cannot_be_recorded(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """All of them ran, and were named, a million as well; after a restart they ran again, as suspects, one by one."""
    monkeypatch.setattr(cycles, "_MOST_PUT_OFF", 20)
    monkeypatch.setattr(cycles, "_REFUSED_RETRY_SECONDS", 0.1)
    registry = Registry()
    called: list[int] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        called.append(job.payload.number)
        await asyncio.sleep(0.001)

    def refusals() -> int:
        return sum("a cycle was refused" in record.message for record in caplog.records)

    async with connected(database) as connection:
        await connection.execute("ALTER TABLE sidings.job_history ADD CONSTRAINT picky CHECK (type <> 'ride')")
        await enqueue(database, ride, [Ride(number=n) for n in range(500)])
        async with running(database, registry, concurrency=5) as executor:
            await eventually(lambda: "no job starts" in str(executor.problems()), "it says that it stands still")
            so_far = refusals()
            await eventually(lambda: refusals() > so_far + 200, "they have been tried again")
            assert len(called) < 200
            await connection.execute("ALTER TABLE sidings.job_history DROP CONSTRAINT picky")
            await ended(database, 500)
            assert executor.problems() == []
    assert sorted(called) == list(range(500))


# -- transactional handlers ---------------------------------------------------------------------------------------


async def test_a_transactional_handlers_effects_and_its_jobs_end_commit_together(database: str):
    registry = Registry()

    @registry.job(group="transport", transactional=True, retry=Retry(wait=wait_none(), stop=stop_after_attempt(4)))
    async def ride(job: Job[Ride]) -> None:
        await job.tx.execute("INSERT INTO public.effect VALUES ($1, $2)", job.id, job.attempt)
        if job.payload.number == 1 and job.attempt < 3:
            raise ValueError("x")
        if job.payload.number == 2:
            await after.enqueue(job.tx, Ride())
        if job.payload.number == 3:
            raise Discard("x")

    @registry.job()
    async def after(job: Job[Ride]) -> None: ...

    async with connected(database) as connection:
        await connection.execute("CREATE TABLE public.effect (job bigint, attempt int)")
    one, two, three = await enqueue(database, ride, [Ride(transport="a", number=n) for n in (1, 2, 3)])
    async with running(database, registry) as executor:
        rows = await ended(database, 6)
        assert executor.problems() == []
    effects = await fetch(database, "SELECT job, attempt FROM public.effect ORDER BY 1")
    assert [tuple(row) for row in effects] == [(one, 3), (two, 1)]
    told = [(row["job_id"], row["outcome"]) for row in rows if row["type"] == "ride"]
    assert told == [
        (one, "retried"),
        (one, "retried"),
        (one, "succeeded"),
        (two, "succeeded"),
        (three, "discarded"),
    ]
    assert await value(database, "SELECT count(*) FROM sidings.job") == 0


async def test_a_transactional_handlers_own_statements_are_planned_as_the_server_is_set_up(database: str):
    registry = Registry()
    seen: dict[str, str] = {}

    @registry.job(transactional=True)
    async def ride(job: Job[Ride]) -> None:
        for name in ("enable_seqscan", "plan_cache_mode", "jit", "lock_timeout"):
            seen[name] = await job.tx.fetchval(f"SHOW {name}")

    await enqueue(database, ride, [Ride()])
    async with running(database, registry):
        await ended(database, 1)
    for name, setting in seen.items():
        assert setting == await value(database, f"SHOW {name}")


@pytest.mark.parametrize("pgbouncer", [False, True])
async def test_an_isolation_level_of_the_database_is_for_handlers_and_not_for_the_executor(
    database: str, pgbouncer: bool
):
    registry = Registry()
    seen: list[str] = []
    strict = f"{database}?options=-c%20default_transaction_isolation%3Dserializable"

    @registry.job(transactional=True)
    async def ride(job: Job[Ride]) -> None:
        seen.append(await job.tx.fetchval("SHOW transaction_isolation"))

    async with connected(database) as connection:
        await connection.execute(
            """CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
               BEGIN NEW.host := current_setting('transaction_isolation'); RETURN NEW; END $$;
               CREATE TRIGGER look BEFORE UPDATE ON sidings.executor FOR EACH ROW EXECUTE FUNCTION look()"""
        )
        await enqueue(database, ride, [Ride()])
        async with running(strict, registry, pgbouncer=pgbouncer):
            await ended(database, 1)
            assert await connection.fetchval("SELECT host FROM sidings.executor") == "read committed"
    assert seen == ["serializable"]


async def test_an_error_at_commit_is_a_failure_like_any_other(database: str):
    registry = Registry()

    @registry.job(transactional=True, retry=AT_ONCE)
    async def ride(job: Job[Ride]) -> None:
        if job.attempt == 1:
            await job.tx.execute("INSERT INTO public.effect VALUES (1), (1)")  # refused when the transaction commits

    async with connected(database) as connection:
        await connection.execute("CREATE TABLE public.effect (job int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    await enqueue(database, ride, [Ride()])
    async with running(database, registry):
        rows = await ended(database, 2)
    assert [row["outcome"] for row in rows] == ["retried", "succeeded"]
    assert rows[0]["error_class"].endswith("UniqueViolationError")
    assert await value(database, "SELECT count(*) FROM public.effect") == 0


async def test_a_transactional_handler_that_is_cancelled_leaves_no_effects(database: str):
    registry = Registry()

    @registry.job(transactional=True, retry=AT_ONCE, timeout=0.1)
    async def ride(job: Job[Ride]) -> None:
        await job.tx.execute("INSERT INTO public.effect VALUES ($1)", job.attempt)
        if job.attempt == 1:
            await asyncio.Event().wait()

    async with connected(database) as connection:
        await connection.execute("CREATE TABLE public.effect (attempt int)")
    await enqueue(database, ride, [Ride()])
    async with running(database, registry):
        await drained(database)
    *before, last = await outcomes(database)
    assert (set(before), last) == ({"retried"}, "succeeded")  # with few cores, another may take too long as well
    assert await value(database, "SELECT array_agg(attempt) FROM public.effect") == [len(before) + 1]


async def test_a_transactional_handlers_effects_vanish_when_somebody_else_has_ended_its_job(database: str):
    registry = Registry()
    reached, go_on = asyncio.Event(), asyncio.Event()

    @registry.job(transactional=True)
    async def ride(job: Job[Ride]) -> None:
        await job.tx.execute("INSERT INTO public.effect VALUES ($1)", job.attempt)
        reached.set()
        await go_on.wait()

    async with connected(database) as connection:
        await connection.execute("CREATE TABLE public.effect (attempt int)")
        await enqueue(database, ride, [Ride()])
        async with running(database, registry) as executor:
            await reached.wait()
            await connection.execute("DELETE FROM sidings.job")
            go_on.set()
            await eventually(lambda: executor.workers.running() == 0, "the handler has ended")
            await executor.cycles.barrier()
        assert await connection.fetchval("SELECT count(*) FROM public.effect") == 0
        assert await connection.fetchval("SELECT count(*) FROM sidings.job_history") == 0


def test_a_plain_function_cannot_be_transactional():
    with pytest.raises(ConfigurationError, match="has to be `async def`"):

        @Registry().job(transactional=True)
        def ride(job: Job[Ride]) -> None: ...


async def test_only_transactional_handlers_have_a_transaction(database: str, caplog: pytest.LogCaptureFixture):
    async def ride(job: Job[Ride]) -> None:
        await job.tx.execute("SELECT 1")

    with caplog.at_level(logging.CRITICAL):
        [row] = await run_one(database, ride, 1, retry=PATIENT)
    assert row["error_message"].startswith("ride: job.tx exists where the type is declared with transactional=True;")

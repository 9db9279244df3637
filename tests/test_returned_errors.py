"""Handlers that return an error where they should raise it, or its class where it should be made; and those that return
what has not run, or not ended."""

import asyncio
import tracemalloc
from concurrent.futures import Future, ThreadPoolExecutor
from cProfile import Profile
from functools import wraps
from typing import Any

import pytest
from sidings import Discard, Snooze
from sidings.jobs import Job, Registry, Retry
from sidings.jobs.middleware import completed
from sidings.testing import drain
from tenacity import retry_if_exception_type, retry_if_result, stop_after_attempt

from .support import Ride, enqueue


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(Discard("no"), "discarded"), (Discard, "discarded"), (ValueError("no"), "retried"), (Snooze(60), "snoozed")],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["async", "plain", "transactional", "in middleware", "batch"])
async def test_an_error_that_is_returned_is_no_success(database: str, kind: str, error: Any, outcome: str) -> None:
    """As handlers of lists return theirs; the job counted as done, and was gone."""
    registry = Registry()
    if kind == "in middleware":

        async def around(call: Any, call_next: Any) -> None:
            await call_next()

        registry.middleware.append(around)

    async def ride(job: Job[Ride]) -> object:
        return error

    async def rides(jobs: list[Job[Ride]]) -> list[object]:
        return [error for _ in jobs]

    options: dict[str, Any] = {"batch": {"batch": 10}, "transactional": {"transactional": True}}.get(kind, {})
    handler: Any = {"batch": rides, "plain": lambda job: error}.get(kind, ride)
    job_type = registry.job(name="ride", payload=Ride, **options)(handler)
    await enqueue(database, job_type, [Ride(), Ride()])
    assert [attempt.outcome for attempt in await drain(database, registry)] == [outcome] * 2


@pytest.mark.parametrize(
    ("error", "outcome"), [(Discard("no"), "discarded"), (ValueError, "retried"), (Snooze(60), "snoozed")], ids=repr
)
@pytest.mark.parametrize(
    "kind", ["async", "plain", "transactional", "in middleware", "judged", "judged, transactional"]
)
async def test_an_error_in_what_a_handler_of_one_job_returns_is_no_success(
    database: str, kind: str, error: Any, outcome: str
) -> None:
    """As a gather with `return_exceptions=True` gives it: the job counted as done, and was gone."""
    registry, seen = Registry(), list[object]()

    async def around(call: Any, call_next: Any) -> None:
        try:
            await call_next()
        except Exception as raised:
            seen.append(type(raised))
            raise

    async def ride(job: Job[Ride]) -> object:
        return [None, error, KeyError("later")]

    if kind == "in middleware":
        registry.middleware.append(around)
    none = retry_if_exception_type() | retry_if_result(lambda result: result is None)
    retry = Retry(retry=none) if "judged" in kind else None
    handler: Any = {"plain": lambda job: (None, error)}.get(kind, ride)
    registry.job(name="ride", payload=Ride, transactional="transactional" in kind, retry=retry)(handler)
    await enqueue(database, registry["ride"], [Ride()])
    assert [attempt.outcome for attempt in await drain(database, registry)] == [outcome]
    assert seen == ([error if isinstance(error, type) else type(error)] if kind == "in middleware" else [])


@pytest.mark.parametrize("wrapped", [False, True])
async def test_an_error_in_the_list_of_a_batch_is_that_of_one_job(database: str, wrapped: bool) -> None:
    registry, seen = Registry(), list[object]()

    async def around(call: Any, call_next: Any) -> None:
        seen.append(await call_next())

    if wrapped:
        registry.middleware.append(around)
    no = Discard("no")

    @registry.job(batch=10)
    async def rides(jobs: list[Job[Ride]]) -> list[object]:
        return [no if job.payload.transport == "b" else None for job in jobs]

    await enqueue(database, rides, [Ride(transport=name) for name in "abc"])
    outcomes = [attempt.outcome for attempt in await drain(database, registry)]
    assert sorted(outcomes) == ["discarded", "succeeded", "succeeded"]
    assert seen == ([[None, no, None]] if wrapped else [])


async def test_what_is_no_error_in_a_list_is_a_success(database: str) -> None:
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> object:
        return [None, int, "an error", {"error": ValueError("as data")}]

    await enqueue(database, ride, [Ride()])
    assert [attempt.outcome for attempt in await drain(database, registry)] == ["succeeded"]


async def test_a_class_of_errors_that_cannot_be_made_is_a_failure(database: str) -> None:
    registry = Registry()

    @registry.job(batch=10, retry=Retry(stop=stop_after_attempt(1)))
    async def rides(jobs: list[Job[Ride]]) -> list[object]:
        return [Snooze for _ in jobs]

    await enqueue(database, rides, [Ride()])
    [attempt] = await drain(database, registry)
    assert attempt.outcome == "discarded"
    assert attempt.error is not None
    assert attempt.error.error_class == "TypeError"


def logged(handler: Any) -> Any:
    """A decorator that makes a plain function of whatever it gets, so that nobody sees a `yield` in it."""

    @wraps(handler)
    def call(argument: Any) -> Any:
        return handler(argument)

    return call


@pytest.mark.parametrize(
    "kind",
    [
        *(
            "generator",
            "async generator",
            "transactional",
            "in middleware",
            "batch",
            "in lists",
            "in a list",
            "in a set",
        ),
        *("in a dict", "in rows"),
    ],
)
async def test_what_has_not_run_is_no_success(database: str, kind: str) -> None:
    """A decorator hides a `yield`, and a forgotten gather what is awaited: the jobs were gone, and nothing had run."""
    registry, ran = Registry(), list[object]()
    if kind == "in middleware":

        async def around(call: Any, call_next: Any) -> None:
            await call_next()

        registry.middleware.append(around)

    def generator(argument: object) -> Any:
        ran.append(argument)
        yield

    async def asynchronous(argument: object) -> Any:
        ran.append(argument)
        yield

    async def returned(argument: object) -> Any:
        return generator(argument)

    async def send(job: object) -> None:
        ran.append(job)

    async def rides(jobs: list[Job[Ride]]) -> list[object]:
        return [send(job) for job in jobs]

    async def one_ride(job: Job[Ride]) -> tuple[object, ...]:
        return None, send(job), send(job)

    handlers: dict[str, Any] = {"async generator": logged(asynchronous), "transactional": returned, "in lists": rides}

    async def set_of_rides(job: Job[Ride]) -> object:
        return {send(job), send(job)}

    async def named_rides(job: Job[Ride]) -> dict[str, object]:
        return {"first": None, "second": send(job)}

    async def rows_of_rides(job: Job[Ride]) -> list[object]:
        return [(1, "a"), {"rides": [None, send(job)]}]

    handlers |= {"in a list": one_ride, "in a set": set_of_rides, "in a dict": named_rides, "in rows": rows_of_rides}
    batch = 10 if kind in ("batch", "in lists") else None
    job_type = registry.job(name="ride", payload=Ride, transactional=kind == "transactional", batch=batch)(
        handlers.get(kind, logged(generator))
    )
    await enqueue(database, job_type, [Ride(), Ride()])
    attempts = await drain(database, registry)
    assert ([attempt.outcome for attempt in attempts], ran) == (["retried"] * 2, [])
    assert all(attempt.error is not None and "the handler returned a" in attempt.error.message for attempt in attempts)


async def test_a_decorator_without_its_parentheses_is_no_success(database: str) -> None:
    """It takes the handler for its option, and each job for the handler: the jobs were gone, and nothing had run."""
    registry, ran = Registry(), list[object]()

    def timed(name: Any = "") -> Any:
        def decorate(handler: Any) -> Any:
            @wraps(handler)
            async def call(job: Any) -> None:
                await handler(job)

            return call

        return decorate

    @registry.job(name="ride", payload=Ride)
    @timed  # for @timed()
    async def ride(job: Job[Ride]) -> None:
        ran.append(job)

    await enqueue(database, ride, [Ride()])
    [attempt] = await drain(database, registry)
    assert (attempt.outcome, ran) == ("retried", [])
    assert attempt.error is not None
    assert "write @timed() for @timed" in attempt.error.message


@pytest.mark.parametrize("where", ["thread", "event loop"])
async def test_what_a_plain_handler_hands_on_is_waited_for(database: str, where: str) -> None:
    """Its job was done as soon as somebody else had begun with it, however that ended."""
    registry, loop = Registry(), asyncio.get_running_loop()
    gate, pool = asyncio.Event(), ThreadPoolExecutor(1)

    async def fail() -> None:
        await gate.wait()
        raise ValueError("no")

    def run() -> None:
        asyncio.run_coroutine_threadsafe(fail(), loop).result()

    @registry.job()
    def ride(job: Job[Ride]) -> Future[None]:
        loop.call_soon_threadsafe(loop.call_later, 0.2, gate.set)
        return pool.submit(run) if where == "thread" else asyncio.run_coroutine_threadsafe(fail(), loop)

    await enqueue(database, ride, [Ride()])
    [attempt] = await drain(database, registry)
    pool.shutdown(wait=False)
    assert attempt.outcome == "retried"


@pytest.mark.parametrize("kind", ["list", "of wait"])
@pytest.mark.parametrize("fails", [False, True])
async def test_what_has_ended_in_a_list_is_what_came_of_it(database: str, fails: bool, kind: str) -> None:
    """As after asyncio.wait, which raises nothing."""
    registry = Registry()

    async def send() -> None:
        if fails:
            raise ValueError("no")

    @registry.job()
    async def ride(job: Job[Ride]) -> object:
        ended = await asyncio.wait([asyncio.create_task(send())])
        return ended if kind == "of wait" else list(ended[0])

    await enqueue(database, ride, [Ride()])
    [attempt] = await drain(database, registry)
    assert attempt.outcome == ("retried" if fails else "succeeded")


def test_long_lists_that_a_handler_returns_are_not_gone_through_one_by_one() -> None:
    def calls(size: int) -> int:
        with Profile() as profile:
            asyncio.run(completed([object()] * size))
            asyncio.run(completed([("a", 1, None)] * size))
        return sum(entry.callcount for entry in profile.getstats())

    itself = list[object]()
    itself.append(itself)
    asyncio.run(completed(itself))
    calls(1)
    assert abs(calls(10_000) - calls(1)) < 5_000


def test_rows_that_hold_what_holds_them_are_gone_through_once() -> None:
    """For each of them all were read: of 30,000 that took seven gigabytes."""
    train: dict[str, object] = {}
    train["cars"] = [{"number": number, "train": train} for number in range(3_000)]
    tracemalloc.start()
    try:
        asyncio.run(completed(train["cars"]))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()

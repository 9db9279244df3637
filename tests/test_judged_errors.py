"""Handlers that return an error, where the retry policy judges what they return."""

from typing import Any

import pytest
from sidings import ConfigurationError, Message, Transaction
from sidings.jobs import Job, Registry, Retry
from sidings.testing import drain
from tenacity import (
    retry_all,
    retry_if_exception,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_none,
)

from .consumer_support import Number, a_service
from .support import Ride, enqueue, fetch, value

BUSY = Retry(wait=wait_none(), retry=retry_if_result(lambda result: isinstance(result, OSError)))


@pytest.mark.parametrize("kind", ["async", "plain", "in middleware"])
async def test_an_error_that_the_policy_wants_to_see_again_is_retried(database: str, kind: str) -> None:
    """It was discarded at its first attempt: for an error that is raised such a policy has nothing to say."""
    registry, calls = Registry(), list[int]()
    if kind == "in middleware":

        async def around(call: Any, call_next: Any) -> None:
            await call_next()

        registry.middleware.append(around)

    def answer() -> object:
        calls.append(1)
        return OSError("busy") if len(calls) < 3 else None

    async def ride(job: Job[Ride]) -> object:
        return answer()

    handler: Any = (lambda job: answer()) if kind == "plain" else ride
    job_type = registry.job(name="ride", payload=Ride, retry=BUSY)(handler)
    await enqueue(database, job_type, [Ride()])
    assert [attempt.outcome for attempt in await drain(database, registry)] == ["retried", "retried", "succeeded"]


@pytest.mark.parametrize("error", [ValueError("no"), ValueError], ids=repr)
async def test_another_error_is_still_a_failure(database: str, error: Any) -> None:
    registry = Registry()

    async def ride(job: Job[Ride]) -> object:
        return error

    job_type = registry.job(name="ride", payload=Ride, retry=BUSY)(ride)
    await enqueue(database, job_type, [Ride()])
    [attempt] = await drain(database, registry)
    assert attempt.outcome == "discarded"
    assert attempt.error is not None
    assert attempt.error.error_class == "ValueError"


@pytest.mark.parametrize("lends", [False, True], ids=["job.tx", "job.tx.connection"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in middleware"])
async def test_what_a_transactional_handler_returns_is_judged_and_its_effects_are_rolled_back(
    database: str, wrapped: bool, lends: bool
) -> None:
    """Whatever was no error passed for done, with its effects; an error was discarded at the first attempt."""
    registry, calls = Registry(), list[int]()
    await fetch(database, "CREATE TABLE effect (number integer)")
    if wrapped:

        async def around(call: Any, call_next: Any) -> None:
            await call_next()

        registry.middleware.append(around)

    async def ride(job: Job[Ride]) -> object:
        calls.append(1)
        tx = job.tx.connection if lends else job.tx
        await tx.execute("INSERT INTO effect VALUES ($1)", len(calls))
        return [OSError("busy"), "busy", None][len(calls) - 1]

    busy = Retry(wait=wait_none(), retry=retry_if_result(lambda result: result is not None))
    job_type = registry.job(name="ride", payload=Ride, transactional=True, retry=busy)(ride)
    await enqueue(database, job_type, [Ride()])
    assert [attempt.outcome for attempt in await drain(database, registry)] == ["retried", "retried", "succeeded"]
    assert [row["number"] for row in await fetch(database, "SELECT number FROM effect")] == [3]


@pytest.mark.parametrize("transactional", [False, True])
async def test_what_the_policy_does_not_take_stands_in_the_log(
    database: str, caplog: pytest.LogCaptureFixture, transactional: bool
) -> None:
    """The job was tried again, and given up, without a word."""
    registry = Registry()

    async def ride(job: Job[Ride]) -> str:
        return "busy"

    busy = Retry(wait=wait_none(), stop=stop_after_attempt(2), retry=retry_if_result(lambda result: result == "busy"))
    job_type = registry.job(name="ride", payload=Ride, transactional=transactional, retry=busy)(ride)
    [id] = await enqueue(database, job_type, [Ride()])
    assert [attempt.outcome for attempt in await drain(database, registry)] == ["retried", "discarded"]
    told = "ResultRejected: the handler returned 'busy'"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"job {id} ride None: attempt 1 failed, again in 0.0 s: {told}",
        f"job {id} ride None: attempt 2 failed, discarded: {told}",
    ]


async def test_a_transactional_handlers_error_that_the_policy_leaves_alone_is_a_failure(database: str) -> None:
    registry = Registry()

    async def ride(job: Job[Ride]) -> object:
        await job.tx.execute("CREATE TABLE effect ()")
        return ValueError("no")

    job_type = registry.job(name="ride", payload=Ride, transactional=True, retry=BUSY)(ride)
    await enqueue(database, job_type, [Ride()])
    [attempt] = await drain(database, registry)
    assert attempt.outcome == "discarded"
    assert await value(database, "SELECT to_regclass('effect')") is None


STATELESS = {"stateless": True, "dead_letter": "d"}


@pytest.mark.parametrize("options", [{}, {"batch": 5}, {"isolate": True}, STATELESS, None])
def test_what_a_messages_handler_returns_is_judged_nowhere_so_a_policy_that_would_is_refused(options: Any) -> None:
    """It was never asked. A message that was to come again counted as handled, and any error had it parked at once."""

    def declare(strategy: Any) -> None:
        service, retry = a_service("postgresql://nowhere/x", "127.0.0.1:1"), Retry(retry=strategy)
        if options is None:
            service.topic("rides", type_header="type", retry=retry)
        else:
            handler: Any = alone if "stateless" in options else several if "batch" in options else one
            service.consumer("rides", retry=retry, **options)(handler)

    async def one(message: Message[Number], tx: Transaction) -> None: ...

    async def several(messages: list[Message[Number]], tx: Transaction) -> None: ...

    async def alone(message: Message[Number]) -> None: ...

    busy, away = retry_if_result(lambda result: result == "busy"), retry_if_exception_type(OSError)
    told = r"^rides: retry=Retry\(retry=.* raise an error in it, and give .* own, .* retry_all\(retry_if_exception_type"
    for strategy in (busy, away | busy, lambda state: state.outcome.result() == "busy"):
        with pytest.raises(ConfigurationError, match=told):
            declare(strategy)
    declare(away | retry_if_exception(lambda error: "busy" in str(error)))
    declare(retry_all(away, lambda state: state.attempt_number < 3))  # which is asked about errors only

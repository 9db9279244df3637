"""Handlers that return an error, where the retry policy judges what they return."""

from typing import Any

import pytest
from sidings.jobs import Job, Registry, Retry
from sidings.testing import drain
from tenacity import retry_if_result, wait_none

from .support import Ride, enqueue

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

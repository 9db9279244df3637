"""Handlers that return an error where they should raise it, or its class where it should be made."""

from typing import Any

import pytest
from sidings import Discard, Snooze
from sidings.jobs import Job, Registry, Retry
from sidings.testing import drain
from tenacity import stop_after_attempt

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

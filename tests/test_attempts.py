"""What an attempt begins with, and what the log says of one that fails."""

import logging
from typing import Any

import pytest
from pydantic import BaseModel
from sidings.executor import PostgresSettings
from sidings.executor.attempts import failed, invalid, job_of
from sidings.executor.deferral import Deferral
from sidings.executor.link import Link
from sidings.executor.queues import Entry, OriginQueue
from sidings.jobs import SUCCEEDED, Fence, Job, JobId, Registry


class Ride(BaseModel):
    vehicle: str


def test_a_job_is_what_its_class_would_have_made():
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    entry = Entry(
        *(7, OriginQueue("rides/0", 3), "ride", "v1", 12),
        attempt=3,
        failures=2,
        losses=1,
        priority=-5,
        enqueued=9.5,
        headers='{"a": "b"}',
        payload='{"vehicle": "v1"}',
    )
    expected = Job(
        Ride(vehicle="v1"), JobId(7), "ride", "rides/0", "v1", 3, 2, -5, 9.5, {"a": "b"}, Fence("rides/0", 3), None
    )
    assert job_of(ride, entry) == expected


def test_each_job_has_headers_of_its_own():
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    entry = Entry(7, OriginQueue("rides/0", 3), "ride", None, 12, payload='{"vehicle": "v1"}')
    first, second = job_of(ride, entry), job_of(ride, entry)
    first.headers["a"] = "b"
    assert second.headers == {}


FORGED = "x\nERROR all jobs are lost\r\x1b[2J\x9b1m\u202e"


@pytest.mark.parametrize("of", [failed, lambda kind, entry, error, _started: invalid(kind, entry, error)])
def test_what_comes_from_elsewhere_makes_no_lines_of_its_own_in_the_log_and_steers_no_terminal(
    caplog: pytest.LogCaptureFixture, of: Any
):
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    of(ride, Entry(7, OriginQueue("rides/0", 3), "ride", FORGED, 12, payload="{}"), ValueError(FORGED), 0.0)
    [told] = [logging.Formatter("%(message)s").format(record) for record in caplog.records]
    first, *others = told.split("\n")
    assert first.startswith("job 7 ride")
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    assert first.isprintable()


async def test_an_outcome_that_was_put_off_is_tried_again_while_postgres_is_away():
    """Nobody tells then whether its row is still locked. The executor would end."""
    link = Link(PostgresSettings(dsn="postgresql://127.0.0.1:1/nowhere"))
    deferral = Deferral(link, schema="sidings", holds=lambda _: True)
    finished = (Entry(1, OriginQueue("rides/0", 1), "ride", None, 1), SUCCEEDED, 0.0, 0.0)
    assert deferral.due() is None
    deferral.add([finished], 0.0)
    assert deferral.due() is not None
    assert await deferral.take_due() == [finished]
    assert (len(deferral), deferral.due()) == (0, None)

"""What an attempt begins with."""

from pydantic import BaseModel
from sidings.executor.attempts import job_of
from sidings.executor.queues import Entry, OriginQueue
from sidings.jobs import Fence, Job, JobId, Registry


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

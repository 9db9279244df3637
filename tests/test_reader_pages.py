"""How many reads it takes to get past jobs of which none is kept in memory."""

from prometheus_client import CollectorRegistry
from sidings import Admin
from sidings.jobs import Job, Registry

from .support import Ride, connected, enqueue, eventually, running

PAUSED = 6_000


async def test_jobs_behind_many_paused_ones_are_found_within_a_few_reads(database: str):
    """They were passed 256 at a time, as in a read of which the size of the payloads is not known yet: 390 reads for
    100,000 of them, after each start and after each action of a person, while the others waited."""
    registry, started, prometheus = Registry(), list[int](), CollectorRegistry()

    @registry.job()
    async def bulk(job: Job[Ride]) -> None:
        raise AssertionError("it is paused")

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with connected(database) as connection:
        await Admin(connection, actor="test").pause(type="bulk", reason="a test")
    await enqueue(database, bulk, (Ride(number=n) for n in range(PAUSED)))
    await enqueue(database, quick, [Ride(number=1)])
    async with running(database, registry, poll_seconds=60, prometheus=prometheus):
        await eventually(lambda: started)
        assert 2 <= prometheus.get_sample_value("sidings_read_seconds_count", {"service": "test"}) <= 6

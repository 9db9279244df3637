"""Many idle origins: as long as nothing is committed nothing is read, and then at once."""

import asyncio
from itertools import pairwise
from typing import Any

from sidings.executor import Executor
from sidings.executor.glance import GLANCE_FROM
from sidings.jobs import Job, Registry

from .support import Ride, connected, drained, enqueue, eventually, outcomes, running, value

ORIGINS = [f"t/{number}" for number in range(GLANCE_FROM + 6)]


def reads(executor: Executor) -> float:
    [metric] = executor.metrics.read_seconds.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_count"))


async def looks_without_reading(executor: Executor) -> None:
    """Return when a poll has passed without a read; other tests' commits on the same server may delay that."""
    seen: list[tuple[float, float]] = []

    def skipped() -> bool:
        seen.append((reads(executor), executor.reader.last_answer))
        return any(one[0] == other[0] and one[1] < other[1] for one, other in pairwise(seen))

    await eventually(skipped, "a poll without a read")


async def test_idle_origins_are_not_read_and_miss_nothing(database: str):
    registry = Registry()
    seen: list[int] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    async with connected(database) as late, running(database, registry, ORIGINS) as executor:
        for number, origin in enumerate(ORIGINS[::23]):
            await looks_without_reading(executor)
            await enqueue(database, ride, [Ride(number=number, transport="a")], origin=origin)  # by nobody who wakes it
            await eventually(lambda number=number: seen[-1:] == [number])

        transaction = late.transaction()  # takes its position before, and commits after a read that has seen all
        await transaction.start()
        await ride.enqueue(late, Ride(number=100, transport="late"), origin="t/1")
        await looks_without_reading(executor)
        await transaction.commit()
        await eventually(lambda: seen[-1] == 100)

        await looks_without_reading(executor)
        await enqueue(database, ride, [Ride(number=101, transport="b")], origin="t/2", delay=0.05)
        await eventually(lambda: seen[-1] == 101)
        await drained(database)
    assert set(await outcomes(database)) == {"succeeded"}


async def test_a_delayed_job_of_many_origins_comes_when_it_is_due(database: str):
    """Its time passes while nothing is committed."""
    registry = Registry()
    done: list[Any] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        done.append(asyncio.get_running_loop().time())

    await enqueue(database, ride, [Ride()], origin="t/9", delay=0.7)
    async with running(database, registry, ORIGINS) as executor:
        await looks_without_reading(executor)
        await eventually(lambda: done)
        await drained(database)  # the handler ends before its attempt is recorded
        assert await value(database, "SELECT min(started_at - due_at) >= '0 s' FROM sidings.job_history")

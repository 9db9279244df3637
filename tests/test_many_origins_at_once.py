"""Many origins that leave, or are read anew, at once: all that waits in memory is looked through once, not for each."""

from collections.abc import Iterable

import pytest
from sidings.executor import planning
from sidings.executor.queues import OriginQueue
from sidings.executor.scheduler import Scheduler
from sidings.jobs import Job, Registry

from .admin_support import a_holder
from .support import SECONDS, Ride, connected, drained, enqueue, eventually, running

ORIGINS = [f"t/{number}" for number in range(40)]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many origins it was looked through, each time. With 50,000 groups that back off a look takes 10 ms: one
    for each of a thousand origins kept the event loop for ten seconds."""
    counted: list[int] = []
    forget = Scheduler.forget_waiting

    def counting(scheduler: Scheduler, *queues: OriginQueue) -> None:
        counted.append(len(queues))
        forget(scheduler, *queues)

    monkeypatch.setattr(Scheduler, "forget_waiting", counting)
    return counted


def a_registry(seen: list[int]) -> tuple[Registry, object]:
    registry = Registry()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    return registry, ride


def few(looks: Iterable[int]) -> bool:
    """Some steps may come apart."""
    counted = list(looks)
    return sum(counted) >= len(ORIGINS) - 1 and len(counted) <= len(ORIGINS) // 4


async def test_origins_that_are_released(database: str, looks: list[int]):
    registry, _ = a_registry([])
    async with running(database, registry, ORIGINS) as executor:
        looks.clear()
        executor.assign(ORIGINS[:1], 2)
        await executor.settled(SECONDS)
        assert list(executor.held) == ORIGINS[:1]
        assert few(looks), looks


async def test_origins_that_others_have_taken_over(database: str, looks: list[int]):
    registry, _ = a_registry([])
    async with running(database, registry, ORIGINS, lease_seconds=3.0) as executor:
        heir = await a_holder(database)
        looks.clear()
        async with connected(database) as connection:
            await connection.execute(
                "UPDATE sidings.origin SET owner = $1, epoch = epoch + 1, lease_until = now() + interval '1 hour' "
                "WHERE origin <> $2",
                *(heir, ORIGINS[0]),
            )
        await eventually(lambda: list(executor.held) == ORIGINS[:1])
        assert few(looks), looks


async def test_origins_in_which_a_transaction_has_left_many_late_jobs(
    database: str, looks: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planning, "_MOST_LATE", 5)
    seen: list[int] = []
    registry, ride = a_registry(seen)
    async with connected(database) as late, running(database, registry, ORIGINS) as executor:
        transaction = late.transaction()
        await transaction.start()
        for origin in ORIGINS:
            await ride.enqueue_many(late, [Ride(transport="a", number=n) for n in range(6)], origin=origin)  # type: ignore[attr-defined]
        for origin in ORIGINS:
            await enqueue(database, ride, [Ride(transport="b", number=-1)], origin=origin)
        executor.wake()
        await eventually(lambda: seen.count(-1) == len(ORIGINS))
        await drained(database)
        looks.clear()
        await transaction.commit()
        await drained(database)
        assert len(seen) == 7 * len(ORIGINS)
        assert few(looks), looks

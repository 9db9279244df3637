"""A group so deep that the server leaves it out of forward reads."""

import asyncio

import pytest
from sidings.executor import planning
from sidings.jobs import Job, Registry

from .support import Ride, drained, enqueue, eventually, running


async def test_after_a_deep_group_the_reader_comes_to_rest(database: str, monkeypatch: pytest.MonkeyPatch):
    """It was refilled for ever, since what the server left out might have been more of it: 2,500 reads a second."""
    registry, reads = Registry(), list[int]()

    @registry.job(group="transport")
    async def store(job: Job[Ride]) -> None: ...

    plan = planning.Planner.plan

    def planned(self: planning.Planner, time: float) -> planning.Plan:
        made = plan(self, time)
        reads.append(len(made.left_out))
        return made

    monkeypatch.setattr(planning.Planner, "plan", planned)
    await enqueue(database, store, [Ride(transport="one") for _ in range(3_000)])
    async with running(database, registry, poll_seconds=3.0):
        await drained(database)
        assert any(reads), "it was never left out"

        async def at_rest() -> bool:
            before = len(reads)
            await asyncio.sleep(0.2)
            return len(reads) == before

        await eventually(at_rest, "no read for a while", seconds=10)

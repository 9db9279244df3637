"""A job that kills its process, beside innocent neighbours."""

import asyncio
from collections import Counter
from pathlib import Path

from .fleet import Fleet, until

ORIGINS = ["t/0", "t/1"]
SETTINGS = {"lease_seconds": 1.0, "poison_after": 2}


async def keep_alive(fleet: Fleet, names: str, deaths: list[int]) -> None:
    """As an orchestrator does: a process that has died is started again, until the test is over."""
    number = 0
    living = [fleet.spawn(name, ORIGINS) for name in names.split()]
    while True:
        for index, member in enumerate(living):
            if member.exit_code is not None:
                deaths.append(member.exit_code)
                number += 1
                living[index] = fleet.spawn(f"{member.name}-{number}", ORIGINS)
        await asyncio.sleep(0.05)


async def test_a_job_that_kills_its_process_is_held_and_its_neighbours_succeed(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor=SETTINGS) as fleet:
        (poison,) = await fleet.enqueue("deadly", ["t/0"], group="poisoned", ms=100)
        behind = await fleet.enqueue("step", ["t/0"], group="poisoned", each=3, ms=10)
        innocent = await fleet.enqueue("step", ORIGINS, groups=8, each=6, ms=40)
        innocent += await fleet.enqueue("single", ORIGINS, each=10, ms=40)
        deaths: list[int] = []
        orchestrator = asyncio.create_task(keep_alive(fleet, "one two", deaths))
        try:
            await fleet.finish()
        finally:
            orchestrator.cancel()
        for member in fleet.members:
            if member.exit_code is None:
                await member.stop()
        await fleet.verify(held={poison})

        assert deaths == [-9] * 3  # the first loss makes it a suspect, the next two convict it
        assert await fleet.outcomes(poison) == ["lost"] * 3 + ["held"]
        (row,) = await fleet.fetch("SELECT * FROM sidings.job WHERE id = $1", poison)
        assert "poison" in row["held"]
        assert '"g":"poisoned0"' in row["payload"]
        ends = await fleet.fetch("SELECT * FROM sidings.job_history WHERE job_id = ANY ($1)", [*behind, *innocent])
        assert {end["outcome"] for end in ends} <= {"succeeded", "lost", "snoozed"}
        # Lost once, a neighbour is a suspect as well, and suspects do not run beside each other.
        losses = Counter(end["job_id"] for end in ends if end["outcome"] == "lost")
        assert set(losses.values()) <= {1}


async def test_two_poisons_are_both_found_out_although_they_run_beside_each_other(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor=SETTINGS) as fleet:
        fleet.numbered_from("t/0", "poisoned1", 1)  # that one ends its process by os._exit
        poisons = await fleet.enqueue("deadly", ["t/0"], groups=2, group="poisoned", ms=50)
        await fleet.enqueue("step", ORIGINS, groups=5, each=4, ms=20)
        deaths: list[int] = []
        orchestrator = asyncio.create_task(keep_alive(fleet, "only", deaths))
        try:
            await fleet.finish()
        finally:
            orchestrator.cancel()
        await fleet.members[-1].stop()
        await fleet.verify(held=poisons)
        assert len(deaths) <= 1 + 2 * len(poisons)


async def test_a_success_clears_an_innocent_of_all_suspicion(database: str, tmp_path: Path):
    """A job that is cut off by other people's deaths, each time after a run of its own that was only retried."""
    async with Fleet(database, tmp_path, executor=SETTINGS | {"poison_after": 1}) as fleet:
        gate = fleet.gate()
        (job,) = await fleet.enqueue("flaky", ["t/0"], fail=2, gate=str(gate))
        for number in range(2):
            member = fleet.spawn(f"doomed{number}", ["t/0"])
            seen = len(fleet.started(job))
            await until(lambda: len(fleet.started(job)) > seen, "the job to run")  # noqa: B023
            member.kill()
            gate.touch()
            survivor = fleet.spawn(f"survivor{number}", ["t/0"])
            await until(lambda: retried(fleet, job, number + 1), "a failure of its own")  # noqa: B023
            gate.unlink()
            survivor.kill()
        gate.touch()
        async with fleet.local(["t/0"]):
            await fleet.finish()
        await fleet.verify()


async def retried(fleet: Fleet, job: int, times: int) -> bool:
    return (await fleet.outcomes(job)).count("retried") >= times

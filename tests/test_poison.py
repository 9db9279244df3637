"""A job that kills its process, beside innocent neighbours."""

import asyncio
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sidings.errors import PostgresUnavailable
from sidings.executor import threads, transactional
from sidings.executor.queues import Entry, OriginQueue
from sidings.executor.recording import plain
from sidings.jobs import Again, Job, OutcomeName, Registry, Retry, Snooze
from tenacity import wait_fixed

from .fleet import Fleet, until
from .support import Ride, enqueue, eventually, history, lose, running, value

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


async def a_suspect(database: str, job_type: Any) -> None:
    """A job that two executors have died of, perhaps."""
    await lose(database, await enqueue(database, job_type, [Ride()]), 2)


async def after_an_attempt(database: str) -> tuple[str, int]:
    """What became of it, and the losses that the job has then."""
    [row] = await eventually(lambda: history(database, "outcome"), "an attempt has ended")
    return row["outcome"], await value(database, "SELECT losses FROM sidings.job")


@pytest.mark.parametrize("raises", [None, Snooze(3600)], ids=["raises nothing else", "snoozes"])
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("ends", ["its origin is given up", "its executor stops"])
async def test_an_attempt_that_is_cut_off_clears_no_suspect(
    database: str, ends: str, batch: int | None, raises: Exception | None
):
    """A job that took a minute until it killed its process was cleared by each rebalance and each deployment: it was
    never found to be poison, and what ran beside it was lost each time."""
    registry, began = Registry(), asyncio.Event()

    @registry.job(payload=Ride, batch=batch)
    async def slow(given: Any) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise raises or asyncio.CancelledError from None

    await a_suspect(database, slow)
    async with running(database, registry, drain_seconds=0.0, shutdown_seconds=0.0) as executor:
        await began.wait()
        if ends == "its origin is given up":
            executor.assign([], 2)
            await executor.settled(30)
    assert await after_an_attempt(database) == ("snoozed", 2)


@pytest.mark.parametrize("kind", ["transactional", "plain", "plain, in batches"])
async def test_an_attempt_that_has_not_begun_clears_no_suspect(
    database: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """There was no connection for it, or no thread."""
    registry, called = Registry(), list[Any]()

    async def refuse(*args: Any, **options: Any) -> Any:
        raise PostgresUnavailable("too many clients already")

    class NoThreads(ThreadPoolExecutor):
        def submit(self, *args: Any, **options: Any) -> Future[Any]:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(transactional, "connect", refuse)
    monkeypatch.setattr(transactional, "_AWAY_SECONDS", 3600.0)
    monkeypatch.setattr(threads, "ThreadPoolExecutor", NoThreads)
    monkeypatch.setattr(threads, "_NO_THREAD_SECONDS", 3600.0)

    if kind == "transactional":

        @registry.job(name="ride", transactional=True)
        async def ride(job: Job[Ride]) -> None:
            called.append(job)
    else:
        ride = registry.job(name="ride", payload=Ride, batch=2 if "batches" in kind else None)(called.append)

    await a_suspect(database, ride)
    async with running(database, registry):
        assert await after_an_attempt(database) == ("snoozed", 2)
    assert called == []


def test_an_attempt_whose_error_cannot_be_stored_clears_no_suspect_either():
    entry = Entry(7, OriginQueue(ORIGINS[0], 3), "ride", None, 12)
    _, outcome, _, _ = plain((entry, Again(OutcomeName.SNOOZED, 1.0, inconclusive=True), 0.0, 1.0))
    assert isinstance(outcome, Again)
    assert outcome.inconclusive


@pytest.mark.parametrize("end", ["it snoozes", "it fails", "its timeout"])
async def test_an_attempt_that_comes_to_its_end_clears_a_suspect(database: str, end: str):
    registry = Registry()

    @registry.job(retry=Retry(wait=wait_fixed(3600)), timeout=0.01 if end == "its timeout" else None)
    async def ride(job: Job[Ride]) -> None:
        match end:
            case "it snoozes":
                raise Snooze(3600)
            case "it fails":
                raise ValueError("the carrier does not answer")
            case _:
                await asyncio.Event().wait()

    await a_suspect(database, ride)
    async with running(database, registry):
        assert await after_an_attempt(database) == ("snoozed" if end == "it snoozes" else "retried", 0)

"""Executors that die, or sleep past their lease, under load."""

import asyncio
import logging
from itertools import pairwise
from pathlib import Path

import asyncpg
import pytest
from sidings.jobs import Job, Registry

from .fleet import Fleet, Run, until
from .support import ORIGIN, SECONDS, Ride, connected, enqueue, eventually, running

ORIGINS = [f"t/{number}" for number in range(6)]


def suspects(runs: list[Run], lost: set[int]) -> list[Run]:
    """Of the jobs that were lost, all runs but the first, in the order of their starts."""
    seen: set[int] = set()
    found: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        if run.job in lost and run.job in seen:
            found.append(run)
        seen.add(run.job)
    return found


async def test_a_killed_executor_is_taken_over_and_its_suspects_run_one_at_a_time(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path) as fleet:
        await fleet.enqueue("step", ORIGINS, groups=8, each=4, ms=40)
        await fleet.enqueue("single", ORIGINS, each=10, ms=40)
        dead = fleet.spawn("dead", ORIGINS)
        await until(lambda: len(fleet.started()) > 60, "jobs to run")
        heir = fleet.spawn("heir", ORIGINS)
        dead.kill()
        await fleet.finish()
        await heir.stop()
        runs = await fleet.verify()

        lost = {row["job_id"] for row in await fleet.fetch("SELECT * FROM sidings.job_history WHERE outcome = 'lost'")}
        cut = {run.job for run in runs if run.how == "cut"}
        assert cut, "nothing ran when the executor was killed"
        assert cut <= lost  # a job that was named and had not started counts as well
        in_doubt = suspects(runs, lost)
        assert {run.job for run in in_doubt} >= cut
        assert all(before.end <= after.start for before, after in pairwise(in_doubt))
        assert {run.pid for run in in_doubt} == {heir.pid}
        executors = await fleet.fetch("SELECT DISTINCT executor FROM sidings.job_history WHERE outcome = 'lost'")
        assert len(executors) == 1  # recorded under the name of the dead one


async def test_repeated_kills_lose_nothing(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.0, "poison_after": 100}) as fleet:
        await fleet.enqueue("step", ORIGINS, groups=6, each=12, ms=25)
        await fleet.enqueue("flaky", ORIGINS, groups=2, each=3, ms=5, fail=2, group="f")
        await fleet.enqueue("thread", ORIGINS, groups=1, each=6, ms=10, group="th")
        living = [fleet.spawn(f"first{number}", ORIGINS) for number in range(2)]
        for kill in range(4):
            seen = len(fleet.started())
            await until(lambda: len(fleet.started()) >= seen + 30, "jobs to run")  # noqa: B023
            owners = {pid for pid, _ in (await fleet.owners()).values()}
            victim = next((member for member in living if member.pid in owners), living[0])
            victim.kill()
            living.remove(victim)
            living.append(fleet.spawn(f"next{kill}", ORIGINS))
        await fleet.finish()
        await fleet.verify()


async def test_a_process_that_slept_past_its_lease_drops_what_is_not_its_own_any_more(database: str, tmp_path: Path):
    settings = {"lease_seconds": 1.5, "exit_when_fenced": False, "concurrency": 20}
    async with Fleet(database, tmp_path, executor=settings) as fleet:
        gate = fleet.gate()
        await fleet.enqueue("step", ORIGINS, groups=4, each=2, gate=str(gate))
        zombie = fleet.spawn("zombie", ORIGINS)
        await until(lambda: len(fleet.started()) == 16, "as many handlers of one of several types as may run")
        asleep_with = [(record["job"], record["origin"]) for record in fleet.started()]
        zombie.pause()
        heir = fleet.spawn("heir", ORIGINS[:4])
        await fleet.held_by(heir, ORIGINS[:4])
        gate.touch()  # when it wakes up, its handlers have something to report
        zombie.resume()
        await fleet.finish()
        await fleet.held_by(zombie, ORIGINS[4:])  # these the heir did not want: they go on under the zombie
        await zombie.stop()
        await heir.stop()
        await fleet.verify()
        rows = await fleet.fetch("SELECT job_id FROM sidings.job_history WHERE outcome = 'lost'")
        assert {row["job_id"] for row in rows} == {job for job, origin in asleep_with if origin in ORIGINS[:4]}


async def test_a_process_that_slept_past_its_lease_ends_itself_if_its_handlers_cannot_be_stopped(
    database: str, tmp_path: Path
):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.5}) as fleet:
        gate = fleet.gate()
        asleep_with = await fleet.enqueue("thread", ORIGINS, groups=2, gate=str(gate))
        zombie = fleet.spawn("zombie", ORIGINS)
        await until(lambda: len(fleet.started()) == 12, "the handlers to run")
        zombie.pause()
        heir = fleet.spawn("heir", ORIGINS, lease_seconds=6.0)  # it cannot stop these handlers either
        await fleet.held_by(heir, ORIGINS)
        zombie.resume()
        assert await zombie.ended() == 70
        gate.touch()
        await fleet.finish()
        await heir.stop()
        await fleet.verify()
        assert await fleet.outcomes() == ["lost", "succeeded"] * len(asleep_with)


@pytest.mark.long
async def test_zombies_that_wake_again_and_again_change_nothing(database: str, tmp_path: Path):
    """Two executors, both assigned everything, paused in turn for longer than the lease, under load."""
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.0, "exit_when_fenced": False}) as fleet:
        await fleet.enqueue("step", ORIGINS, groups=6, each=15, ms=20)
        await fleet.enqueue("single", ORIGINS, each=30, ms=20)
        await fleet.enqueue("transfer", ORIGINS, groups=2, each=10, ms=10, group="x")
        members = [fleet.spawn(name, ORIGINS) for name in ("one", "two")]
        for number in range(3):
            seen = len(fleet.started())
            await until(lambda: len(fleet.started()) >= seen + 30, "jobs to run")  # noqa: B023
            sleeper, other = members[number % 2], members[(number + 1) % 2]
            sleeper.pause()
            await until(lambda: owned_by(fleet, other.pid), "the other to hold everything")  # noqa: B023
            sleeper.resume()
        await fleet.finish()
        for member in members:
            await member.stop()
        await fleet.verify()


async def owned_by(fleet: Fleet, pid: int) -> bool:
    return {owner for owner, _ in (await fleet.owners()).values()} == {pid}


async def test_an_executor_whose_row_is_deleted_starts_again_under_a_new_id(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.0}) as fleet, fleet.local(ORIGINS) as executor:
        await fleet.fetch("ALTER TABLE sidings.executor DISABLE TRIGGER keep_executor")
        await fleet.enqueue("step", ORIGINS, groups=4, each=10, ms=20)
        for _ in range(2):
            seen, former = len(fleet.started()), executor.id
            await until(lambda: len(fleet.started()) >= seen + 20, "jobs to run")  # noqa: B023
            await fleet.fetch("DELETE FROM sidings.executor")
            await until(lambda: executor.id != former and executor.held, "a new id and origins again")  # noqa: B023
        await fleet.finish()
        assert executor.problems() == []
        await executor.stop()
        await fleet.verify()


async def test_the_row_of_an_executor_that_holds_origins_is_not_deleted(database: str, tmp_path: Path):
    """With it went what it names: the jobs that ran were not counted as lost, and ran again as the same attempts."""
    async with Fleet(database, tmp_path) as fleet, fleet.local(ORIGINS) as executor:
        await executor.settled(20)
        with pytest.raises(asyncpg.PostgresError, match=f"the executor {executor.id} holds origins"):
            await fleet.fetch("DELETE FROM sidings.executor")
        await executor.stop()
        assert await fleet.fetch("SELECT FROM sidings.executor") == []


async def test_an_executor_that_held_nothing_for_days_acquires_at_once(database: str, tmp_path: Path):
    """Maintenance has deleted its row. It learnt of that when it held its first origin, under an id that was no more:
    nobody could have that until the lease had run out."""
    async with Fleet(database, tmp_path, executor={"lease_seconds": 600.0}) as fleet, fleet.local([]) as spare:
        await spare.settled(20)
        await fleet.fetch("UPDATE sidings.executor SET started_at = now() - interval '2 days'")
        await fleet.fetch("SELECT sidings.maintain(30)")
        await fleet.enqueue("step", ORIGINS, groups=2, each=2)
        spare.assign(ORIGINS, 2)
        await fleet.finish()


async def test_one_that_waits_for_days_registers_anew_without_an_error_also_on_a_newer_schema(
    database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """As a second instance with the same static assignment does, or one more than there are partitions. Each day it
    said that it was deposed; and its process ended, where its release could not have started any more by then."""
    settings = {"lease_seconds": 600.0}
    async with Fleet(database, tmp_path, executor=settings) as fleet, fleet.local(ORIGINS, 0) as holder:
        await holder.settled(20)
        async with fleet.local(ORIGINS, 0) as waiting:
            await until(lambda: fleet.fetchval("SELECT min(wanted_generation) = 0 FROM sidings.origin"), "a wish")
            former = waiting.id
            await fleet.fetch("UPDATE sidings.executor SET started_at = now() - interval '2 days'")
            await fleet.fetch("INSERT INTO sidings.migration (version, name, checksum) VALUES (9999, 'later', 'x')")
            await fleet.fetch("SELECT sidings.maintain(30)")
            await until(lambda: waiting.id != former, "a row under a new id")
            await holder.stop()
            await until(lambda: set(waiting.held) == set(ORIGINS), "it takes over")
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_an_executor_whose_loops_have_failed_does_not_keep_its_origins(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A defect of ours must not stall partitions for as long as the process lives."""
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.0}) as fleet, fleet.local(ORIGINS) as broken:
        await broken.settled(20)

        def fail(*_: object) -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(broken.reader, "_deliver", fail)
        await fleet.enqueue("step", ORIGINS, groups=2, each=3)
        async with fleet.local(ORIGINS) as heir:
            await until(lambda: set(heir.held) == set(ORIGINS), "the heir to hold everything", timeout=15)
            await fleet.finish()
        with pytest.raises(ExceptionGroup):
            await broken.wait()
        assert "the executor does not run" in broken.problems()
        await fleet.verify()


async def test_an_executor_whose_loops_fail_while_it_stops_does_not_keep_its_origins_for_that_long(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It waited for the rest of the stop, and renewed its leases, with nothing left that could give them back."""
    seconds = {"lease_seconds": 1.0, "shutdown_seconds": 60.0}
    async with Fleet(database, tmp_path, executor=seconds) as fleet, fleet.local(ORIGINS) as broken:
        await fleet.enqueue("step", ORIGINS, groups=2, each=1, gate=str(fleet.gate()))
        await until(lambda: len(fleet.started()) == 12, "the first job of each group")

        async def fail(*_: object) -> None:
            raise KeyError("a defect")

        stopping = asyncio.create_task(broken.stop())
        await until(lambda: broken._stopped, "the stop to begin")
        monkeypatch.setattr(broken.reader._link, "fetch", fail)
        async with fleet.local(ORIGINS) as heir:
            await until(lambda: set(heir.held) == set(ORIGINS), "the heir to hold everything", timeout=15)
            assert not stopping.done()
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)


async def test_an_executor_that_somebody_has_cancelled_does_not_keep_its_origins(database: str, tmp_path: Path):
    """As `asyncio.run` does with all tasks when it returns. The thread went on renewing the leases."""
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.0}) as fleet, fleet.local(ORIGINS) as broken:
        await broken.settled(20)
        assert broken._main is not None
        broken._main.cancel()
        await fleet.enqueue("step", ORIGINS, groups=2, each=3)
        async with fleet.local(ORIGINS) as heir:
            await until(lambda: set(heir.held) == set(ORIGINS), "the heir to hold everything", timeout=15)
            await fleet.finish()
        assert "the executor does not run" in broken.problems()
        await fleet.verify()


async def test_a_process_whose_executor_has_failed_ends_although_handlers_run(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.0}) as fleet:
        gate = fleet.gate()
        await fleet.enqueue("step", ORIGINS, groups=2, each=3, gate=str(gate))
        broken = fleet.spawn("broken", ORIGINS)
        await until(lambda: len(fleet.started()) == 12, "the first job of each group")
        broken.send({"break": True})
        assert await broken.ended() == 1  # `wait` has raised; the handlers are cancelled, not waited for
        gate.touch()
        async with fleet.local(ORIGINS):
            await fleet.finish()
        await fleet.verify()


async def test_an_origin_that_comes_back_waits_for_a_handler_that_could_not_be_stopped(database: str, tmp_path: Path):
    """Somebody takes the origin over and gives it back while a plain function of the former epoch still runs here: it
    must not meet its own second attempt."""
    settings = {"lease_seconds": 1.0, "exit_when_fenced": False}
    async with Fleet(database, tmp_path, executor=settings) as fleet, fleet.local(["t/0"]) as executor:
        gate = fleet.gate()
        await fleet.enqueue("thread", ["t/0"], each=2, gate=str(gate))
        await until(lambda: fleet.started(), "the handler to run")
        before = executor.held
        await fleet.execute(
            "UPDATE sidings.origin SET lease_until = clock_timestamp() - interval '1 hour';"
            "SELECT sidings.acquire(gen_random_uuid(), '{t/0}', 0, interval '0.1 s', true)"
        )
        await until(lambda: executor.held == {}, "the loss to be noticed")
        await fleet.fetch("UPDATE sidings.origin SET owner = NULL, lease_until = NULL, epoch = epoch + 1")
        async with fleet.local(["t/1"]) as other:  # time for a pass of the reconciler, and more
            await other.settled(20)
            await fleet.enqueue("step", ["t/1"], each=20, ms=20)
            await until(lambda: left(fleet, 2), "other jobs to end")
        gate.touch()
        await fleet.finish()
        assert executor.held != before
        await executor.stop()
        await fleet.verify()
        assert len(fleet.started(1)) == 2


async def left(fleet: Fleet, jobs: int) -> bool:
    return await fleet.unfinished() == jobs


@pytest.mark.long
@pytest.mark.parametrize("held_up", ["a lost job", "an origin to be released"])
async def test_a_row_that_somebody_has_locked_holds_up_its_own_origin_only(database: str, held_up: str):
    """A person's transaction, say. A takeover waits for it in vain, and so does a release."""
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async with connected(database) as connection:
        dead = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        await connection.fetch("SELECT sidings.acquire($1, $2, 1, interval '1 ms', true)", dead, ORIGINS)
    ids = {name: (await enqueue(database, ride, [Ride()], origin=name))[0] for name in ORIGINS}
    async with connected(database) as connection, connected(database) as person:
        await connection.execute("UPDATE sidings.executor SET running = $1", [*ids.values()])
        locked = ORIGINS[0]
        async with running(database, registry, [], lease_seconds=5.0) as executor, person.transaction():
            if held_up == "a lost job":
                await person.fetch("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", ids[locked])
            else:
                executor.assign([locked], 2)
                await eventually(lambda: locked in executor.held)
                await person.fetch("SELECT FROM sidings.origin WHERE origin = $1 FOR SHARE", locked)
            executor.assign(ORIGINS if held_up == "a lost job" else ORIGINS[1:], 3)
            await eventually(lambda: set(ORIGINS[1:]) <= executor.held.keys(), "the others are acquired")
            assert (locked in executor.held, executor.problems()) == (False, [])
            problems = await eventually(executor.problems, "health says so")
            assert "origins cannot be acquired or released" in problems[0]
            await person.execute("ROLLBACK; BEGIN")
            await executor.settled(SECONDS)
            assert executor.problems() == []


async def test_who_keeps_a_lease_from_being_renewed_is_told(database: str, caplog: pytest.LogCaptureFixture):
    """As does a commit that waits for a standby that is gone. Nothing said why the origin's jobs did not run."""
    async with connected(database) as person, running(database, Registry(), lease_seconds=3.0) as executor:
        why = f"another transaction keeps rows of sidings.origin locked: {ORIGIN}"
        async with person.transaction():
            await person.fetch("SELECT FROM sidings.origin FOR SHARE")
            await eventually(lambda: f"leases could not be renewed, trying again: {why}" in caplog.text, "the log")
            [problem] = await eventually(executor.problems, "the health check")
            assert problem.startswith("leases were last renewed")
            assert problem.endswith(why)
            assert "works again" not in caplog.text
        await eventually(lambda: "works again" in caplog.text and not executor.problems(), "it is over")

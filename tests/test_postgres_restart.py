"""Postgres dies, comes back, or is away for longer than the leases, while handlers run."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import asyncpg
import pytest
from sidings.devstack import Postgres
from sidings.devstack.databases import create_database, ensure_template
from sidings.devstack.fixtures import ServerDirectory

from .chaos_worker import SERVICE
from .faulty_proxy import proxied
from .fleet import AWAY, Fleet, Member, until

ORIGINS = ["t/0", "t/1", "t/2", "t/3"]


@pytest.fixture(scope="module")
def mortal(sidings_server_directory: ServerDirectory) -> Iterator[Postgres]:
    """A server that the tests of this module may kill; making one takes longer than restarting it."""
    server = Postgres(sidings_server_directory("mortal"))
    server.start()
    try:
        yield server
    finally:
        server.remove()


async def prepared(server: Postgres) -> str:
    """The DSN of a new database with the schema."""
    template = await ensure_template(server.dsn, service=SERVICE)
    return await create_database(server.dsn, f"kept_{token_hex(4)}", template=template)


async def test_a_killed_postgres_loses_no_job_and_doubles_none(mortal: Postgres, tmp_path: Path):
    async with Fleet(await prepared(mortal), tmp_path, executor={"lease_seconds": 1.5}) as fleet:
        await fleet.enqueue("step", ORIGINS, groups=6, each=25, ms=15)
        await fleet.enqueue("transfer", ORIGINS, groups=2, each=20, ms=5, group="x")
        members = [fleet.spawn("one", ORIGINS[:2]), fleet.spawn("two", ORIGINS[2:])]
        for _ in range(2):
            seen = len(fleet.started())
            await until(lambda: len(fleet.started()) >= seen + 50, "jobs to run")  # noqa: B023
            await asyncio.to_thread(mortal.kill)
            await asyncio.to_thread(mortal.start)
        await fleet.finish()
        assert [member.exit_code for member in members] == [None, None]
        for member in members:
            await member.stop()
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()  # no executor has died


@pytest.mark.parametrize("how", ["stopped", "paused"])
async def test_postgres_may_be_away_for_longer_than_the_leases(mortal: Postgres, tmp_path: Path, how: str):
    settings = {"lease_seconds": 1.5}
    dsn = await prepared(mortal)
    async with Fleet(dsn, tmp_path, executor=settings, postgres={"call_seconds": 1.0}) as fleet:
        gate = fleet.gate()
        await fleet.enqueue("step", ORIGINS, groups=2, each=2, gate=str(gate))
        members = [fleet.spawn("one", ORIGINS[:2]), fleet.spawn("two", ORIGINS[2:])]
        await until(lambda: len(fleet.started()) == 8, "the first job of each group")
        before = await fleet.owners()
        await asyncio.to_thread(mortal.pause if how == "paused" else mortal.stop)

        def cancelled() -> bool:
            return sum(record["event"] == "end" and record["how"] == "cancelled" for record in fleet.records()) == 8

        await until(cancelled, "the cancellation of all handlers before the leases run out")
        late = fleet.spawn("late", ORIGINS)  # starts without Postgres, and wants everything
        for member in members:
            await until(lambda: outlived(member), f"{member.name} to outlive its leases")  # noqa: B023
        assert "the executor has not reached Postgres yet" in str((await late.ask())["problems"])
        assert [member.exit_code for member in members] == [None, None]
        gate.touch()
        await asyncio.to_thread(mortal.resume if how == "paused" else mortal.start)
        await fleet.finish()
        for member in members:
            await member.stop()
        await late.stop()
        runs = await fleet.verify()
        if how == "stopped":  # nobody trusts another's expiry right after a restart
            assert {run.pid for run in runs} == {member.pid for member in members}
            assert "lost" not in await fleet.outcomes()
            assert {epoch for _, epoch in before.values()} == {row["epoch"] for row in await history(fleet)}


@pytest.mark.parametrize("kind", ["transfer", "nested"])
async def test_open_transactions_of_handlers_do_not_outlive_the_lease_of_a_process_whose_postgres_hangs(
    mortal: Postgres, tmp_path: Path, kind: str
):
    """They are rolled back when the handlers are cancelled, and no answer comes: the watchdog would end the process."""
    dsn = await prepared(mortal)
    async with Fleet(dsn, tmp_path, executor={"lease_seconds": 2.0}, postgres={"call_seconds": 20.0}) as fleet:
        gate = fleet.gate()
        jobs = await fleet.enqueue(kind, ORIGINS, each=2, gate=str(gate))
        member = fleet.spawn("one", ORIGINS)
        await until(lambda: len(fleet.started()) == len(ORIGINS), "the first job of each group")
        await asyncio.to_thread(mortal.pause)
        try:
            await until(lambda: outlived(member), "it to outlive its leases")
            assert member.exit_code is None
        finally:
            await asyncio.to_thread(mortal.resume)
        gate.touch()
        await fleet.finish()
        assert member.exit_code is None
        await member.stop()
        await fleet.verify()
        assert set(await fleet.outcomes()) == {"snoozed", "succeeded"}
        assert await fleet.fetchval("SELECT count(*) FROM public.effect") == len(jobs)


async def outlived(member: Member) -> bool:
    """Whether a process that is alive has not renewed its leases for as long as they last."""
    return any("leases were last renewed" in problem for problem in (await member.ask())["problems"])


async def history(fleet: Fleet) -> list[asyncpg.Record]:
    return await fleet.fetch("SELECT * FROM sidings.job_history")


async def test_right_after_a_restart_nobody_takes_another_expired_lease_for_abandoned(mortal: Postgres, tmp_path: Path):
    """The restart, not the holder's death, may be why it was not renewed: it gets a full lease to come back."""
    dsn = await prepared(mortal)
    async with proxied(dsn) as proxy, Fleet(dsn, tmp_path, executor={"lease_seconds": 10.0}) as fleet:
        holder = fleet.spawn("holder", ORIGINS, dsn=proxy.dsn)
        await fleet.held_by(holder, ORIGINS)
        before = await fleet.owners()
        proxy.cut()
        await fleet.fetch("UPDATE sidings.origin SET lease_until = clock_timestamp() - interval '1 minute'")
        await asyncio.to_thread(mortal.restart)
        eager = fleet.spawn("eager", ORIGINS)

        async def wished() -> bool:
            try:
                return await fleet.fetchval("SELECT bool_and(wanted_by IS NOT NULL) FROM sidings.origin")
            except AWAY:
                return False

        await until(wished, "the wishes of the other")
        proxy.heal()
        await until(lambda: renewed(fleet), "the holder to renew")
        assert await fleet.owners() == before
        await eager.stop()
        await holder.stop()


async def renewed(fleet: Fleet) -> bool:
    return await fleet.fetchval("SELECT bool_and(lease_until > clock_timestamp()) FROM sidings.origin")


async def test_an_executor_that_dies_while_postgres_is_away_is_taken_over_afterwards(mortal: Postgres, tmp_path: Path):
    async with Fleet(await prepared(mortal), tmp_path, executor={"lease_seconds": 1.5}) as fleet:
        gate = fleet.gate()
        await fleet.enqueue("step", ORIGINS, groups=3, each=3, gate=str(gate))
        doomed = fleet.spawn("doomed", ORIGINS)
        await until(lambda: len(fleet.started()) == 12, "the first job of each group")
        heir = fleet.spawn("heir", ORIGINS)
        await asyncio.to_thread(mortal.kill)
        doomed.kill()
        gate.touch()
        await asyncio.to_thread(mortal.start)
        await fleet.finish()
        await heir.stop()
        await fleet.verify()
        assert (await fleet.outcomes()).count("lost") == 12


async def test_enqueues_that_were_cut_by_a_kill_are_there_completely_or_not_at_all(mortal: Postgres, tmp_path: Path):
    async with Fleet(await prepared(mortal), tmp_path, executor={"lease_seconds": 1.5}) as fleet:
        member = fleet.spawn("one", ORIGINS)
        await fleet.held_by(member, ORIGINS)
        failed = 0
        for _ in range(2):
            enqueueing = asyncio.create_task(enqueue_until_it_fails(fleet))
            seen = len(fleet.started())
            await until(lambda: len(fleet.started()) >= seen + 60, "jobs to run")  # noqa: B023
            await asyncio.to_thread(mortal.kill)
            failed += await enqueueing
            await asyncio.to_thread(mortal.start)
        await fleet.finish()
        await member.stop()
        await fleet.verify()  # the ledger is written in the transactions that enqueue: it says which have committed
        assert failed == 2


async def enqueue_until_it_fails(fleet: Fleet) -> int:
    while True:
        try:
            await fleet.enqueue("step", ORIGINS, groups=3, each=1, ms=5)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
            return 1

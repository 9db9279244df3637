"""Connections that are cut or fall silent in the middle of a statement: nothing is lost, nothing is done twice."""

from pathlib import Path

import pytest

from .faulty_proxy import Moment, proxied
from .fleet import Fleet, until

ORIGINS = ["t/0", "t/1", "t/2"]
QUICK = {"call_seconds": 0.7, "connect_seconds": 1.0}


@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name.lower())
@pytest.mark.parametrize("kind", ["cycle", "read", "acquire", "renew", "promote"])
async def test_a_statement_whose_connection_fails_does_no_harm(
    database: str, tmp_path: Path, kind: str, moment: Moment
):
    async with (
        proxied(database) as proxy,
        Fleet(database, tmp_path, worker_dsn=proxy.dsn, executor={"lease_seconds": 1.5}, postgres=QUICK) as fleet,
    ):
        await fleet.enqueue("step", ORIGINS, groups=4, each=5, ms=10)
        await fleet.enqueue("single", ORIGINS, each=4, delay=0.2)
        fault = proxy.arm(kind, moment, times=2)
        async with fleet.local(ORIGINS) as executor:
            await until(lambda: fault.hits == 2, "both faults")
            await fleet.enqueue("flaky", ORIGINS, groups=4, each=2, ms=5, fail=1)
            await fleet.finish()
            await until(lambda: set(executor.held) == set(ORIGINS), "all origins to be held")
        if (kind, moment) != ("acquire", Moment.LATE):  # an orphaned acquire moves the epoch under its own executor
            assert {owner for owner, _ in (await fleet.owners()).values()} == {None}
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()  # nobody has died


@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name.lower())
async def test_a_release_whose_connection_fails_leaves_the_origin_to_its_lease_at_worst(
    database: str, tmp_path: Path, moment: Moment
):
    async with (
        proxied(database) as proxy,
        Fleet(database, tmp_path, worker_dsn=proxy.dsn, executor={"lease_seconds": 1.5}, postgres=QUICK) as fleet,
    ):
        await fleet.enqueue("step", ORIGINS, groups=3, each=10, ms=20)
        async with fleet.local(ORIGINS) as one, fleet.local(dsn=database) as other:
            await one.settled(20)
            await until(lambda: len(fleet.started()) > 10, "jobs to start")
            fault = proxy.arm("release", moment)
            one.assign(["t/0"], 2)
            other.assign(["t/1", "t/2"], 2)
            await until(lambda: fault.hits, "the fault")
            await other.settled(20)
            one.assign(ORIGINS, 3)  # comes back, whatever became of the release
            other.assign([], 3)
            await one.settled(20)
            await fleet.finish()
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()


@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name.lower())
@pytest.mark.parametrize("kind", ["check", "register"])
async def test_an_executor_starts_although_its_first_statements_fail(
    database: str, tmp_path: Path, kind: str, moment: Moment
):
    async with (
        proxied(database) as proxy,
        Fleet(database, tmp_path, worker_dsn=proxy.dsn, postgres=QUICK) as fleet,
    ):
        await fleet.enqueue("step", ORIGINS, groups=2, each=2)
        fault = proxy.arm(kind, moment, times=2)
        async with fleet.local(ORIGINS) as executor:
            await fleet.finish()
            await until(lambda: fault.hits == 2, "both faults")
            assert executor.problems() == []
        await fleet.verify()


@pytest.mark.parametrize("fault", ["cut", "silence"])
async def test_a_lease_that_expires_under_a_living_executor_is_no_loss(database: str, tmp_path: Path, fault: str):
    async with proxied(database) as proxy, Fleet(database, tmp_path, worker_dsn=proxy.dsn, postgres=QUICK) as fleet:
        gate = fleet.gate()
        jobs = await fleet.enqueue("step", ORIGINS, groups=3, each=2, gate=str(gate))
        # It would end itself with code 70 if a handler outlived the lease.
        member = fleet.spawn("cut off", ORIGINS, exit_when_fenced=True)
        await until(lambda: len(fleet.started()) == 9, "the first job of each group")
        before = await fleet.owners()
        getattr(proxy, fault)()
        await until(
            lambda: sum(r["event"] == "end" and r["how"] == "cancelled" for r in fleet.records()) == 9,
            "the cancellation of all handlers",
        )
        await until(lambda: now_expired(fleet), "the end of the lease")
        proxy.heal()
        gate.touch()
        await fleet.finish()
        assert member.exit_code is None
        assert await fleet.owners() == before  # resumed under the same epochs
        await member.stop()
        await fleet.verify()
        assert sorted(await fleet.outcomes()) == ["snoozed"] * 9 + ["succeeded"] * len(jobs)


async def now_expired(fleet: Fleet) -> bool:
    return await fleet.fetchval("SELECT bool_and(lease_until < clock_timestamp()) FROM sidings.origin")


@pytest.mark.parametrize("busy_with", ["an origin that another holds", "a drain"])
async def test_handlers_stop_before_their_deadline_whatever_the_reconciler_waits_for(
    database: str, tmp_path: Path, busy_with: str
):
    """With Postgres silent, an acquire or the cycle before a release takes its time: the deadlines do not wait."""
    async with (
        proxied(database) as proxy,
        Fleet(database, tmp_path, worker_dsn=proxy.dsn, postgres={"call_seconds": 20.0}) as fleet,
        fleet.local(["t/9"], 5, dsn=database) as other,
    ):
        await other.settled(20)
        gate = fleet.gate()
        await fleet.enqueue("step", ORIGINS, groups=3, each=2, gate=str(gate))
        wanted = [*ORIGINS, "t/8", *(["t/9"] if busy_with.startswith("an origin") else [])]
        member = fleet.spawn("cut off", wanted)
        await until(lambda: len(fleet.started()) == 9, "the first job of each group")
        proxy.silence()
        member.assign([name for name in wanted if name != "t/8"], 2)
        await until(
            lambda: sum(r["event"] == "end" and r["how"] == "cancelled" for r in fleet.records()) >= 9,
            "the cancellation of all handlers",
        )
        gate.touch()
        proxy.heal()
        await fleet.finish()
        assert member.exit_code is None
        await member.stop()
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()

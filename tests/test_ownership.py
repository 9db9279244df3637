"""Who holds an origin: assignments, wishes, drains and releases, with several executors that all want the same."""

import asyncio
import random
from collections.abc import Collection
from pathlib import Path

import pytest
from sidings.executor import Executor, now
from sidings.jobs import Job, Registry

from .faulty_proxy import Moment, proxied
from .fleet import Fleet, Member, shares, until
from .support import ORIGIN, SECONDS, Ride, enqueue, eventually, outcomes, running

ORIGINS = ["t/0", "t/1", "t/2", "t/3"]
LONG = 60.0  # a lease that no test waits for


async def wishes(fleet: Fleet, generation: int) -> int:
    """Origins that somebody of this generation wishes to have right now."""
    return await fleet.fetchval(
        "SELECT count(*) FROM sidings.origin WHERE wanted_generation = $1 AND wanted_until > clock_timestamp()",
        generation,
    )


def holds(executor: Executor, origins: Collection[str]) -> bool:
    return set(executor.held) == set(origins)


async def test_a_clean_stop_hands_over_at_once_and_not_after_a_lease(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": LONG}) as fleet:
        await fleet.enqueue("step", ORIGINS, groups=5, each=8, ms=20)
        one = fleet.spawn("one", ORIGINS)
        await until(lambda: len(fleet.started()) > 20, "jobs to run")
        async with fleet.local(ORIGINS) as successor:
            await one.stop()
            await until(lambda: holds(successor, ORIGINS), "the successor to hold everything", timeout=10)
            await fleet.finish()
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()
        assert await fleet.fetchval("SELECT count(*) FROM sidings.executor") == 0


async def test_a_stop_cancels_what_does_not_end_in_time_and_its_job_runs_elsewhere(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": LONG}) as fleet:
        gate = fleet.gate()
        jobs = await fleet.enqueue("step", ["t/0"], groups=3, each=2, gate=str(gate))
        one = fleet.spawn("one", ["t/0"], shutdown_seconds=0.3)
        await until(lambda: len(fleet.started()) == 3, "the first job of each group")
        await one.stop()
        gate.touch()
        async with fleet.local(["t/0"]):
            await fleet.finish()
        await fleet.verify()
        assert sorted(await fleet.outcomes()) == ["snoozed"] * 3 + ["succeeded"] * len(jobs)


async def test_handlers_have_the_time_of_a_stop_also_where_a_newer_generation_waits_for_their_origin(database: str):
    """As at each stop within a group: the instance leaves it first, so that others are assigned its partitions while
    its handlers still run. They were cancelled when the time of a drain was over."""
    registry, begun, go_on = Registry(), asyncio.Event(), asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        begun.set()
        await go_on.wait()

    await enqueue(database, ride, [Ride()])
    options = {"lease_seconds": 1.5, "drain_seconds": 0.0, "shutdown_seconds": SECONDS}
    async with (
        running(database, registry, [ORIGIN, "t/1"], **options) as first,
        running(database, registry, ()) as second,
    ):
        await asyncio.wait_for(begun.wait(), SECONDS)
        busy = first.scheduler.origins[ORIGIN]
        stopping = asyncio.create_task(first.stop())
        await eventually(lambda: first.cycles.paused)
        second.assign([ORIGIN, "t/1"], 2)
        await eventually(lambda: busy.draining, "the first yields")  # with no time for a drain it cancels in that turn
        await eventually(lambda: "t/1" in second.held, "what is idle is handed over at once")
        go_on.set()
        await stopping
        await second.settled(SECONDS)
    assert await outcomes(database) == ["succeeded"]


async def test_two_believers_of_one_generation_leave_each_other_alone(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 3.0}) as fleet, fleet.local(ORIGINS, 3) as one:
        await one.settled(20)
        before = one.held
        await fleet.enqueue("step", ORIGINS, groups=4, each=10, ms=10)
        async with fleet.local(ORIGINS, 3) as other:
            await until(lambda: wishes(fleet, 3), "wishes of the other")
            await fleet.finish()
            await time_passes(fleet, 1.2)
            assert one.held == before
            assert other.held == {}
            assert len({record["executor"] for record in fleet.started()}) == 1
            await one.stop()
            await until(lambda: holds(other, ORIGINS), "the other to hold everything")
        await fleet.verify()


async def test_who_waits_for_a_live_holder_leaves_the_rows_of_its_origins_alone(database: str, tmp_path: Path):
    """As all but one of the instances with one static assignment do, for as long as they live: each locked and wrote
    every row anew ten times a second, to wish what stood there as its wish."""
    track = "DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET track_functions = pl', current_database()); END$$"
    looks = "SELECT coalesce(sum(calls), 0)::int FROM pg_stat_user_functions WHERE funcname = 'acquire'"
    rows = "SELECT ctid, xmin, xmax, wanted_by FROM sidings.origin ORDER BY origin"
    async with Fleet(database, tmp_path, executor={"lease_seconds": 3600.0}) as fleet:
        await fleet.fetch(track)
        async with fleet.local(ORIGINS, 0) as one:
            await one.settled(20)
            async with fleet.local(ORIGINS, 0) as other:
                await until(lambda: wishes(fleet, 0), "wishes of the other")
                before = await fleet.fetch(rows)
                assert [row["wanted_by"] for row in before] == [other.id] * len(ORIGINS)
                async with fleet.local(ORIGINS, 0):
                    looked = await fleet.fetchval(looks)

                    async def many_more() -> bool:
                        return await fleet.fetchval(looks) > looked + 30

                    await until(many_more, "both to look again and again")
                    assert await fleet.fetch(rows) == before


async def time_passes(fleet: Fleet, leases: float) -> None:
    """Return when every lease ends so many leases later than any did before: all have been renewed meanwhile."""
    before = await fleet.fetchval("SELECT max(lease_until) FROM sidings.origin")

    async def later() -> bool:
        after = await fleet.fetchval("SELECT min(lease_until) FROM sidings.origin")
        return (after - before).total_seconds() > leases * fleet.lease_seconds

    await until(later, f"{leases} leases to pass")


async def test_a_holder_yields_to_a_newer_generation_and_never_takes_back(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 2.0}) as fleet, fleet.local(ORIGINS, 3) as stale:
        await stale.settled(20)
        await fleet.enqueue("step", ORIGINS, groups=4, each=10, ms=20)
        await until(lambda: len(fleet.started()) > 8, "jobs to run")
        async with fleet.local(ORIGINS, 4) as rightful:
            await until(lambda: holds(rightful, ORIGINS), "the newer generation to hold everything")
            epochs = rightful.held
            await fleet.finish()
            await time_passes(fleet, 2.5)
            assert rightful.held == epochs
            assert stale.held == {}
            # A new assignment of its own puts the stale one in the right again.
            stale.assign(ORIGINS[:2], 5)
            rightful.assign(ORIGINS[2:], 5)
            await stale.settled(20)
            await rightful.settled(20)
            assert holds(stale, ORIGINS[:2])
            assert holds(rightful, ORIGINS[2:])
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()


async def test_a_holder_that_has_yielded_takes_over_where_the_newer_one_goes_and_no_assignment_follows(
    database: str, tmp_path: Path
):
    """As where the newer one was of another consumer group, whose generations are others: of a release that was tried
    beside this one, with another `KafkaSettings.group`, and taken back."""
    async with Fleet(database, tmp_path, executor={"lease_seconds": 2.0}) as fleet, fleet.local(ORIGINS, 3) as former:
        await former.settled(20)
        async with fleet.local(ORIGINS, 4) as newer:
            await until(lambda: holds(newer, ORIGINS), "the newer generation to hold everything")
            await time_passes(fleet, 2.5)
            assert former.held == {}
        jobs = await fleet.enqueue("step", ORIGINS, groups=2, each=2)
        await until(lambda: holds(former, ORIGINS), "the former holder to hold everything again")
        await fleet.finish()
        await fleet.verify()
        assert await fleet.outcomes() == ["succeeded"] * len(jobs)


async def test_a_process_that_was_paused_through_a_rebalance_never_plays_ping_pong(database: str, tmp_path: Path):
    """Three believers, of generations 1, 1 and 2, the first asleep when the third came."""
    async with Fleet(database, tmp_path, executor={"lease_seconds": 2.0}) as fleet:
        await fleet.enqueue("step", ORIGINS, groups=4, each=20, ms=20)
        asleep = fleet.spawn("asleep", ORIGINS, 1, exit_when_fenced=False)
        await fleet.held_by(asleep, ORIGINS)
        asleep.pause()
        async with fleet.local(ORIGINS, 1) as stale, fleet.local(ORIGINS, 2) as rightful:
            await until(lambda: holds(rightful, ORIGINS), "the newest generation to hold everything")
            epochs = rightful.held
            asleep.resume()
            await fleet.finish()
            await time_passes(fleet, 2.5)
            assert rightful.held == epochs
            assert stale.held == {}
            assert (await asleep.ask())["held"] == {}
            await asleep.stop()
        await fleet.verify()


async def test_an_origin_that_comes_back_while_it_drains_resumes_under_its_epoch(database: str, tmp_path: Path):
    async with (
        Fleet(database, tmp_path, executor={"lease_seconds": LONG, "drain_seconds": LONG}) as fleet,
        fleet.local(["t/0", "t/1"], 1) as executor,
    ):
        gate = fleet.gate()
        jobs = await fleet.enqueue("step", ["t/0", "t/1"], groups=3, each=3, gate=str(gate))
        await until(lambda: len(fleet.started()) == 6, "the first job of each group")
        before = executor.held
        executor.assign(["t/1"], 2)
        await until(lambda: "t/0" not in executor.held, "the drain")
        executor.assign(["t/0", "t/1"], 3)
        await until(lambda: executor.held == before, "the origin to come back")
        gate.touch()
        await fleet.finish()
        await fleet.verify()
        assert await fleet.outcomes() == ["succeeded"] * len(jobs)
        assert {epoch for _, epoch in (await fleet.owners()).values()} == set(before.values())


async def test_a_drain_ends_although_cycles_were_about_to_start_jobs_of_the_origin(database: str, tmp_path: Path):
    """Jobs that a cycle in flight names when the drain begins must not be chosen again and again."""
    async with (
        Fleet(database, tmp_path, executor={"lease_seconds": LONG, "drain_seconds": LONG, "concurrency": 4}) as fleet,
        fleet.local(ORIGINS, 1) as executor,
    ):
        await fleet.enqueue("single", ORIGINS, each=500, ms=1)
        await fleet.enqueue("step", ORIGINS, groups=50, each=4, ms=1)
        for generation in range(2, 12):
            await until(lambda: len(fleet.started()) > 60 * (generation - 1), "jobs to run")  # noqa: B023
            executor.assign([], generation)
            await executor.settled(5)
            assert await fleet.fetchval("SELECT count(*) FROM sidings.origin WHERE owner IS NOT NULL") == 0
            executor.assign(ORIGINS, generation)
        await fleet.finish()
        await fleet.verify()


async def test_settled_means_the_latest_assignment_even_while_an_acquire_is_under_way(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": LONG}) as fleet, fleet.local() as executor:
        for generation in range(1, 30):
            executor.assign(random.sample(ORIGINS, 2), generation)
            await asyncio.sleep(random.uniform(0, 0.01))
            chosen = random.sample(ORIGINS, 2)
            executor.assign(chosen, generation)
            await executor.settled(10)
            assert holds(executor, chosen)
            assert set(await owned(fleet, executor)) == set(chosen)


async def owned(fleet: Fleet, executor: Executor) -> list[str]:
    rows = await fleet.fetch("SELECT origin FROM sidings.origin WHERE owner = $1", executor.id)
    return [row["origin"] for row in rows]


@pytest.mark.long
async def test_reassignments_in_a_row_lose_nothing_while_three_four_and_two_processes_work(
    database: str, tmp_path: Path
):
    origins = [f"t/{number}" for number in range(100)]
    async with Fleet(database, tmp_path, executor={"lease_seconds": 3.0, "drain_seconds": 0.3}) as fleet:
        members = [fleet.spawn(name) for name in ("one", "two", "three")]
        generation = 1

        def assign(to: list[Member]) -> dict[Member, list[str]]:
            nonlocal generation
            generation += 1
            dealt = shares(random.sample(origins, len(origins)), to)
            for member, share in dealt.items():
                member.assign(share, generation)
            return dealt

        dealt = assign(members)
        for phase in range(7):
            await fleet.enqueue("step", origins, groups=2, each=2, ms=15)
            await fleet.enqueue("flaky", origins, each=1, ms=5, fail=1, group="f")
            if phase == 1:
                members.append(fleet.spawn("four"))
            elif phase == 4 or phase == 5:
                leaving = members.pop(0)
                dealt = assign(members)
                await leaving.stop()
            else:
                dealt = assign(members)
            if phase % 2:  # every other time the next one comes before this one has settled
                for member, share in dealt.items():
                    await fleet.held_by(member, share)
        await fleet.finish()
        for member, share in dealt.items():
            await fleet.held_by(member, share)
            await member.stop()
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()


async def test_an_origin_that_came_back_while_it_drained_is_released_after_a_cycle_of_the_new_drain(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Between the cycle that was waited for and the release, another one may have named its jobs."""
    async with running(database, Registry()) as executor:
        barrier, calls = executor.cycles.barrier, 0

        async def coming_back() -> None:
            nonlocal calls
            calls += 1
            await barrier()
            if calls == 1:
                for origins in (frozenset({ORIGIN}), frozenset[str]()):
                    executor.assign(origins, 1)
                    executor._reconciler._turn(origins)

        monkeypatch.setattr(executor.cycles, "barrier", coming_back)
        executor.assign([], 1)
        await executor.settled(SECONDS)
        assert not executor.scheduler.origins
        assert calls == 2


async def test_an_origin_is_not_taken_again_before_the_cycle_that_names_its_jobs_is_known_to_have_ended(database: str):
    types, ran = Registry(), list[int]()

    @types.job(name="step")
    async def step(job: Job[dict[str, int]]) -> None:
        ran.append(job.id)

    async with proxied(database) as proxy, running(proxy.dsn, types, ORIGINS[:2]) as executor:
        held = proxy.arm("cycle", Moment.HELD)
        jobs = await enqueue(database, step, [{"n": 1}], origin="t/0")
        await eventually(lambda: held.hits, "the cycle that names the job")
        for origin in ORIGINS[:2]:
            executor._reconciler.lost({origin: None})
        await eventually(lambda: "t/1" in executor.held, "the other one to be taken again")
        assert "t/0" not in executor.held
        proxy.let_go()
        await executor.settled(SECONDS)
        await eventually(lambda: ran, "the job")
        assert holds(executor, ORIGINS[:2])
    assert ran == jobs


async def test_a_drain_is_over_when_its_origin_comes_back_or_is_lost(database: str):
    """Else it would be looked at for ever, fifty times a second, and nothing be settled any more."""
    types, began = Registry(), asyncio.Event()

    @types.job(name="step")
    async def step(job: Job[dict[str, int]]) -> None:
        began.set()
        await asyncio.sleep(SECONDS)

    async with running(database, types, drain_seconds=LONG) as executor:
        await enqueue(database, step, [{"n": 1}])
        await began.wait()
        for generation in (2, 4):
            executor.assign([], generation)
            await eventually(lambda: all(queue.draining for queue in executor.scheduler.origins.values()), "the drain")
            if generation == 2:
                executor.assign([ORIGIN], 3)
                await executor.settled(10)
                executor._reconciler.lost({ORIGIN: executor.held[ORIGIN] - 1})  # news of before
                assert executor.held
        executor._reconciler.lost({ORIGIN: None})
        await executor.settled(10)


async def test_what_is_named_does_not_start_once_the_lease_has_run_out(database: str):
    """The worker's own look, the last before a handler: all others lie before the cycle was acknowledged."""
    types, in_time, ended = Registry(), list[bool](), list[int]()

    @types.job(name="step")
    async def step(job: Job[dict[str, int]]) -> None:
        queue = executor.scheduler.origins[ORIGIN]
        in_time.append(now() < queue.deadline)
        if not ended and len(queue.running) > 1:  # others are named, and the worker comes to them next
            queue.deadline = now()
            ended.append(len(in_time))

    async with running(database, types, concurrency=1, lease_seconds=1.5) as executor:
        await enqueue(database, step, [{"n": n} for n in range(500)])
        await eventually(lambda: len(in_time) == 500, "the lease to be renewed, or taken again")
    assert ended
    assert all(in_time)


async def test_of_the_jobs_that_are_named_none_starts_once_its_origin_drains(database: str):
    """They run at the next owner at once: here they would keep it waiting until the drain is cut off."""
    types, ran, go_on = Registry(), list[int](), asyncio.Event()

    @types.job(name="step")
    async def step(job: Job[dict[str, int]]) -> None:
        ran.append(job.id)
        await go_on.wait()

    async with running(database, types, concurrency=1, drain_seconds=LONG) as executor:
        executor.cycles._ahead = 100.0  # as after quick ones
        await enqueue(database, step, [{"n": n} for n in range(5)])
        await eventually(lambda: ran and executor.workers.claimed, "jobs to be named beside the one that runs")
        executor.assign([], 2)
        await eventually(lambda: all(queue.draining for queue in executor.scheduler.origins.values()), "the drain")
        go_on.set()
        await executor.settled(SECONDS)
        assert len(ran) == 1
        assert executor._leases.held() == [], "a lease that has been released is not renewed"

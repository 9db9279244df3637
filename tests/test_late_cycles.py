"""Cycles that arrive when nobody waits for them any more, or when their sender has been taken over. The session's
process in the server has stood still, say, or the network on the way there; the sender may sleep as well."""

from pathlib import Path

import pytest
from sidings.executor import cycles

from .faulty_proxy import Moment, proxied
from .fleet import Fleet, until

SESSIONS = """
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND query LIKE '%begin_cycle%' AND pid <> pg_backend_pid()
"""
OVER = """
    SELECT bool_or(query_start > $2) AND bool_and(state = 'idle') FROM pg_stat_activity WHERE pid = ANY ($1)
"""


@pytest.mark.parametrize("kind", ["step", "flaky", "many"])
async def test_a_cycle_that_arrives_after_a_takeover_changes_nothing(database: str, tmp_path: Path, kind: str):
    """It brings the outcome of an attempt that was lost meanwhile, and names a job that runs elsewhere."""
    async with proxied(database) as proxy, Fleet(database, tmp_path) as fleet:
        gate = fleet.gate()
        asleep = fleet.spawn("asleep", ["t/0"], dsn=proxy.dsn)
        await prepared(fleet)
        former, following = await fleet.enqueue(kind, ["t/0"], each=2, gate=str(gate), fail=1)
        await until(lambda: fleet.started(former), "the first job")
        cycle = proxy.arm("cycle", Moment.KEPT)
        gate.touch()
        await until(lambda: cycle.hits, "its outcome, on the way")
        asleep.pause()
        gate.unlink()
        sessions = [row["pid"] for row in await fleet.fetch(SESSIONS)]
        heir = fleet.spawn("heir", ["t/0"])
        await until(lambda: fleet.started(former, pid=heir.pid), "the same job elsewhere")
        before = await standing(fleet, asleep.pid)
        let_go_at = await fleet.fetchval("SELECT clock_timestamp()")
        proxy.let_go()
        await until(lambda: fleet.fetchval(OVER, sessions, let_go_at), "the end of the cycle")
        assert await standing(fleet, asleep.pid) == before
        assert before["jobs"] == [(former, 2), (following, 1)]
        assert before["running"] == []

        asleep.resume()
        gate.touch()
        await fleet.finish()
        assert (await asleep.ask())["held"] == {}
        await heir.stop()
        await asleep.stop()
        await fleet.verify()


async def prepared(fleet: Fleet) -> None:
    """The statement has been prepared. Else the server counts its time from there, and ends it when it is kept."""
    await fleet.enqueue("single", ["t/0"])
    await fleet.finish()


async def standing(fleet: Fleet, pid: int) -> dict[str, object]:
    """What the database says of an executor, and of all jobs."""
    (row,) = await fleet.fetch("SELECT cycle, running FROM sidings.executor WHERE pid = $1", pid)
    jobs = await fleet.fetch("SELECT id, attempt FROM sidings.job ORDER BY id")
    return dict(row) | {"jobs": [tuple(job) for job in jobs]}


async def test_the_older_of_two_cycles_arrives_when_both_have_been_given_up(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """While it is looked up what has become of them. Their outcomes go out again as one, under the number of the older:
    if that came through now, it would pass for the new one, and what the younger was to record would be forgotten."""
    monkeypatch.setattr(cycles, "_ENOUGH", 1)
    async with proxied(database) as proxy, Fleet(database, tmp_path, worker_dsn=proxy.dsn) as fleet:
        one, other, rest = fleet.gate("one"), fleet.gate("other"), fleet.gate("rest")
        async with fleet.local(["t/0"], lease_seconds=20.0) as executor:
            await prepared(fleet)
            await fleet.enqueue("step", ["t/0"], group="one", gate=str(one))
            await fleet.enqueue("step", ["t/0"], group="other", gate=str(other))
            for group in ("one", "other"):
                await fleet.enqueue("step", ["t/0"], group=group, gate=str(rest))
            await until(lambda: len(fleet.started()) == 3, "the first job of each group")
            older = proxy.arm("cycle", Moment.KEPT)
            one.touch()
            await until(lambda: older.hits, "the older cycle")
            younger = proxy.arm("cycle", Moment.BEFORE)
            looking = proxy.arm("standing", Moment.SLOW)
            other.touch()
            await until(lambda: younger.hits, "the younger cycle")
            await until(lambda: looking.hits, "a look at what has become of them")
            proxy.let_go()
            rest.touch()
            await fleet.finish()
            await until(lambda: executor.cycles.busy_seconds() == 0, "the last answer")
        await fleet.verify()
        assert await fleet.outcomes() == ["succeeded"] * 5

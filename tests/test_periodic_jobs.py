"""Periodic jobs on a real Postgres: one job per tick, whoever fires it, and what becomes of missed ticks."""

import asyncio
import math
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sidings import Admin, Job, Registry, Tick
from sidings.errors import PostgresUnavailable
from sidings.executor import periodic
from sidings.executor.periodic import PeriodicLoop
from sidings.schema import load_sql

from .admin_support import a_holder
from .support import connected, eventually, fetch, jobs_left, running, value

WORKER = Path(__file__).with_name("periodic_worker.py")
LONG_AGO = timedelta(hours=3)


class Ticks:
    """Declares periodic jobs and records what they got."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.jobs: dict[str, list[Job[Tick]]] = defaultdict(list)
        self.gate = asyncio.Event()
        self.gate.set()

    def declare(self, name: str, cron: str | None = None, **options: Any) -> None:
        async def handler(job: Job[Tick]) -> None:
            self.jobs[job.type].append(job)
            await self.gate.wait()

        self.registry.periodic(cron, name=name, **options)(handler)

    async def ran(self, name: str, count: int) -> list[Job[Tick]]:
        """The jobs of that name, once there are so many."""
        await eventually(lambda: len(self.jobs[name]) >= count, lambda: f"{count} x {name}: {self.jobs}")
        return self.jobs[name]


def times(jobs: list[Job[Tick]]) -> list[datetime]:
    return [job.payload.scheduled_at for job in jobs]


def assert_one_row_of_ticks(jobs: list[Job[Tick]]) -> None:
    """Each tick has one job, and each job knows its predecessor: nothing is left out, nothing comes twice."""
    ticks = times(jobs)
    assert ticks == sorted(set(ticks))
    assert len({job.id for job in jobs}) == len(jobs)
    assert [job.payload.previous for job in jobs[1:]] == ticks[:-1]


async def row(dsn: str, name: str, origin: str = "") -> Any:
    rows = await fetch(dsn, "SELECT * FROM sidings.periodic WHERE name = $1 AND origin = $2", name, origin)
    return rows[0] if rows else None


async def remember(dsn: str, name: str, schedule: str, last_tick: datetime | None, origin: str = "", **columns: Any):
    """The row that an earlier run of the service has left."""
    async with connected(dsn) as connection:
        await connection.execute(
            """INSERT INTO sidings.periodic (name, origin, schedule, since, last_tick, job_origin, seen_at)
               VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp() - $7::interval)""",
            name,
            origin,
            schedule,
            datetime(2026, 1, 1, tzinfo=UTC),
            last_tick,
            columns.get("job_origin"),
            columns.get("unseen", timedelta(0)),
        )


async def half_an_hour_away(dsn: str) -> tuple[str, datetime]:
    """An hourly cron expression whose latest tick was half an hour ago by the server's clock, and that tick."""
    now: datetime = await value(dsn, "SELECT clock_timestamp()")
    latest = (now.astimezone(UTC) - timedelta(minutes=30)).replace(second=0, microsecond=0)
    return f"{latest.minute} * * * *", latest


# -- one job per tick ---------------------------------------------------------------------------------------------


async def test_each_tick_becomes_one_job_although_several_executors_try(database: str) -> None:
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    async with running(database, ticks.registry, ["t/0"]), running(database, ticks.registry, ["t/1"]):
        jobs = await ticks.ran("often", 8)
    assert_one_row_of_ticks(jobs)
    assert jobs[0].payload.previous is None
    assert all(tick.timestamp() * 5 % 1 == 0 for tick in times(jobs))
    assert {(job.origin, job.group) for job in jobs} == {("t/0", "often")}
    assert all(job.payload.scheduled_at <= job.enqueued_at for job in jobs)


async def test_a_job_per_origin_is_fired_in_each_origin_by_its_holder(database: str) -> None:
    ticks = Ticks()
    ticks.declare("sweep", every=0.2, per="origin")
    async with running(database, ticks.registry, ["t/0", "t/1"]), running(database, ticks.registry, ["t/2"]):
        await eventually(lambda: all(len(of_origin(ticks.jobs["sweep"], f"t/{n}")) >= 3 for n in range(3)))
    for origin in ("t/0", "t/1", "t/2"):
        assert_one_row_of_ticks(of_origin(ticks.jobs["sweep"], origin))
        assert (await row(database, "sweep", origin))["job_origin"] == origin


def of_origin(jobs: list[Job[Tick]], origin: str) -> list[Job[Tick]]:
    return [job for job in jobs if job.origin == origin]


async def test_an_origin_that_is_acquired_later_gets_its_ticks_too(database: str) -> None:
    ticks = Ticks()
    ticks.declare("sweep", every=0.2, per="origin")
    async with running(database, ticks.registry, ["t/0"]) as executor:
        await ticks.ran("sweep", 1)
        executor.assign(["t/0", "t/1"], 2)
        await eventually(lambda: len(of_origin(ticks.jobs["sweep"], "t/1")) >= 2)


async def test_an_origin_that_goes_away_while_ticks_are_fired_keeps_no_other_waiting(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = Ticks()
    for name in ("first", "second"):
        ticks.declare(name, every=0.2, per="origin")
    async with running(database, ticks.registry, ["t/0", "t/1"]) as executor:
        fire, without = executor._periodic._fire_origins, list[str]()

        async def going_away(name: str, due: list[Any]) -> None:
            """An answer has been waited for since it was seen what is due."""
            if name == "second" and not without and "t/1" in {row.origin for row, _ in due}:
                without.append("t/1")
                executor.assign(["t/0"], 2)
                await executor.settled(20)
            await fire(name, due)

        monkeypatch.setattr(executor._periodic, "_fire_origins", going_away)
        await eventually(lambda: without)
        count = len(of_origin(ticks.jobs["second"], "t/0"))
        await eventually(lambda: len(of_origin(ticks.jobs["second"], "t/0")) >= count + 3)
    assert_one_row_of_ticks(of_origin(ticks.jobs["second"], "t/0"))


async def test_a_superseded_holder_fires_nothing(database: str) -> None:
    """The statement itself is fenced: whatever a process that was paused believes."""
    ticks = Ticks()
    tick, since = datetime(2026, 5, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    await remember(database, "sweep", "daily", None, "t/0")
    async with running(database, ticks.registry, ["t/0"]) as executor, connected(database) as connection:
        epoch = executor.held["t/0"]
        for me, its_epoch, fired in ((executor.id, epoch - 1, []), (executor.id, epoch, ["t/0"])):
            rows = await connection.fetch(
                load_sql("sidings.executor", "fire_origins"),
                me, "sweep", "daily", ["t/0"], [its_epoch], [since], [None], [tick], True, ["t/0"], ["{}"],
            )  # fmt: skip
            assert [answer["origin"] for answer in rows if answer["fired"]] == fired
    assert (await row(database, "sweep", "t/0"))["last_tick"] == tick


async def test_no_tick_is_fired_twice_or_before_its_time_or_of_a_schedule_that_was_replaced_since(
    database: str,
) -> None:
    """Nor where that has come back, as in a rolling deployment: what it has missed in between does not count."""
    ticks = Ticks()
    tick, since = datetime(2026, 5, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    await remember(database, "sweep", "daily", None)
    await remember(database, "sweep", "daily", None, "t/0")
    async with running(database, ticks.registry, ["t/0"]) as executor, connected(database) as connection:
        to_come = datetime.now(UTC) + timedelta(hours=1)
        [answer] = await connection.fetch(
            load_sql("sidings.executor", "fire_origins"),
            executor.id, "sweep", "daily", ["t/0"], [executor.held["t/0"]], [since], [None], [to_come], False,
            ["t/0"], ["{}"],
        )  # fmt: skip
        assert not answer["fired"]  # an executor's clock may be ahead of the server's
        for its_since, fired in ((since - timedelta(days=1), None), (since, "t/0"), (since, None)):
            row = await connection.fetchrow(
                load_sql("sidings.executor", "fire_service"),
                "sweep", "daily", its_since, None, tick, None, False, ["{}"],
            )  # fmt: skip
            assert row is not None
            assert row["fired"] == fired
            [answer] = await connection.fetch(
                load_sql("sidings.executor", "fire_origins"),
                executor.id, "sweep", "daily", ["t/0"], [executor.held["t/0"]], [its_since], [None], [tick], False,
                ["t/0"], ["{}"],
            )  # fmt: skip
            assert answer["fired"] == (fired is not None)


async def test_of_two_that_fire_a_tick_at_once_the_second_finds_it_fired(database: str) -> None:
    """It waits for the first, and looks at what that has left."""
    await remember(database, "sweep", "daily", None, job_origin="t/0")
    since = datetime(2026, 1, 1, tzinfo=UTC)
    its = "sweep", "daily", since, None, datetime(2026, 5, 1, tzinfo=UTC), "t", False, ["{}"]
    fire = load_sql("sidings.executor", "fire_service")
    await fetch(database, "INSERT INTO sidings.topic (topic, partitions) VALUES ('t', 1)")
    async with connected(database) as one, connected(database) as other:
        async with one.transaction():
            first = await one.fetchrow(fire, *its)
            firing = asyncio.create_task(other.fetchrow(fire, *its))
            blocked = "SELECT cardinality(pg_blocking_pids($1)) > 0"
            await eventually(lambda: value(database, blocked, other.get_server_pid()), "it waits")
        second = await firing
    assert first is not None
    assert second is not None
    assert (first["fired"], second["fired"]) == ("t/0", None)
    assert await jobs_left(database) == 1


@pytest.mark.parametrize("hours", [-1, 1])
async def test_the_servers_clock_decides_what_is_due(
    database: str, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """One executor takes its clock for that of another hour; another one is right."""
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    async with running(database, ticks.registry, ["t/0"]) as wrong, running(database, ticks.registry, ["t/1"]):
        learn = wrong._periodic._learn_clock

        def mistake(server: datetime, sent: float) -> None:
            learn(server + timedelta(hours=hours), sent)

        monkeypatch.setattr(wrong._periodic, "_learn_clock", mistake)
        count = len(await ticks.ran("often", 3))
        jobs = await ticks.ran("often", count + 6)
    assert_one_row_of_ticks(jobs)
    assert all(job.payload.scheduled_at <= job.enqueued_at for job in jobs)
    # None is made up for late, as they would be if the one in the past had fired them.
    assert all(job.enqueued_at - job.payload.scheduled_at < timedelta(minutes=5) for job in jobs)


async def test_one_that_cannot_be_fired_keeps_no_other_waiting(database: str, caplog: pytest.LogCaptureFixture) -> None:
    ticks = Ticks()
    ticks.declare("first", every=0.2)
    ticks.declare("second", every=0.2)
    async with connected(database) as connection, running(database, ticks.registry) as executor:
        await connection.execute(
            """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
               CREATE TRIGGER refuse BEFORE INSERT ON sidings.job FOR EACH ROW WHEN (NEW.type = 'first')
               EXECUTE FUNCTION refuse()"""
        )
        await eventually(lambda: "first: a tick could not be fired, trying again: not this one" in caplog.text)
        count = len(ticks.jobs["second"])
        await ticks.ran("second", count + 3)
        executor._periodic.outages["first"]._since -= 60
        [problem] = executor.problems()
        assert problem.startswith("first cannot be fired, for 6")
        assert "not this one" in problem
        assert caplog.text.count("first: a tick could not be fired") == 1
        count = len(ticks.jobs["first"])
        await connection.execute("DROP TRIGGER refuse ON sidings.job")
        assert_one_row_of_ticks(await ticks.ran("first", count + 2))
        assert executor.problems() == []


async def test_neither_what_is_not_due_nor_what_fails_is_looked_at_without_pause(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the event loop, or Postgres, for itself."""
    ticks = Ticks()
    hourly, latest = await half_an_hour_away(database)
    for name in ("hourly", "replaced", "failing"):
        ticks.declare(name, hourly)
    last = {"hourly": latest, "replaced": latest, "failing": latest - LONG_AGO}
    for name, tick in last.items():
        await remember(database, name, f"{hourly}, UTC", tick)
    async with connected(database) as connection, running(database, ticks.registry) as executor:
        await ticks.ran("failing", 1)
        loop = executor._periodic
        await connection.execute(
            """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
               CREATE TRIGGER refuse BEFORE INSERT ON sidings.job FOR EACH ROW EXECUTE FUNCTION refuse();
               UPDATE sidings.periodic SET last_tick = NULL WHERE name = 'failing';
               UPDATE sidings.periodic SET schedule = 'another' WHERE name = 'replaced'"""
        )
        loop._look_at = 0.0
        await eventually(lambda: loop.outages.keys() == {"failing"} and not loop._rows["replaced", ""].in_force)
        turns, asked = list[None](), list[str]()
        fire, fetch, fetchrow = loop._fire, loop._link.fetch, loop._link.fetchrow
        monkeypatch.setattr(loop, "_fire", lambda: (turns.append(None), fire())[1])
        monkeypatch.setattr(loop._link, "fetch", lambda query, *its: (asked.append(query), fetch(query, *its))[1])
        monkeypatch.setattr(loop._link, "fetchrow", lambda query, *its: (asked.append(query), fetchrow(query, *its))[1])
        for its in loop._rows.values():
            its.try_at = 0.0
        await asyncio.sleep(1.0)  # in which there are four pauses, and two tries
        assert len(turns) < 20
        assert len(asked) < 5


async def test_an_instance_without_an_origin_waits_for_one_without_a_core_for_itself(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With jobs per origin only it has no row, and went round without a pause."""
    ticks, pauses = Ticks(), list[float]()
    ticks.declare("sweep", every=0.2, per="origin")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(periodic, "asyncio", SimpleNamespace(sleep=sleep))
    async with running(database, ticks.registry, []) as executor:
        await eventually(lambda: len(pauses) >= 3)
        assert set(pauses) == {periodic._PAUSE_SECONDS}
        executor.assign(["t/0"], 2)
        await ticks.ran("sweep", 2)


async def test_what_cannot_be_fired_in_an_origin_that_goes_away_is_no_problem_here_any_more(database: str) -> None:
    ticks = Ticks()
    ticks.declare("sweep", every=0.2, per="origin")
    async with connected(database) as connection:
        await connection.execute(
            """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not here'; END $$;
               CREATE TRIGGER refuse BEFORE INSERT ON sidings.job FOR EACH ROW EXECUTE FUNCTION refuse()"""
        )
        async with running(database, ticks.registry, ["t/0"]) as executor:
            await eventually(lambda: "sweep" in executor._periodic.outages)
            executor._periodic.outages["sweep"]._since -= 60
            assert any("sweep cannot be fired" in problem for problem in executor.problems())
            executor.assign([], 2)
            await executor.settled(20)
            await eventually(lambda: executor.problems() == [], lambda: executor.problems())


# -- death and takeover -------------------------------------------------------------------------------------------


@contextmanager
def worker(dsn: str, *origins: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(WORKER), dsn, *origins])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_no_tick_is_lost_or_comes_twice_when_executors_die_or_sleep(database: str) -> None:
    async with connected(database) as connection:
        await connection.execute(
            "CREATE TABLE ran (job bigint, type text, origin text, tick timestamptz, previous timestamptz, pid int)"
        )

        async def rounds(pid: int, more: int = 3) -> None:
            """Wait until this process has run so many more ticks in each of the two ways."""
            count = "SELECT count(*) FROM ran WHERE pid = $1 AND type = $2"
            before = {kind: await connection.fetchval(count, pid, kind) for kind in ("each_service", "each_origin")}

            async def enough() -> bool:
                now = [await connection.fetchval(count, pid, kind) - before[kind] for kind in before]
                return min(now) >= more

            await eventually(enough, f"{more} ticks run by {pid}")

        origins = ["t/0", "t/1"]
        with worker(database, *origins) as first, worker(database, *origins) as second:
            holder = await eventually(lambda: owner(connection, origins), "one process to hold both origins")
            victim, heir = (first, second) if holder == first.pid else (second, first)
            await rounds(victim.pid)
            victim.kill()
            await rounds(heir.pid)
            with worker(database, *origins) as third:
                heir.send_signal(signal.SIGSTOP)
                await rounds(third.pid)
                heir.send_signal(signal.SIGCONT)
                await rounds(third.pid)
        for kind, where in (("each_service", "%"), ("each_origin", "t/0"), ("each_origin", "t/1")):
            query = "SELECT * FROM ran WHERE type = $1 AND origin LIKE $2 ORDER BY tick"
            ran = await connection.fetch(query, kind, where)
            ticks = [record["tick"] for record in ran]
            assert len(set(ticks)) == len(ticks) == len({record["job"] for record in ran})
            assert [record["previous"] for record in ran] == [None, *ticks[:-1]]


async def owner(connection: Any, origins: list[str]) -> int | None:
    """The process that holds all of these."""
    rows = await connection.fetch(
        "SELECT e.pid FROM sidings.origin o JOIN sidings.executor e ON e.id = o.owner WHERE o.origin = ANY ($1)",
        origins,
    )
    return rows[0]["pid"] if len(rows) == len(origins) and len({record["pid"] for record in rows}) == 1 else None


# -- missed ticks -------------------------------------------------------------------------------------------------


async def test_the_first_start_makes_up_for_nothing(database: str) -> None:
    ticks = Ticks()
    hourly, _ = await half_an_hour_away(database)
    ticks.declare("hourly", hourly, missed="all")
    ticks.declare("often", every=0.2)
    started = await value(database, "SELECT clock_timestamp()")
    async with running(database, ticks.registry):
        jobs = await ticks.ran("often", 3)
    assert not ticks.jobs["hourly"]
    assert (await row(database, "hourly"))["last_tick"] is None
    assert jobs[0].payload.scheduled_at > started


async def test_one_job_stands_for_all_missed_ticks(database: str) -> None:
    ticks = Ticks()
    hourly, latest = await half_an_hour_away(database)
    ticks.declare("hourly", hourly)
    ticks.declare("often", every=0.2)
    await remember(database, "hourly", f"{hourly}, UTC", latest - LONG_AGO)
    async with running(database, ticks.registry):
        [job] = await ticks.ran("hourly", 1)
        await ticks.ran("often", 3)
    assert job.payload == Tick(scheduled_at=latest, previous=latest - LONG_AGO)
    assert len(ticks.jobs["hourly"]) == 1


@pytest.mark.parametrize("per", ["service", "origin"])
async def test_all_missed_ticks_are_made_up_for_in_order(database: str, per: str) -> None:
    ticks = Ticks()
    hourly, latest = await half_an_hour_away(database)
    ticks.declare("hourly", hourly, missed="all", per=per)
    await remember(database, "hourly", f"{hourly}, UTC", latest - LONG_AGO, "t/0" if per == "origin" else "")
    async with running(database, ticks.registry, ["t/0"]):
        jobs = await ticks.ran("hourly", 3)
    assert times(jobs) == [latest - timedelta(hours=2), latest - timedelta(hours=1), latest]
    assert [job.payload.previous for job in jobs] == [latest - LONG_AGO, *times(jobs)[:-1]]


async def test_what_was_missed_is_made_up_for_by_some_thousands_of_jobs_at_a_time(database: str) -> None:
    """A statement had a thousand jobs for each of 500 origins: it took longer than it may, and was tried again as it
    was."""
    ticks, origins = Ticks(), [f"t/{n}" for n in range(12)]
    ticks.declare("minutely", "* * * * *", missed="all", per="origin")
    ticks.gate.clear()
    week = await value(database, "SELECT clock_timestamp() - interval '7 days'")
    for origin in origins:
        await remember(database, "minutely", "* * * * *, UTC", week, origin)

    async def all_made() -> bool:
        return await jobs_left(database) >= 12_000

    async with running(database, ticks.registry, origins):
        await eventually(all_made)
    most = await value(database, "SELECT max(jobs) FROM (SELECT count(*) AS jobs FROM sidings.job GROUP BY txid) t")
    assert most <= 5_000


async def test_missed_ticks_are_skipped_where_that_is_wanted(database: str) -> None:
    ticks = Ticks()
    hourly, latest = await half_an_hour_away(database)
    ticks.declare("hourly", hourly, missed="skip")
    ticks.declare("often", every=2, missed="skip")
    await remember(database, "hourly", f"{hourly}, UTC", latest - LONG_AGO)
    await remember(database, "often", "every 2 s", latest)
    async with running(database, ticks.registry):
        jobs = await ticks.ran("often", 1)  # the present tick, not one for the half hour
    assert timedelta(0) <= jobs[0].enqueued_at - jobs[0].payload.scheduled_at < timedelta(minutes=1, seconds=5)
    assert not ticks.jobs["hourly"]


async def test_a_tick_waits_until_an_earlier_ones_job_has_ended(database: str) -> None:
    ticks = Ticks()
    ticks.declare("slow", every=0.2)
    ticks.declare("piling", every=0.2, missed="all")
    ticks.gate.clear()
    async with running(database, ticks.registry):
        await eventually(lambda: ticks.jobs["slow"] and ticks.jobs["piling"])

        async def piled() -> bool:
            return await value(database, "SELECT count(*) >= 4 FROM sidings.job WHERE type = 'piling'")

        await eventually(piled, "ticks to pile up where all are to have a job")
        assert await value(database, "SELECT count(*) FROM sidings.job WHERE type = 'slow'") == 1
        ticks.gate.set()
        assert_one_row_of_ticks(await ticks.ran("slow", 3))
        assert_one_row_of_ticks(await ticks.ran("piling", 5))


async def test_per_origin_a_tick_waits_for_an_earlier_ones_job_of_its_own_origin_only(database: str) -> None:
    me, since, tick = (
        await a_holder(database, "t/0", "t/1"),
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(2026, 5, 1, tzinfo=UTC),
    )
    for origin in ("t/0", "t/1"):
        await remember(database, "sweep", "daily", None, origin)
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.job (type, origin, \"group\") VALUES ('sweep', 't/0', 'sweep')")
        for alone, expected in ((True, [("t/0", False, True), ("t/1", True, False)]), (False, [("t/0", True, True)])):
            origins = [origin for origin, _, _ in expected]
            answers = await connection.fetch(
                load_sql("sidings.executor", "fire_origins"),
                me, "sweep", "daily", origins, [7] * len(origins), [since] * len(origins), [None] * len(origins),
                [tick] * len(origins), alone, origins, ["{}"] * len(origins),
            )  # fmt: skip
            assert sorted((answer["origin"], answer["fired"], answer["busy"]) for answer in answers) == expected
    assert await jobs_left(database) == 3


@pytest.mark.parametrize("per", ["service", "origin"])
async def test_a_held_job_keeps_no_tick_waiting(database: str, per: str) -> None:
    ticks = Ticks()
    ticks.declare("often", every=0.2, per=per)
    await remember(database, "often", "every 0.2 s", None, "t/0" if per == "origin" else "", job_origin="t/0")
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, "group", held, position)
               VALUES ('often', 't/0', 'often', 'broken', NULL)"""
        )
    async with running(database, ticks.registry, ["t/0"]):
        await ticks.ran("often", 2)


# -- where the jobs go --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "expected"), [(["t/0", "t/7"], "t/7"), (["t/3", "t/0"], "t/0")], ids=["leased", "not leased"]
)
async def test_ticks_stay_in_the_origin_of_the_last_one_while_it_is_leased(
    database: str, held: list[str], expected: str
) -> None:
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    await remember(database, "often", "every 0.2 s", None, job_origin="t/7")
    async with running(database, ticks.registry, held):
        assert {job.origin for job in await ticks.ran("often", 3)} == {expected}


async def test_ticks_leave_an_origin_whose_lease_has_run_out(database: str) -> None:
    """Its holder has died, and nobody has taken it over."""
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    await a_holder(database, "t/3", lease="-1 hour")
    await remember(database, "often", "every 0.2 s", None, job_origin="t/3")
    async with running(database, ticks.registry, ["t/5"]):
        assert {job.origin for job in await ticks.ran("often", 3)} == {"t/5"}


async def test_ticks_wait_for_a_job_in_an_origin_that_nobody_holds(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ticks in two origins could run at once. It is said aloud."""
    monkeypatch.setattr(periodic, "_WARN_SECONDS", 0.1)
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    await remember(database, "often", "every 0.2 s", None, job_origin="t/7")
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, "group", payload)
               VALUES ('often', 't/7', 'often', '{"scheduled_at": "2026-01-01T00:00:00Z"}')"""
        )
    async with running(database, ticks.registry, ["t/0"]) as executor:
        await eventually(lambda: "an earlier job of it waits in t/7, which no executor holds" in caplog.text)
        assert "`sidings origins move t/7 TO`" in caplog.text
        assert await jobs_left(database) == 1
        executor.assign(["t/7"], 2)
        jobs = await ticks.ran("often", 2)
    assert {job.origin for job in jobs} == {"t/7"}


async def test_ticks_leave_an_origin_that_is_paused(database: str) -> None:
    """The next one went into it and waited, and all later ones behind that."""
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    async with connected(database) as connection, running(database, ticks.registry, ["t/0", "t/1"]):
        await ticks.ran("often", 1)
        ticks.gate.clear()
        before = len(await ticks.ran("often", len(ticks.jobs["often"]) + 1))  # the last of them runs
        await Admin(connection, actor="alice").pause(origin="t/0", reason="its partner is away")
        ticks.gate.set()
        jobs = await ticks.ran("often", before + 3)
    assert {job.origin for job in jobs[:before]} == {"t/0"}
    assert {job.origin for job in jobs[before:]} == {"t/1"}
    assert_one_row_of_ticks(jobs)


@pytest.mark.parametrize(
    ("last", "pauses", "expected"),
    [
        ("t/1", [{"origin": "t/1"}], "t/0"),
        ("t/1", [{"origin": "t/0"}], "t/1"),
        ("t/1", [{"origin": "t/1"}, {"origin": "t/1", "group": "often"}, {"origin": "t/0"}], "t/2"),
        ("t/1", [{"origin": "t/0"}, {"origin": "t/1"}, {"origin": "t/2"}], "t/1"),
        ("t/9", [{"origin": "t/0"}], "t/1"),
        ("t/9", [{"origin": "t/0"}, {"origin": "t/1"}, {"origin": "t/2"}], "t/0"),
        (None, [{"origin": "t/0"}], "t/1"),
        ("t/1", [{"type": "often"}], "t/1"),
        ("t/1", [{"origin": "t/1", "group": "often"}], "t/1"),
        ("t/1", [{"origin": "t/0", "group": "often"}, {"origin": "t/1", "group": "another"}], "t/1"),
    ],
)
async def test_ticks_go_into_a_paused_origin_only_if_all_are(
    database: str, last: str | None, pauses: list[dict[str, str]], expected: str
) -> None:
    """A pause of the type, or of the group, is meant for them, wherever they are."""
    await a_holder(database, "t/0", "t/1", "t/2")
    await remember(database, "often", "daily", None, job_origin=last)
    its = "often", "daily", datetime(2026, 1, 1, tzinfo=UTC), None, datetime(2026, 5, 1, tzinfo=UTC)
    async with connected(database) as connection:
        for pause in pauses:
            await Admin(connection, actor="alice").pause(**pause, reason="its partner is away")
        answer = await connection.fetchrow(load_sql("sidings.executor", "fire_service"), *its, None, True, ["{}"])
    assert answer is not None
    assert answer["fired"] == expected


@pytest.mark.parametrize(
    "pause",
    [{"origin": "t/0"}, {"origin": "t/0", "group": "often"}, {"type": "often"}],
    ids=["origin", "group", "type"],
)
async def test_the_log_names_the_pause_that_keeps_ticks_waiting(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, pause: dict[str, str]
) -> None:
    monkeypatch.setattr(periodic, "_WARN_SECONDS", 0.1)
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    await remember(database, "often", "every 0.2 s", None, job_origin="t/0")
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, "group", payload)
               VALUES ('often', 't/0', 'often', '{"scheduled_at": "2026-01-01T00:00:00Z"}')"""
        )
        admin = Admin(connection, actor="alice")
        await admin.pause(**pause, reason="its partner is away")
        why = f"an earlier job of it in t/0 has not ended, and its {list(pause)[-1]} is paused: `sidings pauses`"
        async with running(database, ticks.registry, ["t/0", "t/1"]):
            await eventually(lambda: why in caplog.text)
            assert await jobs_left(database) == 1
            await admin.resume(**pause)
            assert_one_row_of_ticks((await ticks.ran("often", 3))[1:])
    assert {record.levelname for record in caplog.records if why in record.getMessage()} == {"WARNING"}


def test_the_log_tells_of_a_tick_that_waits_before_it_is_skipped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a nightly one it told a night later."""
    ticks, tick, time = Ticks(), datetime(2026, 5, 1, tzinfo=UTC), 0.01  # as soon as it is due
    ticks.declare("nightly", "0 0 * * *", missed="skip")
    [job_type] = ticks.registry
    assert job_type.periodic is not None
    row = periodic._Row(job_type, job_type.periodic, "", job_type.periodic.schedule.text, tick - LONG_AGO, None)
    loop = PeriodicLoop(None, None, ticks.registry, schema="sidings", on_fired=print)  # type: ignore[arg-type]
    monkeypatch.setattr(periodic, "now", lambda: time)
    waits: Any = {"origin": "t/0", "busy": True, "leased": True, "paused": "type"}
    while due := row.periodic.due(row.last, tick + timedelta(seconds=time)):
        loop._warn(row, due, waits)
        time += periodic._BUSY_SECONDS
    assert "nightly: the tick of 2026-05-01T00:00:00+00:00 waits" in caplog.text


class Nights:
    """A periodic job whose ticks wait, with time that passes as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cron: str, missed: Any) -> None:
        ticks = Ticks()
        ticks.declare("nightly", cron, missed=missed)
        [job_type] = ticks.registry
        assert job_type.periodic is not None
        self.first = datetime(2026, 5, 1, tzinfo=UTC)
        self.answer: dict[str, Any] = {}
        self.time = 0.01  # seconds since the first tick
        monkeypatch.setattr(periodic, "now", lambda: self.time)
        self.row = periodic._Row(
            job_type, job_type.periodic, "", job_type.periodic.schedule.text, self.first - timedelta(seconds=1), None
        )
        self.loop = PeriodicLoop(self, None, ticks.registry, schema="sidings", on_fired=print)  # type: ignore[arg-type]
        self.loop._skew = self.first.timestamp()
        self.loop._rows["nightly", ""] = self.row

    async def fetchrow(self, *_: object) -> dict[str, Any]:
        return {"now": self.first + timedelta(seconds=self.time), "fired": None, **self.answer}

    async def wait(self, until: float, **answer: object) -> None:
        """Until so many seconds after the first tick."""
        self.answer = answer
        while self.time < until:
            await self.loop._fire()
            self.time = min(until, max(self.time, self.row.try_at))


PAUSED = {"origin": "t/0", "busy": True, "leased": True, "paused": "type"}
NOBODYS = {**PAUSED, "leased": False}
NOWHERE = {"origin": None, "busy": False, "leased": None, "paused": None}


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if "nightly: the tick of" in record.getMessage()]


async def test_a_tick_that_waits_behind_a_pause_is_told_of_within_a_minute_when_that_is_no_more_what_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was up to an hour, as between two lines about the pause."""
    nights = Nights(monkeypatch, "0 0 * * *", "once")
    await nights.wait(3_000, **PAUSED)
    assert levels(caplog) == ["WARNING"]
    await nights.wait(3_040, **NOBODYS)  # as at a takeover
    assert levels(caplog) == ["WARNING"]
    await nights.wait(3_060, **NOBODYS)
    assert levels(caplog) == ["WARNING", "ERROR"]
    await nights.wait(3_600, **NOBODYS)
    assert levels(caplog).count("ERROR") >= 9
    before = len(levels(caplog))
    await nights.wait(7_000, **PAUSED)
    assert levels(caplog)[before:] == ["WARNING"]


async def test_that_a_former_tick_was_waited_for_says_nothing_of_the_next(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told of at once, as at a takeover."""
    night = 86_400
    nights = Nights(monkeypatch, "0 0 * * *", "skip")
    await nights.wait(night, **PAUSED)
    await nights.wait(2 * night, **NOWHERE)
    assert levels(caplog) == ["WARNING", "ERROR"]
    await nights.wait(2 * night + 45, **NOWHERE)
    assert levels(caplog) == ["WARNING", "ERROR"]
    await nights.wait(2 * night + 55, **NOWHERE)
    assert levels(caplog) == ["WARNING", "ERROR", "ERROR"]


async def test_ticks_that_are_skipped_behind_a_pause_are_told_of_once_an_hour(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = Nights(monkeypatch, "*/5 * * * *", "skip")
    await nights.wait(3 * 3_600, **PAUSED)
    assert levels(caplog) == ["WARNING"] * 3


async def test_ticks_follow_a_job_of_theirs_that_is_moved(database: str) -> None:
    """Its origin was forgotten: the next ones came in the first that is held, and ran beside it."""
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    await remember(database, "often", "every 0.2 s", None, job_origin="t/7")
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, "group", payload)
               VALUES ('often', 't/7', 'often', '{"scheduled_at": "2026-01-01T00:00:00Z"}')"""
        )
        async with running(database, ticks.registry, ["t/0", "t/3"]):
            await Admin(connection, actor="alice").move("t/7", "t/3")
            assert {job.origin for job in await ticks.ran("often", 3)} == {"t/3"}


async def test_a_tick_that_is_requeued_goes_where_the_others_are(database: str) -> None:
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, "group", payload)
               VALUES ('often', 't/3', 'often', '{"scheduled_at": "2026-01-01T00:00:00Z"}')"""
        )
        admin = Admin(connection, actor="alice")
        await admin.discard(1)
        await remember(database, "often", "every 0.2 s", None, job_origin="t/0")
        again = await admin.requeue(1)
        [job] = await admin.jobs()
        assert (job.id, job.origin) == (again, "t/0")


async def test_slots_of_the_outbox_get_no_jobs(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic, "_WARN_SECONDS", 0.1)
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    async with connected(database) as connection:
        await connection.execute("SELECT sidings.acquire(gen_random_uuid(), '{outbox/0}', 0, interval '1 hour', true)")
    async with running(database, ticks.registry, []) as executor:
        await eventually(lambda: "no executor holds an origin" in caplog.text)
        assert await jobs_left(database) == 0
        executor.assign(["t/0"], 2)
        assert {job.origin for job in await ticks.ran("often", 1)} == {"t/0"}


async def test_a_start_that_has_no_origin_yet_is_no_error(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a missed tick, or while a job of one waits, each start told to consume a topic, or to move the job."""
    tried, warn = Counter[str](), PeriodicLoop._warn
    monkeypatch.setattr(PeriodicLoop, "_warn", lambda *args: (tried.update([args[1].job_type.name]), warn(*args)))
    ticks = Ticks()
    for name, origin in (("missed", None), ("failing", "t/0")):
        ticks.declare(name, every=0.2)
        await remember(database, name, "every 0.2 s", None, job_origin=origin)
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, "group", payload)
               VALUES ('failing', 't/0', 'failing', '{"scheduled_at": "2026-01-01T00:00:00Z"}')"""
        )
    async with running(database, ticks.registry, []) as executor:
        await eventually(lambda: min(tried["missed"], tried["failing"]) >= 2, tried)
        executor.assign(["t/0"], 2)
        for name in ("missed", "failing"):
            await ticks.ran(name, 2)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


async def test_a_job_with_a_home_goes_there(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic, "_WARN_SECONDS", 0.1)
    ticks = Ticks()
    ticks.declare("often", every=0.2, home="rides")
    home = "INSERT INTO sidings.topic (topic, partitions) VALUES ('rides', 4)"
    async with running(database, ticks.registry, [f"rides/{number}" for number in range(4)]):
        await eventually(lambda: "its home 'rides' are not known yet" in caplog.text)
        await fetch(database, home)
        jobs = await ticks.ran("often", 2)
    assert {job.origin for job in jobs} == {await value(database, "SELECT sidings.origin_for('often', 'rides')")}


# -- changes of the code ------------------------------------------------------------------------------------------


async def test_a_changed_schedule_begins_with_its_next_tick(database: str) -> None:
    ticks = Ticks()
    hourly, latest = await half_an_hour_away(database)
    ticks.declare("changed", hourly)
    ticks.declare("often", every=0.2)
    await remember(database, "changed", "0 6 * * *, UTC", latest - LONG_AGO)
    await remember(database, "often", "every 30 s", latest - LONG_AGO)
    async with running(database, ticks.registry):
        jobs = await ticks.ran("often", 2)
    assert not ticks.jobs["changed"]
    assert (await row(database, "changed"))["schedule"] == f"{hourly}, UTC"
    assert jobs[0].payload.previous == latest - LONG_AGO
    assert_one_row_of_ticks(jobs)


async def test_the_schedule_of_the_process_that_started_last_is_in_force(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """During a rolling deployment, and when it is rolled back by ending the new processes only."""
    monkeypatch.setattr("sidings.executor.periodic._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("sidings.executor.periodic._WITHOUT_GAP_SECONDS", 0.0)
    before, after = Ticks(), Ticks()
    before.declare("often", every=0.2)
    after.declare("often", every=0.5)
    other = "UPDATE sidings.periodic SET seen_at = seen_at - interval '4 minutes' RETURNING schedule"
    async with running(database, before.registry, ["t/0"]):
        await before.ran("often", 2)
        async with running(database, after.registry, ["t/1"]):
            await eventually(lambda: in_force(database, "every 0.5 s"))
            ran = len(before.jobs["often"])
            jobs = (await before.ran("often", ran + 3))[ran:]  # its origin is still where they run
            assert all(tick.timestamp() % 0.5 == 0 for tick in times(jobs[1:]))
            assert "often: in force is 'every 0.5 s', of another process" in caplog.text
        assert [record["schedule"] for record in await fetch(database, other)] == ["every 0.5 s"]
        await eventually(lambda: in_force(database, "every 0.2 s"))
        await before.ran("often", len(before.jobs["often"]) + 2)
    assert_one_row_of_ticks(before.jobs["often"])


async def test_an_outage_brings_no_former_schedule_back(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All look at once when it ends, and none has been seen for as long as it was. The first put its own schedule into
    force, also where it was of the former release, and the new one was there."""
    monkeypatch.setattr("sidings.executor.periodic._LOOK_SECONDS", 0.05)
    ticks, away, looks = Ticks(), asyncio.Event(), list[object]()
    ticks.declare("often", every=0.2)
    async with running(database, ticks.registry) as executor:
        await ticks.ran("often", 2)
        loop = executor._periodic
        loop._looking_since = -math.inf
        fetch_, outage = loop._link.fetch, True

        async def look(query: str, *arguments: object) -> Any:
            if outage:
                away.set()
                raise PostgresUnavailable("it is away")
            looks.append(rows := await fetch_(query, *arguments))
            return rows

        monkeypatch.setattr(loop._link, "fetch", look)
        await eventually(away.is_set)
        other = "schedule = 'every 0.5 s', seen_at = clock_timestamp() - interval '4 minutes'"
        await fetch(database, f"UPDATE sidings.periodic SET {other}")
        outage = False
        await eventually(lambda: len(looks) >= 3)
        assert await in_force(database, "every 0.5 s")
        loop._looking_since = -math.inf  # as it will be after three minutes
        await eventually(lambda: in_force(database, "every 0.2 s"), "nobody with the other has been seen since")
        # A process that has slept has seen nobody either.
        loop._look_at, loop._looking_since = loop._look_at - 30, -math.inf
        await eventually(lambda: loop._looking_since > -math.inf)


async def test_who_looks_at_a_periodic_job_is_seen_within_half_a_minute(database: str) -> None:
    """Looks are up to 72 s apart. One that is left out, in an outage that another has not noticed between two of its
    own, must not make three minutes of it."""
    for seconds, anew in ((5, False), (30, True)):
        await fetch(database, "DELETE FROM sidings.periodic")
        await remember(database, "nightly", "daily", None, unseen=timedelta(seconds=seconds))
        before = (await row(database, "nightly"))["seen_at"]
        await attend(database, None, "daily", "")
        assert ((await row(database, "nightly"))["seen_at"] > before) == anew


async def test_instances_that_start_at_the_same_moment_agree_on_the_schedule_in_force(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that waited for the other's commit took the former schedule for the one in force, for a minute, and warned of
    it: its statement had begun before."""
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    await remember(database, "often", "every 30 s", datetime.now(UTC) - LONG_AGO)
    async with connected(database) as other:
        transaction = other.transaction()
        await transaction.start()
        now = "clock_timestamp()"
        await other.execute(f"UPDATE sidings.periodic SET schedule = 'every 0.2 s', since = {now}, seen_at = {now}")
        async with running(database, ticks.registry):
            waits = "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))"
            await eventually(lambda: value(database, waits, other.get_server_pid()), "it has begun to look")
            await transaction.commit()
            await ticks.ran("often", 2)
    assert "in force is" not in caplog.text


async def test_a_schedule_that_comes_back_has_missed_no_tick_since_the_other_was_seen_last(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the instances of a new release are ended at two minutes to six: the job of six o'clock was nobody's."""
    monkeypatch.setattr("sidings.executor.periodic._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("sidings.executor.periodic._WITHOUT_GAP_SECONDS", 0.0)
    ticks = Ticks()
    hourly, latest = await half_an_hour_away(database)
    ticks.declare("hourly", hourly)
    async with running(database, ticks.registry):
        await eventually(lambda: row(database, "hourly"))
        other = "schedule = 'every 7 s', since = since - interval '2 h', seen_at = seen_at - interval '40 min'"
        await fetch(database, f"UPDATE sidings.periodic SET {other}")
        [job] = await ticks.ran("hourly", 1)
    assert job.payload.scheduled_at == latest


async def attend(dsn: str, me: Any, schedule: str, *origins: str, starting: bool = False) -> list[datetime]:
    """An executor with this schedule looks at the rows of "nightly"; up to when their ticks count as settled."""
    look = load_sql("sidings.executor", "attend_periodic")
    names, epochs = ["nightly"] * len(origins), [7] * len(origins)
    await fetch(dsn, look, me, names, list(origins), epochs, starting, [schedule] * len(origins), not starting)
    rows = [await row(dsn, "nightly", origin) for origin in origins]
    return [max(known["since"], known["last_tick"] or known["since"]) for known in rows]


async def test_an_origin_that_comes_late_to_another_schedule_has_missed_no_tick_of_it(database: str) -> None:
    """As where a rollout from 7 to 6 o'clock begins at ten to six, and moves an origin at five past: that one had no
    job on that day."""
    ticks = Ticks()
    hourly, latest = await half_an_hour_away(database)
    ticks.declare("nightly", hourly, per="origin")
    for origin in ("t/0", "t/1"):
        await remember(database, "nightly", "every 86400 s", latest - LONG_AGO, origin)
    async with running(database, ticks.registry, ["t/0"]) as executor:
        await eventually(lambda: has_schedule(database, f"{hourly}, UTC", "t/0"))
        assert not ticks.jobs["nightly"], "its first tick is the next one"
        await fetch(database, "UPDATE sidings.periodic SET since = since - interval '40 min' WHERE origin = 't/0'")
        executor.assign(["t/0", "t/1"], 2)
        await eventually(lambda: ticks.jobs["nightly"])
        [job] = of_origin(await ticks.ran("nightly", 1), "t/1")
    assert (job.payload.scheduled_at, job.payload.previous) == (latest, latest - LONG_AGO)


async def has_schedule(dsn: str, schedule: str, origin: str) -> bool:
    return (await row(dsn, "nightly", origin))["schedule"] == schedule


async def test_an_origin_that_goes_back_to_the_former_schedule_has_missed_no_tick_of_it(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a new release takes an origin at two minutes to two, and is ended: the tick of two o'clock, by the
    former schedule, which other origins have had all the time, never came."""
    ticks = Ticks()
    hourly, latest = await half_an_hour_away(database)
    ticks.declare("nightly", hourly, per="origin")
    await remember(database, "nightly", f"{hourly}, UTC", latest, "t/0")
    await remember(database, "nightly", "every 86400 s", latest - timedelta(hours=1), "t/1")
    taken = "UPDATE sidings.periodic SET since = clock_timestamp() - interval '32 min' WHERE origin = 't/1'"
    await fetch(database, taken)
    async with running(database, ticks.registry, ["t/0", "t/1"]):
        [job] = await ticks.ran("nightly", 1)
    assert (job.origin, job.payload.scheduled_at) == ("t/1", latest)


async def test_what_counts_as_missed_per_origin_where_the_schedule_changes(database: str) -> None:
    me = await a_holder(database, *(f"t/{n}" for n in range(4)))
    now: datetime = await value(database, "SELECT clock_timestamp()")
    day, hour = timedelta(days=1), timedelta(hours=1)

    async def set_(origin: str, since: datetime, last_tick: datetime | None, seen_at: datetime = now) -> None:
        query = "UPDATE sidings.periodic SET since = $2, last_tick = $3, seen_at = $4 WHERE origin = $1"
        await fetch(database, query, origin, since, last_tick, seen_at)

    # Nobody has had the new one yet: it begins now, whatever the last tick was. A job per service is none of its kind.
    await remember(database, "nightly", "new", None)
    for origin in ("t/0", "t/1", "t/2"):
        await remember(database, "nightly", "old", now - day, origin)
    [settled] = await attend(database, me, "new", "t/0", starting=True)
    assert settled >= now
    # Others that come to it count from when the first did, or from their last tick.
    await set_("t/0", now - 3 * hour, now - 2 * hour)
    await set_("t/2", now - day, now - hour)
    assert await attend(database, me, "new", "t/1", "t/2") == [now - 3 * hour, now - hour]
    # An origin that has come since, and had no tick yet, makes up for none from before that.
    await attend(database, me, "new", "t/3")
    await set_("t/3", now - hour, None)
    await set_("t/0", now - day, now - 5 * hour)
    await fetch(database, "UPDATE sidings.periodic SET schedule = 'old' WHERE origin = 't/0'")
    assert await attend(database, me, "old", "t/3") == [now - hour]
    # No other origin has it any more, but this process has had it: from when the present one was last seen.
    await fetch(database, "UPDATE sidings.periodic SET schedule = 'new'")
    await set_("t/0", now - hour, now - day, now - hour)
    assert await attend(database, me, "old", "t/0") == [now - hour]
    # Rows of origins that nobody holds any more tell nothing: their schedule may have gone, and come back.
    await fetch(database, "UPDATE sidings.periodic SET schedule = 'other' WHERE origin <> 't/1'")
    await fetch(database, "UPDATE sidings.periodic SET seen_at = now() - interval '3 days' WHERE origin = 't/1'")
    [settled] = await attend(database, me, "new", "t/0", starting=True)
    assert settled >= now


async def test_what_is_known_of_a_periodic_job_stays_unless_another_schedule_comes_into_force(database: str) -> None:
    """However long the service was down, and however seldom the job has a tick."""
    me, before = await a_holder(database, *(f"t/{n}" for n in range(5))), datetime(2026, 1, 1, tzinfo=UTC)
    # Whether its process starts, the schedule that is found, for how many minutes nobody has seen it; then what is
    # in force, and since when.
    found = {
        ("down", ""): (True, "daily", 120, "daily", "before"),
        ("changed", ""): (True, "hourly", 1, "daily", "now"),
        ("there", ""): (False, "daily", 120, "daily", "before"),
        ("another", ""): (False, "hourly", 2, "hourly", "before"),
        ("left", ""): (False, "hourly", 4, "daily", "seen"),
        ("each", "t/0"): (False, "daily", 2_880, "daily", "before"),
        ("each", "t/1"): (False, "hourly", 1, "daily", "before"),
        ("begun", "t/0"): (True, "hourly", 1, "daily", "now"),
        ("each", "t/4"): (False, "daily", 1, "daily", "before"),
    }
    for (name, origin), (_, schedule, minutes, _, _) in found.items():
        await remember(database, name, schedule, before, origin, unseen=timedelta(minutes=minutes))
    seen = {key: (await row(database, *key))["seen_at"] for key in found}
    started = await value(database, "SELECT clock_timestamp()")
    answers = dict[tuple[str, str], Any]()
    for starting in (True, False):
        keys = [key for key in found if found[key][0] == starting] + (
            [] if starting else [("each", "t/2"), ("each", "t/3")]
        )
        names, origins = [name for name, _ in keys], [origin for _, origin in keys]
        epochs = [6 if origin == "t/2" else 7 for origin in origins]  # t/2 was taken over since
        attend = load_sql("sidings.executor", "attend_periodic")
        rows = await fetch(database, attend, me, names, origins, epochs, starting, ["daily"] * len(keys), not starting)
        answers |= {(answer["name"], answer["origin"]): answer for answer in rows}
        assert len(rows) == len(keys) - (not starting)
    assert answers.keys() == {*found, ("each", "t/3")}
    assert await row(database, "each", "t/2") is None
    for key, (_, _, minutes, schedule, since) in found.items():
        stored = await row(database, *key)
        assert tuple(answers[key])[2:5] == (stored["schedule"], stored["since"], stored["last_tick"])
        assert (stored["schedule"], stored["last_tick"]) == (schedule, before)
        changed = found[key][1] != schedule
        assert (stored["seen_at"] > started) == (schedule == "daily" and (minutes > 1 or changed))
        assert stored["since"] == {"before": before, "seen": seen[key]}.get(since, stored["since"])
        assert (stored["since"] > started) == (since == "now")


async def in_force(database: str, schedule: str) -> bool:
    return (await row(database, "often"))["schedule"] == schedule


async def test_what_no_executor_has_in_its_code_is_forgotten_after_a_week(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidings.executor.periodic._PRUNE_SECONDS", 0.0)
    ticks = Ticks()
    ticks.declare("often", every=0.2)
    long, short = timedelta(days=8), timedelta(days=6)
    await remember(database, "often", "every 0.2 s", None, unseen=long)
    await remember(database, "removed", "every 7 s", None, unseen=long)
    await remember(database, "away", "every 7 s", None, unseen=short)
    async with running(database, ticks.registry):
        await ticks.ran("often", 1)

        async def names() -> bool:
            rows = await fetch(database, "SELECT name FROM sidings.periodic ORDER BY name")
            return [record["name"] for record in rows] == ["away", "often"]

        await eventually(names)

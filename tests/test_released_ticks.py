"""A tick of a periodic job that was held comes back where the others are: two of them never run at once."""

import asyncio
from datetime import UTC, datetime

import pytest
from sidings import Admin, Job, Registry, Tick
from sidings.schema import load_sql

from .admin_support import a_holder, a_job, the_job
from .support import connected, eventually, fetch, running, value


async def a_held_tick(dsn: str) -> int:
    payload = """'{"scheduled_at": "2026-01-01T06:00:00Z", "previous": null}'"""
    return await a_job(dsn, "held", origin="t/0", group="report", type="'report'", payload=payload)


async def release(admin: Admin, held: int, act: str) -> None:
    """By itself, or as one of many."""
    if act == "release":
        await admin.release(held)
    else:
        assert [done.error async for done in admin.each("release", [held])] == [None]


@pytest.mark.parametrize("act", ["release", "each"])
async def test_a_held_tick_that_is_released_does_not_run_beside_another(database: str, admin: Admin, act: str) -> None:
    """Nobody had its origin for a moment, so the ticks went on in another one; it ran where it had been held."""
    registry, started, at_once, now = Registry(), list[int](), list[set[int]](), set[int]()
    gate = asyncio.Event()

    @registry.periodic(every=0.3, name="report")
    async def report(job: Job[Tick]) -> None:
        started.append(job.id)
        now.add(job.id)
        at_once.append(set(now))
        await gate.wait()
        now.discard(job.id)

    held = await a_held_tick(database)

    async def waits_behind() -> bool:
        job = await the_job(database, held)
        return job is not None and job["origin"] == "t/1"

    async with running(database, registry, ["t/1"]):
        await eventually(lambda: started)
        async with running(database, registry, ["t/0"]):
            await release(admin, held, act)
            await eventually(lambda: held in started or waits_behind())
            gate.set()
            await eventually(lambda: held in started)
    assert max(map(len, at_once)) == 1


async def test_the_next_ticks_follow_one_that_is_released_while_no_other_is_there(database: str, admin: Admin) -> None:
    """It would wait where nobody runs it, perhaps, and they behind it."""
    held = await a_held_tick(database)
    columns = "(name, schedule, job_origin) VALUES ('report', '0 6 * * *', 't/9')"
    await fetch(database, f"INSERT INTO sidings.periodic {columns}")
    await admin.release(held)
    job = await the_job(database, held)
    assert job is not None
    assert job["origin"] == await value(database, "SELECT job_origin FROM sidings.periodic") == "t/0"


async def test_the_next_ticks_follow_one_that_is_released_before_the_first_of_a_service(
    database: str, admin: Admin
) -> None:
    """The job was one per origin, and its row for the service has seen no tick yet: they ran in two origins at once."""
    held, since = await a_held_tick(database), datetime(2026, 1, 1, tzinfo=UTC)
    await a_holder(database, "s/0", "t/0")
    await fetch(database, "INSERT INTO sidings.periodic (name, schedule, since) VALUES ('report', 'daily', $1)", since)
    await admin.release(held)
    fire = load_sql("sidings.executor", "fire_service")
    its = ("report", "daily", since, None, since, None, False, ["{}"])
    assert [row["fired"] for row in await fetch(database, fire, *its)] == ["t/0"]


@pytest.mark.parametrize("act", ["release", "each"])
@pytest.mark.parametrize("where", ["nobody has it", "its lease has run out", "it is paused"])
async def test_a_tick_is_released_to_where_ticks_run_if_nothing_runs_where_it_was_held(
    database: str, admin: Admin, where: str, act: str
) -> None:
    """The next ones followed it, and waited behind it for good."""
    held, since = await a_held_tick(database), datetime(2026, 1, 1, tzinfo=UTC)
    await a_holder(database, "t/1")
    if where != "nobody has it":
        await a_holder(database, "t/0", lease="1 hour" if where == "it is paused" else "-1 hour")
    if where == "it is paused":
        await admin.pause(origin="t/0", reason="away")
    insert = "INSERT INTO sidings.periodic (name, schedule, since, job_origin) VALUES ('report', 'daily', $1, 't/1')"
    await fetch(database, insert, since)
    await release(admin, held, act)
    job = await the_job(database, held)
    assert job is not None
    assert job["origin"] == await value(database, "SELECT job_origin FROM sidings.periodic") == "t/1"
    fire = load_sql("sidings.executor", "fire_service")
    its = ("report", "daily", since, None, since, None, True, ["{}"])
    assert [row["fired"] for row in await fetch(database, fire, *its)] == [None]
    await fetch(database, "DELETE FROM sidings.job")
    assert [row["fired"] for row in await fetch(database, fire, *its)] == ["t/1"]


@pytest.mark.parametrize("where", ["nobody has either", "both are paused", "it is the only one"])
async def test_else_the_next_ticks_follow_one_that_is_released(database: str, admin: Admin, where: str) -> None:
    held = await a_held_tick(database)
    if where == "both are paused":
        await a_holder(database, "t/0", "t/1")
        for origin in ("t/0", "t/1"):
            await admin.pause(origin=origin, reason="away")
    elif where == "it is the only one":
        await a_holder(database, "t/0")
    await fetch(database, "INSERT INTO sidings.periodic (name, schedule, job_origin) VALUES ('report', 'daily', 't/1')")
    await admin.release(held)
    job = await the_job(database, held)
    assert job is not None
    assert job["origin"] == await value(database, "SELECT job_origin FROM sidings.periodic") == "t/0"


@pytest.mark.parametrize("paused", [False, True], ids=["nobody has it", "it is paused"])
@pytest.mark.parametrize("waits", [False, True], ids=["no other tick", "behind another tick"])
async def test_a_tick_is_requeued_where_it_was_if_nothing_runs_where_ticks_are(
    database: str, admin: Admin, paused: bool, waits: bool
) -> None:
    """The next ones, which would have gone elsewhere, waited behind it for good."""
    ended = await a_job(database, origin="t/1", group="report", type="'report'")
    await a_holder(database, "t/1", *["t/0"] * paused)
    await admin.discard(ended)
    if paused:
        await admin.pause(origin="t/0", reason="away")
    await fetch(database, "INSERT INTO sidings.periodic (name, schedule, job_origin) VALUES ('report', 'daily', 't/0')")
    if waits:
        await a_job(database, origin="t/0", group="report", type="'report'")
    job = await the_job(database, await admin.requeue(ended))
    assert job is not None
    there = "t/0" if waits else "t/1"
    assert job["origin"] == await value(database, "SELECT job_origin FROM sidings.periodic") == there


@pytest.mark.parametrize("act", ["release", "each"])
async def test_a_tick_of_an_origin_stays_there_when_it_is_released(database: str, admin: Admin, act: str) -> None:
    """Of a job per origin, whose other ticks are in other origins; it was one per service before."""
    held = await a_held_tick(database)
    before = "(name, schedule, job_origin, seen_at) VALUES ('report', 'daily', 's/9', now() - interval '1 hour')"
    await fetch(database, f"INSERT INTO sidings.periodic {before}")
    for origin in ("s/9", "t/0", "t/9"):
        columns = "(name, schedule, origin, job_origin) VALUES ('report', 'daily', $1, $1)"
        await fetch(database, f"INSERT INTO sidings.periodic {columns}", origin)
        await a_job(database, origin=origin, group="report", type="'report'")
    await release(admin, held, act)
    job = await the_job(database, held)
    assert job is not None
    assert (job["origin"], job["held"]) == ("t/0", None)


WAITING = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid())"


async def test_a_tick_that_waits_for_the_end_of_a_release_knows_of_it(database: str) -> None:
    """It knew the jobs as they had been before it waited: nobody held the one's origin yet, so it came into another."""
    registry, at_once, now = Registry(), list[set[int]](), set[int]()
    gate = asyncio.Event()
    gate.set()

    @registry.periodic(every=0.3, name="report")
    async def report(job: Job[Tick]) -> None:
        now.add(job.id)
        at_once.append(set(now))
        await gate.wait()
        now.discard(job.id)

    held = await a_held_tick(database)
    async with running(database, registry, ["t/1"]):
        await eventually(lambda: at_once)
        async with connected(database) as person, person.transaction():
            await person.fetch("SELECT sidings.release_job($1, 'me')", held)
            await eventually(lambda: value(database, WAITING))
            await eventually(lambda: not now)
            gate.clear()
        async with running(database, registry, ["t/0"]):
            await eventually(lambda: held in now)
            gate.set()
    assert max(map(len, at_once)) == 1


async def test_a_tick_waits_for_a_release_in_the_origin_of_the_last_one_too(database: str) -> None:
    """Nobody holds it, so the tick would come into another one, beside that which has come back."""
    held, since = await a_held_tick(database), datetime(2026, 1, 1, tzinfo=UTC)
    await a_holder(database, "t/1")
    insert = "INSERT INTO sidings.periodic (name, schedule, since, job_origin) VALUES ('report', 'daily', $1, 't/0')"
    await fetch(database, insert, since)
    fire = load_sql("sidings.executor", "fire_service")
    async with connected(database) as person, connected(database) as executor:

        async def waits_or_is_done() -> bool:
            return firing.done() or await value(database, WAITING)

        async with person.transaction():
            await person.fetch("SELECT sidings.release_job($1, 'me')", held)
            its = ("report", "daily", since, None, since, None, False, ["{}"])
            firing = asyncio.create_task(executor.fetchrow(fire, *its))
            await eventually(waits_or_is_done)
        fired = await firing
    assert fired is not None
    assert fired["fired"] == "t/0"


async def test_a_tick_waits_for_a_requeue_in_the_origin_of_the_last_one_too(database: str, admin: Admin) -> None:
    """Nobody holds it, so the tick would come into another one, beside that which has come back."""
    ended, since = await a_held_tick(database), datetime(2026, 1, 1, tzinfo=UTC)
    await admin.discard(ended)
    await a_holder(database, "t/1")
    insert = "INSERT INTO sidings.periodic (name, schedule, since, job_origin) VALUES ('report', 'daily', $1, 't/0')"
    await fetch(database, insert, since)
    async with connected(database) as person, connected(database) as executor:

        async def waits_or_is_done() -> bool:
            return firing.done() or await value(database, WAITING)

        async with person.transaction():
            await person.fetch("SELECT sidings.requeue_job($1, 'me')", ended)
            its = ("report", "daily", since, None, since, None, False, ["{}"])
            firing = asyncio.create_task(executor.fetchrow(load_sql("sidings.executor", "fire_service"), *its))
            await eventually(waits_or_is_done)
        await firing
    assert await value(database, "SELECT array_agg(DISTINCT origin) FROM sidings.job") == ["t/0"]

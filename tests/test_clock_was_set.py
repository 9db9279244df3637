"""A Postgres server whose clock was set back for a moment, and put right again."""

import asyncio
import re
import shlex
from typing import Literal

import pytest
from sidings import Admin, Job, Registry, Retry
from sidings.jobs.admin import listing
from tenacity import wait_fixed

from .admin_support import a_holder, a_job, some_jobs
from .cli_support import cli
from .support import ORIGIN, Ride, connected, enqueue, eventually, fetch, running, value


async def test_a_group_that_backs_off_does_not_wait_for_what_the_clock_was_behind(database: str, caplog) -> None:
    """What was read meanwhile seemed to be due in two hours, and the group waited for them, until a restart."""
    registry, ran, waits = Registry(), list[int](), asyncio.Event()

    @registry.job(name="ride", group="transport", retry=Retry(wait=wait_fixed(3600)))
    async def ride(job: Job[Ride]) -> None:
        if job.attempt == 1 and job.payload.number == 0:
            waits.set()
            raise ValueError("not yet")
        ran.append(job.payload.number)

    async with running(database, registry) as executor:
        await enqueue(database, ride, [Ride(transport="a", number=number) for number in range(2)])
        await eventually(lambda: value(database, "SELECT count(*) FROM sidings.job WHERE attempt = 2"))
        assert ran == []
        # To the reader it is the same whether the clock or what stands in the table moves by an hour and a half.
        ahead = executor.reader._sql.replace("clock_timestamp())", "clock_timestamp() + interval '90 min')", 1)
        assert ahead != executor.reader._sql
        executor.reader._sql = ahead
        await enqueue(database, ride, [Ride(transport="b", number=9)])
        await eventually(lambda: len(ran) == 3, lambda: (ran, caplog.text))
        assert [number for number in ran if number != 9] == [0, 1]
        assert "the clock of the Postgres server was set forward, by 5" in caplog.text
        assert "set back" not in caplog.text
        executor.reader._sql = executor.reader._sql.replace("90 min", "10 min")
        await enqueue(database, ride, [Ride(transport="b", number=9)])
        await eventually(lambda: "was set back, by 4" in caplog.text)


@pytest.mark.parametrize("policy", ["serial", "parallel"], ids=["no group", "policy parallel"])
async def test_a_person_lets_a_job_run_now_that_was_due_by_the_clock_while_it_was_ahead(
    database: str, admin: Admin, policy: Literal["serial", "parallel"]
) -> None:
    """It had its place, and waited in memory in no group's order, until it was due by the clock that is right."""
    registry, ran = Registry(), list[int]()

    @registry.job(name="ride", group=None if policy == "serial" else "transport", policy=policy)
    async def ride(job: Job[Ride]) -> None:
        ran.append(job.payload.number)

    async with running(database, registry) as executor:
        async with connected(database) as connection, connection.transaction():
            rides = [Ride(transport="a", number=number) for number in range(2)]
            first, second = await ride.enqueue_many(connection, rides, origin=ORIGIN)
            # As `promote.sql` leaves what is due: with a position.
            await connection.execute("UPDATE sidings.job SET run_at = now() + interval '2 h'")
        await eventually(lambda: executor.scheduler.knows(first) and executor.scheduler.knows(second))
        assert await admin.retry_now(second) == "backing off"
        await eventually(lambda: ran)
        await eventually(lambda: executor.scheduler.knows(first))
        assert ran == [1]


async def test_what_waits_since_the_clock_was_set_back_is_found_by_a_filter(
    database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had been promoted, and had never failed: `sidings jobs retry`, as the guide has it, said that no job fits."""
    later = {"run_at": "now() + interval '2 h'"}
    failing = await a_job(database, "backing off", group="f")
    runs, *waits = await some_jobs(database, 4, group="g", **later)
    other = await a_job(database, origin="z/0", group="g", type="'bill'", **later)
    for state in ("waiting", "blocked", "delayed", "held"):
        await a_job(database, state, group="g")
    await a_holder(database, ORIGIN, running=[runs])

    async def found(**wanted: str) -> list[int]:
        return [job.id for job in await admin.jobs(state="backing off", **wanted)]

    assert await found() == [failing, *waits, other]
    assert await found(origin=ORIGIN, group="g") == waits
    assert await found(origin=ORIGIN, type="ride") == [failing, *waits]
    assert await found(type="bill") == [other]
    seen, after = list[int](), None
    while page := await admin.jobs(state="backing off", limit=2, after=after):
        seen, after = seen + [job.id for job in page], page[-1].cursor
    assert seen == [failing, *waits, other]
    monkeypatch.setattr(listing, "_LOOKED_AT", 3)  # the one that fails and the one that runs stand first
    assert await found() == [failing, waits[0], other]
    assert await found(origin=ORIGIN) == [failing, *waits]
    result = await cli(database, "jobs", "retry", "--type", "ride", "--origin", ORIGIN, "--yes")
    for id in (failing, *waits):
        assert f"job {id}: due now (was backing off)" in result.stdout
    assert await found() == [other]


async def test_what_ended_while_the_clock_was_days_ahead_is_brought_back_by_a_filter(database: str, admin: Admin):
    """A day after now the list ended, by the clock of whoever asked. It lies in partitions that are yet to come."""
    ids = await some_jobs(database, 2)
    for id in ids:
        await admin.discard(id)
    await fetch(database, "SELECT sidings.make_history_day((now() AT TIME ZONE 'UTC')::date + 3)")
    for id, days in zip(ids, (3, 40), strict=True):
        ahead = "UPDATE sidings.job_history SET finished_at = finished_at + make_interval(days => $2) WHERE job_id = $1"
        await fetch(database, ahead, id, days)
    assert [row.job_id for row in await admin.ended()] == ids[::-1]
    assert [row.job_id for row in await admin.requeueable()] == ids
    result = await cli(database, "jobs", "requeue", "--type", "ride", "--yes")
    assert result.stdout.count("requeued as") == 2


async def test_no_end_is_named_for_the_next_call_where_a_job_has_ended_at_a_time_yet_to_come(
    database: str, admin: Admin
):
    """The moment of the command was named: what had ended while the clock was ahead did not fit any more."""
    ids = await some_jobs(database, 3)
    for id in ids:
        await admin.discard(id)
    ahead = "UPDATE sidings.job_history SET finished_at = finished_at + interval '1 h' WHERE job_id = ANY ($1)"
    await fetch(database, ahead, ids[:2])
    requeue, window, hints = ("jobs", "requeue", "--type", "ride", "--limit", 1, "--yes"), list[str](), list[str]()
    for expected in ids:
        result = await cli(database, *requeue, *window)
        assert f"job {expected}: requeued as" in result.stdout
        found = re.search(r"do it again with (.*)$", result.stderr, re.MULTILINE)
        assert found
        window, hints = shlex.split(found[1]), [*hints, re.sub(r"\d\S+", "T", found[1])]
    assert hints == ["--since T", "--since T", "--since T --before T"]
    given = ("--before", "2100-01-01T00:00+00:00")
    await cli(database, "jobs", "cancel", "--type", "ride", "--yes")
    result = await cli(database, *requeue, "--outcome", "cancelled", *given)
    assert result.stderr.rstrip().endswith(" --before 2100-01-01T00:00:00+00:00"), "the end that was given stays"

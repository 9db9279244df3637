"""A Postgres server whose clock was set back for a moment, and put right again."""

import asyncio
from typing import Literal

import pytest
from sidings import Admin, Job, Registry, Retry
from tenacity import wait_fixed

from .support import ORIGIN, Ride, connected, enqueue, eventually, running, value


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

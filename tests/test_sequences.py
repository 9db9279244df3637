"""Sequences behind the tables: a logical replication, as for an upgrade between servers, carries rows only."""

import asyncio

from sidings.jobs import Job, Registry

from .support import ORIGIN, Ride, connected, enqueue, eventually, running

BACK = "SELECT setval('sidings.job_position', 1, false), setval('sidings.job_id_seq', 1, false)"


async def test_jobs_run_where_the_sequences_were_behind_the_tables(database: str):
    """What got a position behind the reader's mark was found by the audit only, a minute later."""
    registry, ran, gate = Registry(), list[str](), asyncio.Event()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        if job.payload.transport == "busy":
            await gate.wait()
        ran.append(f"{job.payload.transport} {job.payload.number}")

    await enqueue(database, ride, [Ride(transport="gone")] * 500)
    await enqueue(database, ride, [Ride(transport="busy", number=n) for n in range(3)])
    async with connected(database) as connection:
        await connection.execute("DELETE FROM sidings.job WHERE payload ->> 'transport' = 'gone'")
        await connection.execute(BACK)
        await enqueue(database, ride, [Ride(transport="early", number=n) for n in range(3)])
        async with running(database, registry, audit_seconds=10_000) as executor:
            await eventually(lambda: len(ran) == 3 and executor.scheduler.origins[ORIGIN].high > 500)
            await enqueue(database, ride, [Ride(transport="late", number=n) for n in range(3)])
            await eventually(lambda: len(ran) == 6, "they have not been passed over")
            [moved_on] = await connection.fetch(
                "SELECT p.last_value, i.last_value FROM sidings.job_position p, sidings.job_id_seq i"
            )
            assert min(moved_on) >= 503
            await enqueue(database, ride, [Ride(transport="busy", number=3)])
            gate.set()
            await eventually(lambda: len(ran) == 10)
    assert ran[:3] == [f"early {n}" for n in range(3)]
    assert ran[3:6] == [f"late {n}" for n in range(3)]
    assert ran[6:] == [f"busy {n}" for n in range(4)]

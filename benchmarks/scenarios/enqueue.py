"""Putting jobs into the database: one in a transaction, and a thousand with one call."""

from collections.abc import Sequence

import asyncpg

from .. import floors, ours, peers
from ..ours import Payload
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []


async def _single(bench: Bench, jobs: int) -> Figures:
    dsn = await ours.fresh(bench)
    noop = ours.registry()["noop"]
    connection = await asyncpg.connect(dsn)
    await bench.meter.start()
    for number in range(jobs):
        async with connection.transaction():
            payload = Payload(number=number, text=ours.TEXT)
            await noop.enqueue(connection, payload, origin="bench/0", group=f"g{number % 1000}")
    reading = await bench.meter.stop()
    await connection.close()
    return reading.per_job(jobs)


async def _bulk(bench: Bench, jobs: int) -> Figures:
    dsn = await ours.fresh(bench)
    bulk = ours.grouped()["grouped"]
    connection = await asyncpg.connect(dsn)
    await bench.meter.start()
    for start in range(0, jobs, floors.EACH):
        async with connection.transaction():
            payloads = [Payload(number=n, text=ours.TEXT) for n in range(start, start + floors.EACH)]
            await bulk.enqueue_many(connection, payloads, origin="bench/0")
    reading = await bench.meter.stop()
    await connection.close()
    return reading.per_job(-(-jobs // floors.EACH) * floors.EACH)


async def _floor_single(bench: Bench, jobs: int, *, plain: bool, begin: bool) -> Figures:
    return await floors.enqueue_single(bench, await ours.fresh(bench), jobs, plain=plain, begin=begin)


async def _floor_bulk(bench: Bench, jobs: int, *, plain: bool) -> Figures:
    return await floors.enqueue_bulk(bench, await ours.fresh(bench), jobs, plain=plain)


@scenario(
    "enqueue",
    "Enqueue one job in a transaction, on one connection",
    compare=[
        # Time per job against the floor's: the target is a ceiling, so the floor's rate stands above the line.
        Compare("floor", "sidings", 1.15, at_most=True, times=True),
        Compare("plain floor", "sidings", times=True),
        Compare("sidings", "pgqueuer"),
        Compare("sidings", "graphile"),
        Compare("sidings", "pgboss"),
        Compare("sidings", "river"),
        Compare("sidings", "procrastinate"),
        Compare("sidings", "chancy"),
    ],
    note="The target means `floor`: a bare INSERT of the same row into the same table, with its indexes, in a "
    "transaction that the caller opens and commits, as one with work of its own does. Beside it, without a "
    "target: `plain floor`, the same into a table with a key and one more index and nothing of ours, which shows "
    "what our columns and indexes cost; and that in autocommit: one round trip instead of three. Peers do what "
    "their enqueue call does on a connection of its own.",
)
def enqueue(size: Size) -> Sequence[Variant]:
    jobs = size.jobs(10_000)
    return [
        Variant("floor", lambda b: _floor_single(b, jobs, plain=False, begin=True), {"jobs": jobs}),
        Variant("sidings", lambda b: _single(b, jobs), {"jobs": jobs}),
        Variant("plain floor", lambda b: _floor_single(b, jobs, plain=True, begin=True), {"jobs": jobs}),
        Variant("plain floor, autocommit", lambda b: _floor_single(b, jobs, plain=True, begin=False), {"jobs": jobs}),
        *peers.variants("enqueue", size),
    ]


@scenario(
    "bulk",
    "Enqueue 1,000 jobs with one call, on one connection",
    compare=[
        Compare("sidings", "floor", 0.8),
        Compare("sidings", "plain floor"),
        Compare("sidings", "pgqueuer"),
        Compare("sidings", "graphile"),
        Compare("sidings", "pgboss"),
        Compare("sidings", "river"),
        Compare("sidings", "procrastinate"),
        Compare("sidings", "chancy"),
    ],
    note="The target means `floor`: INSERT … SELECT FROM unnest() of the same rows into the same table with its "
    "indexes, from arrays of text that are ready. `plain floor` is the same into a table with a key and one more "
    "index. Ours begins with pydantic models, which it validates and turns into JSON, and opens a transaction.",
)
def bulk(size: Size) -> Sequence[Variant]:
    jobs = size.jobs(100_000, least=1_000)
    return [
        Variant("floor", lambda b: _floor_bulk(b, jobs, plain=False), {"jobs": jobs}),
        Variant("sidings", lambda b: _bulk(b, jobs), {"jobs": jobs}),
        Variant("plain floor", lambda b: _floor_bulk(b, jobs, plain=True), {"jobs": jobs}),
        *peers.variants("bulk", size),
    ]

"""Several executors, idle executors, dying executors; each in a process of its own."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import asyncpg

from .. import ours
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario
from ..worker import Worker

__all__: list[str] = []

_ORIGINS = 100


async def _fleet(bench: Bench, jobs: int, executors: int) -> Figures:
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs, spread=_ORIGINS)
    await bench.server.settle(dsn)
    names = ours.origins(_ORIGINS)
    async with AsyncExitStack() as stack:
        made = [Worker(dsn, names[n::executors]) for n in range(executors)]
        workers = [await stack.enter_async_context(worker) for worker in made]
        await bench.meter.start()
        for worker in workers:
            worker.go()
        await ours.until(lambda: sum(w.state["done"] for w in workers) >= jobs)
        reading = await bench.meter.stop()
        reading.client_seconds = sum(w.state["cpu"] for w in workers)
    return reading.per_job(jobs)


@scenario(
    "fleet",
    "1, 2 and 4 executors over 100 origins",
    compare=[
        Compare("sidings, 2 executors", "sidings, 1 executor"),
        Compare("sidings, 4 executors", "sidings, 1 executor"),
    ],
    note="Each in a process of its own; the clock starts with them. More processes than cores only share them.",
)
def fleet(size: Size) -> Sequence[Variant]:
    jobs = size.jobs(200_000)
    return [
        Variant("sidings, 1 executor", lambda b: _fleet(b, jobs, 1), {"jobs": jobs}),
        Variant("sidings, 2 executors", lambda b: _fleet(b, jobs, 2), {"jobs": jobs}),
        Variant("sidings, 4 executors", lambda b: _fleet(b, jobs, 4), {"jobs": jobs}),
    ]


async def _idle(bench: Bench, origins: int, seconds: float) -> Figures:
    dsn = await ours.fresh(bench)
    async with Worker(dsn, ours.origins(origins), every=60.0) as worker:  # else half of it would be this looking
        worker.go()
        await ours.until(lambda: bool(worker.state["held"]))
        await asyncio.sleep(min(2.0, seconds))
        before = await _transactions(dsn)
        cpu = worker.cpu_seconds()
        await bench.meter.start()
        await asyncio.sleep(seconds)
        reading = await bench.meter.stop()
        client = worker.cpu_seconds() - cpu
        statements = (await _transactions(dsn) - before) / reading.seconds
    return {
        "core_percent": (reading.postgres_seconds + client) / reading.seconds * 100,
        "client_percent": client / reading.seconds * 100,
        "postgres_percent": reading.postgres_seconds / reading.seconds * 100,
        "statements": statements,
        "wal_bytes_second": reading.wal_bytes / reading.seconds,
    }


async def _transactions(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("SELECT pg_stat_clear_snapshot()")
        return await connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )
    finally:
        await connection.close()


@scenario(
    "idle",
    "1,000 idle origins held by one executor",
    key="core_percent",
    compare=[Compare("sidings, 1,000 origins", target=5.0, at_most=True)],
    note="Nothing to do. Postgres (background processes included) and client together. Statements are transactions of "
    "the database, those of the meter included (about two in all).",
)
def idle(size: Size) -> Sequence[Variant]:
    seconds = {"tiny": 1.0, "short": 6.0}.get(size.name, 15.0)
    few, many = (16, 1_000) if size.name != "tiny" else (2, 50)
    return [
        Variant(f"sidings, {count:,} origins", lambda b, count=count: _idle(b, count, seconds), {"seconds": seconds})
        for count in (few, many)
    ]


async def _takeover(bench: Bench, *, kill: bool, lease: float) -> Figures:
    dsn = await ours.fresh(bench)
    names = ours.origins(_ORIGINS)
    async with Worker(dsn, names, lease_seconds=lease) as former, Worker(dsn, names, lease_seconds=lease) as heir:
        former.go(1)
        await ours.until(lambda: bool(former.state["held"]))
        await ours.seed(dsn, _ORIGINS, spread=_ORIGINS)
        await ours.until(lambda: former.state["done"] >= _ORIGINS)
        # The heir's assignment is the same generation: it may not ask for what the other still holds.
        heir.go(1)
        await asyncio.sleep(0.5)
        began = time.monotonic()
        if kill:
            former.kill()
        else:
            asyncio.get_running_loop().create_task(former.stop())
        await ours.until(lambda: bool(heir.state["held"]), seconds=lease * 3 + 10)
        return {"seconds": heir.state["held_at"] - began}


@scenario(
    "takeover",
    "From the end of one executor until another holds its 100 origins",
    key="seconds",
    note="The heir waits with the same origins assigned, as after Kafka's rebalance, whose session timeout comes on "
    "top after a kill. After SIGKILL it takes what is left of the lease, which is renewed every third of it: two "
    "thirds to all of 15 s by default.",
)
def takeover(size: Size) -> Sequence[Variant]:
    lease = 15.0 if size.name != "tiny" else 1.0
    return [
        Variant("sidings, SIGKILL", lambda b: _takeover(b, kill=True, lease=lease), {"lease": lease}, repetitions=2),
        Variant("sidings, clean stop", lambda b: _takeover(b, kill=False, lease=lease), {"lease": lease}),
    ]


async def _memory(bench: Bench, jobs: int, groups: int) -> Figures:
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs, groups=groups)
    await bench.server.settle(dsn)
    async with Worker(dsn, ours.origins()) as worker:
        worker.go()
        await ours.until(lambda: worker.state["done"] >= min(jobs, 100_000))
        return {"memory_mib": worker.state["memory_mib"]}


@scenario(
    "memory",
    "Memory of an executor against the backlog",
    key="memory_mib",
    compare=[
        Compare("sidings, 1M", "sidings, 10k"),
        Compare("sidings, 10M", "sidings, 10k"),
        Compare("sidings, 1M in 10,000 groups", "sidings, 10k"),
    ],
    note="The most that the process had resident, Python and its libraries included, while it ran the first 100,000 "
    "jobs. 10M only with --long.",
)
def memory(size: Size) -> Sequence[Variant]:
    def of(jobs: int, name: str, groups: int = 0) -> Variant:
        few = jobs if size.name != "tiny" else size.jobs(jobs)
        settings = {"jobs": few, "groups": groups}
        return Variant(name, lambda b: _memory(b, few, groups), settings, repetitions=1 if size.name == "short" else 2)

    variants = [of(10_000, "sidings, 10k"), of(1_000_000, "sidings, 1M")]
    if size.long:
        variants.append(of(10_000_000, "sidings, 10M"))
    return [*variants, of(1_000_000, "sidings, 1M in 10,000 groups", 10_000)]

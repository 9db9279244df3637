"""Sidings as the benchmarks use it: job types, a seeded backlog, an executor that drains it. Default settings."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import asyncpg
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sidings.executor import Executor, ExecutorSettings, PostgresSettings
from sidings.jobs import Job, OutcomeName, Policy, Registry, Retry
from sidings.schema import migrate
from tenacity import wait_fixed

from .results import Figures
from .suite import Bench

__all__ = [
    "SERVICE",
    "TEXT",
    "Payload",
    "drain",
    "ended",
    "executing",
    "fresh",
    "grouped",
    "origins",
    "registry",
    "seed",
    "until",
]

SERVICE = "bench"
TEXT = "x" * 170  # with it a payload takes about 200 bytes
PATIENCE = 900.0


class Payload(BaseModel):
    """About 200 bytes of JSON, as the peers get."""

    number: int
    text: str


def registry() -> Registry:
    """Job types: `noop`; `quiet`, without history; `failing`, which never succeeds; `batched`, whose handler takes a
    list; `newest`, of policy latest; `transactional`."""
    jobs = Registry()

    @jobs.job(name="noop")
    async def _noop(job: Job[Payload]) -> None:
        pass

    @jobs.job(name="quiet", history=False)
    async def _quiet(job: Job[Payload]) -> None:
        pass

    @jobs.job(name="failing", retry=Retry(wait=wait_fixed(3600)))
    async def _failing(job: Job[Payload]) -> None:
        raise RuntimeError("always")

    @jobs.job(name="batched", batch=100)
    async def _batched(batch: list[Job[Payload]]) -> None:
        pass

    @jobs.job(name="newest", group="text", policy="latest")
    async def _newest(job: Job[Payload]) -> None:
        pass

    @jobs.job(name="transactional", transactional=True)
    async def _transactional(job: Job[Payload]) -> None:
        pass

    return jobs


def grouped() -> Registry:
    """One type, `grouped`, whose group comes from its payload."""
    jobs = Registry()

    @jobs.job(name="grouped", group=lambda payload: f"g{payload.number % 1000}")
    async def _grouped(job: Job[Payload]) -> None:
        pass

    return jobs


def origins(count: int = 16) -> list[str]:
    """Names of so many partitions of one topic."""
    return [f"bench/{n}" for n in range(count)]


async def fresh(bench: Bench) -> str:
    """The DSN of a new database with our schema."""

    async def prepare(dsn: str) -> None:
        await migrate(dsn, service=SERVICE)
        connection = await asyncpg.connect(dsn)
        await connection.execute("SELECT sidings.maintain(30)")  # today's partition, as a running service has it
        await connection.close()

    return await bench.server.fresh("sidings", prepare)


_SEED = """
INSERT INTO sidings.job (type, origin, "group", payload, policy)
SELECT $1, 'bench/' || (CASE WHEN $3 > 0 THEN i % $3 ELSE i END) % $4,
       CASE WHEN $3 > 0 THEN $6 || i % $3 END,
       json_build_object('number', i, 'text', $5::text),
       $7
FROM generate_series(1, $2::bigint) i
"""


async def seed(
    dsn: str,
    jobs: int,
    *,
    type: str = "noop",
    groups: int = 0,
    spread: int = 16,
    prefix: str = "g",
    policy: Policy = Policy.SERIAL,
) -> None:
    """Put jobs into the table: over `spread` origins, in `groups` groups that take turns (0: none)."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(_SEED, type, jobs, groups, spread, TEXT, prefix, policy, timeout=PATIENCE)
    finally:
        await connection.close()


@asynccontextmanager
async def executing(
    dsn: str, jobs: Registry, held: Sequence[str], settings: ExecutorSettings | None = None
) -> AsyncIterator[Executor]:
    """An executor that has been started and told its origins; it may not hold them yet."""
    made = Executor(SERVICE, jobs, PostgresSettings(dsn=dsn), settings, prometheus=CollectorRegistry())
    await made.start()
    try:
        made.assign(held, 1)
        yield made
    finally:
        await made.stop()


async def until(condition: Callable[[], bool], *, pause: float = 0.004, seconds: float = PATIENCE) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        await asyncio.sleep(pause)


def ended(executor: Executor) -> int:
    """Jobs that have come to their good end."""
    count = executor.metrics.count
    return count(OutcomeName.SUCCEEDED) + count(OutcomeName.SUPERSEDED)


async def drain(bench: Bench, dsn: str, jobs: int) -> Figures:
    """Run `jobs` jobs that stand in the table, from the executor's start to the commit of the last outcome."""
    await bench.server.settle(dsn)
    await bench.meter.start()
    async with executing(dsn, registry(), origins()) as made:
        await until(lambda: ended(made) >= jobs)
        reading = await bench.meter.stop()
        cycles = await _cycles(dsn)
    return reading.per_job(jobs) | {"batch": jobs / max(1, cycles)}


async def _cycles(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval("SELECT max(cycle) FROM sidings.executor")
    finally:
        await connection.close()

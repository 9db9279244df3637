"""How much of payloads a read brings at once, and memory holds: of large jobs, also late ones and in deep groups."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from sidings.executor import Executor, reader
from sidings.jobs import Job, Registry

from .support import ORIGIN, SECONDS, Ride, an_executor, connected, drained, enqueue, eventually

BUDGET = 400_000  # characters
LARGE = "x" * 20_000


class Sizes:
    """Characters of payloads: what each read has brought, and the most that was in memory after one. left: how many
    rows came without them, to be read again."""

    def __init__(self) -> None:
        self.brought: list[int] = []
        self.held = self.left = 0


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    sizes, deliver = Sizes(), reader.Reader._deliver

    def counted(self: reader.Reader, plan: Any, rows: list[asyncpg.Record], sent: float) -> None:
        sizes.brought.append(sum(len(row["payload"] or "") for row in rows if row["part"]))
        sizes.left += sum(row["part"] > 4 for row in rows)
        deliver(self, plan, rows, sent)
        sizes.held = max(sizes.held, sum(entry.size for entry in self._scheduler.memory.jobs.values()))

    monkeypatch.setattr(reader.Reader, "_deliver", counted)
    return sizes


@asynccontextmanager
async def with_little_memory(database: str, registry: Registry, *origins: str) -> AsyncIterator[Executor]:
    executor = an_executor(database, registry, concurrency=20)
    memory = executor.scheduler.memory
    memory.payload_budget, memory.size_ahead = BUDGET, BUDGET / 1_024
    await executor.start()
    try:
        executor.assign(origins or [ORIGIN], 1)
        await executor.settled(SECONDS)
        yield executor
    finally:
        await executor.stop()


def types(ran: list[int]) -> tuple[Registry, Sequence[Any]]:
    """Two types, one of them in groups."""
    registry = Registry()

    async def single(job: Job[Ride]) -> None:
        ran.append(len(job.payload.transport))

    async def grouped(job: Job[Ride]) -> None:
        ran.append(len(job.payload.transport))

    return registry, [registry.job()(single), registry.job(group="number")(grouped)]


async def test_the_first_read_brings_no_more_than_memory_may_hold(database: str, sizes: Sizes):
    registry, [single, _] = types(ran := [])
    await enqueue(database, single, [Ride(transport=LARGE)] * 300)
    async with with_little_memory(database, registry):
        await drained(database)
    assert len(ran) == 300
    assert max(sizes.brought) <= BUDGET


@pytest.mark.parametrize("number", [0, 1], ids=["without groups", "in groups"])
async def test_large_jobs_behind_small_ones_are_brought_as_memory_holds_them(database: str, sizes: Sizes, number: int):
    """As many were read as would have had room, had they been as small as those in memory."""
    registry, job_types = types(ran := [])
    small = [Ride(number=n % 50) for n in range(2_000)]
    large = [Ride(transport=LARGE, number=n % 50) for n in range(400)]
    mixed = [Ride(transport=LARGE if n % 40 == 0 else "", number=n % 50) for n in range(2_000)]
    await enqueue(database, job_types[number], [*small, *large, *mixed])
    async with with_little_memory(database, registry):
        await drained(database)
    assert len(ran) == 4_400
    assert max(sizes.brought) <= 2 * BUDGET  # refills and what is read forward
    assert sizes.held <= 3 * BUDGET


async def test_headers_count_as_payloads_do(database: str, sizes: Sizes):
    """As many jobs were in memory as there may be of small ones, however large their headers were."""
    registry, [single, _] = types(ran := [])
    await enqueue(database, single, [Ride()] * 1_000, headers={"token": LARGE})
    async with with_little_memory(database, registry):
        await drained(database)
    assert len(ran) == 1_000
    assert sizes.held <= 256 * 2 * len(LARGE)  # the first read knows of nothing yet


async def test_late_rows_that_are_large_are_brought_as_memory_holds_them(database: str, sizes: Sizes):
    """Up to 2,000 of an origin, and 50,000 of all, came at once, whatever their size."""
    registry, [single, _] = types(ran := [])
    origins = [ORIGIN, "orders/8"]
    async with with_little_memory(database, registry, *origins), connected(database) as connection:
        async with connection.transaction():
            for origin in origins:
                await single.enqueue_many(connection, [Ride(transport=LARGE)] * 150, origin=origin)
            for origin in origins:
                await enqueue(database, single, [Ride(transport="small")], origin=origin)
            await eventually(lambda: len(ran) == 2)
        await drained(database)
    assert len(ran) == 302
    assert max(sizes.brought) <= 2 * BUDGET


async def test_deep_groups_of_large_jobs_share_the_memory(database: str, sizes: Sizes):
    """Up to 64 jobs behind each job that ran, whatever their size, as hardly any could be chosen."""
    registry, go_on = Registry(), asyncio.Event()

    @registry.job(group="number")
    async def slow(job: Job[Ride]) -> None:
        await go_on.wait()

    await enqueue(database, slow, [Ride(transport=LARGE, number=n) for _ in range(30) for n in range(10)])
    async with with_little_memory(database, registry):
        await eventually(lambda: len(sizes.brought) > 40)
        go_on.set()
        await drained(database)
    assert sizes.held <= 3 * BUDGET


async def test_many_origins_of_jobs_alike_are_read_once(database: str, sizes: Sizes):
    """A payload's share was reckoned with 16 rows of each origin, for which there was no room: with 1,000 origins all
    of more than 4 kB came twice, and the jobs took six times as long."""
    registry, [single, _] = types(ran := [])
    origins = [f"orders/{number}" for number in range(60)]
    for origin in origins:
        await enqueue(database, single, [Ride(transport="x" * 1_000)] * 15, origin=origin)
    async with with_little_memory(database, registry, *origins):
        await drained(database)
    assert len(ran) == 900
    assert sizes.left < 90
    assert max(sizes.brought) <= BUDGET

"""`service.transaction()` in which a statement has failed: Postgres answers its COMMIT with ROLLBACK, and no error."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import asyncpg
import pytest
from sidings.executor import PostgresSettings
from sidings.jobs import Job, Registry, Transaction
from sidings.kafka import Transactions

from .support import ORIGIN, Ride, fetch

registry = Registry()


@registry.job()
async def ride(job: Job[Ride]) -> None: ...


@asynccontextmanager
async def a_pool(database: str, told: list[object]) -> AsyncIterator[Transactions]:
    pool = Transactions(PostgresSettings(dsn=database, pool_size=1), told.append)
    await pool.start()
    async with pool.open() as tx:
        await tx.execute("CREATE TABLE once (n int PRIMARY KEY); INSERT INTO once VALUES (1)")
    yield pool
    await pool.stop()


async def twice(tx: Transaction) -> None:
    await tx.execute("INSERT INTO once VALUES (1)")


async def twice_below(tx: Transaction) -> None:
    await tx.connection.execute("INSERT INTO once VALUES (1)")


async def too_long(tx: Transaction) -> None:
    async with asyncio.timeout(0.05):
        await tx.fetchval("SELECT pg_sleep(30)")


@pytest.mark.parametrize("fails", [twice, twice_below, too_long])
async def test_a_job_of_a_transaction_that_cannot_commit_is_not_lost_without_a_word(database: str, fails) -> None:
    """The block has caught the error, so it went on, came to its end, and nothing of it was there."""
    told: list[object] = []

    async def work(pool: Transactions) -> None:
        async with pool.open() as tx:
            await ride.enqueue(tx, Ride(), origin=ORIGIN)
            with suppress(asyncpg.UniqueViolationError, TimeoutError):
                await fails(tx)

    async with a_pool(database, told) as pool:
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await work(pool)
        assert told == []
        assert await fetch(database, "SELECT id FROM sidings.job") == []
        async with pool.open() as tx:  # the connection serves others
            assert await tx.fetchval("SELECT count(*) FROM once") == 1


async def test_a_savepoint_keeps_what_stands_around_it(database: str) -> None:
    told: list[object] = []
    async with a_pool(database, told) as pool:
        async with pool.open() as tx:
            id = await ride.enqueue(tx, Ride(), origin=ORIGIN)
            with suppress(asyncpg.UniqueViolationError):
                async with tx.savepoint():
                    await twice(tx)
        assert told == [{ORIGIN: [id]}]
        assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job")] == [id]

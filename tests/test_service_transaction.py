"""`service.transaction()`: what becomes of its connection when the block is over."""

import asyncio

import pytest
from sidings.executor import PostgresSettings
from sidings.kafka import Transactions

from .support import SECONDS


def transactions(database: str) -> Transactions:
    return Transactions(PostgresSettings(dsn=database, pool_size=1), lambda jobs: None)


async def test_a_connection_is_clean_before_anybody_else_gets_it(database: str) -> None:
    pool = transactions(database)
    await pool.start()
    async with pool.open() as tx:
        backend = await tx.fetchval("SELECT pg_backend_pid()")
        before = await tx.fetchval("SHOW work_mem")
        await tx.execute("SET work_mem = '1234kB'")
        await tx.fetchval("SELECT pg_advisory_lock(7)")
        await tx.execute("LISTEN something")
        await tx.execute("DECLARE kept CURSOR WITH HOLD FOR SELECT 1")
    async with pool.open() as tx:  # at once: the only connection of the pool
        assert await tx.fetchval("SELECT pg_backend_pid()") == backend
        assert await tx.fetchval("SHOW work_mem") == before
        assert await tx.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
        assert await tx.fetchval("SELECT count(*) FROM pg_listening_channels()") == 0
        assert await tx.fetchval("SELECT count(*) FROM pg_cursors WHERE is_holdable") == 0
    await pool.stop()


async def test_a_cancelled_caller_gives_its_connection_back(database: str) -> None:
    pool = transactions(database)
    await pool.start()
    inside = asyncio.Event()

    async def work() -> None:
        async with pool.open() as tx:
            await tx.fetchval("SELECT pg_advisory_lock(7)")
            inside.set()
            await asyncio.sleep(SECONDS)

    caller = asyncio.create_task(work())
    await inside.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    async with pool.open() as tx:
        assert await tx.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    await pool.stop()

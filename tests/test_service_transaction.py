"""`service.transaction()`: what becomes of its connection, and of the transaction itself, when the block is over."""

import asyncio

import asyncpg
import pytest
from sidings import NotInTransaction, PostgresUnavailable
from sidings.executor import PostgresSettings
from sidings.kafka import Transactions

from .support import SECONDS, eventually


def transactions(database: str, **options: int) -> Transactions:
    return Transactions(PostgresSettings(dsn=database, pool_size=1, **options), lambda jobs: None)


def on_their_way() -> list[asyncio.Task[object]]:
    """The connections that are being given back."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "sidings connection"]


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


async def test_the_caller_does_not_wait_until_its_connection_is_clean(database: str) -> None:
    pool = transactions(database)
    await pool.start()
    async with pool.open() as tx:
        await tx.execute("SELECT 1")
    assert len(on_their_way()) == 1
    await pool.stop()
    assert on_their_way() == []


async def test_a_transaction_that_is_over_runs_no_more_statements(database: str) -> None:
    pool = transactions(database)
    await pool.start()
    async with pool.open() as tx:
        await tx.execute("CREATE TABLE stray (id int)")
    with pytest.raises(NotInTransaction, match="has ended"):
        await tx.execute("INSERT INTO stray VALUES (1)")
    with pytest.raises(ZeroDivisionError):
        async with pool.open() as rolled_back:
            raise ZeroDivisionError
    with pytest.raises(NotInTransaction, match="has ended"):
        await rolled_back.fetch("SELECT 1")
    async with pool.open() as tx:
        assert await tx.fetchval("SELECT count(*) FROM stray") == 0
    await pool.stop()


async def test_a_connection_that_breaks_on_its_way_back_is_replaced(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = transactions(database)
    await pool.start()
    admin = await asyncpg.connect(database)
    async with pool.open() as tx:
        backend = await tx.fetchval("SELECT pg_backend_pid()")
    await admin.execute("SELECT pg_terminate_backend($1)", backend)  # before, while or after it is cleaned
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                async with pool.open() as tx:
                    assert await tx.fetchval("SELECT pg_backend_pid()") != backend
                break
            except PostgresUnavailable:
                continue
    await pool.stop()
    await admin.close()
    await eventually(lambda: not on_their_way())
    assert not [record for record in caplog.records if record.name == "asyncio"]


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
    assert on_their_way() == []

"""Waking other instances with NOTIFY."""

import asyncio
from contextlib import AsyncExitStack

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from sidings.errors import ConfigurationError
from sidings.executor import Executor, ExecutorSettings, PostgresSettings
from sidings.jobs import Job, Registry


async def test_a_commit_of_one_instance_wakes_the_owner_of_the_origin_and_nobody_else(database: str) -> None:
    registry = Registry()
    ran = asyncio.Event()

    @registry.job()
    async def work(job: Job[dict[str, str]]) -> None:
        ran.set()

    # Nobody polls within the test's time: only a notification can start the job.
    settings = ExecutorSettings(poll_seconds=1_000, notify=True)
    async with AsyncExitStack() as stack:
        executors: list[Executor] = []
        for name in ("t/0", "t/1"):
            executor = Executor(
                "test", registry, PostgresSettings(dsn=database), settings, prometheus=CollectorRegistry()
            )
            await executor.start()
            stack.push_async_callback(executor.stop)
            executor.assign([name], 1)
            await executor.settled(20)
            executors.append(executor)
        connection = await asyncpg.connect(database)
        stack.push_async_callback(connection.close)
        async with asyncio.timeout(20):
            while await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'") < 2:
                await asyncio.sleep(0.01)
        async with connection.transaction():
            await work.enqueue(connection, {}, origin="t/1")
        executors[0].committed({"t/1"})
        async with asyncio.timeout(20):
            await ran.wait()


def test_notify_is_refused_behind_pgbouncer() -> None:
    postgres = PostgresSettings(dsn="postgresql://localhost/x", pgbouncer=True)
    with pytest.raises(ConfigurationError, match="pgbouncer"):
        Executor("test", Registry(), postgres, ExecutorSettings(notify=True), prometheus=CollectorRegistry())

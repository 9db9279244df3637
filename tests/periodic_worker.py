"""An executor with periodic jobs in a process of its own, to be killed: `python periodic_worker.py DSN ORIGIN...`."""

import asyncio
import os
import sys

from prometheus_client import CollectorRegistry
from sidings import ExecutorSettings, Job, PostgresSettings, Registry, Tick
from sidings.executor import Executor

SERVICE, ORIGIN = "each_service", "each_origin"
RECORD = "INSERT INTO ran (job, type, origin, tick, previous, pid) VALUES ($1, $2, $3, $4, $5, $6)"


def a_registry() -> Registry:
    registry = Registry()

    async def record(job: Job[Tick]) -> None:
        tick = job.payload
        await job.tx.execute(RECORD, job.id, job.type, job.origin, tick.scheduled_at, tick.previous, os.getpid())

    registry.periodic(every=0.1, name=SERVICE, transactional=True)(record)
    registry.periodic(every=0.1, name=ORIGIN, per="origin", transactional=True)(record)
    return registry


async def main(dsn: str, *origins: str) -> None:
    settings = ExecutorSettings(poll_seconds=0.02, lease_seconds=1.0)
    executor = Executor("test", a_registry(), PostgresSettings(dsn=dsn), settings, prometheus=CollectorRegistry())
    await executor.start()
    executor.assign(origins)
    await executor.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""What docs/operations.md has a person do to Sidings' tables stops no job where somebody reads them for long."""

import re

import asyncpg
import pytest
from sidings import Job, Registry

from .guide import DOCS
from .support import Ride, connected, enqueue, eventually, running

TRUNCATE = "TRUNCATE sidings.job_history_default"
IDENTITY = "ALTER TABLE sidings.job_history_default REPLICA IDENTITY FULL"


@pytest.mark.parametrize(("statement", "table"), [(TRUNCATE, "job_history_default"), (IDENTITY, "pause")])
async def test_a_statement_of_the_guides_does_not_wait_for_readers(database: str, statement: str, table: str):
    """It waited for as long as they took, and all jobs behind it."""
    text = " ".join((DOCS / "operations.md").read_text().split())
    [timeout] = re.findall(rf"(?:`(SET lock_timeout = '[^`]+)`, then )?`{statement}`", text)
    jobs, ran = Registry(), []

    @jobs.job()
    async def ride(job: Job[Ride]) -> None:
        ran.append(job.payload.number)

    async with connected(database) as reader, connected(database) as person:
        for row in await reader.fetch(
            "SELECT relname FROM pg_class WHERE relname ~ '^job_history_2' AND relkind = 'r'"
        ):
            await reader.execute(f"DROP TABLE sidings.{row[0]}")  # as where the role of the service is not the owner
        async with running(database, jobs), reader.transaction():
            await reader.execute(f"LOCK TABLE sidings.{table} IN ACCESS SHARE MODE")
            if timeout:
                await person.execute(timeout)
            with pytest.raises(asyncpg.LockNotAvailableError):
                await person.execute(statement.replace("job_history_default", table), timeout=10)
            await enqueue(database, ride, [Ride(number=n) for n in range(9)])
            await eventually(lambda: len(ran) == 9)

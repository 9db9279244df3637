"""Records every run of a handler, for the proof: one row at its start, one at its end, on connections of its own."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count

import asyncpg

__all__ = ["Audit"]

INSERT = """
INSERT INTO audit (event, run, instance, job_id, attempt, transport_id, sequence, outcome, delay_seconds)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
"""
CORRECT = "UPDATE audit SET outcome = 'cancelled' WHERE run = $1 AND event = 'end'"


class Audit:
    """Writes in autocommit, outside any transaction of the service: the rows tell what happened, not what was
    committed."""

    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]", instance: str) -> None:
        self._pool = pool
        self._instance = instance
        self._numbers = count(1)

    @classmethod
    @asynccontextmanager
    async def connect(cls, dsn: str, instance: str) -> AsyncGenerator["Audit"]:
        """An open audit."""
        # The rows must outlive this process, not the server: no wait for the disk.
        settings = {"synchronous_commit": "off", "application_name": f"audit {instance}"}
        async with asyncpg.create_pool(dsn, min_size=2, max_size=4, server_settings=settings) as pool:
            yield cls(pool, instance)

    @asynccontextmanager
    async def run(
        self, transport_id: str, sequence: int, sent_at: datetime, *, job_id: int | None = None, attempt: int = 1
    ) -> AsyncGenerator[None]:
        """Around one run of a handler. Both rows are written whatever happens to the run."""
        run = f"{self._instance}-{next(self._numbers)}"
        about = (run, self._instance, job_id, attempt, transport_id, sequence)
        outcome = "cancelled"
        try:
            await self._write("start", *about, None, None)
            yield
            outcome = "succeeded"
        except Exception:
            outcome = "failed"
            raise
        finally:
            delay = (datetime.now(UTC) - sent_at).total_seconds()
            try:
                await self._write("end", *about, outcome, delay)
            except asyncio.CancelledError:
                # The job's timeout came while this was written: for the executor the attempt has failed.
                await self._pool.execute(CORRECT, run)
                raise

    async def _write(self, *values: object) -> None:
        """Insert a row; a cancellation waits until it is there. (A cancelled insert may be there or not.)"""
        writing = asyncio.ensure_future(self._pool.execute(INSERT, *values))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise

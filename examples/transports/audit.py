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
        """Around one run of a handler. The end is written also when the handler fails or is cancelled."""
        run = f"{self._instance}-{next(self._numbers)}"
        about = (run, self._instance, job_id, attempt, transport_id, sequence)
        await self._pool.execute(INSERT, "start", *about, None, None)
        outcome = "succeeded"
        try:
            yield
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            delay = (datetime.now(UTC) - sent_at).total_seconds()
            await self._pool.execute(INSERT, "end", *about, outcome, delay)

"""What the tests of query plans share: a filled database, and the nodes of a plan."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sidings.devstack.databases import create_database, drop_database

from .support import connected


@contextmanager
def filled_database(
    admin_dsn: str, template: Callable[[], Awaitable[str]], fill: str, *, analysed: bool
) -> Iterator[str]:
    """DSN of a database that all tests of a module share: they change nothing in it. analysed: after it was filled;
    otherwise before, so that the planner takes its tables for empty."""

    async def make() -> str:
        dsn = await create_database(admin_dsn, f"plans_{secrets.token_hex(4)}", template=await template())
        async with connected(dsn) as connection:
            for table in ("job", "origin", "executor"):
                await connection.execute(f"ALTER TABLE sidings.{table} SET (autovacuum_enabled = false)")
            steps = [fill, "VACUUM ANALYZE"]
            for step in steps if analysed else reversed(steps):
                await connection.execute(step)
        return dsn

    dsn = asyncio.run(make())
    try:
        yield dsn
    finally:
        asyncio.run(drop_database(admin_dsn, dsn))


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All nodes of a plan, each before those below it."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)

"""Asks whether anything has been committed at all, before many idle origins are looked at one by one."""

import asyncpg

from ..errors import PostgresUnavailable
from .link import Link

__all__ = ["GLANCE_FROM", "glance"]

GLANCE_FROM = 64  # origins; with fewer the look itself costs no more


async def glance(link: Link, sql: str) -> str | None:
    """What identifies the committed state of the database, as this link's server sees it: equal for two calls between
    which nothing has become visible; None if the server does not answer. sql: `glance.sql`."""
    try:
        return (await link.fetch(sql))[0]["snapshot"]
    except (PostgresUnavailable, asyncpg.PostgresError):
        return None  # the statement that follows will tell

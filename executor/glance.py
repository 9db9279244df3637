"""Asks whether anything has been committed at all, before many idle origins are looked at one by one."""

import asyncpg

from ..errors import PostgresUnavailable
from ..schema import load_sql
from .link import Link

__all__ = ["GLANCE_FROM", "Glance"]

GLANCE_FROM = 64  # origins; with fewer the look itself costs no more


class Glance:
    """What identifies the committed state of the database, as this link's server sees it."""

    def __init__(self, link: Link, schema: str) -> None:
        self._link = link
        self._sql = load_sql(__package__, "glance", schema)

    async def snapshot(self) -> str | None:
        """Equal for two calls between which nothing has become visible; None if the server does not answer."""
        try:
            return (await self._link.fetch(self._sql))[0]["snapshot"]
        except (PostgresUnavailable, asyncpg.PostgresError):
            return None  # the statement that follows will tell

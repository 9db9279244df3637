"""Tells other instances of commits that concern them, where switched on: a coalesced NOTIFY, never one per job.

NOTIFY takes a lock on the whole database at commit, so it is sent apart from the transactions that it tells of, at
most once every few milliseconds per process, and only for origins that this process does not hold itself.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

import asyncpg

from ..errors import PostgresUnavailable
from .link import BROKEN, Backoff, Link, connect
from .scheduler import Scheduler
from .settings import PostgresSettings

__all__ = ["Notifier"]

log = logging.getLogger("sidings.executor")

_COALESCE_SECONDS = 0.002
_MAX_PAYLOAD_BYTES = 7_000  # NOTIFY takes less than 8,000
_CHECK_SECONDS = 15.0


class Notifier:
    """Sends and receives. What it misses, polling finds: it is a matter of latency only."""

    def __init__(
        self, postgres: PostgresSettings, link: Link, scheduler: Scheduler, *, on_notified: Callable[[], None]
    ) -> None:
        self._postgres = postgres
        self._link = link
        self._scheduler = scheduler
        self._on_notified = on_notified
        self._channel = f"{postgres.schema_name}_committed"
        self._pending: set[str] = set()
        self._some = asyncio.Event()

    def announce(self, origins: Collection[str]) -> None:
        """Jobs of these origins have been committed."""
        elsewhere = [origin for origin in origins if origin not in self._scheduler.origins]
        if elsewhere:
            self._pending.update(elsewhere)
            self._some.set()

    async def send(self) -> None:
        """Send for ever."""
        while True:
            await self._some.wait()
            self._some.clear()
            origins, self._pending = self._pending, set()
            payload = "\n".join(origins)
            if len(payload.encode()) > _MAX_PAYLOAD_BYTES:
                payload = ""  # to all
            try:
                await self._link.fetch("SELECT pg_notify($1, $2)", self._channel, payload)
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                log.debug("a notification was not sent: %s", error)
            await asyncio.sleep(_COALESCE_SECONDS)

    async def listen(self) -> None:
        """Listen for ever, over a connection of its own."""
        backoff = Backoff()
        while True:
            try:
                connection = await connect(self._postgres)
            except PostgresUnavailable:
                await backoff.sleep()
                continue
            try:
                await connection.add_listener(self._channel, self._heard)
                self._on_notified()  # something may have been sent while nobody listened
                backoff.reset()
                while True:  # a connection that has died silently is found out
                    await asyncio.sleep(_CHECK_SECONDS)
                    await connection.execute("SELECT 1", timeout=self._postgres.call_seconds)
            except (*BROKEN, asyncpg.PostgresError) as error:
                log.warning("notifications are interrupted: %s", error)
                await backoff.sleep()
            finally:
                connection.terminate()

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        origins = str(payload).split("\n") if payload else []
        if not origins or any(origin in self._scheduler.origins for origin in origins):
            self._on_notified()

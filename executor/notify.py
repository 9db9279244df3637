"""Tells other instances of commits that concern them, where switched on: a coalesced NOTIFY, never one per job.

NOTIFY takes a lock on the whole database at commit, so it is sent apart from the transactions that it tells of, at
most once every few milliseconds per process, and only for origins that this process does not hold itself.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import asyncpg

from ..errors import PostgresUnavailable
from ..jobs.transaction import note_jobs
from ..outage import Outage
from ..waiting import set_within
from .clock import now
from .link import BROKEN, Backoff, Link, connect
from .scheduler import Scheduler
from .settings import PostgresSettings

__all__ = ["Notifier"]

log = logging.getLogger("sidings.executor")

_COALESCE_SECONDS = 0.002
_MAX_PAYLOAD_BYTES = 7_000  # NOTIFY takes less than 8,000
_CHECK_SECONDS = 15.0
_FOREIGN_SECONDS = 60.0  # between log lines of what others send on the channel
_MOST = 2**63 - 1  # of a bigint


class Notifier:
    """Sends and receives, over one connection: so this process is not woken on a second one by what it sends itself.
    What it misses, polling finds: it is a matter of latency only. link: sends while nothing listens."""

    def __init__(
        self,
        postgres: PostgresSettings,
        link: Link,
        scheduler: Scheduler,
        *,
        on_notified: Callable[[Mapping[str, Sequence[int]]], None],
    ) -> None:
        self._postgres = postgres
        self._link = link
        self._scheduler = scheduler
        self._on_notified = on_notified
        self._channel = f"{postgres.schema_name}_committed"
        self._pending: dict[str, list[int]] = {}
        self._some = asyncio.Event()
        self._listening: asyncpg.Connection | None = None
        self._turn = asyncio.Lock()  # one statement at a time on the connection that listens
        self._foreign_from = 0.0  # when a payload that is not ours is worth a line again

    def announce(self, jobs: Mapping[str, Sequence[int]]) -> None:
        """These jobs, by origin, have been committed."""
        for origin, ids in jobs.items():
            if origin not in self._scheduler.origins:
                note_jobs(self._pending, origin, ids)
                self._some.set()

    async def send(self) -> None:
        """Send for ever: at once after a pause, and what comes within a few milliseconds as one."""
        while True:
            await self._some.wait()
            self._some.clear()
            jobs, self._pending = self._pending, {}
            payload = _payload(jobs)
            try:
                await self._notify(payload)
            except (PostgresUnavailable, *BROKEN, asyncpg.PostgresError) as error:
                log.debug("a notification was not sent: %s", error)
            await asyncio.sleep(_COALESCE_SECONDS)

    async def _notify(self, payload: str) -> None:
        connection = self._listening
        if connection is None:
            await self._link.fetch("SELECT pg_notify($1, $2)", self._channel, payload)
            return
        async with self._turn:
            try:
                # Not pg_notify: a query is heard 0.03 to 0.06 ms later. Its commit waits for no disk.
                await connection.execute(
                    f"NOTIFY {self._channel}, {_literal(payload)}", timeout=self._postgres.call_seconds
                )
            except BROKEN:
                connection.terminate()  # which wakes `listen`
                raise

    async def listen(self) -> None:
        """Listen for ever."""
        backoff, outage = Backoff(), Outage(log, "notifications could not be received")
        while True:
            try:
                await self._listen_over(await connect(self._postgres), backoff, outage)
            except PostgresUnavailable:
                pass
            except (*BROKEN, asyncpg.PostgresError) as error:
                outage.failed(repr(error))  # of a TimeoutError there is no text
            await backoff.sleep()

    async def _listen_over(self, connection: asyncpg.Connection, backoff: Backoff, outage: Outage) -> NoReturn:
        ended = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: ended.set())
            async with asyncio.timeout(self._postgres.call_seconds):
                await connection.add_listener(self._channel, self._heard)
            self._listening = connection
            self._on_notified({})  # something may have been sent while nobody listened
            backoff.reset()
            outage.over()
            while True:
                await set_within(ended, _CHECK_SECONDS)
                async with self._turn:  # a connection that has died silently is found out
                    await connection.execute("SELECT 1", timeout=self._postgres.call_seconds)
        finally:
            self._listening = None
            connection.terminate()

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        try:
            jobs = _jobs(str(payload))
        except ValueError:
            # Any role that may connect may send here: an id that no job can have would end the executor.
            self._tell_of_foreign(str(payload))
            jobs = dict[str, list[int]]()
        self._on_notified(jobs)

    def _tell_of_foreign(self, payload: str) -> None:
        if (time := now()) >= self._foreign_from:
            self._foreign_from = time + _FOREIGN_SECONDS
            log.warning("a notification on %s is not one of ours: %.100r", self._channel, payload)


def _payload(jobs: Mapping[str, Sequence[int]]) -> str:
    """A line for each origin, with the ids of its jobs; without them, or empty (to all), where that is too long."""
    for lines in (
        ["\x1f".join([origin, *map(str, ids)]) for origin, ids in jobs.items()],
        jobs,
    ):
        payload = "\n".join(lines)
        if len(payload.encode()) <= _MAX_PAYLOAD_BYTES:
            return payload
    return ""


def _jobs(payload: str) -> dict[str, list[int]]:
    """What `_payload` has made it of. Raises `ValueError` where it has not."""
    lines = [line.split("\x1f") for line in payload.split("\n") if line]
    jobs = {origin: [int(id) for id in ids] for origin, *ids in lines}
    if any(not 0 < id <= _MOST for ids in jobs.values() for id in ids):
        raise ValueError("an id that no job can have")
    return jobs


def _literal(text: str) -> str:
    """As a constant of SQL, whatever `standard_conforming_strings` says."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"

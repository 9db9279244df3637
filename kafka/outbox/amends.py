"""Old messages of directory tables that arrive behind newer ones, put right.

A message that was sent, by a relay that lost its slot or had no answer, may arrive at any later time: behind newer ones
of its key, so that the last message of the key is an old one, and compaction keeps just that. Only the table knows
what the newest one is. So keys of which that can be are *in doubt*: they stand in the database, where they outlive this
relay, and any relay publishes what the table says of them, several times.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

import asyncpg

from ...errors import PostgresUnavailable
from ...executor import Backoff, Link, now, rest_after
from ...legible import told
from ...outage import Outage
from ...schema import load_sql
from .backlog import Row, key_of

__all__ = ["Amends", "cannot"]

log = logging.getLogger("sidings.outbox")

_REST_SECONDS = 60.0  # of a table that somebody writes: while we wait for him, all who would write it wait for us
_TRY_AGAIN = (PostgresUnavailable, asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)


class Amends:
    """Keys that are owed to the database, as ones in doubt; and topics of which some are due."""

    def __init__(self, link: Link, *, schema: str) -> None:
        self._link = link
        self._schema = schema
        self._owed: defaultdict[str, set[bytes]] = defaultdict(set)
        self._due: set[str] = set()
        self._resting: dict[str, float] = {}  # topics, and until when their tables are left alone
        self._work = asyncio.Event()

    @property
    def owed(self) -> bool:
        """Whether something is in doubt that the database does not know of."""
        return bool(self._owed)

    def owe(self, topic: str, rows: Iterable[Row]) -> None:
        """These messages may come late."""
        if keys := {key for row in rows if (key := key_of(row)) is not None}:
            self._owed[topic] |= keys
            self._work.set()

    def due(self, topics: Sequence[str]) -> None:
        """Of these, what the table says is to be published again."""
        if due := [topic for topic in topics if self._resting.get(topic, 0.0) <= now()]:
            self._due.update(due)
            self._work.set()

    async def run(self) -> None:
        """Put things right, for ever."""
        backoff, outage = Backoff(), Outage(log, "what came late could not be put right")
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                for topic in list(self._owed):
                    await self._tell(topic)
                while self._due:
                    await self._settle(self._due.pop())
                backoff.reset()
                outage.over()
            except _TRY_AGAIN as error:
                outage.failed(error)
                self._work.set()
                await backoff.sleep()
                continue
            await self._link.close()  # it is seldom needed

    async def _tell(self, topic: str) -> None:
        keys = self._owed[topic].copy()  # more may come meanwhile
        try:
            await self._fetch("doubt", topic, list(keys))
        except asyncpg.PostgresError as error:
            cannot(topic, error)
        self._owed[topic] -= keys
        if not self._owed[topic]:
            del self._owed[topic]

    async def _settle(self, topic: str) -> None:
        began = now()
        try:
            await self._fetch("settle", topic)
        except asyncpg.LockNotAvailableError:
            self._resting[topic] = now() + _REST_SECONDS
            log.warning("%s: somebody's transaction writes its table, so old messages are put right later", topic)
        except PostgresUnavailable:
            if self._link.patience == 1:
                raise  # Postgres is away, and no table's writers wait for us
            self._resting[topic] = now() + max(_REST_SECONDS, rest_after(now() - began))
            log.warning(
                "%s: its table does not answer in time, as it is large or somebody's transaction writes it, so old "
                "messages are put right later; if this is told again and again, call directory_republish",
                topic,
            )
        except asyncpg.PostgresError as error:
            cannot(topic, error)
            await self._fetch("give_up_doubts", topic)

    async def _fetch(self, query: str, *args: object) -> None:
        fetch = self._link.fetch_long if query == "settle" else self._link.fetch
        await fetch(load_sql(__package__, query, self._schema), *args)


def cannot(topic: str, error: asyncpg.PostgresError) -> None:
    """Tell that it cannot be done; what may be better in a moment is raised."""
    if isinstance(error, _TRY_AGAIN):
        raise error
    log.error(
        "%s: old messages may stand last, and cannot be put right, so call directory_republish: %s", topic, told(error)
    )

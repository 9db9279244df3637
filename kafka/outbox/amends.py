"""What a relay owes directory tables after it has lost a slot with messages under way.

They may have been written behind those of the slot's new owner, so that the last message of a key is an old one, and
compaction keeps just that. Only the table knows what the newest one is: what it says of these keys is published again.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable

import asyncpg

from ...errors import PostgresUnavailable
from ...executor import Backoff, Link
from ...schema import load_sql
from .backlog import Row

__all__ = ["Amends"]

log = logging.getLogger("sidings.outbox")

_ARRIVAL_SECONDS = 1.0  # what was written has reached Kafka by then


class Amends:
    """Keys whose state is owed to a topic. They are forgotten when the process dies."""

    def __init__(self, link: Link, *, schema: str) -> None:
        self._link = link
        self._schema = schema
        self._owed: defaultdict[str, set[bytes]] = defaultdict(set)
        self._work = asyncio.Event()

    @property
    def owed(self) -> bool:
        """Whether something is yet to be published."""
        return bool(self._owed)

    def owe(self, topic: str, rows: Iterable[Row]) -> None:
        """These messages may come late."""
        if keys := {row.key for row in rows if row.key is not None}:
            self._owed[topic] |= keys
            self._work.set()

    async def run(self) -> None:
        """Publish what is owed, for ever."""
        backoff = Backoff()
        while True:
            await self._work.wait()
            self._work.clear()
            await asyncio.sleep(_ARRIVAL_SECONDS)
            for topic in list(self._owed):
                keys = self._owed[topic].copy()  # more may come meanwhile
                try:
                    await self._link.fetch(load_sql(__package__ or "", "repeat_keys", self._schema), topic, list(keys))
                except (PostgresUnavailable, asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
                    log.warning("%s: what came late could not be put right, trying again: %s", topic, error)
                    self._work.set()
                    await backoff.sleep()
                    continue
                except asyncpg.PostgresError as error:
                    log.error(
                        "%s: old messages may stand last, and cannot be put right, so call directory_republish: %s",
                        *(topic, error),
                    )
                backoff.reset()
                self._owed[topic] -= keys
                if not self._owed[topic]:
                    del self._owed[topic]
            if not self._owed:
                await self._link.close()  # it is seldom needed

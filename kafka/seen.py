"""The ids of messages that have been handled: recorded with their effects, so that a repeat changes nothing."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import asyncpg

from ..errors import PostgresUnavailable
from ..executor import Link, PostgresSettings
from ..jobs import Transaction
from ..legible import told
from ..schema import load_sql
from .partition import Item

__all__ = ["Seen", "SeenUpkeep", "short_id"]

log = logging.getLogger("sidings.consumer")

_MAINTAIN_SECONDS = 3_600.0
_OVERDUE_SECONDS = 600.0  # by the clock, for all instances at one time: only one of them makes consumers wait
_MEANWHILE_SECONDS = 10.0
_AGAIN_SECONDS = 60.0


def short_id(topic: str, id: bytes) -> bytes:
    """An id as ``message_seen`` keeps it: 16 bytes, of its topic alone."""
    return hashlib.sha256(topic.encode() + b"\0" + id).digest()[:16]


class Seen:
    """Records ids in the handlers' transaction. Messages without an id are no duplicates."""

    def __init__(self, settings: PostgresSettings) -> None:
        schema = settings.schema_name
        self._seconds = settings.call_seconds
        self._record_sql = load_sql(__package__, "record_seen", schema)
        self._take_back_sql = load_sql(__package__, "take_back_seen", schema)

    async def record(self, tx: Transaction, items: Sequence[Item]) -> frozenset[Item]:
        """Record the ids of `items`, and return those whose id another message had, before or among them.

        A message that is delivered again, after a reset, is no repeat of itself.
        """
        repeats = await self._record(tx, [item for item in items if item.id is not None])
        # Where another transaction was recording an id, whose it is can be seen only now that it has ended: this very
        # message's, where an instance of an earlier release, which took nothing back, did not come to it.
        return frozenset(await self._record(tx, repeats))

    async def take_back(self, tx: Transaction, items: Sequence[Item]) -> None:
        """Forget the ids of `items`, which this transaction has recorded and does not come to."""
        if its := [item for item in items if item.id is not None]:
            await tx.execute(self._take_back_sql, *_columns(its), timeout=self._seconds)

    async def _record(self, tx: Transaction, items: Sequence[Item]) -> Sequence[Item]:
        """Record what is not recorded yet. Returns those of which something else is, or was a moment ago."""
        if not items:
            return items
        places: list[int] = await tx.fetchval(self._record_sql, *_columns(items), timeout=self._seconds)
        return [items[place - 1] for place in places]


class SeenUpkeep:
    """Makes the tables of the days to come, and drops those that are older than `keep_days`.

    asked: whether a consumer here has `dedup`. Else those of before are dropped, where none has it any more.
    """

    def __init__(self, settings: PostgresSettings, keep_days: int, *, asked: bool = True) -> None:
        self._link = Link(settings)
        self._keep_days = keep_days
        self._asked = asked
        self._sql = load_sql(__package__, "maintain_seen" if asked else "drop_seen", settings.schema_name)
        self._overdue_sql = load_sql(__package__, "overdue_seen", settings.schema_name)

    async def run(self) -> None:
        """Do it every hour, for ever; sooner where days could not be dropped for long."""
        while True:
            try:
                await self._link.fetch(self._sql, self._keep_days, datetime.now(UTC).date())
                overdue = self._asked and await self._look()
                seconds = _OVERDUE_SECONDS - time.time() % _OVERDUE_SECONDS if overdue else _MAINTAIN_SECONDS
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                if self._asked or not isinstance(error, PostgresUnavailable):  # of which the others tell
                    log.warning("the days of message ids could not be maintained, trying again: %s", told(error))
                seconds = _AGAIN_SECONDS
            finally:
                await self._link.close()
            await asyncio.sleep(seconds)

    async def _look(self) -> bool:
        """Say what could not be dropped, which is left for another time without an error. Whether there is any."""
        [found] = await self._link.fetch(self._overdue_sql, self._keep_days)
        if found["days"]:  # or another instance is about it
            await asyncio.sleep(_MEANWHILE_SECONDS)
            [found] = await self._link.fetch(self._overdue_sql, self._keep_days)
        if found["days"]:
            log.warning(
                "%s days of message ids, from %s on, are over dedup_days=%s and cannot be dropped: some handler's "
                "transaction is always open (stop all instances for a moment, or have slow work done by jobs), a "
                "session never lets go of them (pg_stat_activity), another role owns them, or a view depends on them, "
                "for which the log of Postgres has the reason; or its clock is ahead of this machine's",
                found["days"],
                found["first"],
                self._keep_days,
            )
        return bool(found["days"])


def _columns(items: Sequence[Item]) -> tuple[list[bytes | None], list[int], list[int]]:
    return (
        [item.id for item in items],
        [item.record.partition for item in items],
        [item.record.offset for item in items],
    )

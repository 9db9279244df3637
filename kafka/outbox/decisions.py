"""What a person decides of parked messages, carried out in parts: a relay parks millions."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import asyncpg

from ...errors import Busy, PostgresUnavailable
from ...executor import now

__all__ = ["Decisions"]

_AT_ONCE = 5_000  # one statement for all of them would take longer than it may
_FEWER = 4  # so many times fewer are next, where even these took too long


class Decisions:
    """Carries out one. fetch: runs a query of this package. long_seconds: a statement that took so long and was not
    answered had too much to do. wake: called after each part."""

    def __init__(
        self, fetch: Callable[..., Awaitable[list[Any]]], long_seconds: float, wake: Callable[[], None] | None
    ) -> None:
        self._fetch = fetch
        self._long_seconds = long_seconds
        self._wake = wake

    async def carry_out(
        self, query: str, topic: str | None, ids: Sequence[int] | None, who: str, reason: str | None
    ) -> list[int]:
        """The ids of the messages of which that is done. Raises `Busy` and `PostgresUnavailable`, which say how many
        were done before."""
        found = list[int]()
        try:
            async for done in self._parts(query, topic, ids, who, reason):
                found += done
                if self._wake is not None:
                    self._wake()
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            raise Busy(
                "another transaction, perhaps one of this call's own that was not answered, keeps a parked message "
                f"locked; {len(found)} were done before: try again, or give the ids of others"
            ) from error
        except asyncpg.InsufficientResourcesError as error:  # its disk is full, say
            raise PostgresUnavailable(
                f"Postgres has ended the statement ({type(error).__name__}: {error}); {len(found)} messages were done "
                "before: try again"
            ) from error
        except PostgresUnavailable as error:
            raise PostgresUnavailable(f"{error}; {len(found)} messages were done before: try again") from error
        return found

    async def _parts(
        self, query: str, topic: str | None, ids: Sequence[int] | None, who: str, reason: str | None
    ) -> AsyncGenerator[list[int]]:
        """What each statement has done. Of large messages fewer go at once, as many as it has the time for. One that
        was not answered has done what is parked no more, and may do the rest later."""
        most, unanswered = _AT_ONCE, set[int]()
        async for some in self._parked_ids(topic, ids):
            while some:
                part, began = some[:most], now()
                try:
                    rows = await self._fetch(query, topic, part, who, reason)
                except PostgresUnavailable as error:
                    too_many = len(part) > 1 and now() - began >= self._long_seconds
                    left = await self._left_of(part, error)
                    if left == part and not too_many:
                        raise
                    unanswered.update(left)
                    done, some = sorted({*part}.difference(left)), [*left, *some[most:]]
                    most = max(1, len(part) // _FEWER)
                else:
                    done, some = sorted({row["id"] for row in rows} | unanswered.intersection(part)), some[most:]
                    if now() - began < self._long_seconds / 2:
                        most = min(2 * most, _AT_ONCE)
                yield done

    async def _left_of(self, part: list[int], error: PostgresUnavailable) -> list[int]:
        """Those that are parked still. error: of the statement that was not answered."""
        try:
            return await self._still_parked(None, part)
        except (PostgresUnavailable, asyncpg.PostgresError):
            raise PostgresUnavailable(f"{error}; what became of {len(part)} more is not known") from error

    async def _still_parked(self, topic: str | None, ids: Sequence[int]) -> list[int]:
        return [row["id"] for row in await self._fetch("still_parked", topic, ids)]

    async def _parked_ids(self, topic: str | None, ids: Sequence[int] | None) -> AsyncGenerator[list[int]]:
        """Those that are meant, in their order, some at a time; not what is parked again meanwhile."""
        if ids is not None:
            chosen = sorted(set(ids))
            for first in range(0, len(chosen), _AT_ONCE):
                yield await self._still_parked(topic, chosen[first : first + _AT_ONCE])
            return
        after, last = 0, (await self._fetch("last_parked", topic))[0]["id"]
        while last is not None and after < last:
            rows = await self._fetch("parked_ids", topic, after, last, _AT_ONCE)
            if not rows:
                return
            yield [row["id"] for row in rows]
            after = rows[-1]["id"]

"""The database transaction that a consumer's handler works in."""

from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from ..errors import NotInTransaction

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
else:
    Connection = asyncpg.Connection

__all__ = ["Connection", "Transaction"]

T = TypeVar("T")


class Transaction:
    """An open transaction. Whoever opened it commits it: a consumer after its handler, ``service.transaction()``
    at the end of its block. It has asyncpg's query methods; `connection` is asyncpg's own object. A codec that is set
    on that stays for whoever has the connection next: where one handler needs it, let a middleware set it for all.
    """

    __slots__ = ("_connection", "enqueued", "failed", "lent", "published")

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        # Origins whose executors should look for jobs once this has committed; and of jobs that came alone, which.
        self.enqueued: dict[str, list[int]] = {}
        self.published = False  # whether a relay should look for messages then
        self.lent = False  # whether somebody has `connection`
        self.failed = False  # whether a statement has: where nothing has been rolled back to, Postgres commits no more

    @property
    def connection(self) -> Connection:
        """asyncpg's own object. Raises `NotInTransaction` after the end of a job's handler."""
        self.lent = True
        return self._open()

    def _open(self) -> Connection:
        if self._connection is None:
            raise NotInTransaction(
                "the job of this transaction has ended: its handler has to await all that it starts. asyncio.gather "
                "goes on with the others when one has failed; asyncio.TaskGroup cancels them"
            )
        return self._connection

    def close(self) -> None:
        """Its connection is going to serve others: what a handler has left behind must not reach their transactions."""
        self._connection = None

    async def _noting(self, statement: Awaitable[T]) -> T:
        try:
            return await statement
        except BaseException:  # also its caller's timeout, or cancellation: the server is told to cancel the statement
            self.failed = True
            raise

    def is_in_transaction(self) -> bool:
        """Whether the connection's transaction is open."""
        return self._open().is_in_transaction()

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        """Run `query` and return Postgres' command tag."""
        return await self._noting(self._open().execute(query, *args, timeout=timeout))

    async def executemany(self, query: str, args: Iterable[Any], *, timeout: float | None = None) -> None:
        """Run `query` once for each sequence of arguments."""
        await self._noting(self._open().executemany(query, args, timeout=timeout))

    async def fetch(self, query: str, *args: Any, timeout: float | None = None) -> list[asyncpg.Record]:
        """Run `query` and return all rows."""
        return await self._noting(self._open().fetch(query, *args, timeout=timeout))

    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None) -> asyncpg.Record | None:
        """Run `query` and return its first row, or None."""
        return await self._noting(self._open().fetchrow(query, *args, timeout=timeout))

    async def fetchval(self, query: str, *args: Any, column: int = 0, timeout: float | None = None) -> Any:
        """Run `query` and return one value of its first row, or None."""
        return await self._noting(self._open().fetchval(query, *args, column=column, timeout=timeout))

"""The database transaction that a consumer's handler works in."""

from collections.abc import Coroutine, Iterable
from inspect import CORO_CLOSED, CORO_CREATED, getcoroutinestate
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from ..errors import NotInTransaction

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
else:
    Connection = asyncpg.Connection

__all__ = ["Connection", "Transaction"]

T = TypeVar("T")

_CALLS = 16  # remembered at least: one that is awaited ends before the next


class Transaction:
    """An open transaction. Whoever opened it commits it: a consumer after its handler, ``service.transaction()``
    at the end of its block. It has asyncpg's query methods; `connection` is asyncpg's own object. A codec that is set
    on that stays for whoever has the connection next: where one handler needs it, let a middleware set it for all.
    """

    __slots__ = ("_calls", "_connection", "_most_calls", "enqueued", "failed", "lent", "published")

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        # Origins whose executors should look for jobs once this has committed; and of jobs that came alone, which.
        self.enqueued: dict[str, list[int]] = {}
        self.published = False  # whether a relay should look for messages then
        self.lent = False  # whether somebody has `connection`
        self.failed = False  # whether a statement has: where nothing has been rolled back to, Postgres commits no more
        self._calls: list[tuple[Coroutine[Any, Any, Any], str]] = []
        self._most_calls = _CALLS

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

    def begun(self, call: Coroutine[Any, Any, T], name: str) -> Coroutine[Any, Any, T]:
        """Remember a call that belongs to this transaction until it has ended, for `check_awaited`."""
        if len(self._calls) >= self._most_calls:
            self._calls = [each for each in self._calls if getcoroutinestate(each[0]) != CORO_CLOSED]
            self._most_calls = _CALLS + 2 * len(self._calls)
        self._calls.append((call, name))
        return call

    def check_awaited(self) -> None:
        """To be called before the commit. Raises `RuntimeError` where a call has not ended, as without its ``await``:
        what it should have stored would be missing, without a word."""
        for call, name in self._calls:
            state = getcoroutinestate(call)
            if state == CORO_CREATED:
                call.close()
                raise RuntimeError(f"{name}() was called and not awaited, so nothing is done: `await {name}(...)`")
            if state != CORO_CLOSED:
                raise RuntimeError(f"{name}() is still under way: await all that is started in a transaction")

    def is_in_transaction(self) -> bool:
        """Whether the connection's transaction is open."""
        return self._open().is_in_transaction()

    def execute(self, query: str, *args: Any, timeout: float | None = None) -> Coroutine[Any, Any, str]:
        """Run `query` and return Postgres' command tag."""
        return self._run("execute", query, *args, timeout=timeout)

    def executemany(
        self, query: str, args: Iterable[Any], *, timeout: float | None = None
    ) -> Coroutine[Any, Any, None]:
        """Run `query` once for each sequence of arguments."""
        return self._run("executemany", query, args, timeout=timeout)

    def fetch(self, query: str, *args: Any, timeout: float | None = None) -> Coroutine[Any, Any, list[asyncpg.Record]]:
        """Run `query` and return all rows."""
        return self._run("fetch", query, *args, timeout=timeout)

    def fetchrow(
        self, query: str, *args: Any, timeout: float | None = None
    ) -> Coroutine[Any, Any, asyncpg.Record | None]:
        """Run `query` and return its first row, or None."""
        return self._run("fetchrow", query, *args, timeout=timeout)

    def fetchval(
        self, query: str, *args: Any, column: int = 0, timeout: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Run `query` and return one value of its first row, or None."""
        return self._run("fetchval", query, *args, column=column, timeout=timeout)

    def _run(self, method: str, *args: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        return self.begun(self._noting(method, *args, **options), f"tx.{method}")

    async def _noting(self, method: str, *args: Any, **options: Any) -> Any:
        statement = getattr(self._open(), method)(*args, **options)
        try:
            return await statement
        except BaseException:  # also its caller's timeout, or cancellation: the server is told to cancel the statement
            self.failed = True
            raise

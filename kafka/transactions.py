"""Transactions for handlers: a pool of connections, and what happens when one of them breaks."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import asyncpg

from ..errors import PostgresUnavailable
from ..executor import PostgresSettings
from ..jobs import Connection, Transaction

if TYPE_CHECKING:
    Pool = asyncpg.Pool[asyncpg.Record]
else:
    Pool = asyncpg.Pool

__all__ = ["Transactions", "server_is_gone"]

log = logging.getLogger("sidings.transactions")

T = TypeVar("T")

_ROLLBACK_SECONDS = 2.0
_COMMAND_SECONDS = 60.0  # default for a handler's own statements; each call can give another

# The server's fault, not the statement's. QueryCanceledError is one of the same family, but it is the answer to a
# statement_timeout, so it belongs to the statement.
_SERVER_GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    asyncpg.CannotConnectNowError,
    asyncpg.ReadOnlySQLTransactionError,  # a standby, or a primary that has been demoted
)


def server_is_gone(error: BaseException, connection: Connection | None) -> bool:
    """Whether `error` says something about the server or the connection, and nothing about what was asked of it."""
    if isinstance(error, asyncpg.QueryCanceledError):
        return False
    return isinstance(error, _SERVER_GONE) or (connection is not None and connection.is_closed())


class Transactions:
    """Opens transactions. `on_enqueued` is called after a commit that has stored jobs, with their origins.

    The connections are those of a pool, without the planner settings that Sidings' own statements use: in here runs
    the service author's SQL. idle_seconds: after so long without a statement the server ends a transaction, so that
    a process that was stopped in the middle of one does not keep its locks; None: never.
    """

    def __init__(
        self, settings: PostgresSettings, on_committed: Callable[[set[str]], None], *, idle_seconds: float | None = 60.0
    ) -> None:
        self.settings = settings
        self.idle_seconds = idle_seconds
        self.on_published: Callable[[], None] | None = None  # after a commit that has put messages into the outbox
        self._on_committed = on_committed
        self._pool: Pool | None = None

    async def start(self) -> None:
        """Make the pool. No connection is opened before one is needed."""
        settings = self.settings
        options: dict[str, str] = {"application_name": "sidings handlers", "lock_timeout": "30000"}
        if self.idle_seconds is not None:
            options["idle_in_transaction_session_timeout"] = str(round(self.idle_seconds * 1000))
        pool = asyncpg.create_pool(
            settings.dsn,
            min_size=0,
            max_size=settings.pool_size,
            timeout=settings.connect_seconds,
            command_timeout=_COMMAND_SECONDS,
            server_settings=None if settings.pgbouncer else options,
            statement_cache_size=0 if settings.pgbouncer else 100,
        )
        await pool
        self._pool = pool

    async def stop(self) -> None:
        """Close all connections, in good order where that is quick."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            async with asyncio.timeout(_ROLLBACK_SECONDS):
                await pool.close()
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            pool.terminate()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Transaction]:
        """A transaction that commits at the end of the block, and rolls back when the block raises.

        Raises `PostgresUnavailable` when there is no connection, or it broke: after a commit that was not answered
        it is unknown whether it has happened. Other errors of Postgres pass through; nothing is committed then.
        """
        connection = await self._acquire()
        try:
            transaction = connection.transaction()
            await self._call(transaction.start(), connection)
            tx = Transaction(connection)
            try:
                yield tx
            except BaseException as error:
                await self._roll_back(transaction.rollback(), connection)
                of_postgres = isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError | OSError)
                if of_postgres and server_is_gone(error, connection):
                    raise PostgresUnavailable(f"the connection to Postgres broke: {error!r}") from error
                raise
            await self._call(transaction.commit(), connection)
        finally:
            await self._release(connection)
        if tx.enqueued:
            self._on_committed(tx.enqueued)
        if tx.published and self.on_published is not None:
            self.on_published()

    async def _acquire(self) -> Connection:
        if self._pool is None:
            raise PostgresUnavailable("the service is not running: enter it (`async with service:`) first")
        try:
            return await self._pool.acquire(timeout=self.settings.connect_seconds)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise PostgresUnavailable(f"no connection to Postgres: {error!r}") from error

    async def _call(self, call: Awaitable[T], connection: Connection) -> T:
        """BEGIN or COMMIT, in time."""
        try:
            async with asyncio.timeout(self.settings.call_seconds):
                return await call
        except BaseException as error:
            if isinstance(error, OSError | asyncpg.InterfaceError) or server_is_gone(error, connection):
                connection.terminate()  # TimeoutError is an OSError
                raise PostgresUnavailable(f"Postgres did not answer: {error!r}") from error
            if isinstance(error, asyncio.CancelledError):
                connection.terminate()
            raise

    async def _roll_back(self, rollback: Awaitable[None], connection: Connection) -> None:
        """Undo the transaction; where that is not quick, let the server find out by itself."""
        if connection.is_closed():
            rollback.close()  # type: ignore[attr-defined]
            return
        try:
            async with asyncio.timeout(_ROLLBACK_SECONDS):
                await rollback
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            log.warning("a rollback was not answered, closing the connection: %r", error)
            connection.terminate()
        except asyncio.CancelledError:
            connection.terminate()
            raise

    async def _release(self, connection: Connection) -> None:
        if self._pool is None:
            connection.terminate()
            return
        try:
            await self._pool.release(connection, timeout=_ROLLBACK_SECONDS)  # pyright: ignore[reportArgumentType]
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            log.warning("a connection could not be given back: %r", error)

"""Transactions for handlers: a pool of connections, and what happens when one of them breaks."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import asyncpg

from ..errors import ConfigurationError, NotInTransaction, PostgresUnavailable
from ..executor import CLEAN, PostgresSettings, keep_from_children, refuses_writes, takes_no_writes
from ..jobs import Connection, Transaction
from ..jobs.retry import leaves_of
from ..jobs.transaction import is_closed, terminate
from ..schema import connect_any
from .checks import check_loop

if TYPE_CHECKING:
    Pool = asyncpg.Pool[asyncpg.Record]
else:
    Pool = asyncpg.Pool

__all__ = ["Transactions", "in_transaction", "server_is_gone"]

log = logging.getLogger("sidings.transactions")

T = TypeVar("T")

_ROLLBACK_SECONDS = 2.0
_LOCK_SECONDS = 30
_COMMAND_SECONDS = 60.0  # default for a handler's own statements; each call can give another

# The server's fault, not the statement's. QueryCanceledError is one of the same family, but it is the answer to a
# statement_timeout, so it belongs to the statement.
_SERVER_GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,  # a standby, or a primary that has been demoted
)
# What comes of a connection that is gone. The last one is asyncpg 0.32's, where a shutdown's last message has arrived.
_NO_ANSWER = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)  # and TimeoutError
_OF_POSTGRES = (*_NO_ANSWER, NotInTransaction)  # as is said of a job or message that was to be stored

# The blocks of `shared` that this task stands in, also those of the task that has begun it, as of a task group. One
# that is over is empty: a task that was begun in it may go on.
_inside: ContextVar[tuple[set["Transactions"], ...]] = ContextVar("sidings_inside", default=())


def server_is_gone(error: BaseException, connection: Connection) -> bool:
    """Whether `error` says something about the server or the connection, and nothing about what was asked of it."""
    if isinstance(error, asyncpg.QueryCanceledError):
        return False
    return isinstance(error, _SERVER_GONE) or is_closed(connection)


async def _takes_no_writes(connection: Connection, error: BaseException, *, failed: bool) -> bool:
    """Whether that is what `error` says of this server, and not only of its own transaction. failed: whether one of the
    transaction's statements may have."""
    if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
        return await takes_no_writes(connection, error, failed=failed)
    return failed and refuses_writes(error)


def in_transaction(connection: Connection) -> bool:
    """Whether a transaction is open; a connection that is gone is not asked, since that is an error of its own."""
    try:
        return connection.is_in_transaction() or connection.is_closed()
    except asyncpg.InterfaceError:
        return True


async def _clean(connection: asyncpg.Connection) -> None:
    """asyncpg's own would leave the role that a block has taken, and its temporary tables, to the next one. Its task
    runs this, of which nobody fetches an error where the block is cancelled meanwhile: so it is told of here."""
    try:
        async with asyncio.timeout(_ROLLBACK_SECONDS):
            await connection.execute(CLEAN)
    except _NO_ANSWER as error:
        log.warning("a connection could not be given back: %r", error)
        connection.terminate()


class Transactions:
    """Opens transactions. `on_committed` is called after a commit that has stored jobs, with their ids by origin.

    The connections are those of a pool, without the planner settings that Sidings' own statements use: in here runs
    the service author's SQL. Consumers have some of their own beside `PostgresSettings.pool_size`, which is for
    `shared`.
    idle_seconds: after so long without a statement the server ends a transaction, so that a process that was stopped
    in the middle of one does not keep its locks; None: never.
    """

    def __init__(self, settings: PostgresSettings, on_committed: Callable[[Mapping[str, Sequence[int]]], None]) -> None:
        self.settings = settings
        self.topics = 0  # that have a consumer
        self.idle_seconds: float | None = 30.0
        self.on_published: Callable[[], None] | None = None  # after a commit that has put messages into the outbox
        self._on_committed = on_committed
        self._places = asyncio.Semaphore(settings.pool_size)  # in `shared`
        self._pool: Pool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that its connections belong to
        self._outdated = False

    async def start(self) -> None:
        """Make the pool. No connection is opened before one is needed."""
        settings = self.settings
        pool = asyncpg.create_pool(
            settings.dsn,
            password=settings.secret(),
            min_size=0,
            max_size=self._size,
            timeout=settings.connect_seconds,
            command_timeout=_COMMAND_SECONDS,
            server_settings=None if settings.pgbouncer else self._session(),
            statement_cache_size=0 if settings.pgbouncer else 100,
            init=keep_from_children,
            reset=_clean,
            connect=connect_any,  # pyright: ignore[reportArgumentType] - of the arguments that the pool gives
        )
        await pool
        self._places = asyncio.Semaphore(settings.pool_size)  # of this event loop
        self._pool, self._loop = pool, asyncio.get_running_loop()

    @property
    def started(self) -> bool:
        """Whether transactions can be opened."""
        return self._pool is not None

    @property
    def aside(self) -> int:
        """How many messages may be tried alone at once, of all topics, beside one of each."""
        return max(1, self.settings.pool_size // 2)

    @property
    def _size(self) -> int:
        consumers = 2 * self.topics + self.aside if self.topics else 0  # a main line for each, and one message aside
        return self.settings.pool_size + consumers

    def _session(self) -> dict[str, str]:
        limits = {"application_name": "sidings handlers", "lock_timeout": f"{_LOCK_SECONDS}s"}
        if self.idle_seconds is not None:
            limits["idle_in_transaction_session_timeout"] = f"{self.idle_seconds * 1000:.0f}ms"
        return limits

    def renew(self) -> None:
        """Postgres was replaced: let the next transactions open other connections. A former primary that lives on would
        take what they write, and lose it."""
        self._outdated = True

    async def stop(self) -> None:
        """Close all connections, in good order where that is quick."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            async with asyncio.timeout(_ROLLBACK_SECONDS):
                await pool.close()
        except _NO_ANSWER:
            pool.terminate()

    @asynccontextmanager
    async def shared(self) -> AsyncGenerator[Transaction]:
        """As `open`, in one of `pool_size` places: however many callers there are, and however long they take, the
        connections that are the consumers' own stay free for them."""
        self._check()
        seconds, began, places = self.settings.connect_seconds, time.monotonic(), self._places
        nested = any(self in block for block in _inside.get())
        block: set[Transactions] = {self}
        try:
            async with asyncio.timeout(seconds):
                await places.acquire()
        except TimeoutError as error:
            own = ", one by the block that this one is in" if nested else ""
            why = f"all {self.settings.pool_size} connections are in use{own}; see pool_size"
            raise PostgresUnavailable(f"no connection to Postgres: {why}", blameless=not nested) from error
        try:
            _inside.set((*filter(None, _inside.get()), block))
            async with self.open(max(0.1, seconds - (time.monotonic() - began))) as tx:
                yield tx
        finally:
            places.release()
            block.clear()

    @asynccontextmanager
    async def open(self, seconds: float | None = None) -> AsyncGenerator[Transaction]:
        """A transaction that commits at the end of the block, and rolls back when the block raises. seconds: how long
        to wait for a connection, if not `connect_seconds`.

        Raises `PostgresUnavailable` when there is no connection, or it broke: after a commit that was not answered
        it is unknown whether it has happened. `ConfigurationError` in another event loop than that of `start`. Other
        errors of Postgres pass through; nothing is committed then. One that the block has caught, as a timeout of a
        statement, has spoilt the transaction, too, unless a savepoint stood around it: then the end of the block raises
        `asyncpg.InFailedSQLTransactionError`. A call on it that was not awaited has stored nothing: `RuntimeError`.
        The same for a COMMIT or ROLLBACK in the block: its end could not tell what has been committed.
        """
        connection = await self._acquire(seconds or self.settings.connect_seconds)
        try:
            transaction = connection.transaction()
            await self._call(transaction.start, connection, begins=True)
            if self.settings.pgbouncer:  # it does not pass settings on at the start of a session
                limits = "; ".join(f"SET LOCAL {name} = '{value}'" for name, value in self._session().items())
                await self._call(partial(connection.execute, limits), connection, begins=True)
            tx = Transaction(connection, _COMMAND_SECONDS)
            try:
                try:
                    yield tx
                    await tx.flush()
                finally:
                    tx.close()
                tx.check_awaited()
                if not in_transaction(connection):  # what followed has committed by itself, or is gone
                    raise RuntimeError("the transaction was ended in its block: leave COMMIT and ROLLBACK to its end")
                if tx.failed or tx.lent:  # Postgres answers the COMMIT of an aborted one with ROLLBACK, and no error
                    await self._call(partial(connection.execute, "SELECT"), connection)
            except BaseException as error:
                await self._undo(error, transaction.rollback, connection, tx)
                raise
            await self._call(transaction.commit, connection)
            if tx.enqueued:
                self._on_committed(tx.enqueued)
            if tx.published and self.on_published is not None:
                self.on_published()
        finally:
            await self._release(connection)

    async def _undo(
        self, error: BaseException, rollback: Callable[[], Awaitable[None]], connection: Connection, tx: Transaction
    ) -> None:
        """Roll back after `error`, and say so where it was the server's."""
        of_postgres = [each for each in leaves_of(error) if isinstance(each, _OF_POSTGRES)]
        gone = next((each for each in of_postgres if server_is_gone(each, connection) or refuses_writes(each)), None)
        blameless = False
        if gone is not None or any(isinstance(each, PostgresUnavailable) for each in leaves_of(error)):
            try:
                if gone is not None:
                    blameless = await _takes_no_writes(connection, gone, failed=tx.failed or tx.lent)
            finally:  # Also where it still answers: a demoted primary must not come back from the pool.
                terminate(connection)
        elif tx.lent:  # what the block has left running may go on with asyncpg's own object, which must lead nowhere
            await self._roll_back(partial(connection.execute, "ROLLBACK; BEGIN"), connection)  # no lock outlives it
            terminate(connection)
        else:
            await self._roll_back(rollback, connection)
        if gone is not None:
            told = f"the connection to Postgres broke: {error!r}"
            raise PostgresUnavailable(told, blameless=blameless) from error

    def _check(self) -> Pool:
        if self._pool is None:
            raise PostgresUnavailable("the service is not running: enter it (`async with service:`) first")
        check_loop(self._loop, "that the service runs in", ", or store through a connection of your own")
        return self._pool

    async def _acquire(self, seconds: float) -> Connection:
        pool = self._check()
        try:
            if self._outdated:
                self._outdated = False
                await pool.expire_connections()
            return await pool.acquire(timeout=seconds)
        except TimeoutError as error:
            used = pool.get_size() - pool.get_idle_size()
            why = f"all {used} connections are in use; see pool_size" if used >= self._size else "it did not answer"
            raise PostgresUnavailable(f"no connection to Postgres: {why}", blameless=True) from error
        # Of an option that this server does not take; and a host is looked up in a thread, which may not be had.
        except (*_NO_ANSWER, ConfigurationError, RuntimeError) as error:
            raise PostgresUnavailable(f"no connection to Postgres: {error!r}", blameless=True) from error

    async def _call(self, call: Callable[[], Awaitable[T]], connection: Connection, *, begins: bool = False) -> T:
        """BEGIN or COMMIT, in time. Where the connection is closed, asyncpg refuses them before there is anything to
        await. begins: nothing has been done on the connection yet."""
        try:
            async with asyncio.timeout(self.settings.call_seconds):
                return await call()
        except BaseException as error:
            gone = server_is_gone(error, connection) or refuses_writes(error)
            busy = isinstance(error, asyncpg.InterfaceError) and not gone and not begins
            if gone or isinstance(error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError):
                try:
                    blameless = begins or await _takes_no_writes(connection, error, failed=True)
                finally:
                    terminate(connection)
                if busy:  # with what was started on asyncpg's own object
                    raise RuntimeError(f"await all that is started in a transaction: {error}") from error
                raise PostgresUnavailable(f"Postgres did not answer: {error!r}", blameless=blameless) from error
            if isinstance(error, asyncio.CancelledError):
                terminate(connection)
            raise

    async def _roll_back(self, rollback: Callable[[], Awaitable[object]], connection: Connection) -> None:
        """Undo the transaction; where that is not quick, let the server find out by itself."""
        if is_closed(connection):
            return
        try:
            async with asyncio.timeout(_ROLLBACK_SECONDS):
                await rollback()
        except _NO_ANSWER as error:
            log.warning("a rollback was not answered, closing the connection: %r", error)
            terminate(connection)
        except asyncio.CancelledError:
            terminate(connection)
            raise

    async def _release(self, connection: Connection) -> None:
        if self._pool is None or is_closed(connection):
            terminate(connection)
            return
        try:
            most = 2 * _ROLLBACK_SECONDS  # `_clean` gives up before
            await self._pool.release(connection, timeout=most)  # pyright: ignore[reportArgumentType]
        except _NO_ANSWER as error:
            log.warning("a connection could not be given back: %r", error)

"""Runs the statements of administration, and says in words what goes wrong."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from ...errors import (
    ActionRefused,
    AdministrationError,
    Busy,
    ConfigurationError,
    JobNotFound,
    PostgresUnavailable,
    SchemaTooOld,
    SidingsError,
)
from ...schema import load_sql, valid_schema_name
from ..transaction import Connection, is_closed

if TYPE_CHECKING:
    Database = Connection | asyncpg.Pool[asyncpg.Record]
else:
    Database = asyncpg.Connection | asyncpg.Pool

__all__ = ["Calls", "Database", "refused"]

_ERRORS: dict[str, type[SidingsError]] = {
    "SD003": JobNotFound,
    "SD004": ActionRefused,
    "22023": ActionRefused,
    "22P02": ActionRefused,  # a value that is no id, no outcome
    "22000": ActionRefused,  # one of another type, which asyncpg has not sent
    "22021": ActionRefused,  # a text with NUL
    "3F000": SchemaTooOld,
    "42P01": SchemaTooOld,
    "42883": SchemaTooOld,
    "42703": SchemaTooOld,
}
# The server's fault, not the statement's.
_GONE = (
    OSError,  # TimeoutError too
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InternalClientError,  # asyncpg 0.32, when a shutdown's last message has reached an idle connection
)
# The server answers, and what it was asked for is undone.
_ENDED = (
    asyncpg.QueryCanceledError,  # by a statement_timeout of the role or the database, or by somebody
    asyncpg.InsufficientResourcesError,  # its disk is full, say
    asyncpg.SerializationError,  # on a standby: the statement was in the way of what the primary has removed
)
_ROLLBACK_SECONDS = 5.0
# For walks along an index: a bitmap has to be sorted, and both may look cheaper where a table was analysed long ago.
_WALK = "SET LOCAL enable_bitmapscan = off; SET LOCAL enable_seqscan = off; SET LOCAL jit = off"


class Calls:
    """The ``.sql`` files of this package on one connection or pool. timeout: seconds for each of them.

    Raises `ConfigurationError` for anything else.
    """

    def __init__(self, database: Database, schema: str, timeout: float) -> None:
        if not (isinstance(database, asyncpg.Pool) or hasattr(database, "is_closed")):
            raise ConfigurationError(f"Admin(<{type(database).__name__}>): give a connection of asyncpg, or a pool")
        self._database = database
        self._schema = valid_schema_name(schema)
        self._timeout = timeout

    async def rows(self, name: str, *arguments: object) -> list[asyncpg.Record]:
        """All rows of a query, which is sent in autocommit."""
        async with self._connection() as connection:
            return await self._fetch(connection, self._timeout, name, arguments)

    async def act(self, name: str, *arguments: object, seconds: float = 0.0) -> list[asyncpg.Record]:
        """All rows of an action, in a transaction of its own: a database or a role may have another isolation level for
        a default. seconds: that it may take, if that is longer."""
        timeout = max(self._timeout, seconds)
        async with self._connection() as connection, _transaction(connection, "", self._timeout):
            return await self._fetch(connection, timeout, name, arguments)

    async def value(self, name: str, *arguments: object, seconds: float = 0.0) -> Any:
        """The one value of an action."""
        return (await self.act(name, *arguments, seconds=seconds))[0][0]

    async def walk(self, name: str, *arguments: object) -> list[asyncpg.Record]:
        """All rows of a query that walks along indexes of the job table, whatever the planner knows of the table."""
        async with self._connection() as connection, _transaction(connection, "READ ONLY", self._timeout):
            await connection.execute(_WALK, timeout=self._timeout)
            return await self._fetch(connection, self._timeout, name, arguments)

    async def _fetch(
        self, connection: Connection, seconds: float, name: str, arguments: tuple[object, ...]
    ) -> list[asyncpg.Record]:
        """For the end of another statement, of which asyncpg may tell the server before, it waits without limit."""
        async with asyncio.timeout(seconds):
            return await connection.fetch(load_sql(__package__, name, self._schema), *arguments, timeout=seconds)

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[Connection]:
        connection: Connection | None = None
        try:
            if isinstance(self._database, asyncpg.Pool):
                async with self._database.acquire(timeout=self._timeout) as connection:
                    yield connection
            elif self._database.is_closed():
                raise PostgresUnavailable(
                    "the connection of this Admin is closed, by Postgres or here; nothing was sent: give it an open "
                    "one, or a pool"
                )
            elif self._database.is_in_transaction():
                raise ActionRefused(
                    "administration needs a connection without an open transaction: executors would wait until it ends"
                )
            else:
                connection = self._database
                yield connection
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            raise Busy(
                "somebody else is changing the same rows, or has a table locked, just now; nothing has changed: try "
                "again, or see whose transaction it is (pg_blocking_pids, pg_stat_activity)"
            ) from error
        except (*_GONE, asyncpg.InterfaceError) as error:
            if isinstance(error, asyncpg.InterfaceError) and (connection is None or not is_closed(connection)):
                raise  # a mistake in its use
            raise PostgresUnavailable(
                f"Postgres did not answer ({type(error).__name__}: {error}); the audit tells whether it was done"
            ) from error
        except asyncpg.ReadOnlySQLTransactionError as error:
            raise PostgresUnavailable(
                f"this Postgres can only be read, as a standby ({error}); nothing has changed: act on the primary "
                "(postgresql://host1,host2/database?target_session_attrs=primary finds it)"
            ) from error
        except _ENDED as error:
            raise PostgresUnavailable(
                f"Postgres has ended the statement ({type(error).__name__}: {error}); nothing has changed"
            ) from error
        except asyncpg.PostgresError as error:
            raise _in_words(error, self._schema) from error


@asynccontextmanager
async def _transaction(connection: Connection, mode: str, timeout: float) -> AsyncGenerator[None]:
    """asyncpg's own has no limit: it waits for ever for a server that has ceased to answer."""
    try:
        await connection.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED {mode}", timeout=timeout)
        yield
        await connection.execute("COMMIT", timeout=timeout)
    except BaseException:
        try:
            async with asyncio.timeout(_ROLLBACK_SECONDS):
                await connection.execute("ROLLBACK")
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            if not is_closed(connection):
                connection.terminate()  # which ends the transaction as well
        raise


def refused(code: str, text: str) -> AdministrationError:
    """The error of an action on one of many jobs, by its SQLSTATE."""
    kinds: dict[str, type[AdministrationError]] = {"SD003": JobNotFound, "SD004": ActionRefused}
    return kinds.get(code, Busy)(text)


def _in_words(error: asyncpg.PostgresError, schema: str) -> Exception:
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return ActionRefused(
            f"{error}: use the role that owns the schema {schema!r}, or give this one the rights that "
            "docs/operations.md names"
        )
    kind = _ERRORS.get(error.sqlstate or "")
    if kind is None:
        return error
    if kind is SchemaTooOld:
        return SchemaTooOld(f"the schema {schema!r} is missing or lacks migrations ({error}): call migrate()")
    hint = getattr(error, "hint", None)
    message = getattr(error, "message", None) or str(error)
    return kind(f"{message}: {hint}" if hint else message)

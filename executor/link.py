"""One database connection that is opened when needed and thrown away when it misbehaves."""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, cast

import asyncpg

from ..errors import PostgresUnavailable
from ..jobs import Connection
from ..schema import check, connect_any, without_account
from .clock import now
from .forks import keep_from_children
from .settings import PostgresSettings

__all__ = [
    "BROKEN",
    "IDLE_SECONDS",
    "MOST_IDLE_SECONDS",
    "NOT_NOW",
    "Backoff",
    "Link",
    "check_schema",
    "close_all",
    "connect",
    "refuses_writes",
    "rest_after",
    "takes_no_writes",
]

log = logging.getLogger("sidings.executor")

# Nothing that a query's result depends on, only guards against plans and waits that must not happen. A sequential
# scan is what a generic plan made on an empty table would choose; jit costs more than these statements take. What is on
# here by itself a role or a database may have switched off.
_OF_THE_PLANNER = {
    "enable_bitmapscan": "off",  # its result would have to be sorted
    "enable_indexscan": "on",
    "enable_nestloop": "on",
    "enable_seqscan": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}
# The isolation level is the one that the protocols were checked with; under SERIALIZABLE our reads would also make
# transactions of the service fail.
_SERVER_SETTINGS = {
    "application_name": "sidings",
    "default_transaction_isolation": "read committed",
    "lock_timeout": "3000",
    **_OF_THE_PLANNER,
}
IDLE_SECONDS = 300.0  # after which the server ends the transaction of a handler that sends it nothing
MOST_IDLE_SECONDS = 2_147_483.0  # that PostgreSQL takes for it: 24.8 days
_FOR_HANDLERS = {
    "application_name": "sidings",
    "idle_in_transaction_session_timeout": f"{int(IDLE_SECONDS)}s",
}

_MOST_PATIENCE = 8
_LONG_SECONDS, _LONG_SHARE = 3.0, 0.9  # what counts as a long statement, and of `call_seconds` where these are fewer
_QUICK_SECONDS = 1.0  # after a long statement that was quicker the next needs no more time than others
_REST, _MOST_REST_SECONDS = 20.0, 300.0
_ASK_SECONDS = 2.0
_GIVE_IDS = ("GetNewTransactionId", "GetNewMultiXactId")  # functions of Postgres, which its errors name
_OF_A_QUERY = ("pgsql_tmp", "/PostgreSQL.", "pg_dynshmem")  # of shared memory a container has little

# It welcomes clients for which it has none.
_OF_A_POOLER = " (right after it was connected: PgBouncer may have no more connections to the server)"

BROKEN = (
    OSError,  # TimeoutError too
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.OperatorInterventionError,  # shutdown, crash of another backend, cancelled by an administrator
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,  # a standby, or a primary that has been demoted
    asyncpg.InternalClientError,  # asyncpg 0.32, when a shutdown's last message has reached an idle connection
)

# What Postgres refuses for the time being: its disk is full, which a connection may need; the database takes none, as
# while it is renamed; somebody has a table locked, as a migration.
NOT_NOW = (asyncpg.InsufficientResourcesError, asyncpg.ObjectNotInPrerequisiteStateError)


class Backoff:
    """Delays between attempts to reach a server: exponential with full jitter, from 50 ms to 2 s."""

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        """The last attempt has succeeded."""
        self._failures = 0

    async def sleep(self) -> None:
        """Wait before the next attempt."""
        self._failures = min(self._failures + 1, 10)
        await asyncio.sleep(random.uniform(0.02, min(2.0, 0.05 * 2**self._failures)))


async def connect(
    settings: PostgresSettings, *, for_handlers: bool = False, statement_seconds: float | None = None
) -> asyncpg.Connection:
    """Open a connection with the settings that our statements rely on; for a handler's own statements, without them.

    statement_seconds: after which a statement is given up, where the caller gives it no other time, and the server ends
    it as well: it notices only when it writes that its client has gone, and a scan would go on till then. None:
    whatever it takes.

    Raises `PostgresUnavailable`; `ConfigurationError` where a pooler answers and the settings do not say so, or an
    option of the DSN is refused.
    """
    connection = await _connect(settings, for_handlers, statement_seconds)
    await keep_from_children(connection)
    return connection


async def _connect(
    settings: PostgresSettings, for_handlers: bool, statement_seconds: float | None
) -> asyncpg.Connection:
    try:
        options: dict[str, Any] = {"statement_cache_size": 0}
        if not settings.pgbouncer:
            chosen = _FOR_HANDLERS.copy() if for_handlers else _SERVER_SETTINGS.copy()
            if statement_seconds is not None:
                chosen["statement_timeout"] = str(max(1, round(statement_seconds * 1000)))
            options = {"server_settings": chosen}
        return await connect_any(
            settings.dsn,
            password=settings.secret(),
            timeout=settings.connect_seconds,
            command_timeout=statement_seconds,
            **options,
        )
    except (*BROKEN, RuntimeError) as error:  # a host is looked up in a thread, and there may be none left for it
        raise _unreached(settings, error) from error


async def takes_no_writes(connection: Connection, error: BaseException, *, failed: bool) -> bool:
    """Whether the server that `connection` leads to takes no writes, like a standby, or one whose disk is full, which
    only the `error` that its handler has raised tells, or that is kept from filling it. What the transaction has done
    is undone, also where it has itself forbidden them; another one is open. failed: whether a statement of the
    transaction may have: else the full disk is another server's."""
    if refuses_writes(error) and (failed or any(isinstance(each, PostgresUnavailable) for each in _all_of(error))):
        return True
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            await connection.execute("ROLLBACK; BEGIN")
            return await connection.fetchval("SHOW transaction_read_only") == "on"
    except (*BROKEN, asyncpg.PostgresError):
        return False
    except BaseException:  # cancelled: nobody would end what is open now
        connection.terminate()
        raise


def refuses_writes(error: BaseException) -> bool:
    """Whether Postgres has no room for what is written, or no transaction ids left before a wraparound, also where a
    handler has made another error of that. No room for a query's own temporary files, or for what its parallel workers
    share, is that query's failure: it would have none again each time."""
    for each in _all_of(error):
        if isinstance(each, asyncpg.DiskFullError):
            return not any(part in str(each) for part in _OF_A_QUERY)
        if isinstance(each, asyncpg.ProgramLimitExceededError):  # the code also of what is too long for an index
            return each.as_dict().get("server_source_function") in _GIVE_IDS
    return False


def _all_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was made of."""
    left, seen = [error], set[int]()
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [inner for inner in (each.__cause__, each.__context__) if inner is not None]
            if isinstance(each, BaseExceptionGroup):
                left += cast(BaseExceptionGroup[BaseException], each).exceptions


def rest_after(took: float) -> float:
    """Seconds until what reads all that waits may be asked for again, if it took so many: twenty times as many, but
    five minutes at most, since Postgres may have been away meanwhile."""
    return min(_REST * took, _MOST_REST_SECONDS)


class Link:
    """A connection of our own for one loop, one statement at a time. Every call has a timeout, which begins when its
    turn comes; after a failure the connection is thrown away and the next call opens another one. `on_error` is told of
    failures, `on_refused` of errors that Postgres reports for the statement itself. patience: how many times
    `call_seconds` a call may take, from the next connection on. long_seconds: what failed after so many may have taken
    too long, and is to be followed by something smaller."""

    def __init__(
        self,
        settings: PostgresSettings,
        on_error: Callable[[], None] | None = None,
        on_refused: Callable[[], None] | None = None,
    ) -> None:
        self._settings = settings
        self._on_error = on_error
        self._on_refused = on_refused
        self._connection: asyncpg.Connection | None = None
        self._answering: asyncpg.Connection | None = None  # when `lived_on` was asked last
        self._turn = asyncio.Lock()
        self._outdated = False
        self.patience = 1
        self.long_seconds = min(_LONG_SECONDS, _LONG_SHARE * settings.call_seconds)

    async def fetch(self, query: str, *args: object) -> list[asyncpg.Record]:
        """Run one statement in autocommit and return its rows.

        Raises `PostgresUnavailable` when the connection failed or the call took too long: whether the statement has
        committed is unknown then. Errors that Postgres reports for the statement itself pass through: it has not.
        """
        async with self._turn:  # who is cancelled here has no statement under way
            return await self._fetch(query, args)

    async def _fetch(self, query: str, args: tuple[object, ...]) -> list[asyncpg.Record]:
        if self._outdated:
            self.drop()
        connection, unanswered = self._connection, False
        seconds = self._settings.call_seconds * self.patience
        try:
            if connection is None or connection.is_closed():
                connection = self._connection = await connect(self._settings, statement_seconds=seconds)
                unanswered = self._settings.pgbouncer
            if not self._settings.pgbouncer:
                # asyncpg's own limit is not one of all: that it keeps a statement no more it tells the server when the
                # next one has been prepared, and waits for the answer however long.
                async with asyncio.timeout(seconds):
                    return await connection.fetch(query, *args)
            # PgBouncer hands out a server connection per transaction: parse and execute have to share one.
            transaction = connection.transaction(isolation="read_committed")
            async with asyncio.timeout(seconds):
                await transaction.start()
                try:
                    await connection.execute(_local(seconds))
                    unanswered = False
                    rows = await connection.fetch(query, *args)
                except Exception:  # where it is given up, a ROLLBACK would wait for its answer, for as long as it takes
                    await transaction.rollback()
                    raise
                await transaction.commit()
                return rows
        except BROKEN as error:
            self.drop()
            if self._on_error is not None:
                self._on_error()
            what = "takes no writes" if isinstance(error, asyncpg.ReadOnlySQLTransactionError) else "did not answer"
            hint = _OF_A_POOLER if unanswered and isinstance(error, TimeoutError) else ""
            raise PostgresUnavailable(f"Postgres {what}: {_text(error)}{hint}") from error
        except PostgresUnavailable:
            if self._on_error is not None:
                self._on_error()
            raise
        except asyncpg.PostgresError:
            if self._on_refused is not None:
                self._on_refused()
            raise
        except asyncio.CancelledError:
            self.drop()  # a statement may be under way
            raise

    async def fetchrow(self, query: str, *args: object) -> asyncpg.Record | None:
        """The first row of `fetch`, or None."""
        rows = await self.fetch(query, *args)
        return rows[0] if rows else None

    async def fetch_long(
        self, query: str, *args: object, tells: Callable[[list[asyncpg.Record]], bool] = lambda _: True
    ) -> list[asyncpg.Record]:
        """`fetch` of what may take longer than a call may, as all that waits is counted: it is given more time then,
        as `be_patient` says, and so is the next one, until one is quick. tells: whether an answer shows how long it
        takes."""
        while True:
            began, patience = now(), self.patience
            try:
                rows = await self.fetch(query, *args)
                break
            except PostgresUnavailable:
                await self.be_patient()
                if self.patience <= patience:  # it is away, or has had all the time that there is
                    raise
        if self.patience > 1 and now() - began < _QUICK_SECONDS and tells(rows):
            self.patience = 1
            self.renew()  # its server goes on with a statement for longer than we wait from now on, locks included
        return rows

    async def be_patient(self) -> None:
        """Let calls take twice as long, up to eight times `call_seconds`; but not where the server, or the way there,
        hangs."""
        self.patience = min(2 * self.patience, _MOST_PATIENCE)
        try:
            await self.fetch("SELECT")
        except (PostgresUnavailable, asyncpg.PostgresError):
            self.patience = 1

    def lived_on(self, pid: int) -> bool:
        """Whether the process of Postgres that has given the last answer, `pid`, had also given the one after which
        this was asked before. Then Postgres has not crashed in between: a crash ends all of them. A connection to
        PgBouncer, which lives on, has another process."""
        before, connection = self._answering, self._connection
        direct = connection is not None and connection.get_server_pid() == pid
        self._answering = connection if direct else None
        return direct and connection is before

    def renew(self) -> None:
        """Let the next call open another connection. A call that is under way goes on: terminated from outside, it
        could fail with anything."""
        self._outdated = True

    def drop(self) -> None:
        """Throw the connection away without a word to the server, which may be gone."""
        connection, self._connection, self._outdated = self._connection, None, False
        if connection is not None:
            connection.terminate()

    async def close(self) -> None:
        """Close the connection in good order; without a word where a statement is under way. There asyncpg, up to 0.31,
        waits without limit until the server has taken note of its cancellation."""
        if self._turn.locked():
            self.drop()
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            try:
                await connection.close(timeout=1.0)
            except BROKEN:
                connection.terminate()


async def close_all(links: Collection[Link]) -> None:
    """Close the connections in good order, all at once; where this is cancelled, without a word."""
    try:
        await asyncio.gather(*(link.close() for link in links))
    finally:
        for link in links:
            link.drop()


def _local(seconds: float) -> str:
    """What a connection to PgBouncer has to set in each transaction. Where a statement is one of several messages, a
    process that is paused in between, or a machine that is gone, would keep its locks; a takeover waits for them."""
    most = max(1, round(seconds * 1000))
    limits = {"lock_timeout": 3000, "statement_timeout": most, "idle_in_transaction_session_timeout": most}
    return "; ".join(f"SET LOCAL {name} = {value}" for name, value in {**limits, **_OF_THE_PLANNER}.items())


def _unreached(settings: PostgresSettings, error: BaseException) -> PostgresUnavailable:
    return PostgresUnavailable(f"no connection to {without_account(settings.dsn)}: {_text(error)}")


def _text(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return "a file that the DSN names is not there: the socket in host=, or that of sslrootcert, sslcert or sslkey"
    # The server's last message has come, and not yet the end of the connection: none of ours is in progress.
    if isinstance(error, asyncpg.InternalClientError) and "another operation" in str(error):
        return "it has ended the session"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def check_schema(settings: PostgresSettings, service: str) -> None:
    """`schema.check` over a connection of its own. The log is told where commits do not wait for the disk.

    Raises `SchemaError` if the database answers and its schema does not fit, `PostgresUnavailable` if it does not, or
    not now.
    """
    connection = None
    try:
        # Each of its statements has its time: together they take many round trips, and a start would never succeed
        # where Postgres is slow.
        connection = await connect(settings, statement_seconds=settings.call_seconds)
        await check(connection, service=service, schema=settings.schema_name)
        if await connection.fetchval("SHOW synchronous_commit") == "off":
            _tell_of_commits(without_account(settings.dsn))
        await connection.close(timeout=settings.call_seconds)
    except (*BROKEN, *NOT_NOW) as error:
        raise PostgresUnavailable(f"the schema could not be checked: {error!r}") from error
    finally:
        if connection is not None:
            connection.terminate()


@cache  # a start looks several times
def _tell_of_commits(where: str) -> None:
    log.warning(
        "synchronous_commit is off in %s: of a transaction that a crash of Postgres loses, jobs may have run and "
        "messages been sent (docs/guarantees.md); ALTER ROLE ... RESET synchronous_commit, or ALTER DATABASE",
        where,
    )

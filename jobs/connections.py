"""The connections that jobs and messages can be stored through, and all that their drivers differ in.

None of these libraries but asyncpg is a dependency, and none is imported before a connection of it is at hand: it is
known by the names of its class and package: of the class that it says to have, since tracers wrap connections in
proxies. Every way runs the same statements in the transaction that stands open.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import asyncpg

from ..errors import EnqueueError, MissingOrigin, NotInTransaction, SchemaError, SchemaMissing, SchemaTooOld
from ..schema import load_sql
from .transaction import Connection, Transaction

if TYPE_CHECKING:
    import psycopg
    from django.db.backends.base.base import BaseDatabaseWrapper
    from sqlalchemy import Connection as AlchemyConnection
    from sqlalchemy.ext.asyncio import AsyncConnection

    # Those of the other libraries, by their methods: by its class, a type checker does not know that of a library which
    # is not installed, and calls each `enqueue` "partially unknown".
    class _Async(Protocol):
        def commit(self) -> Awaitable[None]: ...
        def rollback(self) -> Awaitable[None]: ...

    class _Sync(Protocol):
        def commit(self) -> None: ...
        def rollback(self) -> None: ...

    class _Psycopg(Protocol):
        @property
        def autocommit(self) -> bool: ...
        @property
        def info(self) -> Any: ...
        def pipeline(self) -> Any: ...

    class _Alchemy(Protocol):
        def exec_driver_sql(self, statement: str, /) -> Any: ...

    class _Session(Protocol):
        def connection(self) -> Any: ...
        def flush(self) -> Any: ...

    class _AsyncPsycopg(_Psycopg, _Async, Protocol): ...

    class _AsyncAlchemy(_Alchemy, _Async, Protocol): ...

    class _AsyncSession(_Session, _Async, Protocol): ...

    class _SyncPsycopg(_Psycopg, _Sync, Protocol): ...

    class _SyncAlchemy(_Alchemy, _Sync, Protocol): ...

    class _SyncSession(_Session, _Sync, Protocol): ...

    class _Django(Protocol):  # django.db.connection, and what it stands for
        def __getattr__(self, name: str, /) -> Any: ...

    class _DjangoWrapper(Protocol):
        @property
        def in_atomic_block(self) -> bool: ...
        def get_autocommit(self) -> Any: ...

    AnyConnection = Connection | _AsyncPsycopg | _AsyncAlchemy | _AsyncSession
    AnySyncConnection = _SyncPsycopg | _SyncAlchemy | _SyncSession | _Django | _DjangoWrapper
else:
    AnyConnection = AnySyncConnection = object

__all__ = ["AnyConnection", "AnySyncConnection", "Rows", "Statement", "Storing", "store", "store_sync"]

C = TypeVar("C")
R = TypeVar("R")


class Row(Protocol):
    """What a statement gives for each job: its id, and its origin where the caller did not know it. For many jobs whose
    origin is known: a single row, with the list of their ids."""

    def __getitem__(self, column: int, /) -> Any: ...


Rows = Sequence[Row]

_IDLE, _ACTIVE = 0, 1  # psycopg's TransactionStatus
_ACCEPTED = "asyncpg, psycopg 3 (AsyncConnection), SQLAlchemy 2 (AsyncConnection, AsyncSession)"
_ACCEPTED_SYNC = "psycopg 3 (Connection), SQLAlchemy 2 (Connection, Session), django.db.connection"
_DRIVERS = {"asyncpg": "numbered", "psycopg": "named"}  # SQLAlchemy's, and how they want the parameters


class Storing(NamedTuple):
    """What is stored and by which call, in the words of error messages. package: of the ``.sql`` files. many: whether
    there is a call for many, too."""

    package: str
    what: str
    call: str
    many: bool = True


_JOBS = Storing(__package__ or "", "job", "enqueue")


class Statement(NamedTuple):
    """One of the ``.sql`` files with its arguments. jobs: how many (or messages) it stores. origin: theirs; "" where
    the statement finds it out, and gives it beside each id."""

    name: str
    schema: str
    arguments: tuple[object, ...]
    jobs: int
    origin: str
    storing: Storing = _JOBS

    @property
    def numbered(self) -> str:
        """With the parameters ``$1``, ``$2`` …, as Postgres itself has them."""
        return load_sql(self.storing.package, self.name, self.schema)

    @property
    def named(self) -> str:
        """With the parameters ``%(p1)s``, ``%(p2)s`` …, as psycopg has them."""
        return _named(self.storing.package, self.name, self.schema)

    @property
    def named_arguments(self) -> dict[str, object]:
        return {f"p{number}": value for number, value in enumerate(self.arguments, 1)}


@cache
def _named(package: str, name: str, schema: str) -> str:
    lines = load_sql(package, name, schema).replace("%", "%%").splitlines()
    return re.sub(r"\$(\d+)", r"%(p\1)s", "\n".join(line for line in lines if not line.startswith("--")))


class Way(NamedTuple, Generic[C, R]):
    """How jobs and messages are stored through one kind of connection.

    autocommit: whether each statement would commit by itself; raises `EnqueueError` where the server is no Postgres.
    remedy: what its user should do then. run: the statement. connect: gives a session's connection, or
    waits until its state can be told.
    """

    autocommit: Callable[[C], bool]
    remedy: str
    run: Callable[[C, Statement], R]
    connect: Callable[[Any], Any] | None = None


async def store(
    connection: Transaction | AnyConnection, made: Callable[[], Statement], storing: Storing = _JOBS
) -> tuple[Statement, Rows]:
    """Run the statement that `made` gives in the connection's open transaction. Raises `EnqueueError` for a connection
    of an unknown kind, `NotInTransaction` for one in autocommit; nothing has been sent then. `SchemaError` where the
    tables are not there, `MissingOrigin` where the row of a home went away meanwhile: these spoil the transaction."""
    autocommit, remedy, run, connect = _way(connection.__class__, storing)
    opened = connection if connect is None else await connect(connection)
    if autocommit(opened):
        raise _in_autocommit(storing, remedy)
    statement = made()  # only now: a session's flush may have waited for a lock
    try:
        return statement, (await run(opened, statement) if statement.jobs else ())
    except Exception as error:
        if (told := _told(error, statement)) is not None:
            raise told from error
        raise


def store_sync(
    connection: AnySyncConnection, made: Callable[[], Statement], storing: Storing = _JOBS
) -> tuple[Statement, Rows]:
    """`store` for synchronous code."""
    autocommit, remedy, run, connect = _sync_way(connection.__class__, storing)
    opened = connection if connect is None else connect(connection)
    if autocommit(opened):
        raise _in_autocommit(storing, remedy)
    statement = made()
    try:
        return statement, (run(opened, statement) if statement.jobs else ())
    except Exception as error:
        if (told := _told(error, statement)) is not None:
            raise told from error
        raise


@cache
def _way(cls: type, storing: Storing) -> "Way[Any, Awaitable[Rows]]":
    kind, call = _kind(cls), storing.call
    if kind in _SYNC_WAYS:
        calls = f"{call}_sync or {call}_many_sync" if storing.many else f"{call}_sync"
        raise EnqueueError(f"{kind} is synchronous: call {calls}, without await")
    if kind not in _WAYS:
        raise _unknown(cls, storing, _ACCEPTED)
    return _WAYS[kind]


@cache
def _sync_way(cls: type, storing: Storing) -> "Way[Any, Rows]":
    kind, call = _kind(cls), storing.call
    if kind in _WAYS:
        calls = f"`await {call}(...)` or `await {call}_many(...)`" if storing.many else f"`await {call}(...)`"
        raise EnqueueError(f"{kind} is asynchronous: call {calls}")
    if kind not in _SYNC_WAYS:
        raise _unknown(cls, storing, _ACCEPTED_SYNC)
    return _SYNC_WAYS[kind]


def _kind(cls: type) -> str:
    """``package.Class`` of the first class of its line that we know; "" for none."""
    for base in cls.__mro__:
        kind = f"{base.__module__.partition('.')[0]}.{base.__name__}"
        kind = _ALIASES.get(kind, kind)
        if kind in _WAYS or kind in _SYNC_WAYS:
            return kind
    return "asyncpg.Connection" if hasattr(cls, "is_in_transaction") and hasattr(cls, "fetch") else ""


def _unknown(cls: type, storing: Storing, accepted: str) -> EnqueueError:
    given = f"{cls.__module__}.{cls.__qualname__}"
    return EnqueueError(f"a {storing.what} cannot be stored through {given}: give a connection of {accepted}")


def _in_autocommit(storing: Storing, remedy: str) -> NotInTransaction:
    return NotInTransaction(
        f"the connection is in autocommit, so the {storing.what} could not commit together with the state change: "
        + remedy.format(storing.call)
    )


# SQLSTATEs: undefined table, schema, function, column.
_MISSING = {"42P01": SchemaMissing, "3F000": SchemaMissing, "42883": SchemaTooOld, "42703": SchemaTooOld}
_NULL = "23502"  # in a column that has to have a value


def _told(error: Exception, statement: Statement) -> SchemaError | MissingOrigin | None:
    """What to tell where Postgres misses what is ours, by any driver's error; None where that is not what it says."""
    inner: Any = getattr(error, "orig", None) or error  # SQLAlchemy's
    if not hasattr(inner, "sqlstate"):
        inner = error.__cause__  # Django's
    state = getattr(inner, "sqlstate", None) or ""
    schema, text = statement.schema, str(inner).partition("\n")[0]
    # In any language. A column of the user's, or a trigger, may refuse a null, too.
    at_home = statement.name.startswith("insert_home_jobs")
    if state == _NULL and at_home and {"origin", "job"} <= set(re.findall(r"\w+", text)):
        return MissingOrigin(
            f"jobs have their home in {statement.arguments[1]!r}, whose row in {schema}.topic went away while they "
            "were stored: roll the transaction back, and repeat it once a service that consumes the topic has started"
        )
    kind = _MISSING.get(state)
    # A trigger of the user's may lack something, too.
    if kind is None or not any(name in text for name in (f"{schema}.", f'"{schema}"', 'relation "job"')):
        return None
    if kind is SchemaMissing:
        what = f"the database of this connection has no schema {schema!r} of Sidings, or one of an earlier release"
    else:
        what = f"the schema {schema!r} is older than this release of sidings"
    return kind(
        f"{what} ({text}): call `await service.migrate()` once, or `python -m sidings.schema --service NAME "
        f"--schema {schema} DSN`; or connect to the service's database, and name its schema as it does: "
        "Service(schema=...), or Registry(schema=...) where no service includes it"
    )


# -- asyncpg ----------------------------------------------------------------------------------------------------------


def _asyncpg_autocommit(connection: Connection | Transaction) -> bool:
    try:
        return not connection.is_in_transaction()
    except (asyncpg.InterfaceError, AttributeError) as error:  # its pool has it back; or it is closed, as 0.32 tells it
        raise NotInTransaction("this transaction is over: store inside of its `async with` block") from error


def _asyncpg(connection: Connection | Transaction, statement: Statement) -> Awaitable[Rows]:
    return connection.fetch(statement.numbered, *statement.arguments)


# -- psycopg 3 --------------------------------------------------------------------------------------------------------


def _psycopg_autocommit(connection: "psycopg.AsyncConnection[Any] | psycopg.Connection[Any]") -> bool:
    return connection.autocommit and connection.info.transaction_status == _IDLE


# While statements of a pipeline are under way, psycopg cannot say whether a transaction is open. Entering one that is
# entered already waits for them.
async def _settled(connection: "psycopg.AsyncConnection[Any]") -> "psycopg.AsyncConnection[Any]":
    if connection.autocommit and connection.info.transaction_status == _ACTIVE:
        async with connection.pipeline():
            pass
    return connection


def _settled_sync(connection: "psycopg.Connection[Any]") -> "psycopg.Connection[Any]":
    if connection.autocommit and connection.info.transaction_status == _ACTIVE:
        with connection.pipeline():
            pass
    return connection


# Cursors of a class and a row factory of our choice: a connection's own may want other parameters, or give other rows.
async def _psycopg(connection: "psycopg.AsyncConnection[Any]", statement: Statement) -> Rows:
    from psycopg import AsyncCursor
    from psycopg.rows import tuple_row

    async with AsyncCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.named.encode(), statement.named_arguments)
        return await cursor.fetchall()


def _psycopg_sync(connection: "psycopg.Connection[Any]", statement: Statement) -> Rows:
    from psycopg import Cursor
    from psycopg.rows import tuple_row

    with Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(statement.named.encode(), statement.named_arguments)
        return cursor.fetchall()


# -- SQLAlchemy 2 -----------------------------------------------------------------------------------------------------


async def _of_async_session(session: Any) -> "AsyncConnection":
    """What the session holds is written first, as before a query: only a row that has been updated is locked."""
    if _flushes(session):
        await session.flush()
    return await session.connection()


def _of_session(session: Any) -> "AlchemyConnection":
    if _flushes(session):
        session.flush()
    return session.connection()


def _flushes(session: Any) -> bool:
    """Whether it would before a query: not in an event of a flush, where SQLAlchemy refuses another. Only private
    attributes tell that (2.0 and 2.1)."""
    inner = session
    for _ in range(2):  # a scoped one stands for another, and an asynchronous one; a mock for mocks without end
        inner = getattr(inner, "_proxied", inner)
    return session.autoflush and not getattr(inner, "_flushing", False)


def _alchemy_autocommit(connection: "AlchemyConnection") -> bool:
    driver = connection.dialect.driver
    if driver not in _DRIVERS:
        raise EnqueueError(
            f"nothing can be stored through SQLAlchemy's driver {connection.dialect.name}+{driver}: make the engine "
            "with postgresql+psycopg:// or postgresql+asyncpg://"
        )
    # SQLAlchemy opens a transaction by itself, unless the isolation level is AUTOCOMMIT, set wherever it may be.
    raw: Any = connection.connection.dbapi_connection
    return bool(raw.autocommit)


def _async_alchemy_autocommit(connection: "AsyncConnection") -> bool:
    return connection.sync_connection is not None and _alchemy_autocommit(connection.sync_connection)


async def _async_alchemy(connection: "AsyncConnection", statement: Statement) -> Rows:
    result = await connection.exec_driver_sql(*_for_driver(connection, statement), _BUFFERED)
    return result.all()


def _alchemy(connection: "AlchemyConnection", statement: Statement) -> Rows:
    return connection.exec_driver_sql(*_for_driver(connection, statement), _BUFFERED).all()


def _for_driver(
    connection: "AlchemyConnection | AsyncConnection", statement: Statement
) -> tuple[str, "dict[str, Any] | tuple[Any, ...]"]:
    if _DRIVERS[connection.dialect.driver] == "numbered":
        return statement.numbered, statement.arguments
    return statement.named, statement.named_arguments


_BUFFERED: Any = {"stream_results": False, "yield_per": None}  # no server-side cursor can insert, and both make one


# -- Django -----------------------------------------------------------------------------------------------------------


def _django_autocommit(connection: "BaseDatabaseWrapper") -> bool:
    django: Any = connection  # which has no types
    if django.vendor != "postgresql":
        raise EnqueueError(f"nothing can be stored in {django.vendor}: give Django's connection to Postgres")
    return not django.in_atomic_block and bool(django.get_autocommit())


def _django(connection: "BaseDatabaseWrapper", statement: Statement) -> Rows:
    django: Any = connection
    with django.cursor() as cursor:
        cursor.execute(statement.named, statement.named_arguments)
        return cursor.fetchall()


# -- all of them ------------------------------------------------------------------------------------------------------


_INSIDE = "call {} inside `async with connection.transaction():`"
_INSIDE_SYNC = "call {}_sync inside `with connection.transaction():`"
_INSIDE_ATOMIC = "call {}_sync inside `with transaction.atomic():`"
_NO_AUTOCOMMIT = "use an engine, or a connection, without isolation_level='AUTOCOMMIT'"
_WAYS: dict[str, Way[Any, Awaitable[Rows]]] = {
    "asyncpg.Connection": Way(_asyncpg_autocommit, _INSIDE, _asyncpg),
    "psycopg.AsyncConnection": Way(_psycopg_autocommit, _INSIDE, _psycopg, _settled),
    "sqlalchemy.AsyncConnection": Way(_async_alchemy_autocommit, _NO_AUTOCOMMIT, _async_alchemy),
    "sqlalchemy.AsyncSession": Way(_async_alchemy_autocommit, _NO_AUTOCOMMIT, _async_alchemy, _of_async_session),
}
_SYNC_WAYS: dict[str, Way[Any, Rows]] = {
    "psycopg.Connection": Way(_psycopg_autocommit, _INSIDE_SYNC, _psycopg_sync, _settled_sync),
    "sqlalchemy.Connection": Way(_alchemy_autocommit, _NO_AUTOCOMMIT, _alchemy),
    "sqlalchemy.Session": Way(_alchemy_autocommit, _NO_AUTOCOMMIT, _alchemy, _of_session),
    "django.BaseDatabaseWrapper": Way(_django_autocommit, _INSIDE_ATOMIC, _django),
}
_ALIASES = {  # proxies, which have all that is asked of what they stand for
    "asyncpg.PoolConnectionProxy": "asyncpg.Connection",
    "sidings.Transaction": "asyncpg.Connection",
    "sqlalchemy.async_scoped_session": "sqlalchemy.AsyncSession",
    "sqlalchemy.scoped_session": "sqlalchemy.Session",
    "django.ConnectionProxy": "django.BaseDatabaseWrapper",
}

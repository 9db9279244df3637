"""The connection that one command works on.

Here, as in the other modules, what is large is imported by the function that needs it: --help and the completion of a
shell wait for none of it, and only what has to do with Kafka for Kafka's client.
"""

import getpass
import os
import re
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, PostgresUnavailable, SchemaMissing, SchemaTooOld

if TYPE_CHECKING:
    import asyncpg

    from ..executor import PostgresSettings
    from ..jobs.admin import Admin
    from ..kafka import Outbox

__all__ = ["Session", "open_session", "postgres_settings", "whoever_runs_this"]

_STATEMENT_SECONDS = 60.0
_LOCK_TIMEOUT = "SET lock_timeout = '5s'"  # then it is told of, and not that Postgres did not answer
_CLOCK = "SELECT clock_timestamp(), pg_is_in_recovery(), pg_last_xact_replay_timestamp()"


class Session:
    """An open connection to a service's database. now: by the database's clock, when the command began."""

    def __init__(
        self, settings: "PostgresSettings", connection: "asyncpg.Connection", service: str, now: datetime
    ) -> None:
        self.settings = settings
        self.connection = connection
        self.service = service
        self.now = now
        self.standby: str | None = None  # what to know of one, for people

    @property
    def where(self) -> str:
        """The database, for people: without user and password."""
        from ..schema import without_account

        return without_account(self.settings.dsn)

    def admin(self, by: str | None = None) -> "Admin":
        """by: who acts, for the audit; None: the user of this process and its host."""
        from ..jobs.admin import Admin

        return Admin(
            self.connection,
            actor=by or whoever_runs_this(),
            schema=self.settings.schema_name,
            timeout=_STATEMENT_SECONDS,
        )

    async def take_time(self) -> None:
        """Let the server give what follows as long as it takes; it ends what a command has given up after a minute."""
        if not self.settings.pgbouncer:  # through which no limit was set
            await self.connection.execute("SET statement_timeout = 0")

    @asynccontextmanager
    async def outbox(self) -> "AsyncGenerator[Outbox]":
        """The outbox; it has a connection of its own."""
        from ..kafka import Outbox

        outbox = Outbox(self.settings)
        try:
            yield outbox
        finally:
            await outbox.close()

    async def rows(self, query: str, *arguments: object, package: str | None = __package__) -> "list[asyncpg.Record]":
        """The rows of a ``.sql`` file of this package, or of another. Raises `PostgresUnavailable`."""
        from ..schema import load_sql

        return await self._fetch(load_sql(package, query, self.settings.schema_name), *arguments)

    async def look_at_clock(self) -> None:
        """Let `now` be now. Raises `PostgresUnavailable`."""
        [(self.now, standby, replayed)] = await self._fetch(_CLOCK)
        self.standby = _of_standby(replayed) if standby else None

    async def _fetch(self, sql: str, *arguments: object) -> "list[asyncpg.Record]":
        import asyncio

        from ..executor import BROKEN

        try:
            # For the end of another statement, of which asyncpg may tell the server before, it waits without limit.
            async with asyncio.timeout(_STATEMENT_SECONDS):
                return await self.connection.fetch(sql, *arguments)
        except BROKEN as error:
            raise _no_answer(error) from error


def _of_standby(replayed: datetime | None) -> str:
    """Judged by the clock, a renewal that it lacks looks like a lease that ran out."""
    last = f", committed at {replayed:%Y-%m-%d %H:%M:%S %Z}" if replayed else ""
    return (
        f"this is a standby, and may lack what is newer than its last transaction{last}: ages, leases and what nobody "
        "holds are told as if there were nothing newer"
    )


def _no_answer(error: BaseException) -> PostgresUnavailable:
    return PostgresUnavailable(f"Postgres did not answer ({type(error).__name__}: {error})")


def whoever_runs_this() -> str:
    """``user@host``. In a container the user may have no name: then its number."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def postgres_settings(dsn: str | None, schema: str | None) -> "PostgresSettings":
    """What the options say, else the environment, as for ``Service.from_env``. Raises `ConfigurationError`."""
    from ..executor import PostgresSettings
    from ..schema import check_dsn, valid_schema_name

    if not dsn:
        raise ConfigurationError(
            "no database is named: give --postgres postgresql://user@host/database, or set SIDINGS_POSTGRES "
            '(on this machine: eval "$(sidings dev up)")'
        )
    if not re.match(r"postgres(ql)?://", dsn):
        raise ConfigurationError("--postgres: this is no DSN: give postgresql://user:password@host:port/database")
    check_dsn(dsn, "SIDINGS_POSTGRES" if dsn == os.environ.get("SIDINGS_POSTGRES") else "--postgres")
    name = valid_schema_name("sidings" if schema is None else schema)
    if any(variable.upper().startswith("SIDINGS_POSTGRES_") for variable in os.environ):
        from ..kafka.environment import postgres_of

        return postgres_of(dsn, name)
    return PostgresSettings(dsn=dsn, schema_name=name)


@asynccontextmanager
async def open_session(settings: "PostgresSettings", *, checked: bool = True) -> AsyncGenerator[Session]:
    """Connect, and look at the schema.

    checked: refuse a schema that this release does not fit; without it only one that is not there.

    Raises `PostgresUnavailable`, `SchemaError`, and what Postgres says of the account.
    """
    import asyncio

    import asyncpg

    from ..executor import BROKEN, connect
    from ..schema import check, without_account

    try:
        connection = await connect(settings, for_handlers=True, statement_seconds=_STATEMENT_SECONDS)
    except ValueError:  # what it says could show a part of the password
        raise ConfigurationError(
            "--postgres: this DSN cannot be read: in user and password / @ : ? # have to be percent-encoded (%2F, …)"
        ) from None
    except PostgresUnavailable as error:
        if isinstance(error.__cause__, ValueError):  # asyncpg's, of an option in it
            raise ConfigurationError(f"--postgres: {error.__cause__}") from None
        raise
    except asyncpg.PostgresError as error:
        raise PostgresUnavailable(f"no connection to {without_account(settings.dsn)}: {error}") from error
    try:
        try:
            async with asyncio.timeout(_STATEMENT_SECONDS):
                if not settings.pgbouncer:
                    await connection.execute(_LOCK_TIMEOUT)
                service = await _owner(connection, settings)
                if checked:
                    await check(connection, service=service, schema=settings.schema_name)
                [(now, standby, replayed)] = await connection.fetch(_CLOCK)
        except SchemaTooOld as error:
            text = str(error).partition(": call ")[0]
            raise SchemaTooOld(f"{text}: run `sidings migrate apply`") from None
        except BROKEN as error:
            raise _no_answer(error) from error
        session = Session(settings, connection, service, now)
        session.standby = _of_standby(replayed) if standby else None
        yield session
    finally:
        connection.terminate()


async def _owner(connection: "asyncpg.Connection", settings: "PostgresSettings") -> str:
    import asyncpg

    from ..schema import load_sql, without_account

    schema = settings.schema_name
    try:
        return await connection.fetchval(f"SELECT name FROM {schema}.service")
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        found = [row[0] for row in await connection.fetch(load_sql(__package__, "find_schemas"))]
        others = f" (there is {', '.join(found)}: give --schema)" if found else ""
        raise SchemaMissing(
            f"{without_account(settings.dsn)} has no schema {schema!r} of Sidings{others}: "
            f"make it with `sidings migrate apply --service NAME`"
        ) from None

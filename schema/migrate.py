"""Apply the numbered migrations, safely, however many processes start at once."""

import asyncio
import hashlib
import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files

import asyncpg

from ..errors import (
    ConfigurationError,
    ForeignSchema,
    SchemaBusy,
    SchemaChanged,
    SchemaError,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
)
from .blockers import Connect, watch_blockers
from .refusals import NOT_CONNECTED, check_dsn, refusal, refused_migration
from .servers import connect_any
from .sql import check_service_name, load_sql, rename_schema, valid_schema_name

__all__ = ["Migration", "check", "migrate", "migrations"]

log = logging.getLogger("sidings.schema")

_OLDEST_POSTGRES = 15  # UNIQUE NULLS NOT DISTINCT
_CONNECT_SECONDS = 10.0
_MIGRATE_SECONDS = 600.0  # for one migration at work
_IDLE_SECONDS = 30.0  # between two of its statements: a process that stands still, or is gone, keeps its locks so long
_PATIENCE_SECONDS = 120.0  # with locks that others hold
# For each lock, whereupon all are given back: what a service does waits behind a lock that is waited for. Longer than
# deadlock_timeout, after which an autovacuum gives way; shorter than the 3 s after which statements of executors fail.
_LOCK_SECONDS = 2.0
_PAUSE_SECONDS = 8.0  # at most, from one attempt to the next
# What handlers' transactions use, in their order: the offset is stored last.
_USED_IN_ORDER = ["job", "outbox", "consumer_offset"]
# Before the first release the schema grew by 51 migrations, which then became seven files, of the last seven numbers
# (docs/decisions/0029-first-schema.md). What has all 51, with these checksums, is what the seven make.
_FIRST, _GROWN = 45, 51
_GROWN_SUM = "975640a3b47db29e54cd9c4ebe4a5f2a7a4584e37d890549723aee49e352f8aa"
_UNCACHED = ["job_position", "job_id_seq", "outbox_id"]  # sequences whose order means something


@dataclass(frozen=True)
class Migration:
    """One numbered SQL file.

    Attributes:
        version: Its number, from 45 on: those before were used before the first release.
        sql: Its text, for the schema ``sidings``.
        checksum: SHA-256 of that text.
        runs_with: The last migration that a release must know to run with this one. None: this one itself. The file
            says it in a line of its head, ``-- runs with 0051``, after its tests have run with that release's code.
            Only what a *start* needs stands in the way, as a statement whose arguments or columns have changed. A new
            column with a default, an index, or a function that is replaced by one that does more, do not.
    """

    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()

    @property
    def runs_with(self) -> int | None:
        stated = re.search(r"^-- runs with (\d{4})$", self.sql, re.MULTILINE)
        return int(stated[1]) if stated else None


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations of this release, in order."""
    found = [
        Migration(int(match[1]), match[2], file.read_text(encoding="utf-8"))
        for file in files(__package__ or "").joinpath("migrations").iterdir()
        if (match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name))
    ]
    ordered = tuple(sorted(found, key=lambda m: m.version))
    if [m.version for m in ordered] != list(range(_FIRST, _FIRST + len(ordered))):
        raise SchemaError(f"migrations are not numbered {_FIRST} and on: {[m.name for m in ordered]}")
    return ordered


async def migrate(
    dsn: str, *, service: str, schema: str = "sidings", password: str | Callable[[], str] | None = None
) -> list[Migration]:
    """Bring the schema in the database at `dsn` up to this release::

        await migrate("postgresql://localhost/tracker", service="tracker")

    It runs in one transaction under an advisory lock: twenty processes may call it at once, and a process that dies
    half-way leaves nothing behind. Where nothing is missing it only looks, for which the right to read is enough. What
    is made belongs to the owner of the schema's tables, also where a superuser, or a member of that role, migrates.

    A running service goes on meanwhile, with pauses of 2 s at most where somebody's long transaction keeps a lock: then
    it gives all back and tries again, for two minutes, and says in the log who is in the way.

    Args:
        service: Name of the service that the schema belongs to.
        schema: Where Sidings' tables live.
        password: In place of the DSN's, as in `PostgresSettings`.

    Returns:
        The migrations that were applied.

    Raises:
        SchemaBusy: The locks were not to be had. The message names whose they are; nothing has changed: call it again.
        ForeignSchema: Another service owns the schema.
        SchemaTooNew: A newer release has migrated it in a way that this one cannot run with.
        SchemaChanged: An applied migration file was edited.
        SchemaError: Somebody else's tables are in the way, the server is older than Postgres 15, reads SQL in another
            way, or does not tell its timeline; the message says which.
        ConfigurationError: The name cannot stand in SQL without quotes, the role lacks a right, or the DSN cannot be
            right.
        PostgresUnavailable: Postgres does not answer, may only be read (a standby), or a person has ended the
            statement.
    """
    valid_schema_name(schema)
    check_service_name(service)
    check_dsn(dsn, "dsn")
    connect = partial(
        connect_any,
        dsn,
        password=password,
        timeout=_CONNECT_SECONDS,
        command_timeout=_CONNECT_SECONDS,
        statement_cache_size=0,
    )
    try:
        connection = await connect()
    except NOT_CONNECTED as error:
        raise refusal(dsn, error) from None
    try:
        # READ COMMITTED, whatever the default is: what others have applied while we waited has to be seen.
        limits = (
            f"SET LOCAL statement_timeout = '{_MIGRATE_SECONDS}s'; "
            f"SET LOCAL idle_in_transaction_session_timeout = '{_IDLE_SECONDS}s'"
        )
        if connection.get_server_version().major >= 17:  # the role's may be shorter than our patience
            limits += "; SET LOCAL transaction_timeout = 0"
        await connection.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED; {limits}")
        applied = await _migrate(connection, connect, service, schema)
        await connection.execute("COMMIT")
        await connection.close(timeout=_CONNECT_SECONDS)
    except NOT_CONNECTED as error:
        told = refused_migration(dsn, schema, error)
        if told is None:
            raise
        raise told from error
    finally:
        connection.terminate()  # which ends the transaction as well, also where nothing answers any more
    return applied


async def _migrate(connection: asyncpg.Connection, connect: Connect, service: str, schema: str) -> list[Migration]:
    """All of it inside of the transaction that stands open."""
    _verify_server(connection)
    await _verify_name(connection, schema)
    until = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
    async with watch_blockers(connect, await connection.fetchval("SELECT pg_backend_pid()")) as blockers:
        try:
            await _enter(connection, schema)
            missing = await _missing(connection, service, schema)
            if missing:
                await _verify_role(connection, schema)
            await _apply_patiently(connection, missing, schema, until, blockers)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            raise SchemaBusy(
                f"the schema {schema!r} could not be migrated within {_PATIENCE_SECONDS:g} s, because of locks that "
                f"others hold; nothing has changed. In the way: {'; '.join(blockers) or 'nobody for long'}. Wait until "
                "that has ended, or end it (SELECT pg_terminate_backend(PID)), and migrate again"
            ) from error
    if len(missing) == len(migrations()):
        await connection.execute(f"INSERT INTO {schema}.service (name) VALUES ($1)", service)
    return missing


async def _enter(connection: asyncpg.Connection, schema: str) -> None:
    """Wait until no other migrates this schema, and make it if it is not there. A right to make it is asked for only
    then."""
    await connection.execute(f"SET LOCAL lock_timeout = '{_PATIENCE_SECONDS}s'")
    # The key is the schema's name: schemas of one database do not wait for each other.
    await connection.execute(
        "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))",
        f"sidings.migrate:{schema}",
        timeout=_PATIENCE_SECONDS + _CONNECT_SECONDS,
    )
    if await connection.fetchval("SELECT to_regnamespace($1) IS NULL", schema):
        await connection.execute(f"CREATE SCHEMA {schema}")
    if await connection.fetchval("SELECT to_regclass($1) IS NULL", f"{schema}.migration"):
        await connection.execute(
            f"CREATE TABLE {schema}.migration (version integer CONSTRAINT migration_pkey PRIMARY "
            "KEY, name text NOT NULL, checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now(), "
            "runs_with integer CONSTRAINT migration_runs_with_check CHECK (runs_with < version))"
        )


async def _apply_patiently(
    connection: asyncpg.Connection, missing: list[Migration], schema: str, until: float, blockers: list[str]
) -> None:
    """Apply them, all or none of them, over and over until each lock was to be had within `_LOCK_SECONDS`. The advisory
    lock is kept meanwhile, so that of many processes only one makes a running service wait."""
    loop, pause = asyncio.get_running_loop(), 1.0
    await connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'")
    while True:
        await connection.execute("SAVEPOINT attempt")
        try:
            for table in _altered(missing):
                await connection.execute(f"LOCK TABLE {schema}.{table} IN ACCESS EXCLUSIVE MODE")
            for migration in missing:
                await connection.execute(rename_schema(migration.sql, schema), timeout=_MIGRATE_SECONDS)
                await connection.execute(
                    f"INSERT INTO {schema}.migration (version, name, checksum, runs_with) VALUES ($1, $2, $3, $4)",
                    *(migration.version, migration.name, migration.checksum, migration.runs_with),
                )
            await _hand_over(connection, schema)
            return
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            if missing and loop.time() + pause > until:
                raise
        await connection.execute("ROLLBACK TO attempt")
        if not missing:  # a start does not wait for what only the next migration needs
            log.warning("what belongs to another role in %s is in use, and stays so: %s", schema, "; ".join(blockers))
            return
        log.warning("migrating %s waits for locks, trying again: %s", schema, "; ".join(blockers))
        await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
        pause = min(2 * pause, _PAUSE_SECONDS)


def _altered(missing: list[Migration]) -> list[str]:
    """Tables that are to be locked before anything else, in this order: whoever has one of them is never waited for
    with another one that he comes to later. Postgres would end his transaction: a handler would have failed."""
    texts = [migration.sql for migration in missing]
    made, altered = (
        {name for text in texts for name in re.findall(rf"^{what} sidings\.(\w+)", text, re.MULTILINE)}
        for what in ("CREATE TABLE", r"(?:ALTER TABLE|CREATE (?:UNIQUE )?INDEX \w+ ON)")
    )
    return [table for table in _USED_IN_ORDER if table in altered - made]


async def _verify_role(connection: asyncpg.Connection, schema: str) -> None:
    """What this role makes has to become the owner's, which from Postgres 16 on not every member can bring about."""
    stranger = await connection.fetchrow(
        """SELECT pg_get_userbyid(c.relowner)::text, current_user::text FROM pg_class c
           WHERE c.oid = to_regclass($1) AND NOT pg_has_role(c.relowner, CASE
               WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END)""",
        f"{schema}.migration",
    )
    if stranger is not None:
        owner, ours = stranger
        raise ConfigurationError(
            f"the schema {schema!r} belongs to the role {owner!r}, and what {ours!r} makes there would not: "
            f'migrate as {owner!r}, or let {ours!r} become it (GRANT "{owner}" TO "{ours}")'
        )


def _names() -> list[str]:
    """What stands in the schema by its migrations, and some more: not what others have put there, nor days."""
    return sorted({"migration", *(name for m in migrations() for name in re.findall(r"\bsidings\.(\w+)", m.sql))})


async def _hand_over(connection: asyncpg.Connection, schema: str) -> None:
    """Give what this role has made, now or before, to the owner of the schema's tables, who else could not migrate it
    the next time, or not use it."""
    for row in await connection.fetch(load_sql(__package__, "hand_over"), schema, _names()):
        await connection.execute(row[0])


async def check(connection: asyncpg.Connection, *, service: str | None, schema: str = "sidings") -> None:
    """Refuse a schema that this process must not touch. Every service calls it at its start.

    Args:
        service: Whose the schema has to be. None: anybody's.

    Raises:
        SchemaMissing: No migration has run.
        SchemaTooOld: Migrations are missing.
        SchemaTooNew: A newer release has migrated it in a way that this one cannot run with.
        SchemaChanged: An applied migration file was edited.
        ForeignSchema: Another service owns it.
        SchemaError: Somebody has given its sequences a cache, row-level security hides its rows, the server is too old
            or set up so that SQL means something else, or the database's encoding is not UTF8.
    """
    valid_schema_name(schema)
    _verify_server(connection)
    if await connection.fetchval("SELECT to_regclass($1)", f"{schema}.migration") is None:
        raise SchemaMissing(
            f"the database has no schema {schema!r}: call `await service.migrate()` once before the service runs, or "
            f"`python -m sidings.schema --service {service or 'NAME'} --schema {schema} DSN`"
        )
    applied = await _applied(connection, schema)
    _verify(applied, schema)
    if missing := [m for m in migrations() if m.version not in applied]:
        names = ", ".join(f"{m.version:04}_{m.name}" for m in missing)
        raise SchemaTooOld(f"the schema {schema!r} lacks the migrations {names}: call `await service.migrate()`")
    if service is not None:
        await _verify_owner(connection, service, schema)
    await _verify_functions(connection, schema)
    await _verify_sequences(connection, schema)
    await _warn_of_collation(connection)


async def _verify_sequences(connection: asyncpg.Connection, schema: str) -> None:
    """With a cache a session hands out old numbers later, and what is read by its number is passed over."""
    # As text: for an array of names asyncpg first asks the server what that is, with a query that takes 10 ms.
    query = """SELECT sequencename FROM pg_sequences
               WHERE schemaname = $1 AND sequencename::text = ANY ($2::text[]) AND cache_size <> 1"""
    if cached := [row[0] for row in await connection.fetch(query, schema, _UNCACHED)]:
        remedy = "; ".join(f"ALTER SEQUENCE {schema}.{name} CACHE 1" for name in cached)
        raise SchemaError(
            f"sequences of the schema {schema!r} have a cache, which loses jobs and messages: run {remedy}"
        )


async def _verify_functions(connection: asyncpg.Connection, schema: str) -> None:
    """Functions name the schema that they were made in, and work there: in nobody's, or in another service's."""
    body = await connection.fetchval(
        """SELECT p.prosrc FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
           WHERE n.nspname = $1 AND p.proname = 'acquire'""",
        schema,
    )
    former = re.search(r"\bFROM (\w+)\.origin\b", body or "")
    if former is not None and former[1] != schema:
        raise SchemaError(
            f"the schema {schema!r} was called {former[1]!r}, where its functions would work still: call it so again "
            f"(ALTER SCHEMA {schema} RENAME TO {former[1]}), or run what docs/operations.md has for another name"
        )


def _verify_server(connection: asyncpg.Connection) -> None:
    if connection.get_settings().standard_conforming_strings != "on":
        raise SchemaError(
            "standard_conforming_strings is off here, so that SQL does not mean what it says: run ALTER ROLE ... RESET "
            "standard_conforming_strings, or ALTER DATABASE, or take it out of the DSN or the server's configuration"
        )
    if connection.get_server_version().major < _OLDEST_POSTGRES:
        version = connection.get_settings().server_version
        raise SchemaError(f"this server is Postgres {version}: Sidings needs {_OLDEST_POSTGRES} or newer")
    if (encoding := connection.get_settings().server_encoding) != "UTF8":
        raise SchemaError(
            f"the database's encoding is {encoding}: Sidings needs UTF8, since payloads, keys and the texts of errors "
            "may hold any character: CREATE DATABASE ... TEMPLATE template0 ENCODING 'UTF8'"
        )


async def _warn_of_collation(connection: asyncpg.Connection) -> None:
    """Postgres tells this to whoever connects, and nobody sees it."""
    row = await connection.fetchrow(
        """SELECT datname::text AS name, datcollversion AS made_with, pg_database_collation_actual_version(oid) AS now
           FROM pg_database WHERE datname = current_database()
           AND datcollversion <> pg_database_collation_actual_version(oid)"""
    )
    if row is not None:
        log.error(
            "the operating system sorts text in another way (%s) than when the database %r was made (%s): indexes on "
            "text may be out of order, so that jobs are not found. Stop the services, run REINDEX DATABASE %s, then "
            "ALTER DATABASE %s REFRESH COLLATION VERSION",
            *(row["now"], row["name"], row["made_with"], row["name"], row["name"]),
        )


async def _verify_name(connection: asyncpg.Connection, schema: str) -> None:
    reserved = "SELECT EXISTS (SELECT FROM pg_get_keywords() WHERE word = $1 AND catcode IN ('R', 'T'))"
    if await connection.fetchval(reserved, schema):
        raise ConfigurationError(f"schema={schema!r} is a reserved word of SQL: choose e.g. {schema}_jobs")


async def _missing(connection: asyncpg.Connection, service: str, schema: str) -> list[Migration]:
    """What is to be applied. Raises what forbids it."""
    applied = await _applied(connection, schema)
    _verify(applied, schema)
    if applied:
        await _verify_owner(connection, service, schema)
        await _verify_functions(connection, schema)
    return [m for m in migrations() if m.version not in applied]


async def _verify_rows(connection: asyncpg.Connection, schema: str) -> None:
    """Row-level security without a policy, as an event trigger may put on each table that is made, shows who does not
    own the tables no rows, and Postgres says nothing: all migrations were missing, or no job was there. Of a day's
    table it hides nothing, for that is read by way of its parent."""
    query = """SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname = $1 AND c.relname::text = ANY ($2::text[])
               AND c.relrowsecurity AND row_security_active(c.oid)
               AND NOT EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid) ORDER BY 1"""
    if hidden := [row[0] for row in await connection.fetch(query, schema, _names())]:
        raise SchemaError(
            f"row-level security hides all rows of {schema}.{hidden[0]} ({len(hidden)} tables in all) from this role: "
            f"run ALTER TABLE {schema}.{hidden[0]} DISABLE ROW LEVEL SECURITY, and so on, as their owner, or connect "
            "as that role"
        )


async def _applied(connection: asyncpg.Connection, schema: str) -> dict[int, asyncpg.Record]:
    await _verify_rows(connection, schema)
    # By way of JSON: of a schema from before the first release the column may not be there.
    query = f"SELECT version, checksum, (to_jsonb(m) ->> 'runs_with')::integer AS runs_with FROM {schema}.migration m"
    try:
        rows = await connection.fetch(query)
    except asyncpg.UndefinedColumnError:
        raise SchemaError(
            f"the table {schema}.migration is not Sidings': choose a schema of its own (schema=..., SIDINGS_SCHEMA)"
        ) from None
    return {row["version"]: row for row in rows}


def _verify(applied: dict[int, asyncpg.Record], schema: str) -> None:
    known = {m.version: m for m in migrations()}
    last, grown = max(known), any(version < _FIRST for version in applied)
    if grown and _GROWN not in applied:
        raise SchemaError(
            f"the schema {schema!r} stands at migration {max(applied)} of those before the first release: bring it to "
            f"{_GROWN:04} with the last commit that has them, then start this release (docs/operations.md, Upgrades)"
        )
    if grown and _sum_of_grown(applied) != _GROWN_SUM:
        raise SchemaChanged(
            f"the schema {schema!r} was migrated while a migration before the first release was being written, and "
            "that has other contents now: make it anew"
        )
    for version, row in sorted(applied.items(), reverse=True):
        if grown and version <= _GROWN:
            continue
        if version not in known:
            if row["runs_with"] is None or row["runs_with"] > last:
                raise SchemaTooNew(
                    f"the schema {schema!r} stands at migration {max(applied)}, this release knows up to {last} and "
                    f"cannot run with {version}: a newer release of sidings has migrated it; deploy that release here "
                    "as well"
                )
        elif row["checksum"] != known[version].checksum:
            raise SchemaChanged(
                f"migration {version:04}_{known[version].name} was applied to {schema!r} with other contents than in "
                "this release: restore the file, and put the change into a migration of its own"
            )


def _sum_of_grown(applied: dict[int, asyncpg.Record]) -> str:
    checksums = [applied[version]["checksum"] for version in sorted(applied) if version <= _GROWN]
    return hashlib.sha256("".join(checksums).encode()).hexdigest()


async def _verify_owner(connection: asyncpg.Connection, service: str, schema: str) -> None:
    owner = await connection.fetchval(f"SELECT name FROM {schema}.service")
    if owner != service:
        raise ForeignSchema(
            f"the schema {schema!r} belongs to the service {owner!r}, not to {service!r}: "
            "give this service a schema of its own (schema=...), or correct its name; one that was renamed takes its "
            "schema along, or it would handle all from the beginning (docs/operations.md, Releases of your service)"
        )

"""Apply the numbered migrations, safely, however many processes start at once."""

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import asyncpg

from ..errors import (
    ConfigurationError,
    ForeignSchema,
    SchemaChanged,
    SchemaError,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
)
from .refusals import NOT_CONNECTED, refusal
from .sql import rename_schema, valid_schema_name

__all__ = ["Migration", "check", "migrate", "migrations"]

_CONNECT_SECONDS = 10.0
_MIGRATE_SECONDS = 120.0
_UNCACHED = ["job_position", "job_id_seq", "outbox_id"]  # sequences whose order means something


@dataclass(frozen=True)
class Migration:
    """One numbered SQL file. `checksum` is the SHA-256 of its text."""

    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations of this release, in order."""
    found = [
        Migration(int(match[1]), match[2], file.read_text(encoding="utf-8"))
        for file in files(__package__ or "").joinpath("migrations").iterdir()
        if (match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name))
    ]
    ordered = tuple(sorted(found, key=lambda m: m.version))
    if [m.version for m in ordered] != list(range(1, len(ordered) + 1)):
        raise SchemaError(f"migrations are not numbered 1 to {len(ordered)}: {[m.name for m in ordered]}")
    return ordered


async def migrate(dsn: str, *, service: str, schema: str = "sidings") -> list[Migration]:
    """Bring `schema` in the database at `dsn` up to this release and return the migrations that were applied.

    Runs in one transaction under an advisory lock: twenty processes may call it at once, and a process that
    dies half-way leaves nothing behind. `service` is the name of the service that the schema belongs to.

    Raises `ForeignSchema` if another service owns the schema, `SchemaTooNew` if a newer release has migrated it,
    `SchemaChanged` if an applied file was edited, `ConfigurationError` if the name cannot stand in SQL without quotes
    or the DSN cannot be right, `PostgresUnavailable`.
    """
    valid_schema_name(schema)
    try:
        connection = await asyncpg.connect(dsn, timeout=_CONNECT_SECONDS, statement_cache_size=0)
    except NOT_CONNECTED as error:
        raise refusal(dsn, error) from None
    try:
        await _verify_name(connection, schema)
        async with connection.transaction():
            # The key is the schema's name: schemas of one database do not wait for each other.
            await connection.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))",
                f"sidings.migrate:{schema}",
                timeout=_MIGRATE_SECONDS,
            )
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
            await connection.execute(
                f"CREATE TABLE IF NOT EXISTS {schema}.migration (version integer CONSTRAINT migration_pkey PRIMARY "
                "KEY, name text NOT NULL, checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
            )
            applied = await _applied(connection, schema)
            _verify(applied, schema)
            if applied:
                await _verify_owner(connection, service, schema)
            missing = [m for m in migrations() if m.version not in applied]
            for migration in missing:
                await connection.execute(rename_schema(migration.sql, schema), timeout=_MIGRATE_SECONDS)
                await connection.execute(
                    f"INSERT INTO {schema}.migration (version, name, checksum) VALUES ($1, $2, $3)",
                    migration.version,
                    migration.name,
                    migration.checksum,
                )
            if not applied:
                await connection.execute(f"INSERT INTO {schema}.service (name) VALUES ($1)", service)
            return missing
    finally:
        await connection.close(timeout=_CONNECT_SECONDS)


async def check(connection: asyncpg.Connection, *, service: str, schema: str = "sidings") -> None:
    """Refuse a schema that this process must not touch. Called by every service at start.

    Raises `SchemaMissing`, `SchemaTooOld`, `SchemaTooNew`, `SchemaChanged` or `ForeignSchema`; `SchemaError` where
    somebody has given its sequences a cache.
    """
    valid_schema_name(schema)
    if await connection.fetchval("SELECT to_regclass($1)", f"{schema}.migration") is None:
        raise SchemaMissing(
            f"the database has no schema {schema!r}: call `await service.migrate()` once before the service runs, or "
            f"`python -m sidings.schema --service {service} --schema {schema} DSN`"
        )
    applied = await _applied(connection, schema)
    _verify(applied, schema)
    if missing := [m for m in migrations() if m.version not in applied]:
        names = ", ".join(f"{m.version:04}_{m.name}" for m in missing)
        raise SchemaTooOld(f"the schema {schema!r} lacks the migrations {names}: call `await service.migrate()`")
    await _verify_owner(connection, service, schema)
    await _verify_sequences(connection, schema)


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


async def _verify_name(connection: asyncpg.Connection, schema: str) -> None:
    reserved = "SELECT EXISTS (SELECT FROM pg_get_keywords() WHERE word = $1 AND catcode IN ('R', 'T'))"
    if await connection.fetchval(reserved, schema):
        raise ConfigurationError(f"schema={schema!r} is a reserved word of SQL: choose e.g. {schema}_jobs")


async def _applied(connection: asyncpg.Connection, schema: str) -> dict[int, str]:
    rows = await connection.fetch(f"SELECT version, checksum FROM {schema}.migration")
    return {row["version"]: row["checksum"] for row in rows}


def _verify(applied: dict[int, str], schema: str) -> None:
    known = {m.version: m for m in migrations()}
    if unknown := sorted(set(applied) - set(known)):
        raise SchemaTooNew(
            f"the schema {schema!r} stands at migration {max(unknown)}, this release knows up to {max(known)}: "
            "a newer release of sidings has migrated it; deploy that release here as well"
        )
    for version, checksum in applied.items():
        if known[version].checksum != checksum:
            raise SchemaChanged(
                f"migration {version:04}_{known[version].name} was applied to {schema!r} with other contents than in "
                "this release: restore the file, and put the change into a migration of its own"
            )


async def _verify_owner(connection: asyncpg.Connection, service: str, schema: str) -> None:
    owner = await connection.fetchval(f"SELECT name FROM {schema}.service")
    if owner != service:
        raise ForeignSchema(
            f"the schema {schema!r} belongs to the service {owner!r}, not to {service!r}: "
            "give this service a schema of its own (schema=...), or correct its name"
        )

"""A fresh database per test, copied from a template: about 25 ms, several times less than a migration."""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

__all__ = ["create_database", "database_dsn", "drop_database", "ensure_template"]

SERVER_SECONDS = 60
SCHEMA_FOLDER = Path(__file__).resolve().parents[1] / "schema"


async def create_database(admin_dsn: str, name: str, *, template: str | None = None) -> str:
    """Create the database `name` and return its DSN."""
    async with connected(admin_dsn) as admin:
        copied = f' TEMPLATE "{template}"' if template else ""
        await admin.execute(f'CREATE DATABASE "{name}"{copied}')
    return database_dsn(admin_dsn, name)


def database_dsn(admin_dsn: str, name: str) -> str:
    """The DSN of another database of the same server."""
    parts = urlsplit(admin_dsn)
    # Not all at once: without a host, as with a Unix socket, that leaves the // out.
    return f"{parts.scheme}://{parts.netloc}{urlunsplit(parts._replace(scheme='', netloc='', path=f'/{name}'))}"


async def drop_database(admin_dsn: str, dsn: str) -> None:
    """Drop the database of `dsn`, ending all its sessions."""
    name = urlsplit(dsn).path.removeprefix("/")
    async with connected(admin_dsn) as admin:
        await admin.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


async def ensure_template(admin_dsn: str, *, service: str) -> str:
    """Name of a database with the schema of the code at hand; it is made when the server has none yet.

    It is named after a hash of everything that makes the schema, so that a server that outlives a test run never gives
    an old one.
    """
    from ..schema import migrate  # here, since only these fixtures need it

    content = hashlib.sha256(service.encode())
    for file in sorted(path for path in SCHEMA_FOLDER.rglob("*") if path.suffix in (".py", ".sql")):
        content.update(file.read_bytes())
    name = f"sidings_template_{content.hexdigest()[:16]}"
    async with connected(admin_dsn) as admin:
        # Two test sessions may share one server.
        await admin.execute("SELECT pg_advisory_lock(hashtext('sidings devstack template'))")
        if not await admin.fetchval("SELECT true FROM pg_database WHERE datname = $1", name):
            partial = f"{name}_new"
            await admin.execute(f'DROP DATABASE IF EXISTS "{partial}" WITH (FORCE)')
            await migrate(await create_database(admin_dsn, partial), service=service)
            # The name appears only when the schema is complete.
            await admin.execute(f'ALTER DATABASE "{partial}" RENAME TO "{name}"')
    return name


@asynccontextmanager
async def connected(dsn: str) -> "AsyncGenerator[asyncpg.Connection[asyncpg.Record]]":
    """A connection for as long as the block takes."""
    connection = await asyncpg.connect(dsn, timeout=SERVER_SECONDS, command_timeout=SERVER_SECONDS)
    try:
        yield connection
    finally:
        await connection.close(timeout=SERVER_SECONDS)

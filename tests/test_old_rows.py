"""Rows that were written more than 2^31 transactions ago: the server shows their xmin as one that is yet to come."""

import asyncio
import subprocess

from sidings.devstack import Postgres
from sidings.devstack.accounts import server_account
from sidings.devstack.binaries import postgres_program
from sidings.devstack.fixtures import OwnPostgres
from sidings.devstack.process import clean_environment
from sidings.schema import migrate

from .guide import block
from .support import connected, fetch, value
from .test_directory_tables import OFF, SET_UP, acquirers, insert
from .test_schema import OTHERS

SETTINGS = {"fsync": "off", "autovacuum_freeze_max_age": "2000000000"}
STEP = 1100 << 20  # ids; twice as many are more than 2^31, and once is what a server lets its oldest rows be behind


async def grow_old(server: Postgres) -> None:
    """Twice: freeze all that there is, and let the server go on with an id that is `STEP` further."""
    account = server_account()
    for turn in (1, 2):
        await value(server.dsn, "ALTER DATABASE template0 ALLOW_CONNECTIONS true")
        for database in ("template0", "template1", "postgres"):
            async with connected(server.dsn.removesuffix("postgres") + database) as connection:
                await connection.execute("VACUUM (FREEZE)")
        await asyncio.to_thread(server.stop)
        # A multiple of what a file of pg_xact tells, so that the server makes the next one itself.
        command = [postgres_program("pg_resetwal"), "-x", str(turn * STEP), "-D", str(server.directory / "data")]
        subprocess.run(
            command,
            check=True,
            env=clean_environment(LC_ALL="C"),
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )
        await asyncio.to_thread(server.start)


async def test_an_old_row_that_only_an_old_snapshot_shows_is_not_published(own_postgres: OwnPostgres):
    server = own_postgres(SETTINGS)
    await migrate(server.dsn, service="test")
    async with connected(server.dsn) as db:
        await db.execute(block("directory-tables.md", "The table", "sql") + SET_UP)
        await insert(db, ("t1", "old"), ("t2", "old"))
        await acquirers(db)
    await grow_old(server)
    assert await value(server.dsn, "SELECT max(age(xmin)) FROM terminal_acquirer") < 0
    async with connected(server.dsn) as db, connected(server.dsn) as other:
        async with other.transaction(isolation="repeatable_read"):
            await other.execute("SELECT FROM terminal_acquirer")
            await db.execute(f"{OFF} 't1'; {OFF} 't2'")
            await insert(other, ("t1", "new"))
            async with other.transaction():  # with an id of its own
                await insert(other, ("t2", "new"))
        assert await acquirers(db) == [("t1", None), ("t2", None), ("t1", "new"), ("t2", "new")]


async def test_an_old_function_that_runs_with_the_rights_of_its_owner_stays_his(own_postgres: OwnPostgres):
    server = own_postgres(SETTINGS)
    async with connected(server.dsn) as admin:
        await admin.execute("CREATE ROLE owner LOGIN PASSWORD 'x'; GRANT CREATE ON DATABASE postgres TO owner")
        await migrate(f"postgresql://owner:x@{server.dsn.rpartition('@')[2]}", service="test")
        await admin.execute("ALTER FUNCTION sidings.directory_publish OWNER TO postgres")
    await grow_old(server)
    assert await migrate(server.dsn, service="test") == []
    assert [row["name"] for row in await fetch(server.dsn, OTHERS, "owner")] == ["sidings.directory_publish()"]

"""The schema: migrations that many processes apply at once, refusals that say what to do, the history's partitions."""

import asyncio
import importlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from urllib.parse import quote, urlsplit

import asyncpg
import pytest
from sidings.errors import (
    ConfigurationError,
    ForeignSchema,
    PostgresUnavailable,
    SchemaBusy,
    SchemaChanged,
    SchemaError,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
)
from sidings.jobs import Job, OutcomeName, Registry
from sidings.schema import Migration, blockers, check, load_sql, migrate, migrations, valid_schema_name
from sidings.schema.sql import rename_schema

from .guide import block
from .outbox_support import never_retrieved
from .support import SECONDS, Ride, a_role, connected, enqueue, eventually, fetch, running, value

FIRST, LAST = migrations()[0].version, migrations()[-1].version
migrate_module = importlib.import_module("sidings.schema.migrate")  # the package's `migrate` is the function


async def has_schema(dsn: str, schema: str = "sidings") -> bool:
    return await value(dsn, "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", schema)


async def checked(dsn: str, service: str = "test", schema: str = "sidings") -> None:
    async with connected(dsn) as connection:
        await check(connection, service=service, schema=schema)


def later_migration(sql: str) -> tuple[Migration, ...]:
    """This release's migrations and one more."""
    return (*migrations(), Migration(LAST + 1, "later", sql))


# -- migrate ------------------------------------------------------------------------------------------------------


async def test_migrate_builds_an_empty_database_once(empty_database: str):
    applied = await migrate(empty_database, service="freight")
    assert [m.version for m in applied] == [m.version for m in migrations()]
    assert await migrate(empty_database, service="freight") == []
    await checked(empty_database, "freight")
    rows = await fetch(empty_database, "SELECT version, name, checksum FROM sidings.migration ORDER BY version")
    assert [tuple(row) for row in rows] == [(m.version, m.name, m.checksum) for m in migrations()]


def test_migrations_are_numbered_without_gaps():
    assert [m.version for m in migrations()] == list(range(FIRST, LAST + 1))


async def test_twenty_tasks_and_some_processes_migrate_at_once(empty_database: str):
    command = [sys.executable, "-m", "sidings.schema", "--service", "freight", empty_database]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    # Nobody waits for anybody before this: a lock that all of them need is held until all of them stand at it.
    async with connected(empty_database) as gate, asyncio.TaskGroup() as group:
        await gate.execute("BEGIN")
        key = "sidings.migrate:sidings"
        await gate.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", key)
        tasks = [group.create_task(migrate(empty_database, service="freight")) for _ in range(20)]

        async def all_at_the_gate() -> bool:
            query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (\
                     SELECT oid FROM pg_database WHERE datname = current_database())"
            return await gate.fetchval(query) == len(tasks) + len(processes)

        await eventually(all_at_the_gate, "all are waiting for the migration lock")
        await gate.execute("COMMIT")
    answers = await asyncio.gather(*(asyncio.to_thread(process.communicate, timeout=SECONDS) for process in processes))
    assert [process.returncode for process in processes] == [0, 0, 0], answers
    said = sum(out.count("applied ") for out, _ in answers)
    assert said + sum(len(task.result()) for task in tasks) == len(migrations())  # each was applied by exactly one
    assert await value(empty_database, "SELECT count(*) FROM sidings.migration") == len(migrations())
    assert await value(empty_database, "SELECT count(*) FROM sidings.service") == 1


async def test_a_migration_that_fails_leaves_nothing_behind(empty_database: str, monkeypatch: pytest.MonkeyPatch):
    broken = later_migration("CREATE TABLE sidings.half (id int); SELECT 1/0")
    monkeypatch.setattr(migrate_module, "migrations", lambda: broken)
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(empty_database, service="freight")
    assert not await has_schema(empty_database)


async def test_a_later_release_applies_only_what_is_missing(database: str, monkeypatch: pytest.MonkeyPatch):
    later = later_migration("CREATE TABLE sidings.later (id int)")
    monkeypatch.setattr(migrate_module, "migrations", lambda: later)
    with pytest.raises(SchemaTooOld, match=r"lacks the migrations \d{4}_later: call `await service.migrate\(\)`"):
        await checked(database)
    assert [m.name for m in await migrate(database, service="test")] == ["later"]
    await checked(database)


async def test_an_old_release_refuses_a_newer_schema_and_says_what_to_deploy(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched:
        later = later_migration("CREATE TABLE sidings.later (id int)")
        patched.setattr(migrate_module, "migrations", lambda: later)
        await migrate(database, service="test")
    for refused in (checked(database), migrate(database, service="test")):
        with pytest.raises(SchemaTooNew, match="a newer release of sidings has migrated it; deploy that release"):
            await refused


@pytest.mark.parametrize("runs_with", [LAST, LAST - 1])
async def test_an_old_release_runs_on_a_newer_schema_whose_migrations_say_that_it_may(
    database: str, monkeypatch: pytest.MonkeyPatch, runs_with: int
):
    later = later_migration(f"-- More.\n-- runs with {runs_with:04}\nALTER TABLE sidings.job ADD COLUMN later int")
    with monkeypatch.context() as patched:
        patched.setattr(migrate_module, "migrations", lambda: later)
        await migrate(database, service="test")
    await checked(database)
    assert await migrate(database, service="test") == []
    registry, done = Registry(), asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        done.set()

    async with running(database, registry):
        await enqueue(database, ride, [Ride()])
        await asyncio.wait_for(done.wait(), SECONDS)

    with monkeypatch.context() as patched:  # one more, which says nothing of that
        older_and_newer = (*later, Migration(LAST + 2, "strict", "CREATE TABLE sidings.strict (id int)"))
        patched.setattr(migrate_module, "migrations", lambda: older_and_newer)
        await migrate(database, service="test")
    with pytest.raises(SchemaTooNew, match=f"stands at migration {LAST + 2}, .* cannot run with {LAST + 2}: a newer"):
        await checked(database)


@pytest.mark.parametrize("last", range(51, LAST + 1))
async def test_each_release_since_they_can_be_rolled_back_starts_on_the_schema_of_this_one(
    database: str, monkeypatch: pytest.MonkeyPatch, last: int
):
    """Where a migration cannot say so, the changelog names it ("cannot be rolled back"), and it goes from this list."""
    earlier = migrations()[: last + 1 - FIRST]
    monkeypatch.setattr(migrate_module, "migrations", lambda: earlier)
    await checked(database)


async def test_a_release_that_is_too_old_for_a_newer_schema_is_refused(database: str, monkeypatch: pytest.MonkeyPatch):
    later = later_migration(f"-- runs with {LAST:04}\nCREATE TABLE sidings.later (id int)")
    with monkeypatch.context() as patched:
        patched.setattr(migrate_module, "migrations", lambda: later)
        await migrate(database, service="test")
    monkeypatch.setattr(migrate_module, "migrations", lambda: later[:-2])  # that of the release before this one
    with pytest.raises(SchemaTooNew, match=f"knows up to {LAST - 1} and cannot run with {LAST + 1}"):
        await checked(database)


async def test_an_edited_migration_is_refused(database: str):
    async with connected(database) as connection:
        await connection.execute(f"UPDATE sidings.migration SET checksum = 'other' WHERE version = {FIRST}")
    for refused in (checked(database), migrate(database, service="test")):
        with pytest.raises(SchemaChanged, match="migration 0045_jobs was applied to 'sidings' with other contents"):
            await refused


async def test_a_schema_that_grew_before_the_first_release_is_taken_as_it_stands_once_it_has_all_of_that(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Its rows are those of 51 migrations, of which these files have the last seven numbers."""
    monkeypatch.setattr(migrate_module, "_GROWN_SUM", sha256(b"former" * 51).hexdigest())
    async with connected(database) as connection:
        await connection.execute(
            "DELETE FROM sidings.migration WHERE version <= 51;"
            "INSERT INTO sidings.migration SELECT n, 'grown', 'former', now(), 19 FROM generate_series(20, 51) n;"
            "INSERT INTO sidings.migration SELECT n, 'grown', 'former' FROM generate_series(1, 19) n"
        )
        await checked(database)
        assert await migrate(database, service="test") == []
        with monkeypatch.context() as patched:
            patched.setattr(migrate_module, "migrations", lambda: later_migration("CREATE TABLE sidings.later ()"))
            assert [m.name for m in await migrate(database, service="test")] == ["later"]
            await connection.execute(f"UPDATE sidings.migration SET checksum = 'other' WHERE version = {LAST + 1}")
            with pytest.raises(SchemaChanged, match=f"migration {LAST + 1:04}_later was applied"):
                await checked(database)
            await connection.execute(f"DELETE FROM sidings.migration WHERE version = {LAST + 1}")
        await connection.execute("UPDATE sidings.migration SET checksum = 'other' WHERE version = 27")
        with pytest.raises(SchemaChanged, match="while a migration before the first release was being written"):
            await checked(database)
        await connection.execute("DELETE FROM sidings.migration WHERE version > 50")
        for refused in (checked(database), migrate(database, service="test")):
            with pytest.raises(SchemaError, match=r"stands at migration 50 of those before the first.* to 0051 with"):
                await refused
        await connection.execute(
            "DELETE FROM sidings.migration WHERE version > 18; ALTER TABLE sidings.migration DROP runs_with"
        )
        with pytest.raises(SchemaError, match="stands at migration 18 of those before the first release"):
            await checked(database)


async def test_a_schema_belongs_to_one_service(database: str):
    for refused in (checked(database, "other"), migrate(database, service="other")):
        with pytest.raises(ForeignSchema, match=r"belongs to the service 'test', not to 'other'.* renamed takes its"):
            await refused
    assert await value(database, "SELECT name FROM sidings.service") == "test"


async def test_a_database_without_the_schema_says_which_command_makes_it(empty_database: str):
    with pytest.raises(SchemaMissing, match=r"python -m sidings.schema --service freight --schema rail DSN"):
        await checked(empty_database, "freight", "rail")


async def test_a_service_may_have_only_one_row(database: str):
    async with connected(database) as connection:
        with pytest.raises(asyncpg.UniqueViolationError):
            await connection.execute("INSERT INTO sidings.service (name) VALUES ('second')")


async def test_a_server_that_is_too_old_is_refused_before_anything_is_made(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(migrate_module, "_OLDEST_POSTGRES", 99)
    with pytest.raises(SchemaError, match=r"this server is Postgres \d+.*: Sidings needs 99 or newer"):
        await migrate(empty_database, service="test")
    assert not await has_schema(empty_database)


# -- migrate while others hold locks ------------------------------------------------------------------------------

ALTER = "ALTER TABLE sidings.job ADD COLUMN later int"


@asynccontextmanager
async def a_long_transaction(dsn: str, query: str = "SELECT count(*) FROM sidings.job") -> AsyncIterator[int]:
    """Somebody's, which keeps its locks until the block ends; gives its pid."""
    async with connected(dsn, application_name="a report") as connection, connection.transaction():
        await connection.execute(query)
        yield connection.get_server_pid()


async def test_a_migration_that_waits_for_a_lock_lets_others_through(database: str, monkeypatch: pytest.MonkeyPatch):
    later = later_migration(ALTER)
    monkeypatch.setattr(migrate_module, "migrations", lambda: later)
    async with connected(database) as other:
        async with a_long_transaction(database):
            migrating = asyncio.create_task(migrate(database, service="test"))
            waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'sidings.job'::regclass AND NOT granted)"
            await eventually(lambda: value(database, waits), "the migration waits for the job table")
            async with asyncio.timeout(SECONDS):  # while the long transaction lasts, which would keep it for ever
                await other.execute("INSERT INTO sidings.job (type, origin) VALUES ('x', 't/0')")
            assert not migrating.done()
        assert [m.name for m in await migrating] == ["later"]
    await checked(database)


async def test_no_transaction_that_stores_a_job_and_then_its_offset_fails_because_of_a_migration(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """It waited for the migration, which had the offsets and waited for it, and it was what Postgres ended."""
    later = later_migration(f"ALTER TABLE sidings.consumer_offset ADD COLUMN later int;\n{ALTER}")
    monkeypatch.setattr(migrate_module, "migrations", lambda: later)
    async with connected(database, deadlock_timeout="10ms") as handler:
        async with handler.transaction():
            await handler.execute("INSERT INTO sidings.job (type, origin) VALUES ('x', 't/0')")
            migrating = asyncio.create_task(migrate(database, service="test"))
            waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'sidings.job'::regclass AND NOT granted)"
            await eventually(lambda: value(database, waits), "the migration waits for the job table")
            await handler.execute("UPDATE sidings.consumer_offset SET next_offset = next_offset + 1")
        assert [m.name for m in await migrating] == ["later"]


async def test_a_migration_gives_up_in_the_end_and_names_who_was_in_the_way(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(migrate_module, "_PATIENCE_SECONDS", 1.0)
    later = later_migration(f"CREATE TABLE sidings.half (id int); {ALTER}")
    with monkeypatch.context() as patched:
        patched.setattr(migrate_module, "migrations", lambda: later)
        async with a_long_transaction(database) as pid:
            with pytest.raises(SchemaBusy) as refused:
                await migrate(database, service="test")
    said = rf"In the way: pid {pid} \(postgres, a report, idle in transaction, open for .+\): SELECT count"
    assert re.search(said, str(refused.value))
    assert "nothing has changed" in str(refused.value)
    await checked(database)  # by the release without that migration
    assert await value(database, "SELECT to_regclass('sidings.half')") is None


async def test_what_others_have_in_their_sql_steers_no_terminal(database: str, monkeypatch: pytest.MonkeyPatch):
    """The command for migrations prints it."""
    monkeypatch.setattr(migrate_module, "_PATIENCE_SECONDS", 1.0)
    later = later_migration(ALTER)
    monkeypatch.setattr(migrate_module, "migrations", lambda: later)
    query = "SELECT count(*) /* \x1b[2J\u202e\n\n é */ FROM sidings.job"
    async with a_long_transaction(database, query):
        with pytest.raises(SchemaBusy) as refused:
            await migrate(database, service="test")
    assert str(refused.value).isprintable()
    assert r"SELECT count(*) /* \x1b[2J\u202e é */ FROM sidings.job" in str(refused.value)


async def test_who_looks_for_what_is_in_the_way_leaves_nothing_behind_wherever_it_is_at_the_end(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """It was cancelled while it connected, where a migration took about as long as it waits before; of a future that
    asyncpg leaves then, "Future exception was never retrieved" stood in the log."""
    monkeypatch.setattr(blockers, "_LOOK_SECONDS", 0.0)
    for turns in [*range(12)] * 20:
        async with blockers.watch_blockers(lambda: asyncpg.connect(database), 1):
            for _ in range(turns):
                await asyncio.sleep(0)
    assert never_retrieved(caplog) == []


async def test_a_limit_of_the_roles_on_transactions_does_not_end_the_wait_for_a_lock(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """It was ended each time, "did not answer, migrate again", and nobody learnt who was in the way."""
    if await value(database, "SELECT current_setting('server_version_num')::int") < 170000:
        pytest.skip("transaction_timeout came with Postgres 17")
    monkeypatch.setattr(migrate_module, "_PATIENCE_SECONDS", 3.0)
    later = later_migration(ALTER)
    monkeypatch.setattr(migrate_module, "migrations", lambda: later)
    limited = f"{database}?options=-c%20transaction_timeout%3D1s"
    async with a_long_transaction(database) as pid:
        with pytest.raises(SchemaBusy, match=rf"In the way: pid {pid}"):
            await migrate(limited, service="test")
    assert [m.name for m in await migrate(limited, service="test")] == ["later"]


async def test_of_two_that_migrate_only_one_asks_for_the_lock_that_somebody_holds(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Else of the many instances that start at once there would always be one that makes all others wait."""
    later = later_migration(ALTER)
    monkeypatch.setattr(migrate_module, "migrations", lambda: later)
    waiting = """SELECT count(*) FILTER (WHERE locktype = 'advisory'), count(*) FILTER (WHERE locktype <> 'advisory')
                 FROM pg_locks
                 WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
    async with asyncio.TaskGroup() as group, connected(database) as look, a_long_transaction(database):
        tasks = [group.create_task(migrate(database, service="test")) for _ in range(3)]
        attempts: list[int] = []

        async def attempted_twice() -> bool:
            turn, lock = await look.fetchrow(waiting) or (0, 0)
            if not attempts or attempts[-1] != lock:
                attempts.append(lock)
            return turn == 2 and attempts.count(1) >= 2

        await eventually(attempted_twice, lambda: f"two wait for their turn while the third tries: {attempts}")
        assert set(attempts) <= {0, 1}
    assert sorted(len(task.result()) for task in tasks) == [0, 0, 1]


async def test_whoever_waits_for_another_that_migrates_is_told_so(database: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(migrate_module, "_PATIENCE_SECONDS", 1.5)
    later = later_migration(ALTER)
    monkeypatch.setattr(migrate_module, "migrations", lambda: later)
    turn = "SELECT pg_advisory_xact_lock(hashtextextended('sidings.migrate:sidings', 0))"
    async with a_long_transaction(database, turn) as pid:
        with pytest.raises(SchemaBusy, match=rf"In the way: pid {pid} \(.+\): SELECT pg_advisory_xact_lock"):
            await migrate(database, service="test")


async def test_a_migration_whose_process_stands_still_gives_its_locks_back(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """As one that is paused, or whose machine is gone without a word. All that needed them waited for ten minutes."""
    goes_on = asyncio.Event()
    as_before = migrate_module._hand_over

    async def stand_still(connection: asyncpg.Connection, schema: str) -> None:
        await goes_on.wait()
        await as_before(connection, schema)

    monkeypatch.setattr(migrate_module, "_hand_over", stand_still)
    monkeypatch.setattr(migrate_module, "_IDLE_SECONDS", 1.0)
    later = later_migration(ALTER)
    monkeypatch.setattr(migrate_module, "migrations", lambda: later)
    async with connected(database) as other:
        migrating = asyncio.create_task(migrate(database, service="test"))
        locked = """SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'sidings.job'::regclass AND granted
                                   AND mode = 'AccessExclusiveLock')"""
        await eventually(lambda: value(database, locked), "the migration has the job table")
        async with asyncio.timeout(SECONDS):
            await other.execute("INSERT INTO sidings.job (type, origin) VALUES ('x', 't/0')")
    goes_on.set()
    with pytest.raises(PostgresUnavailable, match=r"did not answer while it was migrated .*: migrate again"):
        await migrating
    monkeypatch.setattr(migrate_module, "_hand_over", as_before)
    assert [m.name for m in await migrate(database, service="test")] == ["later"]


@pytest.mark.parametrize("ended_by", ["pg_cancel_backend", "pg_terminate_backend"])
async def test_a_migration_that_a_person_ends_is_said_to_be_done_as_a_whole_or_not_at_all(
    database: str, monkeypatch: pytest.MonkeyPatch, ended_by: str
):
    later = later_migration(ALTER)
    monkeypatch.setattr(migrate_module, "migrations", lambda: later)
    waiting = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
    turn = "SELECT pg_advisory_xact_lock(hashtextextended('sidings.migrate:sidings', 0))"
    async with a_long_transaction(database, turn):
        migrating = asyncio.create_task(migrate(database, service="test"))
        await eventually(lambda: value(database, waiting), "the migration waits for its turn")
        await fetch(database, f"SELECT {ended_by}(({waiting}))")
        with pytest.raises(PostgresUnavailable, match=r"was migrated .*: migrate again; it is done as a whole"):
            await migrating
    assert [m.name for m in await migrate(database, service="test")] == ["later"]


# -- rights, servers ----------------------------------------------------------------------------------------------


@pytest.fixture
async def stranger(empty_database: str) -> AsyncIterator[str]:
    """DSN of a role that may do nothing in the database but connect. Its name: that of the database."""
    where = urlsplit(empty_database)
    name = where.path.lstrip("/")
    async with connected(empty_database) as connection:
        await connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'")
    yield empty_database.replace(where.netloc, f"{name}:secret@{where.hostname}:{where.port}")
    async with connected(empty_database) as connection:
        await connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


async def test_a_role_without_rights_is_told_which_it_lacks(stranger: str):
    with pytest.raises(ConfigurationError, match=r"may not migrate .* permission denied for database .*operations.md"):
        await migrate(stranger, service="test")


async def test_a_schema_that_is_there_for_the_role_is_enough(stranger: str, empty_database: str):
    name = urlsplit(empty_database).path.lstrip("/")
    async with connected(empty_database) as connection:
        await connection.execute(f"CREATE SCHEMA sidings; GRANT USAGE, CREATE ON SCHEMA sidings TO {name}")
    assert len(await migrate(stranger, service="test")) == len(migrations())
    await checked(stranger)


async def test_where_nothing_is_missing_the_right_to_read_is_enough(stranger: str, empty_database: str):
    await migrate(empty_database, service="test")
    name = urlsplit(empty_database).path.lstrip("/")
    async with connected(empty_database) as connection:
        await connection.execute(f"GRANT USAGE ON SCHEMA sidings TO {name}")
        await connection.execute(f"GRANT SELECT ON sidings.migration, sidings.service TO {name}")
    assert await migrate(stranger, service="test") == []


async def test_a_server_that_can_only_be_read_is_said_to_be_one(empty_database: str):
    standby = f"{empty_database}?options=-c%20default_transaction_read_only%3Don"
    with pytest.raises(PostgresUnavailable, match=r"can only be read, as a standby, or .* a DSN of the primary"):
        await migrate(standby, service="test")


@pytest.mark.parametrize(
    "text", ["wal_level must be set to logical", "WAL control functions cannot be executed when wal_level < logical"]
)
async def test_a_server_that_does_not_tell_its_position_in_the_wal_is_said_to_be_one(empty_database: str, text: str):
    """Amazon Aurora's, as others have reported its errors."""
    async with connected(empty_database) as connection:
        await connection.execute(
            f"""CREATE SCHEMA aurora;
                CREATE FUNCTION aurora.pg_current_wal_insert_lsn() RETURNS pg_lsn LANGUAGE plpgsql AS
                    $$ BEGIN RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = '{text}'; END $$"""
        )
    its = f"{empty_database}?options=-c%20search_path%3Daurora,pg_catalog"
    with pytest.raises(SchemaError, match=rf"tells no position in its WAL: {text}: .* rds.logical_replication = 1"):
        await migrate(its, service="test")
    assert await value(empty_database, "SELECT to_regnamespace('sidings')") is None


async def test_a_schema_of_somebody_else_is_left_as_it_is(empty_database: str):
    async with connected(empty_database) as connection:
        await connection.execute("CREATE SCHEMA taken; CREATE TABLE taken.job (id int)")
    with pytest.raises(SchemaError, match=r"'taken' in .* is not Sidings': relation .job. already exists"):
        await migrate(empty_database, service="test", schema="taken")
    assert await value(empty_database, "SELECT to_regclass('taken.migration')") is None


async def test_a_table_of_migrations_of_somebody_elses_is_said_to_be_one(empty_database: str):
    async with connected(empty_database) as connection:
        await connection.execute("CREATE SCHEMA taken; CREATE TABLE taken.migration (id int, name text)")
    for refused in (migrate(empty_database, service="test", schema="taken"), checked(empty_database, schema="taken")):
        with pytest.raises(SchemaError, match=r"the table taken.migration is not Sidings': choose a schema of its own"):
            await refused


async def test_an_isolation_level_of_the_role_changes_nothing(empty_database: str):
    """What others have applied while it waited would not be seen."""
    strict = f"{empty_database}?options=-c%20default_transaction_isolation%3Dserializable"
    applied = await asyncio.gather(*(migrate(strict, service="test") for _ in range(4)))
    assert sorted(len(each) for each in applied) == [0, 0, 0, len(migrations())]


async def test_a_server_that_reads_strings_in_another_way_is_refused(database: str, empty_database: str):
    """It said 'invalid Unicode escape value'."""
    options = "?options=-c%20standard_conforming_strings%3Doff"
    with pytest.raises(SchemaError, match="standard_conforming_strings is off"):
        await migrate(empty_database + options, service="test")
    with pytest.raises(SchemaError, match="standard_conforming_strings is off"):
        await checked(database + options)


async def test_a_database_that_cannot_hold_every_character_is_refused(empty_database: str):
    """In LATIN1 the migrations failed with an error about bytes; in SQL_ASCII the texts of errors got lost."""
    url = urlsplit(empty_database)
    name = f"{url.path[1:]}_latin1"
    async with connected(empty_database) as connection:
        await connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C'"
        )
        try:
            with pytest.raises(SchemaError, match="encoding is LATIN1: Sidings needs UTF8"):
                await migrate(url._replace(path=f"/{name}").geturl(), service="test")
        finally:
            await connection.execute(f"DROP DATABASE {name}")


async def test_row_level_security_that_hides_all_rows_is_refused_for_what_it_is(database: str):
    """An event trigger may put it on each new table. All migrations were missing then, and `migrate` named an owner."""
    async with a_role(database) as (_, of_role), connected(database) as owner:
        await owner.execute(
            "ALTER TABLE sidings.job ENABLE ROW LEVEL SECURITY; ALTER TABLE sidings.migration ENABLE ROW LEVEL SECURITY"
        )
        told = (
            r"hides all rows of sidings\.job \(2 tables in all\) from this role: "
            r"run ALTER TABLE sidings\.job DISABLE ROW LEVEL SECURITY, and so on"
        )
        with pytest.raises(SchemaError, match=told):
            await checked(of_role)
        with pytest.raises(SchemaError, match=told):
            await migrate(of_role, service="test")
        await checked(database)  # the owner sees them
        await owner.execute(
            "CREATE POLICY everything ON sidings.job USING (true); "
            "CREATE POLICY everything ON sidings.migration USING (true)"
        )
        await checked(of_role)


async def test_row_level_security_of_a_days_table_or_of_anothers_table_is_no_reason_to_refuse_a_role(database: str):
    """A day is read by way of its parent. An event trigger may put it on each table that is made since."""
    async with a_role(database) as (_, of_role), connected(database) as owner, connected(of_role) as other:
        await owner.execute(
            "CREATE TABLE sidings.job_history_20260301 PARTITION OF sidings.job_history "
            "FOR VALUES FROM ('2026-03-01 00:00Z') TO ('2026-03-02 00:00Z'); "
            "ALTER TABLE sidings.job_history_20260301 ENABLE ROW LEVEL SECURITY; "
            "CREATE TABLE sidings.notes (); ALTER TABLE sidings.notes ENABLE ROW LEVEL SECURITY"
        )
        await checked(of_role)
        await owner.execute(
            "INSERT INTO sidings.job_history "
            "(job_id, enqueued_at, finished_at, attempt, outcome, priority, type, origin) VALUES "
            "(1, '2026-03-01', '2026-03-01 12:00Z', 1, 'succeeded', 0, 'a', 'b')"
        )
        assert await other.fetchval("SELECT count(*) FROM sidings.job_history") == 1


async def test_an_operating_system_that_sorts_in_another_way_is_told_of(
    database: str, caplog: pytest.LogCaptureFixture
):
    """Each connection is told so by a notice, which nobody sees; indexes on text are out of order then."""
    await checked(database)
    assert "REINDEX" not in caplog.text
    async with connected(database) as connection:
        await connection.execute("UPDATE pg_database SET datcollversion = '2.27' WHERE datname = current_database()")
    await checked(database)
    name = urlsplit(database).path[1:]
    assert f"than when the database '{name}' was made (2.27)" in caplog.text
    assert f"run REINDEX DATABASE {name}, then ALTER DATABASE {name} REFRESH COLLATION VERSION" in caplog.text


@pytest.mark.parametrize("name", ["", " "])
async def test_a_service_without_a_name_owns_no_schema(empty_database: str, name: str):
    with pytest.raises(ConfigurationError, match=f"service='{name}': give the service's name"):
        await migrate(empty_database, service=name)


# -- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "Freight", "1st", "pg_jobs", "a-b", "a b", "a.b", "jobs;", 'j"', "ä", "x" * 49])
def test_a_schema_name_that_needs_quotes_is_refused(name: str):
    with pytest.raises(ConfigurationError, match="is not usable"):
        valid_schema_name(name)


@pytest.mark.parametrize("name", ["freight_jobs", "_x", "a1", "x" * 48])
def test_plain_schema_names_are_accepted(name: str):
    assert valid_schema_name(name) == name


@pytest.mark.parametrize("name", ["user", "order", "table", "select"])
async def test_a_schema_name_that_is_a_word_of_sql_is_refused_too(name: str, empty_database: str):
    with pytest.raises(ConfigurationError):
        await migrate(empty_database, service="test", schema=name)


def test_the_schema_is_the_only_substitution_in_a_query():
    assert rename_schema("SELECT sidings.acquire() FROM sidings.job, x.sidings_job", "a1") == (
        "SELECT a1.acquire() FROM a1.job, x.sidings_job"
    )
    folder = Path(importlib.import_module("sidings.executor.executor").__file__ or "").parent
    for name in sorted(path.stem for path in folder.glob("*.sql")):
        assert "sidings." not in load_sql("sidings.executor", name, "freight_jobs")


async def test_two_schemas_of_one_database_do_not_wait_for_each_other(empty_database: str):
    async with connected(empty_database) as connection, connection.transaction():
        key = "sidings.migrate:sidings"
        await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", key)
        async with asyncio.timeout(SECONDS):
            await migrate(empty_database, service="other", schema="rail")
    assert await has_schema(empty_database, "rail")


async def test_an_executor_works_in_a_schema_of_another_name(empty_database: str):
    await migrate(empty_database, service="freight", schema="freight_jobs")
    registry = Registry(schema="freight_jobs")
    attempts: list[int] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        attempts.append(job.payload.number)
        if job.payload.number == 1 and job.attempt == 1:
            raise job_type_retry()

    def job_type_retry() -> Exception:
        return ride.retry.after(0)

    async with connected(empty_database) as connection, connection.transaction():
        rides = [Ride(transport="a", number=n) for n in range(3)]
        await ride.enqueue_many(connection, rides, origin="t/0")
        await ride.enqueue(connection, Ride(transport="b", number=7), origin="t/0", delay=0.05)
    async with running(empty_database, registry, ["t/0"], schema="freight_jobs", service="freight"):
        query = "SELECT count(*) FROM freight_jobs.job_history WHERE outcome = 'succeeded'"

        async def done() -> bool:
            return await value(empty_database, query) == 4

        await eventually(done, "all four jobs have succeeded")
        await value(empty_database, "SELECT freight_jobs.maintain(30)")
    assert sorted(attempts) == [0, 1, 1, 2, 7]
    assert not await has_schema(empty_database, "sidings")
    bodies = await fetch(empty_database, "SELECT prosrc FROM pg_proc WHERE pronamespace = 'freight_jobs'::regnamespace")
    assert bodies
    assert not any("sidings." in row["prosrc"] for row in bodies)


async def test_a_schema_that_was_renamed_is_refused_and_made_to_work_as_the_guide_says(empty_database: str):
    """Its functions worked on in the schema of the former name: on no tables, or on another service's, from which they
    took its origins."""
    await migrate(empty_database, service="freight")
    async with connected(empty_database) as connection:
        await connection.execute(
            "CREATE TABLE rate (id int PRIMARY KEY); SELECT sidings.directory_table('rate', 'rates', '{id}')"
        )
        guide = block("operations.md", "A schema under another name", "sql")
        [rename, rewrite] = guide.removesuffix("\\gexec\n").split(";\n")
        await connection.execute(rename)
        await migrate(empty_database, service="other")
        for refused in (
            checked(empty_database, "freight", "freight_jobs"),
            migrate(empty_database, service="freight", schema="freight_jobs"),
        ):
            with pytest.raises(
                SchemaError, match=r"was called 'sidings', where its functions would work .*operations.md"
            ):
                await refused
        for row in await connection.fetch(rewrite):
            await connection.execute(row[0])
        assert await migrate(empty_database, service="freight", schema="freight_jobs") == []
        await checked(empty_database, "freight", "freight_jobs")
        await migrate(empty_database, service="fresh", schema="fresh")
        bodies = """SELECT replace(pg_get_functiondef(oid), $1 || '.', 'x.') FROM pg_proc
                    WHERE pronamespace = $1::regnamespace ORDER BY 1"""
        assert await names(connection, bodies, "freight_jobs") == await names(connection, bodies, "fresh")
        await connection.execute("INSERT INTO rate VALUES (1)")
        assert await connection.fetchval("SELECT count(*) FROM freight_jobs.outbox") == 1
        assert await connection.fetchval("SELECT count(*) FROM sidings.outbox") == 0


async def test_functions_that_rule_out_sequential_scans_compile_nothing(database: str):
    """Up to Postgres 17 what is ruled out costs so much, where it takes place, that it is compiled: 0.2 s each time."""
    functions = await fetch(
        database,
        "SELECT oid::regprocedure::text AS name, proconfig FROM pg_proc "
        "WHERE pronamespace = 'sidings'::regnamespace AND 'enable_seqscan=off' = ANY (proconfig)",
    )
    assert functions
    assert [row["name"] for row in functions if "jit=off" not in row["proconfig"]] == []


async def test_every_constraint_and_index_has_a_name_of_our_own(database: str):
    folder = Path(migrate_module.__file__ or "").parent
    texts = [path.read_text() for path in folder.rglob("*") if path.suffix in (".sql", ".py")]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    names = await fetch(
        database,
        """SELECT c.relname AS name FROM pg_class c WHERE c.relnamespace = 'sidings'::regnamespace
               AND c.relkind IN ('i', 'I') AND NOT c.relispartition
           UNION SELECT c.conname FROM pg_constraint c JOIN pg_class t ON t.oid = c.conrelid
           WHERE c.connamespace = 'sidings'::regnamespace AND c.contype <> 'n' AND NOT t.relispartition""",
    )
    assert len(names) > 8
    assert {row["name"] for row in names} <= words


@pytest.mark.parametrize("sequence", ["job_position", "job_id_seq", "outbox_id"])
async def test_a_sequence_with_a_cache_is_refused_at_start(database: str, sequence: str):
    async with connected(database) as connection:
        await check(connection, service="test")
        await connection.execute(f"ALTER SEQUENCE sidings.{sequence} CACHE 50")
        with pytest.raises(SchemaError, match=f"run ALTER SEQUENCE sidings.{sequence} CACHE 1"):
            await check(connection, service="test")


async def test_the_outcomes_of_python_and_sql_are_the_same(database: str):
    labels = await fetch(database, "SELECT unnest(enum_range(NULL::sidings.outcome))::text AS label")
    assert [row["label"] for row in labels] == [name.value for name in OutcomeName]


@pytest.mark.parametrize(
    "columns",
    ["position = NULL, run_at = NULL, held = NULL", "held = 'why'"],
    ids=["in no state", "waiting and held"],
)
async def test_a_row_in_no_state_or_in_two_is_refused(database: str, columns: str):
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.job (type, origin) VALUES ('x', 't/0')")
        with pytest.raises(asyncpg.CheckViolationError):
            await connection.execute(f"UPDATE sidings.job SET {columns}")


# -- the command --------------------------------------------------------------------------------------------------


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: text for name, text in os.environ.items() if name not in ("SIDINGS_POSTGRES", "SIDINGS_SCHEMA")}
    return subprocess.run(
        [sys.executable, "-m", "sidings.schema", *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


async def test_the_command_says_what_it_has_done(empty_database: str):
    done = await asyncio.to_thread(run_command, "--service", "freight", "--schema", "rail", empty_database)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *(f"applied {m.version:04}_{m.name}" for m in migrations()),
        "the schema 'rail' is up to date",
    ]
    again = await asyncio.to_thread(
        run_command, "--service", "freight", "--schema", "rail", SIDINGS_POSTGRES=empty_database
    )
    assert (again.returncode, again.stdout) == (0, "the schema 'rail' is up to date\n")
    foreign = await asyncio.to_thread(run_command, "--service", "other", "--schema", "rail", empty_database)
    assert (foreign.returncode, foreign.stdout) == (1, "")
    assert foreign.stderr.startswith("error: the schema 'rail' belongs to the service 'freight'")


async def test_the_command_takes_the_services_schema_from_the_environment(empty_database: str):
    """It made, and at the next release brought up to date, another one beside that of the service."""
    given = {"SIDINGS_POSTGRES": empty_database, "SIDINGS_SCHEMA": "rail"}
    done = await asyncio.to_thread(run_command, "--service", "freight", **given)
    assert done.stdout.endswith("the schema 'rail' is up to date\n"), done.stderr
    assert not await value(empty_database, "SELECT count(*) FROM pg_namespace WHERE nspname = 'sidings'")
    await checked(empty_database, "freight", "rail")


async def test_the_command_refuses_what_is_no_dsn_without_showing_a_password(empty_database: str):
    """A slash was missing: it migrated the database that the environment names, or one on this machine, or said that
    there is none of this name, the password in it."""
    parts = urlsplit(empty_database)
    here = {"PGHOST": str(parts.hostname), "PGPORT": str(parts.port), "PGUSER": str(parts.username)}
    here |= {"PGPASSWORD": str(parts.password), "PGDATABASE": parts.path[1:]}
    for dsn in ("postgresql:/me:secret@db1/tracker", "postgres:me:secret@db1/tracker", "postgresql:"):
        refused = await asyncio.to_thread(run_command, "--service", "freight", dsn, **here)
        assert (refused.returncode, refused.stdout) == (1, "")
        told = "error: dsn: it begins with no scheme: give postgresql://user:password@host/database\n"
        assert refused.stderr == told
    assert not await value(empty_database, "SELECT count(*) FROM pg_namespace WHERE nspname = 'sidings'")


def test_the_command_without_a_database_says_how_to_give_one():
    done = run_command("--service", "freight")
    assert done.returncode == 2
    assert "give the DSN of the database, or set SIDINGS_POSTGRES" in done.stderr


def test_the_command_reports_an_unreachable_server_without_a_traceback():
    done = run_command("--service", "freight", "postgresql://postgres@127.0.0.1:1/x")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


# -- the history's partitions -------------------------------------------------------------------------------------

ATTEMPT = """INSERT INTO sidings.job_history
                 (job_id, enqueued_at, finished_at, attempt, outcome, priority, type, origin)
             VALUES ($1, $2, $2, 1, 'succeeded', 0, 'x', 't/0')"""
PARTITIONS = """SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                WHERE i.inhparent = 'sidings.job_history'::regclass ORDER BY 1"""
TABLES = "SELECT relname FROM pg_class WHERE relnamespace = 'sidings'::regnamespace AND relkind = 'r' ORDER BY 1"


async def names(connection: asyncpg.Connection, query: str = PARTITIONS, *args: object) -> list[str]:
    return [row[0] for row in await connection.fetch(query, *args)]


async def days(connection: asyncpg.Connection, first: int, last: int) -> list[str]:
    query = "SELECT to_char((now() AT TIME ZONE 'UTC')::date + n, 'YYYYMMDD') FROM generate_series($1::int, $2) n"
    return [f"job_history_{row[0]}" for row in await connection.fetch(query, first, last)]


@pytest.fixture
async def undivided(database: str) -> str:
    """A database whose history has no days yet, as one that has not been maintained for long."""
    async with connected(database) as connection:
        for name in await names(connection):
            if name != "job_history_default":
                await connection.execute(f"DROP TABLE sidings.{name}")
    return database


async def test_partitions_of_the_history_are_made_ahead(undivided: str):
    async with connected(undivided) as connection:
        assert await names(connection) == ["job_history_default"]
        for _ in range(2):
            await connection.execute("SELECT sidings.maintain(30)")
            assert await names(connection) == [*await days(connection, 0, 2), "job_history_default"]


async def test_rows_that_fell_into_the_default_partition_move_to_their_day(undivided: str):
    async with connected(undivided) as connection:
        now = await connection.fetchval("SELECT now()")
        for n in range(5):
            await connection.execute(ATTEMPT, n, now)
        await connection.execute(ATTEMPT, 99, now - timedelta(days=3))  # a day that has no partition, and gets none
        await connection.execute("SELECT sidings.maintain(30)")
        [today] = await days(connection, 0, 0)
        assert await connection.fetchval(f"SELECT count(*) FROM sidings.{today}") == 5
        assert await connection.fetchval("SELECT array_agg(job_id) FROM sidings.job_history_default") == [99]
        assert await connection.fetchval("SELECT count(*) FROM sidings.job_history") == 6
        await connection.execute(ATTEMPT, 100, now)
        assert await connection.fetchval(f"SELECT count(*) FROM sidings.{today}") == 6


async def with_limit(connection: asyncpg.Connection, name: str, value: int) -> None:
    """Let maintain() find at once that there is too much of something."""
    text = await connection.fetchval("SELECT pg_get_functiondef('sidings.maintain(integer)'::regprocedure)")
    changed, count = re.subn(rf"(\b{name}\s+constant bigint := )\d+", rf"\g<1>{value}", text)
    assert count == 1
    await connection.execute(changed)


async def test_a_day_of_many_rows_stays_in_the_default_partition_and_the_next_ones_get_theirs(undivided: str):
    """To move them all took longer than a call may, so that no day ever got a partition again."""
    async with connected(undivided) as connection:
        await with_limit(connection, "most_moved", 4)
        now = await connection.fetchval("SELECT now()")
        for n in range(5):
            await connection.execute(ATTEMPT, n, now)
        await connection.execute("SELECT sidings.maintain(30)")
        assert await names(connection) == [*await days(connection, 1, 2), "job_history_default"]
        assert await connection.fetchval("SELECT count(*) FROM sidings.job_history") == 5


async def test_a_large_default_partition_is_not_looked_through_for_every_day(undivided: str):
    async with connected(undivided) as connection:
        await with_limit(connection, "most_bytes", 8191)
        now = await connection.fetchval("SELECT now()")
        await connection.execute(ATTEMPT, 1, now)
        await connection.execute("SELECT sidings.maintain(30)")
        assert await names(connection) == ["job_history_default"]
        await connection.execute("TRUNCATE sidings.job_history_default")  # docs/operations.md
        await connection.execute("SELECT sidings.maintain(30)")
        assert await names(connection) == [*await days(connection, 0, 2), "job_history_default"]


async def test_retention_in_the_default_partition_gets_on_in_parts(undivided: str):
    async with connected(undivided) as connection:
        await with_limit(connection, "most_deleted", 2)
        now = await connection.fetchval("SELECT now()")
        for n in range(5):
            await connection.execute(ATTEMPT, n, now - timedelta(days=9))
        await connection.execute(ATTEMPT, 7, now - timedelta(days=6))
        left: list[int] = []
        for _ in range(4):
            await connection.execute("SELECT sidings.maintain(7)")
            left.append(await connection.fetchval("SELECT count(*) FROM sidings.job_history"))
        assert left == [4, 2, 1, 1]


async def test_cycles_do_not_wait_for_rows_that_retention_deletes(undivided: str):
    async with connected(undivided) as connection, connected(undivided) as other:
        await connection.execute(ATTEMPT, 1, await connection.fetchval("SELECT now() - interval '9 days'"))
        async with other.transaction():
            await other.execute("SELECT FROM sidings.job_history_default FOR UPDATE")
            maintaining = asyncio.create_task(connection.execute("SELECT sidings.maintain(7)"))
            query = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted AND locktype = 'transactionid')"
            await eventually(lambda: other.fetchval(query, connection.get_server_pid()), "it waits for the row")
            query = """SELECT array_agg(mode) FROM pg_locks
                       WHERE pid = $1 AND granted AND relation = 'sidings.job_history'::regclass"""
            assert await other.fetchval(query, connection.get_server_pid()) is None
        await maintaining
        assert await connection.fetchval("SELECT count(*) FROM sidings.job_history") == 0


async def an_old_partition(connection: asyncpg.Connection, days_ago: int) -> str:
    [name] = await days(connection, -days_ago, -days_ago)
    day = await connection.fetchval("SELECT (now() AT TIME ZONE 'UTC')::date - $1::int", days_ago)
    await connection.execute(
        f"CREATE TABLE sidings.{name} PARTITION OF sidings.job_history "
        f"FOR VALUES FROM ('{day} 00:00:00+00') TO ('{day + timedelta(days=1)} 00:00:00+00')"
    )
    return name


async def test_retention_drops_whole_days_and_only_those_that_are_over(undivided: str):
    async with connected(undivided) as connection:
        kept, dropped = await an_old_partition(connection, 7), await an_old_partition(connection, 8)
        now = await connection.fetchval("SELECT now()")
        await connection.execute(ATTEMPT, 7, now - timedelta(days=7))
        await connection.execute(ATTEMPT, 8, now - timedelta(days=8))
        await connection.execute(ATTEMPT, 9, now - timedelta(days=9))  # falls into the default partition
        await connection.execute(ATTEMPT, 6, now - timedelta(days=6))  # so does this
        await connection.execute("SELECT sidings.maintain(7)")
        left = await names(connection)
        assert kept in left
        assert dropped not in left
        assert dropped not in await names(connection, TABLES)
        ids = await connection.fetchval("SELECT array_agg(job_id ORDER BY job_id) FROM sidings.job_history")
        assert ids == [6, 7]


async def test_two_may_maintain_at_once(undivided: str):
    async with connected(undivided) as one, connected(undivided) as other:
        async with one.transaction():
            await one.execute("SELECT sidings.maintain(30)")
            async with asyncio.timeout(SECONDS):
                await other.execute("SELECT sidings.maintain(30)")  # returns at once and does nothing
            assert await names(other) == ["job_history_default"]
        assert len(await names(other)) == 4
        await asyncio.gather(*(c.execute("SELECT sidings.maintain(30)") for c in (one, other)))
        assert len(await names(other)) == 4


async def test_maintenance_that_fails_leaves_no_table_behind(undivided: str):
    async with connected(undivided) as connection, connected(undivided) as reader, reader.transaction():
        await reader.fetch("SELECT count(*) FROM sidings.job_history_default")  # attaching needs the default's lock
        before = await names(connection, TABLES)
        with pytest.raises(asyncpg.LockNotAvailableError):  # today's: try again soon
            await connection.execute("SELECT sidings.maintain(30)")
        assert await names(connection, TABLES) == before


async def test_a_day_ahead_that_cannot_be_made_has_time(undivided: str):
    """During a backup each instance tried again each minute, and each time cycles waited for two seconds."""
    async with connected(undivided) as connection, connected(undivided) as backup:
        await connection.execute("SELECT sidings.make_history_day((now() AT TIME ZONE 'UTC')::date)")
        async with backup.transaction():
            await backup.fetch("SELECT count(*) FROM sidings.job_history_default")
            before = await names(connection, TABLES)
            await connection.execute("SELECT sidings.maintain(7)")
            assert await names(connection, TABLES) == before
        await connection.execute("SELECT sidings.maintain(7)")
        assert set(await days(connection, 0, 2)) <= set(await names(connection))


async def test_a_day_that_something_depends_on_keeps_no_other_from_being_dropped_or_made(undivided: str):
    async with connected(undivided) as connection:
        kept, dropped = await an_old_partition(connection, 10), await an_old_partition(connection, 9)
        await connection.execute(f"CREATE VIEW report AS SELECT count(*) FROM sidings.{kept}")
        await connection.execute("SELECT sidings.maintain(7)")
        present = await names(connection)
        assert set(await days(connection, 0, 2)) | {kept} <= set(present)
        assert dropped not in present


async def test_many_old_days_that_are_in_use_do_not_undo_the_days_ahead(undivided: str):
    """As in a backup: a tenth of a second for each was more than the call has."""
    async with connected(undivided) as connection, connected(undivided) as backup:
        old = [await an_old_partition(connection, n) for n in range(10, 80)]
        async with backup.transaction():
            await backup.execute(f"LOCK TABLE {', '.join(f'sidings.{name}' for name in old)} IN ACCESS SHARE MODE")
            await connection.execute("SET statement_timeout = '6s'")
            await connection.execute("SELECT sidings.maintain(7)")
        present = await names(connection)
        assert {*await days(connection, 0, 2), *old} <= set(present)


@asynccontextmanager
async def an_owner(dsn: str) -> AsyncIterator[tuple[str, str]]:
    """A role that may make schemas, and no superuser; and the DSN for it."""
    role, parts = f"owner_{token_hex(6)}", urlsplit(dsn)
    async with connected(dsn) as admin:
        await admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        await admin.execute(f'GRANT CREATE ON DATABASE "{parts.path[1:]}" TO {role}')
        try:
            yield role, parts._replace(netloc=f"{role}:x@{parts.netloc.rpartition('@')[2]}").geturl()
        finally:
            await admin.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


@pytest.mark.parametrize("maker", ["a superuser", "a member"])
async def test_a_day_that_another_role_has_made_is_the_owners_all_the_same(empty_database: str, maker: str):
    """An archive run with an administrator's DSN makes days, and so does an instance whose login is a member of the
    owner. Nobody else could drop them, or archive them."""
    async with an_owner(empty_database) as (owner, of_owner), an_owner(empty_database) as (member, of_member):
        await migrate(of_owner, service="test")
        async with connected(empty_database) as admin:
            await admin.execute(f"GRANT {owner} TO {member}")
            [day] = await days(admin, -9, -9)
        async with connected(empty_database if maker == "a superuser" else of_member) as other:
            await other.execute("SELECT sidings.make_history_day((now() AT TIME ZONE 'UTC')::date - 9)")
            assert day in await names(other)
        async with connected(of_owner) as connection:
            await connection.execute("SELECT sidings.watch_history_day((now() AT TIME ZONE 'UTC')::date - 9)")
            await connection.execute("SELECT sidings.maintain(7)")
            assert day not in await names(connection)


OTHERS = """SELECT o.kind, o.name, pg_get_userbyid(o.owner)::text AS owner FROM (
                SELECT 'relation', c.relname, c.relowner FROM pg_class c WHERE c.relnamespace = 'sidings'::regnamespace
                UNION ALL
                SELECT 'type', t.typname, t.typowner FROM pg_type t WHERE t.typnamespace = 'sidings'::regnamespace
                UNION ALL
                SELECT 'function', p.oid::regprocedure::text, p.proowner FROM pg_proc p
                WHERE p.pronamespace = 'sidings'::regnamespace) o (kind, name, owner)
            WHERE pg_get_userbyid(o.owner) <> $1"""
ALL_KINDS = """CREATE TABLE sidings.later (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n serial);
               CREATE SEQUENCE sidings.later_id; CREATE TYPE sidings.state AS ENUM ('a');
               CREATE TABLE sidings.parted (d date) PARTITION BY LIST (d);
               CREATE TABLE sidings.part PARTITION OF sidings.parted DEFAULT;
               CREATE VIEW sidings.look AS SELECT 1 AS one;
               CREATE FUNCTION sidings.rights() RETURNS name
               LANGUAGE sql SECURITY DEFINER AS 'SELECT current_user'"""


@pytest.mark.parametrize("migrator", ["a superuser", "a member"])
async def test_what_another_role_has_migrated_is_the_owners_all_the_same(
    empty_database: str, monkeypatch: pytest.MonkeyPatch, migrator: str
):
    """The owner could not replace its functions with the next migration, nor use its tables."""
    async with an_owner(empty_database) as (owner, of_owner), an_owner(empty_database) as (member, of_member):
        other = empty_database if migrator == "a superuser" else of_member
        async with connected(empty_database) as admin:
            await admin.execute(f"GRANT {owner} TO {member}")
        for number in range(1, len(migrations()) + 1):  # each migration as it is met by a schema of the release before
            with monkeypatch.context() as patched:
                patched.setattr(migrate_module, "migrations", lambda: migrations()[:number])  # noqa: B023
                await migrate(of_owner if number == 1 else other, service="test")
        with monkeypatch.context() as patched:
            patched.setattr(migrate_module, "migrations", lambda: later_migration(ALL_KINDS))
            await migrate(other, service="test")
            assert await fetch(empty_database, OTHERS, owner) == []
            assert await value(of_owner, "SELECT sidings.rights()") == owner


async def test_a_role_with_a_name_that_needs_quotes_migrates_and_what_it_makes_is_the_owners(empty_database: str):
    """As roles of a cloud's directory have them: each migration ended with "invalid name syntax"."""
    parts, role = urlsplit(empty_database), f"Deploy.{token_hex(6)}@firm"
    async with an_owner(empty_database) as (owner, of_owner), connected(empty_database) as admin:
        await admin.execute(f"CREATE ROLE \"{role}\" LOGIN PASSWORD 'x' IN ROLE {owner}")
        try:
            server = parts.netloc.rpartition("@")[2]
            of_role = parts._replace(netloc=f"{quote(role, safe='')}:x@{server}").geturl()
            assert len(await migrate(of_role, service="test", schema="of_the_role")) == len(migrations())
            await migrate(of_owner, service="test")
            async with connected(of_role) as other:
                await other.execute(f'SET ROLE "{role}"; CREATE TABLE sidings.job_history_20200101 ()')
            assert await migrate(of_role, service="test") == []
            assert await fetch(empty_database, OTHERS, owner) == []
        finally:
            await admin.execute(f'DROP OWNED BY "{role}" CASCADE; DROP ROLE "{role}"')


async def test_what_a_superuser_has_migrated_before_is_given_to_the_owner_by_the_next_time(empty_database: str):
    async with an_owner(empty_database) as (owner, of_owner):
        await migrate(of_owner, service="test")
        async with connected(empty_database) as admin:
            await admin.execute(
                """ALTER FUNCTION sidings.maintain_seen OWNER TO postgres; ALTER TABLE sidings.pause OWNER TO postgres;
                   ALTER FUNCTION sidings.directory_publish OWNER TO postgres;
                   CREATE VIEW sidings.a_report AS SELECT count(*) FROM pg_authid"""
            )
        assert await migrate(empty_database, service="test") == []
        left = {row["name"] for row in await fetch(empty_database, OTHERS, owner)}
        assert left == {
            "sidings.directory_publish()",
            "a_report",
            "_a_report",
        }  # run with the rights of their owner: his decision


async def test_a_start_does_not_wait_for_what_is_to_be_given_to_the_owner(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
):
    """Where nothing was missing, each start during a backup was refused after two minutes, "could not be migrated"."""
    monkeypatch.setattr(migrate_module, "_PATIENCE_SECONDS", 3.0)
    async with an_owner(empty_database) as (owner, of_owner):
        await migrate(of_owner, service="test")
        async with connected(empty_database) as admin, connected(of_owner) as backup:
            await admin.execute("ALTER TABLE sidings.message_seen OWNER TO postgres")
            await admin.execute(f"GRANT SELECT ON sidings.message_seen TO {owner}")
            async with backup.transaction():
                await backup.fetch("SELECT count(*) FROM sidings.message_seen")
                assert await migrate(empty_database, service="test") == []
        assert await migrate(empty_database, service="test") == []
        assert await fetch(empty_database, OTHERS, owner) == []


async def test_a_role_that_could_not_give_away_what_it_makes_migrates_nothing(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
):
    """As one with every right but that of the owner, or, from Postgres 16 on, a member without SET."""
    async with an_owner(empty_database) as (owner, of_owner), an_owner(empty_database) as (other, of_other):
        await migrate(of_owner, service="test")
        async with connected(empty_database) as admin:
            await admin.execute(
                f"GRANT ALL ON SCHEMA sidings TO {other}; GRANT ALL ON ALL TABLES IN SCHEMA sidings TO {other}"
            )
        assert await migrate(of_other, service="test") == []
        monkeypatch.setattr(
            migrate_module, "migrations", lambda: later_migration("CREATE TABLE sidings.later (id int)")
        )
        with pytest.raises(ConfigurationError, match=f"migrate as '{owner}', or let '{other}' become it"):
            await migrate(of_other, service="test")
        async with connected(empty_database) as admin:
            await admin.execute(f"GRANT {owner} TO {other}")
        assert [m.name for m in await migrate(of_other, service="test")] == ["later"]
        assert await fetch(empty_database, OTHERS, owner) == []


async def test_a_day_has_the_readers_of_the_history_unless_policies_say_which_rows_they_see(database: str):
    reader, writer = f"Reader.{token_hex(6)}@firm", f"writer_{token_hex(6)}"
    may = "SELECT has_table_privilege($1, 'sidings.job_history_' || to_char($2::date, 'YYYYMMDD'), 'SELECT')"
    async with connected(database) as admin:
        today = await admin.fetchval("SELECT (now() AT TIME ZONE 'UTC')::date")
        await admin.execute(f'CREATE ROLE "{reader}"; CREATE ROLE {writer}')
        try:
            for ago, change, who in (
                (7, f'GRANT SELECT ON sidings.job_history TO "{reader}"', (True, False)),
                (8, f"GRANT INSERT ON sidings.job_history TO {writer}", (True, False)),
                (9, "GRANT SELECT ON sidings.job_history TO PUBLIC", (True, True)),
                (10, "ALTER TABLE sidings.job_history ENABLE ROW LEVEL SECURITY", (False, False)),
            ):
                day = today - timedelta(days=ago)
                await admin.execute(change)
                await admin.execute("SELECT sidings.make_history_day($1)", day)
                assert (await admin.fetchval(may, reader, day), await admin.fetchval(may, writer, day)) == who, change
        finally:
            await admin.execute(f'DROP OWNED BY "{reader}", {writer}; DROP ROLE "{reader}", {writer}')


async def test_partitions_are_made_while_outcomes_are_being_written(undivided: str):
    """Until the day has a partition its rows go to the default one, and keep coming while it is made."""
    async with connected(undivided) as connection, asyncio.TaskGroup() as group:
        now = await connection.fetchval("SELECT now()")
        written = 0

        async def write() -> None:
            nonlocal written
            async with connected(undivided) as writer:
                while not over.is_set():
                    await writer.execute(ATTEMPT, 1, now)
                    written += 1

        over = asyncio.Event()
        for _ in range(4):
            group.create_task(write())
        try:
            await eventually(lambda: written > 50)
            await connection.execute("SELECT sidings.maintain(30)")
            seen = written
            await eventually(lambda: written > seen + 50)
        finally:
            over.set()
    async with connected(undivided) as connection:
        [today] = await days(connection, 0, 0)
        assert await connection.fetchval(f"SELECT count(*) FROM sidings.{today}") == written
        assert await connection.fetchval("SELECT count(*) FROM sidings.job_history_default") == 0


async def test_a_long_query_over_the_history_delays_retention_but_not_the_partitions_ahead(undivided: str):
    async with connected(undivided) as connection, connected(undivided) as analyst:
        old = await an_old_partition(connection, 9)
        async with analyst.transaction():
            await analyst.fetch(f"SELECT count(*) FROM sidings.{old}")
            await connection.execute("SELECT sidings.maintain(7)")
            present = await names(connection)
            assert set(await days(connection, 0, 2)) <= set(present)
            assert old in present
        await connection.execute("SELECT sidings.maintain(7)")
        assert old not in await names(connection)


async def test_rows_of_executors_that_are_long_gone_are_removed(database: str):
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.executor (id, started_at, host)
               SELECT gen_random_uuid(), now() - age::interval, host
               FROM (VALUES ('young', '1 hour'), ('old', '2 days'), ('owner', '2 days')) v (host, age);
               INSERT INTO sidings.origin (origin, owner) SELECT 't/0', id FROM sidings.executor WHERE host = 'owner'"""
        )
        await connection.execute("SELECT sidings.maintain(30)")
        assert await names(connection, "SELECT host FROM sidings.executor ORDER BY 1") == ["owner", "young"]

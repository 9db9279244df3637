"""The archive of the history: what it holds, and that retention waits for it."""

import asyncio
import importlib
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pyarrow.parquet as pq
import pytest
from prometheus_client import CollectorRegistry
from sidings.errors import ConfigurationError, SchemaTooOld, SidingsError
from sidings.jobs import Registry
from sidings.schema import migrate, migrations
from sidings.spark_analytics.history.archive import _archive, _verify
from sidings.spark_analytics.history.files import archived_parts

from .history_support import Attempt, stored
from .support import connected, eventually, fetch, running

MODULE = sys.modules[_archive.__module__]  # the package's `archive` is the function
migrate_module = importlib.import_module("sidings.schema.migrate")  # as is its `migrate`
OLD = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=9)


def an_attempt(job: int, day: datetime = OLD) -> Attempt:
    return Attempt(job, 1, "succeeded", day, day + timedelta(seconds=2), day + timedelta(seconds=1))


async def archived(dsn: str, directory: Path) -> int:
    return await _archive(dsn, directory, "sidings", lambda _: None)


def jobs(directory: Path) -> list[int]:
    return sorted(n for file in archived_parts(directory).values() for n in pq.read_table(file)["job_id"].to_pylist())


async def maintained(connection: asyncpg.Connection) -> list[int]:
    await connection.execute("SELECT sidings.maintain(7)")
    return await connection.fetchval(
        "SELECT coalesce(array_agg(job_id ORDER BY job_id), '{}') FROM sidings.job_history"
    )


async def test_a_day_is_dropped_only_with_all_of_its_rows_archived(database: str, tmp_path: Path):
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await stored(database, [an_attempt(1), an_attempt(2)])
        assert await maintained(connection) == [1, 2]
        assert await archived(database, tmp_path) >= 1
        assert jobs(tmp_path) == [1, 2]
        await stored(database, [an_attempt(3)], partitions=False)  # late
        assert await maintained(connection) == [1, 2, 3]
        assert await archived(database, tmp_path) == 1
        assert await archived(database, tmp_path) == 0
        assert jobs(tmp_path) == [1, 2, 3]
        query = "SELECT rows FROM sidings.history_archive WHERE day = $1"
        assert await connection.fetchval(query, OLD.date()) == 3
        assert await maintained(connection) == []
        await stored(database, [an_attempt(4)], partitions=False)  # later than late: into the default partition
        assert await maintained(connection) == [4]
        assert await archived(database, tmp_path) == 1
        assert jobs(tmp_path) == [1, 2, 3, 4]
        assert await maintained(connection) == []


async def test_what_is_known_of_one_day_and_one_partition_is_of_no_other(database: str, tmp_path: Path):
    """A day that is dropped takes no note of another's late rows along, and its file is not its next partition's."""
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await stored(database, [an_attempt(1), an_attempt(2, OLD + timedelta(days=1))])
        await archived(database, tmp_path)
        await stored(database, [an_attempt(3, OLD + timedelta(days=1))], partitions=False)
        for _ in range(2):
            assert await maintained(connection) == [2, 3]
        await stored(database, [an_attempt(4)], partitions=False)
        await connection.execute("SELECT sidings.make_history_day($1)", OLD.date())
        assert await maintained(connection) == [2, 3, 4]
        await archived(database, tmp_path)
        assert jobs(tmp_path) == [1, 2, 3, 4]
        assert await maintained(connection) == []


async def test_rows_that_come_when_a_day_was_detached_are_archived_once_its_table_is_out_of_the_way(
    database: str, tmp_path: Path
):
    """The table was archived in their place, which left them out for ever, and the gauge told of nothing."""
    table = f"sidings.job_history_{OLD:%Y%m%d}"
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await stored(database, [an_attempt(1)])
        await connection.execute(f"ALTER TABLE sidings.job_history DETACH PARTITION {table}")
        await stored(database, [an_attempt(2), an_attempt(3, OLD + timedelta(days=1))], partitions=False)
        with pytest.raises(SidingsError, match=f"{table}: no partition any more, .* rename it"):
            await archived(database, tmp_path)
        assert jobs(tmp_path) == [3], "the other days are"
        await connection.execute(f"ALTER TABLE {table} RENAME TO kept")
        assert await archived(database, tmp_path) == 1
        assert jobs(tmp_path) == [2, 3]
        assert await maintained(connection) == []


async def test_rows_that_come_when_an_archived_day_was_dropped_by_hand_are_archived_too(database: str, tmp_path: Path):
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await stored(database, [an_attempt(1)])
        assert await archived(database, tmp_path) >= 1
        await connection.execute(f"DROP TABLE sidings.job_history_{OLD:%Y%m%d}")
        await stored(database, [an_attempt(2)], partitions=False)
        assert await archived(database, tmp_path) == 1
        assert await archived(database, tmp_path) == 0
        assert jobs(tmp_path) == [1, 2]
        assert await maintained(connection) == []


async def test_the_archive_has_all_columns_of_the_history(database: str, tmp_path: Path):
    """The headers of jobs that ended without success came later than the archive, and were lost with their day."""
    await stored(database, [an_attempt(1), an_attempt(2)])
    async with connected(database) as connection:
        await connection.execute(
            """UPDATE sidings.job_history SET outcome = 'discarded', payload = '{"n": 7}', headers = '{"tenant": "t-1"}'
               WHERE job_id = 2"""
        )
        columns = await connection.fetch(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = 'sidings.job_history'::regclass AND attnum > 0"
        )
    await archived(database, tmp_path)
    table = pq.read_table(archived_parts(tmp_path)[OLD.date(), 1])
    assert {row["attname"] for row in columns} == {*table.column_names} - {"day"}
    told = {row["job_id"]: (row["payload"], row["headers"]) for row in table.to_pylist()}
    assert told == {1: (None, None), 2: ('{"n": 7}', '{"tenant": "t-1"}')}


async def test_a_schema_of_an_earlier_release_is_told_of(
    empty_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As where the job that archives is deployed before somebody migrates: asyncpg's own error says nothing of that."""
    with monkeypatch.context() as patched:
        before = [migration for migration in migrations() if migration.version < 68]  # which brought the headers
        patched.setattr(migrate_module, "migrations", lambda: before)
        await migrate(empty_database, service="test")
    await stored(empty_database, [an_attempt(1)])
    with pytest.raises(SchemaTooOld, match=r"'sidings' .*\"headers\".*: migrate .*sidings.schema"):
        await archived(empty_database, tmp_path)
    assert jobs(tmp_path) == []
    await migrate(empty_database, service="test")
    await archived(empty_database, tmp_path)
    assert jobs(tmp_path) == [1]


async def test_a_due_time_that_python_does_not_know_keeps_no_day_out_of_the_archive(database: str, tmp_path: Path):
    """From SQL any may be given; one such job, and the archive came no further, nor did retention."""
    await stored(database, [an_attempt(1), an_attempt(2)])
    async with connected(database) as connection:
        for job, due in ((1, "4000-01-01 BC"), (2, "294000-01-01")):
            await connection.execute(f"UPDATE sidings.job_history SET due_at = '{due}' WHERE job_id = {job}")
    assert await archived(database, tmp_path) >= 1
    assert jobs(tmp_path) == [1, 2]


def test_a_folder_of_a_day_that_is_none_is_told_of(tmp_path: Path):
    """As of somebody's script: the command ended with Python's traceback."""
    file = tmp_path / "day=2026-02-30" / "part-1.parquet"
    file.parent.mkdir()
    file.touch()
    with pytest.raises(ConfigurationError, match=r"day=2026-02-30.* is of no day"):
        archived_parts(tmp_path)


async def test_a_file_that_is_gone_is_written_again_as_long_as_postgres_has_its_rows(database: str, tmp_path: Path):
    await stored(database, [an_attempt(1)])
    await archived(database, tmp_path)
    file = archived_parts(tmp_path)[OLD.date(), 1]
    file.unlink()
    assert await archived(database, tmp_path) == 1
    assert jobs(tmp_path) == [1]
    elsewhere = tmp_path / "elsewhere"
    assert await archived(database, elsewhere) == 0, "it is archived, though in another place"
    await stored(database, [an_attempt(2)], partitions=False)  # late
    assert await archived(database, elsewhere) == 1
    assert jobs(elsewhere) == [1, 2]
    async with connected(database) as connection:
        query = "SELECT location FROM sidings.history_archive WHERE day = $1"
        assert await connection.fetchval(query, OLD.date()) == str(elsewhere)


async def in_zone(database: str, zone: str) -> None:
    async with connected(database) as connection:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE \"{name}\" SET timezone = '{zone}'")


async def test_days_are_those_of_utc_whatever_the_databases_zone_is(database: str, tmp_path: Path):
    await in_zone(database, "Pacific/Auckland")
    midnight = OLD.replace(hour=0)
    divided = [an_attempt(1, midnight), an_attempt(2, midnight + timedelta(hours=23, minutes=59))]
    await stored(database, divided)
    await stored(database, [an_attempt(3, midnight - timedelta(minutes=1))], partitions=False)
    await archived(database, tmp_path)
    found = {day: pq.read_table(file)["job_id"].to_pylist() for (day, _), file in archived_parts(tmp_path).items()}
    assert {day: sorted(own) for day, own in found.items() if own} == {
        OLD.date(): [1, 2], (OLD - timedelta(days=1)).date(): [3]
    }  # fmt: skip


@pytest.mark.parametrize("zone", ["Etc/GMT-14", "Etc/GMT+12"])  # in one of them it is another day now
async def test_a_day_that_has_been_over_for_an_hour_is_archived_and_no_later_one(
    database: str, tmp_path: Path, zone: str
):
    await in_zone(database, zone)
    today = datetime.now(UTC)
    days = [today - timedelta(days=n) for n in range(4)]
    await stored(database, [an_attempt(n, day) for n, day in enumerate(days)])
    async with connected(database) as connection:
        query = "SELECT ((now() - interval '1 hour') AT TIME ZONE 'UTC')::date - 1"
        first = await connection.fetchval(query)
        await archived(database, tmp_path)
        last = await connection.fetchval(query)
    assert first <= max(day for day, _ in archived_parts(tmp_path)) <= last


async def test_a_large_day_is_written_in_groups_of_rows(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MODULE, "_ROWS", 2)
    monkeypatch.setattr(MODULE, "_GROUP", 4)
    await stored(database, [an_attempt(n) for n in range(11)])
    await archived(database, tmp_path)
    assert jobs(tmp_path) == list(range(11))
    metadata = pq.read_metadata(archived_parts(tmp_path)[OLD.date(), 1])
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [4, 4, 3]


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
async def test_a_row_that_comes_as_its_day_is_counted_is_noted_or_the_day_is_not_entered(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
):
    """Not noted: as a row may come that was restored or replicated, without triggers. level: the database's default."""
    setting = "origin"
    await fetch(
        database, f'ALTER DATABASE "{urlsplit(database).path[1:]}" SET default_transaction_isolation TO "{level}"'
    )

    async def verify(*arguments: Any) -> None:
        async with connected(database) as connection:
            await connection.execute(f"SET session_replication_role = {setting}")
            await connection.execute(
                "INSERT INTO sidings.job_history SELECT (jsonb_populate_record(h, jsonb_build_object('job_id', "
                "job_id + 1))).* FROM sidings.job_history h ORDER BY job_id DESC LIMIT 1"
            )
        await _verify(*arguments)

    await stored(database, [an_attempt(1)])
    monkeypatch.setattr(MODULE, "_verify", verify)
    assert await archived(database, tmp_path) >= 1
    assert jobs(tmp_path) == [1], "2 came later, and is noted"
    setting = "replica"
    with pytest.raises(SidingsError, match=r"Postgres counts .*: nothing was entered"):
        await archived(database, tmp_path)
    assert jobs(tmp_path) == [1]
    assert not drafts(tmp_path)
    monkeypatch.undo()
    assert await archived(database, tmp_path) == 1
    assert jobs(tmp_path) == [1, 2, 3]


async def test_an_archive_belongs_to_one_service(database: str, tmp_path: Path):
    await stored(database, [an_attempt(1)])
    await archived(database, tmp_path)
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET name = 'other'")
        with pytest.raises(ConfigurationError, match="is the archive of the service 'test', not of 'other'"):
            await archived(database, tmp_path)


async def test_without_the_switch_retention_does_not_wait(database: str):
    async with connected(database) as connection:
        await stored(database, [an_attempt(1)])
        assert await maintained(connection) == []


async def test_a_directory_of_other_things_is_refused(database: str, tmp_path: Path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigurationError, match="holds other things"):
        await archived(database, tmp_path)


@pytest.mark.parametrize("left", ["nothing", "a mount point", "files without the mark"])
async def test_an_archive_that_is_not_mounted_is_not_begun_anew(database: str, tmp_path: Path, left: str):
    """It was, and all days went into a directory that nobody keeps, as in a container; retention dropped them."""
    directory = tmp_path / "archive"
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await stored(database, [an_attempt(1)])
        assert await archived(database, directory) >= 1
        assert await maintained(connection) == [], "its file is all that there is of it"
        await stored(database, [an_attempt(2, OLD + timedelta(days=1))])
        shutil.copytree(directory, tmp_path / "mounted elsewhere")
        (directory / "sidings-history.json").unlink()
        if left != "files without the mark":
            shutil.rmtree(directory)
        if left == "a mount point":
            directory.mkdir()
        there = sorted(directory.rglob("*"))
        with pytest.raises(ConfigurationError, match=f"archived days in {directory}, and .* is it mounted"):
            await archived(database, directory)
        assert sorted(directory.rglob("*")) == there
        assert directory.exists() == (left != "nothing")
        assert await maintained(connection) == [2]
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(tmp_path / "mounted elsewhere", directory)
        assert await archived(database, directory) == 1
        assert jobs(directory) == [1, 2]


async def test_an_archive_that_is_lost_is_begun_anew_as_the_error_says(database: str, tmp_path: Path):
    directory = tmp_path / "archive"
    await stored(database, [an_attempt(1)])
    days = await archived(database, directory)
    shutil.rmtree(directory)
    with pytest.raises(ConfigurationError) as refused:
        await archived(database, directory)
    said = re.search(r"write (.+) into (.+): what Postgres", str(refused.value))
    assert said is not None
    text, mark = said.groups()
    directory.mkdir()
    Path(mark).write_text(text)
    assert await archived(database, directory) == days
    assert jobs(directory) == [1]


async def test_another_directory_is_begun_whatever_is_archived_elsewhere(database: str, tmp_path: Path):
    await stored(database, [an_attempt(1)])
    assert await archived(database, tmp_path / "former") >= 1
    await stored(database, [an_attempt(2, OLD + timedelta(days=1))])
    assert await archived(database, tmp_path / "new") == 1


STALL = """
CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(4711);
    RETURN NEW;
END $$;
"""
MOMENTS = {  # of the second day; the first is done
    "the file is written": "BEFORE INSERT ON sidings.history_archive FOR EACH ROW",
    "the file has its name": "AFTER INSERT ON sidings.history_archive DEFERRABLE INITIALLY DEFERRED FOR EACH ROW",
}


@asynccontextmanager
async def stalled(database: str, moment: str, day: datetime) -> AsyncIterator[asyncpg.Connection]:
    """Runs of the archive stand still there, as long as this context lasts."""
    constraint = "CONSTRAINT" if "DEFERRED" in MOMENTS[moment] else ""
    async with connected(database) as connection:
        await connection.execute(STALL)
        await connection.execute(
            f"CREATE {constraint} TRIGGER stall {MOMENTS[moment]} WHEN (NEW.day = '{day:%Y-%m-%d}') "
            "EXECUTE FUNCTION stall()"
        )
        await connection.execute("SELECT pg_advisory_lock(4711)")
        yield connection


async def waiting(connection: asyncpg.Connection) -> int:
    """The backend of the run that stands still."""
    query = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"
    return await eventually(lambda: connection.fetchval(query), "a run stands still")


@asynccontextmanager
async def command(*arguments: object, temporary: Path | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command in a process of its own, killed at the end."""
    environment = os.environ | ({"TMPDIR": str(temporary)} if temporary else {})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidings.spark_analytics.history", *map(str, arguments), env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def drafts(directory: Path) -> list[Path]:
    return [path for path in directory.rglob(".*") if path.is_file()]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_killed_run_loses_nothing_and_the_next_one_doubles_nothing(database: str, tmp_path: Path, moment: str):
    days = [OLD, OLD + timedelta(days=1), OLD + timedelta(days=3)]  # young enough, also where midnight passes
    rows = [an_attempt(10 * n + k, day) for n, day in enumerate(days) for k in range(3)]
    everything = sorted(row.job for row in rows)
    await stored(database, rows)
    async with stalled(database, moment, days[1]) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        async with command("archive", "--postgres", database, "--to", tmp_path) as process:
            backend = await waiting(connection)
            process.kill()
            await process.wait()
            # As its machine's end would do: else it would commit what it was asked to.
            await connection.execute("SELECT pg_terminate_backend($1, 10000)", backend)
        seen = (len(drafts(tmp_path)), jobs(tmp_path))
        assert seen == ((1, everything[:3]) if moment == "the file is written" else (0, everything[:6]))
        await stored(database, [an_attempt(100, days[0]), an_attempt(101, days[1])], partitions=False)
        everything += [100, 101]
        assert await maintained(connection) == everything, "retention waits for each of the days"
        await connection.execute("SELECT pg_advisory_unlock_all()")
        assert await archived(database, tmp_path) >= 3
        assert jobs(tmp_path) == everything
        assert not drafts(tmp_path)
        assert await maintained(connection) == [20, 21, 22], "of the days only the last is young enough"
        assert await archived(database, tmp_path) == 0


async def test_a_row_that_comes_while_its_day_is_archived_is_not_lost(database: str, tmp_path: Path):
    await stored(database, [an_attempt(1)])
    async with stalled(database, "the file is written", OLD) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        run = asyncio.create_task(archived(database, tmp_path))
        await waiting(connection)
        await stored(database, [an_attempt(2)], partitions=False)
        await connection.execute("SELECT pg_advisory_unlock_all()")
        await run
        assert jobs(tmp_path) == [1]
        assert await maintained(connection) == [1, 2]
        assert await archived(database, tmp_path) == 1
        assert jobs(tmp_path) == [1, 2]
        assert await maintained(connection) == []


async def test_a_second_run_at_the_same_time_says_so_and_does_nothing(database: str, tmp_path: Path):
    days = [OLD, OLD + timedelta(days=1), OLD + timedelta(days=2)]
    await stored(database, [an_attempt(n, day) for n, day in enumerate(days)])
    async with stalled(database, "the file is written", days[1]) as connection:
        first = asyncio.create_task(archived(database, tmp_path))
        await waiting(connection)
        [draft] = drafts(tmp_path)
        told: list[str] = []
        assert await _archive(database, tmp_path, "sidings", told.append) == 0
        assert told == ["another run is at work: the rest is left to it"]
        assert drafts(tmp_path) == [draft], "it is not the second one's"
        assert jobs(tmp_path) == [0]
        await connection.execute("SELECT pg_advisory_unlock_all()")
        await first
    assert jobs(tmp_path) == [0, 1, 2]


async def test_runs_that_get_into_each_others_way_do_no_harm(database: str, tmp_path: Path):
    days = [OLD + timedelta(days=n) for n in range(6)]
    await stored(database, [an_attempt(n, day) for n, day in enumerate(days)])
    await asyncio.gather(*(archived(database, tmp_path) for _ in range(4)))
    assert jobs(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert not drafts(tmp_path)
    assert await archived(database, tmp_path) == 0


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
async def test_a_run_that_is_stopped_tidies_up(database: str, tmp_path: Path, by: signal.Signals):
    await stored(database, [an_attempt(1)])
    async with stalled(database, "the file is written", OLD) as connection:
        async with command("archive", "--postgres", database, "--to", tmp_path) as process:
            await waiting(connection)
            assert len(drafts(tmp_path)) == 1
            process.send_signal(by)
            _, said = await process.communicate()
        assert process.returncode == 130
        assert said.decode() == "error: interrupted, nothing is left behind\n"
        assert not drafts(tmp_path)
        assert not jobs(tmp_path)


async def test_the_age_of_what_is_not_archived_is_a_metric_and_what_is_kept_for_it_is_told_of(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("sidings.executor.upkeep._ARCHIVE_SECONDS", 0.05)
    registry = CollectorRegistry()
    begin = OLD.replace(hour=0)
    async with connected(database) as connection, running(database, Registry(), prometheus=registry, history_days=7):

        async def becomes(least: float, most: float) -> None:
            def age() -> float | None:
                return registry.get_sample_value("sidings_history_unarchived_seconds", {"service": "test"})

            await eventually(lambda: (now := age()) is not None and least <= now <= most, age)

        def since(end: datetime) -> tuple[float, float]:
            seconds = (datetime.now(UTC) - end).total_seconds()
            return seconds, seconds + 60

        await stored(database, [an_attempt(1), an_attempt(2, OLD + timedelta(days=2))])
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await becomes(*since(begin + timedelta(days=1)))
        await connection.execute("UPDATE sidings.service SET archive_history = false")
        await becomes(0, 0)  # nothing waits for an archive that there is not
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await archived(database, tmp_path)
        await becomes(0, 3_700)  # a day that has been over for less than an hour is not archived yet
        await stored(database, [an_attempt(3, OLD + timedelta(days=2))], partitions=False)  # late
        await becomes(*since(begin + timedelta(days=3)))
        await stored(database, [an_attempt(4, OLD - timedelta(days=3))], partitions=False)  # into the default partition
        await becomes(*since(begin - timedelta(days=2)))
    [told] = [message for message in caplog.messages if "kept until they are archived" in message]  # once an hour
    assert f"days of the history, from {begin.date()} on, are over history_days=7 and" in told


async def test_what_cannot_be_looked_for_is_not_told_to_be_archived(database: str, monkeypatch: pytest.MonkeyPatch):
    """The gauge kept what it had, which is 0 at the start: "none waits"."""
    monkeypatch.setattr("sidings.executor.upkeep._ARCHIVE_SECONDS", 0.05)
    registry = CollectorRegistry()

    def age() -> float | None:
        return registry.get_sample_value("sidings_history_unarchived_seconds", {"service": "test"})

    async with connected(database) as connection:
        await connection.execute("ALTER FUNCTION sidings.history_archived(date) RENAME TO elsewhere")
        async with running(database, Registry(), prometheus=registry):
            await eventually(lambda: (now := age()) is not None and math.isnan(now), age)
            await connection.execute("ALTER FUNCTION sidings.elsewhere(date) RENAME TO history_archived")
            await eventually(lambda: age() == 0, age)
            await connection.execute("ALTER FUNCTION sidings.history_archived(date) RENAME TO elsewhere")
            await eventually(lambda: math.isnan(age() or 0), age)

"""Days that the former server has archived and dropped, and that the new one, after a replication, has still."""

import asyncio
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings.errors import SidingsError
from sidings.spark_analytics.history import Selection, archive, reading
from sidings.spark_analytics.history.files import part_file
from sidings.spark_analytics.history.reading import _transaction
from sidings.spark_analytics.history.running import run_all

from .history_support import store, stored
from .support import connected
from .test_history_archive import OLD, an_attempt, archived, jobs, maintained
from .test_history_reading import executed

pytestmark = pytest.mark.timeout(600)  # Spark starts
DOCS = Path(__file__).parent.parent / "docs"
READING = sys.modules[_transaction.__module__]  # the package's `reading` is the function
DROPPED = "UPDATE sidings.history_archive SET dropped_at = now() WHERE dropped_at IS NULL"  # DDL is not replicated
DAY = f"sidings.job_history_{OLD:%Y%m%d}"
INTO_DEFAULT = (  # as where the new server's schema is not a dump of the former one's
    f"CREATE TABLE copied AS TABLE {DAY}",
    f"DROP TABLE {DAY}",
    "INSERT INTO sidings.job_history TABLE copied",
)


async def replicated(database: str, *moved: str) -> None:
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        for query in (DROPPED, *moved):
            await connection.execute(query)


@pytest.mark.parametrize("moved", [(), INTO_DEFAULT])
async def test_a_day_that_only_the_former_server_has_dropped_is_archived_once(
    database: str, tmp_path: Path, moved: tuple[str, ...]
):
    """All of its rows were written again as another part, and counted twice for ever."""
    await stored(database, [an_attempt(1), an_attempt(2)])
    await archived(database, tmp_path)
    await replicated(database, *moved)
    await stored(database, [an_attempt(3)], partitions=False)
    await archived(database, tmp_path)
    assert jobs(tmp_path) == [1, 2, 3]
    assert await archived(database, tmp_path) == 0
    async with connected(database) as connection:
        query = "SELECT part, rows FROM sidings.history_archive WHERE day = $1"
        assert [tuple(row) for row in await connection.fetch(query, OLD.date())] == [(1, 3)]
        assert await maintained(connection) == []


async def test_so_is_one_that_it_has_dropped_twice(database: str, tmp_path: Path):
    """Rows had come after the first time: the new server has them in one partition."""
    await stored(database, [an_attempt(1), an_attempt(2)])
    await archived(database, tmp_path)
    async with connected(database) as connection:
        await connection.execute(f"ALTER TABLE sidings.job_history DETACH PARTITION {DAY}")
        await connection.execute(f"ALTER TABLE {DAY} RENAME TO first")
    await stored(database, [an_attempt(3)], partitions=False)
    await archived(database, tmp_path)
    assert jobs(tmp_path) == [1, 2, 3]
    await replicated(database, "INSERT INTO sidings.job_history TABLE sidings.first")
    await stored(database, [an_attempt(4)], partitions=False)
    await archived(database, tmp_path)
    assert jobs(tmp_path) == [1, 2, 3, 4]
    async with connected(database) as connection:
        query = "SELECT part, rows, dropped_at FROM sidings.history_archive WHERE day = $1"
        assert [tuple(row) for row in await connection.fetch(query, OLD.date())] == [(1, 4, None)]


async def test_a_later_file_with_rows_that_the_new_server_lacks_stays(database: str, tmp_path: Path):
    await stored(database, [an_attempt(1)])
    await archived(database, tmp_path)
    async with connected(database) as connection:
        await connection.execute(f"ALTER TABLE sidings.job_history DETACH PARTITION {DAY}")
        await connection.execute(f"ALTER TABLE {DAY} RENAME TO first")
        await stored(database, [an_attempt(2), an_attempt(3)], partitions=False)
        await archived(database, tmp_path)
        await replicated(database, "INSERT INTO sidings.job_history TABLE sidings.first")
        await connection.execute("DELETE FROM sidings.job_history WHERE job_id = 3")
        with pytest.raises(SidingsError, match=r"part-2\.parquet has 1 rows that this database has not"):
            await archived(database, tmp_path)
        assert jobs(tmp_path) == [1, 2, 3]


async def test_a_late_row_of_a_day_that_the_former_server_has_archived_is_archived(database: str, tmp_path: Path):
    """The trigger that notes late rows is not replicated: nothing told of it, and retention dropped it."""
    await stored(database, [an_attempt(1)])
    await archived(database, tmp_path)
    async with connected(database) as connection:
        await connection.execute(f"DROP TRIGGER note_late_row ON {DAY}")
    await stored(database, [an_attempt(2)], partitions=False)
    assert await archived(database, tmp_path) == 1
    assert jobs(tmp_path) == [1, 2]
    await stored(database, [an_attempt(3)], partitions=False)
    assert await archived(database, tmp_path) == 1
    assert await archived(database, tmp_path) == 0
    assert jobs(tmp_path) == [1, 2, 3]


async def test_a_later_file_is_replaced_by_that_of_an_entry_that_was_taken_out(database: str, tmp_path: Path):
    """As the guide on erasing has it: the later one stayed, and its rows were counted twice."""
    await stored(database, [an_attempt(1)])
    await archived(database, tmp_path)
    async with connected(database) as connection:
        await connection.execute(f"{DROPPED}; DROP TABLE {DAY}")
        await stored(database, [an_attempt(2)])
        await archived(database, tmp_path)
        assert jobs(tmp_path) == [1, 2]
        part_file(tmp_path, OLD.date(), 1).unlink()
        await connection.execute("DELETE FROM sidings.history_archive WHERE dropped_at IS NOT NULL")
    assert await archived(database, tmp_path) == 1
    assert jobs(tmp_path) == [2]


@pytest.mark.parametrize("first", ["the file", "the entry"])
async def test_retention_waits_for_a_day_whose_file_was_deleted_behind_its_entry(
    database: str, tmp_path: Path, first: str
):
    """The guide on erasing did not say so: with the file alone gone, retention could drop the day before the next
    run."""
    await stored(database, [an_attempt(1)])
    await archived(database, tmp_path)
    [query] = re.findall(r"`(DELETE FROM sidings\.history_archive .*IS NULL.*)`", (DOCS / "security.md").read_text())
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        if first == "the entry":
            await connection.execute(query.replace("2026-03-01", str(OLD.date())))
        part_file(tmp_path, OLD.date(), 1).unlink()
        waiting = await maintained(connection)
    await archived(database, tmp_path)
    assert (waiting, jobs(tmp_path)) == (([1], [1]) if first == "the entry" else ([], []))


@pytest.mark.long
def test_tomorrows_partition_can_be_made_while_an_analysis_reads(
    spark: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was looked for in all of the history stayed locked until Spark had read it."""
    other = OLD - timedelta(days=1)
    store(database, [an_attempt(1), an_attempt(2, other)])
    archive(database, tmp_path)
    asyncio.run(replicated(database, f"DROP TABLE sidings.job_history_{other:%Y%m%d}"))
    made: list[object] = []

    def run_later(*arguments: object) -> None:
        executed(database, "SELECT sidings.make_history_day(current_date + 9)")
        made.append(True)
        run_all(*arguments)

    monkeypatch.setattr(READING, "run_all", run_later)
    window = Selection(other.replace(hour=0), OLD + timedelta(hours=6))
    with reading(spark, window, postgres=database, archive=tmp_path) as attempts:
        assert sorted(row.job_id for row in attempts.collect()) == [1, 2]
    assert made


@pytest.mark.long
@pytest.mark.parametrize("moved", [(), INTO_DEFAULT])
def test_an_analysis_before_the_archives_next_run_counts_it_once(
    spark: SparkSession, database: str, tmp_path: Path, moved: tuple[str, ...]
):
    other = OLD - timedelta(days=1)
    store(database, [an_attempt(1), an_attempt(2), an_attempt(3, other)])
    archive(database, tmp_path)
    asyncio.run(replicated(database, *moved, f"DROP TABLE sidings.job_history_{other:%Y%m%d}"))
    asyncio.run(stored(database, [an_attempt(4, other)], partitions=False))  # after its drop: another row
    window = Selection(other.replace(hour=0), OLD + timedelta(hours=6))
    with reading(spark, window, postgres=database, archive=tmp_path) as attempts:
        assert sorted(row.job_id for row in attempts.collect()) == [1, 2, 3, 4]

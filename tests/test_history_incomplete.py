"""What an archive, or Postgres, has only a part of: it is told, for the figures would be too low."""

import asyncio
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from sidings.errors import ConfigurationError
from sidings.spark_analytics.history import Selection, archive, reading
from sidings.spark_analytics.history.files import part_file

from .guide import DOCS
from .history_support import Attempt, store, stored
from .support import connected, fetch

pytestmark = pytest.mark.timeout(600)  # Spark starts
NOON = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)


def rows_of(days_ago: int, jobs: int = 100) -> list[Attempt]:
    at = NOON - timedelta(days=days_ago)
    row = Attempt(1, 1, "succeeded", at, at + timedelta(seconds=2), at + timedelta(seconds=1))
    return [replace(row, job=1_000 * days_ago + n) for n in range(jobs)]


def dropped(dsn: str) -> None:
    """As retention does it, with the archive's consent."""

    async def run() -> None:
        async with connected(dsn) as connection:
            await connection.execute("UPDATE sidings.service SET archive_history = true")
            await connection.execute("SELECT sidings.maintain(7)")

    asyncio.run(run())


def count(spark: SparkSession, window: Selection, **source: object) -> int:
    with reading(spark, window, **source) as attempts:  # pyright: ignore[reportArgumentType]
        return attempts.count()


@pytest.mark.long
@pytest.mark.parametrize("both", [False, True])
def test_a_file_of_the_archive_that_was_not_written_whole_is_told(
    spark: SparkSession, database: str, tmp_path: Path, both: bool
):
    store(database, rows_of(12) + rows_of(11))
    archive(database, tmp_path)
    dropped(database)
    source = {"archive": tmp_path} | ({"postgres": database} if both else {})
    window = Selection(NOON - timedelta(days=12), NOON - timedelta(days=10))
    assert count(spark, window, **source) == 200
    file = part_file(tmp_path, (NOON - timedelta(days=11)).date(), 1)
    whole = file.read_bytes()
    for size in (0, len(whole) // 2):
        file.write_bytes(whole[:size])  # as a copy to a full disk leaves it
        with pytest.raises(ConfigurationError, match=rf"{file} cannot be read, put back a whole one: "):
            count(spark, window, **source)


@pytest.mark.long
def test_a_file_from_before_rows_came_late_is_told(spark: SparkSession, database: str, tmp_path: Path):
    store(database, rows_of(12))
    archive(database, tmp_path)
    file = part_file(tmp_path, (NOON - timedelta(days=12)).date(), 1)
    before = file.read_bytes()
    asyncio.run(stored(database, rows_of(12, 150)[100:], partitions=False))
    archive(database, tmp_path)
    dropped(database)
    window = Selection(NOON - timedelta(days=13), NOON - timedelta(days=11))
    assert count(spark, window, archive=tmp_path, postgres=database) == 150
    file.write_bytes(before)  # as a backup of the archive has it
    with pytest.raises(ConfigurationError, match=r"has 100 rows, and 150 were archived"):
        count(spark, window, archive=tmp_path, postgres=database)


@pytest.mark.long
def test_days_of_which_nothing_is_known_are_told(
    spark: SparkSession, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """As where retention has dropped them, or a file of the archive is gone: a rate over the window is too low."""
    ago = (12, 11, 10, 3)
    store(database, [row for days in ago for row in rows_of(days)])
    archive(database, tmp_path)
    part_file(tmp_path, (NOON - timedelta(days=10)).date(), 1).unlink()
    since = NOON - timedelta(days=12, hours=1)
    assert count(spark, Selection(since, NOON - timedelta(days=10, hours=13)), archive=tmp_path) == 200
    assert not caplog.records
    assert count(spark, Selection(since, NOON - timedelta(days=9)), archive=tmp_path) == 200
    gone = NOON.date() - timedelta(days=10)
    assert f"nothing is known of 2 of the window's 4 days, the first is {gone}: " in caplog.text
    asyncio.run(maintained(database))
    caplog.clear()
    asyncio.run(stored(database, rows_of(8), partitions=False))  # in the default partition
    asyncio.run(stored(database, rows_of(7), partitions=False))
    window = Selection(NOON - timedelta(days=9), NOON - timedelta(days=6))
    assert count(spark, window, postgres=database) == 200
    assert f"nothing is known of 2 of the window's 4 days, the first is {window.since.date()}: " in caplog.text


async def maintained(dsn: str) -> None:
    """Retention, which does not wait for an archive."""
    async with connected(dsn) as connection:
        await connection.execute("SELECT sidings.maintain(5)")


@pytest.mark.long
def test_days_of_whose_files_something_was_erased_can_be_read(spark: SparkSession, database: str, tmp_path: Path):
    """The guide advised to delete the file, and each analysis of the window was refused from then on."""
    store(database, rows_of(12) + rows_of(11) + rows_of(10))
    archive(database, tmp_path)
    dropped(database)
    gone, emptied = ((NOON - timedelta(days=n)).date() for n in (12, 11))
    part_file(tmp_path, gone, 1).unlink()
    file = part_file(tmp_path, emptied, 1)
    table = pq.read_table(file, partitioning=None)
    for name in ("group", "correlation_id", "payload", "error_message"):
        table = table.set_column(table.column_names.index(name), name, pa.nulls(len(table), pa.string()))
    pq.write_table(table, file)
    window = Selection(NOON - timedelta(days=12), NOON - timedelta(days=9))
    with pytest.raises(ConfigurationError, match=f"lacks day={gone}/part-1.parquet"):
        count(spark, window, postgres=database, archive=tmp_path)
    [query] = re.findall(r"`(DELETE FROM sidings\.history_archive .*NOT NULL.*)`", (DOCS / "security.md").read_text())
    asyncio.run(fetch(database, query.replace("2026-03-01", str(gone))))
    assert count(spark, window, postgres=database, archive=tmp_path) == 200

"""A day of the history that is divided, archived and dropped, all while it is read."""

import asyncio
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sidings.spark_analytics.history import Selection, reading
from sidings.spark_analytics.history.reading import _transaction
from sidings.spark_analytics.history.running import run_all

from .history_support import Attempt, stored
from .support import connected
from .test_history_archive import archived, maintained
from .test_history_reading import TODAY

pytestmark = pytest.mark.timeout(600)  # Spark starts
READING = sys.modules[_transaction.__module__]  # the package's `reading` is the function
OLD = TODAY - timedelta(days=9, hours=12)


@pytest.mark.long
def test_rows_that_are_archived_and_dropped_while_they_are_read_are_read(
    spark: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By a run of the archive after the snapshot, and by retention after the day was read, while others still are: it
    was read as empty, and nothing told of that any more."""
    archive, scratch = tmp_path / "archive", tmp_path / "scratch"
    archive.mkdir()
    scratch.mkdir()

    async def dropped() -> None:
        async with connected(database) as connection:
            assert await maintained(connection) == []

    async def begun() -> None:
        async with connected(database) as connection:
            await connection.execute("UPDATE sidings.service SET archive_history = true")
        early = OLD - timedelta(days=1)
        await stored(database, [Attempt(1, 1, "succeeded", early, early, early)])
        await archived(database, archive)
        await dropped()
        await stored(database, [Attempt(2, 1, "succeeded", OLD, OLD, OLD)], partitions=False)

    asyncio.run(begun())
    times = 0

    def run_between(*arguments: Any) -> None:
        nonlocal times
        times += 1
        if times == 1:
            asyncio.run(archived(database, archive))
        run_all(*arguments)
        if times == 1:
            asyncio.run(dropped())

    monkeypatch.setattr(READING, "run_all", run_between)
    begin = OLD.replace(hour=0)
    window = Selection(begin, begin + timedelta(days=1))
    with reading(spark, window, postgres=database, archive=archive, scratch=scratch) as found:
        assert sorted(row.job_id for row in found.collect()) == [2]

"""Partitions of the history that are made while it is read."""

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
from .test_history_reading import TODAY, executed

pytestmark = pytest.mark.timeout(600)  # Spark starts
READING = sys.modules[_transaction.__module__]  # the package's `reading` is the function
OLD = TODAY - timedelta(days=9, hours=12)


@pytest.mark.long
def test_rows_that_get_a_partition_while_they_are_read_are_read(
    spark: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which they get by the archive, and by executors when a day had none: after the snapshot, and before the read."""
    attempts = [Attempt(job, 1, "succeeded", OLD, OLD, OLD) for job in (1, 2)]
    asyncio.run(stored(database, attempts, partitions=False))
    meanwhile = [f"SELECT sidings.make_history_day('{OLD:%Y-%m-%d}')"]

    def run_later(*arguments: Any) -> None:
        while meanwhile:
            executed(database, meanwhile.pop())
        run_all(*arguments)

    monkeypatch.setattr(READING, "run_all", run_later)
    begin = OLD.replace(hour=0)
    window = Selection(begin, begin + timedelta(days=1))
    with reading(spark, window, postgres=database, scratch=tmp_path) as found:
        assert sorted(row.job_id for row in found.collect()) == [1, 2]
    assert not meanwhile

"""A partition of the history that somebody has detached, as to keep it."""

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
def test_a_day_whose_partition_is_detached_is_read_once(
    spark: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its table has the name of a partition, and the window was read again and again, without end."""
    days = (OLD, OLD + timedelta(days=1))
    attempts = [Attempt(job, 1, "succeeded", at, at, at) for job, at in enumerate(days, 1)]
    asyncio.run(stored(database, attempts))
    executed(database, f"ALTER TABLE sidings.job_history DETACH PARTITION sidings.job_history_{OLD:%Y%m%d}")
    times = 0

    def run_counted(*arguments: Any) -> None:
        nonlocal times
        times += 1
        assert times < 3, "it is read again and again"
        run_all(*arguments)

    monkeypatch.setattr(READING, "run_all", run_counted)
    begin = OLD.replace(hour=0)
    with reading(spark, Selection(begin, begin + timedelta(days=2)), postgres=database, scratch=tmp_path) as found:
        assert [row.job_id for row in found.collect()] == [2]
    assert times == 1

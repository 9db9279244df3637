"""A day of the archive that is archived anew while an analysis reads it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings.errors import SidingsError
from sidings.spark_analytics.history import Selection, archive, reading

from .history_support import Attempt, store

pytestmark = pytest.mark.timeout(600)  # Spark starts


@pytest.mark.long
def test_a_file_that_is_replaced_while_it_is_read_is_told(spark: SparkSession, database: str, tmp_path: Path):
    day = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=3)
    row = Attempt(1, 1, "succeeded", day, day + timedelta(seconds=2), day + timedelta(seconds=1))
    store(database, [replace(row, job=job) for job in range(1_000)])
    archive(database, tmp_path / "archive")
    window = Selection(day - timedelta(days=1), day + timedelta(days=1))

    def read() -> None:
        with reading(spark, window, archive=tmp_path / "archive") as attempts:
            assert attempts.count() == 1_000
            store(database, [replace(row, job=job) for job in range(1_000, 6_000)])  # late
            archive(database, tmp_path / "archive")
            assert attempts.count() in (0, 1_000)  # as Spark finds the rows by the length that the file had

    with pytest.raises(SidingsError, match="has been replaced while it was read"):
        read()
    with reading(spark, window, archive=tmp_path / "archive") as attempts:
        assert attempts.count() == 6_000

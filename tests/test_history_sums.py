"""Times of very many attempts together: more microseconds than a bigint has, at which Spark ends the analysis."""

import sys
from datetime import timedelta

import pytest
from pyspark.sql import SparkSession
from sidings.spark_analytics.history import Selection
from sidings.spark_analytics.history.blocked import blocked_by_error, pieces, stops
from sidings.spark_analytics.history.capacity import capacity
from sidings.spark_analytics.history.skew import by_group, heaviest, members, slowest_groups
from sidings.spark_analytics.history.volume import counted, throughput

from .history_support import DAY

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # Spark starts
WINDOW = Selection(DAY, DAY + timedelta(days=1))
LONG = 1 << 62  # microseconds: two of them are too many
COLUMNS = (
    "job_id bigint, attempt int, type string, origin string, `group` string, outcome string, enqueued bigint, "
    "ready bigint, started bigint, finished bigint, error_class string, error_message string, error_fingerprint string"
)


def an_attempt(job: int, group: str, times: tuple[int, int, int], outcome: str = "succeeded", number: int = 1) -> tuple:
    error = ("Broken", "why", "fp") if outcome == "retried" else (None, None, None)
    return (job, number, "a", "t/0", group, outcome, times[0], *times, *error)


def test_waits_may_sum_up_to_anything(spark: SparkSession):
    rows = [an_attempt(job, "g", (0, LONG, LONG)) for job in range(4)]
    [row] = slowest_groups(by_group(spark.createDataFrame(rows, COLUMNS))).collect()
    assert (row.wait_mean_seconds, row.wait_max_seconds, row.run_mean_seconds) == (LONG / 1e6, LONG / 1e6, 0.0)


def test_times_of_running_may_sum_up_to_anything(spark: SparkSession):
    attempts = spark.createDataFrame([an_attempt(job, "g", (0, 0, LONG)) for job in range(4)], COLUMNS)
    groups = by_group(attempts)
    assert [row.run_mean_seconds for row in slowest_groups(groups).collect()] == [LONG / 1e6]
    assert {row.run_seconds for row in heaviest(members(groups)).collect()} == {LONG * 4 / 1e6}
    assert [row.run_seconds for row in throughput(counted(attempts, WINDOW), WINDOW).drop("bucket").collect()] == [
        LONG * 4 / 1e6
    ]
    assert {row.run_mean_seconds for row in capacity(attempts, WINDOW).collect()} == {LONG / 1e6}


def test_stops_may_sum_up_to_anything(spark: SparkSession, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[stops.__module__], "_MOST_PLACES", 1_000)
    rows = list[tuple]()
    for number in range(4):
        group, head, behind = f"g{number}", 2 * number, 2 * number + 1
        rows += [
            an_attempt(head, group, (0, 0, 1), "retried"),
            an_attempt(head, group, (0, LONG, LONG), number=2),
            an_attempt(behind, group, (1, LONG + 1, LONG + 1)),
        ]
    attempts = spark.createDataFrame(rows, COLUMNS)
    [row] = blocked_by_error(stops(attempts, pieces(attempts))).drop("first", "last").collect()
    assert (row.stops, row.blocked_seconds) == (4, pytest.approx(LONG * 4 / 1e6))

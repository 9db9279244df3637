"""Jobs that go on at another origin: `move` took them there, or partitions were added."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings.spark_analytics.history import Selection, reading
from sidings.spark_analytics.history.blocked import blocked, pieces, still_failing, stops

from .history_support import DAY, Attempt, store

pytestmark = pytest.mark.timeout(600)  # Spark starts
WINDOW = Selection(DAY, DAY + timedelta(days=1))


def attempt(job: int, number: int, origin: str, ready: int, started: int, finished: int, outcome: str) -> Attempt:
    at = [DAY + timedelta(hours=8, seconds=seconds) for seconds in (0, ready, started, finished)]
    error = "fp0" if outcome == "retried" else None
    return Attempt(job, number, outcome, at[0], at[3], at[2], at[1], origin=origin, group="g", error=error)


ROWS = [
    # The head of its group fails, all wait, and are moved; there it succeeds, and the next one starts.
    attempt(1, 1, "gone/0", 0, 0, 10, "retried"),
    attempt(1, 2, "new/0", 20, 3_600, 3_610, "succeeded"),
    attempt(2, 1, "new/0", 10, 3_611, 3_612, "succeeded"),
    # This one was moved and fails still.
    attempt(3, 1, "gone/1", 0, 0, 10, "retried"),
    attempt(3, 2, "new/1", 20, 50, 60, "retried"),
    # This one has failed in no time, as where the clock was set back.
    attempt(4, 1, "gone/2", 0, 10, 10, "retried"),
    attempt(4, 2, "new/2", 20, 60, 70, "succeeded"),
    attempt(5, 1, "new/2", 15, 71, 72, "succeeded"),
    # This one has failed several times before it was moved, with who waited for it.
    attempt(7, 1, "gone/4", 0, 0, 10, "retried"),
    attempt(7, 2, "gone/4", 15, 20, 30, "lost"),
    attempt(7, 3, "gone/4", 35, 40, 50, "retried"),
    attempt(7, 4, "new/4", 55, 100, 110, "succeeded"),
    attempt(8, 1, "new/4", 5, 111, 112, "succeeded"),
    # This one was held, so that the next one started, and then moved and released: there it waited behind another.
    attempt(9, 1, "gone/5", 0, 0, 10, "retried"),
    attempt(9, 2, "gone/5", 15, 20, 30, "held"),
    attempt(10, 1, "gone/5", 5, 31, 32, "succeeded"),
    attempt(9, 3, "new/5", 70, 110, 120, "succeeded"),
    attempt(11, 1, "new/5", 40, 50, 60, "retried"),
    attempt(11, 2, "new/5", 65, 80, 90, "succeeded"),
    # This one is a message whose topic got another name.
    replace(attempt(6, 1, "gone/3", 0, 0, 10, "retried"), type="message:gone"),
    replace(attempt(6, 2, "new/3", 20, 50, 60, "succeeded"), type="message:new"),
]


@pytest.mark.long
def test_a_job_that_was_moved_is_one_job(spark: SparkSession, database: str, tmp_path: Path):
    store(database, ROWS)
    with reading(spark, WINDOW, postgres=database, scratch=tmp_path) as attempts:
        failing = [row.asDict() for row in still_failing(attempts, WINDOW).collect()]
        stood = [row.asDict() for row in blocked(stops(attempts, pieces(attempts))).collect()]
    assert [(row["job_id"], row["origin"], row["failures"]) for row in failing] == [(3, "new/1", 2)]
    assert failing[0]["seconds"] == (timedelta(hours=16) - timedelta(seconds=10)).total_seconds()
    assert [(row["origin"], row["group"], row["stops"], row["blocked_seconds"]) for row in stood] == [
        ("new/0", "g", 1, 3_600.0),
        ("new/4", "g", 3, 100.0),
        ("new/2", "g", 1, 55.0),
        ("gone/5", "g", 1, 20.0),
        ("new/5", "g", 1, 20.0),
    ]

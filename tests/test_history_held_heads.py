"""Groups whose head is held, or was lost, when an analysis' window ends."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from pyspark.sql import SparkSession
from sidings.spark_analytics.history import Selection, blocked, reading

from .history_support import DAY, Attempt, stored

pytestmark = pytest.mark.timeout(600)  # Spark starts


@pytest.mark.long
def test_a_head_that_is_held_or_lost_at_the_windows_end_is_told(spark: SparkSession, database: str):
    """A group that stands still behind a head that is held stood in no table: who waits there has no history."""
    at = [DAY + timedelta(seconds=n) for n in range(10)]
    rows = [
        Attempt(1, 1, "retried", at[0], at[2], at[1], None, "a", "t/0", "blocked", "fp0"),
        Attempt(1, 2, "held", at[0], at[5], at[4], at[3], "a", "t/0", "blocked", "fp1"),
        Attempt(2, 1, "lost", at[0], at[6], None, None, "a", "t/0", "lost"),
        Attempt(3, 1, "held", at[0], at[2], at[1], None, "a", "t/0", "released", "fp1"),
        Attempt(3, 2, "succeeded", at[0], at[4], at[3], None, "a", "t/0", "released"),
        Attempt(4, 1, "held", at[0], at[2], at[1], None, "a", "t/0", None, "fp1"),
        Attempt(5, 1, "held", at[0], at[2], at[1], None, "a", "t/0", "cancelled", "fp1"),
        Attempt(5, 2, "cancelled", at[0], at[4], None, None, "a", "t/0", "cancelled"),
    ]
    asyncio.run(stored(database, rows))
    window = Selection(DAY, DAY + timedelta(hours=1))
    with reading(spark, window, postgres=database) as attempts:
        found = blocked.still_failing(attempts, window).collect()
    told = [(row.group, row.outcome, row.failures, row.seconds, row.error_fingerprint) for row in found]
    assert told == [("blocked", "held", 2, 3_598, "fp1"), ("lost", "lost", 0, 3_594, None)]


@pytest.mark.long
def test_what_was_lost_of_a_type_without_history_is_not_told_as_failing(spark: SparkSession, database: str):
    """That it has succeeded since leaves no row: after each instance that had been killed, all that had run there was
    still failing at the end."""
    at = [DAY + timedelta(seconds=n) for n in range(10)]
    rows = [
        Attempt(1, 1, "lost", at[0], at[6], None, None, "with", "t/0", "g"),
        Attempt(2, 1, "succeeded", at[0], at[2], at[1], None, "with", "t/0", "g"),
        Attempt(3, 1, "lost", at[0], at[6], None, None, "without", "t/0", "g"),
        Attempt(4, 1, "discarded", at[0], at[6], at[5], None, "without", "t/0", "h", "fp"),
    ]
    asyncio.run(stored(database, rows))
    window = Selection(DAY, DAY + timedelta(hours=1))
    with reading(spark, window, postgres=database) as attempts:
        found = blocked.still_failing(attempts, window).collect()
    assert [(row.type, row.job_id) for row in found] == [("with", 1)]


@pytest.mark.long
def test_jobs_that_are_released_wait_like_others(spark: SparkSession, database: str):
    """A group whose held jobs were all released stood still behind the first of them, and was in no figure."""
    at = [DAY + timedelta(seconds=n) for n in range(20_000)]

    def row(job: int, attempt: int, outcome: str, ready: int, started: int, ended: int) -> Attempt:
        error = "fp0" if outcome in ("held", "retried") else None
        due = at[ready] if attempt > 1 else None
        return Attempt(job, attempt, outcome, at[job], at[ended], at[started], due, "a", "t/0", "g", error)

    rows = [
        *(row(job, 1, "held", job, 10 * job, 10 * job + 5) for job in range(1, 5)),
        row(1, 2, "retried", 3_600, 3_604, 3_610),
        row(1, 3, "succeeded", 7_200, 10_810, 10_820),
        *(row(job, 2, "succeeded", 3_600, 10_820 + job, 10_821 + job) for job in range(2, 5)),
        # Another one, alone: nobody waits but itself.
        replace(row(9, 1, "held", 9, 20, 30), group="alone"),
        replace(row(9, 2, "succeeded", 100, 110, 120), group="alone"),
    ]
    asyncio.run(stored(database, rows))
    with reading(spark, Selection(DAY, DAY + timedelta(hours=6)), postgres=database) as attempts:
        found = blocked.blocked(blocked.stops(attempts, blocked.pieces(attempts))).collect()
    told = [(row.group, row.stops, row.blocked_seconds, row.delayed_job_seconds) for row in found]
    assert told == [("g", 1, 7_210, 3 * 7_210)]

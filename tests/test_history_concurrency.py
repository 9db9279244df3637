"""How many attempts ran at once, of each type in each time bucket, against plain sums."""

import random
from collections import defaultdict
from datetime import UTC, timedelta
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession
from sidings.spark_analytics.history import Selection
from sidings.spark_analytics.history.capacity import TICKS, concurrency

from .history_support import DAY

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # Spark starts
SECOND = 1_000_000


def test_each_type_has_what_ran_of_it_in_each_bucket(spark: SparkSession):
    chance = random.Random(5)
    window = Selection(DAY + timedelta(seconds=7.3), DAY + timedelta(hours=3, seconds=0.7))
    step, begin, end = window.step_us, window.since_us, window.until_us
    tick = step // TICKS
    rows: list[tuple[str, int, int]] = []
    for _ in range(400):
        started = chance.randrange(begin - 900 * SECOND, end)
        finished = started + chance.choice((0, 3 * tick, round(chance.expovariate(1 / (200 * SECOND))), 2 * step))
        if begin <= finished < end:
            rows.append((f"type {chance.randrange(3)}", started, finished))
    rows.append(("its clock is ahead", end + 5 * step, end - step))
    ran: dict[tuple[str | None, int], int] = defaultdict(int)
    for type, started, finished in rows:
        for number in range(max(started, begin) // tick, finished // tick + 1):
            part = min(finished, (number + 1) * tick) - max(started, begin, number * tick)
            ran[type, number] += max(0, part)
            ran[None, number] += max(0, part)
    expected: dict[tuple[str | None, int], tuple[float, float]] = {}
    for type in {None, *(type for type, _, _ in rows)}:
        for bucket in range(begin // step, (end - 1) // step + 1):
            lengths = {
                number: min((number + 1) * tick, end) - max(number * tick, begin)
                for number in range(bucket * TICKS, (bucket + 1) * TICKS)
            }
            inside = {number: long for number, long in lengths.items() if long > 0}
            mean = sum(ran[type, number] for number in inside) / sum(inside.values())
            expected[type, bucket] = mean, max(ran[type, number] / long for number, long in inside.items())
    frame = spark.createDataFrame(rows, "type STRING, started LONG, finished LONG")
    found = {
        (row.type, round(row.bucket.astimezone(UTC).timestamp() * 1e6) // step): (row.mean_running, row.peak_running)
        for row in concurrency(frame, window).collect()
    }
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values), key


def test_ticks_in_which_nothing_begins_or_ends_cost_nothing(spark: SparkSession):
    """With a row for each type and tick, 100,000 types of a day had 480 million."""
    window = Selection(DAY, DAY + timedelta(days=1))
    rows = [(f"type {n}", window.since_us + n * SECOND, window.since_us + (n + 1) * SECOND) for n in range(300)]
    table = concurrency(spark.createDataFrame(rows, "type STRING, started LONG, finished LONG"), window)
    assert table.count() == 301 * 96
    plan = cast(Any, table)._jdf.queryExecution().executedPlan().toString()
    assert "Join" not in plan

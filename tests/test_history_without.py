"""Types with `history=False` in an analysis: of them it has what was discarded, and nothing else."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from sidings.jobs import Discard, Job, Registry
from sidings.spark_analytics.history import Selection, reading
from sidings.spark_analytics.history.findings import findings
from sidings.spark_analytics.history.volume import bins_of, by_type, counted, types

from .support import Ride, enqueue, eventually, fetch, running

pytestmark = pytest.mark.timeout(600)  # Spark starts


async def worked_off(database: str) -> None:
    registry = Registry()

    @registry.job(group="transport", history=False)
    async def pay(job: Job[Ride]) -> None:
        if job.payload.number == 7:
            raise Discard("no such account")

    async def ended() -> bool:
        return not await fetch(database, "SELECT FROM sidings.job")

    await enqueue(database, pay, [Ride(transport=f"t{number}", number=number) for number in range(50)])
    async with running(database, registry):
        await eventually(ended, "all have ended")


@pytest.mark.long
def test_one_that_was_discarded_does_not_make_a_type_without_history_fail_always(
    spark: SparkSession, database: str, tmp_path: Path
):
    """ "pay: 100.0% of all attempts failed" was said of a type of which 49 of 50 jobs had succeeded."""
    asyncio.run(worked_off(database))
    begin = datetime.now(UTC) - timedelta(hours=1)
    window = Selection(begin, begin + timedelta(hours=2))
    with reading(spark, window, postgres=database, scratch=tmp_path) as attempts:
        table = types(counted(attempts, window), by_type(bins_of(attempts, window))).toPandas()
    empty = {name: pd.DataFrame(columns=["dimension"]) for name in ("still_failing", "blocked_by_error", "skew")}
    told = [finding.text for finding in findings({**empty, "types": table}) if finding.section != "durations"]
    assert told == ["pay: 1 jobs were discarded"]

"""Limits that a role or a database has on its transactions: the history is archived, and read, all the same."""

import asyncio
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyspark.sql import SparkSession
from sidings.schema import load_sql
from sidings.spark_analytics.history import Selection, reading
from sidings.spark_analytics.history.reading import _transaction
from sidings.spark_analytics.history.running import run_all

from .history_support import store, stored
from .support import connected
from .test_history_archive import MODULE, OLD, an_attempt, archived, jobs

pytestmark = pytest.mark.timeout(600)  # Spark starts
READING = sys.modules[_transaction.__module__]  # the package's `reading` is the function


async def limited(database: str, *settings: str) -> None:
    """All sessions from now on: half a second is enough for what takes no time."""
    async with connected(database) as connection:
        for setting in settings:
            if await connection.fetchval("SELECT current_setting($1, true)", setting) is None:
                pytest.skip(f"{setting} came with Postgres 17")
            await connection.execute(f"ALTER DATABASE \"{urlsplit(database).path[1:]}\" SET {setting} = '500ms'")


@pytest.mark.parametrize("setting", ["idle_in_transaction_session_timeout", "statement_timeout", "transaction_timeout"])
async def test_a_limit_on_transactions_keeps_no_day_out_of_the_archive(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
):
    """It ended the run at the same large day each night, and no later one was archived either."""
    sync = MODULE._sync

    def slowly(path: Path) -> None:
        if path.is_file():
            time.sleep(1)
        sync(path)

    def slow_sql(package: str, name: str, schema: str = "sidings") -> str:
        sql = load_sql(package, name, schema)
        return f"SELECT c.* FROM ({sql}) c, pg_sleep(1)" if name == "count_day" else sql

    await stored(database, [an_attempt(1)])
    await limited(database, setting)
    monkeypatch.setattr(MODULE, "_sync", slowly)
    monkeypatch.setattr(MODULE, "load_sql", slow_sql)
    await archived(database, tmp_path)
    assert jobs(tmp_path) == [1]


@pytest.mark.long
@pytest.mark.parametrize("who", ["Spark's connection", "the one that holds the snapshot"])
def test_a_limit_on_transactions_ends_no_analysis(
    spark: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
):
    def slow_sql(package: str, name: str, schema: str = "sidings") -> str:
        slow = ", (SELECT pg_sleep(1)::text) AS slow" if name == "read_attempts" else ""
        return load_sql(package, name, schema) + slow

    def run_later(*arguments: Any) -> None:
        time.sleep(1)
        run_all(*arguments)

    store(database, [an_attempt(1)])
    asyncio.run(limited(database, "statement_timeout", "transaction_timeout"))
    if who == "Spark's connection":
        monkeypatch.setattr(READING, "load_sql", slow_sql)
    else:
        monkeypatch.setattr(READING, "run_all", run_later)
    window = Selection(OLD, OLD + timedelta(hours=1))
    with reading(spark, window, postgres=database, scratch=tmp_path) as attempts:
        assert [row.job_id for row in attempts.collect()] == [1]

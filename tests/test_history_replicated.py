"""Days that the former server has archived and dropped, and that the new one, after a replication, has still."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings.errors import SidingsError
from sidings.spark_analytics.history import Selection, archive, reading

from .history_support import store, stored
from .support import connected
from .test_history_archive import OLD, an_attempt, archived, jobs, maintained

pytestmark = pytest.mark.timeout(600)  # Spark starts
DROPPED = "UPDATE sidings.history_archive SET dropped_at = now() WHERE dropped_at IS NULL"  # DDL is not replicated
DAY = f"sidings.job_history_{OLD:%Y%m%d}"
INTO_DEFAULT = (  # as where the new server's schema is not a dump of the former one's
    f"CREATE TABLE copied AS TABLE {DAY}",
    f"DROP TABLE {DAY}",
    "INSERT INTO sidings.job_history TABLE copied",
)


async def replicated(database: str, *moved: str) -> None:
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        for query in (DROPPED, *moved):
            await connection.execute(query)


@pytest.mark.parametrize("moved", [(), INTO_DEFAULT])
async def test_a_day_that_only_the_former_server_has_dropped_is_archived_once(
    database: str, tmp_path: Path, moved: tuple[str, ...]
):
    """All of its rows were written again as another part, and counted twice for ever."""
    await stored(database, [an_attempt(1), an_attempt(2)])
    await archived(database, tmp_path)
    await replicated(database, *moved)
    await stored(database, [an_attempt(3)], partitions=False)
    await archived(database, tmp_path)
    assert jobs(tmp_path) == [1, 2, 3]
    assert await archived(database, tmp_path) == 0
    async with connected(database) as connection:
        query = "SELECT part, rows FROM sidings.history_archive WHERE day = $1"
        assert [tuple(row) for row in await connection.fetch(query, OLD.date())] == [(1, 3)]
        assert await maintained(connection) == []


async def test_so_is_one_that_it_has_dropped_twice(database: str, tmp_path: Path):
    """Rows had come after the first time: the new server has them in one partition."""
    await stored(database, [an_attempt(1), an_attempt(2)])
    await archived(database, tmp_path)
    async with connected(database) as connection:
        await connection.execute(f"ALTER TABLE sidings.job_history DETACH PARTITION {DAY}")
        await connection.execute(f"ALTER TABLE {DAY} RENAME TO first")
    await stored(database, [an_attempt(3)], partitions=False)
    await archived(database, tmp_path)
    assert jobs(tmp_path) == [1, 2, 3]
    await replicated(database, "INSERT INTO sidings.job_history TABLE sidings.first")
    await stored(database, [an_attempt(4)], partitions=False)
    await archived(database, tmp_path)
    assert jobs(tmp_path) == [1, 2, 3, 4]
    async with connected(database) as connection:
        query = "SELECT part, rows, dropped_at FROM sidings.history_archive WHERE day = $1"
        assert [tuple(row) for row in await connection.fetch(query, OLD.date())] == [(1, 4, None)]


async def test_a_later_file_with_rows_that_the_new_server_lacks_stays(database: str, tmp_path: Path):
    await stored(database, [an_attempt(1)])
    await archived(database, tmp_path)
    async with connected(database) as connection:
        await connection.execute(f"ALTER TABLE sidings.job_history DETACH PARTITION {DAY}")
        await connection.execute(f"ALTER TABLE {DAY} RENAME TO first")
        await stored(database, [an_attempt(2), an_attempt(3)], partitions=False)
        await archived(database, tmp_path)
        await replicated(database, "INSERT INTO sidings.job_history TABLE sidings.first")
        await connection.execute("DELETE FROM sidings.job_history WHERE job_id = 3")
        with pytest.raises(SidingsError, match=r"part-2\.parquet has 1 rows that this database has not"):
            await archived(database, tmp_path)
        assert jobs(tmp_path) == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("moved", [(), INTO_DEFAULT])
def test_an_analysis_before_the_archives_next_run_counts_it_once(
    spark: SparkSession, database: str, tmp_path: Path, moved: tuple[str, ...]
):
    other = OLD - timedelta(days=1)
    store(database, [an_attempt(1), an_attempt(2), an_attempt(3, other)])
    archive(database, tmp_path)
    asyncio.run(replicated(database, *moved, f"DROP TABLE sidings.job_history_{other:%Y%m%d}"))
    asyncio.run(stored(database, [an_attempt(4, other)], partitions=False))  # after its drop: another row
    window = Selection(other.replace(hour=0), OLD + timedelta(hours=6))
    with reading(spark, window, postgres=database, archive=tmp_path) as attempts:
        assert sorted(row.job_id for row in attempts.collect()) == [1, 2, 3, 4]

"""The archive of the history: what it holds, and that retention waits for it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pyarrow.parquet as pq
import pytest
from sidings.errors import ConfigurationError
from sidings.spark_analytics.history.archive import _archive
from sidings.spark_analytics.history.files import archived_parts

from .history_support import Attempt, stored
from .support import connected

OLD = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=9)


def an_attempt(job: int, day: datetime = OLD) -> Attempt:
    return Attempt(job, 1, "succeeded", day, day + timedelta(seconds=2), day + timedelta(seconds=1))


async def archived(dsn: str, directory: Path) -> int:
    return await _archive(dsn, directory, "sidings", lambda _: None)


def jobs(directory: Path) -> list[int]:
    return sorted(n for file in archived_parts(directory).values() for n in pq.read_table(file)["job_id"].to_pylist())


async def maintained(connection: asyncpg.Connection) -> list[int]:
    await connection.execute("SELECT sidings.maintain(7)")
    return await connection.fetchval(
        "SELECT coalesce(array_agg(job_id ORDER BY job_id), '{}') FROM sidings.job_history"
    )


async def test_a_day_is_dropped_only_with_all_of_its_rows_archived(database: str, tmp_path: Path):
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await stored(database, [an_attempt(1), an_attempt(2)])
        assert await maintained(connection) == [1, 2]
        assert await archived(database, tmp_path) >= 1
        assert jobs(tmp_path) == [1, 2]
        await stored(database, [an_attempt(3)], partitions=False)  # late
        assert await maintained(connection) == [1, 2, 3]
        assert await archived(database, tmp_path) == 1
        assert await archived(database, tmp_path) == 0
        assert jobs(tmp_path) == [1, 2, 3]
        assert await maintained(connection) == []
        await stored(database, [an_attempt(4)], partitions=False)  # later than late: into the default partition
        assert await maintained(connection) == [4]
        assert await archived(database, tmp_path) == 1
        assert jobs(tmp_path) == [1, 2, 3, 4]
        assert await maintained(connection) == []


async def test_without_the_switch_retention_does_not_wait(database: str):
    async with connected(database) as connection:
        await stored(database, [an_attempt(1)])
        assert await maintained(connection) == []


async def test_a_directory_of_other_things_is_refused(database: str, tmp_path: Path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigurationError, match="holds other things"):
        await archived(database, tmp_path)

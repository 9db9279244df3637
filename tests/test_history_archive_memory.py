"""The archive of days whose rows have large payloads."""

import asyncio
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from sidings.spark_analytics.history.files import archived_parts

from .history_support import stored
from .support import connected
from .test_history_archive import OLD, an_attempt, command, jobs

LARGE = 400
MEGABYTE = 1 << 20


@pytest.mark.long
async def test_large_payloads_are_archived_by_few_at_a_time(database: str, tmp_path: Path):
    """Jobs that were discarded, cancelled or superseded keep theirs in the history."""
    await stored(database, [an_attempt(1)])
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.job_history "
            "(job_id, attempt, outcome, enqueued_at, finished_at, type, origin, priority, payload) "
            "SELECT n + 1, 1, 'discarded', finished_at, finished_at, type, origin, priority, "
            f"json_build_object('n', n, 'x', repeat('0123456789abcdef', {MEGABYTE // 16})) "
            f"FROM sidings.job_history, generate_series(1, {LARGE}) n"
        )
    most = 0
    async with command("archive", "--postgres", database, "--to", tmp_path) as process:
        seen = psutil.Process(process.pid)
        ended = asyncio.create_task(process.wait())
        while not ended.done():
            try:
                most = max(most, seen.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            await asyncio.wait([ended], timeout=0.02)
        assert await ended == 0
    assert jobs(tmp_path) == list(range(1, LARGE + 2))
    table = pq.read_table(archived_parts(tmp_path)[OLD.date(), 1], columns=["payload"])
    assert sum(map(len, filter(None, table["payload"].to_pylist()))) > LARGE * MEGABYTE
    assert 0 < most < 600 * MEGABYTE, f"{most // MEGABYTE} MB"

"""What others do to a day of the history between two steps of a run of the archive."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sidings.spark_analytics.history.archive import _archive

from .history_support import stored
from .support import connected
from .test_history_archive import an_attempt, archived, jobs, maintained

TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
EARLY = TODAY - timedelta(days=10, hours=12)
OLD = TODAY - timedelta(days=9, hours=12)


@pytest.mark.parametrize("late", ["nothing", "a late row", "a late row that is archived"])
@pytest.mark.parametrize("divided", [True, False])
async def test_a_run_that_stands_still_while_others_archive_and_drop_its_next_day_takes_nothing_away(
    database: str, tmp_path: Path, divided: bool, late: str
):
    """As a machine that sleeps, or is moved, stands still: it knew the day before the others had done their work."""
    await stored(database, [an_attempt(1, EARLY)])
    await stored(database, [an_attempt(2, OLD)], partitions=divided)
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")

        async def others() -> None:
            await archived(database, tmp_path)
            assert await maintained(connection) == []
            if late != "nothing":
                await stored(database, [an_attempt(3, OLD)], partitions=False)
            if late == "a late row that is archived":
                await archived(database, tmp_path)

        first = asyncio.Event()
        loop = asyncio.get_running_loop()

        def between_days(told: str) -> None:
            if str(EARLY.date()) in told:
                asyncio.run_coroutine_threadsafe(others(), loop).result(60)
                loop.call_soon_threadsafe(first.set)

        run = asyncio.to_thread(lambda: asyncio.run(_archive(database, tmp_path, "sidings", between_days)))
        await asyncio.gather(run, return_exceptions=True)  # it may say that the day is gone
        assert first.is_set()
        await archived(database, tmp_path)
        assert jobs(tmp_path) == ([1, 2] if late == "nothing" else [1, 2, 3])
        rows = await connection.fetchval("SELECT sum(rows) FROM sidings.history_archive")
        assert rows == len(jobs(tmp_path))
        assert await maintained(connection) == []

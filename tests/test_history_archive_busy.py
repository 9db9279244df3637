"""A day that cannot be archived now keeps no other day out of the archive."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from sidings.spark_analytics.history.files import archived_parts

from .history_support import stored
from .support import connected
from .test_history_archive import OLD, an_attempt, command, jobs

HELD = {
    "a backup reads the default partition": "LOCK TABLE sidings.job_history_default IN ACCESS SHARE MODE",
    "a transaction has written into the day": (
        "INSERT INTO sidings.job_history SELECT * FROM sidings.job_history WHERE job_id = 1"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("held", HELD)
async def test_a_day_that_is_in_use_is_told_and_the_others_are_archived(database: str, tmp_path: Path, held: str):
    first, second = OLD, OLD + timedelta(days=1)
    await stored(database, [an_attempt(1, first)], partitions="written" in held)
    await stored(database, [an_attempt(2, second)])
    async with connected(database) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(HELD[held])
        async with command("archive", "--postgres", database, "--to", tmp_path) as process:
            said, errors = await asyncio.wait_for(process.communicate(), 120)
        assert jobs(tmp_path) == [2]
        assert process.returncode == 1
        assert f"archived {second.date()}: 1 rows" in said.decode()
        assert f"{first.date()} is in use" in errors.decode()
        await transaction.rollback()
    async with command("archive", "--postgres", database, "--to", tmp_path) as process:
        await process.communicate()
        assert process.returncode == 0
    assert jobs(tmp_path) == [1, 2]
    assert (first.date(), 1) in archived_parts(tmp_path)

"""A day's file that was damaged when it had been archived, while Postgres still has the rows."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from sidings.errors import SidingsError
from sidings.spark_analytics.history.files import archived_parts, part_file

from .history_support import stored
from .support import connected
from .test_history_archive import OLD, an_attempt, archived, jobs, maintained


@pytest.mark.parametrize("share", [0, 0.5])
async def test_a_day_whose_file_is_damaged_is_told_and_kept_until_it_is_archived_again(
    database: str, tmp_path: Path, share: float
) -> None:
    """As a copy to a full disk, or a file server that went down, leaves it. It passed for archived: no run said a word,
    and retention dropped the rows, which were then nowhere."""
    file = part_file(tmp_path, OLD.date(), 1)
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await stored(database, [an_attempt(1), an_attempt(2)])
        assert await archived(database, tmp_path) >= 1
        whole = file.read_bytes()
        file.write_bytes(whole[: int(len(whole) * share)])
        for _ in range(2):
            with pytest.raises(SidingsError, match=f"{file} cannot be read, so it is not replaced: move it away"):
                await archived(database, tmp_path)
            assert await maintained(connection) == [1, 2], "they are in no archive, so they stay"
        file.rename(tmp_path / "aside")
        assert await archived(database, tmp_path) == 1
        assert jobs(tmp_path) == [1, 2]
        assert await maintained(connection) == []


async def test_a_file_that_was_replaced_by_an_older_one_is_written_again(database: str, tmp_path: Path) -> None:
    """As from a backup of the archive: a row that had come late was nowhere, once retention had dropped the day."""
    file = part_file(tmp_path / "archive", OLD.date(), 1)
    await stored(database, [an_attempt(1)])
    assert await archived(database, tmp_path / "archive") >= 1
    shutil.copy(file, tmp_path / "older")
    await stored(database, [an_attempt(2)], partitions=False)
    assert await archived(database, tmp_path / "archive") == 1
    shutil.copy(tmp_path / "older", file)
    assert await archived(database, tmp_path / "archive") == 1
    assert jobs(tmp_path / "archive") == [1, 2]
    assert await archived(database, tmp_path / "archive") == 0


async def test_days_whose_files_are_gone_are_kept_where_they_cannot_be_written_again(
    database: str, tmp_path: Path
) -> None:
    """The first of them ends the run, as where the disk is full, each night."""
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await stored(database, [an_attempt(1), an_attempt(2, OLD + timedelta(days=1))])
        assert await archived(database, tmp_path) >= 2
        for file in archived_parts(tmp_path).values():
            file.unlink()
            file.parent.rmdir()
            file.parent.touch()  # no folder can be made there
        with pytest.raises(FileExistsError):
            await archived(database, tmp_path)
        assert await maintained(connection) == [1, 2]

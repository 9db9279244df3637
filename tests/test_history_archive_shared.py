"""Two databases of services with one name, whose days go into one directory."""

from pathlib import Path

import pytest
from sidings.devstack.databases import create_database, drop_database, ensure_template
from sidings.errors import SidingsError

from .history_support import stored
from .support import connected
from .test_history_archive import an_attempt, archived, jobs, maintained


async def test_a_database_does_not_write_over_what_another_one_has_archived(
    database: str, sidings_postgres: str, tmp_path: Path
) -> None:
    """Each took the day's file for its own: one was gone without a word, and retention dropped its rows."""
    template = await ensure_template(sidings_postgres, service="test")
    other = await create_database(sidings_postgres, "other", template=template)
    try:
        await stored(database, [an_attempt(1)])
        await stored(other, [an_attempt(2)])
        assert await archived(database, tmp_path) >= 1
        with pytest.raises(SidingsError, match="another database"):
            await archived(other, tmp_path)
        assert jobs(tmp_path) == [1]
        async with connected(other) as connection:
            await connection.execute("UPDATE sidings.service SET archive_history = true")
            assert await maintained(connection) == [2], "it is in no archive, so it stays"
        assert await archived(other, tmp_path / "other") >= 1
        assert jobs(tmp_path / "other") == [2]
    finally:
        await drop_database(sidings_postgres, other)

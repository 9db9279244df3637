"""Two databases of services with one name, or one and what was restored of it, whose days go into one directory."""

import os
import shutil
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sidings.devstack.databases import create_database, drop_database, ensure_template
from sidings.devstack.fixtures import OwnPostgres
from sidings.errors import SidingsError
from sidings.schema import migrate

from .history_support import stored
from .support import connected
from .test_history_archive import OLD, an_attempt, archived, jobs, maintained


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
        with pytest.raises(SidingsError, match="another database has written it"):
            await archived(other, tmp_path)
        assert jobs(tmp_path) == [1]
        async with connected(other) as connection:
            await connection.execute("UPDATE sidings.service SET archive_history = true")
            assert await maintained(connection) == [2], "it is in no archive, so it stays"
        assert await archived(other, tmp_path / "other") >= 1
        assert jobs(tmp_path / "other") == [2]
    finally:
        await drop_database(sidings_postgres, other)


async def test_a_database_restored_from_a_copy_of_its_files_does_not_write_over_what_it_had_archived(
    own_postgres: OwnPostgres, tmp_path: Path
) -> None:
    """It passed for the one that had written them. Days that the archive has not got yet are archived all the same."""
    postgres, archive = own_postgres(), tmp_path / "archive"
    data, copy = postgres.directory / "data", tmp_path / "copy"
    await migrate(postgres.dsn, service="test")
    await stored(postgres.dsn, [an_attempt(1), an_attempt(2, OLD + timedelta(days=1))])
    postgres.stop()
    shutil.copytree(data, copy, copy_function=_with_owner)
    postgres.start()
    await stored(postgres.dsn, [an_attempt(3)])
    assert await archived(postgres.dsn, archive) >= 2
    next(archive.glob(f"day={OLD + timedelta(days=1):%Y-%m-%d}/*")).unlink()
    postgres.stop()
    for file in copy.rglob("*"):
        if file.is_file():
            _with_owner(file, data / file.relative_to(copy))
    postgres.start()
    with pytest.raises(SidingsError, match="has 1 rows that this database has not"):
        await archived(postgres.dsn, archive)
    assert jobs(archive) == [1, 2, 3]


async def test_a_database_restored_from_a_backup_that_knows_the_file_does_not_write_over_what_came_since(
    database: str, sidings_postgres: str, tmp_path: Path
) -> None:
    """The day was archived before the backup, and once more after it, with a row that had come late: the backup's entry
    was taken for that of the later file."""
    await stored(database, [an_attempt(1)])
    assert await archived(database, tmp_path) >= 1
    restored = await create_database(sidings_postgres, "restored", template=database.rpartition("/")[2])
    try:
        await stored(database, [an_attempt(2)], partitions=False)
        assert await archived(database, tmp_path) == 1
        await stored(restored, [an_attempt(3)], partitions=False)
        with pytest.raises(SidingsError, match="has 1 rows that this database has not"):
            await archived(restored, tmp_path)
        assert jobs(tmp_path) == [1, 2]
    finally:
        await drop_database(sidings_postgres, restored)


async def test_a_file_of_rows_that_the_database_has_is_replaced_whoever_has_written_it(
    database: str, tmp_path: Path
) -> None:
    """As one that a former version had written when it was killed, or that somebody has copied with its directory. The
    run failed for ever, and no later day was archived."""
    await stored(database, [an_attempt(1), an_attempt(2, OLD + timedelta(days=1))])
    assert await archived(database, tmp_path / "former") >= 2
    shutil.copytree(tmp_path / "former", tmp_path / "moved")
    for file in (tmp_path / "moved").rglob("*.parquet"):
        pq.write_table(pq.read_table(file).replace_schema_metadata(None), file)
    await stored(database, [an_attempt(3), an_attempt(4, OLD + timedelta(days=1))], partitions=False)
    assert await archived(database, tmp_path / "moved") == 2
    assert jobs(tmp_path / "moved") == [1, 2, 3, 4]


def _with_owner(source: Path | str, target: Path | str) -> None:
    shutil.copy2(source, target)
    owner = Path(source).stat()
    os.chown(target, owner.st_uid, owner.st_gid)


async def test_a_file_that_cannot_be_read_is_told_and_keeps_no_other_day_out_of_the_archive(
    database: str, tmp_path: Path
) -> None:
    await stored(database, [an_attempt(1)])
    assert await archived(database, tmp_path) >= 1
    [file] = tmp_path.glob(f"day={OLD:%Y-%m-%d}/*")
    file.write_bytes(file.read_bytes()[:-9])
    await stored(database, [an_attempt(2)], partitions=False)
    await stored(database, [an_attempt(3, OLD + timedelta(days=1))])
    with pytest.raises(SidingsError, match="cannot be read, so it is not replaced: move it away"):
        await archived(database, tmp_path)
    file.rename(tmp_path / "aside")
    assert jobs(tmp_path) == [3]
    assert await archived(database, tmp_path) == 1
    assert jobs(tmp_path) == [1, 2, 3]


async def test_the_archives_role_needs_no_right_to_temporary_tables(database: str, tmp_path: Path) -> None:
    """The owner may lack it, where nobody has rights that he does not need: after the first late row no day got into
    the archive any more."""
    parts, role = urlsplit(database), f"owner_{token_hex(6)}"
    await stored(database, [an_attempt(1)])
    async with connected(database) as admin:
        await admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'; ALTER SCHEMA sidings OWNER TO {role}")
        await admin.execute(f'REVOKE TEMPORARY ON DATABASE "{parts.path[1:]}" FROM PUBLIC')
        for row in await admin.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'sidings'"):
            await admin.execute(f"ALTER TABLE sidings.{row['tablename']} OWNER TO {role}")
        dsn = parts._replace(netloc=f"{role}:x@{parts.netloc.rpartition('@')[2]}").geturl()
        try:
            assert await archived(dsn, tmp_path) >= 1
            await stored(database, [an_attempt(2)], partitions=False)
            await stored(database, [an_attempt(3, OLD + timedelta(days=1))])
            await admin.execute(f"ALTER TABLE sidings.job_history_{OLD + timedelta(days=1):%Y%m%d} OWNER TO {role}")
            assert await archived(dsn, tmp_path) == 2
            assert jobs(tmp_path) == [1, 2, 3]
        finally:
            await admin.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("kind", ["no time", "null", "text"])
async def test_a_file_of_another_kind_is_told_and_keeps_no_other_day_out_of_the_archive(
    database: str, tmp_path: Path, kind: str
) -> None:
    await stored(database, [an_attempt(1)])
    assert await archived(database, tmp_path) >= 1
    [file] = tmp_path.glob(f"day={OLD:%Y-%m-%d}/*")
    table = pq.read_table(file, columns=["job_id", "attempt", "finished_at"])
    match kind:
        case "no time":
            table = table.drop_columns("finished_at")
        case "null":
            table = table.set_column(2, "finished_at", pa.nulls(1, table.schema.field("finished_at").type))
        case _:
            table = table.set_column(0, "job_id", pa.array(["one"]))
    pq.write_table(table, file)
    await stored(database, [an_attempt(2)], partitions=False)
    await stored(database, [an_attempt(3, OLD + timedelta(days=1))])
    with pytest.raises(SidingsError, match="cannot be read, so it is not replaced: move it away"):
        await archived(database, tmp_path)
    assert (tmp_path / f"day={OLD + timedelta(days=1):%Y-%m-%d}").exists()


@pytest.mark.parametrize("ordered", [True, False])
async def test_all_of_a_large_file_is_compared(
    database: str, tmp_path: Path, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece, whichever order its rows have."""
    monkeypatch.setattr("sidings.spark_analytics.history.missing._CHECKED_ROWS", 100)
    times = [OLD + timedelta(seconds=n if ordered else n * 7919 % 1000) for n in range(1000)]
    await stored(database, [an_attempt(n, at) for n, at in enumerate(times)])
    assert await archived(database, tmp_path) >= 1
    await stored(database, [an_attempt(1000)], partitions=False)
    assert await archived(database, tmp_path) == 1
    assert jobs(tmp_path) == list(range(1001))
    async with connected(database) as connection:
        await connection.execute("DELETE FROM sidings.job_history WHERE job_id IN (5, 500, 999)")
    await stored(database, [an_attempt(1001)], partitions=False)
    with pytest.raises(SidingsError, match="has 3 rows that this database has not"):
        await archived(database, tmp_path)

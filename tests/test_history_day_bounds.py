"""Days of the history whose bounds are not those of their day."""

from datetime import datetime, timedelta
from pathlib import Path

import asyncpg
import pytest

from .history_support import stored
from .support import connected
from .test_history_archive import OLD, an_attempt, archived, jobs, maintained

MIDNIGHT = OLD.replace(hour=0)


async def bounds(connection: asyncpg.Connection, day: datetime) -> str:
    await connection.execute("SET TimeZone = 'UTC'; SET DateStyle = 'ISO'")
    query = "SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = $1::text::regclass"
    return await connection.fetchval(query, f"sidings.job_history_{day:%Y%m%d}")


def between(first: datetime, until: datetime) -> str:
    return f"FOR VALUES FROM ('{first:%Y-%m-%d %H:%M:%S}+00') TO ('{until:%Y-%m-%d %H:%M:%S}+00')"


@pytest.mark.parametrize("style", ["SQL, DMY", "German", "Postgres, MDY", "ISO, YMD"])
@pytest.mark.parametrize("zone", ["Asia/Kolkata", "Asia/Shanghai", "Europe/Dublin"])
async def test_a_day_is_that_of_utc_however_the_database_writes_times(database: str, zone: str, style: str):
    """Before Postgres 18 an abbreviation has one meaning: IST is Israel's, CST America's."""
    async with connected(database) as connection:
        await connection.execute(f"SET TimeZone = '{zone}'; SET DateStyle = '{style}'")
        await connection.execute("SELECT sidings.make_history_day($1)", MIDNIGHT.date())
        assert await bounds(connection, MIDNIGHT) == between(MIDNIGHT, MIDNIGHT + timedelta(days=1))


async def test_days_are_made_beside_tables_that_are_divided_in_another_way(database: str):
    """Once Postgres has analysed its catalogs, it goes through all tables and joins the days to them: it read a time in
    the bounds of each."""
    tomorrow = MIDNIGHT + timedelta(days=1)
    async with connected(database) as connection:
        await connection.execute(
            """CREATE TABLE payment (id bigint) PARTITION BY RANGE (id);
               CREATE TABLE payment_1 PARTITION OF payment FOR VALUES FROM (1) TO (1000000)"""
        )
        await connection.execute(
            "SELECT sidings.make_history_day($1::date - n) FROM generate_series(0, 33) n", MIDNIGHT.date()
        )
        await connection.execute("ANALYZE pg_inherits, pg_class")
        await connection.execute("SELECT sidings.maintain(1000000)")
        await connection.execute("SELECT sidings.make_history_day($1)", tomorrow.date())
        assert await bounds(connection, tomorrow) == between(tomorrow, tomorrow + timedelta(days=1))


async def with_a_late_day(connection: asyncpg.Connection) -> None:
    """A day that begins and ends 14 hours late, as an earlier release has made it."""
    part = f"sidings.job_history_{MIDNIGHT:%Y%m%d}"
    begin = MIDNIGHT + timedelta(hours=14)
    await connection.execute(
        f"CREATE TABLE {part} PARTITION OF sidings.job_history "
        f"FOR VALUES FROM ('{begin}') TO ('{begin + timedelta(days=1)}')"
    )


async def test_the_day_after_one_that_ends_late_begins_with_its_end(database: str):
    async with connected(database) as connection:
        await with_a_late_day(connection)
        tomorrow = MIDNIGHT + timedelta(days=1)
        await stored(
            database, [an_attempt(n, tomorrow + timedelta(hours=n, seconds=-2)) for n in range(25)], partitions=False
        )
        for _ in range(2):
            await connection.execute("SELECT sidings.make_history_day($1)", tomorrow.date())
        assert await bounds(connection, tomorrow) == between(
            tomorrow + timedelta(hours=14), tomorrow + timedelta(days=1)
        )
        query = "SELECT array_agg(job_id ORDER BY job_id) FROM sidings.job_history"
        assert await connection.fetchval(query) == list(range(25))


async def test_what_comes_into_a_day_that_ends_late_is_archived_before_it_is_dropped(database: str, tmp_path: Path):
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.service SET archive_history = true")
        await with_a_late_day(connection)
        tomorrow = MIDNIGHT + timedelta(days=1)
        await stored(database, [an_attempt(1, tomorrow)], partitions=False)
        await archived(database, tmp_path)
        await stored(database, [an_attempt(2, tomorrow)], partitions=False)
        assert await maintained(connection) == [1, 2]
        await archived(database, tmp_path)
        assert await maintained(connection) == []
        assert jobs(tmp_path) == [1, 2]

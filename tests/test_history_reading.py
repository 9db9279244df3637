"""What an analysis reads: Postgres, the archive, or both as one picture."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from sidings.errors import ConfigurationError
from sidings.spark_analytics.history import Selection, archive, reading
from sidings.spark_analytics.history.dsn import jdbc
from sidings.spark_analytics.history.files import part_file
from sidings.spark_analytics.history.reading import COLUMNS, _locked, _out_of_postgres, _slices, _transaction

from .history_support import Attempt, store, stored
from .support import connected, eventually

pytestmark = pytest.mark.timeout(600)  # Spark starts
TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def some(first: int, days_ago: int) -> list[Attempt]:
    at = TODAY - timedelta(days=days_ago) + timedelta(hours=12)
    return [
        Attempt(first, 1, "retried", at, at + timedelta(seconds=2), at + timedelta(seconds=1), None, "é", error="fp0"),
        Attempt(
            first,
            2,
            "succeeded",
            at,
            at + timedelta(seconds=9),
            at + timedelta(seconds=8),
            at + timedelta(seconds=7),
            "é",
            group="g",
        ),
        Attempt(first + 1, 1, "lost", at, at + timedelta(microseconds=1)),
    ]


def executed(dsn: str, *queries: str) -> None:
    async def run() -> None:
        async with connected(dsn) as connection:
            for query in queries:
                await connection.execute(query)

    asyncio.run(run())


def read(spark: SparkSession, selection: Selection, **source: Any) -> list[Sequence[Any]]:
    with reading(spark, selection, **source) as attempts:
        return sorted(map(tuple, attempts.select(*COLUMNS).collect()))


@pytest.mark.long
def test_archive_and_postgres_give_one_picture(
    spark: SparkSession, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    window = Selection(TODAY - timedelta(days=20), TODAY)
    days = {
        "dropped": 9,
        "dropped, and late rows archived": 10,
        "dropped, and late rows": 11,
        "archived": 3,
        "new": 2,
    }
    first = {name: 100 * n for n, name in enumerate(days, 1)}
    rows = {name: some(first[name], ago) for name, ago in days.items()}
    young = rows.pop("new")
    store(database, [row for own in rows.values() for row in own])
    executed(
        database,
        "UPDATE sidings.job_history SET error_message = repeat('é', 600) WHERE job_id = 100 AND attempt = 1",
        "UPDATE sidings.job_history SET due_at = 'infinity' WHERE job_id = 200 AND attempt = 2",
    )
    both: dict[str, Any] = {"postgres": database, "archive": tmp_path}
    before = read(spark, window, postgres=database)
    assert archive(database, tmp_path) >= 4
    assert read(spark, window, archive=tmp_path) == before
    assert read(spark, window, **both) == before, "what is archived and still in Postgres"
    executed(database, "UPDATE sidings.service SET archive_history = true", "SELECT sidings.maintain(7)")
    assert len(read(spark, window, postgres=database)) == 3
    assert "9 rows of the window" in caplog.text
    assert read(spark, window, **both) == before, "what is archived alone"
    late = {
        name: [replace(row, job=row.job + 50) for row in rows[name]]
        for name in ("dropped, and late rows archived", "dropped, and late rows")
    }
    asyncio.run(stored(database, late["dropped, and late rows archived"], partitions=False))
    assert archive(database, tmp_path) == 1
    asyncio.run(stored(database, late["dropped, and late rows"], partitions=False))
    store(database, young)
    jobs = sorted((row[0], row[1]) for row in read(spark, window, **both))
    expected = [*young, *(row for own in (*rows.values(), *late.values()) for row in own)]
    assert jobs == sorted((row.job, row.attempt) for row in expected)
    chosen = Selection(window.since, window.until, types=("é",), origins=("t/0",))
    assert {row[2] for row in read(spark, chosen, **both)} == {"é"}
    assert len(read(spark, chosen, **both)) == len([row for row in expected if row.type == "é"])

    part_file(tmp_path, (TODAY - timedelta(days=9)).date(), 1).unlink()
    with pytest.raises(ConfigurationError, match=r"lacks day=.*, one of 1 files of the window"):
        read(spark, window, **both)
    assert read(spark, Selection(TODAY - timedelta(days=5), TODAY), **both), "other windows can be read"
    executed(database, "UPDATE sidings.service SET name = 'other'")
    with pytest.raises(ConfigurationError, match="is the archive of the service 'test', the database is 'other'"):
        read(spark, window, **both)


@pytest.mark.long
@pytest.mark.parametrize("older", [5, 6])
def test_files_without_headers_are_read_beside_files_with_them(
    spark: SparkSession, database: str, tmp_path: Path, older: int
):
    """As those that were written before the archive had this column."""
    store(database, [*some(1, 5), *some(11, 6)])
    archive(database, tmp_path)
    file = part_file(tmp_path, (TODAY - timedelta(days=older)).date(), 1)
    pq.write_table(pq.read_table(file, partitioning=None).drop_columns("headers"), file)
    window = Selection(TODAY - timedelta(days=9), TODAY)
    before = read(spark, window, postgres=database)
    assert read(spark, window, archive=tmp_path) == before
    executed(database, "UPDATE sidings.service SET archive_history = true", "SELECT sidings.maintain(4)")
    assert read(spark, window, postgres=database, archive=tmp_path) == before


@pytest.mark.long
def test_directories_may_have_any_name(spark: SparkSession, database: str, tmp_path: Path):
    """Spark takes what it is to read for a pattern."""
    rows = some(1, 5)
    store(database, rows)
    expected = [(1, 1), (1, 2), (2, 1)]
    for name in ("[a]", "*", "?", "{b,c}", "d\\e", "100 % é:+#"):
        folder, other = tmp_path / "archives" / name, tmp_path / "scratch" / name
        other.mkdir(parents=True)
        executed(database, "TRUNCATE sidings.history_archive")
        assert archive(database, folder) >= 1
        window = Selection(TODAY - timedelta(days=9), TODAY)
        assert [tuple(row[:2]) for row in read(spark, window, archive=folder)] == expected, name
        assert [tuple(row[:2]) for row in read(spark, window, postgres=database, scratch=other)] == expected, name


@pytest.mark.long
def test_what_is_written_after_the_snapshot_is_not_read(spark: SparkSession, database: str):
    window = Selection(TODAY - timedelta(days=9), TODAY)
    store(database, some(1, 5))
    with asyncio.Runner() as runner, _transaction(runner, database, "sidings", window) as (connection, days):
        snapshot = runner.run(connection.fetchval("SELECT pg_export_snapshot()"))
        store(database, some(11, 5))
        slices = _slices(window, days)
        found = _out_of_postgres(spark, database, "sidings", snapshot, window, slices).select("job_id").collect()
    assert sorted(row.job_id for row in found) == [1, 1, 2]


@pytest.mark.long
def test_spark_goes_by_what_the_environment_says_of_tls(
    spark: SparkSession, database: str, monkeypatch: pytest.MonkeyPatch
):
    """On a server that has none. Our own connection, which is asyncpg's, would have refused it."""
    window = Selection(TODAY - timedelta(days=9), TODAY)
    monkeypatch.setenv("PGSSLMODE", "require")
    with pytest.raises((PySparkException, Py4JJavaError), match=r"Couldn't connect|does not support SSL"):
        _out_of_postgres(spark, database, "sidings", "", window, _slices(window, {}))
    monkeypatch.setenv("PGSSLROOTCERT", "/root.crt")
    told = jdbc("postgresql://u@localhost/db?sslmode=verify-full").properties
    assert (told["sslmode"], told["sslrootcert"]) == ("verify-full", "/root.crt")


def test_days_without_a_partition_are_read_at_once():
    first, second = (TODAY - timedelta(days=9)).date(), (TODAY - timedelta(days=8)).date()
    everything = Selection(datetime(1970, 1, 1, 5, tzinfo=UTC), TODAY)
    slices = _slices(everything, {first: 1_200_000, second: 5})
    assert len(slices) == 1 + 3 + 1 + 1
    assert (slices[0][0], slices[-1][1]) == (everything.since, everything.until)
    assert all(a[1] == b[0] for a, b in pairwise(slices))
    assert slices[1][0] == datetime.combine(first, datetime.min.time(), UTC)
    assert _slices(Selection(TODAY - timedelta(hours=3), TODAY - timedelta(hours=2)), {}) == [
        (TODAY - timedelta(hours=3), TODAY - timedelta(hours=2))
    ]


async def test_a_day_that_retention_drops_meanwhile_is_seen_to_be_dropped(database: str):
    at = TODAY - timedelta(days=9)
    await stored(database, [Attempt(1, 1, "succeeded", at, at, at)])
    async with connected(database) as retention, connected(database) as reader, connected(database) as watcher:
        transaction = retention.transaction()
        await transaction.start()
        await retention.execute(f"LOCK TABLE sidings.job_history_{at:%Y%m%d} IN ACCESS EXCLUSIVE MODE")
        locked = asyncio.create_task(_locked(reader, "sidings", Selection(at - timedelta(days=1), TODAY)))
        waits = "SELECT count(*) FROM pg_locks WHERE pid = $1 AND NOT granted"
        await eventually(lambda: watcher.fetchval(waits, reader.get_server_pid()), "the reader waits for the lock")
        await retention.execute(f"DROP TABLE sidings.job_history_{at:%Y%m%d}")
        await transaction.commit()
        assert await locked == {}
        assert reader.is_in_transaction()
        # And from then on none is.
        await retention.execute("SELECT sidings.make_history_day($1)", at.date())
        assert await reader.fetchval("SELECT count(*) FROM sidings.job_history") == 0


async def test_a_day_that_is_read_is_not_dropped(database: str):
    at = TODAY - timedelta(days=9)
    await stored(database, [Attempt(1, 1, "succeeded", at, at, at)])
    async with connected(database) as retention, connected(database) as reader:
        days = await _locked(reader, "sidings", Selection(at - timedelta(days=1), TODAY))
        assert set(days) >= {at.date()}
        await retention.execute("SELECT sidings.maintain(7)")
        assert await reader.fetchval("SELECT count(*) FROM sidings.job_history") == 1
        await reader.execute("ROLLBACK")
        await retention.execute("SELECT sidings.maintain(7)")
        assert await retention.fetchval("SELECT count(*) FROM sidings.job_history") == 0


@pytest.mark.parametrize("policies", [False, True])
async def test_who_may_read_the_history_may_lock_the_days_that_come(database: str, policies: bool):
    """Three days after its grant a reader's analysis was refused, as the new days had none. Not where policies say
    which rows it sees: it would see all of a day."""
    at, role = TODAY - timedelta(days=9), f"reader_{os.getpid()}_{policies}".lower()
    async with connected(database) as owner:
        await owner.execute(
            f"CREATE ROLE {role} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA sidings TO {role}; "
            f"GRANT SELECT ON ALL TABLES IN SCHEMA sidings TO {role}"
        )
        if policies:
            await owner.execute("ALTER TABLE sidings.job_history ENABLE ROW LEVEL SECURITY")
        try:
            await stored(database, [Attempt(1, 1, "succeeded", at, at, at)])
            query = "SELECT has_table_privilege($1, $2, 'SELECT')"
            assert await owner.fetchval(query, role, f"sidings.job_history_{at:%Y%m%d}") is not policies
            if not policies:
                reader = await asyncpg.connect(database, user=role, password="x")
                assert at.date() in await _locked(reader, "sidings", Selection(at, TODAY))
                await reader.close()
        finally:
            await owner.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")

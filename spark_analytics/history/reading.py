"""Attempts of jobs as one table, out of Postgres, out of the archive, or out of both."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path

import asyncpg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from ...errors import ConfigurationError, SchemaMissing
from ...schema import load_sql, valid_schema_name
from .dsn import jdbc
from .files import archived_parts, check_archive
from .selection import Selection

__all__ = ["COLUMNS", "reading"]

_CONNECT_SECONDS = 10.0
_CALL_SECONDS = 60.0
_SLICE_ROWS = 500_000
_MOST_SLICES = 64  # of a day
_MESSAGE_CHARACTERS = 500

COLUMNS = (
    "job_id", "attempt", "type", "origin", "group", "outcome", "ready", "started", "finished", "error_class",
    "error_message", "error_fingerprint",
)  # fmt: skip


@contextmanager
def reading(
    spark: SparkSession,
    selection: Selection,
    *,
    postgres: str | None = None,
    schema: str = "sidings",
    archive: Path | None = None,
    scratch: Path | None = None,
) -> Generator[DataFrame]:
    """The chosen attempts, an attempt a row, as long as the context lasts.

    postgres: DSN of the service's database. archive: directory of its Parquet archive. With both, what retention has
    dropped in Postgres comes out of the archive, and all else out of Postgres; so no row is read twice.

    All that is read of Postgres is of one snapshot, and is copied to `scratch` at once (default: a temporary directory;
    on a cluster give one that all workers see), so that the snapshot is open no longer than the reading takes and
    each answer reads only the columns that it needs.

    Columns: job_id, attempt, type, origin, group, outcome; ready, started, finished, in microseconds since 1970 (ready:
    when the attempt could start, the later of enqueue and due time; started is null for lost attempts and for jobs that
    ended without running); error_class, error_message (500 characters), error_fingerprint.

    Raises `ConfigurationError` where source and DSN cannot be used, `SchemaMissing` where the database has no such
    schema, and asyncpg's errors and `OSError` where it cannot be reached.
    """
    valid_schema_name(schema)
    if postgres is None and archive is None:
        raise ConfigurationError("nothing to read: give postgres, a DSN, or archive, a directory, or both")
    if archive is not None:
        check_archive(archive)
    folder = Path(tempfile.mkdtemp(prefix="sidings-history-", dir=scratch))
    try:
        files = archived_parts(archive) if archive is not None else {}
        parts: list[DataFrame] = []
        if postgres is not None:
            copy = str(folder / "attempts")
            with asyncio.Runner() as runner, _snapshot(runner, postgres, schema) as (connection, snapshot):
                if archive is not None:
                    dropped = runner.run(_dropped(connection, schema))
                    files = {(day, part): file for (day, part), file in files.items() if part <= dropped.get(day, part)}
                slices = runner.run(_slices(connection, schema, selection))
                rows = _out_of_postgres(spark, postgres, schema, snapshot, selection, slices)
                rows.write.parquet(copy, compression="snappy")
            parts.append(spark.read.parquet(copy))
        chosen = [file for (day, _), file in files.items() if day in selection.days()]
        if chosen:
            parts.append(_out_of_archive(spark, selection, chosen))
        if not parts:
            raise ConfigurationError(f"the archive {archive} has no day of the window")
        out = parts[0]
        for part in parts[1:]:
            out = out.unionByName(part)
        yield out
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _snapshot(
    runner: asyncio.Runner, dsn: str, schema: str
) -> Generator[tuple["asyncpg.Connection[asyncpg.Record]", str]]:
    """A transaction whose snapshot the readers share."""
    connection = runner.run(_connected(dsn, schema))
    try:
        runner.run(connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))
        runner.run(connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0"))
        yield connection, runner.run(connection.fetchval("SELECT pg_export_snapshot()"))
    finally:
        connection.terminate()


async def _connected(dsn: str, schema: str) -> "asyncpg.Connection[asyncpg.Record]":
    jdbc(dsn)  # what it cannot use is told before anything happens
    connection = await asyncpg.connect(
        dsn, timeout=_CONNECT_SECONDS, command_timeout=_CALL_SECONDS, statement_cache_size=0
    )
    if await connection.fetchval("SELECT to_regclass($1)", f"{schema}.job_history") is None:
        connection.terminate()
        raise SchemaMissing(f"the database has no schema {schema!r} of Sidings: check the DSN and the schema's name")
    return connection


async def _dropped(connection: "asyncpg.Connection[asyncpg.Record]", schema: str) -> dict[date, int]:
    """Up to which part the rows of a day are in the archive alone; later ones, entered or not, are in Postgres too."""
    days = await connection.fetch(load_sql(__package__, "list_days", schema))
    parts = await connection.fetch(load_sql(__package__, "list_parts", schema))
    return {row["day"]: 0 for row in days} | {row["day"]: row["part"] for row in parts if row["dropped"]}


async def _slices(
    connection: "asyncpg.Connection[asyncpg.Record]", schema: str, selection: Selection
) -> list[tuple[datetime, datetime]]:
    """Bounds of reads: several of a day with many rows; one of a day that only the default partition can know."""
    rows = {row["day"]: row for row in await connection.fetch(load_sql(__package__, "list_days", schema))}
    slices: list[tuple[datetime, datetime]] = []
    for day in selection.days():
        begin = max(selection.since, datetime.combine(day, time(), UTC))
        end = min(selection.until, datetime.combine(day + timedelta(days=1), time(), UTC))
        count = 1
        if day in rows:
            # Retention gives up at once on a day that is locked. The default partition is not locked for long:
            # tomorrow's
            # partition could not be made meanwhile.
            await connection.execute(f"LOCK TABLE {schema}.{rows[day]['name']} IN ACCESS SHARE MODE")
            count = min(_MOST_SLICES, 1 + rows[day]["rows"] // _SLICE_ROWS)
        step = (end - begin) / count
        edges = [begin + n * step for n in range(count)] + [end]
        slices += itertools.pairwise(edges)
    return slices


def _out_of_postgres(
    spark: SparkSession,
    dsn: str,
    schema: str,
    snapshot: str,
    selection: Selection,
    slices: list[tuple[datetime, datetime]],
) -> DataFrame:
    source = jdbc(dsn)
    query = load_sql(__package__, "read_attempts", schema)
    also = "".join(
        f" AND {column} IN ({', '.join(_literal(v) for v in values)})"
        for column, values in (("type", selection.types), ("origin", selection.origins))
        if values
    )
    properties = source.properties | {
        "fetchsize": "10000",
        # Spark runs it first in the transaction that it reads in.
        "sessionInitStatement": "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; "
        f"SET TRANSACTION SNAPSHOT '{snapshot}'",
    }
    predicates = [f"at >= '{a.isoformat()}' AND at < '{b.isoformat()}'{also}" for a, b in slices]
    frame = spark.read.jdbc(source.url, f"({query}) AS h", predicates=predicates, properties=properties)
    return frame.select(*COLUMNS)


def _out_of_archive(spark: SparkSession, selection: Selection, files: list[Path]) -> DataFrame:
    frame = spark.read.parquet(*map(str, files)).where(
        (f.col("finished_at") >= f.lit(selection.since)) & (f.col("finished_at") < f.lit(selection.until))
    )
    if selection.types:
        frame = frame.where(f.col("type").isin(*selection.types))
    if selection.origins:
        frame = frame.where(f.col("origin").isin(*selection.origins))
    return frame.select(
        "job_id", "attempt", "type", "origin", "group", "outcome",
        f.unix_micros(f.greatest("enqueued_at", "due_at")).alias("ready"),
        f.unix_micros("started_at").alias("started"),
        f.unix_micros("finished_at").alias("finished"),
        "error_class", f.substring("error_message", 1, _MESSAGE_CHARACTERS).alias("error_message"), "error_fingerprint",
    )  # fmt: skip


def _literal(text: str) -> str:
    """As text of SQL; Postgres takes backslashes as they are."""
    return "'" + text.replace("'", "''") + "'"

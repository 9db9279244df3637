"""Attempts of jobs as one table, out of Postgres, out of the archive, or out of both."""

import asyncio
import itertools
import logging
import re
import shutil
import tempfile
from collections.abc import Container, Generator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, time, timedelta
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, cast

import asyncpg
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from ...errors import ConfigurationError, SidingsError
from ...schema import load_sql, valid_schema_name
from .database import connected, unlimited
from .dsn import jdbc
from .files import archived_parts, check_archive, part_file
from .missing import has_all
from .running import run_all
from .selection import Selection

__all__ = ["COLUMNS", "check_source", "reading"]

if TYPE_CHECKING:
    from .database import Connection

log = logging.getLogger("sidings.history")

_CALL_SECONDS = 60.0
_SLICE_ROWS = 500_000
_MOST_SLICES = 64  # of a day
_MESSAGE_CHARACTERS = 500

COLUMNS = (
    "job_id", "attempt", "type", "origin", "group", "outcome", "enqueued", "ready", "started", "finished",
    "error_class", "error_message", "error_fingerprint",
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
    dropped in Postgres comes out of the archive, and all else out of Postgres; so no row is read twice, and none is
    missing: where the archive has not all that it should have, that is an error. With Postgres alone, days that only an
    archive has are told in the log.

    All that is read of Postgres is of one snapshot, and is copied to `scratch` at once (default: a temporary directory;
    on a cluster give one that all workers see), so that the snapshot is open no longer than the reading takes and
    each answer reads only the columns that it needs.

    Columns: job_id, attempt, type, origin, group, outcome; enqueued, ready, started, finished, in microseconds since
    1970 (ready: when the attempt could start, the later of enqueue and due time; started is null for lost attempts and
    for jobs that ended without running); error_class, error_message (500 characters), error_fingerprint.

    Raises `ConfigurationError` where source or DSN cannot be used, or the archive is another's, or lacks files;
    `SchemaMissing` where the database has no such schema, `PostgresUnavailable` where it cannot be reached; asyncpg's
    and Spark's errors; at its end, `SidingsError` where a file of the archive was replaced meanwhile.
    """
    service = _checked(postgres, schema, archive)
    if scratch is not None and not scratch.is_dir():
        raise ConfigurationError(f"the directory for scratch, {scratch}, is not there: make it")
    folder = Path(tempfile.mkdtemp(prefix="sidings-history-", dir=scratch)).resolve()
    try:
        parts: list[DataFrame] = []
        if postgres is not None:
            copy = str(folder / "attempts")
            files, unknown = _copied(spark, selection, copy, postgres, schema, archive, service)
            parts.append(_parquet(spark, copy))
        else:
            files = archived_parts(archive) if archive is not None else {}
            unknown = _others(selection, {day for day, _ in files})
        chosen = [file for (day, _), file in files.items() if _touches(selection, day)]
        found = _states(chosen)
        for file in chosen:
            _rows(file)
        if chosen:
            parts.append(_out_of_archive(spark, selection, chosen))
        if not parts:
            raise ConfigurationError(f"the archive {archive} has no day of the window")
        if unknown:
            log.warning(
                "nothing is known of %s of the window's %s days, the first is %s: means over the window, as numbers per"
                " second and what ran at once, are as if nothing had run then",
                len(unknown), len(selection.days()), unknown[0],
            )  # fmt: skip
        yield reduce(DataFrame.unionByName, parts)
        now = _states(chosen)
        if changed := [file for file in chosen if now.get(file) != found.get(file)]:
            raise SidingsError(
                f"{changed[0]} has been replaced while it was read, as an archive does where rows have come late: what "
                "was read of it is not to be relied on; do this again"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copied(
    spark: SparkSession,
    selection: Selection,
    copy: str,
    postgres: str,
    schema: str,
    archive: Path | None,
    service: str | None,
) -> tuple[dict[tuple[date, int], Path], list[date]]:
    """Copy to `copy` what Postgres has of the window, of one snapshot; again where a day has been divided meanwhile.
    Returns the files whose rows are in the archive alone, and the days of which nothing is known."""
    while True:
        shutil.rmtree(copy, ignore_errors=True)
        with asyncio.Runner() as runner, _transaction(runner, postgres, schema, selection) as (connection, days):
            snapshot = runner.run(connection.fetchval("SELECT pg_export_snapshot()"))
            if archive is not None:
                runner.run(_same_service(connection, schema, archive, service))
            files = runner.run(_only_archived(connection, schema, selection, set(days), archive))
            limits = unlimited(connection, "LOCAL")
            rows = _out_of_postgres(spark, postgres, schema, snapshot, selection, _slices(selection, days), limits)
            run_all(spark.sparkContext, [partial(rows.write.parquet, copy, compression="snappy")])
            if not runner.run(_divided(connection, schema, selection, days)):
                others = _others(selection, {*days, *(day for day, _ in files)})
                return files, runner.run(_without_rows(connection, schema, others))


def check_source(postgres: str | None, schema: str, archive: Path | None) -> None:
    """Raises as `reading` does, without Spark."""
    _checked(postgres, schema, archive)
    if postgres is not None:
        asyncio.run(_reached(postgres, schema))


def _checked(postgres: str | None, schema: str, archive: Path | None) -> str | None:
    """The service whose archive it is."""
    valid_schema_name(schema)
    if postgres is None and archive is None:
        raise ConfigurationError("nothing to read: give postgres, a DSN, or archive, a directory, or both")
    if postgres is not None:
        jdbc(postgres)
    return check_archive(archive) if archive is not None else None


async def _reached(dsn: str, schema: str) -> None:
    connection = await connected(dsn, schema, call_seconds=_CALL_SECONDS)
    may = await connection.fetchval("SELECT has_table_privilege($1, 'SELECT')", f"{schema}.job_history")
    await connection.close(timeout=_CALL_SECONDS)
    if not may:
        raise ConfigurationError(
            f"the DSN's role may not read {schema}.job_history: GRANT it SELECT on the schema's tables"
        )


@contextmanager
def _transaction(
    runner: asyncio.Runner, dsn: str, schema: str, selection: Selection
) -> "Generator[tuple[Connection, dict[date, int]]]":
    """A transaction that has no snapshot yet, and the days of the window that have a partition, with an estimate of
    their rows."""
    connection = runner.run(connected(dsn, schema, call_seconds=_CALL_SECONDS))
    try:
        yield connection, runner.run(_locked(connection, schema, selection))
    finally:
        connection.terminate()


async def _locked(connection: "Connection", schema: str, selection: Selection) -> dict[date, int]:
    """Lock the days: retention gives up at once on one that is locked. Before there is a snapshot, so that it shows
    what retention has dropped until then. The default partition is not locked for long: tomorrow's partition could not
    be made meanwhile."""
    while True:
        rows = await connection.fetch(load_sql(__package__, "list_days", schema))
        days = {row["day"]: row for row in rows if _touches(selection, row["day"])}
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute(unlimited(connection, "LOCAL"))
        try:
            for row in days.values():
                await connection.execute(f"LOCK TABLE {schema}.{row['name']} IN ACCESS SHARE MODE")
            return {day: row["rows"] for day, row in days.items()}
        except asyncpg.UndefinedTableError:  # retention was quicker
            await connection.execute("ROLLBACK")


async def _divided(connection: "Connection", schema: str, selection: Selection, days: Container[date]) -> bool:
    """Whether a day has got its partition since: what was read of it after that is missing. Its rows are new there, so
    that the snapshot does not show them, and Postgres does not look for them in the default partition any more. It may
    have been dropped by now, of which the list of files tells. Ends the transaction."""
    without = _others(selection, days)
    known = await _dropped(connection, schema)
    await connection.execute("COMMIT")
    divided = await connection.fetch(load_sql(__package__, "divided_days", schema), without)
    return bool(divided) or not {day for day, _ in await _dropped(connection, schema) - known}.isdisjoint(without)


async def _without_rows(connection: "Connection", schema: str, days: list[date]) -> list[date]:
    """Those of the days without a partition of which the default one has no row either."""
    rows = await connection.fetch(load_sql(__package__, "empty_days", schema), days) if days else []
    return [row["day"] for row in rows]


async def _dropped(connection: "Connection", schema: str) -> set[tuple[date, int]]:
    rows = await connection.fetch(load_sql(__package__, "list_parts", schema))
    return {(row["day"], row["part"]) for row in rows if row["dropped"]}


async def _same_service(connection: "Connection", schema: str, archive: Path, service: str | None) -> None:
    here = await connection.fetchval(f"SELECT name FROM {schema}.service")
    if here != service:
        raise ConfigurationError(f"{archive} is the archive of the service {service!r}, the database is {here!r}'s")


async def _only_archived(
    connection: "Connection", schema: str, selection: Selection, days: set[date], archive: Path | None
) -> dict[tuple[date, int], Path]:
    """The files whose rows are in the archive alone: those of partitions that were dropped, here. Later ones, entered
    or not, are in Postgres too."""
    rows = await connection.fetch(load_sql(__package__, "list_parts", schema))
    dropped = [row for row in rows if row["dropped"] and _touches(selection, row["day"])]
    if archive is None:
        if lost := [row for row in dropped if row["rows"]]:
            log.warning(
                "%s rows of the window, from %s on, are in the archive alone, and left out: give it (%s)",
                f"{sum(row['rows'] for row in lost):,}", lost[0]["day"], lost[0]["location"],
            )  # fmt: skip
        return {}
    files = archived_parts(archive)  # since the snapshot: with all that it shows as dropped
    if lost := [row for row in dropped if (row["day"], row["part"]) not in files]:
        first = lost[0]
        raise ConfigurationError(
            f"{archive} lacks {part_file(Path(), first['day'], first['part'])}, one of {len(lost)} files of the window "
            f"whose rows are not in Postgres any more; it was written to {first['location']}"
        )
    for row in dropped:
        file = files[row["day"], row["part"]]
        if (rows := _rows(file)) < row["rows"]:
            raise ConfigurationError(
                f"{file} has {rows} rows, and {row['rows']} were archived that are not in Postgres any more: it was"
                " replaced by an older or another one"
            )
    last = dict.fromkeys(days, 0) | {row["day"]: row["part"] for row in dropped}
    files = {(day, part): file for (day, part), file in files.items() if part <= last.get(day, part)}
    # And those that only another server has dropped, from which this one has been replicated, DROP TABLE not included.
    own = [key for key in files if _touches(selection, key[0])]
    # What these looks lock, the default partition too, is not kept while Spark reads.
    await connection.execute("SAVEPOINT looks")
    without = await _without_rows(connection, schema, sorted({day for day, _ in own} - days))
    both = [
        (day, part)
        for day, part in own
        if day not in without and await has_all(connection, files[day, part], schema, "job_history")
    ]
    await connection.execute("ROLLBACK TO SAVEPOINT looks")
    return {key: file for key, file in files.items() if key not in both}


def _slices(selection: Selection, rows: dict[date, int]) -> list[tuple[datetime, datetime]]:
    """Bounds of reads: several of a day with many rows; one of the days between, which only the default partition can
    know."""
    slices: list[tuple[datetime, datetime]] = []
    for known, following in itertools.groupby(selection.days(), key=rows.__contains__):
        days = list(following)
        for first, last in [(day, day) for day in days] if known else [(days[0], days[-1])]:
            begin = max(selection.since, datetime.combine(first, time(), UTC))
            end = min(selection.until, datetime.combine(last, time(), UTC) + timedelta(days=1))
            count = min(_MOST_SLICES, 1 + rows.get(first, 0) // _SLICE_ROWS)
            step = (end - begin) / count
            slices += itertools.pairwise([begin + n * step for n in range(count)] + [end])
    return slices


def _rows(file: Path) -> int:
    """How many rows a file has. Raises `ConfigurationError` where it is damaged: of one that is empty Spark reads none,
    and says nothing."""
    try:
        return cast(int, pq.read_metadata(file).num_rows)
    except (ValueError, OSError) as error:  # those of Arrow are either
        raise ConfigurationError(f"{file} cannot be read, put back a whole one: {error}") from error


def _states(files: list[Path]) -> dict[Path, object]:
    """By which a file that is replaced is known: Spark reads by the length that it had first, and may find no row."""
    out: dict[Path, object] = {}
    for file in files:
        with suppress(FileNotFoundError):  # Spark says that, or it is another state than before
            state = file.stat()
            out[file] = state.st_ino, state.st_size, state.st_mtime_ns
    return out


def _others(selection: Selection, days: Container[date]) -> list[date]:
    """The window's other days."""
    return [day for day in selection.days() if day not in days]


def _touches(selection: Selection, day: date) -> bool:
    return selection.since.date() <= day <= (selection.until - timedelta(microseconds=1)).date()


def _out_of_postgres(
    spark: SparkSession,
    dsn: str,
    schema: str,
    snapshot: str,
    selection: Selection,
    slices: list[tuple[datetime, datetime]],
    limits: str = "",
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
        f"SET TRANSACTION SNAPSHOT '{snapshot}'; {limits}",
    }
    predicates = [f"at >= '{a.isoformat()}' AND at < '{b.isoformat()}'{also}" for a, b in slices]
    frame = spark.read.jdbc(source.url, f"({query}) AS h", predicates=predicates, properties=properties)
    return frame.select(*COLUMNS)


def _out_of_archive(spark: SparkSession, selection: Selection, files: list[Path]) -> DataFrame:
    frame = _parquet(spark, *(str(file.resolve()) for file in files)).where(
        (f.col("finished_at") >= f.lit(selection.since)) & (f.col("finished_at") < f.lit(selection.until))
    )
    if selection.types:
        frame = frame.where(f.col("type").isin(*selection.types))
    if selection.origins:
        frame = frame.where(f.col("origin").isin(*selection.origins))
    return frame.select(
        "job_id", "attempt", "type", "origin", "group", "outcome", f.unix_micros("enqueued_at").alias("enqueued"),
        f.unix_micros(f.greatest("enqueued_at", "due_at")).alias("ready"),
        f.unix_micros("started_at").alias("started"),
        f.unix_micros("finished_at").alias("finished"),
        "error_class", f.substring("error_message", 1, _MESSAGE_CHARACTERS).alias("error_message"), "error_fingerprint",
    )  # fmt: skip


def _parquet(spark: SparkSession, *paths: str) -> DataFrame:
    """Those paths and no others: Spark takes them for patterns, as a shell does."""
    return spark.read.parquet(*(re.sub(r"[][{}*?\\]", r"\\\g<0>", path) for path in paths))


def _literal(text: str) -> str:
    """As text of SQL; Postgres takes backslashes as they are."""
    return "'" + text.replace("'", "''") + "'"

"""The archive: days of the history that are over, as Parquet.

A day takes two transactions. The first sets a trigger on the day's partition, which notes rows that come late, and by
that waits for those that are being written. The second takes a lock, looks at the notes, reads the rows, writes them to
a new file, syncs it, gives it its name, enters it in `history_archive`, removes the notes that it has seen, and
commits.
So whenever it is killed: a file under its name is whole, an entry has its file, and a row that is in neither is either
in a partition that is not entered, or noted; both keep retention from dropping it, and the next run goes on from there.
So it is where a file was damaged later: a run that finds it so takes its entry out, as long as Postgres has the rows.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
# (pyarrow has no annotations)
import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import SchemaTooOld, SidingsError
from ...schema import load_sql, valid_schema_name
from .database import connected, unlimited
from .files import archived_parts, claim_archive, part_file
from .missing import Unreadable, has_all, missing

__all__ = ["archive"]

if TYPE_CHECKING:
    from .database import Connection

_CLOSE_SECONDS = 10.0
_CALL_SECONDS = 600.0
_ROWS = 5_000  # in memory at once, as objects
_PAYLOADS = 100  # of those that have one
_FETCH_BYTES = 16 << 20  # of rows in memory at once, as far as those before tell
_GROUP = 200_000  # rows of a row group
_GROUP_BYTES = 64 << 20  # of one with large payloads

_TIME = pa.timestamp("us", tz="UTC")
_SHAPE = pa.schema(
    [
        ("job_id", pa.int64()), ("epoch", pa.int64()), ("enqueued_at", _TIME), ("due_at", _TIME), ("started_at", _TIME),
        ("finished_at", _TIME), ("executor", pa.string()), ("attempt", pa.int32()), ("outcome", pa.string()),
        ("priority", pa.int16()), ("type", pa.string()), ("origin", pa.string()), ("group", pa.string()),
        ("error_class", pa.string()), ("error_message", pa.string()), ("error_fingerprint", pa.string()),
        ("correlation_id", pa.string()), ("payload", pa.string()), ("headers", pa.string()),
    ]
)  # fmt: skip


class _Foreign(SidingsError):
    """A day's file has rows that the database has not."""


def archive(
    dsn: str, directory: Path, *, schema: str = "sidings", on_day: Callable[[str], None] = lambda _: None
) -> int:
    """Copy each day that is over, and not archived with all of its rows, to ``DIR/day=…/part-1.parquet``; returns
    how many.

    on_day: is told of each day. The role of `dsn` must own the tables, for it sets triggers. Another run at the same
    time is noticed, and left to its work.

    Raises `ConfigurationError` where the DSN is none, or the directory is another service's archive, holds other
    things, or has not what was archived there any more, as where it is not mounted; `SchemaMissing` where the schema is
    not there or from before the archive, `SchemaTooOld` where it lacks a column, `PostgresUnavailable` where nobody
    answers; `SidingsError`, when all others are archived, where a day is in use, its file is damaged or has rows that
    the database has not, or its partition was detached; asyncpg's errors, and `OSError`.
    """
    return asyncio.run(_archive(dsn, directory.resolve(), valid_schema_name(schema), on_day))


async def _archive(dsn: str, directory: Path, schema: str, on_day: Callable[[str], None]) -> int:
    connection = await connected(dsn, schema, call_seconds=_CALL_SECONDS)
    try:
        await connection.execute(unlimited(connection, "SESSION"))  # else the same large day ends each run
        # Before the mark is looked for: another run that begins the archive makes that first, and then its entries.
        entered = await connection.fetchval(
            f"SELECT EXISTS (SELECT FROM {schema}.history_archive WHERE location = $1)", str(directory)
        )
        claim_archive(directory, await connection.fetchval(f"SELECT name FROM {schema}.service"), entered=entered)
        done, busy, foreign, detached = 0, list[date](), list[SidingsError](), list[date]()
        closed = await connection.fetch(load_sql(__package__, "closed_days", schema))
        # All of them first: what ends a run must not leave a day to retention whose file is gone.
        for row in [row for row in closed if not await _archived(connection, directory, schema, row)]:
            try:
                if not row["divided"]:
                    await connection.execute(load_sql(__package__, "note_dropped", schema), row["day"])
                    await connection.execute(f"SELECT {schema}.make_history_day($1)", row["day"])
                    if not await connection.fetch(load_sql(__package__, "divided_days", schema), [row["day"]]):
                        detached.append(row["day"])
                        continue
                await connection.execute(f"SELECT {schema}.watch_history_day($1)", row["day"])
                # Whatever the default: what is counted has to have what has come since the day was read.
                async with connection.transaction(isolation="read_committed"):
                    rows = await _day(connection, directory, schema, row["day"])
            except asyncpg.UndefinedTableError:  # others were quicker, and retention has dropped it
                continue
            except asyncpg.LockNotAvailableError:
                busy.append(row["day"])
                continue
            except (_Foreign, Unreadable) as error:
                foreign.append(error)
                continue
            if rows is None:
                on_day("another run is at work: the rest is left to it")
                break
            on_day(f"archived {row['day']}: {rows:,} rows")
            done += 1
        if foreign:
            raise foreign[0]
        if detached:
            tables = ", ".join(f"{schema}.job_history_{day:%Y%m%d}" for day in detached)
            raise SidingsError(
                f"{tables}: no partition any more, somebody has detached it, and rows of its day that have come since "
                "are in the default partition, not archived: rename it (ALTER TABLE ... RENAME TO), and run this again"
            )
        if busy:
            days = ", ".join(map(str, busy[:10])) + (f" and {len(busy) - 10} more" if len(busy) > 10 else "")
            raise SidingsError(
                f"{days} is in use and not archived: a transaction has written into it and is open, or, where its rows"
                " are in the default partition, one reads that, as a backup does (pg_stat_activity); run this again"
            )
        return done
    except asyncpg.UndefinedColumnError as error:
        raise SchemaTooOld(
            f"the schema {schema!r} is older than this release of sidings ({error}): migrate it first (python -m "
            "sidings.schema), and run this again"
        ) from error
    finally:
        await connection.close(timeout=_CLOSE_SECONDS)


async def _archived(connection: "Connection", directory: Path, schema: str, row: asyncpg.Record) -> bool:
    """Whether a day is in the archive with all of its rows. Where its file is not what was entered any more, the entry
    goes: by it retention would drop them."""
    if not row["archived"]:
        return False
    if row["location"] != str(directory) or _rows(part_file(directory, row["day"], row["part"])) >= row["rows"]:
        return True
    with suppress(asyncpg.UndefinedTableError):  # retention has dropped it
        async with connection.transaction(isolation="read_committed"):
            await connection.execute(f"LOCK TABLE {schema}.job_history_{row['day']:%Y%m%d} IN ACCESS SHARE MODE")
            await connection.execute(
                f"DELETE FROM {schema}.history_archive WHERE day = $1 AND dropped_at IS NULL", row["day"]
            )
    return False


def _rows(file: Path) -> int:
    """How many rows a file has; -1: it is gone or damaged, so that no row of it can be read."""
    try:
        return pq.read_metadata(file).num_rows
    except (ValueError, OSError):  # those of Arrow are either
        return -1


async def _day(connection: "Connection", directory: Path, schema: str, day: date) -> int | None:
    """Archive one day inside a transaction; the number of its rows, or None where another run has the lock."""
    # In the transaction that enters the file: who loses the connection, and with it the lock, cannot enter it either.
    key = f"sidings.archive:{schema}"
    if not await connection.fetchval("SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))", key):
        return None
    # Which partition it is may have changed since the days were listed: others archive one, retention drops it, a late
    # row makes another, and the file of the first is all that there is of its rows.
    await connection.execute(f"LOCK TABLE {schema}.job_history_{day:%Y%m%d} IN ACCESS SHARE MODE")
    part = await _part(connection, directory, schema, day)
    # Before the rows: a note that is seen now belongs to a row that is read below.
    late = await connection.fetch(f"SELECT id FROM {schema}.history_late WHERE day = $1", day)
    file = part_file(directory, day, part)
    file.parent.mkdir(parents=True, exist_ok=True)
    # And later ones, of partitions that are this one: as after a replication, or where a person has taken an entry out.
    there = [path for (its, number), path in archived_parts(directory).items() if its == day and number >= part]
    for each in there:
        await _check_free(connection, each, schema, day)
    _tidy(file)
    draft = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    try:
        rows = await _write(connection, draft, schema, day)
        await _verify(connection, draft, rows, schema, day, [row["id"] for row in late])
        await connection.execute(load_sql(__package__, "enter_day", schema), day, part, rows, str(directory))
        await connection.execute(f"DELETE FROM {schema}.history_late WHERE id = ANY ($1)", [row["id"] for row in late])
        await connection.execute(f"DELETE FROM {schema}.history_archive WHERE day = $1 AND part > $2", day, part)
        draft.rename(file)
        for each in there:  # killed here: an analysis leaves them out while Postgres has their rows
            if each != file:
                each.unlink(missing_ok=True)
    finally:
        draft.unlink(missing_ok=True)
    _sync(file.parent)
    _sync(directory)
    return rows


async def _part(connection: "Connection", directory: Path, schema: str, day: date) -> int:
    """The number of the file of the partition that a day has now. Later files are replaced by this one.

    A partition that was dropped has none of its rows here; if all are, another server has dropped its own, from which
    this one has been replicated: the entry came along, and DROP TABLE did not. Then it is the partition of that file,
    and what came after the other one's drop is in it as well. Raises `Unreadable`."""
    following = await connection.fetchval(load_sql(__package__, "next_part", schema), day)
    for part in range(1, following):
        file = part_file(directory, day, part)
        if file.exists() and await has_all(connection, file, schema, f"job_history_{day:%Y%m%d}"):
            return part
    return following


async def _check_free(connection: "Connection", file: Path, schema: str, day: date) -> None:
    """A file that is there is ours where rows have come late, or we were killed before the commit. Another database's,
    or our own from before we were restored from a backup, entered there or not, may hold all that there is of some
    rows. Raises `_Foreign`, `Unreadable`."""
    count = sum([n async for n in missing(connection, file, schema, f"job_history_{day:%Y%m%d}")])
    if count:
        raise _Foreign(
            f"{file} has {count} rows that this database has not: another database has written it, of a service with "
            "the same name, or this one before it was restored from a backup; give it another directory"
        )


async def _write(connection: "Connection", draft: Path, schema: str, day: date) -> int:
    rows = 0
    with pq.ParquetWriter(draft, _SHAPE, compression="zstd") as writer:
        batches: list[pa.RecordBatch] = []
        size = count = 0
        async for batch in _batches(connection, schema, day):
            rows += batch.num_rows
            batches.append(batch)
            count, size = count + batch.num_rows, size + batch.nbytes
            if count >= _GROUP or size >= _GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(batches))
                batches.clear()
                size = count = 0
        if batches:
            writer.write_table(pa.Table.from_batches(batches))
    _sync(draft)
    return rows


async def _batches(connection: "Connection", schema: str, day: date) -> AsyncGenerator[pa.RecordBatch]:
    """The rows of a day. Those with a payload, which may be large, come by fewer."""
    query = load_sql(__package__, "read_day", schema).replace("{partition}", f"job_history_{day:%Y%m%d}")
    which = [
        (await connection.cursor(f"{query} WHERE payload IS {null}"), first, most)
        for null, first, most in (("NULL", _ROWS, _ROWS), ("NOT NULL", 1, _PAYLOADS))
    ]
    for cursor, fetched, most in which:
        while found := await cursor.fetch(fetched):
            columns = [
                pa.array(column, field.type) for column, field in zip(zip(*found, strict=True), _SHAPE, strict=True)
            ]
            batch = pa.record_batch(columns, schema=_SHAPE)
            fetched = max(1, min(most, fetched * 2, _FETCH_BYTES * len(found) // batch.nbytes))
            yield batch


async def _verify(connection: "Connection", draft: Path, rows: int, schema: str, day: date, late: list[int]) -> None:
    """Compare the file with what Postgres counts; rows that came since it was read are noted."""
    query = load_sql(__package__, "count_day", schema).replace("{partition}", f"job_history_{day:%Y%m%d}")
    count = await connection.fetchrow(query, day, late)
    written = pq.read_metadata(draft).num_rows
    if count is None or written != rows or not rows <= count["rows"] <= rows + count["noted"]:
        raise SidingsError(
            f"{draft} has {written} rows, {rows} were read, Postgres counts {count}: nothing was entered"
        )


def _tidy(file: Path) -> None:
    """Remove what runs that were killed have left; nobody else writes there, for we have the lock."""
    for left in file.parent.glob(f".{file.name}-*"):
        left.unlink()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

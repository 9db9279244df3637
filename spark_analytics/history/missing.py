"""Which rows of the archive's files Postgres has."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (pyarrow has no annotations)
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import SidingsError
from ...schema import load_sql

__all__ = ["Unreadable", "has_all", "missing"]

if TYPE_CHECKING:
    from .database import Connection

_CHECKED_ROWS = 100_000  # of a file, compared at once
_KEYS = {"job_id": pa.int64(), "attempt": pa.int32(), "finished_at": pa.timestamp("us", tz="UTC")}


class Unreadable(SidingsError):
    """Nobody knows which rows a file has."""


async def missing(connection: "Connection", file: Path, schema: str, table: str) -> AsyncGenerator[int]:
    """How many rows of a file the history's table, or partition, has not; by and by. Nothing for an empty file.

    Raises `Unreadable`.
    """
    query = load_sql(__package__, "missing_rows", schema).replace("{partition}", table)
    for ids, attempts, times in _keys(file):
        yield await connection.fetchval(query, ids, attempts, times, min(times), max(times))


async def has_all(connection: "Connection", file: Path, schema: str, table: str) -> bool:
    """Whether the history's table, or partition, has all rows of a file that has some. Raises `Unreadable`."""
    some = False
    async for count in missing(connection, file, schema, table):
        if count:
            return False
        some = True
    return some


def _keys(file: Path) -> Generator[list[list[Any]]]:
    try:
        for batch in pq.ParquetFile(file).iter_batches(_CHECKED_ROWS, columns=list(_KEYS)):
            columns = [batch.column(name).cast(kind) for name, kind in _KEYS.items()]
            if any(column.null_count for column in columns):
                raise pa.ArrowInvalid(f"a row lacks one of {', '.join(_KEYS)}")
            if batch.num_rows:
                yield [column.to_pylist() for column in columns]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise Unreadable(f"{file} cannot be read, so it is not replaced: move it away ({error})") from error

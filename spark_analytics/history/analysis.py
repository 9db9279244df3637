"""All answers about one window, or two, as Parquet tables."""

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame

from . import blocked as b
from .capacity import capacity, concurrency
from .compare import compare
from .failures import errors
from .selection import Selection
from .skew import by_group, heaviest, skew, slowest_groups
from .volume import bins_of, counted, durations, rates, throughput, types

__all__ = ["TABLES", "analyse"]

TABLES = (
    "types", "throughput", "rates", "durations", "concurrency", "capacity", "errors", "blocked", "blocked_by_error",
    "still_failing", "skew", "heaviest", "slowest_groups", "regressions",
)  # fmt: skip


def analyse(
    attempts: DataFrame,
    selection: Selection,
    out: Path,
    *,
    before: tuple[DataFrame, Selection] | None = None,
    instance_concurrency: int = 100,
    utilisation: float = 0.7,
    on_table: Callable[[str], None] = lambda _: None,
) -> None:
    """Write each answer as ``out/<name>.parquet``, a directory of one file that Spark, pandas and DuckDB read.

    attempts: as `reading` gives them. before: those of an earlier window, to compare with; without it there is no table
    `regressions`. instance_concurrency, utilisation: as `capacity` takes them. on_table: is told the name of each table
    when it is written.
    """
    counts, bins, groups = counted(attempts, selection), bins_of(attempts, selection), by_group(attempts)
    pieces = b.pieces(attempts)
    found = b.stops(attempts, pieces)
    kept = [frame.persist() for frame in (counts, bins, groups, pieces, found)]
    tables = {
        "types": types(counts, bins),
        "throughput": throughput(counts, selection),
        "rates": rates(counts),
        "durations": durations(bins),
        "concurrency": concurrency(attempts, selection),
        "capacity": capacity(attempts, selection, concurrency=instance_concurrency, utilisation=utilisation),
        "errors": errors(attempts),
        "blocked": b.blocked(found),
        "blocked_by_error": b.blocked_by_error(found),
        "still_failing": b.still_failing(attempts, selection),
        "skew": skew(groups),
        "heaviest": heaviest(groups),
        "slowest_groups": slowest_groups(groups),
    }
    if before is not None:
        earlier, window = before
        tables["regressions"] = compare(counted(earlier, window), bins_of(earlier, window), counts, bins)
    try:
        for name, frame in tables.items():
            frame.coalesce(1).write.parquet(str(out / f"{name}.parquet"))
            on_table(name)
    finally:
        for frame in kept:
            frame.unpersist()

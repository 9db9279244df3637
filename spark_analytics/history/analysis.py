"""All answers about one window, or two, as Parquet tables."""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from pyspark.sql import DataFrame, SparkSession

from . import blocked as b
from . import capacity as c
from .compare import compare
from .failures import errors
from .running import run_all
from .selection import Selection
from .skew import by_group, heaviest, members, skew, slowest_groups
from .volume import bins_of, by_type, counted, durations, rates, throughput, types

__all__ = ["TABLES", "analyse"]

Chapter = Generator[tuple[str, DataFrame]]

TABLES = (
    "types", "throughput", "rates", "durations", "concurrency", "capacity", "errors", "blocked", "blocked_by_error",
    "still_failing", "skew", "heaviest", "slowest_groups", "regressions",
)  # fmt: skip


# Much of the time goes into planning and compiling, on one core for each answer: with one at a time, the others idle.
_AT_ONCE = 2

# The default of a session, INT96, has no zone for other readers: `report` would find no time of its plots.
_TIMES = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")


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
    when it is written, by the thread that has written it.

    Times in the files have their zone, UTC, whatever the session of `attempts` says.
    """
    c.check_instance(instance_concurrency, utilisation)
    chapters = [
        _blocked(attempts),
        _volume(attempts, selection, before),
        _spread(attempts),
        _rest(attempts, selection, concurrency=instance_concurrency, utilisation=utilisation),
    ]

    folder = out.resolve()  # Java may have begun elsewhere, and takes a colon in a relative path for a scheme's

    def write(chapter: Chapter) -> None:
        with closing(chapter):
            for name, table in chapter:
                table.write.parquet(str(folder / f"{name}.parquet"))
                on_table(name)

    tasks = [partial(write, chapter) for chapter in chapters]
    spark = attempts.sparkSession
    with _set(spark, *_TIMES):
        run_all(spark.sparkContext, tasks, _AT_ONCE)


def _blocked(attempts: DataFrame) -> Chapter:
    with _kept(b.pieces(attempts)) as pieces, _kept(b.stops(attempts, pieces)) as found:
        yield "blocked", b.blocked(found)
        yield "blocked_by_error", b.blocked_by_error(found)


def _volume(attempts: DataFrame, selection: Selection, before: tuple[DataFrame, Selection] | None) -> Chapter:
    with (
        _kept(counted(attempts, selection)) as counts,
        _kept(bins_of(attempts, selection)) as bins,
        _kept(by_type(bins)) as all_bins,
    ):
        yield "types", types(counts, all_bins)
        yield "throughput", throughput(counts, selection)
        yield "rates", rates(counts)
        yield "durations", durations(bins)
        if before is not None:
            earlier = counted(*before), by_type(bins_of(*before))
            yield "regressions", compare(*earlier, counts, all_bins)


def _spread(attempts: DataFrame) -> Chapter:
    with _kept(by_group(attempts)) as groups:
        yield "slowest_groups", slowest_groups(groups)
        with _kept(members(groups)) as every:
            yield "skew", skew(every)
            yield "heaviest", heaviest(every)


def _rest(attempts: DataFrame, selection: Selection, *, concurrency: int, utilisation: float) -> Chapter:
    yield "errors", errors(attempts)
    yield "still_failing", b.still_failing(attempts, selection)
    yield "concurrency", c.concurrency(attempts, selection)
    yield "capacity", c.capacity(attempts, selection, concurrency=concurrency, utilisation=utilisation)


@contextmanager
def _set(spark: SparkSession, key: str, value: str) -> Generator[None]:
    before = cast(str, spark.conf.get(key))  # None only for what has no default
    spark.conf.set(key, value)
    try:
        yield
    finally:
        spark.conf.set(key, before)


@contextmanager
def _kept(frame: DataFrame) -> Generator[DataFrame]:
    frame.persist()
    try:
        yield frame
    finally:
        frame.unpersist()

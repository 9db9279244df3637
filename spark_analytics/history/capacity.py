"""How many attempts ran at once, and how many instances that takes.

Little's law (J. D. C. Little: "A proof for the queuing formula L = λW", Operations Research 9, 1961): the mean number
that run, L, is the rate λ at which attempts become ready, times their mean run time W.
"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

from ...errors import ConfigurationError
from .order import ordered
from .selection import Selection
from .volume import bucket_of

__all__ = ["TICKS", "capacity", "check_instance", "concurrency"]

TICKS = 50  # of a time bucket: all of them can be divided by it


def concurrency(attempts: DataFrame, selection: Selection) -> DataFrame:
    """type (null: all together), bucket; the mean number of attempts that ran, exactly, and the peak: the highest mean
    over a tick, a fiftieth of the bucket, or what the window has of it. Attempts that had not ended at the window's end
    are not in the history, so that the last of the longest run time is an underestimate.

    No event is sorted: the seconds run in a tick are those of the attempts that began before it and had not ended,
    a running count over ticks, plus the rest of the tick for each that starts in it, less that for each that ends.
    """
    tick = selection.step_us // TICKS
    ran = attempts.where(f.col("started").isNotNull()).select(
        "type", f.greatest("started", f.lit(selection.since_us)).alias("begin"), "finished"
    )
    ran = ran.withColumn("end", f.greatest("finished", "begin"))
    parts: list[DataFrame] = []
    for column, sign in (("begin", 1), ("end", -1)):
        at = f.floor(f.col(column) / tick).cast("bigint")
        rest = ((at + 1) * tick - f.col(column)) * sign
        # `at` twice: Spark merges equal expressions.
        parts.append(
            ran.groupBy("type", at.alias("tick")).agg(
                f.sum(f.lit(sign)).cast("bigint").alias("change"), f.sum(rest).alias("within")
            )
        )
    changes = parts[0].unionByName(parts[1])
    edges = selection.since_us // tick, (selection.until_us - 1) // tick
    ticks = attempts.sparkSession.range(edges[0], edges[1] + 1).withColumnRenamed("id", "tick")
    grid = ran.select("type").distinct().crossJoin(ticks)
    full = grid.join(changes.groupBy("type", "tick").agg(f.sum("change").alias("change"), f.sum("within").alias("within")),  # noqa: E501
                     ["type", "tick"], "left").na.fill(0, ["change", "within"])  # fmt: skip
    before = Window.partitionBy("type").orderBy("tick").rowsBetween(Window.unboundedPreceding, -1)
    # The first and the last tick are those of the window, often less than a tick.
    begin, end = f.col("tick") * tick, (f.col("tick") + 1) * tick
    long = f.least(end, f.lit(selection.until_us)) - f.greatest(begin, f.lit(selection.since_us))
    ran = f.coalesce(f.sum("change").over(before), f.lit(0)) * tick + f.col("within")
    by_type = full.select("type", "tick", long.alias("long"), ran.alias("ran"))
    together = by_type.groupBy("tick", "long").agg(f.sum("ran").alias("ran"))
    rows = by_type.unionByName(together.withColumn("type", f.lit(None).cast("string")))
    bucket = f.timestamp_micros(bucket_of(f.col("tick") * tick, selection)).alias("bucket")
    table = rows.groupBy("type", bucket).agg(
        (f.sum("ran") / f.sum("long")).alias("mean_running"), f.max(f.col("ran") / f.col("long")).alias("peak_running")
    )
    return ordered(table, "type", "bucket")


def capacity(
    attempts: DataFrame, selection: Selection, *, concurrency: int = 100, utilisation: float = 0.7
) -> DataFrame:
    """type (null: all together); attempts that became ready per second, over the window and in its busiest bucket;
    their
    mean run time; the mean number that runs by Little's law; `instances` and `busiest_instances`, those needed to
    keep up
    with either rate when each runs `concurrency` handlers at once and is to be busy for `utilisation` of that.

    Raises as `check_instance` does.
    """
    check_instance(concurrency, utilisation)
    started = attempts.where(f.col("started").isNotNull())
    ran = f.greatest(f.col("finished") - f.col("started"), f.lit(0))
    # What was ready before the window is work that the window had to do as well: it counts as ready at its beginning.
    ready = f.greatest(f.col("ready"), f.lit(selection.since_us))
    by_type = started.groupBy("type", bucket_of(ready, selection).alias("bucket")).agg(
        f.count("*").alias("n"), f.sum(ran).alias("ran")
    )
    together = by_type.groupBy("bucket").agg(f.sum("n").alias("n"), f.sum("ran").alias("ran"))
    rows = by_type.unionByName(together.withColumn("type", f.lit(None).cast("string")))
    summed = rows.groupBy("type").agg(
        (f.sum("n") / selection.seconds).alias("ready_per_second"),
        (f.max("n") / min(selection.step.total_seconds(), selection.seconds)).alias("busiest_per_second"),
        (f.sum("ran") / f.sum("n") / 1e6).alias("run_mean_seconds"),
        (f.sum("ran") / 1e6 / selection.seconds).alias("mean_running"),
    )
    room = concurrency * utilisation
    busiest = f.col("busiest_per_second") * f.col("run_mean_seconds")
    table = summed.withColumn("instances", f.ceil(f.col("mean_running") / room))
    return ordered(table.withColumn("busiest_instances", f.ceil(busiest / room)), f.desc("mean_running"), "type")


def check_instance(concurrency: int, utilisation: float) -> None:
    """Raises `ConfigurationError` for a concurrency below 1, or a utilisation that is not above 0 and at most 1."""
    if concurrency < 1:
        raise ConfigurationError(
            f"concurrency={concurrency}: give the handlers that an instance runs at once, 1 or more"
        )
    if not 0 < utilisation <= 1:
        raise ConfigurationError(f"utilisation={utilisation}: give a share above 0 and at most 1, e.g. 0.7")

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
    a running count over ticks, plus the rest of the tick for each that starts in it, less that for each that ends. Only
    ticks in which that happens have a row: with all of them, 100,000 types of a day would have 480 million.
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
    first, last = selection.since_us // tick, (selection.until_us - 1) // tick
    nothing = f.lit(0).cast("bigint")
    begins = ran.select(  # so that each has all of the window's buckets
        "type", f.lit(first).cast("bigint").alias("tick"), nothing.alias("change"), nothing.alias("within")
    ).distinct()
    sums = [f.sum(column).alias(column) for column in ("change", "within")]
    changes = parts[0].unionByName(parts[1]).where(f.col("tick") <= last)  # clocks differ
    by_type = changes.unionByName(begins).groupBy("type", "tick").agg(*sums)
    together = by_type.groupBy("tick").agg(*sums).withColumn("type", f.lit(None).cast("string"))
    order = Window.partitionBy("type").orderBy("tick")
    upto = f.sum("change").over(order.rowsBetween(Window.unboundedPreceding, 0))
    found = by_type.unionByName(together).select(
        "type", "tick", "change", "within", upto.alias("then"),
        (f.lead("tick", 1, last + 1).over(order) - 1).alias("until"),
    )  # fmt: skip
    # The first and the last tick are those of the window, often less than a tick.
    begin, end = f.col("tick") * tick, (f.col("tick") + 1) * tick
    long = f.least(end, f.lit(selection.until_us)) - f.greatest(begin, f.lit(selection.since_us))
    own = (f.col("then") - f.col("change")) * tick + f.col("within")
    here = found.select(
        "type", f.floor(f.col("tick") / TICKS).alias("bucket"), own.alias("ran"), (own / long).alias("peak")
    )
    # The ticks that follow, until the next one that has a row; whole ones where anything runs. A piece for each bucket.
    after = found.where(f.col("until") > f.col("tick")).withColumn("tick", f.col("tick") + 1)
    buckets = f.sequence(f.floor(f.col("tick") / TICKS), f.floor(f.col("until") / TICKS))
    after = after.withColumn("bucket", f.explode(buckets))
    ticks = f.least("until", f.col("bucket") * TICKS + TICKS - 1) - f.greatest("tick", f.col("bucket") * TICKS) + 1
    peak = f.col("then").cast("double").alias("peak")
    there = after.select("type", "bucket", (f.col("then") * ticks * tick).alias("ran"), peak)
    at = f.col("bucket") * selection.step_us
    seconds = f.least(at + selection.step_us, f.lit(selection.until_us)) - f.greatest(at, f.lit(selection.since_us))
    table = (
        here.unionByName(there)
        .groupBy("type", "bucket")
        .agg((f.sum("ran") / f.first(seconds)).alias("mean_running"), f.max("peak").alias("peak_running"))
        .withColumn("bucket", f.timestamp_micros(at))
    )
    return ordered(table, "type", "bucket")


def capacity(
    attempts: DataFrame, selection: Selection, *, concurrency: int = 100, utilisation: float = 0.7
) -> DataFrame:
    """type (null: all together); attempts that became ready per second, over the window and in its busiest bucket;
    their mean run time; the mean number that runs by Little's law; `instances` and `busiest_instances`, those needed to
    keep up with either rate when each runs `concurrency` handlers at once and is to be busy for `utilisation` of that.

    Raises as `check_instance` does.
    """
    check_instance(concurrency, utilisation)
    started = attempts.where(f.col("started").isNotNull())
    ran = f.greatest(f.col("finished") - f.col("started"), f.lit(0)).cast("double")  # a sum as in `skew`
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

"""How much ended, how, and how long it took: by type and time bucket."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from .durations import binned, quantiles
from .order import ordered
from .selection import Selection

__all__ = [
    "OUTCOMES",
    "bins_of",
    "bucket_of",
    "by_type",
    "counted",
    "durations",
    "rates",
    "rates_of_types",
    "throughput",
    "types",
]

OUTCOMES = ("succeeded", "retried", "snoozed", "discarded", "followed", "cancelled", "superseded", "lost", "held")
_TERMINAL = ("succeeded", "discarded", "followed", "cancelled", "superseded")
_FAILED = ("retried", "discarded", "followed", "held", "lost")


def bucket_of(micros: Column, selection: Selection) -> Column:
    """The beginning of the time bucket, in microseconds."""
    return micros - f.pmod(micros, f.lit(selection.step_us))


def _seconds_in(bucket: Column, selection: Selection) -> Column:
    """How much of a time bucket lies in the window: of the first and the last one, often less than a bucket."""
    begin = f.greatest(bucket, f.lit(selection.since_us))
    end = f.least(bucket + selection.step_us, f.lit(selection.until_us))
    return (end - begin) / 1e6


def _by_bucket(attempts: DataFrame, selection: Selection) -> DataFrame:
    """With the column `bucket`: that in which the attempt ended."""
    return attempts.withColumn("bucket", bucket_of(f.col("finished"), selection))


def counted(attempts: DataFrame, selection: Selection) -> DataFrame:
    """Attempts by type, bucket and outcome; small, and the ground of `throughput` and `rates`."""
    ran = f.greatest(f.col("finished") - f.col("started"), f.lit(0)).cast("double")  # a sum as in `skew`
    rows = _by_bucket(attempts, selection).groupBy("type", "bucket", "outcome")
    return rows.agg(f.count("*").alias("n"), f.sum(ran).alias("ran"), f.count("started").alias("started"))


def _sum_of(outcomes: tuple[str, ...]) -> Column:
    return f.coalesce(f.sum(f.when(f.col("outcome").isin(*outcomes), f.col("n"))), f.lit(0))


def throughput(counts: DataFrame, selection: Selection) -> DataFrame:
    """type, bucket; attempts and jobs that ended, jobs per second, seconds that handlers ran."""
    table = (
        counts.groupBy("type", "bucket")
        .agg(
            f.sum("n").alias("attempts"),
            _sum_of(_TERMINAL).alias("jobs"),
            (_sum_of(_TERMINAL) / _seconds_in(f.col("bucket"), selection)).alias("jobs_per_second"),
            (f.coalesce(f.sum("ran"), f.lit(0)) / 1e6).alias("run_seconds"),
        )
        .withColumn("bucket", f.timestamp_micros("bucket"))
    )
    return ordered(table, "type", "bucket")


def _shares(counts: DataFrame, *keys: str | Column) -> DataFrame:
    return counts.groupBy(*keys).agg(
        f.sum("n").alias("attempts"),
        *(_sum_of((name,)).alias(name) for name in OUTCOMES),
        *((_sum_of((name,)) / f.sum("n")).alias(f"{name}_rate") for name in ("retried", "lost", "discarded")),
        (_sum_of(_FAILED) / f.sum("n")).alias("error_rate"),
    )


def rates(counts: DataFrame) -> DataFrame:
    """type, bucket; attempts by outcome; shares of all attempts that were retried, lost, discarded, and that failed in
    any of these ways, or were followed or held."""
    return ordered(_shares(counts, "type", f.timestamp_micros("bucket").alias("bucket")), "type", "bucket")


def rates_of_types(counts: DataFrame) -> DataFrame:
    """The same over the whole window, a row for each type."""
    return _shares(counts, "type")


def durations(bins: DataFrame) -> DataFrame:
    """type, bucket; quantiles of wait, run and total time (`quantiles`)."""
    out = quantiles(bins, "type", "bucket").withColumn("bucket", f.timestamp_micros("bucket"))
    return ordered(out, "type", "bucket")


def types(counts: DataFrame, bins: DataFrame) -> DataFrame:
    """A row for each type over the whole window: the columns of `rates` and `durations`, and the mean run time.

    bins: those `by_type`.
    """
    mean = counts.groupBy("type").agg(f.try_divide(f.sum("ran") / 1e6, f.sum("started")).alias("run_mean_seconds"))
    out = (
        rates_of_types(counts).join(quantiles(bins, "type"), "type", "left").na.fill(0, ["started"]).join(mean, "type")
    )
    return ordered(out, f.desc("attempts"), "type")


def bins_of(attempts: DataFrame, selection: Selection) -> DataFrame:
    """Durations in bins by type and bucket; small, and the ground of `durations` and `by_type`."""
    return binned(_by_bucket(attempts, selection), "type", "bucket")


def by_type(bins: DataFrame) -> DataFrame:
    """The same over the whole window; the ground of `types` and `compare`."""
    return bins.groupBy("type", "measure", "bin").agg(f.sum("n").alias("n"), f.max("most").alias("most"))

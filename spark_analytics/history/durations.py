"""Quantiles of durations out of counts in logarithmic bins: one hash aggregation, no sort, and windows can be added up.

The bins are those of DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch with
relative-error guarantees", VLDB 2019), here without its collapsing: a quantile is within 1 % of the exact one, which is
the smallest duration that at least the given share of all does not exceed.
"""

import math

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

__all__ = ["MEASURES", "binned", "quantiles", "upto"]

_ERROR = 0.01
_GAMMA = (1 + _ERROR) / (1 - _ERROR)
_SHARES = (0.5, 0.9, 0.95, 0.99)

MEASURES = ("wait", "run", "total")  # of an attempt: from `ready` to `started`, from there to `finished`; of a job


def _bin(micros: Column) -> Column:
    """0 for a microsecond and less: clocks differ, and nothing takes less than no time."""
    return f.ceil(f.log(f.greatest(micros, f.lit(1))) / math.log(_GAMMA)).cast("int")


def seconds_of(number: Column) -> Column:
    """The middle of a bin, as seconds."""
    middle = f.pow(f.lit(_GAMMA), number) * (2 / (_GAMMA + 1)) / 1e6
    return f.when(number <= 0, 0.0).otherwise(middle)


def binned(attempts: DataFrame, *keys: str) -> DataFrame:
    """How many durations fell into each bin: the keys, `measure`, `bin`, `n`, `most` (microseconds). Of attempts that
    were started, `wait` and `run`; of jobs that succeeded, `total`, which their last attempt tells alone."""
    total = f.when(f.col("outcome") == "succeeded", f.col("finished") - f.col("enqueued"))
    micros = (f.col("started") - f.col("ready"), f.col("finished") - f.col("started"), total)
    named = [column.alias(measure) for measure, column in zip(MEASURES, micros, strict=True)]
    every = attempts.select(*keys, *named).unpivot(list(keys), list(MEASURES), "measure", "micros")
    rows = every.where(f.col("micros").isNotNull())
    least = f.greatest(f.col("micros"), f.lit(0))
    counts = rows.groupBy(*keys, "measure", _bin(f.col("micros")).alias("bin"))
    return counts.agg(f.count("*").alias("n"), f.max(least).alias("most"))


def upto(rank: Column) -> Column:
    """Of rows of ascending bins, with `below`, how many values they and the lower ones have: the rank's value, which is
    none above the longest that its bin has seen."""
    value = f.least(seconds_of(f.col("bin")), f.col("most") / 1e6)
    return f.min(f.when(f.col("below") >= rank - 1e-6, value))


def quantiles(bins: DataFrame, *keys: str) -> DataFrame:
    """A row for each combination of the keys, of which `bins` are: ``wait_p50_seconds`` … ``wait_max_seconds``, the
    same for ``run`` and ``total``, and `started`, how many attempts the first two stand for."""
    every = Window.partitionBy(*keys, "measure")
    ranked = bins.withColumn("below", f.sum("n").over(every.orderBy("bin"))).withColumn("all", f.sum("n").over(every))
    columns: list[Column] = []
    for measure in MEASURES:
        own = f.col("measure") == measure
        columns += [
            upto(f.when(own, f.col("all") * share)).alias(f"{measure}_p{round(share * 100)}_seconds")
            for share in _SHARES
        ]
        columns.append((f.max(f.when(own, f.col("most"))) / 1e6).alias(f"{measure}_max_seconds"))
    columns.append(f.max("all").alias("started"))
    return ranked.groupBy(*keys).agg(*columns)

"""What has become slower, or fails more often, between two windows.

Quantiles are compared through their confidence intervals by order statistics, which assume nothing about the shape of
the distribution (W. J. Conover: *Practical Nonparametric Statistics*, 3rd ed. 1999, section 3.2); shares of failed
attempts through Wilson's interval (E. B. Wilson, Journal of the American Statistical Association 22, 1927). A type is
called worse where the two 99 % intervals do not meet, both windows have at least 100 attempts of it, and the value has
grown by a fifth at least: with many attempts, differences that nobody cares for are significant too, and attempts of
one bad hour are no independent draws.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from .durations import upto
from .order import ordered
from .volume import rates_of_types

__all__ = ["LEAST", "compare"]

LEAST = 100  # attempts in each window
_RATIO = 1.2
_Z = 2.576  # 99 %
_SECONDS = 0.005  # less is no difference of durations
_SHARE = 0.005  # nor of shares
_QUANTILES = (0.5, 0.95)


def compare(before: DataFrame, before_bins: DataFrame, after: DataFrame, after_bins: DataFrame) -> DataFrame:
    """A row for each type and measure (``wait_p95``, ``error_rate`` …): the values in seconds, or shares, with their
    intervals; how many attempts they stand for; the ratio; and the `verdict`: worse, better, same, or too few.

    before, after: counts of each window (`counted`); their bins (`by_type`).
    """
    old = _values(before, before_bins, "before")
    new = _values(after, after_bins, "after")
    both = old.join(new, ["type", "measure"], "full").na.fill(0, ["before_n", "after_n"])
    least = f.when(f.col("measure") == "error_rate", _SHARE).otherwise(_SECONDS)

    def grown(low: str, high: str) -> Column:
        far = f.col(f"{high}_low") > f.col(f"{low}_high")
        much = (f.col(high) >= f.col(low) * _RATIO) & (f.col(high) - f.col(low) >= least)
        return far & much

    verdict = (
        f.when((f.col("before_n") < LEAST) | (f.col("after_n") < LEAST), "too few")
        .when(grown("before", "after"), "worse")
        .when(grown("after", "before"), "better")
        .otherwise("same")
    )
    ratio = f.try_divide("after", "before")
    order = f.array_position(f.array(*map(f.lit, ("worse", "better", "same", "too few"))), f.col("verdict"))
    table = both.select("*", ratio.alias("ratio"), verdict.alias("verdict"))
    # Of what was not there before the ratio is null, and it is the worst.
    grows = f.when((f.col("before") == 0) & (f.col("after") > 0), float("inf")).otherwise(f.col("ratio"))
    return ordered(table, order, f.desc(grows), "type", "measure")


def _values(counts: DataFrame, bins: DataFrame, name: str) -> DataFrame:
    found = _quantiles(bins).unionByName(_errors(counts))
    return found.select("type", "measure", *(f.col(c).alias(a) for c, a in (
        ("value", name), ("low", f"{name}_low"), ("high", f"{name}_high"), ("n", f"{name}_n"))))  # fmt: skip


def _quantiles(bins: DataFrame) -> DataFrame:
    every = Window.partitionBy("type", "measure")
    ranked = bins.withColumn("below", f.sum("n").over(every.orderBy("bin"))).withColumn("all", f.sum("n").over(every))
    parts: list[DataFrame] = []
    for share in _QUANTILES:
        spread = _Z * f.sqrt(f.col("all") * share * (1 - share))
        low = f.greatest(f.lit(1), f.floor(f.col("all") * share - spread))
        high = f.least(f.col("all"), f.ceil(f.col("all") * share + spread) + 1)
        part = ranked.groupBy("type", "measure").agg(
            upto(f.col("all") * share).alias("value"),
            upto(low).alias("low"),
            upto(high).alias("high"),
            f.max("all").alias("n"),
        )
        parts.append(part.withColumn("measure", f.concat(f.col("measure"), f.lit(f"_p{round(share * 100)}"))))
    return parts[0].unionByName(parts[1])


def _errors(counts: DataFrame) -> DataFrame:
    rows = rates_of_types(counts)
    n, share, z2 = f.col("attempts"), f.col("error_rate"), _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * f.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return rows.select(
        "type", f.lit("error_rate").alias("measure"), share.alias("value"), (middle - half).alias("low"),
        (middle + half).alias("high"), n.alias("n"),
    )  # fmt: skip

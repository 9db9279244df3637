"""How unevenly the work is spread over types, origins and groups, and which groups are slow."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from .order import ordered

__all__ = ["by_group", "heaviest", "members", "skew", "slowest_groups"]

_DIMENSIONS = ("type", "origin", "group")
_TOP = 20
_SLOWEST = 100
_LEAST = 3  # attempts of a group that is called slow


def by_group(attempts: DataFrame) -> DataFrame:
    """Attempts by type, origin and group, with what the answers below need of them."""
    # Of many jobs together, more microseconds than a bigint has: ten million that waited for eleven days.
    ran = f.greatest(f.col("finished") - f.col("started"), f.lit(0)).cast("double")
    waited = f.greatest(f.col("started") - f.col("ready"), f.lit(0)).cast("double")
    return attempts.groupBy("type", "origin", "group").agg(
        f.count("*").alias("attempts"),
        f.count("started").alias("started"),
        f.coalesce(f.sum(ran), f.lit(0)).alias("ran"),
        f.coalesce(f.sum(waited), f.lit(0)).alias("waited"),
        f.max(ran).alias("longest_run"),
        f.max(waited).alias("longest_wait"),
        f.sum(f.col("outcome").isin("retried", "discarded", "followed", "held", "lost").cast("int")).alias("failed"),
    )


def members(groups: DataFrame) -> DataFrame:
    """dimension, name; attempts and seconds of run time of each type, origin and group; jobs without a group are in
    none."""
    parts = [_members(groups, dimension) for dimension in _DIMENSIONS]
    return parts[0].unionByName(parts[1]).unionByName(parts[2])


def _members(groups: DataFrame, dimension: str) -> DataFrame:
    keys = ["origin", "group"] if dimension == "group" else [dimension]
    summed = groups.where(f.col(dimension).isNotNull()).groupBy(*keys)
    sums = summed.agg(f.sum("attempts").alias("attempts"), (f.sum("ran") / 1e6).alias("run_seconds"))
    return sums.select(
        f.lit(dimension).alias("dimension"), f.concat_ws(" ", *keys).alias("name"), "attempts", "run_seconds"
    )


def skew(members: DataFrame) -> DataFrame:
    """A row for each dimension: `members`, `attempts`; the largest and the median member and their ratio; `gini`, of
    attempts over members: 0 where all have the same, near 1 where one has all.

    The Gini coefficient is taken over sizes, not members: its formula by ranks i, 2 Σ i x_i / (n Σ x) - (n + 1) / n,
    needs of the members of one size only the sum of their ranks. So it costs no sort of all groups.
    """
    sizes = members.groupBy("dimension", f.col("attempts").alias("size")).agg(f.count("*").alias("n"))
    every = Window.partitionBy("dimension")
    upto = f.sum("n").over(every.orderBy("size"))
    ranked = (
        sizes.withColumn("upto", upto)
        .withColumn("members", f.sum("n").over(every))
        .withColumn("ranks", f.col("n") * (2 * f.col("upto") - f.col("n") + 1) / 2)
    )
    half = f.min(f.when(f.col("upto") * 2 >= f.col("members"), f.col("size")))
    n, total = f.max("members"), f.sum(f.col("size") * f.col("n"))
    table = ranked.groupBy("dimension").agg(
        n.alias("members"),
        total.alias("attempts"),
        f.max("size").alias("largest"),
        half.alias("median"),
        (f.max("size") / half).alias("largest_over_median"),
        (f.max("size") / total).alias("largest_share"),
        (2 * f.sum(f.col("ranks") * f.col("size")) / (n * total) - (n + 1) / n).alias("gini"),
    )
    return ordered(table, _place(), "dimension")


def heaviest(members: DataFrame) -> DataFrame:
    """dimension, name, rank; attempts and seconds of run time, with their shares: the 20 with most attempts of each."""
    rank = f.row_number().over(Window.partitionBy("dimension").orderBy(f.desc("attempts"), "name"))
    top = members.withColumn("rank", rank).where(f.col("rank") <= _TOP)
    sums = f.sum("attempts").alias("all_attempts"), f.sum("run_seconds").alias("all_seconds")
    table = top.join(f.broadcast(members.groupBy("dimension").agg(*sums)), "dimension").select(
        "dimension", "rank", "name", "attempts", (f.col("attempts") / f.col("all_attempts")).alias("share"),
        "run_seconds", f.try_divide("run_seconds", "all_seconds").alias("run_share"),
    )  # fmt: skip
    return ordered(table, _place(), "rank")


def _place() -> Column:
    return f.array_position(f.array(*map(f.lit, _DIMENSIONS)), f.col("dimension"))


def slowest_groups(groups: DataFrame) -> DataFrame:
    """origin, group; attempts, mean and longest wait and run time, failures: the 100 with the longest mean time from
    ready to finished, among those with at least 3 attempts that were started."""
    named = groups.where(f.col("group").isNotNull()).groupBy("origin", "group")
    summed = named.agg(
        f.sum("attempts").alias("attempts"),
        f.sum("failed").alias("failed"),
        f.sum("started").alias("started"),
        (f.try_divide(f.sum("waited"), f.sum("started")) / 1e6).alias("wait_mean_seconds"),
        (f.max("longest_wait") / 1e6).alias("wait_max_seconds"),
        (f.try_divide(f.sum("ran"), f.sum("started")) / 1e6).alias("run_mean_seconds"),
        (f.max("longest_run") / 1e6).alias("run_max_seconds"),
    )
    total = (f.col("wait_mean_seconds") + f.col("run_mean_seconds")).alias("mean_seconds")
    slow = summed.where(f.col("started") >= _LEAST).select("*", total).drop("started")
    return slow.orderBy(f.desc("mean_seconds"), "origin", "group").limit(_SLOWEST)

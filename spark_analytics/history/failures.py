"""Errors, clustered by their fingerprint: equal for messages that differ only in numbers, ids and quoted values."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from .order import ordered

__all__ = ["errors"]


def errors(attempts: DataFrame) -> DataFrame:
    """A row for each fingerprint: class, attempts and jobs, how the attempts ended, first and last time, types, the
    number of groups touched, and the latest one as an example."""
    failed = attempts.where(f.col("error_fingerprint").isNotNull())
    latest = f.max_by(f.struct("error_class", "error_message", "job_id"), f.struct("finished", "job_id", "attempt"))

    def ended(outcome: str) -> Column:
        return f.sum((f.col("outcome") == outcome).cast("int")).alias(outcome)

    table = (
        failed.groupBy("error_fingerprint")
        .agg(
            f.count("*").alias("attempts"),
            f.count_distinct("job_id").alias("jobs"),
            *(ended(name) for name in ("retried", "discarded", "followed", "held")),
            f.timestamp_micros(f.min("finished")).alias("first"),
            f.timestamp_micros(f.max("finished")).alias("last"),
            f.sort_array(f.collect_set("type")).alias("types"),
            f.count_distinct(f.when(f.col("group").isNotNull(), f.struct("origin", "group"))).alias("groups"),
            latest.alias("latest"),
        )
        .select("*", "latest.error_class", f.col("latest.error_message").alias("example"),
                f.col("latest.job_id").alias("example_job"))
        .drop("latest")
    )  # fmt: skip
    return ordered(table, f.desc("attempts"), "error_fingerprint")

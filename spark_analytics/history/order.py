"""Tables in order."""

from pyspark.sql import Column, DataFrame

__all__ = ["ordered"]


def ordered(table: DataFrame, *columns: str | Column) -> DataFrame:
    """Sorted, in one partition. `orderBy` would compute an answer's last step twice, to find the bounds of partitions
    that are then put together again."""
    return table.repartition(1).sortWithinPartitions(*columns)

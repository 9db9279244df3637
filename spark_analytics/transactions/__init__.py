"""Change-data rows, combined into transactions on Spark Structured Streaming.

    query = combine(session("cdc", KAFKA_CONNECTOR), Config(...))          # or, from a shell:
    python -m sidings.spark_analytics.transactions config.toml

Row changes come in any order, duplicated, spread over partitions. When all of a database transaction are there, they
become one event for each aggregate root that they touch.

Reading order: `config`; what a record means: `changes`, `header`, `debezium`, `decoding`; a transaction: `ordinals`,
`pending`, `combining`, `messages`; on Spark: `bundles`, `assembling`, `snapshots`, `processor`, `topics`, `query`,
`progress`, `__main__`. All up to `messages` is pure. docs/cdc-transactions.md is for those who run it.
"""

from .config import Config, Group, load
from .query import combine

__all__ = ["Config", "Group", "combine", "load"]

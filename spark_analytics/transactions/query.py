"""The streaming query: Kafka, decoding, the stateful operator, Kafka."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyarrow has no annotations.

from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from .bundles import Bundle, bundles
from .config import Config
from .decoding import Record, decode
from .messages import HEADERS
from .processor import OUTPUT, Combiner
from .topics import check_topics

__all__ = ["SETTINGS", "combine"]

BUNDLES = pa.schema([(name, pa.string()) for name in Bundle._fields])
BUNDLES_DDL = ", ".join(f"{name} STRING" for name in Bundle._fields)

MEGABYTE = 1 << 20  # what Kafka's producer sends by default
BUFFER = 32 << 20  # and has in memory: it refuses a message that is larger than that, too
OVERHEAD = 10_000  # that a message has beyond what `Outgoing.size` counts, at most

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": PROVIDER,
    # A micro-batch writes down what it has changed; all of the state is written in the background, now and then.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


def combine(spark: SparkSession, config: Config, *, available_now: bool = False) -> StreamingQuery:
    """Start the query. It runs until its `stop` or an error; await it with `awaitTermination`.

    available_now: take what is in the topics, then end. Timers that are due go off only in a micro-batch with data.

    Its settings are those of a session of its own, so that it does not change those of `spark`, which needs the
    connector to Kafka. What is promised: each complete transaction's events are sent at least once, with all of their
    rows, whatever dies; repeats have the same event id. Not sent, but told by an alert, are a transaction of more
    than `max_transaction_bytes`, and an event of more than `max_event_bytes`. See docs/cdc-transactions.md.

    Raises:
        ConfigurationError: As `check_topics` does.
    """
    check_topics(spark, config)
    own = spark.newSession()
    for key, value in SETTINGS.items():
        own.conf.set(key, value)
    own.conf.set("spark.sql.shuffle.partitions", str(config.state_partitions))
    if available_now:  # else Spark goes on with micro-batches without data, since timers might go off
        own.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    outgoing = (
        _read(own, config)
        .mapInArrow(_decoder(config), BUNDLES_DDL)
        .groupBy("key")
        .transformWithState(Combiner(config), OUTPUT, "Append", "ProcessingTime")
        .selectExpr("topic", "key", "value", _headers())
    )
    largest = config.max_event_bytes + OVERHEAD
    writer = (
        outgoing.writeStream.format("kafka")
        .option("kafka.max.request.size", max(MEGABYTE, largest))
        .option("kafka.buffer.memory", max(BUFFER, largest))
        .options(**config.kafka_options)
        .option("kafka.bootstrap.servers", config.kafka)
        .option("checkpointLocation", config.checkpoint)
        .outputMode("append")
        .queryName("cdc-transactions")
    )
    seconds = f"{config.trigger_seconds} seconds"
    triggered = writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime=seconds)
    return triggered.start()


def _read(spark: SparkSession, config: Config) -> DataFrame:
    return (
        spark.readStream.format("kafka")
        .options(**config.kafka_options)
        .option("kafka.bootstrap.servers", config.kafka)
        .option("subscribe", ",".join(config.read))
        .option("startingOffsets", config.start)
        .option("maxOffsetsPerTrigger", config.max_rows_per_trigger)
        .load()
        .selectExpr("topic", "partition", "offset", "unix_millis(timestamp) AS at", "value")
    )


def _decoder(config: Config) -> Any:
    def decoded(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [column.to_pylist() for column in batch.columns]
            items = (item for record in zip(*columns, strict=True) for item in decode(config, Record(*record)))
            yield _batch(list(bundles(items)))

    return decoded


def _batch(made: list[Bundle]) -> pa.RecordBatch:
    columns: list[Any] = list(zip(*made, strict=True)) if made else [[] for _ in BUNDLES.names]
    arrays = [pa.array(column, pa.string()) for column in columns]
    return cast(pa.RecordBatch, pa.RecordBatch.from_arrays(arrays, schema=BUNDLES))


def _headers() -> str:
    """The columns of headers, as Kafka's sink takes them; what a message does not have is null."""
    each = ", ".join(f"named_struct('key', '{name}', 'value', CAST(`{name}` AS BINARY))" for name in HEADERS)
    made = f"filter(array({each}), header -> header.value IS NOT NULL)"
    return f"CAST({made} AS ARRAY<STRUCT<key: STRING, value: BINARY>>) AS headers"

"""What an operator wants to know of a running query."""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from secrets import token_hex
from typing import Any, cast

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from .config import Config

__all__ = ["Progress", "not_read", "progress"]

STATE_SECONDS = 30.0  # at most, to read the state; a cluster that has no executor left would never have done it


@dataclass(frozen=True)
class Progress:
    """batch: the number of the last micro-batch, which took `seconds` for `rows` and ended `ago` seconds ago. behind:
    Kafka records that were not read by then; None: it was one that is done again after a start, for which Spark does
    not ask Kafka. open: transactions that are incomplete, the oldest of which began `oldest` seconds ago; None: the
    state could not be read now, or nothing has been written yet."""

    batch: int
    ago: float
    rows: int
    seconds: float
    behind: int | None
    open: int | None
    oldest: float | None

    def __str__(self) -> str:
        state = "state not readable now"
        if self.open is not None:
            state = f"{self.open:,} open transactions"
            state += f", the oldest since {self.oldest:,.0f} s" if self.oldest is not None else ""
        batch = f"batch {self.batch}, {self.ago:,.0f} s ago: {self.rows:,} rows in {self.seconds:.1f} s"
        behind = "how far behind is not known yet" if self.behind is None else f"{self.behind:,} behind"
        return f"{batch}, {behind}; {state}"


def progress(spark: SparkSession, query: StreamingQuery, config: Config) -> Progress | None:
    """How the query stands; None before its first micro-batch has ended. It reads the state in a job of its own, which
    takes about as long as a small micro-batch, and at most half a minute: do it every minute or so."""
    told = query.lastProgress
    if told is None:
        return None
    last = cast(dict[str, Any], json.loads(told.json))  # as a dict it has offsets as text that is no JSON
    (source,) = last["sources"]
    opened = _open(spark, config)
    seconds = last["durationMs"].get("triggerExecution", 0) / 1000
    return Progress(
        batch=last["batchId"],
        ago=max(0.0, time.time() - datetime.fromisoformat(last["timestamp"]).timestamp() - seconds),
        rows=last["numInputRows"],
        seconds=seconds,
        behind=not_read(source),
        open=opened[0] if opened else None,
        oldest=None if opened is None or opened[1] is None else max(0.0, time.time() - opened[1] / 1000),
    )


def _open(spark: SparkSession, config: Config) -> tuple[int, int | None] | None:
    """How many transactions are open, and since when the oldest, in milliseconds."""
    reader = spark.read.format("statestore").option("path", config.checkpoint).option("stateVarName", "open")
    context, tag, read = spark.sparkContext, f"progress-{token_hex(8)}", threading.Event()

    def limit() -> None:
        seconds = STATE_SECONDS
        while not read.wait(seconds):
            context.cancelJobsWithTag(tag)  # a session interrupts only what its asking thread has begun
            seconds = 1.0  # its next job, or the first, which was still being planned

    context.addJobTag(tag)
    threading.Thread(target=limit, name="progress", daemon=True).start()
    try:
        row = reader.load().selectExpr("count(*)", "min(user_map_value.since)").first()
    except (PySparkException, Py4JJavaError):  # a file of the checkpoint was replaced while it was read, or the limit
        return None
    finally:
        read.set()
        context.removeJobTag(tag)
    return None if row is None else (row[0], row[1])


def not_read(source: Mapping[str, Any]) -> int | None:
    """Records of Kafka beyond those that a micro-batch has read, in all partitions; None where Spark does not tell.
    Spark's own metrics say it of the partition that has most."""
    read = cast(Mapping[str, Mapping[str, int]], source.get("endOffset") or {})
    latest = cast(Mapping[str, Mapping[str, int]] | None, source.get("latestOffset"))
    if latest is None:
        return None
    return sum(
        offset - read.get(topic, {}).get(partition, 0)
        for topic, offsets in latest.items()
        for partition, offset in offsets.items()
    )

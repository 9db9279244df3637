"""What an operator wants to know of a running query."""

import json
import math
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

__all__ = ["Progress", "Reports", "not_read", "progress"]

STATE_SECONDS = 30.0  # at most, to read the state; a cluster that has no executor left would never have done it
SELDOM = 20.0  # of the time that a read of the state took, reports do without another


@dataclass(frozen=True)
class Progress:
    """batch: the number of the last micro-batch, which took `seconds` for `rows` and ended `ago` seconds ago. behind:
    Kafka records that were not read by then; None: it was one that is done again after a start, for which Spark does
    not ask Kafka. open: transactions that are incomplete, or complete and waiting for room in a micro-batch, the oldest
    of which began `oldest` seconds ago; None: the state could not be read, or nothing has been written yet. read_ago:
    seconds since the state was read, of which these are; 0: it was read now."""

    batch: int
    ago: float
    rows: int
    seconds: float
    behind: int | None
    open: int | None
    oldest: float | None
    read_ago: float = 0.0

    def __str__(self) -> str:
        state = "state not readable" if self.open is None else f"{self.open:,} open transactions"
        state += f", the oldest since {self.oldest:,.0f} s" if self.oldest is not None else ""
        if self.read_ago:
            state += f", as of {self.read_ago:,.0f} s ago"
        elif self.open is None:
            state += " now"
        batch = f"batch {self.batch}, {self.ago:,.0f} s ago: {self.rows:,} rows in {self.seconds:.1f} s"
        behind = "how far behind is not known yet" if self.behind is None else f"{self.behind:,} behind"
        return f"{batch}, {behind}; {state}"


def progress(spark: SparkSession, query: StreamingQuery, config: Config) -> Progress | None:
    """How the query stands; None before its first micro-batch has ended.

    It reads the state in a job of its own, which copies all of it out of the checkpoint, also what is remembered of
    finished transactions: seconds for a small one, half a minute at most. To ask again and again, use `Reports`."""
    return Reports(spark, query, config).next()


class Reports:
    """How a query stands, again and again. The state is read anew only when 20 times as long has gone by as the last
    time took; until then its numbers are those of that time."""

    def __init__(self, spark: SparkSession, query: StreamingQuery, config: Config) -> None:
        self._spark, self._query, self._config = spark, query, config
        self._opened: tuple[int, float | None] | None = None
        self._read_at = self._again_at = -math.inf

    def next(self) -> Progress | None:
        """As it is now; None before the query's first micro-batch has ended."""
        told = self._query.lastProgress
        if told is None:
            return None
        last = cast(dict[str, Any], json.loads(told.json))  # as a dict it has offsets as text that is no JSON
        (source,) = last["sources"]
        asked = time.monotonic()
        if asked >= self._again_at:
            self._read(asked)
            asked = self._read_at
        count, oldest = self._opened or (None, None)
        seconds = last["durationMs"].get("triggerExecution", 0) / 1000
        return Progress(
            batch=last["batchId"],
            ago=max(0.0, time.time() - datetime.fromisoformat(last["timestamp"]).timestamp() - seconds),
            rows=last["numInputRows"],
            seconds=seconds,
            behind=not_read(source),
            open=count,
            oldest=oldest,
            read_ago=asked - self._read_at,
        )

    def _read(self, begun: float) -> None:
        found = _open(self._spark, self._config)
        self._opened = found and (found[0], None if found[1] is None else max(0.0, time.time() - found[1] / 1000))
        self._read_at = time.monotonic()
        self._again_at = self._read_at + SELDOM * (self._read_at - begun)


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

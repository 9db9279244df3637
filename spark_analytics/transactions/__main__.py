"""``python -m sidings.spark_analytics.transactions config.toml``, or by `spark-submit`.

SIGTERM and SIGINT end it after the micro-batch that is under way; the next start goes on where it was.
"""

import argparse
import logging
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

# Absolute, since spark-submit runs this file as a script.
from sidings.errors import ConfigurationError
from sidings.spark_analytics import KAFKA_CONNECTOR, session
from sidings.spark_analytics.transactions.config import Config, load
from sidings.spark_analytics.transactions.progress import Reports, progress
from sidings.spark_analytics.transactions.query import combine

__all__ = ["main", "run"]

STOP_SECONDS = 30.0  # at most, for the micro-batch that is under way
log = logging.getLogger("sidings.cdc")


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal (0), or until the query, or Spark, fails (1); 2: the configuration, or what Spark
    needs, is wrong."""
    parser = argparse.ArgumentParser(prog="python -m sidings.spark_analytics.transactions", description=__doc__)
    parser.add_argument("config", type=Path, help="a TOML file; docs/cdc-transactions.md lists its fields")
    parser.add_argument("--check", action="store_true", help="read the file, say whether it is right, and end")
    parser.add_argument("--available-now", action="store_true", help="take what is there, then end")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("py4j").setLevel(logging.ERROR)
    try:
        config = load(chosen.config)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.check:
        print(f"{chosen.config} is right")
        return 0
    try:
        spark = session("cdc-transactions", KAFKA_CONNECTOR, {"spark.ui.showConsoleProgress": "false"})
    except ConfigurationError as error:
        log.error("%s", error)
        return 2
    stop = threading.Event()

    def asked(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):  # after the session, which has a handler of its own
        signal.signal(number, asked)
    try:
        return run(spark, config, stop, available_now=chosen.available_now)
    except ConfigurationError as error:
        log.error("%s", error)
        return 2
    except (Py4JNetworkError, ConnectionError) as error:
        log.error(
            "Spark's Java process has ended, as where its memory or the machine's was too small; what was read since"
            " the last micro-batch is read again at the next start: %s",
            error,
        )
        return 1
    finally:
        with suppress(Py4JNetworkError, ConnectionError):  # of a Java that has ended
            spark.stop()


def run(spark: SparkSession, config: Config, stop: threading.Event, *, available_now: bool) -> int:
    """Run the query until `stop` is set (0) or it fails (1), and tell in the log how it stands.

    Raises:
        ConfigurationError: As `combine` does.
    """
    try:
        query = combine(spark, config, available_now=available_now)
    except (PySparkException, Py4JJavaError) as error:
        log.error("not started: %s", error)
        return 1
    log.info("started: %s to %s", ", ".join(config.read), ", ".join(group.topic for group in config.groups))
    reports = Reports(spark, query, config)
    report_at = time.monotonic() + config.report_seconds
    while query.isActive and not stop.wait(0.5):
        if time.monotonic() >= report_at:
            log.info("%s", reports.next() or "the first micro-batch has not ended yet")
            report_at = time.monotonic() + config.report_seconds
    if query.isActive:
        _end(query)
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        log.error("failed; what was read since the last micro-batch is read again at the next start: %s", error)
        return 1
    log.info("stopped: %s", progress(spark, query, config) or "nothing was read")
    return 0


def _end(query: StreamingQuery) -> None:
    """Stop between micro-batches, if that comes soon: one that is cut off is done again, its events are repeated."""
    before, deadline = query.lastProgress, time.monotonic() + STOP_SECONDS
    log.info("stopping after the micro-batch that is under way")
    while time.monotonic() < deadline and query.isActive and query.status["isTriggerActive"]:
        last = query.lastProgress
        if last is not None and (before is None or last["batchId"] != before["batchId"]):
            break
        time.sleep(0.02)
    query.stop()


if __name__ == "__main__":
    sys.exit(main())

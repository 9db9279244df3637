"""The query as it runs in production: by the documented command, on a standalone cluster."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyspark
import pytest
from sidings.devstack import spark_jars
from sidings.devstack.fixtures import TopicFactory
from sidings.devstack.locations import free_ports
from sidings.spark_analytics import KAFKA_CONNECTOR
from sidings.spark_analytics.transactions import Config

from .cdc_support import config, following, header_rows, produce, read, rows_of, some_rows, toml
from .guide import DOCS, block
from .support import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1_800)]
WAIT_SECONDS = 600.0  # half a minute by itself; four programs of Java share the machine with others
LOCAL = "127.0.0.1"
BIN = Path(pyspark.__file__).parent / "bin"
# A few rows: to compile code for them takes longer than to do without.
QUICK = "--conf spark.sql.codegen.wholeStage=false --conf spark.sql.codegen.factoryMode=NO_CODEGEN"
ENVIRONMENT = {"SPARK_LOCAL_IP": LOCAL, "PYSPARK_PYTHON": sys.executable, "PATH": f"{BIN}:{os.environ['PATH']}"}


@contextmanager
def started(log: Path, *command: object, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of Spark's. At the end it and its children are killed, if they still run."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env=os.environ | ENVIRONMENT | environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def documented(replaced: Mapping[str, str]) -> str:
    """The command of the page, with these of its texts replaced."""
    _, *lines = block("cdc-transactions.md", "In production", "sh").splitlines()  # without the installation
    command = "\n".join(lines)
    for text, by in replaced.items():
        assert command.count(text) == 1, text
        command = command.replace(text, by)
    return command


async def send(by: Config, name: str, count: int) -> set[tuple[str, int]]:
    """So many transactions, shuffled; the rows that must come of them."""
    chance = random.Random(name)
    made = {f"{name}{number}": some_rows(chance) for number in range(count)}
    values: list[bytes | None] = [value for id, rows in made.items() for value in header_rows(id, rows)]
    chance.shuffle(values)
    await produce(by.kafka, by.topics[0], values)
    return {(id, ordinal) for id, rows in made.items() for ordinal in range(1, len(rows) + 1)}


async def test_the_documented_command_on_a_cluster_that_loses_its_executor_and_then_its_worker(
    sidings_kafka: str, topic: TopicFactory, tmp_path: Path
):
    names = {name: await topic(name, partitions=2) for name in ("cdc", "customers", "addresses", "alerts")}
    by = config(
        kafka=sidings_kafka,
        topics=(names.pop("cdc"),),
        checkpoint=str(tmp_path / "checkpoint"),
        state_partitions=2,
        trigger_seconds=1,
        max_rows_per_trigger=100,
        report_seconds=5,
        **names,
    )
    (tmp_path / "config.toml").write_text(toml(by))
    port, page, other_page = free_ports(3)
    at = ("--host", LOCAL, "--webui-port")
    deploy, log = "org.apache.spark.deploy", tmp_path / "log"
    master = ("spark-class", f"{deploy}.master.Master", *at, page, "--port", port)
    worker = ("spark-class", f"{deploy}.worker.Worker", *at, other_page, "--cores", 2, f"spark://{LOCAL}:{port}")
    command = documented(
        {
            "/opt/cdc/bin/python": sys.executable,
            "MASTER:7077": f"{LOCAL}:{port}",
            f"--packages {KAFKA_CONNECTOR}": f"--jars {','.join(map(str, spark_jars()))}",  # which are here already
            "spark-submit ": f"exec spark-submit --driver-memory 1g --executor-memory 1g {QUICK} ",
        }
    )

    def said() -> str:
        return log.read_text()

    def alive() -> None:
        for process in (first, second, driver):
            assert process.poll() is None, said()[-4000:]

    expected = await send(by, "t", 120)
    with (
        started(tmp_path / "master", *master) as first,
        started(tmp_path / "worker", *worker, SPARK_WORKER_DIR=str(tmp_path)) as second,
        started(log, "bash", "-c", command) as driver,
    ):
        await eventually(lambda: (alive(), "started: " in said())[1], lambda: said()[-4000:], WAIT_SECONDS)
        async with following(by, alive, WAIT_SECONDS) as until:
            await until(bool, "the first event")
            (executor,) = [
                child
                for child in psutil.Process(second.pid).children()
                if child.status() != psutil.STATUS_ZOMBIE  # what the worker has asked the system
                and "CoarseGrainedExecutorBackend" in " ".join(child.cmdline())
            ]
            executor.kill()
            assert not rows_of(await read(by)) >= expected, "it was killed too late to prove anything"
            found = await until(lambda found: rows_of(found) >= expected, "all transactions")
        assert rows_of(found) == expected
        assert "Lost executor" in said()

        # Without a worker nothing can be done, not even to read the state: it says so, and can be stopped.
        os.killpg(second.pid, signal.SIGKILL)
        second.wait()
        stop = re.search(r"`(kill -TERM \$\(pgrep .*?\))`", (DOCS / "cdc-transactions.md").read_text())
        assert stop is not None
        subprocess.run(["bash", "-c", stop[1].replace("<its pid>", str(driver.pid))], check=True)
        assert await asyncio.to_thread(driver.wait, WAIT_SECONDS) == 0
    assert re.search(r"stopped: batch .*state not readable now", said()), said()[-4000:]

"""What stands in the log of a query as it is started from a shell, beside its own lines."""

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sidings.devstack.fixtures import TopicFactory

from .cdc_support import WAIT_SECONDS, Row, header_row, header_rows, produce, read, rows_of, toml
from .support import eventually
from .test_cdc_combining import UPDATE
from .test_cdc_streaming import ROOT, configured


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_the_log_has_no_line_for_each_transaction_and_row(
    sidings_kafka: str, topic: TopicFactory, tmp_path: Path
):
    topics = {name: await topic(name) for name in ("cdc", "customers", "addresses", "alerts")}
    by = configured(topics, sidings_kafka, tmp_path)
    (tmp_path / "config.toml").write_text(toml(by))
    values = [value for number in range(200) for value in header_rows(f"whole{number}", [UPDATE])]
    values += [header_rows(f"open{number}", [UPDATE] * 2)[0] for number in range(50)]
    values += [header_row(Row("CustomerAddresses", "REFRESH", {"customer_id": 7, "at": at})) for at in range(50)]
    await produce(sidings_kafka, topics["cdc"], values)
    command = [sys.executable, "-m", "tests.cdc_worker", str(tmp_path / "config.toml"), "--available-now"]
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert rows_of(await read(by)) == {(f"whole{number}", 1) for number in range(200)}
    lines = done.stderr.splitlines()
    assert len(lines) < 100, "\n".join(lines[-20:])


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_the_command_says_that_sparks_java_has_ended(sidings_kafka: str, topic: TopicFactory, tmp_path: Path):
    """As when the system kills the largest process because its memory is full."""
    topics = {name: await topic(name) for name in ("cdc", "customers", "addresses", "alerts")}
    file, log = tmp_path / "config.toml", tmp_path / "log"
    file.write_text(toml(configured(topics, sidings_kafka, tmp_path)))
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "tests.cdc_worker", str(file)], cwd=ROOT, stderr=out)
    try:
        await eventually(lambda: " started: " in log.read_text(), lambda: log.read_text()[-4000:], WAIT_SECONDS)
        children = psutil.Process(process.pid).children(recursive=True)
        (java,) = [child for child in children if child.name() == "java"]
        java.kill()
        assert await asyncio.to_thread(process.wait, WAIT_SECONDS) == 1
    finally:
        process.kill()
    assert "Spark's Java process has ended" in log.read_text().splitlines()[-1]

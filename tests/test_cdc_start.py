"""The command of change-data transactions where what it needs is not there."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .cdc_support import config, toml

pytestmark = pytest.mark.timeout(900)


async def said(folder: Path, **environment: str) -> str:
    """The log of a start that is refused: Spark's lines are among it."""
    (folder / "config.toml").write_text(toml(config(checkpoint=str(folder / "checkpoint"))))
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "sidings.spark_analytics.transactions", str(folder / "config.toml")],
        env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    return done.stderr


async def test_without_java_or_with_one_that_is_too_old_it_says_what_it_needs(tmp_path: Path):
    nowhere = str(tmp_path / "nowhere")
    log = await said(tmp_path, JAVA_HOME=nowhere)
    assert "Spark does not start: " in log
    assert f"it needs Java 17 or newer, found through JAVA_HOME or the PATH (JAVA_HOME='{nowhere}'" in log
    java = tmp_path / "old" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho java.lang.UnsupportedClassVersionError: up to 55.0 >&2\nexit 1\n")
    java.chmod(0o755)
    assert "it needs Java 17 or newer" in await said(tmp_path, JAVA_HOME=str(tmp_path / "old"))


@pytest.mark.chaos
async def test_without_the_connector_it_says_how_to_name_it(tmp_path: Path):
    log = await said(tmp_path, SIDINGS_SPARK_JARS=str(tmp_path / "nothing.jar"))
    assert "Spark has no connector to Kafka: give spark-submit `--packages org.apache.spark:spark-sql-kafka" in log
    assert "SIDINGS_SPARK_JARS" in log

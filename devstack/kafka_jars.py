"""Kafka's jars: fetched once per user by their Maven coordinates, into a cache.

Ivy out of the pyspark wheel does it (`jars/ivy-*.jar`); where pyspark is not installed, Maven does. Both
resolve against the public default repository, or what the user's own Maven or Ivy settings name instead.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from .binaries import java
from .errors import DevstackError, ToolMissingError
from .locations import cache_directory

__all__ = ["KAFKA_VERSION", "kafka_jars"]

# The newest that resolves: 4.4.0 names an artifact (kafka-tools-api 4.4.0) that is not published.
KAFKA_VERSION = os.environ.get("SIDINGS_KAFKA_VERSION", "4.3.1")
# Kafka logs through slf4j and brings no backend; this one fits the log4j that it brings.
COORDINATES = (
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
)
FETCH_SECONDS = 900
JARS_EXPECTED = 46

Report = Callable[[str], None]


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def kafka_jars(report: Report = _to_stderr) -> Path:
    """The folder with Kafka's jars; fetched at the first call, which takes about half a minute.

    Safe with several processes at once: one fetches, the others wait for it. The folder appears as a whole or
    not at all.

    Raises:
        ToolMissingError: neither pyspark nor Maven is there, or no Java.
        DevstackError: the fetch failed; the text carries what the tool said.
    """
    folder = cache_directory() / f"kafka-{KAFKA_VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_suffix(folder.suffix + ".lock"), report):
        if not folder.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
            try:
                _fetch(partial, report)
                (partial / "jars").rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def _lock(path: Path, report: Report) -> Generator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Another process is fetching Kafka; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(work: Path, report: Report) -> None:
    ivy = _ivy_jar()
    if ivy is not None:
        command, tool = _ivy_command(ivy, work), "Ivy"
    elif shutil.which("mvn"):
        command, tool = _maven_command(work), "Maven"
    else:
        raise ToolMissingError(
            "Kafka's jars must be fetched once, by Ivy (pip install pyspark, which carries it) or by Maven "
            "(`apt install maven`, `brew install maven`): neither is there"
        )
    report(f"Fetching Apache Kafka {KAFKA_VERSION} with {tool}: about {JARS_EXPECTED} jars, 44 MB, once.")
    said = _run(command, work, report)
    jars = list((work / "jars").glob("*.jar"))
    if not any(jar.name.startswith("kafka_2.13-") for jar in jars):
        tail = "\n".join(f"    {line}" for line in said[-25:])
        raise DevstackError(f"fetching Kafka {KAFKA_VERSION} with {tool} failed; its last lines:\n{tail}")
    report(f"Fetched {len(jars)} jars, {sum(jar.stat().st_size for jar in jars) / 1e6:.0f} MB.")


def _run(command: list[str], work: Path, report: Report) -> list[str]:
    """Run the tool, report each tenth jar that arrives, and return its output's lines."""
    said: list[str] = []
    arrived = 0
    with subprocess.Popen(
        command,
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as tool:
        assert tool.stdout is not None
        for line in tool.stdout:
            said.append(line.rstrip())
            if ("[SUCCESSFUL ]" in line or "Downloaded from" in line) and ".jar" in line:
                arrived += 1
                if arrived % 10 == 0:
                    report(f"  {arrived} of about {JARS_EXPECTED} jars")
        if tool.wait(timeout=FETCH_SECONDS) != 0:
            shutil.rmtree(work / "jars", ignore_errors=True)  # a part of the jars would start and then break
    return said


def _ivy_jar() -> Path | None:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted((Path(found.origin).parent / "jars").glob("ivy-*.jar"))), None)


def _ivy_command(ivy: Path, work: Path) -> list[str]:
    wanted = "".join(
        f'<dependency org="{group}" name="{name}" rev="{revision}" conf="default->default"/>'
        for group, name, revision in COORDINATES
    )
    description = work / "ivy.xml"
    description.write_text(
        '<ivy-module version="2.0"><info organisation="sidings" module="devstack"/>'
        f"<dependencies>{wanted}</dependencies></ivy-module>"
    )
    pattern = f"{work}/jars/[artifact]-[revision].[ext]"
    # A cache of its own: Ivy's shared one is not safe for two processes, and keeps failures.
    cache = ["-cache", str(work / "cache")]
    return [
        java(),
        "-jar",
        str(ivy),
        *cache,
        "-ivy",
        str(description),
        "-confs",
        "default",
        "-retrieve",
        pattern,
    ]


def _maven_command(work: Path) -> list[str]:
    wanted = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{revision}</version></dependency>"
        for group, name, revision in COORDINATES
    )
    description = work / "pom.xml"
    description.write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>sidings</groupId><artifactId>devstack</artifactId>"
        f"<version>1</version><dependencies>{wanted}</dependencies></project>"
    )
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={work}/jars"]
    return ["mvn", "--batch-mode", "--file", str(description), *goal]

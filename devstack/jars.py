"""Jars: fetched once per user by their Maven coordinates, into a cache, each set into a folder of its own.

Ivy out of the pyspark wheel does it (`jars/ivy-*.jar`); where pyspark is not installed, Maven does. Both
resolve against the public default repository, or what the user's own settings name instead: Ivy's are in
`~/.ivy2/ivysettings.xml`, which it is told of, as by itself it reads none; Maven finds its own. Whichever repository it
is, jars that `jars.sha256` names must be those that have been tested; of versions that it does not know, the tool has
compared them with what the repository itself says. For new versions: `sha256sum *.jar` in the cache.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from .binaries import LOCALE, java
from .errors import DevstackError, ToolMissingError
from .locations import cache_directory

__all__ = ["KAFKA", "KAFKA_VERSION", "Report", "kafka_jars", "lock", "partial_of", "spark_jars", "to_stderr"]

# The newest that resolves: 4.4.0 names an artifact (kafka-tools-api 4.4.0) that is not published.
KAFKA_VERSION = os.environ.get("SIDINGS_KAFKA_VERSION", "4.3.1")
POSTGRES_DRIVER_VERSION = "42.7.14"
# The newest that resolves: later ones were not published everywhere, though the connector asks for its own version.
TOKEN_PROVIDER_VERSION = "4.0.0"
SILENT_SECONDS = 300  # neither Ivy nor Maven writes a line while a jar is on its way; the largest has 10 MB

Report = Callable[[str], None]


@dataclass(frozen=True)
class JarSet:
    """A set of jars that are used together.

    folder: its name in the cache; carries the version. title: for people. coordinates: (group, artifact, version).
    witness: how the name of a jar begins that must be among them. size: what to expect, for people.
    without: (group, artifact) of what they depend on but must not bring; "*" stands for all artifacts.
    """

    folder: str
    title: str
    coordinates: tuple[tuple[str, str, str], ...]
    witness: str
    size: str
    without: tuple[tuple[str, str], ...] = ()


# Kafka logs through slf4j and brings no backend; this one fits the log4j that it brings.
KAFKA = JarSet(
    f"kafka-{KAFKA_VERSION}",
    f"Apache Kafka {KAFKA_VERSION}",
    (("org.apache.kafka", "kafka_2.13", KAFKA_VERSION), ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4")),
    witness="kafka_2.13-",
    size="about 46 jars, 44 MB",
)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def kafka_jars(report: Report = to_stderr) -> Path:
    """The folder with Kafka's jars; fetched at the first call, which takes about half a minute.

    Safe with several processes at once: one fetches, the others wait for it. The folder appears as a whole or not at
    all.

    Raises:
        ToolMissingError: Neither pyspark nor Maven is there, or no Java.
        DevstackError: The fetch failed; the text carries what the tool said.
    """
    return _folder_of(KAFKA, report)


def spark_jars(report: Report = to_stderr) -> list[Path]:
    """The jars that Spark needs beside its own to read Kafka and Postgres: for the setting ``spark.jars``.

    They fit the installed pyspark. They are fetched at the first call; one process of several does so.

    Args:
        report: Gets lines for a person. Default: they go to stderr.

    Raises:
        ToolMissingError: pyspark is not installed, or no Java.
        DevstackError: The fetch failed; the text carries what the tool said.
    """
    try:
        spark = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        raise ToolMissingError("Spark is not installed; try: pip install 'sidings[spark]'") from None
    jars = JarSet(
        f"spark-{spark}-kafka-postgres-{POSTGRES_DRIVER_VERSION}",
        f"Spark {spark}'s connectors to Kafka and Postgres",
        (
            ("org.apache.spark", "spark-sql-kafka-0-10_2.13", spark),
            ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", TOKEN_PROVIDER_VERSION),
            ("org.postgresql", "postgresql", POSTGRES_DRIVER_VERSION),
        ),
        witness="spark-sql-kafka-0-10_2.13-",
        size="about 11 jars, 16 MB",
        without=(
            ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13"),
            *(("org.scala-lang", "*"), ("org.slf4j", "*"), ("org.apache.hadoop", "*")),  # in pyspark
        ),
    )
    return sorted(_folder_of(jars, report).glob("*.jar"))


def _folder_of(jars: JarSet, report: Report) -> Path:
    folder = cache_directory() / jars.folder
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder.with_suffix(folder.suffix + ".lock"), jars.title, report):
        if not folder.is_dir():
            partial = partial_of(folder)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(exist_ok=True)
            try:
                # One deeper: the tool of a fetch that was killed may be at work still, and must not meet this one's.
                work = Path(tempfile.mkdtemp(dir=partial))
                _fetch(jars, work, report)
                (work / "jars").rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def partial_of(folder: Path) -> Path:
    """Where `folder` is made, under its lock: always the same, so that the next finds what one that was killed left."""
    return folder.with_name(f"{folder.name}.partial")


@contextmanager
def lock(path: Path, what: str, report: Report) -> Generator[None]:
    """Held by one process at a time: by the one that makes what the others wait for."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"Another process is fetching {what}; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(jars: JarSet, work: Path, report: Report) -> None:
    ivy = _ivy_jar()
    if ivy is not None:
        command, tool = _ivy_command(jars, ivy, work), "Ivy"
    elif shutil.which("mvn"):
        command, tool = _maven_command(jars, work), "Maven"
    else:
        raise ToolMissingError(
            f"the jars of {jars.title} must be fetched once, by Ivy (pip install pyspark, which carries it) or by "
            "Maven (`apt install maven`, `brew install maven`): neither is there"
        )
    report(f"Fetching {jars.title} with {tool}: {jars.size}, once.")
    said = _run(command, work, report)
    found = list((work / "jars").glob("*.jar"))
    if not any(jar.name.startswith(jars.witness) for jar in found):
        tail = "\n".join(f"    {line}" for line in said[-25:])
        raise DevstackError(
            f"fetching {jars.title} with {tool} failed; its last lines:\n{tail}\n"
            'Behind a proxy set JAVA_TOOL_OPTIONS="-Dhttps.proxyHost=... -Dhttps.proxyPort=..." (Java reads no '
            f"HTTPS_PROXY); a repository of your own is named in {_ivy_settings()}; for Maven both are in its own "
            f"settings. Without a network, copy {cache_directory() / jars.folder} from a machine that has it"
        )
    if other := _not_as_tested(found):
        raise DevstackError(
            f"{tool} has fetched other jars than those that were tested, under the same names: {', '.join(other)}; "
            "nothing is kept: see which repository your settings of Ivy or Maven name"
        )
    report(f"Fetched {len(found)} jars, {sum(jar.stat().st_size for jar in found) / 1e6:.0f} MB.")


def _not_as_tested(found: list[Path]) -> list[str]:
    """The names of the jars whose content is not what `jars.sha256` says."""
    lines = files(__package__ or "").joinpath("jars.sha256").read_text(encoding="utf-8").splitlines()
    known = {name: digest for digest, name in map(str.split, lines)}
    return [jar.name for jar in sorted(found) if known.get(jar.name) not in (None, _digest(jar))]


def _digest(jar: Path) -> str:
    with jar.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _run(command: list[str], work: Path, report: Report) -> list[str]:
    """Run the tool, report each tenth jar that arrives, and return its output's lines.

    One that says nothing for long is killed: Ivy would wait without end for a connection that stalls."""
    said: list[str] = []
    arrived = 0
    silence = threading.Event()

    def give_up() -> None:
        silence.set()
        tool.kill()

    def watched() -> threading.Timer:
        timer = threading.Timer(SILENT_SECONDS, give_up)
        timer.daemon = True
        timer.start()
        return timer

    with subprocess.Popen(
        command,
        cwd=work,
        env=os.environ | {"LC_ALL": LOCALE},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as tool:
        assert tool.stdout is not None
        timer = watched()
        try:
            for line in tool.stdout:
                timer.cancel()
                timer = watched()
                said.append(line.rstrip())
                if ("[SUCCESSFUL ]" in line or "Downloaded from" in line) and ".jar" in line:
                    arrived += 1
                    if arrived % 10 == 0:
                        report(f"  {arrived} jars so far")
            failed = tool.wait() != 0
        finally:
            timer.cancel()
    if failed:
        shutil.rmtree(work / "jars", ignore_errors=True)  # a part of the jars would start and then break
    if failed and silence.is_set():
        said.append(f"(killed: it said nothing for {SILENT_SECONDS:g} seconds)")
    return said


def _ivy_jar() -> Path | None:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted((Path(found.origin).parent / "jars").glob("ivy-*.jar"))), None)


def _ivy_settings() -> Path:
    return Path.home() / ".ivy2" / "ivysettings.xml"


def _ivy_command(jars: JarSet, ivy: Path, work: Path) -> list[str]:
    wanted = "".join(
        f'<dependency org="{group}" name="{name}" rev="{revision}" conf="default->default">'
        + "".join(f'<exclude org="{org}" module="{module}"/>' for org, module in jars.without if module != name)
        + "</dependency>"
        for group, name, revision in jars.coordinates
    )
    description = work / "ivy.xml"
    description.write_text(
        '<ivy-module version="2.0"><info organisation="sidings" module="devstack"/>'
        f"<dependencies>{wanted}</dependencies></ivy-module>"
    )
    # What is relative is so to `work`, whose path may hold letters with a meaning here.
    pattern = "jars/[artifact]-[revision].[ext]"
    # A cache of its own: Ivy's shared one is not safe for two processes, and keeps failures.
    cache = ["-cache", "cache"]
    settings = ["-settings", str(_ivy_settings())] if _ivy_settings().is_file() else []
    return [
        java(),
        "-jar",
        str(ivy),
        *settings,
        *cache,
        "-ivy",
        description.name,
        "-confs",
        "default",
        "-retrieve",
        pattern,
    ]


def _maven_command(jars: JarSet, work: Path) -> list[str]:
    unwanted = "".join(
        f"<exclusion><groupId>{group}</groupId><artifactId>{name}</artifactId></exclusion>"
        for group, name in jars.without
    )
    wanted = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{revision}</version>"
        f"<exclusions>{unwanted}</exclusions></dependency>"
        for group, name, revision in jars.coordinates
    )
    description = work / "pom.xml"
    description.write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>sidings</groupId><artifactId>devstack</artifactId>"
        f"<version>1</version><dependencies>{wanted}</dependencies></project>"
    )
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={work}/jars"]
    return ["mvn", "--batch-mode", "--file", str(description), *goal]

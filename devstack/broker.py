"""One Kafka broker process: its configuration, start, and whether it answers."""

import base64
import hashlib
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .binaries import LOCALE, java
from .errors import ServerStartError
from .jars import KAFKA, kafka_jars
from .locations import LOOPBACK, cache_directory
from .process import ServerProcess, clean_environment
from .state import ServerStatus, describe
from .tls import TlsFiles

__all__ = ["CLASSES", "Broker", "BrokerPlan", "kafka_id", "prepared"]

START_SECONDS = 60
# A small heap, the cheapest collector and no optimising compiler: it starts in a second or two and leaves the cores to
# others.
JVM = ("-Xmx384m", "-Xms128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
CLASSES = "classes.jsa"
DATA = "data"
FRESH_STORAGE = "bootstrap.checkpoint"
LOG4J = """\
rootLogger.level = INFO
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %m (%c)%n
"""


@dataclass(frozen=True)
class BrokerPlan:
    """What one broker must know: itself and its cluster."""

    node: int
    cluster: str
    ports: Mapping[int, int]  # of each node: the plain listener
    controllers: Mapping[int, int]  # of each node that votes: the controller's port
    secure_port: int | None = None
    tls: TlsFiles | None = None
    jaas: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    jvm: tuple[str, ...] = ()  # options of Java beside the devstack's own

    @property
    def port(self) -> int:
        return self.ports[self.node]

    def properties(self, directory: Path) -> dict[str, str]:
        """The broker's `server.properties`, for one that works in `directory`.

        Paths are relative to it: Kafka reads the file as Latin-1, and what holds its data is a list with commas."""
        listeners = [f"PLAINTEXT://{LOOPBACK}:{self.port}"]
        if self.secure_port is not None:
            listeners.append(f"SASL_SSL://{LOOPBACK}:{self.secure_port}")
        votes = self.node in self.controllers
        controller = [f"CONTROLLER://{LOOPBACK}:{self.controllers[self.node]}"] if votes else []
        replicas = str(min(3, len(self.ports)))
        properties = {
            "process.roles": "broker,controller" if votes else "broker",
            "node.id": str(self.node),
            "controller.quorum.voters": ",".join(
                f"{node}@{LOOPBACK}:{port}" for node, port in self.controllers.items()
            ),
            "listeners": ",".join(listeners + controller),
            "advertised.listeners": ",".join(listeners),
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": DATA,
            "auto.create.topics.enable": "false",
            "offsets.topic.num.partitions": "4",
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.num.partitions": "4",
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": "1",
            # A group of consumers forms at once, and tests can choose short sessions.
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            # A killed broker is noticed in 3 seconds instead of 9.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            # Small indexes: each of the tests' many partitions would preallocate 10 MB.
            "log.index.size.max.bytes": "262144",
            "log.cleaner.dedupe.buffer.size": "4194304",
            "num.network.threads": "2",
            "num.io.threads": "4",
            "log.cleaner.threads": "1",
            "log.segment.delete.delay.ms": "1000",  # deleted topics give their files back soon
            "num.recovery.threads.per.data.dir": "1",
        }
        return properties | self._secure_properties(directory) | dict(self.settings)

    def _secure_properties(self, directory: Path) -> dict[str, str]:
        if self.tls is None:
            return {}
        return {
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": self.jaas,
            "listener.name.sasl_ssl.ssl.keystore.type": "PKCS12",
            "listener.name.sasl_ssl.ssl.keystore.location": os.path.relpath(self.tls.keystore, directory.resolve()),
            "listener.name.sasl_ssl.ssl.keystore.password": self.tls.password,
            "listener.name.sasl_ssl.ssl.key.password": self.tls.password,
        }


class Broker:
    """One broker of a `Kafka`; it can be killed, paused and restarted alone."""

    def __init__(self, directory: Path, plan: BrokerPlan) -> None:
        self.directory = directory
        self.plan = plan
        self._process = ServerProcess(f"kafka-{plan.node}", directory)
        self._since = 0  # size of the log before the start
        self._launched = False  # by this object

    @property
    def address(self) -> str:
        """`host:port` of the plain listener."""
        return f"{LOOPBACK}:{self.plan.port}"

    @property
    def log(self) -> Path:
        """The broker's log file."""
        return self._process.log

    @property
    def fresh_storage(self) -> Path:
        """What new storage begins with: which features this version of Kafka has; the same for all brokers."""
        return self.directory / DATA / FRESH_STORAGE

    @property
    def pid(self) -> int | None:
        """The JVM's pid, or None when it does not run."""
        process = self._process.find()
        return process.pid if process else None

    def launch(self) -> None:
        """Start the JVM, unless it runs, without waiting for it; `await_ready` does. The first time, the storage is
        formatted.

        Raises:
            ServerStateError: The broker is paused.
        """
        if self._process.find() is not None:
            self._process.refuse_paused()
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        data = self.directory / DATA
        config = self.directory / "server.properties"
        properties = self.plan.properties(self.directory)
        config.touch(mode=0o600)  # it names the generated passwords
        config.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        (self.directory / "log4j2.properties").write_text(LOG4J)
        if not (data / "meta.properties").exists():
            self._format(config)
        self._since = self._process.log_size()
        classes = prepared() / CLASSES
        options = (*self.plan.jvm, *([f"-XX:SharedArchiveFile={classes}"] if classes.exists() else []))
        self._process.spawn(
            self._java("kafka.Kafka", config.name, options=options),
            env=clean_environment(LC_ALL=LOCALE),
            cwd=self.directory,
            account=None,
        )
        self._launched = True

    def await_ready(self) -> None:
        """Wait until the broker answers.

        Raises:
            ServerStartError: It ended or did not answer in time; the text carries the last log lines.
        """
        self._process.await_ready(
            lambda: answers(self.plan.port), timeout=START_SECONDS, since=self._since, own=self._launched
        )

    def start(self) -> None:
        """Start the broker, unless it runs, and wait until it answers.

        Raises:
            ServerStateError: It is paused.
            ServerStartError: It ended or did not answer in time; the text carries the last log lines.
        """
        self.launch()
        self.await_ready()

    def stop(self, seconds: float = 20) -> None:
        """Shut down cleanly: leadership moves to other brokers first.

        Args:
            seconds: A broker that needs more is killed.
        """
        self._process.terminate([(signal.SIGTERM, seconds)])

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, and nothing answers."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    def restart(self) -> None:
        """`stop()`, then `start()`."""
        self.stop()
        self.start()

    def status(self) -> ServerStatus:
        """What the broker is doing now."""
        return describe(self._process, self.address if self.directory.exists() else None)

    def _java(self, main: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
        """To be run in `directory`."""
        log4j = "-Dlog4j2.configurationFile=log4j2.properties"  # a list, too
        return [java(), *JVM, *options, log4j, "-cp", f"{kafka_jars()}/*", main, *arguments]

    def _format(self, config: Path) -> None:
        fresh = prepared() / FRESH_STORAGE
        if fresh.exists():  # what Kafka's tool would write, which takes a second and a half of the processor
            data = self.fresh_storage.parent
            data.mkdir(exist_ok=True)
            shutil.copy(fresh, data)
            who = f"cluster.id={self.plan.cluster}\nnode.id={self.plan.node}\ndirectory.id={kafka_id()}\n"
            (data / "meta.properties").write_text(f"version=1\n{who}")
            return
        command = self._java("kafka.tools.StorageTool", "format", "-t", self.plan.cluster, "-c", config.name)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=clean_environment(LC_ALL=LOCALE),
            cwd=self.directory,
            check=False,
            timeout=START_SECONDS,
        )
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).splitlines()[-20:]
            raise ServerStartError("kafka storage format", f"it exited with {done.returncode}", self.log, lines)


def kafka_id() -> str:
    """A random id, as Kafka writes them; none begins with a dash."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")


def prepared() -> Path:
    """The folder of what `prepare` makes, there or not. Java's archive is good for this Java, these options, and the
    jars that it was made of: not for others of the same content that were fetched, or copied, later."""
    program, jars = Path(java()).resolve(), cache_directory() / KAFKA.folder
    fetched = int(jars.stat().st_mtime) if jars.is_dir() else None
    made_for = f"{program} {program.stat().st_mtime_ns} {JVM} {fetched}"
    return cache_directory() / f"{KAFKA.folder}-prepared-{hashlib.sha256(made_for.encode()).hexdigest()[:16]}"


def answers(port: int, *, timeout: float = 1.0) -> bool:
    """Whether a broker answers a request for its API versions; a paused one accepts, but does not answer."""
    correlation = secrets.randbits(31)
    request = struct.pack(">hhih", 18, 0, correlation, -1)  # ApiVersions v0, no client id
    try:
        with socket.create_connection((LOOPBACK, port), timeout=timeout) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            answer = connection.recv(8)
    except OSError:
        return False
    return len(answer) == 8 and struct.unpack(">ii", answer)[1] == correlation

"""A real Apache Kafka of one's own (KRaft, no ZooKeeper), on loopback ports: one broker, or several."""

import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from .broker import Broker, BrokerPlan, kafka_id
from .errors import DevstackError, ServerStartError, ServerStateError
from .locations import LOOPBACK, free_ports, is_free
from .process import ServerProcess
from .state import SavedState, ServerState, ServerStatus
from .tls import TlsFiles, make_certificates

__all__ = ["Kafka"]

PORTS = ("ports", "controllers", "secure_ports")  # as the state names them


class Kafka:
    """A Kafka cluster in a directory::

        cluster = Kafka("/tmp/cluster", brokers=3)
        cluster.start()
        cluster.broker(2).kill()  # the other two go on

    The methods block (start about 3 seconds); from async code call them through `asyncio.to_thread`. They work from any
    process: the brokers are found again through their pid files. The number of brokers, their ports and listeners are
    fixed at the first start; to find a cluster again, its directory is enough.

    Args:
        directory: The cluster's own; made when missing. Data, logs and pid files live in it.
        port: Loopback port of the first broker. Default: a free one, chosen at the first start and kept.
        brokers: How many, default 1. With three or more, three form the quorum, so that any single one may die. With
            two, only the second may: the first is the controller.
        secure: Whether to add a SASL_SSL listener (mechanism PLAIN) to every broker.
        settings: Broker settings beside or instead of the devstack's own.
    """

    def __init__(
        self,
        directory: Path | str,
        port: int | None = None,
        *,
        brokers: int | None = None,
        secure: bool | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = Path(directory).resolve()
        self._state = SavedState(self.directory / "kafka.json")
        self._port = port
        self._wanted = brokers
        self._secure = secure
        self._settings = dict(settings or {})

    # -- where it is

    @property
    def bootstrap(self) -> str:
        """``host:port,…`` of the plain listeners.

        Raises:
            ServerStateError: The cluster was never started.
        """
        return ",".join(f"{LOOPBACK}:{port}" for port in self._numbers("ports"))

    @property
    def secure_bootstrap(self) -> str:
        """``host:port,…`` of the SASL_SSL listeners; empty without `secure`.

        Raises:
            ServerStateError: The cluster was never started.
        """
        return ",".join(f"{LOOPBACK}:{port}" for port in self._numbers("secure_ports"))

    @property
    def ca_file(self) -> Path:
        """PEM file of the authority that signed the brokers' certificates."""
        return self.directory / "tls" / "ca.pem"

    @property
    def username(self) -> str:
        """The SASL user."""
        return "sidings"

    @property
    def password(self) -> str:
        """The SASL user's password, generated at the first start."""
        return self._state["password"]

    @property
    def brokers(self) -> list[Broker]:
        """All brokers; empty before the first start."""
        return [self.broker(node) for node in self._nodes()] if "cluster" in self._state else []

    def broker(self, node: int) -> Broker:
        """The broker with this number, counted from 1.

        Raises:
            DevstackError: There is none, or the cluster was never started.
        """
        if node not in self._nodes():
            raise DevstackError(f"there is no broker {node}: the cluster has {len(self._nodes())}")
        return Broker(self.directory / f"broker-{node}", self._plan(node))

    # -- what can be done to it

    def start(self) -> None:
        """Start all brokers that do not run and wait until each answers.

        Raises:
            ServerStateError: The cluster was made with other `brokers` or without `secure`, or a broker is paused.
            ServerStartError: A broker ended or did not answer in time; the text carries its last log lines.
            ToolMissingError: There is no Java, or nothing to fetch Kafka's jars with.
        """
        created = "cluster" not in self._state
        if created:
            self._invent()
        self._check_shape()
        while True:
            try:
                self._start_brokers()
                return
            except ServerStartError:
                taken = not all(is_free(port) for name in PORTS for port in self._numbers(name))
                if not (created and taken and self._port is None):
                    raise
                # Somebody has taken a port since it was chosen. Nobody knows them yet, so others do as well.
                self._state.update(**self._chosen_ports())

    def stop(self) -> None:
        """Shut all brokers down cleanly, at the same time; one that needs more than 20 seconds is killed."""
        self._each(Broker.stop)

    def kill(self) -> None:
        """SIGKILL to all brokers."""
        self._each(Broker.kill)

    def pause(self) -> None:
        """SIGSTOP to all brokers."""
        self._each(Broker.pause)

    def resume(self) -> None:
        """SIGCONT to all brokers."""
        self._each(Broker.resume)

    def restart(self) -> None:
        """`stop()`, then `start()`."""
        self.stop()
        self.start()

    def status(self) -> list[ServerStatus]:
        """What each broker is doing now."""
        absent = ServerStatus("kafka", ServerState.ABSENT, None, None, self.directory)
        return [broker.status() for broker in self.brokers] or [absent]

    def remove(self) -> None:
        """Kill the brokers and delete the directory with all data."""
        for folder in self.directory.glob("broker-*"):  # also where the state is damaged
            ServerProcess(folder.name.replace("broker", "kafka"), folder).kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    # -- how it is made

    def _start_brokers(self) -> None:
        brokers = self.brokers
        started = [broker for broker in brokers if broker.pid is None]
        running = [broker for broker in brokers if broker not in started]
        try:
            for broker in (*running, *started):  # a paused one is told before any is started
                broker.launch()
            for broker in brokers:  # also those that run: whoever started them may have been interrupted
                broker.await_ready()
        except ServerStartError:
            for broker in started:
                broker.kill()
            raise

    def _each(self, action: Callable[[Broker], None]) -> None:
        brokers = self.brokers
        if brokers:
            with ThreadPoolExecutor(len(brokers)) as pool:
                list(pool.map(action, brokers))

    def _nodes(self) -> range:
        return range(1, len(self._numbers("ports")) + 1)

    def _numbers(self, name: str) -> list[int]:
        return [int(number) for number in self._state[name].split(",") if number]

    def _invent(self) -> None:
        """Choose what stays for the cluster's life: its id, ports, password and certificates."""
        self.directory.mkdir(parents=True, exist_ok=True)
        values = {"password": secrets.token_urlsafe(18)}
        if self._secure:
            values["store_password"] = make_certificates(self.directory / "tls").password
        self._state.update(**values, **self._chosen_ports(), cluster=kafka_id())

    def _chosen_ports(self) -> dict[str, str]:
        count = self._wanted or 1
        voters = 3 if count >= 3 else 1
        free = free_ports(2 * count + voters + 1)
        if self._port is not None:
            free = [self._port, *(port for port in free if port != self._port)]
        chosen = (
            free[:count],
            free[count : count + voters],
            free[count + voters : 2 * count + voters] if self._secure else [],
        )
        return {name: ",".join(map(str, numbers)) for name, numbers in zip(PORTS, chosen, strict=True)}

    def _check_shape(self) -> None:
        count, secured = len(self._nodes()), bool(self._numbers("secure_ports"))
        if self._wanted not in (None, count) or self._secure not in (None, secured):
            what = f"{count} broker(s), {'with' if secured else 'without'} a secured listener"
            raise ServerStateError(f"{self.directory} holds a cluster of {what}; delete it to make another")

    def _plan(self, node: int) -> BrokerPlan:
        secure_ports = self._numbers("secure_ports")
        plan = BrokerPlan(
            node=node,
            cluster=self._state["cluster"],
            ports=dict(enumerate(self._numbers("ports"), 1)),
            controllers=dict(enumerate(self._numbers("controllers"), 1)),
            settings=self._settings,
        )
        if not secure_ports:
            return plan
        tls = self.directory / "tls"
        login = "org.apache.kafka.common.security.plain.PlainLoginModule"
        return replace(
            plan,
            secure_port=secure_ports[node - 1],
            tls=TlsFiles(self.ca_file, tls / "broker.p12", self._state["store_password"]),
            jaas=f'{login} required user_{self.username}="{self.password}";',
        )

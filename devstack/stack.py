"""Both servers together: what the command line, the demo and the test fixtures use."""

import os
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from .binaries import java
from .errors import ServerStateError
from .kafka import Kafka
from .locations import home, locked
from .postgres import Postgres
from .sessions import sweep
from .state import ServerStatus

__all__ = ["KAFKA_VARIABLE", "POSTGRES_VARIABLE", "Endpoints", "Stack", "ensure", "external"]

POSTGRES_VARIABLE = "SIDINGS_POSTGRES"
KAFKA_VARIABLE = "SIDINGS_KAFKA"


@dataclass(frozen=True)
class Endpoints:
    """Where a Postgres and a Kafka are.

    Attributes:
        postgres: A DSN.
        kafka: Bootstrap servers, with commas between.
    """

    postgres: str
    kafka: str


@dataclass(frozen=True)
class External:
    """Servers that the environment names, to be used instead of our own; None where it names none."""

    postgres: str | None
    kafka: str | None


def external() -> External:
    """What `SIDINGS_POSTGRES` and `SIDINGS_KAFKA` say."""
    return External(os.environ.get(POSTGRES_VARIABLE) or None, os.environ.get(KAFKA_VARIABLE) or None)


class Stack:
    """One Postgres and one Kafka, started and stopped together.

    The methods block; from async code call them through `asyncio.to_thread`.

    Args:
        directory: Where they live. Default: the devstack's home.
        brokers: How many, as in `Kafka`.
        secure: Whether to add a SASL_SSL listener, as in `Kafka`.
    """

    def __init__(
        self, directory: Path | str | None = None, *, brokers: int | None = None, secure: bool | None = None
    ) -> None:
        self.directory = Path(directory).resolve() if directory else home()
        self.postgres = Postgres(self.directory / "postgres")
        self.kafka = Kafka(self.directory / "kafka", brokers=brokers, secure=secure)

    def up(self) -> Endpoints:
        """Start what does not run and the environment does not provide, and say where both are.

        Raises:
            DevstackError: A tool is missing or a server did not start; the text says what to do.
        """
        given = self.given()
        if given.postgres and given.kafka:
            return Endpoints(given.postgres, given.kafka)
        if not given.kafka:
            java()  # without one, nothing is started
        with self._lock():
            if not given.postgres:
                self.postgres.start()
            if not given.kafka:
                self.kafka.start()
        return Endpoints(given.postgres or self.postgres.dsn, given.kafka or self.kafka.bootstrap)

    def given(self) -> External:
        """What the environment names, but for servers of this stack.

        A shell that has taken over the lines of an `up` names those, and they may have been stopped since.
        """
        given, own = external(), set[str]()
        for address in (lambda: self.postgres.dsn, lambda: self.kafka.bootstrap):
            with suppress(ServerStateError):  # it was never started
                own.add(address())
        return External(
            None if given.postgres in own else given.postgres,
            None if given.kafka in own else given.kafka,
        )

    def down(self) -> None:
        """Stop both cleanly; the data stays."""
        with self._lock():
            self.kafka.stop()
            self.postgres.stop()

    def status(self) -> list[ServerStatus]:
        """What each server is doing now."""
        return [self.postgres.status(), *self.kafka.status()]

    def remove(self) -> None:
        """Kill both and delete all their data. In the devstack's home also the servers of killed test sessions; those
        of others go on."""
        with self._lock():
            self.kafka.remove()
            self.postgres.remove()
        if self.directory == home():  # only there are any
            sweep(self.directory)

    def _lock(self) -> AbstractContextManager[object]:
        # Two `up` at the same time would both create a cluster in one directory.
        self.directory.mkdir(parents=True, exist_ok=True)
        return locked(self.directory / "lock")


def ensure(directory: Path | str | None = None) -> Endpoints:
    """A running Postgres and Kafka: those that the environment names, else the devstack's own::

        endpoints = devstack.ensure()
        service = Service("tracker", postgres=endpoints.postgres, kafka=endpoints.kafka)

    Our own are started if need be, and stay up; ``python -m sidings.devstack down`` stops them. The call blocks.

    Args:
        directory: Where our own live. Default: the devstack's home.

    Raises:
        DevstackError: A tool is missing or a server did not start; the text says what to do.
    """
    return Stack(directory).up()

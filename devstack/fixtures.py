"""pytest fixtures: real servers, a database per test, uniquely named topics.

    pytest_plugins = ["sidings.devstack.fixtures"]      # in your conftest.py; needs pytest-asyncio

| fixture | scope | gives |
|---|---|---|
| `sidings_postgres` | session | DSN of a Postgres server's administrative database |
| `sidings_kafka` | session | bootstrap servers of a Kafka |
| `database` | test | DSN of a fresh database with the Sidings schema |
| `empty_database` | test | DSN of a fresh, empty database |
| `topic` | test | `await topic("positions", partitions=12)` makes a topic and returns its unique name |
| `own_postgres` | test | `own_postgres()` starts a `Postgres` for this test alone, to be killed at will |
| `own_kafka` | test | `own_kafka(brokers=3)` starts a `Kafka` for this test alone |

Servers start when the first test asks for them and are removed with the session; where `SIDINGS_POSTGRES` or
`SIDINGS_KAFKA` is set, that one is used and left running. Their data are in memory where there is room
(`sidings_server_directory`). The service that owns the schema is named `test`; override the fixture
`sidings_service` for another name, in each folder that tests another service.
"""

import re
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import psutil
import pytest
import pytest_asyncio

from .databases import create_database, drop_database, ensure_template
from .kafka import Kafka
from .postgres import Postgres
from .sessions import session_directory
from .stack import external
from .topics import create_topic, delete_topics

__all__ = [
    "OwnKafka",
    "OwnPostgres",
    "ServerDirectory",
    "TopicFactory",
    "database",
    "empty_database",
    "own_kafka",
    "own_postgres",
    "sidings_devstack_directory",
    "sidings_kafka",
    "sidings_postgres",
    "sidings_server_directory",
    "sidings_service",
    "sidings_template",
    "topic",
]


MEMORY = Path("/dev/shm")
ROOM = 4 << 30  # bytes; the servers of a session need a few hundred MB at most


class ServerDirectory(Protocol):
    """`sidings_server_directory("postgres")` names a directory for a server, made when need be."""

    def __call__(self, name: str) -> Path: ...


class TopicFactory(Protocol):
    """`await topic(name, partitions=…, config=…)` makes a topic; its unique name is returned."""

    def __call__(
        self,
        name: str = "topic",
        *,
        partitions: int = 1,
        replicas: int = 1,
        config: Mapping[str, str] | None = None,
    ) -> Coroutine[None, None, str]: ...


class OwnPostgres(Protocol):
    """`own_postgres(settings)` starts a server; settings as in `Postgres`."""

    def __call__(self, settings: Mapping[str, str] | None = None) -> Postgres: ...


class OwnKafka(Protocol):
    """`own_kafka(brokers=…, secure=…, settings=…)` starts a cluster; arguments as in `Kafka`."""

    def __call__(
        self, *, brokers: int = 1, secure: bool = False, settings: Mapping[str, str] | None = None
    ) -> Kafka: ...


@pytest.fixture(scope="session")
def sidings_devstack_directory() -> Iterator[Path]:
    """Where this session's servers live, or links to where they live; deleted at its end."""
    with session_directory() as directory:
        yield directory


@pytest.fixture(scope="session")
def sidings_server_directory(sidings_devstack_directory: Path) -> ServerDirectory:
    """A factory of directories for servers: in memory where there is room. The servers' `remove()` deletes them.

    A database is some 400 files. In memory it is made and dropped in 80 ms; on a disk in twice that, and in up to ten
    times that where the file system is an ext4 without a journal, as in small virtual machines: to make a file, it
    passes by all that were deleted in the last minutes. What survives a SIGKILL, survives it in memory too.
    """

    def make(name: str) -> Path:
        directory = sidings_devstack_directory / f"{name}-{secrets.token_hex(4)}"
        if MEMORY.is_dir() and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) >= ROOM:
            place = MEMORY / f"sidings-{secrets.token_hex(8)}"
            directory.symlink_to(place)  # first: if this session is killed, the next one finds here what it has left
            place.mkdir()
            place.chmod(0o755)  # Postgres may run as another user
        return directory

    return make


@pytest.fixture(scope="session")
def sidings_service() -> str:
    """Name of the service that owns the schema of `database`."""
    return "test"


@pytest.fixture(scope="session")
def sidings_postgres(request: pytest.FixtureRequest) -> Iterator[str]:
    """DSN of the server's administrative database."""
    given = external().postgres
    if given:
        yield given
        return
    directory: ServerDirectory = request.getfixturevalue("sidings_server_directory")
    server = Postgres(directory("postgres"))
    try:
        server.start()
        yield server.dsn
    finally:
        server.remove()


@pytest.fixture(scope="session")
def sidings_kafka(request: pytest.FixtureRequest) -> Iterator[str]:
    """Bootstrap servers."""
    given = external().kafka
    if given:
        yield given
        return
    directory: ServerDirectory = request.getfixturevalue("sidings_server_directory")
    cluster = Kafka(directory("kafka"))
    try:
        cluster.start()
        yield cluster.bootstrap
    finally:
        cluster.remove()


@pytest.fixture(scope="session")
def sidings_template(sidings_postgres: str, sidings_service: str) -> Callable[..., Coroutine[None, None, str]]:
    """``await sidings_template(service)`` names a database that has the schema of this service; made once a session.

    service: Default: `sidings_service`, as the first test of the session has it that asks for this fixture.
    """
    made: dict[str, str] = {}

    async def template(service: str = sidings_service) -> str:
        if service not in made:
            made[service] = await ensure_template(sidings_postgres, service=service)
        return made[service]

    return template


@pytest_asyncio.fixture
async def database(
    request: pytest.FixtureRequest,
    sidings_postgres: str,
    sidings_service: str,
    sidings_template: Callable[[str], Coroutine[None, None, str]],
) -> AsyncIterator[str]:
    """DSN of a fresh database with the Sidings schema; dropped afterwards, whoever is connected."""
    template = await sidings_template(sidings_service)  # by name: another folder's tests may be of another service
    dsn = await create_database(sidings_postgres, _named_after(request), template=template)
    try:
        yield dsn
    finally:
        await drop_database(sidings_postgres, dsn)


@pytest_asyncio.fixture
async def empty_database(request: pytest.FixtureRequest, sidings_postgres: str) -> AsyncIterator[str]:
    """DSN of a fresh, empty database; dropped afterwards, whoever is connected."""
    dsn = await create_database(sidings_postgres, _named_after(request))
    try:
        yield dsn
    finally:
        await drop_database(sidings_postgres, dsn)


@pytest_asyncio.fixture
async def topic(sidings_kafka: str) -> AsyncIterator[TopicFactory]:
    """A factory of topics: ``await topic("positions", partitions=12)`` makes one and gives its unique name.

    They are deleted afterwards.
    """
    made: list[str] = []

    async def make(
        name: str = "topic",
        *,
        partitions: int = 1,
        replicas: int = 1,
        config: Mapping[str, str] | None = None,
    ) -> str:
        unique = f"{name}-{secrets.token_hex(4)}"
        made.append(unique)
        await create_topic(sidings_kafka, unique, partitions=partitions, replicas=replicas, config=config)
        return unique

    try:
        yield make
    finally:
        await delete_topics(sidings_kafka, made)


@pytest.fixture
def own_postgres(sidings_server_directory: ServerDirectory) -> Iterator[OwnPostgres]:
    """A factory of servers that belong to this test: ``own_postgres()`` starts a `Postgres`.

    They are removed afterwards.
    """
    made: list[Postgres] = []

    def make(settings: Mapping[str, str] | None = None) -> Postgres:
        made.append(Postgres(sidings_server_directory("own-postgres"), settings=settings))
        made[-1].start()
        return made[-1]

    try:
        yield make
    finally:
        for server in made:
            server.remove()


@pytest.fixture
def own_kafka(sidings_server_directory: ServerDirectory) -> Iterator[OwnKafka]:
    """A factory of clusters that belong to this test: ``own_kafka(brokers=3)`` starts a `Kafka`.

    They are removed afterwards.
    """
    made: list[Kafka] = []

    def make(*, brokers: int = 1, secure: bool = False, settings: Mapping[str, str] | None = None) -> Kafka:
        made.append(Kafka(sidings_server_directory("own-kafka"), brokers=brokers, secure=secure, settings=settings))
        made[-1].start()
        return made[-1]

    try:
        yield make
    finally:
        for cluster in made:
            cluster.remove()


def _named_after(request: pytest.FixtureRequest) -> str:
    """A database name that says in the server's log which test it belongs to."""
    node: str = request.node.name
    return f"{re.sub(r'[^a-z0-9]+', '_', node.lower())[:40].strip('_')}_{secrets.token_hex(4)}"

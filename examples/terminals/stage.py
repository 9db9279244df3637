"""A Postgres that the story may kill, a Kafka, the topics, and the service that owns the table."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import asyncpg
from prometheus_client import CollectorRegistry
from sidings import Service
from sidings.devstack import Kafka, Postgres
from sidings.devstack.sessions import session_directory
from sidings.devstack.stack import external
from sidings.devstack.topics import create_topic, delete_topics

from .routing import Topics

__all__ = ["Servers", "reference_data", "servers", "topics"]

TABLES = Path(__file__).with_name("tables.sql")


class Servers(NamedTuple):
    """postgres: the story's own. kafka: bootstrap servers."""

    postgres: Postgres
    kafka: str


@contextmanager
def servers() -> Generator[Servers]:
    """Both, gone at the end. SIDINGS_KAFKA names a Kafka to use instead."""
    given = external().kafka
    with session_directory() as directory:
        postgres, kafka = Postgres(directory / "postgres"), Kafka(directory / "kafka")
        try:
            postgres.start()
            if not given:
                kafka.start()
            yield Servers(postgres, given or kafka.bootstrap)
        finally:
            postgres.remove()
            if not given:
                kafka.remove()


@asynccontextmanager
async def topics(kafka: str) -> AsyncGenerator[Topics]:
    """The topics, with names of their own."""
    mark = secrets.token_hex(4)
    names = Topics(*(f"{name}-{mark}" for name in ("terminal-acquirer", "payments", "authorizations", "payments.dlq")))
    try:
        await create_topic(kafka, names.directory, partitions=3, config={"cleanup.policy": "compact"})
        await asyncio.gather(*(create_topic(kafka, name, partitions=3) for name in names[1:]))
        yield names
    finally:
        await delete_topics(kafka, list(names))


@asynccontextmanager
async def reference_data(servers: Servers, directory: str) -> AsyncGenerator[None]:
    """The service that owns the table: here it does nothing but relay what is edited."""
    service = Service("reference", postgres=servers.postgres.dsn, kafka=servers.kafka, prometheus=CollectorRegistry())
    await service.migrate()
    connection = await asyncpg.connect(servers.postgres.dsn)
    await connection.execute(TABLES.read_text())
    await connection.fetchval(
        "SELECT sidings.directory_table("
        "'terminal_acquirer', topic => $1, key => '{terminal_id}', active => 'is_active')",
        directory,
    )
    await connection.close()
    async with service:
        yield

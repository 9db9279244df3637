"""Servers, a fresh database and a new topic for each of the two runs; all of it is gone at the end."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import asyncpg
from sidings.devstack import Endpoints, Stack, ensure
from sidings.devstack.databases import create_database, drop_database
from sidings.devstack.sessions import session_directory
from sidings.devstack.topics import create_topic, delete_topics
from sidings.schema import migrate

from .routes import routes
from .settings import PARTITIONS, Address

__all__ = ["servers", "stage"]

TABLES = Path(__file__).with_name("tables.sql")


@contextmanager
def servers() -> Generator[Endpoints]:
    """A Postgres and a Kafka of the demo's own, or those that SIDINGS_POSTGRES and SIDINGS_KAFKA name."""
    with session_directory() as directory:
        try:
            yield ensure(directory)
        finally:
            Stack(directory).remove()  # what the environment named does not stand in that directory


@asynccontextmanager
async def stage(endpoints: Endpoints, service: str, transports: int) -> AsyncGenerator[Address]:
    """A database with the schema of `service` and its transports, and a topic of twelve partitions."""
    mark = secrets.token_hex(4)
    topic = f"positions-{mark}"
    dsn = await create_database(endpoints.postgres, f"{service.replace('-', '_')}_{mark}")
    try:
        await asyncio.gather(
            _prepare(dsn, service, transports), create_topic(endpoints.kafka, topic, partitions=PARTITIONS)
        )
        yield Address(dsn, endpoints.kafka, topic)
    finally:
        await delete_topics(endpoints.kafka, [topic])
        await drop_database(endpoints.postgres, dsn)


async def _prepare(dsn: str, service: str, transports: int) -> None:
    await migrate(dsn, service=service)
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(TABLES.read_text())
        await connection.copy_records_to_table(
            "transport",
            records=[(route.transport_id, *route.destination) for route in routes(transports)],
            columns=["id", "destination_latitude", "destination_longitude"],
        )
    finally:
        await connection.close()

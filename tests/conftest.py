"""Fixtures for all tests: real servers, as a user of Sidings would get them."""

import signal
from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from sidings import Admin

from .consumer_support import effects_table
from .support import connected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell has started with `&`: it would be inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("sidings", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sidings")

pytest_plugins = ["sidings.devstack.fixtures"]


@pytest.fixture
async def effects(database: str) -> str:
    """DSN of a database with the table that the handlers of messages write to."""
    await effects_table(database)
    return database


@pytest.fixture
async def admin(database: str) -> AsyncIterator[Admin]:
    """Alice, who may do everything in the database."""
    async with connected(database) as connection:
        yield Admin(connection, actor="alice")


@pytest.fixture(scope="session")
def spark() -> "Generator[SparkSession]":
    """A Spark on two threads, started by the first test of this process that asks for it."""
    from .spark_support import start_spark  # it imports Spark, which takes a second

    session = start_spark()
    yield session
    session.stop()

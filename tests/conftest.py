"""Fixtures for all tests: real servers, as a user of Sidings would get them."""

import pytest

from .consumer_support import effects_table

pytest_plugins = ["sidings.devstack.fixtures"]


@pytest.fixture
async def effects(database: str) -> str:
    """DSN of a database with the table that the handlers of messages write to."""
    await effects_table(database)
    return database

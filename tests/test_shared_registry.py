"""The schema of a registry: its own, that of a service that includes it, or of two that do."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sidings import (
    ConfigurationError,
    Job,
    PostgresSettings,
    Registry,
    SchemaMissing,
    Service,
    StaticAssignment,
    migrate,
)

from .support import ORIGIN, Ride, connected, value


def a_service(name: str, dsn: str, schema: str, origin: str) -> Service:
    postgres = PostgresSettings(dsn=dsn, schema_name=schema)
    return Service(name, postgres=postgres, assignment=StaticAssignment([origin]), prometheus=CollectorRegistry())


async def a_job(job: Job[Ride]) -> None: ...


async def test_a_registry_that_no_service_includes_stores_into_the_schema_that_it_was_given(database: str) -> None:
    """Of the service `billing`, a script's jobs went into that of another service of the database."""
    await migrate(database, service="billing", schema="billing")
    ride = Registry(schema="billing").job()(a_job)
    async with connected(database) as connection, connection.transaction():
        id = await ride.enqueue(connection, Ride(), origin=ORIGIN)
        assert await connection.fetchval("SELECT id FROM billing.job") == id
    assert await value(database, "SELECT count(*) FROM sidings.job") == 0


async def test_without_the_schema_it_is_told_how_a_registry_is_given_one(empty_database: str) -> None:
    await migrate(empty_database, service="billing", schema="billing")
    ride = Registry().job()(a_job)
    async with connected(empty_database) as connection:
        with pytest.raises(SchemaMissing, match=r"no schema 'sidings'.*or Registry\(schema=\.\.\.\) where no service"):
            async with connection.transaction():
                await ride.enqueue(connection, Ride(), origin=ORIGIN)


def test_a_registry_that_was_given_a_schema_is_included_by_none_with_another(database: str) -> None:
    """However deep: the script that enqueues with it would go on storing where that service has nothing."""
    given, between, later = Registry(schema="billing"), Registry(), Registry()
    between.include(given)
    assert (given.schema, between.schema) == ("billing", "sidings")  # that one may still become the service's
    tracker = a_service("test", database, "sidings", ORIGIN)
    for registry in (given, between):
        with pytest.raises(ConfigurationError, match=r"made with schema='billing', .* stores jobs in 'sidings': give"):
            tracker.include(registry)
    tracker.include(later)
    with pytest.raises(ConfigurationError, match="made with schema='billing'"):
        later.include(given)
    assert (given.schema, between.schema, later.schema) == ("billing", "sidings", "sidings")
    ride = given.job()(a_job)
    assert list(tracker.registry) == []
    billing = a_service("billing", database, "billing", ORIGIN)
    billing.include(between)
    assert list(billing.registry) == [ride]
    assert (given.schema, between.schema) == ("billing", "billing")


@pytest.mark.parametrize("schema", ["", "Billing", "pg_jobs", 5])
def test_a_schema_that_cannot_be_one_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"schema={schema!r} is not usable: give"):
        Registry(schema=schema)


async def test_a_service_does_not_store_its_jobs_for_another_one_that_includes_the_same_registry(database: str) -> None:
    """They went where the service that had included it last keeps its own, in origins that nobody holds there."""
    await migrate(database, service="billing", schema="billing")
    shared = Registry()

    @shared.job()
    async def mail(job: Job[Ride]) -> None: ...

    tracker = a_service("test", database, "sidings", "positions/0")
    tracker.include(shared)
    billing = a_service("billing", database, "billing", "invoices/0")
    billing.include(shared)
    with pytest.raises(ConfigurationError, match=r"'mail' would be stored in the schema 'billing'"):
        async with tracker:
            pass
    async with billing, billing.transaction() as tx:
        await mail.enqueue(tx, Ride(), origin="invoices/0")
        assert await tx.fetchval("SELECT count(*) FROM billing.job") == 1

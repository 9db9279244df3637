"""A registry that two services of one process include: each needs its jobs in its own schema."""

import pytest
from prometheus_client import CollectorRegistry
from sidings import ConfigurationError, Job, PostgresSettings, Registry, Service, StaticAssignment, migrate

from .support import Ride


def a_service(name: str, dsn: str, schema: str, origin: str) -> Service:
    postgres = PostgresSettings(dsn=dsn, schema_name=schema)
    return Service(name, postgres=postgres, assignment=StaticAssignment([origin]), prometheus=CollectorRegistry())


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

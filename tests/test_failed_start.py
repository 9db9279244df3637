"""A service whose start fails leaves nothing behind for the one that is made in its place."""

import asyncio
import socket
from collections import Counter
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sidings import ConfigurationError, Service, StaticAssignment
from sidings.jobs import Job, Registry

from .support import ORIGIN, SECONDS, Ride

HERE = StaticAssignment([ORIGIN])


def twice(registry: CollectorRegistry) -> list[object]:
    """Samples that a scrape has more than once: Prometheus takes one of them, and it may be that of the dead."""
    samples = Counter((s.name, *sorted(s.labels.items())) for metric in registry.collect() for s in metric.samples)
    return [sample for sample, count in samples.items() if count > 1]


@pytest.mark.parametrize("options", [{"assignment": HERE}, {"kafka": "127.0.0.1:1", "topics": ["t"]}])
async def test_a_start_that_fails_takes_its_metrics_back(database: str, options: dict[str, Any]) -> None:
    """The address is still the former instance's, say, and the program tries again with another service."""
    registry = CollectorRegistry()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(3):
            http = f"127.0.0.1:{taken.getsockname()[1]}"
            service = Service("test", postgres=database, http=http, prometheus=registry, **options)
            with pytest.raises(ConfigurationError, match="cannot listen there"):
                async with asyncio.timeout(SECONDS):
                    await service.run()
    assert list(registry.collect()) == []
    async with Service("test", postgres=database, assignment=HERE, prometheus=registry):
        assert twice(registry) == []


async def test_so_does_one_that_is_refused_for_what_it_declares(database: str) -> None:
    """Nothing has been connected by then; the metrics were there since the service was made."""
    registry, shared, other = CollectorRegistry(), Registry(), Registry(schema="other")

    @shared.job()
    async def ride(job: Job[Ride]) -> None: ...

    service = Service("test", postgres=database, assignment=HERE, prometheus=registry)
    service.include(shared)
    other.include(shared)
    for reason in ("give each a registry of its own", "make another one"):
        with pytest.raises(ConfigurationError, match=reason):
            await service.run()
        assert list(registry.collect()) == []
    async with Service("test", postgres=database, assignment=HERE, prometheus=registry):
        assert twice(registry) == []

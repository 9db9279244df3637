"""The tenants example over a crash of its Postgres: what was stored and not acknowledged before."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidings.devstack.fixtures import ServerDirectory
from sidings.devstack.postgres import Postgres

from examples.tenants.client import TenantsClient

from .support import value
from .tenants_support import ANN, Stage, staged


@pytest.fixture
def mortal(sidings_server_directory: ServerDirectory) -> Iterator[Postgres]:
    server = Postgres(sidings_server_directory("mortal-tenants"))
    server.start()
    try:
        yield server
    finally:
        server.remove()


@pytest.fixture
def stage(mortal: Postgres, sidings_kafka: str, tmp_path: Path) -> Iterator[Stage]:
    with staged(mortal.dsn, sidings_kafka, tmp_path) as stage:
        yield stage


@pytest.mark.long
async def test_a_tenant_that_was_made_before_a_crash_of_postgres_can_be_changed_after_it(
    mortal: Postgres, stage: Stage
) -> None:
    """The receipt of its event is from before the crash, so `published` could tell nobody what has become of it: each
    request about this tenant was answered with 503, for ever, and so was each attempt to forget the receipt."""
    stage.crash_at("api: committed")
    api = stage.start("api").started()
    creating = asyncio.create_task(TenantsClient(api.url, seconds=1).create(**ANN))
    await api.dead()
    with pytest.raises(TimeoutError):
        await creating
    await asyncio.to_thread(mortal.kill)
    await asyncio.to_thread(mortal.start)
    assert await value(stage.dsn, "SELECT count(*) FROM tenants_api.unacknowledged") == 1
    api = stage.start("all").started()
    async with TenantsClient(api.url) as client:
        made = await client.create(**ANN)
        assert await client.modify(made.id, **ANN | {"name": "Bea"})
        assert (await client.active(made.id)).name == "Bea"
    assert len(await stage.events(stage.topics.pending, made.id)) == 2, "and Kafka has the event"
    assert await value(stage.dsn, "SELECT count(*) FROM tenants_api.unacknowledged") == 0

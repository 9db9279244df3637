"""The tenants example while its processes die, between every pair of steps."""

import asyncio
from collections.abc import Iterator

import pytest

from examples.tenants.client import TenantsClient
from examples.tenants.events import tenant_id_of

from .support import value
from .tenants_support import Process, Stage, change_of, staged

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stage(sidings_postgres: str, sidings_kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(sidings_postgres, sidings_kafka, tmp_path_factory.mktemp("tenants")) as stage:
        yield stage


class Pair:
    """A process with the API and one with the processor; who has died is started again."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.api, self.processor = stage.start("api"), stage.start("processor")
        self.api.started()
        self.processor.started()

    async def replace(self, part: str) -> Process:
        """Wait until the process has died, and start it again, at its old address."""
        dead: Process = getattr(self, part)
        await dead.dead()
        new = self._stage.start(part, port=dead.port if part == "api" else 0)
        setattr(self, part, new)
        return await asyncio.to_thread(new.started)


@pytest.fixture(scope="module")
def pair(stage: Stage) -> Iterator[Pair]:
    pair = Pair(stage)
    yield pair
    pair.api.end()
    pair.processor.end()


POINTS = [
    "api: before the commit",
    "api: committed",
    "api: acknowledged",
    "processor: message taken",
    "processor: job stored",
    "processor: job started",
    "processor: provider called",
    "processor: outcome written",
    "processor: outcome committed",
    "api: status stored",
]


@pytest.mark.parametrize("point", POINTS)
async def test_killed_between_two_steps_the_tenant_is_made_once_and_becomes_active(
    stage: Stage, pair: Pair, point: str
):
    part = point.partition(":")[0]
    fields = {
        "email": f"{point.replace(': ', '-').replace(' ', '-')}@example.com",
        "name": "Ann",
        "billing_address": "1",
    }
    stage.crash_at(point)
    async with TenantsClient(pair.api.url, seconds=100) as client:
        creating = asyncio.create_task(client.create_active(**fields))
        await pair.replace(part)
        tenant = await creating
    assert (tenant.id, tenant.status) == (tenant_id_of(fields["email"]), "active")
    await stage.settled(tenant.id)
    assert len(await stage.journal(tenant.id)) == 1, "the provider has registered it once"
    pending, created = [await stage.events(topic, tenant.id) for topic in (stage.topics.pending, stage.topics.created)]
    # The outbox delivers at least once; a repeat tells of the same change.
    assert {change_of(record) for record in pending} == {change_of(record) for record in created}
    assert len({change_of(record) for record in pending}) == 1
    assert await value(stage.dsn, "SELECT count(*) FROM sidings_processor.job") == 0

"""A transaction of several events that is cut in two between processor A and processor B is handled as one."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from .support import SECONDS, eventually, fetch, value
from .tenants_support import Process, Stage, staged, value_of


@pytest.fixture(scope="module")
def stage(sidings_postgres: str, sidings_kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(sidings_postgres, sidings_kafka, tmp_path_factory.mktemp("tenants")) as stage:
        yield stage


@pytest.fixture(scope="module")
def api(stage: Stage) -> Process:
    return stage.start("api").started()


async def import_users(url: str, name: str) -> str:
    """A tenant, and an import of three users. Returns the tenant's id."""
    fields = {"email": f"{name}@example.com", "name": "Ann", "billing_address": "1"}
    users = [{"email": f"{c}@example.com", "name": c} for c in "abc"]
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as http:
        tenant = (await http.post("/tenants", json=fields)).json()["id"]
        answer = await http.post(f"/tenants/{tenant}/users/import", json={"users": users})
        assert answer.status_code == 201
    return tenant


@pytest.mark.long
@pytest.mark.parametrize("point", ["users: part 2", "users: part 3", "users: complete"])
async def test_processor_b_completes_the_transaction_that_was_cut_when_processor_a_died(
    stage: Stage, api: Process, point: str
):
    """The article's case: two processors of one group; a rebalance moves the partition in the middle."""
    stage.crash_at(point)
    a = stage.start("processor", max_records=1).started()  # a message is a transaction: the cut is between two of them
    tenant = await import_users(api.url, point.replace(": ", "-").replace(" ", "-"))
    await a.dead()
    parts = await fetch(stage.dsn, 'SELECT number, "user" FROM tenants_processor.part ORDER BY number')
    assert [row["number"] for row in parts] == {"users: part 2": [1]}.get(point, [1, 2])
    assert (
        await value(stage.dsn, "SELECT count(*) FROM tenants_processor.seat WHERE tenant = $1::text::uuid", tenant) == 0
    )

    b = stage.start("processor", max_records=1).started()
    await eventually(lambda: _seats(stage, tenant))
    assert await _seats(stage, tenant) == [3], "told once, and never of a part"
    assert await fetch(stage.dsn, "SELECT FROM tenants_processor.part") == []
    await asyncio.to_thread(b.stop)


async def test_processor_b_completes_the_transaction_that_a_rebalance_cut(stage: Stage, api: Process):
    """Nobody dies: B joins the group while A has a part of the transaction, and A leaves it."""
    a = stage.start("processor").started()
    tenant = await import_users(api.url, "rebalance")
    await eventually(lambda: _seats(stage, tenant))
    [*_, third] = records = await stage.events_of_users(tenant)
    assert len(records) == 3
    # The same transaction under another name, sent by hand: two parts to A, the third one when A has gone.
    transaction = "11111111-2222-3333-4444-555555555555"
    await stage.send_users(tenant, transaction, records[:2])
    query = "SELECT count(*) FROM tenants_processor.part WHERE transaction = $1::text::uuid"

    async def parts() -> int:
        return await value(stage.dsn, query, transaction)

    await eventually(lambda: _is(parts, 2))
    b = stage.start("processor").started()
    assert await asyncio.to_thread(a.stop) == 0
    await stage.send_users(tenant, transaction, [third], number=3)
    await eventually(lambda: _is(parts, 0))
    await stage.settled(tenant)
    assert await _seats(stage, tenant) == [3, 3], "one for each transaction"
    await stage.send_users(tenant, transaction, [third], number=3)  # a repeat that comes late
    await stage.send_users(tenant, "99999999-2222-3333-4444-555555555555", records)  # and what comes after it
    await eventually(lambda: _told(stage, tenant, [3, 3, 3]))
    assert await fetch(stage.dsn, "SELECT FROM tenants_processor.part") == [], "a repeat begins nothing anew"
    await asyncio.to_thread(b.stop)


async def _seats(stage: Stage, tenant: str) -> list[int]:
    return [value_of(record)["seats"] for record in await stage.events(stage.topics.seats, tenant)]


async def _told(stage: Stage, tenant: str, seats: list[int]) -> bool:
    return await _seats(stage, tenant) == seats


async def _is(count, expected: int) -> bool:
    return await count() == expected

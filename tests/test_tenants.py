"""The tenants example, over HTTP, against its running processes."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from typing import Any
from uuid import uuid4

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.tenants.client import Refused, TenantFailed, TenantsClient
from examples.tenants.events import Tenant, TenantEvent, tenant_id_of
from examples.tenants.payment import Declined, Payment, PaymentError, Registered

from .consumer_support import producing
from .outbox_support import records
from .support import SECONDS, eventually, fetch, value
from .tenants_support import ANN, ROOT, Process, Stage, change_of, staged, value_of

INTERNAL = {"change", "payment_method", "customer", "first_email", "first_digest", "request_id", "key"}


@pytest.fixture(scope="module")
def stage(sidings_postgres: str, sidings_kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(sidings_postgres, sidings_kafka, tmp_path_factory.mktemp("tenants")) as stage:
        yield stage


@pytest.fixture(scope="module")
def apis(stage: Stage) -> tuple[Process, Process]:
    """Two processes with the API; a third one has the processor."""
    started = [stage.start("api"), stage.start("api"), stage.start("processor")]
    one, other, _ = (process.started() for process in started)
    return one, other


@pytest.fixture
async def http(apis: tuple[Process, Process]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=apis[0].url, timeout=SECONDS) as http:
        yield http


@pytest.fixture
async def other(apis: tuple[Process, Process]) -> AsyncIterator[httpx.AsyncClient]:
    """The other process of the API."""
    async with httpx.AsyncClient(base_url=apis[1].url, timeout=SECONDS) as http:
        yield http


@pytest.fixture
async def client(apis: tuple[Process, Process]) -> AsyncIterator[TenantsClient]:
    async with TenantsClient(apis[0].url) as client:
        yield client


@pytest.fixture
def fields(request: pytest.FixtureRequest) -> dict[str, str]:
    """A tenant that is no other test's."""
    name = "".join(c for c in request.node.name.lower() if c.isalnum())[-40:]
    return {"email": f"{name}@example.com", "name": "Ann", "billing_address": "Main Street 1"}


# -- the way of a tenant ----------------------------------------------------------------------------------------------


async def test_a_tenant_goes_through_the_chain_of_topics(stage: Stage, client: TenantsClient, fields: dict[str, str]):
    tenant = await client.create(**fields)
    assert tenant == Tenant(id=tenant_id_of(fields["email"]), status="pending", reason=None, **fields)
    [pending] = await stage.events(stage.topics.pending, tenant.id)
    assert (await client.active(tenant.id)).status == "active"
    [created] = await stage.events(stage.topics.created, tenant.id)
    told = TenantEvent.model_validate_json(pending.value)
    assert value_of(created) == value_of(pending) | {"customer": f"cus-{str(tenant.id)[:8]}"}
    assert {name: value_of(pending)[name] for name in fields} == fields, "an event has all about the tenant"
    assert change_of(created) == change_of(pending) == str(told.change)
    assert [record.value for record in await stage.events(stage.topics.failed, tenant.id)] == [None]
    assert len(await stage.journal(tenant.id)) == 1


async def test_a_tenant_that_the_provider_declines_fails_with_the_reason(
    stage: Stage, client: TenantsClient, fields: dict[str, str]
):
    with pytest.raises(TenantFailed, match="the payment method was declined") as caught:
        await client.create_active(**fields, payment_method="declined")
    id = caught.value.tenant.id
    failed = [record for record in await stage.events(stage.topics.failed, id) if record.value is not None]
    assert [value_of(record)["reason"] for record in failed] == ["the payment method was declined"]

    await client.modify(id, **fields, payment_method="card-1")
    assert (await client.active(id)).reason is None
    await stage.settled(id)
    assert (await stage.events(stage.topics.failed, id))[-1].value is None, "it stands in one of the topics only"


async def test_a_modification_is_an_event_of_the_same_key_and_deletion_a_tombstone(
    stage: Stage, client: TenantsClient, fields: dict[str, str]
):
    tenant = await client.create_active(**fields)
    moved = fields | {"email": f"new-{fields['email']}", "name": "Ann & Co"}
    assert (await client.modify(tenant.id, **moved)).status == "pending"
    assert (await client.active(tenant.id)).email == moved["email"], "the id stays, whatever the address is"
    await client.delete(tenant.id)
    values = [record.value for record in await stage.events(stage.topics.pending, tenant.id)]
    assert [value and TenantEvent.model_validate_json(value).name for value in values] == ["Ann", "Ann & Co", None]
    with pytest.raises(Refused, match="404"):
        await client.read(tenant.id)
    await stage.settled(tenant.id)
    assert (await stage.events(stage.topics.created, tenant.id))[-1].value is None
    assert [entry["what"] for entry in await stage.journal(tenant.id)] == ["registered", "registered", "closed"]


async def test_the_answer_shows_no_internal_field(
    http: httpx.AsyncClient, client: TenantsClient, fields: dict[str, str]
):
    made = await http.post("/tenants", json=fields | {"payment_method": "card-7"})
    id = made.json()["id"]
    await client.active(id)
    read, listed = await http.get(f"/tenants/{id}"), await http.get("/tenants", params={"limit": 1000})
    for shown in (made.json(), read.json(), *listed.json()):
        assert shown.keys() == Tenant.model_fields.keys()
        assert not shown.keys() & INTERNAL
    assert "card-7" not in made.text + read.text + listed.text


# -- idempotence ------------------------------------------------------------------------------------------------------


async def test_the_same_post_without_a_key_returns_the_same_tenant(
    stage: Stage, http: httpx.AsyncClient, other: httpx.AsyncClient, client: TenantsClient, fields: dict[str, str]
):
    first, second = await http.post("/tenants", json=fields), await other.post("/tenants", json=fields)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]
    assert len(await stage.events(stage.topics.pending, first.json()["id"])) == 1
    moved = fields | {"email": f"new-{fields['email']}"}
    await client.modify(first.json()["id"], **moved)
    late = await http.post("/tenants", json=fields)
    assert (late.status_code, late.json()["id"], late.json()["email"]) == (200, first.json()["id"], moved["email"])


async def test_another_body_for_the_same_address_is_refused(http: httpx.AsyncClient, fields: dict[str, str]):
    await http.post("/tenants", json=fields)
    refused = await http.post("/tenants", json=fields | {"name": "Bob"})
    assert (refused.status_code, refused.json()["detail"]) == (409, f"{fields['email']} belongs to another tenant")


@pytest.mark.parametrize("where", ["header", "body"])
async def test_the_same_key_gets_the_same_answer_and_another_body_is_refused(
    stage: Stage,
    http: httpx.AsyncClient,
    other: httpx.AsyncClient,
    client: TenantsClient,
    fields: dict[str, str],
    where: str,
):
    key = str(uuid4())

    async def post(through: httpx.AsyncClient, body: dict[str, str]) -> httpx.Response:
        if where == "header":
            return await through.post("/tenants", json=body, headers={"Idempotency-Key": key})
        return await through.post("/tenants", json=body | {"request_id": key})

    first = await post(http, fields)
    await client.active(first.json()["id"])
    again = await post(other, fields)
    assert (again.status_code, again.content) == (201, first.content), "the same answer, also when time has passed"
    assert (await post(http, fields | {"name": "Bob"})).status_code == 422
    taken, free = fields | {"name": "Bob"}, str(uuid4())
    refused = [await http.post("/tenants", json=taken, headers={"Idempotency-Key": free}) for _ in range(2)]
    assert [answer.status_code for answer in refused] == [409, 409], "a refusal is an answer too"
    assert len(await stage.events(stage.topics.pending, first.json()["id"])) == 1


async def test_a_key_stands_for_one_request_and_two_keys_contradict_each_other(
    http: httpx.AsyncClient, client: TenantsClient, fields: dict[str, str]
):
    headers = {"Idempotency-Key": str(uuid4())}
    tenant = (await http.post("/tenants", json=fields, headers=headers)).json()["id"]
    user = {"email": fields["email"], "name": "Ann"}
    assert (await http.post(f"/tenants/{tenant}/users", json=user, headers=headers)).status_code == 422
    assert (await http.post("/tenants", json=fields | {"request_id": "other"}, headers=headers)).status_code == 422


async def test_put_and_delete_repeated_change_nothing_more(
    stage: Stage, http: httpx.AsyncClient, client: TenantsClient, fields: dict[str, str]
):
    tenant = await client.create_active(**fields)
    changed = fields | {"name": "Ann & Co"}
    for _ in range(2):
        assert (await http.put(f"/tenants/{tenant.id}", json=changed)).status_code == 200
    for _ in range(2):
        assert (await http.delete(f"/tenants/{tenant.id}")).status_code == 204
    assert len(await stage.events(stage.topics.pending, tenant.id)) == 3
    assert (await http.put(f"/tenants/{tenant.id}", json=changed)).status_code == 404


async def test_a_repeated_event_changes_nothing_also_when_it_comes_after_newer_ones(
    stage: Stage, client: TenantsClient, fields: dict[str, str]
):
    """As a relay may send it again after a takeover: the same event at a new offset."""
    tenant = await client.create_active(**fields)
    await client.delete(tenant.id)
    again = await client.create_active(**fields)
    assert again.id == tenant.id
    await stage.settled(tenant.id)
    done = await stage.journal(tenant.id)
    assert [entry["what"] for entry in done] == ["registered", "closed", "registered"]
    events = await stage.events(stage.topics.pending, tenant.id)
    created = len(await stage.events(stage.topics.created, tenant.id))
    async with producing(stage.kafka) as producer:
        for event in events:
            await producer.send_and_wait(
                stage.topics.pending, event.value, key=event.key, partition=event.partition, headers=list(event.headers)
            )
    marker = await client.create_active(**fields | {"email": f"later-{fields['email']}"})
    await eventually(lambda: _offsets_are_at_the_end(stage))
    await stage.settled(tenant.id)
    assert await stage.journal(tenant.id) == done
    assert len(await stage.events(stage.topics.created, tenant.id)) == created
    assert (await client.read(tenant.id)).status == (await client.read(marker.id)).status == "active"


async def _offsets_are_at_the_end(stage: Stage) -> bool:
    """All that stands in `tenant-pending` has been taken by the processor."""
    query = "SELECT partition, next_offset FROM sidings_processor.consumer_offset WHERE topic = $1"
    taken = {row["partition"]: row["next_offset"] for row in await fetch(stage.dsn, query, stage.topics.pending)}
    return all(record.offset < taken[record.partition] for record in await records(stage.kafka, stage.topics.pending))


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_a_change_that_comes_again_with_its_key_is_not_done_again(
    http: httpx.AsyncClient, other: httpx.AsyncClient, fields: dict[str, str], method: str
):
    """Somebody else has gone on meanwhile, and keeps what he has made."""
    tenant = f"/tenants/{(await http.post('/tenants', json=fields)).json()['id']}"
    new_user = {"email": "a@example.com", "name": "A"}
    user = f"{tenant}/users/{(await http.post(f'{tenant}/users', json=new_user)).json()['id']}"
    theirs = fields | {"name": "theirs"}, new_user | {"name": "theirs"}
    ours = ({}, {}) if method == "DELETE" else ({"json": fields | {"name": "ours"}}, {"json": {"name": "ours"}})
    key, users_key = ({"Idempotency-Key": str(uuid4())} for _ in range(2))

    first_user = await http.request(method, user, headers=users_key, **ours[1])
    first = await http.request(method, tenant, headers=key, **ours[0])
    assert first.is_success
    assert first_user.is_success
    await other.delete(tenant)
    assert (await other.post("/tenants", json=theirs[0])).status_code == 201
    assert (await other.post(f"{tenant}/users", json=theirs[1])).status_code == 201

    again = await other.request(method, tenant, headers=key, **ours[0])
    again_user = await other.request(method, user, headers=users_key, **ours[1])
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert (again_user.status_code, again_user.content) == (first_user.status_code, first_user.content)
    assert [(await http.get(path)).json()["name"] for path in (tenant, user)] == ["theirs", "theirs"]
    assert (await http.delete(user, headers=key)).status_code == 422, "the key stands for another request"


@pytest.mark.parametrize("change", ["modify", "delete"])
async def test_the_client_repeats_no_change_of_a_tenant_that_was_made_again_meanwhile(
    http: httpx.AsyncClient,
    client: TenantsClient,
    fields: dict[str, str],
    change: str,
    monkeypatch: pytest.MonkeyPatch,
):
    tenant = await client.create(**fields)
    send = client._http.request

    async def answer_lost(*request: Any, **options: Any) -> httpx.Response:
        monkeypatch.undo()
        assert (await send(*request, **options)).is_success
        await http.delete(f"/tenants/{tenant.id}")
        assert (await http.post("/tenants", json=fields | {"name": "Bob"})).json()["id"] == str(tenant.id)
        raise httpx.ReadError("the connection broke")

    monkeypatch.setattr(client._http, "request", answer_lost)
    await (client.delete(tenant.id) if change == "delete" else client.modify(tenant.id, **fields | {"name": "Carl"}))
    assert (await client.read(tenant.id)).name == "Bob"


# -- concurrency ------------------------------------------------------------------------------------------------------


async def test_of_concurrent_posts_for_one_address_one_wins(
    stage: Stage, http: httpx.AsyncClient, other: httpx.AsyncClient, fields: dict[str, str]
):
    posts = ((http, other)[n % 2].post("/tenants", json=fields | {"name": f"Ann {n % 4}"}) for n in range(16))
    answers = await asyncio.gather(*posts)
    [winner] = [answer.json() for answer in answers if answer.status_code == 201]
    assert Counter(answer.status_code for answer in answers) == {201: 1, 200: 3, 409: 12}
    assert all(answer.json() == winner for answer in answers if answer.status_code == 200)
    assert len(await stage.events(stage.topics.pending, winner["id"])) == 1


async def test_concurrent_requests_with_one_key_are_done_once(
    stage: Stage, http: httpx.AsyncClient, other: httpx.AsyncClient, fields: dict[str, str]
):
    headers = {"Idempotency-Key": str(uuid4())}
    posts = ((http, other)[n % 2].post("/tenants", json=fields, headers=headers) for n in range(8))
    answers = await asyncio.gather(*posts)
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}


async def test_two_tenants_cannot_move_to_one_address(
    http: httpx.AsyncClient, other: httpx.AsyncClient, fields: dict[str, str]
):
    made = [await http.post("/tenants", json=fields | {"email": f"{n}-{fields['email']}"}) for n in range(2)]
    puts = (
        through.put(f"/tenants/{answer.json()['id']}", json=fields)
        for through, answer in zip((http, other), made, strict=True)
    )
    assert sorted(answer.status_code for answer in await asyncio.gather(*puts)) == [200, 409]


async def test_an_address_that_its_tenant_has_left_is_free_for_another_with_another_id(
    http: httpx.AsyncClient, fields: dict[str, str]
):
    first = (await http.post("/tenants", json=fields)).json()
    await http.put(f"/tenants/{first['id']}", json=fields | {"email": f"new-{fields['email']}"})
    second = await http.post("/tenants", json=fields | {"name": "Bob"})
    assert second.status_code == 201
    assert second.json()["id"] != first["id"]


# -- the payment provider ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["slow", "fail", "twice"])
async def test_whatever_the_provider_does_each_tenant_is_registered_once_and_as_itself(
    stage: Stage, client: TenantsClient, fields: dict[str, str], mode: str
):
    await stage.mode(mode, times=2)
    made = [await client.create(**fields | {"email": f"{n}-{fields['email']}"}) for n in range(3)]
    for tenant in made:
        await client.active(tenant.id)
        assert len(await stage.journal(tenant.id)) == 1
        [created] = await stage.events(stage.topics.created, tenant.id)
        assert value_of(created)["customer"] == f"cus-{str(tenant.id)[:8]}", "the answer is that of its own question"


@pytest.mark.parametrize("mode", ["die", "vanish"])
async def test_a_provider_that_dies_after_it_was_asked_registers_nobody_twice(
    stage: Stage, client: TenantsClient, fields: dict[str, str], mode: str
):
    await stage.mode(mode)
    tenant = await client.create(**fields)
    await asyncio.to_thread(stage.provider.process.wait, SECONDS)
    stage.provider = stage.start_provider(stage.provider.port).started()
    await client.active(tenant.id)
    assert len(await stage.journal(tenant.id)) == 1
    assert len(await stage.events(stage.topics.created, tenant.id)) == 1


async def test_a_closing_that_the_provider_carries_out_late_spares_the_tenant_that_was_made_again(
    stage: Stage, client: TenantsClient, fields: dict[str, str]
):
    tenant = await client.create_active(**fields)
    await eventually(lambda: _nothing_is_under_way(stage), "no other closing can be the one that is late")
    await stage.mode("late")
    await client.delete(tenant.id)
    assert (await client.create_active(**fields)).id == tenant.id
    done = [entry["what"] for entry in await stage.journal(tenant.id)]
    assert done == ["registered", "held back", "closed", "registered", "closed before"], "and nobody new"


async def _nothing_is_under_way(stage: Stage) -> bool:
    """The processor has settled all that stands in `tenant-pending`."""
    query = "SELECT FROM tenants_processor.registration WHERE outcome IS NULL"
    return await _offsets_are_at_the_end(stage) and not await fetch(stage.dsn, query)


@pytest.mark.parametrize("status", [201, 204, 402])
async def test_only_the_right_answers_of_the_provider_count(status: int):
    """A closing that is refused is not done."""
    answering = web.Application()

    async def answer(request: web.Request) -> web.Response:
        said = {"key": request.headers["Idempotency-Key"], "customer": "c", "reason": "no"}
        return web.json_response(said, status=status) if status != 204 else web.Response(status=204)

    answering.router.add_route("*", "/{path:.*}", answer)
    asked, key = TenantEvent(id=uuid4(), change=uuid4(), payment_method="invoice", **ANN), uuid4()
    async with TestServer(answering) as server:
        payment = Payment(str(server.make_url("")), SECONDS)
        try:
            with nullcontext() if status == 204 else pytest.raises(PaymentError, match=f"DELETE .*{status}"):
                await payment.close_account(key, asked.id)
            with nullcontext() if status != 204 else pytest.raises(PaymentError, match=r"POST .*204"):
                made = await payment.register(key, asked)
                assert made == (Registered("c") if status == 201 else Declined("no"))
        finally:
            await payment.close()


# -- users: the second vertical ---------------------------------------------------------------------------------------


async def test_users_come_and_go_and_each_transaction_is_billed_once(
    stage: Stage, http: httpx.AsyncClient, client: TenantsClient, fields: dict[str, str]
):
    tenant = (await client.create(**fields)).id
    at = f"/tenants/{tenant}/users"
    wanted = {"email": "a@example.com", "name": "A"}
    first, again = [await http.post(at, json=wanted) for _ in range(2)]
    assert (first.status_code, again.status_code, first.content) == (201, 200, again.content)
    assert (await http.post(at, json=wanted | {"name": "B"})).status_code == 409
    user = f"{at}/{first.json()['id']}"
    assert (await http.put(user, json={"name": "A", "role": "admin"})).json()["role"] == "admin"

    several = {"users": [{"email": f"{c}@example.com", "name": c} for c in "dcba"]}
    assert (await http.post(f"{at}/import", json=several)).status_code == 409
    several["users"].pop()  # a is another's
    key = {"Idempotency-Key": str(uuid4())}
    made, same = [await http.post(f"{at}/import", json=several, headers=key) for _ in range(2)]
    assert (made.status_code, made.content) == (same.status_code, same.content)
    assert [one["name"] for one in (await http.get(at)).json()] == ["A", "b", "c", "d"]

    assert [(await http.delete(user)).status_code for _ in range(2)] == [204, 204]
    assert (await http.get(user)).status_code == 404
    await client.delete(tenant)
    assert (await http.post(at, json=wanted)).status_code == 404

    async def told() -> bool:
        return [r.value and value_of(r)["seats"] for r in await stage.events(stage.topics.seats, tenant)] == [
            1, 1, 4, 3, None
        ]  # fmt: skip

    await eventually(told, "one number of seats for each transaction, none for its parts")


async def test_a_user_who_comes_while_the_tenant_goes_is_refused_or_goes_too(
    stage: Stage, http: httpx.AsyncClient, other: httpx.AsyncClient, fields: dict[str, str]
):
    tenant = (await http.post("/tenants", json=fields)).json()["id"]
    posts = (http.post(f"/tenants/{tenant}/users", json={"email": f"u{n}@example.com", "name": "U"}) for n in range(8))
    gone, *made = await asyncio.gather(other.delete(f"/tenants/{tenant}"), *posts)
    assert gone.status_code == 204
    assert {answer.status_code for answer in made} <= {201, 404}
    assert await value(stage.dsn, "SELECT count(*) FROM tenants_api.user WHERE tenant = $1::text::uuid", tenant) == 0


# -- processes --------------------------------------------------------------------------------------------------------


async def test_the_parts_run_in_one_process_as_well_and_stop_in_order(stage: Stage, fields: dict[str, str]):
    process = stage.start("all").started()
    async with TenantsClient(process.url) as client:
        assert (await client.create_active(**fields)).status == "active"
    assert await asyncio.to_thread(process.stop) == 0


async def test_nothing_is_confirmed_before_kafka_has_acknowledged_it(
    stage: Stage, empty_database: str, fields: dict[str, str]
):
    """The process that waits for Kafka in vain dies; the repeated request waits for the same event."""
    headers = {"Idempotency-Key": str(uuid4())}
    apart = {"postgres": empty_database, "acknowledge_seconds": 0.3}
    process = stage.start("api", kafka="127.0.0.1:1", **apart).started()
    async with httpx.AsyncClient(base_url=process.url, timeout=SECONDS) as http:
        for _ in range(2):
            answer = await http.post("/tenants", json=fields, headers=headers)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    process.end()
    assert await stage.events(stage.topics.pending, tenant_id_of(fields["email"])) == []
    process = stage.start("api", postgres=empty_database).started()

    async def swept() -> bool:
        return not await fetch(empty_database, "SELECT FROM tenants_api.unacknowledged")

    await eventually(swept, "the new process has waited in place of the one that died")
    async with httpx.AsyncClient(base_url=process.url, timeout=SECONDS) as http:
        answer = await http.post("/tenants", json=fields, headers=headers)
        assert (answer.status_code, answer.json()["status"]) == (201, "pending")
        assert len(await stage.events(stage.topics.pending, answer.json()["id"])) == 1
    process.end()


@pytest.mark.long
def test_the_story_of_the_example_runs_and_ends_by_itself(sidings_postgres: str, sidings_kafka: str):
    environment = os.environ | {"SIDINGS_POSTGRES": sidings_postgres, "SIDINGS_KAFKA": sidings_kafka}
    told = subprocess.run(
        [sys.executable, "-m", "examples.tenants"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "deleted the tenant" in told.stdout

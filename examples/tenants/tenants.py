"""The tenants, as the API sees them: rules, routes, and the consumers that learn what became of a change."""

from typing import Annotated
from uuid import UUID, uuid4

from asyncpg import Record, UniqueViolationError
from fastapi import APIRouter, Query
from fastapi.responses import Response
from sidings import Message, Service, Transaction

from .crash import crash_point
from .events import NewTenant, Tenant, TenantEvent, TenantFields, change_of, digest_of, tenant_id_of
from .requests import MISSING, REFUSED, TAKEN, Answer, IdempotencyKey, Requests, Responses, one_key
from .settings import Topics
from .users import delete_users

__all__ = ["follow_status", "routes"]

_AGAIN: Responses = {200: {"model": Tenant}}


class Tenants:
    """Consistency in the producer: every rule is kept here, in the transaction that writes the event."""

    def __init__(self, requests: Requests, topics: Topics) -> None:
        self._requests = requests
        self._topics = topics

    async def create(self, tx: Transaction, new: NewTenant) -> Answer:
        """A new tenant; or, for a repetition of the request that made one, that one, as it is today.

        Of concurrent requests for one address the unique index lets one through; the others wait for its commit.
        """
        digest = digest_of("create", new)
        ordinal = 0
        while True:
            same = await tx.fetchrow(
                "SELECT * FROM tenants_api.tenant WHERE first_email = $1 AND first_digest = $2", new.email, digest
            )
            if same is not None:
                return Answer.of(200, public(same), same["id"])
            id, change = tenant_id_of(new.email, ordinal), uuid4()
            made = await tx.fetchrow(
                """
                INSERT INTO tenants_api.tenant
                    (id, email, name, billing_address, payment_method, first_email, first_digest, change)
                VALUES ($1, $2, $3, $4, $5, $2, $6, $7) ON CONFLICT DO NOTHING RETURNING *
                """,
                *(id, new.email, new.name, new.billing_address, new.payment_method, digest, change),
            )
            if made is not None:
                await self._publish(tx, id, change, event(made))
                return Answer.of(201, public(made), id)
            owner = await tx.fetchrow(
                "SELECT first_email, first_digest FROM tenants_api.tenant WHERE email = $1", new.email
            )
            if owner is None:  # the id is taken, by a tenant that has another address by now
                ordinal += 1
            elif (owner["first_email"], owner["first_digest"]) != (new.email, digest):
                return Answer.problem(409, f"{new.email} belongs to another tenant")

    async def modify(self, tx: Transaction, id: UUID, fields: TenantFields) -> Answer:
        """The tenant gets these fields. Where it has them already, there is nothing to tell."""
        row = await tx.fetchrow("SELECT * FROM tenants_api.tenant WHERE id = $1 FOR UPDATE", id)
        if row is None:
            return Answer.problem(404, f"there is no tenant {id}")
        if all(row[name] == value for name, value in fields.model_dump().items()):
            return Answer.of(200, public(row), id)
        try:
            async with tx.savepoint():
                changed = await tx.fetchrow(
                    """
                    UPDATE tenants_api.tenant SET email = $2, name = $3, billing_address = $4, payment_method = $5,
                                                  change = $6, status = 'pending', reason = NULL
                    WHERE id = $1 RETURNING *
                    """,
                    *(id, fields.email, fields.name, fields.billing_address, fields.payment_method, uuid4()),
                )
        except UniqueViolationError:
            return Answer.problem(409, f"{fields.email} belongs to another tenant")
        assert changed is not None
        await self._publish(tx, id, changed["change"], event(changed))
        return Answer.of(200, public(changed), id)

    async def delete(self, tx: Transaction, id: UUID) -> Answer:
        """The tenant and its users are no more, whether or not they ever were."""
        if await tx.fetchval("SELECT id FROM tenants_api.tenant WHERE id = $1 FOR UPDATE", id):
            await delete_users(self._requests, tx, self._topics, id)
            await tx.execute("DELETE FROM tenants_api.tenant WHERE id = $1", id)
            await self._publish(tx, id, uuid4(), None)
        return Answer(204, entity=id)

    async def _publish(self, tx: Transaction, id: UUID, change: UUID, value: TenantEvent | None) -> None:
        headers = {"change": str(change)}
        await self._requests.publish(tx, id, self._topics.pending, key=id, value=value, headers=headers)


def public(row: Record) -> Tenant:
    """What a client may see of a row."""
    return Tenant.model_validate({name: row[name] for name in Tenant.model_fields})


def event(row: Record) -> TenantEvent:
    """What Kafka is told."""
    return TenantEvent.model_validate({name: row[name] for name in TenantEvent.model_fields if name in row})


def routes(requests: Requests, topics: Topics) -> APIRouter:
    """The HTTP API of the tenants."""
    router = APIRouter(prefix="/tenants", tags=["tenants"])
    tenants = Tenants(requests, topics)

    @router.post("", status_code=201, response_model=Tenant, responses=_AGAIN | TAKEN | REFUSED)
    async def create_tenant(body: NewTenant, key: IdempotencyKey = None) -> Response:
        """Create a tenant: 201. Repeated: the same tenant, 200; or with a key exactly the first answer."""
        digest = digest_of("POST /tenants", body)
        work = lambda tx: tenants.create(tx, body)  # noqa: E731
        return (await requests.once(work, key=one_key(key, body.request_id), digest=digest)).response()

    @router.get("", response_model=list[Tenant], responses=REFUSED)
    async def list_tenants(
        after: UUID | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100
    ) -> list[Tenant]:
        """Tenants by id, a page at a time: `after` is the last id of the page before."""
        query = "SELECT * FROM tenants_api.tenant WHERE $1::uuid IS NULL OR id > $1 ORDER BY id LIMIT $2"
        async with requests.service.transaction() as tx:
            return [public(row) for row in await tx.fetch(query, after, limit)]

    @router.get("/{id}", response_model=Tenant, responses=MISSING | REFUSED)
    async def read_tenant(id: UUID) -> Response:
        """One tenant."""
        async with requests.service.transaction() as tx:
            row = await tx.fetchrow("SELECT * FROM tenants_api.tenant WHERE id = $1", id)
        answer = Answer.problem(404, f"there is no tenant {id}") if row is None else Answer.of(200, public(row))
        return answer.response()

    @router.put("/{id}", response_model=Tenant, responses=MISSING | TAKEN | REFUSED)
    async def modify_tenant(id: UUID, body: TenantFields, key: IdempotencyKey = None) -> Response:
        """Replace a tenant's fields; it is pending again until the payment provider has agreed."""
        digest = digest_of(f"PUT /tenants/{id}", body)
        return (await requests.once(lambda tx: tenants.modify(tx, id, body), key=key, digest=digest)).response()

    @router.delete("/{id}", status_code=204, response_class=Response, responses=REFUSED)
    async def delete_tenant(id: UUID, key: IdempotencyKey = None) -> Response:
        """Delete a tenant with its users. Repeated with its key, it spares a tenant that was made again meanwhile."""
        digest = f"DELETE /tenants/{id}"
        return (await requests.once(lambda tx: tenants.delete(tx, id), key=key, digest=digest)).response()

    return router


def follow_status(service: Service, topics: Topics) -> None:
    """Declare the consumers that learn what the processor has made of a change. Only the latest change counts, so a
    repeat, or the fate of an earlier one, changes nothing."""
    query = "UPDATE tenants_api.tenant SET status = $3, reason = $4 WHERE id = $1 AND change = $2"

    @service.consumer(topics.created)
    async def on_created(message: Message[TenantEvent | None], tx: Transaction) -> None:
        if message.value is not None:
            await tx.execute(query, message.value.id, change_of(message), "active", None)
            crash_point("api: status stored")

    @service.consumer(topics.failed)
    async def on_failed(message: Message[TenantEvent | None], tx: Transaction) -> None:
        if message.value is not None:
            await tx.execute(query, message.value.id, change_of(message), "failed", message.value.reason)

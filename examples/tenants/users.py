"""The users of a tenant: the second vertical, whole in one module. It shows what another entity takes: models, rules
with their routes, a topic, and a processor. Nothing of the tenants' own had to be changed for it, except that a tenant
takes its users along when it goes.

It also has transactions of *several* events: an import of users, and the deletion of a tenant. Each event says which
part of which transaction it is (`Part`). The processor stores the parts with their offsets until the transaction is
complete, and only then does what follows from it, once. So a rebalance, or a kill, between two parts does not matter:
whoever gets the partition next finds the earlier parts in the database.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self
from uuid import UUID, uuid4, uuid5

from asyncpg import Record
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field
from sidings import Message, Service, Transaction

from .crash import crash_point
from .events import Body, Email, Line, RequestId, digest_of
from .requests import MISSING, REFUSED, TAKEN, Answer, IdempotencyKey, Requests, Responses, one_key
from .settings import Topics

__all__ = ["Part", "Seats", "User", "count_seats", "delete_users", "routes"]

Role = Literal["admin", "member"]


# -- what clients send and see, and what stands in Kafka --------------------------------------------------------------


class ChangedUser(Body):
    """What can be changed of a user."""

    name: Line
    role: Role = "member"


class UserFields(ChangedUser):
    """What a client says of a new user. The address is fixed from then on."""

    email: Email


class NewUser(UserFields):
    """The body of a POST."""

    request_id: RequestId | None = None


class Import(Body):
    """Several users at once, all or none."""

    users: list[UserFields] = Field(min_length=1, max_length=100)
    request_id: RequestId | None = None


class User(BaseModel):
    """What a client sees of a user, and the value of its events: nothing of it is internal."""

    id: UUID
    tenant: UUID
    email: str
    name: str
    role: Role


class Seats(BaseModel):
    """How many users a tenant has to pay for: the value of an event in `tenant-seats`."""

    tenant: UUID
    seats: int


@dataclass(frozen=True)
class Part:
    """Which part of which transaction an event is. It stands in a header, so that a tombstone has it too."""

    transaction: UUID
    number: int
    of: int

    def headers(self) -> dict[str, str]:
        """For `publish`."""
        return {"transaction": f"{self.transaction}/{self.number}/{self.of}"}

    @classmethod
    def read(cls, message: Message[User | None]) -> Self:
        """From a message."""
        transaction, number, of = (message.header("transaction") or b"").decode().split("/")
        return cls(UUID(transaction), int(number), int(of))


class _Taken(Exception):
    """An address is not free: the savepoint is rolled back."""


# -- the API's side ---------------------------------------------------------------------------------------------------


class Users:
    """The rules."""

    def __init__(self, requests: Requests, topics: Topics) -> None:
        self._requests = requests
        self._topics = topics

    async def create(self, tx: Transaction, tenant: UUID, new: UserFields) -> Answer:
        """A new user; or, for a repetition of the request that made one, that one."""
        if not await _locked(tx, tenant):
            return _no_tenant(tenant)
        row, made = await _insert(tx, tenant, new)
        if row is None:
            return Answer.problem(409, f"{new.email} belongs to another user of this tenant")
        user = public(row)
        if made:
            await publish(self._requests, tx, self._topics, tenant, {user.id: user})
        return Answer.of(201 if made else 200, user, tenant)

    async def bring_in(self, tx: Transaction, tenant: UUID, wanted: Sequence[UserFields]) -> Answer:
        """All of them, or none where one cannot be."""
        if not await _locked(tx, tenant):
            return _no_tenant(tenant)
        users: list[User] = []
        new_ones: dict[UUID, User | None] = {}
        try:
            async with tx.savepoint():
                # In one order for all imports, so that two of them cannot wait for each other.
                for new in sorted(wanted, key=lambda new: new.email):
                    row, made = await _insert(tx, tenant, new)
                    if row is None or (users and users[-1].email == new.email):
                        raise _Taken(new.email)
                    users.append(public(row))
                    if made:
                        new_ones[row["id"]] = public(row)
        except _Taken as taken:
            return Answer.problem(409, f"{taken} belongs to another user of this tenant, or is given twice")
        await publish(self._requests, tx, self._topics, tenant, new_ones)
        return Answer(201, f"[{','.join(user.model_dump_json() for user in users)}]", tenant)

    async def modify(self, tx: Transaction, tenant: UUID, id: UUID, changed: ChangedUser) -> Answer:
        """The user gets these fields."""
        row = await tx.fetchrow("SELECT * FROM tenants_api.user WHERE tenant = $1 AND id = $2 FOR UPDATE", tenant, id)
        if row is None:
            return Answer.problem(404, f"there is no user {id} of tenant {tenant}")
        user = public(row).model_copy(update=changed.model_dump())
        if user != public(row):
            await tx.execute("UPDATE tenants_api.user SET name = $2, role = $3 WHERE id = $1", id, user.name, user.role)
            await publish(self._requests, tx, self._topics, tenant, {id: user})
        return Answer.of(200, user, tenant)

    async def delete(self, tx: Transaction, tenant: UUID, id: UUID) -> Answer:
        """The user is no more, whether or not it ever was."""
        if await tx.fetchval("DELETE FROM tenants_api.user WHERE tenant = $1 AND id = $2 RETURNING id", tenant, id):
            await publish(self._requests, tx, self._topics, tenant, {id: None})
        return Answer(204, entity=tenant)


async def delete_users(requests: Requests, tx: Transaction, topics: Topics, tenant: UUID) -> None:
    """A tenant goes, and takes its users along."""
    rows = await tx.fetch("DELETE FROM tenants_api.user WHERE tenant = $1 RETURNING id", tenant)
    await publish(requests, tx, topics, tenant, {row["id"]: None for row in rows})


async def publish(
    requests: Requests, tx: Transaction, topics: Topics, tenant: UUID, users: dict[UUID, User | None]
) -> None:
    """One event for each user; together they are one transaction. All of a tenant's go to one partition."""
    transaction = uuid4()
    for number, (id, user) in enumerate(users.items(), 1):
        headers = Part(transaction, number, len(users)).headers()
        await requests.publish(tx, tenant, topics.users, key=id, value=user, headers=headers, partition_key=tenant)


async def _locked(tx: Transaction, tenant: UUID) -> bool:
    """Whether the tenant is there, and stays until this transaction ends."""
    return await tx.fetchval("SELECT true FROM tenants_api.tenant WHERE id = $1 FOR KEY SHARE", tenant) or False


async def _insert(tx: Transaction, tenant: UUID, new: UserFields) -> tuple[Record | None, bool]:
    """The user's row, and whether it was made now. No row: the address is another's."""
    digest = digest_of("create user", new)
    made = await tx.fetchrow(
        """
        INSERT INTO tenants_api.user (id, tenant, email, name, role, first_digest) VALUES ($1, $2, $3, $4, $5, $6)
        ON CONFLICT DO NOTHING RETURNING *
        """,
        *(uuid5(tenant, new.email), tenant, new.email, new.name, new.role, digest),
    )
    if made is not None:
        return made, True
    query = "SELECT * FROM tenants_api.user WHERE tenant = $1 AND email = $2 AND first_digest = $3"
    return await tx.fetchrow(query, tenant, new.email, digest), False


def _no_tenant(tenant: UUID) -> Answer:
    return Answer.problem(404, f"there is no tenant {tenant}")


def public(row: Record) -> User:
    """What a client may see of a row."""
    return User.model_validate({name: row[name] for name in User.model_fields})


def routes(requests: Requests, topics: Topics) -> APIRouter:
    """The HTTP API of the users."""
    router = APIRouter(prefix="/tenants/{tenant}/users", tags=["users"])
    users = Users(requests, topics)
    again: Responses = {200: {"model": User}}

    @router.post("", status_code=201, response_model=User, responses=again | MISSING | TAKEN | REFUSED)
    async def create_user(tenant: UUID, body: NewUser, key: IdempotencyKey = None) -> Response:
        """Create a user: 201. Repeated: the same user, 200; or with a key exactly the first answer."""
        new = UserFields.model_validate(body.model_dump(exclude={"request_id"}))
        digest = digest_of(f"POST /tenants/{tenant}/users", body)
        work = lambda tx: users.create(tx, tenant, new)  # noqa: E731
        return (await requests.once(work, key=one_key(key, body.request_id), digest=digest)).response()

    @router.post("/import", status_code=201, response_model=list[User], responses=MISSING | TAKEN | REFUSED)
    async def import_users(tenant: UUID, body: Import, key: IdempotencyKey = None) -> Response:
        """Create several users, all or none."""
        digest = digest_of(f"POST /tenants/{tenant}/users/import", body)
        work = lambda tx: users.bring_in(tx, tenant, body.users)  # noqa: E731
        return (await requests.once(work, key=one_key(key, body.request_id), digest=digest)).response()

    @router.get("", response_model=list[User], responses=MISSING | REFUSED)
    async def list_users(tenant: UUID) -> Response:
        """All users of a tenant, by address."""
        async with requests.service.transaction() as tx:
            if not await tx.fetchval("SELECT true FROM tenants_api.tenant WHERE id = $1", tenant):
                return _no_tenant(tenant).response()
            rows = await tx.fetch("SELECT * FROM tenants_api.user WHERE tenant = $1 ORDER BY email", tenant)
        return Answer(200, f"[{','.join(public(row).model_dump_json() for row in rows)}]").response()

    @router.get("/{id}", response_model=User, responses=MISSING | REFUSED)
    async def read_user(tenant: UUID, id: UUID) -> Response:
        """One user."""
        async with requests.service.transaction() as tx:
            row = await tx.fetchrow("SELECT * FROM tenants_api.user WHERE tenant = $1 AND id = $2", tenant, id)
        none = Answer.problem(404, f"there is no user {id} of tenant {tenant}")
        return (none if row is None else Answer.of(200, public(row))).response()

    @router.put("/{id}", response_model=User, responses=MISSING | REFUSED)
    async def modify_user(tenant: UUID, id: UUID, body: ChangedUser, key: IdempotencyKey = None) -> Response:
        """Replace what can be changed of a user."""
        digest = digest_of(f"PUT /tenants/{tenant}/users/{id}", body)
        return (await requests.once(lambda tx: users.modify(tx, tenant, id, body), key=key, digest=digest)).response()

    @router.delete("/{id}", status_code=204, response_class=Response, responses=REFUSED)
    async def delete_user(tenant: UUID, id: UUID, key: IdempotencyKey = None) -> Response:
        """Delete a user. Repeated with its key, it spares a user that was made again meanwhile."""
        digest = f"DELETE /tenants/{tenant}/users/{id}"
        return (await requests.once(lambda tx: users.delete(tx, tenant, id), key=key, digest=digest)).response()

    return router


# -- the processor's side ---------------------------------------------------------------------------------------------


def count_seats(service: Service, topics: Topics) -> None:
    """Declare the processor: after each transaction, and never in the middle of one, it tells how many seats the tenant
    has to pay for."""

    @service.consumer(topics.users)
    async def on_user(message: Message[User | None], tx: Transaction) -> None:
        part, user = Part.read(message), message.value
        crash_point(f"users: part {part.number}")
        if await tx.fetchval("SELECT true FROM tenants_processor.complete WHERE transaction = $1", part.transaction):
            return  # a repeat
        # The partial transaction: rows, committed with this message's offset.
        await tx.execute(
            'INSERT INTO tenants_processor.part (transaction, number, "user", tenant) VALUES ($1, $2, $3, $4) '
            "ON CONFLICT DO NOTHING",
            *(part.transaction, part.number, UUID(message.key_text), None if user is None else user.tenant),
        )
        query = "SELECT count(*) FROM tenants_processor.part WHERE transaction = $1"
        if await tx.fetchval(query, part.transaction) == part.of:
            await _complete(service, topics, tx, part.transaction)
            crash_point("users: complete")


async def _complete(service: Service, topics: Topics, tx: Transaction, transaction: UUID) -> None:
    """All parts are there: apply them as one."""
    parts = await tx.fetch("DELETE FROM tenants_processor.part WHERE transaction = $1 RETURNING *", transaction)
    await tx.execute("INSERT INTO tenants_processor.complete VALUES ($1)", transaction)
    here = [part for part in parts if part["tenant"] is not None]
    await tx.execute(
        "INSERT INTO tenants_processor.seat SELECT * FROM unnest($1::uuid[], $2::uuid[]) ON CONFLICT DO NOTHING",
        *([part["user"] for part in here], [part["tenant"] for part in here]),
    )
    gone = [part["user"] for part in parts if part["tenant"] is None]
    left = await tx.fetch('DELETE FROM tenants_processor.seat WHERE "user" = ANY ($1) RETURNING tenant', gone)
    for tenant in sorted({part["tenant"] for part in here} | {row["tenant"] for row in left}):
        seats = await tx.fetchval("SELECT count(*) FROM tenants_processor.seat WHERE tenant = $1", tenant)
        value = Seats(tenant=tenant, seats=seats) if seats else None
        await service.outbox.publish(tx, topics.seats, key=str(tenant), value=value)

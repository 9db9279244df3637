"""What clients send and see of a tenant, and what stands in Kafka. The difference between the two stays internal."""

import hashlib
from typing import Annotated, Literal
from uuid import UUID, uuid5

from pydantic import BaseModel, ConfigDict, StringConstraints
from sidings import Message

__all__ = [
    "Body",
    "Email",
    "Line",
    "NewTenant",
    "Problem",
    "RequestId",
    "Tenant",
    "TenantEvent",
    "TenantFields",
    "change_of",
    "digest_of",
    "tenant_id_of",
]

_NAMESPACE = UUID("6c1d21f8-52c1-5a3c-9a35-7f2a0b7c11d4")

# Lower case, so that one address is one text. A pattern and no `EmailStr`: OpenAPI then says exactly what is taken.
Email = Annotated[str, StringConstraints(pattern=r"^[a-z0-9._+-]{1,64}@[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63}){1,3}$")]
Line = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
RequestId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,100}$")]


class Body(BaseModel):
    """What a client sends. A field that is not known is refused: it may be a misspelt one."""

    model_config = ConfigDict(extra="forbid")


class TenantFields(Body):
    """What a client may say of a tenant. `payment_method` is a token of the payment provider's; it is never shown."""

    email: Email
    name: Line
    billing_address: Line
    payment_method: Line = "invoice"


class NewTenant(TenantFields):
    """The body of a POST. `request_id` does what the header `Idempotency-Key` does; give one of them, or none."""

    request_id: RequestId | None = None


class Tenant(BaseModel):
    """What a client sees of a tenant. `status` and `reason` are those of its latest change."""

    id: UUID
    email: str
    name: str
    billing_address: str
    status: Literal["pending", "active", "failed"]
    reason: str | None


class TenantEvent(BaseModel):
    """The value of an event: all about a tenant, so that no other event is needed to understand it.

    change: names the change that the event tells of; a repeat of the event has the same. customer: the provider's
    number of the tenant, in `tenant-created`. reason: why not, in `tenant-failed`.
    """

    id: UUID
    change: UUID
    email: str
    name: str
    billing_address: str
    payment_method: str
    customer: str | None = None
    reason: str | None = None


class Problem(BaseModel):
    """Why a request was not done."""

    detail: str


def change_of(message: Message[TenantEvent | None]) -> UUID:
    """Which change an event tells of. It stands in a header, so that a tombstone has it too."""
    return UUID((message.header("change") or b"").decode())


def tenant_id_of(email: str, ordinal: int = 0) -> UUID:
    """The id of a tenant that is created with this address; fixed from then on. ordinal: above 0 where a tenant that
    was created with it lives on under another address."""
    return uuid5(_NAMESPACE, f"{email} {ordinal}" if ordinal else email)


def digest_of(what: str, body: BaseModel) -> str:
    """Two requests with the same digest ask for the same."""
    text = body.model_dump_json(exclude={"request_id"})
    return hashlib.sha256(f"{what}\n{text}".encode()).hexdigest()

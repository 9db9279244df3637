"""The tenants' processor: takes changes from `tenant-pending`, registers the tenant with the payment provider, and
tells the outcome in `tenant-created` or `tenant-failed`.

Its steps, between any two of which it may die:

1. A message comes; a row for the change and a job are stored, together with the message's offset. The row has the key
   that the provider will know the call by. A change that has a row already is a repeat, and ignored.
2. The job calls the provider, with the stored key. Whatever goes wrong, it is tried again, with the same key.
3. The outcome and the event about it are committed together. An attempt that finds an outcome has nothing to do.
4. The relay sends the event.
"""

from uuid import UUID

from pydantic import BaseModel
from sidings import Job, Message, Retry, Service, Transaction
from tenacity import wait_exponential, wait_random

from .crash import crash_point
from .events import TenantEvent, change_of
from .payment import Declined, Payment, Registered
from .settings import Topics

__all__ = ["process_tenants"]


class Change(BaseModel):
    """The payload of the jobs. event: None where the tenant was deleted."""

    tenant: UUID
    change: UUID
    event: TenantEvent | None


def process_tenants(service: Service, topics: Topics, payment: Payment) -> None:
    """Declare the processor."""

    @service.consumer(topics.pending)
    async def on_pending(message: Message[TenantEvent | None], tx: Transaction) -> None:
        crash_point("processor: message taken")
        change = Change(tenant=UUID(message.key_text), change=change_of(message), event=message.value)
        query = """
            INSERT INTO tenants_processor.registration (change, tenant) VALUES ($1, $2)
            ON CONFLICT DO NOTHING RETURNING true
        """
        if await tx.fetchval(query, change.change, change.tenant):
            await settle.enqueue(tx, change)
        crash_point("processor: job stored")

    # The changes of one tenant run one at a time, in their order; one that fails delays no other tenant.
    @service.job(group="tenant", retry=Retry(wait=wait_exponential(0.2, max=60) + wait_random(0, 1)))
    async def settle(job: Job[Change]) -> None:
        change = job.payload
        crash_point("processor: job started")
        async with service.transaction() as tx:
            row = await tx.fetchrow(
                "SELECT key, outcome FROM tenants_processor.registration WHERE change = $1", change.change
            )
        assert row is not None
        if row["outcome"] is None:
            answer = await ask(row["key"], change)
            crash_point("processor: provider called")
            async with service.transaction() as tx:
                await decide(tx, change, answer)
                crash_point("processor: outcome written")
        crash_point("processor: outcome committed")

    async def ask(key: UUID, change: Change) -> Registered | Declined | None:
        if change.event is not None:
            return await payment.register(key, change.event)
        await payment.close_account(key, change.tenant)
        return None

    async def decide(tx: Transaction, change: Change, answer: Registered | Declined | None) -> None:
        """Store the outcome and publish it. A tenant stands in one of the two topics, or, once deleted, in none."""
        created = failed = None
        outcome = "closed"
        match answer, change.event:
            case Registered(customer), TenantEvent() as event:
                outcome, created = "registered", event.model_copy(update={"customer": customer})
            case Declined(reason), TenantEvent() as event:
                outcome, failed = "declined", event.model_copy(update={"reason": reason})
            case _:
                pass
        query = """
            UPDATE tenants_processor.registration SET outcome = $2, customer = $3, reason = $4
            WHERE change = $1 AND outcome IS NULL RETURNING true
        """
        customer, reason = created and created.customer, failed and failed.reason
        if await tx.fetchval(query, change.change, outcome, customer, reason):
            for topic, value in ((topics.created, created), (topics.failed, failed)):
                headers = {"change": str(change.change)}
                await service.outbox.publish(tx, topic, key=str(change.tenant), value=value, headers=headers)

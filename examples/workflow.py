"""A workflow in small: an order is split into its items, each is priced, and the invoice is sent when all are.

    python -m examples.workflow

No engine is needed for that. A job enqueues what comes next in the transaction that stores what it has done:

1. *Fan-out.* `split` writes down how many items there are, and enqueues a job for each. Both are there or neither is.
   A purchase that is there already was ordered twice: it is not split again.
2. *Fan-in.* Each `price` asks somebody else, which may take long, so no transaction is open meanwhile. Then, in one
   transaction, it stores its price and counts itself done in the order's row. The update locks that row, so one of them
   is the last, and knows it: it enqueues `send_invoice`. An attempt that fails before the commit leaves nothing; one
   that comes after it finds the line stored, and counts nothing. So each item counts once, and there is one invoice. Of
   no items none is the last: then `split` enqueues `send_invoice` itself.

Between the steps there is nothing in memory: whoever dies, another instance goes on.
"""

import asyncio
from collections.abc import Sequence
from secrets import token_hex

from pydantic import BaseModel
from sidings import Job, Retry, Service, StaticAssignment, devstack
from tenacity import wait_fixed

TABLES = """
CREATE TABLE IF NOT EXISTS purchase (id text PRIMARY KEY, items integer NOT NULL, priced integer NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS line (purchase text, number integer, cents integer NOT NULL, PRIMARY KEY (purchase, number));
CREATE TABLE IF NOT EXISTS invoice (purchase text PRIMARY KEY, cents integer NOT NULL);
"""
ORIGIN = "purchases/0"


class Purchase(BaseModel):
    """What somebody has ordered."""

    id: str
    items: list[str]


class Line(BaseModel):
    """One item of it. It has a number, as the same item may be in a purchase twice."""

    purchase: str
    number: int
    item: str


class Invoice(BaseModel):
    """All of it is priced."""

    purchase: str


async def price_of(item: str) -> int:
    """In cents: stands for a slow call to somebody else, which may fail."""
    await asyncio.sleep(0.01)
    return 100 * len(item)


def make_service(postgres: str, *, name: str = "workflow", schema: str = "sidings") -> Service:
    """The service, with the three steps."""
    service = Service(name, postgres=postgres, schema=schema, assignment=StaticAssignment([ORIGIN]))
    retry = Retry(wait=wait_fixed(0.2))

    @service.job(transactional=True, retry=retry)
    async def split(job: Job[Purchase]) -> None:
        purchase = job.payload
        query = "INSERT INTO purchase (id, items) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING true"
        if not await job.tx.fetchval(query, purchase.id, len(purchase.items)):
            return  # it was ordered before
        lines = [Line(purchase=purchase.id, number=n, item=item) for n, item in enumerate(purchase.items)]
        await price.enqueue_many(job.tx, lines)
        if not lines:  # then none of them is the last one
            await send_invoice.enqueue(job.tx, Invoice(purchase=purchase.id))

    @service.job(retry=retry, timeout=10)
    async def price(job: Job[Line]) -> None:
        line = job.payload
        cents = await price_of(line.item)  # before the transaction, so that none is open meanwhile
        async with service.transaction() as tx:
            query = "INSERT INTO line VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING true"
            if not await tx.fetchval(query, line.purchase, line.number, cents):
                return  # another attempt has stored and counted it
            # Last, because from here on the other lines of this purchase wait for our commit.
            complete = await tx.fetchval(
                "UPDATE purchase SET priced = priced + 1 WHERE id = $1 RETURNING priced = items", line.purchase
            )
            if complete:
                await send_invoice.enqueue(tx, Invoice(purchase=line.purchase))

    @service.job(group="purchase", transactional=True, retry=retry)
    async def send_invoice(job: Job[Invoice]) -> None:
        await job.tx.execute(
            "INSERT INTO invoice SELECT $1, coalesce(sum(cents), 0) FROM line WHERE purchase = $1",
            job.payload.purchase,
        )

    return service


async def order(service: Service, purchases: Sequence[Purchase]) -> None:
    """Start a workflow for each of these."""
    async with service.transaction() as tx:
        for purchase in purchases:
            await service.registry.enqueue(tx, "split", purchase, origin=ORIGIN)


async def main() -> None:
    """Three purchases; prints their invoices."""
    servers = await asyncio.to_thread(devstack.ensure)
    service = make_service(servers.postgres, schema="workflow")
    await service.migrate()
    ids = [f"{token_hex(4)}-{number}" for number in range(3)]
    async with service:
        async with service.transaction() as tx:
            await tx.execute(TABLES)
        await order(service, [Purchase(id=id, items=["tyre", "wiper", "mirror"][: n + 1]) for n, id in enumerate(ids)])
        async with asyncio.timeout(30):
            while True:
                async with service.transaction() as tx:
                    invoices = await tx.fetch("SELECT * FROM invoice WHERE purchase = ANY ($1) ORDER BY cents", ids)
                if len(invoices) == len(ids):
                    break
                await asyncio.sleep(0.05)
    for invoice in invoices:
        print(f"{invoice['purchase']}: {invoice['cents'] / 100:.2f}")


if __name__ == "__main__":
    asyncio.run(main())

"""A service that reads the events of customers: each has its effect exactly once, also if it comes twice."""

from typing import Any

from pydantic import BaseModel
from sidings import Message, Service, Transaction

__all__ = ["TABLES", "make_reader"]

TABLES = "CREATE TABLE customer (id text PRIMARY KEY, events integer NOT NULL, rows integer NOT NULL)"


class Event(BaseModel):
    """What a transaction, or an initial load, tells about one customer."""

    id: str
    rows: list[dict[str, Any]]


def make_reader(postgres: str, kafka: str, topic: str) -> Service:
    """Counts each customer's events and rows. `dedup` goes by the header `sidings-id`, the id of the event."""
    service = Service("cdc-reader", postgres=postgres, kafka=kafka)

    @service.consumer(topic, dedup=True)
    async def on_event(message: Message[Event], tx: Transaction) -> None:
        await tx.execute(
            "INSERT INTO customer VALUES ($1, 1, $2) ON CONFLICT (id) DO UPDATE "
            "SET events = customer.events + 1, rows = customer.rows + excluded.rows",
            message.value.id,
            len(message.value.rows),
        )

    return service

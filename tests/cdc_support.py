"""What the tests of change-data transactions share: the article's four tables, and records of transactions on them."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from sidings.spark_analytics.transactions import Config, Group

__all__ = [
    "WAIT_SECONDS",
    "Row",
    "Sent",
    "Until",
    "config",
    "debezium_rows",
    "following",
    "header_row",
    "header_rows",
    "produce",
    "read",
    "rows_of",
    "some_rows",
    "toml",
]

Json = dict[str, Any]
WAIT_SECONDS = 200.0  # a micro-batch takes many seconds where others work on the machine


@dataclass(frozen=True)
class Row:
    """A row change of a transaction."""

    table: str
    operation: str
    data: Json


@dataclass(frozen=True)
class Sent:
    """A message in an output topic."""

    topic: str
    key: str
    value: Json
    headers: dict[str, str]


Until = Callable[[Callable[[list[Sent]], bool], str], Awaitable[list[Sent]]]


def config(**values: object) -> Config:
    """The article's groups; the header form. customers, addresses: their topics."""
    customers, addresses = (str(values.pop(name, name)) for name in ("customers", "addresses"))
    groups = (
        Group(name="Address", key="address_id", root="Addresses", tables=("Addresses",), topic=addresses),
        Group(
            name="Customer",
            key="customer_id",
            root="Customers",
            tables=("Customers", "CustomerNames", "CustomerAddresses"),
            topic=customers,
            primary_keys={"CustomerNames": ("customer_id", "name_type")},
        ),
    )
    given: dict[str, Any] = {
        "kafka": "localhost:9092",
        "topics": ("cdc",),
        "checkpoint": "/nowhere",
        "alerts": "alerts",
        "groups": groups,
    }
    return Config(**given | values)


def header_row(
    row: Row, *, transaction: str | None = None, ordinal: int | None = None, last: bool | None = None
) -> bytes:
    """A record of the article's form; without a transaction one of a snapshot."""
    header: Json = {"table": row.table, "operation": row.operation}
    if transaction is not None:
        header |= {"transactionId": transaction, "transactionEventCounter": ordinal, "transactionLastEvent": last}
    return json.dumps({"header": header, "data": row.data}).encode()


def header_rows(transaction: str, rows: Sequence[Row]) -> list[bytes]:
    """The records of a transaction, in order."""
    return [
        header_row(row, transaction=transaction, ordinal=number, last=number == len(rows))
        for number, row in enumerate(rows, 1)
    ]


def debezium_rows(
    transaction: str, rows: Sequence[Row], *, texts: bool = False, wrapped: bool = False
) -> tuple[list[bytes], list[bytes]]:
    """The records of a transaction as Debezium's for Postgres: those of the tables, and its BEGIN and END.

    texts: numbers are written as text. wrapped: with Connect's schema around.
    """
    number = str if texts else int
    ops = {"INSERT": "c", "UPDATE": "u", "DELETE": "d", "SNAPSHOT": "r"}

    def made(value: Json) -> bytes:
        return json.dumps({"schema": {"type": "struct"}, "payload": value} if wrapped else value).encode()

    values: list[Json] = []
    for order, row in enumerate(rows, 1):
        op = ops[row.operation]
        block = {
            "id": f"{transaction}:{9000 + order}",
            "total_order": number(order),
            "data_collection_order": number(1),
        }
        values.append(
            {
                "op": op,
                "before": row.data if op == "d" else None,
                "after": None if op == "d" else row.data,
                "source": {"connector": "postgresql", "db": "shop", "schema": "public", "table": row.table},
                "transaction": None if op == "r" else block,
            }
        )
    boundaries = [
        {"status": "BEGIN", "id": f"{transaction}:8999", "event_count": None, "data_collections": None},
        {"status": "END", "id": f"{transaction}:9999", "event_count": number(len(rows)), "data_collections": []},
    ]
    return [made(value) for value in values], [made(value) for value in boundaries]


def some_rows(chance: random.Random, roots: int = 50) -> list[Row]:
    """A transaction of 1 to 8 rows on the four tables."""
    rows: list[Row] = []
    for _ in range(chance.randint(1, 8)):
        table = chance.choice(["Addresses", "Customers", "CustomerNames", "CustomerAddresses"])
        key = "address_id" if table == "Addresses" else "customer_id"
        data = {key: chance.randint(1, roots), "value": chance.randint(1, 10**6)}
        rows.append(Row(table, chance.choice(["INSERT", "UPDATE"]), data))
    return rows


async def produce(bootstrap: str, topic: str, values: Iterable[bytes | None]) -> None:
    """Send them, spread over the topic's partitions."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5) as producer:
        partitions = sorted(await producer.partitions_for(topic))
        for number, value in enumerate(values):
            key = b"gone" if value is None else None
            await producer.send(topic, value, key, partition=partitions[number % len(partitions)])


@asynccontextmanager
async def following(by: Config, alive: Callable[[], object], seconds: float = WAIT_SECONDS) -> AsyncIterator[Until]:
    """What waits until that which stands in the topics of events and alerts is enough, and returns all of it. alive: is
    asked all the while, and raises when there is nothing to wait for any more. seconds: at most."""
    sent: list[Sent] = []

    async def until(enough: Callable[[list[Sent]], bool], what: str) -> list[Sent]:
        deadline = asyncio.get_running_loop().time() + seconds
        while not enough(sent):
            alive()
            if asyncio.get_running_loop().time() > deadline:
                told = Counter(message.headers["type"] for message in sent)
                raise AssertionError(f"not within {seconds} s: {what}; what was sent: {dict(told)}")
            for records in (await consumer.getmany(timeout_ms=500)).values():
                sent.extend(map(_sent, records))
        return list(sent)

    # Without a group, all partitions are assigned at once.
    async with AIOKafkaConsumer(*_topics(by), bootstrap_servers=by.kafka, auto_offset_reset="earliest") as consumer:
        yield until


async def read(by: Config) -> list[Sent]:
    """All that is in the topics of events and alerts now."""
    async with AIOKafkaConsumer(*_topics(by), bootstrap_servers=by.kafka, auto_offset_reset="earliest") as consumer:
        parts = list(consumer.assignment())
        ends = await consumer.end_offsets(parts)
        sent: list[Sent] = []
        while any([await consumer.position(part) < ends[part] for part in parts]):
            for records in (await consumer.getmany(timeout_ms=200)).values():
                sent.extend(map(_sent, records))
        return sent


def _topics(by: Config) -> list[str]:
    return [*{group.topic for group in by.groups}, by.alerts]


def _sent(record: Any) -> Sent:
    headers = {name: value.decode() for name, value in record.headers}
    return Sent(record.topic, (record.key or b"").decode(), json.loads(record.value or b"null"), headers)


def rows_of(found: Sequence[Sent]) -> set[tuple[str, int]]:
    """Transactions' rows that have come, by ordinal; each event, told apart by its id, counts once."""
    events = {event.headers["sidings-id"]: event.value for event in found if "group" in event.value}
    rows = [
        (event["transaction"], row["ordinal"])
        for event in events.values()
        if "transaction" in event
        for row in event["rows"]
    ]
    assert len(rows) == len(set(rows)), "a row is in two different events"
    return set(rows)


def toml(by: Config) -> str:
    """The configuration as a file."""
    plain = by.model_dump(mode="json", exclude={"groups", "kafka_options"}, exclude_none=True)
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
    for group in by.groups:
        fields = group.model_dump(mode="json", exclude={"primary_keys"})
        lines += ["[[groups]]", *(f"{name} = {json.dumps(value)}" for name, value in fields.items())]
    return "\n".join(lines)

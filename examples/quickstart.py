"""Sidings in five minutes. From the repository's root, after `make setup`:

    .venv/bin/python examples/quickstart.py

Nine position reports of three lorries go through Kafka. A consumer counts them in Postgres and enqueues a job for each,
in the same transaction; the jobs tell a carrier. The carrier fails twice for lorry-2: its calls are retried, in order,
and delay nobody else's.
"""

import asyncio
import logging
import time
from collections import Counter
from secrets import token_hex

import asyncpg
from aiokafka import AIOKafkaProducer
from pydantic import BaseModel
from sidings import Job, Message, PostgresSettings, Retry, Service, Transaction, devstack
from sidings.devstack.topics import create_topic, delete_topics
from tenacity import wait_fixed

# On a fresh broker it logs errors until the group has a coordinator.
logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
servers = devstack.ensure()  # a Postgres and a Kafka on this machine, unless yours are named in the environment
TOPIC = f"positions-{token_hex(4)}"

# -- the service ------------------------------------------------------------------------------------------------------

service = Service(
    "quickstart", postgres=PostgresSettings(dsn=servers.postgres, schema_name="quickstart"), kafka=servers.kafka
)


class Position(BaseModel):
    transport_id: str
    report: int
    latitude: float
    longitude: float


@service.consumer(TOPIC)
async def on_position(message: Message[Position], tx: Transaction) -> None:
    position = message.value
    await tx.execute("UPDATE quickstart.lorry SET reports = reports + 1 WHERE id = $1", position.transport_id)
    await tell_carrier.enqueue(tx, position)  # committed with the update and with the message's offset, or not at all
    say(f"message  {position.transport_id} #{position.report}: row updated, job enqueued")


@service.job(group="transport_id", retry=Retry(wait=wait_fixed(1)))
async def tell_carrier(job: Job[Position]) -> None:
    position = job.payload
    if position.transport_id == "lorry-2" and position.report == 1 and job.attempt < 3:
        say(f"job      {position.transport_id} #{position.report}: the carrier does not answer, again in a second")
        raise ConnectionError("the carrier does not answer")
    say(f"job      {position.transport_id} #{position.report}: carrier told (attempt {job.attempt})")
    told[position.transport_id] += 1
    if told.total() == 9:
        done.set()


# -- what is needed to see it work ------------------------------------------------------------------------------------

told: Counter[str] = Counter()
done = asyncio.Event()
began = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - began:4.1f} s  {text}", flush=True)


async def main() -> None:
    database = await asyncpg.connect(servers.postgres)
    await database.execute("DROP SCHEMA IF EXISTS quickstart CASCADE")  # of a run that was cut short
    await service.migrate()  # Sidings' own tables, in the schema that we have named
    await database.execute("CREATE TABLE quickstart.lorry (id text PRIMARY KEY, reports integer NOT NULL DEFAULT 0)")
    await database.execute("INSERT INTO quickstart.lorry VALUES ('lorry-1'), ('lorry-2'), ('lorry-3')")
    try:
        await create_topic(servers.kafka, TOPIC, partitions=3)
        async with service:
            await send_reports()
            await asyncio.wait_for(done.wait(), 30)
        for row in await database.fetch("SELECT * FROM quickstart.lorry ORDER BY id"):
            say(f"result   {row['id']}: {row['reports']} reports in Postgres, carrier told {told[row['id']]} times")
    finally:
        await database.execute("DROP SCHEMA quickstart CASCADE")
        await database.close()
        await delete_topics(servers.kafka, [TOPIC])


async def send_reports() -> None:
    async with AIOKafkaProducer(bootstrap_servers=servers.kafka) as producer:
        for report in (1, 2, 3):
            for lorry in ("lorry-1", "lorry-2", "lorry-3"):
                position = Position(transport_id=lorry, report=report, latitude=59.44, longitude=24.75)
                await producer.send_and_wait(TOPIC, position.model_dump_json().encode(), key=lorry.encode())


if __name__ == "__main__":
    asyncio.run(main())

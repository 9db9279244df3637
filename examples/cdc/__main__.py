"""``python -m examples.cdc``: row changes into Kafka, through Spark, out as events; checked at the end."""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_hex

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from sidings import devstack
from sidings.devstack.databases import create_database, drop_database
from sidings.devstack.topics import create_topic, delete_topics
from sidings.spark_analytics import KAFKA_CONNECTOR, session
from sidings.spark_analytics.transactions import Config, Group, combine

from .changes import Change, Database, records, refresh
from .check import expected, problems
from .reader import TABLES, make_reader

BEGAN = time.monotonic()
PATIENCE = 300.0  # seconds
Topics = Mapping[str, str]


@dataclass
class Story:
    """What went in. lost: the transaction of which a message never came."""

    complete: dict[str, list[Change]]
    lost: str
    messages: list[bytes]


def invent(count: int, chance: random.Random) -> Story:
    """So many transactions: shuffled, some messages twice, one of them never; an initial load, and rubbish."""
    database = Database(chance)
    made = {token_hex(16): database.transaction() for _ in range(count)}
    lost = next(id for id, changes in made.items() if len(changes) > 2)
    messages = [record for id, changes in made.items() for record in records(id, changes)]
    messages.remove(records(lost, made[lost])[1])
    messages += chance.sample(messages, len(messages) // 10)
    load = [
        Change("Customers", "REFRESH", {"customer_id": 900}),
        Change("CustomerNames", "REFRESH", {"customer_id": 900}),
    ]
    messages += [*refresh(load), b"this is no JSON"]
    chance.shuffle(messages)
    return Story({id: changes for id, changes in made.items() if id != lost}, lost, messages)


async def main(count: int) -> int:
    """Run it; 0 if what came out is right."""
    story = invent(count, random.Random(7))
    servers = await asyncio.to_thread(devstack.ensure)
    mark = token_hex(4)
    topics = {name: f"{name}-{mark}" for name in ("cdc", "customers", "addresses", "alerts")}
    dsn = await create_database(servers.postgres, f"cdc_{mark}")
    try:
        for topic in topics.values():
            await create_topic(servers.kafka, topic, partitions=3)
        await send(servers.kafka, topics["cdc"], story.messages)
        say(f"{len(story.messages):,} row changes of {count:,} transactions are in Kafka, in any order")
        with tempfile.TemporaryDirectory(prefix="cdc-") as checkpoint:
            config = configured(servers.kafka, topics, checkpoint)
            starting = asyncio.create_task(asyncio.to_thread(start, config))
            try:
                _, query = await asyncio.shield(starting)
                say("Spark runs")
                wrong = await watch(query, servers.kafka, topics, story)
            finally:
                spark, query = await starting  # its thread goes on where we are interrupted, and writes the checkpoint
                await asyncio.to_thread(query.stop)
                await asyncio.to_thread(spark.stop)
        wrong += await read_once(dsn, servers.kafka, topics["customers"])
    finally:
        await drop_database(servers.postgres, dsn)
        await delete_topics(servers.kafka, list(topics.values()))
    for problem in wrong:
        print(f"WRONG: {problem}")
    say("all is as it should be" if not wrong else f"{len(wrong)} things are wrong")
    return 1 if wrong else 0


def configured(kafka: str, topics: Topics, checkpoint: str) -> Config:
    """The article's groups. Times are short, since nobody wants to wait an hour for an example."""
    address = Group(
        name="Address", key="address_id", root="Addresses", tables=("Addresses",), topic=topics["addresses"]
    )
    customer = Group(
        name="Customer",
        key="customer_id",
        root="Customers",
        tables=("Customers", "CustomerNames", "CustomerAddresses"),
        topic=topics["customers"],
    )
    return Config(
        kafka=kafka,
        topics=(topics["cdc"],),
        alerts=topics["alerts"],
        checkpoint=checkpoint,
        groups=(address, customer),
        expire_seconds=5,
        snapshot_quiet_seconds=2,
        trigger_seconds=1,
        state_partitions=2,
    )


def start(config: Config) -> tuple[SparkSession, StreamingQuery]:
    """A Spark of this process, with the connector that the devstack has fetched."""
    os.environ["SIDINGS_SPARK_JARS"] = ",".join(map(str, devstack.spark_jars()))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    spark = session(
        "cdc-example", KAFKA_CONNECTOR, {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}
    )
    return spark, combine(spark, config)


async def watch(query: StreamingQuery, kafka: str, topics: Topics, story: Story) -> list[str]:
    """Wait until everything has come, or time is up; what is wrong with it."""
    wanted = len(expected(story.complete))
    told = 0
    async with asyncio.timeout(PATIENCE):
        while True:
            if not query.isActive:
                return [f"the query has ended: {query.exception()}"]
            found = [
                json.loads(m.value or b"") for m in await everything(kafka, [topics["customers"], topics["addresses"]])
            ]
            alerts = [json.loads(m.value or b"") for m in await everything(kafka, [topics["alerts"]])]
            events = [event for event in found if "transaction" in event]
            snapshots = [event for event in found if event["type"] == "CustomerSnapshot"]
            if len(events) > told:
                told = len(events)
                say(f"{told:,} of {wanted:,} events")
            if told >= wanted and snapshots and {"incomplete", "bad-record"} <= {alert["alert"] for alert in alerts}:
                break
            await asyncio.sleep(0.5)
    say(f"such as {json.dumps(events[0])[:160]}…")
    say(f"the initial load: {json.dumps(snapshots[-1])[:160]}…")
    for alert in alerts:
        say(
            f"alert, {alert['alert']}: {alert['reason']}"
            + (f"; missing: {alert['missing']}" if "missing" in alert else "")
        )
    lost = [alert for alert in alerts if alert["transaction"] == story.lost]
    wrong = problems(story.complete, events)
    if [alert.get("missing") for alert in lost] != [[2]]:
        wrong.append(f"the lost row was not told: {lost}")
    return wrong


async def read_once(dsn: str, kafka: str, topic: str) -> list[str]:
    """All events of customers are sent again, as Spark does after a crash; a service reads them."""
    messages = await everything(kafka, [topic])
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        for message in messages:
            await producer.send_and_wait(topic, message.value, key=message.key, headers=list(message.headers))
    connection = await asyncpg.connect(dsn)
    await connection.execute(TABLES)
    service = make_reader(dsn, kafka, topic)
    await service.migrate()
    async with service, asyncio.timeout(PATIENCE):
        while await connection.fetchval("SELECT coalesce(sum(next_offset), 0) FROM sidings.consumer_offset") < 2 * len(
            messages
        ):
            await asyncio.sleep(0.1)
    counted = await connection.fetchval("SELECT sum(events) FROM customer")
    await connection.close()
    say(f"of {2 * len(messages)} messages, every one there twice, the reader has counted {counted} events")
    return (
        []
        if messages and counted == len(messages)
        else [f"the reader has counted {counted} events, not {len(messages)}"]
    )


async def send(kafka: str, topic: str, values: list[bytes]) -> None:
    """Without keys: spread over the partitions."""
    async with AIOKafkaProducer(bootstrap_servers=kafka, linger_ms=5) as producer:
        for number, value in enumerate(values):
            await producer.send(topic, value, partition=number % 3)


async def everything(kafka: str, topics: list[str]) -> list[ConsumerRecord]:
    """All that is in these topics now."""
    # Without a group, all partitions are assigned at once.
    async with AIOKafkaConsumer(*topics, bootstrap_servers=kafka, auto_offset_reset="earliest") as consumer:
        parts = list(consumer.assignment())
        ends = await consumer.end_offsets(parts)
        await consumer.seek_to_beginning(*parts)
        found: list[ConsumerRecord] = []
        while sum([await consumer.position(part) for part in parts]) < sum(ends.values()):
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += records
        return found


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:5.1f} s  {text}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.cdc", description=__doc__)
    parser.add_argument("--transactions", type=int, default=300)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has ignored by what it starts with `&`
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # the same orderly end
    try:
        sys.exit(asyncio.run(main(options.transactions)))
    except KeyboardInterrupt:
        sys.exit(130)

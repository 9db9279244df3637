"""Change-data rows through Spark: combined into transactions, and, as the floor, only read."""

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from secrets import token_hex

from aiokafka import AIOKafkaProducer
from sidings import devstack
from sidings.devstack.topics import create_topic

from ..meter import cpu_with_children
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []

PARTITIONS = 4
SHUFFLED = 5_000  # rows among which the order is random
WARM = 20_000  # rows that are done first: Spark compiles what it runs

KEYS = {
    "Addresses": "address_id",
    "Customers": "customer_id",
    "CustomerNames": "customer_id",
    "CustomerAddresses": "customer_id",
}

_filled: dict[tuple[str, int], str] = {}  # topics, by broker and number of rows: the variants read the same


async def _topic(bench: Bench, rows: int) -> str:
    assert bench.kafka is not None
    name = _filled.get((bench.kafka, rows))
    if name is None:
        name = f"bench-{token_hex(3)}"
        await create_topic(bench.kafka, name, partitions=PARTITIONS)
        chance = random.Random(7)
        values: list[bytes] = []
        while len(values) < rows:
            values += _transaction(chance, rows - len(values))
        async with AIOKafkaProducer(bootstrap_servers=bench.kafka, linger_ms=20) as producer:
            for begin in range(0, rows, SHUFFLED):
                part = values[begin : begin + SHUFFLED]
                chance.shuffle(part)
                for value in part:
                    await producer.send(name, value)
        _filled[bench.kafka, rows] = name
    return name


def _transaction(chance: random.Random, most: int) -> list[bytes]:
    """The row changes of one, in the header form: at most so many."""
    id, count = f"{chance.getrandbits(128):032X}", min(chance.randint(1, 9), most)
    values: list[bytes] = []
    for ordinal in range(1, count + 1):
        table = chance.choice(list(KEYS))
        header = {"table": table, "operation": chance.choice(["INSERT", "UPDATE"]), "transactionId": id}
        header |= {"transactionEventCounter": ordinal, "transactionLastEvent": ordinal == count}
        data = {
            KEYS[table]: chance.randint(1, 100_000),
            "street_number": "25",
            "street_name": "HALE",
            "street_type": "ST",
        }
        values.append(json.dumps({"header": header, "data": data}).encode())
    return values


async def _measured(bench: Bench, rows: int, *, combined: bool) -> Figures:
    assert bench.kafka is not None
    warm, topic = await _topic(bench, WARM), await _topic(bench, rows)
    for name in ("addresses", "customers", "alerts"):
        if (bench.kafka, name) not in _made:
            await create_topic(bench.kafka, name, partitions=2)
            _made.add((bench.kafka, name))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # Spark ends with that process
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, _spark, bench.kafka, warm, topic, rows, combined)


_made: set[tuple[str, str]] = set()


def _spark(kafka: str, warm: str, topic: str, rows: int, combined: bool) -> Figures:
    """In a process of its own: all rows once; their CPU is that of this process, its JVM and Python's workers."""
    from sidings.spark_analytics import KAFKA_CONNECTOR, session

    os.environ |= {"SIDINGS_SPARK_JARS": ",".join(map(str, devstack.spark_jars())), "SPARK_LOCAL_IP": "127.0.0.1"}
    settings = {"spark.master": "local[2]", "spark.log.level": "OFF", "spark.ui.showConsoleProgress": "false"}
    spark = session("bench", KAFKA_CONNECTOR, settings)
    try:
        _once(spark, kafka, warm, combined)
        began, used = time.perf_counter(), cpu_with_children()
        _once(spark, kafka, topic, combined)
        seconds = time.perf_counter() - began
        return {
            "messages": rows / seconds,
            "client_us": (cpu_with_children() - used) / rows * 1e6,
            "work_seconds": seconds,
        }
    finally:
        spark.stop()


def _once(spark, kafka: str, topic: str, combined: bool) -> None:
    from sidings.spark_analytics.transactions import combine

    with tempfile.TemporaryDirectory() as folder:
        if combined:
            combine(spark, _config(kafka, topic, folder), available_now=True).awaitTermination()
            return
        source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", kafka).option("subscribe", topic)
        sink = source.option("startingOffsets", "earliest").load().select("value").writeStream.format("noop")
        sink.option("checkpointLocation", folder).trigger(availableNow=True).start().awaitTermination()


def _config(kafka: str, topic: str, folder: str):
    from sidings.spark_analytics.transactions import Config, Group

    tables = ("Customers", "CustomerNames", "CustomerAddresses")
    return Config(
        kafka=kafka,
        topics=(topic,),
        checkpoint=folder,
        alerts="alerts",
        state_partitions=2,
        groups=(
            Group(name="Address", key="address_id", root="Addresses", tables=("Addresses",), topic="addresses"),
            Group(name="Customer", key="customer_id", root="Customers", tables=tables, topic="customers"),
        ),
    )


@scenario(
    "cdc",
    "Row changes of small transactions, combined on Spark with two threads",
    key="messages",
    compare=[Compare("combined", "floor: Spark reads them")],
    note="Rows of transactions of 1 to 9 rows, in random order among 5,000, in 4 partitions; all of them "
    "are in Kafka before. From the start of the query to its end, in a Spark that is warm; CPU is that of the JVM and "
    "of Python's workers. The floor reads them and does nothing.",
    kafka=True,
    spark=True,
)
def cdc(size: Size) -> Sequence[Variant]:
    rows = size.jobs(150_000)
    return [
        Variant("floor: Spark reads them", lambda b: _measured(b, rows, combined=False), {"rows": rows}),
        Variant("combined", lambda b: _measured(b, rows, combined=True), {"rows": rows}, repetitions=3),
    ]

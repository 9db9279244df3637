"""What each start of a broker would work out again: made once per Kafka and Java, beside Kafka's jars.

Java's archive of the classes that a broker loads, and what is written into a new broker's empty storage: a start takes
some 2 seconds of the processor with them, 5 without.
"""

import asyncio
import logging
import shutil
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError

from .broker import CLASSES, Broker, BrokerPlan, kafka_id, prepared
from .errors import DevstackError
from .jars import Report, lock, partial_of, to_stderr
from .locations import LOOPBACK, free_ports
from .topics import create_topic

__all__ = ["prepare"]

USE_SECONDS = 60
END_SECONDS = 120  # the archive is written as the broker ends


def prepare(report: Report = to_stderr) -> None:
    """Make it, where it is not there yet: a broker is started, used and ended for it: some 20 s of the processor.

    Safe with several processes at once, as `kafka_jars`. Where it cannot be made, as in a cache that may only be read,
    or by a Java without archives, that is told, and a start takes what it takes without.
    """
    folder = prepared()
    if folder.is_dir():
        return
    try:
        with lock(folder.with_name(f"{folder.name}.lock"), "Kafka's start", report):
            if not folder.is_dir():
                _make(folder, report)
    except (OSError, KafkaError, DevstackError) as error:
        report(f"Kafka's start is not prepared: {error}")


def _make(folder: Path, report: Report) -> None:
    report("Preparing Kafka's start: about 50 MB, once.")
    work = partial_of(folder)
    made = work / "made"
    port, controller = free_ports(2)
    archive = (f"-XX:ArchiveClassesAtExit={made / CLASSES}",)
    broker = Broker(work / "broker", BrokerPlan(1, kafka_id(), {1: port}, {1: controller}, jvm=archive))
    broker.kill()  # that of one that was killed
    shutil.rmtree(work, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        try:
            broker.start()
            asyncio.run(asyncio.wait_for(_use(f"{LOOPBACK}:{port}"), USE_SECONDS))
            broker.stop(END_SECONDS)
        finally:
            broker.kill()
        if not (made / CLASSES).exists():
            raise DevstackError("Java has made no archive of the broker's classes")
        shutil.copy(broker.fresh_storage, made)
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


async def _use(bootstrap: str) -> None:
    """What tests do with a broker: it loads the classes for it."""
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())  # it says that a coordinator has to start first
    await create_topic(bootstrap, "used", partitions=1)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id="used")
    async with producer, producer.transaction():
        await producer.send_and_wait("used", b"")
    consumer = AIOKafkaConsumer("used", bootstrap_servers=bootstrap, group_id="used", auto_offset_reset="earliest")
    async with consumer:
        await consumer.getone()
        await consumer.commit()

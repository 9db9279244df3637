"""Compaction takes the marker from a transaction's end, and leaves its batch, empty, for the producer's epoch."""

import asyncio
import struct
from pathlib import Path

from aiokafka import AIOKafkaProducer
from sidings import Message, Service
from sidings.devstack.topics import create_topic

from .consumer_support import producing
from .directory_support import COMPACTED, a_directory, quick, row
from .support import SECONDS, eventually

CONFIG = COMPACTED | {"segment.ms": "200", "min.cleanable.dirty.ratio": "0.001", "delete.retention.ms": "0"}
CONTROL = 0x20
HEADER = struct.Struct(">qiibIhiqqqhii")  # of a batch


def has_emptied_marker(folder: Path, topic: str) -> bool:
    """Whether partition 0's log, as it is on the disk, has a control batch without a record."""
    for segment in folder.rglob(f"{topic}-0/*.log"):
        log, at = segment.read_bytes(), 0
        while at + HEADER.size <= len(log):
            _, length, _, _, _, attributes, *_, records = HEADER.unpack_from(log, at)
            if attributes & CONTROL and records == 0:
                return True
            at += 12 + length
    return False


async def test_what_stands_behind_a_marker_that_compaction_has_emptied_is_read(own_kafka):
    """Directories and consumers made their client anew, again and again, and read nothing more."""
    kafka = await asyncio.to_thread(own_kafka, settings={"log.cleaner.backoff.ms": "100"})
    await create_topic(kafka.bootstrap, "terminals", partitions=1, config=CONFIG)
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id="it")
    await producer.start()
    await producer.begin_transaction()
    await producer.send_and_wait("terminals", row("T-0"), key=b"T-0")
    await producer.stop()  # with its transaction open
    successor = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id="it")
    await successor.start()  # aborts it, with an epoch of which the log has nothing else
    await successor.stop()
    async with asyncio.timeout(SECONDS), producing(kafka.bootstrap) as plain:
        turn = 0
        while not await asyncio.to_thread(has_emptied_marker, kafka.directory, "terminals"):
            turn += 1
            await plain.send_and_wait("terminals", row("T-1", str(turn)), key=b"T-1")
            await asyncio.sleep(0.3)  # closes a segment

    service, read = Service("tracker", kafka=quick(kafka.bootstrap)), list[str | None]()

    @service.consumer("terminals", stateless=True, dead_letter="none")
    async def on_row(message: Message[dict[str, str]]) -> None:
        read.append(message.value["acquirerId"])

    async with asyncio.timeout(SECONDS), service, a_directory("terminals", kafka.bootstrap) as terminals:
        assert [(key, value.acquirer_id) for key, value in terminals.items()] == [("T-1", str(turn))]
        await eventually(lambda: str(turn) in read, read)

"""One reader of a directory's topic, in a process of its own: `python -m benchmarks.replica KIND BOOTSTRAP TOPIC FILE`.

It prints a line of JSON: the records that it holds, the seconds until it was ready, its CPU in that time, and its
memory at the peak. Imports take none of that time; a service has made them long before.
"""

import asyncio
import gc
import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from aiokafka import AIOKafkaConsumer, TopicPartition
from pydantic import BaseModel
from sidings.collector import relax_collector
from sidings.kafka.directory import Directory, SQLite

from .memory import peak_mib

__all__ = ["READERS", "TerminalAcquirer"]

FETCH_BYTES = 4 * 2**20  # of a partition at once, as the directory does; with the client's default it is slower

Ready = Callable[[], None]  # called as soon as all is read: closing is not counted


class TerminalAcquirer(BaseModel):
    """The row of the table in the article."""

    id: int
    terminal_id: str
    acquirer_id: str
    is_active: bool
    updated_date: datetime


async def _bare(bootstrap: str, topic: str, _: Path, ready: Ready) -> int:
    """All records of the topic, thrown away."""
    consumer, records = await _consumer(bootstrap, topic), 0
    ends = await consumer.end_offsets(consumer.assignment())
    while not await _there(consumer, ends):
        records += sum(len(found) for found in (await consumer.getmany(timeout_ms=100)).values())
    ready()
    await consumer.stop()
    return records


async def _by_hand(bootstrap: str, topic: str, _: Path, ready: Ready) -> int:
    """What one writes without a directory: a loop that puts models into a dict."""
    consumer, rows = await _consumer(bootstrap, topic), dict[bytes | None, TerminalAcquirer]()
    ends = await consumer.end_offsets(consumer.assignment())
    while not await _there(consumer, ends):
        for found in (await consumer.getmany(timeout_ms=100)).values():
            for record in found:
                if record.value is None:
                    rows.pop(record.key, None)
                else:
                    rows[record.key] = TerminalAcquirer.model_validate_json(record.value)
    ready()
    await consumer.stop()
    return len(rows)


async def _memory(bootstrap: str, topic: str, _: Path, ready: Ready) -> int:
    """Ours."""
    async with Directory(topic, kafka=bootstrap, model=TerminalAcquirer) as directory:
        ready()
        return len(directory)


async def _sqlite(bootstrap: str, topic: str, file: Path, ready: Ready) -> int:
    """Ours, in a file: cold where there is none yet."""
    storage = SQLite[TerminalAcquirer](file)
    async with Directory(topic, kafka=bootstrap, model=TerminalAcquirer, storage=storage) as directory:
        ready()
        return len(directory)


async def _consumer(bootstrap: str, topic: str) -> AIOKafkaConsumer:
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest", max_partition_fetch_bytes=FETCH_BYTES
    )
    await consumer.start()
    return consumer


async def _there(consumer: AIOKafkaConsumer, ends: dict[TopicPartition, int]) -> bool:
    return all([await consumer.position(partition) >= end for partition, end in ends.items()])


READERS = {"bare": _bare, "by hand": _by_hand, "memory": _memory, "sqlite": _sqlite}


def main(kind: str, bootstrap: str, topic: str, file: str) -> None:
    """Read once, and say what it took."""
    logging.disable(logging.CRITICAL)
    relax_collector()  # as Service.run() does
    gc.collect()
    cpu, began = time.process_time(), time.perf_counter()

    figures: dict[str, float] = {}

    def ready() -> None:
        figures.update(seconds=time.perf_counter() - began, cpu=time.process_time() - cpu)

    figures["records"] = asyncio.run(READERS[kind](bootstrap, topic, Path(file), ready))
    print(json.dumps(figures | {"memory_mib": peak_mib()}))


if __name__ == "__main__":
    main(*sys.argv[1:])

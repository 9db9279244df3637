"""A record that the client cannot read, and says so of no partition: it stops its own, and nothing else."""

import asyncio
import contextlib
import os
import struct
import sys
from typing import Any

import pytest
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c
from sidings import Message, OffsetOutOfRange, Transaction
from sidings.kafka.fetch_loop import FetchLoop
from sidings.kafka.membership import UNREADABLE
from sidings.kafka.partition import Partition

from .consumer_support import Number, a_service, as_json, numbers, offset_reaches, produce, producing, record, sample
from .support import SECONDS, eventually

# A header whose name is no UTF-8, as C clients can send it. aiokafka's compiled part takes no such name.
BAD = """
import asyncio, sys
from aiokafka import AIOKafkaProducer

class Name(str):
    def encode(self, *_):
        return b"\\xff\\xfe"

async def main(bootstrap, topic, partition, before, after):
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        batch = producer.create_batch()
        for n in range(-int(before), int(after) + 1):
            headers = [] if n else [(Name("x"), b"")]
            batch.append(timestamp=None, key=b"k", value=b'{"n": %d}' % n, headers=headers)
        await (await producer.send_batch(batch, topic, partition=int(partition)))

asyncio.run(main(*sys.argv[1:]))
"""


async def produce_unreadable(bootstrap: str, topic: str, partition: int, *, before: int = 0, after: int = 0) -> None:
    """One such record, in a batch with as many good ones before and after it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BAD, bootstrap, topic, str(partition), str(before), str(after)),
        env=os.environ | {"AIOKAFKA_NO_EXTENSIONS": "1"},
    )
    assert await asyncio.wait_for(process.wait(), SECONDS) == 0


def sealed(batch: bytes) -> bytes:
    """With the length and the checksum that fit its bytes."""
    sealed = bytearray(batch)
    struct.pack_into(">i", sealed, 8, len(sealed) - 12)
    struct.pack_into(">I", sealed, 17, calc_crc32c(sealed[21:]))
    return bytes(sealed)


async def produce_padded(bootstrap: str, topic: str, partition: int, codec: str, *, count: int = 1) -> None:
    """Records in one batch with a byte too many behind what is compressed. Brokers read no further than the records."""
    async with producing(bootstrap, compression_type=codec) as producer:
        batch: Any = producer.create_batch()
        for n in range(count):
            batch.append(timestamp=None, key=b"k", value=as_json(n), headers=[])
        batch._buffer = sealed(batch._build() + b"\xff")
        await asyncio.wait_for(await producer.send_batch(batch, topic, partition=partition), SECONDS)


@pytest.mark.parametrize("codec", [1, 2, 3, 4], ids=["gzip", "snappy", "lz4", "zstd"])
def test_whatever_is_wrong_with_what_is_compressed_is_known_for_it(codec: int):
    """Another error was taken for a mistake inside of the client, which was made anew for ever."""
    builder: Any = BatchBuilder(10_000, codec)
    for n in range(10):
        builder.append(timestamp=None, key=b"k", value=as_json(n) * 10, headers=[("name", b"value")])
    whole = builder._build()
    assert len(list(MemoryRecords(sealed(whole)).next_batch())) == 10
    damaged = [whole + b"\xff"]
    for n in range(61, len(whole)):  # behind the batch's header
        damaged += [whole[:n], whole[:n] + bytes([whole[n] ^ 0xFF]) + whole[n + 1 :]]
    for batch in damaged:
        with contextlib.suppress(*UNREADABLE):
            for each in MemoryRecords(sealed(batch)).next_batch():
                assert each.headers is not None


@pytest.mark.parametrize(
    ("codec", "stateless"),
    [
        pytest.param(None, False, id="ordinary"),
        pytest.param(None, True, id="stateless"),
        *(pytest.param(codec, False, id=codec) for codec in ("gzip", "snappy", "lz4")),
        pytest.param("lz4", True, id="stateless-lz4"),
    ],
)
async def test_a_record_that_cannot_be_read_stops_its_partition_and_no_other(
    effects, topic, sidings_kafka, monkeypatch, codec, stateless
):
    monkeypatch.setattr("sidings.kafka.fetch_loop.LOOK_AGAIN_SECONDS", 0.3)
    monkeypatch.setattr("sidings.kafka.stateless_loop.LOOK_AGAIN_SECONDS", 0.3)
    name = await topic(partitions=3)
    other = await topic("other")
    for partition in range(3):
        await produce(sidings_kafka, name, range(5), partition=partition)
    if codec:
        await produce_padded(sidings_kafka, name, 1, codec)
    else:
        await produce_unreadable(sidings_kafka, name, 1)
    await produce(sidings_kafka, name, range(6, 9), partition=1)
    service = a_service(None if stateless else effects, sidings_kafka)
    done: dict[tuple[str, int], list[int]] = {(name, 0): [], (name, 1): [], (name, 2): [], (other, 0): []}

    async def handle(message: Message[Number], tx: Transaction | None = None) -> None:
        done[message.topic, message.partition].append(message.value.n)

    async def alone(message: Message[Number]) -> None:
        await handle(message)

    for one in (name, other):
        if stateless:
            service.consumer(one, stateless=True, dead_letter=f"{one}.dlq")(alone)
        else:
            service.consumer(one)(handle)
    looks: list[str] = []
    refuse = FetchLoop._refuse

    def looked(self: FetchLoop, partition: Partition, error: Exception) -> None:
        looks.append(partition.origin)
        refuse(self, partition, error)

    monkeypatch.setattr(FetchLoop, "_refuse", looked)
    told = f"{name}/1 stands still: the record at offset 5 cannot be read"
    async with service:
        await eventually(lambda: done[name, 0] == done[name, 1] == done[name, 2] == list(range(5)), lambda: done)
        await eventually(lambda: any(told in problem for problem in service.problems()), service.problems)
        await produce(sidings_kafka, name, [5], partition=0)
        await produce(sidings_kafka, other, [0])
        await eventually(lambda: done[name, 0][-1] == 5 and done[other, 0] == [0], lambda: done)
        await eventually(lambda: len(looks) > 2)
        await produce(sidings_kafka, name, [6], partition=0)
        await produce(sidings_kafka, other, [1])
        await eventually(lambda: done[name, 0][-1] == 6 and done[other, 0] == [0, 1], lambda: done)
        assert [problem for problem in service.problems() if told not in problem] == []
        assert sample(service, "sidings_consumer_errors_total", server="kafka") == 0, "no connection was given up"
        if not stateless:
            await service.reset_offsets(name, 6, partitions=[1], actor="alice")
            await eventually(offset_reaches(effects, name, 9, 1))
            await eventually(lambda: service.problems() == [])
    assert done[name, 1] == ([0, 1, 2, 3, 4] if stateless else [0, 1, 2, 3, 4, 6, 7, 8])
    assert done[name, 0] == list(range(7))
    assert done[name, 2] == list(range(5))


async def test_a_reset_says_where_the_batch_of_such_a_record_ends(effects, topic, sidings_kafka):
    """The client reads batches: what stands behind the record in its batch cannot be read either."""
    name = await topic()
    await produce(sidings_kafka, name, range(2))
    await produce_unreadable(sidings_kafka, name, 0, before=3, after=40)
    await produce(sidings_kafka, name, [100, 101])
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    async with service:
        await eventually(lambda: any("the record at offset 5 cannot be read" in p for p in service.problems()))
        assert await numbers(effects) == [0, 1, -3, -2, -1]
        for offset in (6, 44, 45):
            with pytest.raises(OffsetOutOfRange, match=rf"record at {offset} cannot be read.* next that can is 46"):
                await service.reset_offsets(name, offset, partitions=[0], actor="alice")
        await service.reset_offsets(name, 46, partitions=[0], actor="alice")
        await eventually(offset_reaches(effects, name, 48))
    assert await numbers(effects) == [0, 1, -3, -2, -1, 100, 101]


async def test_a_reset_says_where_a_batch_ends_that_cannot_be_decompressed(effects, topic, sidings_kafka):
    """It raised the bare error of the library that decompresses."""
    name = await topic()
    await produce_padded(sidings_kafka, name, 0, "lz4", count=40)
    await produce(sidings_kafka, name, [100, 101])
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    async with service:
        with pytest.raises(OffsetOutOfRange, match=r"record at 3 cannot be read.* next that can is 40"):
            await service.reset_offsets(name, 3, partitions=[0], actor="alice")
        await service.reset_offsets(name, 40, partitions=[0], actor="alice")
        await eventually(offset_reaches(effects, name, 42))
    assert await numbers(effects) == [100, 101]

"""An instance whose wall clock jumps, as where it is put right, or the machine wakes up."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from sidings import Message, Transaction
from sidings.kafka.directory.reader import Reader
from sidings.kafka.fetch_loop import FetchLoop
from sidings.kafka.partition import Item, Partition, State

from .consumer_support import Number, a_service, produce
from .directory_support import quick
from .support import eventually

HOUR = 3_600.0


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + seconds)


async def test_it_does_not_make_kafka_seem_silent(
    effects: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While messages are at hand the client does not ask Kafka, and an answer seemed to be an hour old: `/health` was
    bad for as long as they took."""
    monkeypatch.setattr("sidings.kafka.vitals._STUCK_SECONDS", 0.5)
    positions, service = await topic("positions", partitions=1), a_service(effects, sidings_kafka)
    begun, go = asyncio.Event(), asyncio.Event()

    @service.consumer(positions, model=Number)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        begun.set()
        await go.wait()

    async with service:
        parts = service._life.consumer.vitals._partitions

        def placed() -> bool:  # for longer than Kafka may be silent
            return [p.state is State.READY and time.monotonic() - p.since > 1.0 for p in parts()] == [True]

        await eventually(placed)
        await produce(sidings_kafka, positions, [0])
        await begun.wait()
        with monkeypatch.context() as patched:
            set_clock(patched, HOUR)
            assert not [problem for problem in service.problems() if "has not answered" in problem]
        go.set()


async def test_a_directory_counts_the_silence_of_kafka_by_a_clock_that_nobody_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = Reader(quick("127.0.0.1:1"), "terminals")
    try:
        reader.assign({0})
        now = round(1_000 * time.time())
        reader._client.last_poll_timestamp = lambda tp: now
        with monkeypatch.context() as patched:
            set_clock(patched, HOUR)
            assert reader.silence() < HOUR / 2
        with monkeypatch.context() as patched:
            set_clock(patched, -HOUR)
            await eventually(lambda: reader.silence() > 0.1)
    finally:
        await reader.close()


class Loop(FetchLoop):
    in_flight = 0

    async def _handle(self, items: list[Item]) -> None: ...


async def test_a_partition_that_may_not_be_read_seems_well_only_when_kafka_has_answered_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tp = TopicPartition("positions", 0)
    partition = Partition(tp)
    partition.place(0)
    told = [round(1_000 * time.time())]

    async def position(_: TopicPartition) -> int:
        return partition.end

    async def nothing(*_: Any, **options: int) -> dict[TopicPartition, Any]:
        await asyncio.sleep(0.001)  # the clock goes on
        return {}

    client: Any = SimpleNamespace(
        position=position, getmany=nothing, last_poll_timestamp=lambda _: told[-1], pause=lambda _: None
    )
    parts: Any = SimpleNamespace(topic="positions", spawn=lambda work: work.close(), paused=False)
    loop = Loop(parts, client, {tp: partition}, parts, max_records=10)
    loop._refuse(partition, "there is no right to read it")
    partition.place(0)
    set_clock(monkeypatch, -HOUR)
    await loop._poll([partition], interrupted=False)
    assert partition.problem() == "positions/0 stands still: there is no right to read it"
    told.append(round(1_000 * time.time()))
    await loop._poll([partition], interrupted=False)
    assert partition.problem() is None

"""An instance whose wall clock jumps, as where it is put right, or the machine wakes up."""

import asyncio
import time

import pytest
from sidings import Message, Transaction
from sidings.kafka.directory.reader import Reader
from sidings.kafka.partition import State

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

"""A directory whose topic was cut off, as after an unclean leader election, and has grown again past what was read."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError
from sidings import DirectoryBehind, SQLite
from sidings.devstack import Kafka
from sidings.devstack.fixtures import OwnKafka
from sidings.devstack.topics import create_topic
from sidings.kafka.directory.reader import Reader
from sidings.kafka.directory.same_log import SameLog

from .consumer_support import producing
from .directory_support import COMPACTED, a_directory, put, quick, row
from .support import SECONDS, eventually
from .test_cut_logs import lose

TOPIC = "terminals"


async def cut_and_grow(kafka: Kafka) -> set[str]:
    """All from offset 6 on is lost; where the last one was, at 9, is a transaction's marker now."""
    lose(kafka, TOPIC, 6)
    async with producing(kafka.bootstrap, transactional_id="anew") as producer:
        for key in ("U-6", "U-8", "U-10"):
            async with producer.transaction():
                await producer.send(TOPIC, row(key), key=key.encode(), partition=0)
    return {f"T-{n}" for n in range(6)} | {"U-6", "U-8", "U-10"}


@pytest.fixture
def cut_kafka(own_kafka: OwnKafka) -> Kafka:
    return own_kafka()


@pytest.mark.long
async def test_what_was_cut_off_while_nobody_ran_is_gone(cut_kafka: Kafka, tmp_path: Path, caplog: Any) -> None:
    kafka, path = cut_kafka, tmp_path / "terminals.db"
    await create_topic(kafka.bootstrap, TOPIC, partitions=1, config=COMPACTED)
    await put(kafka.bootstrap, TOPIC, {f"T-{n}": row(f"T-{n}") for n in range(10)})
    async with a_directory(TOPIC, kafka.bootstrap, storage=SQLite(path)) as terminals:
        assert terminals.positions() == {0: 10}
    wanted = await cut_and_grow(kafka)
    async with a_directory(TOPIC, kafka.bootstrap, storage=SQLite(path)) as terminals:
        assert set(terminals) == wanted
    assert "was cut off at 6, before 10" in caplog.text


async def test_what_is_cut_off_under_a_running_directory_goes(cut_kafka: Kafka, caplog: Any) -> None:
    """Which stands still meanwhile, as one does whose machine is busy."""
    kafka = cut_kafka
    await create_topic(kafka.bootstrap, TOPIC, partitions=1, config=COMPACTED)
    await put(kafka.bootstrap, TOPIC, {f"T-{n}": row(f"T-{n}") for n in range(10)})
    async with a_directory(TOPIC, kafka.bootstrap) as terminals:
        with ThreadPoolExecutor(1) as pool:
            wanted = pool.submit(asyncio.run, cut_and_grow(kafka)).result()
        await eventually(lambda: set(terminals) == wanted, lambda: (set(terminals), terminals.positions()))


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connects anew"])
@pytest.mark.parametrize("first", [True, False], ids=["first load", "read again"])
async def test_what_is_cut_off_while_it_is_read_is_not_waited_for(
    cut_kafka: Kafka, monkeypatch: pytest.MonkeyPatch, first: bool, connected: bool
) -> None:
    """The log ends between what was read and what was to be reached, and nothing comes any more."""
    kafka = cut_kafka
    await create_topic(kafka.bootstrap, TOPIC, partitions=1, config=COMPACTED)
    await put(kafka.bootstrap, TOPIC, {f"T-{n}": row(f"T-{n}") for n in range(10)})
    monkeypatch.setattr("sidings.kafka.directory.reader._PARTITION_FETCH_BYTES", 1)  # a batch at a time
    terminals = a_directory(TOPIC, quick(kafka.bootstrap, partition_fetch_bytes=1))
    half, cut, fetch, look = asyncio.Event(), asyncio.Event(), Reader.fetch, SameLog.look
    reasons = [] if first else ["a test"]

    async def stopping(self: Reader, seconds: float, most: int) -> Any:
        if not reasons and 3 <= terminals.positions().get(0, 0) < 6 and not half.is_set():
            half.set()
            await cut.wait()
            if not connected:
                raise KafkaConnectionError
        return await fetch(self, seconds, most)

    async def once(self: SameLog, reader: Reader) -> str | None:
        return reasons.pop() if reasons else await look(self, reader)

    monkeypatch.setattr(Reader, "fetch", stopping)
    monkeypatch.setattr(SameLog, "look", once)
    running = asyncio.create_task(terminals.run())
    try:
        await eventually(half.is_set, terminals.not_ready)
        assert terminals.ready is not first
        waiters = [asyncio.create_task(terminals.wait_until(*offset)) for offset in ([], [9])]
        await asyncio.sleep(0)
        await asyncio.to_thread(lose, kafka, TOPIC, 7)
        cut.set()
        wanted = {f"T-{n}" for n in range(7)}
        await eventually(lambda: terminals.ready and set(terminals) == wanted, terminals.not_ready)
        await terminals.wait_until(timeout=SECONDS)
        async with asyncio.timeout(SECONDS):
            await waiters[0]
            with pytest.raises(DirectoryBehind, match="made anew, or cut off"):
                await waiters[1]
    finally:
        terminals.stop()
        await running

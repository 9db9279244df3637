"""A directory whose topic was cut off, as after an unclean leader election, and has grown again past what was read."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sidings import SQLite
from sidings.devstack import Kafka
from sidings.devstack.fixtures import OwnKafka
from sidings.devstack.topics import create_topic

from .consumer_support import producing
from .directory_support import COMPACTED, a_directory, put, row
from .support import eventually
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

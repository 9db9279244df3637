"""Kafka is set back to a snapshot of its disks: the topic's id and its leaders' epochs come again."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from sidings import SQLite
from sidings.devstack import Kafka
from sidings.devstack.topics import create_topic

from .consumer_support import Number, a_service, numbers, offset_reaches, produce, producing, record
from .directory_support import COMPACTED, a_directory, put, row
from .support import eventually


def take_snapshot(kafka: Kafka, path: Path, *, restarts: int = 0) -> None:
    """restarts: afterwards, each with another epoch of the leader."""
    kafka.stop()
    shutil.copytree(kafka.directory, path / "snapshot")
    kafka.start()
    for _ in range(restarts):
        kafka.stop()
        kafka.start()


def set_back(kafka: Kafka, path: Path) -> None:
    kafka.stop()
    shutil.rmtree(kafka.directory)
    shutil.copytree(path / "snapshot", kafka.directory)
    kafka.start()


@pytest.mark.chaos
async def test_offsets_that_are_reset_before_anything_is_produced_pass_over_nothing(effects, own_kafka, tmp_path):
    kafka = own_kafka()
    await create_topic(kafka.bootstrap, "rides", partitions=1)

    def consuming():
        service = a_service(effects, kafka.bootstrap)
        service.consumer("rides", model=Number)(record)
        return service

    async def handled(first: int, end: int, offset: int) -> None:
        await produce(kafka.bootstrap, "rides", range(first, end))
        async with consuming():
            await eventually(offset_reaches(effects, "rides", offset))

    await handled(0, 3, 3)
    take_snapshot(kafka, tmp_path)
    await handled(3, 6, 6)
    set_back(kafka, tmp_path)
    assert await consuming().reset_offsets("rides", "latest", actor="alice") == [(0, 6, 3, 0)]
    await handled(10, 16, 9)  # more than was lost: without the reset nobody could tell
    assert await numbers(effects) == [*range(6), *range(10, 16)]


@pytest.mark.chaos
async def test_what_comes_in_an_earlier_epoch_than_what_was_read_is_not_passed_over(
    effects, own_kafka, tmp_path, monkeypatch
):
    """The log had grown past the stored offset, and what came next was of an epoch before that of what was read."""
    monkeypatch.setattr("sidings.kafka.placing._REFUSED_SECONDS", 0.1)
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "rides", partitions=1)
    await produce(kafka.bootstrap, "rides", range(3))
    await asyncio.to_thread(take_snapshot, kafka, tmp_path, restarts=2)
    await produce(kafka.bootstrap, "rides", range(3, 6))

    def consuming():
        service = a_service(effects, kafka.bootstrap)
        service.consumer("rides", model=Number)(record)
        return service

    async with consuming():
        await eventually(offset_reaches(effects, "rides", 6))
    await asyncio.to_thread(set_back, kafka, tmp_path)
    await produce(kafka.bootstrap, "rides", range(10, 20))
    service = consuming()
    async with service:
        await eventually(lambda: any("set back to a snapshot" in told for told in service.problems()), service.problems)
        assert await numbers(effects) == [*range(6)]
        await service.reset_offsets("rides", 3, partitions=[0], actor="alice")
        await eventually(offset_reaches(effects, "rides", 13))
        assert service.problems() == []
    assert await numbers(effects) == [*range(6), *range(10, 20)]


@pytest.mark.chaos
async def test_a_directory_is_built_anew_where_its_log_goes_on_in_an_earlier_epoch(
    own_kafka, tmp_path: Path, caplog: Any
) -> None:
    """Where the last record was that it had applied, a transaction's marker is now, and no timestamp tells."""
    kafka, stored = await asyncio.to_thread(own_kafka), SQLite(tmp_path / "terminals.db")
    await create_topic(kafka.bootstrap, "terminals", partitions=1, config=COMPACTED)
    await put(kafka.bootstrap, "terminals", {f"T-{n}": row(f"T-{n}") for n in range(6)})
    await asyncio.to_thread(take_snapshot, kafka, tmp_path, restarts=2)
    await put(kafka.bootstrap, "terminals", {f"T-{n}": row(f"T-{n}") for n in range(6, 10)})
    async with a_directory("terminals", kafka.bootstrap, storage=stored) as terminals:
        assert terminals.positions() == {0: 10}
    await asyncio.to_thread(set_back, kafka, tmp_path)
    async with producing(kafka.bootstrap, transactional_id="anew") as producer:
        for key in ("U-6", "U-8", "U-10"):
            async with producer.transaction():
                await producer.send("terminals", row(key), key=key.encode(), partition=0)
    wanted = {f"T-{n}" for n in range(6)} | {"U-6", "U-8", "U-10"}
    async with a_directory("terminals", kafka.bootstrap, storage=stored) as terminals:
        await eventually(lambda: set(terminals) == wanted, lambda: (set(terminals), terminals.positions()))
    assert "is built anew" in caplog.text

"""Directories in SQLite whose positions go back: what was read before is read again, all of it."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import NotLeaderForPartitionError, OffsetOutOfRangeError
from sidings import SQLite
from sidings.devstack.topics import create_topic, delete_topics
from sidings.kafka.directory.reader import Reader
from sidings.kafka.message import Record

from .consumer_support import producing
from .directory_support import COMPACTED, a_directory, put, row
from .support import SECONDS, eventually
from .test_directory_restart import Checked, load

Fetched = dict[int, Sequence[Record]]


async def a_file_with_a_bad_record(name: str, kafka: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest record of T-1 is one that this release refuses, and others come behind it. The next one takes it."""
    monkeypatch.setattr(Checked, "refused", {"new"})
    await put(kafka, name, {"T-1": row("T-1", "old")})
    await put(kafka, name, {"T-1": row("T-1", "new"), "T-2": row("T-2"), "T-3": row("T-3")})
    assert (await load(name, kafka, path, model=Checked))[0]["T-1"] == "old"
    monkeypatch.setattr(Checked, "refused", set())


NEWEST = {"T-1": "new", "T-2": "a", "T-3": "a"}


async def test_what_could_not_be_applied_is_read_again_also_where_a_start_before_ended_too_soon(
    topic: Any, sidings_kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It had stored that it goes back, but not the last record's place: the next start read on there."""
    name, path = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    await a_file_with_a_bad_record(name, sidings_kafka, path, monkeypatch)

    async def nothing(self: Reader, seconds: float, most: int) -> Fetched:
        await asyncio.sleep(seconds)
        return {}

    terminals = a_directory(name, sidings_kafka, storage=SQLite(path), model=Checked)
    with monkeypatch.context() as slow:
        slow.setattr(Reader, "fetch", nothing)
        runs = asyncio.create_task(terminals.run())
        await eventually(lambda: terminals._follower._noted_at, "its first batch is stored")
        terminals._follower.stop()
        await asyncio.wait_for(runs, SECONDS)
    assert terminals.positions() == {0: 1}
    assert (await load(name, sidings_kafka, path, model=Checked))[::2] == (NEWEST, 0)


async def test_what_could_not_be_applied_is_read_again_also_where_the_first_connection_fails(
    topic: Any, sidings_kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Then it was forgotten that this is a start, so that the rows stayed as they were."""
    name, path = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    await a_file_with_a_bad_record(name, sidings_kafka, path, monkeypatch)
    ask, asked = Reader.epoch_ends, 0

    async def refused_once(self: Reader, epochs: Mapping[int, int]) -> dict[int, int]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise NotLeaderForPartitionError
        return await ask(self, epochs)

    monkeypatch.setattr(Reader, "epoch_ends", refused_once)
    assert (await load(name, sidings_kafka, path, model=Checked))[::2] == (NEWEST, 0)
    assert asked == 2


async def test_a_topic_that_was_made_anew_is_read_from_its_beginning_also_after_a_restart_before_it_had_records(
    topic: Any, sidings_kafka: str, tmp_path: Path
):
    """The file kept the place of the former topic's last record, and the next start read on there: it was out of the
    empty log's range, for ever, or what came before it was missing."""
    name, path, other = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db", tmp_path / "other.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(4)})
    async with a_directory(name, sidings_kafka, storage=SQLite(path)) as terminals:
        former = terminals._follower._log.topic_id
        await delete_topics(sidings_kafka, [name])
        await create_topic(sidings_kafka, name, partitions=1, config=COMPACTED)
        await eventually(lambda: terminals._follower._log.topic_id != former, "it may have asked for that too soon")
        await eventually(lambda: terminals._follower._again is None and terminals.positions() == {0: 0})
    shutil.copy(path, other)
    async with asyncio.timeout(SECONDS):
        assert await load(name, sidings_kafka, path) == ({}, 0, 0)
    async with producing(sidings_kafka, transactional_id=name) as producer:  # the marker stands where the last one was
        for terminals in (("U-0", "U-1", "U-2"), ("U-4",)):
            async with producer.transaction():
                for key in terminals:
                    await producer.send_and_wait(name, row(key), key=key.encode(), partition=0)
    assert await load(name, sidings_kafka, other) == (dict.fromkeys(("U-0", "U-1", "U-2", "U-4"), "a"), 4, 0)


@pytest.mark.parametrize(("times", "rebuilds"), [(1, 0), (99, 1)])
async def test_a_place_that_kafka_refuses_again_is_not_asked_for_for_ever(
    topic: Any, sidings_kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, rebuilds: int
):
    """Although it lies between the log's ends: the directory asked for it without a pause."""
    name, path = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(3)})
    found, *_ = await load(name, sidings_kafka, path)
    fetch, refused = Reader.fetch, 0

    async def refuse(self: Reader, seconds: float, most: int) -> Fetched:
        nonlocal refused
        if self._next[0] == 2 and refused < times:
            refused += 1
            raise OffsetOutOfRangeError({self._tp(0): 2})
        return await fetch(self, seconds, most)

    monkeypatch.setattr(Reader, "fetch", refuse)
    async with asyncio.timeout(SECONDS):
        assert (await load(name, sidings_kafka, path))[::2] == (found, rebuilds)
    assert refused == rebuilds + 1

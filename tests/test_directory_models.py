"""A release whose model takes none of the rows that are there, or only some: when is it ready without them?"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sidings import Changed, Directory, DirectoryNotReady, SQLite

from .consumer_support import made_anew, producing
from .directory_support import COMPACTED, Acquirer, a_directory, put, row
from .support import SECONDS, eventually

STORAGES = pytest.mark.parametrize("storage", [lambda path: None, SQLite], ids=["memory", "sqlite"])


class Located(Acquirer):
    """The next release's: with a field that no row has yet, and that has no default."""

    country: str


def located(terminal: str, country: str = "EE") -> bytes:
    return row(terminal, country=country)


@asynccontextmanager
async def waiting(directory: Directory[Any], bad: int) -> AsyncIterator[None]:
    """Runs it, once it waits since so many rows are bad."""
    running = asyncio.create_task(directory.run())
    try:
        await eventually(lambda: f"{bad} bad" in directory.not_ready()[0], directory.not_ready)
        assert not directory.ready
        yield
    finally:
        directory.stop()
        await asyncio.wait_for(running, SECONDS)


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[tuple[int, str]]:
    return [(line.levelno, line.message) for line in caplog.records if text in line.message]


@STORAGES
async def test_a_directory_that_can_read_none_of_its_rows_waits_for_one(
    topic: Any, sidings_kafka: str, tmp_path: Any, caplog: pytest.LogCaptureFixture, storage: Any
):
    """It was ready, with no entries, so that a rolling update went through."""
    caplog.set_level(logging.INFO)
    name, file = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(3)})
    async with a_directory(name, sidings_kafka, storage=storage(file)) as former:
        assert len(former) == 3
    for _ in range(2):  # the second time the file is as this release has left it
        caplog.clear()
        terminals = a_directory(name, sidings_kafka, storage=storage(file), model=Located)
        async with waiting(terminals, 3):
            [why] = terminals.not_ready()
            assert "(3 bad), the first at partition 0 offset 0: country: Field required" in why
            assert "a default" in why
            with pytest.raises(DirectoryNotReady, match="3 bad"):
                await terminals.wait_ready(timeout=0.1)
            with pytest.raises(DirectoryNotReady, match="3 bad"):
                terminals.get("T-1")
        why = why.partition("is not loaded: ")[2]
        assert lines(caplog, "is not ready") == [(logging.ERROR, f"directory {name!r} is not ready: {why}")]
        assert lines(caplog, "is ready") == []
    terminals = a_directory(name, sidings_kafka, storage=storage(file), model=Located)
    built: dict[Any, Any] = {}

    @terminals.on_change(load=True)
    def build(change: Changed[Located]) -> None:
        built[change.key] = (change.old, change.new and change.new.country)

    async with waiting(terminals, 3):
        await put(sidings_kafka, name, {"T-1": located("T-1")})
        await terminals.wait_ready(timeout=SECONDS)
        assert terminals["T-1"].country == "EE"
        assert built == {"T-1": (None, "EE")}
        [(level, told)] = lines(caplog, "is ready")
        assert level == logging.WARNING
        assert told.endswith("1 entries; 2 rows are bad, as errors() tells")
        await put(sidings_kafka, name, {"T-0": located("T-0"), "T-2": located("T-2")})
        await eventually(lambda: not terminals.errors())
        assert terminals.not_ready() == []
    async with a_directory(name, sidings_kafka, storage=storage(file)) as former:
        assert len(former) == 3, "and back"


@STORAGES
async def test_it_is_ready_without_a_row_when_none_is_bad_any_more(
    topic: Any, sidings_kafka: str, tmp_path: Any, caplog: pytest.LogCaptureFixture, storage: Any
):
    caplog.set_level(logging.INFO)
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1"), "T-2": row("T-2")})
    terminals = a_directory(name, sidings_kafka, storage=storage(tmp_path / "file.db"), model=Located)
    async with waiting(terminals, 2):
        await put(sidings_kafka, name, {"T-1": None})
        await terminals.wait_until(timeout=SECONDS)
        assert not terminals.ready
        await put(sidings_kafka, name, {"T-2": None})
        await terminals.wait_ready(timeout=SECONDS)
        assert len(terminals) == 0
    [(level, told)] = lines(caplog, "is ready")
    assert level == logging.INFO
    assert told.endswith(" 0 entries")


async def test_a_topic_made_anew_meanwhile_is_another_one(topic: Any, sidings_kafka: str):
    name = await topic("terminals")
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    terminals = a_directory(name, sidings_kafka, model=Located)
    async with waiting(terminals, 1):
        await made_anew(sidings_kafka, name)
        await terminals.wait_ready(timeout=SECONDS)
        assert len(terminals) == 0


async def test_the_load_is_limited_also_where_no_row_can_be_read(topic: Any, sidings_kafka: str):
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    with pytest.raises(DirectoryNotReady, match=r"1 bad.* country: Field required.* load_seconds=0\.5"):
        async with asyncio.timeout(SECONDS), a_directory(name, sidings_kafka, model=Located, load_seconds=0.5):
            pytest.fail("no row can be read")


@STORAGES
async def test_a_running_directory_whose_topic_is_read_again_stays_ready(
    topic: Any, sidings_kafka: str, tmp_path: Any, storage: Any
):
    name = await topic("terminals")
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    async with a_directory(name, sidings_kafka, storage=storage(tmp_path / "file.db")) as terminals:
        await made_anew(sidings_kafka, name)
        await put(sidings_kafka, name, {"T-1": b"{}"})
        await eventually(lambda: len(terminals.errors()) == 1)
        assert terminals["T-1"].acquirer_id == "a"
        assert terminals.ready


@STORAGES
async def test_where_the_model_takes_rows_that_are_off_it_is_ready_with_none(
    topic: Any, sidings_kafka: str, tmp_path: Any, caplog: pytest.LogCaptureFixture, storage: Any
):
    """It was never ready: one bad row, in a table whose other rows were all switched off."""
    caplog.set_level(logging.INFO)
    name, file = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}", is_active=False) for n in range(3)} | {"T-3": b"{}"})
    for _ in range(2):  # the second time the file's positions are behind those that are off
        caplog.clear()
        async with asyncio.timeout(SECONDS), a_directory(name, sidings_kafka, storage=storage(file)) as terminals:
            assert len(terminals) == 0
            assert len(terminals.errors()) == 1
        [(level, told)] = lines(caplog, "is ready")
        assert level == logging.WARNING
        assert told.endswith(" 0 entries; 1 rows are bad, as errors() tells")


@STORAGES
async def test_a_bad_row_that_comes_to_a_file_without_rows_keeps_nobody_from_getting_ready(
    topic: Any, sidings_kafka: str, tmp_path: Any, storage: Any
):
    name, file = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}", is_active=False) for n in range(3)})
    for bad in range(2):
        async with asyncio.timeout(SECONDS), a_directory(name, sidings_kafka, storage=storage(file)) as terminals:
            assert len(terminals.errors()) == bad
        await put(sidings_kafka, name, {"T-3": b"{}"})


@STORAGES
async def test_the_last_good_row_of_a_file_may_be_switched_off_beside_a_bad_one(
    topic: Any, sidings_kafka: str, tmp_path: Any, storage: Any
):
    name, file = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}", is_active=n == 0) for n in range(3)})
    async with a_directory(name, sidings_kafka, storage=storage(file)) as terminals:
        assert len(terminals) == 1
    await put(sidings_kafka, name, {"T-0": b'{"is_active": false}', "T-3": b"{}"})
    async with asyncio.timeout(SECONDS), a_directory(name, sidings_kafka, storage=storage(file)) as terminals:
        assert (len(terminals), len(terminals.errors())) == (0, 1)


async def test_a_file_without_rows_is_read_on_from_where_it_stands(topic: Any, sidings_kafka: str, tmp_path: Any):
    name, file = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}", is_active=False) for n in range(3)})
    for deleted in (3, 0):
        async with a_directory(name, sidings_kafka, storage=SQLite(file)) as terminals:
            assert terminals._follower.deleted == deleted


@pytest.mark.parametrize("gone", [row("T", is_active=False), None], ids=["off", "tombstones"])
async def test_many_rows_that_are_gone_do_not_make_it_ready(topic: Any, sidings_kafka: str, gone: bytes | None):
    """No model is asked about these: a release that takes no row went through where they were many."""
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(3)} | {f"U-{n}": gone for n in range(5)})
    async with waiting(a_directory(name, sidings_kafka, model=Located), 3):
        pass


async def test_rows_that_were_off_in_a_topic_made_anew_meanwhile_count_no_more(topic: Any, sidings_kafka: str):
    name = await topic("terminals")
    await put(sidings_kafka, name, {f"T-{n}": None for n in range(3)} | {f"U-{n}": b"{}" for n in range(4)})
    async with waiting(terminals := a_directory(name, sidings_kafka), 4):
        await made_anew(sidings_kafka, name)
        await put(sidings_kafka, name, {"U-1": b"{}", "U-2": b"{}"})
        await eventually(lambda: "2 bad" in terminals.not_ready()[0] or terminals.ready, terminals.not_ready)
        assert not terminals.ready


@pytest.mark.parametrize("key", [None, b"\xff"], ids=["no key", "no text"])
async def test_a_record_that_tells_no_row_keeps_nobody_from_getting_ready(topic: Any, sidings_kafka: str, key: Any):
    """Nothing could have cleared it, no tombstone either, so that it was never ready."""
    name = await topic("terminals")
    async with producing(sidings_kafka) as producer:
        await producer.send_and_wait(name, row("T-1"), key=key)
    async with asyncio.timeout(SECONDS), a_directory(name, sidings_kafka) as terminals:
        assert len(terminals) == 0
        assert len(terminals.errors()) == 1

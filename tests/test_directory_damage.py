"""A directory in SQLite whose file is damaged while it is open: handlers are told, and a restart mends it."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from sidings import SQLite, StorageError
from sidings.kafka.directory.storage import Batch

from .directory_support import COMPACTED, a_directory, put, row
from .support import SECONDS
from .test_directory_storage import a_batch, begin, plan_of, rows_by

PAGE = 4096


def damage(path: Path, of: bytes = b"xxxxxxxx") -> None:
    """All pages with rows in them, as a disk that fails does; what stands in the others is sound."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        for start in range(PAGE, len(data), PAGE):
            if of in data[start : start + PAGE]:
                file.seek(start)
                file.write(b"\xff" * PAGE)


async def test_damage_that_a_read_meets_ends_the_service_and_the_next_start_mends_it(
    topic: Any, sidings_kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of these rows failed, for as long as the process lived, with an error of SQLite's."""
    monkeypatch.setattr("sidings.kafka.directory.follower._NOTE_SECONDS", 0.1)
    name = await topic("terminals", config=COMPACTED)
    path = tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}", "x" * 200) for n in range(200)})
    async with a_directory(name, sidings_kafka, storage=SQLite(path)) as terminals:
        assert len(terminals) == 200
    terminals = a_directory(name, sidings_kafka, storage=SQLite(path))
    life = asyncio.create_task(terminals.run())
    await terminals.wait_ready(SECONDS)
    damage(path)
    with pytest.raises(StorageError, match="malformed"):
        terminals.get("T-5")
    with pytest.raises(StorageError, match="malformed"):
        await asyncio.wait_for(life, SECONDS)
    async with a_directory(name, sidings_kafka, storage=SQLite(path)) as terminals:
        assert (len(terminals), terminals["T-5"].acquirer_id) == (200, "x" * 200)
    assert path.with_name(path.name + ".damaged").exists()


async def test_damage_that_is_met_by_counting_is_told_at_the_next_batch_too(tmp_path: Path) -> None:
    """As the metrics count, with each scrape. It raised an error of SQLite's, and nobody was told."""
    rows = rows_by()
    first = SQLite[Any](tmp_path / "terminals.db")
    await begin(first, rows)
    await first.apply(a_batch(rows, *((f"T-{n}", row(f"T-{n}", "x" * 200)) for n in range(200))))
    await first.close()
    second = SQLite[Any](tmp_path / "terminals.db")
    await second.open(plan_of(rows))
    try:
        damage(tmp_path / "terminals.db", b"T-")  # and the index
        with pytest.raises(StorageError, match="malformed"):
            len(second)
        with pytest.raises(StorageError, match="malformed"):
            await second.apply(Batch())
    finally:
        await second.close()


async def test_a_place_that_the_disk_does_not_read_any_more_is_told_at_the_next_batch_too(tmp_path: Path) -> None:
    """Reads of the rows that stood there failed, for ever, while batches went on and nobody was told."""
    rows, path = rows_by(), tmp_path / "terminals.db"
    storage = SQLite[Any](path)
    await begin(storage, rows)
    await storage.apply(a_batch(rows, *((f"T-{n}", row(f"T-{n}", "x" * 300)) for n in range(3_000))))
    recent = path.with_name("terminals.db-wal")
    os.truncate(recent, recent.stat().st_size * 3 // 4)  # SQLite reads these rows there
    try:
        with pytest.raises(StorageError, match="disk I/O error"):
            storage.items()
        with pytest.raises(StorageError, match="disk I/O error"):
            await storage.apply(Batch())
    finally:
        await storage.close()


async def test_a_file_that_somebody_has_deleted_is_told_at_the_next_batch_too(tmp_path: Path) -> None:
    """Or whose file system is gone. A plain handler that went through it opened an empty one, which has no tables: it
    failed, for as long as the process lived, while all else went on."""
    rows, folder = rows_by(), tmp_path / "a?b #%20"
    storage = SQLite[Any](folder / "terminals.db")
    await begin(storage, rows)
    await storage.apply(a_batch(rows, ("T-1", row("T-1", "x"))))
    try:
        assert len(await asyncio.to_thread(storage.items)) == 1
        for file in folder.iterdir():
            file.unlink()
        with pytest.raises(StorageError, match="unable to open"):
            await asyncio.to_thread(storage.items)
        with pytest.raises(StorageError, match="unable to open"):
            await storage.apply(Batch())
        assert list(folder.iterdir()) == []
    finally:
        await storage.close()


async def test_a_store_that_was_damaged_is_as_good_as_new_when_it_is_opened_again(
    topic: Any, sidings_kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same object, as where a supervisor in the process starts a service anew that has ended: it told of the former
    file's damage for ever."""
    monkeypatch.setattr("sidings.kafka.directory.follower._NOTE_SECONDS", 0.1)
    name = await topic("terminals", config=COMPACTED)
    path = tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}", "x" * 200) for n in range(200)})
    store = SQLite[Any](path)
    async with a_directory(name, sidings_kafka, storage=store) as terminals:
        assert len(terminals) == 200
    terminals = a_directory(name, sidings_kafka, storage=store)
    life = asyncio.create_task(terminals.run())
    await terminals.wait_ready(SECONDS)
    damage(path)
    with pytest.raises(StorageError, match="malformed"):
        terminals.get("T-5")
    with pytest.raises(StorageError, match="malformed"):
        await asyncio.wait_for(life, SECONDS)
    async with a_directory(name, sidings_kafka, storage=store) as terminals:
        assert (len(terminals), terminals["T-5"].acquirer_id) == (200, "x" * 200)


def mislead(path: Path) -> None:
    """The entry of T-105 in the index of the rows leads nowhere."""
    data = bytearray(path.read_bytes())
    for start in range(PAGE, len(data), PAGE):
        if data[start] == 0x0A and (place := data.find(b"T-105", start, start + PAGE)) >= 0:  # a leaf of an index
            data[place + 5] = 0x7F  # the number of the row; there are fewer
    path.write_bytes(data)


def misspell(path: Path) -> None:
    """The name of the row T-100, where the row itself is, is no UTF-8."""
    path.write_bytes(path.read_bytes().replace(b"T-100T-100", b"T-\xff00T-100"))


@pytest.mark.parametrize("meet", ["read", "write", "go through all"])
async def test_damage_that_only_its_use_shows_is_met_once(tmp_path: Path, meet: str) -> None:
    """The check at the start does not see it. The service ended whenever it met it, started with the same file, and
    ended again; where Python could not read a text, it did not even end."""
    rows, path = rows_by(), tmp_path / "terminals.db"
    first = SQLite[Any](path)
    await begin(first, rows)
    await first.apply(a_batch(rows, *((f"T-{n}", row(f"T-{n}", "x")) for n in range(100, 120))))
    await first.close()
    (misspell if meet == "go through all" else mislead)(path)
    second = SQLite[Any](path)
    assert (await second.open(plan_of(rows))).identity is not None
    if meet == "read":
        with pytest.raises(StorageError, match="malformed"):
            second.get("T-105")
    elif meet == "go through all":
        with pytest.raises(StorageError, match="UTF-8"):
            second.items()
    else:
        with pytest.raises(StorageError, match="malformed"):
            await second.apply(a_batch(rows, ("T-105", row("T-105", "y"))))
    with pytest.raises(StorageError):
        await second.apply(Batch())
    await second.close()
    third = SQLite[Any](path)
    assert (await third.open(plan_of(rows))).identity is None
    await third.close()
    assert path.with_name("terminals.db.damaged").exists()


async def test_a_note_that_is_no_utf8_is_damage_when_the_store_is_opened(tmp_path: Path) -> None:
    """The error is Python's own and has no code of SQLite's: each start ended with an AttributeError."""
    rows, path = rows_by(), tmp_path / "terminals.db"
    first = SQLite[Any](path)
    await begin(first, rows)
    await first.close()
    path.write_bytes(path.read_bytes().replace(b"reading", b"readin\xff"))
    second = SQLite[Any](path)
    assert (await second.open(plan_of(rows))).identity is None
    await second.close()
    assert path.with_name("terminals.db.damaged").exists()

"""A directory in SQLite whose file is damaged while it is open: handlers are told, and a restart mends it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sidings import SQLite, StorageError

from .directory_support import COMPACTED, a_directory, put, row
from .support import SECONDS

PAGE = 4096


def damage(path: Path) -> None:
    """All pages with rows in them, as a disk that fails does; what stands in the others is sound."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        for start in range(PAGE, len(data), PAGE):
            if b"xxxxxxxx" in data[start : start + PAGE]:
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

"""Directories in SQLite over restarts: only what is new is read, and a store that may be wrong is built anew."""

import asyncio
import signal
import sqlite3
import sys
from contextlib import closing
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints, create_model, field_validator
from sidings import Directory, SQLite, StorageError
from sidings.devstack.topics import create_topic, delete_topics

from .consumer_support import delete_records
from .directory_support import COMPACTED, Acquirer, a_directory, put, quick, row
from .support import SECONDS, eventually


class Renamed(Acquirer):
    """Another model."""

    note: str = ""


async def load(name: str, kafka: str, path: Path, **options: Any) -> tuple[dict[Any, str], int, int]:
    """A life of the directory: what it has, how many records it has read, how often it was built anew."""
    async with a_directory(name, kafka, storage=SQLite(path), **options) as terminals:
        follower = terminals._follower
        found = {key: value.acquirer_id for key, value in terminals.items()}
        return found, follower.stored + follower.deleted, follower.rebuilds


def forget_id(path: Path) -> None:
    """As of a Kafka that does not tell the ids of topics."""
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("DELETE FROM note WHERE name = 'topic_id'")


async def test_a_restart_reads_only_what_is_new(topic, sidings_kafka, tmp_path):
    name = await topic("terminals", partitions=2, config=COMPACTED)
    path = tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(30)})
    assert (await load(name, sidings_kafka, path))[1:] == (30, 0)
    assert (await load(name, sidings_kafka, path))[1:] == (0, 0), "the last record is looked at, not applied again"
    await put(sidings_kafka, name, {"T-1": b"{broken"}, partition=0)
    assert (await load(name, sidings_kafka, path))[1:] == (0, 0)
    await put(sidings_kafka, name, {"T-2": None, "T-30": row("T-30", "b")}, partition=1)
    await put(sidings_kafka, name, {"T-3": None}, partition=0)
    async with a_directory(name, sidings_kafka, storage=SQLite(path)) as terminals:
        assert terminals._follower.rebuilds == 0
        assert terminals._follower.stored + terminals._follower.deleted == 3
        assert set(terminals) == {f"T-{n}" for n in range(31)} - {"T-2", "T-3"}
        assert [error.key for error in terminals.errors()] == ["T-1"], "what is wrong is kept, too"
        assert (terminals["T-30"].acquirer_id, terminals.get("T-2")) == ("b", None)
    await put(sidings_kafka, name, {"T-1": row("T-1", "c")}, partition=0)
    assert (await load(name, sidings_kafka, path))[0]["T-1"] == "c"
    async with a_directory(name, sidings_kafka, storage=SQLite(path)) as terminals:
        assert terminals.errors() == [], "and what was put right stays right"


async def test_a_store_that_may_be_wrong_is_built_anew(topic, sidings_kafka, tmp_path, monkeypatch, caplog):
    name = await topic("terminals", config=COMPACTED)
    path = tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(5)})
    everything = {f"T-{n}": "a" for n in range(5)}

    async def again(why: str, **options: Any) -> None:
        assert await load(name, sidings_kafka, path, **options) == (everything, 5, 1)
        assert why in caplog.text
        caplog.clear()

    assert await load(name, sidings_kafka, path) == (everything, 5, 0)
    await again("model=, key=, active= or decoder=", model=Renamed)
    await again("model=, key=, active= or decoder=")

    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE note SET value = 'elsewhere' WHERE name = 'cluster'")
    await again("of another Kafka cluster, elsewhere")

    other = await topic("other", config=COMPACTED)
    await put(sidings_kafka, other, {"T-1": row("T-1", "b")})
    assert await load(other, sidings_kafka, path) == ({"T-1": "b"}, 1, 1)
    assert f"of the topic '{name}'" in caplog.text
    await again("of the topic")

    now = __import__("time").time
    with monkeypatch.context() as later:
        later.setattr("sidings.kafka.directory.completeness.time.time", lambda: now() + 86_401)
        await again("delete.retention.ms")
        assert await load(name, sidings_kafka, path) == (everything, 0, 0), "once is enough"

    quick_to_forget = await topic("quick", config=COMPACTED | {"delete.retention.ms": "0"})
    await put(sidings_kafka, quick_to_forget, {"T-1": row("T-1", "c")})
    for _ in range(2):
        assert await load(quick_to_forget, sidings_kafka, path) == ({"T-1": "c"}, 1, 1)
    assert "keeps tombstones for 0 s" in caplog.text
    await again("of the topic")

    await delete_topics(sidings_kafka, [name])
    await create_topic(sidings_kafka, name, partitions=1, config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1", "new")})
    forget_id(path)
    assert await load(name, sidings_kafka, path) == ({"T-1": "new"}, 1, 1)
    assert "ends at 1, before 5: the topic was made anew" in caplog.text

    await delete_topics(sidings_kafka, [name])
    await create_topic(sidings_kafka, name, partitions=1, config=COMPACTED)
    await put(sidings_kafka, name, {"T-2": row("T-2", "newer"), "T-3": row("T-3", "newer")})
    forget_id(path)
    assert (await load(name, sidings_kafka, path))[::2] == ({"T-2": "newer", "T-3": "newer"}, 1)
    assert "has another record at 0" in caplog.text, "although it is longer than what was read"


async def test_a_topic_that_is_made_anew_under_a_running_directory(topic, sidings_kafka, caplog):
    """What is gone goes when the new topic has been read; until then the old rows serve."""
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(5)})
    async with a_directory(name, sidings_kafka) as terminals:
        told: list[Any] = []
        terminals.on_change(lambda change: told.append((change.key, change.new and change.new.acquirer_id)))
        await delete_topics(sidings_kafka, [name])
        await create_topic(sidings_kafka, name, partitions=1, config=COMPACTED)
        await put(sidings_kafka, name, {"T-1": row("T-1", "new")})
        await eventually(lambda: len(terminals) == 1)
        await eventually(lambda: terminals.positions() == {0: 1})
        assert terminals["T-1"].acquirer_id == "new"
        assert dict(told) == {"T-1": "new", "T-0": None, "T-2": None, "T-3": None, "T-4": None}
        assert "is built anew" in caplog.text
        assert terminals._follower.rebuilds >= 1


async def test_who_waits_for_an_offset_to_come_is_not_failed_by_a_file_that_is_built_anew(
    topic, sidings_kafka, tmp_path, caplog
):
    """The log is the same: the offset comes with the next message."""
    name, path = await topic("terminals", config=COMPACTED), tmp_path / "terminals"
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    await load(name, sidings_kafka, path)
    terminals = Directory(name, kafka=quick(sidings_kafka), model=Renamed, storage=SQLite(path))
    waits = asyncio.create_task(terminals.wait_until(1))
    async with asyncio.timeout(SECONDS):
        await asyncio.sleep(0)
        async with terminals:
            assert "is built anew: model=" in caplog.text
            await terminals.wait_until()
            assert not waits.done()
            await put(sidings_kafka, name, {"T-2": row("T-2")})
            await waits


async def test_a_topic_that_is_deleted_under_a_running_directory_is_told_and_waited_for(topic, sidings_kafka, caplog):
    """Nobody was told before a minute, and then that Kafka was silent; aiokafka asked for the topic more than
    a thousand times a second, with a line in the log each time."""
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    async with a_directory(name, sidings_kafka) as terminals:
        await delete_topics(sidings_kafka, [name])
        await eventually(lambda: f"there is no topic {name!r}, or no right to see it: create it" in caplog.text)
        assert terminals._follower.failing_since is not None, "the health check complains after a quarter of a minute"
        assert "there is no topic" in terminals._follower.failure
        assert terminals["T-1"].acquirer_id == "a", "what is known stays"
        await create_topic(sidings_kafka, name, partitions=1, config=COMPACTED)
        await put(sidings_kafka, name, {"T-2": row("T-2")})
        await eventually(lambda: set(terminals) == {"T-2"})


async def test_records_that_were_deleted_before_they_were_read(topic, sidings_kafka, tmp_path, caplog):
    name = await topic("terminals", config={"cleanup.policy": "compact,delete"})
    path = tmp_path / "terminals.db"
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    await load(name, sidings_kafka, path)
    await put(sidings_kafka, name, {"T-1": None, "T-2": row("T-2"), "T-3": row("T-3")})
    await delete_records(sidings_kafka, name, 3)
    assert await load(name, sidings_kafka, path) == ({"T-3": "a"}, 1, 1)
    assert "begins at 3, after 1" in caplog.text


async def test_who_is_refused_a_file_that_is_in_use_leaves_it_to_its_user(topic, sidings_kafka, tmp_path):
    """A second directory with the same object closed what was the first one's, which ended with it."""
    name, path = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    storage: SQLite[Acquirer] = SQLite(path)
    async with a_directory(name, sidings_kafka, storage=storage) as terminals:
        for same in (storage, SQLite[Acquirer](path)):
            with pytest.raises(StorageError, match="in use"):
                await a_directory(name, sidings_kafka, storage=same).run()
            assert terminals.get("T-1") is None
        await put(sidings_kafka, name, {"T-1": row("T-1")})
        await eventually(lambda: "T-1" in terminals, terminals.problems)
    await storage.close()
    assert (await load(name, sidings_kafka, path))[0] == {"T-1": "a"}


WORKER = """
import asyncio, sys
from pydantic import field_validator
from sidings import SQLite
from tests.directory_support import a_directory

async def main():
    topic, kafka, path = sys.argv[1:]
    async with a_directory(topic, kafka, storage=SQLite(path)) as terminals:
        print(terminals._follower.rebuilds, flush=True)
        while True:
            print(sum(terminals.positions().values()), flush=True)
            await asyncio.sleep(0.02)

asyncio.run(main())
"""


async def test_killed_again_and_again_it_misses_nothing(topic, sidings_kafka, tmp_path):
    name = await topic("terminals", partitions=2, config=COMPACTED)
    path = tmp_path / "terminals.db"
    wanted: dict[str, str] = {}
    for turn in range(3):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WORKER, name, sidings_kafka, str(path)),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), SECONDS) == b"0\n", "it is not built anew"
        for n in range(40):
            key, partition = f"T-{n}", n % 2
            value = None if n % 5 == turn else str(turn)
            await put(sidings_kafka, name, {key: value and row(key, value)}, partition=partition)
            wanted |= {key: value} if value else {}
            if value is None:
                wanted.pop(key, None)
            if n == 20:
                process.kill()
                assert await asyncio.wait_for(process.wait(), SECONDS) == -signal.SIGKILL
    found, _, rebuilds = await load(name, sidings_kafka, path)
    assert (found, rebuilds) == (wanted, 0)


class Checked(Acquirer):
    """Its validator is changed between two releases, which its schema does not tell."""

    refused: ClassVar[set[str]] = set()

    @field_validator("acquirer_id")
    @classmethod
    def known(cls, value: str) -> str:
        if value in cls.refused:
            raise ValueError("unknown acquirer")
        return value


async def test_a_file_survives_what_another_release_takes_for_valid(
    topic: Any, sidings_kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A row that is not valid any more is gone, as it would be without the file; to replace it ended the directory. One
    that is valid now is there; it was looked at never again."""
    name = await topic("terminals", config=COMPACTED)
    path = tmp_path / "terminals.db"
    monkeypatch.setattr(Checked, "refused", {"new"})
    await put(sidings_kafka, name, {"T-1": row("T-1", "old"), "T-2": row("T-2"), "T-3": row("T-3", "new")})
    await put(sidings_kafka, name, {"T-2": row("T-2", "b")})
    found, *_ = await load(name, sidings_kafka, path, model=Checked)
    assert found == {"T-1": "old", "T-2": "b"}
    monkeypatch.setattr(Checked, "refused", {"old"})
    changes: list[Any] = []
    async with a_directory(name, sidings_kafka, storage=SQLite(path), model=Checked) as terminals:
        terminals.on_change(changes.append)
        assert {key: value.acquirer_id for key, value in terminals.items()} == {"T-2": "b", "T-3": "new"}
        assert (terminals.get("T-1"), terminals.errors()) == (None, [])
        await put(sidings_kafka, name, {"T-1": row("T-1", "new")})
        await eventually(lambda: "T-1" in terminals)
    assert [(change.key, change.old) for change in changes] == [("T-1", None)]
    assert (await load(name, sidings_kafka, path, model=Checked))[1:] == (0, 0)


async def test_all_that_could_not_be_applied_is_read_again_also_where_it_is_more_than_is_told(
    topic: Any, sidings_kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A thousand of them are kept. The rows of the others stayed as they were, for good, and nothing told of them."""
    monkeypatch.setattr("sidings.kafka.directory.faults._MOST", 10)
    name = await topic("terminals", partitions=2, config=COMPACTED)
    path = tmp_path / "terminals.db"
    rows = [f"T-{n}" for n in range(30)]
    for partition, keys in enumerate((rows[:20], rows[20:])):
        for acquirer in ("old", "new"):
            await put(sidings_kafka, name, {key: row(key, acquirer) for key in keys}, partition=partition)
    monkeypatch.setattr(Checked, "refused", {"new"})
    async with a_directory(name, sidings_kafka, storage=SQLite(path), model=Checked) as terminals:
        assert {value.acquirer_id for value in terminals.values()} == {"old"}
        assert 11 <= len(terminals.errors()) <= 12
        assert terminals.errors()[0].offset in (10, 20), "the first of its partition"
        await put(sidings_kafka, name, {key: row(key, "newer") for key in rows[:20]}, partition=0)
        await put(sidings_kafka, name, {key: row(key, "newer") for key in rows[25:]}, partition=1)
        await terminals.wait_until(timeout=SECONDS)
        assert terminals["T-20"].acquirer_id == "old"
        assert terminals.errors(), "and it is told"
    monkeypatch.setattr(Checked, "refused", set())
    newest = dict.fromkeys(rows, "newer") | dict.fromkeys(rows[20:25], "new")
    assert (await load(name, sidings_kafka, path, model=Checked))[0] == newest
    assert await load(name, sidings_kafka, path, model=Checked) == (newest, 0, 0), "once is enough"


async def test_a_file_is_built_anew_where_a_release_has_changed_a_function(
    topic: Any, sidings_kafka: str, tmp_path: Path
):
    """They have one name. Rows stood under the keys that the former function had made."""
    name = await topic("terminals", config=COMPACTED)
    path = tmp_path / "terminals.db"
    await put(sidings_kafka, name, {"T-1": row("T-1", "a"), "T-2": row("T-2", "b")})
    earlier, same, later = (
        lambda value: value.terminal_id in {"T-1", "T-3"} and value.terminal_id,
        lambda value: value.terminal_id in {"T-1", "T-3"} and value.terminal_id,
        lambda value: value.terminal_id in {"T-1", "T-2"} and value.acquirer_id,
    )
    assert (await load(name, sidings_kafka, path, key=earlier))[1:] == (2, 0)
    assert (await load(name, sidings_kafka, path, key=same))[1:] == (0, 0)
    async with a_directory(name, sidings_kafka, storage=SQLite(path), key=later) as terminals:
        assert terminals._follower.rebuilds == 1
        assert [terminals[key].terminal_id for key in ("a", "b")] == ["T-1", "T-2"]
        assert "T-1" not in terminals


def a_field(name: str, value: Any) -> Any:
    return getattr(value, name)


def a_model(kind: Any = str, config: ConfigDict | None = None, **field: Any) -> type[BaseModel]:
    return create_model("Acquirer", __config__=config, terminal_id=(kind, Field(**{"alias": "terminalId"} | field)))


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ({"model": Acquirer, "key": attrgetter("terminal_id")}, {"model": Acquirer, "key": attrgetter("acquirer_id")}),
        ({"model": dict, "key": itemgetter("terminalId")}, {"model": dict, "key": itemgetter("acquirerId")}),
        (
            {"model": Acquirer, "key": partial(a_field, "terminal_id")},
            {"model": Acquirer, "key": partial(a_field, "acquirer_id")},
        ),
        ({"model": a_model()}, {"model": a_model(Annotated[str, StringConstraints(to_lower=True)])}),
        ({"model": a_model()}, {"model": a_model(config=ConfigDict(str_to_lower=True))}),
        (
            {"model": a_model(validation_alias=AliasChoices("terminalId", "id"))},
            {"model": a_model(validation_alias=AliasChoices("terminalId", "acquirerId"))},
        ),
    ],
)
async def test_and_where_it_has_changed_what_a_getter_gets_or_what_a_model_makes_of_a_text(
    earlier: dict[str, Any], later: dict[str, Any], topic: Any, sidings_kafka: str, tmp_path: Path
):
    """Keys that the directory itself told were found by nobody."""
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1", "A")})
    for options, rebuilds in ((earlier, 0), (earlier, 0), (later, 1)):
        options = {"key": "terminal_id"} | options
        async with a_directory(name, sidings_kafka, storage=SQLite(tmp_path / "file.db"), **options) as terminals:
            assert terminals._follower.rebuilds == rebuilds
            [key] = terminals.keys()
            assert key in terminals

"""The port behind a directory: one suite for memory and SQLite, then what only a file can do."""

import asyncio
import multiprocessing
import random
import resource
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel, TypeAdapter
from sidings import ConfigurationError, Message, StorageError
from sidings.kafka.directory import Memory, SQLite, Storage
from sidings.kafka.directory.rows import BadRecord, Rows
from sidings.kafka.directory.storage import Batch, Identity, Mark, Plan
from sidings.kafka.message import Record, StoredRecord
from sidings.schema import load_sql

from .directory_support import Acquirer, row
from .support import SECONDS, eventually

IDENTITY = Identity("terminals", "cluster", "reading")
BAD = BadRecord("terminals", 0, 7, "T-7", 1, "why")


def rows_by(key: Any = None) -> Rows[Any]:
    return Rows("terminals", model=Acquirer, decoder=None, key=key, active="is_active")


def plan_of(rows: Rows[Any]) -> Plan[Any]:
    return Plan("terminals", rows.derived, rows.decode, rows.key_of)


def a_batch(rows: Rows[Any], *changes: tuple[str, bytes | None], partition: int = 0, start: int = 0, stamp: int = 0):
    """What the follower would apply: message keys and values."""
    records = [
        StoredRecord("terminals", partition, start + n, stamp or start + n, key.encode(), value, [("h", b"\xff")])
        for n, (key, value) in enumerate(changes)
    ]
    made, bad = rows.read_all(records)
    assert not bad
    last = records[-1]
    return Batch(made, {partition: last.offset + 1}, {partition: Mark(last.offset, last.timestamp)}, None, 5.0)


@pytest.fixture(params=["memory", "sqlite"])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage[Any]]:
    made: Storage[Any] = Memory() if request.param == "memory" else SQLite(tmp_path / "terminals.db")
    yield made
    await made.close()
    await made.close()


async def begin(storage: Storage[Any], rows: Rows[Any]) -> None:
    kept = await storage.open(plan_of(rows))
    assert kept.identity is None
    await storage.reset(IDENTITY)


async def test_rows_come_change_and_go(storage: Storage[Any]):
    rows = rows_by()
    await begin(storage, rows)
    assert (len(storage), storage.items(), storage.get("T-1")) == (0, [], None)
    await storage.apply(a_batch(rows, ("T-1", row("T-1", "a")), ("T-2", row("T-2", "b")), ("T-1", row("T-1", "c"))))
    assert storage.get("T-1") == Acquirer(terminal_id="T-1", acquirer_id="c")
    assert storage.get("T-3") is None
    assert storage.get(("T-1",)) is None
    assert (len(storage), {key for key, _ in storage.items()}) == (2, {"T-1", "T-2"})
    await storage.apply(a_batch(rows, ("T-1", None), ("T-3", None), ("T-2", None), ("T-2", row("T-2", "d")), start=3))
    assert dict(storage.items()) == {"T-2": Acquirer(terminal_id="T-2", acquirer_id="d")}
    assert set(storage.rows()) == {"T-2"}
    assert set(storage.keys_of(["T-2"])) == {"T-2"}
    await storage.reset(IDENTITY)
    assert (len(storage), storage.items(), list(storage.rows())) == (0, [], [])


@pytest.mark.parametrize("key", [None, "terminal_id"])
async def test_a_row_comes_and_goes_within_a_batch(storage: Storage[Any], key: str | None):
    """With `key=` in memory that was a KeyError, which ended the service, and its next start."""
    rows = rows_by(key)
    await begin(storage, rows)
    await storage.apply(a_batch(rows, ("T-1", row("T-1", "a")), ("T-1", None), ("T-2", row("T-2", "b"))))
    assert dict(storage.items()) == {"T-2": Acquirer(terminal_id="T-2", acquirer_id="b")}
    await storage.apply(a_batch(rows, ("T-1", row("T-1", "c")), ("T-1", row("T-1", isActive=False)), start=3))
    assert {key for key, _ in storage.items()} == {"T-2"}
    assert len(list(storage.rows())) == 1


async def test_a_key_comes_and_goes_within_a_batch(storage: Storage[Any]):
    rows = rows_by("terminal_id")
    await begin(storage, rows)
    await storage.apply(a_batch(rows, ("1", row("T-1", "a")), ("1", row("T-2", "b")), ("1", row("T-3", "c"))))
    assert dict(storage.items()) == {"T-3": Acquirer(terminal_id="T-3", acquirer_id="c")}
    assert set(storage.keys_of([b"1"])) == {"T-3"}


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("former", [0, 1])
async def test_of_several_rows_with_one_key_the_youngest_counts(storage: Storage[Any], former: int, newest_first: bool):
    """A terminal's former row was switched off and a new one made; they may lie in different partitions."""
    rows = rows_by("terminal_id")
    await begin(storage, rows)
    old = a_batch(rows, ("1", row("T", "old")), partition=former, start=7, stamp=10)
    new = a_batch(rows, ("5", row("T", "new")), partition=1 - former, stamp=20)
    off = a_batch(rows, ("1", row("T", "old", isActive=False)), partition=former, start=8, stamp=15)
    for batch in (new, old) if newest_first else (old, new):
        await storage.apply(batch)
    assert storage.get("T").acquirer_id == "new"
    assert (len(storage), len(storage.items())) == (1, 1)
    assert storage.items()[0][1].acquirer_id == "new"
    await storage.apply(off)
    assert storage.get("T").acquirer_id == "new"
    assert set(storage.rows()) == {b"5"}
    await storage.apply(a_batch(rows, ("5", row("other", "new")), partition=1 - former, start=1, stamp=30))
    assert storage.get("T") is None
    assert storage.get("other").acquirer_id == "new"
    assert set(storage.keys_of([b"5", b"1"])) == {"other"}
    await storage.apply(a_batch(rows, ("5", None), partition=1 - former, start=2))
    assert (len(storage), storage.items()) == (0, [])
    await storage.apply(new)
    await storage.reset(IDENTITY)
    await storage.apply(old)
    assert storage.get("T").acquirer_id == "old", "nothing is left of what was reset"


async def test_of_very_many_rows_with_one_key_the_youngest_is_known_without_a_look_at_each(storage: Storage[Any]):
    """Of all of them it was looked for after each batch: a load of a million took minutes, in which the event loop did
    nothing else."""
    rows = rows_by("terminal_id")
    await begin(storage, rows)

    async def steps(start: int) -> int:
        """Of ten batches."""
        count = 0

        def step(*_: object) -> None:
            nonlocal count
            count += 1

        for first in range(start, start + 1_000, 100):
            batch = a_batch(rows, *((str(n), row("T", str(n))) for n in range(first, first + 100)), start=first)
            sys.setprofile(step)
            try:
                await storage.apply(batch)
            finally:
                sys.setprofile(None)
        return count

    few = await steps(0)
    for start in range(1_000, 9_000, 1_000):
        await steps(start)
    assert await steps(9_000) < 2 * few
    assert storage.get("T").acquirer_id == "9999"


async def test_of_many_rows_with_one_key_the_youngest_counts_whatever_becomes_of_them(storage: Storage[Any]):
    rows, kept = rows_by("terminal_id"), dict[str, tuple[str, int]]()
    await begin(storage, rows)
    chance = random.Random(7)
    for stamp in range(1, 1_500):
        name = str(chance.randrange(20 if stamp > 700 else 60))
        key = chance.choice(["T", "T", "T", "U", None])
        value = None if key is None else row(key, str(stamp))
        moment = stamp if chance.random() < 0.8 else chance.randrange(1, stamp + 1)
        await storage.apply(a_batch(rows, (name, value), start=stamp, stamp=moment))
        kept.pop(name, None)
        if key is not None:
            kept[name] = (key, 10_000 * moment + stamp)
        for each in ("T", "U"):
            youngest = max((order for of, order in kept.values() if of == each), default=None)
            found = storage.get(each)
            assert (found and int(found.acquirer_id)) == (youngest and youngest % 10_000)


@pytest.mark.parametrize("key", [None, "terminal_id"])
async def test_a_thread_misses_no_key_while_its_row_is_replaced(storage: Storage[Any], key: str | None):
    """As a plain handler reads: the key was gone for a moment, as its row was in the midst of a batch."""
    rows = rows_by(key)
    await begin(storage, rows)
    batch = a_batch(rows, ("T-1", None), *[("T-2", row("T-2"))] * 400, ("T-1", row("T-1")))
    await storage.apply(batch)
    looked = missing = 0
    ended = threading.Event()

    def look() -> None:
        nonlocal looked, missing
        while not ended.is_set():
            missing += any(storage.get(f"T-{n}") is None for n in (1, 2))
            looked += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    looking = asyncio.create_task(asyncio.to_thread(look))
    try:
        await eventually(lambda: looked > 0)
        for _ in range(100):
            await storage.apply(batch)
    finally:
        ended.set()
        await looking
        sys.setswitchinterval(interval)
    assert missing == 0


@pytest.mark.parametrize("key", ["T", "\ud800", 7, -1, 2**70, ("T", 7), date(2026, 5, 1), b"T"])
async def test_keys_of_any_kind(storage: Storage[Any], key: Any):
    rows = rows_by(lambda value: key if value.terminal_id == "T" else value.terminal_id)
    await begin(storage, rows)
    await storage.apply(a_batch(rows, ("1", row("T")), ("2", row("U"))))
    assert storage.get(key).terminal_id == "T"
    assert {found for found, _ in storage.items()} == {key, "U"}
    assert storage.get(str(key) + "?") is None


class Region(StrEnum):
    """A field of a key, as a model may have it."""

    NORTH = "north"


class Place(NamedTuple):
    """A key with names."""

    region: str
    zone: int


@dataclass(frozen=True, repr=False)
class Spot:
    """A key with names that is no tuple."""

    region: str
    fare: Decimal
    note: str = field(default="", compare=False)


class Stop(BaseModel, frozen=True):
    """The same as a model."""

    region: Region | str
    spot: Spot


class Nameless:
    """Equal to what has the same value, and written as an address."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nameless) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ((Region.NORTH, 7), ("north", 7)),
        (Place("north", 7), ("north", 7)),
        (("north", 7.0), ("north", True + 6)),
        (Decimal("1.10"), Decimal("1.1")),
        (Decimal("7.0"), 7),
        (0.5, Decimal("0.50")),
        (2**70, Decimal(2**70)),
        (TypeAdapter(datetime).validate_json('"2026-01-01T00:00:00Z"'), NEW_YEAR),
        (("north", NEW_YEAR), ("north", datetime.fromisoformat("2026-01-01T01:00:00+01:00"))),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), None),
        (Decimal("1E+999999999"), None),
        (frozenset({"a", "b", 1}), frozenset({True, "b", "a"})),
        (Spot(Region.NORTH, Decimal("1.10"), "x"), Spot("north", Decimal("1.1"), "y")),
        (
            Stop(region=Region.NORTH, spot=Spot(Region.NORTH, Decimal(1))),
            Stop(region="north", spot=Spot("north", Decimal("1.0"))),
        ),
    ],
)
async def test_a_key_is_found_by_whatever_is_equal_to_it(storage: Storage[Any], key: Any, asked: Any):
    """In memory it was, in a file only by what Python writes alike."""
    rows = rows_by(lambda value: key if value.terminal_id == "T" else value.terminal_id)
    await begin(storage, rows)
    await storage.apply(a_batch(rows, ("1", row("T")), ("2", row("U"))))
    assert storage.get(key).terminal_id == "T"
    assert asked is None or storage.get(asked).terminal_id == "T"
    others = [("north", 8), ("north", 7.5), "north", 6, "7", Decimal("1.01"), 0.25, NEW_YEAR.replace(tzinfo=None)]
    assert [storage.get(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_key_that_python_writes_as_an_address_is_refused(tmp_path: Path, *, wrapped: bool):
    """Rows got lost under it, as one address is many keys' in turn, and none was found."""
    rows = rows_by(lambda value: ("a", Nameless(value.terminal_id)) if wrapped else Nameless(value.terminal_id))
    storage: SQLite[Any] = SQLite(tmp_path / "terminals.db")
    await begin(storage, rows)
    try:
        with pytest.raises(ConfigurationError, match="Nameless has no __repr__: give key= a function"):
            await storage.apply(a_batch(rows, ("1", row("T"))))
    finally:
        await storage.close()


async def test_a_decoder_reads_later_what_it_has_read_first(storage: Storage[Any]):
    def decode(message: Message[bytes | None]) -> Any:
        return [message.key, message.value, message.timestamp_ms, *message.headers]

    rows = Rows("terminals", model=None, decoder=decode, key=None, active="is_active")
    await begin(storage, rows)
    headers = [("none", None), ("empty", b""), ("twice", b"\xff"), ("twice", b"1")]
    changes, _ = rows.read_all([StoredRecord("terminals", 0, 0, 7, b"T", b"v", headers)])
    await storage.apply(Batch(changes, {0: 1}))
    assert storage.get("T") == [b"T", b"v", 7, *headers]


# -- what only a file can do ------------------------------------------------------------------------------------------


async def test_of_several_rows_with_one_key_the_youngest_that_is_still_valid_counts(tmp_path: Path):
    """A later release's validator refuses what was stored. `get` gave None, where `items` and a new file had a row."""
    rows, refused = rows_by("terminal_id"), {"5"}
    plan = plan_of(rows)

    def decode(record: Record) -> Any:
        value = plan.decode(record)
        return None if value is not None and value.acquirer_id in refused else value

    storage: SQLite[Any] = SQLite(tmp_path / "terminals.db")
    await storage.open(replace(plan, decode=decode))
    await storage.reset(IDENTITY)
    await storage.apply(a_batch(rows, *((str(n), row("T", str(n))) for n in range(6)), ("8", row("U", "5"))))
    assert storage.get("T").acquirer_id == "4"
    refused |= {"4", "3"}
    assert storage.get("T").acquirer_id == "2"
    assert [(key, value.acquirer_id) for key, value in storage.items()] == [("T", "2")]
    refused |= {"2", "1", "0"}
    assert (storage.get("T"), storage.get("U"), storage.items()) == (None, None, [])
    await storage.close()


async def test_a_file_keeps_rows_positions_and_errors(tmp_path: Path):
    rows = rows_by()
    first: SQLite[Any] = SQLite(tmp_path / "new" / "terminals.db")
    await begin(first, rows)
    await first.apply(a_batch(rows, ("T-1", row("T-1", "a")), ("T-2", row("T-2", "b"))))
    batch = a_batch(rows, ("T-1", row("T-1", "c")), partition=3, start=9)
    batch.bad = {"T-7": BAD, b"\xff": BAD}
    await first.apply(batch)
    await first.apply(Batch(positions={3: 12}, complete_at=6.5))
    await first.close()
    second: SQLite[Any] = SQLite(tmp_path / "new" / "terminals.db")
    kept = await second.open(plan_of(rows))
    assert kept.identity == IDENTITY
    assert kept.positions == {0: 2, 3: 12}
    assert kept.marks == {0: Mark(1, 1), 3: Mark(9, 9)}
    assert kept.bad == {"T-7": BAD, b"\xff": BAD}
    assert kept.complete_at == 6.5
    assert second.get("T-1").acquirer_id == "c"
    await second.close()
    with closing(sqlite3.connect(tmp_path / "new" / "terminals.db", isolation_level=None)) as file:
        file.execute("UPDATE note SET value = 0 WHERE name = 'format'")
    third: SQLite[Any] = SQLite(tmp_path / "new" / "terminals.db")
    assert (await third.open(plan_of(rows))).identity is None, "a file of another release's form is none"
    await third.close()


async def kept_in(path: Path, *batches: Batch[Any]) -> tuple[dict[int, int], dict[int, Mark]]:
    """Positions and marks of a new file after these, as the next life finds them."""
    rows = rows_by()
    first: SQLite[Any] = SQLite(path)
    await begin(first, rows)
    for batch in batches:
        await first.apply(batch)
    await first.close()
    return await kept_of(path)


async def kept_of(path: Path) -> tuple[dict[int, int], dict[int, Mark]]:
    """The same of a file that is there."""
    store: SQLite[Any] = SQLite(path)
    kept = await store.open(plan_of(rows_by()))
    await store.close()
    return dict(kept.positions), dict(kept.marks)


async def test_a_mark_does_not_stay_where_its_position_goes_back(tmp_path: Path):
    """What lies between would never be read again."""
    before = Batch[Any]((), {0: 501, 1: 501, 2: 501}, dict.fromkeys(range(3), Mark(500, 111, 7)))
    kept = await kept_in(tmp_path / "a.db", before, Batch((), {0: 500, 1: 502, 2: 501}))
    assert kept == ({0: 500, 1: 502, 2: 501}, {1: Mark(500, 111, 7), 2: Mark(500, 111, 7)})
    kept = await kept_in(tmp_path / "b.db", before, Batch((), {0: 500}), Batch((), {0: 600}))
    assert kept[1].keys() == {1, 2}, "it does not come back"
    kept = await kept_in(tmp_path / "c.db", before, Batch((), {0: 100}, {0: Mark(99, 11)}))
    assert kept[1][0] == Mark(99, 11)


async def test_nothing_of_the_former_positions_stays_where_a_topic_was_read_anew(tmp_path: Path):
    """Not even of partitions that it has no longer: each start would have taken it for made anew."""
    before = Batch[Any]((), {0: 501, 1: 9, 3: 7}, {0: Mark(500, 111, 7), 3: Mark(6, 1, 7)})
    after = Batch[Any]((), {0: 600, 1: 3}, {1: Mark(2, 5, 8)}, read_anew=True)
    assert await kept_in(tmp_path / "file.db", before, after) == ({0: 600, 1: 3}, {1: Mark(2, 5, 8)})


async def test_a_mark_whose_epoch_is_not_known_does_not_get_that_of_another(tmp_path: Path):
    """The one before it stood at the same offset, in another log."""
    former, later = Batch[Any]((), {0: 6}, {0: Mark(5, 1, 7)}), Batch[Any]((), {0: 6}, {0: Mark(5, 2)})
    assert (await kept_in(tmp_path / "file.db", former, later))[1] == {0: Mark(5, 2)}


async def test_a_mark_that_an_earlier_version_left_behind_its_position_is_none(tmp_path: Path):
    path = tmp_path / "file.db"
    await kept_in(path, Batch((), {0: 501, 1: 501, 2: 501}, dict.fromkeys(range(3), Mark(500, 111, 7))))
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE position SET next_offset = partition + 499")
    assert await kept_of(path) == ({0: 499, 1: 500, 2: 501}, {2: Mark(500, 111, 7)})


async def test_a_batch_is_seen_when_all_of_it_is_there_and_not_in_the_middle_of_a_handler(tmp_path: Path):
    """The thread commits when it likes; a handler that does not await sees one state all the same."""
    rows = rows_by()
    storage: SQLite[Any] = SQLite(tmp_path / "terminals.db")
    await begin(storage, rows)
    await storage.apply(a_batch(rows, ("T-1", row("T-1", "a")), ("T-2", row("T-2", "a"))))
    applying = asyncio.create_task(
        storage.apply(a_batch(rows, ("T-1", row("T-1", "b")), ("T-2", None), ("T-3", row("T-3", "b")), start=2))
    )
    await asyncio.sleep(0)
    other = sqlite3.connect(tmp_path / "terminals.db")
    until = time.monotonic() + SECONDS
    while other.execute("SELECT next_offset FROM position").fetchone() != (5,):  # without a turn of the event loop
        assert time.monotonic() < until
    other.close()
    seen = [(key, value.acquirer_id) for key, value in storage.items()]
    assert (seen, len(storage), storage.get("T-3")) == ([("T-1", "a"), ("T-2", "a")], 2, None)
    await applying
    assert {(key, value.acquirer_id) for key, value in storage.items()} == {("T-1", "b"), ("T-3", "b")}
    await storage.close()


async def test_a_file_does_not_grow_with_what_is_written_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where each batch is read from while it is written, which keeps SQLite from a checkpoint at the commit."""
    monkeypatch.setattr("sidings.kafka.directory.sqlite._CHECKPOINT_PAGES", 100)
    rows = rows_by()
    storage: SQLite[Any] = SQLite(tmp_path / "terminals.db")
    await begin(storage, rows)
    for turn in range(300):
        applying = asyncio.create_task(storage.apply(a_batch(rows, ("T-1", row("T-1", str(turn))), start=turn)))
        while not applying.done():
            storage.get("T-1")
            await asyncio.sleep(0)
    assert (tmp_path / "terminals.db-wal").stat().st_size < 1 << 20
    await storage.close()


async def test_large_rows_do_not_let_a_file_grow_either(tmp_path: Path):
    """What is written was counted by the row: a thousand edits of one row of a megabyte took a gigabyte."""
    rows = rows_by()
    storage: SQLite[Any] = SQLite(tmp_path / "terminals.db")
    await begin(storage, rows)
    for turn in range(80):
        await storage.apply(a_batch(rows, ("T-1", row("T-1", str(turn % 10) * 1_000_000)), start=turn))
    assert (tmp_path / "terminals.db-wal").stat().st_size < 24 << 20
    await storage.close()


async def test_lives_that_are_killed_early_do_not_let_a_file_grow(tmp_path: Path):
    rows = rows_by()
    for life in range(6):
        storage: SQLite[Any] = SQLite(tmp_path / "terminals.db")
        await storage.open(plan_of(rows))
        keys = [f"T-{n}" for n in range(1_000)]
        for turn in range(3):
            await storage.apply(a_batch(rows, *[(key, row(key, str(turn))) for key in keys], start=life * 3_000))
        for suffix in ("", "-wal"):
            shutil.copy(tmp_path / f"terminals.db{suffix}", tmp_path / f"kept{suffix}")
        await storage.close()
        for suffix in ("", "-wal"):  # as a kill would have left them
            shutil.move(tmp_path / f"kept{suffix}", tmp_path / f"terminals.db{suffix}")
    assert (tmp_path / "terminals.db-wal").stat().st_size < 1 << 20


async def test_what_is_in_a_file_is_not_for_other_users_of_the_machine(tmp_path: Path):
    store = SQLite(tmp_path / "terminals.db")
    await begin(store, rows_by())
    modes = {file.name: file.stat().st_mode & 0o007 for file in tmp_path.iterdir() if file.suffix != ".lock"}
    await store.close()
    assert modes == {"terminals.db": 0, "terminals.db-wal": 0, "terminals.db-shm": 0}


async def test_a_file_has_one_user(tmp_path: Path):
    path = tmp_path / "terminals.db"
    first: SQLite[Any] = SQLite(path)
    await begin(first, rows_by())
    with pytest.raises(StorageError, match="in use"):
        await SQLite(path).open(plan_of(rows_by()))
    with pytest.raises(StorageError, match="in use"):  # given to two directories, it had the rows of the last one
        await first.open(plan_of(rows_by()))
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1] + '.lock', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(path), stderr=asyncio.subprocess.PIPE)
    _, told = await asyncio.wait_for(other.communicate(), SECONDS)
    assert b"BlockingIOError" in told, "the lock is between processes"
    await first.close()
    second: SQLite[Any] = SQLite(path)
    assert (await second.open(plan_of(rows_by()))).identity == IDENTITY
    await second.close()


async def test_a_file_is_closed_although_the_closing_is_cancelled(tmp_path: Path):
    """What its thread had not begun was withdrawn, and the file stayed in use for as long as the process lived."""
    path, rows, applied = tmp_path / "terminals.db", rows_by(), threading.Event()
    storage = SQLite[Any](path)
    await begin(storage, rows)
    assert storage._thread is not None
    storage._thread.submit(applied.wait, SECONDS)  # as a batch that is under way
    closing = asyncio.create_task(storage.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    with pytest.raises(StorageError, match="in use"):
        await storage.open(plan_of(rows))
    applied.set()
    await eventually(lambda: not [thread for thread in threading.enumerate() if "directory-terminals" in thread.name])
    for again in (SQLite[Any](path), storage):
        await again.open(plan_of(rows))
        await again.close()


async def test_a_link_to_a_file_is_that_file(tmp_path: Path):
    """Two processes that came to it by two names shared it, each with a lock of its own."""
    path, link = tmp_path / "volume" / "terminals.db", tmp_path / "link.db"
    path.parent.mkdir()
    link.symlink_to(path)  # which is not there yet
    first: SQLite[Any] = SQLite(link)
    await begin(first, rows_by())
    assert path.stat().st_mode & 0o007 == 0, "it is made as any other"
    with pytest.raises(StorageError, match="in use"):
        await SQLite(path).open(plan_of(rows_by()))
    await first.close()
    path.write_bytes(b"no database")
    second: SQLite[Any] = SQLite(link)
    assert (await second.open(plan_of(rows_by()))).identity is None
    await second.close()
    assert link.is_symlink(), "what is put aside is the file, not the link"
    assert (tmp_path / "volume" / "terminals.db.damaged").read_bytes() == b"no database"


async def test_a_forked_process_does_not_use_the_file(tmp_path: Path):
    """It kept the file from the next service, where this one was killed."""
    first: SQLite[Any] = SQLite(tmp_path / "terminals.db")
    await begin(first, rows_by())
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(SECONDS,), daemon=True)
    child.start()
    try:
        with pytest.raises(StorageError, match="in use"):  # it is the parent's as before
            await SQLite(tmp_path / "terminals.db").open(plan_of(rows_by()))
        await first.close()
        deadline = time.monotonic() + SECONDS / 2
        second: SQLite[Any] = SQLite(tmp_path / "terminals.db")
        while True:
            try:
                await second.open(plan_of(rows_by()))
                break
            except StorageError:  # the child comes to it soon after the fork
                assert time.monotonic() < deadline, "the child has the file"
                await second.close()
        await second.close()
    finally:
        child.kill()
        child.join()


THREADS = """
import asyncio, sys, threading
from sidings import StorageError
from sidings.tests.test_directory_storage import SQLite, a_batch, begin, plan_of, row, rows_by

async def main(path):
    rows, over, told = rows_by("acquirer_id"), threading.Event(), []
    storage = SQLite(path)
    await begin(storage, rows)
    await storage.apply(a_batch(rows, *[(f"T-{n}", row(f"T-{n}", f"a{n}")) for n in range(2_000)]))

    def read():
        while not over.is_set():
            try:
                len(storage), storage.get("a1")
            except StorageError:
                pass  # it is closed just now
            except Exception as error:
                told.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        await asyncio.sleep(0.01)
        await storage.close()
        await storage.open(plan_of(rows))
    over.set()
    for thread in threads:
        thread.join()
    await storage.close()
    assert told == []

asyncio.run(main(sys.argv[1]))
"""


async def test_it_can_be_closed_while_threads_read(tmp_path: Path):
    """That of the metrics, for example: it ended the process with a segmentation fault, in a graceful stop."""
    command = (sys.executable, "-c", THREADS, str(tmp_path / "terminals.db"))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, told = await asyncio.wait_for(process.communicate(), 2 * SECONDS)
    assert (process.returncode, told.decode()[-500:]) == (0, "")


@pytest.mark.parametrize("key", [None, "acquirer_id"])
async def test_a_thread_that_goes_through_all_keys_hides_no_batch_from_others(storage: Storage[Any], key: str | None):
    """As a plain handler does: until it was through, `get` gave what was there before, and callbacks saw no change. The
    thread itself sees one state."""
    rows, count = rows_by(key), 2_500
    plan, hold, go = plan_of(rows), threading.Event(), threading.Event()

    def decode(record: Record) -> Any:
        if threading.current_thread() is not threading.main_thread() and record.offset == 1_500:
            hold.set()
            assert go.wait(SECONDS)
        return plan.decode(record)

    await storage.open(replace(plan, decode=decode))
    await storage.reset(IDENTITY)
    await storage.apply(a_batch(rows, *((f"T-{n}", row(f"T-{n}", f"a-{n}")) for n in range(count))))
    reading = asyncio.create_task(asyncio.to_thread(storage.items))
    await eventually(lambda: hold.is_set() or reading.done())
    changes = [("T-0", None), ("T-1", row("T-1", "a-1", more=1)), ("T-2400", None), ("T-new", row("T-new", "a-new"))]
    await storage.apply(a_batch(rows, *changes, start=count))
    first, new = ("T-0", "T-new") if key is None else ("a-0", "a-new")
    seen = storage.get(first), storage.get(new) is not None, len(storage), len(storage.items())
    go.set()
    found = await reading
    assert seen == (None, True, count - 1, count - 1)
    assert len(found) in (count, count - 1), "all of it is of one moment"


async def test_keys_are_counted_without_sorting_them(tmp_path: Path):
    """Each look at the metrics counts them, and who reads waits: a second with a million rows, while it sorted."""
    path, rows = tmp_path / "terminals.db", rows_by("acquirer_id")
    storage: SQLite[Any] = SQLite(path)
    await begin(storage, rows)
    await storage.apply(a_batch(rows, ("T-1", row("T-1", "a")), ("T-2", row("T-2", "a")), ("T-3", row("T-3", "b"))))
    assert len(storage) == 2
    await storage.close()
    query = "EXPLAIN QUERY PLAN " + load_sql("sidings.kafka.directory", "count_keys")
    with closing(sqlite3.connect(path)) as connection:
        plan = str(connection.execute(query).fetchall())
    assert "COVERING INDEX entry_key" in plan
    assert "TEMP B-TREE" not in plan


@pytest.mark.parametrize("key", [None, "acquirer_id"])
async def test_all_keys_are_gone_through_without_sorting_them(tmp_path: Path, key: str | None):
    """More than 2 MB are sorted in a temporary file, for which a container that can write on its volume only has no
    place: the service ended with an I/O error. And all who read wait until a sort is done, the event loop too."""
    storage, rows, statements = SQLite[Any](tmp_path / "terminals.db"), rows_by(key), list[str]()
    await begin(storage, rows)
    await storage.apply(a_batch(rows, ("T-1", row("T-1", "b")), ("T-2", row("T-2", "a")), ("T-3", row("T-3", "c"))))
    assert storage._reader is not None
    storage._reader.set_trace_callback(statements.append)
    assert len(storage.items()) == 3
    assert statements
    plan = str([storage._reader.execute(f"EXPLAIN QUERY PLAN {each}").fetchall() for each in statements[:]])
    await storage.close()
    assert "TEMP B-TREE" not in plan


@pytest.mark.parametrize("damage", [b"this is no database, and long enough to be read as one" * 20, None])
async def test_a_damaged_file_is_put_aside(tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture):
    path, rows = tmp_path / "terminals.db", rows_by()
    first: SQLite[Any] = SQLite(path)
    await begin(first, rows)
    await first.apply(a_batch(rows, *[(f"T-{n}", row(f"T-{n}")) for n in range(500)]))
    await first.close()
    whole = path.read_bytes()
    path.write_bytes(damage if damage is not None else whole[:4096] + b"\x5a" * 4096 + whole[8192:])
    second: SQLite[Any] = SQLite(path)
    kept = await second.open(plan_of(rows))
    assert kept.identity is None
    assert "damaged" in caplog.text
    assert path.with_name("terminals.db.damaged").exists()
    await second.reset(IDENTITY)
    await second.apply(a_batch(rows, ("T-1", row("T-1"))))
    assert len(second) == 1
    await second.close()


async def test_a_file_that_somebody_else_has_locked_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor is one for which the disk has no room."""
    monkeypatch.setattr("sidings.kafka.directory.sqlite._BUSY_SECONDS", 0.1)
    path, rows = tmp_path / "terminals.db", rows_by()
    first: SQLite[Any] = SQLite(path)
    await begin(first, rows)
    await first.apply(a_batch(rows, ("T-1", row("T-1"))))
    await first.close()
    tool = sqlite3.connect(path, isolation_level=None)
    tool.execute("PRAGMA locking_mode = EXCLUSIVE")
    tool.execute("BEGIN EXCLUSIVE")
    second: SQLite[Any] = SQLite(path)
    with pytest.raises(StorageError, match="locked"):
        await second.open(plan_of(rows))
    await second.close()
    tool.close()
    third: SQLite[Any] = SQLite(path)
    assert (await third.open(plan_of(rows))).identity == IDENTITY
    assert third.get("T-1") is not None
    await third.close()


async def test_a_disk_that_refuses_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        await SQLite(tmp_path / "file" / "terminals.db").open(plan_of(rows_by()))
    with pytest.raises(StorageError, match="not open"):
        await SQLite(tmp_path / "terminals.db").reset(IDENTITY)


async def test_a_disk_that_is_full_is_told_and_leaves_what_was_there(tmp_path: Path):
    path, rows = tmp_path / "terminals.db", rows_by()
    store: SQLite[Any] = SQLite(path)
    await begin(store, rows)
    await store.apply(a_batch(rows, ("T-1", row("T-1", "a"))))
    assert store._writer is not None
    store._writer.execute("PRAGMA max_page_count = 20")
    with pytest.raises(StorageError, match="disk is full"):
        await store.apply(
            a_batch(rows, ("T-1", row("T-1", "b")), *[(f"T-{n}", row("T", "x" * 50_000)) for n in range(9)])
        )
    assert store.get("T-1").acquirer_id == "a"
    await store.close()


async def test_a_disk_that_is_full_at_the_start_is_told_too(tmp_path: Path):
    """It was "disk I/O error", at each start of a service that had ended over its full disk."""
    store: SQLite[Any] = SQLite(tmp_path / "terminals.db")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, limits[1]))  # -shm takes 32,768 from the beginning
    try:
        with pytest.raises(StorageError, match="disk is full"):
            await store.open(plan_of(rows_by()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await store.close()


async def test_a_file_that_may_not_grow_is_told_as_such(tmp_path: Path):
    """It was "disk I/O error", as of a disk that fails; so it is of a quota that is used up."""
    rows = rows_by()
    store: SQLite[Any] = SQLite(tmp_path / "terminals.db")
    await begin(store, rows)
    await store.apply(a_batch(rows, ("T-1", row("T-1", "a"))))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="a quota or a limit of the size of files is reached"):
            await store.apply(a_batch(rows, *[(f"T-{n}", row("T", "x" * 50_000)) for n in range(9)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.get("T-1").acquirer_id == "a"
    await store.close()


KILLED = """
import asyncio, sys
from tests.test_directory_storage import IDENTITY, SQLite, a_batch, plan_of, row, rows_by

async def main():
    rows, store = rows_by(), SQLite(sys.argv[1])
    kept = await store.open(plan_of(rows))
    if kept.identity is None:
        await store.reset(IDENTITY)
    number = kept.positions.get(0, 0)
    while True:  # each batch: 50 rows that all say how many batches there were
        changes = [(f"T-{n}", row(f"T-{n}", str(number // 50))) for n in range(50)]
        await store.apply(a_batch(rows, *changes, start=number))
        number += 50
        print(number, flush=True)

asyncio.run(main())
"""


async def test_a_kill_leaves_rows_and_positions_of_one_moment(tmp_path: Path):
    path, rows = tmp_path / "terminals.db", rows_by()
    last = 0
    for _ in range(3):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, str(path), stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[1]
        )
        assert process.stdout is not None
        for _ in range(10):
            last = int(await asyncio.wait_for(process.stdout.readline(), SECONDS))
        await asyncio.sleep(random.uniform(0, 0.02))  # anywhere in a batch, not just behind one
        process.kill()
        assert await asyncio.wait_for(process.wait(), SECONDS) == -signal.SIGKILL
        store: SQLite[Any] = SQLite(path)
        kept = await store.open(plan_of(rows))
        assert kept.positions[0] >= last
        assert {value.acquirer_id for _, value in store.items()} == {str(kept.positions[0] // 50 - 1)}
        assert kept.marks[0].offset == kept.positions[0] - 1
        await store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()

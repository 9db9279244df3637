"""What a directory tells its readers while something is wrong: the topic, the clock, Kafka, or the directory itself."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError
from prometheus_client import CollectorRegistry
from sidings import DirectoryBehind, DirectoryNotReady, SQLite, StorageError
from sidings.devstack.topics import create_topic, delete_topics
from sidings.kafka import KafkaSettings
from sidings.kafka.directory.completeness import Completeness
from sidings.kafka.directory.faults import Faults
from sidings.kafka.directory.memory import Memory
from sidings.kafka.directory.reader import Reader, Standing
from sidings.kafka.directory.rows import BadRecord
from sidings.kafka.directory.same_log import SameLog
from sidings.kafka.directory.storage import Identity

from .consumer_support import delete_records
from .directory_support import COMPACTED, Acquirer, a_directory, put, quick, row
from .support import SECONDS, eventually
from .test_unreadable import produce_padded, produce_unreadable

Rows = list[tuple[str, bytes | None]]


def meanwhile(work: Coroutine[Any, Any, None]) -> None:
    """Do this while our event loop stands still, so that the directory sees nothing of it."""
    thread = threading.Thread(target=asyncio.run, args=[work])
    thread.start()
    thread.join()


async def make_anew(kafka: str, name: str, rows: Rows, *, partitions: int = 1) -> None:
    """Delete the topic, make it again, and fill it."""
    await delete_topics(kafka, [name])
    await create_topic(kafka, name, partitions=partitions, config=COMPACTED)
    for key, value in rows:
        await put(kafka, name, {key: value})


def noted(terminals: Any) -> list[tuple[Any, str | None, str | None]]:
    """A list that gets all changes."""
    told: list[tuple[Any, str | None, str | None]] = []
    terminals.on_change(
        lambda change: told.append(
            (change.key, change.old and change.old.acquirer_id, change.new and change.new.acquirer_id)
        )
    )
    return told


# -- the topic --------------------------------------------------------------------------------------------------------


async def test_who_asks_for_the_end_of_the_log_is_answered_by_the_next_client_where_this_one_is_given_up(
    topic, sidings_kafka, monkeypatch
):
    """A client that is closed never answers who waits for its metadata: it took all of `request_seconds`."""
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    asked, end_offsets, fetch = asyncio.Event(), AIOKafkaConsumer.end_offsets, Reader.fetch

    async def unanswered(self: AIOKafkaConsumer, partitions: Any) -> Any:
        if not asked.is_set():
            asked.set()
            await asyncio.Event().wait()
        return await end_offsets(self, partitions)

    async def broken(self: Reader, seconds: float, most: int) -> Any:
        if asked.is_set():
            monkeypatch.setattr(Reader, "fetch", fetch)
            raise KafkaConnectionError("just then")
        return await fetch(self, seconds, most)

    settings = quick(sidings_kafka, request_seconds=3_600.0)
    async with a_directory(name, settings) as terminals:
        await terminals.wait_ready(SECONDS)
        monkeypatch.setattr(AIOKafkaConsumer, "end_offsets", unanswered)
        monkeypatch.setattr(Reader, "fetch", broken)
        await asyncio.wait_for(terminals.wait_until(), SECONDS)
    assert asked.is_set()


@pytest.mark.parametrize(("new", "ids"), [(2, False), (7, True)], ids=["shorter, without ids", "longer"])
async def test_who_waits_for_an_offset_of_a_topic_that_is_made_anew_is_told(
    topic, sidings_kafka, monkeypatch, new, ids
):
    """The new one may never come so far: without a timeout it was a wait for ever."""
    if not ids:  # as of brokers before 2.8

        async def unknown(_: Reader) -> None:
            return None

        monkeypatch.setattr(Reader, "topic_id", unknown)
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(5)})
    async with a_directory(name, sidings_kafka) as terminals:
        end_offsets, asked = terminals.end_offsets, list[dict[int, int]]()

        async def end_offsets_of_before() -> dict[int, int]:
            asked.append({0: 9} if not asked else await end_offsets())
            return asked[-1]

        terminals.end_offsets = end_offsets_of_before
        waits = [asyncio.create_task(terminals.wait_until(offset)) for offset in (8, {1: 1}, None)]
        await asyncio.sleep(0)
        meanwhile(make_anew(sidings_kafka, name, [(f"T-{n}", row(f"T-{n}", "new")) for n in range(new)]))
        async with asyncio.timeout(SECONDS):
            far, other, everything = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(far, DirectoryBehind)
        assert "made anew, or cut off, since wait_until() was called, and ends before" in str(far)
        assert f": partition 0 at {new} of 9" in str(far)
        assert isinstance(other, DirectoryBehind)
        assert everything is None
        assert asked == [{0: 9}, {0: new}], "what is in the topic now is in the new one"


@pytest.mark.parametrize("more", [0, 2])
async def test_a_topic_made_anew_unseen_that_is_as_long_as_before_or_longer_is_noticed(
    topic, sidings_kafka, monkeypatch, more: int
):
    """One that is longer is noticed by what comes, one that is not by looking now and then."""
    monkeypatch.setattr("sidings.kafka.directory.same_log._DOUBT_SECONDS", 3_600.0 if more else 1.0)
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(3)})
    async with a_directory(name, sidings_kafka) as terminals:
        await terminals.wait_until(timeout=SECONDS)
        new: Rows = [(f"T-{n}", row(f"T-{n}", "new")) for n in range(1, 4 + more)]
        meanwhile(make_anew(sidings_kafka, name, new))
        await eventually(lambda: {v.acquirer_id for v in terminals.values()} == {"new"})
        assert set(terminals) == {f"T-{n}" for n in range(1, 4 + more)}
        assert terminals._follower.rebuilds == 1
        await put(sidings_kafka, name, {"T-1": row("T-1", "newest")})
        await eventually(lambda: terminals["T-1"].acquirer_id == "newest")


@pytest.mark.parametrize("by", ["its records", "its id"])
async def test_a_topic_made_anew_that_is_longer_is_noticed_whatever_is_known_of_its_end(
    topic, sidings_kafka, monkeypatch, by: str
):
    """Where its end was known before its first records, it was read on as if it were the former topic, and the rows
    that stood in front were missing, for good. Where some of the former one was still to be read, the id tells."""
    monkeypatch.setattr("sidings.kafka.directory.follower._CHUNK_RECORDS", 1)
    monkeypatch.setattr("sidings.kafka.directory.same_log._DOUBT_SECONDS", 3_600.0)
    monkeypatch.setattr("sidings.kafka.directory.same_log._ID_PAUSE_SECONDS", 0.5 if by == "its id" else 3_600.0)
    if by == "its id":
        monkeypatch.setattr(SameLog, "in_doubt", lambda *_: False)
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-0": row("T-0")})
    fetch, held = Reader.fetch, asyncio.Event()
    async with a_directory(name, sidings_kafka) as terminals:
        await terminals.wait_until(timeout=SECONDS)

        async def holding(self: Reader, seconds: float, most: int) -> Any:
            if terminals.positions()[0] < 3:
                return await fetch(self, seconds, most)
            if not held.is_set():  # then the client asks for more
                assert await fetch(self, 0.0, most) == {}
            held.set()
            return await asyncio.sleep(0.05, {})

        monkeypatch.setattr(Reader, "fetch", holding)
        monkeypatch.setattr(Reader, "there", lambda self: {0})  # its metadata come when it is there again
        await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in (1, 2)})
        await eventually(held.is_set)
        meanwhile(make_anew(sidings_kafka, name, [(f"T-{n}", row(f"T-{n}", "new")) for n in range(3, 10)]))
        await eventually(lambda: terminals._follower.progress.ends.get(0) == 7)
        begins, failed = Reader.begins, list[Reader]()

        async def once_not(self: Reader) -> dict[int, int]:
            if not failed:
                failed.append(self)
                raise KafkaConnectionError("just then")
            return await begins(self)

        monkeypatch.setattr(Reader, "begins", once_not)  # what was learnt of the topic is not forgotten over that
        monkeypatch.setattr(Reader, "fetch", fetch)
        await eventually(lambda: set(terminals) == {f"T-{n}" for n in range(3, 10)}, lambda: set(terminals))
        assert failed


async def test_a_topic_made_anew_with_fewer_partitions_is_noticed(topic, sidings_kafka):
    name = await topic("terminals", partitions=2, config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1")}, partition=1)
    async with a_directory(name, sidings_kafka) as terminals:
        meanwhile(make_anew(sidings_kafka, name, [("T-2", row("T-2"))]))
        await eventually(lambda: set(terminals) == {"T-2"})
        assert terminals.positions() == {0: 1}


@pytest.mark.parametrize("rows", [{}, {"T-2": row("T-2")}], ids=["all", "one partition"])
async def test_a_topic_made_anew_that_is_empty_is_there_at_once(topic, sidings_kafka, rows):
    """Until it was as long as the former one the rows of that stayed, and whoever waited waited in vain."""
    name = await topic("terminals", partitions=2, config=COMPACTED)
    for partition in (0, 1):
        await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(partition, 20, 2)}, partition=partition)
    async with a_directory(name, quick(sidings_kafka, fetch_seconds=0.5)) as terminals:
        meanwhile(make_anew(sidings_kafka, name, list(rows.items()), partitions=2))
        await eventually(lambda: terminals._follower.rebuilds >= 1)
        await terminals.wait_until(timeout=SECONDS)
        assert set(terminals) == set(rows)


async def test_a_log_that_has_lost_no_more_than_what_was_applied_is_not_read_again(topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.directory.same_log._DOUBT_SECONDS", 0.5)
    name = await topic("terminals", config={"cleanup.policy": "compact,delete"})
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    async with a_directory(name, sidings_kafka) as terminals:
        await delete_records(sidings_kafka, name, 1)
        await put(sidings_kafka, name, {"T-2": row("T-2")})
        await eventually(lambda: set(terminals) == {"T-1", "T-2"})
        assert terminals._follower.rebuilds == 0


async def test_while_it_is_read_again_no_row_goes_back_to_what_it_was_once(topic, sidings_kafka, monkeypatch):
    """Nor does a row that was deleted come back; and no error stays of a record that is gone."""
    monkeypatch.setattr("sidings.kafka.directory.follower._CHUNK_RECORDS", 1)
    name = await topic("terminals", config=COMPACTED)
    log: Rows = [("T-1", row("T-1", "a")), ("T-2", row("T-2", "a")), ("T-1", row("T-1", "b")), ("T-2", None)]
    for key, value in [*log, ("T-3", row("T-3")), ("T-4", b"{broken")]:
        await put(sidings_kafka, name, {key: value})
    async with a_directory(name, sidings_kafka) as terminals:
        told = noted(terminals)
        assert [error.key for error in terminals.errors()] == ["T-4"]
        meanwhile(make_anew(sidings_kafka, name, [*log, ("T-1", row("T-1", "c"))]))
        await eventually(lambda: terminals.positions() == {0: 5})
        await terminals.wait_until(4, timeout=SECONDS)
        assert told == [("T-1", "b", "c"), ("T-3", "a", None)]
        assert terminals.errors() == []


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "sqlite"])
async def test_what_is_gone_is_looked_for_piece_by_piece(topic, sidings_kafka, monkeypatch, tmp_path, *, stored):
    """The event loop stood still for seconds where a million rows had been."""
    monkeypatch.setattr("sidings.kafka.directory.follower._CHUNK_RECORDS", 10)
    monkeypatch.setattr("sidings.kafka.directory.sqlite._PIECE", 10)
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(100)})
    storage: Any = SQLite(tmp_path / "terminals.db") if stored else Memory()
    at: list[int] = []  # of each row, how many turns the event loop had taken
    rows = storage.rows

    def watched() -> Any:
        for each in rows():
            at.append(turns)
            yield each

    monkeypatch.setattr(storage, "rows", watched)
    async with a_directory(name, sidings_kafka, storage=storage) as terminals:
        meanwhile(make_anew(sidings_kafka, name, [("T-100", row("T-100"))]))
        turns = 0
        async with asyncio.timeout(SECONDS):
            while set(terminals) != {"T-100"}:
                turns += 1
                await asyncio.sleep(0)
    assert len(at) == 100
    assert max(Counter(at).values()) <= 10


async def test_who_waits_while_it_is_read_again_waits_for_the_end_of_that(topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.directory.follower._CHUNK_RECORDS", 1)
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    async with a_directory(name, sidings_kafka) as terminals:

        async def make_it_long() -> None:
            await make_anew(sidings_kafka, name, [])
            await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}", "new") for n in range(500)})

        meanwhile(make_it_long())
        await eventually(lambda: terminals._follower.rebuilds >= 1 and terminals.positions()[0] > 1)
        with pytest.raises(DirectoryBehind, match=r"is read again: partition 0 at \d+ of 500"):
            await terminals.wait_until(0, timeout=0.0)
        await terminals.wait_until(0, timeout=SECONDS)
        assert len(terminals) == 500


async def test_rows_whose_newest_record_is_bad_stay_while_it_is_read_again(topic, sidings_kafka, tmp_path):
    name = await topic("terminals", config=COMPACTED)
    path = tmp_path / "terminals.db"
    for key, value in [("T-1", row("T-1")), ("T-2", row("T-2")), ("T-3", row("T-3"))]:
        await put(sidings_kafka, name, {key: value})
    async with a_directory(name, sidings_kafka, storage=SQLite(path)) as terminals:
        meanwhile(make_anew(sidings_kafka, name, [("T-1", b"{broken"), ("T-2", row("T-2", "b"))]))
        await eventually(lambda: set(terminals) == {"T-1", "T-2"})
        assert terminals["T-1"].acquirer_id == "a"
        assert [error.key for error in terminals.errors()] == ["T-1"]
        meanwhile(make_anew(sidings_kafka, name, [("T-2", b"{broken")]))
        await eventually(lambda: set(terminals) == {"T-2"}, "what was bad in the former topic to go with it")
    async with a_directory(name, sidings_kafka, storage=SQLite(path)) as terminals:
        assert terminals._follower.rebuilds == 0, "the file is of the new topic"
        assert terminals["T-2"].acquirer_id == "b"
        assert [error.key for error in terminals.errors()] == ["T-2"]


async def test_keys_of_two_kinds_are_told_once(topic, sidings_kafka, caplog):
    """After a change from Kafka Connect to a directory table, say: compaction keeps the record of the former key."""
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1"), "T-2": row("T-2")})
    async with a_directory(name, sidings_kafka) as terminals:
        assert "with keys of one kind" not in caplog.text
        for n, acquirer in enumerate(("b", "c")):
            await put(sidings_kafka, name, {'{"terminal_id": "T-1"}': row("T-1", acquirer)})
            await terminals.wait_until(2 + n, timeout=SECONDS)
        assert terminals["T-1"].acquirer_id == "c"
        assert caplog.text.count("with keys of one kind") == 1


# -- the clock --------------------------------------------------------------------------------------------------------


async def test_a_clock_that_was_ahead_hides_no_absence(topic, sidings_kafka, tmp_path, monkeypatch, caplog):
    """A file that says that it was complete tomorrow says nothing; a directory that runs on corrects itself."""
    monkeypatch.setattr("sidings.kafka.directory.follower._NOTE_SECONDS", 0.1)
    now, path = time.time, tmp_path / "terminals.db"
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1")})

    def ahead() -> float:
        return now() + 200_000

    async def a_life(rebuilds: int) -> None:
        async with a_directory(name, sidings_kafka, storage=SQLite(path)) as terminals:
            assert terminals._follower.rebuilds == rebuilds
            assert terminals["T-1"] == Acquirer(terminal_id="T-1", acquirer_id="a")

    with monkeypatch.context() as wrong:
        wrong.setattr("sidings.kafka.directory.completeness.time.time", ahead)
        await a_life(0)
    await a_life(1)
    async with a_directory(name, sidings_kafka, storage=SQLite(path)) as terminals:
        with monkeypatch.context() as wrong:
            wrong.setattr("sidings.kafka.directory.completeness.time.time", ahead)
            await eventually(lambda: terminals._follower._completeness.at > now() + 100_000)
        await eventually(lambda: terminals._follower._completeness.at < now() + 1)
        noted = terminals._follower._noted_at
        await eventually(lambda: terminals._follower._noted_at > noted, "the file to say so")
    await a_life(0)


async def test_a_load_that_takes_longer_than_tombstones_stay_is_not_repeated(topic, sidings_kafka, monkeypatch, caplog):
    """Each further one would take as long: it was read again and again, for ever."""
    name = await topic("terminals", partitions=2, config=COMPACTED | {"delete.retention.ms": "100"})
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(4)})
    now, begin, took = time.time, Completeness.begin, 0.0
    monkeypatch.setattr("sidings.kafka.directory.completeness.time.time", lambda: now() + took)

    def at_length(self: Completeness) -> None:
        nonlocal took
        begin(self)
        took += 1_000

    monkeypatch.setattr(Completeness, "begin", at_length)
    async with a_directory(name, sidings_kafka) as terminals:
        follower = terminals._follower
        await eventually(lambda: "may have missed deletions" in caplog.text)
        assert (follower.rebuilds, len(terminals)) == (0, 4)
        follower._completeness.at -= 1_000
        await eventually(lambda: follower.rebuilds == 1, "an absence to be none of the load's")
        await eventually(lambda: follower._again is None and not follower._completeness._read_anew)
        assert (follower.rebuilds, len(terminals)) == (1, 4)


async def test_completeness_is_of_the_partition_that_kafka_has_told_of_least_lately():
    """What Kafka has not said, nobody knows: a partition that was silent for too long may have lost tombstones."""
    follower = a_directory("terminals", "127.0.0.1:1")._follower
    follower._identity, follower._loaded = Identity("terminals", "cluster", "reading"), True
    completeness = follower._completeness
    completeness.tombstone_seconds, completeness.at = 100.0, 1_000.0
    follower.progress.positions = {0: 5, 1: 5}

    class Told:
        partitions = (0, 1)
        unreadable: ClassVar[dict[int, str]] = {}

        def __init__(self, *standings: Standing) -> None:
            self._standings = dict(enumerate(standings))

        async def standings(self) -> dict[int, Standing]:
            return self._standings

        async def begins(self) -> dict[int, int]:
            return {0: 0, 1: 0}

        async def ends(self) -> dict[int, int]:
            return {0: 5, 1: 9}

        async def topic_id(self) -> None:
            return None

        def seek(self, partition: int, offset: int, epoch: int | None) -> None: ...

        def assign(self, partitions: object) -> None: ...

    told: Any = None
    for first, second, complete_at, rebuilds in [
        (Standing(5, 5, 1_050.0), Standing(5, 5, 1_010.0), 1_010.0, 0),
        (Standing(5, 5, 1_105.0), Standing(4, 5, 1_105.0), 1_105.0, 0),  # read again after a pause: it has been applied
        (Standing(5, 5, 1_300.0), Standing(5, 9, 1_300.0), 1_105.0, 0),  # behind: the next one may be missing
        (Standing(5, 5, 1_301.0), Standing(9, 9, 1_301.0), None, 1),
    ]:
        told = Told(first, second)
        follower.progress.positions = await follower._look_at_positions(told)
        await follower._remember_completeness(told)
        assert follower.rebuilds == rebuilds
        assert complete_at is None or completeness.at == complete_at
    follower.progress.positions = await follower._look_at_positions(
        Told(Standing(5, 5, 1_400.0), Standing(9, 9, 1_500.0))
    )
    follower._again = None
    await follower._finish()
    told = Told(Standing(5, 6, 1_600.0), Standing(9, 10, 1_600.0))
    follower.progress.positions = await follower._look_at_positions(told)
    await follower._remember_completeness(told)
    assert completeness._read_anew, "partitions that were at their ends while others were read are not all at them now"
    completeness.tombstone_seconds, completeness.at, completeness._read_anew = 10.0, 1_000.0, False
    completeness._at_end = {0: 1_050.0, 1: 1_050.0}
    await follower._remember_completeness(told)
    assert follower.rebuilds == 1, "a moment is no absence, whatever delete.retention.ms says"
    completeness.at = time.time() - 30
    assert follower._why_not({0: 0, 1: 0}, {0: 5, 1: 9}) is None, "nor is it after a connection was lost"
    follower._loaded = False
    assert "delete.retention.ms" in (follower._why_not({0: 0, 1: 0}, {0: 5, 1: 9}) or ""), "but of a file it is"


# -- the records ------------------------------------------------------------------------------------------------------


def test_of_the_good_and_bad_records_of_a_row_the_last_one_counts():
    faults = Faults("terminals")

    def note(*kinds: str) -> list[int]:
        """`kinds`: g(ood) or b(ad) and the row's name, in the order of the log: the offsets of the errors that stay."""
        changes: list[Any] = []
        bad: list[Any] = []
        for offset, (kind, name) in enumerate(kinds):
            if kind == "g":
                changes.append((name, name, object(), None))
            else:
                bad.append((len(changes), name, BadRecord("terminals", 0, offset, name, 0, "broken")))
        before = list(faults.now().items())
        changed = faults.note(changes, bad)
        assert changed == faults.now() or (changed is None and before == list(faults.now().items()))
        return [error.offset for error in faults]

    assert note("gx", "gy") == []
    assert note("b1", "g1", "g2", "b2", "g3", "b3", "g3") == [3]
    assert note("g1", "b1") == [3, 1]
    assert note("b2", "g2", "b2", "g1", "g4") == [2]
    assert note("g5") == [2]
    assert note("g2") == []
    assert note("b1", "b2") == [0, 1]
    assert note("b1") == [1, 0], "the oldest first"
    assert faults.total == 9


def test_when_all_is_mended_no_error_is_left_however_many_there_were():
    """The first of each partition that had made room was one until the next start, and the alert did not end."""
    faults = Faults("terminals")
    rows, bad = [f"T-{n}" for n in range(3_000)], list[Any]()
    for offset, name in enumerate(rows):
        bad.append((0, name, BadRecord("terminals", offset % 3, offset, name, 0, "broken")))

    def mended(names: list[str]) -> tuple[int, Any]:
        told = faults.note([(name, name, object(), None) for name in names], [])
        assert told is None or told == faults.now()
        return len(faults), told

    faults.note([], bad)
    assert (len(faults), len(list(faults)), len(faults.now())) == (3_000, 1_003, 1_003)
    assert faults.of_rows() == (3_000, bad[0][2])
    assert [error.offset for error in faults][:4] == [0, 1, 2, 2_000]
    assert mended(rows[3:])[0] == 3
    assert [error.offset for error in faults] == [0, 1, 2]
    assert mended(rows[3:]) == (3, None)
    faults.note([], bad[:1])
    assert [error.offset for error in faults] == [1, 2, 0], "it is bad anew"
    assert mended(rows[:2])[0] == 1
    assert [error.offset for error in faults] == [2]
    assert mended(rows[:3]) == (0, {})
    assert list(faults) == []
    faults.note([], [(0, None, BadRecord("terminals", 0, offset, None, 0, "no key")) for offset in range(1_500)])
    assert (len(faults), next(iter(faults)).offset) == (1_001, 0), "of what no record can mend the first one stays"
    assert faults.of_rows() == (0, None)
    assert mended(rows) == (1_001, None)


# -- Kafka ------------------------------------------------------------------------------------------------------------


async def test_a_record_that_kafka_cannot_give_is_told_and_waited_for_at_the_start(own_kafka, tmp_path, monkeypatch):
    """In memory, and from a file, which knows what was before."""
    monkeypatch.setattr("sidings.kafka.directory.reader._REST_SECONDS", 0.3)
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "terminals", partitions=2, config=COMPACTED)
    await put(kafka.bootstrap, "terminals", {"T-0": row("T-0"), "T-1": row("T-1")})
    path = tmp_path / "terminals.db"
    async with a_directory("terminals", kafka.bootstrap, storage=SQLite(path)):
        pass
    await put(kafka.bootstrap, "terminals", {"T-2": row("T-2")})
    await put(kafka.bootstrap, "terminals", {"T-3": row("T-3")}, partition=1)
    [log] = Path(kafka.directory).rglob("terminals-0/*.log")
    whole = log.read_bytes()
    with log.open("r+b") as file:
        file.seek(whole.rindex(b"acquirerId"))
        file.write(b"?")
    given = [a_directory("terminals", kafka.bootstrap, load_seconds=None, storage=s) for s in (None, SQLite(path))]
    running = [asyncio.create_task(terminals.run()) for terminals in given]
    told = "partition 0 stands still: the record at offset 2 cannot be read (CorruptRecordException"
    for terminals in given:
        await eventually(terminals.problems)
        assert told in terminals.problems()[0]
        await eventually(lambda: terminals.positions() == {0: 2, 1: 1})  # noqa: B023
        assert "partition 0 at 2 of 3; " + told in terminals.not_ready()[0]
        assert not terminals.ready
    log.write_bytes(whole)
    for terminals in given:
        await terminals.wait_ready(SECONDS)
        assert set(terminals) == {f"T-{n}" for n in range(4)}
        await eventually(lambda: not terminals.problems())  # noqa: B023
        terminals.stop()
    await asyncio.wait_for(asyncio.gather(*running), SECONDS)


@pytest.mark.parametrize("codec", [None, "gzip"], ids=["header", "gzip"])
async def test_a_record_that_cannot_be_read_stops_its_partition_and_no_other(topic, sidings_kafka, monkeypatch, codec):
    monkeypatch.setattr("sidings.kafka.directory.reader._REST_SECONDS", 0.1)
    monkeypatch.setattr("sidings.kafka.directory.same_log._DOUBT_SECONDS", 0.5)
    name = await topic("terminals", partitions=3, config=COMPACTED)
    async with a_directory(name, sidings_kafka) as terminals:
        for partition in range(3):
            await put(sidings_kafka, name, {f"T-{partition}": row("T", "a")}, partition=partition)
        await terminals.wait_until(timeout=SECONDS)
        reader = terminals._follower.reader
        if codec:
            await produce_padded(sidings_kafka, name, 1, codec)
        else:
            await produce_unreadable(sidings_kafka, name, 1)
        await put(sidings_kafka, name, {"T-1": row("T", "b")}, partition=1)
        await eventually(terminals.problems)
        assert "partition 1 stands still: the record at offset 1 cannot be read" in terminals.problems()[0]
        for n in range(20):
            for partition in (0, 2):
                await put(sidings_kafka, name, {f"T-{partition}": row("T", str(n))}, partition=partition)
                await terminals.wait_until(n + 1, partition=partition, timeout=SECONDS)
                assert terminals[f"T-{partition}"].acquirer_id == str(n)
        with pytest.raises(DirectoryBehind, match="partition 1 at 1 of 3"):
            await terminals.wait_until(2, partition=1, timeout=0.5)
        assert terminals["T-1"].acquirer_id == "a"
        assert len(terminals.problems()) == 1
        assert terminals._follower.reader is reader, "no connection was given up"
        assert terminals._follower.rebuilds == 0


async def test_one_record_that_cannot_be_read_for_long_does_not_stop_the_others_when_the_connection_breaks(
    own_kafka, monkeypatch
):
    """All was read again then, for what may have been missed, and that ended as little as the record was read: until it
    was, nothing changed any more in any partition."""
    monkeypatch.setattr("sidings.kafka.directory.reader._REST_SECONDS", 0.3)
    kafka = await asyncio.to_thread(own_kafka)
    config = COMPACTED | {"delete.retention.ms": "0"}
    await create_topic(kafka.bootstrap, "terminals", partitions=2, config=config)
    await put(kafka.bootstrap, "terminals", {"T-0": row("T-0")})
    await put(kafka.bootstrap, "terminals", {"T-1": row("T-1")}, partition=1)
    fetch, breaking = Reader.fetch, False

    async def breaks(self: Reader, seconds: float, most: int) -> Any:
        if breaking:
            raise KafkaConnectionError("just then")
        return await fetch(self, seconds, most)

    async def refused(*_: Any) -> None:
        raise KafkaError("no answer")

    monkeypatch.setattr(Reader, "fetch", breaks)
    async with a_directory("terminals", kafka.bootstrap) as terminals:
        follower, told = terminals._follower, noted(terminals)
        await terminals.wait_until(timeout=SECONDS)
        with monkeypatch.context() as away:
            away.setattr(Reader, "connect", refused)
            breaking = True
            await eventually(lambda: follower.reader is None)
            await put(kafka.bootstrap, "terminals", {"T-0": row("T-0", "b")})
            [log] = Path(kafka.directory).rglob("terminals-0/*.log")
            whole = log.read_bytes()
            with log.open("r+b") as file:
                file.seek(whole.rindex(b"acquirerId"))
                file.write(b"?")
            breaking = False
        monkeypatch.setattr("sidings.kafka.directory.completeness._ABSENT_SECONDS", 1.0)
        await eventually(lambda: terminals.problems() and follower.stale_seconds > 1.0)
        for number in range(3):
            before, breaking = follower.reader, True
            await eventually(lambda: follower.reader is not before)  # noqa: B023
            breaking = False
            await put(kafka.bootstrap, "terminals", {"T-1": row("T-1", str(number))}, partition=1)
            await terminals.wait_until(number + 1, partition=1, timeout=SECONDS)
            assert told[-1][0] == "T-1"
            assert told[-1][2] == terminals["T-1"].acquirer_id == str(number)
        assert follower.rebuilds == 0
        assert terminals["T-0"].acquirer_id == "a"
        log.write_bytes(whole)
        await eventually(lambda: follower.rebuilds, "what may have been missed is looked for when it can be read")
        await terminals.wait_until(timeout=SECONDS)
        assert {key: value.acquirer_id for key, value in terminals.items()} == {"T-0": "b", "T-1": "2"}


def test_what_was_missed_in_front_of_a_record_that_cannot_be_read_is_not_put_down_to_a_long_load():
    """Where that record had come during the load. A load as long would be followed by no other."""
    completeness = Completeness("terminals")
    completeness.tombstone_seconds = 100.0
    completeness.begin()
    completeness.at, loaded_at = 1_000.0, 1_010.0
    completeness.barrier_reached()
    completeness.loaded()
    for stands in ({0: "why"}, {}):  # it can be read again
        completeness.stand_still(stands)
        completeness.at_end(1, 2_000.0)
        assert completeness.look((0, 1)) is None
        assert completeness.missed_before(loaded=True) is None
    completeness.at_end(0, loaded_at + 1_000.0)
    assert "delete.retention.ms" in (completeness.look((0, 1)) or "")
    assert completeness.missed_before(loaded=True) is not None


async def test_a_connection_is_taken_for_sound_when_it_has_lasted(topic, sidings_kafka, monkeypatch):
    """One that breaks again and again after a moment must not look like health in between."""
    monkeypatch.setattr("sidings.kafka.directory.directory._UNREACHABLE_SECONDS", 0.0)
    monkeypatch.setattr("sidings.kafka.directory.follower._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("sidings.kafka.directory.follower._STEADY_SECONDS", 3_600.0)
    name = await topic("terminals", config=COMPACTED)
    async with a_directory(name, sidings_kafka) as terminals:
        for number in range(3):
            await put(sidings_kafka, name, {"T-1": row("T-1", str(number))})
            await terminals.wait_until(timeout=SECONDS)
        assert terminals.problems()
        monkeypatch.setattr("sidings.kafka.directory.follower._STEADY_SECONDS", 0.0)
        await eventually(lambda: not terminals.problems())


async def test_a_directory_that_was_declared_long_before_its_start_is_well(topic, sidings_kafka, monkeypatch):
    """As where the process has had much to do between its imports and the service's start."""
    name = await topic("terminals", config=COMPACTED)
    with monkeypatch.context() as long_ago:
        now = time.monotonic
        long_ago.setattr("time.monotonic", lambda: now() - 60.0)
        terminals = a_directory(name, sidings_kafka)
    async with terminals:
        assert terminals.problems() == []


async def test_a_directory_that_cannot_follow_says_how_stale_it_is(topic, sidings_kafka, monkeypatch):
    """With Kafka away it is ready, and as far as it knows nothing is behind."""
    name = await topic("terminals", partitions=2, config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    registry = CollectorRegistry()

    def stale() -> float:
        return registry.get_sample_value("sidings_directory_stale_seconds", {"service": "", "topic": name}) or 0.0

    async def refused(*_: Any, **__: Any) -> None:
        raise KafkaError("no answer")

    terminals = a_directory(name, sidings_kafka, prometheus=registry)
    assert terminals._follower.stale_seconds == 0.0, "it is not ready"
    async with terminals:
        await eventually(lambda: 0.0 < stale() < 1.0)
        with monkeypatch.context() as away:
            away.setattr(Reader, "connect", refused)
            away.setattr(Reader, "fetch", refused)
            await eventually(lambda: stale() > 1.5)
        await eventually(lambda: stale() < 1.0)


async def test_a_directory_that_reads_all_again_is_as_stale_as_what_it_serves(topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.directory.completeness._ABSENT_SECONDS", 1.0)
    name = await topic("terminals", config=COMPACTED | {"delete.retention.ms": "0"})
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    fetch, go = Reader.fetch, asyncio.Event()

    async def refused(*_: Any, **__: Any) -> None:
        raise KafkaError("no answer")

    async def held(reader: Reader, *args: Any, **options: Any) -> Any:
        await go.wait()
        return await fetch(reader, *args, **options)

    async with a_directory(name, sidings_kafka) as terminals:
        follower = terminals._follower
        with monkeypatch.context() as away:
            away.setattr(Reader, "connect", refused)
            away.setattr(Reader, "fetch", refused)
            await eventually(lambda: follower.stale_seconds > 1.5)
        monkeypatch.setattr(Reader, "fetch", held)
        await eventually(lambda: follower.rebuilds == 1)
        assert follower.stale_seconds > 1.5
        go.set()
        await eventually(lambda: follower.stale_seconds < 1.0)
        assert follower.rebuilds == 1


async def test_a_partition_of_which_nothing_has_ever_come_counts_as_silent():
    """As where its broker hangs between the question for its end and the first fetch."""
    reader = Reader(quick("127.0.0.1:1"), "terminals")
    try:
        reader.assign({0})
        await eventually(lambda: reader.silence() > 0.1)
        assigned_at = time.monotonic()
        reader.assign({0, 1})
        assert reader.silence() <= time.monotonic() - assigned_at  # however long this took
    finally:
        await reader.close()


async def test_a_mistake_inside_of_the_client_costs_a_connection_and_not_the_directory(
    topic, sidings_kafka, monkeypatch
):
    name = await topic("terminals", config=COMPACTED)
    async with a_directory(name, sidings_kafka) as terminals:
        getmany, fails = AIOKafkaConsumer.getmany, [AssertionError("a mistake inside of the client")]

        async def failing_once(self: AIOKafkaConsumer, *args: Any, **options: Any) -> Any:
            if fails:
                raise fails.pop()
            return await getmany(self, *args, **options)

        monkeypatch.setattr(AIOKafkaConsumer, "getmany", failing_once)
        await eventually(lambda: not fails)
        await put(sidings_kafka, name, {"T-1": row("T-1")})
        await eventually(lambda: "T-1" in terminals)


async def test_the_ends_are_asked_again_when_kafka_has_not_told_them(topic, sidings_kafka, monkeypatch):
    name = await topic("terminals", config=COMPACTED)
    async with a_directory(name, sidings_kafka) as terminals:
        await put(sidings_kafka, name, {"T-1": row("T-1")})
        ends, fails = Reader.ends, [KafkaError("no answer"), TimeoutError()]

        async def failing(self: Reader) -> dict[int, int]:
            if fails:
                raise fails.pop()
            return await ends(self)

        monkeypatch.setattr(Reader, "ends", failing)
        async with asyncio.timeout(SECONDS):
            assert await terminals.end_offsets() == {0: 1}
        assert fails == []


# -- the directory itself ---------------------------------------------------------------------------------------------


async def test_who_waits_for_a_directory_that_ends_is_told(topic, sidings_kafka, tmp_path):
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    async with a_directory(name, sidings_kafka, storage=SQLite(tmp_path / "terminals.db")) as terminals:
        waiting = asyncio.create_task(terminals.wait_until(7))
        await asyncio.sleep(0)
    for wait in (waiting, terminals.wait_until(7), terminals.wait_until(), terminals.end_offsets()):
        with pytest.raises(DirectoryBehind, match="it has ended"):
            async with asyncio.timeout(SECONDS):
                await wait
    await terminals.wait_until(0)
    assert terminals.problems() == [f"directory {name!r} is read no more: it has ended"]
    for read in (lambda: terminals.get("T-1"), lambda: terminals["T-1"], terminals.items):
        with pytest.raises(StorageError, match="not open"):
            read()


async def test_a_directory_without_a_service_tells_of_its_end(topic, sidings_kafka, tmp_path, caplog):
    """Nobody watches it, and who lives from its callbacks heard of no change any more, for ever."""
    name = await topic("terminals", config=COMPACTED)
    storage = SQLite(tmp_path / "terminals.db")
    terminals = await a_directory(name, sidings_kafka, storage=storage).__aenter__()
    assert storage._writer is not None
    storage._writer.execute("PRAGMA max_page_count = 20")
    await put(sidings_kafka, name, {f"T-{n}": row("x" * 50_000) for n in range(9)})
    await eventually(lambda: terminals._follower.ended and "CRITICAL" in {r.levelname for r in caplog.records})
    [told] = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert f"directory {name!r} has ended" in told.getMessage()
    assert "disk is full" in told.getMessage()
    with pytest.raises(StorageError, match="disk is full"):
        await terminals.__aexit__(None, None, None)


async def test_who_waits_for_a_load_that_fails_is_told(topic, sidings_kafka):
    terminals = a_directory(await topic() + "-nowhere", sidings_kafka, load_seconds=0.5)
    running = asyncio.create_task(terminals.run())
    with pytest.raises(DirectoryNotReady, match="it has ended; there is no topic"):
        async with asyncio.timeout(SECONDS):
            await terminals.wait_ready()
    with pytest.raises(DirectoryNotReady, match="load_seconds"):
        await running


async def test_a_callback_that_raises_costs_no_other_change(topic, sidings_kafka):
    """Nor one that is slow, nor one that stops the directory."""
    name = await topic("terminals", config=COMPACTED)
    async with a_directory(name, sidings_kafka) as terminals:
        told: list[Any] = []

        @terminals.on_change
        def changed(change: Any) -> None:
            told.append(change.key)
            time.sleep(0.05)
            if change.key == "T-9":
                terminals.stop()
            raise KeyError(change.key)

        await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(10)})
        await eventually(lambda: terminals._follower.ended)
        assert sorted(told) == sorted(terminals, key=str) == [f"T-{n}" for n in range(10)]


async def test_values_that_cannot_be_compared_are_others(topic, sidings_kafka):
    """An array of numpy, say, compared with another one is neither true nor false."""

    class Vector:
        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    name = await topic("vectors", config=COMPACTED)
    vectors = a_directory(name, sidings_kafka, decoder=lambda message: Vector())
    told: list[str] = []
    vectors.on_change(lambda change: told.append(change.key))
    await put(sidings_kafka, name, {"a": b"1"})
    async with vectors:
        await put(sidings_kafka, name, {"a": b"2", "b": b"1"})
        await vectors.wait_until(timeout=SECONDS)
        assert sorted(told) == ["a", "b"]


async def test_what_was_read_beside_a_record_that_cannot_be_read_is_read_again():
    """The client has moved on behind it, and has given it to nobody: those rows would be missing, and nothing told."""

    class Client:
        logs: ClassVar = {0: ["a", "b"], 1: ["c", None]}
        positions: ClassVar = {0: 0, 1: 0}

        def assign(self, _: object) -> None: ...

        def pause(self, *_: object) -> None: ...

        def seek(self, tp: TopicPartition, offset: int) -> None:
            self.positions[tp.partition] = offset

        async def position(self, tp: TopicPartition) -> int:
            return self.positions[tp.partition]

        def last_stable_offset(self, tp: TopicPartition) -> int:
            return len(self.logs[tp.partition])

        async def getmany(self, *names: object, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[str]]:
            found: dict[TopicPartition, list[str]] = {}
            for tp in [tp for tp in (TopicPartition("rates", 0), TopicPartition("rates", 1)) if tp in names]:
                for record in self.logs[tp.partition][self.positions[tp.partition] :]:
                    if sum(map(len, found.values())) == max_records:
                        break
                    if record is None:
                        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")
                    found.setdefault(tp, []).append(record)
                    self.positions[tp.partition] += 1
            return found

    reader = Reader(KafkaSettings(bootstrap="127.0.0.1:1"), "rates")
    reader._client = cast(Any, Client())
    reader.assign([0, 1])
    for partition in (0, 1):
        reader.seek(partition, 0, None)
    read: dict[int, list[Any]] = {0: [], 1: []}
    for _ in range(6):
        for partition, records in (await reader.fetch(0.001, 10)).items():
            read[partition] += records
    assert (read, list(reader.unreadable)) == ({0: ["a", "b"], 1: ["c"]}, [1])

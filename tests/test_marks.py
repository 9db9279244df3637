"""Where late rows can stand: the reader's bookkeeping against the definition, in random histories of transactions."""

from collections.abc import Iterator
from random import Random

import pytest
from sidings.executor.marks import ReadMarks

from .scheduler_world import Database, Row, Snapshot


class Reading:
    """The reader's marks beside a database: what `read.sql` would begin its late part at, and what it should find."""

    def __init__(self, origins: int = 1, page: int = 1_000) -> None:
        self.database = Database()
        self.marks = ReadMarks()
        self.page = page
        self.highs = {f"t/{number}": 0 for number in range(origins)}

    def insert(self, xid: int, origin: str = "t/0") -> Row:
        row = Row(self.database.next_id, origin, None, "x", xid, self.database.position())
        self.database.next_id += 1
        self.database.insert(xid, row)
        return row

    def late_from(self, snapshot: Snapshot) -> int | None:
        """`late.mark` of read.sql."""
        marks = self.marks
        candidates = [mark for xid, mark in marks.open.items() if snapshot.shows(xid)]
        if marks.snapshot is not None and snapshot.xmax > Snapshot.parse(marks.snapshot).xmax:
            candidates.append(marks.unseen)
        return min(candidates, default=None)

    def late(self, snapshot: Snapshot) -> list[Row]:
        """By definition: what is visible now, was not at the last delivered read, and stands behind the high mark."""
        if self.marks.snapshot is None:
            return []
        before = Snapshot.parse(self.marks.snapshot)
        rows = self.database.rows.values()
        return [row for row in rows if not before.shows(row.txid) and (row.position or 0) <= self.highs[row.origin]]

    def read(self, *, delivered: bool = True) -> tuple[int | None, list[Row]]:
        """One read; returns its mark and the late rows that it had to find."""
        snapshot = self.database.snapshot()
        mark, late = self.late_from(snapshot), self.late(snapshot)
        if delivered:
            before = max(self.highs.values())
            for origin, high in self.highs.items():
                rows = [r.position or 0 for r in self.database.rows.values() if r.origin == origin]
                self.highs[origin] = max(
                    sorted(position for position in rows if position > high)[: self.page] or [high]
                )
            self.marks.delivered(str(snapshot), self.database.next_xid, before)
        return mark, late


def histories() -> Iterator[Random]:
    for seed in range(1_000):
        yield Random(seed)


@pytest.mark.parametrize("origins", [1, 3])
@pytest.mark.parametrize("page", [1, 3, 1_000])
def test_every_late_row_stands_above_the_mark(origins: int, page: int):
    found = skipped = 0
    for random in histories():
        reading = Reading(origins, page)
        database = reading.database
        others = random.random()
        for _ in range(120):
            dice = random.random()
            if dice < 0.2 and len(database.open) < 6:
                database.begin()
            elif dice < 0.55 and database.open:
                reading.insert(random.choice(list(database.open)), f"t/{random.randrange(origins)}")
            elif dice < 0.75 and database.open:
                # The newest rather seldom, or nearly every open transaction would be an id that a snapshot shows.
                xid = random.choice(sorted(database.open)[: random.choice((1, 6))])
                if random.random() < 0.8:
                    database.commit(xid)
                else:
                    database.end(xid)
            elif dice < 0.75 + 0.05 * others:
                database.end(database.begin())  # somebody else's transaction, which ends at once
            elif dice < 0.82:
                reading.read(delivered=False)
            elif dice < 0.83:
                reading.highs[f"t/{random.randrange(origins)}"] = 0  # dropped and acquired anew
            else:
                mark, late = reading.read()
                skipped += mark is None
                found += len(late)
                if late:
                    assert mark is not None, f"nothing is looked for, but {late} has come"
                    assert all((row.position or 0) > mark for row in late), f"{late} stands at or below {mark}"
                assert len(reading.marks.open) <= len(database.open)
    assert found > 300
    assert skipped > 1_000


def test_nothing_is_looked_for_while_no_transaction_has_ended():
    reading = Reading()
    one, two = reading.database.begin(), reading.database.begin()
    reading.insert(one)
    reading.database.commit(two)
    assert reading.read() == (None, [])  # the first read is a forward one from 0
    assert reading.read() == (None, [])
    third = reading.database.begin()
    reading.insert(third)
    assert reading.read() == (None, [])


def test_a_row_that_commits_behind_a_visible_one_is_found():
    reading = Reading()
    slow, quick = reading.database.begin(), reading.database.begin()
    first, _ = reading.insert(slow), reading.insert(quick)
    reading.database.commit(quick)
    reading.read()
    assert reading.highs == {"t/0": 2}
    reading.database.commit(slow)
    assert reading.read() == (0, [first])
    assert reading.read() == (None, [])


def test_a_row_of_an_id_above_xmax_is_found_although_no_snapshot_has_named_it():
    """xmax is the last *completed* id + 1: ids above it may have been handed out, and have positions."""
    reading = Reading()
    visible, hidden = reading.database.begin(), reading.database.begin()
    first, _ = reading.insert(hidden), reading.insert(visible)
    reading.database.commit(visible)
    snapshot = reading.database.snapshot()
    assert (snapshot.xmin, snapshot.xmax, hidden) == (visible + 1, visible + 1, visible + 1)
    reading.read()
    reading.database.commit(hidden)
    assert reading.read() == (0, [first])


def test_an_id_above_xmax_keeps_its_mark_when_a_later_snapshot_names_it():
    reading = Reading()
    database = reading.database
    before = database.begin()
    reading.insert(before)
    database.commit(before)
    reading.read()
    visible, hidden = database.begin(), database.begin()
    first, _ = reading.insert(hidden), reading.insert(visible)
    database.commit(visible)
    reading.read()
    other = database.begin()
    reading.insert(other)
    database.commit(other)
    reading.read()
    assert reading.marks.open == {hidden: 1}
    assert reading.highs == {"t/0": 4}
    database.commit(hidden)
    assert reading.read() == (1, [first])


def test_a_transaction_that_began_after_a_read_can_only_have_rows_above_its_mark():
    reading = Reading()
    database = reading.database
    for _ in range(5):
        xid = database.begin()
        reading.insert(xid)
        database.commit(xid)
    reading.read()
    late, quick = database.begin(), database.begin()
    row, _ = reading.insert(late), reading.insert(quick)
    database.commit(quick)
    reading.read()
    assert reading.marks.open == {late: 5}
    database.commit(late)
    assert reading.read() == (5, [row])  # nothing at or below 5 is touched


def test_a_long_transaction_costs_one_mark_however_many_reads_there_are():
    reading = Reading()
    database = reading.database
    long = database.begin()
    row = reading.insert(long)
    for _ in range(50):
        xid = database.begin()
        reading.insert(xid)
        database.commit(xid)
        mark, late = reading.read()
        assert late == []
        assert mark is None or mark >= reading.highs["t/0"] - 3  # only what is new is looked at
    assert reading.marks.open == {long: 0}
    database.commit(long)
    assert reading.read() == (0, [row])
    assert reading.marks.open == {}


def test_an_aborted_transaction_is_forgotten():
    reading = Reading()
    xid = reading.database.begin()
    reading.insert(xid)
    other = reading.database.begin()
    reading.database.commit(other)
    reading.read()
    reading.database.end(xid)
    mark, late = reading.read()
    assert (mark, late) == (0, [])
    assert reading.marks.open == {}


def test_a_read_that_was_not_delivered_changes_nothing():
    reading = Reading()
    slow, quick = reading.database.begin(), reading.database.begin()
    first, _ = reading.insert(slow), reading.insert(quick)
    reading.database.commit(quick)
    reading.read()
    reading.database.commit(slow)
    assert reading.read(delivered=False) == (0, [first])
    assert reading.read() == (0, [first])


def test_after_a_reset_everything_begins_anew():
    reading = Reading()
    slow, quick = reading.database.begin(), reading.database.begin()
    reading.insert(slow)
    reading.insert(quick)
    reading.database.commit(quick)
    reading.read()
    reading.marks.reset()
    reading.highs = {"t/0": 0}
    assert reading.marks == ReadMarks()
    reading.database.commit(slow)
    assert reading.read() == (None, [])
    assert reading.highs == {"t/0": 2}

"""The first version of the reader, kept as a warning: a forward scan, and a separate sweep for what committed late.

The scan reads behind the high mark. The sweep reads between a low and the high mark. The low mark may move up to a high
mark when all transactions are over that were possible when the scan saw it. Each detail can be got wrong, and even when
none is, rows of one group start in the wrong order, because scan and sweep have snapshots of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

from reads import Reads
from reads_memory import add
from reads_state import Cycle, Protocol, Row, Scenario, State

__all__ = ["ScanAndSweep", "Sweeping"]

Steps = Iterator[tuple[str, State]]


@dataclass(frozen=True)
class Sweeping:
    """How the low mark moves. `order`: whether a wrong order is to be reported; it masks everything else."""

    bound: str = "next xid"  # "xmax": the low mark may pass if the scan's xmax <= xmin; "xmax < xmin"
    moved: str = "after the sweep"  # "before the sweep"
    order: bool = True


class SweepMarks(NamedTuple):
    """`noted`: (bound, high mark) of past scans: when all ids below the bound are over, `low` may move up to it."""

    high: tuple[int, ...]
    low: int = 0
    noted: tuple[tuple[int, int], ...] = ()


class Scan(NamedTuple):
    """A forward scan that is on its way back."""

    rows: tuple[Row, ...]
    bound: int


class Sweep(NamedTuple):
    """A sweep that is on its way back. `oldest`: the oldest id that was open."""

    rows: tuple[Row, ...]
    oldest: int


def _marks(s: State) -> SweepMarks:
    """This reader's marks stand where the other's do."""
    return cast(SweepMarks, s.marks)


class ScanAndSweep(Reads):
    """The model of the reads with the first version's reader."""

    def __init__(self, protocol: Protocol, scenario: Scenario, sweeping: Sweeping) -> None:
        super().__init__(protocol, scenario)
        self.sweeping = sweeping

    def initial(self) -> State:
        return super().initial()._replace(marks=SweepMarks((0,)))

    def reader_steps(self, s: State) -> Steps:
        """Scan and sweep in any order, one at a time."""
        if s.read is None:
            yield "a scan takes its snapshot", s._replace(read=self._scan(s))
            early = self.sweeping.moved == "before the sweep"
            marks = self._lower(_marks(s), self._oldest(s)) if early else _marks(s)
            yield "a sweep takes its snapshot", s._replace(read=self._sweep(s, marks), marks=marks)
            return
        under_way = cast(Scan | Sweep, s.read)
        if isinstance(under_way, Scan):
            yield "the scan is delivered", self._scanned(s, under_way)
        else:
            yield "the sweep is delivered", self._swept(s, under_way)

    def _oldest(self, s: State) -> int:
        snapshot = self.snapshot(s)
        return min(snapshot.open, default=snapshot.xmax)

    def _scan(self, s: State) -> Scan:
        rows = [row for at, row in self.visible(s) if at > _marks(s).high[0]]
        xmax = self.snapshot(s).xmax
        bound = {"xmax": xmax, "xmax < xmin": xmax + 1, "next xid": s.next_xid}[self.sweeping.bound]
        return Scan(tuple(rows[: self.scenario.page]), bound)

    def _sweep(self, s: State, marks: SweepMarks) -> Sweep:
        rows = [row for at, row in self.visible(s) if marks.low < at <= marks.high[0]]
        return Sweep(tuple(rows), self._oldest(s))

    def _scanned(self, s: State, scan: Scan) -> State:
        for row in scan.rows:
            s = add(self, s, row)
        marks = _marks(s)
        high = max([marks.high[0]] + [self.position(s, row.job) for row in scan.rows])
        noted = tuple(n for n in marks.noted if n[1] != high or n[0] < scan.bound)
        if not any(n[1] == high and n[0] <= scan.bound for n in noted):
            noted = (*noted, (scan.bound, high))
        return s._replace(marks=marks._replace(high=(high,), noted=noted), read=None, ended=())

    def _swept(self, s: State, sweep: Sweep) -> State:
        for row in sweep.rows:
            s = add(self, s, row)
        late = self.sweeping.moved == "after the sweep"
        marks = self._lower(_marks(s), sweep.oldest) if late else _marks(s)
        return s._replace(marks=marks, read=None, ended=())

    def _lower(self, marks: SweepMarks, oldest: int) -> SweepMarks:
        low = max([marks.low] + [high for bound, high in marks.noted if bound <= oldest])
        return marks._replace(low=low, noted=tuple(n for n in marks.noted if n[1] > low))

    def wrong_start(self, s: State, row: Row, cycle: Cycle) -> str:
        wrong = super().wrong_start(s, row, cycle)
        return "" if wrong.startswith("I4") and not self.sweeping.order else wrong

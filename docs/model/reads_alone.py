"""The reads model's cycles that read what they name early: jobs that come alone, each by its id, in a snapshot that is
not that of a read. Compare `name_and_read.sql` and `expected.py`.

It is the cycle under way: no other one commits before it is heard. That it names the job is left out here, see
`lease_early`; a cycle names it when it is in memory.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reads_memory import add
from reads_state import WAITING, Row, State, swap

if TYPE_CHECKING:
    from reads import Reads

__all__ = ["alone_steps"]

Steps = Iterator[tuple[str, State]]


def alone_steps(m: "Reads", s: State) -> Steps:
    """The executor is told of any committed job at any time; what comes of it may be left to a read as well."""
    if not m.protocol.alone:
        return
    if s.alone is not None:
        yield "what the cycle has read does not count", s._replace(alone=None)
        yield f"the cycle brings {m.job_name(s.alone.job)}", _delivered(m, s, s.alone)
    elif s.cycle is None:
        for at, row in m.visible(s):
            if (
                s.jobs[row.job].status == WAITING
                and s.marks.high[m.origin_of(row)] is not None
                and _first(m, s, at, row)
            ):
                yield f"a cycle reads {m.job_name(row.job)}", s._replace(alone=row)


def _first(m: "Reads", s: State, at: int, row: Row) -> bool:
    """Whether none of its group stands before it, in the statement's snapshot."""
    if m.protocol.alone == "any of its group":
        return True
    group = m.specs[row.job].group
    return not any(m.specs[other.job].group == group and before < at for before, other in m.visible(s))


def _delivered(m: "Reads", s: State, row: Row) -> State:
    """It is taken in by its position, like what a read brings, and the mark stays where it is."""
    s = add(m, s._replace(alone=None), row, handed_over=True)
    if m.protocol.alone == "moves the mark":
        origin = m.origin_of(row)
        high = s.marks.high[origin] or 0
        s = s._replace(marks=s.marks._replace(high=swap(s.marks.high, origin, max(high, m.position(s, row.job)))))
    return s

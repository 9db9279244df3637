"""The reads model's reader: one read under way at a time, in one snapshot.

Compare `read.sql`, `reader.py` and `marks.py`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reads_memory import add, apply_refill, crowded, forget_waiting, supersede, thinned, unheard, wants_refill
from reads_state import (
    DUE,
    UNDER_WAY,
    WAITING,
    Glance,
    Job,
    Marks,
    Read,
    Refill,
    Row,
    Snapshot,
    State,
)

if TYPE_CHECKING:
    from reads import Reads

__all__ = ["other_server", "reader_steps", "start_over"]

Steps = Iterator[tuple[str, State]]


def reader_steps(m: "Reads", s: State) -> Steps:
    """One read is under way at a time. Its snapshot is taken now, its result is applied some time later."""
    read = s.read
    if s.thinned:
        yield "it hears that superseded jobs have been ended", thinned(m, s)
        if s.lost_answers:
            yield "the answer of superseding is lost", unheard(m, s)._replace(lost_answers=s.lost_answers - 1)
        if read is None:
            return
    elif m.scenario.latest and (read is None or m.protocol.supersede == "any time"):
        yield from _supersedes(m, s)
    if read is None and m.protocol.glance and s.glance is None:
        glance = _glance(m, s)
        if glance != s.complete or any(wants_refill(m, group) for group in s.groups):
            yield "the reader takes a glance", s._replace(glance=glance, complete=None)
        return
    if read is None:
        if m.protocol.bound == "before the snapshot" and not s.marks.early:
            yield "the reader asks for the next xid", s._replace(marks=s.marks._replace(early=s.next_xid))
            return
        yield "a read takes its snapshot", _issue(m, s, ())
        if m.scenario.full and any(group.queue for group in s.groups):
            yield "a read without a forward part takes its snapshot", _issue(m, s, (), whole=False)
        deep = _deep(m, s) if m.protocol.leave_out else ()
        if deep:
            names = ", ".join(m.group_names[g] for g in deep)
            yield f"a read that leaves out {names} takes its snapshot", _issue(m, s, deep)
        if m.protocol.refill != "in the read":
            yield from _lone_refills(m, s)
        return
    if s.lost_answers:
        yield "the read's answer is lost", s._replace(read=None, lost_answers=s.lost_answers - 1, ended=())
    if read.needs_end:
        read = read._replace(scanned=_scanned(m, s, read.forward), needs_end=False)
        yield "the reader asks how far it may advance", s._replace(read=read)
    else:
        yield "the read is delivered", _deliver(m, s, read)


def _glance(m: "Reads", s: State) -> Glance:
    """Equal for two calls between which nothing has become visible, on the same server."""
    return Glance(m.snapshot(s), 0 if m.protocol.glance == "without the server" else s.server)


def _supersedes(m: "Reads", s: State) -> Steps:
    """Of groups of which nothing runs, and no outcome is unacknowledged."""
    cycle = () if s.cycle is None else (*s.cycle.ends, *s.cycle.fails)
    busy = {m.specs[k].group for k, j in enumerate(s.jobs) if j.status in UNDER_WAY or k in cycle}
    if m.protocol.supersede == "what runs as well":
        busy = set()
    groups = [i for i, group in enumerate(s.groups) if i not in busy and not group.held and crowded(m, s, i)]
    if groups:
        names = ", ".join(m.group_names[g] for g in groups)
        yield f"superseded jobs of {names} are ended", supersede(m, s, groups)


def _deep(m: "Reads", s: State) -> tuple[int, ...]:
    """The groups that can be left out of a forward read: the database is known to have more of them, and the mark has
    passed their last row, or rows between the two would be left to nobody."""
    deep = []
    for index, group in enumerate(s.groups):
        high = s.marks.high[m.scenario.origins[index]]
        passed = high is not None and group.last <= high
        if group.more and (passed or m.protocol.deep == "when more"):
            deep.append(index)
    return tuple(deep)


def _issue(m: "Reads", s: State, left_out: tuple[int, ...], *, whole: bool = True) -> State:
    """`read.sql`: late rows, refills and forward rows of all held origins, in one snapshot."""
    rows, snapshot, marks = m.visible(s), m.snapshot(s), s.marks
    base = _late_base(m, marks, snapshot)
    late = [] if base is None else [row for at, row in rows if _is_late(m, s, base, at, row)]
    refills = _refills(m, s, rows) if m.protocol.refill == "in the read" else ()
    forward = _forward(m, s, rows, left_out) if whole else ()
    elsewhere = bool(left_out) and m.protocol.scanned == "another snapshot"
    read = Read(
        late=tuple(late),
        refills=refills,
        forward=forward,
        left_out=left_out,
        scanned=_scanned(m, s, forward) if left_out and not elsewhere else _ends_of(m, s, forward),
        snapshot=snapshot,
        bound=marks.early or s.next_xid,
        server=s.server,
        version=s.version,
        needs_end=elsewhere,
        glance=s.glance,
        whole=whole,
    )
    s = s._replace(glance=None)
    if m.protocol.marks_of == "issued reads":
        s = s._replace(marks=_advance(m, marks, read))
    return s._replace(read=read)


def _late_base(m: "Reads", marks: Marks, snapshot: Snapshot) -> int | None:
    """Where late rows can start; None if no transaction has ended since the read before."""
    if marks.snapshot is None:
        return None
    bases = [base for xid, base in marks.bases if snapshot.sees(xid)]
    if snapshot.xmax > marks.snapshot.xmax and m.protocol.late_base == "open and later":
        bases.append(marks.unseen)
    return min(bases, default=None)


def _is_late(m: "Reads", s: State, base: int, at: int, row: Row) -> bool:
    high = s.marks.high[m.origin_of(row)]
    assert s.marks.snapshot is not None
    return high is not None and base < at <= high and not s.marks.snapshot.sees(m.xid(s, row.job))


def _refills(m: "Reads", s: State, rows: list[tuple[int, Row]], bounded: bool = True) -> tuple[Refill, ...]:
    """What each group that runs low gets, up to the high mark of its origin."""
    found = []
    for index, group in enumerate(s.groups):
        high = s.marks.high[m.scenario.origins[index]]
        if high is None or not wants_refill(m, group):
            continue
        upto = high if bounded else s.next_position
        more = [row for at, row in rows if m.specs[row.job].group == index and group.last < at <= upto]
        found.append(Refill(index, group.last, group.version, upto, tuple(more[: m.scenario.keep])))
    return tuple(found)


def _forward(m: "Reads", s: State, rows: list[tuple[int, Row]], left_out: tuple[int, ...]) -> tuple[Row, ...]:
    """The next page of each origin, without the rows of the groups that are left out."""
    forward: list[Row] = []
    for origin, high in enumerate(s.marks.high):
        ahead = [row for at, row in rows if high is not None and m.origin_of(row) == origin and at > high]
        wanted = [row for row in ahead if m.specs[row.job].group not in left_out]
        forward += wanted[: m.scenario.page]
    return tuple(forward)


def _ends_of(m: "Reads", s: State, forward: tuple[Row, ...]) -> tuple[int | None, ...]:
    """How far a read has come in each origin: to its last row."""
    ends = list(s.marks.high)
    for row in forward:
        end = ends[m.origin_of(row)]
        assert end is not None
        ends[m.origin_of(row)] = max(end, m.position(s, row.job))
    return tuple(ends)


def _scanned(m: "Reads", s: State, forward: tuple[Row, ...]) -> tuple[int | None, ...]:
    """How far a read has come if it has left rows out: to the highest position that it can see, or, if the page is
    full, to its last row. Then the mark passes the rows left out; their group's refill finds them."""
    ends = list(_ends_of(m, s, forward))
    for at, row in m.visible(s):
        origin = m.origin_of(row)
        end = ends[origin]
        full = sum(m.origin_of(r) == origin for r in forward) == m.scenario.page
        if end is not None and (not full or m.protocol.scanned == "beyond the page"):
            ends[origin] = max(end, at)
    return tuple(ends)


def _deliver(m: "Reads", s: State, read: Read) -> State:
    """Apply late rows, refills and forward rows in that order; then move the marks."""
    if read.snapshot is None:
        refill = read.refills[0]
        return apply_refill(m, s, refill, left_out=False)._replace(read=None, ended=())
    if read.server != s.marks.server and m.protocol.restart != "unnoticed":
        return other_server(m, s)
    valid = read.version == s.version or m.protocol.forgetting == "applies it"
    if valid:
        for row in read.late:
            s = add(m, s, row)
        for refill in read.refills:
            s = apply_refill(m, s, refill, refill.group in read.left_out)
        for row in read.forward:
            s = add(m, s, row)
    marks = s.marks
    passed = _passed(m, s, read) if valid and read.whole and m.protocol.passes else read.scanned
    if m.protocol.passes == "before the bases":
        pairs = zip(marks.high, passed, strict=True)
        marks = marks._replace(high=tuple(new if new is not None else old for old, new in pairs))
    if m.protocol.marks_of == "delivered reads":
        marks = _advance(m, marks, read)
    if valid:
        pairs = zip(s.marks.high, passed, strict=True)
        marks = marks._replace(high=tuple(new if new is not None else old for old, new in pairs))
    marks = marks._replace(drawn=s.next_position - 1 if m.protocol.passes else 0)
    complete = None
    if read.glance is not None and _saw_everything(m, s, read):
        complete = _glance(m, s) if m.protocol.glance == "after the read" else read.glance
    return s._replace(marks=marks, read=None, ended=(), complete=complete)


def _passed(m: "Reads", s: State, read: Read) -> tuple[int | None, ...]:
    """Up to where each origin has been read: where the page was not full, also past what open transactions have drawn.
    What was drawn before this read was sent belongs to ids that it sees or knows to be open."""
    drawn = s.next_position - 1 if m.protocol.passes == "drawn by now" else s.marks.drawn
    ends: list[int | None] = []
    for origin, end in enumerate(read.scanned):
        full = sum(m.origin_of(row) == origin for row in read.forward) == m.scenario.page
        ends.append(end if end is None or (full and m.protocol.passes != "a full page") else max(end, drawn))
    return tuple(ends)


def _saw_everything(m: "Reads", s: State, read: Read) -> bool:
    """Whether a read after this one would bring nothing, were nothing committed meanwhile."""
    rule = m.protocol.complete
    pages = [sum(m.origin_of(row) == origin for row in read.forward) for origin in range(len(read.scanned))]
    wrong = {
        "no forward part": not read.whole,
        "a full page": any(count == m.scenario.page for count in pages),
        "an origin acquired": any(
            old is None and new is not None for old, new in zip(read.scanned, s.marks.high, strict=True)
        ),
        "forgotten": read.version != s.version,
    }
    return not any(is_so for what, is_so in wrong.items() if what != rule)


def _advance(m: "Reads", marks: Marks, read: Read) -> Marks:
    """Each id that was open keeps the position above which its rows lie: the highest mark when it was first seen
    possible. An id from the last read's bound on was handed out after that read: all its positions are higher than
    anything that read could see."""
    bases = dict(marks.bases)

    def base(xid: int) -> int:
        if xid in bases:
            return bases[xid]
        return marks.highest() if marks.snapshot is None or xid >= marks.bound else marks.unseen

    snapshot = read.snapshot
    assert snapshot is not None
    return marks._replace(
        snapshot=snapshot,
        bound=read.bound,
        bases=tuple((xid, base(xid)) for xid in snapshot.open),
        unseen=base(snapshot.xmax),
        early=0,
    )


def other_server(m: "Reads", s: State) -> State:
    """The server has another start time: nothing that the marks say holds any more, nor does this result."""
    drawn = s.marks.drawn if m.protocol.passes == "kept over a restart" else 0
    marks = Marks(tuple(None if h is None else 0 for h in s.marks.high), None, 0, (), 0, s.server, drawn=drawn)
    if m.protocol.restart == "forget all but the marks":
        marks = s.marks._replace(server=s.server)
    s = forget_waiting(s)._replace(marks=marks, read=None, ended=(), glance=None)
    if m.protocol.restart.startswith(("forget everything", "forget all")):
        s = s._replace(jobs=tuple(_cancelled(j) for j in s.jobs), cycle=None, alone=None)
    return s


def start_over(m: "Reads", s: State) -> State:
    """Late rows could not be looked for in time: from 0 on none is late."""
    marks = Marks(tuple(None if h is None else 0 for h in s.marks.high), None, 0, (), 0, s.marks.server)
    if m.protocol.starting_over == "from the marks":
        return s._replace(marks=marks._replace(high=s.marks.high), glance=None, complete=None)
    return forget_waiting(s)._replace(marks=marks, glance=None)


def _lone_refills(m: "Reads", s: State) -> Steps:
    """The wrong way: a refill as a statement of its own, with a snapshot of its own."""
    bounded = m.protocol.refill == "on its own, bounded"
    for refill in _refills(m, s, m.visible(s), bounded):
        read = Read((), (refill,), (), (), s.marks.high, None, 0, s.server, s.version, False)
        yield f"a refill of {m.group_names[refill.group]} takes its snapshot", s._replace(read=read)


def _cancelled(job: Job) -> Job:
    return Job(DUE if job.attempt else WAITING, job.attempt) if job.status in UNDER_WAY else job

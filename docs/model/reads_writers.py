"""The reads model's transactions: each follows its script, and what it does becomes visible when it commits."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reads_memory import add
from reads_state import (
    ABORTED,
    COMMITTED,
    OPEN,
    Row,
    State,
    Writer,
    swap,
)

if TYPE_CHECKING:
    from reads import Reads

__all__ = ["DRAWS", "writer_steps"]

Steps = Iterator[tuple[str, State]]

DRAWS = frozenset(("enqueue", "savepoint", "promote"))  # the steps that draw a position


def writer_steps(m: "Reads", s: State) -> Steps:
    for i, w in enumerate(s.writers):
        if w.status != OPEN:
            continue
        verb, arg = m.scripts[i][w.step]
        if verb == "xid":
            yield _takes_xid(m, s, i, w, w.step + 1)
        elif verb == "wait":
            if s.writers[int(arg)].status != OPEN:
                yield f"T{i} gets the entity's row", _put(m, s, i, w._replace(step=w.step + 1))
        elif verb == "delay":
            yield f"T{i} inserts a delayed job of {arg}", _inserts_delayed(m, s, i, w)
        elif verb in DRAWS:
            yield _enqueues(m, s, i, w, verb, arg)
        else:
            yield _ends(m, s, i, w, verb)


def _put(m: "Reads", s: State, i: int, w: Writer) -> State:
    return s._replace(writers=swap(s.writers, i, w))


def _takes_xid(m: "Reads", s: State, i: int, w: Writer, step: int) -> tuple[str, State]:
    if w.xid:
        return f"T{i} writes", _put(m, s, i, w._replace(step=step))
    w = w._replace(step=step, xid=s.next_xid, newest=s.next_xid)
    return f"T{i} takes xid {s.next_xid}", _put(m, s, i, w)._replace(next_xid=s.next_xid + 1)


def _inserts_delayed(m: "Reads", s: State, i: int, w: Writer) -> State:
    xid = w.xid or s.next_xid
    s = _born(m, s, next(job for job, spec in enumerate(m.specs) if spec.author == i != spec.placer))
    after = _put(m, s, i, w._replace(step=w.step + 1, xid=xid, newest=max(w.newest, xid)))
    return after if w.xid else after._replace(next_xid=s.next_xid + 1)


def _enqueues(m: "Reads", s: State, i: int, w: Writer, verb: str, arg: str) -> tuple[str, State]:
    """`next_position()`: the transaction id first, then nextval. Two steps, since other transactions come between."""
    if not m.protocol.xid_first:
        drawn = sum(v in DRAWS for v, _ in m.scripts[i][: w.step])
        if len(w.positions) > drawn:
            return _takes_xid(m, s, i, w, w.step + 1)
    elif not w.xid:
        return _takes_xid(m, s, i, w, w.step)
    if verb != "promote":
        nth = len(w.positions)
        s = _born(m, s, next(j for j, spec in enumerate(m.specs) if spec.placer == i and spec.nth == nth))
    position, s = _draw(m, s, i)
    w = w._replace(positions=(*w.positions, position))
    if m.protocol.xid_first:
        w = w._replace(step=w.step + 1)
    if verb == "savepoint":
        w = w._replace(newest=s.next_xid)
        s = s._replace(next_xid=s.next_xid + 1)
    done = "promotes the job" if verb == "promote" else "enqueues a job"
    return f"T{i} {done} of {arg} at position {position}", _put(m, s, i, w)


def _born(m: "Reads", s: State, job: int) -> State:
    """A job gets its id; the order of ids matters only for superseding."""
    return s._replace(born=(*s.born, job)) if m.scenario.latest else s


def _draw(m: "Reads", s: State, i: int) -> tuple[int, State]:
    """nextval. A session of a sequence with CACHE > 1 draws several at once."""
    size = m.protocol.sequence_cache
    session = m.scenario.sessions[i] if m.scenario.sessions else None
    if session is None or size == 1:
        return s.next_position, s._replace(next_position=s.next_position + 1)
    cache = s.caches[session] or tuple(range(s.next_position, s.next_position + size))
    drawn = s.next_position + (0 if s.caches[session] else size)
    return cache[0], s._replace(next_position=drawn, caches=swap(s.caches, session, cache[1:]))


def _ends(m: "Reads", s: State, i: int, w: Writer, verb: str) -> tuple[str, State]:
    status = COMMITTED if verb == "commit" else ABORTED
    after = _put(m, s, i, w._replace(step=w.step + 1, status=status))
    after = after._replace(completed=max(s.completed, w.newest))
    if status == ABORTED:
        return f"T{i} aborts", after
    if m.protocol.undone:
        after = after._replace(newest=i)
    if i in m.protocol.hand_over:
        for job, spec in enumerate(m.specs):
            if spec.placer == i:
                after = add(m, after, Row(job, 0), handed_over=True)
        return f"T{i} commits and hands its jobs over in memory", after
    return f"T{i} commits", after

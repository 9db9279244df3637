"""The reads model's executor memory: groups of fetched rows, and what deliveries do to them. Compare
`executor/scheduler.py`."""

from typing import TYPE_CHECKING

from reads_state import BACKOFF, UNDER_WAY, Group, Refill, Row, State, swap

if TYPE_CHECKING:
    from reads import Reads

__all__ = ["add", "apply_refill", "compact", "forget_waiting", "wants_refill"]


def add(m: "Reads", s: State, row: Row, *, handed_over: bool = False) -> State:
    """Take in a row that was delivered: by position, at most `keep` of a group; the tail is left to a refill."""
    index = m.specs[row.job].group
    group, position = s.groups[index], m.position(s, row.job)
    if m.protocol.beyond_last == "dropped":
        return _append(m, s, index, row)
    if group.more and position > group.last:
        return s
    if _known(m, s, row.job):
        strict = m.protocol.strict and s.version == 0 and s.server == 0 and not handed_over
        return s._replace(broken=f"R1: a read delivers {m.job_name(row.job)} a second time") if strict else s
    queue = tuple(sorted((*group.queue, row), key=lambda r: m.position(s, r.job)))
    if len(queue) > m.scenario.keep:
        queue = queue[: m.scenario.keep]
        group = group._replace(more=True, last=m.position(s, queue[-1].job))
    return _with(s, index, group._replace(queue=queue))


def _append(m: "Reads", s: State, index: int, row: Row) -> State:
    """The wrong way: only positions beyond the last one fetched count."""
    group, position = s.groups[index], m.position(s, row.job)
    if position <= group.last:
        return s
    if group.more or len(group.queue) >= m.scenario.keep:
        return _with(s, index, group._replace(more=True))
    return _with(s, index, group._replace(queue=(*group.queue, row), last=position))


def _known(m: "Reads", s: State, job: int) -> bool:
    """Whether memory has this id: waiting, under way, or not yet acknowledged, or ended during this read."""
    same = [k for k in range(len(s.jobs)) if k == job or m.same_id(s, k, job)]
    remembered = s.version == 0 or m.protocol.restart != "forget what is under way"
    unacknowledged = (*s.cycle.ends, *s.cycle.fails) if s.cycle is not None else ()
    for k in same:
        queued = any(row.job == k for row in s.groups[m.specs[k].group].queue)
        if queued or (remembered and s.jobs[k].status in UNDER_WAY) or k in unacknowledged or k in s.ended:
            return True
    return False


def wants_refill(m: "Reads", group: Group) -> bool:
    """A group asks for more when it runs low, unless it backs off."""
    return group.more and not group.held and len(group.queue) <= m.scenario.keep // 2


def apply_refill(m: "Reads", s: State, refill: Refill, left_out: bool) -> State:
    """Apply a refill, unless the group has changed meanwhile. It stays flagged if the refill was full, or if the same
    read has left out rows of the group behind the refill's bound."""
    group = s.groups[refill.group]
    guard = m.protocol.refill_guard
    if guard == "same last" and group.last != refill.last:
        return s
    if guard != "none" and group.version != refill.version:
        return s
    s = _with(s, refill.group, group._replace(more=False))
    for row in refill.rows:
        s = add(m, s, row)
    group = s.groups[refill.group]
    full = len(refill.rows) == m.scenario.keep
    if not group.more and (full or (left_out and m.protocol.left_out == "keeps more")):
        last = m.position(s, refill.rows[-1].job) if full else refill.upto
        s = _with(s, refill.group, group._replace(more=True, last=last))
    return s


def compact(m: "Reads", s: State, job: int) -> State:
    """The head of a group has failed: drop the fetched rows. The group backs off, and is read again from its head."""
    index = m.specs[job].group
    group, rule = s.groups[index], m.protocol.compacted
    first = min([m.position(s, row.job) for row in group.queue] + [m.position(s, job)])
    last = first if rule == "to the head" else first - 1
    compacted = Group((), rule != "not more", last, s.jobs[job].status == BACKOFF, group.version + 1)
    return _with(s, index, compacted)


def forget_waiting(s: State) -> State:
    """Drop all waiting rows and read from position 0 again; what is under way stays known."""
    high = tuple(None if h is None else 0 for h in s.marks.high)
    groups = tuple(Group(version=group.version + 1) for group in s.groups)
    return s._replace(groups=groups, marks=s.marks._replace(high=high), version=s.version + 1)


def _with(s: State, index: int, group: Group) -> State:
    return s._replace(groups=swap(s.groups, index, group))

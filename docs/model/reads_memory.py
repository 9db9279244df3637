"""The reads model's executor memory: groups of fetched rows, and what deliveries do to them. Compare
`executor/scheduler.py`."""

from typing import TYPE_CHECKING

from reads_state import BACKOFF, ENDED, UNDER_WAY, Group, Job, Refill, Row, State, Thinned, swap

if TYPE_CHECKING:
    from reads import Reads

__all__ = [
    "add",
    "apply_refill",
    "compact",
    "crowded",
    "forget_waiting",
    "supersede",
    "thinned",
    "unheard",
    "wants_refill",
]


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
    return s._replace(groups=groups, marks=s.marks._replace(high=high), version=s.version + 1, complete=None)


def crowded(m: "Reads", s: State, index: int) -> bool:
    """Whether the head of a group may have been superseded: ask the database before it starts."""
    group = s.groups[index]
    many = group.more or len(group.queue) > 1
    return m.scenario.latest and bool(group.queue) and many and group.queue[0].job != group.newest


def supersede(m: "Reads", s: State, groups: list[int]) -> State:
    """`supersede.sql`: end all waiting jobs of these groups but the newest of each, by id."""
    answers, jobs, broken = [], list(s.jobs), s.broken
    for index in groups:
        rows = [(at, row.job) for at, row in m.visible(s) if m.specs[row.job].group == index]
        if not rows:
            continue
        by_position = m.protocol.supersede == "by position"
        newest = max(rows)[1] if by_position else max((s.born.index(job), job) for _, job in rows)[1]
        for _, job in rows:
            if job == newest:
                continue
            if jobs[job].status in UNDER_WAY:
                broken = broken or f"I2: {m.job_name(job)} is superseded while it is {jobs[job].status}"
            if s.born.index(job) > s.born.index(newest):
                broken = broken or f"I2: {m.job_name(job)} is superseded by one that was enqueued before it"
            jobs[job] = Job(ENDED, jobs[job].attempt)
        answers.append(Thinned(index, newest, len(rows) - 1, s.groups[index].version))
    return s._replace(jobs=tuple(jobs), thinned=tuple(answers), broken=broken)


def thinned(m: "Reads", s: State) -> State:
    """The answer: the groups of which something was ended are read again, unless they were forgotten."""
    for index, newest, ended, version in s.thinned:
        group = s.groups[index]
        if group.version != version:
            continue
        if not ended and group.queue:
            newest = group.queue[0].job
        s = _with(s, index, group._replace(newest=newest))
        if ended and m.protocol.supersede != "without compaction":
            s = _from_head(m, s, index)
    return s._replace(thinned=())


def unheard(m: "Reads", s: State) -> State:
    """The answer is lost: what is in memory may have been ended, and asked again the database has nothing to end."""
    if m.protocol.supersede != "lost answers are ignored":
        for index, _, _, version in s.thinned:
            if s.groups[index].version == version:
                s = _from_head(m, s, index)
    return s._replace(thinned=())


def _from_head(m: "Reads", s: State, index: int) -> State:
    """Drop the fetched rows of a group, which is read again from its head."""
    group = s.groups[index]
    if not group.queue:
        return s
    last = m.position(s, group.queue[0].job) - 1
    return _with(s, index, Group((), True, last, group.held, group.version + 1, group.newest))


def _with(s: State, index: int, group: Group) -> State:
    return s._replace(groups=swap(s.groups, index, group))

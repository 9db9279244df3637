"""The lease model's server: what the statements of the protocol do when they run.

Each function is one statement of the real system. It runs whenever the server gets to it: its client may have paused,
died, or lost its connection and sent something else since. A function yields nothing while its statement has to wait
for a lock.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lease_admin import view_of
from lease_early import lost
from lease_state import (
    COMMITTED,
    ENDING,
    NO,
    OK,
    REFUSED,
    RUNNING,
    SKIPPED,
    UNKNOWN,
    VOID,
    WAITING,
    Cycle,
    Disown,
    Executor,
    Origin,
    Row,
    State,
    Statement,
    bumped,
    forget,
    swap,
)

if TYPE_CHECKING:
    from lease import Lease

__all__ = ["drop", "is_taken_over", "run"]

Steps = Iterator[tuple[str, State]]


def run(m: "Lease", s: State, st: Statement) -> Steps:
    """Let the server work on one statement."""
    index = s.server.index(st)
    rest = s._replace(server=s.server[:index] + s.server[index + 1 :])
    yield from _KINDS[st.kind](m, rest, st)


def _acquire(m: "Lease", s: State, st: Statement) -> Steps:
    """`acquire()`: a free origin, or one that is its own already, gets a new epoch. One whose lease has expired is
    locked and taken over."""
    origin = s.origins[st.origin]
    who, what = f"server: acquire by {m.names(st.by)}", m.origin_name(st.origin)
    if st.begun:
        yield from _take_over(m, s, st)
    elif _locked(s, st.origin):
        yield f"{who} skips {what}, which is locked", _answer(s, st, NO)
    elif origin.owner in (None, s.executors[st.by].row):
        yield f"{who} of {what}, which is {'free' if origin.owner is None else 'its own'}", _grant(m, s, st)
    elif origin.lease > 0:
        yield f"{who} finds {what} held", _answer(s, st, NO)
    else:
        begun = st._replace(
            begun=True, seen=s.rows[origin.owner].running if m.protocol.takeover == "one snapshot" else ()
        )
        yield f"{who} locks the expired {what}", s._replace(server=(*s.server, begun))


def _take_over(m: "Lease", s: State, st: Statement) -> Steps:
    """The rest of a takeover: lock the former owner's row, record what it ran as lost, bump its fence."""
    former = s.origins[st.origin].owner
    assert former is not None
    if _row_locked(s, former):
        return
    row = s.rows[former]
    running = st.seen if m.protocol.takeover == "one snapshot" else row.running
    named = [job for job in running if m.scenario.origin_of[job] == st.origin]
    cut = [job for job in named if not s.jobs[job].late]  # one that is not committed yet is not seen, and stays
    jobs, broken = s.jobs, s.broken
    for job in cut:
        if job in row.left:
            broken = f"NM: {m.names(former)} is charged for {m.job_name(job)}, named before it acquired the origin"
        if not jobs[job].present:
            broken = f"I2: the run of {m.job_name(job)} that ended it is recorded as lost as well"
        jobs = swap(jobs, job, jobs[job]._replace(attempt=jobs[job].attempt + 1, cut=False))
    unseen = tuple(sorted({*row.left, *named} - {*cut}))
    rest = Row(row.cycle, row.fence + 1, tuple(job for job in row.running if job not in cut), unseen)
    taken = bumped(m.scenario, s._replace(jobs=jobs, rows=swap(s.rows, former, rest), broken=broken), former, False)
    lost = f", lost: {', '.join(map(m.job_name, cut))}" if cut else ""
    what = f"{m.origin_name(st.origin)} from {m.names(former)}"
    yield f"server: {m.names(st.by)} takes over {what}{lost}", _grant(m, taken, st)


def _grant(m: "Lease", s: State, st: Statement) -> State:
    me = s.executors[st.by].row
    old = s.origins[st.origin]
    new = Origin(me, old.epoch + 1, m.scenario.lease, old.since if old.owner == me else old.epoch + 1)
    s = s._replace(origins=swap(s.origins, st.origin, new))
    if old.owner == me and m.protocol.own_origin == "fenced first":
        s = s._replace(rows=swap(s.rows, me, s.rows[me]._replace(fence=s.rows[me].fence + 1)))
    return _answer(s, st, OK, new.epoch, s.rows[me].fence)


def _renew(m: "Lease", s: State, st: Statement) -> Steps:
    """`renew.sql`: prolongs the lease if (owner, epoch) still matches; skips a row that a takeover has locked."""
    origin, me = s.origins[st.origin], s.executors[st.by].row
    who = f"server: renewal by {m.names(st.by)} of {m.origin_name(st.origin)}"
    if _locked(s, st.origin):
        yield f"{who} skips the locked row", _answer(s, st, SKIPPED, st.epoch)
    elif (origin.owner, origin.epoch) == (me, st.epoch):
        s = s._replace(origins=swap(s.origins, st.origin, origin._replace(lease=m.scenario.lease)))
        yield who, _answer(s, st, OK, st.epoch)
    else:
        yield f"{who} matches nothing", _answer(s, st, NO, st.epoch)


def _release(m: "Lease", s: State, st: Statement) -> Steps:
    """`release.sql`: gives the origin up, with a new epoch."""
    origin, me = s.origins[st.origin], s.executors[st.by].row
    if _locked(s, st.origin):
        return
    who = f"server: release by {m.names(st.by)} of {m.origin_name(st.origin)}"
    if (origin.owner, origin.epoch) == (me, st.epoch):
        free = Origin(None, origin.epoch + 1, 0, origin.epoch + 1)
        yield who, s._replace(origins=swap(s.origins, st.origin, free))
    else:
        yield f"{who} matches nothing", s


def _cycle(m: "Lease", s: State, st: Statement) -> Steps:
    """`cycle.sql`: the compare-and-set on the executor's own row, and all that depends on it."""
    cycle, me = st.cycle, s.executors[st.by].row
    assert cycle is not None
    if _row_locked(s, me):
        return
    row = s.rows[me]
    who = f"server: the cycle of {m.names(st.by)} that {m.cycle_name(cycle)}"
    ends, running, void = cycle.ends, cycle.running, False
    if m.protocol.fence == "compare-and-set":
        void = row.fence != cycle.fence or (m.protocol.cycle_number and row.cycle != cycle.number - 1)
    elif m.protocol.fence == "unfenced running set":
        ends = _under_its_epoch(m, s, cycle, me)
    elif not st.begun:
        begun = st._replace(begun=True, seen=_under_its_epoch(m, s, cycle, me))
        yield f"{who} takes its snapshot", s._replace(server=(*s.server, begun))
        return
    else:
        ends = st.seen
    if void:
        yield f"{who} is void", _tell(s, st, VOID)
        return
    if ends and s.budget.refusals:
        refused = s._replace(budget=s.budget._replace(refusals=s.budget.refusals - 1))
        yield f"{who} is refused", _tell(refused, st, REFUSED)
    found = all(s.jobs[job].present for job in (*ends, *cycle.again))
    for job in ends:
        s = _end(m, s, job, me, cycle.epochs[m.scenario.origin_of[job]])
    for job in cycle.again:
        blocked = s.jobs[job].present and (s.jobs[job].blocked or job in cycle.blocks)
        cut = s.jobs[job].cut and job not in cycle.blocks
        jobs = swap(s.jobs, job, s.jobs[job]._replace(attempt=s.jobs[job].attempt + 1, blocked=blocked, cut=cut))
        s = s._replace(jobs=jobs, spared=tuple(k for k in s.spared if k != job))
    s = s._replace(rows=swap(s.rows, me, Row(cycle.number, row.fence, running)))
    yield f"{who} commits", _tell(s, st, COMMITTED, "found" if found else "missing")


def _under_its_epoch(m: "Lease", s: State, cycle: Cycle, me: int) -> tuple[int, ...]:
    """The jobs of a cycle that a join with `origin` on (owner, epoch) finds now."""
    held = [(o.owner, o.epoch) == (me, epoch) for o, epoch in zip(s.origins, cycle.epochs, strict=True)]
    return tuple(job for job in cycle.ends if held[m.scenario.origin_of[job]])


def _finish(m: "Lease", s: State, st: Statement) -> Steps:
    """`SELECT finish(…); COMMIT`, one simple query: a transactional handler's last."""
    origin, me = s.origins[st.origin], s.executors[st.by].row
    who = f"server: finish + COMMIT of {m.job_name(st.job)} by {m.names(st.by)}"
    rule = m.protocol.finish
    if is_taken_over(s, st.origin) and rule == "locks its origin":  # a person's lock leaves the key alone
        return
    matches = (origin.owner, origin.epoch) == (me, st.epoch)
    if rule == "reads the epoch" and not st.begun:
        begun = st._replace(begun=True, seen=(int(matches),))
        yield f"{who} reads the epoch", s._replace(server=(*s.server, begun))
        return
    if rule == "reads the epoch":
        matches = st.seen == (1,)
    if not matches and rule != "is not fenced":
        yield f"{who} is fenced", _fence_error(m, s, st)
        return
    job = s.jobs[st.job]
    by_id = rule == "reads the epoch"  # the wrong protocol matches the job by its id alone, not by (id, attempt)
    if (job.present and (by_id or job.attempt == st.attempt)) or rule == "is not fenced":
        s = _end(m, s, st.job, me, st.epoch)
        job = s.jobs[st.job]
        s = s._replace(jobs=swap(s.jobs, st.job, job._replace(effects=job.effects + 1)))
        yield f"{who} commits", _ended(s, st)
    else:
        yield f"{who} finds it ended, rolls back", _ended(s, st)


def _end(m: "Lease", s: State, number: int, me: int, epoch: int | None) -> State:
    """Delete a job's row and write its terminal history, unless it is gone."""
    job, origin = s.jobs[number], s.origins[m.scenario.origin_of[number]]
    if not job.present:
        return s
    if origin.owner != me or epoch is None or epoch < origin.since:
        s = s._replace(broken=f"FE: a statement of a superseded owner ends {m.job_name(number)}")
    return s._replace(jobs=swap(s.jobs, number, job._replace(present=False, ended=job.ended + 1, cut=False)))


def _look(m: "Lease", s: State, st: Statement) -> Steps:
    """`standing.sql`, where looks take time: what it finds is on its way back."""
    e = s.executors[st.by]
    look = e.view
    if st.heard and look is not None:
        seen = e._replace(view=look._replace(view=view_of(m, s, st.by)))
        yield (
            f"server: {m.names(st.by)}'s look takes its snapshot",
            s._replace(executors=swap(s.executors, st.by, seen)),
        )
    else:
        yield "server: nobody waits for the look", s


def _disown(m: "Lease", s: State, st: Statement) -> Steps:
    """`disown.sql`: the executor bumps its own fence, so that nothing that it has sent before can commit any more."""
    e = s.executors[st.by]
    row = s.rows[e.row]
    if _row_locked(s, e.row):
        return
    after = bumped(m.scenario, s._replace(rows=swap(s.rows, e.row, row._replace(fence=row.fence + 1))), e.row, False)
    e = after.executors[st.by]
    if st.heard and e.disown is not None:
        answer = Disown(OK, row.fence + 1, row.fence == e.fence, len(e.bumps))
        after = after._replace(executors=swap(after.executors, st.by, e._replace(disown=answer)))
    yield f"server: {m.names(st.by)} bumps its own fence", after


# -- what the client gets to know --------------------------------------------------------------------------------


def _answer(s: State, st: Statement, answer: str, epoch: int = 0, fence: int = 0) -> State:
    """The answer to an acquire or renew stands in the client's socket."""
    executor = s.executors[st.by]
    ask = executor.asks[st.origin]
    if not st.heard or ask is None:
        return s
    asks = swap(executor.asks, st.origin, ask._replace(answer=answer, epoch=epoch, fence=fence))
    return s._replace(executors=swap(s.executors, st.by, executor._replace(asks=asks)))


def _tell(s: State, st: Statement, answer: str, told: str = "") -> State:
    """The answer to a cycle stands in the client's socket."""
    executor = s.executors[st.by]
    cycle = st.cycle
    if not st.heard or cycle is None:
        return s
    flights = tuple(
        f._replace(answer=answer, told=told if f.blocks else "")
        if f.number == cycle.number and f.answer == WAITING
        else f
        for f in executor.flights
    )
    return s._replace(executors=swap(s.executors, st.by, executor._replace(flights=flights)))


def _ended(s: State, st: Statement) -> State:
    """The handler hears that its transaction is over."""
    executor = s.executors[st.by]
    hold = executor.holds[st.origin]
    if not st.heard or hold is None or hold.epoch != st.epoch or executor.memory[st.job] != ENDING:
        return s
    memory = swap(executor.memory, st.job, UNKNOWN)
    heads = tuple(job for job in executor.heads if job != st.job)
    return s._replace(executors=swap(s.executors, st.by, executor._replace(memory=memory, heads=heads)))


def _fence_error(m: "Lease", s: State, st: Statement) -> State:
    """A fence error drops the whole origin."""
    executor = s.executors[st.by]
    hold = executor.holds[st.origin]
    if not st.heard or hold is None or hold.epoch != st.epoch:
        return s
    return s._replace(executors=swap(s.executors, st.by, drop(m, executor, st.origin)))


def drop(m: "Lease", executor: Executor, origin: int) -> Executor:
    """Give up an origin in memory: forget its jobs. Handlers that run have yet to stop."""
    executor = lost(m, forget(executor, m.jobs_of(origin)), origin)
    running = {job for job in m.jobs_of(origin) if executor.memory[job] == RUNNING}
    memory = tuple(UNKNOWN if job in m.jobs_of(origin) else known for job, known in enumerate(executor.memory))
    strays = tuple(sorted(running | set(executor.strays)))
    heads = tuple(job for job in executor.heads if job not in m.jobs_of(origin))
    return executor._replace(holds=swap(executor.holds, origin, None), memory=memory, strays=strays, heads=heads)


def _locked(s: State, origin: int) -> bool:
    """Whether a takeover or a person is at work on this origin."""
    return (s.action is not None and s.action.row is None and origin == 0) or is_taken_over(s, origin)


def _row_locked(s: State, row: int) -> bool:
    """Whether a person has locked an executor's row first; a wrong protocol only."""
    return s.action is not None and s.action.row == row


def is_taken_over(s: State, origin: int) -> bool:
    return any(st.kind == "acquire" and st.begun and st.origin == origin for st in s.server)


_KINDS = {
    "acquire": _acquire,
    "renew": _renew,
    "release": _release,
    "cycle": _cycle,
    "finish": _finish,
    "look": _look,
    "disown": _disown,
}

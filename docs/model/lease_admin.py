"""The lease model's administration: what a person does to jobs while executors run. Compare `0048_administration.sql`.

An action locks the origin, then the row of its owner (waits for the cycle in flight; its fence
grows), then changes jobs and commits: two steps here, since nothing of the owner can come between the last ones. The
person learns which jobs are named; one that is not, and was cancelled or paused, must not start after the commit (I8).
The pause of a type locks all executors at once, and no origin.

Here all actions are on origin X. What an executor makes of them is `learns`, at a look, and `delivered`, at a read.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lease_state import (
    BLOCKED,
    DONE,
    MISLAID,
    NAMED,
    QUEUED,
    RUNNING,
    UNKNOWN,
    Action,
    Executor,
    Look,
    Sight,
    State,
    View,
    bumped,
    forget,
    put_back,
    swap,
)

if TYPE_CHECKING:
    from lease import Lease

__all__ = ["administer", "delivered", "learns", "sight_of", "view_of", "withheld"]

Steps = Iterator[tuple[str, State]]

_X = 0


# -- what a person does ------------------------------------------------------------------------------------------


def administer(m: "Lease", s: State) -> Steps:
    """One action at a time: its first step, or its second."""
    if s.action is not None:
        yield from _second_step(m, s, s.action)
        return
    for action, spent in _possible(m, s):
        yield from _first_step(m, spent, action)


def _possible(m: "Lease", s: State) -> Iterator[tuple[Action, State]]:
    b = s.budget
    for job in m.scenario.targets:
        if b.cancels and s.jobs[job].present:
            yield Action("cancels", job, None, None), s._replace(budget=b._replace(cancels=b.cancels - 1))
        if b.releases and s.jobs[job].blocked:
            yield Action("releases", job, None, None), s._replace(budget=b._replace(releases=b.releases - 1))
    if b.halts and not s.paused:
        yield Action("pauses", 0, None, None), s._replace(budget=b._replace(halts=b.halts - 1))
    if b.resumes and s.paused:
        yield Action("resumes", 0, None, None), s._replace(budget=b._replace(resumes=b.resumes - 1))


def _name(m: "Lease", action: Action) -> str:
    what = m.job_name(action.job) if action.kind in ("cancels", "releases") else "some jobs"
    return f"a person {action.kind} {what}"


def _first_step(m: "Lease", s: State, action: Action) -> Steps:
    who, rule, owner = _name(m, action), m.protocol.action, s.origins[_X].owner
    if m.scenario.by_type and action.kind in ("pauses", "resumes"):
        rows = tuple(row._replace(fence=row.fence + (rule != "no fence")) for row in s.rows)
        changed = _changed(m, s, action, tuple(job for row in s.rows for job in row.running), rows)
        for row in range(len(rows)):
            changed = bumped(m.scenario, changed, row, False)
        yield f"{who} of a type", changed
    elif rule == "executor, then origin":
        if owner is not None:
            yield f"{who}: locks {m.names(owner)}'s row", s._replace(action=action._replace(row=owner))
    elif any(st.kind == "acquire" and st.begun and st.origin == _X for st in s.server):
        return  # waits for the takeover
    elif rule == "fence first":
        rows = s.rows if owner is None else swap(s.rows, owner, s.rows[owner]._replace(fence=s.rows[owner].fence + 1))
        early = s._replace(action=action, rows=rows)
        yield f"{who}: bumps the fence, commits", early if owner is None else bumped(m.scenario, early, owner, False)
    else:
        seen = () if owner is None else s.rows[owner].running
        early = action._replace(running=seen if rule == "one snapshot" else None)
        yield f"{who}: locks {m.origin_name(_X)}", s._replace(action=early)


def _second_step(m: "Lease", s: State, action: Action) -> Steps:
    who, rule, origin = _name(m, action), m.protocol.action, s.origins[_X]
    if action.row is not None and any(st.kind == "acquire" and st.begun and st.origin == _X for st in s.server):
        return  # waits for the takeover, which waits for the row
    s = s._replace(action=None)
    if action.kind in ("cancels", "releases") and not s.jobs[action.job].present:
        yield f"{who}: it has ended, nothing is changed", s
        return
    rows, running = s.rows, ()
    if origin.owner is not None:
        row = s.rows[origin.owner]
        running = row.running if action.running is None else action.running
        if rule not in ("no fence", "fence first"):
            rows = swap(s.rows, origin.owner, row._replace(fence=row.fence + 1))
            s = bumped(m.scenario, s, origin.owner, action.kind in ("cancels", "releases"))
    yield f"{who}: locks the holder's row, commits", _changed(m, s, action, running, rows)


def _changed(m: "Lease", s: State, action: Action, running: tuple[int, ...], rows: tuple) -> State:
    """The action has committed, and has told which jobs are running."""
    s, job = s._replace(rows=rows), s.jobs[action.job]
    if action.kind == "cancels":
        told = "running" if action.job in running else "waiting"
        gone = job._replace(present=False, ended=job.ended + 1, cut=False, cancelled=told, blocked=False)
        return s._replace(jobs=swap(s.jobs, action.job, gone))
    if action.kind == "releases":
        return s._replace(jobs=swap(s.jobs, action.job, job._replace(blocked=False)))
    return s._replace(paused=action.kind == "pauses", spared=running if action.kind == "pauses" else ())


# -- what an executor learns of it --------------------------------------------------------------------------------


def withheld(m: "Lease", e: Executor, job: int) -> bool:
    """Whether the executor knows that this job is not to start."""
    return e.paused and job in m.scenario.paused


def view_of(m: "Lease", s: State, i: int) -> View:
    """`standing.sql`, in one snapshot."""
    e = s.executors[i]
    row = s.rows[e.row]
    epochs = tuple(o.epoch if o.owner == e.row else None for o in s.origins)
    gone = tuple(job for job in row.running if not s.jobs[job].present and not s.jobs[job].late)
    unseen = tuple(job for job in row.running if s.jobs[job].late)
    return View(row.cycle, row.fence, epochs, gone, s.paused, unseen, e.bumps)


def learns(m: "Lease", e: Executor, look: Look) -> Executor:
    """Jobs that are gone are stopped. At another fence what has not started is put back. Where of each bump it is known
    that it concerned X alone, this is read anew; else nothing that waits in memory can be relied on, and all is. (In
    the scenarios without a person, it is left where it is.)"""
    view, rule = look.view, m.protocol.put_back
    assert view is not None
    e = e._replace(bumps=e.bumps[len(view.bumps) :])
    everything = m.protocol.forgets == "everything" or (
        not all(view.bumps) and m.protocol.forgets == "what was concerned"
    )
    e = e._replace(memory=tuple(DONE if k == RUNNING and job in view.gone else k for job, k in enumerate(e.memory)))
    if view.unseen:
        taken_for_gone = [k == RUNNING and job in view.unseen for job, k in enumerate(e.memory)]
        e = e._replace(memory=tuple(MISLAID if t else k for t, k in zip(taken_for_gone, e.memory, strict=True)))
    news = False
    if m.protocol.pause != "from every read":
        news = view.paused != e.paused
        e = e._replace(paused=view.paused)
    if not m.scenario.administered or rule == "nothing" or (view.fence == e.fence and not news):
        return e
    chosen = rule == "everything" or (rule == "if the pause is news" and news)
    spared = {job for flight in e.flights[1:] for job in flight.names} if m.protocol.put_back_of == "the older" else ()
    for origin, hold in enumerate(e.holds):
        newer = look.before[origin] is None
        if hold is not None and not (newer and m.protocol.stale_look == "spares what is newer"):
            named = [k for k in m.jobs_of(origin) if e.memory[k] == NAMED and k not in spared] if chosen else []
            counts = m.protocol.void_counts == "the one before"
            if everything or origin == _X:
                sight = (
                    e.sight
                )  # a read that is under way: of what is read anew as a whole it counts no more in any case
                e = forget(e, m.jobs_of(origin), QUEUED, BLOCKED)
                for job in named:
                    e = put_back(forget(e, (job,)), job, m.jobs_of(origin), UNKNOWN, counts)
                e = e if everything else e._replace(sight=sight)
            else:
                for job in named:
                    e = put_back(e, job, m.jobs_of(origin), QUEUED, counts)
    return e


def sight_of(m: "Lease", s: State, i: int) -> Sight:
    """`read.sql`: rows, fence and pause in one snapshot."""
    e = s.executors[i]
    held = [origin for origin, hold in enumerate(e.holds) if hold is not None and not hold.draining]
    jobs = tuple(job for origin in held for job in m.jobs_of(origin) if s.jobs[job].present)
    blocked = tuple(job for job in jobs if s.jobs[job].blocked)
    return Sight(jobs, blocked, s.rows[e.row].fence, s.paused)


def delivered(m: "Lease", e: Executor, sight: Sight) -> Executor:
    """Apply a read, unless it is older than what a look has found: then read again; or it tells of another pause than
    is known here: then forget what waits, and read again."""
    says, always = (sight.fence, sight.paused), m.protocol.pause == "from every read"
    e = e._replace(sight=None)
    if sight.fence < e.fence and m.protocol.stale_reads == "count no more":
        return e._replace(look=True)
    if always or says != e.told:
        e = e._replace(look=e.look or sight.fence > e.fence)
        if not always:
            e = e._replace(told=says)
        if sight.paused != e.paused:
            return forget(e._replace(paused=sight.paused), tuple(range(len(e.memory))), QUEUED, BLOCKED)
    memory = list(e.memory)
    for job in sight.jobs:
        if memory[job] == UNKNOWN:
            memory[job] = BLOCKED if job in sight.blocked else QUEUED
    return e._replace(memory=tuple(memory))

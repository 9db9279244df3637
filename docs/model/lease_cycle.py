"""The lease model's cycles, as an executor sees them. Compare `cycles.py`.

What goes into a cycle, what follows from its answer, and what to do when there is none.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lease_admin import learns, view_of, withheld
from lease_server import drop
from lease_state import (
    AGAIN,
    BLOCKED,
    COMMITTED,
    DONE,
    ENDING,
    HALF_SEEN,
    NAMED,
    QUEUED,
    RUNNING,
    UNANSWERED,
    UNASSIGNED,
    UNKNOWN,
    VOID,
    WAITING,
    Cycle,
    Executor,
    Look,
    State,
    Statement,
    forget,
    swap,
    with_executor,
)

if TYPE_CHECKING:
    from lease import Lease

__all__ = ["hears_of_its_cycle", "looks_up", "sends_cycle"]

Steps = Iterator[tuple[str, State]]


def _start(m: "Lease", s: State, i: int, executor: Executor, job: int) -> tuple[Executor, str]:
    """Start a handler; says which property that violates."""
    broken, name = s.broken, m.job_name(job)
    origin = m.scenario.origin_of[job]
    others = [k for k, other in enumerate(s.executors) if k != i and m.works_on(other, origin)]
    earlier = [k for k in m.jobs_of(origin) if k < job and s.jobs[k].present]
    if s.jobs[job].cancelled == "waiting":
        broken = f"I8: {m.names(i)} starts {name}, which was cancelled before it was named"
    elif s.paused and s.jobs[job].present and job in m.scenario.paused and job not in s.spared:
        broken = f"I8: {m.names(i)} starts {name}, which was paused before it was named"
    elif not s.jobs[job].present and not s.jobs[job].cancelled:
        broken = f"I2: {m.names(i)} starts {name}, which has ended"
    elif s.jobs[job].cut:
        broken = f"LO: {m.names(i)} starts {name}; its last run was cut off and is not recorded as lost"
    elif earlier:
        broken = f"I4: {m.names(i)} starts {name} before {m.job_name(earlier[0])} has ended"
    elif others:
        broken = f"I3: {m.names(i)} starts {name} while {m.names(others[0])} runs a job of {m.origin_name(origin)}"
    return executor._replace(memory=swap(executor.memory, job, RUNNING)), broken


def _compose(m: "Lease", s: State, i: int, number: int, fence: int) -> Cycle | None:
    """Everything that is to be said now: what has finished, and what is to run next. None: there is nothing to say."""
    e = s.executors[i]
    ends, again, names, stays, news = [], [], [], [], False
    for origin, hold in enumerate(e.holds):
        if hold is None:
            continue
        jobs = m.jobs_of(origin)
        ends += [job for job in jobs if e.memory[job] == DONE]
        again += [job for job in jobs if e.memory[job] == AGAIN]
        stays += [job for job in jobs if e.memory[job] in (RUNNING, ENDING)]
        busy = any(e.memory[job] in (RUNNING, ENDING, NAMED, AGAIN, BLOCKED) for job in jobs)
        queued = [job for job in jobs if e.memory[job] == QUEUED]
        if queued and not busy and not hold.draining and not withheld(m, e, queued[0]):
            names.append(queued[0])
        # To let go of an origin, a cycle must leave out the jobs of it that were named and do not run.
        left_over = any(job in s.rows[e.row].running and job not in stays for job in jobs)
        news |= hold.draining == UNASSIGNED and left_over
    if not (ends or again or names or news):
        return None
    epochs = tuple(hold and hold.epoch for hold in e.holds)
    running = tuple(sorted(stays + names))
    return Cycle(number, fence, tuple(ends), tuple(again), tuple(names), running, epochs, WAITING)


def _named(e: Executor, cycle: Cycle) -> Executor:
    """The executor with this cycle on its way."""
    memory = tuple(NAMED if job in cycle.names else known for job, known in enumerate(e.memory))
    return e._replace(flight=cycle, memory=memory)


def sends_cycle(m: "Lease", s: State, i: int) -> Steps:
    """One cycle at a time is on its way. Its number is the next one."""
    e = s.executors[i]
    cycle = _compose(m, s, i, e.cycle + 1, e.fence) if e.flight is None and e.view is None else None
    if cycle is None:
        return
    sender, broken = _named(e, cycle), s.broken
    if m.protocol.successor == "at once":
        for job in cycle.names:
            sender, broken = _start(m, s, i, sender, job)
    yield (
        f"{m.names(i)} sends a cycle that {m.cycle_name(cycle)}",
        with_executor(s, i, sender, Statement(i, "cycle", cycle=cycle))._replace(broken=broken),
    )


def hears_of_its_cycle(m: "Lease", s: State, i: int) -> Steps:
    """The answer to the cycle; or its connection was lost, and the executor finds out."""
    e = s.executors[i]
    if e.flight is None or e.flight.answer == WAITING:
        return
    if e.view is not None:
        if e.view.view is not None:
            yield from _resolves(m, with_executor(s, i, e._replace(view=None)), i, e.view)
        return
    if e.flight.answer == COMMITTED:
        yield _acknowledged(m, s, i)
        return
    if e.flight.answer == UNANSWERED:
        yield _repeated(m, s, i, m.protocol.retry == "the same")
    if e.flight.answer == VOID and m.protocol.void == "do not look":
        yield _repeated(m, s, i, same=True)
    elif m.scenario.slow and e.flight.answer == VOID:
        yield _asks(m, s, i)
    elif m.protocol.cycle_number and not m.scenario.slow:
        yield from _looks(m, s, i)
    elif e.flight.answer == VOID:
        lost = e._replace(flight=None)
        for origin in range(len(e.holds)):
            lost = drop(m, lost, origin)
        yield f"{m.names(i)} hears that it is fenced, gives everything up", with_executor(s, i, lost)


def _acknowledged(m: "Lease", s: State, i: int) -> tuple[str, State]:
    """The cycle has committed: what it ended is over, and what it named starts if the deadline still stands."""
    e, broken = s.executors[i], s.broken
    flight = e.flight
    assert flight is not None
    e = e._replace(cycle=flight.number, flight=None)
    for job in flight.ends:
        if e.memory[job] == DONE:
            e = forget(e, (job,), DONE)
    for job in flight.again:
        if e.memory[job] == AGAIN:  # a group whose head runs again is read again from its head
            e = forget(e, m.jobs_of(m.scenario.origin_of[job]), AGAIN, QUEUED)
    for job in flight.names:
        hold = e.holds[m.scenario.origin_of[job]]
        if e.memory[job] != NAMED or hold is None:
            continue
        if (hold.left > 0 or not m.protocol.look_before_start) and not hold.draining:
            e, broken = _start(m, s, i, e, job)
        else:
            e = e._replace(memory=swap(e.memory, job, UNKNOWN if hold.draining else QUEUED))
    return f"{m.names(i)} hears that its cycle has committed", with_executor(s, i, e)._replace(broken=broken)


def _repeated(m: "Lease", s: State, i: int, same: bool) -> tuple[str, State]:
    """Send the cycle again: the same statement, word for word. The number makes sure that only one of them counts."""
    e = s.executors[i]
    flight = e.flight
    assert flight is not None
    cycle = flight._replace(answer=WAITING)
    e = e._replace(flight=cycle)
    if not same:
        unnamed = e._replace(memory=tuple(QUEUED if known == NAMED else known for known in e.memory))
        cycle = _compose(m, with_executor(s, i, unnamed), i, flight.number, flight.fence) or cycle
        e = _named(unnamed, cycle)
    statement = Statement(i, "cycle", cycle=cycle)
    return f"{m.names(i)} sends a cycle again that {m.cycle_name(cycle)}", with_executor(s, i, e, statement)


def _looks(m: "Lease", s: State, i: int) -> Steps:
    """`standing.sql`, a new statement: the cycle number, the fence, and the origins that are its own, in one snapshot.

    If the number is the cycle's, it had committed. If the fence has changed, what is no longer its own is given up,
    what a person has changed is put back, and the rest of the cycle is sent again with the new fence.
    """
    e, flight = s.executors[i], s.executors[i].flight
    assert flight is not None
    look = _look(m, s, i)
    if m.protocol.void == "origins, then fence" and flight.answer == VOID:
        kept = _keep_its_own(m, e, look)._replace(flight=flight._replace(answer=HALF_SEEN))
        yield f"{m.names(i)} looks at its origins", with_executor(s, i, kept)
    else:
        yield from _resolves(m, s, i, look)


def _look(m: "Lease", s: State, i: int) -> Look:
    """A look that takes no time."""
    return Look(_epochs(s.executors[i]), view_of(m, s, i))


def _epochs(e: Executor) -> tuple[int | None, ...]:
    return tuple(hold and hold.epoch for hold in e.holds)


def _asks(m: "Lease", s: State, i: int) -> tuple[str, State]:
    """A look that takes time."""
    e = s.executors[i]
    asking = e._replace(view=Look(_epochs(e), None), look=e.look and m.protocol.look_up == "once")
    return f"{m.names(i)} sends a look at its row", with_executor(s, i, asking, Statement(i, "look"))


def looks_up(m: "Lease", s: State, i: int) -> Steps:
    """The fence has grown while no cycle was under way: why?"""
    e, name = s.executors[i], m.names(i)
    if e.flight is not None:
        return
    if e.view is not None:
        if e.view.view is not None:
            seen = e._replace(view=None, look=e.look and m.protocol.look_up != "once")
            yield f"{name} hears what its look has found", with_executor(s, i, _learned(m, seen, e.view))
    elif e.look and m.scenario.slow:
        yield _asks(m, s, i)
    elif e.look:
        seen = _learned(m, e._replace(look=False), _look(m, s, i))
        yield f"{name} looks why the fence has grown", with_executor(s, i, seen)


def _learned(m: "Lease", e: Executor, look: Look) -> Executor:
    assert look.view is not None
    return learns(m, _keep_its_own(m, e, look), look)._replace(fence=look.view.fence)


def _resolves(m: "Lease", s: State, i: int, look: Look) -> Steps:
    """What a look says of a cycle that was void or unanswered."""
    e, rule, name, view = s.executors[i], m.protocol.void, m.names(i), look.view
    flight = e.flight
    assert flight is not None
    assert view is not None
    fenced = view.fence != flight.fence
    if fenced and rule == "one look":
        e = _keep_its_own(m, e, look)
    e = learns(m, e, look)._replace(fence=view.fence)
    if view.cycle == flight.number:
        committed = e._replace(flight=flight._replace(answer=COMMITTED))
        yield f"{name} looks at its row: the cycle had committed", with_executor(s, i, committed)
    elif fenced:
        cycle = _rest(m, e, flight._replace(fence=view.fence, answer=WAITING), whole=rule == "send all again")
        if cycle.ends or cycle.again or cycle.running:
            label = f"{name} looks at its row: another fence; sends again a cycle that {m.cycle_name(cycle)}"
            yield label, with_executor(s, i, e._replace(flight=cycle), Statement(i, "cycle", cycle=cycle))
        else:
            yield (
                f"{name} looks at its row: another fence; nothing is left to send",
                with_executor(s, i, e._replace(flight=None)),
            )


def _keep_its_own(m: "Lease", e: Executor, look: Look) -> Executor:
    """Give up all that the database does not say is held by this executor under this epoch. Not what has been acquired
    since the look was sent: that may be younger than the answer."""
    assert look.view is not None
    for origin, hold in enumerate(e.holds):
        if hold is not None and look.before[origin] == hold.epoch != look.view.epochs[origin]:
            e = drop(m, e, origin)
    return e


def _rest(m: "Lease", e: Executor, cycle: Cycle, whole: bool) -> Cycle:
    """What remains of a cycle when some of its origins have been given up, and some of its jobs put back."""
    back = [job for job in cycle.names if e.memory[job] != NAMED]

    def stays(job: int) -> bool:
        origin = m.scenario.origin_of[job]
        hold = e.holds[origin]
        return whole or (job not in back and hold is not None and hold.epoch == cycle.epochs[origin])

    parts = (cycle.ends, cycle.again, cycle.names, cycle.running)
    ends, again, names, running = (tuple(filter(stays, part)) for part in parts)
    return cycle._replace(ends=ends, again=again, names=names, running=running)

"""The lease model's cycles, as an executor sees them. Compare `cycles.py`.

What goes into a cycle, and what follows from its commit. What to do when there is no answer, or another one:
`lease_resolve`, and `lease_settle` where two are under way.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lease_admin import withheld
from lease_early import brings, expected_after, is_news, may_start, named_early, read_with, without
from lease_state import (
    AGAIN,
    BLOCKED,
    COMMITTED,
    DEFERRED,
    DONE,
    ENDING,
    FAILED,
    NAMED,
    QUEUED,
    RUNNING,
    UNASSIGNED,
    UNKNOWN,
    WAITING,
    Cycle,
    Executor,
    State,
    Statement,
    forget,
    put_back,
    swap,
    with_executor,
)

if TYPE_CHECKING:
    from lease import Lease

__all__ = ["acknowledged", "put_together_anew", "sends_cycle", "starts_early"]

Steps = Iterator[tuple[str, State]]


def _start(m: "Lease", s: State, i: int, executor: Executor, job: int) -> tuple[Executor, str]:
    """Start a handler; says which property that violates."""
    broken, name = s.broken, m.job_name(job)
    origin = m.scenario.origin_of[job]
    others = [k for k, other in enumerate(s.executors) if k != i and m.works_on(other, origin)]
    jobs = m.jobs_of(origin)
    earlier = [k for k in jobs if k < job and s.jobs[k].present and k not in m.scenario.late]
    beside = [k for k in jobs if executor.memory[k] in (RUNNING, ENDING)]
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
    elif beside:
        broken = f"I3: {m.names(i)} starts {name} while {m.job_name(beside[0])} runs"
    elif others:
        broken = f"I3: {m.names(i)} starts {name} while {m.names(others[0])} runs a job of {m.origin_name(origin)}"
    return executor._replace(memory=swap(executor.memory, job, RUNNING)), broken


def _compose(m: "Lease", s: State, i: int, number: int, fence: int, early: tuple[int, ...] = ()) -> Cycle | None:
    """Everything that is to be said now: what has finished, and what is to run next. None: there is nothing to say.

    What an older cycle under way ends is not ended again. What it names is named on, whatever becomes of it. Of a
    group whose running job it ends, the next one is named at once; it starts when both are known to be recorded."""
    e, rule = s.executors[i], m.protocol
    told = {job for flight in e.flights for job in flight.ends + flight.again}
    runs = [RUNNING, ENDING]
    runs += [NAMED] if e.flights and rule.carries == "what the older named" else []
    runs += [DEFERRED] if rule.deferred == "stays named" else []
    ends, again, blocks, names, handed, stays, clears = [], [], [], [], [], [], []
    news = is_news(m, e, early)
    for origin, hold in enumerate(e.holds):
        if hold is None:
            continue
        jobs = m.jobs_of(origin)
        ends += [job for job in jobs if e.memory[job] == DONE and job not in told]
        blocks += [job for job in jobs if e.memory[job] == FAILED and job not in told]
        again += [job for job in jobs if e.memory[job] in (AGAIN, FAILED) and job not in told]
        stays += [job for job in jobs if e.memory[job] in runs and job not in e.unlisted]
        done = [job for job in jobs if _hands_over(m, e, job, told)]
        busy = any((job in e.heads and job not in done) or e.memory[job] == BLOCKED for job in jobs)
        queued = [job for job in jobs if e.memory[job] == QUEUED]
        paused = bool(queued) and withheld(m, e, queued[0]) and not (done and rule.hand_over == "of what is paused")
        if queued and not busy and not hold.draining and not paused:
            names.append(queued[0])
            handed += queued[:1] if done else []
        # To let go of an origin, a cycle must leave out the jobs of it that were named and do not run.
        left_over = any(job in s.rows[e.row].running and job not in stays for job in jobs)
        news |= hold.draining == UNASSIGNED and left_over and not e.flights
        if rule.early != "never" and hold.draining == UNASSIGNED and not hold.cleared and not e.flights:
            clears += [origin] if all(e.memory[job] in (UNKNOWN, QUEUED, BLOCKED) for job in jobs) else []
    news |= bool(clears)
    if not (ends or again or names or news):
        return None
    epochs = tuple(hold and hold.epoch for hold in e.holds)
    early = tuple(job for job in early if job not in stays + names)
    running = tuple(sorted([*stays, *names, *early]))
    return Cycle(
        number, fence, tuple(ends), tuple(again), tuple(names), running, epochs, WAITING, handed=tuple(handed),
        early=early, clears=tuple(clears), blocks=tuple(blocks), reads=() if ends or again else read_with(m, s, early),
    )  # fmt: skip


def _hands_over(m: "Lease", e: Executor, job: int, told: set[int]) -> bool:
    """Whether the group of a job may go on although the job is not known to be over. Of `told` an older cycle tells."""
    rule, known = m.protocol.hand_over, e.memory[job]
    if rule == "after the commit":
        return False
    if known == AGAIN:
        return rule == "of any outcome"
    return known == DONE and (job not in told or rule == "of any end")


def _named(m: "Lease", e: Executor, cycle: Cycle) -> Executor:
    """The executor with this cycle on its way."""
    before = {k for job in cycle.names for k in m.jobs_of(m.scenario.origin_of[job])}
    heads = tuple(sorted({*e.heads, *cycle.names} - (before - {*cycle.names})))
    memory = tuple(NAMED if job in cycle.names else known for job, known in enumerate(e.memory))
    e = e._replace(**expected_after(m, e, cycle))
    return e._replace(flights=(*e.flights, cycle), memory=memory, heads=heads)


def _takes_a_second(m: "Lease", e: Executor) -> bool:
    """Whether the cycle that is under way may be followed by another. Where it was sent twice, void would not mean that
    it has not committed."""
    older = e.flights[0]
    first = not older.troubled or m.protocol.second == "after a repetition"
    return first and older.answer in (WAITING, COMMITTED) and not e.look and DEFERRED not in e.memory


def sends_cycle(m: "Lease", s: State, i: int) -> Steps:
    """So many cycles are on their way at a time as the protocol allows. The number of each is the next one."""
    e = s.executors[i]
    if not e.flights:
        yield from _recalls(m, s, i)
    if e.view is not None or len(e.flights) == m.protocol.in_flight:
        return
    if e.flights and not _takes_a_second(m, e):
        return
    number = (e.flights[-1].number if e.flights else e.cycle) + 1
    for early in named_early(m, e):
        cycle = _compose(m, s, i, number, e.fence, early)
        if cycle is not None:
            yield _sends(m, s, i, cycle)


def _sends(m: "Lease", s: State, i: int, cycle: Cycle) -> tuple[str, State]:
    e = s.executors[i]
    sender, broken = _named(m, e, cycle), s.broken
    if m.protocol.successor != "after the commit":
        for job in cycle.names if m.protocol.successor == "at once" else cycle.handed:
            sender, broken = _start(m, s, i, sender, job)
    which = "a second cycle" if e.flights else "a cycle"
    return (
        f"{m.names(i)} sends {which} that {m.cycle_name(cycle)}",
        with_executor(s, i, sender, Statement(i, "cycle", cycle=cycle))._replace(broken=broken),
    )


def _recalls(m: "Lease", s: State, i: int) -> Steps:
    """The time of a deferred outcome has come."""
    e = s.executors[i]
    for job, known in enumerate(e.memory):
        if known == DEFERRED:
            again = e._replace(memory=swap(e.memory, job, DONE))
            yield f"{m.names(i)} takes up the outcome of {m.job_name(job)} again", with_executor(s, i, again)


def acknowledged(m: "Lease", s: State, i: int, place: int = 0) -> tuple[str, State]:
    """A cycle has committed: what it ended is over, and what it named starts if the deadline still stands."""
    e, broken = s.executors[i], s.broken
    flight = e.flights[place]
    e = e._replace(cycle=flight.number, flights=e.flights[:place] + e.flights[place + 1 :])
    e = e._replace(early=may_start(m, e, flight), early_in_row=flight.early)
    for origin in flight.clears:
        hold = e.holds[origin]
        if hold is not None and hold.draining == UNASSIGNED:
            e = e._replace(holds=swap(e.holds, origin, hold._replace(cleared=True)))
    for job in flight.ends:
        if e.memory[job] == DONE:
            group = m.jobs_of(m.scenario.origin_of[job]) if m.protocol.ended == "frees the group" else (job,)
            e = forget(e, (job,), DONE)._replace(heads=tuple(k for k in e.heads if k not in group))
    for job in flight.again:
        if e.memory[job] == AGAIN:  # a group whose head runs again is read again from its head
            e = forget(e, m.jobs_of(m.scenario.origin_of[job]), AGAIN, QUEUED)
            e = e._replace(heads=tuple(k for k in e.heads if k != job))
        elif e.memory[job] == FAILED:
            e = _blocks(m, e, flight, job)
    for job in flight.names:
        hold = e.holds[m.scenario.origin_of[job]]
        if e.memory[job] != NAMED or hold is None:
            continue
        if (hold.left > 0 or not m.protocol.look_before_start) and not hold.draining:
            e, broken = _start(m, s, i, e, job)
        else:
            group = m.jobs_of(m.scenario.origin_of[job])
            e = put_back(e, job, group, UNKNOWN if hold.draining else QUEUED)
    e = brings(m, e, flight)
    which = "its younger cycle" if place else "its cycle"
    return f"{m.names(i)} hears that {which} has committed", with_executor(s, i, e)._replace(broken=broken)


def _blocks(m: "Lease", e: Executor, flight: Cycle, job: int) -> Executor:
    """A job has given up, and that is recorded. Where it is not known that the job was still there, somebody may have
    ended it or let it go on; the group is read again."""
    known = {"counts if it was found": ("found",), "counts if it was heard": ("found", "missing")}
    if flight.told in known.get(m.protocol.failure, (flight.told,)):
        e = e._replace(memory=swap(e.memory, job, BLOCKED))
    else:
        e = forget(e, m.jobs_of(m.scenario.origin_of[job]), FAILED, QUEUED)
    return e._replace(heads=tuple(k for k in e.heads if k != job))


def starts_early(m: "Lease", s: State, i: int) -> Steps:
    """A job that has been named before it was read starts without another cycle, in its turn."""
    e, rule = s.executors[i], m.protocol.early_start
    at_any_time = m.protocol.early_until == "it is taken" or m.protocol.early_from != "its acknowledgement"
    if (e.flights and not at_any_time) or (e.view is not None and "look" in rule):
        return
    for origin, hold in enumerate(e.holds):
        if hold is None or (hold.left <= 0 and "deadline" in rule) or hold.draining:
            continue
        jobs = m.jobs_of(origin)
        known = [job for job in jobs if e.memory[job] == QUEUED]
        if "order" not in rule:
            known += [job for job in jobs if e.memory[job] == UNKNOWN and s.jobs[job].present]
        busy = any(job in e.heads or e.memory[job] == BLOCKED for job in jobs)
        for job in known if "order" not in rule else known[:1]:
            if job in e.early and not (busy and "group" in rule) and not (withheld(m, e, job) and "pause" in rule):
                heads = tuple(sorted({*e.heads, job}))
                started, broken = _start(m, s, i, without(e, job)._replace(heads=heads), job)
                started = started if m.protocol.early_listed else started._replace(unlisted=(*e.unlisted, job))
                after = with_executor(s, i, started)._replace(broken=broken)
                yield f"{m.names(i)} starts {m.job_name(job)}, which was named early", after


def put_together_anew(m: "Lease", s: State, i: int) -> tuple[str, State]:
    """A wrong protocol only: an unanswered cycle is sent again with what has happened since."""
    e = s.executors[i]
    flight = e.flights[0]
    waiting = e._replace(flights=(flight._replace(answer=WAITING),))
    unnamed = e._replace(flights=())
    for job, known in enumerate(e.memory):
        if known == NAMED:
            unnamed = put_back(unnamed, job, m.jobs_of(m.scenario.origin_of[job]), QUEUED)
    cycle = _compose(m, with_executor(s, i, unnamed), i, flight.number, flight.fence)
    sender = _named(m, unnamed, cycle) if cycle else waiting
    cycle = sender.flights[0]
    what = f"{m.names(i)} sends a cycle again that {m.cycle_name(cycle)}"
    return what, with_executor(s, i, sender, Statement(i, "cycle", cycle=cycle))

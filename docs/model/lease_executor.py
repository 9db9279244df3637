"""The lease model's executors: what a process does on its own, and what it does when an answer arrives.

Each function yields the steps of one kind that executor `i` can take. A step is atomic in the process; everything that
needs the server is a statement that is sent here and runs in `lease_server`, any time later.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lease_admin import delivered, sight_of
from lease_cycle import sends_cycle, starts_early
from lease_early import expects, names_early
from lease_look import looks_up
from lease_resolve import hears_of_its_cycle
from lease_server import drop
from lease_state import (
    AGAIN,
    BLOCKED,
    DEAD,
    DEFERRED,
    DONE,
    ENDING,
    EXPIRED,
    FAILED,
    OK,
    PAUSED,
    QUEUED,
    RUNNING,
    SKIPPED,
    UNANSWERED,
    UNASSIGNED,
    UNKNOWN,
    UP,
    WAITING,
    Ask,
    Cycle,
    Executor,
    Hold,
    State,
    Statement,
    forget,
    swap,
    with_executor,
)

if TYPE_CHECKING:
    from lease import Lease

__all__ = ["answers", "die", "hears_of_leases", "steps"]

Steps = Iterator[tuple[str, State]]

_AT_WORK = (RUNNING, DONE, DEFERRED, ENDING, FAILED)


def steps(m: "Lease", s: State, i: int) -> Steps:
    """Everything that executor `i` can do now."""
    status = s.executors[i].status
    if status == UP:
        yield from _faults(m, s, i)
        yield from _deadlines(m, s, i)
        yield from _asks(m, s, i)
        yield from answers(m, s, i)
        yield from _reads(m, s, i)
        yield from _handlers(m, s, i)
        yield from expects(m, s, i)
        yield from starts_early(m, s, i)
        yield from sends_cycle(m, s, i)
        yield from _drains(m, s, i)
    elif status == PAUSED:
        yield f"{m.names(i)} goes on", with_executor(s, i, s.executors[i]._replace(status=UP))
    else:
        yield from _restarts(m, s, i)


def answers(m: "Lease", s: State, i: int) -> Steps:
    """What the executor makes of the answers that have arrived."""
    yield from hears_of_leases(m, s, i)
    yield from hears_of_its_cycle(m, s, i)
    yield from looks_up(m, s, i)


# -- faults ------------------------------------------------------------------------------------------------------


def _faults(m: "Lease", s: State, i: int) -> Steps:
    """A process is stopped (SIGSTOP, a long collection), is killed, or loses a connection."""
    if i not in m.scenario.faulty:
        return
    b, e, name = s.budget, s.executors[i], m.names(i)
    if b.pauses:
        yield (
            f"{name} is paused",
            with_executor(s, i, e._replace(status=PAUSED))._replace(budget=b._replace(pauses=b.pauses - 1)),
        )
    if b.crashes:
        yield f"{name} dies", die(m, s, i)._replace(budget=b._replace(crashes=b.crashes - 1))
    if b.losses:
        spent = b._replace(losses=b.losses - 1)
        for what, after in _lost_connections(m, s, i):
            yield f"{name} loses the connection of {what}", after._replace(budget=spent)


def die(m: "Lease", s: State, i: int) -> State:
    """The process is gone. What it had sent goes on; its runs are cut off, and must be recorded as lost."""
    e = s.executors[i]
    jobs = s.jobs
    for number, job in enumerate(jobs):
        mine = s.origins[m.scenario.origin_of[number]].owner == e.row
        if job.present and mine and number in s.rows[e.row].running and e.memory[number] in _AT_WORK:
            jobs = swap(jobs, number, job._replace(cut=True))
    return s._replace(
        jobs=jobs,
        executors=swap(s.executors, i, m.blank(DEAD, e.row)),
        server=tuple(st._replace(heard=False) if st.by == i else st for st in s.server),
    )


def _lost_connections(m: "Lease", s: State, i: int) -> Steps:
    """Each statement whose answer can get lost; the executor acts upon it: see `_deaf` for the statement itself."""
    e = s.executors[i]
    for place, flight in enumerate(e.flights):
        if flight.answer != UNANSWERED:
            lost = e._replace(flights=swap(e.flights, place, flight._replace(answer=UNANSWERED)))
            which = "its younger cycle" if place else "its cycle"
            yield which, _deaf(s, i, "cycle", lost, number=flight.number)
    for origin, ask in enumerate(e.asks):
        if ask is not None:
            lost = e._replace(asks=swap(e.asks, origin, None))
            yield f"its {ask.kind} of {m.origin_name(origin)}", _deaf(s, i, ask.kind, lost, origin)
    if e.disown is not None:
        yield "its disowning", _deaf(s, i, "disown", e._replace(disown=None))
    if e.view is not None:
        kept = e.look or (not e.flights and m.protocol.look_up != "once")
        lost = e._replace(view=None, look=kept and m.protocol.look_up != "once")
        yield "its look", _deaf(s, i, "look", lost)
    for job, known in enumerate(e.memory):
        if known == ENDING:  # it may commit even so; or else the job runs again
            lost = e._replace(memory=swap(e.memory, job, AGAIN))
            yield f"finish of {m.job_name(job)}", _deaf(s, i, "finish", lost, job=job)


def _deaf(
    s: State,
    i: int,
    kind: str,
    executor: Executor,
    origin: int | None = None,
    job: int | None = None,
    number: int | None = None,
) -> State:
    """Nobody listens any more to the statements of this kind; they may still commit."""

    def meant(st: Statement) -> bool:
        if st.by != i or st.kind != kind or (number is not None and st.cycle is not None and st.cycle.number != number):
            return False
        return origin in (None, st.origin) and job in (None, st.job)

    server = tuple(st._replace(heard=False) if meant(st) else st for st in s.server)
    return s._replace(executors=swap(s.executors, i, executor), server=server)


def _restarts(m: "Lease", s: State, i: int) -> Steps:
    """A wrong protocol only: a process takes over the identity, and the row, of the one that died."""
    e, b = s.executors[i], s.budget
    if b.restarts and m.protocol.identity == "name":
        row = s.rows[e.row]
        new = m.blank(UP, e.row)._replace(cycle=row.cycle, fence=row.fence)
        after = with_executor(s, i, new)._replace(budget=b._replace(restarts=b.restarts - 1))
        yield f"{m.names(i)} restarts under the same identity", after


# -- leases ------------------------------------------------------------------------------------------------------


def _deadlines(m: "Lease", s: State, i: int) -> Steps:
    """At the deadline, or a little before, the handlers stop; a process whose handler does not ends itself."""
    e, p = s.executors[i], m.protocol
    for origin, hold in enumerate(e.holds):
        if hold is None or not m.must_stop(e, origin):
            continue
        who = f"{m.names(i)} reaches its deadline for {m.origin_name(origin)}"
        runs = any(e.memory[job] == RUNNING for job in m.jobs_of(origin))
        if runs and not p.cancellable and p.exit_at_deadline:
            yield f"{who} and ends itself", die(m, s, i)
        elif p.expired == "keep and renew":
            yield f"{who}, stops its jobs", _stop(m, s, i, origin, hold.draining or EXPIRED)
        else:
            yield f"{who}, gives it up", with_executor(s, i, drop(m, e, origin))
    for job in e.strays:
        left = e._replace(strays=tuple(stray for stray in e.strays if stray != job))
        yield f"{m.names(i)}: the handler of {m.job_name(job)} stops", with_executor(s, i, left)


def _stop(m: "Lease", s: State, i: int, origin: int, why: str) -> State:
    """Start nothing more of an origin, forget what waits, and cancel what runs. The origin stays held meanwhile."""
    e = s.executors[i]
    memory, strays = list(e.memory), list(e.strays)
    for job in m.jobs_of(origin):
        if memory[job] == RUNNING and not m.protocol.cancellable:
            strays.append(job)
        if memory[job] in (RUNNING, ENDING):
            memory[job] = AGAIN if m.protocol.cancelled == "recorded" else UNKNOWN
        elif memory[job] in (QUEUED, BLOCKED):
            memory[job] = UNKNOWN
    heads = tuple(job for job in e.heads if memory[job] != UNKNOWN)
    e = forget(e, m.jobs_of(origin))._replace(heads=heads)
    hold = e.holds[origin]
    assert hold is not None
    holds = swap(e.holds, origin, hold._replace(draining=why))
    stopped = e._replace(holds=holds, memory=tuple(memory), strays=tuple(sorted(strays)))
    return _deaf(s, i, "finish", stopped, origin)


def _asks(m: "Lease", s: State, i: int) -> Steps:
    """Acquire what is wanted and not held; renew what is held. A deadline counts from this moment."""
    e = s.executors[i]
    for origin in m.scenario.wants[i]:
        hold = e.holds[origin]
        if e.asks[origin] is not None:
            continue
        what = m.origin_name(origin)
        if hold is None and _may_ask(m, s, i, origin):
            asking = e._replace(asks=swap(e.asks, origin, Ask("acquire", 0, WAITING, 0, 0)))
            yield f"{m.names(i)} asks for {what}", with_executor(s, i, asking, Statement(i, "acquire", origin))
        elif hold is not None and _may_renew(m, i, origin, hold):
            asking = e._replace(asks=swap(e.asks, origin, Ask("renew", 0, WAITING, hold.epoch, 0)))
            yield f"{m.names(i)} renews {what}", with_executor(s, i, asking, Statement(i, "renew", origin, hold.epoch))


def _may_renew(m: "Lease", i: int, origin: int, hold: Hold) -> bool:
    full = m.scenario.lease - m.scenario.margin
    return i in m.scenario.renews and origin not in m.scenario.steady and hold.left < full


def _may_ask(m: "Lease", s: State, i: int, origin: int) -> bool:
    """An executor asks again for what it has given up only when its handlers of it have stopped, and when no cycle is
    unresolved that ends or names a job of it: such a cycle passes the fence, for nobody else has taken the origin."""
    e, jobs, rule = s.executors[i], m.jobs_of(origin), m.protocol.reacquire
    if rule != "with handlers running" and any(job in e.strays for job in jobs):
        return False
    under_way = e.flights[:1] if m.protocol.under_way == "the older" else e.flights
    if names_early(m, e, jobs):
        return False
    whole = m.protocol.under_way == "both, with what runs on"
    if rule != "with a cycle under way" and any(flight.mentions(jobs, whole) for flight in under_way):
        return False
    owner = s.origins[origin].owner
    return i not in m.scenario.ideal or owner in (None, e.row) or s.origins[origin].lease <= 0


def hears_of_leases(m: "Lease", s: State, i: int) -> Steps:
    """The answer to an acquire or a renew."""
    e, p = s.executors[i], m.protocol
    for origin, ask in enumerate(e.asks):
        if ask is None or ask.answer == WAITING:
            continue
        what, heard = m.origin_name(origin), e._replace(asks=swap(e.asks, origin, None))
        hold = e.holds[origin]
        age = ask.age if p.deadline_from == "sending" else 0
        left = m.scenario.lease - m.scenario.margin - age
        mine = hold is not None and hold.epoch == ask.epoch
        if ask.kind == "acquire" and ask.answer == OK and left > 0:
            holding = heard._replace(holds=swap(heard.holds, origin, Hold(ask.epoch, left, "")))
            if p.new_fence == "from acquire":
                holding = holding._replace(fence=ask.fence)
            yield f"{m.names(i)} holds {what}", with_executor(s, i, holding)
        elif ask.kind == "renew" and ask.answer == OK and hold is not None and mine:
            back = hold.draining == EXPIRED and left > 0
            renewed = hold._replace(left=max(left, hold.left), draining="" if back else hold.draining)
            yield (
                f"{m.names(i)} holds {what} longer",
                with_executor(s, i, heard._replace(holds=swap(e.holds, origin, renewed))),
            )
        elif ask.kind == "renew" and ask.answer not in (OK, SKIPPED) and mine:
            yield f"{m.names(i)} has lost {what}, gives it up", with_executor(s, i, drop(m, heard, origin))
        else:
            yield f"{m.names(i)} hears nothing new of {what}", with_executor(s, i, heard)


# -- jobs --------------------------------------------------------------------------------------------------------


def _reads(m: "Lease", s: State, i: int) -> Steps:
    """Read the jobs of a held origin that are not in memory. How jobs are found is the other model's affair."""
    e = s.executors[i]
    if m.scenario.administered:
        yield from _reads_in_two_steps(m, s, i)
        return
    for origin, hold in enumerate(e.holds):
        new = [job for job in m.jobs_of(origin) if s.jobs[job].present and e.memory[job] == UNKNOWN]
        if hold is not None and new and not hold.draining:
            memory = tuple(QUEUED if job in new else known for job, known in enumerate(e.memory))
            yield f"{m.names(i)} reads {m.origin_name(origin)}", with_executor(s, i, e._replace(memory=memory))


def _reads_in_two_steps(m: "Lease", s: State, i: int) -> Steps:
    """A read that also tells of the fence and of pauses; sent if it may bring something. One is under way at a time."""
    e = s.executors[i]
    if e.sight is not None:
        yield f"{m.names(i)}'s read is delivered", with_executor(s, i, delivered(m, e, e.sight))
        return
    sight = sight_of(m, s, i)
    told = sight.fence > e.fence and not e.look and (sight.fence, sight.paused) != e.told
    if told or sight.paused != e.paused or any(e.memory[job] == UNKNOWN for job in sight.jobs):
        if m.scenario.slow:
            yield f"{m.names(i)}'s read takes its snapshot", with_executor(s, i, e._replace(sight=sight))
        else:
            yield f"{m.names(i)} reads", with_executor(s, i, delivered(m, e, sight))


def _handlers(m: "Lease", s: State, i: int) -> Steps:
    """A handler returns. A transactional one ends its job itself: finish and COMMIT go out as one simple query."""
    e = s.executors[i]
    for job, known in enumerate(e.memory):
        if known != RUNNING:
            continue
        origin = m.scenario.origin_of[job]
        hold, who = e.holds[origin], f"{m.names(i)}: the handler of {m.job_name(job)}"
        if job not in m.scenario.transactional:
            yield f"{who} returns", with_executor(s, i, e._replace(memory=swap(e.memory, job, DONE)))
            if s.budget.failures and job in m.scenario.targets:
                failed = with_executor(s, i, e._replace(memory=swap(e.memory, job, FAILED)))
                yield f"{who} gives up", failed._replace(budget=s.budget._replace(failures=s.budget.failures - 1))
        elif hold is not None:
            ending = e._replace(memory=swap(e.memory, job, ENDING))
            finish = Statement(i, "finish", origin, hold.epoch, job, s.jobs[job].attempt)
            yield f"{who} sends finish + COMMIT", with_executor(s, i, ending, finish)


# -- letting go --------------------------------------------------------------------------------------------------


def _drains(m: "Lease", s: State, i: int) -> Steps:
    """After a rebalance: start nothing more, let the handlers end or cancel them, release; or keep it after all."""
    e, b = s.executors[i], s.budget
    for origin, hold in enumerate(e.holds):
        if hold is None or i not in m.scenario.faulty:
            continue
        who, what = m.names(i), m.origin_name(origin)
        if hold.draining != UNASSIGNED:
            if b.drains:
                holds = swap(e.holds, origin, hold._replace(draining=UNASSIGNED, cleared=False))
                drained = with_executor(s, i, forget(e, m.jobs_of(origin), QUEUED, BLOCKED)._replace(holds=holds))
                yield f"{who} drains {what}", drained._replace(budget=b._replace(drains=b.drains - 1))
            continue
        kept = hold._replace(draining="" if hold.left > 0 else EXPIRED, cleared=False)
        keeping = e._replace(holds=swap(e.holds, origin, kept), flights=_of_this_drain(m, e, origin))
        yield f"{who} may keep {what} after all", with_executor(s, i, keeping)
        if m.protocol.cancellable and any(e.memory[job] in (RUNNING, ENDING) for job in m.jobs_of(origin)):
            yield f"{who} cancels what runs of {what}", _stop(m, s, i, origin, UNASSIGNED)
        if _may_release(m, s, i, origin):
            release = Statement(i, "release", origin, hold.epoch, heard=False)
            yield f"{who} releases {what}", with_executor(s, i, drop(m, e, origin), release)


def _of_this_drain(m: "Lease", e: Executor, origin: int) -> tuple[Cycle, ...]:
    """The cycles under way when a drain is taken back: none of them has been gathered since the next one."""
    if m.protocol.barrier == "one of an earlier drain":
        return e.flights
    return tuple(f._replace(clears=tuple(o for o in f.clears if o != origin)) if f.clears else f for f in e.flights)


def _may_release(m: "Lease", s: State, i: int, origin: int) -> bool:
    """A release is sent after an acknowledged cycle that names no job of the origin, or nobody accounts for the run."""
    e, jobs = s.executors[i], m.jobs_of(origin)
    if any(e.memory[job] in (RUNNING, ENDING) for job in jobs):
        return False
    if m.protocol.release == "at once":
        return True
    hold = e.holds[origin]
    if m.protocol.early != "never":
        idle = all(e.memory[job] in (UNKNOWN, QUEUED, BLOCKED) for job in jobs)
        return idle and hold is not None and hold.cleared
    unresolved = any(flight.mentions(jobs) for flight in e.flights)
    if m.protocol.barrier == "one that was under way":
        return not unresolved and all(e.memory[job] in (UNKNOWN, QUEUED, BLOCKED) for job in jobs)
    named = any(job in s.rows[e.row].running for job in jobs if s.jobs[job].present)
    return not unresolved and not named and all(e.memory[job] in (UNKNOWN, QUEUED, BLOCKED) for job in jobs)

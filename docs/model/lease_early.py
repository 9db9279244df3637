"""The lease model's jobs that are named before they are read: `Protocol.early`.

An executor is told which jobs are about to be committed, or have just been. The next cycle names them, whatever is
known of them. Once it is acknowledged, and until another one is sent, those of them that are read and whose turn it is
start without a cycle of their own (`lease_cycle`, `starts_early`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lease_state import QUEUED, UNKNOWN, Cycle, Executor, State, with_executor

if TYPE_CHECKING:
    from lease import Lease

__all__ = [
    "brings",
    "expected_after",
    "expects",
    "gone_wrong",
    "is_news",
    "lost",
    "may_start",
    "named_early",
    "names_early",
    "read_with",
    "without",
]

Steps = Iterator[tuple[str, State]]


def expects(m: "Lease", s: State, i: int) -> Steps:
    """The executor is told to expect a job."""
    e, b = s.executors[i], s.budget
    if m.protocol.early == "never" or not b.expects or i in m.scenario.ideal:
        return
    told = s._replace(budget=b._replace(expects=b.expects - 1))
    for number, job in enumerate(s.jobs):
        told_of = job.present or (job.late and m.protocol.early == "before the commit")
        if told_of and number not in e.expected:
            expecting = e._replace(expected=tuple(sorted((*e.expected, number))))
            yield f"{m.names(i)} is told to expect {m.job_name(number)}", with_executor(told, i, expecting)


# -- naming them -------------------------------------------------------------------------------------------------


def named_early(m: "Lease", e: Executor) -> Iterator[tuple[int, ...]]:
    """What the next cycle may name early: what is new, with or without what was named early before."""
    if m.protocol.early == "never" or (e.flights and m.protocol.early_second == "no"):
        yield ()
        return
    new, before = (tuple(job for job in jobs if _may_name(m, e, job)) for jobs in (e.expected, e.tried))
    yield new
    if before:
        yield tuple(sorted({*new, *before}))


def _may_name(m: "Lease", e: Executor, job: int) -> bool:
    if e.memory[job] not in (UNKNOWN, QUEUED):  # it has started already
        return False
    hold, rule = e.holds[m.scenario.origin_of[job]], m.protocol.early_of
    return rule == "any origin" or (hold is not None and (not hold.draining or rule == "what drains, too"))


def is_news(m: "Lease", e: Executor, early: tuple[int, ...]) -> bool:
    """Whether a cycle is sent that has nothing else to say."""
    tidies = not early and bool(e.early_in_row) and not e.flights and m.protocol.early_tidy == "now and then"
    return tidies or any(job in e.expected for job in early)


def expected_after(m: "Lease", e: Executor, cycle: Cycle) -> dict[str, Any]:
    """What changes when a cycle is sent."""
    if m.protocol.early == "never":
        return {}
    tried = tuple(sorted({*e.tried, *cycle.early})) if e.flights else cycle.early
    early = e.early if m.protocol.early_until == "it is taken" else ()
    early = cycle.early if m.protocol.early_from == "its sending" else early
    expected = tuple(job for job in e.expected if job not in cycle.running)
    return {"expected": expected, "tried": tried, "early": early}


def names_early(m: "Lease", e: Executor, jobs: tuple[int, ...]) -> bool:
    """Whether the executor's row may name any of these jobs early, or will."""
    if m.protocol.early_asks == "at once":
        return False
    flying = [job for flight in e.flights for job in flight.early]
    return any(job in e.early_in_row or job in flying for job in jobs)


def read_with(m: "Lease", s: State, early: tuple[int, ...]) -> tuple[int, ...]:
    """What a cycle that names these brings, by its snapshot, which is older than the lock that it waits for: here as
    old as it can be."""
    rule = m.protocol.early_reads
    if rule == "no" or (s.paused and rule != "what is paused, too"):
        return ()
    found = [job for job in early if s.jobs[job].present]
    return tuple(job for job in found if rule == "what stands behind others" or job == _first(m, s, job))


def _first(m: "Lease", s: State, job: int) -> int:
    return next(k for k in m.jobs_of(m.scenario.origin_of[job]) if s.jobs[k].present)


# -- what becomes of them ----------------------------------------------------------------------------------------


def may_start(m: "Lease", e: Executor, cycle: Cycle) -> tuple[int, ...]:
    """What may start without a cycle now that this one is known to be committed: what its only sending has named."""
    kept = e.early if m.protocol.early_until == "it is taken" else ()
    alone = not e.flights or m.protocol.early_from == "the acknowledgement of either"
    new = [job for job in cycle.early if cycle.once and _held_since(m, e, cycle, m.scenario.origin_of[job])]
    return tuple(sorted({*kept, *new})) if alone else kept


def brings(m: "Lease", e: Executor, cycle: Cycle) -> Executor:
    """What the cycle has read is in memory now, if the names count that it has given; but not of what drains."""
    new = may_start(m, e._replace(early=()), cycle) if m.protocol.early_reads != "when it is void, too" else cycle.reads
    holds = {job: e.holds[m.scenario.origin_of[job]] for job in cycle.reads}
    read = [j for j, hold in holds.items() if j in new and e.memory[j] == UNKNOWN and hold and not hold.draining]
    memory = tuple(QUEUED if job in read else known for job, known in enumerate(e.memory))
    return e._replace(memory=memory) if read else e


def _held_since(m: "Lease", e: Executor, cycle: Cycle, origin: int) -> bool:
    """Whether the origin has been held all the time since the cycle was gathered."""
    hold = e.holds[origin]
    return m.protocol.early_counts == "in any case" or (hold is not None and hold.epoch == cycle.epochs[origin])


def gone_wrong(m: "Lease", e: Executor, cycle: Cycle) -> tuple[Executor, Cycle]:
    """A cycle was void, refused or not answered: what is sent of it again names nothing early."""
    rule = m.protocol.early_resent
    if m.protocol.early_reads == "when it is void, too":
        e = brings(m, e, cycle)
    if not cycle.early or rule in ("yes", "all of it"):
        return e, cycle
    e = e._replace(tried=tuple(job for job in e.tried if job not in cycle.early))
    running = tuple(job for job in cycle.running if job not in cycle.early)
    return e, cycle._replace(running=running, once=rule == "forgotten")


def lost(m: "Lease", e: Executor, origin: int) -> Executor:
    """The executor when an origin is not its own any more."""
    if m.protocol.early == "never" or m.protocol.early_counts == "in any case":
        return e
    gone = m.jobs_of(origin)
    return e._replace(expected=_less(e.expected, gone), tried=_less(e.tried, gone), early=_less(e.early, gone))


def without(e: Executor, job: int) -> Executor:
    """The executor when this job has started: it is named for that reason from now on."""
    names = ("expected", "tried", "early", "early_in_row")
    return e._replace(**{name: _less(getattr(e, name), (job,)) for name in names})


def _less(jobs: tuple[int, ...], gone: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(job for job in jobs if job not in gone)

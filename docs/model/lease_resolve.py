"""What an executor of the lease model makes of the answer to a cycle, void, refused, or missing. Compare `cycles.py`.

Where two cycles are under way and the older one has gone wrong, `lease_settle` makes one of them first.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from lease_admin import learns
from lease_cycle import acknowledged, put_together_anew
from lease_early import gone_wrong
from lease_look import asks, keep_its_own, look_now
from lease_server import drop
from lease_settle import settled, settles
from lease_state import (
    BLOCKED,
    COMMITTED,
    DEFERRED,
    DONE,
    HALF_SEEN,
    NAMED,
    QUEUED,
    REFUSED,
    UNANSWERED,
    UNKNOWN,
    VOID,
    WAITING,
    Cycle,
    Executor,
    Look,
    State,
    Statement,
    put_back,
    swap,
    with_executor,
)

if TYPE_CHECKING:
    from lease import Lease

__all__ = ["hears_of_its_cycle"]

Steps = Iterator[tuple[str, State]]


def hears_of_its_cycle(m: "Lease", s: State, i: int) -> Steps:
    """The answer to the oldest cycle; or its connection was lost, and the executor finds out."""
    e = s.executors[i]
    if not e.flights:
        return
    answer, two = e.flights[0].answer, len(e.flights) > 1
    if e.view is not None:
        if e.view.view is not None:
            seen = with_executor(s, i, e._replace(view=None))
            yield from settled(m, seen, i, e.view) if two else _resolves(m, seen, i, e.view)
        return
    if two and m.protocol.order == "as they come" and e.flights[1].answer == COMMITTED:
        yield acknowledged(m, s, i, 1)
    if answer == COMMITTED:
        yield acknowledged(m, s, i)
    elif answer != WAITING and two:
        yield from settles(m, s, i)
    elif answer != WAITING:
        yield from _goes_wrong(m, s, i, answer)


def _goes_wrong(m: "Lease", s: State, i: int, answer: str) -> Steps:
    """What becomes of the only cycle under way when it has not been acknowledged."""
    e = s.executors[i]
    if answer == REFUSED:
        yield from _shortened(m, s, i)
        return
    if answer == UNANSWERED and m.protocol.retry == "the same":
        yield _repeated(m, s, i)
    elif answer == UNANSWERED:
        yield put_together_anew(m, s, i)
    if answer == VOID and m.protocol.void == "do not look":
        yield _repeated(m, s, i)
    elif m.scenario.slow and answer == VOID:
        yield asks(m, s, i)
    elif m.protocol.cycle_number and not m.scenario.slow:
        yield from _looks(m, s, i)
    elif answer == VOID:
        lost = e._replace(flights=())
        for origin in range(len(e.holds)):
            lost = drop(m, lost, origin)
        yield f"{m.names(i)} hears that it is fenced, gives everything up", with_executor(s, i, lost)


def _repeated(m: "Lease", s: State, i: int) -> tuple[str, State]:
    """Send the cycle again: the same statement, word for word. The number makes sure that only one of them counts."""
    e = s.executors[i]
    return _sent_again(m, s, i, e, e.flights[0], f"{m.names(i)} sends")


def _sent_again(m: "Lease", s: State, i: int, e: Executor, cycle: Cycle, label: str) -> tuple[str, State]:
    e, cycle = gone_wrong(m, e, cycle)
    cycle = cycle._replace(answer=WAITING, troubled=m.protocol.in_flight > 1)
    sent = with_executor(s, i, e._replace(flights=(cycle,)), Statement(i, "cycle", cycle=cycle))
    return f"{label} a cycle again that {m.cycle_name(cycle)}", sent


def _shortened(m: "Lease", s: State, i: int) -> Steps:
    """Postgres has refused a value, or a row is locked: some of what was to be ended is named on, and left to a later
    cycle. What has been named behind it is taken back."""
    ends = s.executors[i].flights[0].ends
    for size in range(1, len(ends) + 1):
        for left_out in combinations(ends, size):
            yield _without(m, s, i, left_out)


def _without(m: "Lease", s: State, i: int, left_out: tuple[int, ...]) -> tuple[str, State]:
    e, rule, origin_of = s.executors[i], m.protocol, m.scenario.origin_of
    cycle = e.flights[0]
    deferred = [job for job in left_out if e.memory[job] == DONE]  # not those of an origin that is gone
    origins = {origin_of[job] for job in deferred}
    behind = {job for job in cycle.handed if origin_of[job] in origins} if rule.taken_back != "never" else set()
    for job in deferred:
        e = e._replace(memory=swap(e.memory, job, DEFERRED))
    for job in [k for k in behind if e.memory[k] == NAMED]:
        hold = e.holds[origin_of[job]]
        known = UNKNOWN if hold is None or hold.draining else QUEUED
        e = put_back(e, job, m.jobs_of(origin_of[job]), known, rule.deferral_counts == "the one before")
    running = {*cycle.running, *(deferred if rule.deferred == "stays named" else ())} - behind
    short = cycle._replace(
        ends=tuple(job for job in cycle.ends if job not in left_out),
        names=tuple(job for job in cycle.names if job not in behind),
        handed=tuple(job for job in cycle.handed if job not in behind),
        running=tuple(sorted(running)),
        less=tuple(sorted({*cycle.less, *left_out, *behind})),
    )
    what = ", ".join(map(m.job_name, left_out))
    return _sent_again(m, s, i, e, short, f"{m.names(i)} was refused, defers {what}, sends")


def _looks(m: "Lease", s: State, i: int) -> Steps:
    """`standing.sql`, a new statement: the cycle number, the fence, and the origins that are its own, in one snapshot.

    If the number is the cycle's, it had committed. If the fence has changed, what is no longer its own is given up,
    what a person has changed is put back, and the rest of the cycle is sent again with the new fence.
    """
    e = s.executors[i]
    flight, look = e.flights[0], look_now(m, s, i)
    if m.protocol.void == "origins, then fence" and flight.answer == VOID:
        kept = keep_its_own(m, e, look)._replace(flights=(flight._replace(answer=HALF_SEEN),))
        yield f"{m.names(i)} looks at its origins", with_executor(s, i, kept)
    else:
        yield from _resolves(m, s, i, look)


def _resolves(m: "Lease", s: State, i: int, look: Look) -> Steps:
    """What a look says of a cycle that was void or unanswered."""
    e, rule, name, view = s.executors[i], m.protocol.void, m.names(i), look.view
    assert view is not None
    flight = e.flights[0]
    fenced = view.fence != flight.fence
    if fenced and rule == "one look":
        e = keep_its_own(m, e, look)
    e, flight = gone_wrong(m, learns(m, e, look)._replace(fence=view.fence), flight)
    if view.cycle == flight.number:
        committed = e._replace(flights=(flight._replace(answer=COMMITTED, troubled=m.protocol.in_flight > 1),))
        yield f"{name} looks at its row: the cycle had committed", with_executor(s, i, committed)
    elif fenced:
        cycle = _rest(m, e, flight._replace(fence=view.fence), whole=rule == "send all again")
        if cycle.ends or cycle.again or cycle.running:
            yield _sent_again(m, s, i, e, cycle, f"{name} looks at its row: another fence; sends")
        else:
            nothing = e._replace(flights=(), early=flight.early if m.protocol.early_resent == "forgotten" else e.early)
            yield f"{name} looks at its row: another fence; nothing is left to send", with_executor(s, i, nothing)
    elif m.protocol.in_flight > 1:
        cycle = flight._replace(number=view.cycle + 1)
        yield _sent_again(m, s, i, e, cycle, f"{name} looks at its row: the cycle had overtaken another; sends")


def _rest(m: "Lease", e: Executor, cycle: Cycle, whole: bool) -> Cycle:
    """What remains of a cycle when some of its origins have been given up, and some of its jobs put back."""
    back = [job for job in cycle.names if e.memory[job] != NAMED]
    if m.protocol.in_flight > 1:  # also what an older one had named
        back += [job for job in cycle.running if e.memory[job] in (UNKNOWN, QUEUED, BLOCKED)]

    def stays(job: int) -> bool:
        origin = m.scenario.origin_of[job]
        hold = e.holds[origin]
        return whole or (job not in back and hold is not None and hold.epoch == cycle.epochs[origin])

    parts = (cycle.ends, cycle.again, cycle.names, cycle.running, cycle.handed, cycle.early, cycle.blocks)
    ends, again, names, running, handed, early, blocks = (tuple(filter(stays, part)) for part in parts)
    if m.protocol.early_resent == "all of it":
        early, running = cycle.early, tuple(sorted({*running, *cycle.early}))
    elif m.protocol.early_resent != "yes":
        early = cycle.early  # it still counts as what may be named
    return cycle._replace(
        ends=ends, again=again, names=names, running=running, handed=handed, early=early, blocks=blocks
    )

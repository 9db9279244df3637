"""The lease model's executors with two cycles under way, of which the older has gone wrong: `cycles.py`, `_settle`.

They wait for the answers to both. If the younger has committed, so has the older. If one of them is missing, the
executor bumps its own fence: then neither can commit any more, and the row says which have. What has not is put into
one cycle, and from there on all is as with one under way. Each of the two has been sent once: a void answer means that
it has not committed and never will.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lease_admin import learns
from lease_cycle import acknowledged
from lease_early import gone_wrong
from lease_look import asks, keep_its_own, look_now
from lease_state import (
    AGAIN,
    COMMITTED,
    DEFERRED,
    DONE,
    ENDING,
    FAILED,
    MISLAID,
    NAMED,
    OK,
    QUEUED,
    RUNNING,
    UNANSWERED,
    WAITING,
    Cycle,
    Disown,
    Look,
    State,
    Statement,
    put_back,
    with_executor,
)

if TYPE_CHECKING:
    from lease import Lease

__all__ = ["settled", "settles"]

Steps = Iterator[tuple[str, State]]


def settles(m: "Lease", s: State, i: int) -> Steps:
    """The older of two cycles was void, refused, or not answered."""
    e, rule, name = s.executors[i], m.protocol, m.names(i)
    older, younger = e.flights
    if e.disown is not None:
        if e.disown.answer == OK:
            yield from _disowned(m, s, i, e.disown)
        return
    if younger.answer == COMMITTED:
        both = e._replace(flights=(older._replace(answer=COMMITTED), younger))
        yield f"{name} hears that its younger cycle has committed, and so the older", with_executor(s, i, both)
        return
    if younger.answer == WAITING and rule.settles != "when the older is":
        return
    missing = older.answer == UNANSWERED or (younger.answer == UNANSWERED and rule.disowns != "if the older is unknown")
    if missing and rule.disowns == "never":
        yield from _looks(m, s, i)
    elif missing:
        asking = e._replace(disown=Disown(WAITING))
        yield f"{name} sends a disowning of its cycles", with_executor(s, i, asking, Statement(i, "disown"))
    else:
        yield f"{name} puts its cycles into one, which was void", _sent_as_one(m, s, i)


def _disowned(m: "Lease", s: State, i: int, answer: Disown) -> Steps:
    """Where the fence is larger by more than one, somebody else has bumped it as well; the look shows another fence."""
    e = s.executors[i]
    own = answer.alone or m.protocol.disowned == "in any case"
    known = (
        e._replace(disown=None, fence=answer.fence, bumps=e.bumps[answer.bumps :]) if own else e._replace(disown=None)
    )
    known = with_executor(s, i, known)
    yield from _looks(m, known, i)


def _looks(m: "Lease", s: State, i: int) -> Steps:
    if m.scenario.slow:
        yield asks(m, s, i)
    else:
        yield from settled(m, s, i, look_now(m, s, i))


def settled(m: "Lease", s: State, i: int, look: Look) -> Steps:
    """What a look says of both; what has not committed is sent as one."""
    e, view = s.executors[i], look.view
    assert view is not None
    s = with_executor(s, i, learns(m, keep_its_own(m, e, look), look)._replace(fence=view.fence))
    exactly, committed = m.protocol.committed == "the row's number", 0
    for flight in e.flights:
        if flight.number > view.cycle or (exactly and flight.number != view.cycle):
            break
        _, s = acknowledged(m, s, i)
        committed += 1
    left = bool(s.executors[i].flights)
    said = f"{m.names(i)} looks at its row: {committed} of its two cycles had committed"
    yield f"{said}; sends the rest as one" if left else said, _sent_as_one(m, s, i) if left else s


def _sent_as_one(m: "Lease", s: State, i: int) -> State:
    """One cycle of all that is left of those under way."""
    e, rule = s.executors[i], m.protocol
    held = [hold and hold.epoch for hold in e.holds]
    e, _ = gone_wrong(m, e, e.flights[0])
    for flight in e.flights[1:] if rule.merged == "the older" else ():
        for job in flight.ends + flight.again + flight.names:
            e = put_back(e, job, m.jobs_of(m.scenario.origin_of[job]), QUEUED if e.memory[job] == NAMED else MISLAID)
    memory = e.memory

    def kept(flight: Cycle, job: int) -> bool:
        origin = m.scenario.origin_of[job]
        return rule.merged_without == "nothing" or held[origin] == flight.epochs[origin] is not None

    flights = e.flights[:1] if rule.merged == "the older" else e.flights
    ends = [job for flight in flights for job in flight.ends if kept(flight, job)]
    again = [job for flight in flights for job in flight.again if kept(flight, job)]
    names = [job for flight in flights for job in flight.names if kept(flight, job) and memory[job] == NAMED]
    runs = [job for job, known in enumerate(memory) if known in (RUNNING, ENDING, DONE, DEFERRED, AGAIN, FAILED)]
    running = sorted({job for job in runs if held[m.scenario.origin_of[job]] is not None} - {*ends, *again} | {*names})
    epochs = tuple(now if now is not None else then for now, then in zip(held, flights[0].epochs, strict=True))
    parts = tuple(ends), tuple(again), tuple(names), tuple(running)
    bearing = flights[:1] if rule.taken_back == "of the older" else flights
    handed = tuple(job for flight in bearing for job in flight.handed if job in names)
    blocks = tuple(job for flight in flights for job in flight.blocks if job in again)
    cycle = Cycle(e.cycle + 1, e.fence, *parts, epochs, WAITING, troubled=True, handed=handed, blocks=blocks)
    deaf = tuple(st._replace(heard=False) if st.by == i and st.kind == "cycle" else st for st in s.server)
    one = e._replace(flights=(cycle,))
    return with_executor(s._replace(server=deaf), i, one, Statement(i, "cycle", cycle=cycle))

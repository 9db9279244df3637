"""The checks of the lease model.

Each seeded bug changes one choice of the protocol, in a scenario as small as shows what it breaks. `README.md` says
what each of them teaches, and where the code guards against it.
"""

from dataclasses import replace
from typing import Any

from check import FULL, NORMAL, QUICK, Check
from lease import Lease
from lease_state import Budget, Protocol, Scenario

__all__ = ["BUGS", "RIGHT", "changed", "two_origins"]

_HOLDS_X, _HOLDS_Y = (0, 0), (0, 1)  # executor A, origins X and Y
_ALONE = Scenario(wants=((0,), ()), start=(_HOLDS_X,), renews=())
_RIVAL = Scenario(start=(_HOLDS_X,), ideal=(1,), instant=("renew",))  # B's statements take no time
_EXPIRES = Scenario(start=(_HOLDS_X,), ideal=(1,), renews=(1,))  # and A cannot renew its lease


_ADMIN = Scenario(wants=((0,), ()), start=(_HOLDS_X,), renews=(), steady=(0,))  # A, undisturbed but by a person
_OLD_PAUSE = "from looks and from reads that say something new"
_SLOW = replace(_ADMIN, slow=True)
_BOTH = replace(_ADMIN, origin_of=(0, 1), wants=((0, 1), ()), start=((0, 0), (0, 1)), steady=(0, 1))
_SLOW_Y = replace(_SLOW, origin_of=(0, 1), wants=((0, 1), ()), start=(_HOLDS_Y,), steady=(0, 1), instant=("acquire",))


def two_origins(**changes: Any) -> Scenario:
    """A holds X and Y, one job in each; B wants X; nothing can happen to the lease of Y."""
    two = Scenario(
        origin_of=(0, 1),
        wants=((0, 1), (0,)),
        start=(_HOLDS_X, _HOLDS_Y),
        ideal=(1,),
        instant=("acquire", "renew"),
        steady=(1,),
    )
    return changed(two, **changes)


def changed(scenario: Scenario, **changes: Any) -> Scenario:
    """The scenario with some fields changed; fields of the budget may be given as such."""
    budget = {name: value for name, value in changes.items() if name in Budget._fields}
    fields = {name: value for name, value in changes.items() if name not in budget}
    return replace(scenario, **fields, budget=scenario.budget._replace(**budget))


def _bug(name: str, breaks: str, scenario: Scenario, **wrong: Any) -> Check:
    return Check(name, lambda: Lease(Protocol(**wrong), scenario), breaks)


def _right(name: str, scenario: Scenario, tier: int = NORMAL, walks: int = 0, **protocol: Any) -> Check:
    return Check(name, lambda: Lease(Protocol(**protocol), scenario), tier=tier, walks=walks)


BUGS = [
    _bug("the fence joins origin.epoch without a lock", "NM", _EXPIRES, fence="joined epoch"),
    _bug("the running set is written without a fence", "NM", _EXPIRES, fence="unfenced running set"),
    _bug("a job starts without a look at the deadline", "I3", changed(_EXPIRES, pauses=1), look_before_start=False),
    _bug("the deadline counts from the answer", "I3", changed(_EXPIRES, start=()), deadline_from="answer"),
    _bug("the clock stands still in a pause", "I3", changed(_EXPIRES, pauses=1), clock="stands still"),
    _bug("a handler outlives its lease", "I3", _EXPIRES, cancellable=False, exit_at_deadline=False),
    _bug("a takeover reads the running set too early", "NM", changed(_EXPIRES, ideal=()), takeover="one snapshot"),
    _bug("cycles have no number", "RN", changed(_ALONE, losses=1), cycle_number=False),
    _bug("two processes share an identity", "I3", _EXPIRES, identity="shared"),
    _bug("a restart keeps its identity", "LO", changed(_ALONE, crashes=1, restarts=1), identity="name"),
    _bug("a release leaves jobs named", "NM", changed(_ALONE, drains=1), release="at once"),
    _bug("a successor starts before the commit", "RN", _ALONE, successor="at once"),
    _bug("a transactional end has no fence", "FE", changed(_EXPIRES, transactional=(0, 1)), finish="is not fenced"),
    _bug(
        "a transactional end reads the epoch, does not lock it",
        "FE",
        changed(_EXPIRES, transactional=(0, 1)),
        finish="reads the epoch",
    ),
    _bug(
        "an origin is acquired again with a cycle under way",
        "I2",
        changed(_ALONE, start=(), renews=(0,), losses=1),
        reacquire="with a cycle under way",
    ),
    _bug(
        "an origin is acquired again with handlers running",
        "I3",
        changed(_ALONE, start=(), renews=(0,), losses=1),
        reacquire="with handlers running",
    ),
    _bug(
        "after a void cycle, origins are read before the fence",
        "NM",
        two_origins(steady=(), wants=((0, 1), (0, 1)), renews=(1,), pauses=1),
        void="origins, then fence",
    ),
    _bug("after a void cycle, all of it is sent again", "NM", two_origins(), void="send all again"),
    _bug("after a void cycle, nobody looks why", "LV", two_origins(renews=(1,)), void="do not look"),
    _bug(
        "the fence is taken from an acquire",
        "NM",
        two_origins(start=(_HOLDS_X,), instant=("renew",), renews=(1,), pauses=1),
        new_fence="from acquire",
    ),
    _bug(
        "an unanswered cycle is put together anew",
        "RN",
        changed(_ALONE, origin_of=(0, 1), wants=((0, 1), ()), steady=(0, 1), losses=1),
        retry="put together anew",
    ),
    _bug(
        "a cancelled attempt is not recorded",
        "I2",
        changed(_ALONE, transactional=(0,), drains=1),
        cancelled="forgotten",
    ),
    _bug(
        "a server restart makes it forget what is under way",
        "I2",
        changed(_ALONE, outages=1),
        outage="forget what is under way",
    ),
    _bug("a person's action does not bump the fence", "I8", changed(_ADMIN, cancels=1), action="no fence"),
    _bug("a person bumps the fence before the transaction", "I8", changed(_ADMIN, cancels=1), action="fence first"),
    _bug("a person is told what ran before the lock", "I8", changed(_ADMIN, cancels=1), action="one snapshot"),
    _bug(
        "a person locks the executor before the origin",
        "LV",
        changed(_EXPIRES, cancels=1),
        action="executor, then origin",
    ),
    _bug("the holder does not put back what it had chosen", "I8", changed(_ADMIN, cancels=1), put_back="what waits"),
    _bug("the holder puts nothing back", "I8", changed(_ADMIN, cancels=1), put_back="nothing"),
    _bug(
        "concerned: a read of before a look counts",
        "I8",
        changed(_SLOW, unread=(1,), targets=(1,), cancels=1),
        stale_reads="count",
    ),
    _bug(
        "concerned: a bump that nobody explains changes nothing",
        "I8",
        changed(_BOTH, by_type=True, paused=(1,), halts=1),
        forgets="X, whatever has happened",
    ),
    _bug(
        "concerned: one bump is explained, of two",
        "I8",
        changed(_BOTH, by_type=True, paused=(1,), halts=1, cancels=1),
        forgets="X, whatever has happened",
    ),
    _bug(
        "what is chosen of a paused type is not put back",
        "I8",
        changed(_ADMIN, by_type=True, halts=1),
        put_back="if the pause is news",
    ),
    _bug(
        "a look older than a read sets the pause back",
        "I8",
        changed(_SLOW_Y, halts=1, losses=1),
        pause=_OLD_PAUSE,
    ),
    _bug(
        "a look spares what was acquired since it was sent",
        "I8",
        changed(_SLOW_Y, origin_of=(0, 0, 1), targets=(0, 1), cancels=2, instant=()),
        stale_look="spares what is newer",
    ),
    _bug(
        "a failure counts of a job that somebody has ended",
        "LV",
        changed(_ADMIN, targets=(0, 1), cancels=1, failures=1),
        failure="counts if it was heard",
    ),
    _bug(
        "a failure counts although its answer was lost",
        "LV",
        changed(_ADMIN, targets=(0, 1), releases=1, failures=1, losses=1),
        failure="counts",
    ),
    _bug(
        "a look-up that fails is not repeated",
        "LV",
        changed(_SLOW, blocked=(0,), releases=1, losses=1),
        look_up="once",
        pause=_OLD_PAUSE,
    ),
]

RIGHT = [
    _right("alone, two connections lost", changed(_ALONE, start=(), renews=(0,), losses=2)),
    _right("alone, a lease that expires is given up, connection lost", changed(_ALONE, losses=1), QUICK,
           expired="give up and acquire"),
    _right("concerned: a person cancels, another origin, connections lost", changed(_BOTH, cancels=1, losses=2), QUICK),
    _right("concerned: a person cancels twice, another origin", changed(
        _BOTH, origin_of=(0, 0, 1), targets=(0, 1), cancels=2, slow=True, unread=(1,)), QUICK),
    _right("concerned: a person cancels, and pauses a type", changed(
        _BOTH, by_type=True, paused=(1,), halts=1, cancels=1, slow=True)),
    _right("also right: everything is forgotten", changed(_SLOW_Y, cancels=1, halts=1, losses=1, instant=()),
           forgets="everything"),
    _right("a person cancels, twice", changed(_ADMIN, targets=(0, 1), cancels=2), QUICK),
    _right("a person pauses and resumes a type", changed(_ADMIN, by_type=True, halts=1, resumes=1, losses=1), QUICK),
    _right("a person releases a blocked job, connection lost",
           changed(_SLOW, blocked=(0,), releases=1, losses=1), QUICK),
    _right("a handler gives up, a person cancels or releases", changed(
        _ADMIN, targets=(0, 1), cancels=1, releases=1, failures=1), QUICK),
    _right("a handler gives up, a person releases, connection lost", changed(
        _SLOW, targets=(0, 1), releases=1, failures=1, losses=1)),
    _right("a takeover, a handler gives up, a person releases", changed(
        _EXPIRES, origin_of=(0,), releases=1, failures=1, crashes=1), FULL),
    _right("a person cancels, connection lost", changed(_SLOW, targets=(0, 1), cancels=1, losses=1)),
    _right("a person cancels, pauses and resumes", changed(_SLOW, cancels=1, halts=1, resumes=1)),
    _right("a person cancels twice, another origin", changed(
        _SLOW_Y, origin_of=(0, 0, 1), targets=(0, 1), cancels=2, instant=())),
    _right("a person pauses, another origin, connection lost", changed(_SLOW_Y, halts=1, losses=1, instant=()), FULL),
    _right("a takeover, a person cancels", changed(_EXPIRES, origin_of=(0,), cancels=1)),
    _right("a takeover, a person cancels, transactional", changed(
        _EXPIRES, origin_of=(0,), transactional=(0,), cancels=1)),
    _right("a takeover, a person pauses", changed(_EXPIRES, origin_of=(0,), halts=1), FULL),
    _right("a takeover, a person pauses and resumes", changed(_EXPIRES, origin_of=(0,), halts=1, resumes=1), FULL),
    _right("a takeover, a person cancels, crash", changed(_EXPIRES, origin_of=(0,), cancels=1, crashes=1)),
    _right("a rival, a person cancels", changed(_RIVAL, targets=(0, 1), cancels=1), FULL),
    _right("a rival, crash", changed(_RIVAL, crashes=1)),
    _right("a rival, pause", changed(_RIVAL, pauses=1)),
    _right("a rival, connection lost", changed(_RIVAL, losses=1)),
    _right("a rival, drain and release", changed(_RIVAL, drains=1)),
    _right("a rival, the server restarts", changed(_RIVAL, outages=1)),
    _right("a rival, handlers that cannot be cancelled", _RIVAL, cancellable=False),
    _right("a rival, transactional, connection lost", changed(_RIVAL, transactional=(0, 1), losses=1)),
    _right("a rival, transactional and plain, drain", changed(_RIVAL, transactional=(0,), drains=1)),
    _right("a rival, expired leases are given up, pause", changed(_RIVAL, pauses=1), expired="give up and acquire"),
    _right("two origins", two_origins()),
    _right("two origins, connection lost", two_origins(losses=1, renews=(1,))),
    _right("two origins, no renewals, pause", two_origins(pauses=1, renews=(1,))),
    _right("also right: acquiring its own bumps its fence", changed(_ALONE, start=(), renews=(0,), losses=2), FULL,
           reacquire="with a cycle under way", own_origin="fenced first"),
    _right("two equals", Scenario(start=(_HOLDS_X,), instant=("renew",)), FULL),
    _right("two equals, pause", Scenario(start=(_HOLDS_X,), instant=("renew",), budget=Budget(pauses=1)), FULL),
    _right("a rival, pause and crash", changed(_RIVAL, pauses=1, crashes=1), FULL),
    _right("a rival, pause and connection lost", changed(_RIVAL, pauses=1, losses=1), FULL),
    _right("a rival, renewals take time, pause", changed(_RIVAL, instant=(), pauses=1), FULL),
    _right("a rival, transactional, pause", changed(_RIVAL, transactional=(0, 1), pauses=1), FULL),
    _right("two origins, drain", two_origins(drains=1), FULL),
    _right("two origins, two jobs in one, connection lost", two_origins(
        origin_of=(0, 0, 1), losses=1, renews=(1,)), FULL),
    _right("walks: everything at once", Scenario(faulty=(0, 1), lease=3, budget=Budget(3, 1, 3, 1, 0, 1)),
           walks=300),
    _right("walks: everything at once, transactional", Scenario(
        transactional=(0,), faulty=(0, 1), lease=3, budget=Budget(2, 1, 3, 1, 0, 1)), walks=300),
    _right("walks: everything at once, two origins", Scenario(
        origin_of=(0, 0, 1), transactional=(1,), wants=((0, 1), (0, 1)), faulty=(0, 1), lease=3,
        budget=Budget(2, 1, 3, 2, 0, 1)), walks=300),
]  # fmt: skip

"""The checks of the lease model where a cycle that ends a job names the next one of the group, and may be refused.

A refusal stands for all that makes an executor leave an outcome out of a cycle: a value that Postgres does not take, a
row that somebody else has locked.
"""

from typing import Any

from check import FULL, NORMAL, QUICK, Check
from lease import Lease
from lease_checks import changed, two_origins
from lease_state import Budget, Protocol, Scenario

__all__ = ["BUGS_OF_HAND_OVER", "RIGHT_OF_HAND_OVER"]

# A has one group of three jobs to itself; a person changes the last one.
_GROUP = Scenario(origin_of=(0, 0, 0), wants=((0,), ()), start=((0, 0),), renews=(), steady=(0,), targets=(2,))
_LEASED = changed(_GROUP, renews=(0,), steady=())
_EXPIRES = Scenario(origin_of=(0, 0, 0), start=((0, 0),), ideal=(1,), renews=(1,))  # B takes it over
# And another origin, which A reads later, so that one cycle has something to say after the other.
_TWO = changed(_GROUP, origin_of=(0, 0, 0, 1), wants=((0, 1), ()), start=((0, 0), (0, 1)), steady=(0, 1), unread=(3,))
_SMALL = changed(_TWO, origin_of=(0, 0, 1), unread=(2,), targets=(0, 1))
_TAKEN = two_origins(origin_of=(0, 0, 1), unread=(2,), renews=(1,))
_WALKS = Scenario(
    origin_of=(0, 0, 0, 1), wants=((0, 1), (0, 1)), faulty=(0, 1), lease=3, budget=Budget(2, 1, 3, 2, 0, 1, refusals=3)
)
_PERSON_WALKS = changed(
    _WALKS,
    slow=True,
    late=(1,),
    targets=(0, 1, 2),
    paused=(1,),
    pauses=1,
    drains=1,
    cancels=1,
    halts=1,
    resumes=1,
    releases=1,
    failures=1,
)


def _bug(name: str, breaks: str, scenario: Scenario, **wrong: Any) -> Check:
    return Check(f"hand-over: {name}", lambda: Lease(Protocol(**wrong), scenario), breaks)


def _right(name: str, scenario: Scenario, tier: int = NORMAL, walks: int = 0, **protocol: Any) -> Check:
    return Check(f"hand-over: {name}", lambda: Lease(Protocol(**protocol), scenario), tier=tier, walks=walks)


BUGS_OF_HAND_OVER = [
    _bug("the next job starts when the cycle is sent", "I4", _GROUP, successor="at once if handed over"),
    _bug("of a job that is to run again", "I4", changed(_GROUP, drains=1), hand_over="of any outcome"),
    _bug("to a job that is paused", "I8", changed(_GROUP, paused=(1,), halts=1), hand_over="of what is paused"),
    _bug("the end is deferred, the next job stays named", "I4", changed(_GROUP, refusals=1), taken_back="never"),
    _bug("the end is deferred, the group goes on", "I4", changed(_GROUP, refusals=1), deferral_counts="nothing"),
    _bug("the end is deferred, the job named no more", "RN", changed(_GROUP, refusals=1), deferred="named no more"),
    _bug("void, then deferred, the group goes on", "I4", changed(_GROUP, cancels=1, refusals=1), void_counts="nothing"),
    _bug("when the one is over, the other counts no more", "I4", _GROUP, ended="frees the group"),
    _bug(
        "of two that are one, only the older takes back", "I4", changed(_TWO, refusals=2), in_flight=2,
        taken_back="of the older",
    ),
    _bug(
        "by the younger, whose answer is heard first", "RN", changed(_GROUP, unread=(1, 2), losses=1), in_flight=2,
        hand_over="of any end", order="as they come",
    ),
]  # fmt: skip

RIGHT_OF_HAND_OVER = [
    _right("refusals, connections lost", changed(_GROUP, refusals=2, losses=2), QUICK),
    _right("a drain, a refusal, connection lost", changed(_GROUP, drains=1, refusals=1, losses=1), QUICK),
    _right("a late job, refusals, connection lost", changed(_GROUP, late=(1,), refusals=2, losses=1), QUICK),
    _right("a person cancels, a refusal, connection lost", changed(
        _GROUP, targets=(0, 1, 2), cancels=1, refusals=1, losses=1)),
    _right("a person cancels, a late job, a refusal", changed(_GROUP, late=(1,), cancels=1, refusals=1, losses=1)),
    _right("a person cancels twice, refusals", changed(_GROUP, targets=(0, 1, 2), cancels=2, refusals=2)),
    _right("a person pauses and resumes, a refusal", changed(_GROUP, paused=(1,), halts=1, resumes=1, refusals=1)),
    _right("a person pauses a type, a refusal", changed(
        _GROUP, paused=(1,), by_type=True, halts=1, resumes=1, refusals=1)),
    _right("a lease that is renewed, refusals, connections lost", changed(_LEASED, refusals=2, losses=2), FULL),
    _right("expired leases are given up, a refusal", changed(_LEASED, refusals=1, losses=1),
           expired="give up and acquire"),
    _right("the server restarts, a refusal, connection lost", changed(_LEASED, outages=1, refusals=1, losses=1), FULL),
    _right("a drain, the lease is renewed, a refusal", changed(_LEASED, drains=1, refusals=1)),
    _right("a takeover, a refusal", changed(_EXPIRES, refusals=1), FULL),
    _right("two cycles, refusals, connection lost", changed(_TWO, refusals=2, losses=1), in_flight=2),
    _right("two cycles, a late job, refusals", changed(_TWO, late=(1,), refusals=1, losses=1), in_flight=2),
    _right("two cycles, the server restarts, refusals", changed(_TWO, outages=1, refusals=2), in_flight=2),
    _right("two cycles, a person cancels, refusals", changed(_SMALL, cancels=1, refusals=2), in_flight=2),
    _right("two cycles, a person cancels, connection lost", changed(
        _TWO, targets=(0, 1, 2), cancels=1, refusals=1, losses=1), FULL, in_flight=2),
    _right("two cycles, a drain, a refusal", changed(_SMALL, drains=1, refusals=1), in_flight=2),
    _right("two cycles, a person pauses and resumes, refusals", changed(
        _TWO, paused=(1,), halts=1, resumes=1, refusals=2), FULL, in_flight=2),
    _right("two cycles, a drain, a person cancels, a refusal", changed(
        _SMALL, drains=1, cancels=1, refusals=1), FULL, in_flight=2),
    _right("two cycles, a takeover, a refusal", changed(_TAKEN, refusals=1), FULL, in_flight=2),
    _right("also right: not before the end is acknowledged", changed(
        _TWO, cancels=1, refusals=2), in_flight=2, hand_over="after the commit"),
    _right("also right: of an end in the older cycle", changed(
        _TWO, cancels=1, refusals=2, losses=1), FULL, in_flight=2, hand_over="of any end"),
    _right("walks: everything at once", changed(_WALKS, transactional=(3,)), walks=80, in_flight=2),
    _right("walks: everything at once, a person", _PERSON_WALKS, walks=80, in_flight=2),
]  # fmt: skip

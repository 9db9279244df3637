"""The checks of the lease model where jobs are named before they are read."""

from dataclasses import replace
from typing import Any

from check import FULL, NORMAL, QUICK, Check
from lease import Lease
from lease_checks import changed, two_origins
from lease_state import Budget, Protocol, Scenario

__all__ = ["BUGS_OF_EARLY", "RIGHT_OF_EARLY"]

# A has one group to itself, reads it later, and is told to expect two of its jobs, or one job twice.
_ONE = Scenario(
    origin_of=(0,), wants=((0,), ()), start=((0, 0),), renews=(), steady=(0,), unread=(0,), budget=Budget(expects=2)
)  # fmt: skip
_GROUP = changed(_ONE, origin_of=(0, 0), unread=(0, 1), targets=(0, 1))
_THREE = changed(_GROUP, origin_of=(0, 0, 0), unread=(1, 2))
_LATE = changed(_GROUP, unread=(), late=(1,))  # the second one has yet to be committed
_SLOW = changed(_LATE, slow=True, expects=1)
_BOTH = changed(_GROUP, origin_of=(0, 1), wants=((0, 1), ()), start=((0, 0), (0, 1)), steady=(0, 1), expects=1)
_EXPIRES = Scenario(
    origin_of=(0,), start=((0, 0),), ideal=(1,), renews=(1,), unread=(0,), budget=Budget(expects=1)
)  # fmt: skip
_RIVAL = changed(_EXPIRES, renews=(0, 1), instant=("renew",))
_LATE_RIVAL = changed(_RIVAL, unread=(), late=(0,))
_TAKEN = changed(two_origins(renews=(1,), unread=(0, 1)), expects=1)  # B takes X over, A keeps Y
_WALKS = Scenario(
    origin_of=(0, 0, 0, 1), wants=((0, 1), (0, 1)), faulty=(0, 1), lease=3, late=(1, 3),
    budget=Budget(2, 1, 3, 2, 0, 1, refusals=2, expects=6, aborts=1),
)  # fmt: skip
_PERSON_WALKS = changed(
    _WALKS, slow=True, targets=(0, 1, 2), paused=(1,), pauses=1, cancels=1, halts=1, resumes=1, refusals=1
)


def _early(**changes: Any) -> Protocol:
    return replace(Protocol(early="after the commit"), **changes)


def _before(**changes: Any) -> dict[str, Any]:
    return {"early": "before the commit", "early_asks": "when it names none", **changes}


def _bug(name: str, breaks: str, scenario: Scenario, **wrong: Any) -> Check:
    return Check(f"early: {name}", lambda: Lease(_early(**wrong), scenario), breaks)


def _right(name: str, scenario: Scenario, tier: int = NORMAL, walks: int = 0, **protocol: Any) -> Check:
    return Check(f"early: {name}", lambda: Lease(_early(**protocol), scenario), tier=tier, walks=walks)


BUGS_OF_EARLY = [
    _bug("a job starts when the cycle is sent", "RN", _ONE, early_from="its sending"),
    _bug("a job starts although another cycle has been sent", "RN", _GROUP, early_until="it is taken"),
    _bug("what has started is named no more", "RN", _GROUP, early_listed=False),
    _bug("void, it counts", "RN", changed(_GROUP, cancels=1), early_resent="forgotten"),
    _bug("lost and sent again without it, it counts", "RN", changed(_ONE, losses=2), early_resent="forgotten"),
    _bug("refused and sent with less, it counts", "RN", changed(_BOTH, unread=(1,), refusals=1),
         early_resent="forgotten"),
    _bug("void, it is sent again with what is another's", "NM", _TAKEN, early_resent="all of it"),
    _bug("the cycle that a release waits for names it", "NM", changed(_LATE, drains=1), early_of="what drains, too"),
    _bug("of an origin that is another's", "NM", changed(_TAKEN, start=((0, 0), (1, 1)), wants=((0,), (1,))),
         early_of="any origin"),
    _bug("it starts without a look at the deadline", "I3", changed(_EXPIRES, pauses=1),
         early_start="order, group, pause, look"),
    _bug("it starts before it is read in its order", "I4", changed(_LATE, unread=(0,)),
         early_start="group, deadline, pause, look"),
    _bug("it starts although its group is busy", "I4", _LATE, early_start="order, deadline, pause, look"),
    _bug("it starts although it was paused before", "I8", changed(_ONE, halts=1),
         early_start="order, group, deadline, look"),
    _bug("it starts while a look is under way", "LV", changed(_SLOW, cancels=1, expects=2),
         **_before(early_start="order, group, deadline, pause")),
    _bug("named under an earlier lease, it counts", "RN", _RIVAL, early_counts="in any case"),
    _bug("read with it, void, it counts", "I8", changed(_SLOW, late=(), unread=(0, 1), cancels=1),
         early_reads="when it is void, too"),
    _bug("read with it, behind others", "I4", _GROUP, early_reads="what stands behind others"),
    _bug("read with it, although it is paused", "I8", changed(_LATE, paused=(1,), halts=1, expects=1),
         early_reads="what is paused, too"),
    _bug("before the commit, and acquired again at once", "NM", changed(_LATE_RIVAL, crashes=1),
         **_before(early_asks="at once")),
    _bug("before the commit, and never named no more", "LV", changed(_ONE, steady=()),
         **_before(early_tidy="never", expired="give up and acquire")),
    _bug("two cycles: it starts with the younger under way", "RN", _BOTH, in_flight=2,
         early_from="the acknowledgement of either"),
    _bug("two cycles: a release counts one of an earlier drain", "NM", changed(_ONE, drains=2), in_flight=2,
         barrier="one of an earlier drain"),
]  # fmt: skip

RIGHT_OF_EARLY = [
    _right("a group of two", _GROUP, QUICK),
    _right("a group of three", _THREE, QUICK),
    _right("a late job, refusals", changed(_LATE, refusals=2), QUICK),
    _right("a late job, connections lost", changed(_LATE, losses=2)),
    _right("a late job that comes first, connection lost", changed(_GROUP, unread=(1,), late=(0,), losses=1)),
    _right("transactional, connection lost", changed(_LATE, transactional=(0, 1), losses=1)),
    _right("the server restarts, connection lost", changed(_LATE, outages=1, losses=1, expects=1)),
    _right("a drain, connection lost", changed(_LATE, drains=1, losses=1, expects=1)),
    _right("two drains", changed(_LATE, drains=2)),
    _right("a person cancels twice", changed(_LATE, cancels=2)),
    _right("a person cancels, connection lost", changed(_LATE, cancels=1, losses=1, expects=1)),
    _right("a person cancels, reads and looks take time", changed(_SLOW, cancels=1)),
    _right("a person pauses and resumes", changed(_LATE, paused=(1,), halts=1, resumes=1, expects=1)),
    _right("a person pauses a type and resumes it", changed(
        _LATE, paused=(1,), by_type=True, halts=1, resumes=1, expects=1)),
    _right("expired leases are given up", changed(_GROUP, steady=(), expects=1), expired="give up and acquire"),
    _right("a takeover, a group of two", changed(_EXPIRES, origin_of=(0, 0), unread=(0, 1)), FULL),
    _right("a takeover, a late job behind another", changed(_EXPIRES, origin_of=(0, 0), unread=(), late=(1,)), FULL),
    _right("a takeover, another origin", _TAKEN, FULL),
    _right("a rival, a late job, crash", changed(_LATE_RIVAL, crashes=1)),
    _right("a rival, pause", changed(_RIVAL, pauses=1), FULL),
    _right("a rival, connection lost", changed(_RIVAL, losses=1), FULL),
    _right("two cycles, connection lost", changed(_BOTH, losses=1), in_flight=2),
    _right("two cycles, a person cancels", changed(_BOTH, cancels=1), in_flight=2),
    _right("two cycles, two drains", changed(_GROUP, drains=2), in_flight=2),
    _right("read with it, a group of two", _GROUP, QUICK, early_reads="yes"),
    _right("read with it, a late job, connections lost", changed(_LATE, losses=2), early_reads="yes"),
    _right("read with it, a late job, refusals", changed(_LATE, refusals=2), early_reads="yes"),
    _right("read with it, a drain, connection lost", changed(_LATE, drains=1, losses=1, expects=1), early_reads="yes"),
    _right("read with it, the server restarts", changed(_LATE, outages=1, losses=1, expects=1), early_reads="yes"),
    _right("read with it, a person cancels, reads take time", changed(_SLOW, cancels=1), early_reads="yes"),
    _right("read with it, a person cancels what is unread", changed(_SLOW, late=(), unread=(0, 1), cancels=1),
           early_reads="yes"),
    _right("read with it, a person pauses and resumes", changed(
        _LATE, paused=(1,), halts=1, resumes=1, expects=1), early_reads="yes"),
    _right("read with it, a rival, crash", changed(_RIVAL, crashes=1), early_reads="yes"),
    _right("read with it, a rival, pause", changed(_RIVAL, pauses=1), FULL, early_reads="yes"),
    _right("read with it, a takeover of another origin", _TAKEN, FULL, early_reads="yes"),
    _right("read with it, two cycles, two drains", changed(_GROUP, drains=2), in_flight=2, early_reads="yes"),
    _right("before the commit, rolled back", changed(_LATE, aborts=1), QUICK, **_before()),
    _right("before the commit, connections lost", changed(_LATE, losses=2), **_before()),
    _right("before the commit, a drain, connection lost", changed(_LATE, drains=1, losses=1, expects=1), **_before()),
    _right("before the commit, reads and looks take time", changed(_SLOW, cancels=1), **_before()),
    _right("before the commit, expired leases are given up", changed(_LATE, steady=(), expects=1),
           **_before(expired="give up and acquire")),
    _right("before the commit, a rival, crash", changed(_LATE_RIVAL, crashes=1), **_before()),
    _right("before the commit, a rival, pause", changed(_LATE_RIVAL, pauses=1), FULL, **_before()),
    _right("also right: it is named again with the rest", _TAKEN, FULL, early_resent="yes"),
    _right("also right: the younger of two names early", changed(_GROUP, drains=2, losses=1, expects=1), FULL,
           in_flight=2, early_second="yes"),
    _right("walks: everything at once", _WALKS, walks=80),
    _right("walks: everything at once, two cycles", _WALKS, walks=60, in_flight=2),
    _right("walks: everything at once, a person, two cycles", _PERSON_WALKS, walks=60, in_flight=2),
    _right("walks: read with it, a person, two cycles", _PERSON_WALKS, walks=60, in_flight=2, early_reads="yes"),
    _right("walks: before the commit", changed(_WALKS, transactional=(1, 3)), walks=60, **_before()),
    _right("walks: before the commit, a person, two cycles", _PERSON_WALKS, walks=60, **_before(in_flight=2)),
]  # fmt: skip

"""The checks of the lease model with two cycles under way at a time."""

from typing import Any

from check import FULL, NORMAL, QUICK, Check
from lease import Lease
from lease_checks import changed, two_origins
from lease_state import Budget, Protocol, Scenario

__all__ = ["BUGS_OF_TWO", "RIGHT_OF_TWO"]

# A has both origins to itself and reads one of them later, so that one cycle has something to say after the other.
_PAIR = Scenario(
    origin_of=(0, 1), wants=((0, 1), ()), start=((0, 0), (0, 1)), renews=(), steady=(0, 1), unread=(1,)
)  # fmt: skip
_THREE = changed(_PAIR, origin_of=(0, 0, 1), unread=(2,), targets=(0, 1))
_X_LATER = changed(_PAIR, unread=(0,))
_SLOW = changed(_X_LATER, slow=True)
_TAKEN = two_origins(unread=(0,), renews=(1,))  # B takes X over
_WALKS = Scenario(
    origin_of=(0, 0, 1), wants=((0, 1), (0, 1)), faulty=(0, 1), lease=3, budget=Budget(2, 1, 3, 2, 0, 1, refusals=2)
)
_PERSON_WALKS = changed(
    _WALKS, slow=True, targets=(0, 1), pauses=1, losses=4, drains=1, refusals=1, cancels=1, halts=1, resumes=1
)


def _bug(name: str, breaks: str, scenario: Scenario, **wrong: Any) -> Check:
    return Check(f"two cycles: {name}", lambda: Lease(Protocol(in_flight=2, **wrong), scenario), breaks)


def _right(name: str, scenario: Scenario, tier: int = NORMAL, walks: int = 0, **protocol: Any) -> Check:
    return Check(
        f"two cycles: {name}", lambda: Lease(Protocol(in_flight=2, **protocol), scenario), tier=tier, walks=walks
    )


BUGS_OF_TWO = [
    _bug("the younger leaves out what the older names", "RN", _PAIR, carries="what runs"),
    _bug("the younger's answer is heard first", "RN", _PAIR, order="as they come"),
    _bug("one follows a cycle that has been sent again", "RN", changed(_PAIR, losses=1), second="after a repetition"),
    _bug("the younger's answer is not waited for", "RN", changed(_THREE, refusals=1), settles="when the older is"),
    _bug("one is missing, they are looked up, not disowned", "RN", changed(_PAIR, losses=1), disowns="never"),
    _bug(
        "the younger is missing, nothing is disowned",
        "RN",
        changed(_THREE, refusals=1, losses=1),
        disowns="if the older is unknown",
    ),
    _bug(
        "any new fence is taken for the disowning's",
        "I8",
        changed(_X_LATER, cancels=1, losses=1),
        disowned="in any case",
    ),
    _bug("only the older is sent again", "LV", changed(_PAIR, losses=1), merged="the older"),
    _bug("after disowning, all of it is sent again", "FE", changed(_TAKEN, losses=1), merged_without="nothing"),
    _bug(
        "what the younger has chosen is not put back",
        "I8",
        changed(_X_LATER, cancels=1, losses=1),
        put_back_of="the older",
    ),
    _bug(
        "a release counts a cycle that was under way", "NM", changed(_PAIR, drains=1), barrier="one that was under way"
    ),
    _bug(
        "acquired again with the younger under way",
        "I2",
        changed(_PAIR, steady=(1,)),
        under_way="the older",
        expired="give up and acquire",
    ),
]

RIGHT_OF_TWO = [
    _right("connections lost", changed(_THREE, losses=3), QUICK),
    _right("refusals, connection lost", changed(_THREE, refusals=2, losses=1), QUICK),
    _right("the server restarts, connection lost", changed(_THREE, outages=1, losses=1), QUICK),
    _right("a person cancels, connection lost, a refusal", changed(_X_LATER, cancels=1, losses=1, refusals=1)),
    _right("a person cancels twice, connection lost", changed(_THREE, cancels=2, losses=1)),
    _right("a person pauses and resumes, connection lost", changed(_X_LATER, halts=1, resumes=1, losses=1)),
    _right("a person cancels, slow looks, connection lost", changed(_SLOW, cancels=1, losses=1)),
    _right("drain and release, connection lost", changed(_X_LATER, drains=1, losses=1)),
    _right("expired leases are given up", changed(_PAIR, steady=(1,)), expired="give up and acquire", under_way="both"),
    _right("a takeover", _TAKEN),
    _right("a takeover, connection lost", changed(_TAKEN, losses=1), FULL),
    _right("a takeover, a person cancels", changed(_TAKEN, cancels=1), FULL),
    _right("a rival", two_origins(unread=(0,)), FULL),
    _right("a rival, connection lost", two_origins(unread=(1,), losses=1), FULL),
    _right("walks: everything at once, transactional", changed(_WALKS, transactional=(1,)), walks=200),
    _right("walks: everything at once, a person", _PERSON_WALKS, walks=200),
]

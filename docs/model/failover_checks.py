"""The checks of the failover model.

Most scenarios let only some loops of A take time, and B none: what a late answer does to a server that goes on is the
lease model's part. What is late here comes from a server that is gone, or counts no more.
"""

from dataclasses import replace
from typing import Any

from check import NORMAL, QUICK, Check
from failover import Failover
from failover_state import LOOPS, Budget, Protocol, Scenario

__all__ = ["BUGS_OF_FAILOVER", "RIGHT_OF_FAILOVER"]

_ALONE = Scenario(jobs=("reused",), wants=(True, False))  # A, and an id that is handed out twice; the primary dies
_CYCLES = replace(_ALONE, loops=("cycles",))
_TWO = Scenario(jobs=("common",))  # A holds X, B wants it
_FREE = replace(_TWO, start=None)
_RELEASES = replace(_FREE, fresh=(1,), let_go=True)
_STARTS = replace(_TWO, fresh=(1,))  # B, after the promotion
_STARTS_FREE = replace(_FREE, fresh=(1,))
# The former primary lives on. A alone: one of its loops meets the new server, the others are connected to the former.
_LIVES = Scenario(jobs=("common",), wants=(True, False), lives=True)
_BY_A_CYCLE = replace(_LIVES, stay=("control", "renewals", "reads"))
_BY_A_RENEWAL = replace(_LIVES, stay=("control", "reads", "cycles"))
_BY_A_HANDLER = replace(_LIVES, stay=("control", "renewals", "reads", "cycles"), transactional=(0,))
# And B, which begins after the promotion.
_LATE_GRANT = replace(_STARTS, start=None, lives=True, loops=("control",), stay=("control",))
# A, which begins after the promotion, and reaches the former primary first.
_STRAYS = replace(_LATE_GRANT, fresh=(0,), loops=(), budget=Budget(strays=1))
_RENEWS_THERE = replace(_STARTS, start=None, lives=True, stay=("renewals",))
_READS_THERE = replace(_STARTS, lives=True, stay=("control", "renewals", "cycles"))
_WALKS = Scenario(
    jobs=("common", "reused"),
    transactional=(0,),
    lives=True,
    slow=(0, 1),
    loops=LOOPS,
    budget=Budget(losses=3, moves=9, strays=2, drains=1, refusals=1, late=1),
)


def _given(scenario: Scenario, **budget: int) -> Scenario:
    return replace(scenario, budget=Budget(**budget))


def _bug(name: str, breaks: str, scenario: Scenario, **wrong: Any) -> Check:
    return Check(f"timeline: {name}", lambda: Failover(Protocol(**wrong), scenario), breaks)


def _right(name: str, scenario: Scenario, tier: int = NORMAL, walks: int = 0, **choice: Any) -> Check:
    return Check(f"timeline: {name}", lambda: Failover(Protocol(**choice), scenario), tier=tier, walks=walks)


BUGS_OF_FAILOVER = [
    _bug("a cycle does not test the timeline", "I2", _CYCLES, cycle="does not"),
    _bug("a look does not tell it", "LV", _BY_A_CYCLE, look="does not"),
    _bug("a read does not tell it", "I3", _READS_THERE, read="does not"),
    _bug("a transactional end does not test it", "I5", replace(_ALONE, transactional=(0,)), finish="does not"),
    _bug("an acquisition does not tell it", "FE", _STRAYS, acquisition="does not"),
    _bug("a renewal counts on any timeline", "LV", _BY_A_RENEWAL, renewal="anywhere"),
    _bug("the new server answers a renewal, and is not noticed", "LV", _BY_A_RENEWAL, met_by_renewal="ignored"),
    _bug("only what waits is forgotten", "RN", _ALONE, noticed="what waits"),
    _bug("the other connections are left as they are", "LV", _BY_A_RENEWAL, connections="as they are"),
    _bug("a transactional end is refused, connections are left", "LV", _BY_A_HANDLER, superseded="only the handlers'"),
    _bug("who starts asks at once", "I3", _STARTS_FREE, asks="who starts"),
    _bug("who starts asks at once, expiry times are old", "I3", _STARTS, asks="who starts"),
    _bug("an origin is asked for where the timeline is noted", "I3", _FREE, asks="where it is noted"),
    _bug("epochs go on where the standby stood", "FT", _FREE, epoch="goes on"),
]

RIGHT_OF_FAILOVER = [
    _right("an id is handed out twice", _CYCLES, QUICK),
    _right("an id is handed out twice, transactional", replace(_ALONE, transactional=(0,), loops=("handlers",)), QUICK),
    _right("a renewal meets the new server first", _BY_A_RENEWAL, QUICK),
    _right("a handler meets the new server first", _BY_A_HANDLER, QUICK),
    _right("a cycle meets the new server first", _BY_A_CYCLE),
    _right("any loop meets the new server first", _given(_LIVES, moves=1)),
    _right("any loop meets it first, transactional", _given(replace(_LIVES, transactional=(0,)), moves=1)),
    _right("two executors, one starts afterwards", _STARTS),
    _right("walks: two executors, nobody has it", replace(_FREE, loops=LOOPS), walks=400),
    _right("two executors, one starts afterwards, nobody has it", _STARTS_FREE),
    _right("walks: one starts afterwards, nobody has it", replace(_STARTS_FREE, loops=LOOPS), walks=400),
    _right("walks: two executors", replace(_TWO, loops=LOOPS), walks=400),
    _right("walks: grants of a former primary are late", _LATE_GRANT, walks=400),
    _right("walks: a new connection leads to the former primary", _STRAYS, walks=400),
    _right("walks: a former primary renews", _RENEWS_THERE, walks=400),
    _right("walks: a release is refused", _given(_RELEASES, refusals=3), walks=400),
    _right("walks: everything at once", _WALKS, walks=60),
]

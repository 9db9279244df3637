"""The checks of the consumer model."""

from dataclasses import replace
from typing import Any

from check import FULL, NORMAL, QUICK, Check
from consumer import Consumer
from consumer_state import Budget, Message, Protocol, Scenario

__all__ = ["BUGS_OF_CONSUMERS", "RIGHT_OF_CONSUMERS"]

_P, _Q = 0, 1
_ONE = Scenario((Message(_P, 0),), (1,))
_TWO = Scenario((Message(_P, 0), Message(_P, 1)), (2,))  # of one key
_GAP = Scenario((Message(_P, 0), Message(_P, 2)), (3,))  # between them, as a transaction's marker leaves it
_BESIDE = Scenario((Message(_P, 0, id="x"), Message(_Q, 0)), (1, 1))  # q0 has no id
_REPEATED = Scenario((Message(_P, 0, id="x"), Message(_Q, 0, id="x")), (1, 1))
_MIXED = Scenario((Message(_P, 0, id="x"), Message(_P, 1, id="y"), Message(_Q, 0, id="x")), (2, 1))
_BEHIND = Scenario((Message(_P, 0), Message(_P, 1, id="x"), Message(_P, 2, id="x")), (3,))  # p0 has no id
_ACROSS = Scenario((Message(_P, 0), Message(_P, 1, id="x"), Message(_Q, 0, id="x")), (2, 1))
_ITSELF = Scenario((Message(_P, 0, id="x"),), (1,))


def _given(scenario: Scenario, **budget: int) -> Scenario:
    return replace(scenario, budget=Budget(**budget))


def _bug(name: str, breaks: str, scenario: Scenario, **wrong: Any) -> Check:
    return Check(f"consumer: {name}", lambda: Consumer(Protocol(**wrong), scenario), breaks)


def _right(name: str, scenario: Scenario, tier: int = NORMAL, walks: int = 0) -> Check:
    return Check(f"consumer: {name}", lambda: Consumer(Protocol(), scenario), tier=tier, walks=walks)


BUGS_OF_CONSUMERS = [
    _bug("the offset moves wherever it stands", "I5", _ONE, expects="nothing"),
    _bug("it expects the message's own offset", "LV", _GAP, expects="the message's offset"),
    _bug("a reset is no part of what it expects", "I8", _given(_ONE, resets=1), resets="are not"),
    _bug("nobody looks for resets", "LV", _given(_ONE, resets=1), reset="is not"),
    _bug("places are not kept beside the ids", "I5", _given(_ITSELF, resets=1), places="not kept"),
    _bug("an id that is being recorded is a repeat", "I5", _REPEATED, taken="a repeat"),
    _bug("the ids of the rest of a batch stay recorded", "I5", _given(_BEHIND, vanishes=1), rest="stay recorded"),
    _bug("ids are taken back that others have recorded", "I5", _REPEATED, rest="are taken back, whoever recorded them"),
    # Instances of an earlier release take nothing back.
    _bug("what has waited for an id does not look again", "I5", _BESIDE, second_look=False, rest="stay recorded"),
    _bug("what is parked is not asked for", "I4", _given(_TWO, parks=1), parked="not asked for"),
    _bug("a message is parked before its offset moves", "I5", _given(_ONE, parks=1),
         parking="a transaction of its own"),
    _bug("a message is parked without its id", "I5", _given(_REPEATED, parks=1), parking="without its id"),
    _bug("a reset looks for jobs before it locks", "I5", _given(_ONE, parks=1, resets=1),
         cancels="what it has seen before"),
]  # fmt: skip

RIGHT_OF_CONSUMERS = [
    _right("two of one key, parked, answers lost, a reset", _given(_TWO, parks=1, losses=2, resets=1), QUICK),
    _right("a gap, answers lost, a reset", _given(_GAP, losses=2, resets=1), QUICK),
    _right("two partitions, ids, answers lost", _given(_BESIDE, losses=2), QUICK),
    _right("a repeat, answers lost", _given(_REPEATED, losses=2)),
    _right("a repeat, a record vanishes, answers lost", _given(_BEHIND, vanishes=1, losses=2)),
    _right("a repeat elsewhere, a record vanishes, an answer lost", _given(_ACROSS, vanishes=1, losses=1), FULL),
    _right("two partitions, a reset, an answer lost", _given(_BESIDE, resets=1, losses=1), FULL),
    _right("a repeat, parked, a reset, an answer lost", _given(_REPEATED, parks=1, losses=1, resets=1), FULL),
    _right("three messages, a repeat, an answer lost", _given(_MIXED, losses=1), FULL),
    _right("walks: everything at once", _given(_MIXED, parks=3, losses=3, resets=2), walks=30),
]

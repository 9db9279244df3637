"""The checks of the reads model, and of its first version.

Each seeded bug changes one choice of the protocol, in a scenario as small as shows what it breaks. `README.md` says
what each of them teaches, and where the code guards against it.
"""

from typing import Any

from check import FULL, NORMAL, QUICK, Check
from reads import Reads
from reads_state import Protocol, Scenario
from sweep import ScanAndSweep, Sweeping

__all__ = ["BUGS", "RIGHT"]


def _scenario(*scripts: str, **options: Any) -> Scenario:
    """`options` are those of the scenario; a script is its steps, separated by commas."""
    return Scenario(tuple(tuple(script.split(", ")) for script in scripts), **options)


def _bug(name: str, breaks: str, scenario: Scenario, **wrong: Any) -> Check:
    return Check(name, lambda: Reads(Protocol(strict=False, **wrong), scenario), breaks)


def _sweep_bug(name: str, breaks: str, scenario: Scenario, sweeping: Sweeping, **wrong: Any) -> Check:
    return Check(name, lambda: ScanAndSweep(Protocol(strict=False, **wrong), scenario, sweeping), breaks)


def _right(name: str, scenario: Scenario, tier: int = NORMAL, walks: int = 0, **protocol: Any) -> Check:
    return Check(name, lambda: Reads(Protocol(**protocol), scenario), tier=tier, walks=walks)


def _alone(name: str, scenario: Scenario, tier: int = NORMAL, **protocol: Any) -> Check:
    """Cycles that read what they name early. That a read brings it as well is no mistake."""
    reads = Protocol(alone="first of its group", strict=False, **protocol)
    return Check(f"read by a cycle: {name}", lambda: Reads(reads, scenario), tier=tier)


# Two writers of one entity, and one of another: the second waits for the first one's commit before it enqueues.
_PAIR = ("enqueue g, commit", "xid, wait 0, enqueue g, commit", "xid, enqueue h, commit")
_TWO_GROUPS = ("enqueue g, commit", "enqueue h, commit")
_ONE_GROUP = ("enqueue g, commit", "enqueue g, commit")
_TWICE_TWO = ("enqueue g, enqueue g, commit", "enqueue g, enqueue g, commit")
_DEEP = "enqueue g, enqueue g, commit"

_FIRST_VERSION = [
    _sweep_bug(
        "scan and sweep: as first written",
        "I4",
        _scenario(*_PAIR, brisk=True),
        Sweeping(bound="xmax", moved="before the sweep"),
    ),
    _sweep_bug(
        "scan and sweep: the low mark passes at xmax <= xmin",
        "LV",
        _scenario("xid, enqueue g, commit", "enqueue h, commit", brisk=True),
        Sweeping(bound="xmax", order=False),
    ),
    _sweep_bug(
        "scan and sweep: the low mark passes at xmax < xmin",
        "LV",
        _scenario("xid, enqueue g, commit", "xid, commit", "enqueue h, commit", brisk=True),
        Sweeping(bound="xmax < xmin", order=False),
    ),
    _sweep_bug(
        "scan and sweep: the low mark moves before the sweep",
        "LV",
        _scenario(*_TWO_GROUPS, brisk=True),
        Sweeping(moved="before the sweep", order=False),
    ),
    _sweep_bug(
        "scan and sweep: all repaired, two snapshots",
        "I4",
        _scenario("enqueue g, commit", "wait 0, enqueue g, commit", "enqueue h, commit", brisk=True),
        Sweeping(),
    ),
    _sweep_bug(
        "scan and sweep: ended ids are forgotten",
        "I2",
        _scenario("enqueue g, commit"),
        Sweeping(order=False),
        known="without the ended",
    ),
]

_BUGS = [
    _bug("the xid is taken after nextval", "LV", _scenario(*_TWO_GROUPS, brisk=True), xid_first=False),
    _bug("the sequence has CACHE 2", "I4", _scenario(*_PAIR, sessions=(0, 1, 1), brisk=True), sequence_cache=2),
    _bug("late rows of ids from xmax on are left out", "LV", _scenario(*_TWO_GROUPS, brisk=True), late_base="open"),
    _bug(
        "the bound of ids is read before the snapshot",
        "LV",
        _scenario(*_TWO_GROUPS, brisk=True),
        bound="before the snapshot",
    ),
    _bug(
        "a read that was never delivered moves the snapshot",
        "LV",
        _scenario(*_TWO_GROUPS, lost_answers=1, brisk=True),
        marks_of="issued reads",
    ),
    _bug(
        "own jobs are handed over in memory",
        "I4",
        _scenario("enqueue g, commit", "wait 0, enqueue g, commit", brisk=True),
        hand_over=(1,),
    ),
    _bug(
        "a refill has a snapshot of its own",
        "I4",
        _scenario(*_TWICE_TWO, keep=1, page=4, brisk=True),
        refill="on its own",
    ),
    _bug(
        "the same, bounded by the high mark",
        "I4",
        _scenario(*_TWICE_TWO, keep=1, page=4, brisk=True),
        refill="on its own, bounded",
    ),
    _bug(
        "a refill is applied although its group was compacted",
        "I4",
        _scenario(_DEEP, keep=1, fails=(0,)),
        refill_guard="none",
    ),
    _bug(
        "a refill is applied although late rows have cut its group",
        "LV",
        _scenario(*_TWICE_TWO, keep=1, brisk=True),
        refill_guard="same version",
    ),
    _bug("rows at or below the last position are dropped", "LV", _scenario(*_ONE_GROUP), beyond_last="dropped"),
    _bug("a head is removed after the await", "I2", _scenario(*_ONE_GROUP), head="removed after the await"),
    _bug(
        "a promoted job keeps its old txid",
        "LV",
        _scenario("delay g, commit", "wait 0, promote g, commit", "enqueue h, commit", brisk=True),
        promotion="old txid",
    ),
    _bug(
        "left out: the mark moves to a maximum of another snapshot",
        "LV",
        _scenario(_DEEP, "wait 0, enqueue h, commit", "wait 0, enqueue g, commit", keep=1, brisk=True),
        leave_out=True,
        scanned="another snapshot",
    ),
    _bug(
        "left out: the mark moves beyond a full page",
        "LV",
        _scenario("enqueue g, enqueue g, enqueue h, enqueue h, commit", keep=1, page=1, brisk=True),
        leave_out=True,
        scanned="beyond the page",
    ),
    _bug(
        "left out: a refill of the same read clears the flag",
        "LV",
        _scenario(_DEEP, "wait 0, enqueue g, commit", keep=1, brisk=True),
        leave_out=True,
        left_out="forgotten",
    ),
    _bug(
        "left out: a group whose last row is ahead of the mark",
        "LV",
        _scenario(*_ONE_GROUP, forgets=1, fails=(0,)),
        leave_out=True,
        deep="when more",
    ),
    _bug(
        "compacted: the last position is the head's",
        "LV",
        _scenario("enqueue g, commit", fails=(0,)),
        compacted="to the head",
    ),
    _bug("compacted: the group is not flagged", "LV", _scenario("enqueue g, commit", fails=(0,)), compacted="not more"),
    _bug(
        "read anew: a read under way is applied",
        "LV",
        _scenario("enqueue g, commit", forgets=1),
        forgetting="applies it",
    ),
    _bug(
        "read anew: ended ids are forgotten",
        "I2",
        _scenario("enqueue g, commit", forgets=1),
        known="without the ended",
    ),
    _bug(
        "starting over: the marks of the origins are kept",
        "LV",
        _scenario(*_TWO_GROUPS, forgets=1, starts_over=True, brisk=True),
        starting_over="from the marks",
    ),
    _bug(
        "read anew: what is under way is forgotten",
        "I2",
        _scenario("enqueue g, commit", restarts=1),
        restart="forget what is under way",
    ),
    _bug(
        "failover: the old marks are kept",
        "LV",
        _scenario(*_TWO_GROUPS, restarts=1),
        undone=True,
        restart="forget all but the marks",
        notice="on connecting",
    ),
    _bug("failover: what is under way is kept", "I2", _scenario(*_TWO_GROUPS, restarts=1), undone=True),
]

_GLANCE = [
    _bug("glance: the snapshot is taken after the read", "LV", _scenario("enqueue g, commit", brisk=True),
         glance="after the read"),
    _bug("glance: it does not name the server", "LV",
         _scenario("xid, commit", "enqueue g, commit", restarts=1, brisk=True), glance="without the server",
         undone=True, restart="forget everything"),
    _bug("glance: complete although there was no forward part", "LV",
         _scenario(*_ONE_GROUP, full=True, brisk=True), glance="before the read", complete="no forward part"),
    _bug("glance: complete although a page was full", "LV", _scenario(*_TWO_GROUPS, page=1, brisk=True),
         glance="before the read", complete="a full page"),
    _bug("glance: complete although an origin was acquired meanwhile", "LV",
         _scenario(*_TWO_GROUPS, origins=(0, 1), brisk=True), glance="before the read", complete="an origin acquired"),
    _bug("glance: complete although its rows were forgotten meanwhile", "LV",
         _scenario("enqueue g, commit", forgets=1, brisk=True), glance="before the read", complete="forgotten"),
]  # fmt: skip

_SUPERSEDE = [
    _bug("superseding: while a read is under way", "I2", _scenario("enqueue g, commit", _DEEP, latest=True),
         supersede="any time"),
    _bug("superseding: without compaction", "I2", _scenario(_DEEP, latest=True), supersede="without compaction"),
    _bug("superseding: what runs as well", "I2", _scenario("enqueue g, commit", _DEEP, latest=True),
         supersede="what runs as well"),
    _bug("superseding: a lost answer is ignored", "I2", _scenario(_DEEP, latest=True, lost_answers=1),
         supersede="lost answers are ignored"),
    _bug("superseding: by position instead of id", "I2",
         _scenario("delay g, commit", "wait 0, enqueue g, promote g, commit", latest=True), supersede="by position"),
]  # fmt: skip

_PASSES = [
    _bug("open rows passed: what was drawn after the snapshot as well", "LV", _scenario(*_TWO_GROUPS, brisk=True),
         passes="drawn by now"),
    _bug("open rows passed: behind a full page", "I4", _scenario(_DEEP, "enqueue g, commit", page=1, brisk=True),
         passes="a full page"),
    _bug("open rows passed: before the bases are taken", "I4", _scenario(*_PAIR, brisk=True),
         passes="before the bases"),
    _bug("open rows passed: what another server had drawn", "LV", _scenario(*_TWO_GROUPS, restarts=1, brisk=True),
         passes="kept over a restart"),
    _bug("open rows passed: a crash is not noticed", "LV", _scenario(*_TWO_GROUPS, restarts=1, brisk=True),
         restart="unnoticed"),
]  # fmt: skip

_ALONE = [
    _bug("read by a cycle: although its group has jobs before it", "I4", _scenario(
        "enqueue g, commit", "wait 0, enqueue g, commit", brisk=True), alone="any of its group"),
    _bug("read by a cycle: the mark moves to it", "I4", _scenario(
        "enqueue h, enqueue h, commit", "enqueue g, commit", page=1, brisk=True), alone="moves the mark"),
    _bug("read by a cycle: while other cycles commit", "I2", _scenario("enqueue g, commit", brisk=True),
         alone="beside other cycles"),
]  # fmt: skip

_RIGHT_ALONE = [
    _alone("two groups", _scenario(*_TWO_GROUPS), QUICK),
    _alone("a failing head", _scenario(*_ONE_GROUP, keep=1, fails=(0, 1)), QUICK),
    _alone("three of a group", _scenario(
        "enqueue g, commit", "wait 0, enqueue g, commit", "enqueue g, commit", keep=1, fails=(0, 2), brisk=True)),
    _alone("a failing, deep group, left out", _scenario(_DEEP, "enqueue g, commit", keep=1, page=1, fails=(0,)),
           leave_out=True),
    _alone("a capped group, late pairs", _scenario(*_TWICE_TWO, keep=1, brisk=True)),
    _alone("savepoints, an abort", _scenario(
        "savepoint g, abort", "wait 0, savepoint g, commit", "xid, enqueue h, commit", keep=1, brisk=True)),
    _alone("a promoted job", _scenario("delay g, commit", "wait 0, promote g, commit", "enqueue h, commit")),
    _alone("an origin acquired later, glances", _scenario(*_TWO_GROUPS, keep=1, origins=(0, 1), brisk=True),
           glance="before the read"),
    _alone("the server restarts", _scenario(*_TWO_GROUPS, restarts=1, fails=(0,))),
    _alone("a failover", _scenario("xid, commit", *_ONE_GROUP, keep=1, restarts=1, brisk=True), FULL, undone=True,
           restart="forget everything", notice="on connecting"),
    _alone("forgotten, answers get lost", _scenario(*_TWO_GROUPS, forgets=1, lost_answers=1, fails=(0,)), FULL),
    _alone("a pair of writers and another", _scenario(*_PAIR, keep=1, page=1, brisk=True), FULL),
]  # fmt: skip

_RIGHT = [
    _right("open rows passed: left out, two groups", _scenario(
        _DEEP, "wait 0, enqueue h, commit", "wait 0, enqueue g, commit", keep=1, brisk=True), leave_out=True),
    _right("open rows passed: savepoints, an abort", _scenario(
        "savepoint g, abort", "wait 0, savepoint g, commit", "xid, enqueue h, commit", keep=1, brisk=True)),
    _right("open rows not passed", _scenario(*_PAIR, keep=1, page=1, brisk=True), passes=""),
    _right("open rows not passed: a crash is not noticed", _scenario(*_PAIR, restarts=1, brisk=True), passes="",
           restart="unnoticed"),
    _right("glance: two groups, memory full", _scenario(*_TWO_GROUPS, page=1, full=True, brisk=True), QUICK,
           glance="before the read"),
    _right("glance: an origin acquired later, rows forgotten", _scenario(
        *_TWO_GROUPS, origins=(0, 1), forgets=1, brisk=True), glance="before the read"),
    _right("glance: a failover", _scenario("xid, commit", "enqueue g, commit", restarts=1, brisk=True), QUICK,
           glance="before the read", undone=True, restart="forget everything"),
    _right("glance: a pair of writers and another", _scenario(*_PAIR, keep=1, page=1, brisk=True),
           glance="before the read"),
    _right("superseding: a deep group", _scenario(_DEEP, "enqueue g, commit", keep=1, latest=True), QUICK),
    _right("superseding: three at once, answers get lost", _scenario(
        "enqueue g, commit", "enqueue g, commit", "enqueue g, commit", latest=True, lost_answers=1, brisk=True)),
    _right("superseding: failures, rows forgotten", _scenario(
        _DEEP, "enqueue g, commit", latest=True, fails=(0, 2), forgets=1)),
    _right("superseding: a promoted job", _scenario(
        "delay g, commit", "wait 0, enqueue g, promote g, commit", "enqueue g, commit", latest=True)),
    _right("two groups", _scenario(*_TWO_GROUPS), QUICK),
    _right("one deep group, left out", _scenario(_DEEP, "enqueue g, commit", keep=1, page=1), QUICK, leave_out=True),
    _right("two fail", _scenario(*_ONE_GROUP, keep=1, fails=(0, 1)), QUICK),
    _right("a pair of writers and another", _scenario(*_PAIR, keep=1, page=1)),
    _right("a pair of writers, ids taken early",
           _scenario("xid, enqueue g, commit", "wait 0, enqueue g, commit", "enqueue h, commit", keep=1, page=1)),
    _right("two enqueues in one transaction", _scenario(
        "enqueue g, xid, enqueue g, commit", "wait 0, enqueue g, commit", "xid, enqueue h, commit")),
    _right("savepoints",
           _scenario("savepoint g, commit", "wait 0, savepoint g, commit", "xid, savepoint h, commit", keep=1)),
    _right("an abort", _scenario("enqueue g, abort", "xid, wait 0, enqueue g, commit", "enqueue h, commit", keep=1)),
    _right("a chain of three",
           _scenario("enqueue g, commit", "wait 0, enqueue g, commit", "xid, wait 1, enqueue g, commit", keep=1)),
    _right("three open at once", _scenario("enqueue g, commit", "xid, commit", "xid, enqueue h, commit", keep=1)),
    _right("a capped group",
           _scenario("enqueue g, commit", "wait 0, enqueue g, commit", "enqueue g, enqueue g, enqueue g, commit",
                     keep=1, page=4, brisk=True)),
    _right("a capped group, slowly",
           _scenario("enqueue g, commit", "wait 0, enqueue g, commit", "enqueue g, enqueue g, enqueue g, commit",
                     keep=1, page=4), FULL),
    _right("a capped group, late pairs", _scenario(*_TWICE_TWO, keep=1)),
    _right("a capped group, left out", _scenario(_DEEP, "enqueue h, commit", "wait 0, enqueue g, commit", keep=1), FULL,
           leave_out=True),
    _right("heads that fail", _scenario(
        "enqueue g, commit", "wait 0, enqueue g, commit", "enqueue g, commit", fails=(0, 1, 2))),
    _right("heads that fail, left out", _scenario(_DEEP, "enqueue g, commit", keep=1, fails=(0, 1)), leave_out=True),
    _right("answers get lost", _scenario(*_PAIR, keep=1, lost_answers=1, brisk=True)),
    _right("reading anew", _scenario(*_TWO_GROUPS, keep=1, forgets=2)),
    _right("reading anew with a failing, deep group", _scenario(_DEEP, "enqueue g, commit", keep=1, forgets=1,
                                                                fails=(0,)), leave_out=True),
    _right("starting over, one group, a failure", _scenario(
        *_ONE_GROUP, keep=1, forgets=1, starts_over=True, fails=(0,))),
    _right("starting over, a pair of writers", _scenario(
        *_PAIR, keep=1, forgets=1, starts_over=True, brisk=True), FULL),
    _right("starting over with a failing, deep group", _scenario(
        _DEEP, "enqueue g, commit", keep=1, forgets=1, starts_over=True, lost_answers=1, fails=(0,)), FULL,
        leave_out=True),
    _right("starting over, with glances", _scenario(*_TWO_GROUPS, forgets=2, starts_over=True, brisk=True), QUICK,
           glance="before the read"),
    _right("the server restarts", _scenario(*_PAIR, keep=1, restarts=1, brisk=True)),
    _right("failover: everything is forgotten", _scenario(*_PAIR, keep=1, restarts=1, brisk=True), undone=True,
           restart="forget everything", notice="on connecting"),
    _right("two origins, one acquired later", _scenario(*_PAIR, keep=1, origins=(0, 1), brisk=True)),
    _right("two origins, one acquired later, slowly", _scenario(*_PAIR, keep=1, origins=(0, 1)), FULL),
    _right("a promoted job", _scenario("delay g, commit", "wait 0, promote g, commit", "enqueue h, commit")),
    _right("two enqueues, one row at a time", _scenario(
        "enqueue g, xid, enqueue g, commit", "wait 0, enqueue g, commit", "xid, enqueue h, commit", keep=1, page=1),
        FULL),
    _right("one group, two late", _scenario("enqueue g, commit", "enqueue g, commit", "xid, enqueue h, commit", keep=1),
           FULL),
    _right("a capped group, one row at a time", _scenario(
        "enqueue g, commit", "wait 0, enqueue g, commit", "enqueue g, enqueue g, enqueue g, commit", keep=1, page=1),
        FULL, leave_out=True),
    _right("a capped group and a late pair", _scenario(
        "enqueue g, commit", "wait 0, enqueue g, commit", "enqueue g, enqueue g, commit", keep=1, brisk=True), FULL,
        leave_out=True),
    _right("the server restarts, slowly", _scenario(*_PAIR, keep=1, restarts=1), FULL),
    _right("two origins, a transaction in both", _scenario(
        "enqueue h, enqueue g, commit", "wait 0, enqueue g, commit", "xid, enqueue h, commit", keep=1, page=1,
        origins=(0, 1)), FULL, passes=""),
    _right("heads that fail, two groups, left out", _scenario(
        _DEEP, "wait 0, enqueue g, commit", "enqueue h, commit", keep=1, fails=(0,)), FULL, leave_out=True, passes=""),
    _right("walks: seven transactions", _scenario(
        "xid, enqueue g, commit", "savepoint g, xid, enqueue g, commit", "wait 0, wait 1, enqueue g, enqueue g, commit",
        "enqueue h, enqueue g, commit", "wait 3, enqueue g, abort", "wait 2, xid, enqueue g, commit",
        "enqueue h, commit", keep=1, lost_answers=1), walks=400),
    _right("walks: seven transactions, failures, left out", _scenario(
        "xid, enqueue g, commit", "savepoint g, xid, enqueue g, commit", "wait 0, wait 1, enqueue g, enqueue g, commit",
        "enqueue h, enqueue g, commit", "wait 3, enqueue g, abort", "wait 2, xid, enqueue g, commit",
        "enqueue h, commit", page=3, fails=(0, 2, 3), forgets=1, lost_answers=1), walks=400, leave_out=True),
]  # fmt: skip

RIGHT = _RIGHT + _RIGHT_ALONE
BUGS = _FIRST_VERSION + _BUGS + _GLANCE + _SUPERSEDE + _PASSES + _ALONE

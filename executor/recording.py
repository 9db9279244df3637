"""Outcomes as the arguments of ``cycle.sql``."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

from ..jobs import SUCCEEDED, Again, Committed, End, ErrorInfo, Hold, OutcomeName
from ..jobs.job import IDEMPOTENCY_KEY, idempotency_key
from ..schema import int_array
from .attempts import Finished
from .queues import Entry

__all__ = ["cycle_arguments", "follows", "plain", "unless_gone", "without_follow_ups"]

_WHY_CHARACTERS = 1_000  # of the error, in a header of the job that follows
_FOLLOWED = re.compile(r"\), followed AS \(.*?\n(?=\), again AS \()", re.DOTALL)


def cycle_arguments(
    executor_id: UUID | None,
    number: int,
    fence: int,
    running: list[int],
    finished: list[Finished],
    silent: list[str],
    sent: float,
    timeline: str | None = None,
) -> tuple[object, ...]:
    """The arguments of ``cycle.sql``, which is about to be sent. running: ids that it names; silent: types without
    history; timeline: of the server that all of it was read from. Times are seconds of the executor's clock."""
    succeeded = [f for f in finished if f[1] is SUCCEEDED]  # by its place: by its name takes twice as long
    entries, starts, ends = _columns(succeeded)
    attempts = [entry.attempt for entry in entries]
    epochs = [entry.origin.epoch for entry in entries]
    one_epoch = epochs[0] if epochs and epochs.count(epochs[0]) == len(epochs) else None
    return (
        executor_id,
        number,
        fence,
        int_array(running),
        int_array([entry.id for entry in entries]),
        "{}" if attempts.count(1) == len(attempts) else int_array(attempts),
        "{}" if one_epoch is not None else int_array(epochs),
        int_array([int((sent - start) * 1e6) for start in starts]),
        int_array([int((sent - end) * 1e6) for end in ends]),
        "[]" if len(succeeded) == len(finished) else json.dumps(_others(finished, sent)),
        silent,
        one_epoch,
        timeline,
    )


def follows(arguments: tuple[object, ...]) -> bool:
    """Whether a cycle with these arguments has a job to store that follows another one."""
    return '"follow_up"' in cast(str, arguments[9])  # or a text says so


def without_follow_ups(cycle: str) -> str:
    """``cycle.sql`` for a cycle that has none: setting up the part that stores them costs it 7 µs
    (docs/decisions/0030-follow-ups.md)."""
    return _FOLLOWED.sub("", cycle)


def _columns(finished: list[Finished]) -> tuple[tuple[Entry, ...], tuple[float, ...], tuple[float, ...]]:
    """Their entries, starts and ends."""
    if not finished:
        return (), (), ()
    entries, _, starts, ends = cast(Any, zip(*finished, strict=True))
    return entries, starts, ends


def _others(finished: list[Finished], sent: float) -> list[dict[str, Any]]:
    """All outcomes but successes, and those that are committed already."""
    return [
        _record(entry, outcome, sent - start, sent - finish, sent)
        for entry, outcome, start, finish in finished
        if outcome is not SUCCEEDED and not isinstance(outcome, Committed)
    ]


def _record(entry: Entry, outcome: End | Again | Hold, started: float, finished: float, sent: float) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": entry.id,
        "attempt": entry.attempt,
        "epoch": entry.origin.epoch,
        "outcome": outcome.name.value,
        "started": started,
        "finished": finished,
        "due": None if entry.due is None else str(sent - entry.due),  # a text: JSON has no number for '-infinity'
    }
    if outcome.error is not None:
        record["error_class"] = outcome.error.error_class
        record["error_message"] = outcome.error.text
        record["error_fingerprint"] = outcome.error.fingerprint
    match outcome:
        case End(follow_up=follow_up):
            record["action"] = "end"
            if follow_up is not None:
                record["follow_up"] = {
                    "type": follow_up.name,
                    "policy": follow_up.policy,
                    "grouped": follow_up.grouped,
                    "headers": {
                        "sidings-error": "" if outcome.error is None else outcome.error.within(_WHY_CHARACTERS),
                        "sidings-job-id": str(entry.id),
                        "sidings-job-key": _key_of(entry),
                        "sidings-job-type": entry.type,
                    },
                }
        case Again():
            record["action"] = "again"
            record["delay"] = float(outcome.delay)
            record["failed"] = 1 if outcome.name is OutcomeName.RETRIED else 0
            record["inconclusive"] = outcome.inconclusive
        case Hold():
            record["action"] = "block" if outcome.blocks else "hold"
            record["reason"] = outcome.reason
            record["failed"] = 1
    return record


def _key_of(entry: Entry) -> str:
    """The `Job.idempotency_key` that its handler saw. Not by what the database has: in a drain time passes there."""
    headers: dict[str, str] = json.loads(entry.headers or "{}")
    return headers.get(IDEMPOTENCY_KEY) or idempotency_key(entry.id, entry.enqueued)


def plain(f: Finished) -> Finished:
    """The same outcome with an error text that can give no offence."""
    error = ErrorInfo("unrecordable", "the error's text could not be stored", "unrecordable")
    entry, outcome, started, ended = f
    match outcome:
        case End(name):
            outcome = replace(outcome, error=None if name is OutcomeName.SUCCEEDED else error)
        case Again():
            outcome = replace(outcome, error=error)
        case Committed():
            pass
        case Hold(blocks=blocks):
            outcome = Hold("its reason could not be stored", error, blocks=blocks)
    return entry, outcome, started, ended


def unless_gone(finished: list[Finished], gone: Collection[int]) -> list[Finished]:
    """What somebody else has ended is over, whatever its handler says. gone: the ids of such jobs."""
    over = Committed(OutcomeName.CANCELLED)
    return [
        (entry, over if entry.id in gone and not isinstance(outcome, Committed) else outcome, started, ended)
        for entry, outcome, started, ended in finished
    ]

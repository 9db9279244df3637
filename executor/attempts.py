"""What an attempt begins with and what becomes of it: the job that its handler receives, and the outcome of what the
handler has returned or raised. Pure but for the log."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from ..errors import KafkaUnavailable, PostgresUnavailable, UndecodableMessage
from ..jobs import SUCCEEDED, Again, Discard, End, ErrorInfo, Hold, Job, JobType, Outcome, OutcomeName, Snooze
from ..jobs.job import IDEMPOTENCY_KEY
from ..jobs.middleware import error_in
from ..jobs.outcome import place_of
from ..jobs.retry import CONFLICTS, that_counts
from ..legible import legible
from .clock import now
from .outages import Outages, after_conflict, conflicts_of
from .queues import Entry
from .transactional import Superseded

__all__ = ["Finished", "failed", "invalid", "job_of", "judged", "made", "poison", "raised", "results"]

log = logging.getLogger("sidings.executor")

_Job: type[Job[Any]] = Job


# An attempt that is over: what came of it, when it began and ended, in seconds of the executor's clock. A plain tuple:
# one with names takes three times as long to make and to take apart.
Finished = tuple[Entry, Outcome, float, float]


def job_of(job_type: JobType[Any], entry: Entry) -> Job[Any]:
    """The job as its handler receives it, all of its fields set. Raises what its payload's model raises."""
    job = object.__new__(_Job)  # its `__init__` takes as long again, and there is one for each attempt
    origin = entry.origin
    job.payload = job_type.load(entry.payload)
    job.id = entry.id
    job.type = entry.type
    job.origin = origin.name
    job.group = entry.group
    job.attempt = entry.attempt
    job.failures = entry.failures
    job.priority = entry.priority
    job.enqueued_timestamp = entry.enqueued
    job.headers = json.loads(entry.headers) if entry.headers else {}
    # Taken out: a handler may give its headers to what it enqueues, which has another effect.
    job.first_key = job.headers.pop(IDEMPOTENCY_KEY, "") if entry.headers else ""
    job.fence = origin.fence
    job.transaction = None
    return job


def invalid(job_type: JobType[Any], entry: Entry, error: BaseException) -> Outcome:
    info, blocks = ErrorInfo.of(error), _blocks(job_type, entry)
    what = "held, and its group blocked, until `sidings jobs retry" if blocks else "held until `sidings jobs release"
    log.error(
        "job %s %s: its payload does not validate, %s %s`, when the model takes it: %s",
        *(entry.id, entry.type, what, entry.id, legible(info.message)),
    )
    return Hold("the payload does not validate", info, blocks=blocks)


def poison(job_type: JobType[Any] | None, entry: Entry) -> Outcome:
    """A job that keeps killing executors is not run but held; its payload stays where it is."""
    log.error("job %s %s has killed %s executors: it waits for a person", entry.id, entry.type, entry.losses)
    error = ErrorInfo.from_text("Poison", f"lost {entry.losses} times; its executor died each time")
    return Hold("poison: it kept killing executors", error, blocks=_blocks(job_type, entry))


def _blocks(job_type: JobType[Any] | None, entry: Entry) -> bool:
    """Whether a job that is not run keeps its place in its group: none of such a type is passed by a later one."""
    return entry.lane is not None and job_type is not None and job_type.retry.on_exhausted == "block"


def raised(
    job_type: JobType[Any], entry: Entry, error: BaseException, started: float, outages: Outages
) -> Outcome | None:
    """What a handler's exception means for one job. One that cannot even be looked at must not end the worker."""
    try:
        return _meaning(job_type, entry, error, started, outages)
    except KeyboardInterrupt:
        raise
    except BaseException as broken:  # noqa: BLE001 - a user's own class of exceptions
        return _undecided(entry, broken)


def _meaning(
    job_type: JobType[Any], entry: Entry, error: BaseException, started: float, outages: Outages
) -> Outcome | None:
    match that_counts(error):
        case Superseded():
            return None
        case Discard() as declined:  # out of a task group, too: by that class, requeueing leaves it out
            kind = ErrorInfo.of(declined).error_class
            return End(OutcomeName.DISCARDED, replace(ErrorInfo.of(error), error_class=kind))
        case Snooze() as snooze:
            return Again(OutcomeName.SNOOZED, snooze.seconds, ErrorInfo.of(error))
        case UndecodableMessage():  # of a stored message: no policy gives it up, or tries it for ever
            return invalid(job_type, entry, error)
        case PostgresUnavailable() | KafkaUnavailable() as away if away.blameless or not outages.is_cause(entry):
            return _put_off(job_type, entry, error, started, outages.met(entry))
        case conflict if isinstance(conflict, CONFLICTS) and (conflicts := conflicts_of(entry)):
            delay, info = after_conflict(conflicts), ErrorInfo.of(error).at(place_of(error))
            _tell(entry, f"met a conflict, no failure, again in {delay:.1f} s", info, level=logging.INFO)
            return Again(OutcomeName.SNOOZED, delay, info)
        case Exception():
            return failed(job_type, entry, error, started)
        case _:
            info = ErrorInfo.of(error)
            told = RuntimeError(f"the handler raised {info.error_class}: {info.message}")
            told.__cause__ = error
            return failed(job_type, entry, told, started)


def results(result: object, count: int) -> Sequence[object]:
    """What a handler of a list says of each of its jobs: nothing, or an exception."""
    if result is None:
        return [None] * count
    if isinstance(result, list | tuple) and len(cast(Sequence[object], result)) == count:
        return cast(Sequence[object], result)
    what = f"it returned {type(cast(object, result)).__name__}"
    error = TypeError(f"the handler of a batch returns None, or for each of its {count} jobs None or an error; {what}")
    return [error] * count


def made(error: BaseException | type[BaseException]) -> BaseException:
    """The error itself, where a handler has returned its class, as `raise` would make it."""
    try:
        return error() if isinstance(error, type) else error
    except Exception as broken:  # noqa: BLE001 - it takes arguments, say
        return broken


def failed(job_type: JobType[Any], entry: Entry, error: BaseException, started: float) -> Outcome:
    try:
        outcome = _fitting(
            entry, job_type.retry.decide(error, failures=entry.failures, elapsed=_elapsed(entry, started))
        )
    except Exception as broken:  # noqa: BLE001 - a user's own strategy
        return _undecided(entry, broken)
    _tell_failed(entry, outcome, outcome.error or ErrorInfo.of(error))
    return outcome


def _tell_failed(entry: Entry, outcome: Outcome, info: ErrorInfo) -> None:
    match outcome:
        case Again():
            what = f"failed, again in {outcome.delay:.1f} s"
        case Hold(blocks=True):
            what = "failed, held, and its group blocked"
        case End(follow_up=follow_up) if follow_up is not None:
            what = f"failed, followed by a job {follow_up.name}"
        case _:
            what = f"failed, {outcome.name.value}"
    _tell(entry, what, info)


def _put_off(job_type: JobType[Any], entry: Entry, error: BaseException, started: float, times: int) -> Outcome:
    """The service's own database or Kafka is away, which is no failure of the handler's. The waits grow, for the sake
    of whom it has called before, and who may be well. times: attempts before this that met it."""
    elapsed = _elapsed(entry, started)
    try:
        outcome = job_type.retry.put_off(error, failures=entry.failures + times, elapsed=elapsed)
    except Exception as broken:  # noqa: BLE001 - a user's own strategy
        return _undecided(entry, broken)
    _tell(entry, f"met an outage, no failure, again in {outcome.delay:.1f} s", outcome.error or ErrorInfo.of(error))
    return outcome


def _tell(entry: Entry, what: str, info: ErrorInfo, *, level: int = logging.WARNING) -> None:
    # The texts that are recorded, not the error: what its class does when a filter of the log asks for it is its own.
    text = legible(f"{info.error_class}: {info.text}")
    group = entry.group if entry.group is None or entry.group.isprintable() else repr(entry.group)
    log.log(level, "job %s %s %s: attempt %s %s: %s", entry.id, entry.type, group, entry.attempt, what, text)


def judged(job_type: JobType[Any], entry: Entry, result: object, started: float) -> Outcome:
    """The policy asks for the result as well. Raises an error that was returned where it has nothing to say of that.
    Of an outage or a conflict it is not asked."""
    error = error_in(result)
    if isinstance(error, BaseException) and isinstance(
        that_counts(error), (PostgresUnavailable, KafkaUnavailable, *CONFLICTS)
    ):
        raise error
    try:
        rejected = job_type.retry.judge_result(result, failures=entry.failures, elapsed=_elapsed(entry, started))
    except Exception as broken:  # noqa: BLE001 - a user's own strategy
        return _undecided(entry, broken)
    if rejected is None:
        if error is not None:
            raise error
        return SUCCEEDED
    outcome = _fitting(entry, rejected)
    _tell_failed(entry, outcome, outcome.error or ErrorInfo.from_text("ResultRejected", ""))
    return outcome


def _fitting(entry: Entry, outcome: Outcome) -> Outcome:
    """A job without a group, or one that stands in no order, has nothing to block: it is held. SQL and earlier releases
    store such jobs also of a type whose jobs have groups."""
    return replace(outcome, blocks=False) if isinstance(outcome, Hold) and entry.lane is None else outcome


def _undecided(entry: Entry, broken: BaseException) -> Outcome:
    """The retry policy itself has failed, or the error's own class: the job must not be lost over it."""
    try:
        log.error("job type %s: what follows cannot be decided; retrying in 60 s", entry.type, exc_info=broken)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - a filter of the log, and it may be what has failed; the history has it
        pass
    return Again(OutcomeName.RETRIED, 60.0, ErrorInfo.of(broken))


def _elapsed(entry: Entry, started: float) -> float:
    """Seconds since the first attempt that failed began; that may be the one that has just failed."""
    return now() - (started if entry.first_started is None else entry.first_started)

"""Retry policies: tenacity's own objects, evaluated across attempts that the database remembers."""

import inspect
import math
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import asyncpg
from tenacity import (
    Future,
    RetryCallState,
    Retrying,
    retry_all,
    retry_always,
    retry_any,
    retry_if_exception,
    retry_if_exception_cause_type,
    retry_if_exception_type,
    retry_if_not_exception_message,
    retry_if_not_result,
    retry_never,
    retry_unless_exception_type,
    stop_all,
    stop_any,
    stop_never,
    wait_chain,
    wait_combine,
    wait_exponential_jitter,
)
from tenacity.retry import retry_base
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from ..errors import ConfigurationError, KafkaUnavailable, PostgresUnavailable, SidingsError
from .outcome import MAX_DELAY_SECONDS, Again, End, ErrorInfo, FollowUp, Hold, Outcome, OutcomeName, place_of

__all__ = ["CONFLICTS", "Discard", "Retry", "RetryAfter", "Snooze", "asked_seconds", "leaves_of", "that_counts"]

# What is undone because of what another transaction has done, and may go through the next time. The last two: it has
# changed the table of a statement that asyncpg had prepared.
CONFLICTS = (asyncpg.SerializationError, asyncpg.InvalidCachedStatementError, asyncpg.OutdatedSchemaCacheError)

_LEAST_PUT_OFF_SECONDS = 1.0


class Discard(SidingsError):
    """``raise Discard("why")`` in a handler ends the job as `discarded`; the history keeps its payload.

    It is for what a person should hear of: the alert on discarded jobs tells of it. Where nothing is wrong, return.
    What brings back discarded jobs leaves it alone, unless it is asked for (`Admin.requeueable`).
    """


class Snooze(SidingsError):
    """``raise Snooze(seconds)`` in a handler runs the job again later, without counting a failure.

    A serial job keeps its place, so its group waits as well. In a decoder of messages: not now, as where the schema
    registry is away; the message keeps its place, and is decoded again later.

    Args:
        seconds: From 0 to 366 days.
        reason: What the history keeps as the error's message.

    Raises:
        ConfigurationError: `seconds` is no such number.
    """

    def __init__(self, seconds: float, reason: str = "") -> None:
        self.seconds = _seconds("Snooze", seconds)
        super().__init__(reason or f"snoozed for {seconds} s")


class RetryAfter(SidingsError):
    """``raise Retry.after(seconds)`` in a handler: this failure is retried after `seconds`.

    That holds whatever the policy's `wait` says. The policy's `stop` still applies.

    Args:
        seconds: From 0 to 366 days.
        reason: What the history keeps as the error's message.

    Raises:
        ConfigurationError: `seconds` is no such number.
    """

    def __init__(self, seconds: float, reason: str) -> None:
        self.seconds = _seconds("Retry.after", seconds)
        super().__init__(reason or f"retry after {seconds} s")


@dataclass(frozen=True, slots=True)
class Retry:
    """When a failed job runs again, and what becomes of it when it does not::

        Retry(wait=wait_exponential_jitter(1, max=60), stop=stop_after_attempt(5), on_exhausted="hold")

    Args:
        wait: Seconds until the next attempt; a tenacity ``wait_*``. Default: exponential from 1 s to 300 s, with
            jitter.
        stop: When to give up; a tenacity ``stop_*``. Default: never, because no number that ran out may lose a job.
            ``attempt_number`` counts the failures of this job over all executors (losses and snoozes do not count), and
            ``seconds_since_start`` runs from the start of the first attempt that failed.
        retry: Which failures (or results) are worth another attempt; a tenacity ``retry_if_*``. Default: every
            exception. Of an exception group, as that of a task group, it is asked about the errors in it.
        on_exhausted: ``"skip"`` ends the job as discarded (the history keeps its payload). ``"hold"`` keeps it for a
            person while its group goes on. ``"block"`` keeps it at the head of its group, which waits for a person.
            A job type, declared before: the job ends as followed, and one of that type with the same payload follows
            (docs/policies.md).

    Raises:
        ConfigurationError: An argument is not such an object (a class is not one), or is, or asks, a coroutine
            function: a decision about a retry must not wait for anything. Or `retry` repeats what succeeds, whatever it
            returned.
    """

    wait: wait_base = field(default_factory=lambda: wait_exponential_jitter(initial=1, max=300))
    stop: stop_base = stop_never
    retry: retry_base = field(default_factory=lambda: retry_if_exception_type(Exception))
    on_exhausted: Literal["skip", "block", "hold"] | FollowUp = "skip"

    @staticmethod
    def given(value: object, what: str) -> "Retry | None":
        """The `retry=` of a declaration called `what`.

        Raises:
            ConfigurationError: It is neither a `Retry` nor None.
        """
        if value is not None and not isinstance(value, Retry):
            raise ConfigurationError(f"{what}: retry={value!r}: give Retry(wait=..., stop=...)")
        return value

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            another = isinstance(value, (type, *_KINDS.values())) and not isinstance(value, kind)
            if another or not callable(value):  # a class would be called: all that it makes of an attempt means yes
                raise ConfigurationError(f"Retry({name}={value!r}): give one of tenacity's {name}_... objects")
            if any(map(_is_asynchronous, _parts(value))):
                raise ConfigurationError(f"Retry({name}=...): asynchronous strategies are not supported")
        repeating = _repeats_success(self.retry)
        if repeating is not None:
            raise ConfigurationError(
                f"Retry(retry=...): {repeating} repeats what succeeds, whatever it returned: give "
                "retry_if_not_exception_type(...), or retry_if_exception(lambda e: ...)"
            )
        if self.follow_up is None and self.on_exhausted not in ("skip", "block", "hold"):
            raise ConfigurationError(
                f"Retry(on_exhausted={self.on_exhausted!r}): give 'skip', 'block' or 'hold', or a job type, which "
                "@service.job() makes of its handler"
            )

    @staticmethod
    def after(seconds: float, reason: str = "") -> RetryAfter:
        """The exception to raise for one retry after `seconds` (0 to 366 days)::

            raise Retry.after(30)

        The policy's `wait` does not count then; its `stop` does.
        """
        return RetryAfter(seconds, reason)

    @property
    def follow_up(self) -> FollowUp | None:
        """The job type in `on_exhausted`; None where a word stands there."""
        return self.on_exhausted if isinstance(self.on_exhausted, FollowUp) else None

    @property
    def judges_results(self) -> bool:
        """Whether `retry` may have something to say about a handler that returned; the usual strategies have not."""
        return not _refuses_success(self.retry)

    def decide(self, error: BaseException, *, failures: int, elapsed: float) -> Outcome:
        """What follows `error`; of an exception group, what follows the first of its errors that is retried. Those that
        say themselves when come last, the longest first; a `Snooze` beside a failure is a `Retry.after`.

        Args:
            failures: Failed attempts before this one.
            elapsed: Seconds since the first failed attempt started.
        """
        info = ErrorInfo.of(error).at(place_of(error))
        errors = [each for each in leaves_of(error) if not isinstance(each, Discard)] or [error]
        given_up: list[Outcome] = []
        for each in sorted(errors, key=_longest, reverse=True):
            outcome = self._decide(_call_state(failures, elapsed, each), info, asked_seconds(each))
            if isinstance(outcome, Again):
                return outcome
            given_up.append(outcome)
        return given_up[0]

    def put_off(self, error: BaseException, *, failures: int, elapsed: float) -> Again:
        """What follows `error` where it is no failure of the handler's.

        The job waits as `wait` says, a second at least; `stop` does not count.

        Args:
            failures: As many as the wait is to be for.
            elapsed: Seconds since the first failed attempt started.
        """
        state = _call_state(failures, elapsed, that_counts(error))
        delay = max(self._delay(state), _LEAST_PUT_OFF_SECONDS)
        return Again(OutcomeName.SNOOZED, delay, ErrorInfo.of(error).at(place_of(error)))

    def judge_result(self, result: object, *, failures: int, elapsed: float) -> Outcome | None:
        """What follows a handler that returned `result`; None when that is a success (``retry_if_result``)."""
        state = _call_state(failures, elapsed)
        state.outcome = Future(state.attempt_number)
        state.outcome.set_result(result)
        if not _says_yes(self.retry, state):
            return None
        return self._decide(state, ErrorInfo.from_text("ResultRejected", f"the handler returned {result!r}"), None)

    def _decide(self, state: RetryCallState, info: ErrorInfo, asked: float | None) -> Outcome:
        if asked is None and not _says_yes(self.retry, state):
            return self._exhausted(f"not retried: {info.error_class}", info)
        delay = asked if asked is not None else self._delay(state)
        state.upcoming_sleep = delay
        if _says_yes(self.stop, state):
            return self._exhausted(f"gave up after {state.attempt_number} failures", info)
        return Again(OutcomeName.RETRIED, delay, info)

    def _delay(self, state: RetryCallState) -> float:
        delay = float(_known(self.wait(state)))
        if math.isnan(delay):
            raise ValueError(f"{self.wait!r} gave NaN")
        return min(max(delay, 0.0), MAX_DELAY_SECONDS)

    def _exhausted(self, reason: str, info: ErrorInfo) -> Outcome:
        if self.on_exhausted in ("hold", "block"):
            return Hold(reason, info, blocks=self.on_exhausted == "block")
        if self.follow_up is not None:
            return End(OutcomeName.FOLLOWED, info, self.follow_up)
        return End(OutcomeName.DISCARDED, info)


def that_counts(error: BaseException) -> BaseException:
    """The error by which an attempt is judged that has raised `error`: of an exception group that which is in it.

    Of several an outage, or else a conflict of transactions: what has failed beside these may have failed because of
    them, and else it does so again when they are over. A `Discard` counts only where there is nothing else, a `Snooze`
    or `Retry.after`, the longest, beside its like and `Discard` only: none ends, or puts off uncounted, what another
    error says of. Else it is the group: `Retry.decide` judges all that is in it.
    """
    errors = list(leaves_of(error))
    outages = [each for each in errors if isinstance(each, PostgresUnavailable | KafkaUnavailable)]
    if outages:  # those that are counted before the blameless, of these those of Postgres
        return min(outages, key=lambda each: (each.blameless, isinstance(each, KafkaUnavailable)))
    if conflicts := [each for each in errors if isinstance(each, CONFLICTS)]:
        return conflicts[0]
    others = [each for each in errors if not isinstance(each, Discard)] or errors[:1]
    if len(others) == 1:
        return others[0]
    for kind in (Snooze, RetryAfter):
        if all(isinstance(each, kind) for each in others):
            return max(others, key=_longest)
    return error


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """What an `ExceptionGroup` is made of, in its order, of groups in it, too; else the error itself. A class of the
    author's that is derived from it is an error like any other, and so is a group with what is no `Exception`."""
    left = [error]  # no recursion: what a handler raises may be ever so deep
    while left:
        each = left.pop()
        if type(each) is ExceptionGroup:
            left += reversed(each.exceptions)
        else:
            yield each


def asked_seconds(error: BaseException) -> float | None:
    """After how long a `Snooze` or `Retry.after` wants the next attempt. None of all else, and where a subclass of the
    author's does not say, or says what is no time: then it has failed like any other."""
    if not isinstance(error, Snooze | RetryAfter):
        return None
    try:
        return Again(OutcomeName.SNOOZED, error.seconds).delay
    except Exception:  # noqa: BLE001 - whatever the author's class does when it is asked
        return None


def _longest(error: BaseException) -> float:
    """To compare by: first what the policy is asked about, and a `Snooze` that does not say, which has failed."""
    return math.inf if (seconds := asked_seconds(error)) is None else seconds


def _parts(strategy: object) -> Iterator[object]:
    """A strategy, and those that it is made of."""
    yield strategy
    for part in _made_of(strategy):
        yield from _parts(part)


def _made_of(strategy: object) -> Iterator[object]:
    for kind, name in _MADE_OF:
        if isinstance(strategy, kind):
            yield from getattr(strategy, name)


def _is_asynchronous(strategy: object) -> bool:
    asked = (strategy, getattr(strategy, "predicate", None))
    return any(inspect.iscoroutinefunction(its) for one in asked for its in (one, type(one).__call__))


def _says_yes(strategy: Any, state: RetryCallState) -> bool:
    """What `strategy` answers. Those that it is made of are asked here: in tenacity an awaitable counts as yes."""
    call = type(strategy).__call__
    if call in _TOGETHER:
        return _TOGETHER[call](_says_yes(part, state) for part in _made_of(strategy))
    if call is retry_if_not_result.__call__ and state.outcome is not None and not state.outcome.failed:
        return not _known(strategy.predicate(state.outcome.result()))
    return _known(strategy(state))


def _known(answer: Any) -> Any:
    """An answer that is there at once.

    Raises:
        TypeError: It would have to be awaited, as that of a lambda that calls a coroutine function.
    """
    if inspect.isawaitable(answer):
        kind = type(cast(object, answer)).__name__
        if inspect.iscoroutine(cast(object, answer)):
            cast(Coroutine[Any, Any, Any], answer).close()
        raise TypeError(f"a strategy of the retry policy answered with a {kind}, which nobody awaits")
    return answer


def _repeats_success(strategy: object) -> str | None:
    """The name of what makes `strategy` say yes to every success; None where it does not. A class counts by the
    `__call__` that it has: one of its own may answer otherwise."""
    kind = type(strategy)
    if kind.__call__ in _REPEATING:
        return kind.__name__.lstrip("_")
    if isinstance(strategy, retry_any) and kind.__call__ is retry_any.__call__:
        return next((name for part in strategy.retries if (name := _repeats_success(part)) is not None), None)
    if isinstance(strategy, retry_all) and kind.__call__ is retry_all.__call__:
        names = [_repeats_success(part) for part in strategy.retries]
        return None if None in names else next(iter(names), kind.__name__)  # of nothing, all say yes
    return None


def _refuses_success(strategy: object) -> bool:
    """Whether `strategy` says no to every success, by what it is made of, as for `_repeats_success`."""
    kind = type(strategy)
    if isinstance(strategy, retry_any) and kind.__call__ is retry_any.__call__:
        return all(map(_refuses_success, strategy.retries))
    if isinstance(strategy, retry_all) and kind.__call__ is retry_all.__call__:
        return any(map(_refuses_success, strategy.retries))
    return kind.__call__ in _EXCEPTIONS_ONLY


def _call_state(failures: int, elapsed: float, error: BaseException | None = None) -> RetryCallState:
    """tenacity's view of the attempt. Its clock is not used: the times are those that the database remembers."""
    state = RetryCallState(_RETRYING, None, (), {})
    state.attempt_number = failures + 1
    state.start_time = 0.0
    state.outcome_timestamp = max(elapsed, 0.0)
    state.idle_for = max(elapsed, 0.0)
    if error is not None:
        state.outcome = Future(state.attempt_number)
        state.outcome.set_exception(error)
    return state


def _seconds(what: str, seconds: float) -> float:
    real = isinstance(seconds, int | float)  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
    if not real or not 0 <= seconds <= MAX_DELAY_SECONDS:
        raise ConfigurationError(f"{what}({seconds!r}): give seconds between 0 and {MAX_DELAY_SECONDS:.0f}")
    return float(seconds)


_RETRYING = Retrying(reraise=True)
_KINDS = {"wait": wait_base, "stop": stop_base, "retry": retry_base}
_MADE_OF = (
    *((retry_any, "retries"), (retry_all, "retries"), (stop_any, "stops"), (stop_all, "stops")),
    *((wait_combine, "wait_funcs"), (wait_chain, "strategies")),
)
_TOGETHER = {
    **dict.fromkeys((retry_any.__call__, stop_any.__call__), any),
    **dict.fromkeys((retry_all.__call__, stop_all.__call__), all),
}
_REPEATING = (  # "until" such an error, says tenacity of them: a success is none
    retry_unless_exception_type.__call__,
    retry_if_not_exception_message.__call__,
    type(retry_always).__call__,
)
_EXCEPTIONS_ONLY = (  # most of tenacity's classes, and an author's, are derived from the first one
    retry_if_exception.__call__,
    retry_if_exception_cause_type.__call__,
    type(retry_never).__call__,
)

"""Retry policies: tenacity's objects answer as they do in tenacity's own loop; what cannot work is refused."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn
from uuid import UUID

import pytest
import tenacity
from hypothesis import given, settings
from hypothesis import strategies as st
from sidings.errors import ConfigurationError
from sidings.jobs import Again, Discard, End, ErrorInfo, Hold, OutcomeName, Retry, RetryAfter, Snooze
from tenacity import (
    retry_all,
    retry_always,
    retry_any,
    retry_if_exception_message,
    retry_if_exception_type,
    retry_if_not_exception_message,
    retry_if_not_exception_type,
    retry_if_not_result,
    retry_if_result,
    retry_unless_exception_type,
    stop_after_attempt,
    stop_after_delay,
    stop_before_delay,
    stop_never,
    wait_chain,
    wait_exponential,
    wait_exponential_jitter,
    wait_fixed,
    wait_incrementing,
    wait_none,
    wait_random_exponential,
)

MOST_SECONDS = 366 * 86_400.0


def delay_of(outcome: object) -> float:
    assert isinstance(outcome, Again), outcome
    return outcome.delay


# -- the same answers as tenacity ---------------------------------------------------------------------------------

numbers = st.integers(0, 8_000).map(lambda eighths: eighths / 8)  # sums of these are exact
waits = st.one_of(
    st.builds(wait_fixed, numbers),
    st.builds(wait_incrementing, numbers, numbers, numbers),
    st.builds(lambda m, low, span: wait_exponential(multiplier=m, min=low, max=low + span), numbers, numbers, numbers),
    st.lists(numbers, min_size=1, max_size=5).map(lambda seconds: wait_chain(*map(wait_fixed, seconds))),
    st.just(wait_none()),
    st.tuples(numbers, numbers).map(lambda pair: wait_fixed(pair[0]) + wait_fixed(pair[1])),
)
stops = st.one_of(
    st.integers(1, 8).map(stop_after_attempt),
    numbers.map(stop_after_delay),
    numbers.map(stop_before_delay),
    st.tuples(st.integers(1, 8), numbers).map(lambda pair: stop_after_attempt(pair[0]) | stop_after_delay(pair[1])),
    st.tuples(st.integers(1, 4), numbers).map(lambda pair: stop_after_attempt(pair[0]) & stop_before_delay(pair[1])),
)
RUNS = st.lists(numbers, min_size=12, max_size=12)  # how long each attempt runs before it fails


def by_tenacity(wait: Any, stop: Any, durations: list[float]) -> list[float]:
    """The delays that tenacity's own loop makes, on a clock of ours."""
    clock, delays, left = [5_000.0], [], iter(durations)

    def fail() -> None:
        duration = next(left, None)
        if duration is None:
            raise StopAsyncIteration  # enough seen
        clock[0] += duration
        raise ValueError

    def sleep(seconds: float) -> None:
        delays.append(seconds)
        clock[0] += seconds

    real = tenacity.time
    tenacity.time = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)  # type: ignore[assignment]
    try:
        retrying = tenacity.Retrying(
            wait=wait, stop=stop, sleep=sleep, retry=retry_if_exception_type(ValueError), reraise=True
        )
        with pytest.raises((ValueError, StopAsyncIteration)):
            retrying(fail)
    finally:
        tenacity.time = real
    return delays


def by_sidings(wait: Any, stop: Any, durations: list[float]) -> list[float]:
    """The delays of decisions that are made one by one, from what the database would remember."""
    policy, delays, elapsed = Retry(wait=wait, stop=stop), [], 0.0
    for failures, duration in enumerate(durations):
        elapsed += duration
        outcome = policy.decide(ValueError(), failures=failures, elapsed=elapsed)
        if not isinstance(outcome, Again):
            break
        delays.append(outcome.delay)
        elapsed += outcome.delay
    return delays


@settings(max_examples=400, deadline=None)
@given(waits, stops, RUNS)
def test_tenacitys_strategies_decide_as_in_tenacitys_own_loop(wait: Any, stop: Any, durations: list[float]):
    ours, theirs = by_sidings(wait, stop, durations), by_tenacity(wait, stop, durations)
    assert len(ours) == len(theirs)
    assert ours == pytest.approx(theirs)


@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated")  # before 9.2 there is no other
@given(st.integers(0, 2_000), st.floats(0.01, 10), st.floats(0.1, 600), st.floats(1.1, 4), st.floats(0, 5))
def test_exponential_backoff_with_jitter_stays_in_its_bounds(
    failures: int, initial: float, most: float, base: float, jitter: float
):
    policy = Retry(wait=wait_exponential_jitter(initial, max=most, exp_base=base, jitter=jitter))
    delay = delay_of(policy.decide(ValueError(), failures=failures, elapsed=0))
    try:
        low = initial * base**failures
    except OverflowError:
        low = math.inf
    assert min(low, most) <= delay <= max(0.0, min(low + jitter, most))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 100_000), st.floats(0, 1e9))
def test_the_default_policy_never_gives_up_and_never_waits_longer_than_five_minutes(failures: int, elapsed: float):
    delay = delay_of(Retry().decide(ValueError("x"), failures=failures, elapsed=elapsed))
    assert min(2.0 ** min(failures, 50), 300) <= delay <= 300


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 60))
def test_random_exponential_waits_stay_in_their_bounds(failures: int):
    policy = Retry(wait=wait_random_exponential(multiplier=0.5, max=60))
    assert 0 <= delay_of(policy.decide(ValueError(), failures=failures, elapsed=0)) <= 60


def test_stop_after_attempt_counts_failures_that_other_executors_have_stored():
    policy = Retry(wait=wait_fixed(1), stop=stop_after_attempt(3))
    decisions = [policy.decide(ValueError(), failures=n, elapsed=0) for n in range(4)]
    assert [type(decision) for decision in decisions] == [Again, Again, End, End]


def test_stop_after_delay_counts_from_the_first_failed_attempt():
    policy = Retry(wait=wait_fixed(1), stop=stop_after_delay(60))
    assert isinstance(policy.decide(ValueError(), failures=900, elapsed=59.9), Again)
    assert isinstance(policy.decide(ValueError(), failures=0, elapsed=60.0), End)


def test_stop_before_delay_looks_ahead_over_the_coming_wait():
    policy = Retry(wait=wait_fixed(10), stop=stop_before_delay(60))
    assert isinstance(policy.decide(ValueError(), failures=3, elapsed=49.0), Again)
    assert isinstance(policy.decide(ValueError(), failures=3, elapsed=50.0), End)


# -- which failures -----------------------------------------------------------------------------------------------


def test_a_failure_that_is_not_worth_a_retry_ends_the_job():
    policy = Retry(retry=retry_if_exception_type((ConnectionError, TimeoutError)))
    assert isinstance(policy.decide(ConnectionResetError(), failures=0, elapsed=0), Again)
    outcome = policy.decide(KeyError("x"), failures=0, elapsed=0)
    assert isinstance(outcome, End)
    assert outcome.name is OutcomeName.DISCARDED
    assert outcome.error is not None
    assert outcome.error.error_class == "KeyError"


def test_on_exhausted_hold_keeps_the_job_for_a_person_and_says_why():
    policy = Retry(stop=stop_after_attempt(2), retry=retry_if_not_exception_type(KeyError), on_exhausted="hold")
    given_up = policy.decide(ValueError("x"), failures=1, elapsed=0)
    refused = policy.decide(KeyError("x"), failures=0, elapsed=0)
    assert isinstance(given_up, Hold)
    assert given_up.reason == "gave up after 2 failures"
    assert isinstance(refused, Hold)
    assert refused.reason == "not retried: KeyError"


def test_retry_after_takes_the_place_of_the_wait_but_not_of_the_stop():
    policy = Retry(wait=wait_fixed(1), stop=stop_after_attempt(2), retry=retry_if_exception_type(KeyError))
    assert delay_of(policy.decide(Retry.after(77), failures=0, elapsed=0)) == 77
    assert isinstance(policy.decide(Retry.after(77), failures=1, elapsed=0), End)


def test_a_result_may_ask_for_a_retry():
    policy = Retry(wait=wait_fixed(5), retry=retry_if_result(lambda result: result == "busy"))
    assert policy.judge_result("done", failures=0, elapsed=0) is None
    rejected = policy.judge_result("busy", failures=0, elapsed=0)
    assert delay_of(rejected) == 5
    assert rejected is not None
    assert rejected.error is not None
    assert rejected.error.message == "the handler returned 'busy'"


def test_results_and_exceptions_may_both_ask_for_a_retry():
    policy = Retry(retry=retry_if_result(lambda result: result is None) | retry_if_exception_type(OSError))
    assert isinstance(policy.judge_result(None, failures=0, elapsed=0), Again)
    assert policy.judge_result(1, failures=0, elapsed=0) is None
    assert isinstance(policy.decide(OSError(), failures=0, elapsed=0), Again)
    assert isinstance(policy.decide(ValueError(), failures=0, elapsed=0), End)


def test_a_rejected_result_counts_towards_the_stop():
    policy = Retry(stop=stop_after_attempt(2), retry=retry_if_result(bool), on_exhausted="hold")
    assert isinstance(policy.judge_result(1, failures=0, elapsed=0), Again)
    assert isinstance(policy.judge_result(1, failures=1, elapsed=0), Hold)


# -- what a strategy may answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "delay"), [(-5.0, 0.0), (math.inf, MOST_SECONDS), (1e30, MOST_SECONDS), (0, 0.0), (3, 3.0)]
)
def test_an_odd_wait_is_brought_into_range(answer: float, delay: float):
    policy = Retry(wait=lambda _: answer)  # type: ignore[arg-type]
    assert delay_of(policy.decide(ValueError(), failures=0, elapsed=0)) == delay


@pytest.mark.parametrize("answer", [math.nan, None, "soon"])
def test_a_wait_that_is_no_number_is_an_error_and_no_outcome(answer: Any):
    policy = Retry(wait=lambda _: answer)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        policy.decide(ValueError(), failures=0, elapsed=0)


@pytest.mark.parametrize("what", ["wait", "stop", "retry"])
def test_asynchronous_strategies_are_refused(what: str):
    async def function(state: object) -> float:
        return 1.0

    class Strategy:
        async def __call__(self, state: object) -> float:
            return 1.0

    kinds = {
        "wait": (tenacity.wait_combine, tenacity.wait_chain),
        "stop": (tenacity.stop_any, tenacity.stop_all),
        "retry": (tenacity.retry_any, tenacity.retry_all),
    }
    for strategy in (function, Strategy()):
        either, both = (kind(strategy) for kind in kinds[what])  # type: ignore[arg-type]
        for whole in (strategy, either, both, kinds[what][0](both)):  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match=r"asynchronous strategies are not supported"):
                Retry(**{what: whole})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind",
    ["retry_if_result", "retry_if_not_result", "retry_if_exception"]
    + ["wait_exception"] * hasattr(tenacity, "wait_exception"),
)
def test_asynchronous_predicates_are_refused(kind: str):
    """Their answer, a coroutine, meant yes: what had succeeded ran again for ever."""

    async def function(state: object) -> bool:
        return False

    class Predicate:
        async def __call__(self, state: object) -> bool:
            return False

    what = kind.split("_")[0]
    combined = tenacity.wait_combine if what == "wait" else retry_any
    for predicate in (function, Predicate(), partial(function)):
        strategy = getattr(tenacity, kind)(predicate)
        for whole in (strategy, combined(strategy)):
            with pytest.raises(ConfigurationError, match=r"asynchronous strategies are not supported"):
                Retry(**{what: whole})


OF_A_RESULT: dict[str, Callable[[Any], Any]] = {
    "result": retry_if_result,
    "not result": retry_if_not_result,
    "any": lambda answer: retry_any(retry_if_result(lambda result: result == 5), retry_if_result(answer)),
    "all": lambda answer: retry_all(retry_if_result(lambda result: result is None), retry_if_result(answer)),
    "any in all": lambda answer: retry_all(retry_any(retry_if_not_result(answer))),
    "of one's own": lambda answer: answer,
}


@pytest.mark.parametrize("strategy", OF_A_RESULT)
def test_a_coroutine_for_an_answer_about_a_result_is_an_error_and_no_outcome(strategy: str):
    """No declaration tells that a lambda will return one."""
    made = list[Any]()
    policy = Retry(retry=OF_A_RESULT[strategy](lambda _: a_coroutine(made)))
    with pytest.raises(TypeError, match="answered with a coroutine, which nobody awaits"):
        policy.judge_result(None, failures=0, elapsed=0)
    assert [inspect.getcoroutinestate(each) for each in made] == [inspect.CORO_CLOSED]


OF_AN_ERROR: dict[str, Callable[[Any], dict[str, Any]]] = {
    "wait": lambda answer: {"wait": answer},
    "stop": lambda answer: {"stop": answer},
    "stop_any": lambda answer: {"stop": tenacity.stop_any(stop_never, answer)},
    "stop_all": lambda answer: {"stop": tenacity.stop_all(answer)},
    "retry": lambda answer: {"retry": answer},
    "retry_if_exception": lambda answer: {"retry": retry_any(tenacity.retry_if_exception(answer))},
}


@pytest.mark.parametrize("strategy", OF_AN_ERROR)
def test_a_coroutine_for_an_answer_about_an_error_is_an_error_and_no_outcome(strategy: str):
    made = list[Any]()
    policy = Retry(**OF_AN_ERROR[strategy](lambda _: a_coroutine(made)))
    with pytest.raises(TypeError, match="answered with a coroutine, which nobody awaits"):
        policy.decide(ValueError(), failures=0, elapsed=0)
    assert [inspect.getcoroutinestate(each) for each in made] == [inspect.CORO_CLOSED]


def a_coroutine(made: list[Any]) -> Any:
    async def function() -> bool:
        return False

    made.append(function())
    return made[-1]


def test_of_results_only_those_strategies_are_asked_that_look_at_them():
    class Busy(tenacity.retry_if_exception): ...

    class Asked(tenacity.retry_if_exception):
        def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
            return retry_state.outcome is not None and retry_state.outcome.result() == "busy"

    of_errors = (
        tenacity.retry_if_exception_type(ValueError),
        tenacity.retry_if_exception_message("away"),
        tenacity.retry_if_exception_cause_type(ValueError),
        tenacity.retry_never,
        Busy(lambda error: True),
        retry_all(retry_unless_exception_type(KeyError), retry_if_exception_type(OSError)),
        retry_all(lambda state: state.attempt_number < 3, retry_if_exception_type(OSError)),
        retry_all(retry_if_result(bool), retry_any(retry_if_exception_type(OSError), tenacity.retry_never)),
    )
    assert not any(Retry(retry=strategy).judges_results for strategy in of_errors)
    assert not Retry(retry=tenacity.retry_any(*of_errors, tenacity.retry_all(*of_errors))).judges_results
    assert Retry(
        retry=tenacity.retry_any(*of_errors, tenacity.retry_if_result(lambda result: not result))
    ).judges_results
    for own in (Asked(lambda error: True), lambda state: False):
        assert Retry(retry=own).judges_results
        assert Retry(retry=retry_any(retry_if_exception_type(OSError), own)).judges_results
        assert Retry(retry=retry_all(retry_unless_exception_type(KeyError), own)).judges_results  # it may say yes
        mixed = retry_any(retry_if_exception_type(OSError), own)
        assert Retry(retry=retry_all(mixed, own)).judges_results


def test_tenacitys_asynchronous_strategies_are_refused():
    async def temporary(error: BaseException) -> bool:
        return True

    with pytest.raises(ConfigurationError, match="asynchronous"):
        Retry(retry=tenacity.asyncio.retry_if_exception(temporary))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"wait": 5}, {"stop": 3}, {"retry": "always"}, {"on_exhausted": "explode"}])
def test_a_policy_that_makes_no_sense_is_refused_when_it_is_declared(options: dict[str, Any]):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Retry(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"retry": ConnectionError},  # a success asked for another attempt as well, again and again, without a word
        {"retry": retry_if_exception_type},
        {"retry": stop_after_attempt(3)},
        {"stop": stop_after_attempt},  # the first failure was the last one: the job was discarded
        {"stop": wait_fixed(3)},
        {"wait": wait_fixed},
        {"wait": stop_after_attempt(3)},
    ],
    ids=[
        "an error",
        "retry's class",
        "a stop to retry",
        "stop's class",
        "a wait to stop",
        "wait's class",
        "a stop to wait",
    ],
)
def test_a_class_or_another_kind_of_strategy_is_refused_when_it_is_declared(options: dict[str, Any]):
    [what] = options
    with pytest.raises(ConfigurationError, match=f"give one of tenacity's {what}_... objects"):
        Retry(**options)


# retry_if_exception takes a function, for which the class of an error stands here as well
OF_EXCEPTIONS = {
    name: getattr(tenacity, name)(match="x") if "message" in name else getattr(tenacity, name)(ValueError)
    for name in dir(tenacity)
    if name.startswith("retry_") and "exception" in name
}
NAMES_OF_EXCEPTIONS = sorted(OF_EXCEPTIONS)
IN_WHAT = {
    "alone": lambda one: one,
    "any": lambda one: retry_any(retry_if_result(lambda result: result == 5), one),
    "any in all": lambda one: retry_all(retry_any(retry_if_exception_type(OSError), one)),
}


@pytest.mark.parametrize("name", [*NAMES_OF_EXCEPTIONS, "retry_always", "retry_never"])
@pytest.mark.parametrize("within", IN_WHAT)
def test_no_strategy_that_looks_at_exceptions_only_repeats_what_succeeds(name: str, within: str):
    strategy = IN_WHAT[within](OF_EXCEPTIONS.get(name) or getattr(tenacity, name))
    try:
        refused, policy = "", Retry(retry=strategy)
    except ConfigurationError as error:
        refused, policy = str(error), None
    answer = policy and policy.judge_result(None, failures=0, elapsed=0)
    assert answer is None
    if name in ("retry_always", "retry_if_not_exception_message", "retry_unless_exception_type"):
        assert f"{name} repeats what succeeds" in refused
        assert "give retry_if_not_exception_type(...), or retry_if_exception(lambda e: ...)" in refused
    else:
        assert refused == ""


def test_what_repeats_a_success_may_stand_with_what_does_not():
    for harmless in (retry_if_exception_message(match="x"), retry_if_result(lambda result: result == 5)):
        policy = Retry(retry=retry_all(retry_unless_exception_type(KeyError), harmless))
        assert policy.judge_result(None, failures=0, elapsed=0) is None
    with pytest.raises(ConfigurationError, match="retry_if_not_exception_message repeats what succeeds"):
        Retry(retry=retry_all(retry_if_not_exception_message(match="x"), retry_always))
    with pytest.raises(ConfigurationError, match="retry_all repeats what succeeds"):
        Retry(retry=retry_all())


def test_a_strategy_of_ones_own_counts_by_what_it_answers_with():
    class Same(retry_unless_exception_type): ...

    class Mended(retry_unless_exception_type):
        def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
            return bool(retry_state.outcome and retry_state.outcome.failed and super().__call__(retry_state))

    class Other(retry_any):
        def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
            return False

    with pytest.raises(ConfigurationError, match="Same repeats what succeeds"):
        Retry(retry=Same(KeyError))
    for retry in (Mended(KeyError), Other(Same(KeyError)), retry_any(Mended(KeyError), lambda _: False)):
        policy = Retry(retry=retry)
        assert policy.judge_result(None, failures=0, elapsed=0) is None


@pytest.mark.parametrize("seconds", [-1, MOST_SECONDS + 1, math.inf, math.nan])
@pytest.mark.parametrize("make", [Snooze, Retry.after], ids=["Snooze", "Retry.after"])
def test_a_delay_out_of_range_is_refused_where_it_is_asked_for(make: Any, seconds: float):
    with pytest.raises(ConfigurationError, match="give seconds between 0 and"):
        make(seconds)


def test_what_a_handler_raises_says_what_it_means():
    assert str(Snooze(5)) == "snoozed for 5 s"
    assert str(Retry.after(5)) == "retry after 5 s"
    assert str(Retry.after(5, "carrier is busy")) == "carrier is busy"
    assert isinstance(Retry.after(5), RetryAfter)
    assert str(Discard("no such transport")) == "no such transport"


# -- how an error is described ------------------------------------------------------------------------------------


@settings(max_examples=500, deadline=None)
@given(st.text(st.characters()), st.text(st.characters()))
def test_whatever_an_error_says_can_be_stored(name: str, message: str):
    info = ErrorInfo.from_text(name, message)
    for text in (info.error_class, info.message, info.fingerprint):
        assert "\0" not in text
        text.encode()
        assert len(text) <= 4_000


def test_of_an_exception_group_all_is_told_that_went_wrong():
    inner = ExceptionGroup("two of these", [KeyError("no such carrier"), OSError("busy")])
    info = ErrorInfo.of(ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("odd"), inner]))
    assert info.message == (
        "unhandled errors in a TaskGroup (2 sub-exceptions): ValueError: odd; ExceptionGroup: two of these "
        "(2 sub-exceptions): KeyError: 'no such carrier'; OSError: busy"
    )
    assert (
        info.fingerprint != ErrorInfo.of(ExceptionGroup("unhandled errors in a TaskGroup", [inner, inner])).fingerprint
    )
    many = ErrorInfo.of(ExceptionGroup("many", [ValueError("x" * 1_000)] * 100_000))
    assert len(many.message) == 4_000


def test_a_message_of_a_megabyte_is_cut_and_keeps_its_beginning():
    info = ErrorInfo.of(ValueError("begin " + "\ud800\0" * 500_000))
    assert info.message.startswith("begin ")
    assert len(info.message) == 4_000


def test_of_a_text_of_millions_of_characters_only_the_first_thousands_are_looked_at():
    class Text(str):
        def __iter__(self) -> NoReturn:
            raise AssertionError("each character was looked at, while the event loop waited")

        def __getitem__(self, key: object) -> NoReturn:
            raise AssertionError("an error's own class says what its text is")

    class Talkative(Exception):
        def __str__(self) -> str:
            return Text("x" * 5_000_000)

    info = ErrorInfo.of(Talkative())
    assert info.message == "x" * 4_000
    assert type(info.message) is str


@settings(max_examples=300, deadline=None)
@given(st.uuids(), st.uuids(), st.integers(0), st.integers(0), st.integers(0, 2**64), st.integers(0, 2**64))
def test_errors_that_differ_only_in_numbers_and_ids_share_a_fingerprint(
    one: UUID, other: UUID, m: int, n: int, address: int, another: int
):
    def error(id: UUID, number: int, at: int) -> ErrorInfo:
        return ErrorInfo.of(ValueError(f"transport {id} at stop {number}: <Carrier object at {at:#x}> said 'no {id}'"))

    assert error(one, m, address).fingerprint == error(other, n, another).fingerprint
    upper = ErrorInfo.of(ValueError(f"no transport {str(one).upper()}"))
    assert upper.fingerprint == ErrorInfo.of(ValueError(f"no transport {other}")).fingerprint


def test_errors_of_another_kind_have_another_fingerprint():
    fingerprints = {
        ErrorInfo.of(error).fingerprint
        for error in (ValueError("no such stop 5"), KeyError("no such stop 5"), ValueError("no such place 5"))
    }
    assert len(fingerprints) == 3


def test_an_errors_class_is_named_so_that_it_can_be_found():
    class CarrierDown(Exception): ...

    assert ErrorInfo.of(ValueError()).error_class == "ValueError"
    assert ErrorInfo.of(tenacity.TryAgain()).error_class == "tenacity.TryAgain"
    assert ErrorInfo.of(CarrierDown()).error_class.endswith(
        "test_an_errors_class_is_named_so_that_it_can_be_found.<locals>.CarrierDown"
    )


def test_an_error_that_cannot_say_what_it_is_is_described_all_the_same():
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("no words")

    info = ErrorInfo.of(Mute())
    assert info.error_class.endswith("Mute")
    assert info.message

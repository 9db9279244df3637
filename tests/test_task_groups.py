"""What a task group raises counts as what its tasks have raised: for retry policies, `Discard`, `Snooze`, outages and
conflicts, of jobs and of messages."""

import asyncio
from collections.abc import Callable
from itertools import chain
from math import inf
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidings import Call, Discard, KafkaUnavailable, Message, PostgresUnavailable, Registry, Retry, Snooze, Transaction
from sidings.executor import PostgresSettings
from sidings.executor.queues import Entry, OriginQueue
from sidings.executor.transactional import Transactional
from sidings.executor.worker import CancelReason
from sidings.executor.workers import Workers
from sidings.jobs import Again, End, Hold, Job, OutcomeName
from sidings.jobs.middleware import Next
from sidings.jobs.retry import that_counts
from sidings.testing import drain
from tenacity import (
    retry_any,
    retry_if_exception_type,
    retry_if_not_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_fixed,
    wait_none,
)

from .consumer_support import Number, a_service, impatient, numbers, offset_reaches, produce, record, sample
from .support import SECONDS, Ride, enqueue, eventually
from .test_outages_of_handlers import of_jobs
from .test_stateless import a_service as a_stateless_service

ONCE = Retry(wait=wait_none(), stop=stop_after_attempt(1))
ON_NETWORK = Retry(wait=wait_fixed(7), retry=retry_if_exception_type(ConnectionError))
CONFLICT = asyncpg.SerializationError("could not serialize access")
CUT, AWAY = PostgresUnavailable("no answer"), PostgresUnavailable("no connection", blameless=True)
LATE, NO_BROKER = KafkaUnavailable("late"), KafkaUnavailable("no broker answers", blameless=True)
BUG, NETWORK = ValueError("a bug"), ConnectionResetError("reset")


class Unsaid(Snooze):
    def __init__(self) -> None:
        Exception.__init__(self, "it does not say for how long")


class Failures(ExceptionGroup[Exception]):
    """A class of an author's own, which a policy may name."""


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("unhandled errors in a TaskGroup", errors)


async def together(*errors: Exception) -> None:
    """Raises what a real task group makes of tasks that fail at once."""

    async def fail(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as tasks:
        for error in errors:
            tasks.create_task(fail(error))


# -- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        *(BUG, CONFLICT, AWAY, Discard("x"), Snooze(1), Failures("two", [BUG, Discard("x")])),
        *(asyncio.CancelledError(), BaseExceptionGroup("of a panic", [SystemExit(3), Discard("x")])),
    ],
    ids=repr,
)
def test_what_is_no_exception_group_counts_as_itself(error: BaseException):
    assert that_counts(error) is error


@pytest.mark.parametrize("error", [BUG, CONFLICT, AWAY, NO_BROKER, Discard("x"), Snooze(1), Failures("f", [BUG])])
def test_the_only_error_of_a_group_counts_however_deep_it_is(error: Exception):
    assert that_counts(group(error)) is error
    assert that_counts(group(group(group(error)))) is error


@pytest.mark.parametrize(
    ("first", "beside"),
    [
        (AWAY, [BUG, Discard("x"), Snooze(9), Retry.after(9), CONFLICT, NO_BROKER]),
        # These count, so that what brings the server down itself, or sends too much, does not go on for ever.
        (CUT, [AWAY, NO_BROKER, LATE]),
        (LATE, [AWAY, NO_BROKER, BUG, CONFLICT]),
        (NO_BROKER, [BUG, Discard("x"), Snooze(9), CONFLICT]),
        (CONFLICT, [asyncpg.InFailedSQLTransactionError("aborted"), BUG, Discard("x"), Snooze(9)]),
        (BUG, [Discard("x")]),
        (Snooze(9), [Discard("x"), Snooze(2)]),
        (Retry.after(9), [Discard("x"), Retry.after(2)]),
    ],
    ids=lambda value: repr(value) if isinstance(value, Exception) else "",
)
def test_of_several_errors_an_outage_counts_before_a_conflict_and_a_discard_last(
    first: Exception, beside: list[Exception]
):
    for other in beside:
        assert that_counts(group(first, other)) is first
        assert that_counts(group(group(other), first)) is first
    assert that_counts(group(*beside, first)) is first


@pytest.mark.parametrize(
    "errors", [[BUG, NETWORK], [BUG, Snooze(9)], [Snooze(9), Retry.after(2)], [BUG, Failures("f", [BUG])]]
)
def test_several_failures_count_as_the_group_that_they_are(errors: list[Exception]):
    error = group(*errors)
    assert that_counts(error) is error


def test_a_snooze_that_does_not_say_for_how_long_is_left_to_its_judge():
    unsaid = Unsaid()
    assert that_counts(group(Snooze(9), unsaid)) is unsaid


def test_a_policy_judges_what_a_group_holds():
    assert isinstance(ON_NETWORK.decide(group(NETWORK), failures=0, elapsed=0), Again)
    assert isinstance(ON_NETWORK.decide(group(group(NETWORK)), failures=0, elapsed=0), Again)
    assert isinstance(ON_NETWORK.decide(group(BUG), failures=0, elapsed=0), End)
    but = Retry(retry=retry_if_not_exception_type(ValueError))
    assert isinstance(but.decide(group(BUG), failures=0, elapsed=0), End)
    assert isinstance(but.decide(group(NETWORK), failures=0, elapsed=0), Again)
    named = Retry(retry=retry_if_exception_type(Failures))
    assert isinstance(named.decide(Failures("two", [BUG, BUG]), failures=0, elapsed=0), Again)


def test_of_several_failures_one_that_is_retried_counts_before_one_that_is_not():
    for errors in ([BUG, NETWORK], [NETWORK, BUG], [BUG, group(BUG, NETWORK)], [Discard("x"), NETWORK]):
        outcome = ON_NETWORK.decide(group(*errors), failures=0, elapsed=0)
        assert isinstance(outcome, Again), errors
        assert outcome.delay == 7
        assert outcome.error is not None
        assert all(type(each).__name__ in outcome.error.message for each in errors)
    held = Retry(retry=ON_NETWORK.retry, on_exhausted="hold").decide(group(Discard("x"), BUG), failures=0, elapsed=0)
    assert isinstance(held, Hold)


def test_of_several_that_say_when_the_longest_counts_unless_another_one_is_retried():
    policy = Retry(wait=wait_fixed(7), stop=stop_after_attempt(3), retry=ON_NETWORK.retry)
    for errors, delay in (
        ([Retry.after(20), Retry.after(30)], 30),
        ([Retry.after(30), NETWORK], 7),
        ([Retry.after(20), BUG, Snooze(30)], 30),
        ([BUG, Snooze(30), Unsaid()], 30),
    ):
        outcome = policy.decide(group(*errors), failures=1, elapsed=0)
        assert isinstance(outcome, Again), errors
        assert (outcome.name, outcome.delay) == (OutcomeName.RETRIED, delay)
        assert isinstance(policy.decide(group(*errors), failures=2, elapsed=0), End), "it goes on for ever, uncounted"


failures = st.sampled_from([BUG, NETWORK, TimeoutError(), Retry.after(3), Retry.after(5)])
groups = st.recursive(failures, lambda inner: st.lists(inner, min_size=1, max_size=4).map(lambda some: group(*some)))


@given(groups, st.integers(0, 3))
def test_no_group_is_given_up_of_which_one_error_would_be_retried(error: Exception, failed: int):
    def leaves(error: Exception) -> list[Exception]:
        return list(chain(*map(leaves, error.exceptions))) if isinstance(error, ExceptionGroup) else [error]

    policy = Retry(wait=wait_none(), stop=stop_after_attempt(3), retry=ON_NETWORK.retry)
    alone = [policy.decide(each, failures=failed, elapsed=0) for each in leaves(error)]
    outcome = policy.decide(error, failures=failed, elapsed=0)
    assert isinstance(outcome, Again) == any(isinstance(each, Again) for each in alone)


def test_the_wait_of_an_outage_sees_the_outage():
    seen = list[BaseException | None]()

    def wait(state: Any) -> float:
        seen.append(state.outcome.exception())
        return 7

    outcome = Retry(wait=wait).put_off(group(AWAY, BUG), failures=0, elapsed=0)  # type: ignore[arg-type]
    assert seen == [AWAY]
    assert outcome.error is not None
    assert "ValueError: a bug" in outcome.error.message


# -- jobs -------------------------------------------------------------------------------------------------------------

OF_JOBS: dict[str, tuple[list[Exception], Retry, str, float | None]] = {
    "an error that is retried": ([NETWORK], ON_NETWORK, "retried", 7),
    "an error that is not": ([BUG], Retry(retry=retry_if_not_exception_type(ValueError)), "discarded", None),
    "one of each": ([BUG, NETWORK], ON_NETWORK, "retried", 7),
    "Discard": ([Discard("no such ride")], Retry(), "discarded", None),
    "two of Discard": ([Discard("no such ride"), Discard("nor this")], Retry(), "discarded", None),
    "Snooze": ([Snooze(50)], ONCE, "snoozed", 50),
    "Retry.after": ([Retry.after(50)], ON_NETWORK, "retried", 50),
    "a Snooze without seconds": ([Unsaid()], ONCE, "retried", 60),
    "an outage": ([AWAY, BUG], ONCE, "snoozed", 1),
    "an outage of Kafka": ([BUG, NO_BROKER], ONCE, "snoozed", 1),
    "a conflict": ([BUG, CONFLICT], ONCE, "snoozed", None),
}


@pytest.mark.parametrize("kind", ["raised", "transactional", "plain", "batch", "listed", "judged"])
@pytest.mark.parametrize("case", OF_JOBS)
async def test_a_job_ends_as_what_its_task_group_raised_would_have_it(database: str, case: str, kind: str):
    errors, retry, outcome, delay = OF_JOBS[case]
    service = of_jobs(database)
    if kind == "judged":
        blameless = case in (
            "an outage",
            "an outage of Kafka",
            "a conflict",
        )  # of these it is not asked, whatever it would say
        judging = retry_any(retry.retry, retry_if_result(lambda _: blameless))
        retry = Retry(wait=retry.wait, stop=retry.stop, retry=judging)

    async def ride(job: Job[Ride]) -> object:
        try:
            await together(*errors)
        except ExceptionGroup as error:
            if kind == "judged":
                return error
            raise

    def plain(job: Job[Ride]) -> None:
        raise group(*errors)

    async def batch(jobs: list[Job[Ride]]) -> None:
        await together(*errors)

    async def listed(jobs: list[Job[Ride]]) -> list[object]:
        return await asyncio.gather(*map(ride, jobs), return_exceptions=True)

    handler: Any = {"plain": plain, "batch": batch, "listed": listed}.get(kind, ride)
    options: dict[str, Any] = {"transactional": {"transactional": True}}.get(kind, {})
    if kind in ("batch", "listed"):
        options = {"batch": 10}
    job_type = service.job(name="ride", payload=Ride, retry=retry, **options)(handler)
    await enqueue(database, job_type, [Ride()])
    attempt, *_ = await drain(service)  # after a conflict the next attempt may be due already
    assert attempt.outcome == outcome
    assert delay is None or attempt.delay == delay
    assert attempt.error is not None
    if case != "a Snooze without seconds":
        declined = "sidings.jobs.retry.Discard" if "Discard" in case else "ExceptionGroup"
        assert attempt.error.error_class == declined
        assert all(str(error) in attempt.error.message for error in errors)


async def test_a_conflict_beside_a_failure_is_one_itself_in_the_eleventh_attempt(database: str):
    service = of_jobs(database)

    @service.job(retry=ONCE)
    async def ride(job: Job[Ride]) -> None:
        await together(BUG, CONFLICT)

    await enqueue(database, ride, [Ride()])
    attempts = await drain(service, until=100)
    assert [a.outcome for a in attempts] == [*["snoozed"] * 10, "discarded"]


async def test_an_outage_that_a_job_may_bring_about_is_no_excuse_for_its_task_group_for_ever(database: str):
    service = of_jobs(database)

    @service.job(retry=ONCE)
    async def ride(job: Job[Ride]) -> None:
        await together(AWAY, CUT)

    await enqueue(database, ride, [Ride()])
    attempts = await drain(service, until=100)
    assert [a.outcome for a in attempts] == ["snoozed", "snoozed", "discarded"]


@pytest.mark.parametrize(("error", "outcome"), [(Discard("it is done elsewhere"), "discarded"), (BUG, "snoozed")])
async def test_what_a_task_group_decides_counts_although_its_executor_gives_the_origin_up(
    error: Exception, outcome: str
):
    """What it fails with, on its way out, does not."""
    registry, began = Registry(), asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise group(error) from None

    nowhere = PostgresSettings(dsn="postgresql://nobody@localhost/nothing")
    workers = Workers(registry, 1, Transactional(nowhere, lambda _: None, lambda _: None))
    origin = OriginQueue("t/0", 1, None)
    origin.deadline = inf
    workers.start()
    try:
        workers.claim([Entry(1, origin, "ride", None, 1, payload=Ride().model_dump_json())])
        await asyncio.wait_for(began.wait(), SECONDS)
        workers.cancel(None, CancelReason.STOPPING)
        [(_, ended, _, _)] = await eventually(lambda: workers.finished)
        assert ended.name == outcome
    finally:
        await workers.stop()


async def test_a_middleware_sees_the_group_itself(database: str):
    registry, seen = Registry(), list[BaseException]()

    async def watch(call: Call, call_next: Next) -> object:
        try:
            return await call_next()
        except BaseException as error:
            seen.append(error)
            raise

    registry.middleware.append(watch)

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        await together(Discard("no such ride"))

    await enqueue(database, ride, [Ride()])
    [attempt] = await drain(database, registry)
    assert attempt.outcome == "discarded"
    assert [type(error) for error in seen] == [ExceptionGroup]


# -- service.transaction() --------------------------------------------------------------------------------------------


async def test_a_connection_that_breaks_in_a_task_group_is_an_outage(database: str):
    """It came out of the block as what asyncpg raises, which is the handler's failure."""
    service = of_jobs(database)

    @service.job(retry=ONCE)
    async def ride(job: Job[Ride]) -> None:
        async with service.transaction() as tx, asyncio.TaskGroup() as tasks:
            if job.attempt == 1:
                tasks.create_task(tx.execute("SELECT pg_terminate_backend(pg_backend_pid())"))

    await enqueue(database, ride, [Ride()])
    attempts = await drain(service, until=100)
    assert [a.outcome for a in attempts] == ["snoozed", "succeeded"]
    assert attempts[0].error is not None
    assert attempts[0].error.error_class == "sidings.errors.PostgresUnavailable"


async def test_a_job_whose_task_group_waits_for_the_place_of_its_own_block_starves_itself(database: str):
    """A child is another task than the one that has the block: it was put off for ever, uncounted."""
    service = of_jobs(database, pool_size=1)

    @service.job(retry=ONCE)
    async def ride(job: Job[Ride]) -> None:
        async def work() -> None:
            async with service.transaction():
                pass

        async with service.transaction(), asyncio.TaskGroup() as tasks:
            tasks.create_task(work())

    await enqueue(database, ride, [Ride()])
    async with service.connected():
        async with service.transaction() as tx:
            await tx.execute("SELECT")  # there is a connection now
        with impatient(service._parts.database.transactions):
            attempts = await drain(service, until=10)
    assert [a.outcome for a in attempts] == ["snoozed", "snoozed", "discarded"]
    assert attempts[0].error is not None
    assert "one by the block that this one is in" in attempts[0].error.message


# -- messages ---------------------------------------------------------------------------------------------------------

OF_MESSAGES: dict[str, tuple[Callable[[], list[Exception]], Retry, int, str, int]] = {
    # what it raises, how often; what becomes of the message, and how many failures are counted
    "Discard": (lambda: [Discard("x")], Retry(), 2, "discarded", 0),
    "Snooze": (lambda: [Snooze(0.01), Snooze(0.02)], ONCE, 4, "handled", 0),
    "an outage": (lambda: [AWAY, BUG], ONCE, 3, "handled", 0),
    "an outage of Kafka": (lambda: [BUG, NO_BROKER], ONCE, 3, "handled", 0),
    "a conflict": (lambda: [CONFLICT, BUG], ONCE, 4, "handled", 0),
    "an error that is retried": (
        lambda: [NETWORK, BUG],
        Retry(wait=wait_none(), retry=ON_NETWORK.retry, stop=stop_after_attempt(3)),
        3,
        "handled",
        2,
    ),
}


@pytest.mark.parametrize("case", OF_MESSAGES)
async def test_a_message_ends_as_what_its_task_group_raised_would_have_it(effects, topic, sidings_kafka, case):
    make, retry, most, result, failed = OF_MESSAGES[case]
    name, tried = await topic(), list[int]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=retry)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 1 and tried.count(1) < most:
            tried.append(1)
            await together(*make())
        await record(message, tx)

    await produce(sidings_kafka, name, range(2))
    async with service:
        await eventually(offset_reaches(effects, name, 2))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 2)
        assert sample(service, "sidings_consumer_messages_total", result="discarded") == (result == "discarded")
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 0
        assert sample(service, "sidings_consumer_failures_total") == failed
    assert len(tried) == most
    assert await numbers(effects) == ([0] if result == "discarded" else [0, 1])


@pytest.mark.parametrize("error", [CUT, asyncpg.TooManyConnectionsError("sorry, too many clients already")], ids=repr)
async def test_an_outage_in_a_task_group_undoes_the_batch_and_parks_nothing(effects, topic, sidings_kafka, error):
    """As of `published()`, where nobody knows what has been committed."""
    name, tried = await topic(), list[int]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=ONCE)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.value.n)
        if len(tried) < 3:
            await together(error, BUG)
        await record(message, tx)

    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(offset_reaches(effects, name, 1))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 1)
        assert sample(service, "sidings_consumer_messages_total", result="handled") == 1
        assert sample(service, "sidings_consumer_failures_total") == 0
    assert tried == [0, 0, 0]


@pytest.mark.parametrize("case", OF_MESSAGES)
async def test_a_stateless_message_ends_as_what_its_task_group_raised_would_have_it(topic, sidings_kafka, case):
    make, retry, most, result, failed = OF_MESSAGES[case]
    most = min(most, 2) if "outage" in case else 1 if case == "Discard" else most - 1 if failed else most
    failed = min(failed, most)
    name, tried = await topic(), list[int]()
    service = a_stateless_service(sidings_kafka)

    @service.consumer(name, stateless=True, retry=retry, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        if len(tried) < most:
            tried.append(message.value.n)
            await together(*make())

    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 1)
        assert sample(service, "sidings_consumer_messages_total", result=result) == 1
        assert sample(service, "sidings_consumer_failures_total") == failed
    assert len(tried) == most

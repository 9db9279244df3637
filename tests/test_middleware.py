"""What a service wraps around every handler: order, exceptions, cancellation, all kinds of handlers."""

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import pytest
from sidings import Call, ConfigurationError, Discard, Job, Message, Next, Registry, Retry, Snooze, Transaction
from sidings.testing import drain
from tenacity import stop_after_attempt, wait_none

from . import guide
from .consumer_support import a_service, offset_reaches, produce_raw
from .support import (
    ORIGIN,
    Ride,
    connected,
    enqueue,
    eventually,
    fetch,
    history,
    outcomes,
    running,
    value,
    without_place,
)

AT_ONCE = Retry(wait=wait_none(), stop=stop_after_attempt(2))
VALUE = Ride(transport="a", number=1).model_dump_json().encode()


class Steps:
    """Middlewares that say what they see."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.calls: list[Call] = []

    def named(self, name: str) -> Any:
        async def around(call: Call, call_next: Next) -> None:
            self.seen.append(f"{name} in")
            self.calls.append(call)
            try:
                result = await call_next()
            except BaseException as error:
                self.seen.append(f"{name} {type(error).__name__}")
                raise
            self.seen.append(f"{name} out {result!r}")

        return around


async def rows_of(database: str, registry: Registry, handler: Any, *, count: int = 1, **options: Any) -> list[Any]:
    """The history of one job, after `count` attempts."""
    declared = registry.job(**{"name": "ride", "retry": AT_ONCE, **options})(handler)
    await enqueue(database, declared, [Ride(transport="a", number=1)])

    async def enough() -> list[Any]:
        rows = await history(database)
        return rows if len(rows) >= count else []

    async with running(database, registry):
        return await eventually(enough)


async def test_middlewares_run_in_order_around_the_handler_and_see_its_job_and_result(database: str) -> None:
    registry, steps = Registry(), Steps()
    registry.middleware += [steps.named("outer"), steps.named("inner")]

    async def ride(job: Job[Ride]) -> int:
        steps.seen.append("handler")
        return job.payload.number

    await rows_of(database, registry, ride)
    assert steps.seen == ["outer in", "inner in", "handler", "inner out 1", "outer out 1"]
    outer, inner = steps.calls
    assert outer is inner
    assert (outer.name, outer.origin, outer.messages, outer.tx) == ("ride", ORIGIN, (), None)
    assert [(job.payload, job.attempt) for job in outer.jobs] == [(Ride(transport="a", number=1), 1)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Discard("no such ride"), ["discarded"]),
        (Snooze(0.01), ["snoozed", "succeeded"]),
        (Retry.after(0.01), ["retried", "succeeded"]),
        (ValueError("x"), ["retried", "succeeded"]),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("kind", ["async", "plain", "transactional"])
async def test_what_a_handler_raises_passes_through(
    database: str, kind: str, error: Exception, expected: list[str]
) -> None:
    registry, steps = Registry(), Steps()
    registry.middleware.append(steps.named("around"))

    def raise_once(job: Job[Ride]) -> None:
        if job.attempt == 1:
            raise error

    async def ride(job: Job[Ride]) -> None:
        raise_once(job)

    handler = raise_once if kind == "plain" else ride
    rows = await rows_of(
        database, registry, handler, count=len(expected), transactional=kind == "transactional", retry=AT_ONCE
    )
    assert [row["outcome"] for row in rows] == expected
    assert steps.seen[:2] == ["around in", f"around {type(error).__name__}"]
    assert all(call.tx is not None for call in steps.calls) == (kind == "transactional")


@pytest.mark.parametrize("error", [Discard("the tenant is gone"), Snooze(3600), ValueError("x")], ids=repr)
async def test_a_middleware_may_raise_in_the_place_of_the_handler(database: str, error: Exception) -> None:
    registry = Registry()
    ran: list[int] = []

    async def refuse(call: Call, call_next: Next) -> None:
        raise error

    async def ride(job: Job[Ride]) -> None:
        ran.append(job.id)

    registry.middleware.append(refuse)
    [row, *_] = await rows_of(database, registry, ride, retry=Retry(stop=stop_after_attempt(1)))
    assert row["outcome"] == ("snoozed" if isinstance(error, Snooze) else "discarded")
    assert row["error_class"].endswith(type(error).__name__)
    assert ran == []


async def swallow(call: Call, call_next: Next) -> str:
    try:
        await call_next()
    except Exception:
        return "all is well"
    return "nothing to see here"


async def test_a_middleware_that_swallows_an_error_does_not_make_a_failed_job_a_success(database: str) -> None:
    registry, steps = Registry(), Steps()
    registry.middleware += [steps.named("outer"), swallow]

    async def ride(job: Job[Ride]) -> None:
        raise ValueError("it failed")

    rows = await rows_of(database, registry, ride, count=2)
    assert [(row["outcome"], without_place(row["error_message"])) for row in rows] == [
        ("retried", "it failed"), ("discarded", "it failed")
    ]  # fmt: skip
    assert steps.seen[:2] == ["outer in", "outer ValueError"]


async def skip(call: Call, call_next: Next) -> None:
    return None


async def twice(call: Call, call_next: Next) -> None:
    await call_next()
    await call_next()


async def forget(call: Call, call_next: Next) -> None:
    asyncio.create_task(call_next())  # type: ignore[arg-type] # noqa: RUF006


REASON = "without await call_next()"


@pytest.mark.parametrize(("middleware", "reason"), [(skip, REASON), (forget, REASON), (twice, "twice")])
async def test_a_middleware_that_does_not_call_the_next_exactly_once_fails_the_attempt(
    database: str, middleware: Any, reason: str
) -> None:
    """Or the job would be lost, or its effects come twice. A call that was begun and forgotten ran after its attempt
    had failed, beside the next one."""
    registry = Registry()
    registry.middleware.append(middleware)
    ran: list[int] = []

    async def ride(job: Job[Ride]) -> None:
        ran.append(job.attempt)

    rows = await rows_of(database, registry, ride, count=2)
    assert [row["outcome"] for row in rows] == ["retried", "discarded"]
    assert reason in rows[0]["error_message"]
    assert ran == ([1, 2] if middleware is twice else [])


async def test_a_refusal_that_another_middleware_swallows_is_no_success(database: str) -> None:
    registry = Registry()

    async def refuse(call: Call, call_next: Next) -> None:
        raise Discard("the tenant is gone")

    async def ride(job: Job[Ride]) -> None: ...

    registry.middleware += [swallow, refuse]
    [row] = await rows_of(database, registry, ride)
    assert (row["outcome"], row["error_message"]) == ("discarded", "the tenant is gone")


async def test_a_middleware_sees_a_timeout_as_a_cancellation_and_belongs_to_the_timed(database: str) -> None:
    registry, steps = Registry(), Steps()
    registry.middleware.append(steps.named("around"))

    async def ride(job: Job[Ride]) -> None:
        await asyncio.Event().wait()

    rows = await rows_of(database, registry, ride, timeout=0.05, retry=Retry(stop=stop_after_attempt(1)))
    assert steps.seen == ["around in", "around CancelledError"]
    assert [row["error_class"] for row in rows] == ["TimeoutError"]


async def hang(call: Call, call_next: Next) -> None:
    await call_next()
    await asyncio.Event().wait()


async def test_a_middleware_that_hangs_is_cancelled_at_the_timeout(database: str) -> None:
    registry = Registry()
    registry.middleware.append(hang)

    async def ride(job: Job[Ride]) -> None: ...

    [row] = await rows_of(database, registry, ride, timeout=0.05, retry=Retry(stop=stop_after_attempt(1)))
    assert row["error_class"] == "TimeoutError"


async def test_a_stop_passes_through_as_a_cancellation_and_the_job_runs_again(database: str) -> None:
    registry, steps = Registry(), Steps()
    registry.middleware.append(steps.named("around"))
    ran = asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        if job.attempt == 1:
            ran.set()
            await asyncio.Event().wait()

    await enqueue(database, ride, [Ride()])
    async with running(database, registry, shutdown_seconds=0.05):
        await ran.wait()
    assert steps.seen == ["around in", "around CancelledError"]
    async with running(database, registry):
        await eventually(lambda: len(steps.seen) == 4)
    assert steps.seen[2:] == ["around in", "around out None"]


# -- all kinds of handlers ----------------------------------------------------------------------------------------

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


async def for_tenant(call: Call, call_next: Next) -> None:
    token = tenant.set(call.jobs[0].payload.transport)
    try:
        await call_next()
    finally:
        tenant.reset(token)


async def test_context_variables_of_a_middleware_are_seen_in_the_thread_of_a_plain_function(database: str) -> None:
    registry = Registry()
    registry.middleware.append(for_tenant)
    seen: list[tuple[str, bool]] = []

    def ride(job: Job[Ride]) -> None:
        seen.append((tenant.get(), threading.current_thread() is threading.main_thread()))

    await rows_of(database, registry, ride)
    assert seen == [("a", False)]


async def test_a_handler_of_lists_is_wrapped_once_and_its_outcomes_count(database: str) -> None:
    registry, steps = Registry(), Steps()
    registry.middleware += [steps.named("around"), swallow]

    @registry.job(batch=10, retry=AT_ONCE)
    async def ride(jobs: list[Job[Ride]]) -> list[Exception | None]:
        return [Discard("odd") if job.payload.number % 2 else None for job in jobs]

    await enqueue(database, ride, [Ride(number=number) for number in range(4)])
    async with running(database, registry):

        async def ended() -> bool:
            return len(await outcomes(database)) == 4

        await eventually(ended)
    assert [[job.payload.number for job in call.jobs] for call in steps.calls] == [[0, 1, 2, 3]]
    rows = await history(database)
    assert sorted(row["outcome"] for row in rows) == ["discarded", "discarded", "succeeded", "succeeded"]


@pytest.mark.parametrize("plain", [False, True])
async def test_a_middleware_sees_all_jobs_of_a_handler_that_has_used_its_list_up(database: str, plain: bool) -> None:
    registry, seen = Registry(), list[int]()

    async def look(call: Call, call_next: Next) -> None:
        await call_next()
        seen.extend(job.payload.number for job in call.jobs)

    registry.middleware.append(look)

    async def ride(jobs: list[Job[Ride]]) -> None:
        jobs.clear()

    def ride_plainly(jobs: list[Job[Ride]]) -> None:
        jobs.clear()

    handler: Any = ride_plainly if plain else ride
    declared = registry.job(name="ride", payload=Ride, batch=10, retry=AT_ONCE)(handler)
    await enqueue(database, declared, [Ride(number=number) for number in range(4)])
    await drain(database, registry)
    assert seen == [0, 1, 2, 3]


async def test_a_middleware_sees_all_messages_of_a_handler_that_has_used_its_list_up(
    database: str, sidings_kafka: str, topic: Any
) -> None:
    name, seen = await topic(), list[int]()
    service = a_service(database, sidings_kafka)

    @service.middleware
    async def look(call: Call, call_next: Next) -> None:
        await call_next()
        seen.extend(message.offset for message in call.messages)

    @service.consumer(name, batch=10)
    async def on_ride(messages: list[Message[Ride]], tx: Transaction) -> None:
        messages.clear()

    await produce_raw(sidings_kafka, name, VALUE, VALUE)
    async with service:
        await eventually(offset_reaches(database, name, 2))
    assert seen == [0, 1]


async def test_what_a_middleware_writes_commits_with_a_transactional_handler_or_not_at_all(database: str) -> None:
    registry = Registry()

    async def audit(call: Call, call_next: Next) -> None:
        assert call.tx is not None
        await call.tx.execute("INSERT INTO audit_trail VALUES ($1)", call.jobs[0].attempt)
        await call_next()

    registry.middleware.append(audit)
    await fetch(database, "CREATE TABLE audit_trail (attempt int)")

    async def ride(job: Job[Ride]) -> None:
        if job.attempt == 1:
            raise ValueError("x")

    await rows_of(database, registry, ride, count=2, transactional=True)
    assert [row["attempt"] for row in await fetch(database, "SELECT * FROM audit_trail")] == [2]


async def test_drained_jobs_are_wrapped_too(database: str) -> None:
    registry, steps = Registry(), Steps()
    registry.middleware.append(steps.named("around"))

    @registry.job(transactional=True)
    async def ride(job: Job[Ride]) -> None: ...

    await enqueue(database, ride, [Ride()])
    await drain(database, registry)
    assert steps.seen == ["around in", "around out None"]


async def test_consumers_are_wrapped_and_so_are_their_stored_messages_once(
    database: str, sidings_kafka: str, topic: Any
) -> None:
    single, listed, isolated = await topic("single"), await topic("listed"), await topic("isolated")
    service, steps = a_service(database, sidings_kafka), Steps()
    service.middleware(steps.named("around"))
    handled: list[str] = []

    @service.consumer(single)
    async def on_single(message: Message[Ride], tx: Transaction) -> None:
        handled.append(message.topic)

    @service.consumer(listed, batch=10)
    async def on_list(messages: list[Message[Ride]], tx: Transaction) -> None:
        handled.append(messages[0].topic)

    @service.consumer(isolated, isolate=True)
    async def on_isolated(message: Message[Ride], tx: Transaction) -> None:
        handled.append(message.topic)

    topics = (single, listed, isolated)
    for name in topics:
        await produce_raw(sidings_kafka, name, VALUE, key=b"k")
    async with service:
        await eventually(lambda: len(handled) == 3)
    assert sorted(call.name for call in steps.calls) == sorted(topics)
    assert all([message.value.number for message in call.messages] == [1] for call in steps.calls)
    assert all(call.tx is not None and not call.jobs and call.origin == f"{call.name}/0" for call in steps.calls)


async def test_a_consumer_whose_middleware_forgets_to_call_it_parks_its_message(
    database: str, sidings_kafka: str, topic: Any
) -> None:
    name = await topic("rides")
    service = a_service(database, sidings_kafka)
    service.middleware(skip)

    @service.consumer(name, retry=Retry(wait=wait_none(), stop=stop_after_attempt(1)))
    async def on_ride(message: Message[Ride], tx: Transaction) -> None: ...

    await produce_raw(sidings_kafka, name, VALUE, key=b"k")
    query = "SELECT payload ->> 'error' FROM sidings.job WHERE type = $1"
    async with service:
        error = await eventually(lambda: value(database, query, f"message:{name}"))
    assert "without await call_next()" in error


async def test_stateless_consumers_are_wrapped(sidings_kafka: str, topic: Any) -> None:
    name = await topic("rides")
    service, steps = a_service(None, sidings_kafka), Steps()
    service.middleware(steps.named("around"))

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def on_ride(message: Message[Ride]) -> None: ...

    await produce_raw(sidings_kafka, name, VALUE, key=b"k")
    async with service:
        await eventually(lambda: len(steps.seen) == 2)
    assert [(call.name, call.tx) for call in steps.calls] == [(name, None)]


class FirstIsLate:
    """Two middlewares. In the first call, the outer one fails beside its `call_next()`, while the inner one waits until
    it is let go on."""

    def __init__(self, middleware: Callable[[Any], object]) -> None:
        self.calls, self.go_on = 0, asyncio.Event()
        self.refused: list[str] = []
        middleware(self._outer)
        middleware(self._inner)

    async def _outer(self, call: Call, call_next: Next) -> None:
        self.calls += 1
        await (asyncio.gather(call_next(), self._fail()) if self.calls == 1 else call_next())

    async def _fail(self) -> None:
        raise ConnectionError("nobody to tell")

    async def _inner(self, call: Call, call_next: Next) -> None:
        if self.calls == 1:
            await self.go_on.wait()
        try:
            await call_next()
        except RuntimeError as error:
            self.refused.append(str(error))
            raise

    async def let_go_on(self) -> None:
        self.go_on.set()
        for _ in range(100):
            await asyncio.sleep(0)


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_job_does_not_begin_after_a_middleware_around_it_has_ended(database: str, transactional: bool) -> None:
    """It ran beside its next attempt."""
    registry = Registry()
    late = FirstIsLate(registry.middleware.append)
    ran: list[int] = []

    async def ride(job: Job[Ride]) -> None:
        ran.append(job.attempt)
        await late.let_go_on()

    rows = await rows_of(database, registry, ride, count=2, transactional=transactional)
    assert [row["outcome"] for row in rows] == ["retried", "succeeded"]
    assert ran == [2]
    assert ["ride is over" in told for told in late.refused] == [True]


@pytest.mark.parametrize("stateless", [False, True])
async def test_a_consumers_handler_does_not_begin_after_a_middleware_around_it_has_ended(
    database: str, sidings_kafka: str, topic: Any, stateless: bool
) -> None:
    """It ran beside the next attempt of its message: a stateless one did all it does, any other got a transaction that
    was over."""
    name = await topic("rides")
    service = a_service(None if stateless else database, sidings_kafka)
    late = FirstIsLate(service.middleware)
    steps: list[str] = []

    async def handle() -> None:
        steps.append("begins")
        await late.let_go_on()
        steps.append("ends")

    if stateless:

        @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq", retry=AT_ONCE)
        async def on_ride(message: Message[Ride]) -> None:
            await handle()
    else:

        @service.consumer(name, retry=AT_ONCE)
        async def on_stored_ride(message: Message[Ride], tx: Transaction) -> None:
            await handle()

    await produce_raw(sidings_kafka, name, VALUE, key=b"k")
    async with service:
        await eventually(lambda: "ends" in steps)
    assert steps == ["begins", "ends"]
    assert [f"{name} is over" in told for told in late.refused] == [True]


# -- declarations -------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_middleware_is_refused(database: str) -> None:
    service = a_service(database)

    def plain(call: Call, call_next: Next) -> None: ...

    async def one(call: Call) -> None: ...

    class Blind:
        async def __call__(self, call: Call, call_next: Next) -> None: ...

    async def three(call: Call, call_next: Next, prefix: str) -> None: ...

    def prefixed(around: Any) -> Any:
        """A decorator that gives it its prefix."""

        @wraps(around)
        async def outer(call: Call, call_next: Next) -> None:
            await around(call, call_next, "t-")

        return outer

    for wrong in (plain, one, three, partial(plain), partial(one), partial(three, prefix="t-", more=1), prefixed):
        with pytest.raises(ConfigurationError, match="must be `async def"):
            service.middleware(wrong)
    for right in (Blind(), partial(three, prefix="t-"), prefixed(three)):
        assert service.middleware(right) is right


async def test_a_partial_of_a_middleware_is_one(database: str) -> None:
    """It was refused, with the demand for an `async def`, which it was."""
    service = a_service(database)
    seen: list[str] = []

    async def around(prefix: str, call: Call, call_next: Next) -> None:
        seen.append(prefix + call.name)
        await call_next()

    service.middleware(partial(around, "t-"))

    @service.job()
    async def ride(job: Job[Ride]) -> None: ...

    await enqueue(database, ride, [Ride()])
    assert [attempt.outcome for attempt in await drain(service)] == ["succeeded"]
    assert seen == ["t-ride"]


async def test_the_documentations_examples_work(database: str) -> None:
    names = guide.run("middleware.md", "", "An error reporter")
    service = a_service(database)
    names["wrap"](service)
    reported: list[Any] = []
    service.middleware(names["reporter"](lambda *arguments: reported.append(arguments)))
    seen: list[str] = []

    @service.job(retry=AT_ONCE)
    async def ride(job: Job[Ride]) -> None:
        seen.append(names["tenant"].get())
        if job.attempt == 1:
            raise ValueError("x")

    async with connected(database) as connection, connection.transaction():
        [id] = await ride.enqueue_many(connection, [Ride()], origin="acme-rides/0")
    await drain(service, until=60)
    assert seen == ["acme", "acme"]
    assert [(repr(error), *rest) for error, *rest in reported] == [("ValueError('x')", "ride", "acme-rides/0", [id])]
    assert [name for name, _ in names["seconds"]] == ["ride", "ride"]

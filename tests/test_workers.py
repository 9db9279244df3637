"""Who wakes whom: what is claimed must not wait beside idle workers, and quick jobs must not keep the event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import Any, Self, cast

import anyio
import pytest
from pydantic import BaseModel
from sidings.executor import PostgresSettings
from sidings.executor.queues import Entry, OriginQueue
from sidings.executor.transactional import Transactional
from sidings.executor.worker import CancelReason
from sidings.executor.workers import Workers
from sidings.jobs import SUCCEEDED, Call, Discard, Job, Next, Registry

from .support import SECONDS, eventually

WORKERS = 100
MOST = 80  # of them for one of several types


class Empty(BaseModel):
    pass


class Yard:
    """Workers, and jobs of four types: quick ones, ones that wait for one of two events, and ones that wait for some
    turns of the event loop."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.gate, self.late = asyncio.Event(), asyncio.Event()
        self.started = 0
        random = Random(1)

        @self.registry.job()
        async def quick(job: Job[Empty]) -> None:
            self.started += 1

        @self.registry.job()
        async def waiting(job: Job[Empty]) -> None:
            self.started += 1
            await self.gate.wait()

        @self.registry.job()
        async def late(job: Job[Empty]) -> None:
            self.started += 1
            await self.late.wait()

        @self.registry.job()
        async def yielding(job: Job[Empty]) -> None:
            self.started += 1
            for _ in range(random.randrange(20)):
                await asyncio.sleep(0)

        nowhere = PostgresSettings(dsn="postgresql://nobody@localhost/nothing")
        self.workers = Workers(self.registry, WORKERS, Transactional(nowhere, lambda _: None, lambda _: None))
        origin = OriginQueue("t/0", 1, None)
        origin.deadline = inf
        self._entries = (partial(Entry, id, origin, group=None, position=id, payload="{}") for id in count(1))

    def entry(self, type: str) -> Entry:
        return next(self._entries)(type=type)

    def claim(self, type: str, jobs: int) -> None:
        self.workers.claim([self.entry(type) for _ in range(jobs)])

    async def turns(self, condition: Callable[[], bool], most: int = 10_000) -> list[int]:
        """How many jobs were started in each turn of the event loop until the condition held."""
        counts: list[int] = []
        while not condition():
            assert len(counts) < most, (
                f"not within {most} turns: {self.started} started, {len(self.workers.claimed)} wait"
            )
            before = self.started
            await asyncio.sleep(0)
            counts.append(self.started - before)
        return counts


@asynccontextmanager
async def a_yard() -> AsyncIterator[Yard]:
    yard = Yard()
    yard.workers.start()
    await asyncio.sleep(0)  # now they are idle
    try:
        yield yard
    finally:
        await yard.workers.stop()


async def test_quick_jobs_leave_the_event_loop_its_turns():
    """With all workers awake a turn took up to 900 jobs; what had finished was sent in one large batch after a small
    one, and the client and Postgres took turns."""
    async with a_yard() as yard:
        yard.claim("quick", 2_000)
        counts = await yard.turns(lambda: len(yard.workers.finished) == 2_000)
    assert max(counts) <= 2 * 64
    assert len(counts) >= 2_000 // 128


async def test_handlers_that_wait_have_all_workers_that_they_may_have_after_a_few_turns():
    async with a_yard() as yard:
        yard.claim("waiting", MOST + 50)
        await yard.turns(lambda: yard.started == MOST, most=12)
        assert yard.workers.running() == MOST
        yard.gate.set()
        await yard.turns(lambda: len(yard.workers.finished) == MOST + 50)
        yard.claim("quick", 2_000)
        counts = await yard.turns(lambda: len(yard.workers.finished) == MOST + 2_050)
    assert max(counts) <= 2 * 64, "those that came after were run by all that had been needed before"


async def test_one_that_waits_among_quick_ones_holds_nobody_up():
    async with a_yard() as yard:
        yard.workers.claim([yard.entry("waiting" if n % 100 == 50 else "quick") for n in range(5_000)])
        await yard.turns(lambda: len(yard.workers.finished) == 4_950)
        assert yard.workers.running() == 50
        yard.gate.set()
        await yard.turns(lambda: len(yard.workers.finished) == 5_000)


async def test_handlers_that_wait_keep_their_workers_however_many_end_in_a_turn():
    async with a_yard() as yard:
        yard.claim("yielding", 20_000)
        await yard.turns(lambda: yard.workers.running() == MOST, most=30)
        running: list[int] = []
        while yard.workers.claimed:
            await asyncio.sleep(0)
            running.append(yard.workers.running())
    assert sum(running[:-5]) / len(running[:-5]) > 0.9 * MOST


async def test_all_workers_at_once_before_quick_jobs_make_room_and_are_there_for_those_that_wait():
    async with a_yard() as yard:
        yard.claim("waiting", MOST)
        await yard.turns(lambda: yard.started == MOST)
        yard.workers.claim([yard.entry("quick") for _ in range(20_000)] + [yard.entry("late") for _ in range(MOST)])
        yard.gate.set()
        counts = await yard.turns(lambda: yard.started == 20_000 + 2 * MOST)
        assert yard.workers.running() == MOST
        assert max(counts[3:]) <= 2 * 64
        yard.late.set()
        await yard.turns(lambda: len(yard.workers.finished) == 20_000 + 2 * MOST)


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_claimed_waits_beside_idle_workers(seed: int):
    """Claims of all sizes at all moments; after each, as many run as may."""
    random = Random(seed)
    async with a_yard() as yard:
        total = kept = 0
        for _ in range(60):
            type = random.choice(("quick", "yielding", "waiting"))
            size = random.choice((1, 1, 2, 3, 10, 300)) if type != "waiting" else random.choice((1, 2, 3))
            if kept + size > WORKERS - 3:
                type = "quick"
            kept += size if type == "waiting" else 0
            total += size
            yard.claim(type, size)
            if random.random() < 0.1:
                taken = yard.workers.unclaim()
                total -= len(taken)
                kept -= sum(entry.type == "waiting" for entry in taken)
            for _ in range(random.choice((0, 0, 1, 2, 5))):
                await asyncio.sleep(0)
        done = lambda: not yard.workers.claimed and len(yard.workers.finished) == total - kept  # noqa: E731
        await yard.turns(done, most=500)
        assert yard.workers.running() == kept
        yard.gate.set()
        await yard.turns(lambda: len(yard.workers.finished) == total)


# -- a worker that is cancelled for nothing, or ended ----------------------------------------------------------------


class Given:
    """Workers of which handlers have given away the tasks, as where somebody may cancel a job from outside."""

    def __init__(self, concurrency: int = 1) -> None:
        self.registry = Registry()
        self.tasks: list[asyncio.Task[None]] = []
        self.gate = asyncio.Event()

        @self.registry.job()
        async def tell(job: Job[Empty]) -> None:
            self.tasks.append(cast(asyncio.Task[None], asyncio.current_task()))

        @self.registry.job()
        async def give_up(job: Job[Empty]) -> None:
            """Cancels itself, and awaits nothing after that."""
            cast(asyncio.Task[None], asyncio.current_task()).cancel()

        @self.registry.job()
        async def give_in(job: Job[Empty]) -> None:
            cast(asyncio.Task[None], asyncio.current_task()).cancel()
            await self.gate.wait()

        @self.registry.job()
        async def untouched(job: Job[Empty]) -> None:
            assert cast(asyncio.Task[None], asyncio.current_task()).cancelling() == 0  # else no timeout works in it
            await asyncio.sleep(0)

        @self.registry.job()
        async def wait(job: Job[Empty]) -> None:
            await self.gate.wait()

        @self.registry.job()
        async def interrupted(job: Job[Empty]) -> None:
            raise KeyboardInterrupt

        @self.registry.job(batch=2)
        async def interrupted_many(jobs: list[Job[Empty]]) -> None:
            raise KeyboardInterrupt

        @self.registry.job(batch=2)
        async def give_up_many(jobs: list[Job[Empty]]) -> None:
            cast(asyncio.Task[None], asyncio.current_task()).cancel()

        nowhere = PostgresSettings(dsn="postgresql://nobody@localhost/nothing")
        self.workers = Workers(self.registry, concurrency, Transactional(nowhere, lambda _: None, lambda _: None))
        origin = OriginQueue("t/0", 1, None)
        origin.deadline = inf
        self._entries = (partial(Entry, id, origin, group=None, position=id, payload="{}") for id in count(1))

    def claim(self, *types: str) -> None:
        self.workers.claim([next(self._entries)(type=type) for type in types])

    async def outcomes(self, count: int) -> list[str]:
        for _ in range(1_000):
            if len(self.workers.finished) >= count:
                break
            await asyncio.sleep(0)
        return [f"{entry.type}: {outcome.name.value}" for entry, outcome, _, _ in self.workers.finished]


@asynccontextmanager
async def given() -> AsyncIterator[Given]:
    given = Given()
    given.workers.start()
    try:
        yield given
    finally:
        await given.workers.stop()


async def test_a_worker_that_is_cancelled_while_it_is_idle_takes_the_next_job():
    async with given() as a:
        a.claim("tell")
        await a.outcomes(1)
        a.tasks[0].cancel()
        await asyncio.sleep(0)
        a.claim("untouched")
        assert await a.outcomes(2) == ["tell: succeeded", "untouched: succeeded"]
        await asyncio.sleep(0)
        assert a.workers.capacity() == 1


async def test_a_worker_that_is_cancelled_when_it_has_just_been_woken_takes_the_job():
    async with given() as a:
        a.claim("tell")
        await a.outcomes(1)
        await asyncio.sleep(0)
        a.claim("untouched")
        while a.workers.capacity() == 0:  # not before it is woken
            await asyncio.sleep(0)
        a.tasks[0].cancel()
        assert await a.outcomes(2) == ["tell: succeeded", "untouched: succeeded"]


@pytest.mark.parametrize("first", ["give_up", "give_in", "give_up_many"])
async def test_what_a_handler_does_to_its_task_is_nothing_to_the_next_job(first: str):
    async with given() as a:
        a.claim(first, "untouched")
        end = "retried" if first == "give_in" else "succeeded"
        assert await a.outcomes(2) == [f"{first}: {end}", "untouched: succeeded"]


async def test_workers_that_are_told_to_end_do_so_while_they_are_idle():
    async with given() as a:
        await asyncio.sleep(0)
        await a.workers.stop()
        assert a.workers.all[0].task.cancelled()  # type: ignore[union-attr]


async def test_each_job_of_a_worker_has_its_own_cancellation():
    """One for a reason that the job before it was cancelled for, as when each takes too long, is one all the same."""
    async with given() as a:
        for number in (1, 2):
            a.claim("wait")
            while not a.workers.running():
                await asyncio.sleep(0)
            a.workers.cancel(None, CancelReason.TIMEOUT)
            assert await a.outcomes(number) == ["wait: retried"] * number


@pytest.mark.parametrize("type", ["interrupted", "interrupted_many"])
def test_the_interrupt_of_a_person_ends_the_loop(type: str):
    async def interrupt() -> None:
        async with given() as a:
            a.claim(type)
            await a.outcomes(1)

    with pytest.raises(KeyboardInterrupt), asyncio.Runner() as runner:
        runner.run(interrupt())


def test_a_worker_that_python_closes_ends():
    """As when its loop is gone: there is nothing more that it could await."""
    loop = asyncio.new_event_loop()

    async def begin() -> Given:
        a = Given()
        a.workers.start()
        a.claim("wait")
        while not a.workers.running():
            await asyncio.sleep(0)
        return a

    try:
        a = loop.run_until_complete(begin())
        coroutine: Any = a.workers.all[0].task.get_coro()  # type: ignore[union-attr]
        coroutine.close()  # raises if it goes on
        assert a.workers.finished == []
    finally:
        loop.run_until_complete(a.workers.stop())
        a.workers.all[0].task.exception()  # type: ignore[union-attr] - of what was done to it here
        loop.close()


@pytest.mark.parametrize("mark", ["failures", "losses"])
async def test_a_job_that_has_failed_or_was_lost_is_in_no_batch_with_others(mark: str):
    """Which may be its fault, and would cost them an attempt as well, or count as a loss of theirs."""
    yard = Yard()
    yard.workers.batch_sizes = {"quick": 10}
    origin = OriginQueue("t/0", 1, None)
    first, *others = [Entry(id, origin, "quick", None, id) for id in range(1, 5)]
    setattr(others[1], mark, 1)
    yard.workers.claim([first, *others])
    assert list(yard.workers.claimed) == [[first, others[0], others[2]], [others[1]]]


async def test_a_batch_goes_on_when_somebody_ends_one_of_its_jobs():
    """The others of it have not been ended; they would wait for the audit."""
    registry, gate, began = Registry(), asyncio.Event(), asyncio.Event()

    @registry.job(batch=10)
    async def listed(jobs: list[Job[Empty]]) -> None:
        began.set()
        await gate.wait()

    nowhere = PostgresSettings(dsn="postgresql://nobody@localhost/nothing")
    workers = Workers(registry, 1, Transactional(nowhere, lambda _: None, lambda _: None))
    origin = OriginQueue("t/0", 1, None)
    origin.deadline = inf
    workers.start()
    try:
        workers.claim([Entry(id, origin, "listed", None, id, payload="{}") for id in (1, 2, 3)])
        await asyncio.wait_for(began.wait(), 30)
        workers.cancel_jobs({1})
        gate.set()
        await asyncio.wait_for(workers.changed.wait(), 30)
        assert [outcome for _, outcome, _, _ in workers.finished] == [SUCCEEDED] * 3
    finally:
        await workers.stop()


async def test_what_comes_for_a_list_counts_as_one_worker():
    async with a_yard() as yard:
        yard.workers.slow.names = frozenset({"waiting"})
        yard.workers.batch_sizes = {"waiting": 50}
        yard.workers.claimed.append([yard.entry("waiting") for _ in range(50)])
        coming = [yard.entry("waiting") for _ in range(2 * 50)]
        shares, _, back = yard.workers.share_out([coming])
        assert len(back) == 0, "a list was given back with all but one of the workers idle"
        assert shares == {"waiting": WORKERS * 4 // 5 - 3}
        yard.workers.claimed.clear()


# -- a plain function inside of middleware ---------------------------------------------------------------------------


async def rolls_back(call: Call, call_next: Next) -> None:
    try:
        await call_next()
    except asyncio.CancelledError as error:
        raise ConnectionError("there is nothing to roll back any more") from error


async def decides(call: Call, call_next: Next) -> None:
    try:
        await call_next()
    except asyncio.CancelledError as error:
        raise Discard("it is too late") from error


async def tells_beside(call: Call, call_next: Next) -> None:
    """Goes on when the other of the two has been cancelled: a gather waits for the first one only."""
    await asyncio.gather(call_next(), asyncio.Event().wait())


async def fails_beside(call: Call, call_next: Next) -> None:
    async def fail() -> None:
        raise ConnectionError("nobody to tell")

    await asyncio.gather(call_next(), fail())


@asynccontextmanager
async def in_a_thread(middleware: Any, *, listed: bool) -> AsyncIterator[tuple[Workers, Entry, threading.Event]]:
    """A plain function that runs, inside of this middleware, until the event is set."""
    registry, began, go_on = Registry(), threading.Event(), threading.Event()
    registry.middleware.append(middleware)

    @registry.job(name="ride", batch=2 if listed else None, payload=Empty)
    def ride(jobs: Any) -> None:
        began.set()
        assert go_on.wait(SECONDS)

    nowhere = PostgresSettings(dsn="postgresql://nobody@localhost/nothing")
    workers = Workers(registry, 1, Transactional(nowhere, lambda _: None, lambda _: None))
    origin = OriginQueue("t/0", 1, None)
    origin.deadline = inf
    entry = Entry(1, origin, "ride", None, 1, payload="{}")
    workers.start()
    try:
        workers.claim([entry])
        await eventually(began.is_set)
        yield workers, entry, go_on
    finally:
        go_on.set()
        await workers.stop()


@pytest.mark.parametrize("listed", [False, True], ids=["a job", "a list"])
@pytest.mark.parametrize("middleware", [rolls_back, decides, tells_beside])
async def test_a_stop_does_not_forget_a_plain_function_whatever_a_middleware_raises(middleware: Any, listed: bool):
    """The watchdog ended, nobody renewed the lease, and the job ran elsewhere beside it."""
    async with in_a_thread(middleware, listed=listed) as (workers, entry, go_on):
        async with asyncio.timeout(4.0):  # a stop waits no longer for it than for others
            await workers.stop()
        assert (workers.running(), workers.in_threads()) == (1, entry)
        assert workers.finished == []
        go_on.set()
        await eventually(lambda: not workers.running(), "it has returned")
        assert workers.in_threads() is None


@pytest.mark.parametrize("listed", [False, True], ids=["a job", "a list"])
@pytest.mark.parametrize(
    ("middleware", "end"),
    [(rolls_back, "succeeded"), (tells_beside, "TimeoutError"), (fails_beside, "ConnectionError")],
)
async def test_a_plain_function_keeps_its_worker_until_it_returns_whatever_a_middleware_raises(
    middleware: Any, end: str, listed: bool
):
    """Its group went on, and the next attempt of the job ran beside it."""
    async with in_a_thread(middleware, listed=listed) as (workers, entry, go_on):
        workers.cancel(None, CancelReason.TIMEOUT)
        for _ in range(100):
            await asyncio.sleep(0)
        assert workers.finished == []
        assert (workers.running(), workers.in_threads()) == (1, entry)
        go_on.set()
        [(_, outcome, _, _)] = await eventually(lambda: workers.finished, "it has returned")
        error = cast(Any, outcome).error
        assert (error.error_class if error else outcome.name.value) == end
        assert cast(asyncio.Task[None], workers.all[0].task).cancelling() == 0


async def test_a_stop_does_not_forget_a_middleware_that_goes_on_after_its_plain_function(
    monkeypatch: pytest.MonkeyPatch,
):
    """Nor what it is in the middle of: it passed for over, since the function was."""
    monkeypatch.setattr("sidings.executor.workers._STOP_SECONDS", 0.2)
    returned, done = asyncio.Event(), asyncio.Event()

    async def goes_on(call: Call, call_next: Next) -> None:
        await call_next()
        returned.set()
        while not done.is_set():
            with suppress(asyncio.CancelledError):
                await done.wait()

    async with in_a_thread(goes_on, listed=False) as (workers, _, go_on):
        go_on.set()
        await asyncio.wait_for(returned.wait(), SECONDS)
        await workers.stop()
        running = workers.running()
        done.set()
        await eventually(lambda: not workers.running(), "it has ended")
    assert running == 1


# -- an async handler behind a plain wrapper ---------------------------------------------------------------------------


async def calls_next(call: Call, call_next: Next) -> None:
    await call_next()


@pytest.mark.parametrize("listed", [False, True], ids=["a job", "a list"])
@pytest.mark.parametrize("middleware", [None, calls_next])
async def test_a_stop_does_not_forget_an_async_handler_behind_a_plain_wrapper(
    middleware: Any, listed: bool, monkeypatch: pytest.MonkeyPatch
):
    """It passed for a plain function that had returned. The watchdog ended, nobody renewed the lease, and the job ran
    elsewhere beside it."""
    monkeypatch.setattr("sidings.executor.workers._STOP_SECONDS", 0.2)
    registry, began, go_on = Registry(), asyncio.Event(), asyncio.Event()
    if middleware is not None:
        registry.middleware.append(middleware)

    async def ride(jobs: Any) -> None:
        began.set()
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await go_on.wait()

    registry.job(name="ride", batch=2 if listed else None, payload=Empty)(lambda jobs: ride(jobs))
    nowhere = PostgresSettings(dsn="postgresql://nobody@localhost/nothing")
    workers = Workers(registry, 1, Transactional(nowhere, lambda _: None, lambda _: None))
    origin = OriginQueue("t/0", 1, None)
    origin.deadline = inf
    workers.start()
    try:
        workers.claim([Entry(1, origin, "ride", None, 1, payload="{}")])
        await asyncio.wait_for(began.wait(), SECONDS)
        await workers.stop()
        assert (workers.running(), workers.in_threads()) == (1, None)
        go_on.set()
        await eventually(lambda: not workers.running(), "it has returned")
    finally:
        go_on.set()
        await workers.stop()


class HalfPlain:
    """One worker, and a job of which the handler does a blocking step in its thread, until it may `go_on`, and returns
    its coroutine."""

    def __init__(self, middleware: Any, *, listed: bool) -> None:
        self.blocks, self.go_on = threading.Event(), threading.Event()
        self.began = False  # the coroutine
        registry = Registry()
        if middleware is not None:
            registry.middleware.append(middleware)

        async def ride(jobs: Any) -> None:
            self.began = True

        @registry.job(name="ride", batch=2 if listed else None, payload=Empty)
        def _(jobs: Any) -> Any:
            self.blocks.set()
            assert self.go_on.wait(SECONDS)
            return ride(jobs)

        nowhere = PostgresSettings(dsn="postgresql://nobody@localhost/nothing")
        self.workers = Workers(registry, 1, Transactional(nowhere, lambda _: None, lambda _: None))
        origin = OriginQueue("t/0", 1, None)
        origin.deadline = inf
        self.entry = Entry(1, origin, "ride", None, 1, payload="{}")

    async def end(self) -> Any:
        """What came of the job once its thread goes on; None: it is not ours any more."""
        for _ in range(100):  # its cancellation arrives
            await asyncio.sleep(0)
        workers = self.workers
        assert (workers.finished, workers.expired, workers.in_threads()) == ([], [], self.entry)
        self.go_on.set()
        await eventually(lambda: workers.finished or workers.expired, "the attempt has ended")
        assert (workers.running(), cast(asyncio.Task[None], workers.all[0].task).cancelling()) == (0, 0)
        return workers.finished[0][1] if workers.finished else None

    async def __aenter__(self) -> Self:
        self.workers.start()
        self.workers.claim([self.entry])
        await eventually(self.blocks.is_set, "its thread runs")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go_on.set()
        await self.workers.stop()


CUT_OFF = [
    (CancelReason.TIMEOUT, "retried: TimeoutError"),
    (CancelReason.STOPPING, "snoozed: Interrupted, inconclusive"),
    (CancelReason.FENCED, "expired"),
    (CancelReason.ENDED, "cancelled"),
]


@pytest.mark.parametrize("listed", [False, True], ids=["a job", "a list"])
@pytest.mark.parametrize(
    ("middleware", "reason", "end"),
    [
        *((None, *case) for case in CUT_OFF),
        *((calls_next, *case) for case in CUT_OFF),
        (rolls_back, CancelReason.TIMEOUT, "retried: ConnectionError"),
        (rolls_back, CancelReason.STOPPING, "snoozed: Interrupted, inconclusive"),
    ],
)
async def test_no_coroutine_behind_a_plain_wrapper_begins_after_its_cancellation(
    middleware: Any, reason: CancelReason, end: str, listed: bool
):
    """It ran to its end, however long that took: each reason cancels once, and that had come while the thread ran."""
    async with HalfPlain(middleware, listed=listed) as yard:
        yard.workers.cancel(None, reason)
        outcome = await yard.end()
        told = outcome.name.value if outcome else "expired"
        if error := getattr(outcome, "error", None):
            told += f": {error.error_class}" + (", inconclusive" if outcome.inconclusive else "")
        assert (told, yard.began) == (end, False)


@pytest.mark.parametrize("listed", [False, True], ids=["a job", "a list"])
@pytest.mark.parametrize("library", ["asyncio", "anyio"])
async def test_no_coroutine_behind_a_plain_wrapper_begins_after_the_timeout_of_a_middleware(listed: bool, library: str):
    """anyio knows its own cancellation by its message: another one it took for somebody else's, and no timeout."""
    runs_out: list[Callable[[], None]] = []

    async def limited(call: Call, call_next: Next) -> None:
        if library == "asyncio":
            async with asyncio.timeout(None) as limit:
                runs_out.append(lambda: limit.reschedule(0.0))
                await call_next()
        else:
            with anyio.fail_after(SECONDS) as scope:
                runs_out.append(lambda: setattr(scope, "deadline", anyio.current_time()))
                await call_next()

    async with HalfPlain(limited, listed=listed) as yard:
        runs_out[0]()
        outcome = await yard.end()
        assert (outcome.name.value, outcome.error.error_class, yard.began) == ("retried", "TimeoutError", False)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("listed", [False, True], ids=["a job", "a list"])
async def test_no_coroutine_behind_a_plain_wrapper_begins_after_a_middleware_around_it_has_ended(
    listed: bool, stops: bool
):
    """It ran beside the next attempt; after a stop, beside the instance that had the origin by then."""
    async with HalfPlain(fails_beside, listed=listed) as yard:
        if stops:
            await yard.workers.stop()
            yard.go_on.set()
            await eventually(lambda: not yard.workers.running(), "its thread has ended")
        else:
            outcome = await yard.end()
            assert (outcome.name.value, outcome.error.error_class) == ("retried", "ConnectionError")
        for _ in range(100):
            await asyncio.sleep(0)
        assert not yard.began


# -- a handler inside of middleware that has ended before it begins ----------------------------------------------------


class LateComer:
    """One worker, and two jobs. An inner middleware waits, in the first one's call, until it is `connected`, whoever
    cancels that, and only then goes on to the handler. Each handler that begins runs until it may `go_on`."""

    def __init__(self, outer: Any, *, plain: bool, listed: bool) -> None:
        self.began: list[int] = []  # the handlers, by the ids of their jobs
        self.waits, self.connected = asyncio.Event(), asyncio.Event()
        self.refused: list[BaseException] = []  # what the inner middleware got in the handler's place
        self.go_on = threading.Event()
        registry = Registry()
        registry.middleware += [outer, self._connects]

        def ride(jobs: Any) -> None:
            self.began.append(jobs[0].id if listed else jobs.id)
            assert self.go_on.wait(SECONDS)

        async def ride_async(jobs: Any) -> None:
            self.began.append(jobs[0].id if listed else jobs.id)
            await asyncio.Event().wait()

        declare = registry.job(name="ride", batch=2 if listed else None, payload=Empty)
        declare(ride if plain else ride_async)
        nowhere = PostgresSettings(dsn="postgresql://nobody@localhost/nothing")
        self.workers = Workers(registry, 1, Transactional(nowhere, lambda _: None, lambda _: None))
        origin = OriginQueue("t/0", 1, None)
        origin.deadline = inf
        self.entries = [Entry(id, origin, "ride", None, id, payload="{}") for id in (1, 2)]

    async def _connects(self, call: Call, call_next: Next) -> None:
        while call.jobs[0].id == 1 and not self.connected.is_set():
            self.waits.set()
            with suppress(asyncio.CancelledError):
                await self.connected.wait()
        try:
            await call_next()
        except Exception as error:
            self.refused.append(error)
            raise

    async def connect(self) -> None:
        self.connected.set()
        for _ in range(100):
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        self.workers.start()
        for entry in self.entries:  # one by one: no list takes both
            self.workers.claim([entry])
        await asyncio.wait_for(self.waits.wait(), SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.connected.set()
        self.go_on.set()
        await self.workers.stop()


async def fails_beside_the_first(call: Call, call_next: Next) -> None:
    await (fails_beside(call, call_next) if call.jobs[0].id == 1 else call_next())


@pytest.mark.parametrize("listed", [False, True], ids=["a job", "a list"])
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_no_handler_begins_after_a_middleware_around_it_has_ended(plain: bool, listed: bool):
    """Its retry ran beside it. A plain one took the place of the function that its worker ran by then, which a stop
    forgot: its job ran elsewhere beside it."""
    async with LateComer(fails_beside_the_first, plain=plain, listed=listed) as yard:
        workers, second = yard.workers, yard.entries[1]
        await eventually(lambda: yard.began, "the next job has begun")
        [(_, outcome, _, _)] = workers.finished
        assert cast(Any, outcome).error.error_class == "ConnectionError"
        await yard.connect()
        assert (workers.running(), workers.all[0].entry) == (1, second)
        assert workers.in_threads() is (second if plain else None)
        await workers.stop()
        assert (workers.running(), workers.in_threads()) == ((1, second) if plain else (0, None))
        yard.go_on.set()
        await eventually(lambda: not workers.running(), "it has returned")
        assert yard.began == [2]
        [error] = yard.refused
        assert isinstance(error, RuntimeError)
        assert "ride is over" in str(error)


@pytest.mark.parametrize("listed", [False, True], ids=["a job", "a list"])
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_no_handler_begins_after_a_stop(plain: bool, listed: bool):
    """It ran beside the instance that had the origin by then: an inner middleware had taken no notice of the stop."""
    async with LateComer(tells_beside, plain=plain, listed=listed) as yard:
        workers = yard.workers
        workers.unclaim()
        await workers.stop()
        await yard.connect()
        assert (workers.running(), workers.in_threads(), yard.began) == (0, None, [])
        [error] = yard.refused
        assert "ride is over" in str(error)


@pytest.mark.parametrize("listed", [False, True], ids=["a job", "a list"])
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_no_handler_begins_after_its_timeout(plain: bool, listed: bool):
    """Its retry ran beside it: as above."""
    async with LateComer(tells_beside, plain=plain, listed=listed) as yard:
        yard.workers.unclaim()
        yard.workers.cancel(None, CancelReason.TIMEOUT)
        [(_, outcome, _, _)] = await eventually(lambda: yard.workers.finished, "the attempt has ended")
        assert cast(Any, outcome).error.error_class == "TimeoutError"
        await yard.connect()
        assert (yard.workers.running(), yard.workers.in_threads(), yard.began) == (0, None, [])

"""Runs handlers: a fixed set of worker coroutines, no task and no statement per job.

Workers take jobs from `claimed`, where the cycle puts those that a commit has named in `running`, and put what came of
them into `finished`, from where the next cycle collects it.
"""

import asyncio
import inspect
import json
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from enum import Enum
from typing import Any, NamedTuple, cast

from ..errors import Fenced
from ..jobs import (
    SUCCEEDED,
    Again,
    Discard,
    End,
    ErrorInfo,
    Hold,
    Job,
    JobId,
    JobType,
    Outcome,
    OutcomeName,
    Registry,
    Snooze,
    current_origin,
)
from .clock import now
from .scheduler import Entry, OriginQueue
from .transactional import Transactional

__all__ = ["CancelReason", "Finished", "Worker", "Workers"]

log = logging.getLogger("sidings.executor")

_STREAK = 64  # jobs that one worker runs before it lets the event loop go round
_SWEEP_SECONDS = 0.05
_STOP_SECONDS = 5.0  # how long a handler may take to notice the last cancellation


class CancelReason(Enum):
    """Why a running handler is cancelled, and so what its attempt counts as."""

    TIMEOUT = "its timeout"  # a failure
    STOPPING = "its executor gives the origin up"  # runs again elsewhere, no failure
    FENCED = "another executor has the origin"  # nothing: the attempt is not ours any more


class Finished(NamedTuple):
    """An attempt that is over. Times are seconds of the executor's clock."""

    entry: Entry
    outcome: Outcome
    started: float
    finished: float


class Worker:
    """One coroutine that runs one job after the other."""

    __slots__ = ("call", "entry", "reason", "started", "stop_at", "task", "wake")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.entry: Entry | None = None  # the job that runs now; the watchdog reads it from its thread
        self.call: Future[object] | None = None  # the plain function that runs, in its thread
        self.started = 0.0
        self.stop_at: float | None = None
        self.reason: CancelReason | None = None
        self.wake: asyncio.Future[None] | None = None

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the running handler. A later reason of more weight replaces an earlier one."""
        if self.entry is None or self.task is None or self.task is asyncio.current_task():
            return  # a handler that has just learnt that it is fenced ends by itself
        if self.reason is None:
            self.reason = reason
            self.task.cancel()
        elif reason is CancelReason.FENCED:
            self.reason = reason

    def left(self, _: object) -> None:
        """The thread has returned when nobody waited for it any more."""
        self.entry = None


class Workers:
    """All workers of an executor. `on_change` is called when the cycle has something to collect."""

    def __init__(
        self,
        registry: Registry,
        concurrency: int,
        transactional: Transactional,
        on_change: Callable[[], None],
    ) -> None:
        self.claimed: deque[Entry] = deque()
        self.finished: list[Finished] = []
        self.expired: list[Entry] = []  # claimed, but the lease ran out before a worker came to them
        self.all = [Worker() for _ in range(concurrency)]
        self._idle: list[Worker] = []
        self._registry = registry
        self._on_change = on_change
        self._transactional = transactional
        self._threads: ThreadPoolExecutor | None = None
        self._concurrency = concurrency
        self._sweeper: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Create the workers' coroutines."""
        for worker in self.all:
            worker.task = asyncio.create_task(self._work(worker), name="sidings worker")
        self._sweeper = asyncio.create_task(self._sweep(), name="sidings timeouts")

    async def watch(self) -> None:
        """Return never; raise if a worker ends although nobody asked it to: its jobs would wait for ever."""
        tasks = [worker.task for worker in self.all if worker.task is not None]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        raise RuntimeError(f"a worker has ended: {next(iter(done))!r}")

    def end(self) -> None:
        """Cancel everything: the executor has come to its end. No cancellation is taken for a handler's own any more,
        or a loop that shuts down would wait for ever for workers that go on."""
        if not self._stopping:
            self._stopping = True
            for task in self._tasks():
                task.cancel()

    def _tasks(self) -> "list[asyncio.Task[None]]":
        tasks = [*(worker.task for worker in self.all), self._sweeper]
        return [task for task in tasks if task is not None]

    async def stop(self) -> None:
        """End the coroutines, running handlers included. Threads are left to themselves."""
        self.end()
        tasks = self._tasks()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=_STOP_SECONDS)
            if pending:
                log.error("stopped although %s handlers take no notice of their cancellation", len(pending))
            for worker in self.all:  # `entry` stays where a handler still runs: the watchdog goes on looking there
                if worker.call is not None:
                    worker.call.add_done_callback(worker.left)
                elif worker.task not in pending:
                    worker.entry = None
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def capacity(self) -> int:
        """Workers that have nothing to do and no claimed job waiting for them."""
        return len(self._idle) - len(self.claimed)

    def running(self) -> int:
        """Handlers that run now."""
        return sum(worker.entry is not None for worker in self.all)

    def busy_origins(self) -> set[str]:
        """Origins of which a handler runs now, under whatever epoch."""
        return {worker.entry.origin.name for worker in self.all if worker.entry is not None}

    def claim(self, entries: list[Entry]) -> None:
        """Hand over jobs that a committed cycle has named."""
        self.claimed.extend(entries)
        self._wake()

    def unclaim(self, queue: OriginQueue | None = None) -> list[Entry]:
        """Take back claimed jobs that have not started, of one origin or of all."""
        taken = [entry for entry in self.claimed if queue is None or entry.origin is queue]
        if taken:
            stay = [entry for entry in self.claimed if queue is not None and entry.origin is not queue]
            self.claimed.clear()
            self.claimed.extend(stay)
        return taken

    def cancel(self, queue: OriginQueue | None, reason: CancelReason) -> int:
        """Cancel the handlers of one origin, or all; returns how many run."""
        count = 0
        for worker in self.all:
            if worker.entry is not None and (queue is None or worker.entry.origin is queue):
                worker.cancel(reason)
                count += 1
        return count

    def _wake(self) -> None:
        # Two at a time, and each that wakes wakes two more: quick jobs need one worker, slow ones soon have all.
        for _ in range(min(2, len(self._idle), len(self.claimed))):
            wake = self._idle.pop().wake
            if wake is not None and not wake.done():
                wake.set_result(None)

    async def _work(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        claimed = self.claimed
        streak = 0
        while not self._stopping:  # a handler may have swallowed the cancellation that was to end this
            if not claimed:
                worker.wake = loop.create_future()
                self._idle.append(worker)
                await worker.wake
                streak = 0
                if len(claimed) > 1:
                    self._wake()
                continue
            await self._attempt(worker, claimed.popleft())
            streak += 1
            if streak >= _STREAK:
                streak = 0
                await asyncio.sleep(0)

    async def _attempt(self, worker: Worker, entry: Entry) -> None:
        started = now()
        origin = entry.origin
        if started >= origin.deadline:
            self.expired.append(entry)
            self._on_change()
            return
        job_type = self._registry.get(entry.type)
        assert job_type is not None  # the scheduler passes known types only
        worker.started = started
        worker.entry = entry
        if job_type.timeout is not None:
            worker.stop_at = started + job_type.timeout
        current_origin.set(origin.name)
        try:
            outcome = await self._run(worker, job_type, entry, started)
        except asyncio.CancelledError:
            outcome = self._cancelled(worker, job_type, entry, started)
        if worker.reason is not None and worker.task is not None:
            while worker.task.cancelling():  # a handler may have caught the cancellation and gone on
                worker.task.uncancel()
        worker.entry = worker.call = None
        worker.stop_at = worker.reason = None
        if outcome is not None:
            self.finished.append(Finished(entry, outcome, started, now()))
        else:
            self.expired.append(entry)
        self._on_change()

    async def _run(self, worker: Worker, job_type: JobType[Any], entry: Entry, started: float) -> Outcome | None:
        """One attempt, from the stored payload to an outcome. Only cancellation comes out as an exception."""
        try:
            job = _job(job_type, entry)
        except Exception as error:  # noqa: BLE001 - a model's own validators may raise anything
            log.error("job %s %s: its payload does not validate, held: %s", entry.id, entry.type, error)
            return Hold("the payload does not validate", ErrorInfo.of(error))
        try:
            if job_type.transactional:
                return await self._transactional.run(job_type, job, entry, started)
            if job_type.is_async:
                result = await cast(Any, job_type.handler)(job)
            else:
                result = await self._in_thread(worker, job_type, job)
                if inspect.isawaitable(result):  # an `async def` behind a decorator that hides it
                    result = await result
        except Fenced:
            return None
        except Discard as error:
            return End(OutcomeName.DISCARDED, ErrorInfo.of(error))
        except Snooze as error:
            return Again(OutcomeName.SNOOZED, error.seconds, ErrorInfo.of(error))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is recorded as its failure
            return _failed(job_type, entry, error, started)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - no reason for this worker to end
            info = ErrorInfo.of(error)
            raised = RuntimeError(f"the handler raised {info.error_class}: {info.message}")
            return _failed(job_type, entry, raised, started)
        return _judged(job_type, entry, result, started) if job_type.retry.judges_results else SUCCEEDED

    async def _in_thread(self, worker: Worker, job_type: JobType[Any], job: Job[Any]) -> object:
        """A plain function. It cannot be interrupted: cancellation waits for it, and its own end counts."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="sidings-job")
        context, handler = copy_context(), cast(Callable[[Any], object], job_type.handler)
        worker.call = self._threads.submit(context.run, _call, handler, job)
        call = asyncio.wrap_future(worker.call)
        while not call.done():
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError:
                if self._stopping:
                    raise
                log.warning("job %s %s: a plain function cannot be cancelled; waiting for it", job.id, job.type)
        return call.result()

    def _cancelled(self, worker: Worker, job_type: JobType[Any], entry: Entry, started: float) -> Outcome | None:
        """The handler ended by cancellation: ours, for a reason, or one that it raised itself."""
        if self._stopping:
            raise asyncio.CancelledError
        match worker.reason:
            case CancelReason.TIMEOUT:
                error = TimeoutError(f"the handler ran longer than {job_type.timeout} s")
                return _failed(job_type, entry, error, started)
            case CancelReason.STOPPING:
                info = ErrorInfo.from_text("Interrupted", "the executor gave the origin up; the job runs again")
                return Again(OutcomeName.SNOOZED, 0.0, info)
            case CancelReason.FENCED:
                return None
            case None:
                return _failed(job_type, entry, RuntimeError("the handler raised CancelledError"), started)

    async def _sweep(self) -> None:
        """Enforce timeouts for all workers with one timer."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            time = now()
            for worker in self.all:
                if worker.stop_at is not None and time >= worker.stop_at:
                    worker.stop_at = None
                    worker.cancel(CancelReason.TIMEOUT)


def _job(job_type: JobType[Any], entry: Entry) -> Job[Any]:
    return Job(
        job_type.load(entry.payload),
        JobId(entry.id),
        entry.type,
        entry.origin.name,
        entry.group,
        entry.attempt,
        entry.failures,
        entry.priority,
        entry.enqueued,
        json.loads(entry.headers) if entry.headers else {},
        entry.origin.fence,
    )


def _call(handler: Callable[[Any], object], job: Job[Any]) -> object:
    try:
        return handler(job)
    except (StopIteration, SystemExit) as error:  # no future can carry the one; the other ends nothing in a thread
        raise RuntimeError(f"the handler raised {error!r}") from error


def _failed(job_type: JobType[Any], entry: Entry, error: Exception, started: float) -> Outcome:
    try:
        outcome = job_type.retry.decide(error, failures=entry.failures, elapsed=_elapsed(entry, started))
    except Exception as broken:  # noqa: BLE001 - a user's own strategy
        return _undecided(entry, broken)
    what = f"again in {outcome.delay:.1f} s" if isinstance(outcome, Again) else outcome.name.value
    log.warning(
        "job %s %s %s: attempt %s failed, %s: %r", entry.id, entry.type, entry.group, entry.attempt, what, error
    )
    return outcome


def _judged(job_type: JobType[Any], entry: Entry, result: object, started: float) -> Outcome:
    """The policy asks for the result as well."""
    try:
        rejected = job_type.retry.judge_result(result, failures=entry.failures, elapsed=_elapsed(entry, started))
    except Exception as broken:  # noqa: BLE001 - a user's own strategy
        return _undecided(entry, broken)
    return SUCCEEDED if rejected is None else rejected


def _undecided(entry: Entry, broken: Exception) -> Outcome:
    """The retry policy itself has failed: the job must not be lost over it."""
    log.error("job type %s: its retry policy failed; retrying in 60 s", entry.type, exc_info=broken)
    return Again(OutcomeName.RETRIED, 60.0, ErrorInfo.of(broken))


def _elapsed(entry: Entry, started: float) -> float:
    """Seconds since the first attempt that failed began; that may be the one that has just failed."""
    return now() - (started if entry.first_started is None else entry.first_started)

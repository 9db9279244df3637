"""One call of a handler, inside of what goes around it, and what its end means for its jobs."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from ..jobs import (
    SUCCEEDED,
    Again,
    Committed,
    Discard,
    ErrorInfo,
    Job,
    JobType,
    Middleware,
    Outcome,
    OutcomeName,
    RetryAfter,
    Snooze,
)
from ..jobs.context import current_work
from ..jobs.middleware import Call, call_through, completed, is_error
from ..jobs.retry import that_counts
from .attempts import failed, invalid, job_of, judged, made, raised, results
from .forks import end_if_forked, forks_so_far
from .queues import Entry
from .threads import HandlerThreads
from .transactional import Superseded, Transactional
from .worker import CancelReason, Worker

__all__ = ["Calling"]


class Calling:
    """Calls handlers for workers: but for those with nothing around them, which a worker awaits by itself."""

    def __init__(self, middleware: Sequence[Middleware], threads: HandlerThreads, transactional: Transactional) -> None:
        self._middleware = middleware
        self._threads = threads
        self._transactional = transactional

    async def run(
        self, worker: Worker, job_type: JobType[Any], job: Job[Any], entry: Entry, started: float
    ) -> Outcome | None:
        """Call a handler that is transactional, a plain function, or inside of middleware. What it raises comes out.
        None: it is not called."""

        def judge(result: object) -> Outcome:
            return judged(job_type, entry, result, started) if job_type.judges_results else SUCCEEDED

        if job_type.transactional:
            return await self._transactional.run(job_type, job, entry, started, worker.limit, judge)
        if self._middleware:
            result = await self._handle_inside(worker, job_type, [job], job)
        else:
            result = await self._handle_plain(worker, job_type, job)
        return judge(result)

    async def run_batch(
        self, worker: Worker, job_type: JobType[Any], entries: list[Entry], started: float
    ) -> list[Outcome | None]:
        """One attempt of a list of jobs; an outcome for each."""
        outcomes: dict[Entry, Outcome | None] = {}  # of those that have not succeeded
        valid: list[Entry] = []
        jobs: list[Job[Any]] = []
        for entry in entries:
            try:
                jobs.append(job_of(job_type, entry))
                valid.append(entry)
            except Exception as error:  # noqa: BLE001 - a model's own validators may raise anything
                outcomes[entry] = invalid(job_type, entry, error)
        current_work.set(tuple(jobs))
        try:
            if not jobs:
                result = None
            elif self._middleware:
                result = await self._handle_inside(worker, job_type, jobs, jobs)
            elif job_type.is_async:
                result = await completed(await cast(Any, job_type.handler)(jobs), listed=True)
            else:
                result = await self._handle_plain(worker, job_type, jobs)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is recorded, and ends no worker
            outcomes |= {entry: self.raised(worker, job_type, entry, error, started) for entry in valid}
        else:
            for entry, each in zip(valid, results(result, len(valid)), strict=True):
                if is_error(each):
                    outcomes[entry] = raised(job_type, entry, made(each), started, self._transactional.outages)
        return [outcomes.get(entry, SUCCEEDED) for entry in entries]

    async def _handle_inside(
        self, worker: Worker, job_type: JobType[Any], jobs: list[Job[Any]], argument: Any
    ) -> object:
        """Call the handler inside of the service's middleware."""
        forks = forks_so_far()
        handler = partial(cast(Any, job_type.handler), argument)
        if not job_type.is_async:
            handler = partial(self._threads.call, worker, job_type.name, job_type.handler, argument)
        call = Call(job_type.name, jobs[0].origin, jobs=tuple(jobs))  # the handler may use its list up
        judged, listed = job_type.judges_results, job_type.batch is not None
        try:
            return await call_through(self._middleware, call, handler, judged=judged, listed=listed)
        except (GeneratorExit, KeyboardInterrupt):  # nothing more can be awaited
            raise
        except BaseException as error:
            # A plain function may go on: at a stop, or where a middleware has not waited for it. It keeps its worker
            # and its group until it returns; at a stop it is left to itself, whatever the middleware has raised.
            end_if_forked(forks, error)
            await self._threads.returned(worker, job_type.name)
            raise

    async def _handle_plain(self, worker: Worker, job_type: JobType[Any], argument: Any) -> object:
        """Call a plain function, with a job or with a list of them."""
        handler = cast(Callable[[Any], object], job_type.handler)
        result = await self._threads.call(worker, job_type.name, handler, argument)
        return await completed(result, judged=job_type.judges_results, listed=job_type.batch is not None)

    def raised(
        self, worker: Worker, job_type: JobType[Any], entry: Entry, error: BaseException, started: float
    ) -> Outcome | None:
        """The handler raised. One that is cancelled because the origin is given up may raise anything on its way out,
        as a task group does of which a task fails to clean up: that is no failure. A thread's call is not cancelled.
        """
        decided = isinstance(that_counts(error), Discard | Snooze | RetryAfter | Superseded)
        cut_off = worker.reason is CancelReason.STOPPING and worker.call is None
        if cut_off and not decided:
            return self.cancelled(worker, job_type, entry, error, started)
        outcome = raised(job_type, entry, error, started, self._transactional.outages)
        not_begun = worker.call is not None and worker.call.cancelled()  # there was no thread for it
        if isinstance(outcome, Again) and (cut_off or not_begun):
            return replace(outcome, inconclusive=True)
        return outcome

    def cancelled(
        self, worker: Worker, job_type: JobType[Any], entry: Entry, by: BaseException, started: float
    ) -> Outcome | None:
        """The handler ended by cancellation: ours, for a reason, or one that it raised itself."""
        if self._threads.stopping:
            worker.leave()
            raise asyncio.CancelledError
        match worker.reason:
            case CancelReason.TIMEOUT:
                error = TimeoutError(f"the handler ran longer than {job_type.timeout} s")
                error.__cause__ = by  # which knows where
                return failed(job_type, entry, error, started)
            case CancelReason.STOPPING:
                info = ErrorInfo.from_text("Interrupted", "the executor gave the origin up; the job runs again")
                return Again(OutcomeName.SNOOZED, 0.0, info, inconclusive=True)
            case CancelReason.FENCED:
                return None
            case CancelReason.ENDED:
                return Committed(OutcomeName.CANCELLED)
            case None:
                raised_itself = RuntimeError("the handler raised CancelledError")
                raised_itself.__cause__ = by
                return failed(job_type, entry, raised_itself, started)

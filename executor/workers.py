"""Runs handlers: a fixed set of worker coroutines, no task per job, and no statement either but for transactional ones.

Workers take jobs from `claimed`, where the cycle puts those that a commit has named in `running`, and put what came of
them into `finished`, from where the next cycle collects it.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

from ..jobs import SUCCEEDED, JobType, Registry
from ..jobs.context import current_work
from ..jobs.middleware import completed
from .attempts import Finished, invalid, job_of, judged
from .calling import Calling
from .clock import now
from .forks import end_if_forked, forks_so_far
from .queues import Entry, OriginQueue
from .slow_types import SlowTypes
from .threads import HandlerThreads
from .transactional import Transactional
from .worker import CancelReason, Worker

__all__ = ["Workers", "runs_alone"]

log = logging.getLogger("sidings.executor")

_STREAK = 64  # jobs that one worker runs before it lets the event loop go round
_AT_ONCE = 2  # workers that take quick jobs in turns
_SWEEP_SECONDS = 0.05
_STOP_SECONDS = 5.0  # how long a handler may take to notice the last cancellation


class Workers:
    """All workers of an executor. `changed` is set when the cycle has something to collect."""

    def __init__(self, registry: Registry, concurrency: int, transactional: Transactional) -> None:
        self.changed = asyncio.Event()
        self.claimed: deque[Entry | list[Entry]] = deque()
        self.batch_sizes = registry.batch_sizes
        self._limits = registry.limits
        self.finished: list[Finished] = []
        self.expired: list[Entry] = []  # claimed, but the lease ran out before a worker came to them
        self.all = [Worker() for _ in range(concurrency)]
        self.slow = SlowTypes(concurrency, registry)
        self._idle: list[Worker] = []
        self._waking: asyncio.Handle | None = None
        self._wave = _AT_ONCE  # workers to wake next
        self._between = 0  # workers that have given the event loop a turn, and go on with the next job by themselves
        self._registry = registry
        self._transactional = transactional
        self._middleware = transactional.middleware = registry.middleware
        self._threads = HandlerThreads(concurrency)
        self._calling = Calling(registry.middleware, self._threads, transactional)
        self._sweeper: asyncio.Task[None] | None = None
        self._stopping = False
        self._forks = 0  # at the start

    def start(self) -> None:
        """Create the workers' coroutines."""
        self._forks = forks_so_far()
        for worker in self.all:
            worker.task = asyncio.create_task(self._work(worker), name="sidings worker")
        self._sweeper = asyncio.create_task(self._sweep(), name="sidings timeouts")

    async def watch(self) -> None:
        """Return never; raise if a worker ends although nobody asked it to, since its jobs would wait for ever, or what
        enforces the timeouts."""
        done, _ = await asyncio.wait(self._tasks(), return_when=asyncio.FIRST_COMPLETED)
        raise RuntimeError(f"a task that runs handlers, or times them out, has ended: {next(iter(done))!r}")

    def end(self) -> None:
        """Cancel everything: the executor has come to its end. No cancellation is taken for a handler's own any more,
        or a loop that shuts down would wait for ever for workers that go on."""
        if not self._stopping:
            self._stopping = True
            self._threads.stop()
            for task in self._tasks():
                task.cancel()

    def includes(self, task: "asyncio.Task[Any] | None") -> bool:
        """Whether it runs handlers."""
        return any(worker.task is task for worker in self.all if task is not None)

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
                if worker.task not in pending:
                    worker.leave()

    def in_threads(self) -> Entry | None:
        """The job of a plain function that has not returned yet, which a stop leaves to itself."""
        return next((worker.entry for worker in self.all if worker.call is not None and not worker.call.done()), None)

    def capacity(self) -> int:
        """Workers that have nothing to do and no claimed job waiting for them."""
        return len(self._idle) - len(self.claimed)

    def share_out(self, coming: Sequence[list[Entry]]) -> tuple[dict[str, int], dict[str, int], list[Entry]]:
        """How many more jobs may start beside those that are `coming`, with one cycle or several: of each slow type; of
        each that has a limit. And claimed ones of slow types that are too many already, and do not start: they would
        wait here, with all behind them, for workers that are left to others."""
        if not self.slow.names and not self._limits:
            return {}, {}, []
        together = self._in_batches if self.batch_sizes else list[Entry | list[Entry]]
        waiting = [_type_of(item) for entries in coming for item in together(entries)]
        slow, taken = self._share_out_slow(waiting) if self.slow.names else ({}, [])
        limited = self._left_of_limits(waiting) if self._limits else {}
        return slow, limited, taken

    def _share_out_slow(self, waiting: list[str]) -> tuple[dict[str, int], list[Entry]]:
        self.slow.tell(now())
        items = list(self.claimed)
        left, back = self.slow.share_out(waiting, list(map(_type_of, items)))
        taken: list[Entry] = []
        self.claimed.clear()
        for item, goes in zip(items, back, strict=True):
            if goes:
                taken += item if isinstance(item, list) else [item]
            else:
                self.claimed.append(item)
        return left, taken

    def _left_of_limits(self, waiting: list[str]) -> dict[str, int]:
        held = Counter(worker.entry.type for worker in self.all if worker.entry is not None)
        held.update(waiting)
        held.update(map(_type_of, self.claimed))
        return {type: limit - held[type] for type, limit in self._limits.copy().items()}

    def running(self) -> int:
        """Handlers that run now."""
        return sum(worker.entry is not None for worker in self.all)

    def busy_origins(self) -> set[str]:
        """Origins of which a handler runs now, under whatever epoch."""
        return {worker.entry.origin.name for worker in self.all if worker.entry is not None}

    def claim(self, entries: list[Entry]) -> None:
        """Hand over jobs that a committed cycle has named."""
        self.claimed.extend(self._in_batches(entries) if self.batch_sizes else entries)
        self._wave = _AT_ONCE
        if self._waking is None:
            self._wake()

    def _in_batches(self, entries: Iterable[Entry]) -> list[Entry | list[Entry]]:
        """Put the jobs of a type that takes lists together, by origin. One that has failed stays alone."""
        items: list[Entry | list[Entry]] = []
        filling: dict[tuple[OriginQueue, str], list[Entry]] = {}
        for entry in entries:
            size = self.batch_sizes.get(entry.type)
            if size is None:
                items.append(entry)
                continue
            key = (entry.origin, entry.type)
            alone = runs_alone(entry)
            if not alone and key in filling and len(filling[key]) < size:
                filling[key].append(entry)
                continue
            batch = [entry]
            items.append(batch)
            if not alone:
                filling[key] = batch
        return items

    def unclaim(self, queue: OriginQueue | None = None) -> list[Entry]:
        """Take back claimed jobs that have not started, of one origin or of all."""
        taken: list[Entry] = []
        for _ in range(len(self.claimed)):
            item = self.claimed.popleft()
            entries = item if isinstance(item, list) else [item]
            if queue is None or entries[0].origin is queue:
                taken += entries
            else:
                self.claimed.append(item)
        return taken

    def give_up(self, queue: OriginQueue | None = None) -> list[Entry]:
        """`unclaim`; and none begins that waits for room within its worker: it comes back as `expired`."""
        self._transactional.turn_away(queue)
        return self.unclaim(queue)

    def cancel(self, queue: OriginQueue | None, reason: CancelReason) -> None:
        """Cancel the handlers of one origin, or all."""
        for worker in self.all:
            if worker.entry is not None and (queue is None or worker.entry.origin is queue):
                worker.cancel(reason)

    def cancel_jobs(self, ids: set[int]) -> None:
        """Cancel the handlers of these jobs. A batch goes on: the outcome of such a job in it matches nothing. So does
        the end of a transaction that has been sent: it may be what has ended the job, and its answer says so."""
        ending = self._transactional.ending
        for worker in self.all:
            entry = worker.entry
            if entry is not None and entry.id in ids and entry not in ending and entry.type not in self.batch_sizes:
                worker.cancel(CancelReason.ENDED)

    def _wake(self) -> None:
        """Wake some workers, and look again at each turn of the event loop while claimed jobs wait. A worker that goes
        on by itself needs no help: quick jobs are left to the first two, so that a turn stays short, or what has
        finished would wait for all of them. Where handlers wait for something, all are awake after a few turns."""
        self._waking = None
        if not self.claimed or not self._idle:
            return
        if not self._between:
            for _ in range(min(self._wave, len(self._idle), len(self.claimed))):
                awake = self._awake()
                if self.slow.leaves(_type_of(self.claimed[0]), len(self._idle), awake):
                    if not awake:
                        return  # one of its own type is to run it; `_sweep` looks again, and what is slow is given back
                    break
                wake = self._idle.pop().wake
                if wake is not None and not wake.done():
                    wake.set_result(None)
            self._wave *= 2
        self._waking = asyncio.get_running_loop().call_soon(self._wake)

    def _takes(self, worker: Worker) -> bool:
        """Whether a worker that is awake takes the next claimed job. Of its own type it does: nothing is left to others
        that was not before."""
        type = _type_of(self.claimed[0])
        if type != worker.type:
            if self.slow.leaves(type, len(self._idle) + 1):
                return False
            self.slow.turn(worker, type)
        return True

    def _awake(self) -> int:
        """Workers that have been woken and not taken a claimed job yet, of whatever type."""
        return len(self.all) - len(self._idle) - self.slow.held.total()

    async def _work(self, worker: Worker) -> None:
        loop, task = asyncio.get_running_loop(), cast(asyncio.Task[None], asyncio.current_task())
        claimed = self.claimed
        streak = 0
        while not self._stopping:  # a handler may have swallowed the cancellation that was to end this
            if not claimed or (streak >= _STREAK and self._between >= _AT_ONCE) or not self._takes(worker):
                current_work.set(None)  # the last job, and its payload
                self.slow.turn(worker, None)
                worker.wake = loop.create_future()
                self._idle.append(worker)
                if claimed and self._waking is None:
                    self._waking = loop.call_soon(self._wake)
                try:
                    await worker.wake
                except asyncio.CancelledError:
                    if worker in self._idle:
                        self._idle.remove(worker)
                    self._disregard(task)
                streak = 0
            elif streak >= _STREAK:
                streak = 0
                self._between += 1
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    self._disregard(task)
                finally:
                    self._between -= 1
            elif isinstance(claimed[0], Entry):
                streak += await self._attempts(worker, task, _STREAK - streak)
            else:
                streak += await self._attempt_batch(worker, task, cast(list[Entry], claimed.popleft()))

    def _disregard(self, task: asyncio.Task[None]) -> None:
        """A worker was cancelled for a job that is over: a handler has given its task away. It belongs to us."""
        if self._stopping:
            raise asyncio.CancelledError
        while task.cancelling():
            task.uncancel()

    async def _forget_cancellation(self, task: asyncio.Task[None]) -> None:
        """Nothing of it is for the next job. One that has not been delivered yet, since a handler has cancelled itself
        and then awaited nothing, is delivered here."""
        self._disregard(task)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._disregard(task)

    async def _attempts(self, worker: Worker, task: asyncio.Task[None], most: int) -> int:
        """One attempt of each of the next claimed jobs of its type, at most of so many, from the stored payload to an
        outcome. Returns how many. One coroutine for all, and a coroutine function without anything around it is
        awaited right here: each call in between costs as much as the rest."""
        claimed, changed = self.claimed, self.changed.set
        finished = now()
        for count in range(most):
            if not claimed or self._stopping or not isinstance(entry := claimed[0], Entry) or entry.type != worker.type:
                return count
            del claimed[0]
            started = finished
            job_type = self._begin(worker, entry, started)
            if job_type is None:
                self.expired.append(entry)
                changed()
                continue
            try:
                try:
                    job = job_of(job_type, entry)
                except Exception as error:  # noqa: BLE001 - a model's own validators may raise anything
                    outcome = invalid(job_type, entry, error)
                else:
                    current_work.set(job)
                    if job_type.is_async and not job_type.transactional and not self._middleware:
                        handler: Any = job_type.handler
                        result = await handler(job)
                        if result is not None:
                            result = await completed(result, judged=job_type.judges_results)
                        outcome = judged(job_type, entry, result, started) if job_type.judges_results else SUCCEEDED
                    else:
                        outcome = await self._calling.run(worker, job_type, job, entry, started)
            except asyncio.CancelledError as error:
                outcome = self._calling.cancelled(worker, job_type, entry, error, started)
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is recorded, and ends no worker
                _pass_on_exit(error, task)
                end_if_forked(self._forks, error)
                outcome = self._calling.raised(worker, job_type, entry, error, started)
            self._end(worker)
            finished = now()
            if outcome is None:
                self.expired.append(entry)
            else:
                self.finished.append((entry, outcome, started, finished))
            changed()
            if task.cancelling():
                await self._forget_cancellation(task)
                finished = now()
        return most

    async def _attempt_batch(self, worker: Worker, task: asyncio.Task[None], entries: list[Entry]) -> int:
        """One attempt of them all. Returns how many they are."""
        started = now()
        job_type = self._begin(worker, entries[0], started)
        if job_type is None:
            self.expired += entries
        else:
            try:
                outcomes = await self._calling.run_batch(worker, job_type, entries, started)
            except asyncio.CancelledError as error:
                outcomes = [self._calling.cancelled(worker, job_type, entry, error, started) for entry in entries]
            except BaseException as error:  # noqa: BLE001 - as in `_attempts`
                _pass_on_exit(error, task)
                end_if_forked(self._forks, error)
                outcomes = [self._calling.raised(worker, job_type, entry, error, started) for entry in entries]
            self._end(worker)
            finished = now()
            for entry, outcome in zip(entries, outcomes, strict=True):
                if outcome is None:
                    self.expired.append(entry)
                else:
                    self.finished.append((entry, outcome, started, finished))
        self.changed.set()
        if task.cancelling():
            await self._forget_cancellation(task)
        return len(entries)

    def _begin(self, worker: Worker, entry: Entry, started: float) -> JobType[Any] | None:
        """The type to run; none if the lease ran out before a worker came to it."""
        if started >= entry.origin.deadline:
            return None
        job_type = self._registry.get(entry.type)
        assert job_type is not None  # the scheduler passes known types only
        worker.started = started
        worker.entry = entry
        if job_type.timeout is not None and not job_type.transactional:
            worker.stop_at = started + job_type.timeout
        return job_type

    def _end(self, worker: Worker) -> None:
        end_if_forked(self._forks)
        worker.entry = worker.call = None
        worker.stop_at = None
        if worker.reason is not None:
            worker.reason = None
            worker.given.clear()

    async def _sweep(self) -> None:
        """Enforce timeouts for all workers with one timer."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            time = now()
            for worker in self.all:
                if worker.stop_at is not None and time >= worker.stop_at:
                    worker.stop_at = None
                    worker.cancel(CancelReason.TIMEOUT)
            if self.slow.look(self.all, len(self._idle), time):
                self.changed.set()
            if self._waking is None:
                self._wake()  # of the claimed jobs the slow ones may have been given back


def runs_alone(entry: Entry) -> bool:
    """Whether a job of a type that takes lists is given to its handler alone: it may spoil the others."""
    return entry.failures > 0 or entry.losses > 0


def _type_of(item: Entry | list[Entry]) -> str:
    return item[0].type if isinstance(item, list) else item.type


def _pass_on_exit(error: BaseException, task: asyncio.Task[None]) -> None:
    """Raise what is not a handler's own: the interrupt of a person, which only the main thread gets, and the end of a
    coroutine that Python closes, after its loop. A handler that raises SystemExit has failed like any other: ending
    the process would have its job do so again, in each instance in turn."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, GeneratorExit) and asyncio.current_task(task.get_loop()) is not task:
        raise error

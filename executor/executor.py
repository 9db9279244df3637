"""The executor: composes the scheduler, the loops and the threads, and starts and stops them together."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID, uuid4

import asyncpg
from prometheus_client import REGISTRY, CollectorRegistry

from ..errors import ConfigurationError, PostgresUnavailable, SchemaTooNew
from ..jobs import Registry
from ..outage import Outage
from ..schema import load_sql
from .clock import now
from .cycles import CycleLoop
from .health import Health
from .leases import LeaseEvents, LeaseThread, tell_loop
from .link import Backoff, Link, check_schema, close_all
from .metrics import ExecutorMetrics
from .notify import Notifier
from .periodic import PeriodicLoop
from .promoter import Promoter
from .queues import OriginQueue
from .reader import Reader
from .reconcile import Reconciler
from .scheduler import Scheduler
from .settings import ExecutorSettings, PostgresSettings
from .standing import Deposed
from .transactional import Transactional
from .upkeep import Upkeep
from .watchdog import Watchdog
from .worker import CancelReason
from .workers import Workers

__all__ = ["Executor"]

log = logging.getLogger("sidings.executor")


class Executor:
    """Runs the jobs of the origins that are assigned to this process. One per service instance.

    `assign` says which origins. `start` returns at once, also while Postgres is away. `stop` lets running handlers end,
    then cancels them, then gives the origins back. What is guaranteed stands in docs/guarantees.md.
    """

    def __init__(
        self,
        service: str,
        registry: Registry,
        postgres: PostgresSettings,
        settings: ExecutorSettings | None = None,
        *,
        prometheus: CollectorRegistry = REGISTRY,
    ) -> None:
        self.id: UUID = uuid4()  # until it registers
        self.on_replaced: list[Callable[[], None]] = []  # called when another server is the primary
        self.settings = settings or ExecutorSettings()
        self.postgres = postgres
        self.metrics = ExecutorMetrics(service, prometheus, registry)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        schema = postgres.schema_name
        self._links = {
            name: Link(postgres, self._link_failed, self.metrics.database_errors.inc)
            for name in ("cycle", "second cycle", "read", "control", "promote", "upkeep", "notify", "periodic")
        }
        self.scheduler = Scheduler(lambda name: registry.get(name) is not None)
        self._transactional = Transactional(postgres, self._refused, self.committed, self.settings.soft_seconds / 2)
        self.workers = Workers(registry, self.settings.concurrency, self._transactional)
        self.cycles = CycleLoop(
            [self._links["cycle"], self._links["second cycle"]],
            self.scheduler,
            self.workers,
            registry,
            self.metrics,
            schema=schema,
            poison_after=self.settings.poison_after,
            on_fenced=self._fenced,
            on_replaced=self._server_replaced,
            on_read=self.wake,
            on_forgotten=lambda: self.reader.read_anew(),
            on_delayed=self._delayed,
            on_hungry=lambda: self.reader.hungry(),
        )
        self.reader = Reader(
            self._links["read"],
            self.scheduler,
            self.metrics,
            schema=schema,
            poll_seconds=self.settings.poll_seconds,
            silent=registry.silent,
            on_rows=self.cycles.signal,
            on_restarted=lambda: self._reconciler.distrust_expiry(),
            on_replaced=self._server_replaced,
            on_fence=self.cycles.standing.fence_read,
        )
        events = LeaseEvents(
            lost=lambda epochs: self._reconciler.lost(epochs),
            wanted=lambda name, generation: self._reconciler.wanted(name, generation),
            replaced=self._server_replaced,
        )
        self._leases = LeaseThread(postgres, self.settings, events, self._link_failed)
        self._watchdog = Watchdog(self.settings, self._leases, self.workers, self.metrics.stalled_seconds.inc)
        self._reconciler = Reconciler(
            self._links["control"],
            self.scheduler,
            self.workers,
            self.cycles,
            self.reader,
            self._leases,
            self.metrics,
            self.settings,
            schema,
            on_replaced=self._server_replaced,
        )
        self._promoter = Promoter(
            self._links["promote"],
            self.scheduler,
            self.metrics,
            schema=schema,
            silent=registry.silent,
            on_promoted=self.reader.wake,
        )
        self._upkeep = Upkeep(
            self._links["upkeep"],
            self.scheduler,
            self.metrics,
            self.settings,
            schema=schema,
            on_found=self._reread,
        )
        self._periodic = PeriodicLoop(
            self._links["periodic"],
            self.scheduler,
            registry,
            schema=schema,
            on_fired=lambda origins: self.committed(dict.fromkeys(origins, ())),
        )
        self._notifier: Notifier | None = None
        if self.settings.notify:
            if postgres.pgbouncer:
                raise ConfigurationError("notify=True does not work with pgbouncer=True: leave one of them out")
            self._notifier = Notifier(postgres, self._links["notify"], self.scheduler, on_notified=self._there_are)
        self._main: asyncio.Task[None] | None = None
        self._checked = False  # the schema, since the last registration
        self._registered = asyncio.Event()
        self._refusal: Exception | None = None  # why it could not be registered, the last time
        self._stopped = False
        self._stopping = asyncio.Lock()
        self._health = Health(
            service=service,
            settings=self.settings,
            registered=self._registered,
            scheduler=self.scheduler,
            workers=self.workers,
            cycles=self.cycles,
            reader=self.reader,
            leases=self._leases,
            watchdog=self._watchdog,
            reconciler=self._reconciler,
            promoter=self._promoter,
            periodic=self._periodic,
            transactional=self._transactional,
            upkeep=self._upkeep,
        )
        self.metrics.gauges = self._health.gauges

    # -- for the assignment -----------------------------------------------------------------------------------------

    def assign(self, origins: Collection[str], generation: int = 0) -> None:
        """From now on these origins, and no others, belong to this process as far as Kafka is concerned.

        Origins that are no longer listed are drained. New ones are acquired in the background, as soon as their former
        owner has let go.

        Args:
            origins: Each ``topic/partition``.
            generation: Of the consumer group; a holder yields an origin to a newer one.
        """
        self._reconciler.assign(origins, generation)

    @property
    def held(self) -> dict[str, int]:
        """The origins whose jobs may run here now, with their epochs."""
        return {queue.name: queue.epoch for queue in self.scheduler.origins.values() if not queue.draining}

    async def settled(self, timeout: float | None = None) -> None:
        """Return when all that is assigned is held and all else released.

        Args:
            timeout: Seconds. None: any time.

        Raises:
            TimeoutError: It is not so after `timeout`.
        """
        async with asyncio.timeout(timeout):
            await self._reconciler.settled()

    def wake(self) -> None:
        """Look for jobs now instead of at the next poll."""
        self.reader.wake()

    def committed(self, jobs: Mapping[str, Sequence[int]]) -> None:
        """Wake whoever runs the jobs that this process has just committed.

        Args:
            jobs: Their ids by origin: of all that has been committed there, or none, where there are many, or some
                that are delayed, say.
        """
        if self._notifier is not None:  # first: others wait longer
            self._notifier.announce(jobs)
        self._there_are(jobs)

    def _there_are(self, jobs: Mapping[str, Sequence[int]]) -> None:
        held = {origin: ids for origin, ids in jobs.items() if origin in self.scheduler.origins}
        if (held or not jobs) and not self.cycles.expect(held):
            self.reader.wake()

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start in the background. Postgres may be away: the executor waits for it.

        Raises:
            SchemaError: The database answers, and its schema does not fit.
        """
        try:
            await check_schema(self.postgres, self._service)
            self._checked = True
        except PostgresUnavailable as error:
            log.warning("starting without Postgres: %s", error)
        if self._stopped:  # meanwhile
            return
        self._loop = asyncio.get_running_loop()
        self._leases.start()
        self._watchdog.start()
        self.workers.start()
        self._main = asyncio.create_task(self._run(), name="sidings executor")

    async def stop(self) -> None:
        """Stop: let running handlers end for `shutdown_seconds`, cancel the others, give the origins back.

        What came of the handlers is recorded before. Safe to call twice, and when never started; then it does not start
        any more.
        """
        self._stopped = True
        async with self._stopping:  # who comes second returns when all is done
            try:
                if self._main is not None:
                    await self._stop(self._main)
            finally:
                self.metrics.close()

    async def _stop(self, main: asyncio.Task[None]) -> None:
        try:
            # Where all tasks are cancelled, as by asyncio.run at an interrupt, nothing can be recorded or given back.
            if self._registered.is_set() and not main.done() and not main.cancelling():
                await self._wind_down()
        finally:
            main.cancel()
            async with AsyncExitStack() as ends:  # the last first; each, also where this is cancelled again and again
                ends.push_async_callback(close_all, self._links.values())
                ends.push_async_callback(self._leases.stop)
                ends.callback(self._watchdog.stop)
                ends.callback(self._transactional.close)
                ends.push_async_callback(self.workers.stop)
                await asyncio.gather(main, return_exceptions=True)

    async def wait(self) -> None:
        """Return when the executor has been stopped; raise what ended it otherwise."""
        if self._main is not None:
            await asyncio.wait([self._main])  # who waits no longer does not end it
            if not self._main.cancelled():
                self._main.result()

    def cancel_all(self) -> None:
        """Cancel every running handler now; their jobs run again. The firm part of a stop."""
        self.workers.cancel(None, CancelReason.STOPPING)

    async def _wind_down(self) -> None:
        """The graceful part, in this order, under one deadline."""
        deadline = self._reconciler.cancel_not_before = now() + self.settings.shutdown_seconds
        self.cycles.paused = True  # 1. start nothing more
        self.cycles.unname(self.workers.give_up())
        while self.workers.running() and now() < deadline:  # 2. let handlers end
            await asyncio.sleep(0.02)
        if running := self.workers.running():  # 3. cancel the rest
            log.warning(
                "stopping: %s handlers still run after %s s: cancelled",
                running,
                self.settings.shutdown_seconds,
            )
            self.cancel_all()
        deadline = max(deadline, now() + 5.0)
        self.assign((), self._reconciler.generation + 1)  # 4. record outcomes, release
        try:
            await self.settled(max(0.0, deadline - now()))
            await self._links["control"].fetch(load_sql(__package__, "deregister", self.postgres.schema_name), self.id)
        except (TimeoutError, PostgresUnavailable, asyncpg.PostgresError) as error:
            left = ", ".join(self.scheduler.origins)
            log.warning("stopped without releasing %s; their leases run out by themselves (%r)", left or "all", error)

    async def _run(self) -> None:
        try:
            await self._run_loops()
        except BaseException as error:
            defect = isinstance(error, Exception)
            if defect:
                log.critical("the executor has failed and runs no more jobs: end this process", exc_info=True)
            if defect or not self._stopped:  # without its loops this process keeps none; a stop gives them back itself
                for leased in self._leases.held():
                    self._leases.drop(leased.name)
            raise
        finally:
            self.workers.end()

    async def _run_loops(self) -> None:
        spare = False
        while True:
            await self._register(goes_on=spare)
            loops: list[Coroutine[Any, Any, None]] = [
                self.cycles.run(),
                self.reader.run(),
                self._reconciler.run(),
                self._reconciler.tend(),
                self._promoter.run(),
                self._periodic.run(),
                self._upkeep.run(),
                self.workers.watch(),
            ]
            if self._notifier is not None:
                loops += [self._notifier.send(), self._notifier.listen()]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(loop, name=f"sidings {loop.__qualname__}") for loop in loops]
                    # One that somebody else has cancelled would be missed by nobody: a task group goes on without it.
                    [ended, *_], _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    raise RuntimeError(f"a loop has ended: {ended!r}")
            except* Deposed:
                spare = not self.scheduler.origins  # maintenance deletes the row of one that has held nothing for a day
                level = logging.INFO if spare else logging.ERROR
                told = "the row of executor %s is gone from the database: starting again under a new id"
                log.log(level, told, self.id)
                self._fenced(list(self.scheduler.origins))
                self._renew_links()  # some may lead to a former primary, where the next one would be registered
            if (task := asyncio.current_task()) is not None and task.cancelling():  # errors of a group hide that
                raise asyncio.CancelledError

    async def _register(self, *, goes_on: bool) -> None:
        """goes_on: as one that runs does on a schema on which its release may start no more."""
        self.id = uuid4()  # only now: what was made before a fork runs in several processes
        backoff, outage, self._refusal = Backoff(), Outage(log, "the executor could not be registered"), None
        while True:
            try:
                if not self._checked:
                    try:
                        await check_schema(self.postgres, self._service)
                    except SchemaTooNew:
                        if not goes_on:
                            raise
                self._checked = False  # the next time it may be another database
                sql = load_sql(__package__, "register", self.postgres.schema_name)
                await self._links["control"].fetch(sql, self.id, socket.gethostname(), os.getpid())
                break
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                self._refusal = error
                outage.failed(error)
                await backoff.sleep()
        outage.over()
        self.cycles.begin(self.id)
        parts = (self.reader, self._leases, self._periodic, self._promoter, self._reconciler, self._transactional)
        for part in parts:
            part.executor_id = self.id
        self._registered.set()

    # -- between the parts ------------------------------------------------------------------------------------------

    def _link_failed(self) -> None:
        """In any thread. Handlers may have taken all connections that the server gives, as when all were lost and
        theirs came back first: what they do not use now is for the executor, without which nothing begins or ends."""
        self.metrics.database_errors.inc()
        if self._loop is not None:
            tell_loop(self._loop, self._transactional.make_room)

    def _delayed(self, due: float) -> None:
        self._promoter.expect(due)

    def _fenced(self, origins: list[str]) -> None:
        self._reconciler.lost(dict.fromkeys(origins))

    def _refused(self, origin: str) -> None:
        """The end of a transaction, for another lease or timeline. Its connection may be the first to have met a new
        server: the others then lead to a former primary, which would grant the lease and have the job run for ever."""
        self._fenced([origin])
        self._renew_links()

    def _renew_links(self) -> None:
        for link in self._links.values():
            link.renew()

    def _server_replaced(self) -> None:
        """Ids may be handed out a second time: not even what runs may be recorded under them."""
        self._fenced(list(self.scheduler.origins))
        self.scheduler.timeline = None
        self._renew_links()  # some may still lead to the former server
        self._transactional.forget_connections()
        for tell in self.on_replaced:
            tell()
        self._reconciler.distrust_expiry()

    def _reread(self, queue: OriginQueue) -> None:
        self.scheduler.forget_waiting(queue)
        self.reader.wake()

    # -- seeing what goes on ----------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What a health check should complain about; empty when all is well."""
        return self._health.problems(self._main, self._refusal)

"""How the parts of a service start, stop and fail together, and what is wrong meanwhile."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing import current_process
from types import TracebackType
from typing import Any

from ..errors import ConfigurationError, DirectoryNotReady, PostgresUnavailable
from ..executor import PostgresSettings, check_schema
from ..jobs import Registry
from ..jobs.tracing import tracing
from ..kafka import Consumer, Directory, KafkaExecutor
from ..schema import REFUSED, refusal
from ..supervision import Supervisor, raise_only
from ..waiting import unless_set
from .configuration import Configuration
from .lookups import look_up_apart
from .monitor import Monitor, ProblemMetrics, warn_of_multiprocess_mode
from .parts import Database, Parts
from .subscriptions import Subscriptions

__all__ = ["Life"]

log = logging.getLogger("sidings.service")

_DRAIN_SECONDS = 5.0  # for the batch at work; a longer one is rolled back, which costs nothing but its repetition
_LEAVE_SECONDS = 10.0
_END_SECONDS = 5.0  # for the consumer, once it has been cancelled
_HURRY_SECONDS = 0.1
_IDLE_SECONDS = 30.0  # a consumer of the author's own has joined its group by then
_HANDLES_NOTHING = ", and handles nothing: it has no job type, consumer or directory"


class Life:
    """The one life of a service: `start`, and `end` once it has started. `monitor`: None if it is not wanted."""

    def __init__(
        self, configuration: Configuration, registry: Registry, parts: Parts, subscriptions: Subscriptions
    ) -> None:
        self.consumer: Consumer | None = None
        self.monitor: Monitor | None = None
        if (http := configuration.http) is not None:
            self.monitor = Monitor(http, configuration.prometheus, problems=self.problems, not_ready=self.not_ready)
        self._configuration = configuration
        self._registry = registry
        self._parts = parts
        self._subscriptions = subscriptions
        self._supervisor = Supervisor()
        self._stack: AsyncExitStack | None = None  # what is to be undone at the end
        self._beginning = threading.Lock()
        self._begun = False  # a start, which may be under way
        self._giving_up = asyncio.Event()  # nothing waits for directories any more
        self._leaving: asyncio.Task[None] | None = None
        if parts.database is not None:
            parts.database.executor.rebalance_listener.on_refused = self._supervisor.fail

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self._stack is not None

    def problems(self) -> list[str]:
        """What ``/health`` complains about. Any thread may call it."""
        found = self._hindrances()
        database = self._parts.database
        if database is not None and database.relay is not None and self.running:
            found += database.relay.held_up()
        return found

    def not_ready(self) -> list[str]:
        """What ``/ready`` complains about: not of what holds up the relay, as without Kafka, since publishing goes
        on. Any thread may call it."""
        found = self._hindrances()
        for directory in self._subscriptions.directories.values():
            found += directory.not_ready()
        if self.consumer is not None and not self.consumer.joined:
            found.append("the consumer has no assignment yet")
        if self._supervisor.stopping:
            found.append("the service is stopping")
        return found

    def _hindrances(self) -> list[str]:
        database = self._parts.database
        found: list[str] = []
        if not self.running:
            found.append("the service does not run")
        directories = self._subscriptions.directories.values()
        waiting = not all(directory.ready for directory in directories)  # consumer and executor have not started
        if database is not None and not waiting:
            found += database.executor.problems()
        if self.consumer is not None and not waiting:
            found += self.consumer.vitals.problems()
        if database is not None and database.relay is not None and self.running:
            found += database.relay.problems()
        if self.running:
            if database is not None:
                found += database.topics.problems()
            for directory in directories:
                found += directory.problems()
            found += self._supervisor.failures
        return found

    # -- start ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all parts. From now on the unexpected end of one cancels the block that `end` ends."""
        name = self._configuration.name
        with self._beginning:
            begun, self._begun = self._begun, True
        if begun:
            raise ConfigurationError(f"the service {name!r} has been started before: make another one")
        try:
            self._check()
            self._subscriptions.close()
            look_up_apart()
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._supervisor)
                try:
                    await self._start_parts(stack)
                except BaseException:
                    self._supervisor.stopping = True
                    raise
                self._stack = stack.pop_all()
        except BaseExceptionGroup as group:
            raise_only(group)
        finally:
            if not self.running:
                self._supervisor.stopping = True  # its executor does not start any more
                await self._take_metrics_back()
        log.info("the service %r runs%s", name, "" if self._subscriptions.declared else _HANDLES_NOTHING)

    async def _take_metrics_back(self) -> None:
        """Also of the parts that the start has not come to: they would stand beside those of the next service of this
        name in the process, under the same labels."""
        if (database := self._parts.database) is not None:
            await database.executor.stop()
            if database.relay is not None:
                await database.relay.stop()
        if self.consumer is not None:
            self.consumer.metrics.close()

    def _check(self) -> None:
        """A service that could do nothing of what it declares must not look as if it were well. Nor may one run where a
        handler's own child process imports the program: that would never get to what it is for."""
        # Python's own check, `multiprocessing.spawn._check_not_importing_main`, looks at this as well (3.11 to 3.14).
        if getattr(current_process(), "_inheriting", False):
            raise ConfigurationError(
                f"the service {self._configuration.name!r} is run by the main module, which a child process of "
                'multiprocessing imports anew: run it below `if __name__ == "__main__":`'
            )
        remedy = "give postgres=... (Service.from_env: SIDINGS_POSTGRES)"
        if self._parts.database is None and len(self._registry):
            names = ", ".join(job_type.name for job_type in self._registry)
            raise ConfigurationError(f"job types are declared ({names}), and there is no Postgres: {remedy}")
        for job_type in self._registry:
            if job_type.schema != self._registry.schema:
                raise ConfigurationError(
                    f"the jobs of {job_type.name!r} would be stored in the schema {job_type.schema!r}, for another "
                    "service of this process has included the registry since: give each a registry of its own"
                )
        self._registry.check_follow_ups()
        if self._parts.database is None and self._parts.messaging is None and not self._subscriptions.topics:
            raise ConfigurationError(
                f"the service {self._configuration.name!r} has neither Postgres nor Kafka, so it could do nothing: "
                f"{remedy}, kafka=... (SIDINGS_KAFKA), or both"
            )

    async def _start_parts(self, stack: AsyncExitStack) -> None:
        """They stop in the reverse order: the consumer takes up nothing more and leaves the group, so that others go
        on with its partitions; beside that, for Kafka may hang, the executor lets its handlers end and gives its
        origins back; the connections are closed."""
        self.consumer = self._parts.make_consumer(self._subscriptions)
        if self.consumer is not None:
            await _refuse_eager_tasks()
        if (spans := tracing()) is not None:
            self._registry.middleware.insert(0, spans)
        configuration = self._configuration
        stack.callback(ProblemMetrics(configuration.name, configuration.prometheus, self.problems).close)
        if self.monitor is not None:
            self.monitor.start()
            stack.callback(self.monitor.stop)
        else:
            warn_of_multiprocess_mode()
        if self._parts.messaging is not None:
            self._parts.messaging.producer.begin()  # also where another event loop sends first
            stack.push_async_callback(self._parts.messaging.producer.stop)
        if self._subscriptions.directories:
            following = [
                (directory, self._supervisor.watch(f"directory {directory.topic!r}", directory.run()))
                for directory in self._subscriptions.directories.values()
            ]
            stack.push_async_callback(_end_directories, following)
        drain_seconds = _DRAIN_SECONDS
        if (database := self._parts.database) is None:
            stack.push_async_callback(self._left)
        else:
            await self._start_database(database, stack)
            drain_seconds = min(drain_seconds, database.executor.settings.shutdown_seconds)
        if self.consumer is not None:
            consuming = self._supervisor.watch("the consumer", self._consume(self.consumer))
            stack.callback(self._leave, self.consumer, consuming)
            stack.push_async_callback(self.consumer.drain, drain_seconds)
        stack.callback(self._giving_up.set)  # the first thing at the end

    async def _start_database(self, database: Database, stack: AsyncExitStack) -> None:
        transactions, topics, executor = database.transactions, database.topics, database.executor
        transactions.topics = len(self._subscriptions.stored)
        kafka = self._configuration.kafka
        transactions.idle_seconds = self._subscriptions.idle_seconds(0.0 if kafka is None else kafka.batch_seconds)
        reached = await _reaches(database.settings, self._configuration.name)  # first: others would only log it
        await transactions.start()
        stack.push_async_callback(transactions.stop)
        stack.push_async_callback(self._left)
        if reached:
            await topics.load()
        stack.push_async_callback(topics.close)
        stack.callback(self._supervisor.watch("the table of topics", topics.run()).cancel)
        database.outbox.loop = asyncio.get_running_loop()
        stack.push_async_callback(database.outbox.close)
        relay = database.relay
        if relay is not None:  # stops after consumer and executor: what they publish at the end still leaves
            stack.push_async_callback(relay.stop)
            await relay.start()
            self._supervisor.watch("the relay", relay.wait())
        stack.push_async_callback(executor.stop)
        if not self._subscriptions.directories:
            await executor.start()
            self._supervisor.watch("the executor", executor.wait())
        else:
            starting = asyncio.Lock()
            self._supervisor.watch("the executor", self._start_late(executor, starting))
            stack.push_async_callback(self._end_late_start, starting)
        stack.callback(executor.rebalance_listener.close)
        if self._configuration.assignment is not None:
            executor.assign(self._configuration.assignment.origins)
        elif self.consumer is None and (homes := [each.name for each in self._registry if each.home is not None]):
            _tell_unassigned(homes)  # there is no Kafka: with it, the consumer would join the homes' topics
        elif self.consumer is None and len(self._registry):
            telling = asyncio.get_running_loop().call_later(_IDLE_SECONDS, _tell_idle, executor, kafka is not None)
            stack.callback(telling.cancel)

    async def _start_late(self, executor: KafkaExecutor, starting: asyncio.Lock) -> None:
        """Run the executor when the directories are ready: its handlers read them."""
        await self._directories_ready()
        async with starting:
            if self._giving_up.is_set():
                return
            await executor.start()
        await executor.wait()

    async def _end_late_start(self, starting: asyncio.Lock) -> None:
        """A start that is under way is not to be stopped half-way; one that has not begun does not begin any more."""
        self._giving_up.set()
        async with starting:
            pass

    def _leave(self, consumer: Consumer, consuming: asyncio.Task[None]) -> None:
        self._leaving = asyncio.create_task(_leave_group(consumer, consuming))

    async def _left(self) -> None:
        if self._leaving is not None:
            await self._leaving

    async def _consume(self, consumer: Consumer) -> None:
        """Consume when the directories are ready. A consumer that was told to stop before ends at once."""
        await self._directories_ready()
        await consumer.run()

    async def _directories_ready(self) -> None:
        """Return when all are, or when the service stops."""
        directories = self._subscriptions.directories.values()
        try:
            await unless_set(self._giving_up, asyncio.gather(*(directory.wait_ready() for directory in directories)))
        except DirectoryNotReady:  # one has ended, which ends the service
            await self._giving_up.wait()

    # -- end --------------------------------------------------------------------------------------------------------

    async def end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop all parts, in order, as ``__aexit__`` does; where it does not run, nothing. Raises what brought the
        service down. `RuntimeError` in one of its own handlers, for which it would wait."""
        if self._stack is None:
            return
        self._refuse_own_handler(asyncio.current_task())
        self._supervisor.stopping = True
        try:
            await self._stack.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            if group.exceptions != (error,):  # else the block's own goes on as it is, also if it is a group
                raise_only(group)
        finally:
            self._stack = None

    def _refuse_own_handler(self, task: "asyncio.Task[Any] | None") -> None:
        database, consumer = self._parts.database, self.consumer
        of_job = database is not None and database.executor.workers.includes(task)
        if of_job or (consumer is not None and consumer.includes(task)):
            raise RuntimeError(
                "a handler cannot end its own service, which waits for it: call service.stop(), where service.run() "
                "runs it, or let the block around the service end, as by an asyncio.Event that it waits for"
            )

    def hurry(self) -> None:
        """Cancel what still runs, again and again, since a cancelled job is taken up anew until the executor stops."""
        if not self.running:
            return
        if self._parts.database is not None:
            self._parts.database.executor.cancel_all()
        if self.consumer is not None:
            self.consumer.cancel()
        asyncio.get_running_loop().call_later(_HURRY_SECONDS, self.hurry)


async def _refuse_eager_tasks() -> None:
    """aiokafka's consumer begins a task before it has made what that uses, and would fail again and again, as if
    Kafka were away. Raises `ConfigurationError`."""

    async def nothing() -> None: ...

    task = asyncio.create_task(nothing())
    eager = task.done()
    await task
    if eager:
        raise ConfigurationError(
            "the event loop begins each task at once (asyncio.eager_task_factory), with which aiokafka's consumer "
            "fails: leave that factory out"
        )


async def _reaches(postgres: PostgresSettings, service: str) -> bool:
    """Whether Postgres answers; executor and relay wait for it, and say so. Raises `SchemaError` where the schema does
    not fit, `ConfigurationError` where the DSN cannot be right."""
    try:
        await check_schema(postgres, service)
    except PostgresUnavailable as error:
        if isinstance(error.__cause__, ValueError):  # asyncpg's, of an option in the DSN
            raise refusal(postgres.dsn, error.__cause__) from None
        return False
    except (ValueError, *REFUSED) as error:
        raise refusal(postgres.dsn, error) from None
    return True


def _tell_unassigned(homes: Sequence[str]) -> None:
    """No refusal: a consumer of the author's own may assign these origins yet, and others may run the jobs."""
    log.warning(
        "there is no kafka= (Service.from_env: SIDINGS_KAFKA), so nothing assigns the origins of the types that have a "
        "home (%s): none of their jobs runs here, and no message leaves the outbox from here; give it, or give "
        "executor.rebalance_listener to a consumer of your own; if others run the jobs and send the messages, this is "
        "as it should be",
        ", ".join(homes),
    )


def _tell_idle(executor: KafkaExecutor, has_kafka: bool) -> None:
    if not executor.held:
        if has_kafka:
            remedy = "consume a topic, name one in topics=,"
        else:
            remedy = (
                "there is no kafka= (Service.from_env: SIDINGS_KAFKA): give it, and consume a topic or name one in "
                "topics=; or give assignment=StaticAssignment([...]),"
            )
        log.warning(
            "job types are declared, and none of their jobs runs here, as nothing assigns an origin: %s or give "
            "executor.rebalance_listener to a consumer of your own; if others run them, this is as it should be",
            remedy,
        )


async def _end_directories(following: Sequence[tuple[Directory[Any], asyncio.Task[None]]]) -> None:
    for directory, _ in following:
        directory.stop()
    try:
        await asyncio.wait([task for _, task in following], timeout=_LEAVE_SECONDS)
    finally:
        for _, task in following:
            task.cancel()


async def _leave_group(consumer: Consumer, consuming: asyncio.Task[None]) -> None:
    consumer.leave()
    try:
        await asyncio.wait([consuming], timeout=_LEAVE_SECONDS)
    finally:
        consuming.cancel()
    _, deaf = await asyncio.wait([consuming], timeout=_END_SECONDS)
    if deaf and (handled := consumer.handled_now()):
        log.error(
            "stopped although handlers of messages take no notice of their cancellation: %s; their process cannot end "
            "before they do: let CancelledError pass",
            ", ".join(handled[:5]),
        )

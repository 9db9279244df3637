"""The service as its author sees it: what is declared, what it offers while it runs, and how it is run."""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry

from ..collector import relax_collector
from ..errors import ConfigurationError
from ..executor import ExecutorSettings, PostgresSettings
from ..jobs import Middleware, Registry, Retry, Transaction
from ..jobs.middleware import check_middleware
from ..kafka import (
    Decoder,
    Dedup,
    Directory,
    KafkaExecutor,
    KafkaSettings,
    KeyOf,
    Outbox,
    OutboxSettings,
    Producer,
    Reset,
    ResetTo,
    Start,
    StatelessSubscription,
    StaticAssignment,
    Storage,
    Subscription,
    TypedSubscription,
    Unknown,
    check_topic,
    reset_offsets,
)
from ..kafka.calling import called_alone
from ..kafka.checks import check_actor
from ..kafka.environment import ARGUMENTS, environment, told_by_variables, warn_of_no_effect
from ..schema import Migration, migrate, valid_schema_name
from ..signals import stop_signals
from ..waiting import done_unless_set
from .configuration import Configuration
from .life import Life
from .parts import Database, Parts
from .subscriptions import Subscriptions

__all__ = ["Service"]

log = logging.getLogger("sidings.service")

M = TypeVar("M", bound=Middleware)
H = TypeVar("H", bound=Callable[..., Awaitable[object]])
T = TypeVar("T")


class Service:
    """A service between Kafka and its own Postgres database::

        service = Service("tracker", postgres="postgresql://localhost/tracker", kafka="localhost:9092")

        @service.consumer("positions")
        async def on_position(message: Message[Position], tx: Transaction) -> None:
            await send_eta.enqueue(tx, SendEta(...))

        asyncio.run(service.run())  # or: async with service: ...

    It starts without Kafka and without Postgres, and waits for them. A wrong schema ends it with a `SchemaError`, at
    once or as soon as the database answers. A part that dies unexpectedly brings the whole service down.

    Args:
        name: The consumer group, the owner of the schema, and a label of every metric.
        postgres: A DSN, or `PostgresSettings`. None: a service of stateless consumers and directories.
        kafka: Bootstrap servers, or `KafkaSettings`. None for a service that brings its own consumer
            (`executor.rebalance_listener`) or has a fixed `assignment`.
        assignment: Origins without Kafka.
        topics: Joined beside those that have a consumer here, for jobs whose origin is one of their partitions. Where
            other instances consume them, these run the jobs.
        schema: Of Sidings' tables. Default: ``sidings``.
        executor: How jobs run.
        outbox: How messages leave.
        http: ``"host:port"``, or a port, for ``/metrics``, ``/health`` and ``/ready``. None: not served.
        prometheus: Where the metrics are registered. None: nowhere; `http` shows them all the same.

    Raises:
        ConfigurationError: An argument is wrong, or some do not go together.
    """

    def __init__(
        self,
        name: str,
        *,
        postgres: str | PostgresSettings | None = None,
        kafka: str | KafkaSettings | None = None,
        assignment: StaticAssignment | None = None,
        topics: Collection[str] = (),
        schema: str | None = None,
        executor: ExecutorSettings | None = None,
        outbox: OutboxSettings | None = None,
        http: str | int | None = None,
        prometheus: CollectorRegistry | None = REGISTRY,
    ) -> None:
        configuration = Configuration(
            name,
            postgres=postgres,
            kafka=kafka,
            assignment=assignment,
            topics=topics,
            schema=schema,
            executor=executor,
            outbox=outbox,
            http=http,
            prometheus=prometheus,
        )
        self.name = name
        self.registry = Registry(schema=None if configuration.postgres is None else configuration.postgres.schema_name)
        self.job = self.registry.job  # declares a job type: @service.job(group="order_id", ...)
        self.periodic = self.registry.periodic  # one with a schedule: @service.periodic("0 6 * * *", ...)
        self._parts = Parts(configuration, self.registry)
        self._subscriptions = Subscriptions(self.registry, has_postgres=configuration.postgres is not None)
        self._life = Life(configuration, self.registry, self._parts, self._subscriptions)
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # that `run` runs in
        self._prometheus = configuration.prometheus

    @classmethod
    def from_env(cls, name: str, **overrides: Any) -> "Service":
        """A service whose settings come from environment variables.

        These are ``SIDINGS_POSTGRES``, ``SIDINGS_KAFKA``, ``SIDINGS_SCHEMA``, ``SIDINGS_HTTP``, ``SIDINGS_TOPICS``
        (comma-separated), and one for each field of `KafkaSettings`, `PostgresSettings` and `ExecutorSettings` that a
        text can say, e.g. ``SIDINGS_KAFKA_SASL_USERNAME``, ``SIDINGS_POSTGRES_POOL_SIZE``,
        ``SIDINGS_EXECUTOR_CONCURRENCY``. Those of ``postgres=``, ``kafka=`` or ``executor=`` are not read where it is
        given here, but for the schema; a warning in the log names them. See docs/configuration.md.

        Args:
            overrides: Arguments of `Service`, which win over the environment.

        Raises:
            ConfigurationError: A variable or an argument is wrong; the message names it.
        """
        given = environment(without=overrides)
        warn_of_no_effect(overrides)
        schema, postgres = overrides.get("schema"), overrides.get("postgres")
        if schema is not None and "postgres" in given:
            given["postgres"] = given["postgres"].model_copy(update={"schema_name": valid_schema_name(schema)})
        if isinstance(postgres, PostgresSettings) and "schema_name" in postgres.model_fields_set:
            given.pop("schema", None)
        used = given.keys() - overrides.keys()
        with told_by_variables({argument: variable for argument, variable in ARGUMENTS.items() if argument in used}):
            return cls(name, **(given | overrides))

    # -- what its author declares -----------------------------------------------------------------------------------

    def include(self, registry: Registry) -> None:
        """Take over the job types of a `Registry` of another module; see `Registry.include`.

        Raises:
            ConfigurationError: Two job types have one name, or the registry was given another schema than the service.
        """
        self.registry.include(registry)

    def middleware(self, around: M) -> M:
        """Wrap every handler of the service, of jobs and of consumers; the first one declared is the outermost::

            @service.middleware
            async def tenant(call: Call, call_next: Next) -> None:
                with use_tenant(call.origin.partition("-")[0]):
                    await call_next()

        It runs for each call of a handler: also for plain functions (outside of their thread), for lists (once), and
        for transactional ones (inside of the transaction). It has to call the next one exactly once, and can change how
        the call ends only by raising. Declare it before the service starts. See docs/middleware.md.

        Returns:
            The function, unchanged.

        Raises:
            ConfigurationError: It is no ``async def`` of two arguments, or the service has started.
        """
        check_middleware(around)
        self._subscriptions.must_be_open("a middleware")
        self.registry.middleware.append(around)
        return around

    def consumer(
        self,
        topic: str,
        *,
        model: Any = None,
        batch: int | None = None,
        decoder: Decoder | None = None,
        retry: Retry | None = None,
        isolate: bool = False,
        start: Start = "earliest",
        timeout: float | None = 30.0,
        dedup: Dedup = False,
        max_waiting: int | None = None,
        stateless: bool = False,
        concurrency: int = 1,
        dead_letter: str | None = None,
    ) -> Callable[[H], H]:
        """Handle the messages of `topic`, with effects exactly once::

            @service.consumer("positions")
            async def on_position(message: Message[Position], tx: Transaction) -> None: ...

        What the handler writes through `tx` commits together with the message's offset, so a message that is delivered
        again changes nothing. Effects elsewhere (HTTP calls) may happen again: make them jobs. Many messages share one
        transaction.

        A failing message is tried again alone, with `retry`, while only its partition waits. Then it is parked as a job
        of its key's group, and while it waits there, later messages of the key are parked behind it. A parked or
        isolated message is a transactional job: its effects too happen exactly once. A message that cannot be decoded
        is kept as a held job with its bytes and its error, and delays no others, not even those of its key.

        Args:
            model: Of the JSON value. Default: X of the handler's ``Message[X]``. `bytes` leaves the value as it is.
            batch: The handler gets lists of up to so many messages, each list of one partition.
            decoder: A function that makes the value from the raw message, instead of JSON. The value of a raw message
                is None for a tombstone. What it raises is final, but for `Snooze`: then the message is decoded again
                later, and nothing of its partition passes it.
            retry: For a failing message before it is parked. Default: 5 attempts, 0.2 s to 1.8 s apart. With `isolate`,
                for its job; default: for ever. A parked message is tried for ever, as jobs are by default. Nothing
                judges what the handler returns: a `retry_if_result` is refused. So are a job type and ``"block"`` in
                ``on_exhausted=``, and without `isolate` ``"hold"``.
            isolate: Store each message as a job of its key's group, and run the handler from there.
            start: Where to begin when no offset is stored: ``"earliest"``, ``"latest"``, ``"committed"`` (the group's
                offset in Kafka, else earliest, with a warning in the log), or ``"fail"``, which ends the service with
                `OffsetUnknown`.
            timeout: Seconds that one call of the handler may take; then it has failed. None: any time.
            dedup: Handle only the first of several messages with one id: True for the id that an outbox of Sidings
                sends, the name of another header, or a function of the message. Ids are kept for
                `KafkaSettings.dedup_days`.
            max_waiting: While more jobs than that wait in the partition's origin, no more of it is read, until half of
                them are gone; looked at every second. None: no limit.
            stateless: Needs no Postgres. The handler takes the message alone, ``async def on_x(message: Message[X])``.
                The offset is committed to Kafka when it has returned, so it runs at least once per message.
            concurrency: Of a stateless consumer: messages of each partition at once. Those of one key run in order,
                those without a key in any order.
            dead_letter: Of a stateless consumer, and needed there: the topic for messages that cannot be decoded, or
                that fail until `retry` gives up.

        Returns:
            A decorator, which gives the handler back. What that enqueues where a test calls it belongs to its message's
            origin.

        Raises:
            ConfigurationError: The declaration cannot work. The decorator raises it too.
        """

        check_topic(topic, "consumer", leased=self._subscriptions.has_postgres)
        if not isinstance(stateless, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"{topic}: stateless={stateless!r}: give True or False")

        def declare(handler: H) -> H:
            if stateless:
                if batch is not None or isolate or dedup or max_waiting is not None:
                    raise ConfigurationError(
                        f"{topic}: stateless=True excludes batch=, isolate=, dedup= and max_waiting="
                    )
                self._subscriptions.add_stateless(
                    StatelessSubscription(
                        topic,
                        handler,
                        concurrency=concurrency,
                        dead_letter=dead_letter,
                        model=model,
                        decoder=decoder,
                        retry=retry,
                        start=start,
                        timeout=timeout,
                    )
                )
                return called_alone(handler)
            if concurrency != 1 or dead_letter is not None:
                raise ConfigurationError(f"{topic}: concurrency= and dead_letter= need stateless=True")
            self._subscriptions.add(
                Subscription(
                    topic,
                    handler,
                    model=model,
                    batch=batch,
                    decoder=decoder,
                    retry=retry,
                    isolate=isolate,
                    start=start,
                    timeout=timeout,
                    dedup=dedup,
                    max_waiting=max_waiting,
                )
            )
            return called_alone(handler)

        return declare

    def topic(
        self,
        topic: str,
        *,
        type_header: str | None = None,
        type_field: str | None = None,
        unknown: Unknown = "park",
        retry: Retry | None = None,
        isolate: bool = False,
        start: Start = "earliest",
        timeout: float | None = 30.0,
        dedup: Dedup = False,
        max_waiting: int | None = None,
    ) -> TypedSubscription:
        """Handle the messages of `topic` by their type, each with a model and a handler of its own::

            transports = service.topic("transports", type_header="ce_type")

            @transports.on("TransportPlanned")
            async def on_planned(message: Message[TransportPlanned], tx: Transaction) -> None: ...

        What holds for `consumer` holds here: effects exactly once, order, retries, parking. Give one of `type_header`
        and `type_field`.

        Args:
            type_header: The type stands in the header of that name, e.g. ``"ce_type"`` (CloudEvents).
            type_field: The type stands in that field of the JSON value; ``"meta.type"`` for one inside of another.
            unknown: What becomes of a message whose type has no handler. ``"park"``: it is kept as a held job, like one
                that cannot be decoded. ``"skip"``: it is passed over, and counted. ``"fail"``: it fails with
                `UnknownMessageType`, is tried again and then parked in its key's group, so that later messages of its
                key wait, in order, for a release of yours that knows the type. So does, with ``"skip"`` and ``"fail"``,
                each message that is stored already.
            retry: As in `consumer`, for all types; so are `isolate`, `start`, `timeout`, `dedup` and `max_waiting`.

        Returns:
            An object whose `on` declares the handlers.

        Raises:
            ConfigurationError: The declaration cannot work.
        """
        check_topic(topic, "topic", leased=self._subscriptions.has_postgres)
        subscription = TypedSubscription(
            topic,
            type_header=type_header,
            type_field=type_field,
            unknown=unknown,
            retry=retry,
            isolate=isolate,
            start=start,
            timeout=timeout,
            dedup=dedup,
            max_waiting=max_waiting,
        )
        self._subscriptions.add(subscription)
        return subscription

    def directory(
        self,
        topic: str,
        *,
        model: type[T] | None = None,
        decoder: Decoder | None = None,
        key: KeyOf[T] | None = None,
        active: str | None = "is_active",
        storage: Storage[T] | None = None,
        load_seconds: float | None = 300.0,
    ) -> Directory[T]:
        """An in-process, always current replica of a compacted topic, which works while Postgres is down::

            terminals = service.directory("terminal-acquirer", model=TerminalAcquirer)

            acquirer = terminals["T-1"].acquirer_id  # also: get, in, len, keys, values, items

        Consumers and executor start, and ``/ready`` turns 200, when all is applied that was in the topics of all
        directories at the start; then they are followed. Rows as an outbox or a service writes them, those of Kafka
        Connect's JDBC source and Debezium's envelopes are all read. A record that cannot be applied is counted and
        stands in ``terminals.errors()``; the former value of its row stays. See docs/directories.md.

        Args:
            model: Of a row; what pydantic can validate. Aliases say whether JSON is in camelCase.
            decoder: Makes the value from the raw message, instead of JSON. None from it deletes the row. What it raises
                makes a bad record, but for `Snooze`: then the record is read again later, and nothing before that.
            key: Of the directory: a field of the model, or a function of the value. None: the message key as text.
            active: The field whose ``false`` deletes a row, in snake_case or camelCase. None: only tombstones delete.
            storage: ``SQLite(path)``: in a file, so that a restart reads only what is new. None: in memory, read again
                at each start.
            load_seconds: How long the load may take from Kafka's first answer on; then the service ends with
                `DirectoryNotReady`, which says how far it is. None: any time.

        Raises:
            ConfigurationError: The declaration cannot work, or the service has no Kafka.
        """
        if self._parts.messaging is None:
            raise ConfigurationError(
                f"directory({topic!r}) needs Kafka: give kafka=... (Service.from_env: SIDINGS_KAFKA)"
            )
        directory = Directory(
            topic,
            kafka=self._parts.messaging.settings,
            model=model,
            decoder=decoder,
            key=key,
            active=active,
            storage=storage,
            load_seconds=load_seconds,
            service=self.name,
            prometheus=self._prometheus,
        )
        self._subscriptions.add_directory(directory)
        return directory

    # -- what it offers at run time ---------------------------------------------------------------------------------

    @property
    def executor(self) -> KafkaExecutor:
        """Runs the jobs: `held` origins, `wake`, `rebalance_listener`.

        Raises:
            ConfigurationError: The service has no Postgres.
        """
        return self._database("executor").executor

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Transaction]:
        """A transaction that commits at the end of the block. Jobs that were stored in it start at once, where this
        instance runs their origin (docs/enqueueing.md)::

            async with service.transaction() as tx:
                await send_eta.enqueue(tx, SendEta(...), origin=service.origin_for(transport_id, "positions"))

        Raises:
            PostgresUnavailable: There was no connection, or none free in time (`PostgresSettings.pool_size`); or the
                service does not run. If it comes from the end of the block, the transaction may have committed. A
                handler that raises it has not failed, and runs again; but from the third time on where it is not
                `blameless` (docs/policies.md).
            RuntimeError: A call on the transaction was not awaited, or the block has committed or rolled back by
                itself.
            asyncpg.InFailedSQLTransactionError: A statement had failed, or was given up as by a timeout, and the block
                has caught that without a savepoint around it. Nothing has committed.
            ConfigurationError: The service has no Postgres, or this is another event loop than the service's.
        """
        async with self._database().transactions.shared() as tx:
            yield tx

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[None]:
        """Within this block `transaction` and `origin_for` work although the service does not run::

            async with service.connected():
                await send_eta(Job.fake(SendEta(...)))

        It is for handlers that a test calls, and for a process that only enqueues. Open one block around all that the
        test, or the process, does. `sidings.testing.drain` opens its own. The connections of `producer`, which direct
        topics use as well, are open until its `stop()`.

        Raises:
            ConfigurationError: The service has no Postgres.
        """
        database = self._database()
        if database.transactions.started:
            yield
            return
        async with AsyncExitStack() as stack:
            stack.push_async_callback(database.topics.close)
            await database.topics.load()
            refreshing = asyncio.create_task(database.topics.run(), name="sidings: the table of topics")
            refreshing.add_done_callback(_tell_end)
            stack.push_async_callback(asyncio.wait, [refreshing])
            stack.callback(refreshing.cancel)
            stack.push_async_callback(database.transactions.stop)
            await database.transactions.start()
            yield

    @property
    def outbox(self) -> Outbox:
        """Messages that leave when a transaction has committed.

        Raises:
            ConfigurationError: The service has no Postgres.
        """
        return self._database("outbox").outbox

    @property
    def producer(self) -> Producer:
        """Messages that go to Kafka at once: `send`.

        Raises:
            ConfigurationError: The service has no Kafka.
        """
        if self._parts.messaging is None:
            raise ConfigurationError(
                f"the service {self.name!r} has no producer: give kafka=... (Service.from_env: SIDINGS_KAFKA)"
            )
        return self._parts.messaging.producer

    def origin_for(self, key: str | bytes, topic: str) -> str:
        """The origin of a key among the partitions of `topic`, for jobs that are enqueued outside a consumer::

            await send_eta.enqueue(tx, SendEta(...), origin=service.origin_for(transport_id, "positions"))

        It hashes as the topic's producers do (`KafkaSettings.partitioners`), over the partition count that Postgres
        remembers, a few seconds old at most; also while Kafka is down.

        Returns:
            ``topic/partition``.

        Raises:
            MissingOrigin: The partition count is not known: the service does not run, or nobody has consumed the topic,
                or named it in ``topics=``, while Kafka was up.
            EnqueueError: The key is neither text nor bytes, but a number, say.
            ConfigurationError: The service has no Postgres.
        """
        return self._database().topics.origin_for(key, topic)

    async def reset_offsets(
        self,
        topic: str,
        to: ResetTo,
        *,
        partitions: Collection[int] | None = None,
        actor: str,
        reason: str | None = None,
    ) -> list[Reset]:
        """Let the consumer of `topic` go on from another place, whether instances run or not::

            await service.reset_offsets("positions", datetime(2026, 5, 1, tzinfo=UTC), actor="alice", reason="...")

        From its return on, effects happen exactly once per message from the new offset on: a transaction that was under
        way can no longer commit. Running instances notice within about a second. Messages from there on that had left
        the main line are delivered again, so their jobs are cancelled; parked messages before it stay. Jobs that
        handlers have enqueued stay as well, and are enqueued again by messages handled again.

        Args:
            to: ``"earliest"``, ``"latest"``, an aware datetime (the first message that is not older), or an offset, for
                one partition.
            partitions: Default: all.
            actor: Who does it, for the audit.
            reason: Why, for the audit.

        Returns:
            For each partition, in order, where it was, where it goes on, and how many jobs were cancelled.

        Raises:
            ConfigurationError: The arguments are wrong; the service lacks Postgres or Kafka; or the consumer is
                stateless: reset its group in Kafka.
            OffsetOutOfRange: There is no such offset, or its record cannot be read; then the message names the next
                that can.
            KafkaUnavailable: Kafka does not answer.
            PostgresUnavailable: Postgres does not answer. It may have happened.
        """
        messaging, database = self._parts.messaging, self._parts.database
        if database is None or messaging is None:
            raise ConfigurationError(
                f"reset_offsets({topic!r}) needs postgres=..., where offsets are stored, and kafka=..."
            )
        if topic in self._subscriptions.stateless:
            raise ConfigurationError(
                f"the offsets of {topic!r}, a stateless consumer, are in Kafka: reset the group there"
            )
        check_actor(actor, "reset_offsets")
        return await reset_offsets(
            messaging.settings,
            database.settings,
            messaging.group,
            topic,
            to,
            partitions=partitions,
            actor=actor,
            reason=reason,
        )

    async def migrate(self) -> list[Migration]:
        """Bring the schema up to this release; safe when many processes do it at once.

        Returns:
            The migrations that were applied; none where nothing was missing.

        Raises:
            SchemaError: It could not be done; the message says what to do. See `sidings.migrate`.
            PostgresUnavailable: Postgres does not answer, or may only be read.
            ConfigurationError: The service has no Postgres, or the role lacks a right.
        """
        postgres = self._database().settings
        return await migrate(postgres.dsn, service=self.name, schema=postgres.schema_name, password=postgres.secret())

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the metrics and health pages while the service runs; None where it serves none."""
        return None if self._life.monitor is None else self._life.monitor.address

    def problems(self) -> list[str]:
        """What ``/health`` complains about; empty when all is well. Any thread may call it."""
        return self._life.problems()

    def _database(self, what: str = "database") -> Database:
        if self._parts.database is None:
            raise ConfigurationError(
                f"the service {self.name!r} has no {what}: give postgres=... (Service.from_env: SIDINGS_POSTGRES)"
            )
        return self._parts.database

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until SIGTERM, SIGINT or `stop`; then let handlers end.

        Those of messages have 5 s at most, then those of jobs `ExecutorSettings.shutdown_seconds`. A second signal
        cancels the handlers. A start that is under way is undone at once, whatever it waits for. Whoever had SIGTERM
        before, as a web server has, gets the signal when the service has ended. The process is the service's: Python's
        cyclic collector is made to run more rarely, unless its thresholds have been set.

        Raises:
            Exception: What brought the service down, e.g. `SchemaError`.
        """
        relax_collector()
        before, self._loop = self._loop, asyncio.get_running_loop()  # of a `run` beside which this one is refused
        try:
            with stop_signals(self.stop, self._life.hurry):
                async with AsyncExitStack() as stack:
                    if await done_unless_set(self._stop, stack.enter_async_context(self)):
                        await self._stop.wait()
        finally:
            self._loop = before

    def stop(self) -> None:
        """Ask `run` to stop gracefully. Any thread may call it."""
        loop = self._loop
        if loop is None:
            self._stop.set()
        else:
            loop.call_soon_threadsafe(self._stop.set)

    async def __aenter__(self) -> Self:
        self._refuse_copy()
        await self._life.start()
        return self

    def _refuse_copy(self) -> None:
        """Where its own modules import the program, Python runs that once more, under its name, and they declare their
        handlers on the service of this copy, which nobody starts. Raises `ConfigurationError`."""
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        variable = next((name for name, value in vars(main).items() if value is self), None)
        if file is None or variable is None:
            return
        for name, module in list(sys.modules.items()):
            if module is main or name.rpartition(".")[2] != Path(file).stem or getattr(module, "__file__", "") != file:
                continue
            if not isinstance(copy := getattr(module, variable, None), Service):
                continue
            mine = self._subscriptions.declared
            if lost := [each for each in copy._subscriptions.declared if each not in mine]:
                raise ConfigurationError(
                    f"the handlers of {', '.join(lost)} are on a copy of the service {self.name!r}, as its module was "
                    f"imported twice, as __main__ and as {name}: make the service in a module of its own, from which "
                    "the program and its handlers import it"
                )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._life.end(kind, error, traceback)


def _tell_end(refreshing: asyncio.Task[None]) -> None:
    """Where no service runs, nobody else does."""
    if not refreshing.cancelled():
        log.critical(
            "the partition counts are not read any more, and those of now count until this process is restarted: %r",
            refreshing.exception(),
        )

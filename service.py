"""The service: what its author declares, and how the parts start, stop and fail together."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry

from .environment import environment
from .errors import ConfigurationError
from .executor import ExecutorSettings, PostgresSettings
from .jobs import Middleware, Registry, Retry, Transaction
from .jobs.middleware import check_middleware
from .jobs.tracing import tracing
from .kafka import (
    Consumer,
    DeadLetters,
    Decoder,
    Dedup,
    KafkaExecutor,
    KafkaSettings,
    Outbox,
    OutboxSettings,
    Producer,
    Relay,
    Reset,
    ResetTo,
    Start,
    StatelessSubscription,
    StaticAssignment,
    Subscription,
    Topics,
    Transactions,
    TypedSubscription,
    Unknown,
    reset_offsets,
)
from .monitor import Monitor
from .schema import Migration, migrate
from .supervision import Supervisor, only_error, relax_collector, stop_signals

__all__ = ["Service"]

log = logging.getLogger("sidings.service")

M = TypeVar("M", bound=Middleware)
H = TypeVar("H", bound=Callable[..., Awaitable[object]])

_DRAIN_SECONDS = 5.0  # for the batch at work; a longer one is rolled back, which costs nothing but its repetition
_LEAVE_SECONDS = 10.0
_IDLE_SECONDS = 30.0
_HURRY_SECONDS = 0.1


class Service:
    """A service between Kafka and its own Postgres database::

        service = Service("tracker", postgres="postgresql://localhost/tracker", kafka="localhost:9092")

        @service.consumer("positions", model=Position)
        async def on_position(message: Message[Position], tx: Transaction) -> None:
            await send_eta.enqueue(tx, SendEta(...))

        asyncio.run(service.run())  # or: async with service: ...

    name: of the service. It is the consumer group, the owner of the schema, and a label of every metric.
    postgres: a DSN, or `PostgresSettings`. kafka: bootstrap servers, or `KafkaSettings`; None for a service that brings
    its own consumer (`executor.rebalance_listener`) or has a fixed `assignment`.
    topics: joined beside those that have a consumer here, for jobs whose origin is one of their partitions.
    schema: of Sidings' tables. executor: how jobs run. outbox: how messages leave.
    http: ``"host:port"`` or a port for ``/metrics``, ``/health`` and ``/ready``; None: not served.
    prometheus: where the metrics are registered.

    It starts without Kafka and without Postgres, and waits for them. A wrong schema ends it with a `SchemaError`, at
    once or as soon as the database answers; a part that dies unexpectedly brings the whole service down.

    Raises `ConfigurationError`.
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
        prometheus: CollectorRegistry = REGISTRY,
    ) -> None:
        if not name:
            raise ConfigurationError("Service(name): give a name; it owns the schema and names the consumer group")
        if kafka is not None and assignment is not None:
            raise ConfigurationError("kafka= and assignment= exclude each other: either Kafka assigns, or you do")
        if isinstance(topics, str):
            raise ConfigurationError(f"topics={topics!r}: give a list of topics")
        if topics and kafka is None:
            raise ConfigurationError("topics= needs kafka=: it is Kafka that assigns their partitions")
        self.name = name
        self._supervisor = Supervisor()
        self.registry = Registry()
        self.job = self.registry.job  # declares a job type: @service.job(group="order_id", ...)
        self.periodic = self.registry.periodic  # one with a schedule: @service.periodic("0 6 * * *", ...)
        self._kafka = KafkaSettings(bootstrap=kafka) if isinstance(kafka, str) else kafka
        self._assignment = assignment
        self._topics = tuple(topics)
        self._prometheus = prometheus
        self._subscriptions: dict[str, Subscription[Any]] = {}
        self._stateless: dict[str, StatelessSubscription[Any]] = {}
        self._postgres = _postgres(postgres, schema)
        self._executor: KafkaExecutor | None = None
        self._transactions: Transactions | None = None
        self._topic_table: Topics | None = None
        if self._postgres is not None:
            self.registry.schema = self._postgres.schema_name
            self._executor = KafkaExecutor(name, self.registry, self._postgres, executor, prometheus=prometheus)
            self._executor.rebalance_listener.on_refused = self._supervisor.fail
            self._transactions = Transactions(self._postgres, self._executor.committed)
            self._topic_table = Topics(self._postgres, {} if self._kafka is None else self._kafka.partitioners)
            self.registry.has_grown = self._topic_table.has_grown
        self._producer = None if self._kafka is None else Producer(self._kafka, outbox)
        self._dead_letters = (
            None if self._kafka is None else DeadLetters(self._kafka.group or name, Producer(self._kafka, outbox))
        )
        self._relay: Relay | None = None
        self._outbox: Outbox | None = None
        if self._postgres is not None and self._transactions is not None:
            self._outbox = Outbox(self._postgres, outbox, direct=self._producer, wake=self._wake_relay)
            self._transactions.on_published = self._wake_relay
            if self._kafka is not None and self._outbox.settings.relay:
                self._relay = Relay(name, self._postgres, self._kafka, outbox, prometheus=prometheus)
        self._monitor = (
            None if http is None else Monitor(http, prometheus, problems=self.problems, not_ready=self._not_ready)
        )
        self._consumer: Consumer | None = None
        self._stack: AsyncExitStack | None = None
        self._stop = asyncio.Event()

    @classmethod
    def from_env(cls, name: str, **overrides: Any) -> "Service":
        """A service whose settings come from environment variables: ``SIDINGS_POSTGRES``, ``SIDINGS_KAFKA``,
        ``SIDINGS_SCHEMA``, ``SIDINGS_HTTP``, ``SIDINGS_TOPICS`` (comma-separated), and one for each field of
        `KafkaSettings`, `PostgresSettings` and `ExecutorSettings`, e.g. ``SIDINGS_KAFKA_SASL_USERNAME``,
        ``SIDINGS_POSTGRES_POOL_SIZE``, ``SIDINGS_EXECUTOR_CONCURRENCY``.

        overrides: arguments of `Service`, which win over the environment. Raises `ConfigurationError`.
        """
        return cls(name, **(environment() | overrides))

    # -- what its author declares -----------------------------------------------------------------------------------

    def include(self, registry: Registry) -> None:
        """Take over the job types of a `Registry` of another module. Raises `ConfigurationError` for a name twice."""
        self.registry.include(registry)

    def middleware(self, around: M) -> M:
        """Wrap every handler of the service, of jobs and of consumers; the first one declared is the outermost::

            @service.middleware
            async def tenant(call: Call, call_next: Next) -> None:
                with use_tenant(call.jobs[0].headers["tenant"]):
                    await call_next()

        It runs for each call of a handler: also for plain functions (outside of their thread), for lists (once), and
        for transactional ones (inside of the transaction). It has to call the next one exactly once, and can change how
        the call ends only by raising. See docs/middleware.md.

        Declare it before the service starts. Raises `ConfigurationError`.
        """
        check_middleware(around)
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
        """Handle the messages of `topic`, effects exactly once::

            @service.consumer("positions", model=Position)
            async def on_position(message: Message[Position], tx: Transaction) -> None: ...

        What the handler writes through `tx` commits together with the message's offset; a message that is delivered
        again changes nothing. Effects elsewhere (HTTP calls) may happen again: make them jobs. Many messages share one
        transaction. A failing one is tried again alone, with `retry`, while only its partition waits; then it is
        parked as a job of its key's group, and while it waits there, later messages of the key are parked behind it.

        model: of the JSON value; default: X of the handler's ``Message[X]``; `bytes` leaves the value as it is.
        batch: the handler gets lists of up to so many messages, each list of one partition.
        decoder: makes the value from the raw message, instead of JSON. A message that cannot be decoded is kept as a
            held job with its bytes and its error, and does not delay the others, not even those of its key.
        retry: for a failing message before it is parked; default: 5 attempts, 0.2 s to 10 s apart. With `isolate`, for
            its job; default: for ever. A parked message is tried for ever, as jobs are by default.
        isolate: store each message as a job of its key's group, and run the handler from there.
        start: where to begin when no offset is stored: ``"earliest"``, ``"latest"``, ``"committed"`` (the group's
            offset in Kafka, else earliest), or ``"fail"``, which ends the service with `OffsetUnknown`.
        timeout: seconds that one call of the handler may take, then it has failed; None: any.
        dedup: handle only the first of several messages with one id: True for the id that an outbox of Sidings sends,
            the name of another header, or a function of the message. Ids are kept for `KafkaSettings.dedup_days`.
        max_waiting: while more jobs than that wait in the partition's origin, no more of it is read, until half of
            them are gone; looked at every second. None: no limit.
        stateless: needs no Postgres. The handler takes the message alone, ``async def on_x(message: Message[X])``; the
            offset is committed to Kafka when it has returned, so it runs at least once per message.
        concurrency: of a stateless consumer: messages of each partition at once. Those of one key run in order, those
            without a key in any order.
        dead_letter: of a stateless consumer, and needed there: the topic for messages that cannot be decoded, or that
            fail until `retry` gives up.

        A parked or isolated message is a transactional job: its effects too happen exactly once. Returns the handler
        unchanged. Raises `ConfigurationError`.
        """

        def declare(handler: H) -> H:
            if topic in self._subscriptions or topic in self._stateless:
                raise ConfigurationError(f"two consumers are declared for the topic {topic!r}")
            if stateless:
                if batch is not None or isolate or dedup or max_waiting is not None:
                    raise ConfigurationError(
                        f"{topic}: stateless=True excludes batch=, isolate=, dedup= and max_waiting="
                    )
                self._stateless[topic] = StatelessSubscription(
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
                self._stateless[topic].middleware = self.registry.middleware
                return handler
            if concurrency != 1 or dead_letter is not None:
                raise ConfigurationError(f"{topic}: concurrency= and dead_letter= need stateless=True")
            self._subscribe(
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
            return handler

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

        What holds for `consumer` holds here: effects exactly once, order, retries, parking.

        type_header: where a message's type stands: the header of that name, e.g. ``"ce_type"`` (CloudEvents).
        type_field: or in the JSON value: the field of that name; ``"meta.type"`` for one inside of another.
        unknown: what becomes of a message whose type has no handler. ``"park"``: it is kept as a held job, like one
            that cannot be decoded. ``"skip"``: it is passed over, and counted. ``"fail"``: it fails with
            `UnknownMessageType`, is tried again and then parked in its key's group, so that later messages of its key
            wait, in order, for a release of yours that knows the type.
        retry, isolate, start, timeout, dedup, max_waiting: as of `consumer`, for all types.

        Returns an object whose `on` declares the handlers. Raises `ConfigurationError`.
        """
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
        self._subscribe(subscription)
        return subscription

    def _subscribe(self, subscription: Subscription[Any]) -> None:
        topic = subscription.topic
        if topic in self._subscriptions or topic in self._stateless:
            raise ConfigurationError(f"two consumers are declared for the topic {topic!r}")
        if self._transactions is None:
            raise ConfigurationError(
                f"the consumer of {topic!r} stores its offsets in Postgres: give postgres=..., or use a consumer with "
                "stateless=True"
            )
        subscription.register(self.registry)
        self._subscriptions[topic] = subscription

    # -- what it offers at run time ---------------------------------------------------------------------------------

    @property
    def executor(self) -> KafkaExecutor:
        """Runs the jobs: `held` origins, `wake`, `rebalance_listener`. Raises `ConfigurationError` without Postgres."""
        if self._executor is None:
            raise ConfigurationError(f"the service {self.name!r} has no executor: give postgres=...")
        return self._executor

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Transaction]:
        """A transaction that commits at the end of the block; jobs that were stored in it start at once::

            async with service.transaction() as tx:
                await send_eta.enqueue(tx, SendEta(...), origin="positions/3")

        Raises `PostgresUnavailable`; if that comes from the end of the block, it may have committed.
        """
        if self._transactions is None:
            raise ConfigurationError(f"the service {self.name!r} has no database: give postgres=...")
        async with self._transactions.open() as tx:
            yield tx

    @property
    def outbox(self) -> Outbox:
        """Messages that leave when a transaction has committed. Raises `ConfigurationError` without Postgres."""
        if self._outbox is None:
            raise ConfigurationError(f"the service {self.name!r} has no outbox: give postgres=...")
        return self._outbox

    @property
    def producer(self) -> Producer:
        """Messages that go to Kafka at once: `send`. Raises `ConfigurationError` without Kafka."""
        if self._producer is None:
            raise ConfigurationError(f"the service {self.name!r} has no producer: give kafka=...")
        return self._producer

    def _wake_relay(self) -> None:
        if self._relay is not None:
            self._relay.wake()

    def origin_for(self, key: str | bytes, topic: str) -> str:
        """The origin of a key among the partitions of `topic`, for jobs that are enqueued outside a consumer::

            await send_eta.enqueue(tx, SendEta(...), origin=service.origin_for(transport_id, "positions"))

        It hashes as the topic's producers do (`KafkaSettings.partitioners`), over the partition count that Postgres
        remembers, a few seconds old at most; also while Kafka is down. Raises `MissingOrigin` while that is unknown.
        """
        if self._topic_table is None:
            raise ConfigurationError(f"the service {self.name!r} has no database: give postgres=...")
        return self._topic_table.origin_for(key, topic)

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

        to: ``"earliest"``, ``"latest"``, an aware datetime (the first message that is not older), or an offset, for
        one partition. partitions: default: all. actor, reason: who does it, and why, for the audit.

        From its return on, effects happen exactly once per message from the new offset on: a transaction that was under
        way can no longer commit. Running instances notice within about a second. Messages from there on that had left
        the main line are delivered again, so their jobs are cancelled (`Reset.cancelled`); parked messages before it
        stay. Jobs that handlers have enqueued stay as well, and are enqueued again by messages handled again.

        Raises `ConfigurationError`, `OffsetOutOfRange`, `KafkaUnavailable`, and `PostgresUnavailable`, after which it
        may have happened.
        """
        if self._postgres is None or self._kafka is None:
            raise ConfigurationError(
                f"reset_offsets({topic!r}) needs postgres=..., where offsets are stored, and kafka=..."
            )
        if topic in self._stateless:
            raise ConfigurationError(
                f"the offsets of {topic!r}, a stateless consumer, are in Kafka: reset the group there"
            )
        if not actor:
            raise ConfigurationError("reset_offsets(actor=''): name the person or program that does it, for the audit")
        return await reset_offsets(
            self._kafka,
            self._postgres,
            self._kafka.group or self.name,
            topic,
            to,
            partitions=partitions,
            actor=actor,
            reason=reason,
        )

    async def migrate(self) -> list[Migration]:
        """Bring the schema up to this release; safe when many processes do it at once. Raises `SchemaError`."""
        if self._postgres is None:
            raise ConfigurationError(f"the service {self.name!r} has no database: give postgres=...")
        return await migrate(self._postgres.dsn, service=self.name, schema=self._postgres.schema_name)

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the metrics and health pages while the service runs."""
        return None if self._monitor is None else self._monitor.address

    def problems(self) -> list[str]:
        """What ``/health`` complains about; empty when all is well. Any thread may call it."""
        found: list[str] = []
        if self._stack is None:
            found.append("the service does not run")
        if self._executor is not None:
            found += self._executor.problems()
        if self._consumer is not None:
            found += self._consumer.vitals.problems()
        if self._relay is not None and self._stack is not None:
            found += self._relay.problems()
        return found

    def _not_ready(self) -> list[str]:
        found = self.problems()
        if self._consumer is not None and not self._consumer.joined:
            found.append("the consumer has no assignment yet")
        if self._supervisor.stopping:
            found.append("the service is stopping")
        return found

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT, or `stop`; then let handlers end, for `ExecutorSettings.shutdown_seconds` at
        most. A second signal cancels them. The process is the service's: Python's cyclic collector is made to run more
        rarely, unless its thresholds have been set.

        Raises what brought the service down, e.g. `SchemaError`.
        """
        relax_collector()
        with stop_signals(self.stop, self._hurry):
            async with self:
                await self._stop.wait()

    def stop(self) -> None:
        """Ask `run` to stop gracefully."""
        self._stop.set()

    async def __aenter__(self) -> Self:
        if self._stack is not None or self._supervisor.stopping:
            raise ConfigurationError(f"the service {self.name!r} has been started before: make another one")
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._supervisor)
                try:
                    await self._start(stack)
                except BaseException:
                    self._supervisor.stopping = True
                    raise
                self._stack = stack.pop_all()
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        log.info("the service %r runs", self.name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._stack is not None
        self._supervisor.stopping = True
        try:
            await self._stack.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        finally:
            self._stack = None

    async def _start(self, stack: AsyncExitStack) -> None:
        """Start the parts. They stop in the reverse order: the consumer takes up nothing more and leaves the group,
        so that others go on with its partitions; the executor lets its handlers end and gives its origins back; the
        connections are closed."""
        self._consumer = self._make_consumer()
        if (spans := tracing()) is not None:
            self.registry.middleware.insert(0, spans)
        if self._monitor is not None:
            self._monitor.start()
            stack.callback(self._monitor.stop)
        if self._producer is not None:
            stack.push_async_callback(self._producer.stop)
        if self._executor is None or self._transactions is None:
            self._start_consumer(stack, _DRAIN_SECONDS)
            return
        self._transactions.extra = len(self._subscriptions)  # the main line of each topic has one
        self._transactions.idle_seconds = self._idle_seconds()
        await self._transactions.start()
        stack.push_async_callback(self._transactions.stop)
        if self._topic_table is not None:
            await self._topic_table.load()
            stack.push_async_callback(self._topic_table.close)
            stack.callback(self._supervisor.watch("the table of topics", self._topic_table.run()).cancel)
        if self._outbox is not None:
            stack.push_async_callback(self._outbox.close)
        if self._relay is not None:  # stops after consumer and executor: what they publish at the end still leaves
            stack.push_async_callback(self._relay.stop)
            await self._relay.start()
            self._supervisor.watch("the relay", self._relay.wait())
        stack.push_async_callback(self._executor.stop)
        await self._executor.start()
        stack.callback(self._executor.rebalance_listener.close)
        self._supervisor.watch("the executor", self._executor.wait())
        if self._assignment is not None:
            self._executor.assign(self._assignment.origins)
        self._start_consumer(stack, min(_DRAIN_SECONDS, self._executor.settings.shutdown_seconds))

    def _start_consumer(self, stack: AsyncExitStack, drain_seconds: float) -> None:
        if self._consumer is not None:
            self._consumer_task = self._supervisor.watch("the consumer", self._consumer.run())
            stack.push_async_callback(self._leave_group)
            stack.push_async_callback(self._consumer.drain, drain_seconds)

    def _make_consumer(self) -> Consumer | None:
        if self._kafka is None:
            if declared := [*self._subscriptions, *self._stateless]:
                raise ConfigurationError(f"consumers of {', '.join(declared)} are declared: give kafka=...")
            return None
        for subscription in self._subscriptions.values():
            subscription.check()
        homes = {job_type.home for job_type in self.registry if job_type.home is not None}
        topics = {*self._topics, *homes}  # without a member of the group for its topic, nobody would run these jobs
        if not (self._subscriptions or self._stateless or (topics and self._transactions is not None)):
            return None
        return Consumer(
            self.name,
            self._kafka,
            self._subscriptions,
            topics,
            self._transactions,
            None if self._executor is None else self._executor.rebalance_listener,
            stateless=self._stateless,
            dead_letters=self._dead_letters,
            topic_table=self._topic_table,
            prometheus=self._prometheus,
        )

    def _idle_seconds(self) -> float | None:
        """How long a handler's transaction may be silent: a little longer than the slowest of them may take."""
        timeouts = [s.timeout for s in self._subscriptions.values()]
        limits = [timeout for timeout in timeouts if timeout is not None]
        return max([_IDLE_SECONDS, *(limit + 5.0 for limit in limits)]) if len(limits) == len(timeouts) else None

    async def _leave_group(self) -> None:
        if self._consumer is None:
            return
        self._consumer.leave()
        await asyncio.wait([self._consumer_task], timeout=_LEAVE_SECONDS)
        self._consumer_task.cancel()

    def _hurry(self) -> None:
        """Cancel what still runs, again and again, since a cancelled job is taken up anew until the executor stops."""
        if self._stack is None:
            return
        if self._executor is not None:
            self._executor.cancel_all()
        if self._consumer is not None:
            self._consumer.cancel()
        asyncio.get_running_loop().call_later(_HURRY_SECONDS, self._hurry)


def _postgres(postgres: str | PostgresSettings | None, schema: str | None) -> PostgresSettings | None:
    if isinstance(postgres, str):
        return PostgresSettings(dsn=postgres, schema_name=schema or "sidings")
    if postgres is not None and schema is not None and schema != postgres.schema_name:
        raise ConfigurationError(f"schema={schema!r} contradicts PostgresSettings.schema_name={postgres.schema_name!r}")
    return postgres

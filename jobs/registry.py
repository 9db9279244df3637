"""Job types: declared with a decorator, collected in a `Registry` that services include."""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..errors import ConfigurationError, InvalidPayload, MissingGroup, MissingOrigin, UnknownJobType
from . import enqueue as _enqueue
from .connections import AnyConnection, AnySyncConnection, Rows, Statement, store, store_sync
from .enqueue import UNSET, Unset
from .job import Job, JobId, P
from .middleware import Middleware
from .periodic import Missed, Per, Periodic, Tick, periodic_of
from .retry import Retry
from .transaction import Transaction

__all__ = ["JobType", "Policy", "Registry"]

Handler = Callable[[Job[P]], Awaitable[object] | object] | Callable[[list[Job[P]]], Awaitable[object] | object]
PolicyName = Literal["serial", "latest", "parallel"]
GroupOf = str | Callable[[P], str | None] | None
T = TypeVar("T")

_MAX_BATCH = 500  # jobs that run are named in one row of the executor, which has to stay small


class Policy(IntEnum):
    """How jobs of one group relate; stored in `job.policy`. A job without a group is a group of its own."""

    SERIAL = 0
    LATEST = 1
    PARALLEL = 2


class JobType(Generic[P]):
    """A named handler with its payload model, group, retry policy and timeout. Made by ``Service.job`` or
    ``Registry.job``; call its `enqueue` to store a job. Calling the type calls the handler."""

    def __init__(
        self,
        registry: "Registry",
        handler: Handler[P],
        *,
        name: str,
        payload: Any,
        group: GroupOf[P],
        retry: Retry,
        timeout: float | None,
        history: bool,
        transactional: bool,
        home: str | None = None,
        policy: PolicyName = "serial",
        batch: int | None = None,
    ) -> None:
        self.name = name
        self.handler = handler
        self.retry = retry
        self.timeout = timeout
        self.history = history
        self.transactional = transactional
        self.batch = batch
        self.periodic: Periodic | None = None  # its schedule, if it has one
        self.wrapped = True  # by the service's middleware; stored messages have theirs further in
        self.policy = _policy(name, policy, group)
        self.is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self.grouped = group is not None
        self._registry = registry
        self._group = group
        self._adapter: TypeAdapter[P] = TypeAdapter(payload)
        # As `validate_python` and `dump_json`, in less than half the time.
        self._validate = self._adapter.validator.validate_python
        self._to_json = self._adapter.serializer.to_json
        self._check_group(payload)
        if home is not None and (group is None or not home):
            raise ConfigurationError(
                f"{name}: home={home!r} needs a topic's name and group=: its hash is the partition"
            )
        self.home = home
        if transactional and not self.is_async:
            raise ConfigurationError(f"{name}: a transactional handler has to be `async def`")
        if retry.on_exhausted == "block" and (group is None or self.policy == Policy.PARALLEL):
            raise ConfigurationError(f"{name}: on_exhausted='block' needs group=, and a policy that keeps its order")
        if batch is not None:
            _check_batch(name, batch, transactional, retry)

    @property
    def schema(self) -> str:
        """The schema that its jobs are stored in."""
        return self._registry.schema

    def __call__(self, job: Any) -> Awaitable[object] | object:
        return self.handler(job)

    def __repr__(self) -> str:
        return f"JobType({self.name!r})"

    async def enqueue(
        self,
        tx: Transaction | AnyConnection,
        payload: P,
        *,
        origin: str | None = None,
        group: str | Unset | None = UNSET,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        unique_key: str | None = None,
    ) -> JobId:
        """Store one job in the caller's transaction, which this call neither commits nor rolls back.

        tx: a consumer's or service's `Transaction`; or a connection with a transaction open: asyncpg's, psycopg's
        ``AsyncConnection``, SQLAlchemy's ``AsyncConnection`` or ``AsyncSession`` (docs/enqueueing.md).
        origin: default: where the group is at home, for a type with a `home`; else the partition of the message, or the
        origin of the job, whose handler makes the call.
        group: default: what the type's `group` yields for the payload. delay: seconds or a timedelta, or run_at:
        an aware datetime. priority: -100 to 100, larger first, between groups only.
        headers: texts that the handler finds in `job.headers`; the current correlation id and trace are added to them.
        unique_key: until the job ends, no other job of its type with this key is stored. It stands while the job waits,
        runs, backs off or is held; an enqueue whose transaction is still open is waited for.

        Returns the job's id; with a `unique_key`, that of the job which has it. The job exists if and only if the
        transaction commits; jobs of one group run in the order of their commits where writers lock the entity's row
        before they enqueue.

        Raises `InvalidPayload`, `MissingOrigin`, `MissingGroup`, `NotInTransaction`; nothing is written then.
        """
        statement = self._one(payload, origin, group, delay, run_at, priority, headers, unique_key)
        rows = await store(tx.connection if isinstance(tx, Transaction) else tx, statement)
        if isinstance(tx, Transaction):
            _note(tx, statement, rows)
        return rows[0][0] if rows else self._homeless()

    async def enqueue_many(
        self,
        tx: Transaction | AnyConnection,
        payloads: Iterable[P],
        *,
        origin: str | None = None,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> list[JobId]:
        """Store many jobs with one statement, in the order of `payloads`; see `enqueue`. All or none are stored."""
        statement = self._many(payloads, origin, delay, run_at, priority, headers)
        rows = await store(tx.connection if isinstance(tx, Transaction) else tx, statement)
        if isinstance(tx, Transaction):
            _note(tx, statement, rows)
        return self._ids(statement, rows)

    def enqueue_sync(
        self,
        connection: AnySyncConnection,
        payload: P,
        *,
        origin: str | None = None,
        group: str | Unset | None = UNSET,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        unique_key: str | None = None,
    ) -> JobId:
        """`enqueue` for synchronous code, with psycopg's ``Connection``, SQLAlchemy's ``Connection`` or ``Session``, or
        ``django.db.connection``."""
        statement = self._one(payload, origin, group, delay, run_at, priority, headers, unique_key)
        rows = store_sync(connection, statement)
        return rows[0][0] if rows else self._homeless()

    def enqueue_many_sync(
        self,
        connection: AnySyncConnection,
        payloads: Iterable[P],
        *,
        origin: str | None = None,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> list[JobId]:
        """`enqueue_many` for synchronous code; see `enqueue_sync`."""
        statement = self._many(payloads, origin, delay, run_at, priority, headers)
        return self._ids(statement, store_sync(connection, statement))

    def _one(
        self,
        payload: P,
        origin: str | None,
        group: str | Unset | None,
        delay: timedelta | float | None,
        run_at: datetime | None,
        priority: int,
        headers: Mapping[str, str] | None,
        unique_key: str | None,
    ) -> Statement:
        checked, text = self._prepared(payload)
        return _enqueue.one_job(
            self._registry.schema,
            self.name,
            self.home,
            origin,
            self.group_of(checked) if isinstance(group, Unset) else self.checked_group(group),
            text.decode(),
            self.policy,
            _enqueue.when(delay, run_at),
            priority,
            headers,
            unique_key,
            self._registry.has_grown,
        )

    def _many(
        self,
        payloads: Iterable[P],
        origin: str | None,
        delay: timedelta | float | None,
        run_at: datetime | None,
        priority: int,
        headers: Mapping[str, str] | None,
    ) -> Statement:
        items = [self._prepared(payload) for payload in payloads]
        groups = [self.group_of(checked) for checked, _ in items] if self.grouped else None
        return _enqueue.many_jobs(
            self._registry.schema,
            self.name,
            self.home,
            origin,
            cast(list[str] | None, groups),  # a type with groups has refused a payload without
            [text for _, text in items],
            self.policy,
            _enqueue.when(delay, run_at),
            priority,
            headers,
            self._registry.has_grown,
        )

    def _ids(self, statement: Statement, rows: Rows) -> list[JobId]:
        return [row[0] for row in rows] if rows or not statement.jobs else [self._homeless()]

    def _homeless(self) -> NoReturn:
        raise MissingOrigin(
            f"the job {self.name!r} has its home in {self.home!r}, whose partitions are not known yet: start a service "
            "that consumes it, or names it in topics=, once while Kafka is up; or insert its row into "
            f"{self._registry.schema}.topic; or give origin='topic/partition'"
        )

    def dump(self, payload: P) -> str:
        """Serialise `payload` to JSON. Raises `InvalidPayload`."""
        return self._prepared(payload)[1].decode()

    def load(self, text: str | None) -> P:
        """Parse a stored payload. Raises pydantic's `ValidationError`."""
        # By name, as `_prepared` writes it, and by alias, as a Kafka message or another program may have it.
        return self._adapter.validate_json("null" if text is None else text, by_name=True, by_alias=True)

    def group_of(self, payload: P) -> str | None:
        """The group of a job with this payload; None where the type has no groups. Raises `MissingGroup`."""
        if self._group is None:
            return None
        if callable(self._group):
            value = self._group(payload)
        elif isinstance(payload, Mapping):
            value = cast(Mapping[str, object], payload).get(self._group)
        else:
            value = getattr(payload, self._group, None)
        return self.checked_group(None if value is None else str(value))

    def _prepared(self, payload: P) -> tuple[P, bytes]:
        """The payload as its model makes it, which also decides its group, and as JSON that `load` can read back."""
        try:
            checked = self._validate(payload, by_name=True, by_alias=True)
            return checked, self._to_json(checked, round_trip=True, by_alias=False)
        except (ValidationError, ValueError, TypeError) as error:
            raise InvalidPayload(f"the payload of {self.name!r} does not fit {self._adapter}: {error}") from error

    def checked_group(self, group: str | None) -> str | None:
        """Refuse an empty group where the type is serial. Raises `MissingGroup`."""
        if not group and self.grouped:
            raise MissingGroup(
                f"{self.name!r} runs serially by group, but {self._group!r} gave {group!r}: fill that field, "
                "or declare the type without group="
            )
        return group

    def _check_group(self, payload: Any) -> None:
        fields = getattr(payload, "model_fields", None)
        if isinstance(self._group, str) and isinstance(fields, dict) and self._group not in fields:
            names = ", ".join(cast(dict[str, object], fields))
            if not hasattr(payload, self._group):
                raise ConfigurationError(f"{self.name}: group={self._group!r} is no field of its payload ({names})")


class Registry:
    """A set of job types without a service, for modules that services include::

    jobs = Registry()


    @jobs.job(group="order_id")
    async def ship(job: Job[Shipment]) -> None: ...


    service.include(jobs)
    """

    def __init__(self) -> None:
        self.schema = "sidings"
        self.has_grown: Callable[[str], bool] = lambda _: False  # the service knows which topics got more partitions
        self.middleware: list[Middleware] = []  # of the service, the outermost first
        self._types: dict[str, JobType[Any]] = {}

    def job(
        self,
        *,
        name: str | None = None,
        payload: Any = None,
        group: GroupOf[Any] = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        history: bool = True,
        transactional: bool = False,
        home: str | None = None,
        policy: PolicyName = "serial",
        batch: int | None = None,
    ) -> Callable[[Handler[P]], JobType[P]]:
        """Declare a job type.

        name: default: the function's name; it is stored with every job, so keep it when you rename the function.
        payload: the model; default: the parameter of the handler's ``Job[...]`` annotation.
        group: name of a payload field, or a function of the payload. Jobs of one origin and group run one at a time,
            in order. Without it every job stands alone.
        retry: default `Retry()`: exponential backoff with jitter, for ever.
        timeout: seconds (or timedelta) after which an attempt is cancelled and counts as failed. A plain function
            cannot be interrupted: it keeps its group until it returns.
        history: whether attempts of this type leave rows in `job_history`.
        transactional: the handler gets `job.tx`, a transaction that also ends the job: what it writes there happens
            exactly once. It must not commit by itself, and it holds a connection while it runs.
        home: a topic. The jobs belong to the partition of it that has their group as its key, wherever they are
            enqueued: so those that come from messages of several topics, from HTTP requests or from timers meet.
        policy: how the jobs of one group relate. ``"serial"``: one at a time, in order, whatever their types.
            ``"latest"``: as serial, but of this type's jobs that wait in the group only the newest runs; the others end
            as superseded, and it inherits their failures. With a `delay` it debounces. ``"parallel"``: the group orders
            nothing; it is there to be seen, paused and cleared by.
        batch: the handler takes ``list[Job[...]]``, up to so many jobs of one origin, no two of a group. It returns
            None when all have succeeded, or for each job, in their order, None or an error (``Discard(...)`` and
            ``Retry.after(...)`` as well), as ``asyncio.gather(..., return_exceptions=True)`` does. What it raises has
            failed them all; a job that has failed once is given to it alone, so that a bad one spoils no other's
            second attempt.

        The handler is ``async def``, or a plain function, which runs in a thread. Raises `ConfigurationError`.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and seconds <= 0:
            raise ConfigurationError(f"timeout={timeout!r}: give a positive number of seconds, or None")

        def declare(handler: Handler[P]) -> JobType[P]:
            label = name or getattr(handler, "__name__", "")
            if not label:
                raise ConfigurationError(f"{handler!r} has no __name__: give name=...")
            model = _payload_model(handler, label, batch is not None) if payload is None else payload
            return self.add(
                JobType(
                    self,
                    handler,
                    name=label,
                    payload=model,
                    group=group,
                    retry=retry or Retry(),
                    timeout=seconds,
                    history=history,
                    transactional=transactional,
                    home=home,
                    policy=policy,
                    batch=batch,
                )
            )

        return declare

    def periodic(
        self,
        cron: str | None = None,
        *,
        every: timedelta | float | None = None,
        timezone: str | None = None,
        missed: Missed = "once",
        per: Per = "service",
        home: str | None = None,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        history: bool = True,
        transactional: bool = False,
    ) -> Callable[[Handler[Tick]], JobType[Tick]]:
        """Declare a job type with a schedule: each of its ticks becomes one job, whichever instance fires it::

            @service.periodic("0 6 * * *", timezone="Europe/Tallinn")
            async def nightly(job: Job[Tick]) -> None: ...

        cron: minute, hour, day of the month, month, day of the week, as cron reads them, in `timezone` (default: UTC).
        every: instead of it, a period in seconds, or a timedelta.
        missed: what becomes of ticks that nobody fired in time: ``"once"``: one job stands for all of them;
            ``"skip"``: what is more than a minute late gets no job; ``"all"``: a job for each.
        per: ``"origin"``: a job in every origin, instead of one for the service.

        Ticks never overlap: they are one group, and with "once" and "skip" a tick waits until the job of the one before
        has ended. See docs/periodic.md, and `job` for the other arguments. Raises `ConfigurationError`.
        """

        def declare(handler: Handler[Tick]) -> JobType[Tick]:
            label = name or getattr(handler, "__name__", "")
            periodic = periodic_of(label, cron, every, timezone, missed, per)
            if per == "origin" and home is not None:
                raise ConfigurationError(f"{label}: home={home!r} and per='origin' exclude each other")
            job_type = self.job(
                name=label,
                payload=Tick,
                group=lambda _: label,
                retry=retry,
                timeout=timeout,
                history=history,
                transactional=transactional,
                home=home,
            )(handler)
            job_type.periodic = periodic
            return job_type

        return declare

    def add(self, job_type: JobType[P]) -> JobType[P]:
        """Register a type. Raises `ConfigurationError` if its name is taken."""
        if self._types.setdefault(job_type.name, job_type) is not job_type:
            raise ConfigurationError(f"two job types are called {job_type.name!r}: give one of them name=...")
        return job_type

    def include(self, other: "Registry") -> None:
        """Take over the types of `other`, which from now on enqueue into this registry's schema."""
        for job_type in other:
            self.add(job_type)
        other.schema = self.schema
        other.has_grown = self.has_grown

    def get(self, name: str) -> JobType[Any] | None:
        """The type of that name, or None."""
        return self._types.get(name)

    def __getitem__(self, name: str) -> JobType[Any]:
        """The type of that name. Raises `UnknownJobType`."""
        try:
            return self._types[name]
        except KeyError:
            known = ", ".join(sorted(self._types)) or "none"
            raise UnknownJobType(
                f"no job type {name!r} is registered (known: {known}): "
                "declare it with @service.job, or include its registry"
            ) from None

    async def enqueue(self, tx: Transaction | AnyConnection, type_name: str, payload: Any, **options: Any) -> JobId:
        """`JobType.enqueue` by name. Raises `UnknownJobType` as well."""
        return await self[type_name].enqueue(tx, payload, **options)

    def enqueue_sync(self, connection: AnySyncConnection, type_name: str, payload: Any, **options: Any) -> JobId:
        """`JobType.enqueue_sync` by name. Raises `UnknownJobType` as well."""
        return self[type_name].enqueue_sync(connection, payload, **options)

    def silent(self) -> list[str]:
        """Names of the types that leave no history."""
        return [job_type.name for job_type in self._types.values() if not job_type.history]

    def __iter__(self) -> Iterator[JobType[Any]]:
        return iter(self._types.values())

    def __len__(self) -> int:
        return len(self._types)


def _note(tx: Transaction, statement: Statement, rows: Rows) -> None:
    """Their executors are woken when the transaction has committed."""
    if statement.origin:
        tx.enqueued.add(statement.origin)
    else:
        tx.enqueued.update(row[1] for row in rows)


def _policy(name: str, policy: str, group: object) -> int:
    if policy.upper() not in Policy.__members__:
        raise ConfigurationError(f"{name}: policy={policy!r}: give 'serial', 'latest' or 'parallel'")
    if policy != "serial" and group is None:
        raise ConfigurationError(f"{name}: policy={policy!r} needs group=: it says how the jobs of a group relate")
    return Policy[policy.upper()].value


def _check_batch(name: str, batch: int, transactional: bool, retry: Retry) -> None:
    if not 1 < batch <= _MAX_BATCH:
        raise ConfigurationError(f"{name}: batch={batch!r}: give 2 to {_MAX_BATCH}, or leave it out")
    if transactional:
        raise ConfigurationError(f"{name}: batch= and transactional=True exclude each other: leave one of them out")
    if retry.judges_results:
        raise ConfigurationError(f"{name}: batch= and a retry by result exclude each other: return errors instead")


def _payload_model(handler: Callable[..., object], label: str, batch: bool) -> Any:
    """X of the handler's ``Job[X]`` annotation, or ``list[Job[X]]`` of a batch."""
    parameters = list(inspect.signature(handler).parameters.values())
    wanted = "list[Job[YourModel]]" if batch else "Job[YourModel]"
    remedy = f"annotate the handler's parameter as {wanted}, or give payload=YourModel"
    if not parameters:
        raise ConfigurationError(f"{label}: the handler takes no parameter; {remedy}")
    try:
        hint = get_type_hints(handler).get(parameters[0].name)
    except NameError as error:  # a model defined inside a function, under `from __future__ import annotations`
        raise ConfigurationError(f"{label}: the annotation cannot be resolved ({error}); {remedy}") from None
    if batch:
        if get_origin(hint) is not list:
            raise ConfigurationError(f"{label}: with batch= the handler takes a list of jobs; {remedy}")
        hint = get_args(hint)[0]
    if hint is Job:
        return Any
    if get_origin(hint) is not Job:
        raise ConfigurationError(f"{label}: the payload's model is unknown; {remedy}")
    return get_args(hint)[0]

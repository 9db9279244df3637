"""A job type: a named handler, and how its jobs are stored. Declared through a `Registry`."""

import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, Generic, Literal, NoReturn, Protocol, cast

from pydantic import BaseModel

from ..errors import ConfigurationError, EnqueueError, InvalidPayload
from .addition import AddedJob, AddedJobs
from .connections import AnyConnection, AnySyncConnection, Rows, Statement, store, store_sync
from .context import current_key, current_work
from .enqueue import (
    UNSET,
    Kind,
    ManyHeaders,
    Unset,
    headers_of_each,
    headers_text,
    homeless,
    kind_of,
    many_jobs,
    one_job,
    short,
    when,
)
from .groups import GroupOf, Groups
from .job import Job, JobId, P
from .middleware import is_async
from .payloads import Payloads
from .periodic import Periodic
from .retry import Retry
from .transaction import Transaction, note_jobs, noted
from .withdraw import WITHDRAWALS, withdrawal

__all__ = ["Handler", "JobType", "Policy", "PolicyName"]

Handler = Callable[[Job[P]], Awaitable[object] | object] | Callable[[list[Job[P]]], Awaitable[object] | object]
PolicyName = Literal["serial", "latest", "parallel"]

_MAX_BATCH = 500  # jobs that run are named in one row of the executor, which has to stay small


class Policy(IntEnum):
    """How jobs of one group relate; stored in `job.policy`. A job without a group is a group of its own."""

    SERIAL = 0
    LATEST = 1
    PARALLEL = 2


class Destination(Protocol):
    """Where a type's jobs are stored, as its registry knows it when they are: a service that includes the registry
    decides it later than the type is declared."""

    @property
    def schema(self) -> str:
        """The database schema."""
        ...

    @property
    def has_grown(self) -> Callable[[str], bool]:
        """Whether partitions were added to a topic."""
        ...


class JobType(Generic[P]):
    """A named handler with its payload model, group, retry policy and timeout.

    It is made by ``Service.job`` or ``Registry.job``. Call its `enqueue` to store a job. Calling the type itself calls
    the handler alone, as in a test; what that enqueues belongs to the job's origin.
    """

    def __init__(
        self,
        destination: Destination,
        handler: Handler[P],
        *,
        name: str,
        payload: Any,
        group: GroupOf[P],
        retry: Retry,
        timeout: float | None,
        history: bool,
        transactional: bool,
        home: str | None,
        policy: PolicyName,
        batch: int | None,
        concurrency: int | None,
    ) -> None:
        self.name = name
        self.handler = handler
        self.retry = retry
        self.judges_results = retry.judges_results
        self.timeout = timeout
        self.history = history
        self.transactional = transactional
        self.batch = batch
        self.concurrency = concurrency
        self.periodic: Periodic | None = None  # its schedule, if it has one
        self.wrapped = True  # by the service's middleware; stored messages have theirs further in
        self.policy = _policy(name, policy, group)
        self.is_async = is_async(handler)
        self.grouped = group is not None
        self._destination = destination
        self._payload = payload
        self._payloads = Payloads[P](name, payload)
        self.load = self._payloads.load  # a call for each job that runs
        self._groups = Groups[P](name, group, payload)
        named = isinstance(home, str) and home != ""  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
        if home is not None and (group is None or not named):
            raise ConfigurationError(
                f"{name}: home={home!r} needs a topic's name and group=: its hash is the partition"
            )
        if home == "outbox":
            raise ConfigurationError(
                f"{name}: home='outbox': relays lease outbox/0 to outbox/15 as the slots of the outbox, so its jobs "
                "would never run: give another topic"
            )
        self.home = home
        if transactional and not self.is_async:
            raise ConfigurationError(f"{name}: a transactional handler has to be `async def`")
        if retry.on_exhausted == "block" and (group is None or self.policy == Policy.PARALLEL):
            raise ConfigurationError(f"{name}: on_exhausted='block' needs group=, and a policy that keeps its order")
        if retry.follow_up is not None:
            self._check_follow_up(cast(JobType[Any], retry.follow_up))
        if batch is not None:
            _check_batch(name, batch, transactional, retry)
        whole = type(concurrency) is int
        if concurrency is not None and not (whole and concurrency > 0):
            raise ConfigurationError(f"{name}: concurrency={concurrency!r}: give a whole number, 1 or more, or None")

    @property
    def schema(self) -> str:
        """The schema that its jobs are stored in."""
        return self._destination.schema

    def __call__(self, job: Any) -> Any:
        """The handler alone, as in a test. What it enqueues belongs to the job's origin, as in an executor."""
        with _working_on(job):
            result = self.handler(job)
        return self._awaited(job, result) if inspect.isawaitable(result) else result

    async def _awaited(self, job: Any, result: Awaitable[object]) -> object:
        with _working_on(job):
            return await result

    def __repr__(self) -> str:
        return f"JobType({self.name!r})"

    @noted
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
        """Store one job in the caller's transaction, which this call neither commits nor rolls back::

            await send_eta.enqueue(tx, SendEta(transport_id="t-1"), delay=60)

        The job exists if and only if the transaction commits. Jobs of one group run in the order of their commits where
        writers lock the entity's row before they enqueue. A job that was stored through a `Transaction` starts at once
        after the commit if this instance runs its origin, or tells the one that does (`ExecutorSettings.notify`). Any
        other is found by the next poll (`ExecutorSettings.poll_seconds`).

        Args:
            tx: A consumer's or service's `Transaction`; or a connection with a transaction open: asyncpg's, psycopg's
                ``AsyncConnection``, SQLAlchemy's ``AsyncConnection`` or ``AsyncSession`` (docs/enqueueing.md).
            origin: ``topic/partition``. Default: where the group is at home, for a type with a `home`; else the origin
                of the message or job whose handler makes the call.
            group: Default: what the type's `group` yields for the payload. None: the job stands alone, if its type has
                no groups. It is never empty.
            delay: Seconds, or a timedelta, until the job is due.
            run_at: When the job is due, an aware datetime; instead of `delay`.
            priority: -100 to 100, larger first, between groups only, among the some 4,000 jobs that are read ahead.
            headers: Texts that the handler finds in `job.headers`. The current correlation id and trace are added to
                them.
            unique_key: Until the job ends, no other job of its type with this key is stored. The key is taken while the
                job waits, is delayed, runs, backs off or is held; an enqueue of it whose transaction is still open is
                waited for.

        Returns:
            The job's id; with a `unique_key`, the id of the job that has it.

        Raises:
            InvalidPayload: The handler would not get what was given; the message says why.
            MissingOrigin: No origin is given, and none can be derived.
            MissingGroup: The type needs a group, and got none.
            NotInTransaction: The connection is in autocommit, or the transaction has ended.
            EnqueueError: Something else cannot be stored. After this error and the ones above nothing has been written,
                and the transaction stays usable.
            SchemaError: Sidings' tables are missing or old. The message says what to run; the transaction has to be
                rolled back.
        """
        made = self._one(payload, origin, group, delay, run_at, priority, headers, unique_key)
        if isinstance(tx, Transaction) and tx.added:
            await tx.flush()
        statement, rows = await store(tx, made)
        if isinstance(tx, Transaction) and rows:
            alone = delay is None and run_at is None and unique_key is None
            note_jobs(tx.enqueued, statement.origin or rows[0][1], [rows[0][0]] if alone else [])
        return rows[0][0] if rows else self._homeless()

    @noted
    async def enqueue_many(
        self,
        tx: Transaction | AnyConnection,
        payloads: Iterable[P],
        *,
        origin: str | None = None,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        priority: int = 0,
        headers: ManyHeaders | None = None,
    ) -> list[JobId]:
        """Store many jobs with one statement, in the order of `payloads`; all or none are stored.

        Arguments and errors are those of `enqueue`; there is no `group` and no `unique_key`. If the row of the type's
        `home` goes away from ``sidings.topic`` meanwhile, `MissingOrigin` says that the transaction has to be rolled
        back.

        Args:
            headers: As in `enqueue`, of all jobs; or a list with those of each, or None, in the order of `payloads`.

        Returns:
            The jobs' ids, in the order of `payloads`.
        """
        made = self._many(payloads, origin, delay, run_at, priority, headers)
        if isinstance(tx, Transaction) and tx.added:
            await tx.flush()
        statement, rows = await store(tx, made)
        if isinstance(tx, Transaction):
            for name in [statement.origin] if statement.origin else {row[1] for row in rows}:
                note_jobs(tx.enqueued, name, [])
        return self._ids(statement, rows)

    @noted
    async def add(
        self,
        tx: Transaction,
        payload: P,
        *,
        origin: str | None = None,
        group: str | Unset | None = UNSET,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Store one job with the others that are added to `tx`, before it commits: a statement for all of them instead
        of one for each::

            await send_eta.add(tx, SendEta(transport_id="t-1"))

        In a consumer these are the jobs of all messages of a batch, so that a handler that takes single messages is
        nearly as fast as one that takes lists. The job exists if and only if the transaction commits.

        It is checked now, and stored when the transaction ends; when 1,000 jobs (or 4 MiB) have been added; before the
        next `enqueue`, `enqueue_many` or `withdraw` of any type in `tx`; at the begin and the end of a `savepoint`; or
        by `tx.flush()`. Until then no statement sees it. Jobs of one group run in the order of these calls. What your
        own SQL stores (``sidings.enqueue()``, a trigger) comes before what has been added and is not stored yet. Where
        somebody has taken ``tx.connection``, it is stored by this call.

        Args:
            tx: A consumer's, a job's or a service's. Other connections have nobody who would store the job: use
                `enqueue` or `enqueue_many`. All else is as in `enqueue`; there is no `unique_key`.
            delay: Counts from when the job is stored.

        Raises:
            EnqueueError: As in `enqueue`, and its kin; nothing has been added. What only Postgres can find, as that the
                partitions of a `home` are not known, is raised where the job is stored; nothing commits then.
        """
        if not isinstance(tx, Transaction):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
            given = f"{type(tx).__module__}.{type(tx).__qualname__}"
            raise EnqueueError(
                f"a job can be added only to a Transaction, which stores it before it commits, and not to {given}: "
                "call enqueue or enqueue_many"
            )
        tx.opened()
        checked, text = self._payloads.prepared(payload)
        its_group = self._groups.of(checked) if isinstance(group, Unset) else self._groups.checked(group)
        kind = self._kind(origin, its_group is not None, delay, run_at, priority)
        key = current_key() if origin is None else None
        job = AddedJob(short("group", its_group), text, headers_text(headers), key)
        if (added := tx.added.get(AddedJobs)) is None:
            added = tx.added[AddedJobs] = AddedJobs()
        if added.add(kind, job) or not tx.holds:
            await tx.flush()

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
        """`enqueue` for synchronous code.

        Args:
            connection: psycopg's ``Connection``, SQLAlchemy's ``Connection`` or ``Session``, or
                ``django.db.connection``, with a transaction open. All else is as in `enqueue`.
        """
        made = self._one(payload, origin, group, delay, run_at, priority, headers, unique_key)
        _, rows = store_sync(connection, made)
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
        headers: ManyHeaders | None = None,
    ) -> list[JobId]:
        """`enqueue_many` for synchronous code, on a connection as in `enqueue_sync`."""
        return self._ids(*store_sync(connection, self._many(payloads, origin, delay, run_at, priority, headers)))

    @noted
    async def withdraw(
        self, tx: Transaction | AnyConnection, job_id: int | None = None, *, unique_key: str | None = None
    ) -> bool:
        """Take back a delayed job of this type, in the caller's transaction, as long as it is not due::

            await remind.withdraw(tx, unique_key=order_id)

        The job is gone if and only if the transaction commits; its history then ends as ``cancelled``. Within the
        transaction its `unique_key` is free, so that a job is put off, or preponed, by withdrawing it and enqueueing
        another one. Lock or update the entity's row first, as for `enqueue`: this sees what is committed by then.

        Until the transaction ends, who enqueues or withdraws with the same key waits; and if the job becomes due
        meanwhile, those of its group that are due after it. No other job does.

        Args:
            tx: As in `enqueue`.
            job_id: What `enqueue` has returned.
            unique_key: The job's, instead of `job_id`.

        Returns:
            True: its handler has never been called, and once the transaction has committed never is. False: there is no
            such job of this type, or its time has come: it waits, runs, has failed and is tried again, is held, or has
            ended. It is as it was, and its handler has to look for itself whether there is anything left to do.

        Raises:
            EnqueueError: Neither `job_id` nor `unique_key` is given, or both, or what cannot be one.
            NotInTransaction: The connection is in autocommit, or the transaction has ended. After these errors nothing
                has been written, and the transaction stays usable.
            SchemaError: As in `enqueue`.
        """
        made = withdrawal(self._destination.schema, self.name, self.history, job_id, unique_key)
        if isinstance(tx, Transaction) and tx.added:
            await tx.flush()
        _, rows = await store(tx, made, WITHDRAWALS)
        return rows[0][0]

    def withdraw_sync(
        self, connection: AnySyncConnection, job_id: int | None = None, *, unique_key: str | None = None
    ) -> bool:
        """`withdraw` for synchronous code, on a connection as in `enqueue_sync`."""
        made = withdrawal(self._destination.schema, self.name, self.history, job_id, unique_key)
        _, rows = store_sync(connection, made, WITHDRAWALS)
        return rows[0][0]

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
    ) -> Callable[[], Statement]:
        checked, text = self._payloads.prepared(payload)
        its_group = self._groups.of(checked) if isinstance(group, Unset) else self._groups.checked(group)
        kind = self._kind(origin, its_group is not None, delay, run_at, priority)
        return one_job(kind, its_group, text.decode(), headers, unique_key, _key_of(origin))

    def _many(
        self,
        payloads: Iterable[P],
        origin: str | None,
        delay: timedelta | float | None,
        run_at: datetime | None,
        priority: int,
        headers: ManyHeaders | None,
    ) -> Callable[[], Statement]:
        values, texts = self._payloads.all_prepared(_several(self.name, payloads), self._groups.value)
        groups = self._groups.all_of(values) if self.grouped else None
        its_headers = headers_of_each(headers, len(texts))
        its_origin = origin if texts else "none/0"  # no jobs need none, and nothing is sent
        kind = self._kind(its_origin, self.grouped, delay, run_at, priority)
        return many_jobs(kind, groups, texts, its_headers, _key_of(origin))

    def _kind(
        self,
        origin: str | None,
        grouped: bool,
        delay: timedelta | float | None,
        run_at: datetime | None,
        priority: int,
    ) -> Kind:
        schema, has_grown = self._destination.schema, self._destination.has_grown
        due = when(delay, run_at)
        return kind_of(schema, self.name, self.home, origin, grouped, self.policy, due, priority, has_grown)

    def _ids(self, statement: Statement, rows: Rows) -> list[JobId]:
        if not rows:
            return [self._homeless()] if statement.jobs else []
        return rows[0][0] if statement.origin else [row[0] for row in rows]

    def _homeless(self) -> NoReturn:
        raise homeless(self._destination.schema, self.name, self.home)

    def dump(self, payload: P) -> str:
        """Serialise `payload` to the JSON that `load` reads.

        Raises:
            InvalidPayload: The handler would not get what was given; the message says why.
        """
        return self._payloads.prepared(payload)[1].decode()

    def group_of(self, payload: P) -> str | None:
        """The group of a job with this payload; None where the type has no groups.

        Raises:
            MissingGroup: The payload yields none, or none that reads the same each time.
        """
        return self._groups.of(payload)

    def _check_follow_up(self, other: "JobType[Any]") -> None:
        """It gets payload, origin and group of a job of this type as they are stored."""
        what, its, ours = f"{self.name}: on_exhausted={other.name}", other._payload, self._payload
        if other.periodic is not None:
            raise ConfigurationError(f"{what} has a schedule, which makes its jobs: give one declared with job()")
        if its not in (ours, Any, object):
            raise ConfigurationError(
                f"{what} takes another payload, {getattr(its, '__name__', its)}, than what it would get, "
                f"{getattr(ours, '__name__', ours)}: declare both with the same, or {other.name} with Job[Any]"
            )
        if other.policy == Policy.LATEST:
            raise ConfigurationError(
                f"{what} has policy='latest', of whose jobs only the newest runs, and one is to run for each that is "
                "given up: give 'serial' or 'parallel' there"
            )
        if other.grouped and not self.grouped:
            raise ConfigurationError(
                f"{what} has groups, and {self.name} has none that it could stand in: leave group= out there, or give "
                "it here as well"
            )
        by, ours_by = other._groups.by, self._groups.by
        if isinstance(by, str) and isinstance(ours_by, str) and by != ours_by:  # of functions nobody can tell
            raise ConfigurationError(
                f"{what} has group={by!r}, but would stand in the group of the {self.name} that it follows, by "
                f"{ours_by!r}: give both the same, or let a type without groups follow, which enqueues a job of "
                f"{other.name}"
            )
        if other.home not in (None, self.home):
            raise ConfigurationError(
                f"{what} has home={other.home!r}, but follows a job in that one's origin: give {self.name} the same "
                "home=, or leave it out there"
            )


def _key_of(origin: str | None) -> Callable[[], bytes | None]:
    """Of which key the origin is a partition's: the message's that is handled, where none is given."""
    return current_key if origin is None else lambda: None


@contextmanager
def _working_on(given: Any) -> Generator[None]:
    """What a handler is called with: a job, or a list of them; or something of a test's own that stands for one."""
    jobs = tuple(cast(list[Any], given)) if isinstance(given, list) else (given,)
    if not jobs or not all(isinstance(job, Job) for job in jobs):
        yield
        return
    token = current_work.set(jobs if isinstance(given, list) else given)
    try:
        yield
    finally:
        current_work.reset(token)


def _several(name: str, payloads: Iterable[P]) -> Iterable[P]:
    """Refuse a single payload: its letters, or fields, could pass for payloads. Raises `InvalidPayload`."""
    if isinstance(payloads, str | bytes | BaseModel) or not hasattr(payloads, "__iter__"):
        kind = type(payloads).__name__
        raise InvalidPayload(
            f"payloads= of {name!r} is a {kind}: give a list of payloads, or a single one to `enqueue`"
        )
    return payloads


def _policy(name: str, policy: object, group: object) -> int:
    if not isinstance(policy, str) or policy.upper() not in Policy.__members__:
        raise ConfigurationError(f"{name}: policy={policy!r}: give 'serial', 'latest' or 'parallel'")
    if policy != "serial" and group is None:
        raise ConfigurationError(f"{name}: policy={policy!r} needs group=: it says how the jobs of a group relate")
    return Policy[policy.upper()].value


def _check_batch(name: str, batch: int, transactional: bool, retry: Retry) -> None:
    if not isinstance(batch, int) or not 1 < batch <= _MAX_BATCH:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"{name}: batch={batch!r}: give 2 to {_MAX_BATCH}, or leave it out")
    if transactional:
        raise ConfigurationError(f"{name}: batch= and transactional=True exclude each other: leave one of them out")
    if retry.judges_results:
        raise ConfigurationError(
            f"{name}: batch= and a retry by result exclude each other: return errors instead, and give a strategy of "
            "your own, asked about errors only, as retry_all(retry_if_exception_type(Exception), own)"
        )

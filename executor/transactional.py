"""Handlers whose database effects and whose job's end commit together."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from uuid import UUID

import asyncpg
from asyncpg.transaction import Transaction as OpenTransaction

from ..errors import ConfigurationError, Fenced, PostgresUnavailable
from ..jobs import (
    SUCCEEDED,
    Again,
    Committed,
    Discard,
    ErrorInfo,
    Job,
    JobType,
    Outcome,
    OutcomeName,
    RetryAfter,
    Snooze,
    Transaction,
)
from ..jobs.middleware import Call, Middleware, call_through, completed
from ..jobs.retry import that_counts
from .clock import now
from .forks import end_if_forked, forks_so_far
from .link import BROKEN, IDLE_SECONDS, MOST_IDLE_SECONDS, connect, takes_no_writes
from .outages import Outages
from .queues import Entry, OriginQueue
from .settings import PostgresSettings
from .spare import Room, SpareConnections

__all__ = ["CLEAN", "Superseded", "Transactional"]

log = logging.getLogger("sidings.executor")

_SUPERSEDED, _OVER = "SD001", "SD002"
_AWAY_SECONDS = 1.0  # until a job is tried again that the server did not let begin or end
_DECIDED = (Discard, Snooze, RetryAfter)
_NO_END_YET = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError, asyncpg.InsufficientResourcesError)
# What its own statements may have brought about: one that failed and was caught, or a stricter isolation level.
_OF_HANDLER = (asyncpg.InFailedSQLTransactionError, asyncpg.TransactionRollbackError)
# What a handler has left in its session is not for the next one. DISCARD ALL would also forget the statements that
# asyncpg has prepared.
CLEAN = (
    "SET SESSION AUTHORIZATION DEFAULT; RESET ROLE; RESET ALL; CLOSE ALL; UNLISTEN *; SELECT pg_advisory_unlock_all(); "
    "DISCARD TEMP"
)


class Superseded(Fenced):
    """The database says so. A handler's own `Fenced`, say of a receiver elsewhere, is a failure like any other."""


class _Lost(Exception):
    """The connection was gone, or took no writes, before the transaction had its end, or that has had no answer:
    `__cause__` says more."""

    def __init__(self, started: float) -> None:
        super().__init__(f"the connection of the job's transaction was lost, {now() - started:.1f} s after its begin")


class _Rejected(Exception):
    """What the handler has returned, of which something else follows than a success."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("the policy rejects what the handler has returned")
        self.outcome = outcome


class _Guard:
    """Cuts a transaction's connection off shortly before the origin's deadline. As a rule the handler was cancelled
    before, but a rollback, ours or of a savepoint of its own, waits for a server that hangs, and the watchdog for
    nobody."""

    def __init__(self, connection: asyncpg.Connection, origin: OriginQueue, seconds: float) -> None:
        self.has_cut = False
        self._connection = connection
        self._origin = origin
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def _look(self) -> None:
        left = self._origin.deadline - self._seconds - now()
        if left <= 0:
            self.has_cut = True
            self._connection.terminate()
        else:  # renewals move the deadline
            self._timer = asyncio.get_running_loop().call_later(left, self._look)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Transactional:
    """Runs transactional handlers, each on a connection that it has to itself meanwhile.

    on_fenced: called with the origin whose lease turned out to be another's. on_committed: called after a commit that
    has stored jobs, with their ids by origin. abort_seconds: so long before the end of its lease a transaction is cut
    off, however long the server takes to answer.
    """

    def __init__(
        self,
        postgres: PostgresSettings,
        on_fenced: Callable[[str], None],
        on_committed: Callable[[Mapping[str, Sequence[int]]], None],
        abort_seconds: float = 0.0,
    ) -> None:
        self.executor_id: UUID | None = None
        self.middleware: Sequence[Middleware] = ()
        self._postgres = postgres
        self._on_fenced = on_fenced
        self._on_committed = on_committed
        self._abort_seconds = abort_seconds
        self.outages = Outages()
        self.connections = SpareConnections(self._connect)
        self.ending: set[Entry] = set()  # jobs whose ends are on their way, and may have committed
        self._room = Room()
        self._begun: set[asyncpg.Connection] = set()  # with an open transaction

    async def run(
        self,
        job_type: JobType[Any],
        job: Job[Any],
        entry: Entry,
        started: float,
        limit: Callable[[float | None], None],
        judge: Callable[[object], Outcome],
    ) -> Outcome | None:
        """One attempt. What the handler raises comes out after the rollback; a success is committed on return. None: it
        has not begun, and is not to.

        limit: told the seconds that the handler may take when it is called, None when it has ended. What the server
        takes before and after that has limits of its own, and is not the handler's failure. judge: what follows a
        handler that returned this; unless that is a success, its effects are rolled back.
        """
        if not await self._room.enter(entry.origin):
            return None
        try:
            try:
                connection, transaction = await self._begin(
                    min(max(job_type.timeout or 0.0, IDLE_SECONDS), MOST_IDLE_SECONDS)
                )
            except PostgresUnavailable as error:  # no failure of the handler's, which has not run
                log.debug("job %s %s does not start yet: %s", entry.id, entry.type, error)
                return Again(OutcomeName.SNOOZED, _AWAY_SECONDS, ErrorInfo.of(error), inconclusive=True)
            self._begun.add(connection)
            guard = _Guard(connection, entry.origin, self._abort_seconds)
            try:
                return await self._run(connection, transaction, job_type, job, entry, started, limit, judge)
            except BaseException as error:
                if not guard.has_cut:
                    if isinstance(error, _Lost):
                        return self._put_off(entry, error)
                    raise
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # for a reason that the worker knows
                    raise asyncio.CancelledError from error
                lost = PostgresUnavailable(f"the transaction was cut off before the lease of {entry.origin.name} ends")
                # No failure of the handler's.
                return Again(OutcomeName.SNOOZED, _AWAY_SECONDS, ErrorInfo.of(lost), inconclusive=True)
            finally:
                self._begun.discard(connection)
                guard.cancel()
        finally:
            self._room.leave()

    async def _run(
        self,
        connection: asyncpg.Connection,
        transaction: OpenTransaction,
        job_type: JobType[Any],
        job: Job[Any],
        entry: Entry,
        started: float,
        limit: Callable[[float | None], None],
        judge: Callable[[object], Outcome],
    ) -> Outcome:
        forks = forks_so_far()
        try:
            job.transaction = Transaction(connection)
            handler = partial(cast(Any, job_type.handler), job)
            limit(job_type.timeout)
            try:
                if self.middleware and job_type.wrapped:
                    call = Call(job_type.name, job.origin, jobs=[job], tx=job.transaction)
                    result = await call_through(self.middleware, call, handler, judged=job_type.judges_results)
                else:
                    result = await completed(await handler(), judged=job_type.judges_results)
                end_if_forked(forks)
                await job.transaction.flush()
                job.transaction.check_awaited()
            finally:
                limit(None)
                job.transaction.close()
            if not connection.is_closed() and not connection.is_in_transaction():  # the job's end would commit alone
                raise RuntimeError("a handler has ended the transaction: leave COMMIT and ROLLBACK to its job")
            if (outcome := judge(result)) is not SUCCEEDED:
                raise _Rejected(outcome)
        except BaseException as error:
            end_if_forked(forks, error)
            counts = that_counts(error)
            if isinstance(error, Exception) and not isinstance(counts, _DECIDED):
                tx = job.transaction
                if await takes_no_writes(connection, error, failed=tx is not None and (tx.failed or tx.lent)):
                    return self._read_only(connection, entry, error)
                if connection.is_closed() or isinstance(counts, asyncpg.ReadOnlySQLTransactionError):
                    connection.terminate()
                    raise _Lost(started) from error
            await self._undo(connection, transaction, job.transaction)
            if isinstance(error, _Rejected):
                return error.outcome
            raise
        self.ending.add(entry)
        try:
            return await self._finish(connection, transaction, job_type, job.transaction, entry, started)
        finally:
            self.ending.discard(entry)

    def _read_only(self, connection: asyncpg.Connection, entry: Entry, error: Exception) -> Outcome:
        """No failure of the handler's, however it tells of it: a primary has been demoted under its connections."""
        connection.terminate()
        self.forget_connections()
        away = PostgresUnavailable(f"Postgres takes no writes: {ErrorInfo.of(error).message}")
        log.warning("job %s %s runs again: %s", entry.id, entry.type, away)
        return Again(OutcomeName.SNOOZED, _AWAY_SECONDS, ErrorInfo.of(away))

    def _put_off(self, entry: Entry, lost: _Lost) -> Outcome:
        """No failure of the handler's: Postgres may have been restarted. Where it happens again and again it is one,
        for the retry policy."""
        error = PostgresUnavailable(f"{lost}: {lost.__cause__!r}")
        if self.outages.is_cause(entry):
            raise error from lost.__cause__
        log.warning("job %s %s runs again: %s", entry.id, entry.type, error)
        return Again(OutcomeName.SNOOZED, _AWAY_SECONDS, ErrorInfo.of(error))

    def close(self) -> None:
        """Close the idle connections."""
        self.connections.close()

    def forget_connections(self) -> None:
        """Those that wait for a job; see `SpareConnections.forget`."""
        self.connections.forget()

    def turn_away(self, queue: OriginQueue | None) -> None:
        """Jobs that wait for room now, of one origin or of all, do not begin."""
        self._room.turn_away(queue)

    def make_room(self) -> None:
        """The executor has had no answer. What was broken off does not count: the server was restarted."""
        self.forget_connections()
        if self._postgres.pgbouncer:
            self._room.lessen(sum(not connection.is_closed() for connection in self._begun))

    async def _connect(self) -> asyncpg.Connection:
        try:
            return await connect(self._postgres, for_handlers=True)
        except (asyncpg.PostgresError, ConfigurationError) as error:  # e.g. the password has been changed
            raise PostgresUnavailable(f"no connection to Postgres: {error!r}") from error

    async def _begin(self, idle_seconds: float) -> tuple[asyncpg.Connection, OpenTransaction]:
        """A connection, and the transaction that is open on it. Raises `PostgresUnavailable`."""
        connection = await self.connections.take()
        transaction = connection.transaction()
        try:
            async with asyncio.timeout(self._postgres.call_seconds):
                await transaction.start()
                # A paused client must not hold its locks for ever; PostgreSQL ends the transaction then.
                if self._postgres.pgbouncer or idle_seconds > IDLE_SECONDS:
                    limit = f"SET LOCAL idle_in_transaction_session_timeout = '{int(idle_seconds * 1000)}ms'"
                    await connection.execute(limit)
        except (*BROKEN, asyncpg.PostgresError) as error:  # it has been idle: it may have died silently since
            connection.terminate()
            raise PostgresUnavailable(f"no transaction could be begun: {error!r}") from error
        except BaseException:
            connection.terminate()
            raise
        return connection, transaction

    async def _undo(self, connection: asyncpg.Connection, transaction: OpenTransaction, tx: Transaction | None) -> None:
        """What the handler has left running may go on with asyncpg's own object, which then must lead nowhere."""
        if tx is not None and tx.lent:
            connection.terminate()
        else:
            await self._roll_back(connection, transaction)

    async def _roll_back(self, connection: asyncpg.Connection, transaction: OpenTransaction) -> None:
        if connection.is_closed() or not connection.is_in_transaction():  # after COMMIT, the handler's or ours
            connection.terminate()
            return
        if await self._answered(connection, connection.execute(f"ROLLBACK AND CHAIN; {CLEAN}")):
            await self._keep(connection, transaction)

    async def _keep(self, connection: asyncpg.Connection, transaction: OpenTransaction) -> None:
        """asyncpg's own object ends what is chained to the transaction, which is empty."""
        if await self._answered(connection, transaction.commit()):
            self.connections.keep(connection)

    async def _answered(self, connection: asyncpg.Connection, call: Awaitable[object]) -> bool:
        """Whether the server has; else the connection is gone, and what is open on it is rolled back."""
        try:
            async with asyncio.timeout(self._postgres.call_seconds):
                await call
        except (*BROKEN, asyncpg.PostgresError):
            connection.terminate()
            return False
        except BaseException:
            connection.terminate()
            raise
        return True

    async def _finish(
        self,
        connection: asyncpg.Connection,
        transaction: OpenTransaction,
        job_type: JobType[Any],
        tx: Transaction,
        entry: Entry,
        started: float,
    ) -> Outcome:
        """Fence, end the job, commit, in one message: from the fence on, the origin cannot be taken over before the
        transaction ends, which must not wait for a process that is paused, or for a slow network."""
        origin = entry.origin.name.replace("'", "''")
        timeline = "NULL" if entry.origin.timeline is None else f"'{entry.origin.timeline}'"
        finish = (
            f"RESET ROLE; SELECT {self._postgres.schema_name}.finish('{self.executor_id}', '{origin}', "
            f"{entry.origin.epoch}, {entry.id}, {entry.attempt}, {now() - started:.6f}, "
            f"{str(job_type.history).lower()}, {timeline}); COMMIT AND CHAIN; {CLEAN}"
        )
        try:
            async with asyncio.timeout(self._postgres.call_seconds):
                await connection.execute(finish)
        except BROKEN as error:
            read_only = isinstance(error, asyncpg.ReadOnlySQLTransactionError)
            if read_only and await takes_no_writes(connection, error, failed=True):
                return self._read_only(connection, entry, error)
            if isinstance(error, asyncpg.InterfaceError) and not connection.is_closed():
                connection.terminate()
                raise RuntimeError(f"a handler has to await all that it starts in its transaction: {error}") from error
            # It may have committed. If it has, the job is gone, and this outcome will match nothing.
            connection.terminate()
            raise _Lost(started) from error
        except asyncpg.PostgresError as error:
            ended = not connection.is_in_transaction()  # it is COMMIT that has failed, as of a deferred constraint
            await self._roll_back(connection, transaction)
            if error.sqlstate == _SUPERSEDED:
                self.forget_connections()  # this one may lead to a former primary, where all would be refused
                self._on_fenced(entry.origin.name)
                raise Superseded(str(error)) from error
            if error.sqlstate == _OVER:
                log.warning("job %s %s was ended by somebody else; its effects are rolled back", entry.id, entry.type)
                return Committed(OutcomeName.CANCELLED)
            if isinstance(error, _NO_END_YET):  # the handler has done its part
                log.warning("job %s %s cannot end yet, its effects are rolled back: %r", entry.id, entry.type, error)
                return Again(OutcomeName.SNOOZED, _AWAY_SECONDS, ErrorInfo.of(error))
            if ended or isinstance(error, _OF_HANDLER):
                raise
            told = f"Postgres refuses the end of the job: {ErrorInfo.of(error).message}"  # a right is missing, say
            raise PostgresUnavailable(told, blameless=True) from error
        except BaseException:
            connection.terminate()
            raise
        if tx.enqueued:
            self._on_committed(tx.enqueued)
        await self._keep(connection, transaction)
        return Committed()

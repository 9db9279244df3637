"""The database transaction of a consumer's handler, of a transactional job's, and of ``service.transaction()``."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import wraps
from inspect import CORO_CLOSED, CORO_CREATED, getcoroutinestate
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import asyncpg

from ..errors import NotInTransaction

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
else:
    Connection = asyncpg.Connection

__all__ = ["Added", "Connection", "Transaction", "is_closed", "note_jobs", "noted", "should_be_stored", "terminate"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

_GIVE_UP_SECONDS = 0.5  # that asyncpg may take to begin to cancel a statement
_UNDO_SECONDS = 2.0  # for a savepoint to be undone, before its connection is closed
_MOST_ADDED, _MOST_ADDED_BYTES = 1_000, 4 << 20
_SAVEPOINT = "SAVEPOINT sidings_"
# What says that a savepoint could not be undone. The last one is asyncpg 0.32's, as of a connection that broke.
_NOT_UNDONE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)  # and TimeoutError
_CALLS = 16  # remembered at least: one that is awaited ends before the next


def is_closed(connection: Connection) -> bool:
    """Whether the connection is gone; the pool takes one that broke back by itself, and it answers nothing any more."""
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        return True


def terminate(connection: Connection) -> None:
    """Close the connection without a word to the server. Also one that is closed: before asyncpg 0.32 the pool would
    never have its place back else."""
    with suppress(asyncpg.InterfaceError):  # it has it back
        connection.terminate()


def noted(method: F) -> F:
    """Decorates a coroutine method of `Transaction`, or one whose first argument, `tx`, may be one: it notes the call,
    and does not commit where that was not awaited."""

    @wraps(method)
    def call(self: object, *args: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        begun = method(self, *args, **options)
        tx = self if isinstance(self, Transaction) else args[0] if args else options.get("tx")
        if isinstance(tx, Transaction):
            tx._begun(begun, self)  # pyright: ignore[reportPrivateUsage]
        return begun

    told, since_312 = cast(Any, call), cast(Any, inspect)  # as a coroutine function, so that mocks of it are, too
    if hasattr(inspect, "markcoroutinefunction"):
        since_312.markcoroutinefunction(told)
    else:
        told._is_coroutine = cast(Any, asyncio.coroutines)._is_coroutine
    return told


def note_jobs(enqueued: dict[str, list[int]], origin: str, ids: Sequence[int]) -> None:
    """Note that jobs have been stored in an origin. Without ids its executor is to look for them; with ids it need not,
    so they are kept only while they are all that has been stored there."""
    known = enqueued.get(origin)
    if known is None or not ids:
        enqueued[origin] = [*ids]
    elif known:
        known += ids


def should_be_stored(count: int, size: int) -> bool:
    """Whether so many, of so many bytes, have been added that they are not to wait for the end of the transaction."""
    return count >= _MOST_ADDED or size >= _MOST_ADDED_BYTES


class Added(Protocol):
    """Jobs, or messages of one outbox, that have been added to a transaction and are not stored yet."""

    async def store(self, tx: "Transaction") -> None:
        """Store it all. After an error the transaction must not commit."""
        ...


class Transaction:
    """An open transaction; whoever opened it commits it.

    That is a consumer after its handler, a transactional job with its end, and ``service.transaction()`` at the end of
    its block. It has asyncpg's query methods, and `savepoint`. It does not commit where a call of these methods, or of
    `enqueue` or `publish` with it, was not awaited; nor where one was given up, by its timeout or by a cancellation,
    without a `savepoint` around it.

    What has been added to it (`JobType.add`, `Outbox.add`) is stored before it commits.

    `connection` is asyncpg's own object. A codec that is set on it stays for whoever has the connection next: where one
    handler needs it, let a middleware set it for all. Where somebody has taken `connection` and the transaction fails,
    the connection is closed.

    Args:
        connection: asyncpg's, with a transaction open. A test makes a `Transaction` of one.
        seconds: How long each call may take that gives no `timeout`. None: any time.
    """

    __slots__ = (
        "_calls",
        "_connection",
        "_depth",
        "_flushing",
        "_most_calls",
        "_seconds",
        "_unsure",
        "added",
        "enqueued",
        "failed",
        "holds",
        "lent",
        "published",
        "unstored",
    )

    def __init__(self, connection: Connection, seconds: float | None = None) -> None:
        self._connection: Connection | None = connection
        self._seconds = seconds
        self.enqueued: dict[str, list[int]] = {}  # for `Executor.committed`, once this has committed; see `note_jobs`
        self.added: dict[object, Any] = {}  # `Added`, by whom it belongs to; see `flush`
        self.holds = True  # whether what is added may wait; see `connection`
        self.unstored = False  # whether storing what was added has failed
        self._flushing = False
        self.published = False  # whether a relay should look for messages then
        self.lent = False  # whether somebody has `connection`
        self.failed = False  # whether a statement has: where nothing has been rolled back to, Postgres commits no more
        self._calls: list[tuple[Coroutine[Any, Any, Any], object]] = []
        self._most_calls = _CALLS
        self._depth = 0  # savepoints around
        self._unsure = False  # whether a call has failed, or was given up, that Postgres may have done, and that stands

    @property
    def connection(self) -> Connection:
        """asyncpg's own object.

        Its savepoints, and calls of it that were given up or not awaited, go unnoticed. What is added to the
        transaction from now on is stored at once: one of its savepoints may stand around that.

        Raises:
            NotInTransaction: The transaction has ended.
            RuntimeError: Something that has been added is not stored yet, as by the handler of another message: it
                might be stored, and undone, within a savepoint that is none of its own. Call ``await tx.flush()``
                first.
        """
        if self.added:
            raise RuntimeError(
                "what has been added to this transaction is not stored yet, and would be undone with a savepoint of "
                "its connection: call `await tx.flush()` before you take `tx.connection`"
            )
        self.lent, self.holds = True, False
        return self.opened()

    def opened(self) -> Connection:
        """As `connection`, for callers that hand it to nobody.

        Raises:
            NotInTransaction: The transaction has ended.
        """
        if self._connection is None:
            raise NotInTransaction(
                "this transaction is over: await all that is started in it inside of its `async with` block, or its "
                "handler. asyncio.gather goes on with the others when one has failed; asyncio.TaskGroup cancels them"
            )
        return self._connection

    def close(self) -> None:
        """End the use of this object, just before the transaction ends.

        What a block or handler has left behind must neither commit by itself then, nor reach the transaction of whoever
        has the connection next.
        """
        self._connection = None

    def _begun(self, call: Coroutine[Any, Any, Any], of: object) -> None:
        """Remember a call of `of` until it has ended, for `check_awaited`."""
        if len(self._calls) >= self._most_calls:
            self._calls = [each for each in self._calls if getcoroutinestate(each[0]) != CORO_CLOSED]
            self._most_calls = _CALLS + 2 * len(self._calls)
        self._calls.append((call, of))

    def check_awaited(self) -> None:
        """Make sure that all calls have ended; to be called before the commit.

        Raises:
            RuntimeError: A call has not ended, as without its ``await``: what it should have stored would be missing,
                without a word.
            asyncpg.InFailedSQLTransactionError: A call was given up, by a timeout say, or has failed, that Postgres may
                have done all the same: it would commit, against its caller's belief.
        """
        for call, of in self._calls:
            state = getcoroutinestate(call)
            if state == CORO_CLOSED:
                continue
            name = f"{'tx' if of is self else getattr(of, 'name', type(of).__name__.lower())}.{call.__name__}"
            if state == CORO_CREATED:
                call.close()
                raise RuntimeError(f"{name}() was called and not awaited, so nothing is done: `await {name}(...)`")
            raise RuntimeError(f"{name}() is still under way: await all that is started in a transaction")
        self._calls.clear()  # a consumer asks after each of a batch's messages
        if self._unsure:
            raise asyncpg.InFailedSQLTransactionError(
                "something in this transaction was cancelled, timed out, or could not be undone, so nobody knows "
                "whether it was done: let the error out of the block, or put `async with tx.savepoint()` around what "
                "may be given up, and await all that is started in it"
            )

    @noted
    async def flush(self) -> None:
        """Store what has been added. Whoever opened the transaction calls it before the commit: so does a test that
        looks for what its code has added.

        Raises:
            MissingOrigin: The partitions of a job type's `home` are not known. After this error, as after any other,
                nothing commits.
        """
        if self._flushing:  # who does so takes along what has come meanwhile
            return
        self._flushing = True
        try:
            while self.added:
                added, self.added = self.added, {}
                for each in added.values():
                    await each.store(self)
        except BaseException:
            self._unsure = self.unstored = True
            raise
        finally:
            self._flushing = False

    @asynccontextmanager
    async def savepoint(self) -> AsyncGenerator[None]:
        """A block that is undone as a whole where it raises; what stands around it stays::

            async with tx.savepoint():
                await tx.execute("INSERT INTO ...", timeout=2)

        While something in it is under way, it cannot be undone: then nothing commits. Where it is not undone within two
        seconds, as on a silent network, the connection is closed. Use it instead of asyncpg's own savepoints, through
        `connection`: with those, a transaction that fails costs its connection, since whoever has that object may
        still use it.
        """
        await self.flush()
        self._depth += 1
        name, unsure, unstored = f"sidings_{self._depth}", self._unsure, self.unstored
        try:  # each of these may be cancelled, and Postgres do it all the same
            await self.execute(f"{_SAVEPOINT}{self._depth}")
            yield
            await self.flush()
            await self.execute(f"RELEASE SAVEPOINT {name}")
        except BaseException as error:
            self.added = {}
            self._unsure = True  # until it is undone, which it is not while something in it is still under way
            try:
                await self._undo(name)
                self._unsure, self.unstored = unsure, unstored
            except asyncpg.InvalidSavepointSpecificationError:
                pass  # not there: then nothing commits any more
            except _NOT_UNDONE:
                if isinstance(error, Exception):
                    raise
            raise  # a cancellation is its caller's, who makes a timeout of it
        finally:
            self._depth -= 1

    async def _undo(self, name: str) -> None:
        """Roll back to a savepoint; where that is not quick, let the server find out by itself."""
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)
        try:
            # A limit of asyncpg's own is none, before 0.32: it first waits for the answer to what was cancelled, be the
            # connection closed. In two steps, as `_Guard`: where the event loop stood still, what has come is read.
            async with limit:
                late = loop.call_later(_UNDO_SECONDS, lambda: limit.reschedule(loop.time() + _GIVE_UP_SECONDS))
                try:
                    await self.execute(f"ROLLBACK TO SAVEPOINT {name}; RELEASE SAVEPOINT {name}")
                finally:
                    late.cancel()
        except TimeoutError:
            if self._connection is not None:  # else it may be the next one's by now
                terminate(self._connection)
            raise

    def is_in_transaction(self) -> bool:
        """Whether the connection's transaction is open."""
        return self.opened().is_in_transaction()

    @noted
    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        """Run `query` and return Postgres' command tag. `timeout` is in seconds."""
        if query[:9].upper() == "SAVEPOINT" and not query.startswith(_SAVEPOINT):  # none of ours: see `connection`
            await self.flush()
            self.holds = False
        return await self._noting(self.opened().execute(query, *args, timeout=timeout), timeout)

    @noted
    async def executemany(self, query: str, args: Iterable[Any], *, timeout: float | None = None) -> None:
        """Run `query` once for each sequence of arguments. `timeout` is in seconds."""
        connection, loop = self.opened(), asyncio.get_running_loop()

        def broken(_: object) -> None:  # asyncpg waits on until it takes more
            loop.call_soon(sending.cancel)  # where it waits for the answer, it has an error by then

        connection.add_termination_listener(broken)
        sending = asyncio.ensure_future(self._noting(connection.executemany(query, args, timeout=timeout), timeout))
        try:
            await asyncio.wait([sending])
            sending.result()
        except BaseException as error:
            # asyncpg sends many before it looks at the next ones, and what it refuses is a DataError, too.
            self._unsure |= getattr(error, "severity", None) is None  # not from Postgres
            if sending.cancel():
                sending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                try:
                    await asyncio.wait([sending], timeout=_GIVE_UP_SECONDS)
                finally:
                    if sending.cancel():  # while it sends, asyncpg forgets one, and waits for the answer to a part
                        try:
                            await asyncio.sleep(_GIVE_UP_SECONDS)  # Postgres is told: nothing else ends its waiting
                        finally:
                            terminate(connection)
            raise
        finally:
            with suppress(asyncpg.InterfaceError):  # the pool has it back
                connection.remove_termination_listener(broken)

    @noted
    async def fetch(self, query: str, *args: Any, timeout: float | None = None) -> list[asyncpg.Record]:
        """Run `query` and return all rows. `timeout` is in seconds."""
        return await self._noting(self.opened().fetch(query, *args, timeout=timeout), timeout)

    @noted
    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None) -> asyncpg.Record | None:
        """Run `query` and return its first row, or None. `timeout` is in seconds."""
        return await self._noting(self.opened().fetchrow(query, *args, timeout=timeout), timeout)

    @noted
    async def fetchval(self, query: str, *args: Any, column: int = 0, timeout: float | None = None) -> Any:
        """Run `query` and return one value of its first row, or None. `timeout` is in seconds."""
        call = self.opened().fetchval(query, *args, column=column, timeout=timeout)
        return await self._noting(call, timeout)

    async def _noting(self, statement: Awaitable[T], timeout: float | None) -> T:
        seconds, guard = self._seconds if timeout is None else timeout, None
        try:
            if seconds is not None:
                guard = _Guard(self.opened(), float(seconds))
            return await statement
        except BaseException as error:  # also its caller's timeout, or cancellation, which ends the statement
            self.failed = True
            # Postgres knows of its own errors, and what asyncpg refuses is not sent. But it may not read the answer.
            self._unsure |= not isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError)
            if isinstance(error, asyncpg.InterfaceError) and "another operation is in progress" in str(error):
                raise asyncpg.InterfaceError(
                    "another operation of this transaction is in progress: await each before the next one begins; what "
                    "is to run at once (asyncio.gather, tasks) needs a transaction of its own"
                ) from error
            raise
        finally:
            if guard is not None:
                guard.cancel()


class _Guard:
    """Cuts a connection off over which no answer has come in time. asyncpg's own limit is not one of all: that it keeps
    another statement no more it tells the server when the next one has been prepared, and waits for the answer however
    long. A timer alone: `asyncio.timeout` would cost each statement some 20 µs."""

    __slots__ = ("_connection", "_loop", "_timer")

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._wait)

    def _wait(self) -> None:  # asyncpg gives up now; and where the event loop stood still, what has come is to be read
        self._timer = self._loop.call_later(_GIVE_UP_SECONDS, terminate, self._connection)

    def cancel(self) -> None:
        self._timer.cancel()

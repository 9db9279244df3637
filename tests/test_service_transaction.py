"""`service.transaction()`: what becomes of its connection when the block is over."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import Context
from typing import Any

import asyncpg
import psycopg
import pytest
from sidings import Message, NotInTransaction, PostgresUnavailable, Transaction
from sidings.executor import PostgresSettings
from sidings.jobs import Job, Registry
from sidings.jobs.transaction import is_closed
from sidings.kafka import Outbox, Transactions

from .consumer_support import TWICE_AND_PARK, Number, a_service, impatient, offset_reaches, produce
from .faulty_proxy import KINDS, Moment, proxied
from .support import ORIGIN, SECONDS, Ride, connected, eventually, fetch


def transactions(database: str) -> Transactions:
    return Transactions(PostgresSettings(dsn=database, pool_size=1), lambda jobs: None)


async def test_a_connection_is_clean_before_anybody_else_gets_it(database: str) -> None:
    pool = transactions(database)
    await pool.start()
    async with pool.open() as tx:
        backend = await tx.fetchval("SELECT pg_backend_pid()")
        before = await tx.fetchval("SHOW work_mem")
        await tx.execute("SET work_mem = '1234kB'")
        await tx.fetchval("SELECT pg_advisory_lock(7)")
        await tx.execute("LISTEN something")
        await tx.execute("DECLARE kept CURSOR WITH HOLD FOR SELECT 1")
        await tx.execute("CREATE TEMP TABLE kept (); SET ROLE pg_monitor")
    async with pool.open() as tx:  # at once: the only connection of the pool
        assert await tx.fetchval("SELECT pg_backend_pid()") == backend
        assert await tx.fetchval("SHOW work_mem") == before
        assert await tx.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
        assert await tx.fetchval("SELECT count(*) FROM pg_listening_channels()") == 0
        assert await tx.fetchval("SELECT count(*) FROM pg_cursors WHERE is_holdable") == 0
        assert await tx.fetchval("SELECT current_user = session_user")
        assert await tx.fetchval("SELECT to_regclass('kept')") is None
    await pool.stop()


async def test_a_connection_that_could_not_be_cleaned_is_nobody_elses(database: str, monkeypatch) -> None:
    """It would have the role that a block has taken, and its temporary tables."""
    pool = transactions(database)
    await pool.start()
    async with pool.open() as tx:
        backend = await tx.fetchval("SELECT pg_backend_pid()")
        monkeypatch.setattr("sidings.kafka.transactions.CLEAN", "SELECT 1 / 0")
    monkeypatch.undo()
    async with pool.open() as tx:
        assert await tx.fetchval("SELECT pg_backend_pid()") != backend
    await pool.stop()


async def test_want_of_a_thread_to_look_up_the_server_is_no_failure_of_a_handlers(database: str) -> None:
    """As at a container's limit: messages whose handler had never run were parked."""
    pool = transactions(database.replace("127.0.0.1", "localhost"))
    await pool.start()
    before = threading.stack_size()
    try:
        threading.stack_size(1 << 46)  # more than there is: so no thread can be started
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())  # the former may have one
        with pytest.raises(PostgresUnavailable, match="can't start new thread") as raised:
            async with pool.open():
                pass
    finally:
        threading.stack_size(before)
    assert raised.value.blameless
    async with pool.open() as tx:  # its place in the pool is free again
        assert await tx.fetchval("SELECT 1") == 1
    await pool.stop()


@pytest.mark.parametrize("how", ["as all", "with a limit, as a consumer's own", "many"])
async def test_a_statement_is_given_up_in_time_where_the_end_of_another_is_not_answered(
    database: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """asyncpg keeps a hundred prepared statements, each for five minutes. That it keeps one no more it told the server
    after the next one was prepared, and waited for the answer, for ever."""
    limit = 0.5 if "limit" in how else None
    if limit is None:
        monkeypatch.setattr("sidings.kafka.transactions._COMMAND_SECONDS", 0.5)
    async with proxied(database) as proxy:
        pool, fault = transactions(proxy.dsn), proxy.arm("close", Moment.SILENT_BEFORE)
        await pool.start()

        async def work() -> None:
            async with pool.open() as tx:
                for number in range(200):
                    query = f"SELECT {number}, $1::text"
                    await (tx.executemany(query, [("a",)]) if how == "many" else tx.fetch(query, "a", timeout=limit))

        working = asyncio.create_task(work())
        await asyncio.wait([working], timeout=12)
        assert working.done()
        assert isinstance(working.exception(), TimeoutError | PostgresUnavailable)
        assert fault.hits == 1
        async with pool.open() as tx:
            assert await tx.fetchval("SELECT true")
        await pool.stop()


async def test_a_block_that_has_another_in_it_has_its_place_until_its_own_end(database: str) -> None:
    """What finds no place then is told so, and has failed; of a task whose block has ended nothing is kept."""
    pool = Transactions(PostgresSettings(dsn=database, pool_size=2), lambda jobs: None)
    taken, over = asyncio.Event(), asyncio.Event()

    async def take() -> None:
        async with pool.shared():
            taken.set()
            await over.wait()

    await pool.start()
    async with pool.shared():
        async with pool.shared():
            pass
        other = asyncio.create_task(take(), context=Context())
        await asyncio.wait_for(taken.wait(), SECONDS)
        with impatient(pool):
            refused = await refusal_of(pool)
        assert "one by the block that this one is in" in str(refused)
        assert not refused.blameless
        over.set()
        await other
    async with everything_taken(pool):
        assert (await refusal_of(pool)).blameless
    await pool.stop()


async def test_what_was_begun_in_a_block_is_in_it_until_its_end(database: str) -> None:
    """Also where the task of another service's block has begun it, or its own has had a block meanwhile."""
    pool, other = transactions(database), transactions(database)
    ended, asked = asyncio.Event(), asyncio.Event()

    async def ask() -> tuple[bool, bool]:
        within = await refusal_of(pool)
        asked.set()
        await ended.wait()
        async with pool.shared():
            pass
        async with everything_taken(pool):
            return within.blameless, (await refusal_of(pool)).blameless

    await pool.start()
    await other.start()
    async with pool.shared() as tx:
        await tx.execute("SELECT")
        async with other.shared():
            pass
        async with other.shared():
            with impatient(pool):
                asking = asyncio.create_task(ask())
                await asyncio.wait_for(asked.wait(), SECONDS)
    ended.set()
    assert await asking == (False, True)
    async with other.shared(), everything_taken(pool):
        assert (await refusal_of(pool)).blameless
    await pool.stop()
    await other.stop()


async def refusal_of(pool: Transactions) -> PostgresUnavailable:
    """What a block says that finds no place."""
    with pytest.raises(PostgresUnavailable, match="connections are in use") as refused:
        async with pool.shared():
            pass
    return refused.value


@asynccontextmanager
async def everything_taken(pool: Transactions) -> AsyncGenerator[None]:
    """By somebody else, until the block's end."""
    taken, over = asyncio.Event(), asyncio.Event()

    async def take() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(pool.settings.pool_size):
                await stack.enter_async_context(pool.shared())
            taken.set()
            await over.wait()

    taking = asyncio.create_task(take(), context=Context())
    await asyncio.wait_for(taken.wait(), SECONDS)
    try:
        with impatient(pool):
            yield
    finally:
        over.set()
        await taking


async def test_a_cancelled_caller_gives_its_connection_back(database: str) -> None:
    pool = transactions(database)
    await pool.start()
    inside = asyncio.Event()

    async def work() -> None:
        async with pool.open() as tx:
            await tx.fetchval("SELECT pg_advisory_lock(7)")
            inside.set()
            await asyncio.sleep(SECONDS)

    caller = asyncio.create_task(work())
    await inside.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    async with pool.open() as tx:
        assert await tx.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    await pool.stop()


async def test_others_are_told_of_what_has_been_committed_and_of_nothing_else(database: str) -> None:
    told: list[object] = []
    registry, settings = Registry(), PostgresSettings(dsn=database)

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    pool, outbox = Transactions(settings, lambda jobs: told.append(dict(jobs))), Outbox(settings)
    pool.on_published = lambda: told.append("published")
    await pool.start()
    async with pool.open() as tx:
        await tx.execute("CREATE TABLE late (n int CONSTRAINT once UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    assert told == []
    for numbers in ("(1), (1)", "(1)"):  # the first is refused by the commit itself
        try:
            async with pool.open() as tx:
                id = await ride.enqueue(tx, Ride(), origin=ORIGIN)
                await outbox.publish(tx, "etas", key="k", value=b"v")
                await tx.execute(f"INSERT INTO late VALUES {numbers}")
                assert told == []
        except asyncpg.UniqueViolationError:
            assert numbers == "(1), (1)"
    assert told == [{ORIGIN: [id]}, "published"]
    await pool.stop()
    await outbox.close()


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
async def test_a_block_that_ends_its_transaction_itself_has_failed(database: str, ending: str) -> None:
    """As a helper may that was given the connection. It ended well: behind a ROLLBACK the job was gone without a word,
    and the executor was told of it; behind a COMMIT nothing stood or fell with the block any more."""
    told, registry = [], Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    pool = Transactions(PostgresSettings(dsn=database, pool_size=1), told.append)
    await pool.start()

    async def work() -> None:
        async with pool.open() as tx:
            await ride.enqueue(tx, Ride(), origin=ORIGIN)
            await tx.connection.execute(ending)

    with pytest.raises(RuntimeError, match="leave COMMIT and ROLLBACK to its end"):
        await work()
    assert told == []
    async with pool.open() as tx:  # the connection serves others
        await ride.enqueue(tx, Ride(), origin=ORIGIN)
    assert len(told) == 1
    await pool.stop()


@pytest.mark.parametrize(("fails", "lent"), [(True, False), (True, True), (False, False)])
async def test_what_a_block_has_left_running_commits_nothing_by_itself(database: str, fails: bool, lent: bool) -> None:
    """asyncio.gather goes on with the others when one has failed. What they wrote between the transaction's end and the
    moment in which the pool had its connection back was committed at once, also where the block was rolled back."""
    pool, ending = transactions(database), asyncio.Event()
    left: list[asyncio.Task[str]] = []
    await pool.start()
    async with pool.open() as tx:
        await tx.execute("CREATE TABLE late (what text)")

    async def late(tx: Transaction) -> str:
        through = tx.connection if lent else tx
        await ending.wait()
        for _ in range(5):  # until the end has been sent
            await asyncio.sleep(0)
        while True:
            try:
                await through.execute("INSERT INTO late VALUES ('late')")
            except (
                *(NotInTransaction, asyncpg.InterfaceError, AttributeError),
                asyncpg.ConnectionDoesNotExistError,  # closed amid its statement
            ) as error:
                if "another operation" not in str(error):
                    return str(error)
            await asyncio.sleep(0)

    async def fail() -> None:
        ending.set()
        raise ValueError("the carrier does not answer")

    async def work() -> None:
        async with pool.open() as tx:
            left.append(asyncio.create_task(late(tx)))
            await tx.execute("INSERT INTO late VALUES ('block')")
            if fails:
                await asyncio.gather(left[-1], fail())
            ending.set()

    for _ in range(5):
        ending.clear()
        with suppress(ValueError):
            await work()
    async with asyncio.timeout(SECONDS):
        told = await asyncio.gather(*left)
    assert [row["what"] for row in await fetch(database, "SELECT what FROM late")] == ([] if fails else ["block"] * 5)
    assert lent or all("this transaction is over" in each for each in told)
    async with pool.open() as tx:  # the pool has its place back
        assert await tx.fetchval("SELECT 1") == 1
    await pool.stop()


async def test_a_transaction_that_is_used_twice_at_once_is_told_of_with_what_to_do(database: str) -> None:
    """It was asyncpg's "another operation is in progress"; and where the other one had been started through
    `tx.connection`, an outage of Postgres, for which a job's handler was called again without having failed."""
    pool = transactions(database)
    await pool.start()

    async def twice() -> None:
        async with pool.open() as tx:
            await asyncio.gather(tx.execute("SELECT pg_sleep(5)"), tx.execute("SELECT 2"))

    async def left() -> None:
        async with pool.open() as tx:
            started.append(asyncio.create_task(tx.connection.execute("SELECT pg_sleep(5)")))
            await asyncio.sleep(0)  # it has been sent

    started: list[asyncio.Task[str]] = []
    with pytest.raises(asyncpg.InterfaceError, match="await each before the next one begins"):
        await twice()
    with pytest.raises(RuntimeError, match=r"await all that is started in a transaction: .* in progress"):
        await left()
    await asyncio.gather(*started, return_exceptions=True)
    async with pool.open() as tx:
        assert await tx.fetchval("SELECT 1") == 1
    await pool.stop()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_connection_that_the_server_closes_just_after_the_end_changes_nothing_of_that(
    database: str, fails: bool
) -> None:
    """As at a restart: the server's last word came with the answer to the COMMIT, and who had committed was told of an
    error of asyncpg's own, which came of the connection on its way back to the pool."""
    pool, loop = transactions(database), asyncio.get_running_loop()
    await pool.start()
    async with pool.open() as tx:
        await tx.execute("CREATE TABLE done (n int)")

    def close(backend: int) -> None:
        time.sleep(0.3)  # the answer is on its way; it is read together with what follows
        with psycopg.connect(database, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (backend,))

    async def work() -> None:
        async with pool.open() as tx:
            await tx.execute("INSERT INTO done VALUES (1)")
            loop.call_soon(close, await tx.fetchval("SELECT pg_backend_pid()"))
            if fails:
                raise KeyError

    for _ in range(3):
        try:
            await work()
        except KeyError:
            assert fails
    async with pool.open() as tx:
        assert await tx.fetchval("SELECT count(*) FROM done") == (0 if fails else 3)
    await pool.stop()


async def test_a_block_that_has_failed_holds_no_lock_any_more(database: str) -> None:
    """Also where it has taken `tx.connection`, as for a savepoint, so that it is closed: who tried again at once
    could find the row locked, by nobody."""
    pool = transactions(database)
    await pool.start()
    async with pool.open() as tx:
        await tx.execute("CREATE TABLE wagon (id integer); INSERT INTO wagon VALUES (1)")
    async with connected(database) as other:
        for _ in range(50):
            with suppress(ValueError):
                async with pool.open() as tx:
                    async with tx.connection.transaction():
                        await tx.execute("UPDATE wagon SET id = 2")
                    raise ValueError("the carrier does not answer")
            assert await other.fetchval("SELECT id FROM wagon FOR UPDATE NOWAIT") == 1
    await pool.stop()


async def test_savepoints_within_savepoints_are_undone_by_themselves_and_cost_no_connection(database: str) -> None:
    """Through `tx.connection` each that was followed by a failure closed it: a thousand requests that ended in one at
    once were told that Postgres had no connection."""
    pool = transactions(database)
    await pool.start()
    backends = set[int]()

    async def insert(tx: Transaction, number: int) -> None:
        await tx.execute("INSERT INTO wagon VALUES ($1)", number)

    async with pool.open() as tx:
        await tx.execute("CREATE TABLE wagon (id integer PRIMARY KEY)")
        async with tx.savepoint():
            await insert(tx, 1)
            with suppress(asyncpg.UniqueViolationError):
                async with tx.savepoint():
                    await insert(tx, 2)
                    await insert(tx, 1)
            async with tx.savepoint():
                await insert(tx, 3)
            with suppress(ValueError):
                async with tx.savepoint():
                    await insert(tx, 5)
                    raise ValueError("the carrier does not answer")
        await insert(tx, 6)
    for _ in range(5):
        with suppress(ValueError):
            async with pool.open() as tx:
                backends.add(await tx.fetchval("SELECT pg_backend_pid()"))
                async with tx.savepoint():
                    await insert(tx, 7)
                raise ValueError("the carrier does not answer")
    assert [row["id"] for row in await fetch(database, "SELECT id FROM wagon ORDER BY id")] == [1, 3, 6]
    assert len(backends) == 1
    await pool.stop()


@pytest.mark.parametrize("silent", ["SELECT 'a handler asks'", "SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO"])
async def test_who_gives_a_savepoint_up_on_a_silent_connection_is_told_so_soon(
    database: str, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """It waited a minute to be undone, and its caller's timeout became an error of the connection's."""
    monkeypatch.setitem(KINDS, "silent", re.compile(f"^{silent}"))
    async with proxied(database) as proxy:
        pool, fault = transactions(proxy.dsn), proxy.arm("silent", Moment.SILENT_BEFORE)
        await pool.start()

        async def work() -> None:
            async with asyncio.timeout(None) as limit, pool.open() as tx:
                limit.reschedule(asyncio.get_running_loop().time() + 0.5)
                async with tx.savepoint(), tx.savepoint():
                    await tx.fetchval("SELECT 'a handler asks'")
                    if silent == "ROLLBACK TO":
                        await tx.fetchval("SELECT pg_sleep(30)")

        working = asyncio.create_task(work())
        await asyncio.wait([working], timeout=12)
        assert working.done()
        assert type(working.exception()) is TimeoutError
        assert fault.hits == 1
        async with pool.open() as tx:
            assert await tx.fetchval("SELECT true")
        await pool.stop()


async def test_a_savepoint_is_undone_although_the_event_loop_stands_still_meanwhile(database: str, monkeypatch) -> None:
    """The answer had come, and was thrown away with the connection, and so with the whole transaction."""
    pool, execute, blocked = transactions(database), asyncpg.Connection.execute, list[int]()

    def stand_still(backend: int) -> None:
        os.kill(backend, signal.SIGCONT)
        time.sleep(2.2)
        blocked.append(backend)

    async def send(self: asyncpg.Connection, query: str, *args: object, **options: Any) -> str:
        if query.startswith("ROLLBACK TO"):
            os.kill(backend, signal.SIGSTOP)  # so that no answer comes before
            asyncio.get_running_loop().call_soon(stand_still, backend)
        return await execute(self, query, *args, **options)

    await pool.start()
    monkeypatch.setattr(asyncpg.Connection, "execute", send)
    async with pool.open() as tx:
        backend = await tx.fetchval("SELECT pg_backend_pid()")
        await tx.execute("CREATE TABLE wagon (id integer)")
        await tx.execute("INSERT INTO wagon VALUES (1)")
        with suppress(ValueError):
            async with tx.savepoint():
                await tx.execute("INSERT INTO wagon VALUES (2)")
                raise ValueError("the carrier does not answer")
        assert blocked == [backend]
    async with pool.open() as tx:
        assert await tx.fetchval("SELECT pg_backend_pid()") == backend
        assert await tx.fetchval("SELECT array_agg(id) FROM wagon") == [1]
    await pool.stop()


@pytest.mark.parametrize("asked", [True, False], ids=["by a statement", "by the commit"])
async def test_a_connection_that_is_closed_by_then_is_told_of_as_what_it_is(database: str, asked: bool) -> None:
    """asyncpg refuses to begin a ROLLBACK or COMMIT on it, with an error of its own that hid the other."""
    pool = transactions(database)
    await pool.start()

    async def work() -> None:
        async with pool.open() as tx:
            await fetch(database, f"SELECT pg_terminate_backend({await tx.fetchval('SELECT pg_backend_pid()')})")
            await eventually(lambda: is_closed(tx.connection))
            if asked:
                await tx.fetchval("SELECT 1")

    with pytest.raises(PostgresUnavailable):
        await work()
    async with pool.open() as tx:
        assert await tx.fetchval("SELECT 1") == 1
    await pool.stop()


@pytest.mark.parametrize("seconds", [0.0, 0.02], ids=["just then", "before"])
async def test_what_is_stored_on_a_connection_that_the_server_closes_says_that_it_broke(
    database: str, seconds: float
) -> None:
    """It said that there was no transaction; or, where the server's last word had just come, an error of asyncpg's."""
    registry, pool = Registry(), transactions(database)

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async def work(other: asyncpg.Connection) -> None:
        async with pool.open() as tx:
            backend = await tx.fetchval("SELECT pg_backend_pid()")
            await other.execute(f"SELECT pg_terminate_backend({backend})")
            await asyncio.sleep(seconds)
            await ride.enqueue(tx, Ride(), origin=ORIGIN)

    await pool.start()
    async with connected(database) as other:
        for _ in range(10):
            with pytest.raises(PostgresUnavailable, match="the connection to Postgres broke"):
                await work(other)
    await pool.stop()


@pytest.mark.parametrize("fails", [False, True], ids=["in the main line", "aside"])
async def test_callers_that_hang_take_no_connection_of_the_consumers(effects, topic, sidings_kafka, fails):
    """Requests that wait for a locked row had all of the pool, each that ended was followed by the next, and no message
    of any topic was handled meanwhile."""
    name = await topic(partitions=3)
    settings = PostgresSettings(dsn=effects, pool_size=2, connect_seconds=1)
    service = a_service(settings, sidings_kafka)
    handled: list[tuple[int, int]] = []
    failed = set[int]()
    refusals = set[str]()

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def on_number(message: Message[Number], tx: Transaction) -> None:
        if fails and message.partition not in failed:
            failed.add(message.partition)
            raise ValueError("x")
        handled.append((message.partition, message.value.n))

    async with service:
        await eventually(lambda: not service.problems())
        ended = asyncio.Event()

        async def hang() -> None:
            while not ended.is_set():
                try:
                    async with service.transaction() as tx:
                        await tx.fetchval("SELECT 1")
                        await ended.wait()
                except PostgresUnavailable as error:
                    refusals.add(str(error))

        callers = [asyncio.create_task(hang()) for _ in range(12)]
        try:
            await eventually(lambda: bool(refusals), "the callers have all that they can")
            for partition in (0, 1, 2):
                await produce(sidings_kafka, name, [partition], partition=partition)
                await eventually(offset_reaches(effects, name, 1, partition))
            assert sorted(handled) == [(n, n) for n in (0, 1, 2)]
        finally:
            ended.set()
            await asyncio.gather(*callers)
    assert refusals == {"no connection to Postgres: all 2 connections are in use; see pool_size"}


async def test_a_handler_may_take_longer_than_postgres_can_say(effects, topic, sidings_kafka):
    """Every connection of the consumers' pool was refused, for ever, and told as an outage of Postgres."""
    name, seen = await topic(), list[str]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, timeout=30 * 86_400)
    async def on_number(message: Message[Number], tx: Transaction) -> None:
        seen.append(await tx.fetchval("SHOW idle_in_transaction_session_timeout"))

    async with service:
        async with service.transaction() as tx:
            assert await tx.fetchval("SHOW idle_in_transaction_session_timeout") == "2147483s"
        await produce(sidings_kafka, name, [1])
        await eventually(offset_reaches(effects, name, 1))
    assert seen == ["2147483s"]


@pytest.mark.parametrize(
    ("timeouts", "expected"),
    [([], 30.0), ([1.0], 30.0), ([1.0, 60.0], 65.5), ([60.0, 1e300], 2_147_483.0), ([1e300, None], None)],
)
def test_a_transaction_may_be_silent_as_long_as_the_slowest_handler_may_take(
    timeouts: list[float | None], expected: float | None
) -> None:
    service = a_service("postgresql://localhost/x", "localhost:1")
    for number, timeout in enumerate(timeouts):
        service.consumer(f"t{number}", timeout=timeout)(on_message)
    assert service._subscriptions.idle_seconds(0.5) == expected


async def on_message(message: Message[object], tx: Transaction) -> None: ...


async def test_messages_that_stand_aside_do_not_take_the_only_place_of_their_own_handlers(
    effects, topic, sidings_kafka
):
    """One waited for what it had itself, failed for that alone, and was parked."""
    name = await topic(partitions=2)
    service = a_service(PostgresSettings(dsn=effects, pool_size=1), sidings_kafka)
    failed, ended = set[int](), asyncio.Event()
    refusals: list[PostgresUnavailable] = []
    handled: list[int] = []

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def on_number(message: Message[Number], tx: Transaction) -> None:
        if message.partition not in failed:
            failed.add(message.partition)
            raise ValueError("x")
        if message.partition == 0:
            await ended.wait()
        try:
            async with service.transaction() as other:
                await other.fetchval("SELECT 1")
        except PostgresUnavailable as error:
            refusals.append(error)
            raise
        handled.append(message.partition)

    async with service:
        await eventually(lambda: not service.problems())
        await produce(sidings_kafka, name, [1], partition=0)
        await eventually(lambda: 0 in failed)
        await produce(sidings_kafka, name, [1], partition=1)
        await eventually(lambda: handled == [1], lambda: (handled, refusals))
        ended.set()
        for partition in (0, 1):
            await eventually(offset_reaches(effects, name, 1, partition))
    assert (handled, refusals) == ([1, 0], [])

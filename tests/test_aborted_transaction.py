"""`service.transaction()` in which a statement has failed: Postgres answers its COMMIT with ROLLBACK, and no error."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress

import asyncpg
import psycopg
import pytest
from sidings import PostgresUnavailable
from sidings.executor import PostgresSettings
from sidings.jobs import Job, Registry, Transaction
from sidings.kafka import Transactions

from .outbox_support import never_retrieved
from .support import ORIGIN, SECONDS, Ride, connected, eventually, fetch, value

registry = Registry()


@registry.job()
async def ride(job: Job[Ride]) -> None: ...


@asynccontextmanager
async def a_pool(database: str, told: list[object]) -> AsyncIterator[Transactions]:
    pool = Transactions(PostgresSettings(dsn=database, pool_size=1), told.append)
    await pool.start()
    async with pool.open() as tx:
        await tx.execute("CREATE TABLE once (n int PRIMARY KEY); INSERT INTO once VALUES (1)")
    yield pool
    await pool.stop()


async def twice(tx: Transaction) -> None:
    await tx.execute("INSERT INTO once VALUES (1)")


async def twice_below(tx: Transaction) -> None:
    await tx.connection.execute("INSERT INTO once VALUES (1)")


async def too_long(tx: Transaction) -> None:
    async with asyncio.timeout(0.05):
        await tx.fetchval("SELECT pg_sleep(30)")


@pytest.mark.parametrize("fails", [twice, twice_below, too_long])
async def test_a_job_of_a_transaction_that_cannot_commit_is_not_lost_without_a_word(database: str, fails) -> None:
    """The block has caught the error, so it went on, came to its end, and nothing of it was there."""
    told: list[object] = []

    async def work(pool: Transactions) -> None:
        async with pool.open() as tx:
            await ride.enqueue(tx, Ride(), origin=ORIGIN)
            with suppress(asyncpg.UniqueViolationError, TimeoutError):
                await fails(tx)

    async with a_pool(database, told) as pool:
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await work(pool)
        assert told == []
        assert await fetch(database, "SELECT id FROM sidings.job") == []
        async with pool.open() as tx:  # the connection serves others
            assert await tx.fetchval("SELECT count(*) FROM once") == 1


async def half_of_many(tx: Transaction) -> None:
    await tx.executemany("INSERT INTO once VALUES ($1)", [*((n,) for n in range(2, 50_000)), ("none",)])


async def not_read(tx: Transaction) -> None:
    await tx.fetchval("INSERT INTO once VALUES (2) RETURNING '20000-01-01'::date")


@pytest.mark.parametrize(("fails", "error"), [(half_of_many, asyncpg.DataError), (not_read, ValueError)])
async def test_what_a_failed_call_has_done_in_part_does_not_commit(database: str, fails, error) -> None:
    """Postgres knew of no failure: asyncpg had refused the last arguments, when the others were sent, or the answer."""
    async with a_pool(database, []) as pool:

        async def work() -> None:
            async with pool.open() as tx:
                with suppress(error):
                    await fails(tx)

        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await work()
        assert await fetch(database, "SELECT n FROM once") == [(1,)]
        async with pool.open() as tx:  # with a savepoint around it, it is undone
            with suppress(error):
                async with tx.savepoint():
                    await fails(tx)
        assert await fetch(database, "SELECT n FROM once") == [(1,)]


async def test_what_postgres_has_refused_of_many_rows_is_undone_by_any_savepoint(database: str) -> None:
    """It knows that it has failed: as after any other statement, what follows commits."""
    async with a_pool(database, []) as pool:
        async with pool.open() as tx:
            with suppress(asyncpg.UniqueViolationError):
                async with tx.connection.transaction():
                    await tx.executemany("INSERT INTO once VALUES ($1)", [(2,), (1,)])
            await tx.execute("INSERT INTO once VALUES (3)")
        assert await fetch(database, "SELECT n FROM once ORDER BY n") == [(1,), (3,)]


async def test_a_savepoint_keeps_what_stands_around_it(database: str) -> None:
    told: list[object] = []
    async with a_pool(database, told) as pool:
        async with pool.open() as tx:
            id = await ride.enqueue(tx, Ride(), origin=ORIGIN)
            with suppress(asyncpg.UniqueViolationError):
                async with tx.savepoint():
                    await twice(tx)
        assert told == [{ORIGIN: [id]}]
        assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job")] == [id]


def give_up_when_done(database: str, backend: int, limit: asyncio.Timeout, statement: str) -> None:
    """`limit` is over when Postgres has done the statement that is sent next, and nobody has read its answer."""
    loop = asyncio.get_running_loop()
    done = "SELECT FROM pg_stat_activity WHERE pid = %s AND query LIKE %s AND state LIKE 'idle in transaction%%'"

    def wait() -> None:  # in the event loop, which therefore reads nothing
        with psycopg.connect(database, autocommit=True) as other:
            until = time.monotonic() + SECONDS
            while other.execute(done, (backend, f"%{statement} %")).fetchone() is None and time.monotonic() < until:
                pass
        limit.reschedule(loop.time())

    loop.call_soon(wait)


async def test_a_job_whose_enqueue_was_given_up_does_not_commit_against_its_callers_belief(database: str) -> None:
    """Postgres had stored it just before, so the transaction was not aborted: the job ran, beside what the caller had
    done in its place."""
    told: list[object] = []

    async def work(pool: Transactions, *, savepoint: bool) -> None:
        async with pool.open() as tx:
            backend = await tx.fetchval("SELECT pg_backend_pid()")
            await ride.enqueue(tx, Ride(number=1), origin=ORIGIN)  # from here on it takes one trip
            await tx.fetchval("SELECT 1")
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as limit, tx.savepoint() if savepoint else nullcontext():
                    give_up_when_done(database, backend, limit, "INSERT INTO")
                    await ride.enqueue(tx, Ride(number=2), origin=ORIGIN)
            assert limit.expired()
            await ride.enqueue(tx, Ride(number=3), origin=ORIGIN)

    async with a_pool(database, told) as pool:
        with pytest.raises(asyncpg.InFailedSQLTransactionError, match="nobody knows whether it was done"):
            await work(pool, savepoint=False)
        assert told == []
        assert await numbers(database) == []
        await work(pool, savepoint=True)
        assert await numbers(database) == [1, 3]


async def test_a_savepoint_that_is_given_up_as_it_begins_keeps_nothing_of_the_one_around_it(database: str) -> None:
    """Postgres had it all the same, under the name of the outer one: that rolled back to it, and its job ran."""
    told: list[object] = []
    async with a_pool(database, told) as pool:
        async with pool.open() as tx:
            backend = await tx.fetchval("SELECT pg_backend_pid()")
            with suppress(ValueError):
                async with tx.savepoint():
                    await ride.enqueue(tx, Ride(number=1), origin=ORIGIN)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(None) as limit:
                            give_up_when_done(database, backend, limit, "SAVEPOINT")
                            async with tx.savepoint():
                                pytest.fail("it was given up")
                    assert limit.expired()
                    raise ValueError("the carrier does not answer")
            await ride.enqueue(tx, Ride(number=2), origin=ORIGIN)
        assert await numbers(database) == [2]


async def test_a_savepoint_that_is_given_up_as_it_ends_commits_nothing_of_its_own(database: str) -> None:
    """Its block had raised a timeout, and what it had stored was committed."""
    told: list[object] = []

    async def work(pool: Transactions) -> None:
        async with pool.open() as tx:
            backend = await tx.fetchval("SELECT pg_backend_pid()")
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as limit, tx.savepoint():
                    await ride.enqueue(tx, Ride(), origin=ORIGIN)
                    give_up_when_done(database, backend, limit, "RELEASE")
            assert limit.expired()

    async with a_pool(database, told) as pool:
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await work(pool)
        assert told == []
        assert await numbers(database) == []
        async with pool.open() as tx:  # within another one, that is undone, and the transaction goes on
            backend = await tx.fetchval("SELECT pg_backend_pid()")
            with suppress(TimeoutError):
                async with tx.savepoint(), asyncio.timeout(None) as limit, tx.savepoint():
                    await ride.enqueue(tx, Ride(number=1), origin=ORIGIN)
                    give_up_when_done(database, backend, limit, "RELEASE")
            assert limit.expired()
            await ride.enqueue(tx, Ride(number=2), origin=ORIGIN)
        assert await numbers(database) == [2]


async def test_a_savepoint_that_could_not_be_undone_commits_nothing(database: str) -> None:
    """What `gather` has left running in it was still under way: it was not rolled back to, and its job ran."""
    told: list[object] = []

    async def unreachable() -> None:
        raise ValueError("the carrier does not answer")

    async def work(pool: Transactions, other: asyncpg.Connection) -> None:
        async with pool.open() as tx:
            with suppress(asyncpg.InterfaceError):
                async with tx.savepoint():
                    await ride.enqueue(tx, Ride(number=1), origin=ORIGIN)
                    waiting = asyncio.ensure_future(tx.execute("SELECT FROM once FOR UPDATE"))
                    await asyncio.gather(waiting, unreachable())
            await other.execute("ROLLBACK")
            await waiting
            await ride.enqueue(tx, Ride(number=2), origin=ORIGIN)

    async with a_pool(database, told) as pool, connected(database) as other:
        await other.execute("BEGIN; SELECT FROM once FOR UPDATE")
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await work(pool, other)
        assert told == []
        assert await numbers(database) == []


async def store_many(pool: Transactions) -> None:
    """More than Postgres takes while the first of it waits for a lock."""
    async with pool.open() as tx:
        rows = ((1, "x" * 10_000) for _ in range(5_000))
        await tx.executemany("UPDATE once SET n = n WHERE n = $1 AND $2 <> ''", rows)


async def test_many_rows_that_are_given_up_while_they_are_sent_end_at_once(database: str) -> None:
    """asyncpg passed over the cancellation, and waited for the answer to what it had not sent to its end."""

    async with a_pool(database, []) as pool, connected(database) as other:
        await other.execute("BEGIN; SELECT FROM once FOR UPDATE")
        working = asyncio.create_task(store_many(pool))
        blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        await eventually(lambda: value(database, blocked), "the server takes no more")
        working.cancel()
        ended, _ = await asyncio.wait([working], timeout=5)  # a statement may take 60
        assert ended
        assert working.cancelled()
        # Else each further attempt of a job left one more connection that waits, for as long as the row is locked.
        assert await value(database, blocked) == 0
        await other.execute("ROLLBACK")
        async with pool.open() as tx:
            assert await tx.fetchval("SELECT count(*) FROM once") == 1


async def test_a_connection_that_breaks_while_many_rows_are_given_up_hides_no_cancellation(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidings.jobs.transaction._GIVE_UP_SECONDS", 1.0)

    async with a_pool(database, []) as pool, connected(database) as other:
        await other.execute("BEGIN; SELECT FROM once FOR UPDATE")
        working = asyncio.create_task(store_many(pool))
        blocked = "SELECT pid FROM pg_locks WHERE NOT granted"
        pid = await eventually(lambda: value(database, blocked), "the server takes no more")
        working.cancel()

        async def told() -> bool:
            return await value(database, blocked) is None

        await eventually(told, "Postgres is told")
        assert await value(database, "SELECT pg_terminate_backend($1)", pid)
        await asyncio.wait([working], timeout=5)
        assert working.cancelled()


async def test_many_rows_end_when_the_connection_breaks_while_they_are_sent(database: str) -> None:
    """asyncpg waited for it to take more: a transactional job for ever, anything else for a minute."""

    async with a_pool(database, []) as pool, connected(database) as other:
        await other.execute("BEGIN; SELECT FROM once FOR UPDATE")
        working = asyncio.create_task(store_many(pool))
        blocked = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        await eventually(lambda: value(database, f"SELECT count(*) {blocked}"), "the server takes no more")
        assert await value(database, f"SELECT count(pg_terminate_backend(pid)) {blocked}") == 1
        ended, _ = await asyncio.wait([working], timeout=5)
        working.cancel()
        assert ended
        assert isinstance(working.exception(), PostgresUnavailable)


async def numbers(database: str) -> list[int]:
    """Of the jobs that are stored."""
    rows = await fetch(database, "SELECT (payload ->> 'number')::int AS number FROM sidings.job ORDER BY id")
    return [row["number"] for row in rows]


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_connection_that_fails_while_it_is_given_back_leaves_no_traceback_where_its_block_is_cancelled(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaks: bool
) -> None:
    """asyncpg cleans it in a task of its own: "Task exception was never retrieved" stood in the log."""

    async def work(pool: Transactions) -> None:
        async with pool.open() as tx:
            await tx.execute("SELECT")

    async with a_pool(database, []) as pool:
        monkeypatch.setattr("sidings.kafka.transactions.CLEAN", "SELECT pg_sleep(60)")
        working = asyncio.create_task(work(pool))
        cleaned = "FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' AND state = 'active'"
        await eventually(lambda: value(database, f"SELECT count(*) {cleaned}"), "it is being given back")
        working.cancel()
        await asyncio.wait([working])
        assert working.cancelled()
        if breaks:
            assert await value(database, f"SELECT count(pg_terminate_backend(pid)) {cleaned}") == 1
        monkeypatch.undo()
        await work(pool)  # pool_size is 1: the place is free, with another connection
        assert never_retrieved(caplog) == []
        assert "a connection could not be given back" in caplog.text

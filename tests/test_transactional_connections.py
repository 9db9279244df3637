"""Connections of transactional handlers: what a job leaves in its session, and errors that are not the handler's."""

import asyncio
import gc
import os
import re
import signal
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest
from sidings.executor import spare, transactional
from sidings.executor.clock import now
from sidings.executor.queues import OriginQueue
from sidings.executor.spare import Room
from sidings.jobs import Job, Registry, Retry
from tenacity import retry_if_result, stop_after_attempt, wait_fixed

from .faulty_proxy import KINDS, Moment, proxied
from .support import (
    ORIGIN,
    SECONDS,
    a_role,
    connected,
    drained,
    enqueue,
    eventually,
    fetch,
    outcomes,
    running,
)

ONCE = Retry(stop=stop_after_attempt(1))  # what counts as a failure ends the job


def leaves_traces(registry: Registry) -> tuple[Any, list[tuple[object, ...]]]:
    """A job type that leaves all sorts of things in its session; and what its attempts have found there."""
    found = list[tuple[object, ...]]()

    @registry.job(transactional=True, retry=Retry(wait=wait_fixed(0.01)))
    async def tenant(job: Job[dict[str, str]]) -> None:
        row = await job.tx.fetchrow(
            "SELECT pg_backend_pid(), current_setting('role'), current_setting('search_path'), "
            "coalesce(current_setting('app.tenant', true), ''), to_regclass('pg_temp.scratch') IS NULL, "
            "current_setting('transaction_isolation'), "
            "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())"
        )
        found.append(tuple(row or ()))
        await job.tx.execute("SELECT pg_advisory_lock(7)")
        await job.tx.execute("CREATE TEMPORARY TABLE scratch (n int)")
        await job.tx.execute("SET app.tenant = 'one'; SET search_path = 'nowhere'; SET ROLE postgres")
        await job.tx.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        if job.attempt == 1:
            raise ValueError("what is rolled back leaves its locks")

    return tenant, found


def found_nothing(found: list[tuple[object, ...]]) -> None:
    """In the same session each time."""
    assert len(found) == 4
    assert len({pid for pid, *_ in found}) == 1
    assert {tuple(left) for _, *left in found} == {("none", '"$user", public', "", True, "read committed", 0)}


async def test_a_job_finds_nothing_that_the_one_before_it_has_left_in_the_session(database: str) -> None:
    registry = Registry()
    tenant, found = leaves_traces(registry)
    async with running(database, registry, concurrency=1):
        await enqueue(database, tenant, [{}] * 2)
        await drained(database)
    found_nothing(found)


async def test_an_attempt_whose_connection_the_server_refuses_is_no_failure(database: str) -> None:
    registry, name = Registry(), urlsplit(database).path.strip("/")

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None: ...

    @registry.job()
    async def first(job: Job[dict[str, str]]) -> None: ...

    elsewhere = urlsplit(database)._replace(path="/postgres").geturl()
    async with running(database, registry), connected(database) as inside, connected(elsewhere) as admin:
        await enqueue(database, first, [{}])
        await drained(database)  # by now the executor has its own connections
        async with inside.transaction():
            await once.enqueue(inside, {}, origin=ORIGIN)
            await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')

        async def tried() -> object:
            return await inside.fetchval("SELECT count(*) FROM sidings.job_history WHERE type = 'once'")

        await eventually(tried, "an attempt")
        await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
        await drained(database)
    assert set(await outcomes(database)) == {"snoozed", "succeeded"}


async def test_a_job_and_its_effects_are_committed_although_the_answer_to_its_end_is_late(database: str) -> None:
    """COMMIT was a statement of its own, for which the server waited for a second at most, the origin locked: no job
    ended where that took an answer longer, and what was tried again counted as its failures."""
    registry = Registry()

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("CREATE TABLE effect ()")

    async with proxied(database) as proxy, running(proxy.dsn, registry), connected(database) as other:
        fault = proxy.arm("finish", Moment.HELD)
        await enqueue(database, once, [{}])
        await drained(database)
        assert await other.fetchval("SELECT to_regclass('effect')") == "effect"
        await other.execute("SELECT FROM sidings.origin FOR UPDATE NOWAIT")
        proxy.let_go()
    assert fault.hits == 1
    assert await outcomes(database) == ["succeeded"]


async def test_what_its_commit_refuses_is_a_failure_of_the_job(database: str) -> None:
    """As a deferred constraint. It comes with the answer to the job's end, whose own refusals are no failures."""
    registry = Registry()
    async with connected(database) as connection:
        await connection.execute("CREATE TABLE effect (number int UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, int]]) -> None:
        await job.tx.execute("INSERT INTO effect SELECT $1 FROM generate_series(1, $1)", job.payload["copies"])

    async with running(database, registry, concurrency=1):
        await enqueue(database, once, [{"copies": copies} for copies in (2, 1)])
        await drained(database)
    assert await outcomes(database) == ["discarded", "succeeded"]


async def test_a_server_that_takes_no_writes_is_no_failure(database: str) -> None:
    """A primary that has been demoted under its connections, or is read-only since its disk is full: jobs that ran then
    failed, and with their last attempt they were gone."""
    registry = Registry()

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None:
        if job.attempt == 1:
            await job.tx.execute("SET TRANSACTION READ ONLY")
        await job.tx.execute("CREATE TABLE effect ()")

    async with running(database, registry):
        await enqueue(database, once, [{}])
        await drained(database)
    assert sorted(await outcomes(database)) == ["snoozed", "succeeded"]


@pytest.mark.parametrize("what", ["disk_full", "program_limit_exceeded"])
@pytest.mark.parametrize("told", ["as it is", "as another error"])
async def test_a_full_disk_is_no_failure(database: str, told: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only at the job's end it was none: what a handler's own statement met was its failure, and a job with one attempt
    was discarded. The same where Postgres has no transaction ids left, before a wraparound."""
    monkeypatch.setattr("sidings.executor.link._GIVE_IDS", ("exec_stmt_raise",))  # the function that RAISE names
    registry, tried = Registry(), list[int]()
    async with connected(database) as connection:
        await connection.execute(
            f"""CREATE FUNCTION write(room boolean) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
                IF NOT room THEN RAISE {what} USING MESSAGE = 'No space left on device'; END IF; END $$"""
        )

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None:
        tried.append(job.attempt)
        try:
            await job.tx.execute("SELECT write($1)", len(tried) > 4)
        except (asyncpg.DiskFullError, asyncpg.ProgramLimitExceededError):
            if told == "as another error":
                raise ValueError("not now") from None
            raise

    async with running(database, registry):
        await enqueue(database, once, [{}])
        await drained(database)
    assert sorted(await outcomes(database)) == ["snoozed"] * 4 + ["succeeded"]


async def test_a_row_that_is_too_long_for_an_index_is_a_failure(database: str) -> None:
    """With the same code Postgres says that it has no transaction ids left."""
    registry = Registry()
    await fetch(database, "CREATE TABLE effect (text text STORAGE EXTERNAL PRIMARY KEY)")

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None:
        too_long = "SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) n"
        await job.tx.execute(f"INSERT INTO effect {too_long}")

    async with running(database, registry):
        await enqueue(database, once, [{}])
        await drained(database)
    assert await outcomes(database) == ["discarded"]


@pytest.mark.parametrize(
    "file",
    [
        'write to file "base/pgsql_tmp/pgsql_tmp4711.0"',
        'resize shared memory segment "/PostgreSQL.3583811644" to 8409088 bytes',
        'resize shared memory segment "pg_dynshmem/mmap.4711" to 8409088 bytes',
    ],
)
async def test_a_query_that_has_no_room_for_what_is_only_its_own_has_failed(database: str, file: str) -> None:
    """Nobody waits for room that it would take again each time. Of shared memory a container has 64 MB, which a
    parallel join finds too little, each time."""
    registry = Registry()

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None:
        message = f"could not {file}: No space left on device"
        await job.tx.execute(f"DO $$ BEGIN RAISE disk_full USING MESSAGE = '{message}'; END $$")

    async with running(database, registry):
        await enqueue(database, once, [{}])
        await drained(database)
    assert await outcomes(database) == ["discarded"]


async def test_the_full_disk_of_another_server_is_a_failure(database: str) -> None:
    registry = Registry()

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("SELECT")
        async with connected(database) as elsewhere:
            await elsewhere.execute("DO $$ BEGIN RAISE disk_full; END $$")

    async with running(database, registry):
        await enqueue(database, once, [{}])
        await drained(database)
    assert await outcomes(database) == ["discarded"]


async def test_an_error_that_is_its_own_cause_is_a_failure_like_others(database: str) -> None:
    """Its causes were gone through without an end, and the event loop with them."""
    registry = Registry()

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None:
        error = ValueError("no")
        raise error from error

    async with running(database, registry):
        await enqueue(database, once, [{}])
        await drained(database)
    assert await outcomes(database) == ["discarded"]


@pytest.mark.parametrize("where", ["handler", "end"])
async def test_it_is_waited_for_until_it_takes_writes_however_the_handler_tells_of_it(
    database: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third such end was the job's failure; one that its handler had made into another error was at once."""
    registry, tried, connect = Registry(), list[int](), transactional.Transactional._connect

    async def demoted(self: transactional.Transactional) -> asyncpg.Connection:
        connection = await connect(self)
        if len(tried) < 4:
            await connection.execute("SET default_transaction_read_only = on")
        return connection

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None:
        tried.append(job.attempt)
        try:
            if where == "handler":
                await job.tx.execute("CREATE TABLE effect ()")
        except asyncpg.ReadOnlySQLTransactionError:
            raise ValueError("not now") from None

    monkeypatch.setattr(transactional, "_AWAY_SECONDS", 0.05)
    monkeypatch.setattr(transactional.Transactional, "_connect", demoted)
    async with running(database, registry):
        await enqueue(database, once, [{}])
        await drained(database)
    assert sorted(await outcomes(database)) == ["snoozed"] * 4 + ["succeeded"]


@pytest.mark.parametrize("statement", ["CREATE TABLE effect ()", "SELECT pg_terminate_backend(pg_backend_pid())"])
async def test_nor_is_it_where_the_handler_makes_a_result_of_it_that_its_policy_rejects(
    database: str, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the last attempt, and the job was discarded."""
    registry, tried, connect = Registry(), list[int](), transactional.Transactional._connect

    async def demoted(self: transactional.Transactional) -> asyncpg.Connection:
        connection = await connect(self)
        if not tried and statement.startswith("CREATE"):
            await connection.execute("SET default_transaction_read_only = on")
        return connection

    @registry.job(transactional=True, retry=Retry(stop=stop_after_attempt(1), retry=retry_if_result(lambda r: not r)))
    async def once(job: Job[dict[str, str]]) -> bool:
        tried.append(job.attempt)
        try:
            await job.tx.execute(statement if len(tried) == 1 else "SELECT")
        except asyncpg.PostgresError:
            return False
        return True

    monkeypatch.setattr(transactional.Transactional, "_connect", demoted)
    async with running(database, registry):
        await enqueue(database, once, [{}])
        await drained(database)
    assert sorted(await outcomes(database)) == ["snoozed", "succeeded"]


async def test_an_attempt_whose_connection_breaks_before_the_handler_is_called_is_no_failure(database: str) -> None:
    registry = Registry()

    @registry.job(transactional=True, retry=ONCE, timeout=3_600)
    async def once(job: Job[dict[str, str]]) -> None: ...

    async with proxied(database) as proxy, running(proxy.dsn, registry):
        fault = proxy.arm("limit", Moment.BEFORE)
        await enqueue(database, once, [{}])
        await drained(database)
    assert fault.hits == 1
    assert await outcomes(database) == ["snoozed", "succeeded"]


async def test_a_connection_that_the_server_closes_just_after_a_handler_has_raised_is_no_failure(database: str) -> None:
    """As at a restart: the server's last word came with the answer to the ROLLBACK, and an error of asyncpg's own took
    the place of what the handler had raised, and was its failure."""
    registry, loop = Registry(), asyncio.get_running_loop()

    def close(backend: int) -> None:
        time.sleep(0.3)  # the answer is on its way; it is read together with what follows
        with psycopg.connect(database, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (backend,))

    seen: list[int] = []

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, str]]) -> None:
        seen.append(job.attempt)
        if len(seen) == 1:
            loop.call_soon(close, await job.tx.fetchval("SELECT pg_backend_pid()"))
            raise ValueError("the carrier does not answer")

    async with running(database, registry):
        await enqueue(database, once, [{}])
        await drained(database)
    assert await outcomes(database) == ["snoozed", "succeeded"]


async def test_a_handler_that_is_cancelled_while_its_server_is_asked_whether_it_takes_writes_leaves_no_session(
    database: str,
) -> None:
    registry, backends = Registry(), list[int]()

    @registry.job(transactional=True)
    async def once(job: Job[dict[str, str]]) -> None:
        backends.append(await job.tx.fetchval("SELECT pg_backend_pid()"))
        os.kill(backends[0], signal.SIGSTOP)
        raise ValueError("the carrier does not answer")

    gc.disable()  # that would end the session at last
    try:
        async with running(database, registry, shutdown_seconds=0.0):
            await enqueue(database, once, [{}])
            await eventually(lambda: backends)
        os.kill(backends[0], signal.SIGCONT)
        async with connected(database) as other:

            async def gone() -> bool:
                sessions = await other.fetch("SELECT pid FROM pg_stat_activity")
                return backends[0] not in [session["pid"] for session in sessions]

            await eventually(gone)
    finally:
        gc.enable()


@pytest.mark.parametrize("ends", ["by its timeout", "by a stop"])
@pytest.mark.parametrize("silent", ["SELECT 'a handler asks'", "SAVEPOINT", "RELEASE SAVEPOINT"])
async def test_a_handler_in_a_savepoint_ends_although_its_connection_has_fallen_silent(
    database: str, monkeypatch: pytest.MonkeyPatch, silent: str, ends: str
) -> None:
    """The savepoint was to be undone, for which nothing had a limit: worker and group hung until TCP gave up."""
    monkeypatch.setitem(KINDS, "silent", re.compile(f"^{silent}"))
    registry, stops = Registry(), ends == "by a stop"

    @registry.job(transactional=True, retry=ONCE, timeout=None if stops else 0.5)
    async def once(job: Job[dict[str, str]]) -> None:
        async with job.tx.savepoint(), job.tx.savepoint():
            await job.tx.fetchval("SELECT 'a handler asks'")

    async with proxied(database) as proxy:
        fault = proxy.arm("silent", Moment.SILENT_BEFORE)
        async with running(proxy.dsn, registry, shutdown_seconds=0.0) as executor:
            await enqueue(database, once, [{}])
            await eventually(lambda: fault.hits)
            async with asyncio.timeout(SECONDS / 2):
                await (executor.stop() if stops else drained(database))
    assert await outcomes(database) == (["snoozed"] if stops else ["discarded"])


async def test_nothing_cuts_a_connection_off_for_the_sake_of_a_job_that_has_ended(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another job's, of another origin, when the lease of the former one ends."""
    registry, guards = Registry(), list[Any]()

    class Guard(transactional._Guard):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            guards.append(self)

    @registry.job(transactional=True, retry=ONCE)
    async def once(job: Job[dict[str, bool]]) -> None:
        if job.payload["fails"]:
            raise ValueError("the carrier does not answer")

    monkeypatch.setattr(transactional, "_Guard", Guard)
    async with running(database, registry) as executor:
        await enqueue(database, once, [{"fails": True}, {"fails": False}])
        await drained(database)
        assert [guard._timer is None or guard._timer.cancelled() for guard in guards] == [True, True]
        assert executor._transactional._begun == set()


@pytest.mark.parametrize("timeout", [None, 0.2])
async def test_an_end_that_waits_too_long_for_a_lock_is_no_failure(database: str, timeout: float | None) -> None:
    """Somebody has locked the origin's row for longer than `finish` waits, and than the handler, which has done its
    part, may take."""
    registry = Registry()

    @registry.job(transactional=True, retry=ONCE, timeout=timeout)
    async def once(job: Job[dict[str, str]]) -> None: ...

    async with running(database, registry, lease_seconds=60), connected(database) as other:
        async with other.transaction():
            await other.execute("SELECT FROM sidings.origin FOR UPDATE")
            await enqueue(database, once, [{}])

            async def tried() -> object:
                return await outcomes(database)

            await eventually(tried, "an attempt")
        await drained(database)
        sessions = await other.fetch("SELECT state FROM pg_stat_activity WHERE datname = current_database()")
        assert "idle in transaction (aborted)" not in [session["state"] for session in sessions]
    assert await outcomes(database) == ["snoozed", "succeeded"]


async def test_the_time_that_a_handler_may_take_begins_with_its_transaction(database: str) -> None:
    """It was over before the handler had been called, and the job was discarded."""
    registry = Registry()

    @registry.job(transactional=True, retry=ONCE, timeout=0.2)
    async def once(job: Job[dict[str, str]]) -> None: ...

    async with proxied(database) as proxy, running(proxy.dsn, registry):
        fault = proxy.arm("begin", Moment.SLOW)
        await enqueue(database, once, [{}])
        await drained(database)
    assert fault.hits == 1
    assert await outcomes(database) == ["succeeded"]


@pytest.mark.parametrize(
    ("timeout", "idle"),
    [(timedelta(seconds=30), "5min"), (timedelta(hours=1), "1h"), (timedelta(days=30), "2147483s")],
    ids=["half a minute", "an hour", "a month"],
)
async def test_a_transactional_handler_may_be_idle_for_as_long_as_it_may_take(
    database: str, timeout: timedelta, idle: str
) -> None:
    registry, told = Registry(), list[str]()

    @registry.job(transactional=True, retry=ONCE, timeout=timeout)
    async def slow(job: Job[dict[str, str]]) -> None:
        told.append(await job.tx.fetchval("SHOW idle_in_transaction_session_timeout"))

    async with running(database, registry):
        await enqueue(database, slow, [{}])
        await drained(database)
    assert await outcomes(database) == ["succeeded"]
    assert told == [idle]


async def test_connections_that_handlers_need_no_more_are_given_back(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many were kept as had ever been needed at once; other instances, which may have none, could not begin."""
    monkeypatch.setattr(spare, "_KEEP_SECONDS", 0.2)
    registry, gate, started = Registry(), asyncio.Event(), list[int]()

    @registry.job(transactional=True)
    async def wait(job: Job[dict[str, str]]) -> None:
        started.append(job.id)
        await gate.wait()

    async with running(database, registry), connected(database) as other:

        async def connections() -> int:
            return await other.fetchval("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")

        async def few() -> bool:
            return await connections() < 20

        await enqueue(database, wait, [{}] * 30)
        await eventually(lambda: len(started) == 30, "all run")
        assert await connections() >= 30
        gate.set()
        await drained(database)
        await eventually(few, "they are given back")


async def test_handlers_that_reconnect_first_do_not_keep_the_executor_from_it(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of the server. The executor was without a lease then, and without any work, for ever."""
    monkeypatch.setattr(spare, "_KEEP_SECONDS", 3_600.0)
    registry, gate, started = Registry(), asyncio.Event(), list[int]()

    @registry.job(transactional=True)
    async def wait(job: Job[dict[str, str]]) -> None:
        started.append(job.id)
        await gate.wait()
        await asyncio.sleep(0.05)

    async with a_role(database, "CONNECTION LIMIT 20") as (_, dsn), running(dsn, registry, lease_seconds=3):
        await enqueue(database, wait, [{}] * 60)
        await eventually(lambda: len(started) >= 10, "all connections are taken")
        gate.set()
        async with connected(database) as admin:
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND usename <> current_user"
            )
        await drained(database)


async def test_where_the_server_gives_no_more_connections_jobs_take_turns_and_few_ask_for_one(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each job asked, was put off for a second, and asked again: hundreds of refused connections and lines of the log a
    second, and few of those that there were had any work."""
    registry, gate, asked, started = Registry(), asyncio.Event(), list[object](), list[int]()
    connect = transactional.connect

    async def counted(*args: Any, **options: Any) -> asyncpg.Connection:
        asked.append(args)
        return await connect(*args, **options)

    @registry.job(transactional=True)
    async def wait(job: Job[dict[str, str]]) -> None:
        started.append(job.id)
        await gate.wait()

    @registry.job()
    async def first(job: Job[dict[str, str]]) -> None: ...

    monkeypatch.setattr(transactional, "connect", counted)
    async with a_role(database, "CONNECTION LIMIT 12") as (_, dsn), running(dsn, registry) as executor:
        await enqueue(database, first, [{}])
        await drained(database)  # by now the executor has its own connections
        await enqueue(database, wait, [{}] * 300)
        await eventually(lambda: started and len(asked) >= 80, "all workers that one type may have, have asked")
        refused = executor._transactional.connections
        await eventually(lambda: refused.outage.error, "there are no more")
        refused.outage._since -= 60
        [problem] = executor.problems()
        assert problem.startswith("transactional jobs get no connection, for 6")
        gate.set()
        await drained(database)
        assert len(started) == 300
        assert len(asked) < 100 + 30  # all workers at first, then one at a time
        assert caplog.text.count("could not be had, trying again") == 1


async def test_where_the_server_gives_no_more_connections_the_executor_gets_one_before_its_handlers(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What one job gives back another takes, so that the thread that renews leases came too late."""
    registry, started = Registry(), list[int]()

    @registry.job(transactional=True)
    async def quick(job: Job[dict[str, str]]) -> None:
        started.append(job.id)
        await asyncio.sleep(0.1)

    async with a_role(database, "CONNECTION LIMIT 9") as (_, dsn), running(dsn, registry, lease_seconds=4) as executor:
        begun = executor._leases.last_renewed
        await enqueue(database, quick, [{}] * 300)
        refused = executor._transactional.connections
        await eventually(lambda: started and refused.outage.error, "all connections are taken")
        await eventually(lambda: executor._leases.last_renewed > begun + 0.5, "a renewal")
        assert "cannot be renewed" not in caplog.text
        assert executor.held
        await eventually(lambda: len(started) > 20, "handlers run")


async def test_a_place_that_is_handed_to_a_job_that_is_cancelled_goes_to_the_next() -> None:
    """Else there would be one less each time, until no transactional job began any more."""
    room, origin = Room(), OriginQueue("t/0", 1)
    room._most, room._changed_at = 1, now()
    assert await room.enter(origin)
    waiting = [asyncio.create_task(room.enter(origin)) for _ in range(2)]
    await asyncio.sleep(0)
    room.leave()
    waiting[0].cancel()
    assert await asyncio.wait_for(waiting[1], SECONDS)
    assert waiting[0].cancelled()


async def test_a_job_that_is_turned_away_and_cancelled_has_had_no_place() -> None:
    """Else there would be one more each time, until PgBouncer had no connections left."""
    room, origin = Room(), OriginQueue("t/0", 1)
    room._most, room._changed_at = 1, now()
    assert await room.enter(origin)
    waiting = [asyncio.create_task(room.enter(origin)) for _ in range(2)]
    await asyncio.sleep(0)
    room.turn_away(origin)
    waiting[0].cancel()
    assert await asyncio.wait_for(waiting[1], SECONDS) is False
    assert (waiting[0].cancelled(), room._inside) == (True, 1)

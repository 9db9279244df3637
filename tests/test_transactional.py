"""Transactional handlers: effects and the end of the job commit together, exactly once, fenced."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from sidings import Admin
from sidings.errors import ConfigurationError, NotInTransaction
from sidings.executor import Executor, ExecutorSettings, PostgresSettings
from sidings.executor.attempts import job_of
from sidings.executor.clock import now
from sidings.executor.queues import Entry, OriginQueue
from sidings.executor.transactional import Transactional
from sidings.jobs import SUCCEEDED, Again, Discard, Job, OutcomeName, Registry, Retry
from tenacity import stop_after_attempt, wait_fixed

from .faulty_proxy import Moment, proxied
from .support import ORIGIN, a_role, drained, enqueue, eventually, running

Start = Callable[[Registry], Awaitable[Executor]]


@pytest.fixture
async def connection(database: str) -> AsyncIterator[asyncpg.Connection]:
    opened = await asyncpg.connect(database)
    await opened.execute("CREATE TABLE effect (job bigint, note text)")
    yield opened
    await opened.close()


@pytest.fixture
async def start(database: str) -> AsyncIterator[Start]:
    started: list[Executor] = []

    async def begin(registry: Registry) -> Executor:
        settings = ExecutorSettings(lease_seconds=3, concurrency=20)
        postgres = PostgresSettings(dsn=database, call_seconds=3)
        executor = Executor("test", registry, postgres, settings, prometheus=CollectorRegistry())
        await executor.start()
        executor.assign(["t/0"], 1)
        await executor.settled(20)
        started.append(executor)
        return executor

    yield begin
    for executor in started:
        await executor.stop()


async def until(connection: asyncpg.Connection, query: str, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not await connection.fetchval(query):
            await asyncio.sleep(0.01)


async def outcomes(connection: asyncpg.Connection) -> list[str]:
    rows = await connection.fetch("SELECT outcome::text FROM sidings.job_history ORDER BY job_id, attempt")
    return [row[0] for row in rows]


NOTHING_WAITS = "SELECT NOT EXISTS (SELECT FROM sidings.job)"


async def test_effects_followers_and_the_jobs_end_commit_together(connection: asyncpg.Connection, start: Start) -> None:
    registry = Registry()

    @registry.job(group="g", transactional=True)
    async def first(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1, 'first')", job.id)
        async with job.tx.connection.transaction():  # a savepoint of the handler's own
            await second.enqueue(job.tx, {"g": "x"})

    @registry.job(group="g", transactional=True)
    async def second(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1, 'second')", job.id)

    await start(registry)
    async with connection.transaction():
        await first.enqueue_many(connection, [{"g": "x"}] * 5, origin="t/0")
    await until(connection, NOTHING_WAITS)
    assert await connection.fetchval("SELECT count(*) FROM effect") == 10
    assert await outcomes(connection) == ["succeeded"] * 10
    assert await connection.fetchval("SELECT count(DISTINCT job) FROM effect") == 10


async def test_a_failed_attempt_leaves_no_effect(connection: asyncpg.Connection, start: Start) -> None:
    registry = Registry()

    @registry.job(transactional=True, retry=Retry(wait=wait_fixed(0.01)))
    async def picky(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1, 'attempt ' || $2)", job.id, str(job.attempt))
        if job.attempt < 3:
            raise ValueError("not yet")

    await start(registry)
    async with connection.transaction():
        await picky.enqueue(connection, {}, origin="t/0")
    await until(connection, NOTHING_WAITS)
    assert await connection.fetchval("SELECT array_agg(note) FROM effect") == ["attempt 3"]
    assert await outcomes(connection) == ["retried", "retried", "succeeded"]


async def test_the_history_tells_when_a_job_began_also_where_its_end_waits_for_a_lock(
    connection: asyncpg.Connection, database: str, start: Start
) -> None:
    registry, took = Registry(), list[float]()
    other = await asyncpg.connect(database)

    @registry.job(transactional=True)
    async def held_up(job: Job[dict[str, str]]) -> None:
        began = now()
        if job.attempt == 1:
            await other.execute("BEGIN")
            await other.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", job.id)
        await job.tx.execute("INSERT INTO effect VALUES ($1, clock_timestamp()::text)", job.id)
        took.append(now() - began)

    await start(registry)
    async with connection.transaction():
        await held_up.enqueue(connection, {}, origin="t/0")
    await until(connection, "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
    await asyncio.sleep(took[0] + 0.3)  # the end waits for longer than it took to come to that statement
    await other.close()
    await until(connection, NOTHING_WAITS)
    began = "SELECT started_at FROM sidings.job_history WHERE outcome = 'succeeded'"
    assert await connection.fetchval(f"SELECT ({began}) <= note::timestamptz FROM effect")


@pytest.mark.parametrize("lent", [False, True])
async def test_what_a_failed_attempt_has_left_behind_reaches_no_other_transaction(
    connection: asyncpg.Connection, start: Start, lent: bool
) -> None:
    """asyncio.gather goes on with the others when one has failed. What they wrote then was committed at once, or with
    whatever job had the connection next."""
    registry, go_on = Registry(), asyncio.Event()
    tried: list[object] = []

    @registry.job(transactional=True, retry=Retry(stop=stop_after_attempt(1)))
    async def gathering(job: Job[dict[str, str]]) -> None:
        async def fail() -> None:
            raise ValueError("the carrier does not answer")

        async def late() -> None:
            tx = job.tx.connection if lent else job.tx
            await go_on.wait()
            for write in (
                lambda: tx.execute("INSERT INTO effect VALUES (1, 'late')"),
                lambda: gathering.enqueue(tx, {}, origin="t/0"),
                lambda: job.tx.connection.execute("INSERT INTO effect VALUES (1, 'late')"),
            ):
                try:
                    tried.append(await write())
                except (NotInTransaction, asyncpg.InterfaceError) as error:
                    tried.append(error)

        await asyncio.gather(late(), fail())

    @registry.job(transactional=True)
    async def following(job: Job[dict[str, str]]) -> None:
        go_on.set()
        while len(tried) < 3:
            await asyncio.sleep(0.01)

    await start(registry)
    async with connection.transaction():
        await gathering.enqueue(connection, {}, origin="t/0")
    await until(connection, "SELECT count(*) = 1 FROM sidings.job_history")
    async with connection.transaction():
        await following.enqueue(connection, {}, origin="t/0")
    await until(connection, "SELECT count(*) = 2 FROM sidings.job_history")
    assert await outcomes(connection) == ["discarded", "succeeded"]
    assert await connection.fetchval("SELECT count(*) FROM effect") == 0
    assert all(isinstance(each, NotInTransaction | asyncpg.InterfaceError) for each in tried)


async def test_a_handler_that_returns_while_a_statement_of_its_own_is_under_way_has_failed(
    connection: asyncpg.Connection, start: Start
) -> None:
    """The end could not be sent, which passed for a connection that broke: the job ran again at once, for ever."""
    registry, left = Registry(), list[asyncio.Task[str]]()

    @registry.job(transactional=True, retry=Retry(stop=stop_after_attempt(1)))
    async def hasty(job: Job[dict[str, str]]) -> None:
        left.append(asyncio.create_task(job.tx.execute("SELECT pg_sleep(20)")))
        await asyncio.sleep(0)  # it has been sent

    await start(registry)
    async with connection.transaction():
        await hasty.enqueue(connection, {}, origin="t/0")
    await until(connection, "SELECT count(*) > 0 FROM sidings.job_history")
    assert await outcomes(connection) == ["discarded"]
    assert "await all" in await connection.fetchval("SELECT error_message FROM sidings.job_history")
    assert await connection.fetchval("SELECT count(*) FROM sidings.job") == 0
    [ended] = await asyncio.gather(*left, return_exceptions=True)
    assert isinstance(ended, asyncpg.ConnectionDoesNotExistError)


async def test_what_the_commit_refuses_is_a_failure_of_the_handler(
    connection: asyncpg.Connection, start: Start
) -> None:
    registry = Registry()
    await connection.execute("ALTER TABLE effect ADD UNIQUE (note) DEFERRABLE INITIALLY DEFERRED")

    @registry.job(transactional=True, retry=Retry(stop=stop_after_attempt(1)))
    async def twice(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect SELECT $1, 'the same' FROM generate_series(1, 2)", job.id)

    await start(registry)
    async with connection.transaction():
        await twice.enqueue(connection, {}, origin="t/0")
    await until(connection, "SELECT count(*) > 0 FROM sidings.job_history")
    assert await outcomes(connection) == ["discarded"]


async def test_a_handler_that_ends_its_transaction_itself_has_failed(
    connection: asyncpg.Connection, start: Start
) -> None:
    registry = Registry()

    @registry.job(transactional=True, retry=Retry(wait=wait_fixed(0.01)))
    async def hasty(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1, 'attempt ' || $2)", job.id, str(job.attempt))
        if job.attempt == 1:
            await job.tx.execute("ROLLBACK")

    await start(registry)
    async with connection.transaction():
        await hasty.enqueue(connection, {}, origin="t/0")
    await until(connection, NOTHING_WAITS)
    assert await connection.fetchval("SELECT array_agg(note) FROM effect") == ["attempt 2"]
    assert await outcomes(connection) == ["retried", "succeeded"]
    error = "SELECT error_message FROM sidings.job_history WHERE attempt = 1"
    assert "leave COMMIT and ROLLBACK to its job" in await connection.fetchval(error)


async def test_a_timeout_rolls_the_effects_back(connection: asyncpg.Connection, start: Start) -> None:
    registry = Registry()

    @registry.job(transactional=True, timeout=0.2, retry=Retry(wait=wait_fixed(0.01)))
    async def slow(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1, '')", job.id)
        if job.attempt == 1:
            await job.tx.execute("SELECT pg_sleep(30)")

    await start(registry)
    async with connection.transaction():
        await slow.enqueue(connection, {}, origin="t/0")
    await until(connection, NOTHING_WAITS)
    assert await connection.fetchval("SELECT count(*) FROM effect") == 1
    *before, last = await outcomes(connection)
    assert (set(before), last) == ({"retried"}, "succeeded")  # with few cores, another may take too long as well


async def test_an_owner_whose_lease_was_taken_over_cannot_commit(
    connection: asyncpg.Connection, database: str, start: Start
) -> None:
    registry = Registry()
    reached, go_on = asyncio.Event(), asyncio.Event()

    @registry.job(transactional=True)
    async def move(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1, 'by epoch ' || $2)", job.id, str(job.fence.epoch))
        if not reached.is_set():
            reached.set()
            await go_on.wait()

    await start(registry)
    async with connection.transaction():
        await move.enqueue(connection, {}, origin="t/0")
    await reached.wait()
    # Somebody else takes the origin over, with all that a takeover does, while the handler is at work.
    await connection.execute("UPDATE sidings.origin SET lease_until = now() - interval '1 day'")
    taken = await connection.fetchrow(
        "SELECT * FROM sidings.acquire(gen_random_uuid(), ARRAY['t/0'], 2, interval '0.1 s', true)"
    )
    assert taken is not None
    assert taken["losses"] == 1
    go_on.set()
    await until(connection, NOTHING_WAITS)  # when that one's lease has run out, the job runs again, under a newer epoch
    assert await connection.fetch("SELECT note FROM effect") != []
    assert await connection.fetchval("SELECT count(*) FROM effect") == 1
    assert await connection.fetchval("SELECT note FROM effect") != "by epoch 1"
    assert await outcomes(connection) == ["lost", "succeeded"]


async def test_no_origin_is_taken_over_while_a_handlers_transaction_is_about_to_commit(
    connection: asyncpg.Connection, database: str
) -> None:
    """The successor would read the job once more, before its end is visible."""
    acquire = "SELECT acquired_epoch FROM sidings.acquire($1, '{t/0}', 1, '1 microsecond', true)"
    owner, successor = uuid4(), uuid4()
    await connection.executemany("INSERT INTO sidings.executor (id) VALUES ($1)", [(owner,), (successor,)])
    insert = "INSERT INTO sidings.job (type, origin, payload) VALUES ('x', 't/0', '{}') RETURNING id"
    job = await connection.fetchval(insert)
    epoch = await connection.fetchval(acquire, owner)
    other = await asyncpg.connect(database)
    async with connection.transaction():
        await connection.execute("SELECT sidings.finish($1, 't/0', $2, $3, 1, 0, true)", owner, epoch, job)
        assert await other.fetchval(acquire, successor) is None
    assert await other.fetchval(acquire, successor) == epoch + 1
    await other.close()


async def test_a_job_that_somebody_else_has_ended_leaves_no_effect(
    connection: asyncpg.Connection, start: Start
) -> None:
    registry = Registry()
    reached, go_on = asyncio.Event(), asyncio.Event()

    @registry.job(transactional=True, group="g")
    async def late(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1, '')", job.id)
        if job.payload["g"] == "a":
            reached.set()
            await go_on.wait()

    await start(registry)
    async with connection.transaction():
        await late.enqueue(connection, {"g": "a"}, origin="t/0")
    await reached.wait()
    await connection.execute("DELETE FROM sidings.job")
    go_on.set()
    async with connection.transaction():
        await late.enqueue(connection, {"g": "b"}, origin="t/0")
    await until(connection, "SELECT EXISTS (SELECT FROM effect)")
    assert await connection.fetchval("SELECT count(*) FROM effect") == 1
    assert await outcomes(connection) == ["succeeded"]


async def test_an_end_that_has_committed_counts_whatever_the_fence_tells_before_its_answer_is_heard(
    database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job was gone, as one that a person ends: it was cancelled, and what it had enqueued waited for a poll."""
    registry, answered, told = Registry(), asyncio.Event(), list[str]()
    sent, execute = asyncio.Event(), asyncpg.Connection.execute

    async def late(connection: asyncpg.Connection, query: str, *args: object, **options: object) -> str:
        result = await execute(connection, query, *args, **options)
        if ".finish(" in query:
            sent.set()
            await answered.wait()
        return result

    @registry.job(transactional=True)
    async def first(job: Job[None]) -> None:
        await second.enqueue(job.tx, None)

    @registry.job()
    async def second(job: Job[None]) -> None:
        pass

    monkeypatch.setattr(asyncpg.Connection, "execute", late)
    async with running(database, registry) as executor:
        monkeypatch.setattr(executor._transactional, "_on_committed", lambda jobs: told.extend(jobs))
        fence = executor.cycles.standing.fence
        await enqueue(database, first, [None])
        await sent.wait()
        await admin.pause(type="another", reason="to bump the fence")
        await eventually(lambda: executor.cycles.standing.fence > fence, "it has been looked up")
        answered.set()
        await drained(database)
    ended = {outcome.value: executor.metrics.count(outcome, "first") for outcome in OutcomeName}
    assert {outcome: count for outcome, count in ended.items() if count} == {"succeeded": 1}
    assert told == [ORIGIN]


async def test_a_connection_that_dies_in_the_handler_is_replaced_and_that_is_no_failure(
    connection: asyncpg.Connection, database: str, start: Start
) -> None:
    registry, killer = Registry(), await asyncpg.connect(database)

    @registry.job(transactional=True, retry=Retry(stop=stop_after_attempt(1)))
    async def cut(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1, '')", job.id)
        if job.attempt == 1:
            await killer.execute("SELECT pg_terminate_backend($1)", job.tx.connection.get_server_pid())
            await job.tx.fetchval("SELECT 1")

    await start(registry)
    async with connection.transaction():
        await cut.enqueue(connection, {}, origin="t/0")
    await until(connection, NOTHING_WAITS)
    assert await connection.fetchval("SELECT count(*) FROM effect") == 1
    assert await outcomes(connection) == ["snoozed", "succeeded"]
    await killer.close()


async def test_a_handler_whose_connection_is_lost_each_time_has_failed(
    connection: asyncpg.Connection, database: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a server's `transaction_timeout`, or a proxy that ends what is idle: it ran again at once, for ever."""
    monkeypatch.setattr("sidings.executor.transactional._AWAY_SECONDS", 0.01)
    registry, killer = Registry(), await asyncpg.connect(database)
    gone: set[int] = set()

    @registry.job(transactional=True, retry=Retry(stop=stop_after_attempt(1)))
    async def slow(job: Job[dict[str, str]]) -> None:
        lost, inner = asyncio.Event(), job.tx.connection
        inner.add_termination_listener(lambda _: lost.set())
        gone.add(inner.get_server_pid())
        await killer.execute("SELECT pg_terminate_backend($1)", inner.get_server_pid())
        await lost.wait()

    await start(registry)
    async with connection.transaction():
        await slow.enqueue(connection, {}, origin="t/0")
    await until(connection, NOTHING_WAITS)
    assert await outcomes(connection) == ["snoozed", "snoozed", "discarded"]
    assert len(gone) == 3
    [error] = await connection.fetch("SELECT error_class, error_message FROM sidings.job_history WHERE attempt = 3")
    assert error["error_class"] == "sidings.errors.PostgresUnavailable"
    assert "the connection of the job's transaction was lost" in error["error_message"]
    await killer.close()


@pytest.mark.parametrize("grouped", [False, True])
async def test_what_a_handler_decides_counts_although_its_connection_was_lost(
    connection: asyncpg.Connection, database: str, start: Start, grouped: bool
) -> None:
    registry, killer = Registry(), await asyncpg.connect(database)

    @registry.job(transactional=True)
    async def over(job: Job[dict[str, str]]) -> None:
        lost, inner = asyncio.Event(), job.tx.connection
        inner.add_termination_listener(lambda _: lost.set())
        await killer.execute("SELECT pg_terminate_backend($1)", inner.get_server_pid())
        await lost.wait()
        error = Discard("nobody needs it any more")
        raise ExceptionGroup("of a task group", [error]) if grouped else error

    await start(registry)
    async with connection.transaction():
        await over.enqueue(connection, {}, origin="t/0")
    await until(connection, NOTHING_WAITS)
    assert await outcomes(connection) == ["discarded"]
    await killer.close()


async def test_an_attempt_for_which_there_is_no_connection_is_no_failure(
    connection: asyncpg.Connection, database: str
) -> None:
    registry = Registry()

    @registry.job(transactional=True, retry=Retry(stop=stop_after_attempt(1)))
    async def once(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1, '')", job.id)

    async with proxied(database) as proxy, running(proxy.dsn, registry, ["t/0"]):
        fault = proxy.arm("begin", Moment.BEFORE)
        async with connection.transaction():
            await once.enqueue(connection, {}, origin="t/0")
        await until(connection, NOTHING_WAITS)
    assert fault.hits == 1
    assert await connection.fetchval("SELECT count(*) FROM effect") == 1
    assert await outcomes(connection) == ["snoozed", "succeeded"]


def test_a_plain_function_cannot_be_transactional() -> None:
    registry = Registry()
    with pytest.raises(ConfigurationError, match="async def"):

        @registry.job(transactional=True)
        def sync(job: Job[dict[str, str]]) -> None: ...


def test_tx_is_refused_where_it_was_not_asked_for() -> None:
    with pytest.raises(ConfigurationError, match="transactional=True"):
        _ = Job({}, type="plain").tx


async def test_a_transaction_that_is_cut_off_before_the_lease_ends_is_no_failure_of_its_handler(database: str):
    """Here nobody has cancelled the handler before; with one attempt allowed, the job would be discarded."""
    registry = Registry()

    @registry.job(transactional=True, retry=Retry(stop=stop_after_attempt(1)))
    async def ride(job: Job[str]) -> None:
        await job.tx.execute("SELECT pg_sleep(60)")

    queue = OriginQueue("t/0", 1)
    queue.deadline = now() + 61.0
    entry = Entry(1, queue, "ride", None, 1, payload='"x"')
    transactional = Transactional(PostgresSettings(dsn=database), lambda _: None, lambda _: None, abort_seconds=60.0)
    attempt = transactional.run(ride, job_of(ride, entry), entry, now(), lambda _: None, lambda _: SUCCEEDED)
    outcome = await asyncio.wait_for(attempt, 30)
    assert isinstance(outcome, Again)
    assert outcome.name is OutcomeName.SNOOZED
    assert outcome.inconclusive, "it may kill its executor yet"


async def test_an_end_that_postgres_refuses_is_no_failure_of_the_handler(
    connection: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
):
    """As where the role has lost a right on Sidings' own tables. With its last attempt the job was discarded."""
    registry, called = Registry(), list[int]()

    @registry.job(transactional=True, retry=Retry(wait=wait_fixed(0.1), stop=stop_after_attempt(1)))
    async def pay(job: Job[str]) -> None:
        called.append(job.attempt)
        await job.tx.execute("INSERT INTO effect VALUES ($1, 'paid')", job.id)

    async with a_role(database) as (role, dsn), running(dsn, registry):
        await connection.execute(f"GRANT ALL ON effect TO {role}; REVOKE UPDATE ON sidings.origin FROM {role}")
        await enqueue(database, pay, ["one"])
        await eventually(lambda: outcomes(connection))
        await connection.execute(f"GRANT UPDATE ON sidings.origin TO {role}")
        await drained(database)
    assert await connection.fetchval("SELECT count(*) FROM effect") == 1
    assert await outcomes(connection) == ["snoozed", "succeeded"]
    assert called == [1, 2]
    assert "Postgres refuses the end of the job: permission denied for table origin" in caplog.text


async def test_a_handler_may_take_another_role_for_its_statements(connection: asyncpg.Connection, database: str):
    """As for row-level security. The job's end is not that role's."""
    registry, ran = Registry(), list[str]()

    @registry.job(transactional=True)
    async def pay(job: Job[str]) -> None:
        await job.tx.execute(f"SET LOCAL ROLE {tenant}")
        ran.append(await job.tx.fetchval("SELECT current_user::text"))

    async with a_role(database) as (role, dsn), a_role(database) as (tenant, _):
        await connection.execute(f"REVOKE ALL ON SCHEMA sidings FROM {tenant}; GRANT {tenant} TO {role}")
        async with running(dsn, registry):
            await enqueue(database, pay, ["one"])
            await drained(database)
    assert ran == [tenant]

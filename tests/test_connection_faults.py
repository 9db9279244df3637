"""Connections that are cut or fall silent in the middle of a statement: nothing is lost, nothing is done twice."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from sidings.errors import PostgresUnavailable
from sidings.executor import PostgresSettings
from sidings.executor.clock import now
from sidings.executor.link import Link, connect
from sidings.jobs import Job, Registry

from .faulty_proxy import LATE_SECONDS, Moment, proxied
from .fleet import Fleet, until
from .outbox_support import relaying
from .support import ORIGIN, Ride, connected, drained, enqueue, eventually, outcomes, running, value

ORIGINS = ["t/0", "t/1", "t/2"]
LEFT = "SELECT date_part('epoch', lease_until - clock_timestamp()) FROM sidings.origin"
QUICK = {"call_seconds": 0.6, "connect_seconds": 1.0}


@pytest.mark.parametrize(
    "kind",
    [
        *["cycle", "read", "release", "finish"],
        *[pytest.param(kind, marks=pytest.mark.long) for kind in ("acquire", "renew", "promote", "begin", "commit")],
    ],
)
async def test_a_statement_whose_connection_fails_does_no_harm(database: str, tmp_path: Path, kind: str):
    async with (
        proxied(database) as proxy,
        Fleet(database, tmp_path, worker_dsn=proxy.dsn, executor={"lease_seconds": 1.5}, postgres=QUICK) as fleet,
        fleet.local(ORIGINS) as executor,
    ):
        for generation, moment in enumerate(Moment, start=2):
            await fleet.enqueue("step", ORIGINS, groups=4, each=3, ms=10)
            await fleet.enqueue("flaky", ORIGINS, groups=2, each=2, ms=5, fail=1, group="f")
            await fleet.enqueue("transfer", ORIGINS, each=3, ms=5, group="x")
            await fleet.enqueue("single", ORIGINS, each=3, delay=0.1)
            if kind == "acquire":
                executor.assign(ORIGINS[1:], 2 * generation)
            await executor.settled(20)
            fault = proxy.arm(kind, moment)
            executor.assign(ORIGINS[1:] if kind == "release" else ORIGINS, 2 * generation)
            await until(lambda: fault.hits, f"the fault: {moment.value}")  # noqa: B023
            executor.assign(ORIGINS, 2 * generation + 1)
            await fleet.finish()
            await until(lambda: set(executor.held) == set(ORIGINS), "all origins to be held")
        assert executor.problems() == []
        await executor.stop()
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()  # nobody has died
        assert {owner for owner, _ in (await fleet.owners()).values()} == {None}


@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name.lower())
async def test_a_release_that_fails_does_not_keep_the_next_owner_waiting(database: str, tmp_path: Path, moment: Moment):
    settings = {"lease_seconds": 60.0}
    async with (
        proxied(database) as proxy,
        Fleet(database, tmp_path, worker_dsn=proxy.dsn, executor=settings, postgres=QUICK) as fleet,
        fleet.local(ORIGINS) as one,
        fleet.local(dsn=database) as other,
    ):
        await fleet.enqueue("step", ORIGINS, groups=3, each=10, ms=10)
        await until(lambda: len(fleet.started()) > 10, "jobs to start")
        fault = proxy.arm("release", moment)
        one.assign(["t/0"], 2)
        other.assign(["t/1", "t/2"], 2)
        await other.settled(20)
        await until(lambda: fault.hits, "the fault")
        await fleet.finish()
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["check", "register"])
async def test_an_executor_starts_although_its_first_statements_fail(database: str, tmp_path: Path, kind: str):
    async with proxied(database) as proxy, Fleet(database, tmp_path, worker_dsn=proxy.dsn, postgres=QUICK) as fleet:
        for moment in Moment:
            await fleet.enqueue("step", ORIGINS, groups=2, each=2)
            times = 1 if moment is Moment.SLOW else 2  # a slow answer is one
            fault = proxy.arm(kind, moment, times)
            async with fleet.local(ORIGINS) as executor:
                await fleet.finish()
                await until(lambda: fault.hits == times, "the faults")  # noqa: B023
                assert executor.problems() == []
        await fleet.verify()


async def test_an_origin_that_is_acquired_while_a_void_cycle_is_looked_into_is_not_taken_for_lost(
    database: str, tmp_path: Path
):
    async with (
        proxied(database) as proxy,
        Fleet(database, tmp_path, worker_dsn=proxy.dsn, executor={"lease_seconds": 60.0}) as fleet,
        fleet.local(["t/0"], 1) as executor,
    ):
        await executor.settled(20)
        fault = proxy.arm("standing", Moment.SLOW)
        await fleet.fetch("UPDATE sidings.executor SET fence = fence + 1")
        await fleet.enqueue("step", ORIGINS[:2], groups=2, each=2)
        await until(lambda: fault.hits, "the question why the cycle was void")
        executor.assign(["t/0", "t/1"], 2)
        await fleet.finish()
        await fleet.verify()
        assert {epoch for _, epoch in (await fleet.owners()).values()} == {1}


@pytest.mark.parametrize("fault", ["cut", "silence"])
async def test_a_lease_that_expires_under_a_living_executor_is_no_loss(database: str, tmp_path: Path, fault: str):
    async with (
        proxied(database) as proxy,
        Fleet(database, tmp_path, worker_dsn=proxy.dsn, executor={"lease_seconds": 6.0}, postgres=QUICK) as fleet,
    ):
        gate = fleet.gate()
        jobs = await fleet.enqueue("step", ORIGINS, groups=3, each=2, gate=str(gate))
        # It would end itself with code 70 if a handler outlived the lease.
        member = fleet.spawn("cut off", ORIGINS, exit_when_fenced=True)
        await until(lambda: len(fleet.started()) == 9, "the first job of each group")
        before = await fleet.owners()
        getattr(proxy, fault)()
        await until(
            lambda: sum(r["event"] == "end" and r["how"] == "cancelled" for r in fleet.records()) == 9,
            "the cancellation of all handlers",
        )
        await until(lambda: now_expired(fleet), "the end of the lease")
        proxy.heal()
        gate.touch()
        await fleet.finish()
        assert member.exit_code is None
        assert await fleet.owners() == before  # resumed under the same epochs
        await member.stop()
        await fleet.verify()
        assert sorted(await fleet.outcomes()) == ["snoozed"] * 9 + ["succeeded"] * len(jobs)


@pytest.mark.parametrize("kind", ["acquire", "renew"])
async def test_a_lease_ends_here_before_it_ends_in_the_database_however_long_the_answer_took(database: str, kind: str):
    """It counts from the sending: of an answer nobody knows how much of its time was the way back."""
    async with (
        proxied(database) as proxy,
        running(proxy.dsn, Registry(), (), lease_seconds=1.5) as executor,
        connected(database) as other,
    ):
        assert executor.settings.margin_seconds < LATE_SECONDS
        proxy.arm(kind, Moment.SLOW, 100)
        executor.assign(["t/0"], 2)
        await executor.settled(20)
        queue, seen = executor.scheduler.origins["t/0"], 0.0
        for _ in range(1 if kind == "acquire" else 4):
            await eventually(lambda: queue.deadline > seen, "the next answer")  # noqa: B023
            seen = queue.deadline
            left = await other.fetchval(
                "SELECT date_part('epoch', lease_until - clock_timestamp()) FROM sidings.origin"
            )
            assert seen < now() + left


async def test_the_lease_of_a_slot_counts_from_the_sending_too(database: str, sidings_kafka: str):
    async with proxied(database) as proxy, connected(database) as other:
        proxy.arm("acquire", Moment.SLOW, 100)
        proxy.arm("renew", Moment.BEFORE, 100)  # which would count from another sending
        async with relaying(proxy.dsn, sidings_kafka, lease_seconds=1.5) as relay:
            slots = await eventually(lambda: list(relay.backlog.slots.values()))
            left = await other.fetchval(
                "SELECT date_part('epoch', lease_until - clock_timestamp()) FROM sidings.origin WHERE origin = $1",
                slots[0].name,
            )
            assert slots[0].deadline < now() + left


async def test_a_renewal_that_is_not_answered_is_given_up_while_there_is_time_for_another(database: str):
    """A call may take longer than a lease lasts. Handlers would be cancelled because of one connection that hangs."""
    registry = Registry()
    begun, go = asyncio.Event(), asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        begun.set()
        await go.wait()

    async with (
        proxied(database) as proxy,
        running(proxy.dsn, registry, lease_seconds=6.0) as executor,
        connected(database) as other,
    ):
        await enqueue(database, ride, [Ride()])
        await begun.wait()
        fault = proxy.arm("renew", Moment.SILENT_BEFORE)
        executor._leases.renew_soon()
        await eventually(lambda: fault.hits)
        before = await other.fetchval("SELECT lease_until FROM sidings.origin")
        grown = "SELECT lease_until > $1 FROM sidings.origin"
        await eventually(lambda: other.fetchval(grown, before), "another renewal")
        go.set()
        await drained(database)
    assert await outcomes(database) == ["succeeded"]  # it was not cancelled meanwhile


async def test_a_read_that_fails_forgets_no_transaction_that_was_open(database: str):
    """Rows of it stand behind the marks of the reads before."""
    registry = Registry()
    order: list[int] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        order.append(job.payload.number)

    async with (
        proxied(database) as proxy,
        running(proxy.dsn, registry, audit_seconds=1_000),
        connected(database) as late,
    ):
        async with late.transaction():
            await ride.enqueue(late, Ride(number=1), origin=ORIGIN)
            await enqueue(database, ride, [Ride(number=2)])
            await eventually(lambda: order == [2])
            fault = proxy.arm("read", Moment.BEFORE)
            await eventually(lambda: fault.hits)
            await enqueue(database, ride, [Ride(number=3)])
            await eventually(lambda: order == [2, 3])
        await eventually(lambda: order == [2, 3, 1])


async def now_expired(fleet: Fleet) -> bool:
    return await fleet.fetchval("SELECT bool_and(lease_until < clock_timestamp()) FROM sidings.origin")


@pytest.mark.parametrize("busy_with", ["an origin that another holds", "a drain"])
async def test_handlers_stop_before_their_deadline_whatever_the_reconciler_waits_for(
    database: str, tmp_path: Path, busy_with: str
):
    """With Postgres silent, an acquire or the cycle before a release takes its time: the deadlines do not wait."""
    settings = {"lease_seconds": 6.0}
    async with (
        proxied(database) as proxy,
        Fleet(database, tmp_path, worker_dsn=proxy.dsn, executor=settings, postgres={"call_seconds": 20.0}) as fleet,
        fleet.local(["t/9"], 5, dsn=database) as other,
    ):
        await other.settled(20)
        gate = fleet.gate()
        await fleet.enqueue("step", ORIGINS, groups=3, each=2, gate=str(gate))
        wanted = [*ORIGINS, "t/8", *(["t/9"] if busy_with.startswith("an origin") else [])]
        member = fleet.spawn("cut off", wanted)
        await until(lambda: len(fleet.started()) == 9, "the first job of each group")
        proxy.silence()
        member.assign([name for name in wanted if name != "t/8"], 2)
        await until(
            lambda: sum(r["event"] == "end" and r["how"] == "cancelled" for r in fleet.records()) >= 9,
            "the cancellation of all handlers",
        )
        gate.touch()
        proxy.heal()
        await fleet.finish()
        assert member.exit_code is None
        await member.stop()
        await fleet.verify()
        assert "lost" not in await fleet.outcomes()


@pytest.mark.parametrize("pgbouncer", [False, True])
async def test_a_statement_that_is_given_up_ends_in_the_server(database: str, pgbouncer: bool):
    """A client that goes away does not end a scan: those of reads over millions of rows would pile up."""
    link = Link(PostgresSettings(dsn=database, call_seconds=0.5, pgbouncer=pgbouncer))
    with pytest.raises(PostgresUnavailable):
        await link.fetch("SELECT 'abandoned', pg_sleep(30)")
    await eventually(
        lambda: value(
            database,
            "SELECT count(*) = 0 FROM pg_stat_activity "
            "WHERE query LIKE '%''abandoned''%' AND state = 'active' AND pid <> pg_backend_pid()",
        ),
        "the end of the statement",
        seconds=5,
    )
    await link.close()


async def test_a_server_goes_on_with_no_statement_for_longer_than_is_waited_for_it(database: str):
    """After a quick answer the connection still had the limit of the long ones: what was given up went on, with the
    lock that it had taken, against which the next try came."""
    link = Link(PostgresSettings(dsn=database, call_seconds=1.5))
    limit = "SELECT current_setting('statement_timeout')"
    try:
        await link.fetch_long("SELECT pg_sleep(2)")
        assert (link.patience, (await link.fetch(limit))[0][0]) == (2, "3s")
        await link.fetch_long("SELECT", tells=lambda _: False)
        assert (link.patience, (await link.fetch(limit))[0][0]) == (2, "3s")
        await link.fetch_long("SELECT")
        assert (link.patience, (await link.fetch(limit))[0][0]) == (1, "1500ms")
    finally:
        await link.close()


async def test_a_session_that_the_server_has_ended_is_told_as_such(database: str):
    """It was asyncpg's "cannot switch to state 12; another operation (2) is in progress", as of a fault in the service:
    the next statement came after the server's last message, and before the end of the connection."""
    link = Link(PostgresSettings(dsn=database))
    session = (await link.fetch("SELECT pg_backend_pid()"))[0][0]
    with psycopg.connect(database, autocommit=True) as other:  # the event loop sees nothing of it meanwhile
        other.execute("SELECT pg_terminate_backend(%s, 5000)", [session])
    for _ in range(2):  # of its turns; it reads the message in the second
        await asyncio.sleep(0)
    with pytest.raises(PostgresUnavailable, match=r"^Postgres did not answer: it has ended the session$"):
        await link.fetch("SELECT 1")
    assert (await link.fetch("SELECT 1"))[0][0] == 1
    link.drop()


async def test_a_statement_that_is_not_answered_is_no_want_of_connections_where_there_is_no_pgbouncer(database: str):
    """Each try is the first statement of a connection. While Postgres was slow, the log thought of a PgBouncer."""
    async with proxied(database) as proxy:
        link = Link(PostgresSettings(dsn=proxy.dsn, call_seconds=2.0))
        fault = proxy.arm("standing", Moment.SILENT_BEFORE)
        with pytest.raises(PostgresUnavailable) as raised:
            await link.fetch("SELECT e.cycle, e.fence FROM sidings.executor e")
        assert (fault.hits, str(raised.value)) == (1, "Postgres did not answer: TimeoutError")
        link.drop()


@pytest.mark.parametrize("pgbouncer", [False, True])
async def test_a_statement_is_given_up_in_time_where_nothing_passes_any_more(database: str, pgbouncer: bool):
    """Through PgBouncer it is a transaction, whose ROLLBACK waited for its answer: no lease was renewed, for ever."""
    async with proxied(database) as proxy:
        link = Link(PostgresSettings(dsn=proxy.dsn, call_seconds=2.0, pgbouncer=pgbouncer))
        proxy.arm("standing", Moment.SILENT_BEFORE)
        fetching = asyncio.create_task(link.fetch("SELECT e.cycle, e.fence FROM sidings.executor e"))
        await asyncio.wait([fetching], timeout=12)
        assert fetching.done()
        assert isinstance(fetching.exception(), PostgresUnavailable)
        assert await link.fetch("SELECT")
        await link.close()


async def test_a_statement_is_given_up_in_time_where_the_end_of_another_is_not_answered(database: str):
    """asyncpg keeps a hundred prepared statements, each for five minutes. That it keeps one no more it told the server
    after the next one was prepared, and waited for the answer, for ever."""
    async with proxied(database) as proxy:
        link = Link(PostgresSettings(dsn=proxy.dsn, call_seconds=1.0))
        fault = proxy.arm("close", Moment.SILENT_BEFORE)
        number = 0
        while not fault.hits:
            fetching = asyncio.create_task(link.fetch(f"SELECT {(number := number + 1)}"))
            await asyncio.wait([fetching], timeout=12)
            assert fetching.done()
        assert isinstance(fetching.exception(), PostgresUnavailable)
        assert await link.fetch("SELECT")
        await link.close()


async def test_a_connection_is_closed_at_once_where_nothing_passes_any_more(database: str):
    """asyncpg's close waited for an answer to the statement's cancellation, without limit: so did the stop."""
    async with proxied(database) as proxy:
        link = Link(PostgresSettings(dsn=proxy.dsn, call_seconds=60.0))
        await link.fetch("SELECT")
        fault = proxy.arm("standing", Moment.SILENT_BEFORE)
        fetching = asyncio.create_task(link.fetch("SELECT e.cycle, e.fence FROM sidings.executor e"))
        await eventually(lambda: fault.hits == 1, "the statement is under way")
        with pytest.raises(StopIteration):  # it has waited for nobody
            link.close().send(None)
        with pytest.raises(PostgresUnavailable):
            await fetching


async def test_statements_wait_for_their_turn_and_one_that_is_given_up_meanwhile_ends_no_other(database: str):
    link = Link(PostgresSettings(dsn=database, call_seconds=60.0))
    await link.fetch("SET lock_timeout = 0")
    async with connected(database) as other:
        await other.execute("SELECT pg_advisory_lock(1)")
        first, second, third = (
            asyncio.create_task(link.fetch(f"SELECT {number} AS n{lock}"))
            for number, lock in ((1, ", pg_advisory_xact_lock_shared(1)"), (2, ""), (3, ""))
        )
        waits = "SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE query LIKE '%xact_lock_shared(1)'"
        await eventually(lambda: value(database, waits), "the first waits")
        second.cancel()
        await asyncio.wait([second])
        assert not first.done()
        assert not third.done()
        await other.execute("SELECT pg_advisory_unlock(1)")
    assert second.cancelled()
    assert [rows[0]["n"] for rows in await asyncio.gather(first, third)] == [1, 3]
    await link.close()


async def test_a_statement_that_nobody_gives_up_may_take_longer(database: str):
    """As a reset of offsets does, which may have to cancel a million jobs."""
    connection = await connect(PostgresSettings(dsn=database, call_seconds=0.1))
    assert await connection.fetchval("SELECT 1 FROM pg_sleep(0.5)") == 1
    await connection.close()


async def test_an_executor_goes_on_when_there_was_no_thread_to_look_up_the_server(
    database: str, caplog: pytest.LogCaptureFixture
):
    """As at a container's limit. It ended, and with it its process."""
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    before = threading.stack_size()
    async with running(database.replace("127.0.0.1", "localhost"), registry), connected(database) as admin:
        try:
            threading.stack_size(1 << 46)  # more than there is: so no thread can be started
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())  # the former has one
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid()"
            )
            await eventually(lambda: "can't start new thread" in caplog.text, "the server cannot be looked up")
        finally:
            threading.stack_size(before)
        await enqueue(database, ride, [Ride()])
        await drained(database)

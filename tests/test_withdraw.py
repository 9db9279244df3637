"""Delayed jobs that are withdrawn in a transaction, while executors promote them."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any

import asyncpg
import psycopg
import pytest
from sidings.errors import Busy, EnqueueError, NotInTransaction
from sidings.executor.glance import GLANCE_FROM
from sidings.jobs import Job, Registry, Retry, Transaction
from sidings.jobs.admin import Admin
from sidings.kafka import partition_for
from sidings.schema import load_sql, migrate
from tenacity import wait_fixed

from .guide import block
from .guide import run as guide
from .support import ORIGIN, Ride, connected, drained, enqueue, eventually, fetch, history, jobs_left, running, value
from .ways import WAYS, opened

PAGE = "enqueueing.md"
HOUR = 3_600


def declare(schema: str = "sidings", **options: Any) -> Any:
    registry = Registry(schema=schema)

    async def ride(job: Job[Ride]) -> None: ...

    return registry.job(**options)(ride)


async def withdrawn(dsn: str, job_type: Any, *args: Any, **options: Any) -> bool:
    """Withdraw in a transaction of its own."""
    async with connected(dsn) as connection, connection.transaction():
        return await job_type.withdraw(connection, *args, **options)


async def until_it_waits(observer: asyncpg.Connection, connection: asyncpg.Connection) -> None:
    pid = connection.get_server_pid()
    await eventually(lambda: observer.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid), "it waits")


# -- in the caller's transaction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
async def test_a_job_is_withdrawn_if_and_only_if_the_callers_transaction_commits(database: str, name: str):
    ride = declare(group="transport")
    [by_id] = await enqueue(database, ride, [Ride(transport="a", number=1)], delay=HOUR)
    async with connected(database) as connection, connection.transaction():
        by_key = await ride.enqueue(connection, Ride(number=2), origin=ORIGIN, group="b", delay=HOUR, unique_key="k")
    async with opened(name, database) as way:
        for ending in ("ROLLBACK", "COMMIT"):
            await way.begin()
            assert await way.withdraw(ride, by_id) is True
            assert await way.withdraw(ride, unique_key="k") is True
            assert [await way.withdraw(ride, by_id), await way.withdraw(ride, unique_key="k")] == [False, False]
            assert await jobs_left(database) == 2
            await way.end(ending)
            assert await jobs_left(database) == (2 if ending == "ROLLBACK" else 0)
    rows = await history(database, "job_id, outcome, attempt, due_at > now() AS early, started_at, payload::text")
    assert sorted(tuple(row) for row in rows) == [
        (by_id, "cancelled", 1, True, None, '{"transport":"a","number":1}'),
        (by_key, "cancelled", 1, True, None, '{"transport":"","number":2}'),
    ]


@pytest.mark.parametrize("name", WAYS)
async def test_a_job_is_put_off_by_withdrawing_it_and_enqueueing_it_anew(database: str, name: str):
    ride = declare()
    key = {"origin": ORIGIN, "unique_key": "k"}
    async with opened(name, database) as way:
        await way.begin()
        first = await way.enqueue(ride, Ride(), delay=HOUR, **key)
        assert await way.enqueue(ride, Ride(), delay=2 * HOUR, **key) == first
        await way.end("COMMIT")
        await way.begin()
        assert await way.withdraw(ride, unique_key="k")
        second = await way.enqueue(ride, Ride(), delay=2 * HOUR, **key)
        await way.end("COMMIT")
    rows = await fetch(database, "SELECT id, run_at - enqueued_at > interval '119 min' AS later FROM sidings.job")
    assert [tuple(row) for row in rows] == [(second, True)]
    assert second != first


@pytest.mark.parametrize("name", WAYS)
async def test_what_is_refused_leaves_the_transaction_usable(database: str, name: str):
    ride = declare()
    [id] = await enqueue(database, ride, [Ride()], delay=HOUR)
    async with opened(name, database, autocommit=True) as way:
        with pytest.raises(NotInTransaction, match="the job's withdrawal could not commit together with the state"):
            await way.withdraw(ride, id)
    async with opened(name, database) as way:
        await way.begin()
        for args, options, told in (
            ((), {}, "ride: give job_id= or unique_key= to withdraw a job, one of the two"),
            ((id,), {"unique_key": "k"}, "one of the two"),
            ((str(id),), {}, f"job_id='{id}' is no job's id: give what `enqueue` has returned"),
            ((True,), {}, "job_id=True is no job's id"),
            ((2**63,), {}, "is no job's id"),
            ((), {"unique_key": 7}, "unique_key=7 is no text"),
            ((), {"unique_key": "a\0"}, "unique_key='a"),
            ((), {"unique_key": ""}, "unique_key is empty: give the one that the job was enqueued with"),
        ):
            with pytest.raises(EnqueueError, match=told):
                await way.withdraw(ride, *args, **options)
        assert await way.withdraw(ride, id)
        await way.end("COMMIT")
    assert await jobs_left(database) == 0


async def test_a_connection_of_the_other_kind_is_told_the_right_call(database: str):
    ride = declare()
    with (
        psycopg.connect(database) as sync,
        pytest.raises(EnqueueError, match=r"Connection is synchronous: call withdraw_sync, without await"),
    ):
        await ride.withdraw(sync, 1)
    async with connected(database) as connection:
        with pytest.raises(EnqueueError, match=r"Connection is asynchronous: call `await withdraw\(\.\.\.\)`$"):
            ride.withdraw_sync(connection, 1)
    with pytest.raises(EnqueueError, match=r"a job's withdrawal cannot be stored through builtins\.int"):
        await ride.withdraw(1, 1)


async def test_a_call_that_is_not_awaited_commits_nothing(database: str):
    ride = declare()
    async with connected(database) as connection, connection.transaction():
        tx = Transaction(connection)
        ride.withdraw(tx, 1)
        with pytest.raises(RuntimeError, match=r"ride\.withdraw\(\) was called and not awaited"):
            tx.check_awaited()


# -- which jobs ---------------------------------------------------------------------------------------------------


async def test_no_job_of_another_type_or_schema_is_withdrawn(database: str):
    ride, other, elsewhere = declare(), declare(name="other"), declare("elsewhere")
    await migrate(database, service="test", schema="elsewhere")
    async with connected(database) as connection, connection.transaction():
        id = await ride.enqueue(connection, Ride(), origin=ORIGIN, delay=HOUR, unique_key="k")
    for job_type in (other, elsewhere):
        assert not await withdrawn(database, job_type, id)
        assert not await withdrawn(database, job_type, unique_key="k")
    assert not await withdrawn(database, ride, id + 1)
    assert not await withdrawn(database, ride, unique_key="l")
    async with connected(database) as connection, connection.transaction():
        await elsewhere.enqueue(connection, Ride(), origin=ORIGIN, delay=HOUR, unique_key="k")
    assert await withdrawn(database, elsewhere, unique_key="k")
    assert await jobs_left(database) == 1
    assert await value(database, "SELECT outcome FROM elsewhere.job_history") == "cancelled"


async def test_a_job_whose_time_has_come_is_not_withdrawn(database: str):
    registry, gate = Registry(), asyncio.Event()

    @registry.job()
    async def wait(job: Job[Ride]) -> None:
        await gate.wait()

    @registry.job(retry=Retry(wait=wait_fixed(HOUR)))
    async def fail(job: Job[Ride]) -> None:
        raise ValueError

    [held] = await enqueue(database, wait, [Ride()], delay=HOUR)
    await fetch(database, "UPDATE sidings.job SET held = 'why'")
    [waiting] = await enqueue(database, wait, [Ride()], origin="transports/1")
    [runs] = await enqueue(database, wait, [Ride()])
    [failed] = await enqueue(database, fail, [Ride()])
    async with running(database, registry):
        delayed = "SELECT count(*) = 1 FROM sidings.job WHERE id = $1 AND position IS NULL AND attempt = 2"
        await eventually(
            lambda: value(database, delayed, failed), "it has no group, so it is delayed when it has failed"
        )
        await eventually(lambda: value(database, "SELECT $1 = ANY (running) FROM sidings.executor", runs))
        for job_type, id in ((wait, held), (wait, waiting), (wait, runs), (fail, failed)):
            assert not await withdrawn(database, job_type, id)
        gate.set()
        await eventually(lambda: value(database, "SELECT count(*) = 0 FROM sidings.job WHERE id = $1", runs))
        assert not await withdrawn(database, wait, runs)
    assert {row[0] for row in await fetch(database, "SELECT id FROM sidings.job")} == {held, waiting, failed}


async def test_a_type_without_history_leaves_none(database: str):
    ride = declare(history=False)
    [id] = await enqueue(database, ride, [Ride()], delay=HOUR)
    assert await withdrawn(database, ride, id)
    assert await jobs_left(database) == len(await history(database)) == 0


async def test_a_withdrawn_job_can_be_requeued(database: str):
    ride = declare()
    [id] = await enqueue(database, ride, [Ride(number=7)], delay=HOUR)
    assert await withdrawn(database, ride, id)
    async with connected(database) as connection:
        new = await Admin(connection, actor="test").requeue(id)
    [row] = await fetch(
        database, "SELECT id, position IS NOT NULL AS waits, payload ->> 'number' AS n FROM sidings.job"
    )
    assert tuple(row) == (new, True, "7")


async def test_what_a_job_of_policy_latest_has_superseded_does_not_come_back(database: str):
    registry, seen = Registry(), []

    @registry.job(group="transport", policy="latest")
    async def newest(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    await enqueue(database, newest, [Ride(transport="a", number=1)], delay=0.01)
    [last] = await enqueue(database, newest, [Ride(transport="a", number=2)], delay=HOUR)
    async with running(database, registry):
        await eventually(lambda: value(database, "SELECT count(*) = 1 FROM sidings.job_history"), "1 is superseded")
        assert await withdrawn(database, newest, last)
        await enqueue(database, newest, [Ride(transport="a", number=3)])
        await drained(database)
    assert seen == [3]
    assert [row["outcome"] for row in await history(database)] == ["superseded", "cancelled", "succeeded"]


# -- with others at work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
async def test_of_two_transactions_one_withdraws_the_job(database: str, ending: str):
    ride = declare()
    [id] = await enqueue(database, ride, [Ride()], delay=HOUR)
    async with connected(database) as first, connected(database) as second, connected(database) as observer:
        await first.execute("BEGIN")
        assert await ride.withdraw(first, id)
        async with second.transaction():
            waits = asyncio.create_task(ride.withdraw(second, id))
            await until_it_waits(observer, second)
            await first.execute(ending)
            assert await waits is (ending == "ROLLBACK")
    assert await jobs_left(database) == 0
    assert [row["outcome"] for row in await history(database)] == ["cancelled"]


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
async def test_an_enqueue_of_the_key_waits_until_it_is_known_whether_the_job_is_withdrawn(database: str, ending: str):
    ride = declare()
    options = {"origin": ORIGIN, "delay": HOUR, "unique_key": "k"}
    async with connected(database) as first, connected(database) as second, connected(database) as observer:
        async with first.transaction():
            id = await ride.enqueue(first, Ride(), **options)
        await first.execute("BEGIN")
        assert await ride.withdraw(first, unique_key="k")
        async with second.transaction():
            waits = asyncio.create_task(ride.enqueue(second, Ride(), **options))
            await until_it_waits(observer, second)
            await first.execute(ending)
            assert (await waits == id) is (ending == "ROLLBACK")
    assert await jobs_left(database) == 1


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read", "serializable"])
@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
async def test_a_job_that_is_just_promoted_is_not_withdrawn(database: str, isolation: Any, ending: str):
    ride = declare()
    [id] = await enqueue(database, ride, [Ride()], run_at=datetime.now(UTC) - timedelta(seconds=1))
    async with connected(database) as executor, connected(database) as mine, connected(database) as observer:
        me = await executor.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)"
        epoch = await executor.fetchval(acquire, me)
        transaction = mine.transaction(isolation=isolation)
        await transaction.start()
        await mine.fetch("SELECT FROM sidings.job")
        await executor.execute("BEGIN")
        promote = load_sql("sidings.executor", "promote")
        row = await executor.fetchrow(promote, me, [ORIGIN], [epoch], 10, [], None, None)
        assert row is not None
        assert row["promoted"] == 1
        waits = asyncio.create_task(ride.withdraw(mine, id))
        await until_it_waits(observer, mine)
        await executor.execute(ending)
        if ending == "COMMIT" and isolation != "read_committed":
            with pytest.raises(asyncpg.SerializationError):
                await waits
            await transaction.rollback()
        else:
            assert await waits is (ending == "ROLLBACK")
            await transaction.commit()
    assert await jobs_left(database) == (ending == "COMMIT")


async def test_an_open_withdrawal_holds_up_only_what_is_due_after_it_in_its_group(database: str):
    registry, seen = Registry(), list[tuple[str, int]]()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        seen.append((job.payload.transport, job.payload.number))

    async with connected(database) as mine, AsyncExitStack() as stack:
        async with mine.transaction():
            [id] = await enqueue(database, ride, [Ride(transport="a", number=1)], delay=0.1)
            assert await ride.withdraw(mine, id)
            await enqueue(database, ride, [Ride(transport="a", number=2)], delay=0.2)
            await enqueue(database, ride, [Ride(transport="a", number=3)])
            await enqueue(database, ride, [Ride(transport="b", number=4)], delay=0.3)
            await stack.enter_async_context(running(database, registry))
            await eventually(lambda: {("a", 3), ("b", 4)} <= {*seen}, "the others run", seconds=10)
            with pytest.raises(Busy):
                async with connected(database) as person:
                    await Admin(person, actor="test").cancel(id)
            await enqueue(database, ride, [Ride(transport="c", number=5)])
            await eventually(lambda: ("c", 5) in seen, "and go on", seconds=10)
            assert ("a", 2) not in seen
        await drained(database)
    assert sorted(seen) == [("a", 2), ("a", 3), ("b", 4), ("c", 5)]


async def days_of_the_history(dsn: str) -> list[int]:
    """Which days have a partition, counted from today."""
    query = """SELECT to_date(right(c.relname, 8), 'YYYYMMDD') - (now() AT TIME ZONE 'UTC')::date AS day
               FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
               WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '\\d{8}$' ORDER BY day"""
    return [row["day"] for row in await fetch(dsn, query)]


async def without_the_day(dsn: str, ahead: int) -> None:
    day = await value(dsn, "SELECT to_char((now() AT TIME ZONE 'UTC')::date + $1::int, 'YYYYMMDD')", ahead)
    await fetch(dsn, f"DROP TABLE sidings.job_history_{day}")


@pytest.mark.parametrize("found", [False, True])
async def test_an_open_withdrawal_that_leaves_no_history_keeps_no_day_from_being_made_or_dropped(
    database: str, found: bool
):
    ride = declare(history=False)
    [id] = await enqueue(database, ride, [Ride()], delay=HOUR)
    await fetch(database, "SELECT sidings.make_history_day((now() AT TIME ZONE 'UTC')::date - 40)")
    await without_the_day(database, 2)
    assert await days_of_the_history(database) == [-40, 0, 1]
    async with connected(database) as connection, connection.transaction():
        assert await ride.withdraw(connection, id if found else id + 1) is found
        await fetch(database, "SELECT sidings.maintain(30)")
        assert await days_of_the_history(database) == [0, 1, 2]


@pytest.mark.parametrize("what", ["dropped", "made"])
async def test_a_day_that_is_overdue_has_its_turn_although_transactions_that_withdraw_overlap(database: str, what: str):
    """Each of them has the history until it ends: three tenths of a second were never enough."""
    ride = declare()
    ids = await enqueue(database, ride, [Ride()] * 11, delay=HOUR)
    if what == "dropped":
        await fetch(database, "SELECT sidings.make_history_day((now() AT TIME ZONE 'UTC')::date - 40)")
    else:
        await without_the_day(database, 1)
    waits = """SELECT count(*) > 0 FROM pg_locks
               WHERE pid = $1 AND NOT granted AND waitstart < clock_timestamp() - interval '0.5 seconds'"""
    async with connected(database) as mine, connected(database) as other, connected(database) as retention:
        pid, transaction = retention.get_server_pid(), mine.transaction()
        await transaction.start()
        assert await ride.withdraw(mine, ids.pop())
        for _ in range(10):
            maintaining = asyncio.create_task(retention.execute("SELECT sidings.maintain(30)"))
            while not (maintaining.done() or await value(database, waits, pid)):
                await asyncio.sleep(0.01)
            following = other.transaction()
            await following.start()
            withdrawing = asyncio.create_task(ride.withdraw(other, ids.pop()))
            if maintaining.done():
                assert await withdrawing
            await transaction.commit()
            assert await withdrawing
            await maintaining
            mine, other, transaction = other, mine, following
            if await days_of_the_history(database) == [0, 1, 2]:
                break
        else:
            pytest.fail(f"it is never {what}")
        await transaction.commit()
    assert await history(database, "outcome") == [("cancelled",)] * (11 - len(ids))


async def test_a_job_that_is_due_while_it_is_withdrawn_runs_after_a_rollback(database: str):
    """Also where the executor has so many origins that it looks only when something has been committed."""
    registry, ran = Registry(), asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        ran.set()

    origins = [f"t/{n}" for n in range(GLANCE_FROM)]
    async with connected(database) as mine, running(database, registry, origins) as executor:
        [id] = await enqueue(database, ride, [Ride()], origin="t/7", delay=0.1)
        await mine.execute("BEGIN")
        assert await ride.withdraw(mine, id)
        promoter = executor._promoter
        await eventually(lambda: promoter._done and promoter._looked_at[1] == id, "it was passed over")
        await mine.execute("ROLLBACK")
        await eventually(ran.is_set)


async def test_each_job_is_either_withdrawn_or_run_while_an_executor_promotes(database: str):
    """Those are withdrawn that are due in this moment, by several at once, and a part of that is rolled back; and some
    that are due in an hour."""
    registry, ran, gone = Registry(), Counter[int](), Counter[int]()

    @registry.job(group="transport")
    async def grouped(job: Job[Ride]) -> None:
        ran[job.id] += 1

    @registry.job()
    async def alone(job: Job[Ride]) -> None:
        ran[job.id] += 1

    due = """SELECT id, type FROM sidings.job
             WHERE payload ->> 'transport' <> 'left alone'
               AND (run_at < clock_timestamp() + interval '2 ms' OR run_at > clock_timestamp() + interval '30 min')
             ORDER BY random() LIMIT 4"""

    async def withdraw() -> None:
        async with connected(database) as connection:
            while await connection.fetchval("SELECT EXISTS (SELECT FROM sidings.job)"):
                for id, name in await connection.fetch(due):
                    transaction = connection.transaction()
                    await transaction.start()
                    taken = await (grouped if name == "grouped" else alone).withdraw(connection, id)
                    if random.random() < 0.3:
                        await transaction.rollback()
                    else:
                        await transaction.commit()
                        gone[id] += taken

    ids = list[int]()
    start = datetime.now(UTC) + timedelta(seconds=1)
    async with connected(database) as connection, connection.transaction():
        for n in range(800):
            job_type, run_at = (grouped, alone)[n % 2], start + timedelta(milliseconds=2 * n, hours=n % 10 == 1)
            payload = Ride(transport="left alone" if n % 10 == 0 else str(n % 7), number=n)
            ids.append(await job_type.enqueue(connection, payload, origin=ORIGIN, run_at=run_at))
    async with running(database, registry):
        await asyncio.gather(*(withdraw() for _ in range(3)))
    gone = +gone
    assert len(ran) >= 80 <= len(gone)
    assert ran + gone == Counter(ids), "each once"
    rows = await history(database, "job_id, outcome")
    assert {row["job_id"] for row in rows if row["outcome"] == "cancelled"} == {*gone}
    assert {row["job_id"] for row in rows if row["outcome"] == "succeeded"} == {*ran}
    assert len(rows) == len(ids)


async def test_a_transactional_job_withdraws_another_in_the_transaction_that_ends_it(database: str):
    registry = Registry()

    @registry.job()
    async def remind(job: Job[Ride]) -> None: ...

    @registry.job(transactional=True, retry=Retry(wait=wait_fixed(0.01)))
    async def pay(job: Job[Ride]) -> None:
        assert await remind.withdraw(job.tx, unique_key="k")
        if job.attempt == 1:
            raise ValueError

    async with connected(database) as connection, connection.transaction():
        id = await remind.enqueue(connection, Ride(), origin=ORIGIN, delay=HOUR, unique_key="k")
        await pay.enqueue(connection, Ride(), origin=ORIGIN)
    async with running(database, registry):
        await drained(database)
    rows = await fetch(database, "SELECT outcome, job_id = $1 AS it FROM sidings.job_history ORDER BY finished_at", id)
    assert [tuple(row) for row in rows] == [("retried", False), ("cancelled", True), ("succeeded", False)]


# -- from SQL -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["job_id", "unique_key"])
async def test_a_job_from_sql_is_withdrawn_by_sql_if_and_only_if_the_transaction_commits(database: str, by: str):
    enqueue = "SELECT sidings.enqueue('ride', '{}', 't/0', delay => '1 hour', unique_key => 'k')"
    async with connected(database) as connection:
        id = await connection.fetchval(enqueue)
        what = f"job_id => {id}" if by == "job_id" else "unique_key => 'k'"
        for ending in ("ROLLBACK", "COMMIT"):
            await connection.execute("BEGIN")
            assert not await connection.fetchval(f"SELECT sidings.withdraw('other', {what})")
            assert await connection.fetchval(f"SELECT sidings.withdraw('ride', {what})") is True
            assert await connection.fetchval(f"SELECT sidings.withdraw('ride', {what})") is False
            await connection.execute(ending)
            assert await jobs_left(database) == (ending == "ROLLBACK")
        [row] = await history(database, "job_id, outcome, error_class")
        assert tuple(row) == (id, "cancelled", "Cancelled")
        id = await connection.fetchval(enqueue)
        assert await connection.fetchval("SELECT sidings.withdraw('ride', $1, history => false)", id)
        at_once = await connection.fetchval("SELECT sidings.enqueue('ride', '{}', 't/0')")
        assert not await connection.fetchval("SELECT sidings.withdraw('ride', $1)", at_once)
    assert len(await history(database)) == 1


@pytest.mark.parametrize(
    ("arguments", "told", "hint"),
    [
        ("'', 1", "the job to be withdrawn has no type", "the name of its handler"),
        ("NULL, 1", "the job to be withdrawn has no type", "the name of its handler"),
        ("'ride'", "of the job 'ride' to be withdrawn neither job_id nor unique_key is given", "one of them"),
        ("'ride', NULL", "of the job 'ride' to be withdrawn neither job_id nor unique_key is given", "one of them"),
        ("'ride', 1, 'k'", "of the job 'ride' to be withdrawn both job_id and unique_key are given", "one of them"),
        ("'ride', unique_key => ''", "the unique_key of the job 'ride' is empty", "that it was enqueued with"),
        ("'ride', 1, history => NULL", "history is NULL for the job 'ride'", "if its type has history=False"),
    ],
)
async def test_what_sql_cannot_withdraw_is_refused_with_a_hint_and_spoils_no_more_than_its_savepoint(
    database: str, arguments: str, told: str, hint: str
):
    ride = declare()
    [id] = await enqueue(database, ride, [Ride()], delay=HOUR)
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
            async with connection.transaction():  # a savepoint
                await connection.execute(f"SELECT sidings.withdraw({arguments})")
        assert caught.value.message == told
        assert hint in str(caught.value.hint)
        assert await connection.fetchval("SELECT sidings.withdraw('ride', $1)", id)
    assert await jobs_left(database) == 0


async def test_a_function_of_the_owner_withdraws_for_a_role_that_may_do_nothing_else(database: str):
    ride, role = declare(), f"app_{token_hex(6)}"
    async with connected(database) as connection:
        async with connection.transaction():
            await ride.enqueue(connection, Ride(), origin=ORIGIN, delay=HOUR, unique_key="k")
        await connection.execute(
            f"""CREATE FUNCTION forget_ride(key text) RETURNS boolean
                LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
                AS $$ SELECT sidings.withdraw('ride', unique_key => key) $$;
                CREATE ROLE {role}; GRANT USAGE ON SCHEMA sidings TO {role}"""
        )
        try:
            await connection.execute(f"SET SESSION AUTHORIZATION {role}")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute("SELECT sidings.withdraw('ride', unique_key => 'k')")
            assert await connection.fetchval("SELECT forget_ride('k')")
        finally:
            await connection.execute(f"RESET SESSION AUTHORIZATION; DROP OWNED BY {role}; DROP ROLE {role}")
    assert [row["outcome"] for row in await history(database)] == ["cancelled"]


# -- the guide ----------------------------------------------------------------------------------------------------


async def test_the_reminder_of_the_guide_is_put_off_and_dropped(database: str):
    names, until = guide(PAGE, "", "Taking a delayed job back"), datetime(2040, 1, 1, tzinfo=UTC)
    left = "SELECT origin, run_at FROM sidings.job"

    async def called(*calls: Awaitable[Any]) -> None:
        for call in calls:
            async with connection.transaction():
                await call

    async with connected(database) as connection:
        await connection.execute(
            "CREATE TABLE purchase (id text PRIMARY KEY, paid bool NOT NULL DEFAULT false);"
            "INSERT INTO sidings.topic (topic, partitions) VALUES ('orders', 24)"
        )
        await called(names["ordered"](connection, "o-1"))
        [row] = await connection.fetch("SELECT origin, run_at - enqueued_at > '23 h' AS later FROM sidings.job")
        assert tuple(row) == (f"orders/{partition_for(b'o-1', 24)}", True)
        await called(names["put_off"](connection, "o-1", until))
        assert [row["run_at"] for row in await connection.fetch(left)] == [until]
        await called(names["paid"](connection, "o-1"), names["put_off"](connection, "o-1", until))
        assert await connection.fetch(left) == []


async def test_the_statement_of_the_guide_withdraws(database: str):
    remind = declare(name="remind")
    async with connected(database) as connection, connection.transaction():
        await remind.enqueue(connection, Ride(), origin=ORIGIN, delay=HOUR, unique_key="o-1")
    assert await value(database, block(PAGE, "Taking a delayed job back from SQL", "sql")) is True
    assert await jobs_left(database) == 0


async def test_the_rights_to_enqueue_and_those_that_the_guide_adds_are_enough_to_withdraw(database: str):
    ride, role = declare(), f"app_{token_hex(6)}"
    [id] = await enqueue(database, ride, [Ride()], delay=HOUR)
    async with connected(database) as connection:
        await connection.execute(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA sidings TO {role}")
        try:
            for rights in ("SELECT ON sidings.job", "DELETE ON sidings.job", "INSERT ON sidings.job_history"):
                await connection.execute(f"SET SESSION AUTHORIZATION {role}")
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    async with connection.transaction():
                        await ride.withdraw(connection, id)
                await connection.execute(f"RESET SESSION AUTHORIZATION; GRANT {rights} TO {role}")
            await connection.execute(f"SET SESSION AUTHORIZATION {role}")
            async with connection.transaction():
                assert await ride.withdraw(connection, id)
        finally:
            await connection.execute(f"RESET SESSION AUTHORIZATION; DROP OWNED BY {role}; DROP ROLE {role}")
    assert [row["outcome"] for row in await history(database)] == ["cancelled"]

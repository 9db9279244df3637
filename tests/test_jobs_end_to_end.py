"""Jobs from their enqueue to their end, with one executor (at times two) in this process and a real Postgres."""

import asyncio
import logging
import threading
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sidings.errors import SchemaMissing
from sidings.executor import cycles, suspects
from sidings.executor.deferral import Deferral
from sidings.executor.upkeep import Upkeep
from sidings.jobs import Job, OutcomeName, Registry, Retry
from sidings.schema import load_sql, migrate, without_account
from tenacity import wait_fixed, wait_none

from .support import (
    ORIGIN,
    SECONDS,
    Ledger,
    Ride,
    an_executor,
    connected,
    drained,
    enqueue,
    eventually,
    fetch,
    history,
    jobs_left,
    lose,
    outcomes,
    running,
    value,
)

OTHER = "transports/1"
LONG = {"lease_seconds": 300.0}  # longer than any test: nothing happens here because a lease has run out


def rides(count: int, transport: str = "", first: int = 0) -> list[Ride]:
    return [Ride(transport=transport, number=first + number) for number in range(count)]


class Meeting:
    """Handlers that wait for each other: it passes only if `size` of them run at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.here = 0
        self.most = 0
        self.complete = asyncio.Event()

    async def attend(self) -> None:
        self.here += 1
        self.most = max(self.most, self.here)
        if self.here == self.size:
            self.complete.set()
        await self.complete.wait()
        self.here -= 1


# -- order and concurrency ----------------------------------------------------------------------------------------


async def test_jobs_without_a_group_run_side_by_side_up_to_the_concurrency(database: str):
    registry = Registry()
    meeting = Meeting(5)

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        await meeting.attend()

    await enqueue(database, ride, rides(20))
    async with running(database, registry, concurrency=5):
        await drained(database)
    assert meeting.most == 5


async def test_groups_run_side_by_side_and_each_in_its_order(database: str):
    registry = Registry()
    ledger, meeting = Ledger(), Meeting(6)

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        if job.payload.number == 0:
            await meeting.attend()
        await asyncio.sleep(0)
        ledger.end(job)

    for number in range(30):
        await enqueue(database, ride, [Ride(transport=f"t{group}", number=number) for group in range(6)])
    async with running(database, registry):
        await drained(database)
    assert ledger.overlaps == []
    assert all(ids == sorted(ids) and len(ids) == 30 for ids in ledger.by_group().values())
    assert len(ledger.started) == 180


async def test_plain_functions_run_side_by_side_in_threads(database: str):
    registry = Registry()
    barrier = threading.Barrier(4)
    threads: set[int] = set()

    @registry.job()
    def ride(job: Job[Ride]) -> None:
        barrier.wait(SECONDS)
        threads.add(threading.get_ident())

    await enqueue(database, ride, rides(8))
    async with running(database, registry, concurrency=4):
        await drained(database)
    assert len(threads) == 4
    assert threading.get_ident() not in threads


async def test_larger_priorities_go_first_once_a_worker_is_free(database: str):
    registry = Registry()
    order: list[int] = []
    go_on = asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        order.append(job.priority)
        if len(order) == 1:
            await go_on.wait()

    async with running(database, registry, concurrency=1) as executor:
        await enqueue(database, ride, rides(1))
        await eventually(lambda: order, "the only worker is busy")
        for priority in (-10, 0, 50, 10):
            await enqueue(database, ride, rides(2), priority=priority)
        await eventually(lambda: executor.scheduler.ready == 8, "all are known")
        go_on.set()
        await drained(database)
    assert order[1:] == [50, 50, 10, 10, 0, 0, -10, -10]


async def test_only_jobs_of_assigned_origins_run(database: str):
    registry = Registry()
    ledger = Ledger()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)

    mine = await enqueue(database, ride, rides(5))
    others = await enqueue(database, ride, rides(5), origin=OTHER)
    async with running(database, registry) as executor:
        await eventually(lambda: len(ledger.started) == 5)
        assert sorted(ledger.runs()) == mine
        executor.assign([ORIGIN, OTHER], 2)
        await drained(database)
        assert sorted(ledger.runs()) == mine + others
        assert set(executor.held) == {ORIGIN, OTHER}


async def test_delayed_jobs_are_promoted_in_due_order(database: str):
    registry = Registry()
    order: list[int] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        order.append(job.payload.number)

    base = await value(database, "SELECT date_part('epoch', clock_timestamp())")
    async with connected(database) as connection:
        for number in (3, 1, 4, 2, 0):  # enqueued out of order, due one after the other, all of them soon
            await connection.execute(
                """INSERT INTO sidings.job (type, origin, "group", position, run_at, payload)
                   VALUES ('ride', $1, 'a', NULL, to_timestamp($2::float8), $3)""",
                ORIGIN,
                base + 0.3 + 0.05 * number,
                Ride(transport="a", number=number).model_dump_json(),
            )
    async with running(database, registry):
        await drained(database)
    assert order == [0, 1, 2, 3, 4]
    rows = await history(database)
    assert all(row["due_at"] <= row["started_at"] for row in rows)


async def test_delayed_jobs_that_are_overdue_together_run_in_due_order_too(database: str):
    registry = Registry()
    order: list[int] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        order.append(job.payload.number)

    numbers = [n * 37 % 200 for n in range(200)]
    async with connected(database) as connection:
        await connection.executemany(
            """INSERT INTO sidings.job (type, origin, "group", position, run_at, payload)
               VALUES ('ride', $1, 'a', NULL, now() - interval '1 hour' + $2 * interval '1 second', $3)""",
            [(ORIGIN, number, Ride(transport="a", number=number).model_dump_json()) for number in numbers],
        )
    async with running(database, registry):
        await drained(database)
    assert order == sorted(numbers)


async def test_delayed_jobs_that_are_due_at_once_keep_their_order_however_many_statements_promote_them(database: str):
    """Rows take whatever place in the table is free: where one statement promoted no more of them, those of a group
    that stood further back were promoted later, and ran out of their order."""
    async with connected(database) as connection:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)"
        epoch = await connection.fetchval(acquire, me)
        for number in range(30, 0, -1):  # the last ten are due before the others
            await connection.execute(
                """INSERT INTO sidings.job (id, type, origin, "group", position, run_at, payload)
                   OVERRIDING SYSTEM VALUE VALUES ($2, 'ride', $1, 'a', NULL, $3, '{}')""",
                *(ORIGIN, number, datetime(2026, 1, 1 if number > 20 else 2, tzinfo=UTC)),
            )
        await connection.execute("SET enable_indexscan = off")  # the index has them in order by itself
        for _ in range(4):
            promote = load_sql("sidings.executor", "promote")
            await connection.fetchrow(promote, me, [ORIGIN], [epoch], 8, [], None, None)
        rows = await connection.fetch("SELECT id FROM sidings.job ORDER BY position")
    assert [row["id"] for row in rows] == [*range(21, 31), *range(1, 21)]


async def test_delayed_jobs_of_a_moment_keep_their_order_beside_those_of_another_origin(database: str):
    """What one statement promotes of several origins is sorted as a whole."""
    moments = {ORIGIN: datetime(2026, 1, 2, tzinfo=UTC), OTHER: datetime(2026, 1, 1, tzinfo=UTC)}
    async with connected(database) as connection:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = "SELECT acquired_epoch FROM sidings.acquire($1, $2, 1, '1 hour', true)"
        epochs = [row["acquired_epoch"] for row in await connection.fetch(acquire, me, list(moments))]
        for origin, moment in moments.items():
            await connection.execute(
                """INSERT INTO sidings.job (type, origin, "group", position, run_at, payload)
                   SELECT 'ride', $1, 'a', NULL, $2, '{}' FROM generate_series(1, 100)""",
                *(origin, moment),
            )
        promote = load_sql("sidings.executor", "promote")
        await connection.fetchrow(promote, me, list(moments), epochs, 100, [], None, None)
        for origin in moments:
            rows = await connection.fetch("SELECT id FROM sidings.job WHERE origin = $1 ORDER BY position", origin)
            assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)


async def test_a_promotion_that_commits_behind_later_jobs_is_found(database: str):
    """Its job was stored long ago: by its first transaction the reader would not take it for a late one."""
    registry = Registry()
    order: list[int] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        order.append(job.payload.number)

    async with running(database, registry, audit_seconds=1_000) as executor, connected(database) as promoting:
        await enqueue(database, ride, rides(1, first=1), delay=3_600)
        async with promoting.transaction():
            await promoting.execute("UPDATE sidings.job SET run_at = now()")  # nobody else sees that it is due
            row = await promoting.fetchrow(
                load_sql("sidings.executor", "promote"),
                *(executor.id, [ORIGIN], [executor.held[ORIGIN]], 10, [], None, None),
            )
            assert row is not None
            assert row["promoted"] == 1
            await enqueue(database, ride, rides(1, first=2))
            await eventually(lambda: order == [2])
        await eventually(lambda: order == [2, 1])


async def test_a_commit_that_the_executor_is_told_of_needs_no_poll(database: str):
    registry = Registry()
    seen: list[int] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    async with running(database, registry, poll_seconds=1_000) as executor:
        for number in range(3):
            await enqueue(database, ride, rides(1, first=number))
            executor.wake()
            await eventually(lambda number=number: seen == list(range(number + 1)))


# -- trouble stays where it is ------------------------------------------------------------------------------------


async def test_a_failing_group_does_not_delay_the_others(database: str):
    registry = Registry()
    ledger = Ledger()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(3600)))
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        ledger.end(job)
        if job.payload.transport == "bad":
            raise ConnectionError("the carrier is down")

    for number in range(20):
        await enqueue(database, ride, [Ride(transport=name, number=number) for name in ("bad", "a", "b", "c", "d")])
    async with running(database, registry, concurrency=1) as executor:

        async def others_done() -> bool:
            return (await outcomes(database)).count("succeeded") == 80

        await eventually(others_done, "80 jobs of the other groups have succeeded")
        assert len(ledger.by_group()["bad"]) == 1  # its head has failed once, and nothing behind it was tried
        assert executor.problems() == []
    assert await jobs_left(database) == 20
    assert ledger.overlaps == []


async def test_a_handler_that_hangs_takes_one_worker_and_no_more(database: str):
    registry = Registry()
    ledger = Ledger()
    never = asyncio.Event()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        if job.payload.transport == "hangs":
            await never.wait()
        ledger.end(job)

    for number in range(10):
        names = ("hangs", *(f"t{n}" for n in range(10)))
        await enqueue(database, ride, [Ride(transport=name, number=number) for name in names])
    async with running(database, registry, concurrency=2, shutdown_seconds=0.0):
        await eventually(lambda: len(ledger.ended) == 100, lambda: f"100 others have run: {len(ledger.ended)}")
        assert len(ledger.by_group()["hangs"]) == 1


async def test_a_stuck_group_with_a_deep_backlog_costs_the_others_nothing_and_runs_in_order_once_it_may(database: str):
    registry = Registry()
    ledger = Ledger()
    repaired = False

    @registry.job(group="transport", retry=Retry(wait=lambda _: 0.5 if repaired else 0.02))
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        ledger.end(job)
        if job.payload.transport == "stuck" and not repaired:
            raise ConnectionError("the carrier is down")

    stuck = await enqueue(database, ride, rides(2_000, "stuck"))
    async with running(database, registry, lease_seconds=300) as executor:
        for batch in range(3):
            transports = [f"t{number}" for number in range(20)]
            await enqueue(database, ride, [Ride(transport=name, number=batch) for name in transports for _ in range(5)])
            done = 100 * (batch + 1)
            await eventually(lambda done=done: executor.metrics.count(OutcomeName.SUCCEEDED) == done, "the others ran")
        assert set(ledger.by_group()["stuck"]) == {stuck[0]}
        assert len(executor.scheduler.memory.jobs) < 300  # of 2,000
        repaired = True
        await eventually(lambda: len(set(ledger.by_group()["stuck"])) > 400, "it goes on, refill after refill")
    ran = [id for id in ledger.by_group()["stuck"] if id != stuck[0]]
    assert ran == stuck[1 : len(ran) + 1]
    assert ledger.overlaps == []


async def test_an_executor_that_takes_a_stuck_group_over_starts_with_the_healthy_ones_at_once(database: str):
    registry = Registry()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(3600)))
    async def ride(job: Job[Ride]) -> None:
        if job.payload.transport == "stuck":
            raise ConnectionError("the carrier is down")

    await enqueue(database, ride, rides(1_500, "stuck"))
    async with running(database, registry) as first:
        await eventually(lambda: first.metrics.count(OutcomeName.RETRIED) == 1, "the head has failed")
    await enqueue(database, ride, rides(50, "a") + rides(50, "b"))
    async with running(database, registry) as second:
        await eventually(lambda: second.metrics.count(OutcomeName.SUCCEEDED) == 100)
        assert second.metrics.count(OutcomeName.RETRIED) == 0  # it backs off, whoever owns it
        assert len(second.scheduler.memory.jobs) < 300
    assert await jobs_left(database) == 1_500


async def test_a_row_locked_by_another_transaction_stalls_only_itself(database: str, monkeypatch: pytest.MonkeyPatch):
    """The outcome of the locked job waits; others are recorded meanwhile, in many cycles, and it comes in the end."""
    monkeypatch.setitem(_server_settings(), "lock_timeout", "50")
    registry = Registry()
    ledger = Ledger()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        ledger.end(job)

    async with connected(database) as locker:
        await locker.execute("BEGIN")
        [locked, behind] = await enqueue(database, ride, rides(2, "locked"))
        await locker.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", locked)
        await enqueue(database, ride, rides(60, "chain"))  # one after the other: a cycle each
        await enqueue(database, ride, [Ride(transport=f"t{n}") for n in range(60)])
        async with running(database, registry) as executor:
            await eventually(lambda: executor.metrics.count(OutcomeName.SUCCEEDED) == 120, "the others ran")
            assert ledger.by_group()["locked"] == [locked]
            assert await value(database, "SELECT count(*) FROM sidings.job_history WHERE job_id = $1", locked) == 0
            assert executor.problems() == []
            await locker.execute("COMMIT")
            await drained(database)
    assert ledger.by_group()["locked"] == [locked, behind]
    assert await outcomes(database) == ["succeeded"] * 122


async def test_statements_that_postgres_refuses_are_counted(database: str, monkeypatch: pytest.MonkeyPatch):
    """Somebody has locked the table, say: the alert asks this counter whether Postgres fails."""
    monkeypatch.setitem(_server_settings(), "lock_timeout", "50")
    async with running(database, Registry()) as executor, connected(database) as locker:
        assert executor.metrics.database_errors._value.get() == 0
        async with locker.transaction():
            await locker.execute("LOCK TABLE sidings.job")
            await eventually(lambda: executor.metrics.database_errors._value.get() > 1, "reads and promotions fail")


async def test_the_log_and_health_name_a_locked_table_that_keeps_outcomes_from_being_recorded(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Both said nothing of a reason, as of a partition of the history that an open ALTER TABLE keeps locked."""
    monkeypatch.setitem(_server_settings(), "lock_timeout", "50")
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async with running(database, registry) as executor, connected(database) as locker:
        async with locker.transaction():
            await locker.execute("LOCK TABLE sidings.job_history")
            await enqueue(database, ride, rides(1))
            told = "what became of jobs could not be recorded, trying again: LockNotAvailableError: canceling statement"
            await eventually(lambda: told in caplog.text, "the log says why")
            with monkeypatch.context() as later:
                later.setattr(executor.cycles, "busy_seconds", lambda: 20.0)
                [problem] = executor.problems()
            assert problem.startswith("a cycle has been under way for 20.0 s: LockNotAvailableError: canceling")
        await drained(database)
        await eventually(lambda: "what became of jobs could not be recorded for" in caplog.text, "it works again")


async def test_health_names_what_keeps_it_from_knowing_what_has_become_of_cycles(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Postgres is away since two were in flight: how long it lasts was all that it said."""
    async with running(database, Registry()) as executor:
        executor.cycles.standing.outage.failed("no connection to db-1")
        monkeypatch.setattr(executor.cycles, "busy_seconds", lambda: 20.0)
        assert executor.problems() == ["a cycle has been under way for 20.0 s: no connection to db-1"]


async def test_health_names_what_keeps_jobs_from_being_read(database: str, monkeypatch: pytest.MonkeyPatch):
    """As where somebody has locked what each read looks at: how long it lasts was all that it said."""
    monkeypatch.setitem(_server_settings(), "lock_timeout", "50")
    async with running(database, Registry()) as executor, connected(database) as locker, locker.transaction():
        await locker.execute("LOCK TABLE sidings.pause")
        executor.reader.last_answer -= 60
        told = "s ago: LockNotAvailableError: canceling statement due to lock timeout"
        await eventually(lambda: any(told in problem for problem in executor.problems()), executor.problems, 5)


def _server_settings() -> dict[str, str]:
    from sidings.executor import link

    return link._SERVER_SETTINGS


async def test_a_locked_row_holds_the_cycle_up_once_and_not_at_every_new_try(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(_server_settings(), "lock_timeout", "50")
    monkeypatch.setattr(Deferral, "locked_seconds", 0.02)
    registry = Registry()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None: ...

    async with connected(database) as locker:
        await locker.execute("BEGIN")
        [locked] = await enqueue(database, ride, rides(1, "locked"))
        await locker.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", locked)
        async with running(database, registry) as executor:
            looks = 0
            real = executor.cycles._deferral.locked

            async def counted(finished: Any) -> set[int]:
                nonlocal looks
                looks += 1
                return await real(finished)

            monkeypatch.setattr(executor.cycles._deferral, "locked", counted)
            await eventually(lambda: looks > 10, "it was tried again ten times")
            await enqueue(database, ride, rides(10, "chain"))
            await eventually(lambda: executor.metrics.count(OutcomeName.SUCCEEDED) == 10)
            await locker.execute("COMMIT")
            await drained(database)
    assert caplog.text.count("are locked by another transaction") == 1


async def test_a_locked_row_is_recorded_although_the_loop_wakes_too_early_and_nothing_else_happens(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """uvloop's timers come up to a millisecond early. Without another one such an outcome waited for the next poll."""
    monkeypatch.setitem(_server_settings(), "lock_timeout", "50")
    monkeypatch.setattr(Deferral, "locked_seconds", 0.02)
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async with running(database, registry, poll_seconds=1_000, **LONG) as executor, connected(database) as locker:
        real, early = cycles.set_within, 0

        async def early_once_each_time(event: asyncio.Event, seconds: float | None) -> bool:
            nonlocal early
            early += seconds is not None and seconds > 0.001
            return await real(event, seconds if seconds is None else max(0.0, seconds - 0.001))

        monkeypatch.setattr(cycles, "set_within", early_once_each_time)
        async with locker.transaction():
            [locked] = await enqueue(database, ride, rides(1))
            await locker.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", locked)
            executor.wake()
            await eventually(lambda: early > 3, "it was put off three times")
        await drained(database)


async def test_a_locked_row_is_recorded_although_others_never_stop_finishing(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(_server_settings(), "lock_timeout", "50")
    registry = Registry()
    stop = False

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None: ...

    @registry.job()
    async def endless(job: Job[Ride]) -> None:
        if not stop:
            async with connected(database) as connection, connection.transaction():
                await endless.enqueue(connection, Ride())

    async with connected(database) as locker:
        await locker.execute("BEGIN")
        [locked] = await enqueue(database, ride, rides(1, "locked"))
        await locker.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", locked)
        async with running(database, registry) as executor:
            await enqueue(database, endless, rides(8))
            await eventually(lambda: executor.metrics.count(OutcomeName.SUCCEEDED, "endless") > 20)
            await locker.execute("COMMIT")
            await eventually(lambda: executor.metrics.count(OutcomeName.SUCCEEDED, "ride") == 1, "it is recorded")
            stop = True
            await drained(database)


async def test_thousands_of_groups_that_fail_leave_a_healthy_one_its_turn(database: str):
    registry = Registry()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(0.5)))
    async def failing(job: Job[Ride]) -> None:
        await asyncio.sleep(0.05)
        raise ConnectionError("the carrier is away")

    @registry.job(group="transport")
    async def healthy(job: Job[Ride]) -> None: ...

    await enqueue(database, failing, [Ride(transport=f"failing {number}") for number in range(4_500)])
    async with connected(database) as connection:  # all that could run is more than fits into memory
        await connection.execute("UPDATE sidings.job SET attempt = 2, failures = 1, run_at = clock_timestamp()")
    await enqueue(database, healthy, rides(1, "healthy"))
    async with running(database, registry, concurrency=4) as executor:  # which runs 80 of them a second
        await eventually(lambda: executor.metrics.count(OutcomeName.SUCCEEDED), "it has run", 10.0)


# -- suspects and unknown types -----------------------------------------------------------------------------------


async def test_jobs_that_were_lost_together_run_one_at_a_time_beside_the_innocent(database: str):
    registry = Registry()
    now, most, innocent_at_once = 0, 0, Meeting(3)

    @registry.job()
    async def suspect(job: Job[Ride]) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1

    @registry.job()
    async def innocent(job: Job[Ride]) -> None:
        await innocent_at_once.attend()

    await lose(database, await enqueue(database, suspect, rides(8)))
    await enqueue(database, innocent, rides(3))
    async with running(database, registry):
        await drained(database)
    assert most == 1
    assert innocent_at_once.most == 3


async def test_a_suspect_that_hangs_keeps_no_other_for_ever(database: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suspects, "_ALONE_SECONDS", 0.2)
    registry, gate, ended = Registry(), asyncio.Event(), list[int]()

    @registry.job(group="transport")
    async def suspect(job: Job[Ride]) -> None:
        if job.payload.number == 0:
            await gate.wait()
        ended.append(job.payload.number)

    await lose(database, await enqueue(database, suspect, [Ride(transport=f"{n}", number=n) for n in range(3)]))
    async with running(database, registry):
        await eventually(lambda: len(ended) == 2, "the end of those that do not hang")
        gate.set()
        await drained(database)
    assert ended == [1, 2, 0]


async def test_one_success_clears_a_suspect_and_poison_is_held_with_its_payload(database: str):
    registry = Registry()
    seen: list[int] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    [last_chance, poison, _] = await enqueue(database, ride, rides(3, "a"))
    await lose(database, [last_chance], 2)
    await lose(database, [poison], 3)
    async with running(database, registry, poison_after=2):
        await eventually(lambda: seen == [0, 2], lambda: f"the group goes on: {seen}")

        async def one_left() -> bool:
            return await jobs_left(database) == 1

        await eventually(one_left)
    [row] = await fetch(database, "SELECT id, held, payload FROM sidings.job")
    assert (row["id"], row["held"]) == (poison, "poison: it kept killing executors")
    assert Ride.model_validate_json(row["payload"]).number == 1
    [held] = [row for row in await history(database) if row["outcome"] == "held"]
    assert held["error_class"] == "Poison"
    assert sorted(await outcomes(database)) == ["held", "succeeded", "succeeded"]


async def test_a_job_of_an_unknown_type_is_left_alone_and_counted_until_somebody_knows_it(database: str):
    old, new = Registry(), Registry()
    seen: list[tuple[str, int]] = []

    def declare(registry: Registry, name: str) -> Any:
        async def ride(job: Job[Ride]) -> None:
            seen.append((name, job.payload.number))

        return registry.job(name=name, group="transport")(ride)

    known = declare(old, "known")
    declare(new, "known")
    added = declare(new, "added")
    await enqueue(database, known, rides(1, "a", 0))
    await enqueue(database, added, rides(1, "a", 1))
    await enqueue(database, known, rides(1, "a", 2))
    await enqueue(database, known, rides(1, "b", 3))
    await enqueue(database, added, rides(1, "c", 4))
    exposed = CollectorRegistry()
    async with running(database, old, prometheus=exposed) as executor:
        await eventually(lambda: len(seen) == 2 and executor.scheduler.unknown.get("added") == 2)
        assert sorted(seen) == [("known", 0), ("known", 3)]
        assert 'sidings_unknown_jobs{service="test",type="added"} 2.0' in generate_latest(exposed).decode()
        assert await jobs_left(database) == 3
        assert executor.problems() == []
    async with running(database, new):
        await drained(database)
    assert [number for _, number in seen if number < 3] == [0, 1, 2]


# -- starting and stopping ----------------------------------------------------------------------------------------


async def test_an_executor_may_start_before_postgres_can_be_reached(own_postgres: Any):
    server = await asyncio.to_thread(own_postgres)
    dsn = server.dsn
    await migrate(dsn, service="test")
    registry = Registry()
    seen: list[int] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    await enqueue(dsn, ride, rides(3))
    await asyncio.to_thread(server.stop)
    executor = an_executor(dsn, registry)
    await executor.start()
    try:
        executor.assign([ORIGIN], 1)
        told = f"the executor has not reached Postgres yet: no connection to {without_account(dsn)}: ConnectionRefused"
        await eventually(lambda: [each.startswith(told) for each in executor.problems()] == [True], executor.problems)
        with pytest.raises(TimeoutError):
            await executor.settled(0.2)
        await asyncio.to_thread(server.start)
        await executor.settled(SECONDS)
        await eventually(lambda: len(seen) == 3)
        assert executor.problems() == []
    finally:
        await executor.stop()


@pytest.mark.long
async def test_an_executor_stops_although_postgres_is_away(own_postgres: Any):
    server = await asyncio.to_thread(own_postgres)
    dsn = server.dsn
    await migrate(dsn, service="test")
    never_there = an_executor("postgresql://postgres@127.0.0.1:1/x", Registry())
    await never_there.start()
    there_no_more = an_executor(dsn, Registry())
    await there_no_more.start()
    there_no_more.assign([ORIGIN], 1)
    await there_no_more.settled(SECONDS)
    await asyncio.to_thread(server.stop)
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(never_there.stop(), there_no_more.stop())
    assert there_no_more.problems()[0] == "the executor does not run"


async def test_a_schema_that_does_not_fit_is_an_error_at_start_and_nothing_is_left_running(empty_database: str):
    executor = an_executor(empty_database, Registry())
    threads = set(threading.enumerate())
    with pytest.raises(SchemaMissing):
        await executor.start()
    assert set(threading.enumerate()) <= threads
    await executor.stop()


async def test_an_executor_may_be_stopped_twice_and_without_having_been_started(database: str):
    exposed = CollectorRegistry()
    never = an_executor(database, Registry(), prometheus=exposed)
    await never.stop()
    await never.stop()
    assert generate_latest(exposed) == b""
    executor = an_executor(database, Registry(), prometheus=exposed)
    await executor.start()
    await asyncio.gather(executor.stop(), executor.stop())
    await executor.stop()
    assert generate_latest(exposed) == b""


async def test_a_graceful_stop_lets_handlers_end_starts_no_others_and_leaves_nothing_behind(database: str):
    registry = Registry()
    started, go_on = asyncio.Event(), asyncio.Event()
    ran: list[int] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ran.append(job.payload.number)
        started.set()
        await go_on.wait()

    await enqueue(database, ride, rides(3, "a"))
    executor = an_executor(database, registry, shutdown_seconds=SECONDS, **LONG)
    await executor.start()
    executor.assign([ORIGIN], 1)
    await started.wait()
    stopping = asyncio.create_task(executor.stop())
    await eventually(lambda: executor.cycles.paused)
    await enqueue(database, ride, rides(1, "b", 7))
    await executor.cycles.barrier()
    go_on.set()
    async with asyncio.timeout(SECONDS):
        await stopping
    assert ran == [0]
    assert await outcomes(database) == ["succeeded"]
    assert await jobs_left(database) == 3
    assert await fetch(database, "SELECT FROM sidings.executor") == []
    [origin] = await fetch(database, "SELECT owner, lease_until FROM sidings.origin")
    assert tuple(origin) == (None, None)
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'sidings'"
    )
    await eventually(lambda: _is_zero(database, waiting), "all connections are closed")


async def _is_zero(database: str, query: str) -> bool:
    return await value(database, query) == 0


async def test_handlers_that_do_not_end_in_time_are_cancelled_and_run_again_elsewhere(database: str):
    registry = Registry()
    attempts: list[tuple[int, int]] = []
    started = asyncio.Event()
    cancelled: list[int] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        attempts.append((job.attempt, job.failures))
        if job.attempt == 1:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(job.attempt)
                raise

    await enqueue(database, ride, rides(1, "a"))
    async with running(database, registry, shutdown_seconds=0.05, **LONG):
        await started.wait()
    assert cancelled == [1]
    [row] = await history(database)
    assert (row["outcome"], row["error_class"]) == ("snoozed", "Interrupted")
    async with running(database, registry):
        await drained(database)
    assert attempts == [(1, 0), (2, 0)]


async def test_a_handler_that_takes_no_notice_of_cancellation_cannot_keep_the_executor_from_stopping(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("sidings.executor.workers._STOP_SECONDS", 0.2)
    registry = Registry()
    started: set[int] = set()
    go_on = asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        started.add(job.payload.number)
        cancelled = 0
        while not go_on.is_set() and (job.payload.number == 1 or cancelled < 2):
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                cancelled += 1

    await enqueue(database, ride, rides(2))  # number 0 returns when it is cancelled for the second time
    executor = an_executor(database, registry, shutdown_seconds=0.0)
    await executor.start()
    executor.assign([ORIGIN], 1)
    await eventually(lambda: len(started) == 2)
    async with asyncio.timeout(SECONDS):
        await executor.stop()
    assert "although 1 handlers take no notice of their cancellation" in caplog.text
    assert "stopped without releasing transports/0" in caplog.text
    go_on.set()
    await eventually(lambda: executor.workers.running() == 0, "the handler has ended")


async def test_a_second_executor_takes_over_as_soon_as_the_first_has_stopped(database: str):
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    origins = [f"t/{number}" for number in range(20)]
    async with running(database, registry, origins, **LONG) as first:
        epochs = dict(first.held)
        second = an_executor(database, registry, **LONG)
        await second.start()
        try:
            second.assign(origins, 1)  # of the same generation: the first does not yield
            await eventually(lambda: _wanted(database, 20), "the second waits for all of them")
            assert second.held == {}
            await first.stop()
            await second.settled(SECONDS)  # their leases would last for minutes
            assert set(second.held) == set(origins)
            assert all(second.held[name] > epochs[name] for name in origins)
            for name in origins:
                await enqueue(database, ride, rides(1), origin=name)
            await drained(database)
        finally:
            await second.stop()
    assert await outcomes(database) == ["succeeded"] * 20


async def _wanted(database: str, count: int) -> bool:
    return await value(database, "SELECT count(*) = $1 FROM sidings.origin WHERE wanted_by IS NOT NULL", count)


async def test_an_origin_is_yielded_to_an_executor_of_a_newer_assignment(
    database: str, caplog: pytest.LogCaptureFixture
):
    registry = Registry()
    ledger = Ledger()
    executors: dict[str, int] = Counter()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        if job.payload.number >= 200:  # half of them are left for the newer one, however fast the first is
            # A renewal brings word of it.
            await eventually(lambda: first._leases.renew_soon() or "yielding it" in caplog.text)
        executors[str(job.fence.epoch)] += 1
        ledger.end(job)

    async with running(database, registry, **LONG) as first:
        await enqueue(database, ride, [Ride(transport=f"t{n % 4}", number=n) for n in range(400)])
        await eventually(lambda: len(ledger.ended) > 20)
        async with running(database, registry, generation=2, **LONG) as second:
            assert set(second.held) == {ORIGIN}
            await drained(database)
            assert first.held == {}  # and it does not want the origin back
    assert len(executors) == 2
    assert ledger.overlaps == []
    assert all(ids == sorted(ids) for ids in ledger.by_group().values())


async def test_an_origin_that_is_taken_away_is_drained_and_comes_back_under_its_epoch(database: str):
    registry = Registry()
    ledger = Ledger()
    go_on = asyncio.Event()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        await go_on.wait()
        ledger.end(job)

    await enqueue(database, ride, rides(3, "a"))
    async with running(database, registry, drain_seconds=SECONDS, **LONG) as executor:
        epoch = executor.held[ORIGIN]
        await eventually(lambda: ledger.started)
        executor.assign([], 2)
        await eventually(lambda: executor.held == {}, "it drains")
        executor.assign([ORIGIN], 3)
        await executor.settled(SECONDS)
        assert executor.held == {ORIGIN: epoch}
        assert len(ledger.started) == 1  # what runs was left alone
        go_on.set()
        await drained(database)
        executor.assign([], 4)
        await executor.settled(SECONDS)
        assert await value(database, "SELECT owner FROM sidings.origin") is None
    assert await outcomes(database) == ["succeeded"] * 3
    assert ledger.overlaps == []


@pytest.mark.parametrize("what", ["a drain", "a stop"])
async def test_jobs_that_are_claimed_and_have_not_started_are_taken_back(database: str, what: str):
    """They wait for a worker, and are named already: else its jobs would go on ending and starting."""
    registry = Registry()
    ran: list[int] = []
    last, go_on = 20, asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        ran.append(job.payload.number)
        if job.payload.number == last:
            await go_on.wait()

    await enqueue(database, ride, rides(2 * last))
    executor = an_executor(database, registry, concurrency=1, drain_seconds=SECONDS, shutdown_seconds=SECONDS, **LONG)
    await executor.start()
    try:
        executor.assign([ORIGIN], 1)
        await eventually(lambda: last in ran and executor.workers.claimed, "others wait behind one that takes its time")
        if what == "a drain":
            executor.assign([], 2)
            ending = asyncio.create_task(executor.settled(SECONDS))
            await eventually(lambda: executor.held == {})
        else:
            ending = asyncio.create_task(executor.stop())
            await eventually(lambda: executor.cycles.paused)
        go_on.set()
        await ending
        assert ran == list(range(last + 1))
        left = await fetch(
            database, "SELECT (payload ->> 'number')::int AS number, attempt FROM sidings.job ORDER BY 1"
        )
        assert [tuple(row) for row in left] == [(number, 1) for number in range(last + 1, 2 * last)]
    finally:
        go_on.set()
        await executor.stop()


async def test_retries_survive_a_restart_of_the_executor(database: str):
    registry = Registry()
    seen: list[tuple[int, int]] = []

    @registry.job(group="transport", retry=Retry(wait=wait_none()))
    async def grouped(job: Job[Ride]) -> None:
        seen.append((job.attempt, job.failures))
        if job.attempt <= 3:
            raise ValueError("x")

    @registry.job(retry=Retry(wait=wait_none()))
    async def single(job: Job[Ride]) -> None:
        seen.append((job.attempt, job.failures))
        if job.attempt <= 3:
            raise ValueError("x")

    await enqueue(database, grouped, rides(1, "a"))
    await enqueue(database, single, rides(1))
    before = 0
    for _ in range(8):
        async with running(database, registry):
            await eventually(lambda before=before: len(seen) > before)
        before = len(seen)
        if before == 8:
            break
    assert sorted(seen) == sorted([(1, 0), (2, 1), (3, 2), (4, 3)] * 2)
    assert await jobs_left(database) == 0
    rows = await history(database)
    assert Counter(row["outcome"] for row in rows) == {"retried": 6, "succeeded": 2}


async def test_a_held_job_that_is_released_runs_in_its_new_place(database: str):
    """Released as `sidings` has to do it: a new position *and* a new transaction id."""
    registry = Registry()
    seen: list[int] = []
    mended = False

    @registry.job(group="transport", retry=Retry(stop=lambda _: True, on_exhausted="hold"))
    async def ride(job: Job[Ride]) -> None:
        seen.append(job.payload.number)
        if job.payload.number == 1 and not mended:
            raise ValueError("x")

    [first, *_] = await enqueue(database, ride, rides(3, "a", 1))
    async with running(database, registry), connected(database) as connection:
        await eventually(lambda: seen == [1, 2, 3])
        mended = True
        await connection.execute(
            """UPDATE sidings.job SET held = NULL, run_at = NULL, txid = pg_current_xact_id(),
                   position = CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END
               WHERE id = $1""",
            first,
        )
        await drained(database)
    assert seen == [1, 2, 3, 1]


# -- what can be seen ---------------------------------------------------------------------------------------------


async def test_the_metrics_tell_what_happened(database: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sidings.executor.upkeep._AGES_SECONDS", 0.05)
    registry, exposed = Registry(), CollectorRegistry()
    never = asyncio.Event()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(3600)))
    async def ride(job: Job[Ride]) -> None:
        match job.payload.transport:
            case "bad":
                raise ValueError("x")
            case "hangs":
                await never.wait()

    @registry.job(name="held", retry=Retry(stop=lambda _: True, on_exhausted="hold"))
    async def exhausted(job: Job[Ride]) -> None:
        raise ValueError("x")

    await enqueue(database, exhausted, rides(2))
    await enqueue(database, ride, [Ride(transport=name) for name in ("bad", "bad", "hangs", "a", "b", "c")])
    async with running(database, registry, prometheus=exposed, shutdown_seconds=0.0) as executor:
        await eventually(
            lambda: executor.metrics.count(OutcomeName.SUCCEEDED) == 3 and executor.metrics.count(OutcomeName.HELD) == 2
        )
        await eventually(lambda: executor._upkeep.held == 2 and executor._upkeep.oldest.get(ORIGIN))
        figures = samples(exposed)
        assert figures['sidings_jobs_total{outcome="succeeded",service="test",type="ride"}'] == 3
        assert figures['sidings_jobs_total{outcome="retried",service="test",type="ride"}'] == 1
        assert figures['sidings_jobs_total{outcome="held",service="test",type="held"}'] == 2
        assert figures['sidings_job_run_seconds_count{service="test",type="ride"}'] == 4
        assert figures['sidings_job_wait_seconds_bucket{le="+Inf",service="test",type="ride"}'] == 4
        assert figures['sidings_running{service="test"}'] == 1
        assert figures['sidings_ready{service="test"}'] == 0
        assert figures['sidings_blocked_groups{service="test"}'] == 1
        assert figures['sidings_held_jobs{service="test"}'] == 2
        assert figures['sidings_held_origins{service="test"}'] == 1
        assert 0 < figures['sidings_oldest_waiting_seconds{origin="transports/0",service="test"}'] < SECONDS
        assert figures['sidings_cycle_seconds_count{service="test"}'] > 0
        assert figures['sidings_read_seconds_count{service="test"}'] > 0
        for zero in ("audit_found", "fenced", "lost", "takeovers", "unmatched_outcomes", "database_errors"):
            assert figures[f'sidings_{zero}_total{{service="test"}}'] == 0, zero
    assert generate_latest(exposed) == b""


async def test_a_job_that_is_due_since_ever_leaves_the_sum_of_waits_finite(database: str):
    """As SQL may store it: it was infinite until a restart, and so was each mean reckoned from it."""
    registry, exposed = Registry(), CollectorRegistry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async with running(database, registry, prometheus=exposed) as executor:
        async with connected(database) as connection:
            await connection.execute(
                """INSERT INTO sidings.job (type, origin, payload, run_at, enqueued_at)
                   VALUES ('ride', $1, '{"number": 1}', '-infinity', now() - interval '1 hour')""",
                ORIGIN,
            )
        await eventually(lambda: executor.metrics.count(OutcomeName.SUCCEEDED) == 1)
        waited = samples(exposed)['sidings_job_wait_seconds_sum{service="test",type="ride"}']
    assert 3_590 < waited < 3_600 + 2 * SECONDS, "since it was stored"


@pytest.mark.parametrize(("stored", "due", "since"), [("1 minute", "1 hour", 60), ("1 hour", "5 minutes", 300)])
async def test_a_job_has_waited_since_it_was_stored_or_due_whichever_is_later(
    database: str, stored: str, due: str, since: int
):
    """It was said to have waited since a `run_at` that was long past when it was enqueued."""
    registry, exposed = Registry(), CollectorRegistry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async with running(database, registry, prometheus=exposed) as executor:
        async with connected(database) as connection:
            await connection.execute(
                f"""INSERT INTO sidings.job (type, origin, payload, run_at, enqueued_at) VALUES
                    ('ride', $1, '{{"number": 1}}', now() - interval '{due}', now() - interval '{stored}')""",
                ORIGIN,
            )
        await eventually(lambda: executor.metrics.count(OutcomeName.SUCCEEDED) == 1)
        waited = samples(exposed)['sidings_job_wait_seconds_sum{service="test",type="ride"}']
    assert since - 10 < waited < since + 2 * SECONDS


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Name with sorted labels -> value."""
    return {
        f"{sample.name}{{{','.join(f'{key}={text!r}' for key, text in sorted(sample.labels.items()))}}}".replace(
            "'", '"'
        ): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


async def test_the_documented_metrics_are_those_that_exist(database: str):
    exposed = CollectorRegistry()
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    await enqueue(database, ride, rides(1))
    async with running(database, registry, prometheus=exposed) as executor:
        await eventually(lambda: executor.metrics.count(OutcomeName.SUCCEEDED) == 1)
        families = {f"{m.name}_total" if m.type == "counter" else m.name: m for m in exposed.collect()}
    table = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    documented = {row[0].strip("`"): row[1] for row in rows}
    missing = {name: family.type for name, family in families.items() if documented.get(name) != family.type}
    assert missing == {}


async def test_the_audit_finds_nothing_while_jobs_come_and_go(database: str, monkeypatch: pytest.MonkeyPatch):
    registry = Registry()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(0.01)))
    async def ride(job: Job[Ride]) -> None:
        if job.payload.number % 3 == 0 and job.attempt == 1:
            raise ValueError("x")

    audits, real = 0, Upkeep.audit

    async def counted(upkeep: Upkeep) -> int:
        nonlocal audits
        found = await real(upkeep)
        audits += 1
        return found

    monkeypatch.setattr(Upkeep, "audit", counted)
    async with running(database, registry, audit_seconds=0.02) as executor:
        executor.scheduler.memory.max_keep = 4

        async def write() -> None:
            for number in range(30):
                await enqueue(database, ride, [Ride(transport=f"t{n}", number=number) for n in range(5)])

        await asyncio.gather(*(write() for _ in range(3)))
        during = audits
        await drained(database)
        await eventually(lambda: audits > during + 2)
        assert during > 0
        assert executor.metrics.audit_found._value.get() == 0


async def test_a_job_that_no_read_has_delivered_is_found_by_the_audit_and_run(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Here a bug is put in: a read's row is thrown away."""
    monkeypatch.setattr("sidings.executor.upkeep._SECOND_LOOK_SECONDS", 0.1)
    registry = Registry()
    seen: list[int] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        seen.append(job.id)

    async with running(database, registry, audit_seconds=0.1) as executor:
        real = executor.scheduler.insert_all
        lost: list[int] = []

        def careless(entries: list[Any], now: float) -> None:
            if not lost and entries:
                lost.append(entries.pop(0).id)
            real(entries, now)

        monkeypatch.setattr(executor.scheduler, "insert_all", careless)
        ids = await enqueue(database, ride, rides(3))
        await eventually(lambda: len(seen) == 3)
        assert lost == ids[:1]
        assert sorted(seen) == ids
        assert executor.metrics.audit_found._value.get() == 1
    assert "the audit found jobs" in caplog.text


async def test_a_defect_in_a_loop_is_reported_and_lets_the_leases_run_out(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    executor = an_executor(database, Registry(), lease_seconds=0.6)
    await executor.start()
    try:
        executor.assign([ORIGIN], 1)
        await executor.settled(SECONDS)
        await eventually(lambda: executor.problems() == [], executor.problems)

        def broken() -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(executor.cycles, "_gather", broken)
        executor.cycles.signal()
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(SECONDS):
                await executor.wait()
        assert caught.group_contains(ZeroDivisionError)
        assert "the executor does not run" in executor.problems()
        assert "the executor has failed" in caplog.text  # also where nobody waits for it
        over = "SELECT lease_until < clock_timestamp() FROM sidings.origin"
        await eventually(lambda: value(database, over), "its lease has run out")
    finally:
        await executor.stop()


async def test_an_executor_whose_row_is_gone_starts_again_under_a_new_id(
    database: str, caplog: pytest.LogCaptureFixture
):
    registry = Registry()
    seen: list[int] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    with caplog.at_level(logging.CRITICAL):
        async with running(database, registry) as executor:
            before = executor.id
            async with connected(database) as connection:
                await connection.execute("UPDATE sidings.origin SET owner = NULL; DELETE FROM sidings.executor")
            await enqueue(database, ride, rides(3))
            await drained(database)
            assert executor.id != before
            assert executor.problems() == []
    assert sorted(seen) == [0, 1, 2]


@asynccontextmanager
async def two_executors(database: str, registry: Registry):
    async with running(database, registry, [ORIGIN]) as one, running(database, registry, [OTHER]) as two:
        yield one, two


async def test_two_executors_share_the_work_by_origin(database: str):
    registry = Registry()
    ledger = Ledger()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        await asyncio.sleep(0)
        ledger.end(job)

    async with two_executors(database, registry) as (one, two):
        for origin in (ORIGIN, OTHER):
            for _ in range(10):
                await enqueue(database, ride, [Ride(transport=f"{origin} {n}") for n in range(5)], origin=origin)
        await drained(database)
        for executor in (one, two):  # which count a little after the commit
            await eventually(lambda executor=executor: executor.metrics.count(OutcomeName.SUCCEEDED) == 50)
    assert ledger.overlaps == []
    rows: list[asyncpg.Record] = await fetch(database, "SELECT DISTINCT origin, executor FROM sidings.job_history")
    assert {(row["origin"], row["executor"]) for row in rows} == {(ORIGIN, one.id), (OTHER, two.id)}

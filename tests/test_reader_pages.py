"""How many reads it takes to get past jobs of which none is kept in memory, and what they ask of the server."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from sidings import Admin, PostgresUnavailable, Retry
from sidings.executor import Executor, ExecutorSettings, PostgresSettings, now, planning, promoter, reader
from sidings.jobs import Job, OutcomeName, Registry
from tenacity import wait_fixed

from .support import ORIGIN, SECONDS, Ride, a_role, an_executor, connected, drained, enqueue, eventually, running

PAUSED = 6_000
BEHIND = 1_000
STILL = 600
DRAINED = 20_000
ROW_SECONDS = 0.001


async def test_jobs_behind_many_paused_ones_are_found_within_a_few_reads(database: str):
    """They were passed 256 at a time, as in a read of which the size of the payloads is not known yet: 390 reads for
    100,000 of them, after each start and after each action of a person, while the others waited."""
    registry, started, prometheus = Registry(), list[int](), CollectorRegistry()

    @registry.job()
    async def bulk(job: Job[Ride]) -> None:
        raise AssertionError("it is paused")

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with connected(database) as connection:
        await Admin(connection, actor="test").pause(type="bulk", reason="a test")
    await enqueue(database, bulk, (Ride(number=n) for n in range(PAUSED)))
    await enqueue(database, quick, [Ride(number=1)])
    async with running(database, registry, poll_seconds=60, prometheus=prometheus):
        await eventually(lambda: started)
        assert 2 <= prometheus.get_sample_value("sidings_read_seconds_count", {"service": "test"}) <= 6


async def test_what_is_paused_is_brought_only_where_it_has_changed(database: str, monkeypatch: pytest.MonkeyPatch):
    """Each read brought it all: of 5,000 groups 280 kB, twenty times a second."""
    registry, started, brought = Registry(), list[str](), list[int]()

    @registry.job(group="transport")
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.transport)

    deliver = reader.Reader._deliver

    def delivered(self: reader.Reader, plan: planning.Plan, rows: list[asyncpg.Record], sent: float) -> None:
        brought.append(len(json.loads(rows[0]["headers"])["pauses"] or ()))
        deliver(self, plan, rows, sent)

    monkeypatch.setattr(reader.Reader, "_deliver", delivered)
    async with connected(database) as connection:
        admin = Admin(connection, actor="test")
        for group in "abcd":
            await admin.pause(origin=ORIGIN, group=group, reason="a test")
        await enqueue(database, quick, [Ride(transport=group) for group in "abz"])
        async with running(database, registry, poll_seconds=0.01):
            await eventually(lambda: started == ["z"] and len(brought) > 5)
            await admin.resume(origin=ORIGIN, group="b")
            await eventually(lambda: started == ["z", "b"])
            await admin.pause(type="quick", reason="a test")
            await enqueue(database, quick, [Ride(transport="y")])
            for group in "acd":
                await admin.resume(origin=ORIGIN, group=group)
            seen = len(brought)
            await eventually(lambda: len(brought) > seen + 5)
            assert started == ["z", "b"]
            await admin.resume(type="quick")
            await drained(database)
    assert started[2:] in (["a", "y"], ["y", "a"])
    assert [count for count in brought if count][:2] == [4, 3]
    assert sum(count > 0 for count in brought) <= 6


async def test_of_the_reads_of_a_drain_none_asks_for_nothing(database: str, monkeypatch: pytest.MonkeyPatch):
    """The cycles see memory run low while a read is under way, and asked for another one: it came when the answer had
    filled memory."""
    registry, ended, asked = Registry(), list[int](), list[int]()

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        ended.append(job.payload.number)

    plan = planning.Planner.plan

    def planned(self: planning.Planner, time: float) -> planning.Plan:
        made = plan(self, time)
        asked.append(sum(made.pages))
        return made

    await enqueue(database, quick, (Ride(number=n) for n in range(DRAINED)))
    monkeypatch.setattr(planning.Planner, "plan", planned)
    async with running(database, registry, poll_seconds=60):
        await eventually(lambda: len(ended) == DRAINED)
    assert len(asked) > 4
    assert 0 not in asked


async def test_a_paused_origin_keeps_the_reader_from_nothing_and_is_not_read(database: str):
    """It was taken for one that has more, and never read: 1,500 reads a second brought nothing for as long as it was
    paused, and `/health` said that jobs may wait unread, after the second pause."""
    registry, prometheus = Registry(), CollectorRegistry()

    @registry.job()
    async def quick(job: Job[Ride]) -> None: ...

    async with (
        running(database, registry, (ORIGIN, "orders/8"), poll_seconds=60, prometheus=prometheus) as executor,
        connected(database) as connection,
    ):
        admin, scheduler = Admin(connection, actor="test"), executor.scheduler
        await admin.pause(origin="orders/8", reason="a test")
        await admin.pause(type="bulk", reason="a test")
        await enqueue(database, quick, [Ride(number=1)])
        executor.wake()  # the next poll is a minute away, and nobody has told it
        await eventually(lambda: scheduler.pauses.types and scheduler.pauses.origins, "it knows of both")
        reader = executor.reader
        await eventually(lambda: not reader._planner.wants() and not reader.starved_seconds(), "all is read")
        await drained(database)
        assert prometheus.get_sample_value("sidings_read_seconds_count", {"service": "test"}) <= 40


async def test_groups_that_come_back_with_large_payloads_do_so_as_memory_holds_them(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Fifteen rows of each of 500 groups were read again at once, whatever their size: gigabytes, where each job has
    some hundred kilobytes."""
    registry, away, refilled = Registry(), True, list[int]()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(0.3)))
    async def large(job: Job[Ride]) -> None:
        if away:
            raise ConnectionError("the carrier is away")

    await enqueue(database, large, (Ride(transport=f"{group}", number=n) for n in range(8) for group in range(150)))
    async with connected(database) as connection:
        form = "('{\"form\": \"' || repeat('x', 2000) || '\",' || substr(payload::text, 2))::json"
        await connection.execute(f"UPDATE sidings.job SET payload = {form}")
    deliver = reader.Reader._deliver

    def counted(self: reader.Reader, plan: Any, rows: list[asyncpg.Record], sent: float) -> None:
        refilled.append(sum(row["part"] == 2 for row in rows))
        deliver(self, plan, rows, sent)

    monkeypatch.setattr(reader.Reader, "_deliver", counted)
    executor = an_executor(database, registry)
    executor.scheduler.memory.payload_budget = 200_000
    await executor.start()
    try:
        executor.assign([ORIGIN])
        await eventually(lambda: executor.metrics.count(OutcomeName.RETRIED) >= 300, "they have failed twice")
        away = False
        await drained(database)
    finally:
        await executor.stop()
    assert max(refilled) <= 256  # as many as are read while their size is not known


@asynccontextmanager
async def slow_rows(dsn: str, type: str, *, gone: bool = False) -> AsyncIterator[str]:
    """The DSN of a role for which the server takes its time over each row of a type, as over many more of them. gone:
    it sees none of them, as if they had been deleted, and vacuum could not remove them."""
    async with a_role(dsn) as (role, of_role), connected(dsn) as admin:
        await admin.execute(
            "CREATE FUNCTION public.looked_at(type text) RETURNS boolean VOLATILE LANGUAGE plpgsql AS "
            f"$$BEGIN IF type = '{type}' THEN PERFORM pg_sleep({ROW_SECONDS}); RETURN {not gone}; END IF; "
            "RETURN true; END$$; "
            f"CREATE POLICY slow ON sidings.job TO {role} USING (public.looked_at(type)); "
            "ALTER TABLE sidings.job ENABLE ROW LEVEL SECURITY"
        )
        yield of_role


def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts as a quick read beside calls of half a second."""
    monkeypatch.setattr(planning, "_QUICK_READ", 0.4)


@asynccontextmanager
async def impatient(dsn: str, registry: Registry, *origins: str) -> AsyncIterator[Executor]:
    """An executor that gives a call up after half a second. It reads a page in far less."""
    settings = PostgresSettings(dsn=dsn, call_seconds=0.5)
    executor = Executor(
        "test", registry, settings, ExecutorSettings(shutdown_seconds=2.0), prometheus=CollectorRegistry()
    )
    executor.scheduler.memory.window = 100
    await executor.start()
    try:
        executor.assign(origins or [ORIGIN], 1)
        await executor.settled(SECONDS)
        yield executor
    finally:
        await executor.stop()


async def test_a_group_too_deep_to_be_stepped_over_in_time_is_read_page_by_page(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """The server left its rows out, and took longer over them than a call may take: the read was repeated for ever, and
    no job of any group was found any more. It takes some twenty million rows, or a slow disk."""
    monkeypatch.setattr("sidings.executor.link._MOST_PATIENCE", 1)  # more time would do as well
    scaled(monkeypatch)
    registry, started = Registry(), list[int]()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(3_600)))
    async def deep(job: Job[Ride]) -> None:
        raise ValueError("it fails, and so all behind it wait")

    @registry.job(group="transport")
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    await enqueue(database, deep, (Ride(transport="deep", number=n) for n in range(BEHIND)))
    await enqueue(database, quick, [Ride(transport="quick", number=1)])
    async with slow_rows(database, "deep") as slow, impatient(slow, registry):
        await eventually(lambda: started)


@pytest.mark.long
async def test_jobs_behind_too_many_that_have_ended_to_be_stepped_over_in_time_are_found(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """While a prepared transaction that somebody has forgotten, say, keeps vacuum from removing them. After a start no
    read got past them any more; it takes some thirty million, or a slow disk."""
    scaled(monkeypatch)
    registry, started = Registry(), list[int]()

    @registry.job()
    async def ended(job: Job[Ride]) -> None:
        raise AssertionError("it has ended")

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    origins = [ORIGIN, "transports/1"]
    for number, origin in enumerate(origins):
        await enqueue(database, ended, (Ride(number=n) for n in range(STILL)), origin=origin)
        await enqueue(database, quick, [Ride(number=number)], origin=origin)
    async with slow_rows(database, "ended", gone=True) as slow, impatient(slow, registry, *origins):
        await eventually(lambda: sorted(started) == [0, 1])


@pytest.mark.long
async def test_delayed_jobs_behind_too_many_that_have_been_promoted_are_promoted(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """The same, of the index of delayed jobs."""
    monkeypatch.setattr("sidings.executor.link._REST", 0.1)
    registry, started = Registry(), list[int]()

    @registry.job()
    async def promoted(job: Job[Ride]) -> None:
        raise AssertionError("it has ended")

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    past = datetime.now(UTC) - timedelta(hours=1)
    await enqueue(database, promoted, (Ride(number=n) for n in range(STILL)), run_at=past)
    await enqueue(database, quick, [Ride(number=1)], run_at=past + timedelta(minutes=1))
    async with slow_rows(database, "promoted", gone=True) as slow, impatient(slow, registry):
        await eventually(lambda: started)


async def test_where_a_look_for_what_is_due_takes_long_others_begin_where_it_ended(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Beside a million jobs that had been promoted, and could not be removed, each look took 0.2 s of Postgres' CPU,
    four times a second."""
    monkeypatch.setattr(promoter, "_QUICK_LOOK", -1.0)
    monkeypatch.setattr(promoter, "_MOST_PER_ORIGIN", 1)
    monkeypatch.setattr("sidings.executor.link._REST", 1e9)
    registry, started, begins = Registry(), list[int](), list[object]()

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    await enqueue(database, quick, [Ride(number=1)], run_at=datetime.now(UTC) - timedelta(hours=1))
    async with running(database, registry) as executor:
        await eventually(lambda: started)
        await eventually(lambda: executor._promoter._whole_at > now() + SECONDS, "two whole looks have taken long")
        fetchrow = executor._promoter._link.fetchrow

        async def noting(query: str, *arguments: object) -> object:
            begins.append(arguments[-1])
            return await fetchrow(query, *arguments)

        monkeypatch.setattr(executor._promoter._link, "fetchrow", noting)
        await enqueue(database, quick, [Ride(number=2)], run_at=datetime.now(UTC) - timedelta(hours=1))
        # These are committed before they are due, at the same moment, and one look promotes one of them.
        await enqueue(database, quick, [Ride(number=3), Ride(number=4)], delay=2)
        await eventually(lambda: len(started) == 3)
        assert started == [1, 3, 4]
        assert None not in begins
        executor._promoter._whole_at = 0.0
        await eventually(lambda: started == [1, 3, 4, 2], "what was due before it was committed")
        await eventually(lambda: executor._promoter._whole_at > now() + SECONDS)
        begins.clear()
        await enqueue(database, quick, [Ride()] * 5, run_at=datetime.now(UTC) - timedelta(hours=1))
        executor._promoter._whole_at = 0.0
        await eventually(lambda: len(started) == 9, "five that one look has no room for")
        await eventually(lambda: executor._promoter._whole_at > now() + SECONDS)
        assert begins.count(None) == 1
        another, overdue = "transports/1", datetime.now(UTC) - timedelta(hours=1)
        await enqueue(database, quick, [Ride(number=5)], origin=another, run_at=overdue)
        executor.assign([ORIGIN, another], 2)
        await eventually(lambda: started[-1] == 5, "of an origin that has come since, all that is due")


@pytest.mark.parametrize("fails", [False, True])
async def test_one_look_for_what_is_due_that_took_long_leaves_no_job_waiting(
    database: str, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """As behind a lock of the table, or where the process stood still: what was due before it was committed then, as
    with a `run_at` that has passed, waited for twenty times as long."""
    monkeypatch.setattr(promoter, "_QUICK_LOOK", SECONDS)
    registry, started, later = Registry(), list[int](), [0.0, 3_600.0]
    monkeypatch.setattr(promoter, "now", lambda: now() + later[0])

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with running(database, registry) as executor:
        await eventually(lambda: executor._promoter._looked_at, "its first look, which is a whole one anyway")
        fetchrow = executor._promoter._link.fetchrow

        async def slow(query: str, *arguments: object) -> object:
            if len(later) > 1:
                later.pop(0)
                if fails:
                    raise PostgresUnavailable("it did not answer")
            return await fetchrow(query, *arguments)

        monkeypatch.setattr(executor._promoter._link, "fetchrow", slow)
        await eventually(lambda: len(later) == 1)
        await enqueue(database, quick, [Ride()], run_at=datetime.now(UTC) - timedelta(hours=1))
        await eventually(lambda: started)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_look_for_what_is_due_that_had_too_little_time_is_followed_by_smaller_ones(
    database: str, monkeypatch: pytest.MonkeyPatch, whole: bool
):
    """On a server to which its jobs are too many for a call, each look promoted as many as the last, and was undone."""
    monkeypatch.setattr(promoter, "_QUICK_LOOK", SECONDS if whole else -1.0)
    monkeypatch.setattr("sidings.executor.link._REST", 1e9)
    registry, later, most = Registry(), [0.0], list[object]()
    monkeypatch.setattr(promoter, "now", lambda: now() + later[0])

    async with running(database, registry) as executor:
        if not whole:
            await eventually(lambda: executor._promoter._whole_at > now() + SECONDS, "two whole looks have taken long")
        fetchrow = executor._promoter._link.fetchrow

        async def failing(query: str, *arguments: object) -> object:
            most.append(arguments[3])
            if len(most) <= 2:
                later[0] += executor._promoter._link.long_seconds
                raise PostgresUnavailable("it did not answer")
            return await fetchrow(query, *arguments)

        monkeypatch.setattr(executor._promoter._link, "fetchrow", failing)
        await eventually(lambda: len(most) >= 6)
    assert most[:6] == [1_000, 500, 250, 500, 1_000, 1_000]


async def test_looks_for_what_is_due_are_followed_by_smaller_ones_also_where_a_call_has_little_time(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """With `call_seconds` of less than three, looks that were cut off never counted as too long: none was smaller than
    the last, and no delayed job was promoted."""
    monkeypatch.setattr("sidings.executor.link._MOST_PATIENCE", 1)  # more time would do as well
    registry, started = Registry(), list[int]()

    @registry.job()
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with connected(database) as connection:
        await connection.execute(
            "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$BEGIN PERFORM pg_sleep({ROW_SECONDS}); RETURN NEW; END$$; "
            "CREATE TRIGGER slow BEFORE UPDATE ON sidings.job FOR EACH ROW "
            "WHEN (OLD.position IS NULL AND NEW.position IS NOT NULL) EXECUTE FUNCTION public.slow()"
        )
    many = round(1.2 * 0.5 / ROW_SECONDS)  # which take longer than a call may
    await enqueue(database, quick, (Ride(number=n) for n in range(many)), run_at=datetime.now(UTC) - timedelta(hours=1))
    async with impatient(database, registry):
        await eventually(lambda: len(started) == many)


async def test_late_rows_among_too_many_to_be_looked_through_in_time_are_found_by_reading_anew(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """A transaction that was open at the first read ends: its rows may stand anywhere. Looking for them among what
    stands still took longer than a call may take; the read was repeated for ever, and no job was found any more."""
    monkeypatch.setattr("sidings.executor.link._MOST_PATIENCE", 1)  # more time would do as well
    scaled(monkeypatch)
    registry, started = Registry(), list[int]()

    @registry.job()
    async def bulk(job: Job[Ride]) -> None:
        raise AssertionError("it is paused")

    @registry.job(group="transport")
    async def quick(job: Job[Ride]) -> None:
        started.append(job.payload.number)

    async with connected(database) as writer, slow_rows(database, "bulk") as slow:
        await Admin(writer, actor="test").pause(type="bulk", reason="a test")
        transaction = writer.transaction()
        await transaction.start()
        await quick.enqueue(writer, Ride(transport="a", number=1), origin=ORIGIN)
        await enqueue(database, bulk, (Ride(number=n) for n in range(STILL)))
        async with impatient(slow, registry) as executor:
            await eventually(lambda: executor.scheduler.origins[ORIGIN].high > STILL)
            await transaction.commit()
            await eventually(lambda: started)

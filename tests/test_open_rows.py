"""Rows that are not committed yet: the reader's marks pass them, and late rows bring them when they are.

Else each read steps over the rows of an open transaction, in all origins in which nothing newer is committed.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Any

import asyncpg
import pytest
from sidings.devstack import Postgres
from sidings.devstack.databases import create_database, ensure_template
from sidings.devstack.fixtures import ServerDirectory
from sidings.errors import PostgresUnavailable
from sidings.executor import Executor, scheduler
from sidings.executor.glance import GLANCE_FROM
from sidings.executor.scheduler import Scheduler
from sidings.jobs import Job, Registry

from .scheduler_world import INDEX, LIVES, Clocks, Record, World
from .support import Ledger, Ride, an_executor, answers, connected, drained, enqueue, eventually, running, value
from .test_query_plans import a_reader

ORIGINS = ["t/0", "t/1", "t/2"]


def rides(count: int, transport: str = "") -> list[Ride]:
    return [Ride(transport=transport, number=number) for number in range(count)]


def a_registry(ledger: Ledger) -> tuple[Registry, Any]:
    registry = Registry()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        await asyncio.sleep(0)
        ledger.end(job)

    return registry, ride


async def drawn(dsn: str) -> int:
    """The last position that has been drawn."""
    return await value(dsn, "SELECT last_value FROM sidings.job_position")


async def passed(executor: Executor, position: int, origins: list[str]) -> None:
    """Wait until the marks of these origins stand at or behind a position."""
    queues = executor.scheduler.origins

    def all_have() -> bool:
        return all(queues[name].high >= position for name in origins)

    await eventually(all_have, lambda: f"the marks to pass {position}: {[queues[name].high for name in origins]}", 5)


@asynccontextmanager
async def a_transaction(dsn: str) -> AsyncIterator[tuple[asyncpg.Connection, asyncpg.transaction.Transaction]]:
    async with connected(dsn) as connection:
        transaction = connection.transaction()
        await transaction.start()
        yield connection, transaction


async def buffers_of_a_read(dsn: str, executor: Executor) -> int:
    """How many blocks the next read would touch."""
    reader = executor.reader
    query = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {reader._sql}"
    async with connected(dsn, enable_seqscan="off", enable_bitmapscan="off") as connection:
        for _ in range(2):  # the first fills the caches of this connection
            arguments = reader._arguments(reader._planner.plan(0.0))
            plan = json.loads(await connection.fetchval(query, *arguments))[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_read_steps_over_the_rows_of_an_open_transaction_only_once(database: str, ending: str):
    ledger = Ledger()
    registry, ride = a_registry(ledger)
    async with running(database, registry, ORIGINS) as executor, a_transaction(database) as (connection, transaction):
        for number, origin in enumerate(ORIGINS):
            payloads = [Ride(transport=f"open {number} {n % 200}") for n in range(3_000)]
            await ride.enqueue_many(connection, payloads, origin=origin)
        await passed(executor, await drawn(database), ORIGINS)
        assert await buffers_of_a_read(database, executor) < 60  # it was 300 and more: about 1 for 30 rows
        await enqueue(database, ride, rides(20, "other"), origin=ORIGINS[0])
        await eventually(lambda: len(ledger.ended) == 20, "the jobs of others to run")
        assert {group for group, _ in ledger.started} == {"other"}
        await getattr(transaction, ending)()
        await drained(database)
        count = 20 + (9_000 if ending == "commit" else 0)
        assert len(ledger.started) == len(ledger.runs()) == count
        assert not ledger.overlaps
        assert all(ids == sorted(ids) for ids in ledger.by_group().values())
        assert await executor._upkeep.audit() == 0
        await enqueue(database, ride, rides(5, "after"), origin=ORIGINS[1])
        await eventually(lambda: len(ledger.ended) == count + 5, "the jobs enqueued afterwards")


async def test_few_rows_of_a_transaction_that_was_passed_come_late_and_in_their_place(database: str):
    """Each waits for a lock that the other's commit sets free, so the order of the groups is known."""
    ledger = Ledger()
    registry, ride = a_registry(ledger)
    async with running(database, registry, ORIGINS) as executor:
        async with a_transaction(database) as (first, one):
            before = [await ride.enqueue(first, Ride(transport="g"), origin=ORIGINS[0]) for _ in range(3)]
            await passed(executor, await drawn(database), ORIGINS)
            async with a_transaction(database) as (second, two):
                between = await ride.enqueue_many(second, rides(3, "h"), origin=ORIGINS[1])
                await passed(executor, await drawn(database), ORIGINS)
                await one.commit()
                behind = await enqueue(database, ride, rides(3, "g"), origin=ORIGINS[0])
                await eventually(lambda: len(ledger.ended) == 6, "the first group")
                await two.commit()
        await drained(database)
        assert ledger.by_group() == {"g": [*before, *behind], "h": between}
        assert executor.metrics.late_rows._value.get() >= 6


async def test_an_executor_that_starts_passes_what_is_open(database: str):
    ledger = Ledger()
    registry, ride = a_registry(ledger)
    async with a_transaction(database) as (connection, transaction):
        ids = await ride.enqueue_many(connection, rides(200, "open"), origin=ORIGINS[0])
        async with running(database, registry, ORIGINS) as executor:
            await passed(executor, await drawn(database), ORIGINS)
            await transaction.commit()
            await drained(database)
            assert ledger.by_group() == {"open": ids}


async def test_the_first_position_is_not_passed_before_it_is_drawn(database: str):
    """A sequence that was never used has the last value 1."""
    ledger = Ledger()
    registry, ride = a_registry(ledger)
    async with running(database, registry, ORIGINS) as executor:
        answered: set[float] = set()
        await eventually(lambda: answered.add(executor.reader.last_answer) or len(answered) > 3, "some reads")
        assert [queue.high for queue in executor.scheduler.origins.values()] == [0, 0, 0]
        await enqueue(database, ride, rides(1, "g"), origin=ORIGINS[0])
        await drained(database)


def test_an_answer_with_late_rows_of_many_origins_is_bounded():
    """A transaction may have stored jobs in all of them; what was left for another read is read anew from 0."""
    world = Scheduler(lambda kind: True)
    reader = a_reader(world)
    for number in range(10):
        world.add_origin(f"t/{number}", 1)
    assert reader._arguments(reader._planner.plan(0.0))[15] == 2_000
    for number in range(10, 1_000):
        world.add_origin(f"t/{number}", 1)
    assert 32 <= reader._arguments(reader._planner.plan(0.0))[15] <= 64


async def test_after_a_read_that_took_too_long_origins_take_turns(database: str, monkeypatch: pytest.MonkeyPatch):
    """With six million open rows in 16 origins, the first read of an executor took longer than a call may take."""
    monkeypatch.setattr("sidings.executor.link._LONG_SECONDS", 0.0)
    ledger = Ledger()
    registry, ride = a_registry(ledger)
    refused: list[int] = []
    for number, origin in enumerate(ORIGINS):
        await enqueue(database, ride, rides(20, f"{number}"), origin=origin)
    executor = an_executor(database, registry)
    fetch = executor.reader._link.fetch

    async def slow(query: str, *arguments: Any) -> list[asyncpg.Record]:
        if query == executor.reader._sql and sum(page > 0 for page in arguments[2]) > 1 and len(refused) < 5:  # type: ignore[arg-type]
            refused.append(len(ledger.ended))
            raise PostgresUnavailable("it took too long")
        return await fetch(query, *arguments)

    monkeypatch.setattr(executor.reader._link, "fetch", slow)
    await executor.start()
    try:
        executor.assign(ORIGINS, 1)
        await drained(database)
    finally:
        await executor.stop()
    assert refused[0] == 0
    assert refused[-1] > 0, "jobs of some origins run before all can be read at once"
    assert executor.reader._planner._turns is None


# -- a crash hands out positions a second time -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal(sidings_server_directory: ServerDirectory) -> Iterator[Postgres]:
    """A server whose backends the test may kill. WAL reaches the disk with commits only."""
    settings = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
    server = Postgres(sidings_server_directory("mortal"), settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.remove()


async def crash(dsn: str, connection: asyncpg.Connection) -> None:
    """Kill this one's backend, which takes all others with it. Returns when the server answers again."""
    async with connected(dsn) as other:
        os.kill(await connection.fetchval("SELECT pg_backend_pid()"), signal.SIGKILL)
        await eventually(other.is_closed, "the server to notice")
    await eventually(lambda: answers(dsn), "the server to answer")


async def test_positions_that_a_crash_hands_out_again_are_found(mortal: Postgres, caplog: pytest.LogCaptureFixture):
    """A backend that is killed takes all others with it, but not the server's start: what no commit had made durable is
    gone, positions too that the marks have passed."""
    template = await ensure_template(mortal.dsn, service="test")
    dsn = await create_database(mortal.dsn, f"crash_{token_hex(4)}", template=template)
    ledger = Ledger()
    registry, ride = a_registry(ledger)
    again = 0
    async with running(dsn, registry, ORIGINS, lease_seconds=60, audit_seconds=3600) as executor:
        for attempt in range(5):
            expected = len(ledger.ended) + 20
            async with a_transaction(dsn) as (connection, _):
                await ride.enqueue_many(connection, rides(500, "open"), origin=ORIGINS[0])
                high = await drawn(dsn)
                await passed(executor, high, ORIGINS)
                await crash(dsn, connection)
            again += await drawn(dsn) < high - 100
            for number in range(20):
                await enqueue(dsn, ride, rides(1, f"{attempt} {number}"), origin=ORIGINS[number % 3])
            await eventually(lambda: len(ledger.ended) >= expected, "the jobs of after the crash")  # noqa: B023
    assert again, "no crash has taken positions back: the test has shown nothing"
    assert caplog.text.count("was restarted") == 5
    assert set(ledger.runs().values()) == {1}


async def test_statistics_that_a_person_has_reset_are_no_crash(database: str, caplog: pytest.LogCaptureFixture):
    """All that waited was read anew."""
    registry, ride = a_registry(Ledger())
    async with running(database, registry), connected(database) as connection:
        for kinds in ([], ["bgwriter"], ["archiver", "bgwriter"]):
            await connection.execute("SELECT pg_stat_reset_shared(kind) FROM unnest($1::text[]) kind", kinds)
            await enqueue(database, ride, rides(1, "a"))
            await drained(database)
    assert "was restarted" not in caplog.text


@pytest.mark.chaos
async def test_transaction_ids_that_a_crash_hands_out_again_are_no_sign_that_nothing_has_been_committed(
    mortal: Postgres,
):
    """Many idle origins are not read while the snapshot is the same. After a crash it comes again, with other rows."""
    template = await ensure_template(mortal.dsn, service="test")
    dsn = await create_database(mortal.dsn, f"crash_{token_hex(4)}", template=template)
    ledger = Ledger()
    registry, ride = a_registry(ledger)
    origins = [f"t/{number}" for number in range(GLANCE_FROM + 6)]
    snapshot, again = "SELECT pg_current_snapshot()::text", 0
    # No renewal may come in between, and no poll before the server has recovered.
    async with running(dsn, registry, origins, lease_seconds=600, audit_seconds=3600, poll_seconds=6) as executor:
        for attempt in range(4):
            await executor.cycles.barrier()  # what has ended is recorded: nothing else takes a transaction id
            async with a_transaction(dsn) as (connection, transaction):
                await connection.execute("SELECT pg_current_xact_id()")
                await transaction.rollback()
                before = await connection.fetchval(snapshot)
                executor.wake()
                await eventually(lambda: (executor.reader._complete or "").startswith(before), "a read")  # noqa: B023
                await crash(dsn, connection)
            await enqueue(dsn, ride, rides(1, "after"), origin=origins[attempt])
            again += await value(dsn, snapshot) == before
            await eventually(lambda: len(ledger.ended) > attempt, "the job of after the crash")  # noqa: B023
    assert again, "no crash has taken transaction ids back: the test has shown nothing"


# -- worlds in which anything may happen -----------------------------------------------------------------------------


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    monkeypatch.setattr(scheduler, "_HEAVY", 6)
    with Clocks() as clocks:
        yield clocks


@pytest.mark.parametrize("name", LIVES)
def test_marks_that_pass_open_rows_lose_nothing_whatever_happens(
    name: str, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
):
    """As `test_scheduler_properties`, on a database that tells how far positions have been drawn: as late as can be."""
    deliver = World.deliver_read

    def deliver_read(self: World) -> None:
        if self.read_in_flight is not None:
            told = list(self.read_in_flight.rows[0])
            told[INDEX["position"]] = self.database.next_position - 1
            self.read_in_flight.rows[0] = Record(told)
        deliver(self)

    monkeypatch.setattr(World, "deliver_read", deliver_read)
    steps = 0
    for seed in range(100_000):
        chance = random.Random(f"open rows {name} {seed}")
        world = clocks.world = World(chance, LIVES[name])
        length = chance.choice((60, 200, 600))
        try:
            world.live(length)
        except AssertionError as error:
            error.add_note(f"in the life {name!r} with the seed {seed}, at step {world.step} of {length}")
            raise
        steps += length
        if steps > 10_000:
            break

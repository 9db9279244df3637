"""The lease thread, alone."""

import asyncio
import itertools
import logging
import runpy
import time
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import pytest
from sidings.executor import ExecutorSettings, PostgresSettings, clock, connect
from sidings.executor.leases import LeaseEvents, LeaseThread
from sidings.schema import int_array, load_sql
from sidings.waiting import set_within

from .support import SECONDS, eventually, refusing

NOBODY = LeaseEvents(lost=lambda epochs: None, wanted=lambda name, generation: None, replaced=lambda: None)


class Held:
    """What is leased."""

    name = "t/0"
    epoch = 1
    deadline = 0.0
    timeline: str | None = None


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="time.monotonic() counts the time asleep here")
def test_leases_run_out_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that wakes up goes on with what others have taken over meanwhile."""
    clock_gettime, asleep = time.clock_gettime, 1_000.0
    monkeypatch.setattr(
        time, "clock_gettime", lambda which: clock_gettime(which) + asleep * (which == time.CLOCK_BOOTTIME)
    )
    now = runpy.run_path(clock.__file__)["now"]
    before = time.monotonic()
    assert now() >= before + asleep


async def test_a_renewal_may_be_asked_for_when_the_thread_has_ended() -> None:
    leases = LeaseThread(PostgresSettings(dsn="postgresql://x"), ExecutorSettings(), NOBODY, lambda: None)
    leases.renew_soon()
    leases.start()
    await eventually(lambda: leases._poke, "it runs")
    await leases.stop()
    assert leases._loop is not None
    assert leases._loop.is_closed()
    leases.renew_soon()


async def test_leases_are_tried_again_after_an_error_that_nobody_has_thought_of() -> None:
    """PgBouncer in place of Postgres, for a while: our own connections refuse it with a `ConfigurationError`."""
    async with refusing("08P01", "unsupported startup parameter: jit") as (dsn, asked):
        leases = LeaseThread(PostgresSettings(dsn=dsn), ExecutorSettings(lease_seconds=0.2), NOBODY, lambda: None)
        leases.executor_id = uuid4()
        leases.hold([Held()])
        leases.start()
        try:
            await eventually(lambda: len(asked) > 2, "it tries again")
        finally:
            await leases.stop()


@pytest.fixture
def of_the_log():
    """Adds a filter to the executor's log."""
    added: list[Callable[[logging.LogRecord], bool]] = []
    log = logging.getLogger("sidings.executor")

    def add(given: Callable[[logging.LogRecord], bool]) -> None:
        added.append(given)
        log.addFilter(given)

    yield add
    for each in added:
        log.removeFilter(each)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_leases_are_renewed_although_a_filter_of_the_log_raises(of_the_log) -> None:
    """The thread ended, and each lease ran out, for good; the executor did nothing any more."""
    asked = 0

    def failed() -> None:
        nonlocal asked
        asked += 1

    def broken(record: logging.LogRecord) -> bool:
        raise LookupError(record.msg)

    of_the_log(broken)
    postgres = PostgresSettings(dsn="postgresql://somebody@127.0.0.1:1/x")  # nobody is there
    leases = LeaseThread(postgres, ExecutorSettings(lease_seconds=0.2), NOBODY, failed)
    leases.executor_id = uuid4()
    leases.hold([Held()])
    leases.start()
    try:
        await eventually(lambda: asked > 2, "it tries again", seconds=5)
    finally:
        await leases.stop()


async def test_the_thread_is_waited_for_while_handlers_keep_the_threads_of_asyncio() -> None:
    """A stop waited for one of them for as long as their calls took."""
    gate = asyncio.Event()
    taken = [asyncio.create_task(asyncio.to_thread(_until, gate)) for _ in range(64)]
    leases = LeaseThread(PostgresSettings(dsn="postgresql://x"), ExecutorSettings(), NOBODY, lambda: None)
    leases.start()
    await eventually(lambda: leases._poke, "it runs")
    try:
        await asyncio.wait_for(leases.stop(), 5)
        assert leases._thread is not None
        assert not leases._thread.is_alive()
    finally:
        gate.set()
        await asyncio.gather(*taken)


def _until(gate: asyncio.Event) -> None:
    while not gate.is_set():
        time.sleep(0.01)


async def test_the_thread_is_not_waited_for_while_its_server_hangs() -> None:
    """A stop waited for its call, for as long as that may take, after all that it does itself."""
    asked = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    dsn = f"postgresql://somebody@127.0.0.1:{port}/x?sslmode=disable"
    postgres = PostgresSettings(dsn=dsn, connect_seconds=120.0)
    leases = LeaseThread(postgres, ExecutorSettings(lease_seconds=360.0), NOBODY, lambda: None)
    leases.executor_id = uuid4()
    leases.hold([Held()])
    leases.start()
    await eventually(lambda: leases._poke, "it runs")
    leases.renew_soon()
    await asyncio.wait_for(asked.wait(), SECONDS)
    try:
        await asyncio.wait_for(leases.stop(), SECONDS)
        assert leases._thread is not None
        assert not leases._thread.is_alive()
    finally:
        server.close()


async def test_a_renewal_that_took_long_in_vain_is_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the lease is short by then: with a pause behind it, half a second of fifteen."""
    times = itertools.count(step=1_000)
    monkeypatch.setattr("sidings.executor.leases.now", lambda: float(next(times)))  # each call takes as long
    waits: list[float | None] = []

    async def wait(event: asyncio.Event, seconds: float | None) -> bool:
        waits.append(seconds)
        return await set_within(event, seconds)

    monkeypatch.setattr("sidings.executor.leases.set_within", wait)
    async with refusing("57P03", "the database system is starting up") as (dsn, asked):
        leases = LeaseThread(PostgresSettings(dsn=dsn), ExecutorSettings(lease_seconds=3_600.0), NOBODY, lambda: None)
        leases.executor_id = uuid4()
        leases.hold([Held()])
        leases.start()
        try:
            await eventually(lambda: leases._poke, "it runs")
            leases.renew_soon()
            await eventually(lambda: len(asked) > 2, "it tries again")
            leases.suspended = True
            await eventually(lambda: waits[-1] == 240, "while it is suspended, it waits, and keeps no core busy")
        finally:
            await leases.stop()


async def test_a_renewal_asks_the_server_nothing_else(database: str) -> None:
    """On each new connection asyncpg asked, in two statements before, what an array of epochs is: a third of the lease
    was not enough for all where Postgres is slow, and the next renewal began with a new connection."""
    asked: list[str] = []
    connection = await connect(PostgresSettings(dsn=database))
    try:
        connection.add_query_logger(lambda record: asked.append(record.query))
        arguments = (uuid4(), [Held.name], int_array([Held.epoch]), timedelta(seconds=15))
        rows = await connection.fetch(renew := load_sql("sidings.executor", "renew"), *arguments)
    finally:
        await connection.close()
    assert (asked, len(rows)) == ([renew], 1)

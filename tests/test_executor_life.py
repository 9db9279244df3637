"""Starts and stops of an executor that cross each other."""

import asyncio
import resource
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sidings.errors import PostgresUnavailable
from sidings.executor.upkeep import Upkeep
from sidings.jobs import Job, Registry
from sidings.schema import load_sql

from .faulty_proxy import proxied
from .support import ORIGIN, SECONDS, Ride, a_role, an_executor, connected, drained, enqueue, eventually, running, value

EXECUTORS = "SELECT count(*) FROM sidings.executor"


async def test_an_executor_that_is_stopped_while_it_starts_does_not_start(database: str):
    async with proxied(database) as proxy:
        executor = an_executor(proxy.dsn, Registry())
        executor.assign([ORIGIN], 1)
        proxy.hold()
        starting = asyncio.create_task(executor.start())
        await eventually(lambda: proxy.waiting, "its first connection")
        await executor.stop()
        proxy.pass_on()
        await starting
        assert executor.problems() == ["the executor does not run"]
        assert await value(database, EXECUTORS) == 0


async def test_an_executor_that_starts_long_after_it_was_made_has_missed_no_renewal(database: str):
    """A service waits for its directories first, which may take minutes."""
    executor = an_executor(database, Registry())
    executor._leases.last_renewed -= 100.0
    await executor.start()
    try:
        executor.assign([ORIGIN], 1)
        await executor.settled(20)
        assert executor.problems() == []
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("sidings ")]
        assert [thread.daemon for thread in threads] == [True, True], "a process that never stops it ends all the same"
    finally:
        await executor.stop()


async def test_whoever_stops_an_executor_a_second_time_waits_for_the_first(database: str):
    registry, started, go_on = Registry(), asyncio.Event(), asyncio.Event()

    @registry.job()
    async def slow(job: Job[Ride]) -> None:
        started.set()
        await go_on.wait()

    async with running(database, registry, shutdown_seconds=20) as executor:
        await enqueue(database, slow, [Ride()])
        await started.wait()
        first = asyncio.create_task(executor.stop())
        second = asyncio.create_task(executor.stop())
        await asyncio.sleep(0)
        go_on.set()
        await second
        assert first.done()
        assert await value(database, EXECUTORS) == 0


async def test_a_stop_gives_all_back_where_no_file_is_left(database: str):
    """Its last statement was read from its file then, as were others that are seldom needed: a relay ended at such a
    one, and with it the service."""
    load_sql.cache_clear()
    registry, limits = Registry(), resource.getrlimit(resource.RLIMIT_NOFILE)

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async with running(database, registry) as executor:
        await enqueue(database, ride, [Ride()])
        await drained(database)  # its connections are open
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # which are open: not one more
            await executor.stop()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert await value(database, EXECUTORS) == 0


async def test_a_stop_that_was_cancelled_is_completed_by_the_next(database: str):
    registry, started = Registry(), asyncio.Event()

    @registry.job()
    async def slow(job: Job[Ride]) -> None:
        started.set()
        await asyncio.Event().wait()

    async with running(database, registry, shutdown_seconds=20) as executor:
        await enqueue(database, slow, [Ride()])
        await started.wait()
        first = asyncio.create_task(executor.stop())
        await asyncio.sleep(0)
        first.cancel()
        await executor.stop()
        assert first.done()
        assert executor.problems()[0] == "the executor does not run"


async def test_an_executor_whose_loops_have_been_cancelled_from_outside_stops_at_once(database: str):
    """As when somebody interrupts the process: asyncio.run cancels all tasks then. Nothing could
    record what handlers end with, or give the origins back; it waited for both."""
    registry, started = Registry(), asyncio.Event()

    @registry.job()
    async def slow(job: Job[Ride]) -> None:
        started.set()
        await asyncio.Event().wait()

    tasks = asyncio.all_tasks()
    executor = an_executor(database, registry, shutdown_seconds=3600)
    await executor.start()
    executor.assign([ORIGIN], 1)
    await executor.settled(20)
    await enqueue(database, slow, [Ride()])
    await started.wait()
    for task in asyncio.all_tasks() - tasks:
        task.cancel()
    await executor.stop()
    assert executor.problems()[0] == "the executor does not run"


@pytest.mark.parametrize("name", ["sidings Promoter.run", "sidings timeouts"])
async def test_an_executor_of_which_somebody_has_cancelled_one_loop_ends(database: str, name: str):
    """As code that cancels tasks which are not its own. Delayed jobs were promoted no more, or no handler was cancelled
    at its timeout, and all seemed well."""
    async with running(database, Registry()) as executor:
        [loop] = [task for task in asyncio.all_tasks() if task.get_name() == name]
        loop.cancel()
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(executor.wait(), 20)
        assert any(name in str(error) for error in ended.value.exceptions)
        assert executor.problems() == ["the executor does not run"]


async def test_who_waits_no_longer_for_an_executor_leaves_it_running_and_a_stop_lets_others_return(database: str):
    """It ended with the first that gave up waiting for it; who still waited at a stop was cancelled."""
    registry, ran = Registry(), asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        ran.set()

    async with running(database, registry) as executor:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(executor.wait(), 0.05)
        await enqueue(database, ride, [Ride()])
        await asyncio.wait_for(ran.wait(), SECONDS)
        waiting = asyncio.create_task(executor.wait())
        await asyncio.sleep(0)
        await executor.stop()
        await waiting
        await executor.wait()


async def test_a_stop_while_the_row_of_the_executor_is_found_to_be_gone_ends(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """While it ends its loops, to begin them anew. Up to Python 3.12 a task group hides that it is cancelled then: it
    registered once more, and the stop waited for ever."""
    ending, go_on = asyncio.Event(), asyncio.Event()

    async def slow_to_end(_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await go_on.wait()

    monkeypatch.setattr(Upkeep, "run", slow_to_end)
    async with running(database, Registry()) as executor, connected(database) as connection:
        await connection.execute("UPDATE sidings.origin SET owner = NULL; DELETE FROM sidings.executor")
        await asyncio.wait_for(ending.wait(), SECONDS)
        stopping = asyncio.create_task(executor.stop())
        # From Python 3.13 on the group's own cancellation is still counted then: a stop does not begin with a pause.
        main = executor._main
        await eventually(lambda: executor._stopping.locked() and (executor.cycles.paused or main.cancelling()))
        stopping.cancel()  # else it would wait for the loops, which give origins back
        await eventually(lambda: executor._main and executor._main.cancelling())
        go_on.set()
        await asyncio.wait([stopping], timeout=SECONDS)
        assert stopping.cancelled()
        assert await value(database, EXECUTORS) == 0


async def test_why_leases_are_not_renewed_stands_in_health(database: str):
    """It said for how long; why, as that the server gives no more connections, stood in the log alone."""
    async with (
        a_role(database) as (role, dsn),
        running(dsn, Registry(), lease_seconds=1.0) as executor,
        connected(database) as connection,
    ):
        await connection.execute(f"ALTER ROLE {role} CONNECTION LIMIT 0")
        await connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")

        def told() -> bool:
            return any(
                problem.startswith("leases were last renewed") and "too many connections for role" in problem
                for problem in executor.problems()
            )

        await eventually(told, executor.problems)
        await connection.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")
        await eventually(lambda: executor.problems() == [], executor.problems)


async def test_that_delayed_jobs_cannot_be_promoted_stands_in_health_until_they_can(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Or until there is nothing to be promoted here: an instance whose origins others have is well."""

    async def fails(*_: object) -> None:
        raise PostgresUnavailable("it does not answer")

    async with running(database, Registry()) as executor:
        outage = executor._promoter.outage
        for again in (lambda: monkeypatch.undo(), lambda: executor.assign([], 2)):
            monkeypatch.setattr(executor._promoter._link, "fetchrow", fails)
            await eventually(outage.seconds)
            outage._since -= 100.0
            [problem] = executor.problems()
            assert problem.startswith("delayed jobs cannot be promoted, for 1")
            assert problem.endswith("s: it does not answer")
            again()
            await eventually(lambda: executor.problems() == [], executor.problems)


async def test_leases_are_renewed_no_more_when_a_stop_is_cancelled_again_and_again(database: str):
    """As anyio's cancel scopes do. Its origins stood still for as long as the process lived: the thread that renews
    leases went on."""
    registry, begun = Registry(), asyncio.Event()

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def free() -> bool:
        return await value(database, "SELECT bool_and(owner IS NULL OR lease_until < now()) FROM sidings.origin")

    await enqueue(database, ride, [Ride()])
    async with running(database, registry, lease_seconds=1.5) as executor:
        await asyncio.wait_for(begun.wait(), SECONDS)
        stopping = asyncio.create_task(executor.stop())
        await asyncio.sleep(0)
        while not stopping.done():
            stopping.cancel()
            await asyncio.sleep(0)
        await eventually(lambda: not executor.workers.running(), "its handler has ended")
        await eventually(free, "the lease has run out", seconds=15.0)


class NoThreadIsFree(ThreadPoolExecutor):
    """Takes calls, and begins none."""

    taken = threading.Event()

    def submit(self, *_: object) -> Any:
        self.taken.set()


@pytest.mark.parametrize("begins", [True, False])
async def test_a_plain_function_holds_up_nothing_when_a_stop_is_cancelled_again_and_again(
    database: str, monkeypatch: pytest.MonkeyPatch, begins: bool
):
    """It passed for running when it had returned, or never begun: the process was ended when the lease ran out.
    Connections, the threads of handlers and the metrics stayed as well."""
    registry, begun, go_on, prometheus = Registry(), threading.Event(), threading.Event(), CollectorRegistry()

    @registry.job()
    def ride(job: Job[Ride]) -> None:
        begun.set()
        go_on.wait(SECONDS)

    async def connections() -> int:
        ours = "datname = current_database() AND application_name = 'sidings'"
        return await value(database, f"SELECT count(*) FROM pg_stat_activity WHERE {ours}")

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("sidings")]

    if not begins:
        monkeypatch.setattr("sidings.executor.threads.ThreadPoolExecutor", NoThreadIsFree)
        begun = NoThreadIsFree.taken
    await enqueue(database, ride, [Ride()])
    async with running(database, registry, prometheus=prometheus) as executor:
        await eventually(begun.is_set)
        stopping = asyncio.create_task(executor.stop())
        await asyncio.sleep(0)
        while not stopping.done():
            stopping.cancel()
            await asyncio.sleep(0)
        assert stopping.cancelled()
        await eventually(lambda: all(worker.task and worker.task.done() for worker in executor.workers.all))
        assert executor.workers.running() == begins, "a thread goes on"
        go_on.set()
        await eventually(lambda: not executor.workers.running(), "it has returned")
        await eventually(lambda: not threads(), threads)
        await eventually(lambda: _is_zero(connections()), "all connections are closed")
        assert list(prometheus.collect()) == []


async def _is_zero(count: Awaitable[int]) -> bool:
    return await count == 0

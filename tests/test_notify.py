"""Waking other instances with NOTIFY."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from sidings.errors import ConfigurationError
from sidings.executor import Executor, ExecutorSettings, PostgresSettings, notify
from sidings.jobs import Job, Registry

from .faulty_proxy import Moment, proxied
from .support import connected, enqueue, eventually, running


async def test_a_commit_of_one_instance_wakes_the_owner_of_the_origin(database: str) -> None:
    registry = Registry()
    ran = asyncio.Event()

    @registry.job()
    async def work(job: Job[dict[str, str]]) -> None:
        ran.set()

    # Nobody polls within the test's time: only a notification can start the job.
    settings = ExecutorSettings(poll_seconds=1_000, notify=True)
    async with AsyncExitStack() as stack:
        executors: list[Executor] = []
        for name in ("t/0", "t/1"):
            executor = Executor(
                "test", registry, PostgresSettings(dsn=database), settings, prometheus=CollectorRegistry()
            )
            await executor.start()
            stack.push_async_callback(executor.stop)
            executor.assign([name], 1)
            await executor.settled(20)
            executors.append(executor)
        connection = await asyncpg.connect(database)
        stack.push_async_callback(connection.close)
        async with asyncio.timeout(20):
            while await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'") < 2:
                await asyncio.sleep(0.01)
        async with connection.transaction():
            await work.enqueue(connection, {}, origin="t/1")
        executors[0].committed({"t/1": []})
        async with asyncio.timeout(20):
            await ran.wait()


LISTENING = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"


@asynccontextmanager
async def heard_of(database: str) -> AsyncIterator[tuple[Executor, asyncpg.Connection, list[str]]]:
    """An executor that holds `t/0` and listens; a connection; and the payloads of the notifications that it hears."""
    heard: list[str] = []
    async with (
        running(database, Registry(), ["t/0"], notify=True) as executor,
        connected(database) as connection,
    ):
        await eventually(lambda: connection.fetchval(LISTENING), "the executor listens")
        await connection.add_listener("sidings_committed", lambda *call: heard.append(str(call[-1])))
        yield executor, connection, heard


async def test_commits_at_once_are_told_of_by_one_notification_and_those_of_own_origins_by_none(database: str) -> None:
    odd = ["t/1", "it's \\ 'odd'", "ä/2"]
    async with heard_of(database) as (executor, _, heard):
        executor.committed({"t/0": []})
        for _ in range(100):
            for origin in odd:
                executor.committed({origin: []})
        await eventually(lambda: heard, "something is heard")
        executor.committed({"last/0": []})
        await eventually(lambda: heard[-1] == "last/0", "the last is heard")
    assert [sorted(payload.split("\n")) for payload in heard] == [sorted(odd), ["last/0"]]


async def test_commits_in_more_origins_than_a_notification_can_name_are_told_to_all(database: str) -> None:
    async with heard_of(database) as (executor, _, heard):
        executor.committed({f"{'x' * 100}/{number}": [] for number in range(100)})
        await eventually(lambda: heard, "something is heard")
    assert heard == [""]


async def test_a_connection_that_was_cut_is_replaced_at_once_for_both_directions(database: str) -> None:
    async with heard_of(database) as (executor, connection, heard):
        former = await connection.fetchval(LISTENING)
        await connection.execute(f"SELECT pg_terminate_backend({former})")
        again = f"{LISTENING} AND pid <> {former}"
        await eventually(lambda: connection.fetchval(again), "the executor listens again")

        async def told() -> bool:
            executor.committed({"t/1": []})
            return "t/1" in heard

        await eventually(told, "it sends again")


async def test_a_connection_that_falls_silent_before_it_listens_is_replaced_and_the_log_says_why(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied(database) as proxy:
        silent = proxy.arm("listen", Moment.SILENT_BEFORE)
        postgres = PostgresSettings(dsn=proxy.dsn, call_seconds=0.5)
        executor = Executor("test", Registry(), postgres, ExecutorSettings(notify=True), prometheus=CollectorRegistry())
        await executor.start()
        try:
            await eventually(lambda: silent.hits, "it has tried")
            assert executor._notifier is not None
            await eventually(lambda: executor._notifier._listening, "the executor listens")
        finally:
            await executor.stop()
    lines = [record.getMessage() for record in caplog.records]
    told = [line for line in lines if line.startswith("notifications could not be received, ")]
    assert told == ["notifications could not be received, trying again: TimeoutError()"]


@pytest.mark.parametrize("payload", ["t/0\x1fsoon", f"t/0\x1f{2**63}"])
async def test_what_somebody_sends_by_hand_is_taken_for_news_of_everything_and_logged_once(
    database: str, payload: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    ran: list[int] = []

    @registry.job()
    async def work(job: Job[dict[str, str]]) -> None:
        ran.append(job.id)

    async with (
        # Nobody polls within the test's time: only a notification can start the job.
        running(database, registry, ["t/0"], notify=True, poll_seconds=1_000) as executor,
        connected(database) as connection,
    ):
        await eventually(lambda: executor._notifier and executor._notifier._listening, "the executor listens")
        for _ in range(2):
            before = len(ran)
            await enqueue(database, work, [{}], origin="t/0")
            await connection.execute("SELECT pg_notify('sidings_committed', $1)", payload)
            await eventually(lambda before=before: len(ran) > before, "the job has run")
    told = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR", "CRITICAL")]
    assert [record.getMessage() for record in told] == [
        f"a notification on sidings_committed is not one of ours: {payload!r}"
    ]


def test_notify_is_refused_behind_pgbouncer() -> None:
    postgres = PostgresSettings(dsn="postgresql://localhost/x", pgbouncer=True)
    with pytest.raises(ConfigurationError, match="pgbouncer"):
        Executor("test", Registry(), postgres, ExecutorSettings(notify=True), prometheus=CollectorRegistry())


async def test_a_refused_listener_is_told_of_ever_more_rarely(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the role's password has been changed: each try was told, one a second."""
    refused, connects = list[Exception](), notify.connect

    async def refuse(settings: PostgresSettings) -> asyncpg.Connection:
        if len(refused) < 4:
            refused.append(asyncpg.InvalidPasswordError("not this one"))
            raise refused[-1]
        return await connects(settings)

    monkeypatch.setattr(notify, "connect", refuse)
    async with running(database, Registry(), notify=True) as executor:
        assert executor._notifier is not None
        await eventually(lambda: executor._notifier._listening is not None)
    told = [record.getMessage() for record in caplog.records if "not this one" in record.getMessage()]
    assert len(told) == 1, told
    assert len(refused) == 4

"""Processes that are forked: with a service that was made before, as by `gunicorn --preload`, and by handlers."""

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sidings import Message, Transaction
from sidings.executor import Executor, PostgresSettings, connect, forks
from sidings.jobs import Job, Registry
from sidings.kafka.transactions import Transactions
from sidings.service.monitor import Monitor
from sidings.signals import stop_signals

from .consumer_support import Number, a_service, produce, sample
from .support import (
    ORIGIN,
    SECONDS,
    Ride,
    an_executor,
    connected,
    drained,
    enqueue,
    eventually,
    fetch,
    outcomes,
    running,
)

forking = multiprocessing.get_context("fork")


@contextmanager
def forked(executor: Executor, count: int) -> Iterator[set[int]]:
    """So many children that each run this executor; their process ids."""
    children = [forking.Process(target=_run, args=(executor,), daemon=True) for _ in range(count)]
    try:
        for child in children:
            child.start()
        yield {child.pid for child in children if child.pid is not None}
    finally:
        for child in children:
            child.kill()
            child.join()


def _run(executor: Executor) -> None:
    async def run() -> None:
        await executor.start()
        executor.assign([ORIGIN])
        await asyncio.sleep(SECONDS)

    asyncio.run(run())


def _sleep(ready: Event) -> None:
    ready.set()
    time.sleep(SECONDS)


async def test_processes_that_are_forked_with_a_service_are_executors_of_their_own(database: str):
    """Under one id they took each other's origins as their own, in turns, and ran the same jobs at once."""
    with forked(an_executor(database, Registry()), 2) as pids:

        async def refused() -> bool:
            return bool(await fetch(database, "SELECT FROM sidings.origin WHERE wanted_by <> owner"))

        await eventually(refused, "one of them to wait for the other", seconds=5)
        assert {row["pid"] for row in await fetch(database, "SELECT pid FROM sidings.executor")} == pids
        assert [row["epoch"] for row in await fetch(database, "SELECT epoch FROM sidings.origin")] == [1]


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_for_a_forked_process_is_not_for_the_service(name: signal.Signals):
    """As `multiprocessing.Pool` ends its processes, and a supervisor, or Ctrl-C, all processes of a group."""
    told: list[str] = []
    ready = forking.Event()
    child = forking.Process(target=_sleep, args=(ready,), daemon=True)
    with stop_signals(lambda: told.append("stop"), lambda: told.append("hurry")):
        child.start()
        assert child.pid is not None
        if name is signal.SIGINT:  # Python ignores it while it forks
            await asyncio.to_thread(ready.wait, SECONDS)
        os.kill(child.pid, name)
        await asyncio.to_thread(child.join, 5)
        ended, told_by_child = child.exitcode is not None, told.copy()
        child.kill()
        os.kill(os.getpid(), name)
        await eventually(lambda: told == ["stop"], "the service's own signal", seconds=5)
    assert (ended, told_by_child) == (True, [])


def _serve(told: Any) -> None:
    """A web server, and a service beside it."""

    async def serve() -> None:
        stopped = asyncio.Event()
        with stop_signals(stopped.set, stopped.set):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stopped.wait(), 5)

    signal.signal(signal.SIGTERM, lambda *_: told.put(("web server", os.getpid())))
    asyncio.run(serve())


async def test_a_signal_for_a_service_of_a_forked_process_is_for_nobody_else():
    """That of its parent was stopped in its memory as well; and as that never ended there, a web server that had the
    signal before did not get it, and served on."""
    told = forking.SimpleQueue()
    with stop_signals(lambda: told.put(("stop", os.getpid())), lambda: None):
        child = forking.Process(target=_serve, args=(told,), daemon=True)
        await asyncio.to_thread(child.start)
        await asyncio.to_thread(child.join, SECONDS)
        child.kill()
    found = list[object]()
    while not told.empty():
        found.append(told.get())
    assert found == [("web server", child.pid)]


def test_a_forked_process_does_not_listen():
    """It kept the address from the next service, where this one was killed."""
    monitor = Monitor("127.0.0.1:0", CollectorRegistry(), problems=list, not_ready=list)
    monitor.start()
    address = monitor.address
    assert address is not None
    ready = forking.Event()
    child = forking.Process(target=_sleep, args=(ready,), daemon=True)
    child.start()
    try:
        assert ready.wait(SECONDS)
        monitor.stop()
        with socket.socket() as another:
            another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            another.bind(address)
            another.listen()
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("whose", ["a loop's", "a consumer's"])
async def test_a_forked_process_keeps_no_transaction_open(database: str, whose: str, monkeypatch: pytest.MonkeyPatch):
    """Where it outlived a killed service, Postgres went on with its transactions, and nobody else got their locks."""
    settings = PostgresSettings(dsn=database)
    closed = await connect(settings)
    await closed.close()
    transactions = Transactions(settings, lambda _: None)
    await transactions.start()
    assert transactions._pool is not None
    connection = await (connect(settings) if whose == "a loop's" else transactions._pool.acquire())
    await connection.execute("BEGIN; LOCK TABLE sidings.pause")
    strange = SimpleNamespace(is_closed=lambda: False)  # has no socket where it is looked for
    # Of these nothing is left to take away.
    monkeypatch.setattr(forks, "_connections", [closed, strange, *forks._connections])
    ready = forking.Event()
    child = forking.Process(target=_sleep, args=(ready,), daemon=True)
    child.start()
    try:
        assert await asyncio.to_thread(ready.wait, SECONDS)
        await connection.execute("SELECT 1")  # this process keeps it
        connection._transport.abort()  # without a word to Postgres, as where this process is killed
        async with connected(database) as other:
            await other.execute("SET lock_timeout = '5s'")
            await other.execute("BEGIN; LOCK TABLE sidings.pause")
    finally:
        child.kill()
        child.join()
        await transactions.stop()


@pytest.mark.parametrize(("code", "ends_with"), [(None, 0), (3, 3), ("it went wrong", 1)])
def test_a_forked_process_that_calls_sys_exit_ends_as_it_says(code: Any, ends_with: int):
    so_far = forks.forks_so_far()
    if (child := os.fork()) == 0:
        forks.end_if_forked(so_far, SystemExit(code))
        os._exit(99)
    assert _exit_code(child) == ends_with


@pytest.mark.parametrize("leaves", ["exit", "error", "return"])
@pytest.mark.parametrize("kind", ["async", "plain", "transactional"])
async def test_a_forked_process_that_comes_out_of_its_handler_ends(database: str, kind: str, leaves: str):
    """It went on as a second executor, over the same connections, or as a thread that waits for ever and keeps them."""
    jobs = Registry()
    codes: list[int | None] = []

    def fork(job: Job[Ride]) -> None:
        child = os.fork()
        if child != 0:
            codes.append(_exit_code(child))
        elif leaves == "exit":
            sys.exit(3)
        elif leaves == "error":
            os.execv("/nowhere", ["/nowhere"])

    async def fork_in_the_loop(job: Job[Ride]) -> None:
        fork(job)

    handler = fork if kind == "plain" else fork_in_the_loop
    fork_type = jobs.job(name="fork", transactional=kind == "transactional")(handler)
    async with running(database, jobs):
        await enqueue(database, fork_type, [Ride()])
        await drained(database)
    assert codes == [3 if leaves == "exit" else 1]
    assert await outcomes(database) == ["succeeded"]


@pytest.mark.parametrize("stateless", [False, True])
async def test_a_forked_process_that_comes_out_of_a_consumers_handler_ends(
    database: str, topic: Any, sidings_kafka: str, stateless: bool
):
    """It went on as a second consumer, over the same connections."""
    name, dead_letters = await topic("positions"), await topic("dead")
    service = a_service(None if stateless else database, sidings_kafka)
    codes: list[int | None] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            sys.exit(3)
        codes.append(_exit_code(child))

    if stateless:

        @service.consumer(name, stateless=True, dead_letter=dead_letters)
        async def handle(message: Message[Number]) -> None:
            fork()

    else:

        @service.consumer(name)
        async def handle_in(message: Message[Number], tx: Transaction) -> None:
            fork()

    await produce(sidings_kafka, name, [1])
    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 1)
    assert codes == [3]


def _exit_code(child: int) -> int | None:
    """None: it has not ended within three seconds, and is killed."""
    for _ in range(300):
        if (ended := os.waitpid(child, os.WNOHANG)) != (0, 0):
            return os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None

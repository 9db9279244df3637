"""Processes that are forked: a service that was made before, as by `gunicorn --preload`, and what handlers fork."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import pytest
from sidings.executor import Executor
from sidings.jobs import Registry
from sidings.supervision import stop_signals

from .support import ORIGIN, SECONDS, an_executor, eventually, fetch

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

"""SIGTERM and SIGINT, and whom they stop."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from sidings.signals import stop_signals

from .support import SECONDS, eventually


async def test_a_signal_stops_all_services_that_run_side_by_side():
    """The one that had started last stopped, and the others went on until they were killed."""
    told: list[str] = []
    first_ends = asyncio.Event()

    async def first() -> None:
        with stop_signals(lambda: told.append("first"), lambda: told.append("first hurries")):
            await first_ends.wait()

    running = asyncio.create_task(first())
    await asyncio.sleep(0)
    with stop_signals(lambda: told.append("second"), lambda: told.append("second hurries")):
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: sorted(told) == ["first", "second"], told, seconds=5)
        first_ends.set()
        await running
        os.kill(os.getpid(), signal.SIGINT)
        await eventually(lambda: told[2:] == ["second hurries"], told, seconds=5)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_has_stopped_a_service_goes_on_to_who_had_it_before(name: signal.Signals):
    """A web server that had taken SIGTERM, as uvicorn's `Server.serve()` does, went on without the service for ever."""
    told: list[tuple[str, int]] = []

    def web_server(number: int, _: object) -> None:
        told.append(("web server", number))

    before = {each: signal.signal(each, web_server) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        stopped = asyncio.Event()
        with stop_signals(stopped.set, lambda: told.append(("hurry", 0))):
            os.kill(os.getpid(), name)
            await asyncio.wait_for(stopped.wait(), 5)
            assert told == []
        assert told == [("web server", name)]
        with stop_signals(stopped.set, stopped.set), stop_signals(stopped.set, stopped.set):
            pass
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is web_server
        assert told == [("web server", name)]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_after_a_service_asyncio_run_has_its_handler_of_sigint_again():
    """Python's own was there, which raises KeyboardInterrupt in the middle of the event loop."""

    async def main() -> tuple[object, object]:
        before = signal.getsignal(signal.SIGINT)
        stopped = asyncio.Event()
        with stop_signals(stopped.set, stopped.set):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(stopped.wait(), 5)
        return before, signal.getsignal(signal.SIGINT)

    before, after = asyncio.run(main())
    assert after is before
    assert before is not signal.default_int_handler


async def test_the_event_loops_own_handler_that_a_service_replaces_is_told_of(caplog: pytest.LogCaptureFixture):
    """It was gone without a word."""
    loop, own = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, own.set)
    with stop_signals(own.set, own.set):
        pass
    assert caplog.messages == ["SIGTERM does not reach the event loop's own handler any more, since a service runs"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


FORK = """
import os, signal, sys
import sidings.signals

def own(*_): ...

signal.signal(signal.SIGTERM, own)
signal.signal(signal.SIGINT, own)
if os.fork() == 0:
    os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is own else 1)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_where_no_service_runs_what_is_forked_keeps_its_signal_handlers():
    """Those of a server that forks its workers, say."""
    assert subprocess.run([sys.executable, "-c", FORK], check=False, timeout=SECONDS).returncode == 0

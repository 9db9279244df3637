"""SIGTERM and SIGINT, and whom they stop."""

import asyncio
import os
import signal

from sidings.supervision import stop_signals

from .support import eventually


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

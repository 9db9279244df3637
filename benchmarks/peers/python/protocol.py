"""What the harness expects of a peer's program; see ../__init__.py. Runs in the peers' environment."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

TEXT = "x" * 170


def payload(number: int) -> dict[str, object]:
    return {"number": number, "text": TEXT}


async def ready() -> None:
    """Set up; wait for the harness."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


class Clock:
    def __init__(self) -> None:
        self._cpu, self._began = time.process_time(), time.perf_counter()

    def done(self, **more: float) -> None:
        """Print the result."""
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        print(json.dumps({"seconds": seconds, "client_seconds": cpu, **more}), flush=True)


async def until(condition: Callable[[], Awaitable[bool] | bool], pause: float = 0.004) -> None:
    while True:
        met = condition()
        if not isinstance(met, bool):
            met = await met
        if met:
            return
        await asyncio.sleep(pause)


async def latencies(rate: int, send: Callable[[int], Awaitable[object]], started: dict[int, float]) -> dict[str, float]:
    """Send at a steady rate; `send` returns when committed. Handlers note `time.perf_counter()` in `started`. How many
    seconds long is the last argument of the command line."""
    seconds = float(sys.argv[-1])
    committed: dict[int, float] = {}
    begin, count = time.perf_counter(), int(rate * seconds)
    for number in range(count):
        if (wait := begin + number / rate - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        await send(number)
        committed[number] = time.perf_counter()
    await until(lambda: len(started) >= count)
    waits = sorted(max(0.0, started[n] - at) for n, at in committed.items() if n >= rate)
    return {
        "p50_ms": waits[len(waits) // 2] * 1e3,
        "p99_ms": waits[min(len(waits) - 1, int(len(waits) * 0.99))] * 1e3,
        "jobs": count,
    }

"""An executor in a process of its own: `python -m benchmarks.worker DSN ORIGINS EVERY SETTINGS`, driven by `Worker`.

It prints `ready`, waits for a line, starts, prints `held` when it holds all its origins, and then, every so many
seconds in which something has changed, a line of JSON with what it has done. A closed standard input ends it in good
order.
"""

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from sidings.collector import relax_collector
from sidings.executor import ExecutorSettings
from sidings.jobs import OutcomeName

from . import ours
from .memory import peak_mib

__all__ = ["Worker"]

ROOT = Path(__file__).resolve().parents[1]


class Worker:
    """The harness' side of a worker process. `state` is what it last said of itself."""

    def __init__(self, dsn: str, origins: Sequence[str], *, every: float = 0.01, **settings: Any) -> None:
        """every: how often it looks at what it has done, once it holds its origins; that costs it some CPU."""
        self._command = [
            sys.executable,
            "-m",
            "benchmarks.worker",
            dsn,
            json.dumps(list(origins)),
            str(every),
            json.dumps(settings),
        ]
        self.state: dict[str, Any] = {"done": 0, "held": False}

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line == b"ready\n", line
        self._follower = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _follow(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.state |= json.loads(line)

    def go(self, generation: int = 1) -> None:
        """Start the executor, with its origins assigned under that generation."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{generation}\n".encode())

    def kill(self) -> None:
        """SIGKILL."""
        self._process.send_signal(signal.SIGKILL)

    @property
    def pid(self) -> int:
        """The process'."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU that the process has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    async def stop(self) -> None:
        """End it in good order; what it says at last stands in `state`."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            async with asyncio.timeout(60):
                await self._process.wait()
        await self._follower


def _say(**state: Any) -> None:
    print(json.dumps(state), flush=True)


async def _main(dsn: str, origins: list[str], every: float, settings: dict[str, Any]) -> None:
    logging.disable(logging.CRITICAL)
    relax_collector()  # as Service.run() does
    print("ready", flush=True)
    generation = int(await asyncio.to_thread(sys.stdin.readline) or 0)
    cpu, ended = time.process_time(), asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    async with ours.executing(dsn, ours.registry(), origins, ExecutorSettings(**settings)) as made:
        made.assign(origins, generation)
        before, held = -1, False
        while not ended.done():
            done = made.metrics.count(OutcomeName.SUCCEEDED)
            if not held and len(made.held) == len(origins):
                held = True
                _say(held=True, held_at=time.monotonic())
            if done != before:
                before = done
                _say(done=done, cpu=time.process_time() - cpu, memory_mib=peak_mib())
            await asyncio.wait([ended], timeout=every if held else 0.01)
        _say(cpu=time.process_time() - cpu)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])))

"""The demo's processes: started, watched and always ended, each by its own pid."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Self

__all__ = ["Child", "ChildFailed", "Children", "unless_orphaned"]

START_SECONDS = 20.0


class ChildFailed(Exception):
    """A process ended by itself, or did not start."""


class Child:
    """One process. Its output goes to `log`; its standard input is a pipe that closes when this process dies."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self.expected_end = False
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def first_line(self) -> str:
        """The first line that it prints."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"{self.name} ended before it was ready: {self.last_lines()}")
        return line.decode().strip()

    async def signal(self, number: signal.Signals, timeout: float) -> None:
        """Send a signal and wait for the end; SIGKILL follows after `timeout` seconds."""
        self.expected_end = True
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        try:
            async with asyncio.timeout(timeout):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def wait(self, timeout: float) -> None:
        """Wait for an end by itself. Raises `ChildFailed` unless it ends well."""
        self.expected_end = True
        try:
            async with asyncio.timeout(timeout):
                code = await self._process.wait()
        except TimeoutError:
            raise ChildFailed(f"{self.name} has not ended after {timeout:.0f} s") from None
        if code:
            raise ChildFailed(f"{self.name} ended with {code}: {self.last_lines()}")

    def check(self) -> None:
        """Raises `ChildFailed` if it has ended and should not have."""
        if not self.alive and not self.expected_end:
            raise ChildFailed(f"{self.name} ended with {self._process.returncode}: {self.last_lines()}")

    def last_lines(self, count: int = 5) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


class Children:
    """All processes of the demo: ``async with Children(folder) as children``. None survives the block."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._all: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(child.signal(signal.SIGKILL, 10.0) for child in self._all))

    async def start(
        self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None, piped: bool = False
    ) -> Child:
        """Run ``python -m module arguments``. With `piped` its standard output can be read by `Child.first_line`."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if piped else file,
                stderr=file,
                env=os.environ | dict(environment or {}),
                start_new_session=True,  # Ctrl-C goes to the demo alone, which ends its children in order
            )
        child = Child(name, process, log)
        self._all.append(child)
        return child

    def check(self) -> None:
        """Raises `ChildFailed` if any has ended that should not have."""
        for child in self._all:
            child.check()


async def unless_orphaned(work: Coroutine[object, object, object]) -> None:
    """Run `work`, and cancel it when the process that started this one has died: its end of our standard input is
    closed then, however it died."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)

    def readable() -> None:
        if not os.read(0, 1024):
            loop.remove_reader(0)
            task.cancel()

    loop.add_reader(0, readable)
    try:
        await task
    finally:
        loop.remove_reader(0)

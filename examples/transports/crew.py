"""The processes of one run, and the eye on them."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
from uuid import UUID

import aiohttp

from .children import Child, Children
from .flaky import Fault, fault_of
from .observe import Observer, Snapshot, Stall
from .routes import transport_name
from .settings import Address, Plan
from .view import View

__all__ = ["Crew", "Killed", "NotInTime"]

LOOK_SECONDS = 0.5
STOP_SECONDS = 30.0
BUSY_SECONDS = 2.0
BUSY = "SELECT cardinality(running) > 0 FROM sidings.executor WHERE id = $1"


class NotInTime(Exception):
    """Something that should have happened did not."""


@dataclass(frozen=True)
class Killed:
    """An instance after SIGKILL: when that was sent (wall clock), when it was dead (server's clock), its executor, the
    partitions that it held."""

    at: float
    died_at: datetime
    executor: UUID
    held: frozenset[int]


class Crew:
    """Starts and ends processes and meanwhile keeps looking: every wait refreshes the view, and ends with an error when
    a process has died that should live."""

    def __init__(self, children: Children, observer: Observer, address: Address, plan: Plan, view: View) -> None:
        self.observer = observer
        self._children = children
        self._address = address
        self._plan = plan
        self._view = view
        self._instances: dict[str, Child] = {}
        self._states: dict[str, str] = {}
        self._began = 0.0  # monotonic second of the first message

    @classmethod
    @asynccontextmanager
    async def gather(cls, address: Address, plan: Plan, view: View, logs: Path) -> AsyncGenerator["Crew"]:
        """A crew with a running carrier and no instances yet. All processes are gone after the block."""
        healthy = [name for n in range(plan.transports) if fault_of(name := transport_name(n)) is Fault.NONE]
        async with Children(logs) as children:
            carrier = await children.start("carrier", "examples.transports.flaky", piped=True)
            address = replace(address, carrier=await carrier.first_line())
            async with Observer.connect(address, healthy, {}, view.event) as observer:
                yield cls(children, observer, address, plan, view)

    @property
    def snapshot(self) -> Snapshot:
        """The latest."""
        assert self.observer.snapshot is not None
        return self.observer.snapshot

    def living(self) -> set[str]:
        """Names of the instances that run."""
        return {name for name, child in self._instances.items() if child.alive}

    def stalls(self) -> list[Stall]:
        """When partitions stood still."""
        self.observer.finish()
        return self.observer.stalls

    # -- processes ----------------------------------------------------------------------------------------------------

    async def start_instance(self, name: str, way: str) -> None:
        """Start a service instance; way: `jobs` or `inline`."""
        child = await self._children.start(
            name, "examples.transports.instance", name, way, environment=self._address.environment()
        )
        self.observer.names[child.pid] = name
        self._instances[name] = child
        self._states[name] = "running"
        self._view.event(f"started instance {name}")

    async def start_producer(self, seconds: float) -> Child:
        """Start the lorries; the timetable's clock starts with them."""
        producer = await self._children.start(
            "producer",
            "examples.transports.producer",
            *("--transports", str(self._plan.transports)),
            *("--rate", str(self._plan.rate)),
            *("--seconds", str(seconds)),
            environment=self._address.environment(),
        )
        producer.expected_end = True
        await self.until(lambda now: now.sent > 0, STOP_SECONDS, "the first message is sent")
        self._began = time.monotonic()
        self._view.event(f"{self._plan.transports} lorries report, {self._plan.rate:.0f} messages a second")
        return producer

    async def kill(self, name: str) -> Killed:
        """SIGKILL, in the middle of a job if there is one within a few seconds."""
        executor = next(key for key, value in self.observer.executors.items() if value == name)
        deadline = time.monotonic() + BUSY_SECONDS
        while time.monotonic() < deadline and not await self.observer.postgres.fetchval(BUSY, executor):
            await asyncio.sleep(0.005)
        at = time.time()
        held = frozenset(number for number, state in enumerate(self.snapshot.partitions) if state.owner == name)
        await self._instances[name].signal(signal.SIGKILL, STOP_SECONDS)
        died_at = await self.observer.postgres.fetchval("SELECT clock_timestamp()")
        self._states[name] = "killed"
        self._view.event(f"killed {name} with SIGKILL")
        return Killed(at, died_at, executor, held)

    async def stop(self, name: str) -> float:
        """SIGTERM; returns the seconds until the process had ended."""
        at = time.monotonic()
        self._states[name] = "stopping"
        self._view.event(f"asked {name} to stop (SIGTERM)")
        await self.meanwhile(self._instances[name].signal(signal.SIGTERM, STOP_SECONDS))
        self._states[name] = "stopped"
        seconds = time.monotonic() - at
        self._view.event(f"{name} has ended, {seconds:.1f} s later")
        return seconds

    async def switch_faults(self, state: str) -> float:
        """Make the carrier fail for some transports, or no more; returns the wall clock second."""
        async with aiohttp.ClientSession() as session, session.put(f"{self._address.carrier}/faults/{state}") as answer:
            answer.raise_for_status()
        self._view.event("the carrier fails for some transports" if state == "on" else "the carrier is well again")
        return time.time()

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def at(self, seconds: float) -> None:
        """Wait for a moment of the timetable."""
        while time.monotonic() - self._began < seconds:
            await self._step()

    async def until(
        self,
        holds: Callable[[Snapshot], bool],
        seconds: float,
        what: str,
        for_seconds: float = 0.0,
        left: Callable[[Snapshot], int] | None = None,
    ) -> None:
        """Wait until snapshots have fulfilled a condition for some time. Raises `NotInTime`.

        left: what there is still to do. While it becomes less, a busy machine has time.
        """
        began = true_since = time.monotonic()
        least = inf
        while True:
            await self._step()
            if left is not None and left(self.snapshot) < least:
                least, began = left(self.snapshot), time.monotonic()
            if not holds(self.snapshot):
                true_since = time.monotonic()
            elif time.monotonic() - true_since >= for_seconds:
                return
            if time.monotonic() - began > seconds:
                raise NotInTime(f"after {seconds:.0f} s it is not true yet that {what}")

    async def meanwhile(self, work: Coroutine[object, object, None]) -> None:
        """Go on looking while `work` goes on."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await self._step()
        finally:
            await task

    async def _step(self) -> None:
        ended = time.monotonic() + LOOK_SECONDS
        self._view.update(await self.observer.look(), self._states)
        self._children.check()
        await asyncio.sleep(max(0.05, ended - time.monotonic()))

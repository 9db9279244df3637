"""CPU time of Postgres and of the client, and WAL: taken around a piece of work.

CPU per job is the steadiest figure on a machine that others use too. Postgres' CPU is that of the postmaster, of its
children, and of children that have ended, which the kernel adds up in the postmaster's own account.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from .results import Figures

if TYPE_CHECKING:
    from .server import Server

__all__ = ["Meter", "Reading", "cpu_with_children", "foreign_cores", "postgres_cpu"]


def postgres_cpu(pid: int) -> float:
    """Seconds of CPU that a Postgres server has used since its start, background processes included."""
    postmaster = psutil.Process(pid)
    while True:
        children = postmaster.children()
        try:
            total = sum(times.user + times.system for child in children for times in (child.cpu_times(),))
        except psutil.NoSuchProcess:
            continue
        own = postmaster.cpu_times()
        # A child that ends meanwhile moves from one account to the other: count again.
        if {child.pid for child in postmaster.children()} == {child.pid for child in children}:
            return total + own.user + own.system + own.children_user + own.children_system


def cpu_with_children() -> float:
    """Seconds of CPU that this process and all that it has started have used."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system + (times.children_user + times.children_system if process != me else 0.0)
    return total


def foreign_cores(server: "Server | None") -> Callable[[], float]:
    """Start to count; the call of the result tells how many cores were busy on average since with what is neither this
    process, its children nor the server. With None: the server counts as foreign too."""
    began, busy, ours = time.monotonic(), _machine_busy(), _ours(server)

    def so_far() -> float:
        seconds = max(1e-3, time.monotonic() - began)
        return max(0.0, (_machine_busy() - busy - (_ours(server) - ours)) / seconds)

    return so_far


def _machine_busy() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)


def _ours(server: "Server | None") -> float:
    me = psutil.Process()
    own = me.cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    postgres = server.pid if server is not None else None
    for child in me.children(recursive=True):
        try:
            if child.pid != postgres and not (postgres and child.ppid() == postgres):
                times = child.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total + (postgres_cpu(postgres) if postgres else 0.0)


@dataclass
class Reading:
    """What was used up between start and stop. `client_seconds` is this process' CPU; a variant that works in other
    processes puts theirs in."""

    seconds: float = 0.0
    client_seconds: float = 0.0
    postgres_seconds: float = 0.0
    wal_bytes: int = 0

    def __add__(self, other: "Reading") -> "Reading":
        return Reading(
            self.seconds + other.seconds,
            self.client_seconds + other.client_seconds,
            self.postgres_seconds + other.postgres_seconds,
            self.wal_bytes + other.wal_bytes,
        )

    def per_job(self, jobs: int, *, rate: str = "rate") -> Figures:
        """As the figures of a repetition that did so many jobs, or whatever `rate` counts."""
        return {
            rate: jobs / self.seconds,
            "postgres_us": self.postgres_seconds / jobs * 1e6,
            "client_us": self.client_seconds / jobs * 1e6,
            "wal_bytes": self.wal_bytes / jobs,
            "work_seconds": self.seconds,
        }


class Meter:
    """`await meter.start()`, the work, `reading = await meter.stop()`."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._wal = 0
        self._postgres = self._client = self._began = 0.0

    async def start(self) -> None:
        """The work begins."""
        self._wal = await self._server.wal()
        self._postgres = postgres_cpu(self._server.pid)
        self._client = time.process_time()
        self._began = time.perf_counter()

    async def stop(self) -> Reading:
        """The work is over."""
        seconds = time.perf_counter() - self._began
        client = time.process_time() - self._client
        postgres = postgres_cpu(self._server.pid) - self._postgres
        wal = await self._server.wal() - self._wal
        return Reading(seconds, client, postgres, wal)

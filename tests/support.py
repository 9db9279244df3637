"""What several test modules share: connections, conditions with deadlines, an executor that is stopped in any case."""

import asyncio
import inspect
import re
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import asyncpg
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sidings.executor import Executor, ExecutorSettings, PostgresSettings
from sidings.executor.queues import Lane
from sidings.executor.scheduler import Scheduler
from sidings.jobs import Job, Registry

SECONDS = 30.0  # the deadline of everything that is waited for; reached only when something is broken
ORIGIN = "transports/0"


class Ride(BaseModel):
    """The payload of most test jobs."""

    transport: str = ""
    number: int = 0


@asynccontextmanager
async def connected(dsn: str, **settings: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of the test's own."""
    connection = await asyncpg.connect(dsn, timeout=SECONDS, command_timeout=SECONDS, server_settings=settings or None)
    try:
        yield connection
    finally:
        connection.terminate()


@asynccontextmanager
async def a_role(dsn: str, options: str = "", *, password: str = "x") -> AsyncIterator[tuple[str, str]]:
    """A role that may do what executors do, with options of CREATE ROLE; and the DSN for it."""
    role, parts = f"role_{token_hex(6)}", urlsplit(dsn)
    async with connected(dsn) as admin:
        await admin.execute(
            f"CREATE ROLE {role} LOGIN PASSWORD '{password}' {options}; GRANT ALL ON SCHEMA sidings TO {role}; "
            f"GRANT ALL ON ALL TABLES IN SCHEMA sidings TO {role}; "
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA sidings TO {role}"
        )
        try:
            server = parts.netloc.rpartition("@")[2]
            yield role, parts._replace(netloc=f"{role}:{password}@{server}").geturl()
        finally:
            await admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@asynccontextmanager
async def refusing(code: str, message: str) -> AsyncIterator[tuple[str, list[float]]]:
    """The DSN of a server that refuses each session with this SQLSTATE and text; and when it has done so."""
    asked: list[float] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!i", await reader.readexactly(4))
        (kind,) = struct.unpack("!i", (await reader.readexactly(length - 4))[:4])
        if kind == 196_608:  # the start of a session; else it asks for TLS
            asked.append(asyncio.get_running_loop().time())
            fields = f"SFATAL\0C{code}\0M{message}\0\0".encode()
            writer.write(b"E" + struct.pack("!i", 4 + len(fields)) + fields)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    try:
        yield f"postgresql://somebody@127.0.0.1:{server.sockets[0].getsockname()[1]}/x?sslmode=disable", asked
    finally:
        server.close()


async def eventually(condition: Callable[[], Any], what: object = "", seconds: float = SECONDS) -> Any:
    """Wait until `condition`, plain or async, gives something true, and return that. Fails after `seconds`."""
    deadline, pause = asyncio.get_running_loop().time() + seconds, 0.01
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
            pause = min(1.3 * pause, 0.1)  # mostly over a connection of its own: that would take a core
        if result:
            return result
        if asyncio.get_running_loop().time() > deadline:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {seconds} s: {told or condition}")
        await asyncio.sleep(pause)


def an_executor(dsn: str, registry: Registry, *, schema: str = "sidings", service: str = "test", **options: Any):
    """An executor that polls fast, and never ends the process of the test. `options`: fields of `ExecutorSettings`,
    `prometheus` and `pgbouncer`."""
    prometheus, pgbouncer = options.pop("prometheus", None) or CollectorRegistry(), options.pop("pgbouncer", False)
    quick = {"poll_seconds": 0.02, "shutdown_seconds": 2.0, "exit_when_fenced": False}
    settings = ExecutorSettings(**quick | options)
    postgres = PostgresSettings(dsn=dsn, schema_name=schema, pgbouncer=pgbouncer)
    return Executor(service, registry, postgres, settings, prometheus=prometheus)


@asynccontextmanager
async def running(
    dsn: str, registry: Registry, origins: Iterable[str] = (ORIGIN,), **options: Any
) -> AsyncIterator[Executor]:
    """A started executor that holds `origins`; stopped at the end, whatever happens. `options`: as of `an_executor`,
    and the assignment's `generation`."""
    generation = options.pop("generation", 1)
    executor = an_executor(dsn, registry, **options)
    await executor.start()
    try:
        executor.assign(list(origins), generation)
        await executor.settled(SECONDS)
        yield executor
    finally:
        async with asyncio.timeout(SECONDS):
            await executor.stop()


async def enqueue(dsn: str, job_type: Any, payloads: Iterable[Any], *, origin: str = ORIGIN, **options: Any):
    """Enqueue payloads in one transaction of its own; returns the ids."""
    async with connected(dsn) as connection, connection.transaction():
        return await job_type.enqueue_many(connection, list(payloads), origin=origin, **options)


async def fetch(dsn: str, query: str, *args: Any) -> list[asyncpg.Record]:
    """The rows of one query."""
    async with connected(dsn) as connection:
        return await connection.fetch(query, *args)


async def value(dsn: str, query: str, *args: Any) -> Any:
    """The value of one query."""
    async with connected(dsn) as connection:
        return await connection.fetchval(query, *args)


async def answers(dsn: str) -> bool:
    """Whether the server takes queries, as it does not while it recovers from a crash."""
    try:
        return await value(dsn, "SELECT true")
    except (OSError, asyncpg.PostgresError):
        return False


async def jobs_left(dsn: str) -> int:
    """Rows in the job table."""
    return await value(dsn, "SELECT count(*) FROM sidings.job")


async def drained(dsn: str) -> None:
    """Wait until the job table is empty."""

    async def empty() -> bool:
        return await jobs_left(dsn) == 0

    await eventually(empty, "the job table is empty")


def stuck_lanes(scheduler: Scheduler) -> list[Lane]:
    """Lanes that back off or are blocked by a head of an unknown type."""
    return [lane for queue in scheduler.origins.values() for lane in queue.lanes.values() if lane.due is not None]


async def history(dsn: str, columns: str = "*") -> list[asyncpg.Record]:
    """All attempts, in the order in which they ended."""
    return await fetch(dsn, f"SELECT {columns} FROM sidings.job_history ORDER BY finished_at, attempt")


async def lose(dsn: str, ids: list[int], losses: int = 1) -> None:
    """As if these jobs had been running when their executor died."""
    async with connected(dsn) as connection:
        await connection.execute(
            "UPDATE sidings.job SET losses = $2::int, attempt = attempt + $2::int WHERE id = ANY ($1)", ids, losses
        )


async def outcomes(dsn: str) -> list[str]:
    """The outcomes of all attempts, in the order in which they ended."""
    return [row["outcome"] for row in await history(dsn, "outcome")]


@dataclass
class Ledger:
    """What handlers did: starts in order, and any overlap within a group."""

    started: list[tuple[str | None, int]] = field(default_factory=list)
    ended: list[tuple[str | None, int]] = field(default_factory=list)
    overlaps: list[tuple[str | None, int]] = field(default_factory=list)
    _now: set[str] = field(default_factory=set)

    def start(self, job: Job[Any]) -> None:
        self.started.append((job.group, job.id))
        if job.group is not None:
            if job.group in self._now:
                self.overlaps.append((job.group, job.id))
            self._now.add(job.group)

    def end(self, job: Job[Any]) -> None:
        self.ended.append((job.group, job.id))
        if job.group is not None:
            self._now.discard(job.group)

    def by_group(self) -> dict[str | None, list[int]]:
        """Ids in the order in which they started, by group."""
        out: dict[str | None, list[int]] = defaultdict(list)
        for group, id in self.started:
            out[group].append(id)
        return out

    def runs(self) -> Counter[int]:
        """How often each job was started."""
        return Counter(id for _, id in self.started)


def without_place(message: str) -> str:
    """What the error said, without where the handler raised it."""
    return re.sub(r" \([\w.]+:\d+ in \w+\)$", "", message)

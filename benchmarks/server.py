"""The Postgres that the benchmarks run on, and a fresh database for each repetition."""

import asyncio
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import psutil
from sidings.devstack import Kafka, Postgres

__all__ = ["SETTINGS", "Server", "machine", "open_transaction", "running_kafka"]

# As the peers were tuned (benchmarks/peers/README.md); otherwise Postgres' defaults: fsync and synchronous_commit on.
SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "4GB"}


class Server:
    """A server of the benchmarks' own: WAL and CPU of others would be counted as ours."""

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        """durable: whether commits wait for the disk; False only where nothing is measured."""
        self._postgres = Postgres(directory, settings=SETTINGS if durable else SETTINGS | {"fsync": "off"})
        self._templates: dict[str, str] = {}
        self._serial = 0
        self._admin: asyncpg.Connection | None = None

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._postgres.start)
        self._admin = await asyncpg.connect(self._postgres.dsn)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._admin is not None:
            await self._admin.close()
        await asyncio.to_thread(self._postgres.remove)

    @property
    def pid(self) -> int:
        """The postmaster's."""
        pid = self._postgres.pid
        assert pid is not None
        return pid

    @property
    def admin(self) -> asyncpg.Connection:
        """A connection for what is not measured."""
        assert self._admin is not None
        return self._admin

    async def wal(self) -> int:
        """Bytes of WAL written since the cluster was made."""
        return await self.admin.fetchval("SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")

    def dsn(self, database: str) -> str:
        """Of that database on this server."""
        return urlunsplit(urlsplit(self._postgres.dsn)._replace(path=f"/{database}"))

    async def fresh(self, kind: str, prepare: Callable[[str], Awaitable[None]]) -> str:
        """The DSN of a new database, copied from the template that `prepare` has filled when `kind` was first asked
        for. Databases of earlier repetitions of all kinds are dropped."""
        if kind not in self._templates:
            name = f"template_{kind}"
            await self.admin.execute(f'CREATE DATABASE "{name}"')
            await prepare(self.dsn(name))
            self._templates[kind] = name
        if self._serial:
            await self.admin.execute(f'DROP DATABASE IF EXISTS "bench_{self._serial}" WITH (FORCE)')
        self._serial += 1
        name = f"bench_{self._serial}"
        await self.admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{self._templates[kind]}"')
        await self.admin.execute("CHECKPOINT")
        return self.dsn(name)

    async def settle(self, dsn: str) -> None:
        """Before the clock starts: statistics and hint bits as autovacuum leaves them. The checkpoint comes before the
        backlog (`fresh`), not after it: it would make each page's first change a full-page image in the WAL."""
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute("VACUUM (ANALYZE)")
        finally:
            await connection.close()


@asynccontextmanager
async def open_transaction(dsn: str) -> AsyncIterator[None]:
    """A transaction that has written, has a snapshot, and stays open."""
    connection = await asyncpg.connect(dsn)
    transaction = connection.transaction(isolation="repeatable_read")
    await transaction.start()
    await connection.execute("CREATE TABLE left_open (number int); SELECT count(*) FROM pg_class")
    try:
        yield
    finally:
        await transaction.rollback()
        await connection.close()


@asynccontextmanager
async def running_kafka() -> AsyncIterator[str]:
    """A Kafka of the benchmarks' own; its bootstrap servers."""
    with tempfile.TemporaryDirectory(prefix="sidings-bench-") as folder:
        kafka = Kafka(Path(folder) / "kafka")
        try:
            await asyncio.to_thread(kafka.start)
            yield kafka.bootstrap
        finally:
            await asyncio.to_thread(kafka.remove)


def machine(server_version: str) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "python_loop_ms": _loop_ms(),
        "postgres": server_version,
        "postgres_settings": dict(SETTINGS),
        "packages": {name: _version(name) for name in ("sidings", "asyncpg", "pydantic", "uvloop", "aiokafka")},
        "commit": _commit(),
        "load_before": list(psutil.getloadavg()),
    }


def _loop_ms() -> float:
    """CPU milliseconds of a fixed loop, the least of five: what Python takes depends on its version, on how it was
    compiled, and on the phase that the machine is in."""

    class Pair:
        def __init__(self, a: int, b: int) -> None:
            self.a = a
            self.b = b

    def loop() -> float:
        started = time.process_time()
        total, kept = 0, dict[int, Pair]()
        for number in range(250_000):
            pair = kept[number & 1023] = Pair(number, total)
            total += pair.a - pair.b if pair.a > 3 else 1
        return time.process_time() - started

    return round(min(loop() for _ in range(5)) * 1e3, 1)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    import subprocess

    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return done.stdout.strip() or None

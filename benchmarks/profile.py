"""Where the time of a drain goes: a flame graph of the client, the plans of the two hot statements with their buffers
and WAL, and how many statements, rows and bytes of WAL a job takes."""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from sidings.executor import Link
from sidings.schema import load_sql

from . import ours
from .meter import Meter
from .server import Server
from .suite import SIZES, Bench
from .worker import Worker

__all__ = ["profile"]

_EXPLAINED = 20  # the call of a statement that is explained: by then batches have grown


@dataclass
class _Statement:
    calls: int = 0
    seconds: float = 0.0
    rows: int = 0
    plan: str = ""


async def profile(jobs: int, *, groups: int, folder: Path) -> None:
    """Profile drains of `jobs` jobs in `groups` groups; writes into `folder` and prints a summary."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sidings-bench-") as temporary:
        async with Server(Path(temporary) / "postgres") as server:
            bench = Bench(server, SIZES["normal"], Meter(server))
            await _statements(bench, jobs, groups, folder)
            await _flames(bench, jobs, groups, folder)


async def _statements(bench: Bench, jobs: int, groups: int, folder: Path) -> None:
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs, groups=groups)
    sent = ("read", "cycle", "name", "acquire_origins", "renew")
    names = {load_sql("sidings.executor", name, "sidings"): name for name in sent}
    counts: dict[str, _Statement] = {}
    with _counting(names, counts, explain=False):
        figures = await ours.drain(bench, dsn, jobs)
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, min(jobs, 50_000), groups=groups)
    plans: dict[str, _Statement] = {}
    with _counting(names, plans, explain=True):
        await ours.drain(bench, dsn, min(jobs, 50_000))
    summary = (f"{jobs:,} jobs in {groups or 'no'} groups: {figures['rate']:,.0f}/s; a job: "
             f"{figures['postgres_us']:.1f} µs CPU Postgres, {figures['client_us']:.1f} µs client, "
             f"{figures['wal_bytes']:.0f} bytes of WAL, {figures['batch']:.0f} jobs a cycle")  # fmt: skip
    lines = [summary, ""]
    for name, count in sorted(counts.items(), key=lambda item: -item[1].seconds):
        lines.append(f"{name:<15} {count.calls:>7,} calls, {count.calls / jobs * 1000:8.2f} per 1,000 jobs, "
                     f"{count.rows:>9,} rows, {count.seconds / count.calls * 1e3:7.2f} ms each, "
                     f"{count.seconds / jobs * 1e6:6.2f} µs a job")  # fmt: skip
    for name in ("cycle", "read"):
        lines += ["", f"-- {name}", plans[name].plan]
    (folder / "statements.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


@contextmanager
def _counting(names: dict[str, str], counts: dict[str, _Statement], *, explain: bool) -> Iterator[None]:
    """Count what goes through the executor's connections. explain: explain one call of each in a transaction that is
    rolled back, on a connection with the same settings, before it runs in earnest."""
    original = Link.fetch

    async def fetch(self: Link, query: str, *args: object) -> list[asyncpg.Record]:
        count = counts.setdefault(names.get(query, "other"), _Statement())
        count.calls += 1
        if explain and query in names and count.calls == _EXPLAINED:
            count.plan = await _plan(self, query, args)
        began = time.perf_counter()
        rows = await original(self, query, *args)
        count.seconds += time.perf_counter() - began
        count.rows += len(rows)
        return rows

    Link.fetch = fetch
    try:
        yield
    finally:
        Link.fetch = original


async def _plan(link: Link, query: str, args: tuple[object, ...]) -> str:
    connection: Any = link._connection  # the plan depends on the session's settings
    transaction = connection.transaction()
    await transaction.start()
    try:
        rows = await connection.fetch(f"EXPLAIN (ANALYZE, BUFFERS, WAL) {query}", *args)
    finally:
        await transaction.rollback()
    return "\n".join(row[0] for row in rows)


async def _flames(bench: Bench, jobs: int, groups: int, folder: Path) -> None:
    """A flame graph by py-spy where it is installed, else cProfile's table."""
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs, groups=groups)
    await bench.server.settle(dsn)
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if spy is None:
        await _cprofile(bench, dsn, jobs, folder / "profile.txt")
        return
    async with Worker(dsn, ours.origins()) as worker:
        flames = folder / "flames.svg"
        # Else it stops the process for each sample, which comes to a stop at its next system call: what makes one, such
        # as a send, or asyncio's looks at the process id, has the samples of what runs before it.
        options = ["--nonblocking", "--rate", "500", "--duration", "600", "--output", str(flames)]
        spying = await asyncio.create_subprocess_exec(
            *(spy, "record", "--pid", str(worker.pid), *options),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        await asyncio.sleep(1.0)
        worker.go()
        await ours.until(lambda: worker.state["done"] >= jobs)
    _, errors = await spying.communicate()  # it ends with the worker
    print(f"flame graph: {flames}" if flames.exists() else f"py-spy failed: {errors.decode()[-300:]}")


async def _cprofile(bench: Bench, dsn: str, jobs: int, file: Path) -> None:
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.enable()
    await ours.drain(bench, dsn, jobs)
    profiler.disable()
    with file.open("w") as out:
        pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(50)
    print(f"py-spy is not installed; cProfile's table: {file}")

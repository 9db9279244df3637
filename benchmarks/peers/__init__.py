"""Other queues, as programs of their own with their own dependencies, driven over standard input and output.

A peer's program is called with a command and a DSN. It prints `ready` when it is set up, waits for a line, does the
work, and prints one line of JSON: `seconds`, `client_seconds` (its CPU) and whatever else it measured.
"""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from ..results import Figures
from ..server import open_transaction
from ..suite import Bench, Size, Skip, Variant

__all__ = ["PEERS", "Peer", "latency_seconds", "prepare", "variants"]

switched_off = False

HERE = Path(__file__).parent
SECONDS = 600.0
_SEEDED = {"drain": 0, "groups": 1_000, "hot": 1}  # scenarios that begin with a backlog; in how many groups
_HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sidings" / "benchmarks"


@dataclass(frozen=True)
class Peer:
    """name; version: its release; command: makes its program's command line, installing what it needs, or raises
    `Skip`. work: for each scenario that the peer takes part in, the jobs to do in a normal run and the settings to
    show."""

    name: str
    version: str
    command: Callable[[], list[str]]
    work: dict[str, tuple[int, dict[str, Any]]]


def _install(marker: Path, what: str, steps: Sequence[Sequence[str]], folder: Path, **environment: str) -> None:
    """Run the steps once; `marker` tells that they have succeeded."""
    if marker.exists():
        return
    for step in steps:
        try:
            done = subprocess.run(
                step,
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
                env=os.environ | environment,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Skip(f"{what} could not be installed: {error}") from None
        if done.returncode:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise Skip(f"{what} could not be installed: {''.join(last)}")
    marker.touch()


def _hash(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@cache
def _node_folder() -> Path:
    if not shutil.which("node") or not shutil.which("npm"):
        raise Skip("node and npm are not installed")
    source = HERE / "node"
    folder = _HOME / f"node-{_hash(source / 'package.json', source / 'package-lock.json')}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    _install(folder / ".ready", "the npm packages", [("npm", "ci", "--no-audit", "--no-fund")], folder)
    return folder


def _node(script: str) -> Callable[[], list[str]]:
    return lambda: ["node", str(_node_folder() / script)]


@cache
def _python_folder() -> Path:
    wanted = HERE / "python" / "requirements.txt"
    folder = _HOME / f"python-{_hash(wanted)}"
    folder.mkdir(parents=True, exist_ok=True)
    pip = str(folder / "bin" / "python")
    steps = [
        (sys.executable, "-m", "venv", str(folder)),
        (pip, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(wanted)),
    ]
    _install(folder / ".ready", "the PyPI packages", steps, folder)
    return folder


def _python(script: str) -> Callable[[], list[str]]:
    return lambda: [str(_python_folder() / "bin" / "python"), str(HERE / "python" / script)]


@cache
def _river_program() -> str:
    if not shutil.which("go"):
        raise Skip("go is not installed")
    source = HERE / "river"
    program = _HOME / f"river-{_hash(source / 'go.mod', source / 'go.sum', source / 'main.go')}"
    program.parent.mkdir(parents=True, exist_ok=True)
    marker = program.with_suffix(".ready")
    _install(marker, "River", [("go", "build", "-o", str(program), ".")], source)
    return str(program)


def _npm_version(package: str) -> str:
    return json.loads((HERE / "node" / "package.json").read_text())["dependencies"][package]


def _pypi_version(package: str) -> str:
    wanted = (HERE / "python" / "requirements.txt").read_text()
    return next(line for line in wanted.splitlines() if line.startswith(package)).partition("==")[2]


def _go_version(module: str) -> str:
    wanted = (HERE / "river" / "go.mod").read_text()
    return next(line for line in wanted.splitlines() if module + " v" in line).split()[1].removeprefix("v")


PEERS: list[Peer] = [
    Peer(
        "graphile",
        _npm_version("graphile-worker"),
        _node("graphile.js"),
        {
            "drain": (200_000, {"concurrentJobs": 24, "localQueue": 500, "refetchDelay": "10 ms", "batch delays": 0}),
            "open": (200_000, {}),
            "groups": (50_000, {"concurrentJobs": 100, "localQueue": 500, "refetchDelay": 0, "pollInterval": "50 ms"}),
            "hot": (1_000, {"concurrentJobs": 1, "maxPoolSize": 2, "localQueue": "none", "batch delays": "none"}),
            "enqueue": (5_000, {}),
            "bulk": (50_000, {"call": "addJobs, 1,000 each"}),
            "latency": (50, {"concurrentJobs": 24, "localQueue": "none", "batch delays": 0}),
        },
    ),
    Peer(
        "pgqueuer",
        _pypi_version("pgqueuer"),
        _python("pgqueuer_peer.py"),
        {
            "drain": (100_000, {"instances": 2, "batch_size": 200, "loop": "uvloop"}),
            "open": (200_000, {}),
            "enqueue": (5_000, {}),
            "bulk": (50_000, {"call": "enqueue with lists of 1,000"}),
            "latency": (50, {"instances": 1}),
        },
    ),
    Peer(
        "pgboss",
        _npm_version("pg-boss"),
        _node("pgboss.js"),
        {
            "drain": (100_000, {"batchSize": 1000, "localConcurrency": 4, "burstWhenBatchFull": True}),
            "groups": (50_000, {"policy": "key_strict_fifo", "batchSize": 500, "localConcurrency": 2}),
            "hot": (1_000, {"policy": "key_strict_fifo", "calls": "fetch and complete, in turns"}),
            "enqueue": (3_000, {}),
            "bulk": (50_000, {"call": "insert, 1,000 each"}),
            "latency": (50, {"useListenNotify": True}),
        },
    ),
    Peer(
        "river",
        _go_version("riverqueue/river"),
        lambda: [_river_program()],
        {
            "drain": (100_000, {"MaxWorkers": 1000, "FetchCooldown": "1 ms"}),
            "enqueue": (5_000, {}),
            "bulk": (50_000, {"call": "InsertManyFast, 1,000 each"}),
            "latency": (50, {"FetchCooldown": "1 ms"}),
        },
    ),
    Peer(
        "procrastinate",
        _pypi_version("procrastinate"),
        _python("procrastinate_peer.py"),
        {
            "drain": (3_000, {"concurrency": 10, "delete_jobs": "always", "loop": "uvloop"}),
            "groups": (2_000, {"lock": "a group", "concurrency": 10}),
            "hot": (500, {"lock": "a group", "concurrency": 1}),
            "enqueue": (3_000, {}),
            "bulk": (20_000, {"call": "batch_defer_async, 1,000 each"}),
            "latency": (50, {"concurrency": 10}),
        },
    ),
    Peer(
        "chancy",
        _pypi_version("chancy"),
        _python("chancy_peer.py"),
        {
            "drain": (10_000, {"concurrency": 1000, "executor": "async", "loop": "uvloop"}),
            "enqueue": (3_000, {}),
            "bulk": (20_000, {"call": "push_many, 1,000 each"}),
            "latency": (50, {}),
        },
    ),
]


def prepare(scenarios: Sequence[str]) -> None:
    """Install what the peers of these scenarios need, before anything is measured. A peer that cannot be installed is
    skipped later, with the reason."""
    if switched_off:
        return
    for peer in PEERS:
        if not peer.work.keys().isdisjoint(scenarios):
            with suppress(Skip):
                peer.command()


def latency_seconds(size: Size) -> float:
    """How long jobs are enqueued at a steady rate, by us and by peers."""
    return {"tiny": 0.6, "short": 4.0}.get(size.name, 10.0)


def variants(scenario: str, size: Size) -> list[Variant]:
    """The peers that take part in a scenario."""
    if switched_off:
        return []
    able = [peer for peer in PEERS if scenario in peer.work]
    if scenario == "open":
        return [_variant(peer, "open", size, left_open=yes) for peer in able for yes in (False, True)]
    return [_variant(peer, scenario, size) for peer in able]


def _variant(peer: Peer, scenario: str, size: Size, *, left_open: bool = False) -> Variant:
    normal, settings = peer.work[scenario]
    work = "drain" if scenario == "open" else scenario
    if scenario == "latency":
        jobs = normal
    elif scenario == "open" and size.long:
        jobs = normal * 5
    else:
        jobs = max(1_000 if scenario == "bulk" else 1, size.jobs(normal))

    async def once(bench: Bench) -> Figures:
        command = await asyncio.to_thread(peer.command)
        return await _once(bench, peer.name, command, work, jobs, left_open=left_open)

    name = f"{peer.name}, left open" if left_open else f"{peer.name}, 1 group" if scenario == "hot" else peer.name
    repetitions = 1 if size.name == "short" or (scenario == "open" and size.long) else min(3, size.repetitions)
    return Variant(name, once, {"version": peer.version, "jobs": jobs, **settings}, repetitions)


async def _once(
    bench: Bench, name: str, command: list[str], scenario: str, jobs: int, *, left_open: bool = False
) -> Figures:
    async def prepare(dsn: str) -> None:
        await _call(command, "install", dsn)

    dsn = await bench.server.fresh(name, prepare)
    if scenario in _SEEDED:
        await _call(command, "seed", dsn, str(jobs), str(_SEEDED[scenario]))
        await bench.server.settle(dsn)
    async with AsyncExitStack() as stack:
        if left_open:
            await stack.enter_async_context(open_transaction(dsn))
        settings = (
            [str(jobs), str(max(2, round(latency_seconds(bench.size))))] if scenario == "latency" else [str(jobs)]
        )
        program = await stack.enter_async_context(_Program([*command, scenario, dsn, *settings]))
        await program.line()  # ready
        await bench.meter.start()
        program.go()
        answer = json.loads(await program.line())
        reading = await bench.meter.stop()
    reading.seconds, reading.client_seconds = answer.pop("seconds"), answer.pop("client_seconds")
    figures = reading.per_job(int(answer.pop("jobs", jobs)))
    if scenario == "latency":  # the rate is ours, not the peer's
        figures = {key: figures[key] for key in ("client_us", "postgres_us")}
    return {key: float(value) for key, value in answer.items()} | figures


async def _call(command: list[str], *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} {arguments[0]} failed: {output.decode()[-400:]}")


class _Program:
    def __init__(self, command: list[str]) -> None:
        self._command = command

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stderr is not None
        self._errors = asyncio.create_task(self._process.stderr.read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._errors

    async def line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            errors = (await self._errors).decode(errors="replace").strip()
            raise RuntimeError(f"{' '.join(self._command)} ended: {errors[-400:]}")
        return line.decode()

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

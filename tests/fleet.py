"""A fleet of executors, in processes of their own or in the test's, and the proof that they did their work.

    async with Fleet(database, tmp_path) as fleet:
        await fleet.enqueue("step", groups=10, each=5)
        one = fleet.spawn("one", ["t/0", "t/1"])
        ...
        one.kill()
        ...
        await fleet.finish()  # until no job is left
        await fleet.verify()

`verify` proves that every job ended once, that no group ran twice at once, and that each ran in order.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from math import inf
from pathlib import Path
from typing import Any, Self

import asyncpg
from sidings.executor import Executor

from .chaos_worker import Journal, Work, executor_of, registry_of

__all__ = ["Fleet", "Member", "Run", "until", "verify"]

WORKER = Path(__file__).with_name("chaos_worker.py")
PATIENCE = 30.0  # seconds that a condition may take on a busy machine
LEASE = 2.0
TERMINAL = ("succeeded", "discarded", "followed", "cancelled", "superseded")
EFFECTIVE = ("transfer", "nested", "chain", "tangle")  # types that leave a row in `effect`
LEDGER = """
    CREATE TABLE IF NOT EXISTS public.ledger (job bigint, type text, origin text, "group" text, n int);
    CREATE TABLE IF NOT EXISTS public.effect (job bigint, attempt int);
    CREATE TABLE IF NOT EXISTS public.counter (id int, n int);
    INSERT INTO public.counter SELECT i, 0 FROM generate_series(0, 49) i WHERE NOT EXISTS (SELECT FROM public.counter);
"""
AWAY = (OSError, TimeoutError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.CannotConnectNowError,
        asyncpg.OperatorInterventionError, asyncpg.InternalClientError)  # fmt: skip


async def until(
    condition: Callable[[], Awaitable[Any] | Any], what: str, *, timeout: float = PATIENCE, pause: float = 0.02
) -> Any:
    """Poll `condition` until it is true, and return it; `what` says what was waited for when it is not in time."""
    deadline = time.monotonic() + timeout
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for: {what}")
        await asyncio.sleep(pause)


# -- the proof


@dataclass
class Run:
    """One run of a handler, as the journal has it. `end`: when it ended, or its process died. `how`: done, raised,
    cancelled, or cut (by the death of its process). `alone`: until when no other run of its group may start."""

    job: int
    attempt: int
    epoch: int
    pid: int
    executor: str
    origin: str
    group: str | None
    type: str
    start: float
    end: float = inf
    alone: float = inf
    how: str = "open"

    def __str__(self) -> str:
        return (
            f"job {self.job} attempt {self.attempt} of {self.origin} {self.group} "
            f"(epoch {self.epoch}, pid {self.pid}): {self.start:.3f} to {self.end:.3f} {self.how}"
        )


def runs_of(journal: Iterable[dict[str, Any]]) -> list[Run]:
    """The journal as runs. A process that was paused past its lease may go on for the moment until it looks at the
    clock, so its runs are alone up to the pause only; what becomes of them then is for the fence to void."""
    runs: list[Run] = []
    running: dict[tuple[int, int], Run] = {}  # by pid and job: one at a time
    paused: dict[int, float] = {}
    for record in journal:
        pid, of = record["pid"], record.get("of")
        match record["event"]:
            case "start":
                run = Run(record["job"], record["attempt"], record["epoch"], pid, record["executor"], record["origin"],
                          record["group"], record["type"], record["t"])  # fmt: skip
                assert (pid, run.job) not in running, f"one process runs a job twice at once: {run}"
                running[pid, run.job] = run
                runs.append(run)
            case "end":
                run = running.pop((pid, record["job"]))
                if run.how == "open":
                    run.end, run.how = record["t"], record["how"]
                    run.alone = min(run.alone, run.end)
            case "paused":
                paused[record["of"]] = record["t"]
            case "resumed":
                for run in _open(running, of):
                    run.alone = min(run.alone, paused[record["of"]])
            case "dies" | "exits" | "died":
                for run in _open(running, of or pid):
                    run.end, run.how = paused[record["of"]] if record.get("while_paused") else record["t"], "cut"
                    run.alone = min(run.alone, run.end)
            case _:
                pass
    return runs


def _open(running: dict[tuple[int, int], Run], pid: int | None) -> list[Run]:
    return [run for (of, _), run in running.items() if of == pid and run.how == "open"]


def verify(
    audit: Iterable[dict[str, Any]],
    history: Sequence[Any],
    jobs: Sequence[Any],
    ledger: Sequence[Any],
    *,
    held: Collection[int] = (),
) -> list[Run]:
    """Raise `AssertionError`, naming all that is wrong, unless

    - every committed job (`ledger`) has ended in exactly one terminal row of `history` and is gone from `jobs`; those
      in `held` are still there, and held;
    - nothing else has ended, each attempt has one row, and the terminal one is the last;
    - each success was a run of that executor, under that epoch, that went through;
    - no two runs of one origin and group overlapped;
    - no job of a group started before the successful runs of those before it were over.

    Returns the runs.
    """
    wrong: list[str] = []
    runs = runs_of(audit)
    committed = {row["job"]: row for row in ledger}
    left = {row["id"]: row for row in jobs}
    by_job: dict[int, list[Any]] = defaultdict(list)
    for row in history:
        by_job[row["job_id"]].append(row)

    for job in committed:
        rows = by_job[job]
        ends = [row["outcome"] for row in rows if row["outcome"] in TERMINAL]
        if job in held:
            if ends or job not in left or left[job]["held"] is None:
                wrong.append(f"job {job} should be held: ended {ends}, row {left.get(job)}")
        elif len(ends) != 1 or job in left:
            wrong.append(f"job {job} ended {len(ends)} times {ends}, {'still' if job in left else 'not'} in the table")
        attempts = sorted(row["attempt"] for row in rows)
        if attempts != list(range(1, len(attempts) + 1)):
            wrong.append(f"job {job} has attempts {attempts} in the history")
        if ends and max(rows, key=lambda row: row["attempt"])["outcome"] not in TERMINAL:
            wrong.append(f"job {job} was attempted after its end")
    wrong += [f"job {job} is in the history but was never committed" for job in by_job if job not in committed]

    through = {(run.job, run.attempt, run.executor, run.epoch): run for run in runs if run.how == "done"}
    successful: dict[int, Run] = {}
    for row in history:
        if row["outcome"] == "succeeded":
            run = through.get((row["job_id"], row["attempt"], str(row["executor"]), row["epoch"]))
            if run is None:
                wrong.append(f"job {row['job_id']} succeeded in attempt {row['attempt']} without such a run")
            else:
                successful[row["job_id"]] = run

    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        if run.group is not None:
            groups[run.origin, run.group].append(run)
    for members in groups.values():
        members.sort(key=lambda run: run.start)
        for before, after in pairwise(members):
            if after.start < before.alone:
                wrong.append(f"overlap:\n    {before}\n    {after}")

    first: dict[int, float] = {}
    for run in runs:
        first[run.job] = min(first.get(run.job, inf), run.start)
    order: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in ledger:
        if row["group"] is not None and row["job"] not in held:
            order[row["origin"], row["group"]].append(row)
    for members in order.values():
        members.sort(key=lambda row: row["n"])
        last: Run | None = None  # to end, of those before
        for row in members:
            if last is not None and first.get(row["job"], inf) < last.end:
                wrong.append(f"order: job {row['job']} started before {last} was over")
            done = successful.get(row["job"])
            if done is not None and (last is None or done.end > last.end):
                last = done

    if wrong:
        more = f"\n... and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise AssertionError("\n".join(["the proof fails:", *wrong[:20]]) + more)
    return runs


# -- the fleet


class Member:
    """A worker process."""

    def __init__(self, fleet: "Fleet", name: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.log = log
        self.paused = False
        self._fleet = fleet
        self._process = process
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self._reaper.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.returncode if not self._reaper.is_alive() else None

    def _reap(self) -> None:
        code = self._process.wait()
        self._fleet.journal.note("died", of=self.pid, code=code, while_paused=self.paused)

    def send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(command) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            self._reaper.join(PATIENCE)  # while it waits, the process passes for living
            if self._reaper.is_alive():
                raise

    def assign(self, origins: Iterable[str], generation: int) -> None:
        self.send({"assign": sorted(origins), "generation": generation})

    async def ask(self) -> dict[str, Any]:
        """What the process answers to {"ask": …}: the origins that it holds, with their epochs, and its problems."""
        number = next(self._fleet.numbers)
        self.send({"ask": number})
        return await until(
            lambda: next((r for r in self._fleet.records() if r["event"] == "answer" and r["ask"] == number), None),
            f"an answer of {self.name}",
        )

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)
        self._reaper.join(PATIENCE)
        assert not self._reaper.is_alive()

    def pause(self) -> None:
        """SIGSTOP."""
        self._fleet.journal.note("paused", of=self.pid)
        self.paused = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._fleet.journal.note("resumed", of=self.pid)
        self._signal(signal.SIGCONT)
        self.paused = False

    def terminate(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    async def stop(self) -> None:
        """Stop in good order; returns when the process has ended."""
        self.send({"stop": True})
        assert await self.ended() == 0, self.tail()

    async def ended(self, timeout: float = PATIENCE) -> int:
        """Wait for the end of the process; its exit code."""
        await until(lambda: self.exit_code is not None, f"the end of {self.name}", timeout=timeout)
        assert self.exit_code is not None
        return self.exit_code

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)


class Fleet:
    """Executors on one database, their journal, and a ledger of what was committed.

    dsn: of the database. directory: for journal and logs. worker_dsn: how the executors reach the database, where that
    is not the same. executor, postgres: their settings.
    """

    def __init__(
        self,
        dsn: str,
        directory: Path,
        *,
        worker_dsn: str | None = None,
        executor: dict[str, Any] | None = None,
        postgres: dict[str, Any] | None = None,
    ) -> None:
        self.dsn = dsn
        self.members: list[Member] = []
        self.journal = Journal(directory / "journal", "test")
        self.numbers = count(1)
        self.executor = {"lease_seconds": LEASE, "concurrency": 16, "poll_seconds": 0.05, **(executor or {})}
        self.postgres = {"call_seconds": 3.0, "connect_seconds": 3.0, **(postgres or {})}
        self._worker_dsn = worker_dsn or dsn
        self._directory = directory
        self._registry = registry_of(self.journal)
        self._connection: asyncpg.Connection | None = None
        self._records: list[dict[str, Any]] = []
        self._read = 0
        self._enqueued: dict[tuple[str, str], int] = defaultdict(int)
        self._gates: list[Path] = []

    @property
    def lease_seconds(self) -> float:
        return self.executor["lease_seconds"]

    async def __aenter__(self) -> Self:
        await self.execute(LEDGER)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        for gate in self._gates:  # a thread of this process may still wait there
            gate.touch()
        for member in self.members:
            if member.exit_code is None:
                member.kill()
        if self._connection is not None:
            self._connection.terminate()
        if kind is not None:
            for member in self.members:
                print(f"-- {member.name} (pid {member.pid}, exit code {member.exit_code})\n{member.tail()}")
            print(*(record for record in self.records() if record["event"] == "failed"), sep="\n")

    # -- members

    def spawn(
        self,
        name: str,
        origins: Iterable[str] = (),
        generation: int = 1,
        *,
        dsn: str | None = None,
        postgres: dict[str, Any] | None = None,
        release: Path | None = None,
        enough: int | None = None,
        **executor: Any,
    ) -> Member:
        """Start a worker process. release: the folder above another release's package, to run with that one. enough:
        outcomes that are worth a second cycle while one is under way."""
        log = self._directory / f"{name}-{next(self.numbers)}.log"
        command = [
            *(sys.executable, str(WORKER), dsn or self._worker_dsn, str(self._directory / "journal"), name),
            *("--executor", json.dumps(self.executor | executor)),
            *("--postgres", json.dumps(self.postgres | (postgres or {}))),
            *("--origins", json.dumps(sorted(origins)), "--generation", str(generation)),
            *(() if enough is None else ("--enough", str(enough))),
        ]
        env = os.environ | {"PYTHONUNBUFFERED": "1"} | ({"PYTHONPATH": str(release)} if release else {})
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=env)
        self.members.append(Member(self, name, process, log))
        return self.members[-1]

    @asynccontextmanager
    async def local(
        self,
        origins: Iterable[str] = (),
        generation: int = 1,
        *,
        dsn: str | None = None,
        postgres: dict[str, Any] | None = None,
        **executor: Any,
    ) -> AsyncIterator[Executor]:
        """An executor in the process of the test, which it never ends; stopped at the end of the block."""
        settings = {"exit_when_fenced": False, "shutdown_seconds": 5.0, **self.executor, **executor}
        made = executor_of(
            dsn or self._worker_dsn,
            Journal(self._directory / "journal", "local"),
            executor=settings,
            postgres=self.postgres | (postgres or {}),
        )
        made.assign(list(origins), generation)
        await made.start()
        try:
            yield made
        finally:
            await made.stop()

    # -- jobs

    async def enqueue(
        self,
        kind: str = "step",
        origins: Iterable[str] = ("t/0",),
        *,
        groups: int = 1,
        each: int = 1,
        group: str = "g",
        delay: float | None = None,
        **work: Any,
    ) -> list[int]:
        """Commit `each` jobs in each of `groups` groups of each origin, in one transaction; their ids."""
        names = [f"{group}{number}" for number in range(groups)]
        job_type = self._registry[kind]
        ids: list[int] = []
        connection = await self._connected()
        async with connection.transaction():
            for origin in origins:
                works: list[Work] = []
                for name in (name for _ in range(each) for name in names):
                    works.append(Work(g=name, n=self._enqueued[origin, name], **work))
                    self._enqueued[origin, name] += 1
                made = await job_type.enqueue_many(connection, works, origin=origin, delay=delay)
                grouped = job_type.grouped and delay is None and kind != "loose"
                await connection.executemany(
                    "INSERT INTO public.ledger VALUES ($1, $2, $3, $4, $5)",
                    [(i, kind, origin, w.g if grouped else None, w.n) for i, w in zip(made, works, strict=True)],
                )
                ids += made
        return ids

    def numbered_from(self, origin: str, group: str, number: int) -> None:
        """The next job of this group gets this `n`."""
        self._enqueued[origin, group] = number

    async def unfinished(self) -> int:
        """Jobs in the table that are not held."""
        return await self.fetchval("SELECT count(*) FROM sidings.job WHERE held IS NULL")

    async def finish(self, timeout: float = PATIENCE) -> None:
        """Return when every job has ended or is held."""

        async def done() -> bool:
            try:
                return await self.unfinished() == 0
            except AWAY:
                return False

        await until(done, "the end of all jobs", timeout=timeout, pause=0.05)

    async def verify(self, *, held: Collection[int] = ()) -> list[Run]:
        """`verify` on all that this fleet has done; see there."""
        history = await self.fetch("SELECT * FROM sidings.job_history ORDER BY finished_at")
        jobs = await self.fetch("SELECT * FROM sidings.job")
        ledger = await self.fetch("SELECT * FROM public.ledger")
        runs = verify(self.records(), history, jobs, ledger, held=held)
        done = {row["job_id"] for row in history if row["outcome"] == "succeeded"}  # the others, a person has cancelled
        transfers = sorted(row["job"] for row in ledger if row["type"] in EFFECTIVE and row["job"] in done)
        effects = sorted(row["job"] for row in await self.fetch("SELECT job FROM public.effect"))
        assert effects == transfers, "the effects of transactional handlers have not happened exactly once"
        tangled = sum(row["type"] == "tangle" and row["job"] in done for row in ledger)
        assert await self.fetchval("SELECT sum(n) FROM public.counter") == 2 * tangled
        return runs

    async def outcomes(self, *jobs: int) -> list[str]:
        """The outcomes of these jobs' attempts, in order; without any, of all."""
        rows = await self.fetch(
            "SELECT outcome FROM sidings.job_history WHERE job_id = ANY ($1) OR $1 = '{}' ORDER BY job_id, attempt",
            jobs,
        )
        return [row["outcome"] for row in rows]

    # -- looking

    def records(self) -> list[dict[str, Any]]:
        """The journal so far."""
        with (self._directory / "journal").open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._records.append(json.loads(line))
                self._read += len(line)
        return self._records

    def started(self, *jobs: int, pid: int | None = None) -> list[dict[str, Any]]:
        """The starts of these jobs (of all, without any), of one process or of all."""
        return [
            record
            for record in self.records()
            if record["event"] == "start" and (not jobs or record["job"] in jobs) and pid in (None, record["pid"])
        ]

    async def owners(self) -> dict[str, tuple[int | None, int]]:
        """Of each origin the owner's pid (None: nobody) and the epoch."""
        rows = await self.fetch(
            "SELECT o.origin, o.epoch, e.pid FROM sidings.origin o LEFT JOIN sidings.executor e ON e.id = o.owner"
        )
        return {row["origin"]: (row["pid"], row["epoch"]) for row in rows}

    async def held_by(self, member: Member, origins: Collection[str], timeout: float = PATIENCE) -> None:
        """Wait until `member` holds exactly these origins."""

        async def holds() -> bool:
            try:
                owners = await self.owners()
            except AWAY:
                return False
            return {name for name, (pid, _) in owners.items() if pid == member.pid} == set(origins)

        await until(holds, f"{member.name} to hold {len(origins)} origins", timeout=timeout)

    def gate(self, name: str = "gate") -> Path:
        """A path that jobs can wait for (`gate=str(path)`); `path.touch()` lets them go on."""
        self._gates.append(self._directory / name)
        return self._gates[-1]

    async def fetch(self, query: str, *args: object) -> list[asyncpg.Record]:
        connection = await self._connected()
        return await connection.fetch(query, *args)

    async def fetchval(self, query: str, *args: object) -> Any:
        return (await self.fetch(query, *args))[0][0]

    async def execute(self, script: str) -> None:
        """Statements in one transaction."""
        await (await self._connected()).execute(script)

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(self.dsn, timeout=10, command_timeout=20)
        return self._connection


def shares(origins: Sequence[str], members: Sequence[Member]) -> dict[Member, list[str]]:
    """The origins dealt out, one after the other."""
    return {member: list(origins[number :: len(members)]) for number, member in enumerate(members)}

"""A worker process for the tests that kill things: an `Executor` that notes every run of a handler in a journal.

`python tests/chaos_worker.py DSN JOURNAL NAME [--executor JSON] [--postgres JSON] [--origins JSON] [--generation N]
[--enough N]`

It takes commands as JSON lines on stdin: {"assign": [...], "generation": 2}, {"ask": 7}, {"block": FILE},
{"break": true}, {"stop": true}; when stdin ends, so does the process. What it has to say it appends to the journal.

The journal is a file and no table: a `write` to a file opened for appending survives the SIGKILL of its writer, is
ordered across processes, works from a thread and from a blocked event loop, and does not care for the Postgres that
a test kills. Its times are those of CLOCK_BOOTTIME, which all processes of the machine share.
"""

import argparse
import asyncio
import json
import linecache
import logging
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

_exit_at_once = os._exit
_before_exit: list[Callable[[int], None]] = []


def _noted_exit(code: int) -> None:
    for note in _before_exit:
        note(code)
    _exit_at_once(code)


os._exit = _noted_exit  # before the import: the watchdog takes `os._exit` as the default of a parameter

from prometheus_client import CollectorRegistry  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from sidings.executor import Executor, ExecutorSettings, PostgresSettings, cycles, now  # noqa: E402
from sidings.jobs import Job, Registry, Retry, Snooze  # noqa: E402
from tenacity import wait_fixed  # noqa: E402

os._exit = _exit_at_once

SERVICE = "test"


class Journal:
    """Appends records to the journal file: one line, one write."""

    def __init__(self, path: Path | str, writer: str) -> None:
        self.writer = writer
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, event: str, **fields: Any) -> None:
        record = {"t": now(), "writer": self.writer, "pid": os.getpid(), "event": event, **fields}
        os.write(self._file, (json.dumps(record) + "\n").encode())


class Work(BaseModel):
    """What a job of the tests does. `g`: its group; `n`: its place there; `ms`: how long it takes; `gate`: a file whose
    appearance it waits for; `fail`: how often it fails first."""

    g: str = ""
    n: int = 0
    ms: float = 0
    gate: str = ""
    fail: int = 0


def registry_of(journal: Journal, executor_id: Callable[[], object] = lambda: "") -> Registry:
    """The job types of the tests, noting each run in `journal`."""
    jobs = Registry()

    @contextmanager
    def noted(job: Job[Work], *, alone: bool = True) -> Iterator[None]:
        group = job.group if alone else None
        run = {"job": job.id, "type": job.type, "origin": job.origin, "group": group, "n": job.payload.n}
        run |= {"attempt": job.attempt, "epoch": job.fence.epoch, "executor": str(executor_id())}
        journal.note("start", **run)
        how = "raised"
        try:
            yield
            how = "done"
        except asyncio.CancelledError:
            how = "cancelled"
            raise
        finally:
            journal.note("end", how=how, **run)

    async def work(payload: Work) -> None:
        await asyncio.sleep(payload.ms / 1000)
        while payload.gate and not Path(payload.gate).exists():
            await asyncio.sleep(0.01)

    @jobs.job(group="g")
    async def step(job: Job[Work]) -> None:
        with noted(job):
            await work(job.payload)

    @jobs.job()
    async def single(job: Job[Work]) -> None:
        with noted(job):
            await work(job.payload)

    @jobs.job(group="g", retry=Retry(wait=wait_fixed(0.05)))
    async def flaky(job: Job[Work]) -> None:
        with noted(job):
            await work(job.payload)
            if job.failures < job.payload.fail:
                raise ConnectionError("the carrier does not answer")

    @jobs.job(group="g")
    def thread(job: Job[Work]) -> None:
        with noted(job):
            time.sleep(job.payload.ms / 1000)
            while job.payload.gate and not Path(job.payload.gate).exists():
                time.sleep(0.01)

    @jobs.job(group="g")
    async def blocking(job: Job[Work]) -> None:
        """Blocks the event loop, as a handler must not."""
        with noted(job):
            time.sleep(job.payload.ms / 1000)  # noqa: ASYNC251
            while job.payload.gate and not Path(job.payload.gate).exists():
                time.sleep(0.01)  # noqa: ASYNC251

    @jobs.job(group="g")
    async def stuck(job: Job[Work]) -> None:
        """Blocks the event loop within a line of the log, as where nobody reads the pipe that it goes to."""
        (handler,) = logging.getLogger().handlers
        handler.acquire()
        try:
            await blocking(job)
        finally:
            handler.release()

    @jobs.job(group="g")
    async def full(job: Job[Work]) -> None:
        """Blocks the event loop while the disk that the log goes to is full."""
        (handler,) = logging.getLogger().handlers
        assert isinstance(handler, logging.StreamHandler)
        with Path("/dev/full").open("w") as disk:
            handler.setStream(disk)
            await blocking(job)

    @jobs.job(group="g")
    async def unreadable(job: Job[Work]) -> None:
        """Blocks the event loop while the disk with the source files hangs."""
        linecache.checkcache = linecache.updatecache = cast(Any, lambda *_: threading.Event().wait())
        await blocking(job)

    @jobs.job(group="g", transactional=True, retry=Retry(wait=wait_fixed(0.05)))
    async def transfer(job: Job[Work]) -> None:
        """Its effect, a row in `effect`, commits together with the end of the job."""
        with noted(job):
            await job.tx.execute("INSERT INTO public.effect VALUES ($1, $2)", job.id, job.attempt)
            await work(job.payload)

    @jobs.job(group="g", transactional=True, retry=Retry(wait=wait_fixed(0.05)))
    async def nested(job: Job[Work]) -> None:
        """As `transfer`, in a savepoint: that has an end of its own, which asks the server."""
        with noted(job):
            async with job.tx.connection.transaction():  # earlier releases have no other
                await job.tx.execute("INSERT INTO public.effect VALUES ($1, $2)", job.id, job.attempt)
                await work(job.payload)

    @jobs.job(group="g", transactional=True, retry=Retry(wait=wait_fixed(0.05)))
    async def chain(job: Job[Work]) -> None:
        """As `transfer`, and the same transaction stores the next job, of another group."""
        with noted(job):
            await job.tx.execute("INSERT INTO public.effect VALUES ($1, $2)", job.id, job.attempt)
            await work(job.payload)
            after = job.payload.model_copy(update={"g": job.payload.g + "'"})
            made = await step.enqueue(job.tx, after)
            await job.tx.execute(
                "INSERT INTO public.ledger VALUES ($1, 'step', $2, $3, $4)", made, job.origin, after.g, after.n
            )

    @jobs.job(group="g", transactional=True, retry=Retry(wait=wait_fixed(0.05)))
    async def tangle(job: Job[Work]) -> None:
        """As `transfer`, with locks that others take in another order."""
        with noted(job):
            await job.tx.execute("INSERT INTO public.effect VALUES ($1, $2)", job.id, job.attempt)
            for row in random.sample(range(50), 2):
                await job.tx.execute("UPDATE public.counter SET n = n + 1 WHERE id = $1", row)
                await work(job.payload)

    @jobs.job(group="g", batch=5, retry=Retry(wait=wait_fixed(0.05)))
    async def many(batch: list[Job[Work]]) -> list[Exception | None]:
        with ExitStack() as stack:
            for job in batch:
                stack.enter_context(noted(job))
            await work(batch[0].payload)
        return [ConnectionError("odd") if job.failures < job.payload.fail else None for job in batch]

    @jobs.job(group="g", policy="latest")
    async def newest(job: Job[Work]) -> None:
        with noted(job):
            await work(job.payload)

    @jobs.job(group="g", policy="parallel", retry=Retry(wait=wait_fixed(0.05)))
    async def loose(job: Job[Work]) -> None:
        with noted(job, alone=False):
            await work(job.payload)
            if job.failures < job.payload.fail:
                raise ConnectionError("the carrier does not answer")

    @jobs.job(group="g", timeout=0.1, retry=Retry(wait=wait_fixed(0.05)))
    async def timed(job: Job[Work]) -> None:
        with noted(job):
            await asyncio.sleep(30 if job.failures < job.payload.fail else 0)

    @jobs.job(group="g", timeout=0.2, retry=Retry(wait=wait_fixed(0.05)))
    async def sulky(job: Job[Work]) -> None:
        """Takes its time when it is cancelled, and then has succeeded."""
        with noted(job):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                await work(job.payload)

    @jobs.job(group="g", retry=Retry(wait=wait_fixed(0.05)))
    async def moody(job: Job[Work]) -> None:
        """Ends in all the ways there are."""
        with noted(job):
            await work(job.payload)
            if job.attempt <= job.payload.fail + 1:
                match random.randrange(7):
                    case 0:
                        raise Snooze(0.05)
                    case 1:
                        raise Retry.after(0.05)
                    case 2:
                        raise SystemExit
                    case 3:
                        raise GeneratorExit
                    case 4:
                        cast(asyncio.Task[None], asyncio.current_task()).cancel()
                        await asyncio.sleep(0)
                    case 5:
                        cast(asyncio.Task[None], asyncio.current_task()).cancel()
                    case _:
                        raise asyncio.CancelledError

    @jobs.job(group="g")
    async def stubborn(job: Job[Work]) -> None:
        """Does not let itself be cancelled."""
        with noted(job):
            while not Path(job.payload.gate).exists():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    journal.note("refused", job=job.id)

    @jobs.job(group="g")
    async def deadly(job: Job[Work]) -> None:
        """Kills its process."""
        with noted(job):
            await asyncio.sleep(job.payload.ms / 1000)
            journal.note("dies", job=job.id)
            if job.payload.n % 2:
                _exit_at_once(1)
            os.kill(os.getpid(), signal.SIGKILL)

    return jobs


def executor_of(
    dsn: str, journal: Journal, *, executor: dict[str, Any] | None = None, postgres: dict[str, Any] | None = None
) -> Executor:
    """An executor for the tests' job types. Its settings are those of `ExecutorSettings` and `PostgresSettings`."""
    made: list[Executor] = []
    jobs = registry_of(journal, lambda: made[0].id)
    made.append(
        Executor(
            SERVICE,
            jobs,
            PostgresSettings(dsn=dsn, **(postgres or {})),
            ExecutorSettings(**(executor or {})),
            prometheus=CollectorRegistry(),
        )
    )
    return made[0]


async def _run(arguments: argparse.Namespace) -> None:
    journal = Journal(arguments.journal, arguments.name)
    _before_exit.append(lambda code: journal.note("exits", code=code))
    executor = executor_of(arguments.dsn, journal, executor=arguments.executor, postgres=arguments.postgres)
    executor.assign(arguments.origins, arguments.generation)
    await executor.start()
    journal.note("up")
    commands = _commands()
    ended = asyncio.create_task(executor.wait())
    while True:
        command = asyncio.create_task(commands.get())
        await asyncio.wait([command, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            journal.note("failed", error="".join(traceback.format_exception(ended.exception())))
            await ended
            return
        match command.result():
            case {"assign": origins, "generation": generation}:
                executor.assign(origins, generation)
            case {"ask": number}:
                journal.note("answer", ask=number, held=executor.held, problems=executor.problems())
            case {"block": gate}:
                while not Path(gate).exists():
                    time.sleep(0.01)  # noqa: ASYNC251 - hangs, as a service's own code may
            case {"break": _}:
                executor.reader._deliver = executor.reader.wake  # a defect: it takes no arguments
            case _:
                break
    await executor.stop()
    journal.note("down")


def _commands() -> "asyncio.Queue[dict[str, Any]]":
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

    def read() -> None:  # not through sys.stdin, whose lock a thread must not hold when Python ends
        pending = b""
        while received := os.read(0, 65_536):
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                loop.call_soon_threadsafe(queue.put_nowait, json.loads(line))
        _exit_at_once(0)  # the test is gone

    threading.Thread(target=read, daemon=True).start()
    return queue


def main() -> None:
    parser = argparse.ArgumentParser(description="An executor that tests can kill.")
    parser.add_argument("dsn")
    parser.add_argument("journal", type=Path)
    parser.add_argument("name")
    parser.add_argument("--executor", type=json.loads, default={}, help="settings of the executor")
    parser.add_argument("--postgres", type=json.loads, default={}, help="settings of its connections")
    parser.add_argument("--origins", type=json.loads, default=[], help="its first assignment")
    parser.add_argument("--generation", type=int, default=1, help="the generation of that")
    parser.add_argument("--enough", type=int, default=cycles._ENOUGH, help="outcomes that are worth a second cycle")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    arguments = parser.parse_args()
    cycles._ENOUGH = arguments.enough
    asyncio.run(_run(arguments))


if __name__ == "__main__":
    main()

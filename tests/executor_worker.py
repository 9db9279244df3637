"""A worker process of the executor's world: `chaos_worker.py` with other types of jobs, which end in all the ways there
are. How an attempt ends is a function of the job's `n` and the attempt; well, once there is a file `calm` beside the
journal. What a handler wants is in the journal with its end (`how`).
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

if __package__:
    from . import chaos_worker
else:
    import chaos_worker  # first: it has to see who takes `os._exit`

# isort: split

from pydantic import BaseModel
from sidings.jobs import Discard, Job, Registry, Retry, Snooze
from tenacity import retry_if_exception_type, retry_if_result, stop_after_attempt, wait_random

LOCK = "INSERT INTO public.entity VALUES ($1) ON CONFLICT (id) DO UPDATE SET n = entity.n + 1"
EFFECT = "INSERT INTO public.effect VALUES ($1, $2)"
PEOPLE = "UPDATE public.person SET n = n + 1 WHERE id = $1"
AT_COMMIT = "INSERT INTO public.at_commit VALUES ($1)"
BATCH = 4
WAIT = wait_random(0.0, 0.6)
MOODS = {
    "well": 60, "slow": 12, "fail": 12, "snooze": 4, "after": 4, "discard": 2, "hang": 2, "swallow": 1, "exit": 1,
    "cancel": 1,
}  # fmt: skip
MOODS_TX = MOODS | {
    "40001": 2, "40P01": 2, "23514": 2, "late 40001": 3, "late 40P01": 2, "late 23514": 3, "late gone": 2, "gone": 2,
    "slow statement": 2, "late sleep": 2, "caught": 2, "lent": 2, "left": 1, "tangle": 10, "57014": 1,
}  # fmt: skip
FOLLOWED = ("owes", "owes_tx", "owes_lists")
OF_SERIAL = ("step", "holds", "blocks", "skips", "judged", "transfer", "thread", "lists", "timed", "judged_tx",
             "thread_lists", *FOLLOWED * 2)  # fmt: skip
OF_LATEST = ("newest", "newest_tx", "newest_lists", "newest_blocks")
OF_PARALLEL = ("loose", "loose_lists")
TRANSACTIONAL = ("transfer", "newest_tx", "judged_tx", "owes_tx")
GROUPS = [f"g{n}" for n in range(4)]


class Work(BaseModel):
    """n: numbers the jobs that were made by the world. more: how many generations it still enqueues."""

    g: str = ""
    n: int = 0
    more: int = 0


class NotYet(Exception):
    """A failure."""


def registry_of(journal: Any, executor_id: Callable[[], object] = lambda: "") -> Registry:
    calm = Path(sys.argv[2] if __name__ == "__main__" else "none").with_name("calm")
    jobs = Registry()

    def of(job: Job[Work]) -> random.Random:
        return random.Random(f"{job.payload.n} {job.attempt}")

    def mood(job: Job[Work], moods: dict[str, int]) -> str:
        return "well" if calm.exists() else of(job).choices([*moods], [*moods.values()])[0]

    @contextmanager
    def noted(job: Job[Work], size: int = 1, *, alone: bool = True) -> Iterator[list[str]]:
        group = job.group if alone else None
        run: dict[str, Any] = {"job": job.id, "type": job.type, "origin": job.origin, "group": group}
        run |= {"attempt": job.attempt, "epoch": job.fence.epoch, "executor": str(executor_id())}
        run |= {"failures": job.failures, "size": size, "lane": job.group}
        journal.note("start", **run)
        how = ["done"]
        try:
            yield how
        except asyncio.CancelledError:
            how[0] = "cancelled"
            raise
        except BaseException as error:
            how[0] = f"raised {type(error).__name__}"
            raise
        finally:
            journal.note("end", how=how[0], **run)

    def end(mood: str) -> None:
        match mood:
            case "fail":
                raise NotYet("at random")
            case "snooze":
                raise Snooze(0.3)
            case "after":
                raise Retry.after(0.4)
            case "discard":
                raise Discard("at random")
            case "exit":
                raise SystemExit
            case _:
                pass

    async def behave(job: Job[Work], moods: dict[str, int] = MOODS) -> str:
        match mood(job, moods):
            case "slow":
                await asyncio.sleep(of(job).choice([0.05, 0.2, 0.5]))
            case "hang":
                await asyncio.sleep(60)
            case "swallow":
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
            case "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
            case other:
                end(other)
                return other
        return "well"

    async def plain(job: Job[Work], *, alone: bool = True) -> None:
        with noted(job, alone=alone):
            await behave(job)

    async def transfer(job: Job[Work]) -> None:
        tx = job.tx
        with noted(job):
            await tx.execute(EFFECT, job.id, job.attempt)
            kind = await behave(job, MOODS_TX)
            if job.payload.more and not calm.exists():
                await lay_out(job)
            match kind.removeprefix("late "):
                case "well":
                    return
                case "tangle":
                    for person in random.sample(range(12), 2):
                        await tx.execute(PEOPLE, person)
                        await asyncio.sleep(0.02)
                case "slow statement":
                    await tx.execute("SET LOCAL statement_timeout = '100ms'")
                    await tx.execute("SELECT pg_sleep(5)")
                case "caught":
                    with suppress(Exception):
                        await tx.execute("SELECT 1 / 0")
                case "lent":
                    async with tx.connection.transaction():
                        await tx.connection.fetch("SELECT 1")
                    if of(job).random() < 0.5:
                        raise NotYet("it has had the connection")
                case "left":
                    asyncio.ensure_future(tx.connection.fetch("SELECT pg_sleep(0.2)")).add_done_callback(
                        lambda task: task.cancelled() or task.exception()
                    )
                case "gone" if kind == "gone":
                    await tx.execute("SELECT pg_terminate_backend(pg_backend_pid())")
                case "57014":
                    await tx.execute("SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(5)")
                case what if kind.startswith("late "):
                    await tx.execute(AT_COMMIT, what)
                case code:
                    await tx.execute(f"DO $$ BEGIN RAISE 'as if' USING ERRCODE = '{code}'; END $$")

    async def lay_out(job: Job[Work]) -> None:
        """More jobs, of its own group and of others, behind the lock of each group."""
        rng = of(job)
        for _ in range(rng.choice([0, 1, 1, 2])):
            group = rng.choice([job.payload.g, job.payload.g, rng.choice(GROUPS)])
            origin = job.origin if rng.random() < 0.7 else rng.choice(["t/0", "t/3", "t/5"])
            name = rng.choice([*OF_SERIAL, *OF_LATEST, *OF_PARALLEL, "transfer"])
            work = Work(g=group, n=job.payload.n * 7 + rng.randrange(1_000_000), more=job.payload.more - 1)
            await job.tx.execute(LOCK, f"{origin} {group}")
            key = f"k{rng.randrange(3)}" if rng.random() < 0.2 else None
            delay = rng.choice([None, None, None, 0.2, 1.0])
            await jobs[name].enqueue(
                job.tx, work, origin=origin, unique_key=key, delay=delay, priority=rng.choice([0, 0, 5, -5])
            )

    async def lists(batch: list[Job[Work]], *, alone: bool = True) -> list[object]:
        with ExitStack() as stack:
            hows = [stack.enter_context(noted(job, len(batch), alone=alone)) for job in batch]
            first = mood(batch[0], MOODS)
            if first == "slow":
                await asyncio.sleep(0.2)
            elif first == "hang":
                await asyncio.sleep(60)
            elif first in ("fail", "snooze", "after", "discard") and of(batch[0]).random() < 0.3:
                end(first)
            answers: list[object] = []
            for job, how in zip(batch, hows, strict=True):
                try:
                    end(mood(job, MOODS))
                    answers.append(None)
                except Exception as error:
                    answers.append(error)
                    how[0] = f"raised {type(error).__name__}"
                except SystemExit:
                    answers.append(None)
            return answers

    quick, twice = Retry(wait=WAIT), stop_after_attempt(2)
    common: dict[str, Any] = {"group": "g", "timeout": 2, "retry": quick}

    def add(name: str, handler: Any, **options: Any) -> None:
        async def with_jobs(job: Job[Work]) -> Any:
            return await handler(job)

        async def with_lists(batch: list[Job[Work]]) -> Any:
            return await handler(batch)

        jobs.job(name=name, **common | options)(with_lists if options.get("batch") else with_jobs)

    async def loose(job: Job[Work]) -> None:
        await plain(job, alone=False)

    async def loose_lists(batch: list[Job[Work]]) -> list[object]:
        return await lists(batch, alone=False)

    async def judged(job: Job[Work]) -> int:
        with noted(job) as how:
            await behave(job)
            answer = of(job).choice([1, 1, 0])
            if not answer and not calm.exists():
                how[0] = "raised by its result"
            return answer or calm.exists()

    async def judged_tx(job: Job[Work]) -> int:
        await transfer(job)
        return 1 if calm.exists() else of(job).choice([1, 1, 0])

    def thread_lists(batch: list[Job[Work]]) -> list[object]:
        with ExitStack() as stack:
            hows = [stack.enter_context(noted(job, len(batch))) for job in batch]
            kind = mood(batch[0], MOODS)
            if kind in ("slow", "hang"):
                time.sleep(0.3 if kind == "slow" else 2.5)
            answers: list[object] = []
            for job, how in zip(batch, hows, strict=True):
                fails = mood(job, MOODS) == "fail"
                answers.append(NotYet("one") if fails else None)
                how[0] = "raised NotYet" if fails else how[0]
            return answers

    async def deadly(job: Job[Work]) -> None:
        with noted(job):
            await asyncio.sleep(0.02)
            if not calm.exists():
                journal.note("dies", job=job.id)
                chaos_worker._exit_at_once(1)

    add("step", plain)
    add("single", loose, group=None)
    add("holds", plain, retry=Retry(wait=WAIT, stop=twice, on_exhausted="hold"))
    add("blocks", plain, retry=Retry(wait=WAIT, stop=twice, on_exhausted="block"))
    add("skips", plain, retry=Retry(wait=WAIT, stop=twice))
    add("owed", plain)
    owes = Retry(stop=stop_after_attempt(1), on_exhausted=jobs["owed"])
    add("owes", plain, retry=owes)
    add("owes_tx", transfer, transactional=True, retry=owes)
    add("owes_lists", lists, batch=BATCH, retry=owes)
    add("timed", plain, timeout=0.15)
    add("judged", judged, retry=Retry(
        wait=WAIT, stop=stop_after_attempt(4),
        retry=retry_if_result(lambda answer: not answer) | retry_if_exception_type(Exception),
    ))  # fmt: skip
    add("transfer", transfer, transactional=True)
    add("lists", lists, batch=BATCH)
    add("newest", plain, policy="latest")
    add("newest_tx", transfer, policy="latest", transactional=True)
    add("newest_lists", lists, policy="latest", batch=BATCH)
    add("newest_blocks", plain, policy="latest", retry=Retry(wait=WAIT, stop=twice, on_exhausted="block"))
    add("loose", loose, policy="parallel")
    add("loose_lists", loose_lists, policy="parallel", batch=BATCH)
    add("deadly", deadly)
    add("judged_tx", judged_tx, transactional=True, retry=Retry(
        wait=WAIT, retry=retry_if_result(lambda answer: not answer) | retry_if_exception_type(Exception),
    ))  # fmt: skip
    jobs.job(name="thread_lists", **common, batch=BATCH)(thread_lists)

    @jobs.job(**common)
    def thread(job: Job[Work]) -> None:
        with noted(job):
            kind = mood(job, MOODS)
            if kind in ("slow", "swallow", "cancel"):
                time.sleep(of(job).choice([0.05, 0.2, 0.5]))
            elif kind == "hang":
                time.sleep(3)
            end(kind)

    return jobs


if __name__ == "__main__":
    chaos_worker.registry_of = registry_of
    chaos_worker.main()

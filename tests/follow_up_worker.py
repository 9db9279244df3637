"""A worker process whose jobs give up and are followed by others: `chaos_worker.py` with other types."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__:
    from . import chaos_worker
else:
    import chaos_worker

# isort: split

from sidings.jobs import Job, Registry, Retry
from tenacity import stop_after_attempt


def registry_of(journal: Any, executor_id: Callable[[], object] = lambda: "") -> Registry:
    jobs = Registry()

    def note(event: str, job: Job[chaos_worker.Work]) -> None:
        run = {"job": job.id, "type": job.type, "origin": job.origin, "group": job.group, "attempt": job.attempt}
        journal.note(event, **run, epoch=job.fence.epoch, executor=str(executor_id()), how="done")

    @jobs.job(group="g")
    async def refund(job: Job[chaos_worker.Work]) -> None:
        note("start", job)
        note("end", job)

    @jobs.job(group="g", retry=Retry(stop=stop_after_attempt(1), on_exhausted=refund))
    async def charge(job: Job[chaos_worker.Work]) -> None:
        note("start", job)
        while not Path(job.payload.gate).exists():
            await asyncio.sleep(0.01)
        note("end", job)
        raise ConnectionError("the bank does not answer")

    return jobs


if __name__ == "__main__":
    chaos_worker.registry_of = registry_of
    chaos_worker.main()

"""A job that is discarded can be brought back, whatever its type leaves in the history."""

import pytest
from sidings import Admin
from sidings.jobs import Discard, Job, Registry, Retry
from tenacity import stop_after_attempt, wait_none

from .support import ORIGIN, Ride, enqueue, eventually, fetch, running


@pytest.mark.parametrize("how", ["gives up", "discards"])
async def test_a_discarded_job_of_a_type_without_history_can_be_requeued(database: str, admin: Admin, how: str) -> None:
    registry = Registry()
    mended: list[str] = []

    @registry.job(group="transport", history=False, retry=Retry(wait=wait_none(), stop=stop_after_attempt(2)))
    async def pay(job: Job[Ride]) -> None:
        if job.payload.number and not mended:
            raise Discard("no such account") if how == "discards" else ValueError("no such account")
        mended.extend([job.payload.transport] if mended else [])

    await enqueue(database, pay, [Ride(transport="well")])
    [id] = await enqueue(database, pay, [Ride(transport="t1", number=1)])
    async with running(database, registry, [ORIGIN]):
        await eventually(lambda: admin_finds_nothing(database), "all have ended")
        found = [(row.job_id, row.outcome) for row in await admin.requeueable(declined=True)]
        assert found == [(id, "discarded")]
        mended.append("")
        await admin.requeue(id)
        await eventually(lambda: mended == ["", "t1"])
    rows = await fetch(database, "SELECT job_id, outcome FROM sidings.job_history")
    assert [tuple(row) for row in rows] == [(id, "discarded")], "and nothing else is in the history"


async def test_a_job_that_was_stored_without_a_payload_can_be_requeued(database: str, admin: Admin) -> None:
    """As SQL may: the history's NULL stood for a payload that somebody has erased."""
    registry = Registry()
    seen: list[None] = []

    @registry.job()
    async def rebuild(job: Job[None]) -> None:
        seen.append(job.payload)
        if len(seen) == 1:
            raise Discard("not now")

    await fetch(database, "SELECT sidings.enqueue('rebuild', NULL, $1)", ORIGIN)
    async with running(database, registry, [ORIGIN]):
        await eventually(lambda: admin_finds_nothing(database), "it has ended")
        [row] = await admin.requeueable(declined=True)
        await admin.requeue(row.job_id)
        await eventually(lambda: seen == [None, None])


async def admin_finds_nothing(database: str) -> bool:
    return not await fetch(database, "SELECT FROM sidings.job")

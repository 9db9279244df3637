"""What is done to many jobs: one transaction after the other, with rests in which executors get on."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable

from ...errors import ActionRefused, AdministrationError, Busy, JobNotFound, PostgresUnavailable
from .calls import Calls, refused
from .rows import ActedOn, JobState

__all__ = ["act_on_each", "clear"]

_CLEARED_AT_ONCE = 10_000  # the holder's cycles wait meanwhile: about 75 ms
_ACTED_ON_AT_ONCE = 2_000  # likewise, 0.1 to 0.3 s
# At least, from one transaction to the next, and as long as it took: each voids what the holder has planned, and makes
# it read thousands of jobs anew; without a rest it would come to nothing else.
_REST_SECONDS = 1.0
_ENDS_TOLD = 20  # of many jobs: a look into a history of millions takes 20 ms and more


async def act_on_each(
    calls: Calls, actor: str, action: str, job_ids: Iterable[int], reason: str | None, still: str | None
) -> AsyncGenerator[ActedOn]:
    """As `Admin.each`. still: the state that they must be in."""
    ids, took, told = list(dict.fromkeys(job_ids)), 0.0, 0
    for first in range(0, len(ids), _ACTED_ON_AT_ONCE):
        if first:
            await asyncio.sleep(max(_REST_SECONDS, took))
        some = ids[first : first + _ACTED_ON_AT_ONCE]
        began = time.monotonic()
        try:
            done = await calls.act("act_on_jobs", action, some, actor, reason, still)
        except (AdministrationError, PostgresUnavailable) as error:
            if first:
                before = f"{first} of {len(ids)} jobs are dealt with, and stay so"
                raise type(error)(f"{before}; with the rest: {error}") from error
            raise
        rows = {row["job"]: row for row in done}
        took = time.monotonic() - began
        for id in some:
            state, code = rows[id]["state"], rows[id]["code"]
            error = None if code is None else refused(code, rows[id]["refusal"])
            if isinstance(error, JobNotFound) and told < _ENDS_TOLD:
                told += 1
                try:
                    error = await _how_it_ended(calls, id) or error
                except PostgresUnavailable:  # what was done is done, and is to be told of
                    told = _ENDS_TOLD  # it would have to be waited for again
            yield ActedOn(id, None if state is None else JobState(state), error)


async def _how_it_ended(calls: Calls, job_id: int) -> JobNotFound | None:
    try:
        await calls.rows("no_such_job", job_id)
    except JobNotFound as error:
        return error
    except (Busy, ActionRefused):  # the latter: of a role that may act, and not look into the history
        return None


async def clear(calls: Calls, actor: str, origin: str, group: str, reason: str | None, *, running: bool) -> int:
    """As `Admin.clear_group`."""
    total = 0
    while True:
        arguments = (origin, group, actor, reason, running, _CLEARED_AT_ONCE)
        began = time.monotonic()
        try:
            cleared = await calls.value("clear_group", *arguments)
        except (Busy, PostgresUnavailable) as error:
            if total:
                raise type(error)(f"{error} ({total} jobs are cancelled already)") from error
            raise
        total += cleared
        if cleared < _CLEARED_AT_ONCE:
            return total
        await asyncio.sleep(max(_REST_SECONDS, time.monotonic() - began))

"""Waiting for an event, or for the time that it may take."""

import asyncio
import random
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

__all__ = ["done_unless_set", "poll", "set_within", "unless_set"]

T = TypeVar("T")


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until `event` is set, for `seconds` at most; None: any time. Returns whether it is set."""
    if seconds is None:
        return await event.wait()
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def poll(event: asyncio.Event, seconds: float) -> None:
    """Wait until `event` is set, for `seconds` at most, give or take a fifth: many shall not all look at once. Where it
    is set already, others have their turn first."""
    if event.is_set():
        await asyncio.sleep(0)
    else:
        await set_within(event, seconds * random.uniform(0.8, 1.2))


async def unless_set(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """What `work` returns; None where `event` is set before it has ended, which cancels it."""
    working = asyncio.ensure_future(work)
    interrupted = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([working, interrupted], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        interrupted.cancel()
        await asyncio.gather(working, interrupted, return_exceptions=True)


async def done_unless_set(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Whether `work` has ended before `event` was set, which cancels it. It runs in the caller's own task, as what
    opens a task group has to."""
    limit = asyncio.timeout(None)

    async def interrupt() -> None:
        await event.wait()
        limit.reschedule(asyncio.get_running_loop().time())

    interrupting = asyncio.create_task(interrupt())
    try:
        async with limit:
            await work
    except TimeoutError:
        if not limit.expired():
            raise
        return False
    finally:
        interrupting.cancel()
    return True

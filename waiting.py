"""Waiting for an event, or for the time that it may take."""

import asyncio

__all__ = ["set_within"]


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until `event` is set, for `seconds` at most; None: any time. Returns whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True

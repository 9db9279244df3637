"""A consumer's handler inside of what the service wraps around every handler."""

from collections.abc import Sequence
from typing import Any

from ..jobs import Transaction
from ..jobs.context import Within, current_work
from ..jobs.middleware import Call, Middleware, Next, call_through
from .message import Message

__all__ = ["call_inside"]


async def call_inside(
    middleware: Sequence[Middleware],
    topic: str,
    messages: Sequence[Message[Any]],
    tx: Transaction | None,
    handler: Next,
) -> None:
    """Call `handler`, which handles these messages of one partition, as the current work. A stored message is handled
    within its job, and the log tells of both."""
    outer = current_work.get()
    work = messages if len(messages) > 1 else messages[0]
    if outer is not None and not isinstance(outer, Sequence) and not isinstance(work, Sequence):
        work = Within(outer, work)
    token = current_work.set(work)
    try:
        if middleware:
            await call_through(middleware, Call(topic, messages[0].origin, messages=messages, tx=tx), handler)
        else:
            await handler()
    finally:
        current_work.reset(token)

"""What a handler works on while it handles one message outside of a batch."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from ..jobs.context import Within, current_work
from .message import Message

__all__ = ["working_on"]


@contextmanager
def working_on(message: Message[Any]) -> Generator[None]:
    """What is done in here is done for `message`. A stored message is handled within its job, and the log tells of
    both."""
    outer = current_work.get()
    token = current_work.set(message if outer is None or isinstance(outer, Sequence) else Within(outer, message))
    try:
        yield
    finally:
        current_work.reset(token)

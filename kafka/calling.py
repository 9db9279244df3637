"""What a handler works on while it handles one message outside of a batch, and what is told of its errors and of what
stands in messages."""

import reprlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from ..jobs import ErrorInfo
from ..jobs.context import Within, current_work
from ..jobs.outcome import legible, place_of
from .message import Message

__all__ = ["failure_of", "shown", "text_of", "told_of", "working_on"]

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 200, 200


def shown(value: object) -> str:
    """`value`, which a message has brought, as a line of the log may show it: it may have a megabyte."""
    return _SHORT.repr(value)


def told_of(error: Exception) -> str:
    """The name of `error` and its text, whatever its class does when it is asked for that: what an author's code raises
    must not end the service because it cannot be shown."""
    return f"{type(error).__name__}: {ErrorInfo.of(error).message}"


def failure_of(error: Exception) -> str:
    """The same of what a handler raised, and where it did."""
    return f"{type(error).__name__}: {ErrorInfo.of(error).at(place_of(error)).text}"


def text_of(error: Exception) -> str:
    """Its text alone, for the log."""
    return legible(ErrorInfo.of(error).message)


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

"""What a handler works on while it handles one message outside of a batch, and what is told of its errors and of what
stands in messages."""

import asyncio
import reprlib
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from ..jobs import ErrorInfo, Snooze
from ..jobs.context import Within, current_work, work_origin
from ..jobs.outcome import place_of
from ..jobs.retry import asked_seconds
from ..legible import legible
from .message import Message

__all__ = [
    "called_alone",
    "failure_of",
    "puts_off",
    "shown",
    "text_of",
    "told_of",
    "unusual",
    "working_on",
]

H = TypeVar("H", bound=Callable[..., Awaitable[object]])

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 200, 200


def shown(value: object) -> str:
    """`value`, which a message has brought, as a line of the log may show it: it may have a megabyte."""
    return _SHORT.repr(value)


def told_of(error: BaseException) -> str:
    """The name of `error` and its text, whatever its class does when it is asked for that: what an author's code raises
    must not end the service because it cannot be shown."""
    return f"{type(error).__name__}: {ErrorInfo.of(error).message}"


def failure_of(error: Exception) -> str:
    """The same of what a handler raised, and where it did."""
    return f"{type(error).__name__}: {ErrorInfo.of(error).at(place_of(error)).text}"


def text_of(error: Exception) -> str:
    """Its text alone, for the log."""
    return legible(ErrorInfo.of(error).message)


def unusual(error: BaseException, task: "asyncio.Task[Any] | None") -> RuntimeError:
    """The failure that it is where a handler raises what is no `Exception`, as `SystemExit`, or what an extension
    written in Rust raises when it panics: else each start of the service would end with this message. task: its own.

    Raises what is not the handler's own: the interrupt of a person, and the end of a coroutine that Python closes,
    after its loop."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, GeneratorExit) and (task is None or asyncio.current_task(task.get_loop()) is not task):
        raise error
    return RuntimeError(f"the handler raised {told_of(error)}")


def puts_off(error: BaseException) -> bool:
    """Whether what decodes a message says with it that it cannot do so now, as where it does not reach the schema
    registry. All else that it raises is the message's own fault."""
    return isinstance(error, Snooze) and asked_seconds(error) is not None


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


def called_alone(handler: H) -> H:
    """The handler as its declaration returns it. Where a test calls it by itself, what it enqueues belongs to its
    message's origin, as in a consumer."""

    @wraps(handler)
    async def call(*given: Any, **named: Any) -> object:
        arguments: list[Any] = [*given, *named.values()]
        first: Any = next(filter(_is_given, arguments), None)
        messages = cast(list[Any], first) if isinstance(first, list) else [first]
        if work_origin() is not None or not all(getattr(each, "topic", "") for each in messages or [None]):
            return await handler(*given, **named)
        token = current_work.set(tuple(messages) if len(messages) > 1 else messages[0])
        try:
            return await handler(*given, **named)
        finally:
            current_work.reset(token)

    return cast(H, call)


def _is_given(argument: object) -> bool:
    """Whether it is what a consumer's handler gets beside its transaction."""
    return isinstance(argument, Message | list)

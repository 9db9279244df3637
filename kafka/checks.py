"""What an author has given to a declaration, looked at before anything runs with it.

What is wrong here would show late and as something else: a decoder that is no function holds every message, an
asynchronous one makes coroutines of them, a limit that is not a number ends the loop that compares with it.
"""

import asyncio
import inspect
import math

from ..errors import ConfigurationError

__all__ = ["check_actor", "check_count", "check_function", "check_loop", "check_seconds"]


def check_loop(own: asyncio.AbstractEventLoop | None, where: str, instead: str = "") -> None:
    """Whether this is the event loop that connections belong to; None: they have none yet. Another one would spoil them
    for their own. Raises `ConfigurationError`."""
    if own is not None and asyncio.get_running_loop() is not own:
        raise ConfigurationError(
            f"this is not the event loop {where}, whose connections these are: let that one run the coroutine "
            f"(asyncio.run_coroutine_threadsafe){instead}"
        )


def check_actor(actor: str, call: str) -> None:
    """What persons do is written into the audit with who they are. Raises `ConfigurationError`."""
    if not actor:
        raise ConfigurationError(f"{call}(actor=''): name the person or program that does it, for the audit")


def check_count(given: object, name: str, what: str, remedy: str) -> None:
    """`given` must be a whole number from 1 on, or None. Raises `ConfigurationError`."""
    if given is not None and not (isinstance(given, int) and not isinstance(given, bool) and given >= 1):
        raise ConfigurationError(f"{what}: {name}={given!r}: give {remedy}")


def check_seconds(given: object, name: str, what: str) -> None:
    """`given` must be a duration, or None. Raises `ConfigurationError`."""
    if given is None or (isinstance(given, int | float) and not isinstance(given, bool) and 0 < given < math.inf):
        return
    raise ConfigurationError(f"{what}: {name}={given!r}: give a positive number of seconds, or None")


def check_function(given: object, name: str, what: str, takes: str) -> None:
    """`given` must be a plain function that can be called with one argument, or None. Raises `ConfigurationError`."""
    if given is None:
        return
    if not callable(given) or inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(type(given).__call__):
        raise ConfigurationError(f"{what}: {name}={given!r}: give a plain function, which is called with {takes}")
    try:
        inspect.signature(given, follow_wrapped=False).bind(None)
    except TypeError:
        raise ConfigurationError(f"{what}: {name}={given!r}: it cannot be called with {takes} alone") from None
    except ValueError:
        return  # it does not say what it takes, as some that are written in C

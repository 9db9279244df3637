"""Before many things are touched: show them, ask, and refuse where nobody can answer."""

import signal
import sys
from types import FrameType
from typing import NoReturn

import typer

from .command import fail
from .output import note

__all__ = ["ask"]


def ask(what: str, *, yes: bool) -> None:
    """Return if it is to be done. what: a sentence such as 'cancel 12 jobs'.

    On a terminal a person is asked; without one --yes has to say it. Exits with 1 otherwise, or with 130 after Ctrl-C;
    nothing has changed.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():  # pyright: ignore[reportUnnecessaryComparison] - closed: `<&-`
        fail(f"this would {what}; nothing was done: give --yes where nobody can be asked")
    before = signal.signal(signal.SIGINT, _leave)  # asyncio's only cancels the task, and the terminal is read on
    try:
        sure = typer.confirm(f"{what[0].upper()}{what[1:]}?", err=True)
    except typer.Exit:
        note("\nnothing was done")
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if not sure:
        note("nothing was done")
        raise typer.Exit(1)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise typer.Exit(128 + number)

"""Before many things are touched: show them, ask, and refuse where nobody can answer."""

import sys

import typer

from .command import fail
from .output import note

__all__ = ["ask"]


def ask(what: str, *, yes: bool) -> None:
    """Return if it is to be done. what: a sentence such as 'cancel 12 jobs'.

    On a terminal a person is asked; without one --yes has to say it. Exits with 1 otherwise; nothing has changed.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():  # pyright: ignore[reportUnnecessaryComparison] - closed: `<&-`
        fail(f"this would {what}; nothing was done: give --yes where nobody can be asked")
    if not typer.confirm(f"{what[0].upper()}{what[1:]}?", err=True):
        note("nothing was done")
        raise typer.Exit(1)

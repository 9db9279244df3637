"""The command line: `sidings`. See docs/cli.md.

Reading order: `app` (the tree of commands), `command` (what all commands share), `session` (the connection), `output`
(tables, JSON, times), `consent` (what is asked before many things are touched), `filters` (times and states as people
write them); then a module for each group of commands: `status`; `jobs` with `job_details` and `job_actions`,
`job_types`, `groups`, `origins`, `audit`; `consumers`, `outbox`; `migrations`, `dev`; `web`, for which `pages` shows
their tables in a browser. What is looked at and done is `sidings.jobs.admin`'s and the outbox's; the few ``.sql`` files
here only look.
"""

import codecs
import io
import json
import os
import sys
from typing import NoReturn

__all__ = ["main"]


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def main() -> None:
    """Run the command that the process' arguments name, and exit with its code (docs/cli.md lists them)."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] - closed, as by `>&-`
        _fail("the standard output is closed")
    codecs.register_error("sidings.escaped", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack what a key or an error has
            stream.reconfigure(errors="sidings.escaped")
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        _fail(f"the command line needs {error.name}: pip install 'sidings[cli]'")
    try:
        app(prog_name="sidings")
    except OSError as error:  # as of a disk that is full; a broken pipe has ended it already
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python fails once more, with what is left of the output
        _fail(error)


def _fail(error: object) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)

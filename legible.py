"""What comes from elsewhere, as the log and `/health` may have it."""

import re

import asyncpg

__all__ = ["legible", "told"]

_UNUSUAL = re.compile("\n(?!    )|[^ -~\n]")


def legible(text: object) -> str:
    """What comes from elsewhere, as a line of the log may have it: no control characters, which could steer a terminal,
    and behind a line break an indent, so that nothing in it passes for a line of its own. What is so already stays."""
    return _UNUSUAL.sub(_shown, str(text))


def told(error: object) -> str:
    """The text of an error, legible. Of what Postgres says not the DETAIL: it quotes the row, and so a payload."""
    if isinstance(error, asyncpg.PostgresError):
        message = error.args[0] if error.args else "without a text"  # where somebody else has raised it, perhaps
        error = f"{message}\nHINT:  {error.hint}" if error.hint else message
    return legible(error)


def _shown(match: re.Match[str]) -> str:
    c = match[0]
    return c if c.isprintable() else "\n    " if c == "\n" else repr(c)[1:-1]

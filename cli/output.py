"""How results are shown: tables for people, plain columns for pipes, JSON for programs."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import typer

if TYPE_CHECKING:
    from .session import Session

__all__ = [
    "STYLES",
    "Table",
    "Verbatim",
    "age",
    "at_most",
    "counted",
    "document",
    "duration",
    "note",
    "plain",
    "print_json",
    "span",
    "table",
    "until",
    "words",
]


class Verbatim(NamedTuple):
    """JSON that stands in a document as it is."""

    text: str


Table = tuple[Sequence[str], Sequence[Sequence[object]]]  # columns, rows


STYLES = {
    "blocked": "red",
    "held": "red",
    "discarded": "red",
    "lost": "red",
    "backing off": "yellow",
    "retried": "yellow",
    "followed": "yellow",
    "running": "green",
    "succeeded": "green",
}
_COUNTED = 10_000  # as far as Admin counts
# What goes into the next command stays in one piece; the other columns give way where a terminal is narrow.
_WHOLE = {"id", "job", "origin", "topic", "held by", "executor"}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print rows: on a terminal as a table that folds what is too long and leaves out columns that are empty; elsewhere
    as columns two spaces apart, which cut nothing and are always the same. None is shown as '-'."""
    cells = [[_cell(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(columns, cells, title)
        return
    if title:
        typer.echo(f"{title}:")
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in (columns, *cells):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    kept = [at for at in range(len(columns)) if not rows or any(row[at] != "-" for row in rows)]
    for name in (columns[at] for at in kept):
        grid.add_column(name, overflow="fold", no_wrap=name in _WHOLE)
    for row in rows:  # Text: what is data is no markup
        grid.add_row(*(Text(row[at], style=STYLES.get(row[at], "")) for at in kept))
    Console().print(grid)


def note(text: str) -> None:
    """Something that is not a result, so that pipes do not get it."""
    typer.echo(text, err=True)


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else plain(str(value))


def plain(text: str) -> str:
    """One line without control characters: keys and errors come from elsewhere, and could steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def words(*given: str) -> str:
    """Words of a command that can be pasted into a shell and performed. As `plain`, but bash and zsh take what is
    escaped for what it stands for."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in given)


def _escaped(word: str) -> str:
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return "".join(c if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in c.encode()) for c in quoted)


def print_json(session: "Session", **content: object) -> None:
    """One document: what is listed, under its name, and `now` by the database's clock, to which ages refer, and
    whether it is a `standby`. What could steer a terminal is escaped, as in `plain`."""
    content = {"now": session.now, "standby": session.standby is not None, **content}
    members = [f"  {json.dumps(name)}: {_indented(value)}" for name, value in content.items()]
    text = "{\n" + ",\n".join(members) + "\n}"
    typer.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def _indented(value: object) -> str:
    text = value.text if isinstance(value, Verbatim) else json.dumps(document(value), indent=2, ensure_ascii=False)
    return text.replace("\n", "\n  ")


def document(value: object) -> Any:
    """`value` as JSON has it. Times are in UTC, durations in seconds; bytes are text, else \\x… in hexadecimal."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return value.total_seconds()
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return f"\\x{value.hex()}"
        case Mapping():
            items = cast(Mapping[str, object], value).items()
            return {name: document(item) for name, item in items}
        case list() | tuple():
            return [document(item) for item in cast(Sequence[object], value)]
        case bool() | int() | float() | None:
            return value
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: document(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case _:
            return str(value)


def duration(time: timedelta) -> str:
    """In one or two units: '850ms', '4s', '3m20s', '2h5m', '3d4h'."""
    seconds = time.total_seconds()
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.0f}s"
    whole = int(seconds)
    for size, unit, part, part_unit in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit}{rest}{part_unit}" if rest else f"{whole // size}{unit}"
    raise AssertionError


def counted(number: int, noun: str) -> str:
    """'1 job', '2 jobs'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def at_most(number: int) -> str | None:
    """A number as `Admin` counts it, for a table: '10000+' where there may be more. Zeroes are left out: what matters
    stands out."""
    return f"{number}+" if number >= _COUNTED else str(number or "") or None


def age(time: datetime | None, now: datetime) -> str | None:
    """How long ago, for a table."""
    return None if time is None else duration(now - time)


def until(time: datetime | None, now: datetime) -> str | None:
    """How long until then, for a table; 'due' when it is past."""
    if time is None:
        return None
    return "due" if time <= now else duration(time - now)


def span(begin: datetime | None, end: datetime | None) -> str | None:
    """How long something took, for a table."""
    return None if begin is None or end is None else duration(end - begin)

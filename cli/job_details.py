"""One job on the screen."""

import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import typer

from .output import Table, age, plain, span, table, until
from .session import Session

if TYPE_CHECKING:
    from ..jobs.admin import AttemptRow, AuditRow, JobDetails, PauseRow

_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+')
_DEEPEST = 50  # of its indentations: a payload may be nested by thousands

__all__ = [
    "actions_table",
    "attempts_table",
    "error_text",
    "facts",
    "pause_text",
    "payload_lines",
    "payload_text",
    "show_details",
]


def show_details(session: Session, details: "JobDetails") -> None:
    """Everything that is known of it, as text."""
    now = session.now
    for name, value in facts(details, now).items():
        typer.echo(f"{name + ':':<17} {plain(str(value))}")
    for pause in details.pauses:
        typer.echo(f"{'paused:':<17} {plain(pause_text(pause))}, {age(pause.paused_at, now)} ago")
    for name, value in details.headers.items():
        typer.echo(f"{'header:':<17} {plain(f'{name}={value}')}")
    if details.payload is not None:
        typer.echo("payload:")
        for line in payload_lines(details.payload):
            typer.echo(f"  {line}")
    if details.attempts:
        table(*attempts_table(details.attempts, now), title="attempts")
    if details.actions:
        table(*actions_table(details.actions, now), title="what people did")


def facts(details: "JobDetails", now: datetime) -> dict[str, object]:
    """What is known of it in a word or two, by name."""
    row = details.row
    if row is not None:
        found: dict[str, object] = {
            "job": row.id,
            "type": row.type,
            "origin": row.origin,
            "group": row.group,
            "state": row.state,
            "held": row.held,
            "error": row.error,
            "attempt": row.attempt,
            "failures": row.failures,
            "losses": row.losses,
            "priority": row.priority,
            "position": row.position,
            "unique key": row.unique_key,
            "enqueued": f"{age(row.enqueued_at, now)} ago ({row.enqueued_at:%Y-%m-%d %H:%M:%S %Z})",
            "next attempt in": None if row.held else until(row.run_at, now),
        }
    else:
        last = details.attempts[-1]
        ago = f"{last.outcome} {age(last.finished_at, now)} ago"
        unknown = f"gone; its last attempt on record was {ago} (history=False leaves none of what succeeds)"
        found = {
            "job": details.id,
            "type": last.type,
            "origin": last.origin,
            "group": last.group,
            "state": f"ended: {ago}" if last.outcome.terminal else unknown,
        }
    return {name: value for name, value in found.items() if value is not None}


def payload_text(payload: str, limit: int = sys.maxsize) -> str:
    """Indented. Numbers are as they stand there: Python's own are rounded, and there are some that it does not take.

    limit: so many characters at most are made of it; a megabyte that is nested deep has fifty with its indentation.
    """
    out, length, depth, before = list[str](), 0, 0, ""
    for match in _TOKENS.finditer(payload):
        if length >= limit:
            break
        token = match[0]
        ends = token in ("]", "}")
        depth -= ends
        indented = before in ("[", "{", ",") if not ends else before not in ("[", "{")
        space = "\n" + "  " * min(depth, _DEEPEST) if indented else ""
        depth += token in ("[", "{")
        is_text = token.startswith('"')
        shown = json.dumps(json.loads(token), ensure_ascii=False) if is_text else ": " if token == ":" else token
        out += (space, shown)
        length += len(space) + len(shown)
        before = token
    return "".join(out)[:limit]


def payload_lines(payload: str, limit: int = sys.maxsize) -> list[str]:
    """The same for people: escaped is what could steer a terminal or turn a line round, and what UTF-8 lacks."""
    return [plain(line) for line in payload_text(payload, limit).split("\n")]


def attempts_table(attempts: "Sequence[AttemptRow]", now: datetime) -> Table:
    """A row for each."""
    columns = ["attempt", "outcome", "ended ago", "ran", "executor", "error"]
    rows = [
        (
            a.attempt,
            a.outcome,
            age(a.finished_at, now),
            span(a.started_at, a.finished_at),
            a.executor,
            error_text(a),
        )
        for a in attempts
    ]
    return columns, rows


def error_text(attempt: "AttemptRow") -> str | None:
    """How it failed, if it did."""
    return ": ".join(text for text in (attempt.error_class, attempt.error_message) if text) or None


def actions_table(actions: "Sequence[AuditRow]", now: datetime) -> Table:
    """A row for each thing that was done to it."""
    return ["action", "by", "ago", "because"], [(a.action, a.actor, age(a.at, now), a.reason) for a in actions]


def pause_text(pause: "PauseRow") -> str:
    """What is paused, by whom and why."""
    if pause.group:
        name = f"group {pause.group} of {pause.origin}"
    else:
        kind = "type" if pause.type else "origin" if pause.origin else "topic"
        name = f"{kind} {pause.type or pause.origin or pause.topic}"
    return f"{name}, by {pause.paused_by}: {pause.reason}"

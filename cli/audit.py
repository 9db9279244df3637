"""`sidings audit` and `sidings pauses`: what people did, and what is paused."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from .command import LAST_ID, Json, Limit, command
from .output import Table, age, document, note, print_json, table
from .session import Session

if TYPE_CHECKING:
    from ..jobs.admin import AuditRow, PauseRow

__all__ = ["add_to", "audit_table", "pauses_table"]


def add_to(app: typer.Typer) -> None:
    """Declare both."""
    command(app, "audit")(audit)
    command(app, "pauses")(pauses)


async def audit(
    session: Session,
    by: Annotated[str | None, typer.Option("--by", help="What this person or program did.", metavar="NAME")] = None,
    action: Annotated[str | None, typer.Option("--action", help="cancel, pause, move, …", metavar="ACTION")] = None,
    limit: Limit = 100,
    before: Annotated[int | None, typer.Option("--before", help="The next page: before this id.", max=LAST_ID)] = None,
    as_json: Json = False,
) -> None:
    """What people and programs did, the newest first."""
    rows = await session.admin().audit(limit=limit, before=before, actor=by, action=action)
    more = rows[-1].id if len(rows) == limit else None
    if as_json:
        print_json(session, audit=rows, next=more)
        return
    if not rows:
        note("nothing was done")
        return
    table(*audit_table(rows, session.now))
    if more:
        note(f"there may be more: add --before {more}")


def audit_table(rows: "Sequence[AuditRow]", now: datetime) -> Table:
    """A row for each action."""
    shown = [
        (
            r.id,
            age(r.at, now),
            r.actor,
            r.action,
            _pairs(document(r.target)),
            r.reason,
            _pairs(document(r.detail)),
        )
        for r in rows
    ]
    return ["id", "ago", "by", "action", "what", "because", "detail"], shown


async def pauses(session: Session, as_json: Json = False) -> None:
    """What is paused, by whom and why, the newest first."""
    rows = await session.admin().pauses()
    if as_json:
        print_json(session, pauses=rows)
    elif rows:
        table(*pauses_table(rows, session.now))
    else:
        note("nothing is paused")


def pauses_table(rows: "Sequence[PauseRow]", now: datetime) -> Table:
    """A row for each pause."""
    shown = [(r.type, r.origin, r.group, r.topic, r.paused_by, age(r.paused_at, now), r.reason) for r in rows]
    return ["type", "origin", "group", "topic", "by", "ago", "because"], shown


def _pairs(values: dict[str, object]) -> str:
    return ", ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in values.items()
        if value is not None
    )

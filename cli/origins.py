"""`sidings origins`: who holds which, what waits there; pausing one, and moving the jobs of an orphan."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from uuid import UUID

import typer

from ..errors import ActionRefused
from ..jobs.admin import JobState
from .command import Because, By, Json, Yes, command, group
from .consent import ask
from .job_types import Backlog, backlogs
from .output import age, counted, note, print_json, span, table
from .session import Session

__all__ = ["app"]

app = group("Origins: who holds them and what waits there; pause, resume, move.")

Origin = Annotated[str, typer.Argument(help="topic/partition", show_default=False)]
Reason = Annotated[str, typer.Option("--because", help="Why: whoever wonders reads it.", metavar="TEXT")]


@dataclass(frozen=True, slots=True)
class OriginRow:
    """An origin: who holds it, or held it last, and what waits there."""

    origin: str
    held: bool
    owner: UUID | None
    epoch: int | None
    lease_until: datetime | None
    host: str | None
    pid: int | None
    jobs: int
    states: Mapping[JobState, int]
    oldest: datetime | None
    paused: str | None


@command(app, "list")
async def list_origins(
    session: Session,
    orphans: Annotated[bool, typer.Option("--orphans", help="Only those with jobs that nobody holds.")] = False,
    as_json: Json = False,
) -> None:
    """Origins with their holder, epoch, lease and jobs. Reads all jobs."""
    rows = await _rows(session)
    if orphans:
        rows = [row for row in rows if row.jobs and not row.held]
    if as_json:
        print_json(session.now, origins=rows)
        return
    if not rows:
        note("no orphans" if orphans else "no origins: no executor has run, and no job waits")
        return
    now = session.now
    columns = ["origin", "held by", "epoch", "lease", "jobs", "held jobs", "oldest", "paused"]
    shown = [
        (
            row.origin,
            f"{row.host}:{row.pid}" if row.held else None,
            row.epoch,
            span(now, row.lease_until) if row.held else None,
            row.jobs or None,
            row.states.get(JobState.HELD) or None,
            age(row.oldest, now),
            row.paused,
        )
        for row in rows
    ]
    table(columns, shown)


@command(app, "pause")
async def pause(session: Session, origin: Origin, because: Reason, by: By = None) -> None:
    """No further job of the origin starts; what runs goes on."""
    known = origin in {row["origin"] for row in await session.rows("list_origins")}
    await session.admin(by).pause(origin=origin, reason=because)
    typer.echo(f"the origin {origin} is paused")
    if not known:
        note(
            "no executor has held it so far: if that is a typing error, resume it; `sidings origins list` has the names"
        )


@command(app, "resume")
async def resume(session: Session, origin: Origin, by: By = None, because: Because = None) -> None:
    """End a pause of the origin."""
    await session.admin(by).resume(origin=origin, reason=because)
    typer.echo(f"the origin {origin} goes on")


@command(app, "move")
async def move(
    session: Session,
    origin: Origin,
    to: Annotated[str, typer.Argument(help="The origin that gets them.", show_default=False)],
    lease_seconds: Annotated[float, typer.Option("--lease-seconds", help="The longest lease of the executors.")] = 60.0,
    by: By = None,
    because: Because = None,
    yes: Yes = False,
) -> None:
    """Give all jobs of an orphaned origin to another one, in the same order, behind what waits there."""
    counts = await session.admin().counts(by=["state"], origin=origin)
    if not counts:
        raise ActionRefused(f"there are no jobs in {origin}: `sidings origins list --orphans` names where there are")
    table(["state", "jobs", "oldest"], [(row.state, row.jobs, age(row.oldest, session.now)) for row in counts])
    ask(f"move {counted(sum(row.jobs for row in counts), 'job')} from {origin} to {to}", yes=yes)
    moved = await session.admin(by).move(origin, to, reason=because, lease_seconds=lease_seconds)
    typer.echo(f"moved {counted(moved, 'job')} from {origin} to {to}")


async def _rows(session: Session) -> list[OriginRow]:
    """Every origin that has been held, that has jobs, or that is paused."""
    admin = session.admin()
    holders = {row["origin"]: row for row in await session.rows("list_origins")}
    counts = await admin.counts(by=["state", "origin"])
    jobs = {backlog.name: backlog for backlog in backlogs("origin", counts, await admin.pauses())}
    rows: list[OriginRow] = []
    for name in sorted({*holders, *jobs}, key=_by_partition):
        backlog = jobs.get(name, Backlog(name, {}, None, None))
        holder = dict(holders[name]) if name in holders else {}
        rows.append(
            OriginRow(
                name,
                holder.get("held", False),
                holder.get("owner"),
                holder.get("epoch"),
                holder.get("lease_until"),
                holder.get("host"),
                holder.get("pid"),
                backlog.jobs,
                backlog.states,
                backlog.oldest,
                backlog.paused,
            )
        )
    return rows


def _by_partition(origin: str) -> tuple[str, int, str]:
    topic, _, partition = origin.rpartition("/")
    return topic, int(partition) if partition.isdigit() else -1, origin

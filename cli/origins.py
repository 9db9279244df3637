"""`sidings origins`: who holds which, what waits there; pausing one, and moving the jobs of an orphan."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ActionRefused
from .command import Because, By, Json, Reason, Yes, command, group
from .consent import ask
from .output import Table, age, at_most, counted, note, print_json, span, table
from .session import Session

if TYPE_CHECKING:
    from ..jobs.admin import OriginRow

__all__ = ["app", "in_order", "origins_table"]

app = group("Origins: who holds them and what waits there; pause, resume, move.")

Origin = Annotated[str, typer.Argument(help="topic/partition", show_default=False)]


@command(app, "list")
async def list_origins(
    session: Session,
    orphans: Annotated[bool, typer.Option("--orphans", help="Only those with jobs that nobody holds.")] = False,
    as_json: Json = False,
) -> None:
    """Origins with their holder, epoch, lease, and jobs by state; groups whose head fails."""
    rows = in_order(await session.admin().origins())
    if orphans:
        rows = [row for row in rows if row.jobs and not row.leased]
    if as_json:
        print_json(session, origins=rows)
        return
    if not rows:
        note("no orphans" if orphans else "no origins: no executor has run, and no job waits")
        return
    table(*origins_table(rows, session.now))


def in_order(origins: "Sequence[OriginRow]") -> "list[OriginRow]":
    """By topic, and by the partition's number."""
    return sorted(origins, key=lambda row: _by_partition(row.origin))


def origins_table(rows: "Sequence[OriginRow]", now: datetime) -> Table:
    """A row for each."""
    counts = ["waiting", "running", "failing", "delayed", "held"]
    columns = ["origin", "held by", "epoch", "lease", *counts, "oldest", "groups", "paused"]
    shown = [
        (
            row.origin,
            f"{row.host}:{row.pid}" if row.leased else None,
            row.epoch,
            span(now, row.lease_until) if row.leased else None,
            at_most(row.waiting),
            row.running or None,
            row.backing_off + row.blocked or None,
            at_most(row.delayed),
            at_most(row.held),
            age(row.oldest, now),
            row.blocked_groups or None,
            row.pause and f"{row.pause.paused_by}: {row.pause.reason}",
        )
        for row in rows
    ]
    return columns, shown


@command(app, "pause")
async def pause(session: Session, origin: Origin, because: Reason, by: By = None) -> None:
    """No further job of the origin starts; what runs goes on."""
    admin = session.admin(by)
    known = origin in {row.origin for row in await admin.origins() if row.epoch or row.jobs}
    await admin.pause(origin=origin, reason=because)
    typer.echo(f"the origin {origin} is paused")
    if not known:
        note(
            "no executor has held it so far, and it has no jobs: if that is a typing error, resume it; "
            "`sidings origins list` has the names"
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
    await session.take_time()
    moved = await session.admin(by).move(origin, to, reason=because, lease_seconds=lease_seconds)
    typer.echo(f"moved {counted(moved, 'job')} from {origin} to {to}")


def _by_partition(origin: str) -> tuple[str, int, str]:
    topic, _, partition = origin.rpartition("/")
    return topic, int(partition) if partition.isdecimal() else -1, origin

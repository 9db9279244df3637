"""`sidings groups`: groups that wait for their head, and what to do about them."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from .command import LAST_ID, Because, By, Json, Limit, Reason, Yes, command, group
from .consent import ask
from .job_details import pause_text
from .jobs import print_jobs, without_cursor
from .output import Table, age, at_most, counted, note, plain, print_json, table, until, words
from .session import Session

if TYPE_CHECKING:
    from ..jobs.admin import BlockedGroup

__all__ = ["app", "groups_table"]

app = group("Groups that wait for their head: list, release, skip, clear, pause, resume.")

Origin = Annotated[str, typer.Argument(help="topic/partition", show_default=False)]
Group = Annotated[str, typer.Argument(help="The group.", show_default=False)]


@command(app, "list")
async def list_groups(
    session: Session,
    origin: Annotated[str | None, typer.Option("--origin", "-o", help="Of this origin.")] = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """Groups whose head keeps the others waiting, the longest first: it backs off, is blocked, or the group is
    paused."""
    found = await session.admin().blocked_groups(origin=origin, limit=limit)
    if as_json:
        print_json(session, groups=found)
        return
    if not found:
        note(
            "no group waits for a head that fails, is blocked or paused. Others may stand still behind a job that runs "
            "for long (`sidings jobs list --state running`), whose type has a handler in no instance (see the log), or "
            "whose type or origin is paused (`sidings pauses`)"
        )
        return
    table(*groups_table(found, session.now))
    if len(found) == limit:
        note(f"these are the first {limit}; there may be more: raise --limit")


def groups_table(found: "Sequence[BlockedGroup]", now: datetime) -> Table:
    """A row for each group."""
    columns = ["origin", "group", "state", "for", "job", "type", "failures", "next in", "behind", "cause"]
    rows = [
        (
            row.origin,
            row.group,
            "paused" if row.pause else row.state,
            age(row.since, now),
            row.head,
            row.type,
            row.failures,
            until(row.next_at, now),
            at_most(row.behind),
            pause_text(row.pause) if row.pause else row.error,
        )
        for row in found
    ]
    return columns, rows


@command(app, "show")
async def show(session: Session, origin: Origin, group: Group, limit: Limit = 20, as_json: Json = False) -> None:
    """The first jobs of one group, in order, and what pauses it."""
    admin = session.admin()
    jobs = await admin.jobs(origin=origin, group=group, limit=limit)
    types = {job.type for job in jobs}
    pauses = [p for p in await admin.pauses() if p.type in types or (p.origin == origin and p.group in (None, group))]
    if as_json:
        print_json(session, origin=origin, group=group, jobs=[without_cursor(job) for job in jobs], pauses=pauses)
        return
    for pause in pauses:
        typer.echo(f"paused: {plain(pause_text(pause))}, {age(pause.paused_at, session.now)} ago")
    print_jobs(session, jobs)
    if len(jobs) == limit:
        whole = words("sidings", "jobs", "list", "--origin", origin, "--group", group)
        note(f"these are the first {limit}; {whole} lists all")


@command(app, "release")
async def release(session: Session, origin: Origin, group: Group, by: By = None, because: Because = None) -> None:
    """The head runs now, instead of when its backoff ends or a person decides."""
    head = await session.admin(by).release_group(origin, group, reason=because)
    typer.echo(f"job {head}: due now")


@command(app, "skip")
async def skip(
    session: Session,
    origin: Origin,
    group: Group,
    head: Annotated[
        int | None, typer.Option("--head", help="The job that you mean; another is not skipped.", max=LAST_ID)
    ] = None,
    by: By = None,
    because: Because = None,
) -> None:
    """The head ends as discarded, the next job follows."""
    skipped = await session.admin(by).skip_head(origin, group, head=head, reason=because)
    typer.echo(f"job {skipped}: discarded; `sidings jobs requeue {skipped}` brings it back")


@command(app, "clear")
async def clear(
    session: Session,
    origin: Origin,
    group: Group,
    running: Annotated[bool, typer.Option("--running", help="Also the job that runs.")] = False,
    by: By = None,
    because: Because = None,
    yes: Yes = False,
) -> None:
    """All waiting and delayed jobs of the group end as cancelled; held ones stay."""
    jobs = await session.admin().jobs(origin=origin, group=group, limit=10)
    if not jobs:
        note("no job of this group waits: nothing was done")
        return
    print_jobs(session, jobs)
    if len(jobs) == 10:
        note("and more")
    ask(f"cancel all waiting jobs of the group {group} of {origin}", yes=yes)
    cleared = await session.admin(by).clear_group(origin, group, reason=because, running=running)
    typer.echo(f"cancelled {counted(cleared, 'job')}")


@command(app, "pause")
async def pause(session: Session, origin: Origin, group: Group, because: Reason, by: By = None) -> None:
    """No further job of the group starts; what runs goes on."""
    admin = session.admin(by)
    await admin.pause(origin=origin, group=group, reason=because)
    typer.echo(f"the group {group} of {origin} is paused")
    if not await admin.jobs(origin=origin, group=group, limit=1):
        note("it has no jobs now: if that is a typing error, resume it")


@command(app, "resume")
async def resume(session: Session, origin: Origin, group: Group, by: By = None, because: Because = None) -> None:
    """End a pause of the group."""
    await session.admin(by).resume(origin=origin, group=group, reason=because)
    typer.echo(f"the group {group} of {origin} goes on")

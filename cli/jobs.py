"""`sidings jobs`: looking at jobs. `job_actions` adds what is done to them."""

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ActionRefused, ConfigurationError
from .command import LAST_ID, Json, Limit, command, group
from .filters import NAMES, a_state, a_time, check_group, check_words, outcome_names, state_names
from .job_details import error_text, payload_text, show_details
from .output import Table, Verbatim, age, note, print_json, table, until, words
from .session import Session

if TYPE_CHECKING:
    from ..jobs.admin import AttemptRow, JobRow

__all__ = [
    "Group",
    "Origin",
    "Since",
    "State",
    "Type",
    "app",
    "ended_filter",
    "ended_table",
    "jobs_table",
    "print_ended",
    "print_jobs",
    "without_cursor",
]

app = group("Look at jobs; cancel, discard, retry, release and requeue them.")

State = Annotated[
    str | None,
    typer.Option("--state", "-s", help="waiting, backing-off, …", autocompletion=state_names, metavar="STATE"),
]
Type = Annotated[str | None, typer.Option("--type", "-t", help="Of this type.", metavar="TYPE")]
Origin = Annotated[str | None, typer.Option("--origin", "-o", help="Of this origin.", metavar="TOPIC/PARTITION")]
Group = Annotated[str | None, typer.Option("--group", "-g", help="Of this group; needs --origin.", metavar="GROUP")]
Outcomes = Annotated[
    list[str] | None,
    typer.Option("--outcome", help="May be repeated. Default: all without success.", autocompletion=outcome_names),
]
Since = Annotated[str, typer.Option("--since", help="30m, 2h, 7d, or a time.", metavar="WHEN")]


@command(app, "list")
async def list_jobs(
    session: Session,
    state: State = None,
    type: Type = None,
    origin: Origin = None,
    group: Group = None,
    limit: Limit = 100,
    after: Annotated[str | None, typer.Option("--after", help="The next page: as the last one says.")] = None,
    as_json: Json = False,
) -> None:
    """Stored jobs: those with a place in the order first, then the delayed, then the held."""
    check_group(origin, group)
    wanted = {"state": a_state(state), "type": type, "origin": origin, "group": group}
    try:
        jobs = await session.admin().jobs(**wanted, limit=limit, after=after)
    except ActionRefused as error:
        if not str(error).startswith("after="):
            raise
        raise ConfigurationError(f"--after {after!r}: give what the page before said, with the same filter") from None
    more = jobs[-1].cursor if len(jobs) == limit else None
    if as_json:
        print_json(session, jobs=[without_cursor(job) for job in jobs], next=more)
        return
    if jobs or not (type or origin):
        print_jobs(session, jobs)
    else:
        note(f"no job fits: {NAMES}")
    if more:
        note(f"there may be more: add --after {words(more)}")


@command(app, "show")
async def show(
    session: Session, id: Annotated[int, typer.Argument(help="Its number.", max=LAST_ID)], as_json: Json = False
) -> None:
    """One job, also one that has ended: payload, attempts, what was done to it, what keeps it from starting."""
    details = await session.admin().show(id)
    if as_json:
        payload = None if details.payload is None else Verbatim(payload_text(details.payload))
        row = None if details.row is None else without_cursor(details.row)
        rest = {"attempts": details.attempts, "actions": details.actions, "pauses": details.pauses}
        print_json(session, id=id, job=row, payload=payload, headers=details.headers, **rest)
    else:
        show_details(session, details)


@command(app, "counts")
async def counts(
    session: Session,
    by: Annotated[list[str] | None, typer.Option("--by", help="state, type, origin; may be repeated.")] = None,
    type: Type = None,
    origin: Origin = None,
    as_json: Json = False,
) -> None:
    """How many jobs there are, by state and type, or as --by says. Reads all of them: 0.3 s for a million."""
    check_words("--by", by, ["state", "type", "origin"])
    wanted: Any = by or ["state", "type"]
    found = await session.admin().counts(by=wanted, origin=origin, type=type)
    names = [name for name in ("type", "state", "origin") if name in wanted]
    if as_json:
        rows = [{name: getattr(row, name) for name in (*names, "jobs", "oldest")} for row in found]
        print_json(session, counts=rows)
        return
    shown = [[*(getattr(row, name) for name in names), row.jobs, age(row.oldest, session.now)] for row in found]
    table([*names, "jobs", "oldest"], shown) if shown else note("no jobs")


@command(app, "ended")
async def ended(
    session: Session,
    outcome: Outcomes = None,
    since: Since = "24h",
    type: Type = None,
    origin: Origin = None,
    limit: Limit = 100,
    before: Annotated[str | None, typer.Option("--before", help="The next page: as the last one says.")] = None,
    as_json: Json = False,
) -> None:
    """Jobs that ended without success, the newest first: what `requeue` can bring back."""
    rows = await session.admin().ended(
        **ended_filter(session, outcome, since),
        before=a_time("--before", before, session.now),
        type=type,
        origin=origin,
        limit=limit,
    )
    more = rows[-1].finished_at.isoformat() if len(rows) >= limit else None
    if as_json:
        print_json(session, jobs=rows, next=more)
        return
    print_ended(session, rows)
    if more:
        note(f"there may be more: add --before '{more}'")


def ended_filter(session: Session, outcome: Sequence[str] | None, since: str) -> dict[str, Any]:
    """What the options of a command say, as `Admin.ended` and `Admin.requeueable` take it."""
    check_words("--outcome", outcome, [*outcome_names(), "succeeded"])
    return {"outcomes": outcome or outcome_names(), "since": a_time("--since", since, session.now)}


def print_jobs(session: Session, jobs: "Sequence[JobRow]") -> None:
    """A table of jobs."""
    table(*jobs_table(jobs, session.now)) if jobs else note("no jobs")


def jobs_table(jobs: "Sequence[JobRow]", now: datetime) -> Table:
    """A row for each."""
    columns = ["id", "type", "origin", "group", "state", "attempt", "age", "next in", "cause"]
    rows = [
        (j.id, j.type, j.origin, j.group, j.state, j.attempt, age(j.enqueued_at, now), _next(j, now), _cause(j))
        for j in jobs
    ]
    return columns, rows


def _next(job: "JobRow", now: datetime) -> str | None:
    return None if job.held else until(job.run_at, now)


def _cause(job: "JobRow") -> str | None:
    return ": ".join(text for text in (job.held, job.error) if text) or None


def print_ended(session: Session, rows: "Sequence[AttemptRow]") -> None:
    """A table of jobs that have ended."""
    table(*ended_table(rows, session.now)) if rows else note("no jobs")


def ended_table(rows: "Sequence[AttemptRow]", now: datetime) -> Table:
    """A row for each."""
    columns = ["id", "type", "origin", "group", "outcome", "attempt", "ended ago", "cause"]
    shown = [
        (r.job_id, r.type, r.origin, r.group, r.outcome, r.attempt, age(r.finished_at, now), error_text(r))
        for r in rows
    ]
    return columns, shown


def without_cursor(job: "JobRow") -> dict[str, object]:
    """A job as JSON shows it: where the next page begins is said once, in `next`."""
    return {field.name: getattr(job, field.name) for field in fields(job) if field.name != "cursor"}

"""`sidings jobs`: look at jobs, cancel, discard, retry, release and requeue them."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from ..errors import AdministrationError, Busy, ConfigurationError
from ..jobs.admin import AttemptRow, JobRow
from .command import Because, By, Json, Limit, Yes, command, fail, group
from .consent import ask
from .filters import a_state, a_time, outcome_names, state_names
from .job_details import show_details
from .output import ago, note, print_json, table, until
from .session import Session

__all__ = ["app", "print_jobs"]

app = group("Look at jobs; cancel, discard, retry, release and requeue them.")

Ids = Annotated[list[int] | None, typer.Argument(help="Their numbers; or give a filter.", show_default=False)]
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
    jobs = await session.admin().jobs(
        state=a_state(state), type=type, origin=origin, group=group, limit=limit, after=after
    )
    more = jobs[-1].cursor if len(jobs) == limit else None
    if as_json:
        print_json(session.now, jobs=[_without_cursor(job) for job in jobs], next=more)
        return
    print_jobs(session, jobs)
    if more:
        note(f"there may be more: add --after '{more}'")


@command(app, "show")
async def show(session: Session, id: Annotated[int, typer.Argument(help="Its number.")], as_json: Json = False) -> None:
    """One job, also one that has ended: payload, attempts, what was done to it, what keeps it from starting."""
    details = await session.admin().show(id)
    if as_json:
        payload = None if details.payload is None else json.loads(details.payload)
        row = None if details.row is None else _without_cursor(details.row)
        rest = {"attempts": details.attempts, "actions": details.actions, "pauses": details.pauses}
        print_json(session.now, id=id, job=row, payload=payload, headers=details.headers, **rest)
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
    wanted: Any = by or ["state", "type"]
    found = await session.admin().counts(by=wanted, origin=origin, type=type)
    names = [name for name in ("type", "state", "origin") if name in wanted]
    if as_json:
        rows = [{name: getattr(row, name) for name in (*names, "jobs", "oldest")} for row in found]
        print_json(session.now, counts=rows)
        return
    shown = [[*(getattr(row, name) for name in names), row.jobs, ago(row.oldest, session.now)] for row in found]
    table([*names, "jobs", "oldest"], shown)


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
    rows = await _ended(session, outcome, since, type, origin, limit, before)
    more = rows[-1].finished_at.isoformat() if len(rows) == limit else None
    if as_json:
        print_json(session.now, jobs=rows, next=more)
        return
    _print_ended(session, rows)
    if more:
        note(f"there may be more: add --before '{more}'")


@command(app, "cancel")
async def cancel(
    session: Session,
    ids: Ids = None,
    state: State = None,
    type: Type = None,
    origin: Origin = None,
    group: Group = None,
    limit: Limit = 100,
    by: By = None,
    because: Because = None,
    yes: Yes = False,
) -> None:
    """End jobs as cancelled, in whatever state they are; a running handler is cancelled within a second."""
    chosen = await _choose(session, "cancel", ids, state, type, origin, group, limit, yes)
    admin = session.admin(by)
    await _each(chosen, "cancelled", lambda job: admin.cancel(job, reason=because))


@command(app, "discard")
async def discard(
    session: Session,
    ids: Ids = None,
    state: State = None,
    type: Type = None,
    origin: Origin = None,
    group: Group = None,
    limit: Limit = 100,
    by: By = None,
    because: Because = None,
    yes: Yes = False,
) -> None:
    """The same as cancel, but they end as discarded."""
    chosen = await _choose(session, "discard", ids, state, type, origin, group, limit, yes)
    admin = session.admin(by)
    await _each(chosen, "discarded", lambda job: admin.discard(job, reason=because))


@command(app, "retry")
async def retry(
    session: Session,
    ids: Ids = None,
    state: State = None,
    type: Type = None,
    origin: Origin = None,
    group: Group = None,
    limit: Limit = 100,
    by: By = None,
    because: Because = None,
    yes: Yes = False,
) -> None:
    """Let jobs that are delayed, back off or are blocked run now; they keep their place in their group."""
    chosen = await _choose(session, "retry", ids, state, type, origin, group, limit, yes)
    admin = session.admin(by)
    await _each(chosen, "due now", lambda job: admin.retry_now(job, reason=because))


@command(app, "release")
async def release(
    session: Session,
    ids: Ids = None,
    type: Type = None,
    origin: Origin = None,
    group: Group = None,
    limit: Limit = 100,
    by: By = None,
    because: Because = None,
    yes: Yes = False,
) -> None:
    """Let held jobs run, at the end of their groups' order, failures and losses forgotten."""
    narrowed = "held" if type or origin else None
    chosen = await _choose(session, "release", ids, narrowed, type, origin, group, limit, yes)
    admin = session.admin(by)
    await _each(chosen, "released", lambda job: admin.release(job, reason=because))


@command(app, "requeue")
async def requeue(
    session: Session,
    ids: Ids = None,
    outcome: Outcomes = None,
    since: Since = "24h",
    type: Type = None,
    origin: Origin = None,
    limit: Limit = 100,
    force: Annotated[bool, typer.Option("--force", help="Also those that were requeued before.")] = False,
    by: By = None,
    because: Because = None,
    yes: Yes = False,
) -> None:
    """Bring back jobs that were discarded, cancelled or superseded, as new jobs at the end of their groups' order."""
    filtered = bool(outcome or type or origin)
    _check_choice("requeue", ids, filtered, "--outcome, --type or --origin")
    if not ids:
        rows = await _ended(session, outcome, since, type, origin, limit, None)
        if not rows:
            fail(f"no job that ended since {since} fits: nothing was done")
        _print_ended(session, rows)
        _say_limit(len(rows), limit)
        ids = [row.job_id for row in reversed(rows)]  # in the order in which they ended
    if filtered or len(ids) > 1:
        ask(f"requeue {_jobs(len(ids))}", yes=yes)
    admin = session.admin(by)
    await _each(ids, "requeued as", lambda job: admin.requeue(job, reason=because, force=force))


async def _choose(
    session: Session,
    verb: str,
    ids: Sequence[int] | None,
    state: str | None,
    type: str | None,
    origin: str | None,
    group: str | None,
    limit: int,
    yes: bool,
) -> Sequence[int]:
    """The jobs that are named, or that fit the filter; more than one are shown, and it is asked."""
    filtered = bool(state or type or origin or group)
    _check_choice(verb, ids, filtered, "--state, --type, --origin or --group")
    if ids and len(ids) == 1:
        return ids
    if ids:
        note(f"jobs {', '.join(map(str, ids))}")
    else:
        admin = session.admin()
        jobs = await admin.jobs(state=a_state(state), type=type, origin=origin, group=group, limit=limit)
        if not jobs:
            fail("no job fits: nothing was done")
        print_jobs(session, jobs)
        _say_limit(len(jobs), limit)
        ids = [job.id for job in jobs]
    ask(f"{verb} {_jobs(len(ids))}", yes=yes)
    return ids


def _check_choice(verb: str, ids: Sequence[int] | None, filtered: bool, filters: str) -> None:
    if bool(ids) == filtered:
        both = "not both numbers and a filter" if ids else f"numbers of jobs, or {filters}"
        raise ConfigurationError(f"jobs {verb}: say which jobs: {both}")


async def _each(ids: Sequence[int], done: str, act: Callable[[int], Awaitable[object]]) -> None:
    """Do it to one after the other, each in a transaction of its own, and say what became of each."""
    refused = 0
    for id in ids:
        try:
            found = await act(id)
        except AdministrationError as error:
            refused += 1
            note(f"error: job {id}: {error}" if isinstance(error, Busy) else f"error: {error}")
        else:
            was = "" if found is None else f" {found}" if done.endswith(" as") else f" (was {found})"
            typer.echo(f"job {id}: {done}{was}")
    if refused:
        fail(f"{refused} of {_jobs(len(ids))} were left as they are")


async def _ended(
    session: Session,
    outcome: Sequence[str] | None,
    since: str,
    type: str | None,
    origin: str | None,
    limit: int,
    before: str | None,
) -> list[AttemptRow]:
    return await session.admin().ended(
        outcomes=outcome or outcome_names(),
        since=a_time("--since", since, session.now),
        before=a_time("--before", before, session.now),
        type=type,
        origin=origin,
        limit=limit,
    )


def print_jobs(session: Session, jobs: Sequence[JobRow]) -> None:
    """A table of jobs."""
    now = session.now
    columns = ["id", "type", "origin", "group", "state", "attempt", "age", "next", "cause"]
    rows = [
        (j.id, j.type, j.origin, j.group, j.state, j.attempt, ago(j.enqueued_at, now), until(j.run_at, now), _cause(j))
        for j in jobs
    ]
    table(columns, rows) if rows else note("no jobs")


def _cause(job: JobRow) -> str | None:
    return job.held if job.error is None or job.held == job.error else job.error


def _print_ended(session: Session, rows: Sequence[AttemptRow]) -> None:
    columns = ["id", "type", "origin", "group", "outcome", "attempt", "ended", "cause"]
    shown = [
        (r.job_id, r.type, r.origin, r.group, r.outcome, r.attempt, ago(r.finished_at, session.now), _error(r))
        for r in rows
    ]
    table(columns, shown) if shown else note("no jobs")


def _error(row: AttemptRow) -> str | None:
    return ": ".join(text for text in (row.error_class, row.error_message) if text) or None


def _without_cursor(job: JobRow) -> dict[str, object]:
    return {field.name: getattr(job, field.name) for field in fields(job) if field.name != "cursor"}


def _say_limit(found: int, limit: int) -> None:
    if found == limit:
        note(f"these are the first {limit}; there may be more: raise --limit, or do it again")


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"

"""`sidings jobs`: cancel, discard, retry, release and requeue jobs, by number or by filter."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import AdministrationError, Busy, ConfigurationError
from .command import LAST_ID, Because, By, Limit, Yes, command, fail, once
from .consent import ask
from .filters import NAMES, a_state, a_time, check_group, outcome_names
from .jobs import Group, Origin, Since, State, Type, app, ended_filter, print_ended, print_jobs
from .output import counted, note
from .session import Session

if TYPE_CHECKING:
    from ..jobs.admin import JobRow

__all__ = ["app"]

_COUNTED = 10_000  # of those that are left out
Action = Literal["cancel", "discard", "retry now", "release"]
# Where an action is done to jobs of some states only: a filter that named others would be filled with what is refused.
_STATES: dict[str, tuple[str, ...]] = {"retry": ("backing off", "blocked", "delayed"), "release": ("held",)}
Ids = Annotated[
    list[int] | None,
    typer.Argument(help="Their numbers; or give a filter.", show_default=False, max=LAST_ID, callback=once),
]


def _action(verb: str, done: str, text: str, action: Action) -> None:
    """Declare a command that does the same to each of the jobs that are named, or that fit a filter."""

    async def run(
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
        chosen = await _choose(session, verb, ids, state, type, origin, group, limit, yes)
        refused = 0
        async for acted in session.admin(by).each(action, chosen, reason=because, state=a_state(state)):
            if acted.error is None:
                typer.echo(f"job {acted.job_id}: {done}" + ("" if verb == "release" else f" (was {acted.state})"))
            else:
                _say_refused(acted.job_id, acted.error, len(chosen))
                refused += 1
        _end(refused, len(chosen))

    run.__doc__ = text
    command(app, verb)(run)


_action(
    "cancel",
    "cancelled",
    "End jobs as cancelled, in whatever state they are; a running handler is cancelled within a second.",
    "cancel",
)
_action(
    "discard",
    "discarded",
    "The same as cancel, but they end as discarded.",
    "discard",
)
_action(
    "retry",
    "due now",
    "Let jobs that are delayed, back off or are blocked run now; they keep their place in their group.",
    "retry now",
)
_action(
    "release",
    "released",
    "Let held jobs run, at the end of their groups' order, failures and losses forgotten.",
    "release",
)


@command(app, "requeue")
async def requeue(
    session: Session,
    ids: Ids = None,
    outcome: Annotated[
        list[str] | None,
        typer.Option(
            "--outcome",
            help="followed, cancelled, superseded; may be repeated. Default: discarded.",
            autocompletion=outcome_names,
        ),
    ] = None,
    since: Since = "24h",
    before: Annotated[
        str | None, typer.Option("--before", help="Only what ended before: as --since.", metavar="WHEN")
    ] = None,
    type: Type = None,
    origin: Origin = None,
    limit: Limit = 100,
    force: Annotated[bool, typer.Option("--force", help="Also those requeued before, or delivered again.")] = False,
    declined: Annotated[bool, typer.Option("--declined", help="Also those that handlers ended by Discard.")] = False,
    by: By = None,
    because: Because = None,
    yes: Yes = False,
) -> None:
    """Bring back jobs that have ended without success, as new jobs at the end of their groups' order.

    A filter takes those that were discarded; those that were cancelled or superseded, or that another job has followed,
    only where --outcome says so, and those that their handlers have ended by Discard only with --declined.
    """
    filtered = bool(outcome or type or origin)
    _check_choice("requeue", ids, filtered, "--outcome, --type or --origin")
    if ids and before:
        raise ConfigurationError("jobs requeue: --before belongs to a filter: leave it out, or the numbers")
    ends: dict[int, datetime] = {}
    if "succeeded" in (outcome or ()):
        raise ConfigurationError(
            "jobs requeue --outcome succeeded: what succeeded leaves no payload: enqueue anew, or reset the consumer"
        )
    if not ids:
        until = a_time("--before", before, session.now)
        chosen = ended_filter(session, outcome or ["discarded"], since)
        fitting = partial(session.admin().requeueable, **chosen, before=until, type=type, origin=origin, force=force)
        rows = await fitting(limit=limit, declined=declined)
        if not declined:
            _say_declined(len(await fitting(limit=_COUNTED, declined="only")))
        if not rows:
            ended = f"{' or '.join(chosen['outcomes'])} since {since}" + (f" and before {before}" if before else "")
            fail(f"no job was {ended} that fits and was neither requeued nor delivered again: nothing was done")
        print_ended(session, rows)
        again, end = f" with --since {chosen['since'].isoformat(timespec='seconds')}", until or session.now
        if all(row.finished_at < end for row in rows):  # else what ended while the clock was ahead would be left behind
            again += f" --before {end.isoformat()}"
        _say_limit(len(rows), limit, again)
        ends = {row.job_id: row.finished_at for row in rows}
        ids = list(ends)  # in the order in which they were enqueued
    if filtered or len(ids) > 1:
        ask(f"requeue {counted(len(ids), 'job')}", yes=yes)
    admin, refused = session.admin(by), 0
    for number, id in enumerate(ids):  # each in a transaction of its own: that delays no executor
        try:
            new = await admin.requeue(id, reason=because, force=force, finished_at=ends.get(id))
            typer.echo(f"job {id}: requeued as {new}")
        except AdministrationError as error:
            _say_refused(id, error, len(ids))
            refused += 1
            if isinstance(error, Busy):  # those behind it in its group would come before it
                refused += len(ids) - number - 1
                break
    _end(refused, len(ids))


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
    """The jobs that are named, or that fit the filter; unless it is a single number they are shown, and it is asked."""
    filtered = bool(state or type or origin or group)
    _check_choice(verb, ids, filtered, "--state, --type, --origin or --group")
    check_group(origin, group)
    if ids and len(ids) == 1:
        return ids
    if ids:
        note(f"jobs {', '.join(map(str, ids))}")
    else:
        admin, jobs = session.admin(), list["JobRow"]()
        for one in _states(verb, a_state(state)):
            if left := limit - len(jobs):
                jobs += await admin.jobs(state=one, type=type, origin=origin, group=group, limit=left)
        if not jobs:
            fail(f"no job fits: nothing was done; {NAMES}")
        print_jobs(session, jobs)
        _say_limit(len(jobs), limit)
        ids = [job.id for job in jobs]
    ask(f"{verb} {counted(len(ids), 'job')}", yes=yes)
    return ids


def _states(verb: str, state: str | None) -> Sequence[str | None]:
    """Those of which a filter takes jobs, one after the other; None: of all."""
    fitting = _STATES.get(verb, ())
    if state is None:
        return fitting or (None,)
    if fitting and state not in fitting:
        raise ConfigurationError(f"jobs {verb}: only {' or '.join(fitting)} jobs: give such a --state, or leave it out")
    return (state,)


def _check_choice(verb: str, ids: Sequence[int] | None, filtered: bool, filters: str) -> None:
    if bool(ids) == filtered:
        both = "not both numbers and a filter" if ids else f"numbers of jobs, or {filters}"
        raise ConfigurationError(f"jobs {verb}: say which jobs: {both}")


def _say_refused(id: int, error: AdministrationError, of: int) -> None:
    text = str(error).replace("force => true", "--force")
    if f"job {id}" not in text:
        text = f"job {id}: {text}"
    if of == 1:
        fail(text)
    note(f"error: {text}")


def _end(refused: int, of: int) -> None:
    if refused:
        fail(f"{refused} of {of} jobs were left as they are")


def _say_declined(found: int) -> None:
    if found:
        more = " or more" if found == _COUNTED else ""
        note(
            f"left out: {counted(found, 'job')}{more} that handlers have ended by Discard; --declined brings them, too"
        )


def _say_limit(found: int, limit: int, so: str = "") -> None:
    if found == limit:
        note(f"these are the first {limit}; there may be more: raise --limit, or do it again{so}")

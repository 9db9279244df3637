"""`sidings types`: how many jobs each type has, and pausing one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import Busy, PostgresUnavailable
from .command import Because, By, Json, Reason, command, group
from .output import Table, age, note, print_json, table
from .session import Session

if TYPE_CHECKING:
    from ..jobs.admin import JobCount, JobState, PauseRow

__all__ = ["Backlog", "app", "backlogs", "print_types", "types_table"]

app = group("Types of jobs: list, pause, resume.")

Type = Annotated[str, typer.Argument(help="The type.", show_default=False)]


@command(app, "list")
async def list_types(session: Session, as_json: Json = False) -> None:
    """Types that have jobs or are paused, with how many jobs are in which state. Reads all jobs."""
    admin = session.admin()
    types = backlogs(await admin.counts(by=["state", "type"]), await admin.pauses())
    if as_json:
        print_json(session, types=types)
    else:
        print_types(session, types)


@command(app, "pause")
async def pause(session: Session, type: Type, because: Reason, by: By = None) -> None:
    """No further job of the type starts; what runs goes on. Groups wait whose head is of the type."""
    admin = session.admin(by)
    await admin.pause(type=type, reason=because)
    typer.echo(f"the type {type} is paused")
    try:
        if await admin.jobs(type=type, limit=1):
            return
        doubt = "it has no jobs now"
    except (Busy, PostgresUnavailable):  # what it says of changes is not meant of the pause, which stands
        doubt = "whether it has jobs could not be looked up"
    note(f"{doubt}: if its name is a typing error, resume it; `sidings types list` has the names")


@command(app, "resume")
async def resume(session: Session, type: Type, by: By = None, because: Because = None) -> None:
    """End a pause of the type."""
    await session.admin(by).resume(type=type, reason=because)
    typer.echo(f"the type {type} goes on")


@dataclass(frozen=True, slots=True)
class Backlog:
    """The jobs of a type. oldest: when the oldest was enqueued. paused: by whom and why."""

    name: str
    states: "Mapping[JobState, int]"
    oldest: datetime | None
    paused: str | None

    @property
    def jobs(self) -> int:
        return sum(self.states.values())


def backlogs(counts: Sequence["JobCount"], pauses: Sequence["PauseRow"]) -> list[Backlog]:
    """One for each type that has jobs or is paused as a whole. counts: by state and type."""
    from ..jobs.admin import JobState

    paused = {p.type: f"{p.paused_by}: {p.reason}" for p in pauses if p.type and p.group is None}
    of: dict[str, list[JobCount]] = {name: [] for name in paused}
    for count in counts:
        if count.type is not None:
            of.setdefault(count.type, []).append(count)
    out: list[Backlog] = []
    for name, mine in sorted(of.items()):
        states = {state: sum(c.jobs for c in mine if c.state is state) for state in JobState}
        out.append(Backlog(name, states, min((c.oldest for c in mine), default=None), paused.get(name)))
    return out


def print_types(session: Session, types: Sequence[Backlog]) -> None:
    """A table of them."""
    table(*types_table(types, session.now)) if types else note("no jobs")


def types_table(types: Sequence[Backlog], now: datetime) -> Table:
    """A row for each. Zeroes are left out: what matters stands out."""
    from ..jobs.admin import JobState

    columns = ["type", *JobState, "oldest", "paused"]
    rows = [[t.name, *(t.states[state] or None for state in JobState), age(t.oldest, now), t.paused] for t in types]
    return columns, rows

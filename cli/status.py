"""`sidings status`: everything that matters on one screen, and whether something needs a person."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from .command import Code, Json, command
from .job_details import pause_text
from .job_types import Backlog, backlogs, print_types
from .outbox import OutboxTopic, print_topics, topics
from .output import Table, age, counted, note, plain, print_json, span, table
from .session import Session

if TYPE_CHECKING:
    from ..jobs.admin import ExecutorRow, Orphan, PauseRow

__all__ = ["Overview", "add_to", "executors_table", "look"]

_FEW = 5  # names in one line


def add_to(app: typer.Typer) -> None:
    """Declare it."""
    command(app, "status")(status)


@dataclass(frozen=True, slots=True)
class Overview:
    """What `status` shows. problems: what needs a person, each with the command that goes on from there."""

    service: str
    schema: str
    version: int
    executors: "list[ExecutorRow]"
    origins_held: int
    origins_free: int
    types: list[Backlog]
    blocked_groups: int
    orphans: "list[Orphan]"
    pauses: "list[PauseRow]"
    outbox: list[OutboxTopic]
    relays: int
    relays_without_kafka: int
    problems: list[str]

    @property
    def holders(self) -> str:
        """How many executors hold how many origins, as a sentence."""
        free = f"; held by nobody: {self.origins_free}" if self.origins_free else ""
        return f"held by {counted(len(self.executors), 'executor')}: {counted(self.origins_held, 'origin')}{free}"


async def status(
    session: Session,
    watch: Annotated[
        float | None, typer.Option("--watch", "-w", help="Again every so many seconds, until Ctrl-C.", min=0.2)
    ] = None,
    as_json: Json = False,
) -> None:
    """The schema, executors, backlog, what fails or waits for a person, the outbox, as Postgres has it. Exit code 4:
    something needs a person. What instances alone know, as partitions of a consumer that stand still, says /health."""
    import asyncio

    while True:
        overview = await look(session)
        if watch is not None and sys.stdout.isatty():
            _clear()
            if session.standby:
                note(session.standby)
        _print(session, overview, as_json)
        if watch is None:
            raise typer.Exit(Code.ATTENTION if overview.problems else Code.DONE)
        await asyncio.sleep(watch)
        await session.look_at_clock()


def _clear() -> None:
    from rich.console import Console

    Console().clear()


async def look(session: Session) -> Overview:
    """Reads all jobs and all of the outbox."""
    admin = session.admin()
    executors = await admin.executors()
    origins = await admin.origins()
    held = sum(origin.leased for origin in origins)
    pauses = await admin.pauses()
    types = backlogs(await admin.counts(by=["state", "type"]), pauses)
    orphans = await admin.orphans()
    outbox = await topics(session)
    [relays] = await session.rows("alive_relays")
    applied = await session.rows("applied_migrations")
    overview = Overview(
        session.service,
        session.settings.schema_name,
        applied[-1]["version"],
        executors,
        held,
        len(origins) - held,
        types,
        sum(origin.blocked_groups for origin in origins),
        orphans,
        pauses,
        outbox,
        relays["relays"],
        relays["cut_off"],
        [],
    )
    overview.problems.extend(_problems(overview))
    return overview


def _problems(overview: Overview) -> list[str]:
    from ..jobs.admin import JobState

    sums = {state: sum(type.states[state] for type in overview.types) for state in JobState}
    out: list[str] = []
    if not overview.origins_held and overview.origins_free:
        out.append("no executor holds an origin: does the service run? If so, its /health says what it lacks")
    if overview.orphans:
        names = _some([orphan.origin for orphan in overview.orphans])
        out.append(f"jobs wait in origins that nobody holds: {names}: sidings origins list --orphans")
    if count := sums[JobState.BLOCKED]:
        out.append(f"{counted(count, 'group')} blocked until a person decides: sidings groups list")
    if count := sums[JobState.HELD]:
        out.append(f"{counted(count, 'job')} held: sidings jobs list --state held")
    if waiting := sum(topic.waiting for topic in overview.outbox if not overview.relays):
        why = "no relay reaches Kafka" if overview.relays_without_kafka else "no relay is alive"
        out.append(f"{counted(waiting, 'message')} to send, and {why}: sidings outbox list")
    if parked := sum(topic.parked for topic in overview.outbox):
        out.append(f"{counted(parked, 'message')} parked: sidings outbox parked")
    if failing := [topic.topic for topic in overview.outbox if topic.failing]:
        out.append(f"the outbox cannot send to {_some(failing)}: sidings outbox list")
    return out


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return plain(", ".join(names[:_FEW])) + more


def _print(session: Session, overview: Overview, as_json: bool) -> None:
    now = session.now
    if as_json:
        print_json(session, **{name: getattr(overview, name) for name in Overview.__slots__})
        return
    typer.echo(f"service {overview.service}, schema {overview.schema} at {overview.version:04}, {session.where}")
    typer.echo(overview.holders)
    if overview.executors:
        table(*executors_table(overview.executors, now), title="executors")
    if overview.types:
        print_types(session, overview.types)
    else:
        typer.echo("no jobs")
    if overview.blocked_groups:
        typer.echo(f"{counted(overview.blocked_groups, 'group')} behind a head that fails: sidings groups list")
    for pause in overview.pauses:
        typer.echo(f"paused: {plain(pause_text(pause))}, {age(pause.paused_at, now)} ago")
    if overview.outbox:
        print_topics(session, overview.outbox)
    for problem in overview.problems:
        typer.echo(f"! {plain(problem)}")


def executors_table(executors: "Sequence[ExecutorRow]", now: datetime) -> Table:
    """A row for each."""
    rows = [
        (f"{e.host}:{e.pid}", e.origins, e.running or None, span(now, e.lease_until), age(e.started_at, now))
        for e in executors
    ]
    return ["executor", "origins", "running", "lease", "up"], rows

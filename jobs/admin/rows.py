"""What administration shows: frozen values. Times are aware datetimes by the database's clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from ...errors import AdministrationError
from ..outcome import OutcomeName

__all__ = [
    "ActedOn",
    "AttemptRow",
    "AuditRow",
    "BlockedGroup",
    "ExecutorRow",
    "JobCount",
    "JobDetails",
    "JobRow",
    "JobState",
    "OriginRow",
    "Orphan",
    "PauseRow",
]


class JobState(StrEnum):
    """The state of a stored job (docs/job-states.md). One that its executor is about to start counts as running."""

    WAITING = "waiting"
    BACKING_OFF = "backing off"  # its group waits until its next attempt
    BLOCKED = "blocked"  # its group waits for a person
    RUNNING = "running"
    DELAYED = "delayed"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class JobRow:
    """A stored job without its payload.

    Attributes:
        run_at: When it becomes due. None: at once, or never (blocked).
        position: Its place in its origin's order; None while it is delayed or held.
        held: Why a person has to decide.
        error: The last error, 'Class: message'.
        cursor: Where the list goes on after it.
    """

    id: int
    type: str
    origin: str
    group: str | None
    state: JobState
    priority: int
    attempt: int
    failures: int
    losses: int
    enqueued_at: datetime
    run_at: datetime | None
    position: int | None
    unique_key: str | None
    held: str | None
    error: str | None
    cursor: str = ""


@dataclass(frozen=True, slots=True)
class JobCount:
    """How many jobs there are. What was not asked for is None.

    Attributes:
        oldest: When the oldest was enqueued.
    """

    state: JobState | None
    type: str | None
    origin: str | None
    jobs: int
    oldest: datetime


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One row of the history. started_at, executor and epoch are None where the job did not run."""

    job_id: int
    type: str
    origin: str
    group: str | None
    attempt: int
    outcome: OutcomeName
    enqueued_at: datetime
    due_at: datetime | None
    started_at: datetime | None
    finished_at: datetime
    executor: UUID | None
    epoch: int | None
    error_class: str | None
    error_message: str | None
    correlation_id: str | None


@dataclass(frozen=True, slots=True)
class ActedOn:
    """What became of one of many jobs.

    Attributes:
        state: In which it was found. None: there is no such job, or somebody else is changing it.
        error: Why nothing was done to it. None: it was done.
    """

    job_id: int
    state: JobState | None
    error: AdministrationError | None


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One action of a person or a program, as in the table ``audit``."""

    id: int
    at: datetime
    actor: str
    action: str
    target: Mapping[str, object]
    reason: str | None
    detail: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class PauseRow:
    """What is paused: a type, an origin, or a group of an origin, of which no job starts; or the reading of a topic."""

    type: str | None
    origin: str | None
    group: str | None
    topic: str | None
    paused_by: str
    reason: str
    paused_at: datetime


@dataclass(frozen=True, slots=True)
class JobDetails:
    """All that is known of one job.

    Attributes:
        row: None if it has ended.
        payload: As JSON text; None if it has ended well.
        attempts: Oldest first.
        actions: Oldest first.
        pauses: Those that keep it from starting.
    """

    id: int
    row: JobRow | None
    payload: str | None
    headers: Mapping[str, str]
    attempts: tuple[AttemptRow, ...]
    actions: tuple[AuditRow, ...]
    pauses: tuple[PauseRow, ...]


@dataclass(frozen=True, slots=True)
class BlockedGroup:
    """A group that waits for its head: it backs off, is blocked, or the group is paused.

    Attributes:
        since: The head's first failure, or the pause.
        head: Id of the job. Where only jobs of policy `parallel` wait in a paused group: of the first of them, which is
            nobody's head, so `release_group` and `skip_head` find none.
        next_at: The head's next attempt. None: no time is set.
        error: The cause, 'Class: message'.
        behind: Jobs that wait behind it; at most 10,000 are counted.
    """

    origin: str
    group: str
    since: datetime
    head: int
    type: str
    state: JobState
    failures: int
    next_at: datetime | None
    error: str | None
    behind: int
    pause: PauseRow | None


@dataclass(frozen=True, slots=True)
class OriginRow:
    """An origin with who holds it, or held it last, and what is there.

    The counts are of jobs, by `JobState`. Of those that wait, are delayed or held at most 10,000 are counted.

    Attributes:
        leased: Somebody holds it: the lease has not run out.
        owner: Of the lease, as are `host` and `pid`, also when it has run out. None where nobody has held the origin,
            or where it was given back.
        epoch: 0 or None where nobody has held it.
        oldest: When the first in its order was enqueued.
        blocked_groups: Those whose head backs off or is blocked.
        pause: Of the whole origin.
    """

    origin: str
    leased: bool
    owner: UUID | None
    host: str | None
    pid: int | None
    epoch: int | None
    lease_until: datetime | None
    waiting: int
    running: int
    backing_off: int
    blocked: int
    delayed: int
    held: int
    oldest: datetime | None
    blocked_groups: int
    pause: PauseRow | None

    @property
    def jobs(self) -> int:
        """All that are counted."""
        return self.waiting + self.running + self.backing_off + self.blocked + self.delayed + self.held


@dataclass(frozen=True, slots=True)
class ExecutorRow:
    """An executor that holds origins. Of one that holds none nobody knows whether it lives.

    Attributes:
        origins: How many.
        lease_until: The first of its leases to end, if it renews none.
        running: Jobs that it runs or is about to run.
    """

    id: UUID
    host: str
    pid: int
    started_at: datetime
    origins: int
    lease_until: datetime
    running: int


@dataclass(frozen=True, slots=True)
class Orphan:
    """An origin with jobs that nobody holds.

    Attributes:
        former_owner: Of a lease that ran out, as are `lease_until`, `host` and `pid`.
    """

    origin: str
    former_owner: UUID | None
    lease_until: datetime | None
    host: str | None
    pid: int | None
    waiting: int
    delayed: int
    held: int
    oldest: datetime

"""What administration shows, out of the rows that its statements return."""

import json

import asyncpg

from ..outcome import OutcomeName
from .rows import AttemptRow, AuditRow, BlockedGroup, JobCount, JobRow, JobState, OriginRow, PauseRow

__all__ = ["attempt_row", "audit_row", "blocked_group", "job_count", "job_row", "origin_row", "pause_row"]


def job_row(row: asyncpg.Record, cursor: str = "") -> JobRow:
    """A stored job; of a list, with its cursor there."""
    return JobRow(
        id=row["id"],
        type=row["type"],
        origin=row["origin"],
        group=row["group"],
        state=JobState(row["state"]),
        priority=row["priority"],
        attempt=row["attempt"],
        failures=row["failures"],
        losses=row["losses"],
        enqueued_at=row["enqueued_at"],
        run_at=row["run_at"],
        position=row["position"],
        unique_key=row["unique_key"],
        held=row["held"],
        error=row["error"],
        cursor=cursor,
    )


def job_count(row: asyncpg.Record) -> JobCount:
    """What was not counted by is None."""
    return JobCount(
        state=None if row["state"] is None else JobState(row["state"]),
        type=row["type"],
        origin=row["origin"],
        jobs=row["jobs"],
        oldest=row["oldest"],
    )


def attempt_row(row: asyncpg.Record) -> AttemptRow:
    """A row of the history."""
    return AttemptRow(
        job_id=row["job_id"],
        type=row["type"],
        origin=row["origin"],
        group=row["group"],
        attempt=row["attempt"],
        outcome=OutcomeName(row["outcome"]),
        enqueued_at=row["enqueued_at"],
        due_at=row["due_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        executor=row["executor"],
        epoch=row["epoch"],
        error_class=row["error_class"],
        error_message=row["error_message"],
        correlation_id=row["correlation_id"],
    )


def audit_row(row: asyncpg.Record) -> AuditRow:
    """An action; its target and detail come as JSON."""
    return AuditRow(
        id=row["id"],
        at=row["at"],
        actor=row["actor"],
        action=row["action"],
        target=json.loads(row["target"]),
        reason=row["reason"],
        detail=json.loads(row["detail"]) if row["detail"] else {},
    )


def pause_row(row: asyncpg.Record) -> PauseRow:
    """A pause."""
    return PauseRow(
        type=row["type"],
        origin=row["origin"],
        group=row["group"],
        paused_by=row["paused_by"],
        reason=row["reason"],
        paused_at=row["paused_at"],
    )


def origin_row(row: asyncpg.Record) -> OriginRow:
    """An origin, with its pause."""
    columns = {name: value for name, value in row.items() if not name.startswith("pause")}
    return OriginRow(**columns, pause=_pause_of(row, group=None))


def blocked_group(row: asyncpg.Record, error: str | None) -> BlockedGroup:
    """A group that waits for its head, with its pause. error: the last of the head's."""
    return BlockedGroup(
        origin=row["origin"],
        group=row["group"],
        since=row["since"],
        head=row["head"],
        type=row["type"],
        state=JobState(row["state"]),
        failures=row["failures"],
        next_at=row["next_at"],
        error=error,
        behind=row["behind"],
        pause=_pause_of(row, group=row["group"]),
    )


def _pause_of(row: asyncpg.Record, *, group: str | None) -> PauseRow | None:
    """That of the origin, or of the group of it, that the row is of."""
    if row["paused_by"] is None:
        return None
    return PauseRow(
        type=None,
        origin=row["origin"],
        group=group,
        paused_by=row["paused_by"],
        reason=row["pause_reason"],
        paused_at=row["paused_at"],
    )

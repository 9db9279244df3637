"""What administration shows, out of the rows that its statements return."""

import json
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

import asyncpg

from ..outcome import OutcomeName
from .rows import AttemptRow, AuditRow, BlockedGroup, JobCount, JobRow, JobState, OriginRow, PauseRow

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["attempt_row", "audit_row", "blocked_group", "job_count", "job_row", "origin_row", "pause_row"]

T = TypeVar("T", bound="DataclassInstance")


def job_row(row: asyncpg.Record, cursor: str = "") -> JobRow:
    """A stored job; of a list, with its cursor there."""
    return _made(JobRow, row, state=JobState(row["state"]), cursor=cursor)


def job_count(row: asyncpg.Record) -> JobCount:
    """What was not counted by is None."""
    return _made(JobCount, row, state=None if row["state"] is None else JobState(row["state"]))


def attempt_row(row: asyncpg.Record) -> AttemptRow:
    """A row of the history."""
    return _made(AttemptRow, row, outcome=OutcomeName(row["outcome"]))


def audit_row(row: asyncpg.Record) -> AuditRow:
    """An action; its target and detail come as JSON."""
    detail: object = json.loads(row["detail"] or "{}")
    return _made(AuditRow, row, target=json.loads(row["target"]), detail=detail)


def pause_row(row: asyncpg.Record) -> PauseRow:
    """A pause."""
    return _made(PauseRow, row)


def origin_row(row: asyncpg.Record) -> OriginRow:
    """An origin, with its pause."""
    return _made(OriginRow, row, pause=_pause_of(row, group=None))


def blocked_group(row: asyncpg.Record, error: str | None) -> BlockedGroup:
    """A group that waits for its head, with its pause. error: the last of the head's."""
    pause = _pause_of(row, group=row["group"])
    return _made(BlockedGroup, row, state=JobState(row["state"]), error=error, pause=pause)


def _pause_of(row: asyncpg.Record, *, group: str | None) -> PauseRow | None:
    """That of the origin, or of the group of it, that the row is of."""
    if row["paused_by"] is None:
        return None
    return _made(PauseRow, row, type=None, group=group, topic=None, reason=row["pause_reason"])


def _made(kind: type[T], row: asyncpg.Record, **instead: object) -> T:
    """Each field is the column of its name, but those of `instead`."""
    values = {**row, **instead}
    return kind(**{field.name: values[field.name] for field in fields(kind)})

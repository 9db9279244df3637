"""Pages of jobs: each section in the order of an index, and a cursor that says where the next page begins.

A position, a due time or an id of the last row is enough to go on in the middle of an index, so a page costs the same
however many jobs come before it, and nothing is sorted.
"""

import re
from typing import NamedTuple

import asyncpg

from ...errors import ActionRefused
from .calls import Calls
from .reading import job_row
from .rows import JobRow, JobState

__all__ = ["Filter", "list_jobs"]

_LOOKED_AT = 1_000  # of each origin, where no index has what is looked for: 0.2 s for a hundred origins

_SECTIONS: dict[JobState | None, tuple[str, ...]] = {
    None: ("ordered", "delayed", "held"),
    JobState.WAITING: ("ordered",),
    JobState.BACKING_OFF: ("backing_off", "due_later"),
    JobState.BLOCKED: ("blocked",),
    JobState.RUNNING: ("running",),
    JobState.DELAYED: ("delayed",),
    JobState.HELD: ("held",),
}


class Filter(NamedTuple):
    """Which jobs; None: any."""

    state: JobState | None
    type: str | None
    origin: str | None
    group: str | None


_KEYS = range(-210_866_803_200_000_000, 1 << 63)  # what Postgres takes for a number, and as a time from 4713 BC on


class _Cursor(NamedTuple):
    section: str
    key: int = 0  # a position, or a time in microseconds since 1970
    id: int = 0
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.section}:{self.key}:{self.id}:{self.origin}"

    @classmethod
    def parse(cls, text: str, sections: tuple[str, ...]) -> "_Cursor":
        section, _, rest = text.partition(":")
        key, _, rest = rest.partition(":")
        id, _, origin = rest.partition(":")
        numbers = re.fullmatch("-?[0-9]{1,19}", key) and re.fullmatch("[0-9]{1,19}", id)
        if section not in sections or not numbers or int(key) not in _KEYS or int(id) not in _KEYS:
            raise ActionRefused(f"after={text!r} is no cursor of this list: give the cursor of its last row")
        return cls(section, int(key), int(id), origin)

    @classmethod
    def behind(cls, row: asyncpg.Record, section: str) -> "_Cursor":
        key = row["position"] if section in ("ordered", "due_later") else row.get("due_microseconds") or 0
        return cls(section, key, row["id"], row["origin"])


async def list_jobs(calls: Calls, wanted: Filter, limit: int, after: str | None) -> list[JobRow]:
    """One page: at most `limit` rows behind the cursor `after`."""
    sections = _SECTIONS[wanted.state]
    start = _Cursor(sections[0]) if after is None else _Cursor.parse(after, sections)
    out: list[JobRow] = []
    for section in sections[sections.index(start.section) :]:
        cursor = start if section == start.section else _Cursor(section)
        rows = await _page(calls, cursor, wanted, limit - len(out))
        out.extend(job_row(row, str(_Cursor.behind(row, section))) for row in rows)
        if len(out) >= limit:
            break
    return out


async def _page(calls: Calls, at: _Cursor, wanted: Filter, most: int) -> list[asyncpg.Record]:
    state, type, origin, group = wanted
    match at.section:
        case "ordered":
            return await calls.walk("list_ordered", at.origin, at.key, origin, group, type, state, most)
        case "due_later":
            return await calls.walk("list_due_later", at.origin, at.key, origin, group, type, _LOOKED_AT, most)
        case "delayed":
            return await calls.walk("list_delayed", at.origin, at.key, at.id, origin, group, type, most)
        case "held":
            return await calls.walk("list_held", at.origin, at.id, origin, group, type, most)
        case "running":
            return await calls.walk("list_running", at.id, origin, group, type, most)
        case _:
            time = None if at.section == "blocked" else at.key
            return await calls.walk("list_backing_off", time, at.id, origin, group, type, state, most)

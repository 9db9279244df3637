"""Jobs that are added to a transaction: held back until it ends, and then stored with few statements."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from .connections import store
from .enqueue import AT_ONCE, Kind, homeless, many_jobs
from .transaction import Transaction, note_jobs, should_be_stored

__all__ = ["AddedJob", "AddedJobs"]


class AddedJob(NamedTuple):
    """What one job of a `Kind` has for itself; see `one_job`. headers: their text."""

    group: str | None
    payload: bytes
    headers: str | None
    key: bytes | None


class AddedJobs:
    """Those of one transaction that have not been stored yet.

    Jobs of one kind become one statement. Within a group the order stands in which they were added: a job whose group
    has last got one of another kind goes into a later round than that. So of two types that take turns in each of a
    thousand groups, two statements store all.
    """

    def __init__(self) -> None:
        self._rounds: list[dict[Kind, list[AddedJob]]] = []
        self._last: dict[str, tuple[int, Kind]] = {}  # by group: of any origin, since that of a home is not known here
        self._jobs = self._bytes = 0

    def add(self, kind: Kind, job: AddedJob) -> bool:
        """Take up one more job; returns whether they should be stored now."""
        number = 0
        if job.group is not None:
            number, last = self._last.get(job.group, (0, kind))
            number += last != kind
            self._last[job.group] = number, kind
        if number == len(self._rounds):
            self._rounds.append({})
        self._rounds[number].setdefault(kind, []).append(job)
        self._jobs += 1
        self._bytes += len(job.payload)
        return should_be_stored(self._jobs, self._bytes)

    async def store(self, tx: Transaction) -> None:
        """Store all. Errors are those of `JobType.enqueue_many`; after one the transaction must not commit."""
        for kinds in self._rounds:
            for kind, jobs in kinds.items():
                if kind.place() == "placed_":
                    for key, together in groupby(jobs, _key_beside_group):
                        await _store(tx, kind, [*together], key)
                else:
                    await _store(tx, kind, jobs, None)


def _key_beside_group(job: AddedJob) -> bytes | None:
    """None stands for the group: so the jobs of many keys share a statement, where these are their groups."""
    return None if job.group is not None and job.key == job.group.encode() else job.key


async def _store(tx: Transaction, kind: Kind, jobs: Sequence[AddedJob], key: bytes | None) -> None:
    groups = [job.group for job in jobs if job.group is not None] if kind.grouped else None
    headers: list[str | None] | str | None = [job.headers for job in jobs]
    if headers.count(headers[0]) == len(headers):
        headers = headers[0]
    made = many_jobs(kind, groups, [job.payload for job in jobs], headers, lambda: key)
    statement, rows = await store(tx, made)
    if not rows:
        raise homeless(kind.schema, kind.type_name, kind.home)
    alone = len(jobs) == 1 and kind.when == AT_ONCE
    if statement.origin:
        note_jobs(tx.enqueued, statement.origin, rows[0][0] if alone else [])
    else:
        for row in rows:
            note_jobs(tx.enqueued, row[1], [row[0]] if alone else [])

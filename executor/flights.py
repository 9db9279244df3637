"""What a cycle records and names, and a cycle that is on its way."""

import asyncio
from dataclasses import dataclass, field

import asyncpg

from ..errors import PostgresUnavailable
from .attempts import Finished
from .expected import Early
from .link import Link
from .queues import Entry

__all__ = ["Batch", "Flight", "applied", "merged"]


@dataclass(slots=True)
class Batch:
    """What one cycle records and names, and the server's timeline that it was read from. early: what it names, at its
    first sending only, although it has not been read yet (`Expected`). reads: of these, the ids of those that it is to
    bring, and `rows` what it has brought."""

    finished: list[Finished]
    chosen: list[Entry]
    barriers: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    timeline: str | None = None
    early: dict[int, Early] = field(default_factory=dict[int, Early])
    reads: list[int] = field(default_factory=list[int])
    rows: list[asyncpg.Record] = field(default_factory=list[asyncpg.Record])


@dataclass(slots=True, eq=False)
class Flight:
    """A cycle that has been sent, until its answer has been dealt with. contents: what has been sent of it so far, also
    where `batch` has become less since."""

    batch: Batch
    number: int
    sent: float
    link: Link
    answer: asyncio.Task[asyncpg.Record | None]
    contents: list[tuple[list[Finished], list[Entry]]]

    def applied(self) -> bool:
        """Whether the server has said that it is committed."""
        return self.answer.exception() is None and applied(self.answer.result())

    def unknown(self) -> bool:
        """Whether it may yet be committed, or be so already, although there is no answer."""
        return isinstance(self.answer.exception(), PostgresUnavailable)


def applied(row: asyncpg.Record | None) -> bool:
    """Whether a cycle's answer says that it is committed."""
    return row is not None and row["applied"] == 1


def merged(batches: list[Batch]) -> Batch:
    """One batch of several, none of which has been committed."""
    return Batch(
        [f for batch in batches for f in batch.finished],
        [entry for batch in batches for entry in batch.chosen],
        [reached for batch in batches for reached in batch.barriers],
        batches[-1].timeline,
    )

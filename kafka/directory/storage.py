"""The port between a directory and what holds its rows; `memory` and `sqlite` are the two implementations.

One suite, `tests/test_directory_storage.py`, holds both to what is said here.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

from ..message import Record
from .rows import BadRecord, Change, Row

__all__ = ["Batch", "Identity", "Kept", "Mark", "Plan", "Storage"]

T = TypeVar("T")


class Mark(NamedTuple):
    """The last record that was applied of a partition: it tells whether the log is still the same one.

    Attributes:
        timestamp_ms: Of the record, milliseconds since 1970.
        epoch: Of the leader that wrote it; None where it is not known.
    """

    offset: int
    timestamp_ms: int
    epoch: int | None = None


class Identity(NamedTuple):
    """What the rows of a store are of.

    Attributes:
        cluster: Kafka's id.
        reading: How records are read.
    """

    topic: str
    cluster: str
    reading: str


@dataclass(frozen=True, slots=True)
class Plan(Generic[T]):
    """What a store has to know.

    Attributes:
        derived: Keys differ from rows, so that several rows may have one key.
        decode: Gives the value of a record that was stored.
        key_of: Gives the key of its row.
    """

    topic: str
    derived: bool
    decode: Callable[[Record], T | None]
    key_of: Callable[[Row, T], Hashable]


@dataclass(slots=True)
class Batch(Generic[T]):
    """What is applied at once.

    Attributes:
        positions: The next offset, by partition. A partition that is not named keeps its own.
        marks: The last record, by partition. A partition that is not named keeps its own, as long as that is before the
            position.
        bad: All records that could not be applied and still matter; None where that has not changed.
        complete_at: When nothing of the topic was missing, in seconds since 1970; 0: it is not known.
        topic_id: Kafka's, of the topic that was read; None where it does not tell.
        read_anew: The topic has been read again: nothing of the former positions and marks stays.
    """

    changes: Sequence[Change[T]] = ()
    positions: Mapping[int, int] = field(default_factory=dict[int, int])
    marks: Mapping[int, Mark] = field(default_factory=dict[int, Mark])
    bad: Mapping[Row, BadRecord] | None = None
    complete_at: float = 0.0
    topic_id: UUID | None = None
    read_anew: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What a store has kept of a life before.

    Attributes:
        identity: None for a new store.
        marks: Of each partition that has one; always before its position.
        topic_id: The last one that was told.
    """

    identity: Identity | None
    positions: Mapping[int, int]
    marks: Mapping[int, Mark]
    bad: Mapping[Row, BadRecord]
    complete_at: float
    topic_id: UUID | None = None


class Storage(Protocol[T]):
    """Holds the rows of one directory.

    Where several rows have one key, the one with the youngest record counts, so that the order in which partitions are
    read does not matter. Reading comes from the event loop, and is quick there; plain handlers read from their threads.
    `open`, `reset`, `apply` and `close` are awaited, one at a time.
    """

    async def open(self, plan: Plan[T]) -> Kept:
        """Begin, with what is there.

        Raises:
            StorageError: The store cannot be used; it has let go of its files then.
        """
        ...

    async def reset(self, identity: Identity) -> None:
        """Forget everything; from now on the rows are of `identity`."""
        ...

    async def apply(self, batch: Batch[T]) -> None:
        """Apply all of `batch`, or nothing. Of several changes of a row the last one counts."""
        ...

    async def close(self) -> None:
        """Let go of files. Safe to call twice, and when never opened."""
        ...

    def get(self, key: Hashable) -> T | None:
        """The value of a key."""
        ...

    def __len__(self) -> int:
        """How many keys there are."""
        ...

    def items(self) -> list[tuple[Hashable, T]]:
        """All keys and values, as they are now."""
        ...

    def rows(self) -> Iterable[Row]:
        """All rows, as they are now."""
        ...

    def keys_of(self, rows: Iterable[Row]) -> Iterable[Hashable]:
        """The keys that these rows have now."""
        ...

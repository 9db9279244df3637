"""An assigned partition, as this process sees it: where it stands, and which of its messages are at hand."""

import asyncio
import logging
import time
from collections import deque
from enum import Enum
from typing import Any
from uuid import UUID

from aiokafka import TopicPartition

from ..legible import legible
from .message import Message, Record, group_of_key, origin_of

__all__ = ["Item", "Partition", "State", "tell_undecodable"]

log = logging.getLogger("sidings.consumer")


class State(Enum):
    """What may happen to a partition next."""

    UNPLACED = "its stored offset has to be read"
    READY = "its messages are handled in the main line"
    ASIDE = "its first message failed, and is handled alone"
    REFUSED = "its stored offset is none of its log, or what stands there cannot be read"
    FULL = "so much of it is under way, or waits as jobs, that no more is read"


class Item:
    """A message at hand. `message` is None where `error` says why it cannot be decoded, or where it is passed over;
    `id` tells repeats, as `short_id` makes it, where its consumer looks for them. `placement`: the partition's, when it
    was fetched."""

    __slots__ = ("error", "id", "message", "partition", "placement", "record")

    def __init__(
        self,
        partition: "Partition",
        record: Record,
        message: Message[Any] | None,
        error: str | None,
        id: bytes | None = None,
    ) -> None:
        self.partition = partition
        self.placement = partition.placement
        self.record = record
        self.message = message
        self.error = error
        self.id = id

    @property
    def void(self) -> bool:
        """Whether its partition has been displaced since: it is none of those that stand there now."""
        return self.placement != self.partition.placement

    @property
    def group(self) -> str | None:
        """The group of its key."""
        return group_of_key(self.record.key)

    @property
    def type(self) -> str | None:
        """That of the message, where its topic has messages of several types."""
        return None if self.message is None else self.message.type

    @property
    def passed_over(self) -> bool:
        """Whether it is of no interest, so that only its offset counts."""
        return self.message is None and self.error is None


class Partition:
    """next_offset: what is stored, and so what the next compare-and-set expects; -1: not known yet. items: fetched and
    not yet handled, in order. end: where reading goes on after the last of them, behind any gap in the log.
    began: where reading started when it was first placed here; None: not yet.
    topic_id: of the topic that it was placed in last, None where it is not known.
    placement: grows when what is in memory becomes void, so that whoever has waited can tell.
    outside: an offset that Kafka has just refused to read from;
    beyond: a stored offset that lay beyond the end of the log, and how often it had been reset: a person has to decide;
    suspect: it may have a record that cannot be read, and is read alone; careful: so many records of it one by one;
    unreadable: what is to be told of what cannot be read; calls: since when handlers run, by offset (of lists
    the first); deaf: those that go on after their timeout.
    put_off: until then its next message is not decoded, as its decoder has asked for; 0: it has not, or the message is
    decoded, or passed over, by now;
    idle_at: when the client was last asked for more and had nothing of it; answered_at: when it was first seen then
    that Kafka had answered again, at `answered` by the client's clock, which somebody may set."""

    __slots__ = (
        "answered",
        "answered_at",
        "began",
        "beyond",
        "calls",
        "careful",
        "conflicts",
        "cuts",
        "deaf",
        "end",
        "failures",
        "first_failure",
        "idle_at",
        "items",
        "left",
        "next_offset",
        "origin",
        "outside",
        "placement",
        "put_off",
        "reason",
        "since",
        "state",
        "suspect",
        "topic_id",
        "tp",
        "undone",
        "unreadable",
    )

    def __init__(self, tp: TopicPartition) -> None:
        self.tp = tp
        self.origin = origin_of(tp.topic, tp.partition)
        self.state = State.UNPLACED
        self.since = time.monotonic()  # in this state
        self.reason = ""
        self.next_offset: int = -1
        self.items: deque[Item] = deque()
        self.end = -1
        self.began: int | None = None
        self.topic_id: UUID | None = None
        self.placement = 0
        self.outside: int | None = None
        self.beyond: tuple[int, int] | None = None
        self.suspect = False
        self.careful = 0
        self.unreadable: str | None = None
        self.calls: dict[int, float] = {}
        self.deaf: set[int] = set()
        self.put_off = 0.0
        self.undone = False  # a transaction of it was not committed, or nobody knows; and none since
        self.idle_at = self.answered_at = self.since
        self.answered: int | None = None
        # Of the message that stands first; they outlive rebalances that leave the partition here.
        self.failures = 0
        self.first_failure = 0.0
        self.cuts = 0  # how often a connection has broken under its handler, or Kafka was late with what it sends
        self.conflicts = 0  # with other transactions, since it has failed last
        self.left = asyncio.Event()  # no longer aside, whatever its message still waits for

    def enter(self, state: State, reason: str = "") -> None:
        """Change the state."""
        if state is not self.state:
            self.since = time.monotonic()
            if self.state is State.ASIDE:
                self.left.set()
                self.left = asyncio.Event()
        self.state = state
        self.reason = reason

    @property
    def failing_since(self) -> float | None:
        """Since when a message that fails has held it up; None when none does."""
        return self.since if self.state is State.ASIDE else None

    def problem(self) -> str | None:
        """What a health check should say of it."""
        if deaf := list(self.deaf):
            return f"{self.origin}: the handler of offset {min(deaf)} goes on, although it was cancelled at its timeout"
        return self.unreadable or (self.reason if self.state is State.REFUSED else None)

    def trust(self) -> None:
        """What was in doubt has been read."""
        self.suspect, self.careful = False, 0

    def inherit(self, former: "Partition") -> None:
        """Take over from the same partition of the assignment before."""
        self.next_offset, self.outside, self.beyond = former.next_offset, former.outside, former.beyond
        self.failures, self.first_failure, self.cuts = former.failures, former.first_failure, former.cuts
        self.suspect, self.careful, self.unreadable = former.suspect, former.careful, former.unreadable
        self.began, self.undone, self.calls = former.began, former.undone, former.calls
        self.conflicts, self.put_off, self.topic_id = former.conflicts, former.put_off, former.topic_id

    def place(self, offset: int, *, anew: bool = False) -> None:
        """Reading starts at the stored `offset`. anew: its topic is another one of this name, of which nothing has
        failed."""
        if anew or offset != self.next_offset:
            self.failures = self.cuts = self.conflicts = 0
            self.unreadable, self.undone = None, False
        # What is before the message that was put off does not wait for it.
        self.put_off = 0.0 if offset > self.next_offset else min(self.put_off, time.monotonic())
        self.next_offset = self.end = offset
        self.began = offset if self.began is None else min(self.began, offset)
        self.beyond = None
        self.items.clear()
        self.enter(State.READY)

    def displace(self) -> None:
        """What is in memory may be wrong: read the stored offset again before anything else."""
        self.placement += 1
        self.items.clear()
        self.enter(State.UNPLACED)

    def after(self, count: int) -> int:
        """The offset to store when the first `count` items are done."""
        return self.end if count == len(self.items) else self.items[count - 1].record.offset + 1

    def done(self, count: int, offset: int) -> None:
        """The first `count` items are handled, and `offset` is stored."""
        for _ in range(count):
            self.items.popleft()
        self.next_offset, self.undone = offset, False
        self.failures = self.cuts = self.conflicts = 0


def tell_undecodable(partition: Partition, record: Record, becomes: str, error: object) -> None:
    """Say of a message that cannot be decoded what becomes of it."""
    log.error("%s offset %s cannot be decoded, and %s: %s", partition.origin, record.offset, becomes, legible(error))

"""An assigned partition of a stateless consumer: what of it is under way, and what Kafka has been told."""

import asyncio
import time
from dataclasses import dataclass

from aiokafka import TopicPartition

from .partition import Partition, State
from .stateless_window import Window

__all__ = ["Failing", "StatelessPartition"]

_COMMIT_SECONDS = 60.0  # without a commit before the health check complains


@dataclass(slots=True)
class Failing:
    """A message that has failed, or whose handler has found a server away. since: the start of its first attempt that
    failed, or of that one, on the monotonic clock."""

    since: float
    failures: int = 0
    conflicts: int = 0  # with other transactions, since the last failure
    cuts: int = 0  # how often Kafka was late with what its handler sends


class StatelessPartition(Partition):
    """next_offset, here: the lowest unfinished offset; committed: what Kafka knows of it. leaving: set when it is given
    up, so that nothing of it waits any longer. stuck: why its dead letters do not leave."""

    __slots__ = ("committed", "failing", "leaving", "refusal", "stuck", "uncommitted_since", "window", "workers")

    def __init__(self, tp: TopicPartition) -> None:
        super().__init__(tp)
        self.window = Window()
        self.workers: set[asyncio.Task[None]] = set()
        self.failing: dict[int, Failing] = {}  # by offset
        self.leaving = asyncio.Event()
        self.stuck: str | None = None
        self.committed = -1
        self.uncommitted_since: float | None = None  # since when commits fail
        self.refusal: str | None = None  # why, the last time

    @property
    def placed(self) -> bool:
        """Whether it is known where it stands."""
        return self.state in (State.READY, State.FULL)

    @property
    def failing_since(self) -> float | None:
        return min((failing.since for failing in list(self.failing.values())), default=None)

    def problem(self) -> str | None:
        """What a health check should say of it."""
        if self.stuck is not None:
            return f"{self.origin} stands still: {self.stuck}"
        since = self.uncommitted_since  # any thread may ask: it may be over between two looks
        if since is not None and time.monotonic() - since > _COMMIT_SECONDS:
            return f"the offset of {self.origin} could not be committed for {_COMMIT_SECONDS:.0f} s: {self.refusal}"
        return super().problem()

    def inherit(self, former: Partition) -> None:
        """Take over from the same partition of the assignment before: how often its messages have failed."""
        if isinstance(former, StatelessPartition):
            self.failing = former.failing
        super().inherit(former)

    def place(self, offset: int, *, anew: bool = False) -> None:
        """Reading starts at the committed `offset`. Nothing of the partition is under way. anew: as in `Partition`."""
        self.window = Window()
        self.leaving = asyncio.Event()
        self.stuck = self.uncommitted_since = None
        self.failing = {at: failing for at, failing in self.failing.items() if at >= offset and not anew}
        self.committed = offset
        super().place(offset, anew=anew)

    def take_up(self) -> None:
        """What has been read gets under way."""
        self.window.add(self.items)
        self.items.clear()

    def look(self) -> None:
        """Find `next_offset`: the first message that is not finished, else where reading goes on, behind any gap."""
        first = self.window.first_unfinished
        if first is None:
            first = self.items[0].record.offset if self.items else self.end
        self.next_offset = first

"""Which messages of a partition are under way, which may start, and how far the partition is done. No I/O, no clock."""

import heapq
from collections import deque
from collections.abc import Iterable

from .message import size_of
from .partition import Item

__all__ = ["Window"]


class Window:
    """Messages of one partition, in the order of the log, from the first unfinished one to the last that was read.

    Messages of one key form a lane, of which only the first may run; a message without a key is a lane of its own.
    size: of the unfinished ones, in bytes; of finished ones only the offset is kept.
    """

    def __init__(self) -> None:
        self.size = 0
        self._offsets: deque[int] = deque()
        self._finished: set[int] = set()  # offsets behind the first unfinished one
        self._lanes: dict[bytes, deque[Item]] = {}  # unfinished ones by key; the first of each runs or may start
        self._startable: list[tuple[int, Item]] = []  # a heap

    def __len__(self) -> int:
        """Messages from the first unfinished one on: finished ones among them count."""
        return len(self._offsets)

    @property
    def startable(self) -> int:
        """How many messages may start now."""
        return len(self._startable)

    @property
    def first_unfinished(self) -> int | None:
        """The offset that must not be passed; None when everything that was added is finished."""
        return self._offsets[0] if self._offsets else None

    def add(self, items: Iterable[Item]) -> None:
        """Take in messages that follow those of before in the log."""
        for item in items:
            self._offsets.append(item.record.offset)
            self.size += size_of(item.record)
            key = item.record.key
            if key is None:
                self._may_start(item)
            elif (lane := self._lanes.get(key)) is None:
                self._lanes[key] = deque([item])
                self._may_start(item)
            else:
                lane.append(item)

    def start(self) -> Item | None:
        """The earliest message that may start, which runs from now on; None when there is none."""
        return heapq.heappop(self._startable)[1] if self._startable else None

    def finish(self, item: Item) -> None:
        """`item`, which was started, is done with."""
        key = item.record.key
        if key is not None:
            lane = self._lanes[key]
            lane.popleft()
            if lane:
                self._may_start(lane[0])
            else:
                del self._lanes[key]
        self.size -= size_of(item.record)
        self._finished.add(item.record.offset)
        while self._offsets and self._offsets[0] in self._finished:
            self._finished.discard(self._offsets.popleft())

    def _may_start(self, item: Item) -> None:
        heapq.heappush(self._startable, (item.record.offset, item))

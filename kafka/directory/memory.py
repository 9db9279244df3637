"""Rows in memory: the fastest store, read again from the topic at every start."""

from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from ..message import Record
from .rows import Row
from .storage import Batch, Identity, Kept, Plan

__all__ = ["Memory"]

T = TypeVar("T")

_FEW = 8  # rows of a key, all of which are looked at


class Memory(Generic[T]):
    """Holds the values in a dict."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, T] = {}
        # Where keys differ from rows: the rows, of which the youngest has the least number; for each key the rows that
        # have it; and where these are many, a heap of them, with some that have it no more or are younger by now.
        self._rows: dict[Row, tuple[Hashable, tuple[int, int, int], T]] = {}
        self._rivals: dict[Hashable, set[Row]] = {}
        self._heaps: dict[Hashable, list[tuple[tuple[int, int, int], Row]]] = {}
        self._derived = False

    async def open(self, plan: Plan[T]) -> Kept:
        """Begin, empty."""
        self._derived = plan.derived
        return Kept(None, {}, {}, {}, 0.0)

    async def reset(self, identity: Identity) -> None:
        """Forget everything."""
        self._entries.clear()
        self._rows.clear()
        self._rivals.clear()
        self._heaps.clear()

    async def apply(self, batch: Batch[T]) -> None:
        """Apply `batch`. Threads that read meanwhile find each key that has a value before and after."""
        if self._derived:
            keys: set[Hashable] = set()
            for row, key, value, record in batch.changes:
                self._change(keys, row, key, value, record)
            for key in keys:
                self._show(key)
            return
        entries, gone = self._entries, set[Row]()
        for row, _, value, _ in batch.changes:
            if value is None:
                gone.add(row)
            else:
                entries[row] = value
                if gone:
                    gone.discard(row)
        for row in gone:
            entries.pop(row, None)

    async def close(self) -> None:
        """Nothing to do."""

    def get(self, key: Hashable) -> T | None:
        """The value of a key."""
        return self._entries.get(key)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[Hashable, T]]:
        """All keys and values."""
        return list(self._entries.items())

    def rows(self) -> Iterable[Row]:
        """All rows."""
        return list(self._rows) if self._derived else [row for row in self._entries if isinstance(row, str)]

    def keys_of(self, rows: Iterable[Row]) -> Iterable[Hashable]:
        """The keys that these rows have now."""
        return [self._rows[row][0] for row in rows if row in self._rows] if self._derived else rows

    def _change(self, keys: set[Hashable], row: Row, key: Hashable, value: T | None, record: Record | None) -> None:
        """Adds the keys that are to be shown anew."""
        if (former := self._rows.pop(row, None)) is not None:
            self._rivals[former[0]].discard(row)
            keys.add(former[0])
        if value is not None and record is not None:
            age = (-record.timestamp, -record.partition, -record.offset)
            self._rows[row] = (key, age, value)
            self._rivals.setdefault(key, set()).add(row)
            if (heap := self._heaps.get(key)) is not None:
                heappush(heap, (age, row))
            keys.add(key)

    def _show(self, key: Hashable) -> None:
        """Let the youngest of a key's rows be its value."""
        rivals = self._rivals[key]
        if not rivals:
            del self._rivals[key]
            self._heaps.pop(key, None)
            self._entries.pop(key, None)  # none where its rows have come and gone in one batch
        elif len(rivals) <= _FEW:
            self._heaps.pop(key, None)
            self._entries[key] = min((self._rows[row] for row in rivals), key=lambda kept: kept[1])[2]
        else:
            self._entries[key] = self._rows[self._youngest(key, rivals)][2]

    def _youngest(self, key: Hashable, rivals: set[Row]) -> Row:
        """The same of many, without a look at each."""
        heap = self._heaps.get(key)
        if heap is None or len(heap) > 2 * len(rivals):
            heap = self._heaps[key] = [(self._rows[row][1], row) for row in rivals]
            heapify(heap)
        while (row := heap[0][1]) not in rivals or self._rows[row][1] != heap[0][0]:
            heappop(heap)
        return row

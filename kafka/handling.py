"""One batch in one transaction: the handlers' effects, the messages stored as jobs, and the offsets, or nothing."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..errors import PostgresUnavailable
from ..jobs import Transaction, current_origin
from .offsets import Move, OffsetsMoved, OffsetStore
from .parking import Parking
from .partition import Item, Partition
from .subscription import Subscription
from .transactions import Transactions, server_is_gone

__all__ = ["BatchFailed", "Handling"]


class BatchFailed(Exception):
    """Nothing of the batch is committed. `index` is that of the message whose handler raised `error`; None when the
    batch failed as a whole, so that any of its messages may be the cause."""

    def __init__(self, error: Exception, index: int | None) -> None:
        super().__init__(repr(error))
        self.error = error
        self.index = index


class Handling:
    """Handles messages of one subscription. hurry: asked between two messages; True ends the batch early."""

    def __init__(
        self,
        subscription: Subscription[object],
        transactions: Transactions,
        offsets: OffsetStore,
        parking: Parking,
        *,
        batch_seconds: float,
        hurry: Callable[[], bool],
    ) -> None:
        self._subscription = subscription
        self._transactions = transactions
        self._offsets = offsets
        self._parking = parking
        self._batch_seconds = batch_seconds
        self._hurry = hurry

    async def transact(self, items: Sequence[Item]) -> int:
        """Handle `items`, or as many of them as time allows, and return how many: their effects are committed.

        Raises `BatchFailed`, `OffsetsMoved` and `PostgresUnavailable`. After the last it is unknown whether the
        transaction has committed.
        """
        try:
            async with self._transactions.open() as tx:
                blocked = await self._blocked(tx, items)
                count, stored = await self._call_handlers(tx, items, blocked)
                if stored:
                    await self._parking.store(tx, self._subscription, stored)
                steps = _steps(items[:count])
                await self._offsets.advance(tx, [step.move for step in steps])
        except (BatchFailed, OffsetsMoved, PostgresUnavailable):
            raise
        except Exception as error:  # a statement of ours or the commit: whose fault it was, the batch cannot tell
            raise BatchFailed(error, None) from error
        _settle(steps)
        return count

    async def park(self, item: Item, error: str) -> None:
        """Store the message as a job instead of handling it. Raises `OffsetsMoved`, `PostgresUnavailable`."""
        async with self._transactions.open() as tx:
            await self._parking.store(tx, self._subscription, [item], error)
            steps = _steps([item])
            await self._offsets.advance(tx, [step.move for step in steps])
        _settle(steps)

    async def skip(self, item: Item) -> None:
        """Pass over the message. Raises `OffsetsMoved`, `PostgresUnavailable`."""
        async with self._transactions.open() as tx:
            steps = _steps([item])
            await self._offsets.advance(tx, [step.move for step in steps])
        _settle(steps)

    async def _blocked(self, tx: Transaction, items: Sequence[Item]) -> frozenset[tuple[str, str]]:
        if self._subscription.isolate:  # every message is stored anyway
            return frozenset()
        return await self._parking.blocked(tx, items)

    async def _call_handlers(
        self, tx: Transaction, items: Sequence[Item], blocked: frozenset[tuple[str, str]]
    ) -> tuple[int, list[Item]]:
        """How many messages were done, and those of them that have to be stored as jobs."""
        until = time.monotonic() + self._batch_seconds
        isolate = self._subscription.isolate
        stored: list[Item] = []
        for first, chunk in _chunks(items, self._subscription.batch or 1):
            if first and (time.monotonic() > until or self._hurry()):
                return first, stored
            direct: list[Item] = []
            for item in chunk:
                aside = isolate or item.message is None or (item.partition.origin, item.group) in blocked
                (stored if aside else direct).append(item)
            if direct:
                await self._call(tx, direct, first if len(chunk) == 1 else None)
        return len(items), stored

    async def _call(self, tx: Transaction, items: list[Item], index: int | None) -> None:
        current_origin.set(items[0].partition.origin)
        messages = [item.message for item in items if item.message is not None]
        try:
            async with asyncio.timeout(self._subscription.timeout):
                await self._subscription.call(messages, tx)
        except Exception as error:
            if server_is_gone(error, tx.connection):
                raise PostgresUnavailable(f"the connection broke under a handler: {error!r}") from error
            raise BatchFailed(error, index) from error


def _chunks(items: Sequence[Item], size: int) -> Iterator[tuple[int, Sequence[Item]]]:
    """Consecutive messages of one partition each, at most `size`, with the index of the first: so a list handler's
    jobs have one origin."""
    if size == 1:
        for index, item in enumerate(items):
            yield index, (item,)
        return
    first = 0
    while first < len(items):
        last = first + 1
        while last < len(items) and last - first < size and items[last].partition is items[first].partition:
            last += 1
        yield first, items[first:last]
        first = last


class _Step(NamedTuple):
    partition: Partition
    count: int
    move: Move


def _steps(items: Sequence[Item]) -> list[_Step]:
    """How far `items` bring each of their partitions."""
    counts: dict[Partition, int] = {}
    for item in items:
        counts[item.partition] = counts.get(item.partition, 0) + 1
    return [_Step(p, count, Move(p.tp, p.next_offset, p.after(count))) for p, count in counts.items()]


def _settle(steps: Sequence[_Step]) -> None:
    for step in steps:
        step.partition.done(step.count, step.move.next)

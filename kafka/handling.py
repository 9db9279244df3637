"""One batch in one transaction: the handlers' effects, the messages stored as jobs, and the offsets, or nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from ..errors import PostgresUnavailable
from ..jobs import Transaction, current_origin
from .metrics import ConsumerMetrics
from .offsets import Move, OffsetsMoved, OffsetStore
from .parking import Parking
from .partition import Item, Partition
from .subscription import Subscription
from .transactions import Transactions, in_transaction, server_is_gone

__all__ = ["BatchFailed", "Handling"]

_MAX_CUTS = 2  # connections that may break under one message before it is taken for the cause


class BatchFailed(Exception):
    """Nothing of the batch is committed. `index` is that of the message whose handler raised `error`; None when any of
    the messages may be the cause."""

    def __init__(self, error: Exception, index: int | None) -> None:
        super().__init__(repr(error))
        self.error = error
        self.index = index


class Handling:
    """Handles messages of one subscription. hurry: asked between two messages; True ends the batch early.

    Its methods raise `BatchFailed`, `OffsetsMoved` (another process has moved on: what is in memory is wrong) and
    `PostgresUnavailable`, after which it is unknown whether the transaction has committed.
    """

    def __init__(
        self,
        subscription: Subscription[object],
        transactions: Transactions,
        offsets: OffsetStore,
        parking: Parking,
        metrics: ConsumerMetrics,
        *,
        batch_seconds: float,
        hurry: Callable[[], bool],
    ) -> None:
        self.in_flight = 0  # transactions under way
        self._subscription = subscription
        self._transactions = transactions
        self._offsets = offsets
        self._parking = parking
        self._metrics = metrics
        self._batch_seconds = batch_seconds
        self._hurry = hurry

    async def handle(self, items: Sequence[Item]) -> int:
        """Handle `items`, or as many of them as time allows, and return how many: their effects are committed."""

        async def work(tx: Transaction) -> tuple[Sequence[Item], list[Item]]:
            blocked = await self._blocked(tx, items)
            count, aside = await self._call_handlers(tx, items, blocked)
            if aside:
                await self._parking.store(tx, self._subscription, aside)
            return items[:count], aside

        started = time.monotonic()
        done, aside = await self._in_transaction(work)
        self._count(len(done), aside, time.monotonic() - started)
        return len(done)

    async def park(self, item: Item, error: str) -> None:
        """Store the message as a job instead of handling it."""

        async def work(tx: Transaction) -> tuple[Sequence[Item], list[Item]]:
            await self._parking.store(tx, self._subscription, [item], error)
            return [item], []

        await self._in_transaction(work)
        self._metrics.messages(self._subscription.topic, "parked")

    async def discard(self, item: Item) -> None:
        """Pass over the message."""

        async def work(_: Transaction) -> tuple[Sequence[Item], list[Item]]:
            return [item], []

        await self._in_transaction(work)
        self._metrics.messages(self._subscription.topic, "discarded")

    async def _in_transaction(
        self, work: Callable[[Transaction], Awaitable[tuple[Sequence[Item], list[Item]]]]
    ) -> tuple[Sequence[Item], list[Item]]:
        """Run `work` and, last, store the offsets of the messages that it has done."""
        self.in_flight += 1
        try:
            async with self._transactions.open() as tx:
                done, aside = await work(tx)
                steps = _steps(done)
                await self._offsets.advance(tx, [step.move for step in steps])
        except (BatchFailed, OffsetsMoved, PostgresUnavailable):
            raise
        except TimeoutError as error:
            raise PostgresUnavailable("a statement of the consumer's own was not answered in time") from error
        except Exception as error:  # a statement of ours or the commit: whose fault it was, the batch cannot tell
            raise BatchFailed(error, None) from error
        finally:
            self.in_flight -= 1
        for step in steps:
            step.partition.done(step.messages, step.move.next)
        return done, aside

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
        aside: list[Item] = []
        for first, chunk in _chunks(items, self._subscription.batch or 1):
            if first and (time.monotonic() > until or self._hurry()):
                return first, aside
            direct: list[Item] = []
            for item in chunk:
                stored = isolate or item.message is None or (item.partition.origin, item.group) in blocked
                (aside if stored else direct).append(item)
            if direct:
                await self._call(tx, direct, first if len(chunk) == 1 else None)
        return len(items), aside

    async def _call(self, tx: Transaction, items: list[Item], index: int | None) -> None:
        """One call of the handler."""
        partition = items[0].partition
        current_origin.set(partition.origin)
        try:
            async with asyncio.timeout(self._subscription.timeout):
                await self._subscription.call([item.message for item in items if item.message is not None], tx)
            if not in_transaction(tx.connection):
                raise RuntimeError("a handler has ended the transaction: leave COMMIT and ROLLBACK to its consumer")
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise BatchFailed(RuntimeError("the handler raised CancelledError"), index) from error
        except Exception as error:
            if server_is_gone(error, tx.connection):
                partition.cuts += 1
                if partition.cuts <= _MAX_CUTS:
                    raise PostgresUnavailable(f"the connection broke under a handler: {error!r}") from error
            raise BatchFailed(error, index) from error

    def _count(self, done: int, aside: Sequence[Item], seconds: float) -> None:
        topic = self._subscription.topic
        held = sum(item.message is None for item in aside)
        self._metrics.batch(topic, done, seconds)
        self._metrics.messages(topic, "handled", done - len(aside))
        self._metrics.messages(topic, "held", held)
        self._metrics.messages(topic, "isolated" if self._subscription.isolate else "parked", len(aside) - held)


class _Step(NamedTuple):
    partition: Partition
    messages: int
    move: Move


def _steps(items: Sequence[Item]) -> list[_Step]:
    """How far `items` bring each of their partitions."""
    counts: dict[Partition, int] = {}
    for item in items:
        counts[item.partition] = counts.get(item.partition, 0) + 1
    return [_Step(p, count, Move(p.tp, p.next_offset, p.after(count))) for p, count in counts.items()]


def _chunks(items: Sequence[Item], size: int) -> Iterator[tuple[int, Sequence[Item]]]:
    """Consecutive messages of one partition each, at most `size`, with the index of the first: so the jobs that a list
    handler enqueues have one origin."""
    first = 0
    while first < len(items):
        last = first + 1
        while last < len(items) and last - first < size and items[last].partition is items[first].partition:
            last += 1
        yield first, items[first:last]
        first = last

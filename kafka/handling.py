"""One batch in one transaction: the handlers' effects, the messages stored as jobs, and the offsets, or nothing."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg

from ..errors import PostgresUnavailable
from ..executor import MOST_CUTS, end_if_forked, forks_so_far, takes_no_writes
from ..jobs import Snooze, Transaction
from ..jobs.context import current_work
from ..jobs.retry import leaves_of, that_counts
from ..jobs.transaction import is_closed
from ..legible import told
from .calling import told_of, unusual
from .message import Message
from .metrics import ConsumerMetrics
from .offsets import Move, OffsetsMoved, OffsetStore
from .parking import Parking
from .partition import Item, Partition, tell_undecodable
from .patience import Patience
from .seen import Seen
from .subscription import Subscription
from .transactions import Transactions, in_transaction, server_is_gone

__all__ = ["BatchFailed", "Handling", "IdNotRecorded"]

_SEEN_SECONDS = 1.0  # until a message is tried again whose id is another one's that is under way
# How Postgres ends a statement that takes too long, or that somebody has cancelled; and one that waits for a lock.
_CUT_SHORT = (asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError)


class BatchFailed(Exception):
    """Nothing of the batch is committed. `index` is that of the message whose handler raised `error`; None when any of
    the messages may be the cause."""

    def __init__(self, error: Exception, index: int | None) -> None:
        of_postgres = index is None and isinstance(error, asyncpg.PostgresError)  # its DETAIL would quote the row
        super().__init__(f"{type(error).__name__}: {told(error)}" if of_postgres else told_of(error))
        self.error = error
        self.index = index


class IdNotRecorded(Snooze):
    """No failure of the message's: it waits by itself. Nobody can tell whether for another one, or for a lock."""

    def __init__(self) -> None:
        why = "another message with its id is under way, or somebody holds a lock on message_seen (pg_locks)"
        super().__init__(_SEEN_SECONDS, why)


class Handling:
    """Handles messages of one subscription. hurry: asked between two messages; True ends the batch early.
    ending: whether the consumer is cancelling what runs.

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
        seen: Seen | None,
        batch_seconds: float,
        hurry: Callable[[], bool],
        ending: Callable[[], bool],
    ) -> None:
        self.in_flight = 0  # transactions under way
        self._subscription = subscription
        self._transactions = transactions
        self._offsets = offsets
        self._parking = parking
        self._metrics = metrics
        self._seen = seen
        self._batch_seconds = batch_seconds
        self._hurry = hurry
        self._ending = ending
        self._reach = sys.maxsize  # so many messages, or a list more, are begun with at most where ids are recorded

    async def handle(self, items: Sequence[Item]) -> int:
        """Handle `items`, or as many of them as time allows, and return how many: their effects are committed."""
        begun = {items[0].partition}
        within = self._within_reach(items)

        async def work(tx: Transaction) -> _Done:
            repeats = await self._repeats(tx, within)
            blocked = await self._blocked(tx, within)
            count, aside = await self._call_handlers(tx, within, blocked, repeats, begun)
            await tx.flush()  # before a later message of a job's group
            if aside:
                await self._parking.store(tx, self._subscription, aside)
            if self._seen is not None and count < len(within):
                await self._seen.take_back(tx, within[count:])
            return _Done(within[:count], aside, repeats)

        started = time.monotonic()
        try:
            done = await self._in_transaction(within, work)
        except PostgresUnavailable:
            for partition in begun:
                partition.undone = True
            raise
        if len(done.items) < len(items):
            self._reach = 2 * len(done.items)
        self._count(done, time.monotonic() - started)
        for item in done.aside:
            if item.message is None:
                tell_undecodable(item.partition, item.record, "is kept as a held job", item.error)
        return len(done.items)

    async def park(self, item: Item, error: str) -> None:
        """Store the message as a job instead of handling it."""

        async def work(tx: Transaction) -> _Done:
            repeats = await self._repeats(tx, [item])
            if not repeats:
                await self._parking.store(tx, self._subscription, [item], error)
            return _Done([item], [], repeats)

        done = await self._in_transaction([item], work)
        self._metrics.messages(self._subscription.topic, "duplicate" if done.repeats else "parked")

    async def discard(self, item: Item) -> None:
        """Pass over the message."""

        async def work(tx: Transaction) -> _Done:
            return _Done([item], [], await self._repeats(tx, [item]))

        await self._in_transaction([item], work)
        self._metrics.messages(self._subscription.topic, "discarded")

    async def _in_transaction(
        self, items: Sequence[Item], work: Callable[[Transaction], Awaitable["_Done"]]
    ) -> "_Done":
        """Run `work` on `items` and, last, store the offsets of those that it has done."""
        placements = {item.partition: item.placement for item in items}
        self.in_flight += 1
        try:
            _check(placements)
            async with self._transactions.open() as tx:
                try:
                    done = await work(tx)
                    _check(placements)  # before anything is asked of partitions that stand elsewhere by now
                    steps = _steps(done.items)
                    await self._offsets.advance(tx, [step.move for step in steps])
                except _CUT_SHORT as error:  # a statement of ours: what a handler raises is `BatchFailed` by now
                    if len(items) > 1:  # fewer at once may be quick enough
                        raise
                    raise PostgresUnavailable(
                        f"a statement of the consumer's own was ended: {error}: look at statement_timeout, of the role "
                        "or set by a handler, and at locks on Sidings' tables (pg_locks)"
                    ) from error
                if steps:
                    tx.failed = tx.lent = False  # in a transaction that is aborted, that would have failed
        except (BatchFailed, OffsetsMoved, PostgresUnavailable):
            raise
        except TimeoutError as error:
            raise PostgresUnavailable("a statement of the consumer's own was not answered in time") from error
        except Exception as error:  # a statement of ours or the commit: whose fault it was, the batch cannot tell
            raise BatchFailed(error, None) from error
        finally:
            self.in_flight -= 1
        for step in steps:
            if step.partition.placement == placements[step.partition]:
                step.partition.done(step.messages, step.move.next)
        return done

    def _within_reach(self, items: Sequence[Item]) -> Sequence[Item]:
        """With `dedup`, not many more than the last transaction has come to: the ids of all others are recorded, and
        taken back, for nothing. No list is cut."""
        if self._seen is None or len(items) <= self._reach:
            return items
        return items[: next((first for first, _ in self._chunks(items) if first >= self._reach), len(items))]

    async def _repeats(self, tx: Transaction, items: Sequence[Item]) -> frozenset[Item]:
        """Those of `items` that only repeat a message; the ids of the others are recorded. One whose id is taken by a
        transaction that is still open, as of a handler that hangs, waits for that by itself, and has not failed."""
        if self._seen is None:
            return frozenset()
        try:
            return await self._seen.record(tx, items)
        except _CUT_SHORT as error:  # where statement_timeout is shorter than this statement's own lock_timeout, too
            raise BatchFailed(IdNotRecorded(), None) from error

    async def _blocked(self, tx: Transaction, items: Sequence[Item]) -> frozenset[tuple[str, str]]:
        if self._subscription.isolate:  # every message is stored anyway
            return frozenset()
        return await self._parking.blocked(tx, items)

    async def _call_handlers(
        self,
        tx: Transaction,
        items: Sequence[Item],
        blocked: frozenset[tuple[str, str]],
        repeats: frozenset[Item],
        begun: set[Partition],
    ) -> tuple[int, list[Item]]:
        """How many messages were done, and those of them that have to be stored as jobs. `begun` takes up the
        partitions that have some in the transaction."""
        until = time.monotonic() + self._batch_seconds
        isolate = self._subscription.isolate
        aside: list[Item] = []
        with Patience(self._subscription.timeout) as patience:
            for first, chunk in self._chunks(items):
                if first and (time.monotonic() > until or self._hurry()):
                    return first, aside
                begun.add(chunk[0].partition)
                direct: list[Message[Any]] = []
                for item in chunk:
                    if item.passed_over or item in repeats:
                        continue
                    if item.message is None or isolate or (blocked and (item.partition.origin, item.group) in blocked):
                        aside.append(item)
                    else:
                        direct.append(item.message)
                if direct:
                    index = first if len(chunk) == 1 else None
                    try:
                        await self._call(tx, chunk[0].partition, direct, index, patience)
                    except BatchFailed as failed:
                        if tx.unstored:  # which may be what an earlier message has added
                            raise BatchFailed(failed.error, None) from failed.error
                        raise
        return len(items), aside

    async def _call(
        self,
        tx: Transaction,
        partition: Partition,
        messages: list[Message[Any]],
        index: int | None,
        patience: Patience,
    ) -> None:
        """One call of the handler."""
        token = current_work.set(tuple(messages) if len(messages) > 1 else messages[0])
        forks, task = forks_so_far(), asyncio.current_task()
        offset = messages[0].offset  # the handler may empty the list
        partition.calls[offset] = time.monotonic()
        try:
            await patience.call(self._subscription.call(messages, tx), lambda: partition.deaf.add(offset))
            tx.check_awaited()
            if is_closed(tx.opened()):  # as where it has caught that: else nobody knew whose message it was
                raise ConnectionError("the connection to Postgres was closed under a handler")
            if not in_transaction(tx.opened()):
                raise RuntimeError("a handler has ended the transaction: leave COMMIT and ROLLBACK to its consumer")
        except asyncio.CancelledError as error:
            if self._ending():
                raise
            raise BatchFailed(RuntimeError("the handler raised CancelledError"), index) from error
        except Exception as error:
            if self._ending():  # what it makes of its cancellation, as when something cannot be closed
                raise asyncio.CancelledError from error
            connection = tx.opened()
            if await takes_no_writes(connection, error, failed=tx.failed or tx.lent):
                raise PostgresUnavailable(f"Postgres takes no writes: {told_of(error)}") from error
            counts = that_counts(error)
            away = isinstance(counts, PostgresUnavailable) and not counts.blameless
            if away or any(server_is_gone(each, connection) for each in leaves_of(error)):
                partition.cuts += 1
                if partition.cuts <= MOST_CUTS:
                    raise PostgresUnavailable(f"the connection broke under a handler: {told_of(error)}") from error
            raise BatchFailed(error, index) from error
        except BaseException as error:
            end_if_forked(forks, error)
            failure = unusual(error, task)
            if self._ending():
                raise asyncio.CancelledError from error
            raise BatchFailed(failure, index) from error
        finally:
            partition.calls.pop(offset, None)
            partition.deaf.discard(offset)
            end_if_forked(forks, sys.exception())
            current_work.reset(token)

    def _chunks(self, items: Sequence[Item]) -> Iterator[tuple[int, Sequence[Item]]]:
        """Consecutive messages of one partition and type each, for one call, with the index of the first: so the jobs
        that a list handler enqueues have one origin."""
        if self._subscription.largest_batch == 1:
            for index, item in enumerate(items):
                yield index, [item]
            return
        first = 0
        while first < len(items):
            partition, kind = items[first].partition, items[first].type
            last = first + 1
            for item in items[last : first + self._subscription.batch_of(items[first].message)]:
                if item.partition is not partition or item.type != kind:
                    break
                last += 1
            yield first, items[first:last]
            first = last

    def _count(self, done: "_Done", seconds: float) -> None:
        topic = self._subscription.topic
        held = sum(item.message is None for item in done.aside)
        repeats = sum(item in done.repeats for item in done.items) if done.repeats else 0
        skipped = sum(item.passed_over for item in done.items if item.message is None)
        self._metrics.batch(topic, len(done.items), seconds)
        self._metrics.messages(topic, "handled", len(done.items) - len(done.aside) - repeats - skipped)
        self._metrics.messages(topic, "duplicate", repeats)
        self._metrics.messages(topic, "skipped", skipped)
        self._metrics.messages(topic, "held", held)
        self._metrics.messages(topic, "isolated" if self._subscription.isolate else "parked", len(done.aside) - held)


def _check(placements: Mapping[Partition, int]) -> None:
    """Raises `OffsetsMoved` where a partition has been displaced: no message of before may move its offset."""
    if void := [partition.tp for partition, placement in placements.items() if partition.placement != placement]:
        raise OffsetsMoved(void)


class _Done(NamedTuple):
    """items: whose offsets are to be stored; aside: those of them that are stored as jobs; repeats: messages of the
    batch whose id another message had."""

    items: Sequence[Item]
    aside: Sequence[Item]
    repeats: frozenset[Item]


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

"""Transactions while they are open, in the state of the operator, which keeps those of one bucket together.

A call to the state is a round trip to the JVM, more costly than all that is done with a row: hence what is done once
for a bucket and micro-batch is not done for each transaction. One that comes whole within a micro-batch, as most do,
takes two calls: is it finished (a late duplicate), and: it is, now.

| state | key | |
|---|---|---|
| `open` | transaction | what `Pending` holds, and how many chunks of rows there are |
| `rows` | transaction, chunk | rows, as JSON: those that a micro-batch brought, so that nothing is written twice |
| `rows` | transaction, `COUNTED` | how many bytes all of them have, where there is more than one chunk |
| `done` | transaction | how many rows it had, null: it was given up; a mark that Spark's time-to-live removes |
| `due` | milliseconds | the transactions to look at then, as JSON; a timer is set for then |
| `count` | | how many are open |
"""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, cast

from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessorHandle, ValueState

from .combining import combine_rows, count_changes
from .config import Config
from .decoding import Item
from .messages import Outgoing, alert, text_of
from .ordinals import Ordinals
from .pending import Pending, differing

__all__ = ["Assembling", "value_at", "value_of"]

CHUNK = 1_000_000  # characters of rows in one value of the state, about
COUNTED = -1  # in a chunk's place
ROW_BYTES = 200  # that a row takes beyond its own, in an event and in memory, about
# Characters of events that one call sends. Spark has all of them in memory, thrice, until the call has ended, and makes
# one table of them, of 2 GB at most. A transaction is not divided: `max_transaction_bytes` limits it.
ROOM = 50_000_000
SPARSE = 20  # reading one transaction costs as much as reading so many when all are read


class _Open(NamedTuple):
    """A transaction's state."""

    since: int
    last: int | None
    seen: str
    alerted: bool
    chunks: int

    def pending(self) -> Pending:
        return Pending(self.since, self.last, Ordinals(self.seen), self.alerted)


class Assembling:
    """A micro-batch's view on the transactions of a bucket, whichever Spark has set."""

    def __init__(self, config: Config, handle: StatefulProcessorHandle) -> None:
        self._config = config
        self._handle = handle
        opened = "since LONG, last INT, seen STRING, alerted BOOLEAN, chunks INT"
        self._open = handle.getMapState("open", "id STRING", opened)
        self._rows = handle.getMapState("rows", "id STRING, chunk INT", "rows STRING")
        self._done = handle.getMapState("done", "id STRING", "last INT", ttlDurationMs=_ms(config.forget_seconds))
        self._due = handle.getMapState("due", "at LONG", "ids STRING")
        self._count = handle.getValueState("count", "open LONG")
        self._looked = 0  # characters of events that timers have sent: those of all buckets are one call

    def take(self, items: Iterable[Item], now: int) -> Iterator[Outgoing]:
        """The items of the bucket that a micro-batch has brought; what is to be sent."""
        of: dict[str, list[Item]] = {}
        for item in items:
            of.setdefault(item.id, []).append(item)
        count = self._counted()
        known = self._known(of, count)
        opened: list[str] = []
        waiting: list[str] = []
        closed = sent = 0
        for id, of_it in of.items():
            before = known.get(id)
            if before is None and (done := cast(tuple[int | None] | None, value_at(self._done, (id,)))) is not None:
                yield from self._late(of_it, done[0])
                continue
            pending = Pending(now) if before is None else before.pending()
            rows, again, told = pending.absorb(self._config.alerts, of_it)
            yield from told
            chunks = 0 if before is None else before.chunks
            size = _bytes(rows) + self._kept_bytes(id, chunks)
            hopeless = self._contradicted(id, again, chain(self._kept(id, chunks), rows)) or self._too_large(
                id, pending, chain(self._kept(id, chunks), rows), size
            )
            if hopeless is not None:  # at once: it must not become complete, whatever comes
                yield hopeless
                self._done.updateValue((id,), (None,))
                if before is not None:
                    self._remove(id, chunks)
                    closed += 1
                continue
            if not pending.complete or sent > ROOM:
                self._keep(id, pending, chunks, rows, size, before)
                if before is None:
                    opened.append(id)
                if pending.complete:
                    waiting.append(id)
                continue
            if before is not None:
                rows = [*self._kept(id, chunks), *rows]
                self._remove(id, chunks)
                closed += 1
            for made in self._finished(id, pending, rows, now):
                sent += len(made.value)
                yield made
        self._look_again(now + _ms(self._config.expire_seconds), opened)
        self._look_again(now + 1, waiting)  # in the next micro-batch
        self._add(count, len(opened) - closed)

    def _contradicted(self, id: str, again: list[Item], rows: Iterable[tuple[int, str]]) -> Outgoing | None:
        """The alert that it is given up, since a row that has come again is another one: nobody knows how many rows it
        has. rows: all so far."""
        if not again or (other := differing(again, rows)) is None:
            return None
        reason = f"row {other.ordinal} has come again, with other content: the transaction is given up"
        return alert(self._config.alerts, "contradiction", reason, transaction=id, place=other.place)

    def _too_large(self, id: str, pending: Pending, rows: Iterable[tuple[int, str]], size: int) -> Outgoing | None:
        """The alert that it is given up. rows: all so far, of so many bytes."""
        most = self._config.max_transaction_bytes
        if size <= most:
            return None
        reason = (
            f"a transaction of {size:,} bytes so far; max_transaction_bytes is {most:,}: the transaction is given up."
            " To have its events, raise that, and the workers' memory, and begin anew with another checkpoint while the"
            " topics still have its rows; or load the tables of its groups as a snapshot, which tells of no deletion"
        )
        return alert(
            self._config.alerts,
            "too-large",
            reason,
            transaction=id,
            last=pending.last,
            rows=len(pending.seen),
            bytes=size,
            changes=count_changes(rows),
        )

    def _finished(self, id: str, pending: Pending, rows: list[tuple[int, str]], now: int) -> Iterator[Outgoing]:
        """What is sent of a transaction that is complete. rows: all of them."""
        if pending.alerted:
            seconds = round((now - pending.since) / 1000)
            reason = f"all {pending.last} rows have come, {seconds} s after the first"
            yield alert(self._config.alerts, "completed-late", reason, transaction=id)
        self._done.updateValue((id,), (pending.last,))
        yield from combine_rows(self._config, id, rows)

    def _late(self, items: list[Item], last: int | None) -> Iterator[Outgoing]:
        """What comes of a finished transaction of so many rows: duplicates, or what cannot be of it. None: it was given
        up, and what comes is lost, which is told once in a micro-batch."""
        if last is None:
            reason = f"records that have come after the transaction was given up: {len(items)}"
            yield alert(self._config.alerts, "given-up", reason, transaction=items[0].id, place=items[0].place)
            return
        _, _, told = Pending(0, last, Ordinals(f"1-{last}")).absorb(self._config.alerts, items)
        yield from told

    def look(self, at: int, now: int) -> Iterator[Outgoing]:
        """The timer that was set for `at` has gone off: what is still open is told, or given up; or it is complete, and
        had no room in the micro-batch before."""
        due = cast(tuple[str] | None, self._due.getValue((at,)))
        if due is None:
            return
        self._due.removeKey((at,))
        ids = dict.fromkeys(cast(list[str], json.loads(due[0])))  # a version before has noted some twice
        count = self._counted()
        known = self._known(ids, count)
        told: list[str] = []
        again: list[str] = []
        waiting: list[str] = []
        closed = 0
        # The query stood still, or it would have looked sooner: there is one more time, whose milliseconds are odd.
        stood_still = now - at > _ms(max(self._config.expire_seconds, 2 * self._config.trigger_seconds))
        for id in ids:
            state = known.get(id)
            if state is None:
                continue  # it has become complete
            pending = state.pending()
            if state.since > at and not pending.complete:
                continue  # so it has; what has its id now began later, and has a time of its own
            if pending.complete and self._looked > ROOM:
                waiting.append(id)
                continue
            hopeless = None
            if pending.complete:  # the limit may have been lowered while it waited
                size = self._kept_bytes(id, state.chunks)
                hopeless = self._too_large(id, pending, self._kept(id, state.chunks), size)
            elif state.alerted and (not stood_still or at % 2):
                hopeless = pending.given_up(self._config.alerts, id, now)
            if hopeless is not None:
                yield hopeless
                self._remove(id, state.chunks)
                self._done.updateValue((id,), (None,))
                closed += 1
                continue
            if pending.complete:
                rows = list(self._kept(id, state.chunks))
                self._remove(id, state.chunks)
                closed += 1
                for made in self._finished(id, pending, rows, now):
                    self._looked += len(made.value)
                    yield made
                continue
            if state.alerted:
                again.append(id)
                continue
            told.append(id)
            yield pending.overdue(self._config.alerts, id, now)
            self._open.updateValue((id,), state._replace(alerted=True))
        # From now on, not from `at`: after an outage of the query what was missing may not have been read yet.
        later = now + _ms(self._config.forget_seconds)
        self._look_again(later + later % 2, told)
        self._look_again(later + 1 - later % 2, again)
        self._look_again(now + 1, waiting)
        self._add(count, -closed)

    def _known(self, ids: Iterable[str], count: int) -> dict[str, _Open]:
        """Those of them that are open."""
        ids = set(ids)
        if count == 0:
            return {}
        if count <= SPARSE * len(ids):
            pairs = cast(Iterator[tuple[tuple[str], tuple[Any, ...]]], self._open.iterator())
            return {id: _Open(*state) for (id,), state in pairs if id in ids}
        found = {id: value_at(self._open, (id,)) for id in ids}
        return {id: _Open(*state) for id, state in found.items() if state is not None}

    def _keep(
        self, id: str, pending: Pending, chunks: int, rows: list[tuple[int, str]], size: int, before: _Open | None
    ) -> None:
        """size: of all rows, those that are kept already too."""
        for begin, end in _chunks(rows):
            self._rows.updateValue((id, chunks), (text_of(rows[begin:end]),))
            chunks += 1
        if rows and chunks > 1:
            self._rows.updateValue((id, COUNTED), (str(size),))
        state = _Open(pending.since, pending.last, str(pending.seen), pending.alerted, chunks)
        if state != before:
            self._open.updateValue((id,), state)

    def _kept(self, id: str, chunks: int) -> Iterator[tuple[int, str]]:
        for chunk in range(chunks):
            (rows,) = cast(tuple[str], self._rows.getValue((id, chunk)))
            yield from (tuple(row) for row in json.loads(rows))

    def _kept_bytes(self, id: str, chunks: int) -> int:
        """Of the rows that are kept. Where only one chunk is, or a version before has kept them, they are counted."""
        if chunks > 1 and (counted := cast(tuple[str] | None, value_at(self._rows, (id, COUNTED)))) is not None:
            return int(counted[0])
        return _bytes(self._kept(id, chunks))

    def _remove(self, id: str, chunks: int) -> None:
        self._open.removeKey((id,))
        for chunk in [*range(chunks), *([COUNTED] if chunks > 1 else [])]:
            self._rows.removeKey((id, chunk))

    def _look_again(self, at: int, ids: list[str]) -> None:
        if not ids:
            return
        others = cast(tuple[str] | None, value_at(self._due, (at,)))
        if others is None:
            self._handle.registerTimer(at)
        all_ids = [*cast(list[str], json.loads(others[0])), *ids] if others else ids
        once = list(dict.fromkeys(all_ids))  # `take` and several timers of a micro-batch may let the same one wait
        self._due.updateValue((at,), (text_of(once),))

    def _counted(self) -> int:
        state = cast(tuple[int] | None, value_of(self._count))
        return 0 if state is None else state[0]

    def _add(self, count: int, difference: int) -> None:
        if difference:
            self._count.update((count + difference,))


def value_at(state: MapState, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What stands there. Spark writes a warning for each key whose value it is asked for in vain: with them a log had a
    line for each transaction."""
    return cast(tuple[Any, ...], state.getValue(key)) if state.containsKey(key) else None


def value_of(state: ValueState) -> tuple[Any, ...] | None:
    """What it holds; so it is with a state that holds nothing."""
    return cast(tuple[Any, ...], state.get()) if state.exists() else None


def _bytes(rows: Iterable[tuple[int, str]]) -> int:
    return sum(ROW_BYTES + (len(row) if row.isascii() else len(row.encode())) for _, row in rows)


def _chunks(rows: list[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """Where each begins and ends."""
    begin = characters = 0
    for at, (_, row) in enumerate(rows, 1):
        characters += len(row)
        if characters > CHUNK or at == len(rows):
            yield begin, at
            begin, characters = at, 0


def _ms(seconds: float) -> int:
    return round(seconds * 1000)

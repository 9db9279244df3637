"""The stateful operator: Spark calls it for each transaction (and each root of a snapshot) that has new items.

A transaction's state is small while it is open (`open`), its rows are appended to a list (`rows`), so that a large one
that comes in many micro-batches is not written again with each of them, and what is finished leaves a mark (`done`)
that Spark's time-to-live removes. One that comes whole within a micro-batch, as most do, leaves the mark only.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from .combining import combine_rows, combine_snapshot
from .config import Config
from .decoding import Item
from .messages import Outgoing, alert
from .ordinals import Ordinals
from .pending import Pending

__all__ = ["OUTPUT", "Combiner"]

OUTPUT = "topic STRING, key STRING, value STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
APPENDED = 1_000  # rows of one message to the state


class Key(NamedTuple):
    """What items are grouped by."""

    kind: str
    id: str


class Combiner(StatefulProcessor):
    """Items in, messages out."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Spark calls it once for each partition and micro-batch."""
        self._handle = handle
        config = self._config
        self._open = handle.getValueState("open", "since LONG, last INT, seen STRING, alerted BOOLEAN")
        self._rows = handle.getListState("rows", "ordinal INT, row STRING")
        self._done = handle.getValueState("done", "at LONG", ttlDurationMs=_ms(config.forget_seconds))
        self._quiet = handle.getValueState("quiet", "changed LONG, sent BOOLEAN")
        self._parts = handle.getMapState("parts", "part STRING", "at LONG, row STRING")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:  # noqa: N802, N803
        """The items of one key that a micro-batch has brought."""
        kind, id = Key(*key)
        items = (Item(*row) for row in rows)
        now = timerValues.getCurrentProcessingTimeInMs()
        match kind:
            case "transaction":
                outgoing = self._transaction(id, items, now)
            case "snapshot":
                outgoing = self._snapshot(items, now)
            case _:
                outgoing = (Outgoing(*json.loads(cast(str, item.row))) for item in items)
        yield from map(self._row, outgoing)

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[Any]:
        """A timer of a key has gone off."""
        kind, id = Key(*key)
        now = timerValues.getCurrentProcessingTimeInMs()
        yield from map(self._row, self._overdue(id, now) if kind == "transaction" else self._settled(id, now))

    def _transaction(self, id: str, items: Iterable[Item], now: int) -> Iterator[Outgoing]:
        if self._done.exists():
            return  # late duplicates
        pending, was_open = self._pending(now)
        rows, told = pending.absorb(self._config.alerts, items)
        yield from told
        if not pending.complete:
            if rows:
                self._append(rows)
            if not was_open:
                self._handle.registerTimer(self._expires(pending))
            self._open.update((pending.since, pending.last, str(pending.seen), pending.alerted))
            return
        if was_open:
            rows = [*cast(Iterator[tuple[int, str]], self._rows.get()), *rows]
            self._handle.deleteTimer(self._expires(pending))
            self._forget()
            if pending.alerted:
                seconds = round((now - pending.since) / 1000)
                reason = f"all {pending.last} rows have come, {seconds} s after the first"
                yield alert(self._config.alerts, "completed-late", reason, transaction=id)
        self._done.update((now,))
        yield from combine_rows(self._config, id, rows)

    def _overdue(self, id: str, now: int) -> Iterator[Outgoing]:
        pending, was_open = self._pending(now)
        if not was_open:
            return
        if pending.alerted:  # it has had its second time
            self._forget()
            self._done.update((now,))
            return
        yield pending.overdue(self._config.alerts, id, now)
        pending.alerted = True
        self._open.update((pending.since, pending.last, str(pending.seen), True))
        self._handle.registerTimer(self._expires(pending))

    def _pending(self, now: int) -> tuple[Pending, bool]:
        state = cast(tuple[int, int | None, str, bool] | None, self._open.get())
        if state is None:
            return Pending(now), False
        since, last, seen, alerted = state
        return Pending(since, last, Ordinals(seen), alerted), True

    def _expires(self, pending: Pending) -> int:
        seconds = self._config.expire_seconds + (self._config.forget_seconds if pending.alerted else 0)
        return pending.since + _ms(seconds)

    def _append(self, rows: list[tuple[int, str]]) -> None:
        for begin in range(0, len(rows), APPENDED):
            self._rows.appendList(cast(list[tuple[Any, ...]], rows[begin : begin + APPENDED]))

    def _forget(self) -> None:
        self._open.clear()
        self._rows.clear()

    def _snapshot(self, items: Iterable[Item], now: int) -> Iterator[Outgoing]:
        changed = False
        for item in sorted(items, key=lambda item: (item.at, _offset(item))):
            part = (item.part,)
            known = cast(tuple[int, str] | None, self._parts.getValue(part))
            if known is None or (item.at >= known[0] and item.row != known[1]):
                self._parts.updateValue(part, (item.at, item.row))
                changed = True
        if not changed:
            return  # duplicates
        state = cast(tuple[int, bool] | None, self._quiet.get())
        if state is None or state[1]:
            self._handle.registerTimer(now + _ms(self._config.snapshot_quiet_seconds))
        self._quiet.update((now, False))
        yield from ()

    def _settled(self, id: str, now: int) -> Iterator[Outgoing]:
        state = cast(tuple[int, bool] | None, self._quiet.get())
        if state is None:
            return
        changed, sent = state
        quiet_at = changed + _ms(self._config.snapshot_quiet_seconds)
        keep_until = changed + _ms(self._config.snapshot_keep_seconds)
        if not sent and now < quiet_at:
            self._handle.registerTimer(quiet_at)
        elif not sent:
            self._quiet.update((changed, True))
            self._handle.registerTimer(max(keep_until, now + 1))
            rows = [row for _, row in cast(Iterator[tuple[int, str]], self._parts.values())]
            group, root = cast(list[str], json.loads(id))
            yield from combine_snapshot(self._config, group, root, rows)
        elif now >= keep_until:
            self._quiet.clear()
            self._parts.clear()

    def _row(self, outgoing: Outgoing) -> Row:
        headers = [Row(key=name, value=value.encode()) for name, value in outgoing.headers.items()]
        return Row(topic=outgoing.topic, key=outgoing.key, value=outgoing.value, headers=headers)


def _offset(item: Item) -> int:
    return int(item.place.rpartition("/")[2])


def _ms(seconds: float) -> int:
    return round(seconds * 1000)

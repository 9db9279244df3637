"""The rows of a root that an initial load brings, in the state of the operator, until no more of them come."""

import json
from collections.abc import Iterable, Iterator
from typing import cast

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from .assembling import value_at, value_of
from .combining import combine_snapshot
from .config import Config
from .decoding import Item
from .messages import Outgoing

__all__ = ["Snapshots"]

# Of events that are due, in a micro-batch of a state partition. A worker has all that timers send in memory, thrice,
# until the last of them has gone off, and what Spark makes of it takes 2 GB at most.
CHARACTERS = 50_000_000


class Snapshots:
    """A micro-batch's view on the rows of a root, whichever Spark has set."""

    def __init__(self, config: Config, handle: StatefulProcessorHandle) -> None:
        self._config = config
        self._handle = handle
        self._quiet = handle.getValueState("quiet", "changed LONG, sent BOOLEAN")
        self._parts = handle.getMapState("parts", "part STRING", "at LONG, row STRING")
        self._characters = 0

    def take(self, items: Iterable[Item], now: int) -> Iterator[Outgoing]:
        """The rows of the root that a micro-batch has brought: nothing is sent yet."""
        changed = False
        for item in sorted(items, key=lambda item: (item.at, _offset(item))):
            part = (item.part,)
            known = cast(tuple[int, str] | None, value_at(self._parts, part))
            if known is None or item.at > known[0] or (item.at == known[0] and item.row != known[1]):
                # The time also of a row that has come again as it was: what was sent in between may come yet.
                self._parts.updateValue(part, (item.at, item.row))
                changed = changed or known is None or item.row != known[1]
        if not changed:
            return  # duplicates
        state = cast(tuple[int, bool] | None, value_of(self._quiet))
        if state is None or state[1]:
            self._handle.registerTimer(now + _ms(self._config.snapshot_quiet_seconds))
        self._quiet.update((now, False))
        yield from ()

    def settled(self, id: str, at: int, now: int) -> Iterator[Outgoing]:
        """The timer that was set for `at` has gone off: its event, when its rows are quiet, or its end, when they are
        old."""
        state = cast(tuple[int, bool] | None, value_of(self._quiet))
        if state is None:
            return
        changed, sent = state
        quiet_at = changed + _ms(self._config.snapshot_quiet_seconds)
        keep_until = changed + _ms(self._config.snapshot_keep_seconds)
        # From now on: after an outage of the query the rest of the load may not have been read yet.
        later = now + _ms(self._config.snapshot_keep_seconds)
        if not sent and now < quiet_at:
            self._handle.registerTimer(quiet_at)
        elif not sent and self._characters > CHARACTERS:
            self._handle.registerTimer(now + 1)  # in the next micro-batch
        elif not sent:
            self._quiet.update((changed, True))
            self._handle.registerTimer(later + later % 2)
            parts = self._young(now)
            # State from before columns' names told parts apart too may have a row once more, under its former part.
            rows = list(dict.fromkeys(row for _, row in parts))
            group, root = cast(list[str], json.loads(id))
            for made in combine_snapshot(self._config, group, root, rows, [at for at, _ in parts]):
                self._characters += len(made.value)
                yield made
        elif at < keep_until:
            # It was for rows before the last one, which has a timer of its own; or it is that one, and rows were kept
            # for less when it was set. Only then a further one: else each event left a timer that never ends.
            if at == max(self._handle.listTimers(), default=at):
                self._handle.registerTimer(later + later % 2)
        elif now - at > _ms(max(self._config.snapshot_quiet_seconds, 2 * self._config.trigger_seconds)) and at % 2 == 0:
            # The query stood still, or it would have looked sooner: once more, at a time whose milliseconds are odd.
            self._handle.registerTimer(later + 1 - later % 2)
        else:
            self._quiet.clear()
            self._parts.clear()

    def _young(self, now: int) -> list[tuple[int, str]]:
        """The parts; those that no load has brought for so long that the source must have deleted them are dropped.

        By the times of the records: after an outage of the query the whole load is old. A time that is ahead of `now`
        is wrong, and makes no other part old.
        """
        parts = list(cast(Iterator[tuple[tuple[str], tuple[int, str]]], self._parts.iterator()))
        newest = max((at for _, (at, _) in parts if at <= now), default=0)
        kept: list[tuple[int, str]] = []
        for part, (at, row) in parts:
            if at < newest - _ms(self._config.snapshot_keep_seconds):
                self._parts.removeKey(part)
            else:
                kept.append((at, row))
        return kept


def _offset(item: Item) -> int:
    return int(item.place.rpartition("/")[2])


def _ms(seconds: float) -> int:
    return round(seconds * 1000)

"""The stateful operator: Spark calls it for each bucket of transactions, and each root of a snapshot, with what came
for it, and when a timer of it goes off.
"""

import json
from collections.abc import Iterator
from typing import Any, cast

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from .assembling import Assembling
from .bundles import items_of
from .config import Config
from .messages import HEADERS, Outgoing
from .snapshots import Snapshots

__all__ = ["OUTPUT", "Combiner"]

_kept_open: list[Any] = []  # the connection to the state of the task that this process did last

# Headers as columns: to make Python structures of them takes longer than all else that is done for a message.
OUTPUT = ", ".join(f"`{name}` STRING" for name in ("topic", "key", "value", *HEADERS))
_Sent = Row("topic", "key", "value", *HEADERS)


class Combiner(StatefulProcessor):
    """Bundles in, messages out."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Spark calls it once for each partition and micro-batch."""
        self._handle = handle
        self._transactions = Assembling(self._config, handle)
        self._snapshots = Snapshots(self._config, handle)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:  # noqa: N802, N803
        """The bundles of one key that a micro-batch has brought."""
        kind, _, _ = cast(str, key[0]).partition("/")
        items = (item for row in rows for item in items_of(row.items))
        now = timerValues.getCurrentProcessingTimeInMs()
        match kind:
            case "transaction":
                outgoing = self._transactions.take(items, now)
            case "snapshot":
                outgoing = self._snapshots.take(items, now)
            case _:
                outgoing = (Outgoing(*json.loads(cast(str, item.row))) for item in items)
        return map(_row, outgoing)

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[Any]:
        """A timer of a key has gone off."""
        kind, _, id = cast(str, key[0]).partition("/")
        now = timerValues.getCurrentProcessingTimeInMs()
        at = expiredTimerInfo.getExpiryTimeInMs()
        if kind == "transaction":
            outgoing = self._transactions.look(at, now)
        else:
            outgoing = self._snapshots.settled(id, at, now)
        return map(_row, outgoing)

    def close(self) -> None:
        """Spark calls it when a task has done its work.

        Up to 4.2.0 Spark never closes its end of the connection to the state (SPARK-58932): a socket and a port stayed
        for each task, until there were none left. When the task ends, the thread that reads it is interrupted, and that
        closes it, if it still reads. So it is not told that nothing more comes, nor is the connection closed here.
        """
        connection = getattr(self._handle, "_statefulProcessorApiClient", None)
        if connection is not None:  # Spark's stand-in for tests has none
            connection.set_handle_state = _said_nothing
            _kept_open[:] = [connection]


def _said_nothing(state: object) -> None:
    """In place of the client's own."""


def _row(outgoing: Outgoing) -> Row:
    return _Sent(outgoing.topic, outgoing.key, outgoing.value, *map(outgoing.headers.get, HEADERS))

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

# Headers as columns: to make Python structures of them takes longer than all else that is done for a message.
OUTPUT = ", ".join(f"`{name}` STRING" for name in ("topic", "key", "value", *HEADERS))
_Sent = Row("topic", "key", "value", *HEADERS)


class Combiner(StatefulProcessor):
    """Bundles in, messages out."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Spark calls it once for each partition and micro-batch."""
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
        if kind == "transaction":
            outgoing = self._transactions.look(expiredTimerInfo.getExpiryTimeInMs(), now)
        else:
            outgoing = self._snapshots.settled(id, now)
        return map(_row, outgoing)


def _row(outgoing: Outgoing) -> Row:
    return _Sent(outgoing.topic, outgoing.key, outgoing.value, *map(outgoing.headers.get, HEADERS))

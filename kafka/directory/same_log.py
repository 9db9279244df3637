"""Whether the log is still the one that was read before: a topic may be made anew under its name, or be cut off."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from uuid import UUID

from aiokafka.errors import KafkaError

from ..message import Record
from ..topic_ids import is_another
from .reader import Reader
from .storage import Mark

__all__ = ["SameLog", "outside"]

_DOUBT_SECONDS = 10.0  # between looks at the last record while nothing comes
_ID_PAUSE_SECONDS = 5.0  # between looks at the topic's id
_ID_SECONDS = 2.0  # for the answer


class SameLog:
    """What tells that a topic's log is the same as before: the topic's id, and the last record of each partition, which
    is read again after a pause, and whose leader's epoch must not end before it."""

    def __init__(self) -> None:
        self.topic_id: UUID | None = None  # of the topic which is read
        self.marks: dict[int, Mark] = {}  # of each partition, the last record that was applied
        self._id_now: UUID | None = None  # of the topic which has its name, when that was last asked
        self._id_asked_at = 0.0
        self._expected: dict[int, Mark] = {}  # what stands first where reading goes on, if it is the same log
        self._at_end: set[int] = set()  # read up to their ends since the last look at what stands there
        self._sure_at = 0.0  # when the last record was last looked at

    async def ask_id(self, reader: Reader) -> None:
        """Which topic has the name now; as before, where Kafka does not say. To be asked before where its logs begin
        and end: these may be another's by then, which the next look shows."""
        self._id_asked_at = time.monotonic()
        with suppress(KafkaError, OSError):  # TimeoutError is an OSError
            async with asyncio.timeout(_ID_SECONDS):
                self._id_now = await reader.topic_id() or self._id_now
        self.topic_id = self.topic_id or self._id_now

    async def look(self, reader: Reader) -> str | None:
        """`another`, having asked every now and then."""
        if time.monotonic() - self._id_asked_at > _ID_PAUSE_SECONDS:
            await self.ask_id(reader)
        return self.another()

    def another(self) -> str | None:
        """Why the topic is not the one that is read, though it has its name; None where nothing tells. The records do
        not, where it has grown past the place that was reached in the former one, and has none at the last one's."""
        return "the topic has another id: it was made anew" if is_another(self.topic_id, self._id_now) else None

    async def cut(self, reader: Reader) -> str | None:
        """Why the log does not hold the last records any more; None where nothing tells. There may be none where one
        of them was, as where it was compacted since: so only the leaders' epochs tell, once it has grown again."""
        epochs = {partition: mark.epoch for partition, mark in self.marks.items() if mark.epoch is not None}
        for partition, end in (await reader.epoch_ends(epochs)).items():
            if 0 <= end <= (offset := self.marks[partition].offset):
                return f"partition {partition} was cut off at {end}, before {offset + 1}"
        return None

    def read_anew(self) -> None:
        """It is read from its beginning, as the topic that has the name now."""
        self.topic_id = self._id_now
        self.marks.clear()

    def starts(self, positions: Mapping[int, int], begins: Mapping[int, int]) -> dict[int, int]:
        """Where to read on: at the last record that was applied, which is then expected there."""
        self._expected, self._sure_at = dict(self.marks), time.monotonic()
        self._at_end.clear()
        return dict(positions) | {p: max(mark.offset, begins.get(p, 0)) for p, mark in self.marks.items()}

    def at_end(self, partition: int) -> None:
        """There was nothing more of this partition."""
        self._at_end.add(partition)

    def in_doubt(self, fetched: Mapping[int, Sequence[Record]]) -> bool:
        """Whether to look first if this is the log that was read before: a client tells nothing of a topic that was
        made anew, or cut off, and is as long as before. Where it is longer, its end may be known before its records
        are: so what counts is that there was nothing more once."""
        return time.monotonic() - self._sure_at > _DOUBT_SECONDS or any(
            partition in self.marks and partition not in self._expected and partition in self._at_end
            for partition in fetched
        )

    def differs(self, fetched: dict[int, Sequence[Record]], positions: Mapping[int, int]) -> str | None:
        """Why the log is not the one that was read before; None where nothing tells. Takes out what was applied."""
        for partition in list(fetched) if self._expected else ():
            expected, records = self._expected.pop(partition, None), fetched[partition]
            if expected is not None and records[0].offset == expected.offset:
                if records[0].timestamp != expected.timestamp_ms:
                    return f"partition {partition} has another record at {expected.offset}: the topic was made anew"
                if expected.offset < positions[partition]:
                    fetched[partition] = records[1:]
                if not fetched[partition]:
                    del fetched[partition]
        return None


def outside(positions: Mapping[int, int], begins: Mapping[int, int], ends: Mapping[int, int]) -> str | None:
    """Why what comes next cannot be in this log; None where it can."""
    if gone := sorted(positions.keys() - ends.keys()):
        return f"the topic has no partition {gone[0]} any more: it was made anew"
    for partition, position in positions.items():
        if position > ends[partition]:
            return f"partition {partition} ends at {ends[partition]}, before {position}: the topic was made anew"
        if position < begins[partition]:
            return f"partition {partition} begins at {begins[partition]}, after {position}: the rest is gone"
    return None

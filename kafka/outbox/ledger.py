"""What becomes of the messages of one round."""

from collections.abc import Collection, Sequence

from ...executor import now
from .backlog import Backlog, Lane, Row, slot_of
from .recorder import Recorder

__all__ = ["Ledger"]


class Ledger:
    """The messages that were taken out of a lane together. Each is settled once: as accepted, refused, or lost with its
    slot; what is left in the end is outstanding. accepted: how many were."""

    def __init__(self, lane: Lane, rows: list[Row], backlog: Backlog, recorder: Recorder) -> None:
        self.rows = rows
        self.accepted = 0
        self._lane = lane
        self._backlog = backlog
        self._recorder = recorder
        self._handed_over: list[Sequence[Row]] = []
        self._settled: list[Sequence[Row]] = []

    def hand_over(self, rows: list[Row]) -> None:
        """They are about to be sent."""
        self._handed_over.append(rows)

    def accept(self, rows: list[Row]) -> None:
        """Kafka has acknowledged them."""
        self.accepted += len(rows)
        self._settled.append(rows)
        self._recorder.acknowledged(self._lane, rows)

    def refuse(self, row: Row, reason: str) -> None:
        """Kafka will never take it, or it cannot be sent."""
        self._settled.append((row,))
        self._recorder.refused(self._lane, row, reason)

    def still_ours(self, rows: list[Row]) -> list[Row]:
        """Leave out messages of slots that were lost; they are their new owner's. The last look before sending. The
        same list if all are ours."""
        time = now()
        lost = {slot for slot in set(map(slot_of, rows)) if slot.expired(time) or not self._backlog.has(slot)}
        if not lost:
            return rows
        gone = self.unsettled([row for row in rows if slot_of(row) in lost])
        self._settled.append(gone)
        self._lane.account(gone)
        return [row for row in rows if slot_of(row) not in lost]

    def unsettled(self, rows: Collection[Row]) -> list[Row]:
        """Those of `rows` of which nothing has become yet."""
        settled = {row[:2] for some in self._settled for row in some}  # one id may stand in two slots
        return [row for row in rows if row[:2] not in settled]

    def unanswered(self) -> list[Row]:
        """What is outstanding and was handed over: Kafka may have it."""
        return self.unsettled([row for some in self._handed_over for row in some])

    def outstanding(self) -> list[Row]:
        """All of the round of which nothing has become yet."""
        return self.unsettled(self.rows)

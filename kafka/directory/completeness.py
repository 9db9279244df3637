"""Whether deletions may have been missed: Kafka keeps a tombstone for a time, and who was away for longer never sees
it."""

import logging
import time
from collections.abc import Collection, Iterable

__all__ = ["TOMBSTONE_SECONDS", "Completeness"]

log = logging.getLogger("sidings.directory")

TOMBSTONE_SECONDS = 86_400.0  # Kafka's default, where it does not tell
_ABSENT_SECONDS = 60.0  # a shorter absence is none, whatever delete.retention.ms says


class Completeness:
    """When nothing of `topic` was missing. Times are seconds since 1970."""

    def __init__(self, topic: str) -> None:
        self.at = 0.0  # of all partitions; while all is read, for the first time or again, when that began
        self.tombstone_seconds = TOMBSTONE_SECONDS  # the topic's delete.retention.ms
        self._topic = topic
        self._at_end: dict[int, float] = {}  # the same of each partition
        self._served_at = 0.0  # the same of the rows that are in use
        self._read_anew = False  # and since then something has been missing at any time
        self._standing: set[int] = set()  # partitions with a record that the client cannot read, until they are read

    @property
    def stale_seconds(self) -> float:
        """How long ago Kafka last said that nothing of the rows in use was missing."""
        return max(0.0, time.time() - self._served_at)

    def begin(self) -> None:
        """All is read from now on, for the first time or again."""
        self.at, self._read_anew = time.time(), True
        self._standing.clear()

    def at_end(self, partition: int, answered: float) -> None:
        """All of the partition had been read when Kafka answered."""
        self._at_end[partition] = answered
        self._standing.discard(partition)

    def stand_still(self, partitions: Collection[int]) -> None:
        """The client cannot read what comes next of these. What they miss meanwhile was not missed in a long load, and
        nothing is gained by reading all again before they are read: that would end as little, and keep back what comes
        of the others. `look` sees it when they have come to their ends."""
        self._standing.update(partitions)
        if partitions:
            self._read_anew = False

    def barrier_reached(self) -> None:
        """What was at its end once, earlier, may have deletions since."""
        self._at_end.clear()

    def loaded(self) -> None:
        """The rows are in use from now on."""
        self._served_at = self.at

    def look(self, partitions: Iterable[int]) -> str | None:
        """Take in of when all `partitions` are complete. Returns why everything has to be read again; None where it has
        not, or where reading all took so long that reading again would as well."""
        now = min((self._at_end.get(partition, 0.0) for partition in partitions), default=0.0)
        away = now - self.at
        missed = self._missed(away) if away > max(self.tombstone_seconds, _ABSENT_SECONDS) else None
        if missed is not None and not self._read_anew:
            return missed
        if now:  # it may lie before: somebody has put the clock back
            if missed is not None:
                log.warning("directory %r takes too long to be read: %s; raise that", self._topic, missed)
            self.at = self._served_at = now
            self._read_anew = False
        return None

    def missed_before(self, loaded: bool) -> str | None:
        """Why the rows, of before a connection or of a file, may not be current; None where they are, or where rows in
        use will be looked at when no partition stands still any more."""
        if loaded and self._standing:
            return None
        away = abs(time.time() - self.at)  # a time to come is none to count from
        return self._missed(away) if away > self.tombstone_seconds and (not loaded or away > _ABSENT_SECONDS) else None

    def _missed(self, away: float) -> str:
        return (
            f"its rows are {away:.0f} s old, and Kafka keeps tombstones for {self.tombstone_seconds:.0f} s "
            "(delete.retention.ms): it may have missed deletions"
        )

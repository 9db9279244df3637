"""Jobs that were lost with their executor: any of them may have been its death."""

import logging
from collections import deque
from collections.abc import Callable, Collection

from .queues import Entry

__all__ = ["Suspects"]

log = logging.getLogger("sidings.executor")

_ALONE_SECONDS = 300.0  # a suspect that runs for longer keeps the others waiting no more: it may hang


class Suspects:
    """They run one at a time, beside all the innocent: so the next death shows which it was. One that waits for its
    turn holds its lane."""

    def __init__(self) -> None:
        self.running: Entry | None = None
        self._waiting: deque[Entry] = deque()
        self._until = 0.0  # the one that runs has had its time alone then

    def ready(self) -> bool:
        """Whether one may start."""
        return bool(self._waiting) and self.running is None

    def start(self, now: float, full: Collection[str]) -> Entry | None:
        """The next one that is of none of these types."""
        entry = next((entry for entry in self._waiting if entry.type not in full), None)
        if entry is not None:
            self._waiting.remove(entry)
            self.admit(entry, now)
        return entry

    def admit(self, entry: Entry, now: float) -> bool:
        """Whether this one may start now; else it waits here."""
        if self.running is None:
            self.running, self._until = entry, now + _ALONE_SECONDS
            return True
        self._waiting.append(entry)
        return False

    def over(self, entries: Collection[Entry]) -> None:
        """These run no more: perhaps the next one may."""
        if self.running is not None and self.running in entries:
            self.running = None

    def remove(self, entry: Entry) -> bool:
        """Take out one that waits. Returns whether it did."""
        if entry not in self._waiting:
            return False
        self._waiting.remove(entry)
        if entry.lane is not None:
            entry.lane.running = None
        return True

    def forget(self, gone: Callable[[Entry], bool]) -> set[Entry]:
        """Take out those of them that wait, and return these."""
        forgotten = {entry for entry in self._waiting if gone(entry)}
        self._waiting = deque(entry for entry in self._waiting if entry not in forgotten)
        for entry in forgotten:
            if entry.lane is not None:
                entry.lane.running = None
        return forgotten

    def next_due(self) -> float | None:
        """When `wake_due` has something to do."""
        return self._until if self._waiting and self.running is not None else None

    def wake_due(self, now: float) -> None:
        """The one that runs has been alone for long enough."""
        if self._waiting and self.running is not None and now >= self._until:
            log.warning(
                "job %s %s, which was lost when its executor died, has been running for %.0f s: the next such job "
                "starts beside it",
                *(self.running.id, self.running.type, _ALONE_SECONDS),
            )
            self.running = None

"""Topics that a person has paused: nothing more of them is handled, in any instance, until somebody resumes them."""

import logging
from collections.abc import Collection

__all__ = ["Pauses"]

log = logging.getLogger("sidings.consumer")


class Pauses:
    """Those of the consumed `topics` that are paused (``sidings.topic_pause``), as Postgres has last told. While it is
    away, they stay as they were. Any thread may ask ``topic in pauses``."""

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = frozenset(topics)
        self._paused = frozenset[str]()

    def __contains__(self, topic: object) -> bool:
        return topic in self._paused

    def told(self, topics: Collection[str] | None) -> None:
        """Of all topics, these are paused; None: none is."""
        paused = self._topics.intersection(topics or ())
        for topic in sorted(paused - self._paused):
            log.warning("%s: paused by order, nothing more of it is taken up; `sidings pauses` says by whom", topic)
        for topic in sorted(self._paused - paused):
            log.info("%s: resumed by order, going on", topic)
        self._paused = paused

"""Attempts of jobs that met Postgres away, which is no failure of theirs."""

from .queues import Entry

__all__ = ["Outages"]

_MAX_CUTS = 2  # connections that may be lost under one job before it is taken for the cause, as under a message
_MOST = 10_000  # jobs of which that is remembered


class Outages:
    """Counts them by job, in this process."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._cuts: dict[int, int] = {}

    def met(self, entry: Entry) -> int:
        """One more attempt has. How many did before it."""
        return _count(self._met, entry.id) - 1

    def is_cause(self, entry: Entry) -> bool:
        """One more connection was lost under the job. Whether they are so many that it is taken for the cause: it may
        bring the server down, or something ends what takes as long as it does."""
        return _count(self._cuts, entry.id) > _MAX_CUTS


def _count(counts: dict[int, int], id: int) -> int:
    if len(counts) >= _MOST:
        counts.clear()
    counts[id] = counts.get(id, 0) + 1
    return counts[id]

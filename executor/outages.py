"""Attempts of jobs that met a server away, or a conflict with another transaction, which is no failure of theirs."""

import random

from .queues import Entry

__all__ = ["MOST_CONFLICTS", "MOST_CUTS", "Outages", "after_conflict", "conflicts_of"]

# Of a job or message, that are no failure. The next one counts as one: nothing goes on for ever unseen, as where a
# handler itself raises what Postgres raises of a conflict.
MOST_CONFLICTS = 10
# Connections to Postgres that may be lost under a job or message, or times that Kafka was late with what it sends and
# nobody knows why, before it is taken for the cause.
MOST_CUTS = 2
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
        """One more connection was lost under the job, or Kafka was late. Whether they are so many that it is taken for
        the cause: it may bring the server down, or send more than comes through, or something ends what takes as long
        as it does."""
        return _count(self._cuts, entry.id) > MOST_CUTS


def conflicts_of(entry: Entry) -> int:
    """The attempt was in conflict with another transaction. How many may have been since one that counts; 0: it counts.

    By the number of the attempt, which the row has: counted here, it would begin anew with each process, and as soon as
    more jobs are in conflict than can be remembered."""
    return entry.attempt % (MOST_CONFLICTS + 1)


def after_conflict(conflicts: int) -> float:
    """Seconds until the next attempt after so many: soon, since one of those in conflict has gone through, but not when
    all others try again."""
    return random.uniform(0.02, min(2.0, 0.05 * 2**conflicts))


def _count(counts: dict[int, int], id: int) -> int:
    if len(counts) >= _MOST:
        counts.clear()
    counts[id] = counts.get(id, 0) + 1
    return counts[id]

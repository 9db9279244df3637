"""Partitions that have taken nothing lately: messages without a key, which may go to any, go to others."""

from collections.abc import Collection, Iterable

from ...executor import now

__all__ = ["Shunned"]

_LONGEST_SECONDS = 3_600.0


class Shunned:
    """Remembers them until they take something. seconds: after which messages without a key try one again, as nothing
    else may ever go there; each time that this is in vain, it is left out for twice as long, an hour at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[tuple[str, int], tuple[float, float]] = {}  # until when, and how many seconds these are

    def failed(self, topic: str, partitions: Iterable[int]) -> None:
        """They took nothing."""
        time = now()
        for partition in partitions:
            until, seconds = self._until.get((topic, partition), (time, 0.0))
            if until <= time:
                seconds = min(2 * seconds, max(_LONGEST_SECONDS, self._seconds)) or self._seconds
            self._until[topic, partition] = time + seconds, seconds

    def took(self, topic: str, partitions: Iterable[int]) -> None:
        """They have taken something."""
        if self._until:
            for partition in partitions:
                self._until.pop((topic, partition), None)

    def avoided(self, topic: str, partitions: Collection[int], others: frozenset[int]) -> frozenset[int]:
        """Those of a topic's partitions that messages without a key do not go to: these, and `others`. Where that
        leaves none it is not the fault of the partitions, and they are remembered no more."""
        shunned = self._now(topic, partitions)
        if others.issuperset(partitions) or not (shunned | others).issuperset(partitions):
            return others | shunned
        self.took(topic, shunned)
        return others

    def leaves_none(self, topic: str, partitions: Collection[int], others: frozenset[int]) -> bool:
        """Whether all of a topic's partitions are remembered, or among `others`."""
        return (self._now(topic, partitions) | others).issuperset(partitions)

    def _now(self, topic: str, partitions: Collection[int]) -> frozenset[int]:
        if not self._until:
            return frozenset()
        time = now()
        return frozenset(p for p in partitions if (topic, p) in self._until and self._until[topic, p][0] > time)

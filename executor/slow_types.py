"""Which types of jobs are slow, how many workers each keeps, and how many it may still have."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence, Sized

from .shares import TIMES_THE_REST, shares, too_many
from .worker import Worker

__all__ = ["SlowTypes"]

log = logging.getLogger("sidings.executor")

_SLOW_SECONDS = 0.05  # that a handler has been running for
_SLOW_SIGNS, _MOST_SIGNS = 3, 10  # that most handlers of a type have been running for so long
_TELL_SECONDS = 60.0


class SlowTypes:
    """Of one executor. workers: how many it has. types: those that are declared, of which there may be more later."""

    def __init__(self, workers: int, types: Sized) -> None:
        self.names: frozenset[str] = frozenset()
        self.held = Counter[str]()  # workers that are not idle, by the type that they run; to count them takes long
        self._workers = workers
        self._types = types
        self._signs: dict[str, int] = {}  # two for each look at which most workers of a type have had its jobs for long
        self._told: dict[str, float] = {}  # slow types, and when the log may be told again

    def turn(self, worker: Worker, type: str | None) -> None:
        """The worker takes jobs of this type from now on; None: it is idle."""
        if worker.type is not None:
            self.held[worker.type] -= 1
        if type is not None:
            self.held[type] += 1
        worker.type = type

    def leaves(self, type: str, idle: int, waking: int = 0) -> bool:
        """Whether a type is to leave the idle workers to others, slow or not. idle: how many there are; waking: workers
        that have been woken and have no job yet: they may take this type's."""
        few = idle * (TIMES_THE_REST + 1) <= self._workers
        return few and self._several() and self.held[type] + waking >= TIMES_THE_REST * idle

    def share_out(self, coming: Iterable[str], claimed: Sequence[str]) -> tuple[dict[str, int], list[bool]]:
        """How many more jobs of each slow type may start, beside those that come and those that are claimed (of each
        its type); and which claimed ones are too many already."""
        held = self.held.copy()
        held.update(coming)
        held.update(claimed)
        slow = {type: held[type] for type in self.names}
        back = too_many(self._workers, slow, claimed)
        return shares(self._workers, slow), back

    def look(self, busy: Iterable[Worker], idle: int, time: float) -> bool:
        """Look which types are slow now, every 0.05 s; returns whether these are others than before. A type of which a
        few jobs take long is not slow, nor one that was held up once, with all others. One that is slow stays so for
        some looks: where its jobs begin together they are all young at every other look."""
        long = Counter[str]()
        if 2 * idle <= self._workers and self._several():
            entries = [worker.entry for worker in busy if time - worker.started > _SLOW_SECONDS]
            long.update(entry.type for entry in entries if entry is not None)
        most_long = [type for type, count in long.items() if 2 * count > self.held[type]]
        signs = {type: count - 1 for type, count in self._signs.items() if count > 1}
        signs |= {type: min(self._signs.get(type, 0) + 2, _MOST_SIGNS) for type in most_long}
        former, self._signs = self.names, signs
        self.names = frozenset(type for type, count in signs.items() if count >= _SLOW_SIGNS)
        return self.names != former

    def _several(self) -> bool:
        return len(self._types) > 1  # one alone has all workers

    def tell(self, time: float) -> None:
        """Log which slow types have all that they may have, once a minute."""
        left = shares(self._workers, {type: self.held[type] for type in self.names})
        for type in [type for type, more in left.items() if more <= 0 and time >= self._told.get(type, 0.0)]:
            self._told[type] = time + _TELL_SECONDS
            log.warning(
                "%s of %s workers run jobs of the type %r: no more of them start, so that other types find workers; if "
                "that is normal for it, raise ExecutorSettings.concurrency, else see its `timeout=`",
                *(self.held[type], self._workers, type),
            )

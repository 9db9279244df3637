"""The jobs in memory, and how many more there is room for: by their number, and by the size of their payloads.

What could run fills the window. Beyond it memory holds what runs and what waits behind others, up to a budget; and the
payloads of all have a budget of their own, so that a read asks for fewer rows where they are large. Pure, like the
scheduler.
"""

from collections.abc import Iterable, Mapping

from .queues import Entry, OriginQueue
from .ready import ReadyQueue

__all__ = ["Memory"]

_FIRST_ROOM = 256  # rows of a read of which nothing is known yet
_LEAST_ROOM = 64  # runnable jobs to have in memory, however much stands there that cannot run; fewer of large ones
_VARY = 4  # how many times as large as the others payloads may be, before a read is cut short for it


class Memory:
    """jobs: by id, waiting and running. payload: characters of their payloads and headers, all together. keep: most
    jobs of a lane.

    origins, ready: what is held and what could run. For the sizes see `Scheduler`.
    """

    def __init__(
        self,
        origins: Mapping[str, OriginQueue],
        ready: ReadyQueue,
        *,
        window: int,
        keep: int,
        budget: int,
        payload_budget: int,
    ) -> None:
        self.jobs: dict[int, Entry] = {}
        self.payload = 0
        self.window = window
        self.keep = self.max_keep = keep
        self.budget = budget
        self.payload_budget = payload_budget
        self.size_ahead = payload_budget / (_FIRST_ROOM * _VARY)  # of a payload, while nothing is in memory
        self._origins = origins
        self._ready = ready

    def drop(self, entry: Entry) -> None:
        """Forget a job, unless another entry stands for it: its origin may have been dropped and read anew."""
        if self.jobs.get(entry.id) is entry:
            del self.jobs[entry.id]
            self.payload -= entry.size

    def running(self) -> int:
        """Jobs that have been chosen."""
        return sum(len(queue.running) for queue in self._origins.values())

    def adjust_keep(self) -> None:
        """Share the budgets among the lanes: many lanes, or large payloads, few jobs of each."""
        lanes = sum(len(queue.lanes) for queue in self._origins.values())
        # Of payloads those that have come back may have a quarter only; else most that is read for them would not fit.
        payloads = self.payload_budget // 4 if self._ready.back else self.payload_budget
        fitting = min(self.budget, int(payloads / self._size()))
        self.keep = max(4, min(self.max_keep, fitting // (lanes + 1)))

    def room(self) -> int:
        """How many more rows to read forward."""
        if len(self.jobs) >= self.budget // 2 and self._ready.new() + self.running() >= self.window // 8:
            return 0  # with many groups, what is read now would not fit into their lanes, and be read again
        return self.space()

    def low(self) -> bool:
        """Whether half of what memory may hold has been used up, so that the next read should be sent."""
        room = self.room()
        return room > 0 and room >= self._ready.new()

    def space(self) -> int:
        """How many more rows there is room for, by their number and by the size of their payloads. Lanes that have come
        back have room of their own."""
        return max(0, min(self.window - self._ready.new(), self.fitting()))

    def fitting(self, largest: int = 0) -> int:
        """How many more rows there is room for by the size of their payloads; largest: one of them is known to have."""
        size = max(largest, _VARY * self._size())
        least = max(1, min(_LEAST_ROOM, int(self.payload_budget / size / 4)))
        return max(int(self._spare() / size), least - self._ready.count)

    def share(self, rows: int) -> int:
        """How large each payload may be, where a read brings up to so many. What is like those in memory is not left in
        the database while that takes a quarter more than there is to be at most: all rows would come twice."""
        return int(max(1, self._spare() / rows, min(_VARY * self._size(), self.payload_budget / 4 / rows)))

    def passed(self, sizes: Iterable[int]) -> None:
        """Jobs of these sizes have been read forward. Where none is kept, as of what is paused, those that follow may
        be as large: else reads would stay as small as the first one until something is kept."""
        self.size_ahead = self.payload_budget / (_FIRST_ROOM * _VARY)
        if not self.jobs and (passed := list(sizes)):
            self.size_ahead = sum(passed) / len(passed)

    def _spare(self) -> int:
        """How many more characters of payloads there is room for."""
        return max(0, self.payload_budget - self.payload)

    def _size(self) -> float:
        """Of a payload."""
        jobs = len(self.jobs)
        return max(1.0, self.payload / jobs if jobs else self.size_ahead)

"""What could run, in the order in which it is chosen; what waits for its time; and the lanes that come back from their
backoff as there is room.

The highest priority first; of one priority, first attempts and what runs again in turns. More lanes may come back than
the workers can run, as where a carrier is away: each priority has room for a quarter of the window, so that no crowd
keeps another priority's lanes away, and all together for the window; a few always have room. What is back does not
count where it is asked how much there is to run, or crowds of several priorities would keep new jobs from being read.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from math import inf

from .queues import Entry, Lane

__all__ = ["ReadyQueue"]

_FEW = 64  # lanes of a priority that may be back whatever others are
_FEW_TIMERS = 1_000  # of so many it does not matter whether anybody waits for them still


class _Level:
    """One priority. again: what has run before; its turn comes after a first attempt. overdue: lanes whose time has
    come, and when it had; back: how many have come back, and are read again or stand here."""

    __slots__ = ("again", "agains_turn", "back", "first", "overdue")

    def __init__(self) -> None:
        self.first: deque[Entry | Lane] = deque()
        self.again: deque[Entry | Lane] = deque()
        self.agains_turn = False
        self.overdue: deque[tuple[float, Lane]] = deque()
        self.back = 0


class ReadyQueue:
    """count: what stands here, lanes and single jobs. back: lanes that have come back, here or being read again."""

    def __init__(self, window: int) -> None:
        self.count = 0
        self.back = 0
        self._window = window
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # priorities, highest first
        self._timers: list[tuple[float, int, Entry | Lane]] = []
        self._serial = 0
        self._most_timers = _FEW_TIMERS  # then those are dropped of lanes that do not wait for them any more

    def push(self, item: Entry | Lane, head: Entry) -> None:
        """To the end of its line. head: the item itself, or the lane's."""
        level = self._level(head.priority)
        (level.first if head.attempt == 1 else level.again).append(item)
        self.count += 1

    def take(self) -> Iterator[Entry | Lane]:
        """Take out one after the other, for as long as they are asked for."""
        for priority in self._order:
            level = self._levels[priority]
            first, again = level.first, level.again
            while first or again:
                if again and (level.agains_turn or not first):
                    item = again.popleft()
                    level.agains_turn = False
                else:
                    item = first.popleft()
                    level.agains_turn = True
                self.count -= 1
                yield item

    def lines(self) -> list[deque[Entry | Lane]]:
        """What stands here. Who takes something out lowers `count`."""
        levels = [self._levels[priority] for priority in self._order]
        return [line for level in levels for line in (level.first, level.again)]

    def remove(self, entry: Entry) -> None:
        """Take this one out, if it stands here."""
        for line in self.lines():
            if entry in line:
                line.remove(entry)
                self.count -= 1

    def forget(self, gone: Callable[[Entry | Lane], bool]) -> None:
        """Take all of these out, also of what waits for its time: else they pile up till then."""
        self.take_out(gone)
        self._timers = [timer for timer in self._timers if not gone(timer[2])]
        heapq.heapify(self._timers)
        for level in self._levels.values():
            level.overdue = deque(item for item in level.overdue if not gone(item[1]))

    def take_out(self, gone: Callable[[Entry | Lane], bool]) -> None:
        """Take these out of what could run. Lanes of them that are back `leave` by themselves."""
        for line in self.lines():
            stay = [item for item in line if not gone(item)]
            self.count -= len(line) - len(stay)
            line.clear()
            line.extend(stay)

    # -- what comes back ----------------------------------------------------------------------------------------

    def delay(self, item: Entry | Lane, due: float) -> None:
        """It is among the `returning` when its time has come; never, where that is infinite: a person decides. A lane
        waits for as long as that is its `due`."""
        if due == inf:
            return
        if len(self._timers) >= self._most_timers:
            self._timers = [timer for timer in self._timers if _awaited(timer[2], timer[0])]
            heapq.heapify(self._timers)
            self._most_timers = max(_FEW_TIMERS, 2 * len(self._timers))
        self._serial += 1
        heapq.heappush(self._timers, (due, self._serial, item))

    def let_back(self, lane: Lane, priority: int) -> bool:
        """Whether a lane may come back now; `lane.priority` is then the one whose room it takes."""
        level = self._level(priority)
        if not self._has_room(level):
            return False
        lane.back, lane.priority = True, priority
        level.back += 1
        self.back += 1
        return True

    def leave(self, lane: Lane) -> None:
        """Its head has been chosen, or it backs off again, or is forgotten: there is room for another one."""
        if lane.back:
            lane.back = False
            self._levels[lane.priority].back -= 1
            self.back -= 1

    def returning(self, now: float) -> Iterator[Entry | Lane]:
        """Jobs whose time has come; and lanes, as far as there is room for them, in the order of their times."""
        while self._timers and self._timers[0][0] <= now:
            due, _, item = heapq.heappop(self._timers)
            if not isinstance(item, Lane):
                yield item
            elif item.due == due:  # it waits for that still
                self._level(item.priority).overdue.append((due, item))
        for priority in self._order:
            level = self._levels[priority]
            while level.overdue and self._has_room(level):
                due, lane = level.overdue.popleft()
                if lane.due == due:
                    self.let_back(lane, priority)
                    yield lane

    def next_due(self) -> float | None:
        """When something may come back next."""
        dues = [level.overdue[0][0] for level in self._levels.values() if level.overdue and self._has_room(level)]
        return min([*dues, *(timer[0] for timer in self._timers[:1])], default=None)

    def _has_room(self, level: _Level) -> bool:
        return level.back < max(1, self._window // 4) and (self.back < self._window or level.back < _FEW)

    def _level(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            self._order = sorted(self._levels, reverse=True)
        return level


def _awaited(item: Entry | Lane, due: float) -> bool:
    return not isinstance(item, Lane) or item.due == due

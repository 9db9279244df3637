"""What could run, in the order in which it is chosen; what waits for its time; and the lanes that come back from their
backoff as there is room.

The highest priority first; of one priority, the types of jobs in turns; of one type, first attempts and what runs again
in turns. More lanes may come back than the workers can run, as where a carrier is away: each type of each priority has
room for a quarter of the window, so that no crowd keeps another one's lanes away, and all together for the window; a
few always have room. Their payloads have room in the same way, in half of those that memory may hold. What is back does
not count where it is asked how much there is to run, or crowds would keep new jobs from being read. So it is with first
attempts of slow types, which the workers take fewer of than there are: their lanes, too, wait until there is room for
them.
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf

from .queues import Entry, Lane

__all__ = ["ReadyQueue"]

_FEW = 64  # lanes of a type and priority that may be back whatever others are
_MOST_SLOW = 8  # windows of what stands here of slow types, before it keeps others from being read
_MOST_LANES = 64  # windows of their lanes that wait for room: half a kilobyte each
_FEW_TIMERS = 1_000  # of so many it does not matter whether anybody waits for them still


class _Level:
    """What stands here of one priority and type. again: what has run before; its turn comes after a first attempt.
    listed: has its turn among the types. overdue: lanes whose time has come, and when it had; back: how many have come
    back, and are read again or stand here; size: of the payloads of what they have in memory."""

    __slots__ = ("again", "agains_turn", "back", "first", "listed", "overdue", "priority", "size", "type")

    def __init__(self, priority: int, type: str) -> None:
        self.priority = priority
        self.type = type
        self.first: deque[Entry | Lane] = deque()
        self.again: deque[Entry | Lane] = deque()
        self.agains_turn = False
        self.listed = False
        self.overdue: deque[tuple[float, Lane]] = deque()
        self.back = self.size = 0

    def pop(self) -> Entry | Lane | None:
        if self.again and (self.agains_turn or not self.first):
            self.agains_turn = False
            return self.again.popleft()
        self.agains_turn = True
        return self.first.popleft() if self.first else None


class ReadyQueue:
    """count: what stands here, lanes and single jobs. back: lanes that have come back, here or being read again; size:
    of the payloads of what these have in memory.
    slow: types of which the workers take no more than their share, or than their limit."""

    def __init__(self, window: int, payload_budget: int) -> None:
        self.count = 0
        self.back = 0
        self.size = 0
        self.slow: Collection[str] = frozenset()
        self._window = window
        self._payload_budget = payload_budget
        self._levels: dict[tuple[int, str], _Level] = {}
        # Of each priority, the highest first: types of which something stands here.
        self._turns: dict[int, deque[_Level]] = {}
        self._overdue: dict[_Level, None] = {}  # in which lanes wait for room
        self._timers: list[tuple[float, int, Entry | Lane]] = []
        self._serial = 0
        self._most_timers = _FEW_TIMERS  # then those are dropped of lanes that do not wait for them any more

    def push(self, item: Entry | Lane, head: Entry) -> None:
        """To the end of its line. head: the item itself, or the lane's."""
        line = (head.priority, head.type)
        level = self._levels.get(line) or self._level(line)  # mostly without a call: this is done for each job
        (level.first if head.attempt == 1 else level.again).append(item)
        if not level.listed:
            level.listed = True
            self._turns[level.priority].append(level)
        self.count += 1

    def line(self, priority: int, type: str) -> deque[Entry | Lane]:
        """Where first attempts of a priority and type stand, which has its turn from now on. Who adds something raises
        `count`."""
        level = self._level((priority, type))
        if not level.listed:
            level.listed = True
            self._turns[priority].append(level)
        return level.first

    def take(self, shares: Mapping[str, int]) -> Iterator[Entry | Lane]:
        """Take out one after the other, for as long as they are asked for. shares: of these types no more is wanted
        when nothing is left of it."""
        for turns in self._turns.values():
            passed = 0
            while passed < len(turns):
                level = turns[0]
                if shares and shares.get(level.type, 1) <= 0:
                    turns.rotate(-1)
                    passed += 1
                elif (item := level.pop()) is None:
                    level.listed = False
                    turns.popleft()
                else:
                    turns.rotate(-1)
                    passed = 0
                    self.count -= 1
                    yield item

    def take_alike(self, most: int) -> list[Entry | Lane]:
        """Take out up to so many at once, if these are first attempts of one type, which is not slow, and nothing else
        stands here: then there are no turns to take."""
        listed = [level for turns in self._turns.values() for level in turns]
        if len(listed) != 1 or listed[0].again or listed[0].type in self.slow:
            return []
        level = listed[0]
        level.agains_turn = True
        taken = [level.first.popleft() for _ in range(min(most, len(level.first)))]
        self.count -= len(taken)
        return taken

    def any(self, shares: Mapping[str, int]) -> bool:
        """Whether `take` would find something."""
        if not shares:
            return self.count > 0
        levels = (level for turns in self._turns.values() for level in turns if shares.get(level.type, 1) > 0)
        return any(level.first or level.again for level in levels)

    def waits_for_room(self) -> bool:
        """Whether there are lanes whose time has come, and no room for them."""
        return any(level.overdue for level in self._overdue)

    def new(self) -> int:
        """How much stands here that has not come back, and is of no slow type; of such types, what is too much."""
        count = self.count - self.back
        if self.slow:
            slow = [level for level in self._levels.values() if level.type in self.slow]
            standing = sum(len(level.first) + len(level.again) - level.back for level in slow)
            count -= min(standing, _MOST_SLOW * self._window)
            count += max(0, sum(len(level.overdue) for level in slow) - _MOST_LANES * self._window)
        return max(0, count)

    def lines(self, types: Collection[str] | None = None) -> list[deque[Entry | Lane]]:
        """What stands here, by priority; types: of these alone. Who takes something out lowers `count`."""
        levels = sorted(self._levels.values(), key=lambda level: -level.priority)
        return [line for level in levels if types is None or level.type in types for line in (level.first, level.again)]

    def remove(self, gone: Collection[Entry | Lane]) -> None:
        """Take these out of what could run, in one pass. Lanes of them that are back `leave` by themselves."""
        for line in self.lines():
            stay = [item for item in line if item not in gone]
            self.count -= len(line) - len(stay)
            line.clear()
            line.extend(stay)

    def take_out(self, lane: Lane, head: Entry) -> None:
        """Take out a lane that stands here; head: with which it was pushed, as a rule."""
        level = self._level((head.priority, head.type))
        try:
            (level.first if head.attempt == 1 else level.again).remove(lane)
            self.count -= 1
        except ValueError:
            self.remove({lane})

    def forget(self, gone: Callable[[Entry | Lane], bool]) -> None:
        """Take all of these out, also of what waits for its time: else they pile up till then."""
        self.remove({item for line in self.lines() for item in line if gone(item)})
        self._timers = [timer for timer in self._timers if not gone(timer[2])]
        heapq.heapify(self._timers)
        for level in self._overdue:
            level.overdue = deque(item for item in level.overdue if not gone(item[1]))

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

    def let_back(self, lane: Lane, line: tuple[int, str]) -> bool:
        """Whether a lane may come back now; `lane.line` is then the one whose room it takes."""
        level = self._level(line)
        if not self._has_room(level, lane):
            return False
        lane.back, lane.line = True, line
        level.back += 1
        level.size += lane.size
        self.back += 1
        self.size += lane.size
        return True

    def grow(self, lane: Lane, size: int) -> bool:
        """Whether a lane that is back may have a job more in memory, of this size."""
        level = self._levels[lane.line]
        if not self._fits(level, size):
            return False
        lane.size += size
        level.size += size
        self.size += size
        return True

    def leave(self, lane: Lane) -> None:
        """Its head has been chosen, or it backs off again, or is forgotten: there is room for another one."""
        if lane.back:
            lane.back = False
            level = self._levels[lane.line]
            level.back -= 1
            level.size -= lane.size
            self.back -= 1
            self.size -= lane.size

    def returning(self, now: float) -> Iterator[Entry | Lane]:
        """Jobs whose time has come; and lanes, as far as there is room for them, in the order of their times."""
        while self._timers and self._timers[0][0] <= now:
            due, _, item = heapq.heappop(self._timers)
            if not isinstance(item, Lane):
                yield item
            elif item.due == due:  # it waits for that still
                level = self._level(item.line)
                level.overdue.append((due, item))
                self._overdue[level] = None
        for level in sorted(self._overdue, key=lambda level: -level.priority):
            while level.overdue and self._has_room(level, level.overdue[0][1]):
                due, lane = level.overdue.popleft()
                if lane.due == due:
                    self.let_back(lane, (level.priority, level.type))
                    yield lane
            if not level.overdue:
                del self._overdue[level]

    def next_due(self) -> float | None:
        """When something may come back next."""
        first = [(level, *level.overdue[0]) for level in self._overdue if level.overdue]
        dues = [due for level, due, lane in first if self._has_room(level, lane)]
        return min([*dues, *(timer[0] for timer in self._timers[:1])], default=None)

    def _has_room(self, level: _Level, lane: Lane) -> bool:
        if level.back and not self._fits(level, lane.size):
            return False
        return level.back < max(1, self._window // 4) and (self.back < self._window or level.back < _FEW)

    def _fits(self, level: _Level, size: int) -> bool:
        """Whether a crowd may have so much more: it has no more than what is left for all crowds, as in `shares`. So
        one of them gets a quarter of the payloads that memory may hold, several get less, and a new one finds room."""
        return level.size + size <= self._payload_budget // 2 - self.size

    def _level(self, line: tuple[int, str]) -> _Level:
        level = self._levels.get(line)
        if level is None:
            level = self._levels[line] = _Level(*line)
            if level.priority not in self._turns:
                priorities = sorted([level.priority, *self._turns], reverse=True)
                self._turns = {priority: self._turns.get(priority, deque()) for priority in priorities}
        return level


def _awaited(item: Entry | Lane, due: float) -> bool:
    return not isinstance(item, Lane) or item.due == due

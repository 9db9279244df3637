"""What the next read asks for: how far each origin is read forward, which lanes are refilled, and how large all of that
may be. Pure, like the scheduler."""

from collections.abc import Iterable
from dataclasses import dataclass

from .queues import Lane, OriginQueue
from .scheduler import Scheduler

__all__ = ["Plan", "Planner"]

_REFILLS = 500  # lanes a read refills
_LEFT_OUT = 16  # lanes that the server leaves out of the forward part
_IDLE_PAGE = 16
_MOST_LATE = 2_000  # late rows of one origin in a read
_ALL_LATE = 50_000  # of all origins: they come when a transaction ends, whatever there is room for
_QUICK_READ = 1.0  # seconds: one that was answered within so many may be followed by a larger one again
_LOOK_AHEAD = 500  # rows read forward at a poll while memory holds enough
_MOST_BYTES = 2**31 - 1  # of a payload


@dataclass(slots=True)
class Plan:
    """What a read asks for, with the versions that tell whether its answer still applies.

    pages: how many rows forward of each origin; partial: some have no turn, and should have it at once. lanes: to be
    refilled, by `size` rows each, up to a position. largest: bytes of a payload that it brings.
    """

    origins: list[tuple[OriginQueue, int]]
    pages: list[int]
    partial: bool
    lanes: list[tuple[Lane, int, int]]  # lane, its version, up to
    left_out: dict[Lane, None]
    size: int
    most_late: int
    largest: int


class Planner:
    """Asks for as much as memory has room for, and for less after a read that took too long, or that had to leave rows
    in the database since their payloads are large."""

    def __init__(self, scheduler: Scheduler, poll_seconds: float) -> None:
        self.most_late = _MOST_LATE
        self._scheduler = scheduler
        self._poll_seconds = poll_seconds
        self._looked_ahead = 0.0
        self._most: int | None = None  # rows of a read; None: as many as there is room for
        self._turns: int | None = None  # how many origins are read forward at once; None: all
        self._turn = 0  # how many have had their turn
        self._leaves_out = True  # deep lanes, as long as the server steps over their rows in time
        self._too_large: set[OriginQueue] = set()  # whose next row the last read has left for its size
        self._largest = 0  # bytes of the largest payload of such a row, or of the next one of a lane

    # -- whether to read --------------------------------------------------------------------------------------------

    def wants(self) -> bool:
        """Whether a read would bring what there is room for, or has to do something else."""
        return bool(self._scheduler.hungry or self._scheduler.crowded) or self.behind_hand()

    def behind_hand(self) -> bool:
        """Whether memory has room, and the database is known to have more."""
        backlogged = (queue for queue in self._scheduler.origins.values() if queue.backlogged)
        return self._scheduler.memory.low() and bool(self._readable(backlogged))

    def saw_everything(self, plan: Plan) -> bool:
        """Whether a read after this one would bring nothing, were nothing committed meanwhile."""
        if self._scheduler.hungry or self._scheduler.crowded or not all(plan.pages):
            return False
        seen = dict(plan.origins)
        readable = self._readable(self._scheduler.origins.values())
        return all(seen.get(queue) == queue.version and not queue.backlogged for queue in readable)

    def _readable(self, queues: Iterable[OriginQueue]) -> list[OriginQueue]:
        paused = self._scheduler.pauses.origins
        return [queue for queue in queues if not queue.draining and queue.name not in paused]

    # -- what to ask for --------------------------------------------------------------------------------------------

    def plan(self, time: float) -> Plan:
        """The next read. Its lanes are hungry no more: `Scheduler.still_hungry` gives them back."""
        scheduler, memory = self._scheduler, self._scheduler.memory
        memory.adjust_keep()
        queues = self._readable(scheduler.origins.values())
        fitting = max(1, memory.fitting(self._largest))
        size, refills = self._refills(fitting)
        lanes = scheduler.take_hungry(refills)
        pages, partial = self._pages(queues, self._room(time), fitting)
        most_late = min(self.most_late, _ALL_LATE // max(1, len(queues)) + 1)
        return Plan(
            [(queue, queue.version) for queue in queues],
            pages,
            partial,
            lanes,
            dict.fromkeys([lane for lane in scheduler.heavy if lane.more and self._leaves_out][:_LEFT_OUT]),
            size,
            most_late if self._most is None else min(most_late, self._most + 1),
            min(_MOST_BYTES, max(self._largest, memory.share(max(1, sum(pages), len(lanes) * size)))),
        )

    def _room(self, time: float) -> int:
        """How many rows to read forward; some at every poll, however much is in memory: groups may have become busy
        that memory holds nothing of."""
        room = self._scheduler.memory.room()
        if not room and time - self._looked_ahead >= self._poll_seconds:
            room = min(_LOOK_AHEAD, self._scheduler.memory.space())
        if room:
            self._looked_ahead = time
        return room

    def _refills(self, fitting: int) -> tuple[int, int]:
        """How many rows of a lane, and how many lanes."""
        size, lanes = self._scheduler.memory.keep, _REFILLS
        if self._most is not None:
            size = min(size, self._most)
            lanes = max(1, self._most // size)
        size = min(size, max(1, fitting // max(1, min(lanes, len(self._scheduler.hungry)))))
        return size, min(lanes, max(1, fitting // size))

    def _pages(self, queues: list[OriginQueue], room: int, fitting: int) -> tuple[list[int], bool]:
        """How many rows of each origin, and whether some have to wait for their turn."""
        if not room or not queues:
            return [0] * len(queues), False
        least = max(1, min(_IDLE_PAGE, fitting // len(queues)))
        busy_page = max(least, room // max(1, sum(queue.backlogged for queue in queues)))
        idle_page = max(least, room // len(queues))
        if self._most is not None:
            page = max(1, self._most // len(queues))
            busy_page, idle_page = min(busy_page, page), min(idle_page, page)
        if self._largest:  # what the last read has left comes first, with as many rows as may be that large
            first = set([queue for queue in queues if queue in self._too_large][:fitting])
            page = min(busy_page, max(1, fitting // max(1, len(first))))
            return [page if queue in first else 0 for queue in queues], True
        pages = [busy_page if queue.backlogged else idle_page for queue in queues]
        if self._turns is None:
            return pages, False
        its_turn = {(self._turn + number) % len(queues) for number in range(self._turns)}
        self._turn += self._turns
        return [page if number in its_turn else 0 for number, page in enumerate(pages)], len(its_turn) < len(queues)

    # -- what came of it --------------------------------------------------------------------------------------------

    def asks_for_less(self) -> bool:
        """Whether reads are smaller than there is room for, since one took too long."""
        return self._most is not None

    def took_too_long(self, plan: Plan) -> None:
        """Ask for less. The read may have had to step over millions of rows that are not committed yet, in many
        origins: read fewer of them forward at once; a mark that has passed such rows does not meet them again. Or over
        as many of lanes that are left out: take these page by page, until all marks are at the end. Or its rows are
        large, and the way here is narrow: ask for fewer."""
        self._turns = max(1, sum(page > 0 for page in plan.pages) // 4)
        self._most = max(1, (sum(plan.pages) + len(plan.lanes) * plan.size) // 4)
        self._leaves_out = self._leaves_out and not plan.left_out

    def delivered(self, plan: Plan, took: float, too_large: set[OriginQueue], largest: int) -> None:
        """The read was answered, after so many seconds. It has left rows in the database for their size: the next ones
        of these origins, or of lanes; `largest` bytes has the largest of them, 0 where there is none."""
        self._too_large, self._largest = too_large, largest
        self._leaves_out = self._leaves_out or not any(queue.backlogged for queue, _ in plan.origins)
        if self._most is not None and took < _QUICK_READ:
            self._most = self._most * 2 if self._most < self._scheduler.memory.window else None
        if self._turns is not None:
            self._turns = self._turns * 2 if self._turns < len(plan.origins) else None

"""What the scheduler keeps of origins, groups and jobs. Data only: `scheduler` has the rules."""

from math import inf
from typing import NamedTuple

from ..jobs import Fence, JobId

__all__ = ["NOTHING_PAUSED", "Entry", "Lane", "OriginQueue", "Pauses"]


class Pauses(NamedTuple):
    """What a person has paused."""

    types: frozenset[str]
    origins: frozenset[str]
    groups: frozenset[tuple[str, str]]  # origin, group

    @classmethod
    def of(cls, rows: list[list[str | None]] | None) -> "Pauses":
        """From the rows of ``sidings.pause``: kind, type, origin, group."""
        rows = rows or []
        return cls(
            frozenset(type or "" for kind, type, _, _ in rows if kind == "type"),
            frozenset(origin or "" for kind, _, origin, _ in rows if kind == "origin"),
            frozenset((origin or "", group or "") for kind, _, origin, group in rows if kind == "group"),
        )


NOTHING_PAUSED = Pauses(frozenset(), frozenset(), frozenset())


class Entry:
    """A job in memory. Times are seconds of the executor's clock, but `enqueued`, which is the server's epoch seconds;
    `due` is None for "at once"."""

    __slots__ = (
        "attempt",
        "due",
        "enqueued",
        "failures",
        "first_started",
        "group",
        "headers",
        "id",
        "lane",
        "losses",
        "origin",
        "payload",
        "policy",
        "position",
        "priority",
        "type",
    )

    def __init__(
        self,
        id: int,
        origin: "OriginQueue",
        type: str,
        group: str | None,
        position: int,
        attempt: int = 1,
        failures: int = 0,
        losses: int = 0,
        priority: int = 0,
        policy: int = 0,
        due: float | None = None,
        enqueued: float = 0.0,
        first_started: float | None = None,
        headers: str | None = None,
        payload: str | None = None,
    ) -> None:
        self.id = JobId(id)
        self.origin = origin
        self.type = type
        self.group = group
        self.position = position
        self.attempt = attempt
        self.failures = failures
        self.losses = losses
        self.priority = priority
        self.policy = policy
        self.due = due
        self.enqueued = enqueued
        self.first_started = first_started
        self.headers = headers
        self.payload = payload
        self.lane: Lane | None = None

    @property
    def size(self) -> int:
        """Characters of its payload and headers."""
        return len(self.payload or "") + len(self.headers or "")

    def __repr__(self) -> str:
        return f"Entry({self.id}, {self.origin.name}, group={self.group!r}, position={self.position})"


class Lane:
    """A group of one origin. `version` changes whenever a refill that is under way must not be applied."""

    __slots__ = (
        "back",
        "blocked_by",
        "due",
        "ending",
        "group",
        "last",
        "line",
        "more",
        "newest",
        "origin",
        "queue",
        "queued",
        "running",
        "size",
        "skipped",
        "version",
    )

    def __init__(self, origin: "OriginQueue", group: str) -> None:
        self.origin = origin
        self.group = group
        self.queue: list[Entry] = []  # few, and mostly none: an empty deque takes 760 bytes
        self.running: Entry | None = None
        self.ending: Entry | None = None  # the one before `running`, which one and the same cycle ends and names
        self.queued = False  # stands in the ready queue
        self.more = False  # the database has jobs behind `last` that are not here
        self.last = 0
        self.due: float | None = None  # backs off until then
        self.line: tuple[int, str] = (0, "")  # priority and type of its head, when it backed off or came back
        self.size = 0  # of its head, when it backed off or came back
        self.back = False  # has come back, and its head has not been chosen yet
        self.blocked_by: int | None = None  # id of its head, whose type is unknown to this process
        self.newest = 0  # id of the job that the database has just said to be the newest of its kind
        self.skipped = 0
        self.version = 0


class OriginQueue:
    """What the executor knows of one origin. `high` is the position up to which it has been read; before `first` no job
    waits, as far as is known; `deadline` is the executor's clock time until which jobs of it may start (kept by the
    lease thread); `timeline` is the server's from which its jobs have been read, None before the first read."""

    __slots__ = (
        "backlogged",
        "deadline",
        "draining",
        "epoch",
        "fence",
        "first",
        "high",
        "lanes",
        "name",
        "running",
        "timeline",
        "unknown",
        "version",
    )

    def __init__(self, name: str, epoch: int, timeline: str | None = None) -> None:
        self.name = name
        self.epoch = epoch
        self.timeline = timeline
        self.fence = Fence(name, epoch)
        self.deadline = inf
        self.high = 0
        self.first = 0
        self.lanes: dict[str, Lane] = {}
        self.running: set[Entry] = set()  # chosen, running, or finished but not yet acknowledged
        self.draining = False
        self.backlogged = True
        self.unknown: dict[str, int] = {}  # jobs by type, of those that this process does not know
        self.version = 0

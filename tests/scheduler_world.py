"""A database of rows and transactions in memory, and an executor's own reader, scheduler and cycle loop on top of it.

The database answers a read as `read.sql` does: one snapshot, late rows, refills, forward rows. Answers and cycles can
be kept back for as long as a test likes, so every interleaving of commits, reads, cycles and handlers is possible.
`World` checks after each step what must never happen.
"""

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any, Self, TypeVar
from uuid import uuid4

from prometheus_client import CollectorRegistry
from sidings.executor import cycles, expected, reader, standing
from sidings.executor.attempts import Finished
from sidings.executor.cycles import CycleLoop
from sidings.executor.flights import Batch, Flight, merged
from sidings.executor.metrics import ExecutorMetrics
from sidings.executor.queues import Entry, Lane, OriginQueue, Pauses
from sidings.executor.reader import Reader
from sidings.executor.scheduler import Scheduler
from sidings.executor.shares import shares, too_many
from sidings.jobs import SUCCEEDED, Again, Committed, End, Hold, Outcome, OutcomeName, Policy, Registry

COLUMNS = (
    *("part", "ref", "id", "type", "group", "position", "numbers"),
    *("run_at", "enqueued_at", "first_started_at", "headers", "payload"),
)
INDEX = {name: number for number, name in enumerate(COLUMNS)}
LATEST, PARALLEL = Policy.LATEST.value, Policy.PARALLEL.value
T = TypeVar("T")
SERVER_AHEAD = 1_000_000.0  # the server's epoch seconds minus the executor's clock
ELSEWHERE = "t/9"  # an origin that another executor holds


class Record(tuple):
    """A row of an answer, by number and by name."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, INDEX[key] if isinstance(key, str) else key)


@dataclass(slots=True, eq=False)
class Row:
    id: int
    origin: str
    group: str | None
    type: str
    txid: int
    position: int | None
    run_at: float | None = None
    attempt: int = 1
    failures: int = 0
    losses: int = 0
    priority: int = 0
    policy: int = 0
    held: bool = False
    inserted: int = 0  # steps of the world
    committed: int = 0
    moved: bool = False  # was given another place
    size: int = 0  # of its payload

    def delivered(self, part: int, ref: int, *, fits: bool) -> Record:
        run_at = None if self.run_at is None else self.run_at + SERVER_AHEAD
        numbers = [self.attempt, self.failures, self.losses, self.priority, self.policy]
        what = (self.id, self.type, self.group, self.position, None if numbers == [1, 0, 0, 0, 0] else numbers)
        payload = "x" * self.size if fits else str(self.size)
        return Record((part if fits else part + 4, ref, *what, run_at, 0.0, None, None, payload))


@dataclass(slots=True)
class Snapshot:
    xmin: int
    xmax: int
    open: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> "Snapshot":
        xmin, xmax, xip = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(xid) for xid in xip.split(",") if xid))

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.open)))}"

    def shows(self, xid: int) -> bool:
        return xid < self.xmin or (xid < self.xmax and xid not in self.open)


class Database:
    """Rows, and the transactions that they come from. Ids and positions are handed out before commit."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}  # committed
        self.open: dict[int, list[Row]] = {}  # transaction id -> what it has inserted
        self.next_xid = 700
        self.last_completed = 699
        self.next_position = 1
        self.next_id = 1
        self.server = "start timeline 1"
        self.fence = 0
        self.actions: list[tuple[int, str, str, str | None, int | None]] = []  # fence, action, origin, group, job
        self.pauses: list[list[str | None]] = []

    def begin(self) -> int:
        xid = self.next_xid
        self.next_xid += 1
        self.open[xid] = []
        return xid

    def position(self) -> int:
        self.next_position += 1
        return self.next_position - 1

    def insert(self, xid: int, row: Row) -> None:
        self.open[xid].append(row)

    def end(self, xid: int) -> None:
        del self.open[xid]
        self.last_completed = max(self.last_completed, xid)

    def commit(self, xid: int) -> list[Row]:
        rows = self.open[xid]
        self.rows.update((row.id, row) for row in rows)
        self.end(xid)
        return rows

    def snapshot(self) -> Snapshot:
        xmax = self.last_completed + 1  # as in Postgres: not the next id
        running = frozenset(xid for xid in self.open if xid < xmax)
        return Snapshot(min(running, default=xmax), xmax, running)

    def read(self, arguments: tuple[Any, ...], now: float) -> list[Record]:
        """`read.sql`."""
        (origins, highs, pages, report, previous, xids, marks, unseen, *lanes, size, left_out, _, most_late) = (
            arguments[:-3]
        )
        largest, late_bytes, paused = arguments[-3:]
        snapshot = self.snapshot()
        candidates = [mark for xid, mark in zip(xids, marks, strict=True) if snapshot.shows(xid)]
        before = None if previous is None else Snapshot.parse(previous)
        if before is not None and snapshot.xmax > before.xmax:
            candidates.append(unseen)
        late = min(candidates, default=None)
        header = [None] * len(COLUMNS)
        header[:4] = [0, 0, self.next_xid, self.server]
        header[INDEX["position"]] = self.next_position - 1
        header[INDEX["run_at"]] = now + SERVER_AHEAD
        digest = str(sorted(self.pauses, key=str)) if self.pauses else None
        pauses = list(self.pauses) if digest not in (None, paused) else None
        header[INDEX["headers"]] = json.dumps({"fence": self.fence, "paused": digest, "pauses": pauses})
        header[INDEX["payload"]] = json.dumps(str(snapshot))
        answer = [Record(header)]
        by_origin: dict[str, list[Row]] = {name: [] for name in (*origins, *lanes[0])}
        for row in self.rows.values():
            if row.position is not None and row.origin in by_origin:
                by_origin[row.origin].append(row)
        for rows in by_origin.values():
            rows.sort(key=lambda row: row.position or 0)
        if late is not None and before is not None:
            for ref, (name, high) in enumerate(zip(origins, highs, strict=True), start=1):
                missed = [r for r in by_origin[name] if late < r.position <= high and not before.shows(r.txid)]
                for row in missed[:most_late]:
                    late_bytes -= row.size
                    answer.append(row.delivered(1, ref, fits=late_bytes >= 0))
        for ref, (name, group, after, upto) in enumerate(zip(*lanes, strict=True), start=1):
            rows = [row for row in by_origin[name] if row.group == group and after < (row.position or 0) <= upto]
            answer += [row.delivered(2, ref, fits=row.size <= largest) for row in rows[:size]]
        out = set(left_out or ())
        for ref, (name, high, page) in enumerate(zip(origins, highs, pages, strict=True), start=1):
            rows = [row for row in by_origin[name] if (row.position or 0) > high]
            kept = [r for r in rows if r.group is None or r.policy == PARALLEL or f"{name}\x1f{r.group}" not in out]
            answer += [row.delivered(3, ref, fits=row.size <= largest) for row in kept[:page]]
            if report[ref - 1]:
                scanned = [None] * len(COLUMNS)
                scanned[:2] = [4, ref]
                scanned[INDEX["position"]] = rows[-1].position if rows else None
                answer.append(Record(scanned))
        return answer

    def read_named(self, ids: list[int]) -> list[dict[str, Any]]:
        """`name_and_read.sql`."""
        found = [] if self.pauses else [row for id in ids if (row := self.rows.get(id)) is not None]
        return [
            {name: getattr(row, name) for name in ("id", "type", "group", "position", "origin", "priority", "policy")}
            | {"enqueued_at": 0.0, "headers": None, "payload": "x" * row.size}
            for row in found
            if row.position is not None and row.run_at is None and row.size <= 10
            if (row.attempt, row.failures, row.losses) == (1, 0, 0) and row.policy != LATEST
            if row.group is None
            or row.policy == PARALLEL
            or not any(self._stands_before(other, row) for other in self.rows.values())
        ]

    @staticmethod
    def _stands_before(other: Row, row: Row) -> bool:
        same = (other.origin, other.group) == (row.origin, row.group)
        return same and other.position is not None and other.position < (row.position or 0)


class Handlers:
    """Takes the place of `Workers`: handlers start and end when the world says so."""

    def __init__(self, concurrency: int) -> None:
        self.changed = asyncio.Event()
        self.claimed: deque[Entry] = deque()
        self.finished: list[Finished] = []
        self.expired: list[Entry] = []
        self.busy: list[Entry] = []
        self.void: list[Entry] = []  # still running, although another executor has their origin
        self.concurrency = concurrency
        self.batch_sizes: dict[str, int] = {}
        self.clock: Callable[[], float] = float
        self.slow: set[str] = set()
        self.limits: dict[str, int] = {}

    def capacity(self) -> int:
        return self.concurrency - len(self.busy) - len(self.void) - len(self.claimed)

    def claim(self, entries: list[Entry]) -> None:
        self.claimed.extend(entries)

    def share_out(self, coming: Sequence[list[Entry]]) -> tuple[dict[str, int], dict[str, int], list[Entry]]:
        entries = [entry for batch in coming for entry in batch]
        held = Counter(entry.type for entry in (*self.busy, *self.claimed, *entries) if entry.type in self.slow)
        slow = {type: held[type] for type in self.slow}
        back = too_many(self.concurrency, slow, [entry.type for entry in self.claimed])
        taken = [entry for entry, goes in zip(self.claimed, back, strict=True) if goes]
        self.claimed = deque(entry for entry in self.claimed if entry not in taken)
        limited = {type: limit - self.at_once(type, entries) for type, limit in self.limits.items()}
        return shares(self.concurrency, slow), limited, taken

    def at_once(self, type: str, coming: Iterable[Entry]) -> int:
        """Jobs of a type that run, or are going to."""
        return sum(entry.type == type for entry in (*self.busy, *self.void, *self.claimed, *coming))

    def unclaim(self, queue: OriginQueue | None = None) -> list[Entry]:
        taken = [entry for entry in self.claimed if queue is None or entry.origin is queue]
        self.claimed = deque(entry for entry in self.claimed if queue is not None and entry.origin is not queue)
        return taken

    def cancel_jobs(self, ids: set[int]) -> None:
        """Somebody has ended these jobs; their handlers notice it at once."""
        for entry in [entry for entry in self.busy if entry.id in ids]:
            self.busy.remove(entry)
            self.finished.append((entry, Committed(OutcomeName.CANCELLED), self.clock(), self.clock()))


STEPS = {
    "begin": 3,
    "insert": 14,
    "commit": 6,
    "abort": 1,
    "promote": 2,
    "move": 1,
    "send_read": 10,
    "deliver_read": 10,
    "fail_read": 1,
    "send_cycle": 16,
    "acknowledge_cycle": 16,
    "start": 22,
    "finish": 22,
    "pass_time": 5,
    "drain_or_resume": 1,
    "release": 1,
    "lose": 1,
    "acquire": 2,
    "reread": 1,
    "expire_or_renew": 2,
    "restart_server": 0,
    "thin_out": 8,
    "cancel": 0,
    "let_run": 0,
    "clear": 0,
    "pause": 0,
    "resume": 0,
    "slow_down": 0,
    "tell": 6,
}


@dataclass(frozen=True)
class Life:
    """What a world is like. Sizes are small, so that every bound is reached all the time."""

    steps: dict[str, int]  # how likely each step is
    groups: tuple[str | None, ...] = ("a", "b", None)
    origins: tuple[str, ...] = ("t/0", "t/1")
    window: int = 12
    keep: int = 4
    budget: int = 30
    concurrency: int = 3
    alone: float = 0.3  # inserts in a transaction of their own
    unknown: float = 0.01  # jobs of a type that this process does not know
    failing: float = 0.3
    latest: float = 0.0
    parallel: float = 0.0
    most_late: int = 3  # rows of an origin in a read
    slow: float = 0.0  # jobs of a type that may become slow
    limit: int | None = None  # how many of them may run at once
    large: float = 0.0  # payloads that fill a good deal of the memory


def life(changed: dict[str, int] | None = None, **options: Any) -> Life:
    """`Life` with some steps more or less likely than usual."""
    return Life({**STEPS, **(changed or {})}, **options)


NO_OWNERSHIP = {"drain_or_resume": 0, "release": 0, "lose": 0, "acquire": 0, "reread": 0}
LIVES = {
    "a bit of everything": life(),
    "many groups": life(groups=("a", "b", "c", "d", "e", "f", "g", None), window=40, concurrency=6),
    "one deep group": life(groups=("a",), origins=("t/0",), alone=0.6, concurrency=1),
    "transactions that end late": life(
        {**NO_OWNERSHIP, "begin": 6, "promote": 0, "move": 0}, alone=0.02, failing=0.05, groups=("a", "b")
    ),
    "transactions that end late, before jobs that are blocked": life(
        {**NO_OWNERSHIP, "begin": 6, "insert": 8, "commit": 3, "promote": 0, "move": 0, "let_run": 1},
        alone=0.5,
        failing=0.6,
        groups=("a", "b", "c"),
        origins=("t/0",),
    ),
    "bursts behind an open transaction": life(
        {**NO_OWNERSHIP, "promote": 0, "move": 0, "commit": 3}, alone=0.5, failing=0.0, groups=("a",), origins=("t/0",)
    ),
    "failures without groups": life({**NO_OWNERSHIP, "promote": 12}, groups=(None,), failing=0.8, unknown=0),
    "changing owners": life({"drain_or_resume": 5, "release": 4, "lose": 4, "acquire": 10, "restart_server": 1}),
    "unknown types": life({"move": 3}, unknown=0.2, groups=("a", "b", "c")),
    "hardly any memory": life(window=4, budget=8, concurrency=1),
    "large payloads": life(large=0.2, groups=("a", "b", "c", None), origins=("t/0", "t/1", "t/2")),
    "large payloads that end late": life(
        {**NO_OWNERSHIP, "begin": 6, "move": 0},
        alone=0.02,
        failing=0.1,
        large=0.5,
        groups=("a", "b", None),
        most_late=20,
    ),
    "only the newest": life(latest=0.7, groups=("a", "b", "c"), unknown=0),
    "all policies": life(latest=0.4, parallel=0.3, groups=("a", "b", "c", None)),
    "a type becomes slow": life({"slow_down": 3}, slow=0.7, groups=("a", "b", "c", "d", "e", None), concurrency=5),
    "a crowd of a slow type": life(
        {"slow_down": 1, "insert": 30, "finish": 8}, slow=0.9, groups=tuple("abcdefghijklmnopqrst"), origins=("t/0",)
    ),
    "a type has a limit": life(slow=0.7, limit=2, groups=("a", "b", "c", "d", "e", None), concurrency=5),
    "a type has a limit, and becomes slow": life(
        {"slow_down": 3, "drain_or_resume": 4}, slow=0.7, limit=1, groups=("a", "b", "c", None), concurrency=5
    ),
    "persons intervene": life({"cancel": 6, "pause": 3, "resume": 3}, groups=("a", "b", "c", None)),
    "persons intervene in everything": life(
        {"cancel": 6, "pause": 3, "resume": 3, "lose": 2, "acquire": 6}, latest=0.3, parallel=0.2
    ),
    "persons act on jobs and groups": life(
        {"cancel": 4, "let_run": 8, "clear": 2}, groups=("a", "b", "c", None), failing=0.5
    ),
    "persons act on jobs and groups of all policies": life(
        {"cancel": 4, "let_run": 8, "clear": 2, "pause": 1, "resume": 1, "lose": 1, "acquire": 3},
        groups=("a", "b", "c", None),
        failing=0.5,
        latest=0.3,
        parallel=0.2,
    ),
}


@dataclass(slots=True)
class InFlight:
    plan: Any
    rows: list[Record]
    sent: float
    taken_in: dict[str, frozenset[int]]  # origin -> ids that the snapshot shows


@dataclass
class World:
    """One executor and its database. Every method is one step that may happen at any time (or does nothing)."""

    random: Random
    life: Life

    def __post_init__(self) -> None:
        self.database = Database()
        self.step = 0
        self.clock = 100.0
        self.read_in_flight: InFlight | None = None
        self.cycles_in_flight: list[tuple[Batch, bool]] = []  # and whether it has committed
        self.shown: dict[str, frozenset[int]] = {}  # by origin: what the last read that counts has shown
        self.running_rows: dict[int, int] = {}  # id -> attempt
        self.over: set[int] = set()
        self.named: set[int] = set()  # by the last cycle that has committed
        self.stopped: set[int] = set()  # cancelled when they were named
        self.started = 0
        registry = Registry()
        registry.job(name="known", payload=object)(_handler)
        registry.job(name="slow", payload=object)(_handler)
        self.scheduler = Scheduler(
            lambda kind: kind != "unknown",
            window=self.life.window,
            keep=self.life.keep,
            budget=self.life.budget,
            payload_budget=60,
        )
        metrics = ExecutorMetrics("test", CollectorRegistry())
        self.handlers = Handlers(self.life.concurrency)
        self.handlers.clock = lambda: self.clock
        if self.life.limit is not None:
            self.handlers.limits = {"slow": self.life.limit}
        self.reader = Reader(
            _none(),
            self.scheduler,
            metrics,
            schema="sidings",
            poll_seconds=1,
            silent=list,
            on_rows=_ignore,
            on_restarted=_ignore,
            on_replaced=_ignore,
            on_fence=lambda fence: self.cycles.standing.fence_read(fence),
        )
        self.reader._planner.most_late = self.life.most_late
        self.cycles = CycleLoop(
            [Standing(self)],  # type: ignore[list-item]
            self.scheduler,
            self.handlers,  # type: ignore[arg-type]
            registry,
            metrics,
            schema="sidings",
            poison_after=5,
            on_fenced=_ignore,
            on_replaced=_ignore,
            on_read=_ignore,
            on_forgotten=_ignore,
            on_delayed=_ignore,
            on_hungry=_ignore,
        )
        self.cycles.begin(uuid4())
        self.epoch = 0
        for name in self.life.origins:
            self._acquire(name)

    # -- writers --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if len(self.database.open) < 5:
            self.database.begin()

    def insert(self) -> None:
        """A row in one of the open transactions, or in one of its own."""
        alone = not self.database.open or self.random.random() < self.life.alone
        xid = self.database.begin() if alone else self.random.choice(list(self.database.open))
        group = self.random.choice(self.life.groups)
        for _ in range(self.random.choice((1, 1, 1, 2, 9))):
            kind = "unknown" if self.random.random() < self.life.unknown else "known"
            if self.life.slow and kind == "known" and self.random.random() < self.life.slow:
                kind = "slow"
            self._insert(xid, group, kind)
        if alone:
            self.commit(xid)

    def _insert(self, xid: int, group: str | None, kind: str = "known") -> Row:
        database = self.database
        origin = self.random.choice(self.life.origins)
        row = Row(database.next_id, origin, group, kind, xid, None, inserted=self.step)
        dice = self.random.random()
        if group is not None and kind != "unknown" and dice < self.life.latest + self.life.parallel:
            row.policy = LATEST if dice < self.life.latest else PARALLEL
        if self.random.random() < 0.1:
            row.run_at = self.clock + self.random.random()
        else:
            row.position = database.position()
        row.priority = self.random.choice((0, 0, 0, 1, -1))
        if self.random.random() < self.life.large:
            row.size = self.random.choice((1, 3, 10, 30, 100))
        database.next_id += 1
        database.insert(xid, row)
        return row

    def commit(self, xid: int | None = None) -> None:
        if xid is None and self.database.open:
            xid = self.random.choice(list(self.database.open))
        if xid is not None:
            for row in self.database.commit(xid):
                row.committed = self.step

    def abort(self) -> None:
        if self.database.open:
            self.database.end(self.random.choice(list(self.database.open)))

    def promote(self) -> None:
        """Delayed rows that are due get a position and a new transaction id."""
        due = [r for r in self.database.rows.values() if r.position is None and not r.held and r.run_at <= self.clock]
        for row in sorted(due, key=lambda row: (row.run_at, row.id)):
            if row.policy == LATEST and any(other.id > row.id for other in self._alike(row)):
                self._end(row)
            else:
                self._move(row)

    def move(self) -> None:
        """A person gives a waiting or held row a new place."""
        rows = [row for row in self.database.rows.values() if row.held or row.position is not None]
        if rows:
            row = self.random.choice(rows)
            if row.held:
                row.run_at = None
                self.over.discard(row.id)
            self._move(row)

    def _move(self, row: Row) -> None:
        xid = self.database.begin()
        row.txid, row.position, row.held, row.moved = xid, self.database.position(), False, True
        row.inserted = row.committed = self.step
        self.database.end(xid)

    def _alike(self, row: Row) -> list[Row]:
        """What of its group and type is not held."""
        return [
            other
            for other in self.database.rows.values()
            if (other.origin, other.group, other.policy) == (row.origin, row.group, LATEST) and not other.held
        ]

    def _end(self, row: Row) -> None:
        del self.database.rows[row.id]
        assert row.id not in self.over, f"{row} ended twice"
        self.over.add(row.id)

    # -- persons --------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """A person ends a job, whatever its state."""
        if self.database.rows:
            row = self.random.choice(list(self.database.rows.values()))
            if row.held:
                self.over.discard(row.id)
            self._end(row)
            if row.id in self.named:
                self.stopped.add(row.id)
            self._intervene("cancel", row.origin, row.group, row.id)

    def let_run(self) -> None:
        """A person releases a job that is held, or has one run now that backs off or is delayed."""
        rows = [r for r in self.database.rows.values() if (r.held or r.run_at is not None) and r.id not in self.named]
        if not rows:
            return
        row = self.random.choice(rows)
        if row.held:
            row.run_at, row.failures, row.losses = None, 0, 0
            self.over.discard(row.id)
            self._move(row)
            self._intervene("release", row.origin, row.group, row.id)
        else:
            row.run_at = None if row.position is not None else self.clock
            self._intervene("retry now", row.origin, row.group, row.id)

    def clear(self) -> None:
        """A person ends the jobs of a group that neither run nor are held."""
        rows = [r for r in self.database.rows.values() if r.group is not None and not r.held and r.id not in self.named]
        if rows:
            origin, group = (row := self.random.choice(rows)).origin, row.group
            for row in [row for row in rows if (row.origin, row.group) == (origin, group)]:
                self._end(row)
            self._intervene("clear group", origin, group)

    def pause(self) -> None:
        """A person pauses something, here or where others have it."""
        origin = self.random.choice((*self.life.origins, ELSEWHERE))
        group = self.random.choice([group for group in self.life.groups if group] or ["none"])
        pause = self.random.choice((["type", "known", None, None], ["origin", None, origin, None]))
        if self.random.random() < 0.6:
            pause = ["group", None, origin, group]
        if pause not in self.database.pauses:
            self.database.pauses.append(pause)
            if pause[2] != ELSEWHERE:
                self._intervene()

    def resume(self) -> None:
        if self.database.pauses:
            pause = self.database.pauses.pop(self.random.randrange(len(self.database.pauses)))
            if pause[2] != ELSEWHERE:
                self._intervene()

    def _intervene(self, action: str = "", origin: str = "", group: str | None = None, job: int | None = None) -> None:
        """Of some it is not known what they concern."""
        self.database.fence += 1
        if action and self.random.random() < 0.9:
            self.database.actions.append((self.database.fence, action, origin, group, job))

    def _paused(self, row: Row) -> bool:
        return any(
            pause in self.database.pauses
            for pause in (
                ["type", row.type, None, None],
                ["origin", None, row.origin, None],
                ["group", None, row.origin, row.group],
            )
        )

    # -- the reader -----------------------------------------------------------------------------------------------

    def slow_down(self) -> None:
        """The handlers of a type take long, or do so no more."""
        self.handlers.slow ^= {"slow"}

    def thin_out(self, answers: float = 0.8) -> None:
        """Superseded jobs are ended, while no read is under way. answers: how likely it is that this is known."""
        if self.read_in_flight is not None:
            return
        answered = self.random.random() < answers
        for lane in list(self.scheduler.crowded):
            alike = [
                row
                for row in self.database.rows.values()
                if (row.origin, row.group, row.policy) == (lane.origin.name, lane.group, LATEST)
                and row.position is not None
            ]
            newest = max((row.id for row in alike), default=0)
            older = [row for row in alike if row.id < newest]
            for row in older:
                self._end(row)
            if answered:
                self.scheduler.thinned(lane, newest, len(older), self.clock)
            else:
                self.scheduler.read_anew(lane, self.clock + 1.0)

    def send_read(self) -> None:
        if self.read_in_flight is None and any(not q.draining for q in self.scheduler.origins.values()):
            plan = self.reader._planner.plan(self.clock)
            self.scheduler.reading = True
            rows = self.database.read(self.reader._arguments(plan), self.clock)
            self.read_in_flight = InFlight(plan, rows, self.clock, self._shows())

    def deliver_read(self) -> None:
        flight, self.read_in_flight = self.read_in_flight, None
        if flight is not None:
            origins = [(queue, version) for queue, version in flight.plan.origins]
            if json.loads(flight.rows[0]["headers"])["fence"] < self.cycles.standing.fence:
                origins = []  # it does not count
            pauses, times_anew = self.scheduler.pauses, self.reader._times_anew
            self.reader._deliver(flight.plan, flight.rows, flight.sent)
            if all(ELSEWHERE in pause for pause in _each(pauses) ^ _each(self.scheduler.pauses)):
                assert self.reader._times_anew <= times_anew, "all is read anew for what others hold"
            for queue, version in origins:
                if self.scheduler.origins.get(queue.name) is queue and queue.version == version:
                    self.shown[queue.name] = flight.taken_in[queue.name]

    def fail_read(self) -> None:
        flight, self.read_in_flight = self.read_in_flight, None
        if flight is not None:
            self.reader._give_up(flight.plan)

    def _shows(self) -> dict[str, frozenset[int]]:
        shown: dict[str, list[int]] = {name: [] for name in self.life.origins}
        for row in self.database.rows.values():
            if row.position is not None:
                shown[row.origin].append(row.id)
        return {name: frozenset(ids) for name, ids in shown.items()}

    # -- the cycle ------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """The executor is told of a job that has been committed, mostly one of the last: the next cycle names it."""
        ids = sorted(self.database.rows)[-3:] if self.random.random() < 0.7 else list(self.database.rows)
        if ids and not self.cycles_in_flight:
            row = self.database.rows[self.random.choice(ids)]
            if self.cycles._expected.tell({row.origin: [row.id]}, 3):
                self.cycles._expected.unread.add(row.id)

    def send_cycle(self) -> None:
        """Gather, and commit or be void; the answer comes later. A second cycle may follow before that."""
        flying = self.cycles_in_flight
        if len(flying) == 2 or (flying and self.cycles.standing.doubtful):
            return
        if self.cycles.standing.doubtful:
            run(self.cycles.standing.look_up())
        self.cycles._flights = deque(Flight(batch, 1, self.clock, None, None, []) for batch, _ in flying)  # type: ignore[arg-type]
        claimed = len(self.handlers.claimed)
        batch = self.cycles._gather()
        for entry in list(self.handlers.claimed)[claimed:]:
            self._check_choice(entry, named=True)  # it starts, since the last cycle has named it
        self.cycles._flights.clear()
        self.cycles._look_after()
        chosen = [entry for sent in (*(sent for sent, _ in flying), batch) if sent is not None for entry in sent.chosen]
        for type, limit in self.handlers.limits.items():
            assert self.handlers.at_once(type, chosen) <= limit, f"more than {limit} of type {type}"
        if batch is not None:
            assert len(batch.early) <= 3, "more is named early than there was room for"
            batch.rows = self.database.read_named(batch.reads)  # type: ignore[assignment]
            committed = self.cycles.standing.fence == self.database.fence and all(before for _, before in flying)
            flying.append((batch, committed))
            if committed:
                self._commit_cycle(batch)

    def acknowledge_cycle(self) -> None:
        """The oldest answer arrives, or is lost. What is void is sent once more, all of it in one cycle."""
        if not self.cycles_in_flight:
            return
        batch, committed = self.cycles_in_flight.pop(0)
        if committed and (self.cycles_in_flight or self.random.random() < 0.7):
            self.cycles._acknowledged(batch, heard=True)
            if not self.cycles_in_flight:
                self.cycles._expected.acknowledged(batch.early)
                self.cycles._expected.read(batch.reads, batch.rows)
            return
        if committed:
            run(self.cycles._resolve(batch, 0))
            self.cycles._acknowledged(batch, heard=False)
            return
        batch = merged([batch, *(second for second, _ in self.cycles_in_flight)])
        run(self.cycles._resolve(batch, 1))
        self.cycles_in_flight = [(batch, True)]
        self._commit_cycle(batch)

    def _commit_cycle(self, batch: Batch) -> None:
        self.named = {*self.cycles._named, *batch.early}
        for entry, outcome, _, _ in batch.finished:
            self._record(entry, outcome)
        for entry in batch.chosen:
            self._check_choice(entry)

    def _record(self, entry: Entry, outcome: Outcome) -> None:
        row = self.database.rows.get(entry.id)
        if row is None or row.attempt != entry.attempt:
            return
        match outcome:
            case Again():
                row.attempt += 1
                row.failures += outcome.name is OutcomeName.RETRIED
                row.losses = row.losses if outcome.inconclusive else 0
                row.run_at = self.clock + outcome.delay
                if row.group is None or row.policy == PARALLEL:
                    row.position = None
            case Hold():
                row.attempt += 1
                row.losses = 0
                if outcome.blocks:
                    row.run_at = inf
                else:
                    row.held, row.position = True, None
            case Committed():
                raise AssertionError(f"{row} is still there")
            case _:
                del self.database.rows[row.id]
        if not isinstance(outcome, Again) and row.run_at != inf:
            assert row.id not in self.over, f"{row} ended twice"
            self.over.add(row.id)

    # -- handlers -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A handler starts."""
        handlers = self.handlers
        if not handlers.claimed or len(handlers.busy) + len(handlers.void) >= handlers.concurrency:
            return
        entry = handlers.claimed.popleft()
        assert self.scheduler.holds(entry), f"{entry} starts although its origin is another's"
        assert not entry.origin.draining, f"{entry} starts although its origin is draining"
        if entry.origin.deadline <= self.clock:
            handlers.expired.append(entry)
            return
        assert entry.type != "unknown", f"{entry} starts although nobody here knows its type"
        row = self.database.rows.get(entry.id)
        if row is None and entry.id in self.stopped:
            row = Row(entry.id, entry.origin.name, entry.group, entry.type, 0, entry.position, attempt=entry.attempt)
        assert row is not None, f"{entry} starts although it is over"
        assert row.attempt == entry.attempt, f"{entry} starts as attempt {entry.attempt}, it is at {row.attempt}"
        for other in handlers.busy:
            assert other.id != entry.id, f"{entry} runs twice at once"
            same = (other.origin.name, other.group) == (entry.origin.name, entry.group)
            ordered = entry.lane is not None and other.lane is not None
            assert not ordered or not same, f"{entry} starts while {other} of its group runs"
        if entry.losses:
            assert not any(other.losses for other in handlers.busy), f"{entry} is the second suspect at once"
        handlers.busy.append(entry)
        self.started += 1

    def finish(self, outcome: Outcome | None = None) -> None:
        """A handler ends."""
        handlers = self.handlers
        if handlers.void and self.random.random() < 0.5:
            entry = handlers.void.pop(self.random.randrange(len(handlers.void)))
            if self.random.random() < 0.5:
                handlers.expired.append(entry)
            else:
                handlers.finished.append((entry, SUCCEEDED, self.clock, self.clock))
        elif handlers.busy:
            entry = handlers.busy.pop(self.random.randrange(len(handlers.busy)))
            handlers.finished.append((entry, outcome or self._outcome(entry), self.clock, self.clock))

    def _outcome(self, entry: Entry) -> Outcome:
        if self.random.random() > self.life.failing:
            return SUCCEEDED
        dice = self.random.random()
        if dice < 0.5:
            return Again(OutcomeName.RETRIED, self.random.choice((0.0, 0.1, 1.0)))
        if dice < 0.6:
            return Again(OutcomeName.SNOOZED, 0.0, inconclusive=self.random.random() < 0.5)
        if dice < 0.85 and entry.group is not None and entry.policy not in (LATEST, PARALLEL):
            return Hold("why", blocks=True)
        return Hold("why") if dice < 0.9 else End(OutcomeName.DISCARDED)

    def pass_time(self) -> None:
        self.clock += self.random.choice((0.01, 0.1, 0.5))

    # -- ownership ------------------------------------------------------------------------------------------------

    def _acquire(self, name: str) -> None:
        self.epoch += 1
        self.scheduler.add_origin(name, self.epoch)
        self.shown[name] = frozenset()

    def _some_origin(self) -> OriginQueue | None:
        return self.random.choice(list(self.scheduler.origins.values()) or [None])

    def drain_or_resume(self) -> None:
        queue = self._some_origin()
        if queue is None:
            return
        if queue.draining:
            self.scheduler.resume(queue)
        else:
            self.cycles.unname(self.handlers.unclaim(queue))
            self.scheduler.drain(queue)
            self.shown[queue.name] = frozenset()

    def release(self) -> None:
        """A drained origin is given back, after a cycle that names none of its jobs."""
        for queue in list(self.scheduler.origins.values()):
            if queue.draining and not queue.running and not self.cycles_in_flight:
                assert not any(entry.origin is queue for entry in self.handlers.busy)
                assert not any(entry.origin is queue for entry in self.cycles._named.values())
                self.scheduler.remove_origin(queue.name)

    def lose(self) -> None:
        """Another executor takes an origin over and accounts for what was named; it may come back later."""
        queue = self._some_origin()
        if queue is None:
            return
        known = {entry.id for entry in self.cycles._named.values() if entry.origin is queue}
        known |= {id for id, row in self.database.rows.items() if id in self.named and row.origin == queue.name}
        for id, row in self.database.rows.items():
            if id in known:
                row.attempt += 1
                row.losses += 1
        handlers = self.handlers
        handlers.unclaim(queue)
        handlers.void += [entry for entry in handlers.busy if entry.origin is queue]
        handlers.busy = [entry for entry in handlers.busy if entry.origin is not queue]
        self.named -= known
        self.cycles.forget(queue.name)
        self.scheduler.remove_origin(queue.name)

    def acquire(self) -> None:
        for name in self.life.origins:
            # The watchdog sees to it that nothing of an older epoch still runs when an origin comes back.
            if name not in self.scheduler.origins and not any(e.origin.name == name for e in self.handlers.void):
                self._acquire(name)
                return

    def reread(self) -> None:
        """The audit has found something, or the server is a new one: everything is read from 0 again."""
        queue = self._some_origin()
        if queue is not None and not queue.draining:
            self.scheduler.forget_waiting(queue)
            self.shown[queue.name] = frozenset()

    def expire_or_renew(self) -> None:
        """A deadline passes before claimed jobs have started; later it is a good one again."""
        queue = self._some_origin()
        if queue is not None:
            queue.deadline = inf if queue.deadline < inf else self.clock

    def restart_server(self) -> None:
        """The next answer comes from a server that was started anew; open transactions are gone."""
        for xid in list(self.database.open):
            self.database.end(xid)
        self.database.server = "re" + self.database.server  # the timeline stays
        self.shown = {name: frozenset() for name in self.life.origins}

    # -- what must never happen -----------------------------------------------------------------------------------

    def _check_choice(self, entry: Entry, *, named: bool = False) -> None:
        """Nothing of the group stands before it that a read had shown by now. named: so it was before, and who has
        cancelled or paused it since was told that it runs."""
        row = self.database.rows.get(entry.id)
        if row is None and named and entry.id in self.stopped:
            return
        assert row is not None, f"{entry} is chosen although it is over"
        assert named or not self._paused(row), f"{entry} is chosen although it is paused"
        if entry.lane is None or row.moved:
            return
        for other in self.database.rows.values():
            if (
                other.policy == PARALLEL
                or other.origin != row.origin
                or other.group != row.group
                or other.moved
                or other.position is None
            ):
                continue
            if other.id in self.shown[row.origin] or other.committed < row.inserted:
                assert other.position >= entry.position, f"{entry} is chosen before {other}"

    def live(self, steps: int) -> None:
        """Take so many steps, let everything end, and check all the while."""
        names = [name for name, weight in self.life.steps.items() if weight]
        weights = [self.life.steps[name] for name in names]
        for name in self.random.choices(names, weights, k=steps):
            self.take(name)
            if name == "deliver_read" or self.step % 8 == 0:
                self.check()
        self.finish_everything()

    def take(self, name: str) -> None:
        """Take one step."""
        self.step += 1
        getattr(self, name)()

    def check(self) -> None:
        """Bounds, and the audit: what the last read has shown is either in memory or will be read."""
        scheduler = self.scheduler
        for queue in scheduler.origins.values():
            for lane in queue.lanes.values():
                assert len(lane.queue) <= self.life.keep + 1, f"{lane.group} holds {len(lane.queue)} jobs"
                positions = [entry.position for entry in lane.queue]
                assert positions == sorted(positions)
            if queue.draining:
                assert not any(entry.origin is queue for entry in self.handlers.claimed)
        assert scheduler.memory.payload == sum(entry.size for entry in scheduler.memory.jobs.values())
        lanes = [lane for queue in scheduler.origins.values() for lane in queue.lanes.values()]
        back = Counter(lane.line for lane in lanes if lane.back)
        assert back == Counter({line: level.back for line, level in scheduler._ready._levels.items()}), (
            "room is lost for good"
        )
        taken = sum(lane.size for lane in lanes if lane.back)
        assert scheduler._ready.size == sum(level.size for level in scheduler._ready._levels.values()) == taken
        self._check_lanes(lanes)
        if self.step % 64 == 0:
            self._check_ready(lanes)
        if self.read_in_flight is not None or self.cycles_in_flight:
            return
        for row in self.database.rows.values():
            if row.position is None or row.type == "unknown" or row.id not in self.shown.get(row.origin, ()):
                continue
            accounted = scheduler.knows(row.id) or scheduler.accounts_for(row.origin, row.group, row.position)
            accounted = accounted or scheduler.withholds(row.type, row.origin, row.group)
            assert accounted or row.moved, f"the audit finds {row}"
        if self.cycles.standing.fence == self.database.fence:  # else a person has let go on what is blocked still
            self._check_blocked(lanes)
        assert scheduler.memory.running() <= len(scheduler.memory.jobs)
        assert scheduler.ready >= 0

    def _check_blocked(self, lanes: list[Lane]) -> None:
        """A lane that waits for a person does so at the first job of its group: no other one can be released."""
        for lane in lanes:
            if lane.due != inf or lane.origin.draining:
                continue
            name = lane.origin.name
            rows = [r for r in self.database.rows.values() if (r.origin, r.group) == (name, lane.group)]
            if any(row.moved and row.run_at == inf for row in rows):  # it was the first, and has another place now
                continue
            rows = [row for row in rows if row.id in self.shown[name] and row.policy != PARALLEL and not row.held]
            first = min(rows, key=lambda row: row.position or 0, default=None)
            blocked = first is None or first.run_at == inf or self._paused(first)
            assert blocked, f"{lane.group} waits for a person, before {first}"

    def _check_lanes(self, lanes: list[Lane]) -> None:
        """None stands still: each runs a job, may run one, waits for its time, or is about to be read."""
        scheduler, flight = self.scheduler, self.read_in_flight
        read = {lane for lane, version, _ in flight.plan.lanes if lane.version == version} if flight else set[Lane]()
        for lane in lanes:
            if (job := lane.running) is not None:
                assert job in lane.origin.running or job in scheduler.suspects._waiting, f"{job} holds its group"
            elif not lane.queued and lane.due is None and lane not in scheduler.crowded and not lane.origin.draining:
                assert not lane.queue, f"{lane.group} stands still"
                assert lane in scheduler.hungry or lane in read, f"{lane.group} is not read any more"

    def _check_ready(self, lanes: list[Lane]) -> None:
        """What could run stands there once, and nothing else does."""
        ready = self.scheduler._ready
        assert ready.back == sum(lane.back for lane in lanes)
        standing = [item for line in ready.lines() for item in line]
        assert ready.count == len(standing) == len(set(standing)), "something is ready twice, or counted and not there"
        assert {lane for lane in lanes if lane.queued} == {item for item in standing if isinstance(item, Lane)}
        assert all(item.lane is None for item in standing if isinstance(item, Entry))
        singles = {item for item in standing if isinstance(item, Entry)}
        assert all(self.scheduler.memory.jobs.get(entry.id) is entry for entry in singles), "what is over is ready"
        assert all(self.scheduler.holds(entry) for entry in self.scheduler.memory.jobs.values()), (
            "memory keeps what is another's"
        )

    def finish_everything(self) -> None:
        """Let all that is there come to its end, and check that nothing is left over."""
        for xid in list(self.database.open):
            self.commit(xid)
        self.deliver_read()
        while self.cycles_in_flight:
            self.acknowledge_cycle()
        while self.database.pauses:
            self.resume()
        quiet = 0
        for _ in range(20_000):
            before = (len(self.database.rows), self.started)
            for queue in list(self.scheduler.origins.values()):
                queue.deadline = inf
                if queue.draining:
                    self.scheduler.resume(queue)
            self.clock += 0.3 if quiet < 10 else 70.0  # past the time after which unknown types are looked at again
            while self.handlers.void:
                self.handlers.expired.append(self.handlers.void.pop())
            for _ in self.life.origins:
                self.acquire()
            self.promote()
            for row in [row for row in self.database.rows.values() if row.run_at == inf]:
                row.run_at = None
                self._intervene("retry now", row.origin, row.group, row.id)
            self.thin_out(0.8 if quiet < 10 else 1.0)  # else bad luck may pass for a lost job
            self.send_read()
            self.deliver_read()
            self.send_cycle()
            while self.cycles_in_flight:
                self.acknowledge_cycle()
            while self.handlers.claimed and len(self.handlers.busy) < self.handlers.concurrency:
                self.start()
            while self.handlers.busy:
                self.finish(SUCCEEDED)
            quiet = quiet + 1 if before == (len(self.database.rows), self.started) else 0
            if quiet > 20:
                break
        blocked = {}
        for row in self.database.rows.values():
            if row.type == "unknown" and row.group is not None and row.position is not None:
                key = (row.origin, row.group)
                blocked[key] = min(row.position, blocked.get(key, row.position))
        for row in self.database.rows.values():
            behind = row.position is not None and row.position >= blocked.get((row.origin, row.group), 2**62)
            assert row.held or row.type == "unknown" or behind, f"{row} was never run"
        assert not self.handlers.claimed
        for _ in range(3):
            self.send_read()
            self.deliver_read()
        assert not self.reader._planner.wants(), "one read follows another, for nothing"
        assert self.scheduler.suspects.running is None
        for queue in self.scheduler.origins.values():
            assert not queue.running
            assert all(lane.more for lane in queue.lanes.values()), "an empty lane is kept"


class Standing:
    """`standing.sql`."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def fetchrow(self, _: str, executor: object, known: int, most: int) -> dict[str, Any]:
        database = self.world.database
        actions = [action for action in database.actions if action[0] > known]
        origins = sorted(self.world.scheduler.origins)
        return {
            "cycle": 0,
            "fence": database.fence,
            "actions": json.dumps(actions) if actions else None,
            "timeline": self.world.scheduler.timeline,
            "origins": origins,
            "epochs": [self.world.scheduler.origins[name].epoch for name in origins],
            "gone": [id for id in self.world.named if id not in database.rows],
        }


def run(step: Coroutine[Any, Any, T]) -> T:
    """Run what never has to wait."""
    try:
        step.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


class Clocks:
    """Puts a world's clock in the place of the executor's."""

    def __init__(self) -> None:
        self.world: World | None = None

    def __call__(self) -> float:
        return 0.0 if self.world is None else self.world.clock

    def __enter__(self) -> Self:
        self._real = (reader.now, cycles.now, standing.now, expected.now)
        reader.now = cycles.now = standing.now = expected.now = self
        return self

    def __exit__(self, *_: object) -> None:
        reader.now, cycles.now, standing.now, expected.now = self._real


def _each(pauses: Pauses) -> set[tuple[str, ...]]:
    """The type, the origin, or the origin and group of each."""
    return {("type", type) for type in pauses.types} | {(origin,) for origin in pauses.origins} | set(pauses.groups)


async def _handler(job: object) -> None: ...


def _ignore(*_: object) -> None: ...


def _none() -> Any:
    """No connection: the world answers itself, and nobody resets statistics."""
    return SimpleNamespace(lived_on=lambda _: False)

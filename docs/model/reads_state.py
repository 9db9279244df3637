"""The state of the reads model: transactions, the reader with its marks, groups in memory, the cycle under way.

The scripts of the transactions are finite, so ids, positions and the whole space are.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

__all__ = [
    "ABORTED",
    "BACKOFF",
    "COMMITTED",
    "DONE",
    "DUE",
    "ENDED",
    "FAILED",
    "NAMED",
    "OPEN",
    "RUNNING",
    "UNDER_WAY",
    "UNDONE",
    "WAITING",
    "Cycle",
    "Glance",
    "Group",
    "Job",
    "JobSpec",
    "Marks",
    "Protocol",
    "Read",
    "Refill",
    "Row",
    "Scenario",
    "Snapshot",
    "State",
    "Thinned",
    "Writer",
    "swap",
]

OPEN, COMMITTED, ABORTED = "open", "committed", "aborted"
UNDONE = "undone"  # committed, but lost in a failover

# WAITING: has never started. NAMED: a cycle has committed that names it. DONE, FAILED: its handler has returned.
# BACKOFF: a cycle has recorded the failure, the row waits for its retry time. DUE: that has come. ENDED: deleted.
WAITING, NAMED, RUNNING, DONE, FAILED = "waiting", "named", "running", "done", "failed"
BACKOFF, DUE, ENDED = "backoff", "due", "ended"
UNDER_WAY = frozenset((NAMED, RUNNING, DONE, FAILED))

T = TypeVar("T")


def swap(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """The tuple with one item replaced."""
    return (*items[:index], item, *items[index + 1 :])


class Writer(NamedTuple):
    """A transaction. `positions`: those it has drawn, for its enqueues and promotions in the order of the script."""

    step: int
    xid: int  # 0: none yet
    newest: int  # the newest id that it burned, for a savepoint
    positions: tuple[int, ...]
    status: str


class Snapshot(NamedTuple):
    """A `pg_snapshot`: ids from `xmax` (the newest completed id + 1) on, and those in `open`, are invisible."""

    xmax: int
    open: tuple[int, ...]

    def sees(self, xid: int) -> bool:
        return xid < self.xmax and xid not in self.open


class Marks(NamedTuple):
    """What the reader keeps between reads. `high`: up to where each origin has been read; None: not held.

    snapshot: that of the last delivered read. bound: the first id not handed out then. bases: for each id open then,
    the position above which its rows lie; `unseen` is the same for the ids from the snapshot's xmax on.
    """

    high: tuple[int | None, ...]
    snapshot: Snapshot | None
    bound: int
    bases: tuple[tuple[int, int], ...]
    unseen: int
    server: int  # the start time of the server that all this holds for
    early: int = 0  # the next id, looked up before the snapshot; a wrong protocol only
    drawn: int = 0  # the last position that had been drawn when the last delivered read was answered

    def highest(self) -> int:
        return max(high for high in self.high if high is not None)


class Row(NamedTuple):
    """A row of `job`, as a read saw it."""

    job: int
    attempt: int


class Refill(NamedTuple):
    """The part of a read that fetches more of a group: its rows behind `last`, up to `upto`."""

    group: int
    last: int
    version: int
    upto: int
    rows: tuple[Row, ...]


class Read(NamedTuple):
    """A read that is on its way back, with all that it saw. `snapshot`: None for a refill on its own. `needs_end`: how
    far it may advance is still to be looked up. Both are wrong. `glance`: what the glance before it has shown. `whole`:
    it has a forward part."""

    late: tuple[Row, ...]
    refills: tuple[Refill, ...]
    forward: tuple[Row, ...]
    left_out: tuple[int, ...]  # groups that the forward part was told to leave out
    scanned: tuple[int | None, ...]  # up to where the forward part has seen each origin
    snapshot: Snapshot | None
    bound: int
    server: int
    version: int
    needs_end: bool
    glance: "Glance | None" = None
    whole: bool = True


class Group(NamedTuple):
    """A group in memory: fetched rows by position. `more`: the database has rows behind `last` that are not here.
    `held`: backs off. `version` changes when the group is compacted. `newest`: the job that superseding has left."""

    queue: tuple[Row, ...] = ()
    more: bool = False
    last: int = 0
    held: bool = False
    version: int = 0
    newest: int | None = None


class Job(NamedTuple):
    """How far a job has come; `attempt` as it stands in the database."""

    status: str
    attempt: int


class Glance(NamedTuple):
    """`glance.sql`: what identifies the committed state of the database."""

    snapshot: Snapshot
    server: int


class Thinned(NamedTuple):
    """Of one group all waiting jobs but the newest have been ended; the answer is on its way. `version`: of it."""

    group: int
    newest: int
    ended: int
    version: int


class Cycle(NamedTuple):
    """A cycle that has committed and has not been acknowledged."""

    ends: tuple[int, ...]
    fails: tuple[int, ...]
    names: tuple[int, ...]


class State(NamedTuple):
    """Everything. `ended`: jobs that ended, or failed, while a read was under way. `version` changes when the executor
    forgets what waits. `newest`: the writer whose commit a failover may lose, because nothing that counts has committed
    since. `glance`: of the next read; `complete`: as of which nothing was left to read. `thinned`: superseding under
    way. `born`: jobs in the order of their ids, where that matters. `alone`: what the cycle under way has read."""

    writers: tuple[Writer, ...]
    next_xid: int
    next_position: int
    completed: int  # the newest id whose transaction has ended
    caches: tuple[tuple[int, ...], ...]  # positions that a session has cached; a wrong protocol only
    marks: Marks
    read: Read | None
    groups: tuple[Group, ...]
    jobs: tuple[Job, ...]
    cycle: Cycle | None
    ended: tuple[int, ...]
    server: int
    version: int
    newest: int | None
    lost_answers: int  # how many answers can still get lost
    forgets: int  # how often the executor can still forget what waits
    restarts: int  # how often the server can still restart
    broken: str
    glance: Glance | None = None
    complete: Glance | None = None
    thinned: tuple[Thinned, ...] = ()
    born: tuple[int, ...] = ()
    alone: Row | None = None


class JobSpec(NamedTuple):
    """A job of the scenario. `author` inserts it; `placer` gives it its position, the `nth` that it draws."""

    author: int
    placer: int
    nth: int
    group: int


@dataclass(frozen=True)
class Protocol:
    """The protocol, as choices between the right way (the default) and wrong ones (in the comment)."""

    xid_first: bool = True  # next_position() takes a transaction id before nextval
    sequence_cache: int = 1
    promotion: str = "new txid"  # "old txid"
    late_base: str = "open and later"  # "open": ids from the last snapshot's xmax on are forgotten
    bound: str = "with the snapshot"  # "before the snapshot"
    marks_of: str = "delivered reads"  # "issued reads"
    hand_over: tuple[int, ...] = ()  # writers whose own jobs go into memory at commit
    refill: str = "in the read"  # "on its own", "on its own, bounded"
    refill_guard: str = "same last"  # "same version", "none"
    beyond_last: str = "by position"  # "dropped": rows at or below the last position are ignored
    known: str = "with the ended"  # "without the ended": ids that ended while a read was under way are forgotten
    head: str = "removed when chosen"  # "removed after the await"
    leave_out: bool = False  # the forward part may leave out deep groups (an option, not a mistake)
    deep: str = "more, and passed"  # "when more": groups are left out whose last row the mark has not passed
    scanned: str = "this page, this snapshot"  # "another snapshot", "beyond the page"
    left_out: str = "keeps more"  # "forgotten": a refill in the same read clears `more`
    compacted: str = "to before the head"  # "to the head", "not more"
    forgetting: str = "voids the read under way"  # "applies it"
    starting_over: str = "from 0"  # "from the marks": only what is needed to find late rows is forgotten
    restart: str = "forget the waiting"  # "unnoticed", "forget what is under way", "forget everything", …
    notice: str = "with a read"  # "on connecting": another server is noticed before anything is sent to it
    undone: bool = False  # a restart is a failover that has lost the last commit
    glance: str = ""  # no glance; "before the read" is right. "after the read", "without the server"
    complete: str = (
        "all was seen"  # "no forward part", "a full page", "an origin acquired", "forgotten": … all the same
    )
    supersede: str = "between reads"  # "any time", "what runs as well", "by position", …
    # How far marks pass rows that are not committed yet: up to what was drawn when the read before was answered.
    # "", not at all, is right as well; "drawn by now", "a full page", "before the bases", "kept over a restart": wrong
    passes: str = "drawn before"
    # "": no cycle reads what it names early. "first of its group" is right; "any of its group", "moves the mark",
    # "beside other cycles": wrong
    alone: str = ""
    strict: bool = True  # a row that is delivered twice is a violation, even if memory would notice


@dataclass(frozen=True)
class Scenario:
    """Transactions, and what else may happen.

    writers: their steps: `xid` (some other write takes an id), `wait N` (for the end of writer N, on an entity's row),
    `enqueue G`, `savepoint G` (the same inside a savepoint, which burns an id), `delay G` (insert without a position),
    `promote G` (give that job its position), `commit`, `abort`.
    keep: fetched rows per group. page: rows of a forward read. fails: jobs that fail once. origins: the origin of each
    group; the second one is acquired some time later. brisk: handlers take no time and cycles are acknowledged at once,
    which keeps the space small where it does not matter. latest: of a group's waiting jobs only the newest runs.
    full: memory may be too full for a forward part. starts_over: where it forgets, it is the reader, which starts over.
    """

    writers: tuple[tuple[str, ...], ...]
    keep: int = 2
    page: int = 2
    fails: tuple[int, ...] = ()
    origins: tuple[int, ...] = (0, 0)
    sessions: tuple[int, ...] = ()
    lost_answers: int = 0
    forgets: int = 0
    restarts: int = 0
    brisk: bool = False
    latest: bool = False
    full: bool = False
    starts_over: bool = False

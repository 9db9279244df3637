"""The state of the lease model: what stands in the database, what the executors remember, what is on its way.

Numbers that only grow (epochs, fences, cycle numbers) would make the space infinite. Only their relation to the present
value matters, so `lease_canonical` puts its distance from it there. Of time, only what is left of a lease is kept.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

__all__ = [
    "AGAIN",
    "BLOCKED",
    "COMMITTED",
    "DEAD",
    "DEFERRED",
    "DONE",
    "ENDING",
    "EXPIRED",
    "FAILED",
    "HALF_SEEN",
    "MISLAID",
    "NAMED",
    "NO",
    "OK",
    "PAUSED",
    "QUEUED",
    "REFUSED",
    "RUNNING",
    "SKIPPED",
    "UNANSWERED",
    "UNASSIGNED",
    "UNKNOWN",
    "UP",
    "VOID",
    "WAITING",
    "Action",
    "Ask",
    "Budget",
    "Cycle",
    "Disown",
    "Executor",
    "Hold",
    "Job",
    "Look",
    "Origin",
    "Protocol",
    "Row",
    "Scenario",
    "Sight",
    "State",
    "Statement",
    "View",
    "bumped",
    "forget",
    "put_back",
    "swap",
    "with_executor",
]

# An executor is up, paused, or dead.
UP, PAUSED, DEAD = "up", "paused", "dead"

# What an executor knows of a job. NAMED: it stands in the `running` of the cycle that is on its way. DONE: its handler
# has returned, no cycle that ends it has been acknowledged. ENDING: its transactional handler has sent finish + COMMIT.
# AGAIN: it was cancelled, or its end is unknown; a cycle has to record that this attempt is over, the job runs again.
# DEFERRED: done, but a cycle that was to end it was refused for that; a later one is to end it.
# FAILED: its handler has given up, and no cycle that says so has been acknowledged.
# BLOCKED: it has given up, its group waits until a person releases it. MISLAID: by a wrong protocol.
UNKNOWN, QUEUED, NAMED, RUNNING, DONE = "-", "queued", "named", "running", "done"
ENDING, AGAIN, DEFERRED, FAILED, BLOCKED, MISLAID = "ending", "again", "deferred", "failed", "blocked", "mislaid"

# Why an executor lets go of an origin: its lease could not be renewed in time; it is not assigned any more.
EXPIRED, UNASSIGNED = "expired", "unassigned"

# The answer to a cycle, as its sender knows it. VOID: 0 rows. UNANSWERED: the connection was lost, it may still commit.
# REFUSED: Postgres takes one of its values for wrong. HALF_SEEN (a wrong protocol): void, and the origins have been
# looked at, the fence not yet.
WAITING, COMMITTED, VOID, UNANSWERED, HALF_SEEN = "waiting", "committed", "void", "unanswered", "half seen"
REFUSED = "refused"
# The answer to an acquire or renew. SKIPPED: a takeover had the row locked just then.
OK, NO, SKIPPED = "ok", "no", "skipped"

T = TypeVar("T")


def swap(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """The tuple with one item replaced."""
    return (*items[:index], item, *items[index + 1 :])


class Origin(NamedTuple):
    """A row of `origin`. `lease`: ticks left. `since`: the epoch at which the present owner became it; not a column."""

    owner: int | None
    epoch: int
    lease: int
    since: int


class Row(NamedTuple):
    """A row of `executor`. `left`: what it goes on naming of an origin that it has lost: jobs that the takeover did not
    see, since they had not been committed. Not a column."""

    cycle: int
    fence: int
    running: tuple[int, ...]
    left: tuple[int, ...] = ()


class Job(NamedTuple):
    """A row of `job`, and its history. `cut`: a run died with its executor and has not been recorded as lost yet.
    `cancelled`: what the person was told who ended it, "waiting" or "running". `late`: its transaction is at work."""

    present: bool
    attempt: int
    ended: int
    effects: int
    cut: bool
    cancelled: str = ""
    blocked: bool = False
    late: bool = False


class Hold(NamedTuple):
    """An origin that an executor believes to hold. `left`: ticks until its own deadline. `draining`: why nothing of it
    is started any more, or an empty string. `cleared`: a cycle that was gathered since has been acknowledged; noted
    where jobs are named early."""

    epoch: int
    left: int
    draining: str
    cleared: bool = False


class Cycle(NamedTuple):
    """A cycle: what it ends, what it names. `epochs`: those under which the origins were held when it was composed.
    `troubled`: it has been looked up or sent again; not noted where one is under way at a time. `handed`: of the jobs
    that it names, those whose predecessor has ended, but is not known to be over. `less`: jobs that it is without since
    its first sending, which may still commit. `early`: what its first sending names early, and nothing else makes it
    name. `reads`: of these, those that it brings: as its snapshot shows them, each the first of its group. `once`: it
    has been sent once. `clears`: the draining origins of which it names nothing. `blocks`: of `again`,
    those that block their group. `told`, where there are such: its own answer has said that it has committed, and
    whether it "found" all of its jobs, or some were "missing"."""

    number: int
    fence: int
    ends: tuple[int, ...]
    again: tuple[int, ...]
    names: tuple[int, ...]
    running: tuple[int, ...]
    epochs: tuple[int | None, ...]
    answer: str
    troubled: bool = False
    handed: tuple[int, ...] = ()
    less: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    once: bool = True
    clears: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    told: str = ""
    reads: tuple[int, ...] = ()

    def mentions(self, jobs: tuple[int, ...], running: bool = True) -> bool:
        """Whether it ends or names any of these jobs, or (`running`) has it in its running set."""
        named = self.running if running else self.names
        return any(job in self.ends + self.again + self.less or job in named for job in jobs)


class Ask(NamedTuple):
    """An acquire or renew that is on its way, or its answer. `age`: ticks since it was sent."""

    kind: str
    age: int
    answer: str
    epoch: int
    fence: int


class Sight(NamedTuple):
    """A read on its way back, where reads take time: the rows that still count, the fence and the pause as seen."""

    jobs: tuple[int, ...]
    blocked: tuple[int, ...]
    fence: int
    paused: bool


class View(NamedTuple):
    """What `standing.sql` has found. `epochs`: of the origins that are the executor's own. `gone`: jobs that its
    running set names although they are no more."""

    cycle: int
    fence: int
    epochs: tuple[int | None, ...]
    gone: tuple[int, ...]
    paused: bool
    unseen: tuple[int, ...] = ()  # they seem to be gone as well: they have not been committed
    bumps: tuple[bool, ...] = ()  # as in `Executor`


class Look(NamedTuple):
    """A look that is on its way, where looks take time. `before`: the epochs of the origins that were held when it was
    sent; of another origin it may know less than a read does. `view`: the answer."""

    before: tuple[int | None, ...]
    view: View | None


class Action(NamedTuple):
    """What a person does; it has taken its first lock. `row`: of the executor whose row it has locked, by a wrong
    order. `running`: what it has read too early."""

    kind: str
    job: int
    row: int | None
    running: tuple[int, ...] | None


class Disown(NamedTuple):
    """An executor bumps its own fence; or the answer. `alone`: nobody else has bumped it since it last knew it.
    `bumps`: how many there have been since, this one included."""

    answer: str
    fence: int = 0
    alone: bool = False
    bumps: int = 0


class Executor(NamedTuple):
    """A process. `heads`: the jobs that their groups count as running (`Lane.running`): chosen, and their outcome not
    known to be recorded, unless the successor has been chosen. `strays`: jobs whose handlers have yet to stop although
    the process has given up their origin. `paused`: the person's pause, as far as it is known here. `look`: the fence
    has grown, see why. `told`: what the last read said; kept by a wrong protocol only. `expected`: jobs to be
    named early, about to be committed or just committed; `tried`: those that have been, and may be again; `early`:
    those that may start without another cycle; `early_in_row`: those that the last acknowledged cycle may have named.
    `unlisted`: what runs and is not named; by a wrong protocol. `bumps`: of each bump of the fence since the one that
    it knows, whether the database knows that it concerned X alone; kept where there are persons."""

    status: str
    row: int  # its row in `executor`: one of its own, unless two processes share an identity
    cycle: int  # the number of the last cycle that it knows to have committed
    fence: int
    holds: tuple[Hold | None, ...]
    memory: tuple[str, ...]
    flights: tuple[Cycle, ...]  # on their way or unresolved, the oldest first
    asks: tuple[Ask | None, ...]
    strays: tuple[int, ...]
    heads: tuple[int, ...] = ()
    paused: bool = False
    look: bool = False
    sight: Sight | None = None
    view: Look | None = None
    told: tuple[int, bool] | None = None
    disown: Disown | None = None
    expected: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    early_in_row: tuple[int, ...] = ()
    unlisted: tuple[int, ...] = ()
    bumps: tuple[bool, ...] = ()


class Statement(NamedTuple):
    """A statement on the server. It runs to its end whatever becomes of its client; `heard`: the client still listens.

    begun: a takeover that has locked its origin, or a statement of a wrong protocol that has taken its snapshot too
    early; `seen` is what it saw then.
    """

    by: int
    kind: str
    origin: int = 0
    epoch: int = 0
    job: int = 0
    attempt: int = 0
    cycle: Cycle | None = None
    heard: bool = True
    begun: bool = False
    seen: tuple[int, ...] = ()


class Budget(NamedTuple):
    """How many faults, drains, and actions of a person may still happen."""

    pauses: int = 0
    crashes: int = 0
    losses: int = 0  # of a connection
    drains: int = 0
    restarts: int = 0  # of a dead process, under its former identity
    outages: int = 0  # the server restarts
    cancels: int = 0
    halts: int = 0  # a person pauses something
    resumes: int = 0
    releases: int = 0  # of a blocked job
    refusals: int = 0  # of a cycle that ends something
    expects: int = 0  # an executor is told of a job that is about to be committed, or has just been
    aborts: int = 0  # a late transaction rolls back
    failures: int = 0  # a handler gives up, and blocks its group


_NO_FAULTS = Budget()


class State(NamedTuple):
    """Everything. `broken`: the property that the last step violated. `paused`: whether the pause of the scenario
    stands; `spared`: jobs that were named when it was made, and may start."""

    origins: tuple[Origin, ...]
    rows: tuple[Row, ...]
    jobs: tuple[Job, ...]
    executors: tuple[Executor, ...]
    server: tuple[Statement, ...]
    budget: Budget
    broken: str
    action: Action | None = None
    paused: bool = False
    spared: tuple[int, ...] = ()


def forget(e: Executor, jobs: tuple[int, ...], *known: str) -> Executor:
    """These jobs, as far as they are no more than this, are to be read anew; a read under way counts no more."""
    memory = tuple(UNKNOWN if job in jobs and k in known else k for job, k in enumerate(e.memory))
    sight = e.sight and e.sight._replace(jobs=tuple(job for job in e.sight.jobs if job not in jobs))
    return e._replace(memory=memory, sight=sight)


def bumped(scenario: "Scenario", s: State, row: int, concerns_x: bool) -> State:
    """The fence in a row of `executor` has been bumped; has a person noted that it concerns X alone?"""
    if not scenario.administered:
        return s
    noted = tuple(e._replace(bumps=(*e.bumps, concerns_x)) if e.row == row else e for e in s.executors)
    return s._replace(executors=noted)


def put_back(e: Executor, job: int, group: tuple[int, ...], known: str, counts: bool = True) -> Executor:
    """Undo the choice of a job. If its predecessor has ended and nobody has heard that this is recorded, it is the one
    that the group counts as running again (`counts`)."""
    before = [k for k in group if e.memory[k] in (DONE, DEFERRED)] if counts else []
    heads = tuple(sorted({*e.heads, *before} - {job}))
    return e._replace(memory=swap(e.memory, job, known), heads=heads)


def with_executor(s: State, i: int, executor: Executor, *sent: Statement) -> State:
    """The state after executor `i` has changed, and has sent these statements."""
    return s._replace(executors=swap(s.executors, i, executor), server=(*s.server, *sent))


@dataclass(frozen=True)
class Protocol:
    """The protocol, as choices between the right way (the default) and wrong ones (in the comment)."""

    fence: str = "compare-and-set"  # "joined epoch", "unfenced running set"
    cycle_number: bool = True
    takeover: str = "fresh snapshots"  # "one snapshot"
    look_before_start: bool = True
    deadline_from: str = "sending"  # "answer"
    clock: str = "goes on in a pause"  # "stands still": CLOCK_MONOTONIC in a suspended machine
    cancellable: bool = True  # whether handlers stop when they are told to
    exit_at_deadline: bool = True  # a process whose handler does not stop ends itself
    identity: str = "process"  # "shared", "name"
    successor: str = "after the commit"  # "at once", "at once if handed over"
    hand_over: str = "with the end"  # "after the commit", "of any end", "of any outcome", "of what is paused"
    taken_back: str = "with the end"  # "never", "of the older": what was named behind an end that is deferred
    void_counts: str = "the one before"  # "nothing": as running, in a group whose next job was put back
    deferral_counts: str = "the one before"  # "nothing"
    ended: str = "frees its own"  # "frees the group", although it has been handed over
    deferred: str = "stays named"  # "named no more": until it is recorded
    finish: str = "locks its origin"  # "reads the epoch", "is not fenced"
    expired: str = "keep and renew"  # "give up and acquire" is as right, given the rule for `reacquire`
    reacquire: str = "when settled"  # "with a cycle under way", "with handlers running"
    void: str = "one look"  # "origins, then fence", "send all again", "do not look"
    new_fence: str = "from the look"  # "from acquire"
    own_origin: str = "as if free"  # "fenced first": acquiring what is its own bumps the executor's own fence
    retry: str = "the same"  # "put together anew"
    release: str = "after a cycle"  # "at once"
    cancelled: str = "recorded"  # "forgotten": no cycle says that a cancelled attempt is over
    outage: str = "forget the waiting"  # "forget what is under way"
    action: str = "origin, executor, jobs"  # "no fence", "fence first", "one snapshot", …
    put_back: str = "everything"  # "if the pause is news", "what waits", "nothing"
    forgets: str = "what was concerned"  # "everything" is as right, "X, whatever has happened": at another fence
    stale_reads: str = "count no more"  # "count": reads of before the fence that a look has found
    failure: str = "counts if it was found"  # "counts if it was heard", "counts": that a job has given up
    pause: str = "from every read"  # "from looks and from reads that say something new"
    stale_look: str = "covers all"  # "spares what is newer": than its sending
    look_up: str = "until it succeeds"  # "once": a failure, or the answer to an earlier one, ends it
    in_flight: int = 1  # cycles; with two, the younger is sent while the older is unanswered
    second: str = "after a first sending"  # "after a repetition": when the younger may be sent
    carries: str = "what the older named"  # "what runs": the younger's running set
    order: str = "oldest first"  # "as they come": answers
    settles: str = "when both are answered"  # "when the older is"
    disowns: str = "if one is unknown"  # "if the older is unknown", "never": only looks
    disowned: str = "if nobody else has"  # "in any case": takes the new fence for its own doing
    committed: str = "up to the row's number"  # "the row's number": after a disowning
    merged: str = "both"  # "the older": what is sent again
    merged_without: str = "what is lost"  # "nothing": of origins that are another's by then
    put_back_of: str = "both"  # "the older": of the cycles under way
    under_way: str = "both, with what runs on"  # "both" is as right, "the older": what holds up an acquire
    barrier: str = "a cycle gathered since"  # a drain began. "one that was under way", "one of an earlier drain"
    early: str = "never"  # "after the commit", "before the commit": when jobs are named that have yet to be read
    early_of: str = "what is held"  # "what drains, too", "any origin"
    early_second: str = "no"  # "yes" is as right: whether the younger of two cycles names anything early
    early_from: str = "its acknowledgement"  # "its sending", "the acknowledgement of either": it starts without a cycle
    early_until: str = "the next sending"  # "it is taken"
    # "no", "yes" are right: whether a cycle reads what it names early. "when it is void, too", "what is paused, too",
    # "what stands behind others": wrong
    early_reads: str = "no"
    early_resent: str = "no"  # "forgotten", "yes" is as right, "all of it": what was void, refused, not answered
    early_counts: str = "under the same lease"  # "in any case": what has been named
    early_start: str = "order, group, deadline, pause, look"  # without one: what holds up an early start
    early_listed: bool = True  # what has started early is named from then on
    early_asks: str = "at once"  # for an origin again; "when it names none" is right where named before the commit
    early_tidy: str = "now and then"  # "never": a cycle with nothing to say, to name no more what has not started

    @property
    def stale_is_harmless(self) -> bool:
        """Whether statements of a past epoch, fence or number can be left out of the state."""
        return self.fence == "compare-and-set" and self.cycle_number and self.finish == "locks its origin"


@dataclass(frozen=True)
class Scenario:
    """What there is and what may go wrong.

    origin_of: the origin of each job; the jobs of one origin form one serial group. wants: the origins assigned to each
    executor. start: who holds what at first, with its jobs read: pairs (executor, origin). ideal: executors whose
    statements take no time, which keeps the space small. renews, faulty: the executors that renew leases, that suffer
    pauses, crashes and lost connections. lease, margin: in ticks. targets: the jobs that a person may cancel or
    release, and whose handlers may give up. paused: those that the pause holds back; `by_type`: it is one of a type,
    which no origin tells of. blocked: jobs that have given up at first. unread: of what is held at first, they have yet
    to be read. late: jobs whose transactions commit at any time; those behind them do not wait for it. slow: reads and
    looks take time.
    """

    origin_of: tuple[int, ...] = (0, 0)
    transactional: tuple[int, ...] = ()
    wants: tuple[tuple[int, ...], ...] = ((0,), (0,))
    start: tuple[tuple[int, int], ...] = ()
    ideal: tuple[int, ...] = ()
    instant: tuple[str, ...] = ()
    steady: tuple[int, ...] = ()
    renews: tuple[int, ...] = (0, 1)
    faulty: tuple[int, ...] = (0,)
    lease: int = 2
    margin: int = 1
    targets: tuple[int, ...] = (0,)
    paused: tuple[int, ...] = (0,)
    by_type: bool = False
    blocked: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    slow: bool = False
    budget: Budget = _NO_FAULTS

    @property
    def administered(self) -> bool:
        """Whether a person does anything."""
        b = self.budget
        return bool(b.cancels or b.halts or b.resumes or b.releases)

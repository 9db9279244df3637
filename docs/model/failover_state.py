"""The state of the failover model: what stands on two servers, what two executors remember, what is on its way.

Numbers that only grow (epochs, fences, cycle numbers) are moved together (`canonical`): only how they relate to each
other matters, and distances of two and more are one and the same.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "ABOVE",
    "AGAIN",
    "CHOSEN",
    "COMMITTED",
    "CUT",
    "DONE",
    "FOLLOWS",
    "LEASE",
    "LOOPS",
    "LOST",
    "NEW",
    "OLD",
    "PROMOTED",
    "QUEUED",
    "RUNNING",
    "Batch",
    "Budget",
    "Entry",
    "Executor",
    "Hold",
    "Job",
    "Origin",
    "Pending",
    "Protocol",
    "Row",
    "Scenario",
    "Server",
    "State",
    "Token",
    "canonical",
    "swap",
]

# The servers, by their timelines: the primary, and the standby that takes its place.
OLD, NEW = 0, 1
# What the standby does: it has all that the primary has committed; it receives nothing more; it takes writes itself.
FOLLOWS, CUT, PROMOTED = "follows", "cut", "promoted"
# A job in memory. DONE, AGAIN: a cycle is to record its end, or that this attempt is over. COMMITTED: its transaction
# has ended it.
QUEUED, CHOSEN, RUNNING, DONE, AGAIN, COMMITTED = "queued", "chosen", "running", "done", "again", "committed"
# Each loop of an executor has a connection of its own, and one statement under way at most.
LOOPS = ("control", "renewals", "reads", "cycles", "handlers")
LOST = "lost"  # the answer never comes
LEASE = 2  # ticks
ABOVE = 100  # where the epochs of the new timeline begin, far above those of the former

T = TypeVar("T")


def swap(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """The tuple with one item replaced."""
    return (*items[:index], item, *items[index + 1 :])


class Origin(NamedTuple):
    """A row of `origin`. `lease`: ticks left."""

    owner: int | None
    epoch: int
    lease: int


class Row(NamedTuple):
    """A row of `executor`."""

    cycle: int
    fence: int
    running: tuple[int, ...]


class Job(NamedTuple):
    """A row of `job`, or what it was: `present` no more. `what`: which job it is; another one may have its id on the
    other server."""

    what: str
    attempt: int
    present: bool


class Server(NamedTuple):
    """A server. An id that nobody has been given there is None."""

    origin: Origin
    rows: tuple[Row, ...]
    jobs: tuple[Job | None, ...]


class Entry(NamedTuple):
    """A job in the memory of an executor."""

    what: str
    attempt: int
    state: str


class Hold(NamedTuple):
    """The origin, as an executor believes to hold it. `left`: ticks until its own deadline. `timeline`: of the server
    that has granted it. `cleared`: a cycle that names nothing of it has been acknowledged. Not in the code: `late`,
    whether a former primary has granted or renewed it after the promotion; `met`, whether the executor has had an
    answer of the new server since."""

    epoch: int
    timeline: int | None
    left: int
    draining: bool = False
    cleared: bool = False
    late: bool = False
    met: bool = False


class Batch(NamedTuple):
    """A cycle that is not known to be recorded. `ends`: id, job, attempt, and what becomes of it. `ours`: the lease
    that all this was chosen under is still held. `state`: what is to be done next: "send", "wait", "look"."""

    number: int
    timeline: int | None
    ends: tuple[tuple[int, str, int, str], ...]
    chosen: tuple[int, ...]
    barrier: bool
    state: str = "send"
    ours: bool = True


class Pending(NamedTuple):
    """The answer of a statement, on its way. `age`: ticks since it was sent. `ours`: the lease that it was sent for is
    still held. `late`: it has run on a former primary, after the promotion."""

    kind: str
    server: int
    answer: tuple[object, ...]
    ours: bool = True
    age: int = 0
    late: bool = False


class Executor(NamedTuple):
    """A process. `timeline`: all in memory was acquired and read on it (`Scheduler.timeline`). `reader`: the server
    that the last read came from. `stays`: of each loop, whether its connection leads to the former primary still.
    `lately`: ticks left of the lease that it gave up when it noticed the failover. `unreleased`: the epoch of a lease
    that it has let go of in memory only. Not in the code: `met`, whether any loop has had an answer of the new
    server."""

    timeline: int | None
    reader: int | None
    hold: Hold | None
    memory: tuple[Entry | None, ...]
    cycle: int
    fence: int
    batch: Batch | None
    look: bool
    pending: tuple[Pending | None, ...]
    stays: tuple[bool, ...]
    wants: bool
    lately: int = 0
    unreleased: int | None = None
    met: bool = False


class Token(NamedTuple):
    """The fencing token of a lease, and whose it was."""

    epoch: int
    owner: int | None


class Budget(NamedTuple):
    """How often something may still happen."""

    losses: int = 0  # of a connection with a statement under way, which may have run or not
    moves: int = 0  # of an idle connection to the former primary
    strays: int = 0  # a new connection leads to the former primary
    drains: int = 0  # the origin is assigned away, and perhaps back
    refusals: int = 0  # of a release
    late: int = 0  # jobs stored on a former primary


_NOTHING_MORE = Budget()
_NO_TOKEN = Token(0, None)


class State(NamedTuple):
    """Everything. `old` is None when it is dead. `noted`: ticks until its timeline is known on the new server for a
    lease; None: nobody has asked it for an origin yet. `token`: of the former timeline's last lease under which a job
    has run. `broken`: the property that the last step has violated."""

    phase: str
    old: Server | None
    new: Server | None
    noted: int | None
    executors: tuple[Executor, ...]
    budget: Budget
    token: Token = _NO_TOKEN
    broken: str = ""


@dataclass(frozen=True)
class Protocol:
    """The protocol, as choices between the right way (the default) and wrong ones (in the comment)."""

    cycle: str = "tests the timeline"  # "does not"
    look: str = "tells the timeline"  # "does not": what is looked up after a void cycle
    landed: str = (
        "on the same timeline"  # "anywhere": a number that has been reached means that the cycle has committed
    )
    read: str = "tells the timeline"  # "does not"
    finish: str = "tests the timeline"  # "does not"
    superseded: str = "opens other connections"  # "only the handlers'": after a transaction whose end was refused
    acquisition: str = "tells the timeline"  # "does not"
    renewal: str = "where it was granted"  # "anywhere"
    met_by_renewal: str = "replaced"  # "ignored": the new server answers a renewal
    # "where it is noted"; "who starts": at once
    asks: str = "where the timeline is known for a lease, or for what was held"
    epoch: str = "above those of former timelines"  # "goes on": that of a lease
    noticed: str = "forgets all"  # "what waits": in memory
    connections: str = "opened anew"  # "as they are": when another timeline is noticed


@dataclass(frozen=True)
class Scenario:
    """The world that is searched. New connections lead to the new server after its promotion; of executors in `slow`,
    those of the loops in `stay` lead to the former primary until they end. Answers of the loops in `loops` take time,
    all else happens at once.

    jobs: "common" ones are there from the beginning; the id of a "reused" one is handed out on each of the servers.
    start: who holds the origin at first. lives: whether the former primary outlives the promotion.
    """

    jobs: tuple[str, ...] = ("common", "reused")
    transactional: tuple[int, ...] = ()
    wants: tuple[bool, bool] = (True, True)
    start: int | None = 0
    lives: bool = False
    slow: tuple[int, ...] = (0,)
    loops: tuple[str, ...] = ()
    stay: tuple[str, ...] = LOOPS
    fresh: tuple[int, ...] = ()  # executors that begin after the promotion
    let_go: bool = False  # A has a release to send, of a lease that is lost with the primary
    budget: Budget = _NOTHING_MORE


def _together(*numbers: int | None, start: int = 0) -> dict[int | None, int | None]:
    """These numbers in the same order from `start` on, apart by one where they are, else by two."""
    moved: dict[int | None, int | None] = {None: None}
    at, before = start, None
    for number in sorted({n for n in numbers if n is not None}):
        if before is not None:
            at += min(2, number - before)
        moved[number], before = at, number
    return moved


def _alike(numbers: dict[int | None, int | None]) -> bool:
    return all(number == at for number, at in numbers.items())


def canonical(s: State) -> State:
    """The state with its growing numbers moved together."""
    servers = [server for server in (s.old, s.new) if server is not None]
    numbers = (
        s.token.epoch,
        *(server.origin.epoch for server in servers),
        *(e.hold.epoch for e in s.executors if e.hold is not None),
        *(e.unreleased for e in s.executors),
        *(_epoch(p) for e in s.executors for p in e.pending if p is not None),
    )
    epochs = _together(*(n for n in numbers if n is not None and n < ABOVE))
    epochs |= _together(*(n for n in numbers if n is not None and n >= ABOVE), start=ABOVE)
    s = _few_attempts(s)
    executors: list[Executor] = []
    moved = not _alike(epochs)
    rows: list[tuple[dict[int | None, int | None], dict[int | None, int | None]]] = []
    for i, e in enumerate(s.executors):
        look = e.pending[3] if e.pending[3] is not None and e.pending[3].kind == "look" else None
        read = e.pending[2]
        cycles = _together(
            e.cycle,
            *(server.rows[i].cycle for server in servers),
            *(() if e.batch is None else (e.batch.number,)),
            *(() if look is None or look.answer[0] == LOST else (look.answer[0],)),  # type: ignore[arg-type]
        )
        fences = _together(
            e.fence,
            *(server.rows[i].fence for server in servers),
            *(() if look is None or look.answer[0] == LOST else (look.answer[1],)),  # type: ignore[arg-type]
            *(() if read is None or read.answer[0] == LOST else (read.answer[0],)),  # type: ignore[arg-type]
        )
        rows.append((cycles, fences))
        moved = moved or not (_alike(cycles) and _alike(fences))
    if not moved:
        return s
    for e, (cycles, fences) in zip(s.executors, rows, strict=True):
        executors.append(_moved(e, epochs, cycles, fences))
    old, new = (
        server
        and server._replace(
            origin=server.origin._replace(epoch=epochs[server.origin.epoch]),
            rows=tuple(
                row._replace(cycle=cycles[row.cycle], fence=fences[row.fence])
                for row, (cycles, fences) in zip(server.rows, rows, strict=True)
            ),
        )
        for server in (s.old, s.new)
    )
    return s._replace(old=old, new=new, executors=tuple(executors), token=s.token._replace(epoch=epochs[s.token.epoch]))


def _few_attempts(s: State) -> State:
    """The same for the attempts of each job."""
    maps: list[dict[int | None, int | None]] = []
    for n in range(len(s.executors[0].memory)):
        numbers: list[int] = [job.attempt for x in (s.old, s.new) if x and (job := x.jobs[n])]
        for e in s.executors:
            if m := e.memory[n]:
                numbers.append(m.attempt)
            if e.batch:
                numbers += [end[2] for end in e.batch.ends if end[0] == n]
            if (p := e.pending[2]) and p.answer[0] != LOST and (job := p.answer[1 + n]):
                numbers.append(job[1])  # type: ignore[index]
        maps.append(_together(1, *numbers, start=1))
    if all(_alike(to) for to in maps):
        return s
    old, new = (
        x
        and x._replace(jobs=tuple(j and j._replace(attempt=to[j.attempt]) for j, to in zip(x.jobs, maps, strict=True)))
        for x in (s.old, s.new)
    )
    return s._replace(old=old, new=new, executors=tuple(_with_attempts(e, maps) for e in s.executors))


def _with_attempts(e: Executor, maps: Any) -> Executor:
    memory = tuple(m and m._replace(attempt=to[m.attempt]) for m, to in zip(e.memory, maps, strict=True))
    batch = e.batch and e.batch._replace(ends=tuple((n, what, maps[n][a], how) for n, what, a, how in e.batch.ends))
    pending, p = e.pending, e.pending[2]
    if p is not None and p.answer[0] != LOST:
        jobs = tuple(j and (j[0], to[j[1]]) for j, to in zip(p.answer[1:], maps, strict=True))  # type: ignore[index]
        pending = swap(pending, 2, p._replace(answer=(p.answer[0], *jobs)))
    return e._replace(memory=memory, batch=batch, pending=pending)


def _epoch(p: Pending) -> int | None:
    if p.answer[0] == LOST or p.kind not in ("acquire", "look"):
        return None
    return p.answer[-1]  # type: ignore[return-value]


def _moved(e: Executor, epochs: Any, cycles: Any, fences: Any) -> Executor:
    pending: list[Pending | None] = []
    for p in e.pending:
        if p is not None and p.answer[0] != LOST:
            if p.kind == "acquire":
                p = p._replace(answer=(p.answer[0], epochs[p.answer[1]]))
            elif p.kind == "read":
                p = p._replace(answer=(fences[p.answer[0]], *p.answer[1:]))
            elif p.kind == "look":
                p = p._replace(answer=(cycles[p.answer[0]], fences[p.answer[1]], epochs[p.answer[2]]))
        pending.append(p)
    return e._replace(
        hold=e.hold and e.hold._replace(epoch=epochs[e.hold.epoch]),
        unreleased=epochs[e.unreleased],
        cycle=cycles[e.cycle],
        fence=fences[e.fence],
        batch=e.batch and e.batch._replace(number=cycles[e.batch.number]),
        pending=tuple(pending),
    )

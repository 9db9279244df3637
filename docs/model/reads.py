"""Model 2: finding jobs. Transaction ids, positions, commit order; one reader with one read under way; groups capped in
memory; cycles.

Properties, checked in every state:

R1  a read delivers no row twice (while nothing was forgotten)
I2  no job starts twice, none starts after its end, none starts as an attempt that is over
I4  a job starts only when those of its group have ended that were committed before it was enqueued
LV  from every quiet state (transactions over, memory empty) the reader alone finds all committed jobs

Writers that lock an entity's row before they enqueue are modelled by `wait N`. The parts: `reads_state` (the state),
`reads_memory` (groups in memory), and here writers, reader, cycles. `sweep.py` is the first version of the reader.
"""

from collections.abc import Iterator

from reads_alone import alone_steps
from reads_memory import compact, crowded, forget_waiting
from reads_reader import other_server, reader_steps, start_over
from reads_state import (
    ABORTED,
    BACKOFF,
    COMMITTED,
    DONE,
    DUE,
    ENDED,
    FAILED,
    NAMED,
    OPEN,
    RUNNING,
    UNDER_WAY,
    UNDONE,
    WAITING,
    Cycle,
    Group,
    Job,
    JobSpec,
    Marks,
    Protocol,
    Row,
    Scenario,
    Snapshot,
    State,
    Writer,
    swap,
)
from reads_writers import DRAWS, writer_steps

__all__ = ["Reads"]

Steps = Iterator[tuple[str, State]]


class Reads:
    """The model: a protocol, right or wrong, in a scenario."""

    def __init__(self, protocol: Protocol, scenario: Scenario) -> None:
        self.protocol = protocol
        self.scenario = scenario
        self.scripts = [tuple(step.partition(" ")[::2] for step in script) for script in scenario.writers]
        self.group_names = sorted({arg for script in self.scripts for verb, arg in script if verb in _INSERTS})
        self.specs = self._find_jobs()
        self.waits = [frozenset(int(arg) for verb, arg in script if verb == "wait") for script in self.scripts]

    def _find_jobs(self) -> list[JobSpec]:
        specs, delayed = [], {}
        for author, script in enumerate(self.scripts):
            drawn = 0
            for verb, arg in script:
                if verb in ("enqueue", "savepoint"):
                    specs.append(JobSpec(author, author, drawn, self.group_names.index(arg)))
                elif verb == "delay":
                    delayed[arg] = author
                elif verb == "promote":
                    specs.append(JobSpec(delayed[arg], author, drawn, self.group_names.index(arg)))
                drawn += verb in DRAWS
        return specs

    def job_name(self, job: int) -> str:
        return f"job {job} ({self.group_names[self.specs[job].group]} of T{self.specs[job].placer})"

    # -- the state space -----------------------------------------------------------------------------------------

    def initial(self) -> State:
        sc = self.scenario
        origins = max(sc.origins[: len(self.group_names)]) + 1
        high = tuple(0 if origin == 0 else None for origin in range(origins))
        return State(
            writers=(Writer(0, 0, 0, (), OPEN),) * len(self.scripts),
            next_xid=1,
            next_position=1,
            completed=0,
            caches=((),) * (1 + max(sc.sessions, default=-1)),
            marks=Marks(high, None, 0, (), 0, 0),
            read=None,
            groups=(Group(),) * len(self.group_names),
            jobs=(Job(WAITING, 0),) * len(self.specs),
            cycle=None,
            ended=(),
            server=0,
            version=0,
            newest=None,
            lost_answers=sc.lost_answers,
            forgets=sc.forgets,
            restarts=sc.restarts,
            broken="",
        )

    def successors(self, state: State) -> Steps:
        if state.broken:
            return
        yield from writer_steps(self, state)
        if self.protocol.notice == "on connecting" and state.server != state.marks.server:
            yield "the executor connects to another server", other_server(self, state)
        else:
            yield from self.reader_steps(state)
            yield from self.cycle_steps(state)
            yield from alone_steps(self, state)
        yield from self.job_steps(state)
        yield from self.other_steps(state)

    def position(self, s: State, job: int) -> int:
        """Where a job stands; 0 if it has no position yet."""
        spec = self.specs[job]
        drawn = s.writers[spec.placer].positions
        return drawn[spec.nth] if spec.nth < len(drawn) else 0

    def origin_of(self, row: Row) -> int:
        return self.scenario.origins[self.specs[row.job].group]

    def xid(self, s: State, job: int) -> int:
        """What stands in `job.txid`."""
        spec = self.specs[job]
        return s.writers[spec.placer if self.protocol.promotion == "new txid" else spec.author].xid

    def visible(self, s: State) -> list[tuple[int, Row]]:
        """The committed rows that have a position, in its order."""
        rows = []
        for job, spec in enumerate(self.specs):
            committed = s.writers[spec.author].status == s.writers[spec.placer].status == COMMITTED
            if committed and s.jobs[job].status != ENDED:
                rows.append((self.position(s, job), Row(job, s.jobs[job].attempt)))
        return sorted(rows)

    def snapshot(self, s: State) -> Snapshot:
        """xmax is the newest *completed* id + 1, not the next one to be handed out."""
        xmax = s.completed + 1
        open_ = sorted(w.xid for w in s.writers if w.status == OPEN and 0 < w.xid < xmax)
        return Snapshot(xmax, tuple(open_))

    # -- transactions and reads ----------------------------------------------------------------------------------

    def reader_steps(self, s: State) -> Steps:
        """What the reader can do; the first version of it does something else."""
        return reader_steps(self, s)

    # -- cycles and handlers -------------------------------------------------------------------------------------

    def cycle_steps(self, s: State) -> Steps:
        """`cycle.sql`: ends what is done, records what has failed, names the heads of the groups that are free."""
        if s.cycle is not None:
            yield "the cycle is acknowledged", self._acknowledged(s, s.cycle)
            return
        if s.alone is not None and self.protocol.alone != "beside other cycles":
            return  # it is itself the cycle under way
        ends = tuple(job for job, j in enumerate(s.jobs) if j.status == DONE)
        fails = tuple(job for job, j in enumerate(s.jobs) if j.status == FAILED)
        heads = self._heads(s)
        if ends or fails or heads:
            cycle = Cycle(ends, fails, tuple(row.job for row in heads))
            parts = [("ends", ends), ("fails", fails), ("names", cycle.names)]
            said = ", ".join(f"{verb} {' '.join(map(str, jobs))}" for verb, jobs in parts if jobs)
            after = self._commit(s, cycle, heads)
            yield f"a cycle commits: {said}", self._at_once(after, cycle) if self.scenario.brisk else after

    def _at_once(self, s: State, cycle: Cycle) -> State:
        s = self._acknowledged(s, cycle)
        return s._replace(jobs=tuple(Job(DONE, j.attempt) if j.status == RUNNING else j for j in s.jobs))

    def _heads(self, s: State) -> list[Row]:
        """The head of each group none of whose jobs is under way, and which does not back off."""
        busy = {self.specs[k].group for k, j in enumerate(s.jobs) if j.status in (NAMED, RUNNING, FAILED)}
        return [
            group.queue[0]
            for index, group in enumerate(s.groups)
            if group.queue and index not in busy and not group.held and s.jobs[group.queue[0].job].status != BACKOFF
            if not crowded(self, s, index) and not any(t[0] == index and t[3] == group.version for t in s.thinned)
        ]

    def _commit(self, s: State, cycle: Cycle, heads: list[Row]) -> State:
        jobs = list(s.jobs)
        for job in cycle.ends:
            jobs[job] = Job(ENDED, jobs[job].attempt)
            for other, spec in enumerate(self.specs):
                if self.same_id(s, other, job) and s.writers[spec.author].status == COMMITTED:
                    s = s._replace(broken=f"I2: the end of job {job}, which a failover had undone, deletes job {other}")
        for job in cycle.fails:
            jobs[job] = Job(BACKOFF, jobs[job].attempt + 1)
        groups = list(s.groups)
        newest = None if cycle.ends or cycle.fails else s.newest
        for row in heads:
            s = s._replace(broken=s.broken or self.wrong_start(s, row, cycle))
            jobs[row.job] = Job(NAMED, jobs[row.job].attempt)
            index = self.specs[row.job].group
            if self.protocol.head == "removed when chosen":
                groups[index] = groups[index]._replace(queue=groups[index].queue[1:], newest=None)
        return s._replace(jobs=tuple(jobs), groups=tuple(groups), cycle=cycle, newest=newest)

    def wrong_start(self, s: State, row: Row, cycle: Cycle) -> str:
        """The property that is violated if this row starts now."""
        job, name = s.jobs[row.job], self.job_name(row.job)
        if job.status not in (WAITING, DUE):
            return f"I2: {name} starts again, it is {job.status}"
        if row.attempt != job.attempt:
            return f"I2: {name} starts as attempt {row.attempt}, which is over"
        spec = self.specs[row.job]
        for other, before in enumerate(self.specs):
            first = before.placer == spec.placer and before.nth < spec.nth
            first = first or before.placer in self.waits[spec.placer]
            over = s.jobs[other].status == ENDED or other in cycle.ends
            committed = s.writers[before.author].status == s.writers[before.placer].status == COMMITTED
            if before.group == spec.group and first and committed and not over:
                return f"I4: {name} starts before {self.job_name(other)}, which was committed first, has ended"
        return ""

    def _acknowledged(self, s: State, cycle: Cycle) -> State:
        """Named jobs start, groups whose head has failed are compacted, and what a read may still show is noted."""
        jobs, groups = list(s.jobs), list(s.groups)
        for job in cycle.names:
            if jobs[job].status == NAMED:
                jobs[job] = Job(RUNNING, jobs[job].attempt)
            if self.protocol.head == "removed after the await":
                index = self.specs[job].group
                groups[index] = groups[index]._replace(queue=groups[index].queue[1:])
        ended = s.ended
        if s.read is not None and self.protocol.known == "with the ended":
            ended = tuple(sorted({*ended, *cycle.ends, *cycle.fails}))
        s = s._replace(jobs=tuple(jobs), groups=tuple(groups), ended=ended, cycle=None)
        for job in cycle.fails:
            s = compact(self, s, job)
        return s

    def job_steps(self, s: State) -> Steps:
        """Handlers return or fail; a retry time comes."""
        for job, (status, attempt) in enumerate(s.jobs):
            if status == RUNNING:
                yield f"job {job} is done", s._replace(jobs=swap(s.jobs, job, Job(DONE, attempt)))
                if job in self.scenario.fails and attempt == 0:
                    yield f"job {job} fails", s._replace(jobs=swap(s.jobs, job, Job(FAILED, attempt)))
            elif status == BACKOFF:
                index = self.specs[job].group
                groups = swap(s.groups, index, s.groups[index]._replace(held=False))
                yield (
                    f"the retry time of job {job} comes",
                    s._replace(jobs=swap(s.jobs, job, Job(DUE, attempt)), groups=groups),
                )

    # -- what else may happen ------------------------------------------------------------------------------------

    def other_steps(self, s: State) -> Steps:
        if None in s.marks.high:
            high = tuple(h or 0 for h in s.marks.high)
            yield "the other origin is acquired", s._replace(marks=s.marks._replace(high=high), complete=None)
        if s.forgets and self.scenario.starts_over:
            if s.read is None:
                yield (
                    "two reads have failed: the reader starts over",
                    start_over(self, s)._replace(forgets=s.forgets - 1),
                )
        elif s.forgets:
            yield "the executor forgets what waits", forget_waiting(s)._replace(forgets=s.forgets - 1)
        if s.restarts and (s.newest is not None or not self.protocol.undone):
            yield "the server fails over" if self.protocol.undone else "the server restarts", self._restarted(s)

    def _restarted(self, s: State) -> State:
        """Open transactions abort, the read under way is lost; ids and positions that no commit had made durable are
        handed out again. A failover loses the last commit as well."""
        writers = [w._replace(status=ABORTED) if w.status == OPEN and w.xid else w for w in s.writers]
        if self.protocol.undone and s.newest is not None:
            writers[s.newest] = writers[s.newest]._replace(status=UNDONE)
        durable = [w for w in writers if w.status == COMMITTED]
        xid = max((w.newest for w in durable), default=0)
        position = max((p for w in durable for p in w.positions), default=0)
        return s._replace(
            writers=tuple(writers),
            next_xid=xid + 1,
            next_position=position + 1,
            completed=xid,
            read=None,
            glance=None,
            thinned=(),
            ended=(),
            server=s.server + 1,
            newest=None,
            restarts=s.restarts - 1,
        )

    def same_id(self, s: State, a: int, b: int) -> bool:
        """Whether two rows have the same id: after a failover another row can get that of one that was undone."""
        return self.protocol.undone and a != b and self.position(s, a) == self.position(s, b) != 0

    # -- properties ----------------------------------------------------------------------------------------------

    def broken(self, state: State) -> str:
        return state.broken

    def quiet(self, state: State) -> bool:
        """All transactions are over, nothing is under way, memory is empty."""
        return (
            state.read is None
            and state.cycle is None
            and state.alone is None
            and all(w.status != OPEN for w in state.writers)
            and not any(j.status in UNDER_WAY for j in state.jobs)
            and not any(group.queue for group in state.groups)
        )

    def finished(self, state: State) -> bool:
        """All transactions are over, and all their jobs have ended."""
        if any(w.status == OPEN for w in state.writers):
            return False
        return not self.visible(state)


_INSERTS = frozenset(("enqueue", "savepoint", "delay"))

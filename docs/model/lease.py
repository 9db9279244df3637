"""Model 1: lease, epoch, fence, cycle number, running set, takeover.

Two executors and a server. Properties, checked in every state:

I2  a job has at most one terminal outcome, none together with a loss of the same run; no job starts that has ended
I3  no two executors that look at their clocks run jobs of one group at once, nor does one run such jobs twice
I4  a job starts only when its predecessor in the group has ended
I5  the effects of a transactional handler are committed exactly once
I8  what a person has cancelled or paused does not start after the action, unless it was named by then
FE  the fence: no statement of a superseded owner ends a job
RN  a running job of a live owner stands in its committed running set, so that its death can be accounted for
NM  a running set names no job of an origin that does not belong to its executor, so that nobody else is charged; but
    for one that had not been committed when the origin was taken over: nobody is charged for that either
LO  a run that died with its executor is recorded as lost before the job runs again
LV  from every state all jobs can still end (checked on the whole graph)

The parts: `lease_state` (the state), `lease_canonical`, `lease_server` (statements), `lease_executor` (processes),
`lease_cycle` (cycles; in trouble: `lease_resolve`, `lease_settle`, `lease_look`), `lease_early` (jobs that are named
before they are read), `lease_admin` (a person's actions), and here time, the server's restarts, and the properties.
"""

from collections.abc import Iterator

from lease_admin import administer
from lease_canonical import canonical
from lease_executor import answers, hears_of_leases, steps
from lease_server import is_taken_over, run
from lease_state import (
    AGAIN,
    BLOCKED,
    DEAD,
    DEFERRED,
    DONE,
    ENDING,
    NAMED,
    PAUSED,
    QUEUED,
    RUNNING,
    UNANSWERED,
    UNKNOWN,
    UP,
    WAITING,
    Cycle,
    Executor,
    Hold,
    Job,
    Origin,
    Protocol,
    Row,
    Scenario,
    State,
    swap,
)

__all__ = ["Lease"]

Steps = Iterator[tuple[str, State]]


class Lease:
    """The model: a protocol, right or wrong, in a scenario."""

    def __init__(self, protocol: Protocol, scenario: Scenario) -> None:
        self.protocol = protocol
        self.scenario = scenario
        self._origins = 1 + max(scenario.origin_of)
        self._jobs_of = tuple(
            tuple(job for job, of in enumerate(scenario.origin_of) if of == origin) for origin in range(self._origins)
        )

    def jobs_of(self, origin: int) -> tuple[int, ...]:
        """The jobs of an origin in the order of their positions."""
        return self._jobs_of[origin]

    # -- names for the reader ------------------------------------------------------------------------------------

    def names(self, executor: int) -> str:
        return "AB"[executor]

    def origin_name(self, origin: int) -> str:
        return "XY"[origin]

    def job_name(self, job: int) -> str:
        origin = self.scenario.origin_of[job]
        return f"{'xy'[origin]}{self._jobs_of[origin].index(job)}"

    def cycle_name(self, cycle: Cycle) -> str:
        parts = [("ends", cycle.ends), ("gives back", cycle.again), ("names", cycle.names)]
        parts += [("names early", tuple(job for job in cycle.early if job in cycle.running))]
        said = [f"{verb} {', '.join(map(self.job_name, jobs))}" for verb, jobs in parts if jobs]
        return " and ".join(said) or "ends and names nothing"

    # -- the state space -----------------------------------------------------------------------------------------

    def blank(self, status: str, row: int) -> Executor:
        """A process that knows nothing yet."""
        nothing = (None,) * self._origins
        return Executor(status, row, 0, 0, nothing, (UNKNOWN,) * len(self.scenario.origin_of), (), nothing, ())

    def initial(self) -> State:
        shared = self.protocol.identity == "shared"
        origins = [Origin(None, 0, 0, 0)] * self._origins
        executors = [self.blank(UP, 0 if shared else i) for i in (0, 1)]
        for i, origin in self.scenario.start:
            origins[origin] = Origin(executors[i].row, 0, self.scenario.lease, 0)
            executors[i] = self._holding(executors[i], origin)
        blocked = self.scenario.blocked
        late = self.scenario.late
        jobs = tuple(
            Job(job not in late, 0, 0, 0, False, "", job in blocked, job in late)
            for job in range(len(self.scenario.origin_of))
        )
        rows = (Row(0, 0, ()),) * 2
        return State(tuple(origins), rows, jobs, tuple(executors), (), self.scenario.budget, "")

    def _holding(self, executor: Executor, origin: int) -> Executor:
        """An executor that has acquired an origin a moment ago and has read its jobs."""
        hold = Hold(0, self.scenario.lease - self.scenario.margin, "")
        memory = [QUEUED if self.scenario.origin_of[job] == origin else k for job, k in enumerate(executor.memory)]
        memory = [BLOCKED if job in self.scenario.blocked and k == QUEUED else k for job, k in enumerate(memory)]
        memory = [UNKNOWN if job in self.scenario.unread + self.scenario.late else k for job, k in enumerate(memory)]
        return executor._replace(holds=swap(executor.holds, origin, hold), memory=tuple(memory))

    def successors(self, state: State) -> Steps:
        if state.broken:
            return
        found = list(self._prompt(state))
        prune = self.protocol.stale_is_harmless
        for label, after in found or self._all(state):
            yield label, canonical(after, prune)

    def _all(self, s: State) -> Steps:
        yield from self._tick(s)
        yield from self._outage(s)
        yield from self._late_commits(s)
        yield from administer(self, s)
        for statement in s.server:
            yield from run(self, s, statement)
        for i in (0, 1):
            yield from steps(self, s, i)

    def _prompt(self, s: State) -> Steps:
        """What takes no time in this scenario happens before anything else."""
        ideal, instant = self.scenario.ideal, self.scenario.instant
        for statement in s.server:
            if statement.by in ideal or statement.kind in instant:
                yield from run(self, s, statement)
        for i, e in enumerate(s.executors):
            if e.status == UP and i in ideal:
                yield from answers(self, s, i)
            elif e.status == UP and instant:
                yield from hears_of_leases(self, s, i)

    def _tick(self, s: State) -> Steps:
        """Time passes, unless a process that is up has yet to act upon a deadline."""
        if any(e.status == UP and self._must_act(e) for e in s.executors):
            return
        origins = tuple(self._sooner(o, origin) for origin, o in enumerate(s.origins))
        after = s._replace(origins=origins, executors=tuple(self._older(e) for e in s.executors))
        if after != s:
            yield "time passes", after

    def _late_commits(self, s: State) -> Steps:
        """A transaction commits that had its position before others of the group, which have not waited for it."""
        for number in self.scenario.late:
            if s.jobs[number].late and s.budget.aborts:
                budget = s.budget._replace(aborts=s.budget.aborts - 1)
                gone = s.jobs[number]._replace(late=False)
                after = s._replace(jobs=swap(s.jobs, number, gone), budget=budget)
                yield f"{self.job_name(number)} is rolled back", after
            if s.jobs[number].late:
                there = s.jobs[number]._replace(present=True, late=False)
                yield f"{self.job_name(number)} is committed", s._replace(jobs=swap(s.jobs, number, there))

    def must_stop(self, e: Executor, origin: int) -> bool:
        """Whether the deadline for this origin has come, and the executor has not stopped its jobs yet."""
        hold = e.holds[origin]
        if hold is None or hold.left > 0:
            return False
        return not hold.draining or any(e.memory[job] in (RUNNING, ENDING) for job in self._jobs_of[origin])

    def _must_act(self, e: Executor) -> bool:
        stops = self.protocol.cancellable or self.protocol.exit_at_deadline
        return (stops and bool(e.strays)) or any(self.must_stop(e, origin) for origin in range(self._origins))

    def _sooner(self, row: Origin, origin: int) -> Origin:
        return row if origin in self.scenario.steady else row._replace(lease=max(row.lease - 1, 0))

    def _older(self, e: Executor) -> Executor:
        limit, steady = self.scenario.lease, self.scenario.steady
        stands = e.status == PAUSED and self.protocol.clock == "stands still"
        holds = [
            h and (h if stands or origin in steady else h._replace(left=max(h.left - 1, 0)))
            for origin, h in enumerate(e.holds)
        ]
        asks = [a and a._replace(age=min(a.age + 1, limit)) for a in e.asks]
        return e._replace(holds=tuple(holds), asks=tuple(asks))

    def _outage(self, s: State) -> Steps:
        """The server restarts: what was on it is gone, what had committed stays, every connection is lost. The
        executors notice the new start time: they forget the waiting jobs and read again, what runs goes on."""
        if not s.budget.outages:
            return
        executors = tuple(e if e.status == DEAD else self._reconnected(e) for e in s.executors)
        budget = s.budget._replace(outages=s.budget.outages - 1)
        yield "the server restarts", s._replace(server=(), executors=executors, budget=budget, action=None)

    def _reconnected(self, e: Executor) -> Executor:
        after = {QUEUED: UNKNOWN, BLOCKED: UNKNOWN, ENDING: AGAIN}
        if self.protocol.outage == "forget what is under way":
            after |= {NAMED: UNKNOWN, DONE: UNKNOWN}
        memory = tuple(after.get(known, known) for known in e.memory)
        flights = tuple(f._replace(answer=UNANSWERED) if f.answer == WAITING else f for f in e.flights)
        return e._replace(
            memory=memory,
            heads=tuple(job for job in e.heads if memory[job] != UNKNOWN),
            flights=flights,
            asks=tuple(None if a is not None and a.answer == WAITING else a for a in e.asks),
            sight=None,
            view=None,
            look=e.look or e.view is not None,
            disown=None,
        )

    # -- properties ----------------------------------------------------------------------------------------------

    def broken(self, state: State) -> str:
        wrong = state.broken or self._two_at_once(state) or self._books(state) or self._running_sets(state)
        return wrong or self._deadlock(state)

    def _deadlock(self, s: State) -> str:
        """Nobody ever lets go, unless Postgres finds out and sends one of them away."""
        if s.action is not None and s.action.row is not None and is_taken_over(s, 0):
            return "LV: a person and a takeover wait for each other's locks"
        return ""

    def works_on(self, executor: Executor, origin: int) -> bool:
        """Whether a process runs a job of this origin and has no excuse. It has one from its deadline until its first
        look at the clock, at which it stops; meanwhile it starts nothing."""
        if executor.status != UP:
            return False
        hold, jobs = executor.holds[origin], self._jobs_of[origin]
        if hold is not None and hold.left > 0 and any(executor.memory[job] in (RUNNING, ENDING) for job in jobs):
            return True
        stops = self.protocol.cancellable or self.protocol.exit_at_deadline
        return not stops and any(job in executor.strays for job in jobs)

    def _two_at_once(self, s: State) -> str:
        for origin in range(self._origins):
            if all(self.works_on(e, origin) for e in s.executors):
                return f"I3: both executors run a job of {self.origin_name(origin)}"
            for i, e in enumerate(s.executors):
                running = any(e.memory[job] == RUNNING for job in self._jobs_of[origin])
                if running and any(job in e.strays for job in self._jobs_of[origin]):
                    return f"I3: {self.names(i)} runs a job of {self.origin_name(origin)} while an earlier run goes on"
        return ""

    def _books(self, s: State) -> str:
        for number, job in enumerate(s.jobs):
            if job.ended > 1:
                return f"I2: {self.job_name(number)} has {job.ended} terminal outcomes"
            ended = 0 if job.cancelled else job.ended
            if job.effects > 1 or (number in self.scenario.transactional and job.effects != ended):
                return f"I5: the effects of {self.job_name(number)} were committed {job.effects} times"
        return ""

    def _running_sets(self, s: State) -> str:
        for number, job in enumerate(s.jobs):
            if not (job.present or job.late):
                continue
            origin = self.scenario.origin_of[number]
            owner = s.origins[origin].owner
            for row in {e.row for e in s.executors}:
                if owner != row and number in s.rows[row].running and number not in s.rows[row].left:
                    return f"NM: {self.names(row)}'s running set names {self.job_name(number)}, which is not its own"
            for i, e in enumerate(s.executors):
                runs = e.status == UP and e.memory[number] in (RUNNING, ENDING, DONE, DEFERRED)
                if runs and owner == e.row and self._valid(s, e, origin) and number not in s.rows[e.row].running:
                    return f"RN: {self.names(i)} runs {self.job_name(number)}, which its running set does not name"
        return ""

    def _valid(self, s: State, e: Executor, origin: int) -> bool:
        hold = e.holds[origin]
        return hold is not None and hold.epoch >= s.origins[origin].since

    def quiet(self, state: State) -> bool:
        return any(e.status != DEAD for e in state.executors)

    def finished(self, state: State) -> bool:
        """All jobs are over, but those behind a pause that nobody is going to end, or a job that nobody releases."""
        stays = list(self.scenario.paused) if state.paused and not state.budget.resumes else []
        if self.scenario.budget.failures and not state.budget.releases:
            stays += [number for number, job in enumerate(state.jobs) if job.blocked]
        behind = {self.scenario.origin_of[job] for job in stays}
        left = [number for number, job in enumerate(state.jobs) if job.present or job.late]
        return all(self.scenario.origin_of[number] in behind for number in left)

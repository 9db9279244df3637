"""Model 3: a failover that loses commits.

A primary, and an asynchronous standby that stops following at any time and is promoted at any time: what is committed
in between is lost with it, and epochs, cycle numbers, attempts and ids are handed out a second time. The former primary
dies with the promotion, or lives on and answers whoever is connected to it. One origin, one group, two executors; each
of their loops has its own connection. Properties:

I2  no job of the new server is ended by the outcome of another job, which had its id on the former primary
I3  no two executors that look at their clocks run jobs at once; but for one whose lease a former primary has granted or
    renewed after the promotion, and that has had no answer of the new server since
I5  the effects of a transactional handler are committed on the new server for its own job only
FT  the epoch of a lease of the new server, its fencing token, is larger than that of others under which jobs have run
FE  on the new server nobody ends a job of an origin that is another's there
RN  what runs under a lease of the new server stands in the running set there
LV  all jobs of the new server can still be ended: from every state, if the former primary is dead, else from every
    state in which an executor that wants the origin has had an answer of the new server

The parts: `failover_state`, `failover_server` (statements), and here the executors, time, and the properties.
"""

from collections.abc import Callable, Iterator

import failover_server as on
from failover_state import (
    AGAIN,
    CHOSEN,
    COMMITTED,
    CUT,
    DONE,
    FOLLOWS,
    LEASE,
    LOOPS,
    LOST,
    NEW,
    OLD,
    PROMOTED,
    QUEUED,
    RUNNING,
    Batch,
    Entry,
    Executor,
    Hold,
    Job,
    Origin,
    Pending,
    Protocol,
    Row,
    Scenario,
    Server,
    State,
    Token,
    canonical,
    swap,
)

__all__ = ["Failover"]

Steps = Iterator[tuple[str, State]]
_Run = Callable[[Server, int], on.Ran]
_CONTROL, _RENEWALS, _READS, _CYCLES, _HANDLERS = range(5)
_NOTHING = (None,) * len(LOOPS)


class Failover:
    """The model: a protocol, right or wrong, in a scenario."""

    def __init__(self, protocol: Protocol, scenario: Scenario) -> None:
        self.protocol = protocol
        self.scenario = scenario
        self._slow = frozenset(LOOPS.index(loop) for loop in scenario.loops)

    # -- for the checker -----------------------------------------------------------------------------------------

    def initial(self) -> State:
        sc = self.scenario
        jobs = tuple(Job("common", 1, present=True) if kind == "common" else None for kind in sc.jobs)
        origin = Origin(sc.start, 1, 0 if sc.start is None else LEASE)
        server = Server(origin, (Row(0, 0, ()), Row(0, 0, ())), jobs)
        executors = tuple(
            Executor(
                timeline=None if i in sc.fresh else OLD,
                reader=None,
                hold=Hold(1, OLD, LEASE) if sc.start == i else None,
                memory=(None,) * len(jobs),
                cycle=0,
                fence=0,
                batch=None,
                look=False,
                pending=_NOTHING,
                stays=(False,) * len(LOOPS),
                wants=sc.wants[i],
            )
            for i in range(2)
        )
        state = State(FOLLOWS, server, None, None, executors, sc.budget)
        if sc.let_go:  # A has acquired and drained it since the standby receives nothing more
            a = executors[0]._replace(unreleased=2)
            old = server._replace(origin=Origin(0, 2, LEASE))
            state = state._replace(phase=CUT, old=old, new=server, executors=(a, executors[1]))
        return canonical(state)

    def successors(self, state: State) -> Steps:
        if state.broken:
            return
        for label, after in self._steps(state):
            for i, e in enumerate(after.executors):
                if _runs(e) and e.hold and e.hold.timeline == OLD and e.hold.epoch >= after.token.epoch:
                    after = after._replace(token=Token(e.hold.epoch, i))
            yield label, canonical(after)

    def broken(self, state: State) -> str:
        if state.broken:
            return state.broken
        runs = [e for e in state.executors if _runs(e)]
        if len(runs) == 2 and not any(e.hold and e.hold.late and not e.hold.met for e in runs):
            return "I3: A and B run jobs of one group at once"
        if state.new is not None and state.phase == PROMOTED:
            origin = state.new.origin
            for i, e in enumerate(state.executors):
                if e.hold and e.hold.timeline == NEW and (origin.owner, origin.epoch) == (i, e.hold.epoch):
                    if _runs(e) and not (e.hold.epoch > state.token.epoch or state.token == (e.hold.epoch, i)):
                        return f"FT: {'AB'[i]}'s fencing token is not larger than those of the former timeline"
                    for n, m in enumerate(e.memory):
                        if m and m.state == RUNNING and n not in state.new.rows[i].running:
                            return f"RN: {'AB'[i]} runs x{n}, which does not stand in its running set on the new server"
        return ""

    def quiet(self, state: State) -> bool:
        if state.phase != PROMOTED:
            return False
        return state.old is None or any(e.wants and e.met for e in state.executors)

    def finished(self, state: State) -> bool:
        new = state.new
        return state.phase == PROMOTED and new is not None and all(job and not job.present for job in new.jobs)

    # -- the servers ---------------------------------------------------------------------------------------------

    def _steps(self, s: State) -> Steps:
        yield from self._time(s)
        yield from self._servers(s)
        for i, e in enumerate(s.executors):
            if i in self.scenario.fresh and s.phase != PROMOTED:
                continue
            yield from self._hears(s, i, e)
            yield from self._thinks(s, i, e)
            yield from self._sends(s, i, e)

    def _servers(self, s: State) -> Steps:
        old, new = s.old, s.new
        if s.phase == FOLLOWS:
            yield "the standby receives nothing more", s._replace(phase=CUT, new=old)
        if s.phase == CUT:
            after = s._replace(phase=PROMOTED)
            stay = tuple(loop in self.scenario.stay for loop in LOOPS)
            if self.scenario.lives:
                executors = tuple(
                    e._replace(stays=stay) if i in self.scenario.slow and i not in self.scenario.fresh else e
                    for i, e in enumerate(s.executors)
                )
                yield "the standby is promoted, the former primary lives on", after._replace(executors=executors)
            else:
                yield "the primary dies, the standby is promoted", after._replace(old=None)
        for n, kind in enumerate(self.scenario.jobs):
            if kind != "reused":
                continue
            if old is not None and old.jobs[n] is None and (s.phase == CUT or (s.phase == PROMOTED and s.budget.late)):
                late = s.budget.late - (s.phase == PROMOTED)
                jobs = swap(old.jobs, n, Job("lost", 1, present=True))
                after = s._replace(old=old._replace(jobs=jobs), budget=s.budget._replace(late=late))
                yield f"x{n} is stored on the primary, and will be lost", after
            if s.phase == PROMOTED and new is not None and new.jobs[n] is None:
                jobs = swap(new.jobs, n, Job("new", 1, present=True))
                yield f"another x{n} is stored on the new server", s._replace(new=new._replace(jobs=jobs))

    def _time(self, s: State) -> Steps:
        old, new = (
            x and x._replace(origin=x.origin._replace(lease=max(0, x.origin.lease - 1))) for x in (s.old, s.new)
        )
        executors = tuple(self._tick(e) for e in s.executors)
        noted = s.noted and s.noted - 1
        after = s._replace(old=old, new=new, noted=noted, executors=executors)
        if after != s:
            yield "time passes", after

    def _tick(self, e: Executor) -> Executor:
        pending = tuple(p and p._replace(age=min(LEASE, p.age + 1)) for p in e.pending)
        e = e._replace(lately=max(0, e.lately - 1), pending=pending)
        if e.hold is None or e.hold.left == 0:
            return e
        e = e._replace(hold=e.hold._replace(left=e.hold.left - 1))
        return _stop(e) if e.hold and e.hold.left == 0 else e

    # -- what an executor sends ----------------------------------------------------------------------------------

    def _sends(self, s: State, i: int, e: Executor, only: int | None = None) -> Steps:
        name, free = "AB"[i], [p is None and only in (None, loop) for loop, p in enumerate(e.pending)]
        hold, batch = e.hold, e.batch
        alive = hold is not None and hold.left > 0 and not hold.draining
        if free[_CONTROL] and e.unreleased is not None:
            epoch = e.unreleased
            yield from self._send(s, i, _CONTROL, "the release", lambda x, w: on.release(x, w, i, epoch))
        if free[_CONTROL] and e.wants and hold is None and not (batch and (batch.ends or batch.chosen)):
            refused = e.unreleased is not None
            if not refused or s.budget.refusals:
                t = s._replace(budget=s.budget._replace(refusals=s.budget.refusals - 1)) if refused else s
                what = "after the release was refused: an acquire" if refused else "an acquire"
                yield from self._send(t, i, _CONTROL, what, lambda x, w: self._acquire(x, w, i, e, s))
        if free[_RENEWALS] and hold is not None:
            epoch = hold.epoch
            yield from self._send(s, i, _RENEWALS, "a renewal", lambda x, w: on.renew(x, w, i, epoch))
        if free[_READS] and alive:
            yield from self._send(s, i, _READS, "a read", lambda x, w: on.read(x, w, i))
        if free[_HANDLERS]:
            for n, m in enumerate(e.memory):
                if m and m.state == RUNNING and n in self.scenario.transactional:
                    run = lambda x, w, n=n, m=m: on.finish(self.protocol, x, w, i, e, n, m)  # noqa: E731
                    yield from self._send(s, i, _HANDLERS, f"the end of x{n}", run)
        if only is None and e.wants and s.budget.drains and hold is not None:
            after = _forget_waiting(e._replace(wants=False, hold=hold._replace(draining=True)))
            yield f"{name} drains X", _with(s, i, after)._replace(budget=s.budget._replace(drains=s.budget.drains - 1))
        if free[_CYCLES]:
            if batch is None and not e.look and (batch := self._gather(e)) is not None:
                memory = e.memory
                for n in batch.chosen:
                    memory = swap(memory, n, _of(memory[n])._replace(state=CHOSEN))
                e = e._replace(memory=memory, batch=batch)
                s = _with(s, i, e)
            if (batch is None and e.look) or (batch and batch.state == "look"):
                yield from self._send(s, i, _CYCLES, "a look", lambda x, w: on.look(x, w, i))
            elif batch and batch.state == "send":
                names = tuple(n for n, m in enumerate(e.memory) if m and m.state != QUEUED and n not in _ids(batch))
                what = f"a cycle that names {_jobs(names)}, ends {_jobs(_ids(batch))}"
                run = lambda x, w: on.cycle(self.protocol, x, w, i, e, batch, names)  # noqa: E731
                yield from self._send(s, i, _CYCLES, what, run)

    def _acquire(self, server: Server, where: int, i: int, e: Executor, s: State) -> on.Ran:
        asks = where == OLD or s.noted == 0 or e.lately > 0
        if self.protocol.asks == "where it is noted":
            asks = asks or s.noted is not None
        elif self.protocol.asks == "who starts":
            asks = asks or (i in self.scenario.fresh and e.timeline is None)
        return on.acquire(self.protocol, server, where, i, asks=asks)

    def _leads(self, s: State, i: int, loop: int) -> int:
        if s.phase != PROMOTED or (s.old is not None and s.executors[i].stays[loop]):
            return OLD
        return NEW

    def _send(self, s: State, i: int, loop: int, what: str, run: _Run) -> Steps:
        """A statement runs, and its answer comes later, at once, or never."""
        e, where = s.executors[i], self._leads(s, i, loop)
        server = s.old if where == OLD else s.new
        assert server is not None
        server, answer, broken = run(server, where)
        answer = answer._replace(ours=e.hold is not None, late=where == OLD and s.phase == PROMOTED)
        there = "" if s.phase != PROMOTED else " on the former primary" if where == OLD else " on the new server"
        if e.batch and loop == _CYCLES:
            e = e._replace(batch=e.batch._replace(state="wait"))
        if loop == _CONTROL and answer.kind == "acquire" and where == NEW and s.noted is None:
            s = s._replace(noted=LEASE)
        ran = s._replace(old=server) if where == OLD else s._replace(new=server)
        ran = ran._replace(broken=broken)
        label = f"{'AB'[i]}: {what} runs{there}"
        if i not in self.scenario.slow or loop not in self._slow:
            after = _with(ran, i, self._heard(e, i, loop, answer))
            batch = after.executors[i].batch
            if loop == _CYCLES and batch is not None and not broken and batch.state == "look":
                yield from self._sends(after, i, after.executors[i], _CYCLES)  # it was void: see why
            else:
                yield label, after
            return
        yield label, _with(ran, i, e._replace(pending=swap(e.pending, loop, answer)))
        if s.budget.losses:
            lost = answer._replace(answer=(LOST, *answer.answer[1:]) if answer.kind == "finish" else (LOST,))
            unheard = e._replace(pending=swap(e.pending, loop, lost))
            less = s.budget._replace(losses=s.budget.losses - 1)
            yield f"{label}, its answer is lost", _with(ran, i, unheard)._replace(budget=less)
            yield f"{label} not, its connection is lost", _with(s, i, unheard)._replace(budget=less)

    # -- what it hears -------------------------------------------------------------------------------------------

    def _hears(self, s: State, i: int, e: Executor) -> Steps:
        for loop in range(len(LOOPS)):
            p = e.pending[loop]
            if p is None:
                continue
            free = e._replace(pending=swap(e.pending, loop, None))
            if p.answer[0] != LOST:
                yield f"{'AB'[i]} hears of the {p.kind}", _with(s, i, self._heard(free, i, loop, p))
            if p.answer[0] == LOST or (p.server == OLD and s.old is None):
                yield f"{'AB'[i]} gives up the {p.kind}", _with(s, i, self._unheard(free, loop, p))

    def _unheard(self, e: Executor, loop: int, p: Pending) -> Executor:
        e = e._replace(stays=swap(e.stays, loop, False))
        if p.kind == "finish" and p.ours:
            n = p.answer[1]
            assert isinstance(n, int)
            m = e.memory[n]
            if m and m.state == RUNNING:
                return e._replace(memory=swap(e.memory, n, m._replace(state=AGAIN)))
        if e.batch and p.kind in ("cycle", "look"):
            return e._replace(batch=e.batch._replace(state="send" if p.kind == "cycle" else "look"))
        return e

    def _heard(self, e: Executor, i: int, loop: int, p: Pending) -> Executor:
        if p.kind == "acquire":
            e = self._granted(e, p)
        elif p.kind == "release":
            e = e._replace(unreleased=None)
        elif p.kind == "renew":
            e = self._renewed(e, p)
        elif p.kind == "read":
            e = self._delivered(e, p)
        elif p.kind == "cycle":
            e = self._answered(e, p)
        elif p.kind == "look":
            e = self._found(e, p)
        elif p.kind == "finish":
            e = self._ended(e, p)
        if self.scenario.lives and p.server == NEW and p.kind != "release":
            e = e._replace(met=True, hold=e.hold and e.hold._replace(met=True))
        return e

    def _granted(self, e: Executor, p: Pending) -> Executor:
        epoch = p.answer[1]
        if self.protocol.acquisition == "tells the timeline":
            if e.timeline not in (None, p.server):
                known = e.timeline
                e = e._replace(stays=swap(e.stays, _CONTROL, False))
                return self._replaced(e) if p.server > known else e
            e = e._replace(timeline=p.server)
        if not isinstance(epoch, int) or e.hold is not None:
            return e
        hold = Hold(epoch, e.timeline, max(0, LEASE - p.age), draining=not e.wants, late=p.late)
        return e._replace(hold=hold, lately=0)

    def _renewed(self, e: Executor, p: Pending) -> Executor:
        hold = e.hold
        if hold is None or not p.ours:
            return e
        if hold.timeline not in (None, p.server) and self.protocol.renewal == "where it was granted":
            e = e._replace(stays=swap(e.stays, _RENEWALS, False))
            newer = p.server > hold.timeline
            return self._replaced(e) if newer and self.protocol.met_by_renewal == "replaced" else e
        if not p.answer[1]:
            return _lost(e._replace(stays=swap(e.stays, _RENEWALS, False)))
        return e._replace(hold=hold._replace(left=max(hold.left, LEASE - p.age), late=hold.late or p.late))

    def _delivered(self, e: Executor, p: Pending) -> Executor:
        fence, jobs = p.answer[0], p.answer[1:]
        moved = e.timeline not in (None, p.server)
        if (moved or e.reader not in (None, p.server)) and self.protocol.read == "tells the timeline":
            e = e._replace(reader=p.server)
            if moved:
                return self._replaced(e)
            return _forget_waiting(e)
        if self.protocol.read == "tells the timeline" or e.timeline is None:
            hold = e.hold and e.hold._replace(timeline=p.server if e.timeline is None else e.hold.timeline)
            e = e._replace(reader=p.server, timeline=p.server, hold=hold)
        if isinstance(fence, int) and fence > e.fence:
            e = e._replace(look=True)
        if not p.ours or e.hold is None or e.hold.draining or e.hold.left == 0:
            return e
        memory = e.memory
        for n, job in enumerate(jobs):
            m = memory[n]
            if isinstance(job, tuple) and (m is None or m.state == QUEUED):
                memory = swap(memory, n, Entry(job[0], job[1], QUEUED))
        return e._replace(memory=memory)

    def _answered(self, e: Executor, p: Pending) -> Executor:
        assert e.batch is not None
        if p.answer[0]:
            return self._landed(e)
        return e._replace(batch=e.batch._replace(state="look"))

    def _found(self, e: Executor, p: Pending) -> Executor:
        cycle, fence, epoch = p.answer
        assert isinstance(cycle, int)
        assert isinstance(fence, int)
        if e.timeline not in (None, p.server) and self.protocol.look == "tells the timeline":
            e = self._replaced(e)
        if e.hold is not None and p.ours and e.hold.epoch != epoch:
            e = _lost(e)
        batch = e.batch
        if fence != e.fence:
            e = _forget_waiting(e._replace(fence=fence))
            if batch and batch.ours:
                memory = tuple(None if m and m.state == CHOSEN else m for m in e.memory)
                e = e._replace(memory=memory, batch=batch._replace(chosen=()))
        e, batch = e._replace(look=False), e.batch
        if batch is None:
            return e
        if cycle == batch.number and (batch.timeline in (None, p.server) or self.protocol.landed == "anywhere"):
            return self._landed(e)
        if not batch.ours:
            batch = batch._replace(ends=(), chosen=())
        return e._replace(batch=batch._replace(number=cycle + 1, timeline=e.timeline, state="send"))

    def _landed(self, e: Executor) -> Executor:
        batch, hold = e.batch, e.hold
        assert batch is not None
        e = e._replace(cycle=batch.number, batch=None)
        if not batch.ours or hold is None:
            return e
        memory = e.memory
        for n in _ids(batch):
            memory = swap(memory, n, None)
        for n in batch.chosen:
            m = memory[n]
            if m and m.state == CHOSEN:
                live = hold.left > 0 and not hold.draining
                memory = swap(memory, n, m._replace(state=RUNNING) if live else None)
        if batch.barrier and hold.draining:
            e = e._replace(hold=hold._replace(cleared=True))
        return e._replace(memory=memory)

    def _ended(self, e: Executor, p: Pending) -> Executor:
        if not p.ours:
            return e
        outcome, n = p.answer
        assert isinstance(n, int)
        if outcome == "superseded":
            every = self.protocol.superseded == "opens other connections"
            stays = tuple(s and loop == _RENEWALS for loop, s in enumerate(e.stays)) if every else e.stays
            return _lost(e._replace(stays=swap(stays, _HANDLERS, False)))
        m = e.memory[n]
        return e._replace(memory=swap(e.memory, n, m._replace(state=COMMITTED))) if m else e

    def _replaced(self, e: Executor) -> Executor:
        """Another timeline answers: nothing that was read before counts."""
        lately = e.hold.left if e.hold else e.lately
        e = _forget_waiting(e) if self.protocol.noticed == "what waits" else _lost(e)
        stays = tuple(s and loop == _RENEWALS for loop, s in enumerate(e.stays))
        e = e._replace(stays=stays if self.protocol.connections == "opened anew" else e.stays)
        return e._replace(timeline=None, lately=lately)

    # -- what it does by itself ----------------------------------------------------------------------------------

    def _thinks(self, s: State, i: int, e: Executor) -> Steps:
        name, hold = "AB"[i], e.hold
        for n, m in enumerate(e.memory):
            if m and m.state == RUNNING and n not in self.scenario.transactional:
                yield f"{name}'s handler of x{n} returns", _with(s, i, _becomes(e, n, DONE))
        if not e.wants and self.scenario.wants[i]:
            back = e._replace(wants=True, hold=hold and hold._replace(draining=False, cleared=False))
            yield f"{name} is assigned X again", _with(s, i, back)
        if hold is not None and hold.draining and hold.cleared and not any(e.memory) and e.batch is None:
            yield f"{name} lets go of X", _with(s, i, _lost(e)._replace(unreleased=hold.epoch))
        for loop, stays in enumerate(e.stays):
            if e.pending[loop] is not None or s.old is None or s.phase != PROMOTED or i not in self.scenario.slow:
                continue
            if stays and (s.budget.moves or loop == _HANDLERS):
                moves = s.budget.moves - (loop != _HANDLERS)
                after = _with(s, i, e._replace(stays=swap(e.stays, loop, False)))
                yield (
                    f"{name}'s connection for {LOOPS[loop]} ends",
                    after._replace(budget=s.budget._replace(moves=moves)),
                )
            if not stays and s.budget.strays and LOOPS[loop] in self.scenario.stay:
                after = _with(s, i, e._replace(stays=swap(e.stays, loop, True)))
                less = s.budget._replace(strays=s.budget.strays - 1)
                yield (
                    f"{name}'s new connection for {LOOPS[loop]} leads to the former primary",
                    after._replace(budget=less),
                )

    def _gather(self, e: Executor) -> Batch | None:
        hold, memory = e.hold, e.memory
        ends = tuple(
            (n, m.what, m.attempt, m.state) for n, m in enumerate(memory) if m and m.state in (DONE, AGAIN, COMMITTED)
        )
        busy = any(m and m.state != QUEUED for m in memory)
        chosen = tuple(n for n, m in enumerate(memory) if m and m.state == QUEUED)[:1]
        if busy or hold is None or hold.draining or hold.left == 0:
            chosen = ()
        barrier = bool(hold and hold.draining and not hold.cleared and not any(memory))
        if not (ends or chosen or barrier):
            return None
        return Batch(e.cycle + 1, e.timeline, ends, chosen, barrier)


def _runs(e: Executor) -> bool:
    return any(m and m.state == RUNNING for m in e.memory)


def _with(s: State, i: int, e: Executor) -> State:
    return s._replace(executors=swap(s.executors, i, e))


def _of(m: Entry | None) -> Entry:
    assert m is not None
    return m


def _becomes(e: Executor, n: int, state: str) -> Executor:
    return e._replace(memory=swap(e.memory, n, _of(e.memory[n])._replace(state=state)))


def _ids(batch: Batch) -> tuple[int, ...]:
    return tuple(n for n, *_ in batch.ends)


def _jobs(jobs: tuple[int, ...]) -> str:
    return " ".join(f"x{n}" for n in jobs) or "nothing"


def _forget_waiting(e: Executor) -> Executor:
    """What has not been chosen is to be read anew; a read under way counts no more."""
    memory = tuple(None if m and m.state == QUEUED else m for m in e.memory)
    read = e.pending[_READS]
    return e._replace(memory=memory, pending=swap(e.pending, _READS, read and read._replace(ours=False)))


def _stop(e: Executor) -> Executor:
    """The lease runs out: handlers are cancelled, and run again."""
    memory = tuple(m._replace(state=AGAIN) if m and m.state == RUNNING else m for m in e.memory)
    return _forget_waiting(e._replace(memory=memory))


def _lost(e: Executor) -> Executor:
    """The origin is another's: everything of it stops, and is forgotten."""
    pending = tuple(p and p._replace(ours=False) for p in e.pending)
    batch = e.batch and e.batch._replace(ours=False)
    return e._replace(hold=None, memory=(None,) * len(e.memory), pending=pending, batch=batch)

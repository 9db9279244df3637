"""One state of the lease model for all that are alike.

Numbers that only grow (epochs, fences, cycle numbers) become their distance from the present value, statements that can
do nothing any more are left out.
"""

from lease_state import (
    DEAD,
    OK,
    Ask,
    Cycle,
    Executor,
    Hold,
    Job,
    Look,
    Origin,
    Row,
    State,
    Statement,
)

__all__ = ["canonical"]


def canonical(state: State, prune: bool) -> State:
    """One state for all that differ only in absolute numbers, in what a running set says of jobs that are over, or
    (`prune`) in statements that can do nothing any more."""
    origins, rows, jobs, executors, server = state[:5]
    moved = any(o.epoch for o in origins) or any(r.cycle or r.fence for r in rows) or any(j.attempt for j in jobs)
    if moved:
        server = tuple([_canonical_statement(st, rows[executors[st.by].row], origins, jobs) for st in server])
        executors = tuple([_canonical_executor(e, rows[e.row], origins) for e in executors])
        origins = tuple([Origin(o.owner, 0, o.lease, 0 if o.since == o.epoch else -1) for o in origins])
    rows = tuple([Row(0, 0, _open(row.running, jobs), _open(row.left, jobs)) for row in rows])
    if state.budget.expects or any(e.expected or e.tried or e.early_in_row for e in executors):
        executors = tuple([_without_ended(e, jobs) for e in executors])
    jobs = tuple([job._replace(attempt=0) if job.attempt else job for job in jobs])
    if prune:
        server = tuple([st for st in server if not _spent(st, origins[st.origin], executors[st.by].row)])
    if len(server) > 1:
        server = tuple(sorted(server, key=repr))
    return State(origins, rows, jobs, executors, server, *state[5:])


def _epoch(epoch: int, origin: Origin) -> int:
    """0: the present epoch; -1: an earlier one of the same owner; -2: before its time."""
    if epoch == origin.epoch:
        return 0
    return -1 if epoch >= origin.since else -2


def _open(numbers: tuple[int, ...], jobs: tuple[Job, ...]) -> tuple[int, ...]:
    """Those of these jobs that are not over."""
    return tuple([job for job in numbers if jobs[job].present or jobs[job].late])


def _without_ended(e: Executor, jobs: tuple[Job, ...]) -> Executor:
    """That a job is over is the same as never to have been told to expect it."""
    named = [_open(part, jobs) for part in (e.expected, e.tried, e.early, e.early_in_row)]
    return e._replace(expected=named[0], tried=named[1], early=named[2], early_in_row=named[3])


def _canonical_executor(e: Executor, row: Row, origins: tuple[Origin, ...]) -> Executor:
    if e.status == DEAD:
        return e._replace(bumps=()) if e.bumps else e
    floor = -1
    if e.bumps:
        e = _in_short(e)
    if e.sight or e.view or e.told or any(f.fence != e.fence for f in e.flights):
        e, floor = _ranked(e, row, origins), -9
    return e._replace(
        cycle=e.cycle - row.cycle,
        fence=max(e.fence - row.fence, floor),
        holds=tuple([h and Hold(_epoch(h.epoch, o), *h[1:]) for h, o in zip(e.holds, origins, strict=True)]),
        flights=tuple([_canonical_cycle(f, row, origins, floor) for f in e.flights]),
        disown=e.disown and e.disown._replace(fence=max(e.disown.fence - row.fence, -1)),
        asks=tuple([a and _canonical_ask(a, row, o) for a, o in zip(e.asks, origins, strict=True)]),
    )


def _in_short(e: Executor) -> Executor:
    """Of bumps that are looked at together only whether all of them are explained matters."""
    view = e.view and e.view.view
    if e.disown is not None and e.disown.bumps:
        return e
    seen = len(view.bumps) if view else 0
    parts = [part for part in (e.bumps[:seen], e.bumps[seen:]) if part]
    short = e._replace(bumps=tuple([all(part) for part in parts]))
    if e.view is not None and view is not None and seen:
        short = short._replace(view=e.view._replace(view=view._replace(bumps=(all(view.bumps),))))
    return short


def _ranked(e: Executor, row: Row, origins: tuple[Origin, ...]) -> Executor:
    """Of the fences that an executor compares with each other, only the order matters."""
    view = e.view and e.view.view
    fences = [
        e.fence,
        *(f.fence for f in e.flights),
        e.sight and e.sight.fence,
        e.told and e.told[0],
        view and view.fence,
    ]
    past = sorted({f for f in fences if f is not None and f < row.fence}, reverse=True)
    rank = {fence: row.fence - 1 - place for place, fence in enumerate(past)} | {row.fence: row.fence}
    look = e.view
    if look is not None:
        before = tuple([None if b is None else _epoch(b, o) for b, o in zip(look.before, origins, strict=True)])
        if view is not None:
            epochs = tuple([None if b is None else _epoch(b, o) for b, o in zip(view.epochs, origins, strict=True)])
            view = view._replace(cycle=view.cycle - row.cycle, fence=rank[view.fence] - row.fence, epochs=epochs)
        look = Look(before, view)
    return e._replace(
        fence=rank[e.fence],
        flights=tuple([f._replace(fence=rank[f.fence]) for f in e.flights]),
        sight=e.sight and e.sight._replace(fence=rank[e.sight.fence] - row.fence),
        told=e.told and (rank[e.told[0]] - row.fence, e.told[1]),
        view=look,
    )


def _canonical_ask(ask: Ask, row: Row, origin: Origin) -> Ask:
    if ask.kind == "acquire" and ask.answer != OK:
        return ask
    return ask._replace(epoch=_epoch(ask.epoch, origin), fence=max(ask.fence - row.fence, -1))


def _canonical_cycle(cycle: Cycle, row: Row, origins: tuple[Origin, ...], floor: int = -1) -> Cycle:
    return cycle._replace(
        number=max(cycle.number - row.cycle, -1),  # two under way may both have committed
        fence=max(cycle.fence - row.fence, floor),
        epochs=tuple([None if e is None else _epoch(e, o) for e, o in zip(cycle.epochs, origins, strict=True)]),
    )


def _canonical_statement(st: Statement, row: Row, origins: tuple[Origin, ...], jobs: tuple[Job, ...]) -> Statement:
    if st.cycle is not None:
        return st._replace(cycle=_canonical_cycle(st.cycle, row, origins))
    if st.kind in ("acquire", "look", "disown"):
        return st
    return st._replace(epoch=_epoch(st.epoch, origins[st.origin]), attempt=max(st.attempt - jobs[st.job].attempt, -1))


def _spent(st: Statement, origin: Origin, row: int) -> bool:
    """Nobody listens to it, and it can no longer change anything."""
    if st.heard or st.begun:
        return False
    if st.cycle is not None:
        return st.cycle.number < 1 or st.cycle.fence != 0
    return st.kind == "look" or (
        st.kind not in ("acquire", "disown") and (st.epoch != 0 or st.attempt != 0 or origin.owner != row)
    )

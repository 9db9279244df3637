"""The statements of the failover model: each runs at once on the server that its connection leads to."""

from failover_state import (
    ABOVE,
    AGAIN,
    COMMITTED,
    LEASE,
    NEW,
    Batch,
    Entry,
    Executor,
    Job,
    Pending,
    Protocol,
    Server,
    swap,
)

__all__ = ["Ran", "acquire", "cycle", "finish", "look", "read", "release", "renew"]

Ran = tuple[Server, Pending, str]  # the server afterwards, the answer, and the property that is violated


def acquire(p: Protocol, server: Server, where: int, i: int, *, asks: bool) -> Ran:
    """`acquire_origins.sql`. asks: for the origin; else only whose answer this is."""
    origin, epoch = server.origin, None
    if asks and (origin.owner in (None, i) or origin.lease == 0):
        former = origin.owner
        if former is not None and former != i:
            row = server.rows[former]
            jobs = tuple(
                job._replace(attempt=job.attempt + 1) if job and job.present and n in row.running else job
                for n, job in enumerate(server.jobs)
            )
            rows = swap(server.rows, former, row._replace(fence=row.fence + 1, running=()))
            server = server._replace(rows=rows, jobs=jobs)
        epoch = origin.epoch + 1
        if where == NEW and p.epoch == "above those of former timelines":
            epoch = max(epoch, ABOVE)
        server = server._replace(origin=origin._replace(owner=i, epoch=epoch, lease=LEASE))
    return server, Pending("acquire", where, ("answered", epoch)), ""


def release(server: Server, where: int, i: int, epoch: int) -> Ran:
    """`release.sql`."""
    origin = server.origin
    if (origin.owner, origin.epoch) == (i, epoch):
        server = server._replace(origin=origin._replace(owner=None, epoch=epoch + 1, lease=0))
    return server, Pending("release", where, ("answered",)), ""


def renew(server: Server, where: int, i: int, epoch: int) -> Ran:
    """`renew.sql`."""
    renewed = (server.origin.owner, server.origin.epoch) == (i, epoch)
    if renewed:
        server = server._replace(origin=server.origin._replace(lease=LEASE))
    return server, Pending("renew", where, ("answered", renewed)), ""


def read(server: Server, where: int, i: int) -> Ran:
    """`read.sql`: all that is there, and the fence."""
    jobs = tuple((job.what, job.attempt) if job and job.present else None for job in server.jobs)
    return server, Pending("read", where, (server.rows[i].fence, *jobs)), ""


def cycle(p: Protocol, server: Server, where: int, i: int, e: Executor, batch: Batch, names: tuple[int, ...]) -> Ran:
    """`cycle.sql`."""
    row, broken = server.rows[i], ""
    same = batch.timeline in (None, where) or p.cycle == "does not"
    if not (row.cycle == batch.number - 1 and row.fence == e.fence and same):
        return server, Pending("cycle", where, (False,)), ""
    jobs = server.jobs
    for n, what, attempt, outcome in batch.ends:
        job = jobs[n]
        if outcome == COMMITTED or job is None or not job.present or job.attempt != attempt:
            continue
        if where == NEW and job.what != what:
            broken = f"I2: x{n} of the new server is ended by {'AB'[i]}, which has run another job of that id"
        if server.origin.owner != i:
            broken = f"FE: {'AB'[i]} ends x{n}, which is not its own"
        jobs = swap(jobs, n, job._replace(attempt=attempt + 1) if outcome == AGAIN else job._replace(present=False))
    rows = swap(server.rows, i, row._replace(cycle=batch.number, running=names))
    return server._replace(rows=rows, jobs=jobs), Pending("cycle", where, (True,)), broken


def look(server: Server, where: int, i: int) -> Ran:
    """`standing.sql`."""
    row, origin = server.rows[i], server.origin
    epoch = origin.epoch if origin.owner == i else None
    return server, Pending("look", where, (row.cycle, row.fence, epoch)), ""


def finish(p: Protocol, server: Server, where: int, i: int, e: Executor, n: int, entry: Entry) -> Ran:
    """`sidings.finish` and COMMIT."""
    assert e.hold is not None
    origin, job, broken = server.origin, server.jobs[n], ""
    same = e.hold.timeline in (None, where) or p.finish == "does not"
    if (origin.owner, origin.epoch) != (i, e.hold.epoch) or not same:
        return server, Pending("finish", where, ("superseded", n)), ""
    if not _is(job, entry):
        return server, Pending("finish", where, ("over", n)), ""
    assert job is not None
    if where == NEW and job.what != entry.what:
        broken = f"I5: the handler of another job of its id commits the effects and the end of x{n} of the new server"
    server = server._replace(jobs=swap(server.jobs, n, job._replace(present=False)))
    return server, Pending("finish", where, ("committed", n)), broken


def _is(job: Job | None, entry: Entry) -> bool:
    return job is not None and job.present and job.attempt == entry.attempt

"""Draining a backlog: ungrouped, in many groups, in few, and by handlers that ask for more than a plain one."""

from collections.abc import Sequence

from sidings.jobs import Policy

from .. import floors, ours, peers
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []

GROUPS, EACH = 1_000, 50
HOT = {1: 2_000, 20: 500, 200: 150}  # how many groups: jobs in each
WAITING = 100  # of a group, where only the newest counts


async def _sidings(
    bench: Bench, jobs: int, *, type: str = "noop", groups: int = 0, policy: Policy = Policy.SERIAL
) -> Figures:
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs, type=type, groups=groups, policy=policy)
    return await ours.drain(bench, dsn, jobs)


async def _floor(bench: Bench, jobs: int, *, groups: int = 0, history: bool = True) -> Figures:
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs, groups=groups)
    return await floors.drain(bench, dsn, jobs, origins=ours.origins(), history=history)


async def _handled(bench: Bench, jobs: int, *, in_flight: int = 1) -> Figures:
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs)
    return await floors.drain_handled(bench, dsn, jobs, origins=ours.origins(), in_flight=in_flight)


@scenario(
    "drain",
    "Drain of no-op jobs without groups, one process",
    compare=[
        Compare("sidings", "floor", 0.75),
        Compare("sidings", "floor, with handlers"),
        Compare("sidings", "floor, with handlers, 2 in flight"),
        Compare("floor, with handlers", "floor"),
        Compare("floor, with handlers, 2 in flight", "floor"),
        Compare("sidings", "graphile", 2.0),
        Compare("sidings", "pgqueuer", 4.0),
        Compare("sidings", "pgboss"),
        Compare("sidings", "river"),
        Compare("sidings", "procrastinate"),
        Compare("sidings", "chancy"),
        Compare("sidings, no history", "floor, no history"),
        Compare("sidings, no history", "sidings"),
    ],
    note="A backlog stands in the table; the clock runs from the worker's start to the commit of the last outcome. The "
    "floor reads, deletes and records the same rows by bare SQL, without a handler. The floor with handlers also "
    "makes each row's model and `Job`, awaits an async handler and records when it ran, and no more: what Python costs "
    "at the least. It records one batch at a time, as the floor does, or has two in flight, as ours has.",
)
def drain(size: Size) -> Sequence[Variant]:
    jobs = size.jobs(200_000)
    settings = {"jobs": jobs, "page": floors.PAGE, "batch": floors.BATCH}
    return [
        Variant("floor", lambda b: _floor(b, jobs), settings),
        Variant("sidings", lambda b: _sidings(b, jobs), {"jobs": jobs, "history": True}),
        Variant("floor, with handlers", lambda b: _handled(b, jobs), settings),
        Variant("floor, with handlers, 2 in flight", lambda b: _handled(b, jobs, in_flight=2), settings),
        Variant("floor, no history", lambda b: _floor(b, jobs, history=False), {"jobs": jobs}),
        Variant("sidings, no history", lambda b: _sidings(b, jobs, type="quiet"), {"jobs": jobs, "history": False}),
        *peers.variants("drain", size),
    ]


@scenario(
    "groups",
    "Drain of 1,000 serial groups × 50 jobs, one process",
    compare=[
        Compare("sidings", "sidings, no groups", 0.9),
        Compare("sidings", "floor"),
        Compare("sidings", "graphile", 3.0),
        Compare("sidings", "pgboss"),
        Compare("sidings", "procrastinate"),
        Compare("sidings, no history", "sidings"),
    ],
    note="Jobs of one group run one at a time, in order. The floor takes the same rows in any order. Peers without "
    "ordered groups are left out. The target of 3 × is that of the best peer, Graphile Worker.",
)
def groups(size: Size) -> Sequence[Variant]:
    jobs, count = (GROUPS * EACH, GROUPS) if size.name != "tiny" else (500, 10)
    settings = {"jobs": jobs, "groups": count}
    return [
        Variant("floor", lambda b: _floor(b, jobs, groups=count), settings),
        Variant("sidings", lambda b: _sidings(b, jobs, groups=count), settings | {"history": True}),
        Variant("sidings, no groups", lambda b: _sidings(b, jobs), {"jobs": jobs, "history": True}),
        Variant(
            "sidings, no history",
            lambda b: _sidings(b, jobs, type="quiet", groups=count),
            settings | {"history": False},
        ),
        *peers.variants("groups", size),
    ]


@scenario(
    "hot",
    "Drain of few serial groups: 1 × 2,000 jobs, 20 × 500, 200 × 150",
    compare=[
        Compare("sidings, 20 groups", "sidings, 1 group"),
        Compare("sidings, 200 groups", "sidings, 1 group"),
        Compare("sidings, 1 group", "graphile, 1 group"),
        Compare("sidings, 1 group", "pgboss, 1 group"),
        Compare("sidings, 1 group", "procrastinate, 1 group"),
    ],
    note="A job of a group starts when the end of the one before it has been committed: one group is as fast as "
    "commits follow each other on the disk, and several share them. Peers with ordered groups drain one, of fewer "
    "jobs, and not in the short run.",
)
def hot(size: Size) -> Sequence[Variant]:
    rivals = peers.variants("hot", size) if size.name != "short" else []  # which has to end within 10 minutes
    return [*(_hot(size, count, each) for count, each in HOT.items()), *rivals]


def _hot(size: Size, count: int, each: int) -> Variant:
    jobs = size.jobs(count * each)
    return Variant(
        f"sidings, {count} group{'s' if count > 1 else ''}",
        lambda b: _sidings(b, jobs, groups=count),
        {"jobs": jobs, "groups": count},
    )


@scenario(
    "features",
    "Handlers of lists, policy latest and transactional jobs beside a plain drain",
    compare=[
        Compare("sidings, batch=100", "sidings"),
        Compare("sidings, latest", "sidings"),
        Compare("sidings, transactional", "sidings"),
    ],
    note=f"Jobs ended a second. latest: {WAITING} jobs wait in each group, of which the newest runs and the others "
    "end as superseded. transactional: each job ends in a transaction of its own, with a commit that waits for "
    "the disk.",
)
def features(size: Size) -> Sequence[Variant]:
    jobs, few = size.jobs(100_000), size.jobs(10_000)
    waiting = max(1, jobs // WAITING)
    return [
        Variant("sidings", lambda b: _sidings(b, jobs), {"jobs": jobs}),
        Variant("sidings, batch=100", lambda b: _sidings(b, jobs, type="batched"), {"jobs": jobs}),
        Variant(
            "sidings, latest",
            lambda b: _sidings(b, jobs, type="newest", groups=waiting, policy=Policy.LATEST),
            {"jobs": jobs, "groups": waiting},
        ),
        Variant("sidings, transactional", lambda b: _sidings(b, few, type="transactional"), {"jobs": few}),
    ]

"""Draining a backlog: ungrouped, in serial groups, and against what usually hurts queues."""

from collections.abc import Sequence

from .. import floors, ours, peers
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []

GROUPS, EACH = 1_000, 50


async def _sidings(bench: Bench, jobs: int, *, type: str = "noop", groups: int = 0) -> Figures:
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs, type=type, groups=groups)
    return await ours.drain(bench, dsn, jobs)


async def _floor(bench: Bench, jobs: int, *, history: bool = True) -> Figures:
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs)
    return await floors.drain(bench, dsn, jobs, origins=ours.origins(), history=history)


@scenario(
    "drain",
    "Drain of no-op jobs without groups, one process",
    compare=[
        Compare("sidings", "floor", 0.75),
        Compare("sidings", "graphile", 2.0),
        Compare("sidings", "pgqueuer", 4.0),
        Compare("sidings", "pgboss"),
        Compare("sidings", "river"),
        Compare("sidings", "procrastinate"),
        Compare("sidings", "chancy"),
        Compare("sidings, no history", "floor, no history"),
        Compare("sidings, no history", "sidings"),
    ],
    note="A backlog stands in the table; the clock runs from the worker's start to the commit of the last outcome.",
    peers=True,
)
def drain(size: Size) -> Sequence[Variant]:
    jobs = size.jobs(100_000)
    return [
        Variant("floor", lambda b: _floor(b, jobs), {"jobs": jobs, "page": floors.PAGE, "batch": floors.BATCH}),
        Variant("sidings", lambda b: _sidings(b, jobs), {"jobs": jobs, "history": True}),
        Variant("floor, no history", lambda b: _floor(b, jobs, history=False), {"jobs": jobs}),
        Variant("sidings, no history", lambda b: _sidings(b, jobs, type="quiet"), {"jobs": jobs, "history": False}),
        *peers.variants("drain", size),
    ]


@scenario(
    "groups",
    "Drain of 1,000 serial groups × 50 jobs, one process",
    compare=[
        Compare("sidings", "sidings, no groups", 0.9),
        Compare("sidings", "graphile", 3.0),
        Compare("sidings", "pgboss"),
        Compare("sidings", "procrastinate"),
    ],
    note="Jobs of one group run one at a time, in order. Peers without ordered groups are left out.",
    peers=True,
)
def groups(size: Size) -> Sequence[Variant]:
    many = size.jobs(GROUPS * EACH)
    return [
        Variant(
            "sidings", lambda b: _sidings(b, many, groups=max(1, many // EACH)), {"jobs": many, "groups": many // EACH}
        ),
        Variant("sidings, no groups", lambda b: _sidings(b, many), {"jobs": many}),
        *peers.variants("groups", size),
    ]

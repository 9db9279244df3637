"""What usually hurts queues: a deep backlog, a stuck group, failing groups, a transaction that somebody left open."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
from sidings.jobs import OutcomeName

from .. import ours, peers
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []

STUCK = 100_000


async def _into_empty(bench: Bench, backlog: int, measured: int, rounds: int) -> Figures:
    """An executor waits at an empty table; a backlog is committed; the first `measured` jobs of it count."""
    dsn = await ours.fresh(bench)
    total, figures = 0, list[Figures]()
    async with ours.executing(dsn, ours.registry(), ours.origins()) as made:
        await made.settled(30)
        for _ in range(rounds):
            await ours.seed(dsn, backlog)
            await bench.meter.start()
            begun = made.metrics.count(OutcomeName.SUCCEEDED)
            made.wake()
            enough = total + measured
            await ours.until(lambda enough=enough: made.metrics.count(OutcomeName.SUCCEEDED) >= enough)
            jobs = made.metrics.count(OutcomeName.SUCCEEDED) - begun
            figures.append((await bench.meter.stop()).per_job(jobs))
            total += backlog
    return {key: sum(f[key] for f in figures) / len(figures) for key in figures[0]}


@scenario(
    "backlog",
    "Cost of a job at backlogs of 10 thousand to 10 million",
    compare=[
        Compare("1M", "10k", 1.25, at_most=True, key="cpu_us", label="CPU a job at 1M / at 10k"),
        Compare("10M", "10k", 1.25, at_most=True, key="cpu_us", label="CPU a job at 10M / at 10k"),
    ],
    note="The backlog is committed under a running executor; what counts are its first 100,000 jobs (of 10,000: "
    "all, ten times over). 10M only with --long.",
)
def backlog(size: Size) -> Sequence[Variant]:
    def of(jobs: int, rounds: int = 1) -> Variant:
        least = size.jobs(jobs)
        label = f"{jobs // 1_000_000}M" if jobs >= 1_000_000 else f"{jobs // 1_000}k"

        async def once(bench: Bench) -> Figures:
            figures = await _into_empty(bench, least, min(least, 100_000), rounds)
            return figures | {"cpu_us": figures["postgres_us"] + figures["client_us"]}

        return Variant(label, once, {"jobs": least}, repetitions=1 if jobs >= 10_000_000 else None)

    sizes = [of(10_000, rounds=10 if size.name != "tiny" else 1), of(100_000), of(1_000_000)]
    return [*sizes, of(10_000_000)] if size.long else sizes


async def _healthy(
    bench: Bench, jobs: int, *, failing: int = 0, behind: int = 0, stuck: bool = False, restarted: bool = False
) -> Figures:
    """Drain healthy groups. failing: so many groups fail at their head, with `behind` jobs waiting. stuck: one group
    with `STUCK` jobs behind a head that fails; restarted: which it had done before this executor started."""
    dsn = await ours.fresh(bench)
    if failing:
        await ours.seed(dsn, failing, type="failing", groups=failing, prefix="f")
        await ours.seed(dsn, failing * behind, groups=failing, prefix="f")
    if stuck:
        await ours.seed(dsn, 1, type="failing", groups=1, prefix="stuck")
        await ours.seed(dsn, bench.size.jobs(STUCK), groups=1, prefix="stuck")
        if restarted:
            connection = await asyncpg.connect(dsn)
            await connection.execute(
                "UPDATE sidings.job SET attempt = 2, failures = 1, run_at = now() + interval '1 hour', "
                "first_started_at = now() WHERE type = 'failing'"
            )
            await connection.close()
    await ours.seed(dsn, jobs, groups=max(1, jobs // 50))
    return await ours.drain(bench, dsn, jobs)


@scenario(
    "stuck",
    "One group stuck, with 100,000 jobs behind its head",
    compare=[
        Compare("sidings, stuck", "sidings", 0.95),
        Compare("sidings, stuck before a restart", "sidings", 0.95),
    ],
    note="50,000 healthy jobs in 1,000 groups, committed after those of the stuck group. The clock starts with the "
    "executor, so that it finds all of it just after its start.",
)
def stuck(size: Size) -> Sequence[Variant]:
    jobs = size.jobs(50_000)
    return [
        Variant("sidings", lambda b: _healthy(b, jobs), {"jobs": jobs}),
        Variant("sidings, stuck", lambda b: _healthy(b, jobs, stuck=True), {"jobs": jobs, "behind": size.jobs(STUCK)}),
        Variant(
            "sidings, stuck before a restart", lambda b: _healthy(b, jobs, stuck=True, restarted=True), {"jobs": jobs}
        ),
    ]


@scenario(
    "failing",
    "1 % of the groups failing",
    compare=[Compare("sidings, failing", "sidings", 0.95)],
    note="50,000 healthy jobs in 1,000 groups, and 10 more groups whose heads fail, with 50 jobs behind each.",
)
def failing(size: Size) -> Sequence[Variant]:
    jobs = size.jobs(50_000)
    return [
        Variant("sidings", lambda b: _healthy(b, jobs), {"jobs": jobs}),
        Variant("sidings, failing", lambda b: _healthy(b, jobs, failing=10, behind=50), {"jobs": jobs}),
    ]


@asynccontextmanager
async def open_transaction(dsn: str) -> AsyncIterator[None]:
    """A transaction that has written, has a snapshot, and stays open."""
    connection = await asyncpg.connect(dsn)
    transaction = connection.transaction(isolation="repeatable_read")
    await transaction.start()
    await connection.execute("CREATE TABLE left_open (number int); SELECT count(*) FROM pg_class")
    try:
        yield
    finally:
        await transaction.rollback()
        await connection.close()


async def _drain_with(bench: Bench, jobs: int, *, open: bool) -> Figures:
    dsn = await ours.fresh(bench)
    await ours.seed(dsn, jobs)
    if not open:
        return await ours.drain(bench, dsn, jobs)
    async with open_transaction(dsn):
        return await ours.drain(bench, dsn, jobs)


@scenario(
    "open",
    "A writing transaction left open for the whole drain",
    compare=[
        Compare("sidings, left open", "sidings", 0.95),
        Compare("graphile, left open", "graphile"),
        Compare("pgqueuer, left open", "pgqueuer"),
    ],
    note="Nothing that is deleted can be cleaned up. With --long the drain takes more than 35 s.",
    peers=True,
)
def left_open(size: Size) -> Sequence[Variant]:
    jobs = size.jobs(200_000) if not size.long else 3_000_000
    return [
        Variant("sidings", lambda b: _drain_with(b, jobs, open=False), {"jobs": jobs}),
        Variant("sidings, left open", lambda b: _drain_with(b, jobs, open=True), {"jobs": jobs}),
        *(v for v in peers.variants("open", size)),
    ]

"""What usually hurts queues: a deep backlog, a stuck group, failing groups, a transaction that somebody left open."""

from collections.abc import Sequence

import asyncpg

from .. import ours, peers
from ..meter import Reading, postgres_cpu
from ..results import Figures
from ..server import open_transaction
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []

STUCK = 100_000


async def _into_empty(bench: Bench, backlog: int, measured: int, rounds: int) -> Figures:
    """An executor waits at an empty table; a backlog is committed, by one transaction. What counts are its first
    `measured` jobs, of a larger one as many after a vacuum and a checkpoint: what the seeding has left to do is not the
    jobs' cost. Nor is what Postgres did until the commit, the executor's looking at rows that it may not see yet
    included: that is `seed_us`, for each row."""
    dsn = await ours.fresh(bench)
    total, jobs, reading, seeding = 0, 0, Reading(), 0.0
    async with ours.executing(dsn, ours.registry(), ours.origins()) as made:
        await made.settled(30)
        for _ in range(rounds):
            used = postgres_cpu(bench.server.pid)
            await ours.seed(dsn, backlog)
            seeding += postgres_cpu(bench.server.pid) - used
            if backlog > measured:
                await bench.server.settle(dsn)
                await bench.server.admin.execute("CHECKPOINT")
                total = ours.ended(made)
            begun = ours.ended(made)
            await bench.meter.start()
            made.wake()
            enough = total + measured
            await ours.until(lambda enough=enough: ours.ended(made) >= enough)
            reading += await bench.meter.stop()
            jobs += ours.ended(made) - begun
            total += backlog
    figures = reading.per_job(jobs)
    cpu = figures["postgres_us"] + figures["client_us"]
    return figures | {"cpu_us": cpu, "seed_us": seeding / (backlog * rounds) * 1e6}


@scenario(
    "backlog",
    "Cost of a job at backlogs of 10 thousand to 10 million",
    key="cpu_us",
    compare=[
        Compare("sidings, 1M", "sidings, 10k", 1.25, at_most=True),
        Compare("sidings, 10M", "sidings, 10k", 1.25, at_most=True),
    ],
    note="The backlog is committed under a running executor, by one transaction. What counts: of 10,000 jobs all, ten "
    "times over; of 1M 300,000, of 10M 3,000,000, after a vacuum and a checkpoint: for a minute, so that a round of "
    "autovacuum and audits are in it. 10M only with --long: the target is stated for it. The CPU that Postgres used "
    "until the commit, for each row, is `seed_us`.",
)
def backlog(size: Size) -> Sequence[Variant]:
    def of(jobs: int, name: str, rounds: int = 1) -> Variant:
        few = jobs if size.name != "tiny" else size.jobs(jobs)
        measured = few if few <= 100_000 else few * 3 // 10
        return Variant(
            f"sidings, {name}",
            lambda b: _into_empty(b, few, measured, rounds if size.name != "tiny" else 1),
            {"jobs": few, "rounds": rounds},
            repetitions=1 if jobs >= 10_000_000 else None,
        )

    variants = [of(10_000, "10k", rounds=10), of(100_000, "100k"), of(1_000_000, "1M")]
    return [*variants, of(10_000_000, "10M")] if size.long else variants


def _behind(size: Size) -> int:
    return STUCK if size.name != "tiny" else size.jobs(STUCK)


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
        await ours.seed(dsn, _behind(bench.size), groups=1, prefix="stuck")
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
    note="Healthy jobs in groups of 50, committed after those of the stuck group; their rate counts. The clock starts "
    "with the executor, so that it finds all of it just after its start. stuck: the head fails at once in this "
    "drain, and would run again after an hour; before a restart: it had failed under an earlier executor.",
)
def stuck(size: Size) -> Sequence[Variant]:
    jobs, settings = size.jobs(100_000), {"jobs": size.jobs(100_000), "behind": _behind(size)}
    return [
        Variant("sidings", lambda b: _healthy(b, jobs), {"jobs": jobs}),
        Variant("sidings, stuck", lambda b: _healthy(b, jobs, stuck=True), settings),
        Variant("sidings, stuck before a restart", lambda b: _healthy(b, jobs, stuck=True, restarted=True), settings),
    ]


@scenario(
    "failing",
    "1 % of the groups failing",
    compare=[Compare("sidings, failing", "sidings", 0.95)],
    note="Healthy jobs in groups of 50, and 1 % more groups whose heads fail, with 50 jobs behind each; the rate of "
    "the healthy ones counts.",
)
def failing(size: Size) -> Sequence[Variant]:
    jobs = size.jobs(100_000)
    bad = max(1, jobs // 50 // 100)
    return [
        Variant("sidings", lambda b: _healthy(b, jobs), {"jobs": jobs, "groups": jobs // 50}),
        Variant(
            "sidings, failing",
            lambda b: _healthy(b, jobs, failing=bad, behind=50),
            {"jobs": jobs, "groups": jobs // 50, "failing groups": bad},
        ),
    ]


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
    note="Nothing that is deleted can be cleaned up. With --long the drain takes more than 35 s, for which the target "
    "is stated: see the seconds of work.",
)
def left_open(size: Size) -> Sequence[Variant]:
    jobs, repetitions = (size.jobs(200_000), None) if not size.long else (4_000_000, 2)
    return [
        Variant("sidings", lambda b: _drain_with(b, jobs, open=False), {"jobs": jobs}, repetitions),
        Variant("sidings, left open", lambda b: _drain_with(b, jobs, open=True), {"jobs": jobs}, repetitions),
        *peers.variants("open", size),
    ]

"""From the commit of an enqueue to the start of its handler."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import asyncpg
from sidings.executor import ExecutorSettings
from sidings.jobs import Job, Registry

from .. import ours, peers
from ..ours import Payload
from ..producer import produce
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario
from ..worker import ROOT

__all__: list[str] = []


_HANGING = 2_000  # more jobs than there are workers by far, each in a group of its own


async def _latency(
    bench: Bench, rate: int, *, elsewhere: bool = False, notify: bool = False, beside_hanging: bool = False
) -> Figures:
    dsn = await ours.fresh(bench)
    seconds = peers.latency_seconds(bench.size)
    started: dict[int, float] = {}
    types = Registry()

    @types.job(name="noop")
    async def _noop(job: Job[Payload]) -> None:
        started[job.payload.number] = time.monotonic()

    @types.job(name="hanging", group="number")
    async def _hanging(job: Job[Payload]) -> None:
        await asyncio.Event().wait()

    if beside_hanging:
        await ours.seed(dsn, _HANGING, type="hanging", groups=_HANGING)
    settings = ExecutorSettings(notify=notify, shutdown_seconds=1)
    async with ours.executing(dsn, types, ours.origins(), settings) as made:
        await made.settled(30)
        await bench.meter.start()
        if elsewhere:
            committed = await _from_elsewhere(dsn, rate, seconds, notify=notify)
        else:
            connection = await asyncpg.connect(dsn)
            committed = await produce(connection, rate, seconds, made)
            await connection.close()
        await ours.until(lambda: len(started) >= len(committed))
        reading = await bench.meter.stop()
    waits = sorted(max(0.0, started[n] - at) for n, at in committed.items() if n >= rate * min(1.0, seconds / 2))
    figures = reading.per_job(len(committed))
    return {
        "p50_ms": waits[len(waits) // 2] * 1e3,
        "p99_ms": waits[min(len(waits) - 1, int(len(waits) * 0.99))] * 1e3,
        "client_us": figures["client_us"],
        "postgres_us": figures["postgres_us"],
    }


async def _from_elsewhere(dsn: str, rate: int, seconds: float, *, notify: bool) -> dict[int, float]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.producer", dsn, str(rate), str(seconds), *(["notify"] if notify else [])),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    output, _ = await process.communicate()
    return {int(number): at for number, at in json.loads(output).items()}


@scenario(
    "latency",
    "Commit to handler start",
    key="p50_ms",
    compare=[
        Compare("sidings, 50/s", target=2.0, at_most=True),
        Compare("sidings, 50/s", target=10.0, at_most=True, key="p99_ms"),
        Compare("sidings, other process, NOTIFY, 50/s", target=2.0, at_most=True),
        Compare("sidings, 50/s, beside a type that hangs", "sidings, 50/s"),
        Compare("sidings, 50/s", "river"),
        Compare("sidings, 50/s", "graphile"),
        Compare("sidings, 50/s", "pgboss"),
        Compare("sidings, 50/s", "pgqueuer"),
        Compare("sidings, 50/s", "chancy"),
        Compare("sidings, 50/s", "procrastinate"),
    ],
    note="50 or 1,000 jobs a second, one transaction each. In the same process: the executor is told of the commit. "
    "From another process: found by polling every 100 ms (the default), or announced by NOTIFY. The first second "
    "does not count. Beside a type that hangs: 2,000 jobs of another type, none of which ends. "
    "The CPU is that of the process of the handlers; in the same process, the producer's is part "
    "of it.",
)
def latency(size: Size) -> Sequence[Variant]:
    told, polled, notified = ({"wake": how} for how in ("after commit", "polling, 100 ms", "notify=True"))
    return [
        Variant("sidings, 50/s", lambda b: _latency(b, 50), told),
        Variant("sidings, 1,000/s", lambda b: _latency(b, 1_000), told),
        Variant("sidings, 50/s, beside a type that hangs", lambda b: _latency(b, 50, beside_hanging=True), told),
        Variant("sidings, other process, 50/s", lambda b: _latency(b, 50, elsewhere=True), polled),
        Variant("sidings, other process, 1,000/s", lambda b: _latency(b, 1_000, elsewhere=True), polled),
        Variant(
            "sidings, other process, NOTIFY, 50/s", lambda b: _latency(b, 50, elsewhere=True, notify=True), notified
        ),
        Variant(
            "sidings, other process, NOTIFY, 1,000/s",
            lambda b: _latency(b, 1_000, elsewhere=True, notify=True),
            notified,
        ),
        *peers.variants("latency", size),
    ]

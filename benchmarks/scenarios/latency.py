"""From the commit of an enqueue to the start of its handler."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import asyncpg
from sidings.jobs import Job, Registry

from .. import ours, peers
from ..ours import Payload
from ..producer import produce
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario
from ..worker import ROOT

__all__: list[str] = []


def _seconds(size: Size) -> float:
    return {"tiny": 0.6, "short": 5.0}.get(size.name, 12.0)


async def _latency(bench: Bench, rate: int, *, elsewhere: bool) -> Figures:
    dsn = await ours.fresh(bench)
    seconds = _seconds(bench.size)
    started: dict[int, float] = {}
    types = Registry()

    @types.job(name="noop")
    async def _noop(job: Job[Payload]) -> None:
        started[job.payload.number] = time.monotonic()

    async with ours.executing(dsn, types, ours.origins()) as made:
        await made.settled(30)
        await bench.meter.start()
        if elsewhere:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.producer", dsn, str(rate), str(seconds)),
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
            )
            output, _ = await process.communicate()
            committed = {int(k): v for k, v in json.loads(output).items()}
        else:
            connection = await asyncpg.connect(dsn)
            committed = await produce(connection, rate, seconds, made.wake)
            await connection.close()
        await ours.until(lambda: len(started) >= len(committed))
        reading = await bench.meter.stop()
    waits = sorted(max(0.0, started[n] - at) for n, at in committed.items() if n >= rate * min(1.0, seconds / 2))
    figures = reading.per_job(len(committed))
    del figures["wal_bytes"], figures["rate"]
    return {
        "p50_ms": waits[len(waits) // 2] * 1e3,
        "p99_ms": waits[min(len(waits) - 1, int(len(waits) * 0.99))] * 1e3,
    } | figures


@scenario(
    "latency",
    "Commit to handler start",
    key="p50_ms",
    compare=[
        Compare("sidings, 50/s", "graphile"),
        Compare("sidings, 50/s", "pgqueuer"),
        Compare("sidings, 50/s", "pgboss"),
        Compare("sidings, 50/s", "river"),
    ],
    note="50 or 1,000 jobs a second, one transaction each. In one process: the executor is woken after the commit. "
    "From another process: found by polling every 100 ms. Targets: p50 ≤ 2 ms, p99 ≤ 10 ms for own transactions.",
    peers=True,
)
def latency(size: Size) -> Sequence[Variant]:
    polled = {"wake": "polling, 100 ms"}
    return [
        Variant("sidings, 50/s", lambda b: _latency(b, 50, elsewhere=False), {"wake": "after commit"}),
        Variant("sidings, 1,000/s", lambda b: _latency(b, 1_000, elsewhere=False), {"wake": "after commit"}),
        Variant("sidings, other process, 50/s", lambda b: _latency(b, 50, elsewhere=True), polled),
        Variant(
            "sidings, other process, 1,000/s", lambda b: _latency(b, 1_000, elsewhere=True), {"wake": "polling, 100 ms"}
        ),
        *peers.variants("latency", size),
    ]

"""Enqueues at a steady rate; also as a process: `python -m benchmarks.producer DSN RATE SECONDS [notify]`."""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence

from sidings.executor import Executor, ExecutorSettings, PostgresSettings
from sidings.kafka.transactions import Transactions

from . import ours
from .ours import Payload

__all__ = ["produce"]


async def produce(dsn: str, rate: int, seconds: float, executor: Executor | None = None) -> dict[int, float]:
    """Enqueue jobs, each in a transaction of its own, opened as `service.transaction()` does; returns when the commit
    of each was answered, on the clock that all processes share. executor: of this process, which is told of them."""
    noop = ours.registry()["noop"]
    times: list[float] = []

    def committed(jobs: Mapping[str, Sequence[int]]) -> None:
        times.append(time.monotonic())
        if executor is not None:
            executor.committed(jobs)

    transactions = Transactions(PostgresSettings(dsn=dsn), committed)
    await transactions.start()
    begin = time.monotonic()
    for number in range(int(rate * seconds)):
        if (wait := begin + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        async with transactions.open() as tx:
            await noop.enqueue(tx, Payload(number=number, text=ours.TEXT), origin=f"bench/{number % 16}")
    await transactions.stop()
    return dict(enumerate(times))


async def _main(dsn: str, rate: int, seconds: float, *, notify: bool) -> None:
    if notify:  # an instance of the service that holds none of these origins
        async with ours.executing(dsn, ours.registry(), [], ExecutorSettings(notify=True)) as made:
            times = await produce(dsn, rate, seconds, made)
    else:
        times = await produce(dsn, rate, seconds)
    print(json.dumps(times))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), notify="notify" in sys.argv[4:]))

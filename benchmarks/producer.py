"""Enqueues at a steady rate; also as a process: `python -m benchmarks.producer DSN RATE SECONDS [notify]`."""

import asyncio
import json
import sys
import time

import asyncpg
from sidings.executor import Executor, ExecutorSettings
from sidings.jobs import Transaction

from . import ours
from .ours import Payload

__all__ = ["produce"]


async def produce(
    connection: asyncpg.Connection, rate: int, seconds: float, executor: Executor | None = None
) -> dict[int, float]:
    """Enqueue jobs, each in a transaction of its own; returns when the commit of each was answered, on the clock that
    all processes share. executor: of this process, which is told of them."""
    noop = ours.registry()["noop"]
    times: dict[int, float] = {}
    begin = time.monotonic()
    for number in range(int(rate * seconds)):
        if (wait := begin + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        tx = Transaction(connection)
        async with connection.transaction():
            await noop.enqueue(tx, Payload(number=number, text=ours.TEXT), origin=f"bench/{number % 16}")
        times[number] = time.monotonic()
        if executor is not None:
            executor.committed(tx.enqueued)
    return times


async def _main(dsn: str, rate: int, seconds: float, *, notify: bool) -> None:
    connection = await asyncpg.connect(dsn)
    if notify:  # an instance of the service that holds none of these origins
        async with ours.executing(dsn, ours.registry(), [], ExecutorSettings(notify=True)) as made:
            times = await produce(connection, rate, seconds, made)
    else:
        times = await produce(connection, rate, seconds)
    print(json.dumps(times))
    await connection.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), notify="notify" in sys.argv[4:]))

"""Enqueues at a steady rate; also as a process of its own: `python -m benchmarks.producer DSN RATE SECONDS`."""

import asyncio
import json
import sys
import time
from collections.abc import Callable

import asyncpg

from . import ours
from .ours import Payload

__all__ = ["produce"]


async def produce(
    connection: asyncpg.Connection, rate: int, seconds: float, wake: Callable[[], None] | None = None
) -> dict[int, float]:
    """Enqueue jobs, each in a transaction of its own; returns when each was committed, on the clock that all processes
    share."""
    noop = ours.registry()["noop"]
    committed: dict[int, float] = {}
    begin = time.monotonic()
    for number in range(int(rate * seconds)):
        if (wait := begin + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        async with connection.transaction():
            await noop.enqueue(connection, Payload(number=number, text=ours.TEXT), origin=f"bench/{number % 16}")
        committed[number] = time.monotonic()
        if wake is not None:
            wake()
    return committed


async def _main() -> None:
    connection = await asyncpg.connect(sys.argv[1])
    print(json.dumps(await produce(connection, int(sys.argv[2]), float(sys.argv[3]))))
    await connection.close()


if __name__ == "__main__":
    asyncio.run(_main())

"""Chancy. Settings and reasons: ../README.md"""

import asyncio
import logging
import sys
import time

import psycopg
import uvloop
from chancy import Chancy, Queue, Worker, job
from protocol import Clock, latencies, payload, ready, until

logging.disable(logging.CRITICAL)
handled = [0]
started: dict[int, float] = {}


@job()
async def noop(*, number: int, text: str) -> None:
    handled[0] += 1
    started[number] = time.perf_counter()


def jobs_of(first: int, count: int) -> list[object]:
    return [noop.job.with_kwargs(**payload(n)) for n in range(first, first + count)]


async def main() -> None:
    command, dsn, *rest = sys.argv[1:]
    count = int(rest[0]) if rest else 0
    single = command in ("enqueue", "bulk")
    async with Chancy(dsn, min_connection_pool_size=1, max_connection_pool_size=1 if single else 10) as chancy:
        if command == "install":
            await chancy.migrate()
            return
        await chancy.declare(
            Queue("default", concurrency=1000, executor="chancy.executors.asyncex.AsyncExecutor", polling_interval=1)
        )
        match command:
            case "seed":
                for start in range(0, count, 1_000):
                    async for _ in chancy.push_many(jobs_of(start, min(1_000, count - start))):
                        pass
            case "drain":
                async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                    await ready()
                    clock = Clock()
                    async with Worker(chancy, register_signal_handlers=False):
                        await until(lambda: handled[0] >= count)

                        async def done() -> bool:
                            cursor = await connection.execute(
                                "SELECT NOT EXISTS (SELECT FROM chancy_jobs WHERE state IN ('pending', 'running'))"
                            )
                            row = await cursor.fetchone()
                            return row is not None and row[0]

                        await until(done)
                        clock.done()
            case "enqueue":
                await ready()
                clock = Clock()
                for number in range(count):
                    await chancy.push(noop.job.with_kwargs(**payload(number)))
                clock.done()
            case "bulk":
                await ready()
                clock = Clock()
                for start in range(0, count, 1_000):
                    async for _ in chancy.push_many(jobs_of(start, 1_000)):
                        pass
                clock.done()
            case "latency":
                async with Worker(chancy, register_signal_handlers=False):
                    await asyncio.sleep(1)
                    await ready()
                    clock = Clock()
                    clock.done(
                        **await latencies(count, lambda n: chancy.push(noop.job.with_kwargs(**payload(n))), started)
                    )
            case _:
                raise SystemExit(f"unknown command {command}")


uvloop.run(main())

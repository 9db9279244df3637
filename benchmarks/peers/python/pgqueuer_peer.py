"""PgQueuer. Settings and reasons: ../README.md"""

import asyncio
import json
import sys
import time
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, Job, PgQueuer, Queries
from protocol import TEXT, Clock, latencies, payload, ready, until


async def main() -> None:
    command, dsn, *rest = sys.argv[1:]
    connection = await asyncpg.connect(dsn)
    queries = Queries(AsyncpgDriver(connection))
    match command:
        case "install":
            await queries.install()
        case "seed":
            jobs = int(rest[0])
            for start in range(0, jobs, 1_000):
                count = min(1_000, jobs - start)
                await queries.enqueue(
                    ["noop"] * count,
                    [json.dumps(payload(n)).encode() for n in range(start, start + count)],
                    [0] * count,
                )
        case "drain":
            await drain(dsn, connection, int(rest[0]))
        case "enqueue":
            await ready()
            clock = Clock()
            for number in range(int(rest[0])):
                await queries.enqueue("noop", json.dumps(payload(number)).encode())
            clock.done()
        case "bulk":
            await ready()
            clock = Clock()
            for start in range(0, int(rest[0]), 1_000):
                await queries.enqueue(
                    ["noop"] * 1_000,
                    [json.dumps(payload(n)).encode() for n in range(start, start + 1_000)],
                    [0] * 1_000,
                )
            clock.done()
        case "latency":
            await latency(dsn, queries, int(rest[0]))
        case _:
            raise SystemExit(f"unknown command {command}")
    await connection.close()


async def worker(dsn: str, handled: "dict[int, float] | list[int]") -> PgQueuer:
    queue = PgQueuer.from_asyncpg_connection(await asyncpg.connect(dsn))

    @queue.entrypoint("noop")
    async def noop(job: Job) -> None:
        assert job.payload is not None
        number = json.loads(job.payload)["number"]
        if isinstance(handled, dict):
            handled[number] = time.perf_counter()
        else:
            handled[0] += 1

    return queue


async def drain(dsn: str, connection: "asyncpg.Connection[asyncpg.Record]", jobs: int) -> None:
    handled = [0]
    queues = [await worker(dsn, handled) for _ in range(2)]
    await ready()
    clock = Clock()
    tasks = [asyncio.create_task(q.run(batch_size=200, dequeue_timeout=timedelta(seconds=1))) for q in queues]
    await until(lambda: handled[0] >= jobs)

    async def empty() -> bool:
        return not await connection.fetchval("SELECT EXISTS (SELECT FROM pgqueuer)")

    await until(empty)
    clock.done()
    for queue in queues:
        queue.shutdown.set()
    await asyncio.wait(tasks, timeout=5)


async def latency(dsn: str, queries: Queries, rate: int) -> None:
    started: dict[int, float] = {}
    queue = await worker(dsn, started)
    task = asyncio.create_task(queue.run(batch_size=10))
    await asyncio.sleep(0.5)
    await ready()
    clock = Clock()

    async def send(number: int) -> None:
        await queries.enqueue("noop", json.dumps({"number": number, "text": TEXT}).encode())

    found = await latencies(rate, send, started)
    clock.done(**found)
    queue.shutdown.set()
    await asyncio.wait([task], timeout=5)


uvloop.run(main())

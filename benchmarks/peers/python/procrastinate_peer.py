"""Procrastinate. Settings and reasons: ../README.md"""

import asyncio
import logging
import sys
import time

import psycopg
import uvloop
from procrastinate import App, PsycopgConnector
from protocol import Clock, latencies, payload, ready, until

logging.disable(logging.CRITICAL)


async def main() -> None:
    command, dsn, *rest = sys.argv[1:]
    count = int(rest[0]) if rest else 0
    single = command in ("enqueue", "bulk")
    app = App(connector=PsycopgConnector(conninfo=dsn, min_size=1, max_size=1 if single else 5))
    handled = [0]
    started: dict[int, float] = {}

    @app.task(name="noop")
    async def noop(number: int, text: str) -> None:
        handled[0] += 1
        started[number] = time.perf_counter()

    async with app.open_async():
        match command:
            case "install":
                await app.schema_manager.apply_schema_async()
            case "seed":
                groups = int(rest[1])
                for start in range(0, count, 1_000):
                    if not groups:
                        await noop.batch_defer_async(*(payload(n) for n in range(start, min(start + 1_000, count))))
                        continue
                    jobs = range(start, min(start + 1_000, count))
                    await asyncio.gather(
                        *(noop.configure(lock=f"g{n % groups}").defer_async(**payload(n)) for n in jobs)
                    )
            case "drain" | "groups" | "hot":
                await drain(app, dsn, handled, count, concurrency=1 if command == "hot" else 10)
            case "enqueue":
                await ready()
                clock = Clock()
                for number in range(count):
                    await noop.defer_async(**payload(number))
                clock.done()
            case "bulk":
                await ready()
                clock = Clock()
                for start in range(0, count, 1_000):
                    await noop.batch_defer_async(*(payload(n) for n in range(start, start + 1_000)))
                clock.done()
            case "latency":
                worker = asyncio.create_task(app.run_worker_async(concurrency=10, install_signal_handlers=False))
                await asyncio.sleep(0.5)
                await ready()
                clock = Clock()
                clock.done(**await latencies(count, lambda n: noop.defer_async(**payload(n)), started))
                worker.cancel()
                await asyncio.wait([worker])
            case _:
                raise SystemExit(f"unknown command {command}")


async def drain(app: App, dsn: str, handled: list[int], jobs: int, *, concurrency: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await ready()
        clock = Clock()
        worker = asyncio.create_task(
            app.run_worker_async(concurrency=concurrency, delete_jobs="always", install_signal_handlers=False)
        )
        await until(lambda: handled[0] >= jobs)

        async def empty() -> bool:
            cursor = await connection.execute("SELECT NOT EXISTS (SELECT FROM procrastinate_jobs)")
            row = await cursor.fetchone()
            return row is not None and row[0]

        await until(empty)
        clock.done()
        worker.cancel()
        await asyncio.wait([worker])


uvloop.run(main())

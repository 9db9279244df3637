"""The physical limit: bare SQL over asyncpg that reads, deletes and records the same rows in the same batches as the
executor does, on the same tables, with nothing else in between. No handler, no order, no fence, no retries.

It reads pages of 4,000 rows on one connection while it deletes and records batches of 500 on another, as the executor
does; the batches of the executor itself stand beside its rate in the results.
"""

import asyncio

import asyncpg

from .ours import TEXT
from .results import Figures
from .suite import Bench

__all__ = ["drain", "enqueue_bulk", "enqueue_single"]

PAGE, BATCH = 4_000, 500

_READ = """
SELECT j.id, j.type, j."group", j.position, j.attempt, j.priority, date_part('epoch', j.run_at),
       date_part('epoch', j.enqueued_at), j.headers, j.payload
FROM sidings.job j WHERE j.origin = $1 AND j.position > $2 ORDER BY j.position LIMIT $3
"""
_END = """
WITH f AS (
    DELETE FROM sidings.job j USING unnest($1::bigint[]) f (id) WHERE j.id = f.id
    RETURNING j.id, j.enqueued_at, j.run_at, j.attempt, j.priority, j.type, j.origin, j."group"
), history AS (
    INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, started_at, finished_at, executor, attempt,
                                     outcome, priority, type, origin, "group")
    SELECT f.id, 1, f.enqueued_at, f.run_at, clock_timestamp(), clock_timestamp(), $2, f.attempt, 'succeeded',
           f.priority, f.type, f.origin, f."group"
    FROM f WHERE $3
)
SELECT count(*) FROM f
"""
_OPTIONS = {"jit": "off", "enable_seqscan": "off", "plan_cache_mode": "force_generic_plan"}


async def drain(bench: Bench, dsn: str, jobs: int, *, origins: list[str], history: bool = True) -> Figures:
    """Delete and record all rows of the table; as many as `jobs`."""
    await bench.server.settle(dsn)
    await bench.meter.start()
    reader = await asyncpg.connect(dsn, server_settings=_OPTIONS)
    writer = await asyncpg.connect(dsn, server_settings=_OPTIONS)
    pages: asyncio.Queue[list[int] | None] = asyncio.Queue(maxsize=2)

    async def read() -> None:
        for origin in origins:
            after = 0
            while rows := await reader.fetch(_READ, origin, after, PAGE):
                await pages.put([row[0] for row in rows])
                after = rows[-1][3]
                if len(rows) < PAGE:
                    break
        await pages.put(None)

    async def end() -> int:
        done, waiting, me = 0, list[int](), "00000000-0000-0000-0000-000000000001"
        while (page := await pages.get()) is not None:
            waiting += page
            while len(waiting) >= BATCH:
                batch, waiting = waiting[:BATCH], waiting[BATCH:]
                done += await writer.fetchval(_END, batch, me, history)
        if waiting:
            done += await writer.fetchval(_END, waiting, me, history)
        return done

    _, done = await asyncio.gather(read(), end())
    reading = await bench.meter.stop()
    await reader.close()
    await writer.close()
    assert done == jobs, (done, jobs)
    return reading.per_job(jobs) | {"batch": float(BATCH)}


_ONE = 'INSERT INTO sidings.job (type, origin, "group", payload) VALUES ($1, $2, $3, $4)'
_MANY = """INSERT INTO sidings.job (type, origin, "group", payload)
SELECT $1, $2, u."group", u.payload FROM unnest($3::text[], $4::json[]) u ("group", payload)"""
_PLAIN_TABLE = """CREATE TABLE plain (id bigserial PRIMARY KEY, type text NOT NULL, "group" text, payload json,
run_at timestamptz NOT NULL DEFAULT now()); CREATE INDEX plain_run_at ON plain (run_at, id)"""
_PLAIN_ONE = 'INSERT INTO plain (type, "group", payload) VALUES ($1, $2, $3)'
_PLAIN_MANY = """INSERT INTO plain (type, "group", payload)
SELECT $1, u."group", u.payload FROM unnest($2::text[], $3::json[]) u ("group", payload)"""


async def enqueue_single(bench: Bench, dsn: str, jobs: int, *, plain: bool, begin: bool) -> Figures:
    """One INSERT after the other on one connection. plain: into a table with two indexes and nothing of ours; begin: in
    an explicit transaction each, as a caller with work of its own has it, else in autocommit."""
    connection = await asyncpg.connect(dsn)
    if plain:
        await connection.execute(_PLAIN_TABLE)
    await bench.meter.start()
    for number in range(jobs):
        payload, group = _payload(number), f"g{number % 1000}"
        arguments = (_PLAIN_ONE, "noop", group, payload) if plain else (_ONE, "noop", "bench/0", group, payload)
        if begin:
            async with connection.transaction():
                await connection.execute(*arguments)
        else:
            await connection.execute(*arguments)
    reading = await bench.meter.stop()
    await connection.close()
    return reading.per_job(jobs)


async def enqueue_bulk(bench: Bench, dsn: str, jobs: int, *, plain: bool, each: int = 1_000) -> Figures:
    """`each` rows with one INSERT … SELECT FROM unnest() a transaction."""
    connection = await asyncpg.connect(dsn)
    if plain:
        await connection.execute(_PLAIN_TABLE)
    await bench.meter.start()
    for start in range(0, jobs, each):
        groups = [f"g{n % 1000}" for n in range(start, start + each)]
        payloads = [_payload(n) for n in range(start, start + each)]
        if plain:
            await connection.execute(_PLAIN_MANY, "noop", groups, payloads)
        else:
            await connection.execute(_MANY, "noop", "bench/0", groups, payloads)
    reading = await bench.meter.stop()
    await connection.close()
    return reading.per_job(-(-jobs // each) * each)


def _payload(number: int) -> str:
    return f'{{"number":{number},"text":"{TEXT}"}}'

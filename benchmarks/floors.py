"""The physical limit: bare SQL over asyncpg that reads, deletes and records the same rows in the same batches as the
executor does, on the same tables, with nothing else in between. No handler, no order, no fence, no retries.

It reads pages of 4,000 rows on one connection while it deletes and records batches of 500 on another, as the executor
does; the batches of the executor itself stand beside its rate in the results.

`drain_handled` is the same with what no executor in Python whose handlers get a `Job` can leave out for each row, in
its one thread. One batch is recorded at a time, as in `drain`, or two are in flight, as the executor has them.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence

import asyncpg
from sidings.jobs import Fence, Job, JobId

from .ours import TEXT, Payload
from .results import Figures
from .suite import Bench

__all__ = ["EACH", "drain", "drain_handled", "enqueue_bulk", "enqueue_single"]

PAGE, BATCH = 4_000, 500
EACH = 1_000  # rows that one call enqueues

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
        async for _, rows in _pages(reader, _READ, origins):
            await pages.put([row[0] for row in rows])
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


async def _pages(
    reader: asyncpg.Connection, sql: str, origins: list[str]
) -> AsyncIterator[tuple[str, list[asyncpg.Record]]]:
    for origin in origins:
        after = 0
        while rows := await reader.fetch(sql, origin, after, PAGE):
            yield origin, rows
            after = rows[-1][3]
            if len(rows) < PAGE:
                break


# With the columns of `Job`; and as `cycle.sql` records: an attempt that must be the row's, times as ages.
_READ_WHOLE = """
SELECT j.id, j.type, j."group", j.position, j.attempt, j.failures, j.priority, date_part('epoch', j.enqueued_at),
       j.headers, j.payload
FROM sidings.job j WHERE j.origin = $1 AND j.position > $2 ORDER BY j.position LIMIT $3
"""
_RECORD = """
WITH f AS (
    DELETE FROM sidings.job j
    USING (SELECT date_part('epoch', statement_timestamp()) AS sent) me,
          unnest($1::text::bigint[], $2::text::int[], $3::float8[], $4::float8[]) f (id, attempt, started, finished)
    WHERE j.id = f.id AND j.attempt = coalesce(f.attempt, 1)
    RETURNING j.id, j.enqueued_at, j.run_at, to_timestamp(me.sent - f.started) AS started_at,
              to_timestamp(me.sent - f.finished) AS finished_at, j.attempt, j.priority, j.type, j.origin, j."group",
              j.headers
), history AS (
    INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, started_at, finished_at, executor, attempt,
                                     outcome, priority, type, origin, "group", correlation_id)
    SELECT f.id, 1, f.enqueued_at, f.run_at, f.started_at, f.finished_at, $5, f.attempt, 'succeeded', f.priority,
           f.type, f.origin, f."group", f.headers ->> 'correlation_id'
    FROM f
)
SELECT count(*) FROM f
"""


async def _noop(job: Job[Payload]) -> None:
    pass


_Handled = tuple[list[int], list[int], list[float]]  # ids, attempts, and times: the first start, then each end


async def drain_handled(bench: Bench, dsn: str, jobs: int, *, origins: list[str], in_flight: int = 1) -> Figures:
    """`drain`, where each row's payload becomes its pydantic model, its `Job` goes through an async handler, and its
    times are recorded. As little as can be done for that: no naming of what runs, no deadline, no retry, no metrics.

    in_flight: batches that are being recorded at once, on a connection each."""
    await bench.server.settle(dsn)
    await bench.meter.start()
    reader = await asyncpg.connect(dsn, server_settings=_OPTIONS)
    writers = [await asyncpg.connect(dsn, server_settings=_OPTIONS) for _ in range(in_flight)]
    pages: asyncio.Queue[tuple[Fence, list[asyncpg.Record]] | None] = asyncio.Queue(maxsize=2)
    batches: asyncio.Queue[_Handled | None] = asyncio.Queue(maxsize=1)  # handled while the one before is recorded
    types = {"noop": (_noop, Payload.__pydantic_validator__.validate_json)}
    done: list[int] = []

    async def read() -> None:
        async for origin, rows in _pages(reader, _READ_WHOLE, origins):
            await pages.put((Fence(origin, 1), rows))
        await pages.put(None)

    async def handle() -> None:
        ids, attempts, times = list[int](), list[int](), [time.monotonic()]
        while (page := await pages.get()) is not None:
            fence, rows = page
            origin = fence.origin
            for id, type, group, _, attempt, failures, priority, enqueued, headers, payload in rows:
                handler, parse = types[type]
                await handler(
                    Job(parse(payload), JobId(id), type, origin, group, attempt, failures, priority, enqueued,
                        json.loads(headers) if headers else {}, fence)
                )  # fmt: skip
                ids.append(id)
                attempts.append(attempt)
                times.append(time.monotonic())
                if len(ids) == BATCH:
                    await batches.put((ids, attempts, times))
                    ids, attempts, times = [], [], [time.monotonic()]
        if ids:
            await batches.put((ids, attempts, times))
        for _ in writers:
            await batches.put(None)

    async def record(writer: asyncpg.Connection) -> None:
        me = "00000000-0000-0000-0000-000000000001"
        while (batch := await batches.get()) is not None:
            ids, attempts, times = batch
            sent = time.monotonic()
            ages = [sent - at for at in times]
            known = "{}" if attempts.count(1) == len(attempts) else _array(attempts)
            done.append(await writer.fetchval(_RECORD, _array(ids), known, ages[:-1], ages[1:], me))

    await asyncio.gather(read(), handle(), *map(record, writers))
    reading = await bench.meter.stop()
    for connection in (reader, *writers):
        await connection.close()
    assert sum(done) == jobs, (sum(done), jobs)
    return reading.per_job(jobs) | {"batch": float(BATCH)}


def _array(numbers: Sequence[int]) -> str:
    """As Postgres writes an array, which asyncpg encodes in less time."""
    return "{" + str(numbers)[1:-1] + "}"


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


async def enqueue_bulk(bench: Bench, dsn: str, jobs: int, *, plain: bool) -> Figures:
    """`EACH` rows with one INSERT … SELECT FROM unnest() a transaction."""
    connection = await asyncpg.connect(dsn)
    if plain:
        await connection.execute(_PLAIN_TABLE)
    await bench.meter.start()
    for start in range(0, jobs, EACH):
        groups = [f"g{n % 1000}" for n in range(start, start + EACH)]
        payloads = [_payload(n) for n in range(start, start + EACH)]
        if plain:
            await connection.execute(_PLAIN_MANY, "noop", groups, payloads)
        else:
            await connection.execute(_MANY, "noop", "bench/0", groups, payloads)
    reading = await bench.meter.stop()
    await connection.close()
    return reading.per_job(-(-jobs // EACH) * EACH)


def _payload(number: int) -> str:
    return f'{{"number":{number},"text":"{TEXT}"}}'

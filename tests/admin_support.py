"""What the tests of administration share: jobs in every state, and executors made by hand."""

from typing import Any
from uuid import UUID, uuid4

import asyncpg
from sidings.schema import load_sql

from .support import ORIGIN, SECONDS, connected, value

GROUP = "g"
STATES: dict[str, dict[str, str]] = {
    "waiting": {},
    "backing off": {"run_at": "now() + interval '1 hour'", "attempt": "3", "failures": "2", "error": "'ValueError: x'"},
    "blocked": {"run_at": "'infinity'", "attempt": "6", "failures": "5", "error": "'ValueError: x'"},
    "delayed": {"run_at": "now() + interval '1 hour'", "position": "NULL"},
    "held": {
        "held": "'poison'",
        "position": "NULL",
        "losses": "6",
        "failures": "2",
        "attempt": "8",
        "first_started_at": "now()",
    },
}


async def patient(dsn: str) -> None:
    """Actions, and what else waits for a lock a few seconds, do so as long as tests wait for anything: one whose test
    stood still for two seconds found that it had been given up."""
    async with connected(dsn) as connection:
        names = await connection.fetch(
            """SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'sidings'::regnamespace
               AND proconfig && '{lock_timeout=2s, lock_timeout=5s}'"""
        )
        for (name,) in names:
            await connection.execute(f"ALTER FUNCTION {name} SET lock_timeout = '{SECONDS}s'")


async def a_job(
    dsn: str, state: str = "waiting", *, origin: str = ORIGIN, group: str | None = GROUP, **more: str
) -> int:
    """A stored job in that state. more: SQL of further columns."""
    return (await some_jobs(dsn, 1, state, origin=origin, group=group, **more))[0]


async def some_jobs(
    dsn: str, count: int, state: str = "waiting", *, origin: str = ORIGIN, group: str | None = GROUP, **more: str
) -> list[int]:
    """So many of them, in order."""
    columns = {"type": "'ride'", "payload": """'{"transport": "a"}'""", **STATES[state], **more}
    names, values = ", ".join(columns), ", ".join(columns.values())
    query = f"""INSERT INTO sidings.job (origin, "group", {names})
                SELECT $1, $2, {values} FROM generate_series(1, $3) RETURNING id"""
    async with connected(dsn) as connection:
        return [row["id"] for row in await connection.fetch(query, origin, group, count)]


async def a_job_that_left_no_end(dsn: str) -> int:
    """One of a type with history=False that was lost, and ran well behind that: no row says how it ended."""
    id = await a_job(dsn)
    async with connected(dsn) as connection:
        await connection.execute(
            """WITH gone AS (DELETE FROM sidings.job WHERE id = $1 RETURNING *)
               INSERT INTO sidings.job_history
                   (job_id, enqueued_at, finished_at, attempt, outcome, priority, type, origin)
               SELECT id, enqueued_at, now(), attempt, 'lost', priority, type, origin FROM gone""",
            id,
        )
    return id


async def the_job(dsn: str, id: int) -> dict[str, Any] | None:
    """Its row, whole."""
    async with connected(dsn) as connection:
        row = await connection.fetchrow("SELECT * FROM sidings.job WHERE id = $1", id)
    return None if row is None else dict(row)


async def a_holder(dsn: str, *origins: str, lease: str = "1 hour", running: list[int] | None = None) -> UUID:
    """The row of an executor that holds `origins` for so long, and names these jobs. A negative lease has run out."""
    me = uuid4()
    async with connected(dsn) as connection:
        await connection.execute(load_sql("sidings.executor", "register"), me, "host-of-the-holder", 4711)
        await connection.execute("UPDATE sidings.executor SET running = $2 WHERE id = $1", me, running or [])
        for origin in origins:
            await connection.execute(
                "INSERT INTO sidings.origin (origin, owner, epoch, lease_until) "
                f"VALUES ($1, $2, 7, clock_timestamp() + interval '{lease}')",
                origin,
                me,
            )
    return me


async def fence(dsn: str, executor: UUID) -> int:
    return await value(dsn, "SELECT fence FROM sidings.executor WHERE id = $1", executor)


async def slow_updates(connection: asyncpg.Connection, seconds: float = 0.3) -> None:
    """From now on each update of a job takes so long."""
    await connection.execute(
        f"""CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql
           AS $$ BEGIN PERFORM pg_sleep({seconds}); RETURN NEW; END $$;
           CREATE TRIGGER slow BEFORE UPDATE ON sidings.job FOR EACH ROW EXECUTE FUNCTION slow()"""
    )

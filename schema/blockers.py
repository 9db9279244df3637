"""Who stands in the way of a session that waits for locks, in words."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg

from ..waiting import set_within
from .refusals import NOT_CONNECTED
from .sql import load_sql

__all__ = ["Connect", "watch_blockers"]

Connect = Callable[[], Awaitable[asyncpg.Connection]]

_LOOK_SECONDS = 0.5
_LEAVE_SECONDS = 1.0


@asynccontextmanager
async def watch_blockers(connect: Connect, pid: int) -> AsyncGenerator[list[str]]:
    """Inside of the block the list says who was last seen to block the session `pid`; empty: nobody was.

    A session that waits cannot look by itself, and nothing tells afterwards. The second connection that this takes is
    opened only when the block takes longer than a moment.
    """
    seen: list[str] = []
    ended = asyncio.Event()
    watching = asyncio.create_task(_watch(connect, pid, seen, ended), name="sidings blockers")
    try:
        yield seen
    finally:
        # A connection that is being made is not cancelled at once: asyncpg can leave a future that nobody fetches, of
        # which asyncio tells the log as of an error.
        ended.set()
        await asyncio.wait([watching], timeout=_LEAVE_SECONDS)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(connect: Connect, pid: int, seen: list[str], ended: asyncio.Event) -> None:
    if await set_within(ended, _LOOK_SECONDS):
        return
    query = load_sql(__package__, "blockers")
    try:
        connection = await connect()
        try:
            while not ended.is_set():
                await connection.execute("BEGIN")  # PgBouncer: parse and execute have to share a server
                rows = await connection.fetch(query, pid)
                await connection.execute("COMMIT")
                if rows:
                    seen[:] = [_in_words(row) for row in rows]
                await set_within(ended, _LOOK_SECONDS)
        finally:
            connection.terminate()
    except NOT_CONNECTED as error:
        seen.append(f"(no more can be found out: {type(error).__name__}: {error})")


def _in_words(row: asyncpg.Record) -> str:
    if row["pid"] == 0:
        return "a prepared transaction (SELECT * FROM pg_prepared_xacts; end it with ROLLBACK PREPARED)"
    about = [row["role"], row["application"], row["state"], row["open_for"] and f"open for {row['open_for']}"]
    query = " ".join((row["query"] or "").split())
    text = f"pid {row['pid']} ({', '.join(filter(None, about))}): {query}".removesuffix(": ")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)  # it is others', and goes to a terminal

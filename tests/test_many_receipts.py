"""Many wait for acknowledgements at once, as the requests of an HTTP API do, over the one connection that there is."""

import asyncio
from dataclasses import replace

import asyncpg
import pytest

from .faulty_proxy import Moment, proxied
from .outbox_support import publishing
from .support import SECONDS, eventually


async def test_those_who_wait_are_asked_for_together_and_who_gives_up_takes_no_answer_along(database: str) -> None:
    """Each was asked for by a statement of its own, one after the other: 10,000 were told ten seconds late and more.
    Who gave up while its own was under way took the connection along, which the next one had to open anew."""
    async with proxied(database) as proxy, publishing(proxy.dsn) as (outbox, connection):
        async with connection.transaction():
            receipts = [await outbox.publish(connection, "etas", key="k", value=b"x") for _ in range(200)]
        same = [*receipts, *receipts[:50]]  # repeats of a request wait for the same event
        asked = proxy.arm("receipts", Moment.SLOW, 10_000)
        waiting = [asyncio.create_task(outbox.published(receipt)) for receipt in same]
        await eventually(lambda: asked.hits > 0)
        backends = "SELECT array_agg(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE $1"
        before = await connection.fetchval(backends, "%pg_xact_status%subxid%")
        for waiter in waiting[::2]:  # one of them is the first, whose question is under way
            waiter.cancel()
        await connection.execute("DELETE FROM sidings.outbox")  # as a relay that has sent them
        hits = asked.hits
        async with asyncio.timeout(SECONDS):
            ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert ends[1::2] == [None] * 125
        assert all(isinstance(end, asyncio.CancelledError) for end in ends[::2])
        assert asked.hits - hits <= 5
        assert await connection.fetchval(backends, "%pg_xact_status%subxid%") == before


async def test_a_receipt_that_postgres_makes_nothing_of_is_no_failure_of_the_others(database: str) -> None:
    async with publishing(database) as (outbox, connection):
        async with connection.transaction():
            receipts = [await outbox.publish(connection, "etas", key="k", value=b"x") for _ in range(5)]
        receipts[3] = replace(receipts[3], subxid=receipts[3].subxid + 2**40)  # of another server
        waiting = [asyncio.create_task(outbox.published(receipt)) for receipt in receipts]
        with pytest.raises(asyncpg.PostgresError, match="in the future"):
            await waiting.pop(3)
        assert not any(waiter.done() for waiter in waiting)
        await connection.execute("DELETE FROM sidings.outbox")
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*waiting)

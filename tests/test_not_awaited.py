"""Calls on a transaction without their ``await``: Python only warns, and what they should store would be missing."""

import asyncio
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import create_autospec

import pytest
from sidings import Job, Message, Retry, Transaction
from sidings.executor import PostgresSettings
from sidings.jobs import JobType, Registry
from sidings.kafka import Outbox, Transactions
from tenacity import stop_after_attempt, wait_fixed

from .consumer_support import TWICE_AND_PARK, Number, a_service, offset_reaches, produce
from .support import ORIGIN, Ride, drained, enqueue, eventually, fetch, history, running

registry = Registry()


@registry.job()
async def ride(job: Job[Ride]) -> None: ...


Call = Callable[[Transaction, Outbox], Any]
CALLS: dict[str, Call] = {
    "ride.enqueue": lambda tx, _: ride.enqueue(tx, Ride(), origin=ORIGIN),
    "ride.enqueue_many": lambda tx, _: ride.enqueue_many(tx, [Ride()], origin=ORIGIN),
    "outbox.publish": lambda tx, outbox: outbox.publish(tx, "etas", value=b"1"),
    "outbox.publish_many": lambda tx, outbox: outbox.publish_many(tx, "etas", [(None, b"1")]),
    "tx.execute": lambda tx, _: tx.execute("SELECT 1"),
    "tx.executemany": lambda tx, _: tx.executemany("SELECT $1::int", [(1,)]),
    "tx.fetch": lambda tx, _: tx.fetch("SELECT 1"),
    "tx.fetchrow": lambda tx, _: tx.fetchrow("SELECT 1"),
    "tx.fetchval": lambda tx, _: tx.fetchval("SELECT 1"),
}


@pytest.fixture
async def pool(database: str):
    pool = Transactions(PostgresSettings(dsn=database, pool_size=1), lambda _: None)
    await pool.start()
    yield pool
    await pool.stop()


@pytest.mark.parametrize("name", CALLS)
async def test_nothing_is_committed_where_a_call_was_not_awaited(database: str, pool: Transactions, name: str) -> None:
    outbox = Outbox(pool.settings)

    async def work() -> None:
        async with pool.open() as tx:
            await ride.enqueue(tx, Ride(), origin=ORIGIN)
            CALLS[name](tx, outbox)

    with pytest.raises(RuntimeError, match=rf"{name}\(\) was called and not awaited"):
        await work()
    assert await fetch(database, "SELECT id FROM sidings.job") == []
    async with pool.open() as tx:  # the connection serves others
        await CALLS[name](tx, outbox)


async def test_nor_where_one_is_still_under_way(database: str, pool: Transactions) -> None:
    left = []

    async def work() -> None:
        async with pool.open() as tx:
            await ride.enqueue(tx, Ride(), origin=ORIGIN)
            left.append(asyncio.create_task(tx.fetchval("SELECT pg_sleep(30)")))
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match=r"tx.fetchval\(\) is still under way"):
        await work()
    await asyncio.gather(*left, return_exceptions=True)
    assert await fetch(database, "SELECT id FROM sidings.job") == []


async def test_calls_that_have_ended_somehow_are_no_hindrance_and_are_forgotten(
    database: str, pool: Transactions
) -> None:
    async with pool.open() as tx:
        for _ in range(100):
            await tx.execute("SELECT 1")
        asyncio.create_task(tx.execute("SELECT 1")).cancel()  # before it has begun
        await asyncio.sleep(0)
        await asyncio.gather(*(ride.enqueue(tx, Ride(), origin=ORIGIN) for _ in range(1)))
        assert len(tx._calls) <= 32
    assert len(await fetch(database, "SELECT id FROM sidings.job")) == 1


@pytest.mark.parametrize("method", [JobType.enqueue, JobType.enqueue_many, Outbox.publish, Transaction.execute])
async def test_mocks_of_them_are_to_be_awaited_as_well(method: Callable[..., Any]) -> None:
    await create_autospec(method)("a", "b", "c")


async def test_a_job_whose_handler_forgets_it_has_failed(database: str) -> None:
    mine = Registry()

    @mine.job(transactional=True, retry=Retry(wait=wait_fixed(0.01), stop=stop_after_attempt(2)))
    async def forgetful(job: Job[Ride]) -> None:
        done = ride_of_mine.enqueue(job.tx, Ride())
        if job.attempt == 2:
            await done

    @mine.job()
    async def ride_of_mine(job: Job[Ride]) -> None: ...

    async with running(database, mine):
        await enqueue(database, forgetful, [Ride()])
        await drained(database)
    [first, second, third] = await history(database)
    assert "ride_of_mine.enqueue() was called and not awaited" in first["error_message"]
    assert (second["type"], second["outcome"]) == ("forgetful", "succeeded")
    assert third["type"] == "ride_of_mine"


@pytest.mark.parametrize(("begun", "said"), [(False, "was called and not awaited"), (True, "is still under way")])
async def test_a_message_whose_handler_forgets_it_is_not_passed_over(
    effects, topic, sidings_kafka, begun, said
) -> None:
    name = await topic()
    service = a_service(effects, sidings_kafka)
    left = []

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        call = tx.execute("SELECT pg_sleep(20)")
        if begun:
            left.append(asyncio.create_task(call))
            await asyncio.sleep(0)

    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(offset_reaches(effects, name, 1))
        [parked] = await fetch(effects, "SELECT payload FROM sidings.job")
    assert f"tx.execute() {said}" in json.loads(parked["payload"])["error"]
    await asyncio.gather(*left, return_exceptions=True)

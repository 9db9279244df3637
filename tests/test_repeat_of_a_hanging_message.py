"""A message that hangs, and was sent twice, holds up the partitions of the two, and no other."""

import asyncio
import logging

import pytest
from sidings import Message, Transaction

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    as_json,
    limit_statements,
    numbers,
    offset_reaches,
    producing,
    record,
    sample,
)
from .support import eventually
from .test_dedup import duplicates, send


@pytest.mark.parametrize("limit", [None, 0.4])
async def test_a_repeat_of_a_message_that_hangs_stops_no_other_partition(effects, topic, sidings_kafka, caplog, limit):
    """Its id is taken until the transaction ends. The main line waited for that, with all that it had of the topic,
    gave the statement up, took Postgres for away, read all of it again, and waited. limit: a `statement_timeout` that
    is over before the wait for the id."""
    name, hangs, go_on = await topic(partitions=3), asyncio.Event(), asyncio.Event()
    service = a_service(effects, sidings_kafka)
    tried: list[int] = []
    if limit is not None:
        await limit_statements(effects, limit)

    @service.consumer(name, dedup=True, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.value.n)
        if message.value.n == 1:
            if tried.count(1) == 1:
                raise ValueError("it fails in the main line")
            hangs.set()
            await go_on.wait()
        assert await tx.fetchval("SHOW lock_timeout") == "30s", "what the handler itself waits for is its own affair"
        await record(message, tx)

    async with service:
        await send(sidings_kafka, name, [(1, "a")], key=None)
        await asyncio.wait_for(hangs.wait(), 20)
        async with producing(sidings_kafka) as producer:
            sent = [
                await producer.send(name, as_json(n), partition=partition, headers=[("sidings-id", id)])
                for n, id, partition in [(1, b"a", 1), (2, b"b", 2), (3, b"c", 1)]
            ]
            await asyncio.gather(*sent)
        await eventually(offset_reaches(effects, name, 1, 2), "the third partition waits", 15)
        assert await numbers(effects) == [2]
        assert sample(service, "sidings_consumer_errors_total", server="postgres") == 0
        go_on.set()
        await eventually(offset_reaches(effects, name, 1, 0))
        await eventually(offset_reaches(effects, name, 2, 1))
        assert duplicates(service) == 1
        assert sample(service, "sidings_consumer_failures_total") == 0, "a repeat that waits has not failed"
        assert sample(service, "sidings_consumer_errors_total", server="postgres") == 0
    assert await numbers(effects) == [2, 1, 3]
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith("sidings")]

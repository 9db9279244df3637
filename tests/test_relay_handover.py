"""A batch that cannot be handed over: those of other partitions that Kafka has already are not sent again."""

import asyncio
from typing import Any

import pytest
from aiokafka.errors import UnknownTopicOrPartitionError
from sidings.kafka.outbox import senders

from .outbox_support import assert_complete, emptied, numbered, publish, records, relaying


async def test_what_was_handed_over_before_a_batch_that_could_not_be_is_not_sent_again(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, calls = senders.Sender.send, 0

    async def third_time_not(sender: Any, batch: Any, to: str, partition: int) -> asyncio.Future[object]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise UnknownTopicOrPartitionError("the topic has just been recreated")
        return await send(sender, batch, to, partition)

    monkeypatch.setattr(senders.Sender, "send", third_time_not)
    etas = await topic("etas", partitions=3)
    await publish(database, etas, numbered(0, 600))
    async with relaying(database, sidings_kafka):
        await emptied(database)
    assert calls > 3
    found = await records(sidings_kafka, etas)
    assert_complete(found, 600)
    assert len(found) == 600

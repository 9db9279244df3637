"""Producers that are ended with batches in them."""

import asyncio
import gc

import pytest
from sidings.devstack.topics import create_topic
from sidings.kafka.outbox import OutboxSettings
from sidings.kafka.outbox.senders import Sender
from sidings.kafka.settings import KafkaSettings

from .support import SECONDS, eventually


@pytest.mark.parametrize("idempotent", [True, False])
async def test_batches_that_have_not_had_their_turn_are_failed_without_a_word_of_asyncios(
    sidings_kafka: str, topic, caplog: pytest.LogCaptureFixture, idempotent: bool
) -> None:
    """For each, "Future exception was never retrieved" stood in the log, with ProducerClosed."""
    name = await topic()
    sender = Sender(KafkaSettings(bootstrap=sidings_kafka), OutboxSettings(), idempotent=idempotent)
    await sender.start()
    sender._producer._sender.sender_task.cancel()  # as where a request before them is not answered
    await asyncio.sleep(0)
    batch = sender.batch()
    batch.append(timestamp=None, key=None, value=b"1")
    sent = await sender.send(batch, name, 0)
    await sender.kill()
    assert type(sent.exception()).__name__ == "ProducerClosed"
    del sender, batch, sent
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_batches_that_wait_to_be_tried_again_are_failed_without_a_word_of_asyncios(
    own_kafka, caplog: pytest.LogCaptureFixture
) -> None:
    """For each, a traceback with the KeyError of one of aiokafka's callbacks stood in the log."""
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "etas", partitions=1)
    # Kafka has a fifth of a second for an answer.
    sender = Sender(KafkaSettings(bootstrap=kafka.bootstrap), OutboxSettings(delivery_seconds=0.4), idempotent=True)
    await sender.start()
    await sender.partitions("etas", SECONDS)
    await asyncio.to_thread(kafka.pause)
    batch = sender.batch()
    batch.append(timestamp=None, key=None, value=b"1")
    sent = await sender.send(batch, "etas", 0)
    waiting = sender._producer._message_accumulator._batches
    await eventually(lambda: any(one.retry_count for batches in waiting.values() for one in batches))
    await sender.kill()
    assert type(sent.exception()).__name__ == "ProducerClosed"
    await asyncio.sleep(0)
    assert "Exception in callback" not in caplog.text
    await asyncio.to_thread(kafka.resume)

"""Producers that are ended with batches in them."""

import asyncio
import gc

import pytest
from sidings.kafka.outbox import OutboxSettings
from sidings.kafka.outbox.senders import Sender
from sidings.kafka.settings import KafkaSettings


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

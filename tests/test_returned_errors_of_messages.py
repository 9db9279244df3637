"""Handlers of lists of messages that return an error for one of them, as handlers of lists of jobs do."""

import pytest
from sidings import Discard, Message, Transaction

from .consumer_support import TWICE_AND_PARK, Number, a_service, numbers, offset_reaches, produce, record
from .support import eventually, fetch


@pytest.mark.parametrize(("error", "parked"), [(ValueError("no"), 1), (ValueError, 1), (Discard("no"), 0)], ids=repr)
async def test_an_error_in_the_list_is_that_messages_failure(effects, topic, sidings_kafka, error, parked):
    """All passed for handled, and the offset went past them."""
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, batch=10, retry=TWICE_AND_PARK)
    async def handle(messages: list[Message[Number]], tx: Transaction) -> list[object]:
        for message in messages:
            await record(message, tx)
        return [error if message.value.n == 1 else None for message in messages]

    await produce(sidings_kafka, name, [0], key="a")
    await produce(sidings_kafka, name, [1], key="b")
    await produce(sidings_kafka, name, [2], key="c")
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        assert await numbers(effects) == [0, 2]
        assert len(await fetch(effects, "SELECT id FROM sidings.job")) == parked

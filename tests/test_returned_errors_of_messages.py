"""Handlers of messages that return an error, or several in a list, as handlers of lists of jobs do."""

import pytest
from sidings import Discard, Message, Transaction

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    as_json,
    numbers,
    offset_reaches,
    produce,
    produce_raw,
    record,
)
from .support import eventually, fetch


@pytest.mark.parametrize("batch", [10, 1])
@pytest.mark.parametrize(("error", "parked"), [(ValueError("no"), 1), (ValueError, 1), (Discard("no"), 0)], ids=repr)
async def test_an_error_in_the_list_is_that_messages_failure(effects, topic, sidings_kafka, error, parked, batch):
    """All passed for handled, and the offset went past them."""
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, batch=batch, retry=TWICE_AND_PARK)
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


@pytest.mark.parametrize("batch", [10, 1])
async def test_also_where_one_type_of_the_topic_is_handled_in_lists(effects, topic, sidings_kafka, batch):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    events = service.topic(name, type_header="type", retry=TWICE_AND_PARK)

    @events.on("refused", model=Number, batch=batch)
    async def refuse(messages: list[Message[Number]], tx: Transaction) -> list[object]:
        return [ValueError("no") for _ in messages]

    @events.on("handled", model=Number)
    async def handle(message: Message[Number], tx: Transaction) -> list[object]:
        await record(message, tx)
        return [ValueError("no") if message.value.n == 3 else None]

    for number, type in enumerate((b"refused", b"handled", b"handled"), start=1):
        await produce_raw(sidings_kafka, name, as_json(number), key=b"%d" % number, headers=[("type", type)])
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        assert await numbers(effects) == [2]
        assert len(await fetch(effects, "SELECT id FROM sidings.job")) == 2


@pytest.mark.parametrize("wrapped", [False, True])
async def test_an_error_in_what_a_handler_of_one_message_returns_is_its_failure(effects, topic, sidings_kafka, wrapped):
    """As a gather with `return_exceptions=True` gives it: the message passed for handled."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    if wrapped:

        @service.middleware
        async def around(call, call_next):
            await call_next()

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> list[object]:
        await record(message, tx)
        return [None, ValueError("no") if message.value.n == 1 else None]

    await produce(sidings_kafka, name, [0], key="a")
    await produce(sidings_kafka, name, [1], key="b")
    async with service:
        await eventually(offset_reaches(effects, name, 2))
        assert await numbers(effects) == [0]
        assert len(await fetch(effects, "SELECT id FROM sidings.job")) == 1


async def test_calls_in_the_list_that_nobody_awaits_are_its_failure(effects, topic, sidings_kafka):
    """All messages passed for handled, and nothing had run."""
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, batch=10, retry=TWICE_AND_PARK)
    async def handle(messages: list[Message[Number]], tx: Transaction) -> list[object]:
        return [record(message, tx) for message in messages]

    await produce(sidings_kafka, name, [0], key="a")
    async with service:
        await eventually(offset_reaches(effects, name, 1))
        assert len(await fetch(effects, "SELECT id FROM sidings.job")) == 1

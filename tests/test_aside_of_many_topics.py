"""Messages of one topic that hang while they are tried alone keep those of another topic waiting for no slot."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from sidings import Message, Transaction
from sidings.kafka.siding import Siding

from .consumer_support import TWICE_AND_PARK, Number, a_service, offset_reaches, produce, record
from .support import SECONDS, eventually

HANGING = 6  # partitions; five messages are tried alone at once, with the default `pool_size`


async def test_hanging_messages_of_a_topic_keep_no_other_topic_from_trying_its_own_again(effects, topic, sidings_kafka):
    slow, quick = await topic("slow", partitions=HANGING), await topic("quick")
    go_on, hang, tried = asyncio.Event(), set[int](), list[int]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(slow, retry=TWICE_AND_PARK)
    async def call_carrier(message: Message[Number], tx: Transaction) -> None:
        if message.value.n not in tried:
            tried.append(message.value.n)
            raise ValueError("it fails in the main line")
        hang.add(message.value.n)
        await go_on.wait()

    @service.consumer(quick, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if -1 not in tried:
            tried.append(-1)
            raise ConnectionError("once")
        await record(message, tx)

    async with service:
        for number in range(HANGING):
            await produce(sidings_kafka, slow, [number], partition=number)
        await eventually(lambda: len(tried) == HANGING and len(hang) >= 5)
        await produce(sidings_kafka, quick, [0, 1])
        await eventually(offset_reaches(effects, quick, 2), "the other topic stands still", 15)
        go_on.set()


async def test_slots_are_as_many_as_ever_after_messages_have_had_them():
    """With fewer, messages that hang keep others waiting; with more, there are not enough connections for them."""
    shared, nothing = asyncio.Semaphore(2), SimpleNamespace(topic="positions")
    given: Any = nothing
    siding = Siding(given, given, given, shared, lambda _: None, lambda: False)
    for _ in range(4):
        async with siding._slot():  # both kinds are free
            pass
    for _ in range(2):
        async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
            for _ in range(3):
                assert not (shared.locked() and siding._own.locked())
                await stack.enter_async_context(siding._slot())
            assert (shared.locked(), siding._own.locked()) == (True, True)

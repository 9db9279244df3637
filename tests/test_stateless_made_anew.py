"""Stateless consumers whose topic was made anew, and who did not see it at once."""

import asyncio
import threading

import pytest
from sidings import Message

from .consumer_support import Number, a_service, produce
from .support import eventually
from .test_topic_ids import made_anew


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_a_stateless_consumer_misses_nothing_of_a_topic_that_was_made_anew_under_it(start, topic, sidings_kafka):
    """It had grown past the position: what stood in front was never handled."""
    name, dead_letters = await topic(), await topic()
    handled = []
    service = a_service(None, sidings_kafka, name="stateless", settings={"fetch_seconds": 0.05, "group": name})

    @service.consumer(name, model=Number, stateless=True, dead_letter=dead_letters, start=start)
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    def meanwhile() -> None:
        async def work() -> None:
            await made_anew(sidings_kafka, name)
            await produce(sidings_kafka, name, range(10, 16))

        asyncio.run(work())

    async with service:
        [partition] = await eventually(lambda: service._life.consumer._stateless.partitions.values())
        await eventually(lambda: partition.placed)
        await produce(sidings_kafka, name, range(3))
        await eventually(lambda: len(handled) == 3)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()  # the loop stands still for a moment, as that of a process that is paused
        await eventually(lambda: set(handled) >= set(range(10, 16)), lambda: handled)


async def test_nor_does_the_next_instance_where_one_has_committed_into_the_new_topic_at_its_end(
    topic, sidings_kafka, monkeypatch
):
    """What it had under way was the former one's, and it ended before it looked."""
    monkeypatch.setattr("sidings.kafka.topic_ids._LOOK_SECONDS", 3_600.0)
    name, dead_letters = await topic(), await topic()
    handled, under_way, go_on = [], asyncio.Event(), asyncio.Event()

    def consuming():
        service = a_service(None, sidings_kafka, name="stateless", settings={"fetch_seconds": 0.05, "group": name})

        @service.consumer(name, model=Number, stateless=True, dead_letter=dead_letters)
        async def handle(message: Message[Number]) -> None:
            if message.value.n == 2:
                under_way.set()
                await go_on.wait()
            handled.append(message.value.n)

        return service

    await produce(sidings_kafka, name, range(3))
    async with consuming():
        await eventually(under_way.is_set)
        await made_anew(sidings_kafka, name)
        await produce(sidings_kafka, name, range(10, 16))
        go_on.set()
    async with consuming():
        await eventually(lambda: handled == [*range(3), *range(10, 16)], lambda: handled)

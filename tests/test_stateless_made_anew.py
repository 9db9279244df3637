"""A stateless consumer whose process stood still while its topic was made anew."""

import asyncio
import threading

from sidings import Message

from .consumer_support import Number, a_service, produce
from .support import eventually
from .test_topic_ids import made_anew


async def test_a_stateless_consumer_misses_nothing_of_a_topic_that_was_made_anew_under_it(topic, sidings_kafka):
    """It had grown past the position: what stood in front was never handled."""
    name, dead_letters = await topic(), await topic()
    handled = []
    service = a_service(None, sidings_kafka, name="stateless", settings={"fetch_seconds": 0.05, "group": name})

    @service.consumer(name, model=Number, stateless=True, dead_letter=dead_letters)
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    def meanwhile() -> None:
        async def work() -> None:
            await made_anew(sidings_kafka, name)
            await produce(sidings_kafka, name, range(10, 16))

        asyncio.run(work())

    await produce(sidings_kafka, name, range(3))
    async with service:
        await eventually(lambda: len(handled) == 3)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()  # the loop stands still for a moment, as that of a process that is paused
        await eventually(lambda: set(handled) >= set(range(10, 16)), lambda: handled)

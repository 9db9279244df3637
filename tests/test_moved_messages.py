"""Jobs of messages that were moved to another origin, or to another topic."""

import json

from sidings import Job, Message, Transaction, correlated
from sidings.testing import drain

from .consumer_support import Number, a_service, produce, record
from .support import fetch, jobs_left


async def a_parked_message(dsn: str, topic: str, origin: str) -> None:
    """One of the topic that was called "former", as the guide leaves it."""
    stored = {"topic": "former", "partition": 0, "offset": 4711, "timestamp": 0, "key": "aw==", "value": "eyJuIjogMX0="}
    await fetch(
        dsn,
        "INSERT INTO sidings.job (type, origin, \"group\", payload) VALUES ($1, $2, 'k', $3)",
        *(f"message:{topic}", origin, json.dumps(stored)),
    )


async def test_what_a_moved_message_enqueues_is_in_the_origin_where_that_is_now(effects):
    """It went to the partition from which the message had been moved, where nobody ran it."""
    service = a_service(effects, "localhost:1")

    @service.job(group="n", payload=Number)
    async def tell(job: Job[Number]) -> None: ...

    @service.consumer("places", model=Number)
    async def on_message(message: Message[Number], tx: Transaction) -> None:
        assert message.origin == "former/0"
        with correlated("c-1"):
            await tell.enqueue(tx, message.value)

    await a_parked_message(effects, "places", "places/0")
    attempts = await drain(effects, service.registry)
    assert [(attempt.type, attempt.origin) for attempt in attempts] == [
        ("message:places", "places/0"),
        ("tell", "places/0"),
    ]


async def test_a_reset_cancels_no_parked_message_of_the_former_topic(effects, topic, sidings_kafka):
    """Nobody would deliver it again."""
    places = await topic()
    await produce(sidings_kafka, places, range(3))
    await a_parked_message(effects, places, f"{places}/0")
    service = a_service(effects, sidings_kafka)
    service.consumer(places, model=Number)(record)
    [reset] = await service.reset_offsets(places, "earliest", actor="alice")
    assert (reset.cancelled, await jobs_left(effects)) == (0, 1)

"""Jobs of messages that were moved to another origin, or to another topic."""

import json

from sidings import Job, Message, Transaction, correlated
from sidings.testing import drain

from .consumer_support import TWICE_AND_PARK, Number, a_service, made_anew, produce, record
from .support import eventually, fetch, jobs_left, value


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


async def test_each_reset_of_a_topic_that_was_made_anew_leaves_what_is_parked_of_the_former_one(
    effects, topic, sidings_kafka
):
    """The second one cancelled it, and nobody delivered it again."""
    name = await topic()
    service = a_service(effects, sidings_kafka)

    async def refuse(message: Message[Number], tx: Transaction) -> None:
        raise RuntimeError("not yet")

    async def parked(keys: list[str]) -> None:
        stored = f"""SELECT array_agg("group" ORDER BY id) FROM sidings.job WHERE type = 'message:{name}'"""
        await eventually(lambda: value(effects, f"SELECT ({stored}) = $1", keys))

    service.consumer(name, model=Number, retry=TWICE_AND_PARK)(refuse)
    await produce(sidings_kafka, name, [1], key="former")
    async with service:
        await parked(["former"])
    await made_anew(sidings_kafka, name)
    await service.reset_offsets(name, "earliest", actor="alice")
    await produce(sidings_kafka, name, [2], key="new")
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, retry=TWICE_AND_PARK)(refuse)
    async with service:
        await parked(["former", "new"])
    [reset] = await service.reset_offsets(name, "earliest", actor="alice")
    assert reset.cancelled == 1
    await parked(["former"])

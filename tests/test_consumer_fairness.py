"""Partitions with much to read keep none waiting that has little."""

import pytest
from sidings import Message, Retry, Transaction
from tenacity import wait_none

from .consumer_support import Number, a_service, produce
from .support import eventually


@pytest.mark.parametrize("stateless", [False, True], ids=["ordinary", "stateless"])
async def test_partitions_of_a_topic_take_turns_however_much_has_been_fetched_of_one(
    effects, topic, sidings_kafka, stateless
):
    """Kafka gives a megabyte of a partition at once. All of that went first: a single message of another partition
    waited for tens of thousands of small ones, and for as many of each further partition that was behind."""
    name, count = await topic(partitions=2), 1_000
    for partition in (0, 1):
        await produce(sidings_kafka, name, range(count), partition=partition)
    service = a_service(
        None if stateless else effects, sidings_kafka, settings={"fetch_seconds": 0.05, "max_records": 10}
    )
    order: list[int] = []

    async def handle(message: Message[Number], tx: Transaction | None = None) -> None:
        order.append(message.partition)

    async def alone(message: Message[Number]) -> None:
        await handle(message)

    if stateless:
        service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")(alone)
    else:
        service.consumer(name)(handle)
    async with service:
        await eventually(lambda: len(order) == 2 * count)
    late = max(order.index(0), order.index(1))
    assert late < count / 2, f"one partition waited for {late} messages of the other"


async def test_a_message_that_has_failed_once_does_not_wait_for_the_polls_of_other_partitions(
    effects, topic, sidings_kafka, monkeypatch
):
    """Each of them did, for 0.2 s: of a partition whose messages all failed once, five were handled in a second."""
    monkeypatch.setattr("sidings.kafka.fetch_loop._POLL_SECONDS", 3.0)
    name, count = await topic(partitions=2), 30
    await produce(sidings_kafka, name, range(count), partition=0)  # of the other one there is nothing to poll
    service = a_service(effects, sidings_kafka)
    tried, handled = set[int](), list[int]()

    @service.consumer(name, retry=Retry(wait=wait_none()))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n not in tried:
            tried.add(message.value.n)
            raise ValueError("not yet")
        handled.append(message.value.n)

    async with service:
        await eventually(lambda: len(handled) == count, lambda: handled)
    assert handled == list(range(count))

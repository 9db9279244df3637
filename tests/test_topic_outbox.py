"""A topic that is called as the slots of the outbox are: its jobs would be stored, and never run, without a word."""

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition
from sidings import ConfigurationError, Job, Message, Registry, Service
from sidings.kafka.assignment import StaticAssignment

from .consumer_support import Number, a_service
from .support import SECONDS, Ride, eventually

REFUSED = "outbox/0 to outbox/15"


async def a_job(job: Job[Ride]) -> None: ...


def test_what_would_lease_the_slots_of_the_outbox_is_refused() -> None:
    service = a_service("postgresql://nobody@localhost/nothing", "localhost:9092")
    declare: list[Any] = [
        lambda: service.consumer("outbox", model=Number),
        lambda: service.topic("outbox", type_field="type"),
        lambda: a_service("postgresql://nobody@localhost/nothing", "localhost:9092", topics=["etas", "outbox"]),
        lambda: StaticAssignment(["orders/0", "outbox/0"]),
        lambda: Registry().job(group="transport", home="outbox")(a_job),
    ]
    for one in declare:
        with pytest.raises(ConfigurationError, match=REFUSED):
            one()


def test_a_service_without_postgres_may_consume_a_topic_of_that_name() -> None:
    service: Service = a_service(None, "localhost:9092")

    @service.consumer("outbox", model=Number, stateless=True, dead_letter="dead")
    async def handle(message: Message[Number]) -> None: ...


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_users_own_consumer_of_such_a_topic_brings_the_service_down_with_the_reason(
    database: str, sidings_kafka: str, when: str
) -> None:
    """Its executor leased the slots that were free, and no relay sent what waited there; of the others no job ran."""
    service = a_service(database, sidings_kafka)
    running = asyncio.create_task(service.run()) if when == "after" else None
    if running is not None:
        await eventually(lambda: service.problems() == [])
    listener = service.executor.rebalance_listener
    listener.on_partitions_assigned({TopicPartition("outbox", 0), TopicPartition("orders", 0)})
    with pytest.raises(ConfigurationError, match=REFUSED):
        await asyncio.wait_for(running or service.run(), SECONDS)
    assert service.executor.held == {}

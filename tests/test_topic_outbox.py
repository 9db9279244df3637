"""A topic that is called as the slots of the outbox are: its jobs would be stored, and never run, without a word."""

from typing import Any

import pytest
from sidings import ConfigurationError, Job, Message, Registry, Service
from sidings.kafka.assignment import StaticAssignment

from .consumer_support import Number, a_service
from .support import Ride

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

"""A failover that has lost the very rows of stored offsets, as of a topic that was consumed for the first time just
before: what this process has handled since is done anew on the new server, where its effects are lost, too."""

from typing import Any

import pytest
from sidings import Message, Transaction

from .consumer_support import Number, a_service, produce
from .support import eventually
from .test_failover import Failover, failover, line, recorded  # noqa: F401
from .test_stateless import committed


def consuming(failover: Failover, kafka: str, topic: str, start: Any) -> Any:  # noqa: F811
    """A service whose consumer writes down which numbers it has handled."""
    service = a_service(
        failover.proxy.dsn, kafka, settings={"fetch_seconds": 0.05, "group": topic}, executor={"lease_seconds": 3.0}
    )

    @service.consumer(topic, start=start)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await tx.execute("INSERT INTO effect VALUES ($1)", str(message.value.n))

    return service


@pytest.mark.long
@pytest.mark.parametrize("start", ["latest", "committed", "earliest"])
async def test_what_was_handled_from_an_offset_that_got_lost_is_done_anew(
    failover: Failover,  # noqa: F811
    topic: Any,
    sidings_kafka: str,
    start: Any,
):
    """It went on as `start` says, behind all that: at the end of the log, or at what Kafka had been told."""
    name = await topic()
    service = consuming(failover, sidings_kafka, name, start)

    await failover.lose_what_follows()
    async with service:
        partitions = service._life.consumer._stored.partitions
        await eventually(lambda: any(p.state.name == "READY" for p in partitions.values()))
        await produce(sidings_kafka, name, range(1, 4))
        await eventually(lambda: recorded(failover.old, range(1, 4)))

        async def kafka_knows() -> bool:
            return await committed(sidings_kafka, name, group=name) == 3

        await eventually(kafka_knows)
        await failover.happen()
        failover.proxy.heal()
        await produce(sidings_kafka, name, range(4, 6))
        await eventually(lambda: recorded(failover.new, range(1, 6)), "all of them have their effects there, once")


async def test_so_is_what_an_instance_has_handled_that_ran_before(
    failover: Failover,  # noqa: F811
    topic: Any,
    sidings_kafka: str,
):
    """The one that met the failover began where that one had ended, and went on from there."""
    name = await topic()

    await failover.lose_what_follows()
    await produce(sidings_kafka, name, range(1, 4))
    async with consuming(failover, sidings_kafka, name, "earliest"):
        await eventually(lambda: recorded(failover.old, range(1, 4)))
    async with consuming(failover, sidings_kafka, name, "earliest"):
        await produce(sidings_kafka, name, range(4, 6))
        await eventually(lambda: recorded(failover.old, range(1, 6)))
        await failover.happen()
        failover.proxy.heal()
        await produce(sidings_kafka, name, range(6, 8))
        await eventually(lambda: recorded(failover.new, range(1, 8)), "all of them have their effects there, once")


async def test_also_where_the_connection_to_kafka_is_made_anew_meanwhile(
    failover: Failover,  # noqa: F811
    topic: Any,
    sidings_kafka: str,
):
    """As where both were away. The new client did not know that there had been an offset."""
    name = await topic()
    service = consuming(failover, sidings_kafka, name, "latest")

    await failover.lose_what_follows()
    async with service:
        consumer = service._life.consumer
        partitions = consumer._stored.partitions
        await eventually(lambda: any(p.state.name == "READY" for p in partitions.values()))
        await produce(sidings_kafka, name, range(1, 4))
        await eventually(lambda: recorded(failover.old, range(1, 4)))
        await failover.happen()
        client = consumer._client
        client._fetcher._fetch_task.cancel()
        await eventually(lambda: consumer._client not in (client, None) and consumer._client.assignment())
        failover.proxy.heal()
        await eventually(lambda: any(p.state.name == "READY" for p in partitions.values()))
        await produce(sidings_kafka, name, range(4, 6))
        await eventually(lambda: recorded(failover.new, range(1, 6)), "all of them have their effects there, once")

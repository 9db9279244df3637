"""A topic that changes from an ordinary consumer to a stateless one, and back: each message is handled once, and not
again from the offset on that Postgres still has from before."""

from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from sidings import Message, Transaction

from .cli_support import cli, refused
from .consumer_support import Number, a_service, produce, sample
from .support import connected, eventually, value


class Topic:
    """Services that consume it, one after the other; `handled` by whom, in order."""

    def __init__(self, dsn: str, kafka: str, name: str, start: str) -> None:
        self.dsn, self.kafka, self.name, self.start = dsn, kafka, name, start
        self.handled: list[tuple[str, int]] = []

    def _service(self, dsn: str | None) -> Any:
        return a_service(dsn, self.kafka, settings={"fetch_seconds": 0.05, "group": self.name})

    def ordinary(self) -> Any:
        service = self._service(self.dsn)

        @service.consumer(self.name, model=Number, start=self.start)
        async def handle(message: Message[Number], tx: Transaction) -> None:
            self.handled.append(("ordinary", message.value.n))

        return service

    def stateless(self, start: Any = "earliest") -> Any:
        service = self._service(None)

        @service.consumer(self.name, model=Number, stateless=True, dead_letter=f"{self.name}.dlq", start=start)
        async def handle(message: Message[Number]) -> None:
            self.handled.append(("stateless", message.value.n))

        return service

    async def run(self, service: Any, *numbers: int) -> None:
        """Until these, which are sent now, are handled."""
        async with service:
            await produce(self.kafka, self.name, numbers)
            await eventually(lambda: numbers[-1] in [n for _, n in self.handled], lambda: self.handled)
            await eventually(lambda: sample(service, "sidings_consumer_lag") == 0)


@pytest.mark.parametrize("start", ["earliest", "committed"])
async def test_what_a_stateless_consumer_has_handled_meanwhile_is_not_handled_again(
    start, database, topic, sidings_kafka, caplog
):
    its = Topic(database, sidings_kafka, await topic(), start)
    await its.run(its.ordinary(), 0, 1)
    await its.run(its.stateless(), 2, 3)
    await its.run(its.ordinary(), 4)
    assert [n for _, n in its.handled] == [0, 1, 2, 3, 4]
    assert f"{its.name}/0: offsets 2 to 3 were handled by a stateless consumer" in caplog.text
    await its.run(its.stateless(), 5)
    await its.run(its.ordinary(), 6)
    assert [n for _, n in its.handled] == [0, 1, 2, 3, 4, 5, 6]


async def test_but_a_reset_meanwhile_counts(database, topic, sidings_kafka):
    its = Topic(database, sidings_kafka, await topic(), "earliest")
    await its.run(its.ordinary(), 0, 1)
    await its.run(its.stateless(), 2, 3)
    service = its.ordinary()
    await service.reset_offsets(its.name, 1, partitions=[0], actor="alice")
    await its.run(service, 4)
    assert its.handled[4:] == [("ordinary", n) for n in (1, 2, 3, 4)]


async def test_the_command_that_resets_a_consumer_refuses_while_it_is_a_stateless_one(database, topic, sidings_kafka):
    """It succeeded, with its row in the audit, and nothing was handled again, but all of it once the consumer was an
    ordinary one: the stored offset is of before."""
    its = Topic(database, sidings_kafka, await topic(), "earliest")
    reset = ("consumers", "reset", its.name, "--to", "earliest", "--yes")
    kafka = {"SIDINGS_KAFKA": sidings_kafka, "SIDINGS_KAFKA_GROUP": its.name}
    await its.run(its.ordinary(), 0)
    await its.run(its.stateless(), 1)
    text = await refused(database, *reset, **kafka)
    assert text.startswith(f"the offsets of {its.name}/0 are in Kafka, since a stateless consumer has handled")
    assert await value(database, "SELECT count(*) FROM sidings.audit") == 0
    await its.run(its.ordinary(), 2)
    assert (await cli(database, *reset, **kafka)).stdout.endswith(f"{its.name}/0: from 3 to 0\n")


async def test_and_so_it_does_where_the_instance_dies_that_has_begun_there(database, topic, sidings_kafka, monkeypatch):
    """Before it has told Kafka how far it is: what the stateless one had committed would count again."""
    monkeypatch.setattr("sidings.kafka.lag.LagCommitter.commit", _nothing)
    its = Topic(database, sidings_kafka, await topic(), "earliest")
    await its.run(its.ordinary(), 0)
    await its.run(its.stateless(), 1, 2)
    service = its.ordinary()
    await service.reset_offsets(its.name, 0, partitions=[0], actor="alice")
    await its.run(service, 3)
    client = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, group_id=its.name, enable_auto_commit=False)
    await client.start()
    try:
        assert await client.committed(TopicPartition(its.name, 0)) == 0
    finally:
        await client.stop()


async def test_what_lies_before_the_place_where_the_stateless_consumer_began_is_not_passed_over(
    database, topic, sidings_kafka, monkeypatch
):
    """It found no offset of the group, as where Kafka has deleted it, and began at the end of the log."""
    monkeypatch.setattr("sidings.kafka.lag.LagCommitter.commit", _nothing)
    its = Topic(database, sidings_kafka, await topic(), "earliest")
    await its.run(its.ordinary(), 0)
    await produce(its.kafka, its.name, [1, 2])
    for number in (3, 4):  # the second goes on where the first has ended
        service = its.stateless("latest")
        async with service:
            [partition] = await eventually(service._life.consumer._stateless.partitions.values)
            await eventually(lambda partition=partition: partition.placed)
            await produce(its.kafka, its.name, [number])
            await eventually(lambda number=number: ("stateless", number) in its.handled, lambda: its.handled)
    await its.run(its.ordinary(), 5)
    assert its.handled[3:] == [("ordinary", n) for n in (1, 2, 3, 4, 5)]


async def test_nor_is_what_a_postgres_that_was_restored_has_lost(database, topic, sidings_kafka):
    its = Topic(database, sidings_kafka, await topic(), "earliest")
    columns = "next_offset, epoch_offset, leader_epoch"
    await its.run(its.ordinary(), 0)
    async with connected(database) as connection:
        backup = await connection.fetchrow(f"SELECT {columns} FROM sidings.consumer_offset")
        await its.run(its.ordinary(), 1, 2)
        await its.run(its.stateless(), 3)
        await connection.execute(f"UPDATE sidings.consumer_offset SET ({columns}) = ($1, $2, $3)", *backup)
    await its.run(its.ordinary(), 4)
    assert its.handled[4:] == [("ordinary", n) for n in (1, 2, 3, 4)]


async def _nothing(_: object) -> None: ...

"""A topic that changes from an ordinary consumer to a stateless one, and back: each message is handled once, and not
again from the offset on that Postgres still has from before."""

from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from sidings import Message, Transaction

from .consumer_support import Number, a_service, produce, sample
from .support import eventually


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

    def stateless(self) -> Any:
        service = self._service(None)

        @service.consumer(self.name, model=Number, stateless=True, dead_letter=f"{self.name}.dlq")
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


async def _nothing(_: object) -> None: ...

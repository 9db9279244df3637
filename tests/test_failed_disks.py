"""A broker of whose disks one has failed goes on with the others, and what was on it has another leader."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import KafkaStorageError
from aiokafka.protocol.fetch import FetchRequest
from sidings import Message
from sidings.devstack.broker import Broker, kafka_id
from sidings.devstack.topics import create_topic
from sidings.kafka.brokers import _Client

from .consumer_support import Number, produce
from .support import eventually
from .test_stateless import a_service


class Disk:
    """Nothing is read from it, once it has failed, until the client has asked who leads what now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed = False
        self.refused: list[AIOKafkaClient] = []
        self._moved: set[AIOKafkaClient] = set()
        self._send, self._update = AIOKafkaClient.send, _Client._metadata_update
        disk = self

        async def send(client: AIOKafkaClient, node: Any, request: Any, **options: Any) -> Any:
            answer: Any = await disk._send(client, node, request, **options)
            if isinstance(request, FetchRequest) and disk.failed and client not in disk._moved:
                disk.refused.append(client)
                for _, partitions in answer.topics:
                    partitions[:] = [(one[0], KafkaStorageError.errno, *one[2:-1], b"") for one in partitions]
            return answer

        async def update(client: _Client, *arguments: Any) -> bool:
            if client in disk.refused:
                disk._moved.add(client)
            return await disk._update(client, *arguments)

        monkeypatch.setattr(AIOKafkaClient, "send", send)
        monkeypatch.setattr(_Client, "_metadata_update", update)


async def test_what_was_on_a_disk_that_has_failed_is_read_from_its_next_leader(
    topic, sidings_kafka, monkeypatch, caplog
):
    """By a consumer and by a directory. The broker answers, so that nothing else makes them ask who leads it."""
    name, handled = await topic(), list[int]()
    disk = Disk(monkeypatch)
    service = a_service(sidings_kafka, metadata_seconds=3_600.0)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    directory = service.directory(name, model=Number)
    async with service:
        await produce(sidings_kafka, name, [0])
        await eventually(lambda: handled == [0] and directory["k"].n == 0)
        disk.failed = True
        await produce(sidings_kafka, name, [1])
        await eventually(lambda: handled == [0, 1] and directory["k"].n == 1)
    assert len({*disk.refused}) == 2
    assert len(disk.refused) < 20, "it is not asked again and again at once"
    assert "Unexpected error" not in caplog.text
    assert f"lets nothing be read of some partitions, trying again: {name}/0 ([Error 56] Kafka" in caplog.text


async def test_what_nobody_leads_once_a_disk_has_failed_is_not_said_to_work_again(
    topic, sidings_kafka, monkeypatch, caplog
):
    """There was one replica: the broker is not asked for it any more, and all that it is asked for can be read."""
    name = await topic(partitions=2)
    disk = Disk(monkeypatch)
    leader = ClusterMetadata.leader_for_partition
    monkeypatch.setattr(
        ClusterMetadata,
        "leader_for_partition",
        lambda cluster, tp: -1 if disk.refused and tp.partition == 0 else leader(cluster, tp),
    )
    service, handled = a_service(sidings_kafka), list[int]()

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    async with service:
        await produce(sidings_kafka, name, [0], partition=1)
        await eventually(lambda: handled == [0])
        disk.failed = True
        await eventually(lambda: disk.refused)
        await produce(sidings_kafka, name, [1], partition=1)
        await eventually(lambda: handled == [0, 1])
    assert f"{name}/0 ([Error 56] Kafka" in caplog.text
    assert "works again" not in caplog.text
    assert "may have no leader now" in caplog.text


@pytest.mark.chaos
@pytest.mark.timeout(240)
async def test_a_disk_of_a_broker_fails(own_kafka, caplog, monkeypatch):
    """The real thing: three brokers with two disks each, of which one can be written no more."""
    with_one = Broker._format

    def with_two(broker: Broker, config: Path) -> None:
        with_one(broker, config)
        told = (broker.directory / "data" / "meta.properties").read_text()
        disk = broker.directory / "disk"
        disk.mkdir()
        (disk / "meta.properties").write_text(re.sub("directory.id=.*", f"directory.id={kafka_id()}", told))

    monkeypatch.setattr(Broker, "_format", with_two)
    disks = {
        "log.dirs": "data,disk",
        "replica.high.watermark.checkpoint.interval.ms": "500",  # it writes there, and notices
        "replica.lag.time.max.ms": "2000",  # so long it waits for a replica that is gone, with each message
    }
    kafka = await asyncio.to_thread(lambda: own_kafka(brokers=3, settings=disks))
    await create_topic(kafka.bootstrap, "positions", partitions=12, replicas=3)
    handled = list[int]()
    service = a_service(kafka.bootstrap, metadata_seconds=3_600.0)

    @service.consumer("positions", stateless=True, dead_letter="positions.dlq")
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    async def arrive(numbers: dict[int, int]) -> None:
        for partition, number in numbers.items():
            await produce(kafka.bootstrap, "positions", [number], partition=partition)
        await eventually(lambda: {*numbers.values()} <= {*handled})

    async with service:
        await arrive({n: n for n in range(12)})
        broker = kafka.brokers[0]
        disk: Path = broker.directory / "disk"
        there = [int(log.name.rpartition("-")[2]) for log in disk.glob("positions-*")]
        cluster = service._life.consumer._client._client.cluster
        leads = [n for n in there if cluster.leader_for_partition(TopicPartition("positions", n)) == broker.plan.node]
        assert leads
        disk.rename(disk.with_name("was a disk"))
        disk.write_text("")
        await eventually(lambda: "Stopping serving logs in dir" in broker.log.read_text())
        await arrive({n: 100 + n for n in leads})
    assert sorted(handled) == [*range(12), *(100 + n for n in sorted(leads))]
    assert "Unexpected error" not in caplog.text
    assert f"broker {broker.plan.node} lets nothing be read of some partitions" in caplog.text

"""What is told where nobody leads some partitions: that it is so, and how far paused ones have grown."""

import asyncio

import pytest
from aiokafka.admin import NewTopic
from sidings.devstack.topics import create_topic

from .consumer_support import Number, a_service, administering, numbers, produce, record, sample
from .support import eventually
from .test_backlog import FREE, a_service_with_jobs


@pytest.mark.long
async def test_full_partitions_have_their_lag_beside_one_that_nobody_leads(effects, own_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.backlog._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("sidings.kafka.vitals._ENDS_SECONDS", 1.0)
    kafka = await asyncio.to_thread(own_kafka, brokers=3)
    await create_topic(kafka.bootstrap, "orders", partitions=3)
    service, gate = a_service_with_jobs(effects, kafka.bootstrap, "orders")
    for partition in range(3):
        await produce(kafka.bootstrap, "orders", range(FREE), partition=partition, key=str(partition))
    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_full_partitions") == 3)
        await eventually(lambda: sample(service, "sidings_consumer_lag") == 0)
        async with administering(kafka.bootstrap) as admin:
            [described] = await admin.describe_topics(["orders"])
        leaders = {found["partition"]: found["leader"] for found in described["partitions"]}
        await asyncio.to_thread(kafka.broker(leaders[0]).kill)
        for partition in (1, 2):
            await produce(kafka.bootstrap, "orders", range(FREE, FREE + 5), partition=partition, key=str(partition))
        await eventually(lambda: sample(service, "sidings_consumer_lag") == 10)
        gate.set()


@pytest.mark.long
async def test_partitions_that_nobody_leads_are_named(effects, own_kafka, monkeypatch, caplog):
    """`/health` said that Kafka had not answered, and the log nothing at all."""
    monkeypatch.setattr("sidings.kafka.vitals._ENDS_SECONDS", 0.5)
    monkeypatch.setattr("sidings.kafka.vitals._STUCK_SECONDS", 2.0)
    monkeypatch.setattr("sidings.kafka.directory.directory._SILENT_SECONDS", 2.0)
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    async with administering(kafka.bootstrap) as admin:
        places = {"orders": {0: [1], 1: [2]}, "rates": {0: [2]}}
        await admin.create_topics([NewTopic(name, -1, -1, replica_assignments=each) for name, each in places.items()])
    service = a_service(effects, kafka.bootstrap)
    service.consumer("orders", model=Number)(record)
    service.directory("rates", model=dict)
    async with service:
        await produce(kafka.bootstrap, "orders", [0], partition=1)
        await eventually(lambda: numbers(effects))
        await asyncio.to_thread(kafka.broker(2).stop)
        told = {
            "Kafka has not answered for 2 s about orders/1: nobody leads orders/1",
            "directory 'rates': Kafka is silent for",
        }
        await eventually(lambda: all(any(part in one for one in service.problems()) for part in told), service.problems)
        assert any(one.endswith(": nobody leads rates/0") for one in service.problems())
        await eventually(lambda: "what nobody leads could not be read, trying again: orders/1" in caplog.text)
        await asyncio.to_thread(kafka.start)
        await eventually(lambda: service.problems() == [], service.problems)
        await eventually(lambda: "what nobody leads could not be read for" in caplog.text)

"""What is told of how far paused partitions have grown, where nobody leads some of them."""

import asyncio

from sidings.devstack.topics import create_topic

from .consumer_support import administering, produce, sample
from .support import eventually
from .test_backlog import a_service_with_jobs


async def test_full_partitions_have_their_lag_beside_one_that_nobody_leads(effects, own_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.backlog._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("sidings.kafka.vitals._ENDS_SECONDS", 1.0)
    kafka = await asyncio.to_thread(own_kafka, brokers=3)
    await create_topic(kafka.bootstrap, "orders", partitions=3)
    service, gate = a_service_with_jobs(effects, kafka.bootstrap, "orders")
    for partition in range(3):
        await produce(kafka.bootstrap, "orders", range(15), partition=partition, key=str(partition))
    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_full_partitions") == 3)
        await eventually(lambda: sample(service, "sidings_consumer_lag") == 0)
        async with administering(kafka.bootstrap) as admin:
            [described] = await admin.describe_topics(["orders"])
        leaders = {found["partition"]: found["leader"] for found in described["partitions"]}
        await asyncio.to_thread(kafka.broker(leaders[0]).kill)
        for partition in (1, 2):
            await produce(kafka.bootstrap, "orders", range(15, 20), partition=partition, key=str(partition))
        await eventually(lambda: sample(service, "sidings_consumer_lag") == 10)
        gate.set()

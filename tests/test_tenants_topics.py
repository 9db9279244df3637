"""The topics of the tenants example, when Kafka has compacted what it may compact."""

import secrets
import time
from datetime import timedelta

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from sidings.devstack.topics import delete_topics

from examples.tenants.settings import Settings
from examples.tenants.topics import make_topics

from .consumer_support import administering, producing
from .outbox_support import records

AT_ONCE = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0"}


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_a_part_of_a_transaction_stays_when_its_user_has_a_newer_event(sidings_kafka: str) -> None:
    """The transaction waits for all of its parts, and one that is gone never comes."""
    settings = Settings(postgres="-", kafka=sidings_kafka, prefix=f"t{secrets.token_hex(4)}-")
    pending, users = settings.topics.pending, settings.topics.users
    try:
        await make_topics(settings, partitions=1)
        admin = AIOKafkaAdminClient(bootstrap_servers=sidings_kafka)
        await admin.start()
        try:
            for name, policy in ((pending, "compact"), (users, await config_of(admin, users, "cleanup.policy"))):
                configs = AT_ONCE | {"cleanup.policy": policy}
                await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, configs=configs)])
        finally:
            await admin.close()
        sent, deadline = 0, time.monotonic() + 120
        async with producing(sidings_kafka) as producer:
            while len(await records(sidings_kafka, pending)) == sent:
                assert time.monotonic() < deadline, "nothing is compacted: the test has shown nothing"
                for name in (users, pending):
                    await producer.send_and_wait(name, b"%d" % sent, key=b"a user")
                sent += 1
        assert [record.value for record in await records(sidings_kafka, users)] == [b"%d" % n for n in range(sent)]
    finally:
        await delete_topics(sidings_kafka, settings.topics.all())


async def test_a_deletion_stays_for_a_processor_that_is_away_for_weeks(sidings_kafka: str) -> None:
    """A tombstone that is gone before it is read leaves the customer with the provider, who bills him."""
    settings = Settings(postgres="-", kafka=sidings_kafka, prefix=f"t{secrets.token_hex(4)}-")
    topics = settings.topics
    try:
        await make_topics(settings, partitions=1)
        async with administering(sidings_kafka) as admin:
            for name in (topics.pending, topics.created, topics.failed, topics.seats):
                kept = int(await config_of(admin, name, "delete.retention.ms"))
                assert timedelta(milliseconds=kept) == timedelta(days=30), name
    finally:
        await delete_topics(sidings_kafka, topics.all())


async def config_of(admin: AIOKafkaAdminClient, topic: str, name: str) -> str:
    [answer] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return next(entry[1] for entry in answer.resources[0][4] if entry[0] == name)

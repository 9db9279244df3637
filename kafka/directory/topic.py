"""What Kafka says of a directory's topic: its partitions, how long its tombstones stay, and whether its rows do."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from ..brokers import go_around_hanging_brokers
from ..settings import KafkaSettings

__all__ = ["TopicFacts", "look_at"]

_CONFIGS = ("cleanup.policy", "delete.retention.ms")


class TopicFacts(NamedTuple):
    """partitions: empty where the topic does not exist, or may not be seen. tombstone_seconds: how long a tombstone is
    kept at least; None where Kafka does not tell. policy: ``cleanup.policy``; None where Kafka does not tell."""

    cluster: str
    partitions: frozenset[int]
    tombstone_seconds: float | None
    policy: str | None


async def look_at(settings: KafkaSettings, topic: str) -> TopicFacts:
    """Ask a broker about `topic`. Raises `KafkaError`, `OSError`."""
    admin = AIOKafkaAdminClient(**settings.client_options())
    go_around_hanging_brokers(admin._client)  # pyright: ignore[reportPrivateUsage]
    try:
        await admin.start()
        cluster = await admin.describe_cluster()
        topics = await admin.describe_topics()  # all, since asking for one may create it
        found = [one for one in topics if one["topic"] == topic]
        partitions = frozenset(partition["partition"] for one in found for partition in one["partitions"])
        configs = await _configs(admin, topic) if partitions else dict[str, str]()
    finally:
        await admin.close()
    retention: str | None = configs.get("delete.retention.ms")
    return TopicFacts(
        str(cluster.get("cluster_id")),
        partitions,
        None if retention is None else int(retention) / 1000,
        configs.get("cleanup.policy"),
    )


async def _configs(admin: AIOKafkaAdminClient, topic: str) -> Mapping[str, str]:
    """The topic's settings; empty without the right to see them."""
    wanted = ConfigResource(ConfigResourceType.TOPIC, topic, configs=dict.fromkeys(_CONFIGS))
    answers = cast(list[Any], await admin.describe_configs([wanted]))
    found: dict[str, str] = {}
    for answer in answers:
        for code, _, _, _, entries in answer.resources:
            if code != 0:
                return {}
            found |= {entry[0]: entry[1] for entry in entries}
    return found

"""What Kafka says of a directory's topic: its partitions, how long its tombstones stay, and whether its rows do."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.protocol.admin import DescribeConfigsRequest

from .. import membership

__all__ = ["TopicFacts", "look_at"]

_CONFIGS = ("cleanup.policy", "delete.retention.ms")


class TopicFacts(NamedTuple):
    """partitions: empty where the topic does not exist, or may not be seen. tombstone_seconds: how long a tombstone is
    kept at least; None where Kafka does not tell. policy: ``cleanup.policy``; None where Kafka does not tell."""

    cluster: str
    partitions: frozenset[int]
    tombstone_seconds: float | None
    policy: str | None


async def look_at(client: AIOKafkaConsumer, topic: str) -> TopicFacts:
    """Ask a broker about `topic`, on the connections of `client`. Raises `KafkaError`, `OSError`."""
    metadata = await membership.describe(client, [topic])
    found = metadata.to_object()
    partitions = frozenset(partition["partition"] for one in found["topics"] for partition in one["partitions"])
    configs = dict[str, str]()
    if partitions:
        inner: Any = client._client  # pyright: ignore[reportPrivateUsage]  # aiokafka lets nobody else send on them
        inner.cluster.update_metadata(metadata)  # who leads them is asked for next
        configs = await _configs(inner, topic)
    retention: str | None = configs.get("delete.retention.ms")
    return TopicFacts(
        str(found.get("cluster_id")),
        partitions,
        None if retention is None else int(retention) / 1000,
        configs.get("cleanup.policy"),
    )


async def _configs(inner: Any, topic: str) -> Mapping[str, str]:
    """The topic's settings; empty without the right to see them."""
    wanted = [(ConfigResourceType.TOPIC, topic, list(_CONFIGS))]
    answer: Any = await inner.send(inner.get_random_node(), DescribeConfigsRequest(wanted))
    found: dict[str, str] = {}
    for code, _, _, _, entries in answer.resources:
        if code != 0:
            return {}
        found |= {entry[0]: entry[1] for entry in entries}
    return found

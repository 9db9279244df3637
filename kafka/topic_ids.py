"""Which topic it is: one that was deleted and made anew has the same name, and another id.

aiokafka 0.14 speaks only versions of the metadata request that know no ids, so the one that does stands here (KIP-516;
brokers have it since 2.8).
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping
from io import SEEK_CUR, BytesIO
from typing import Any
from uuid import UUID

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IncompatibleBrokerVersion, KafkaConnectionError, KafkaError
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
    UnsignedVarInt32,
)

from .partition import Partition, State

__all__ = ["TopicIdWatch", "ask_topic_ids", "ask_topics", "is_another"]

log = logging.getLogger("sidings.consumer")

_LOOK_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_NONE = UUID(int=0)  # of topics in clusters that give no ids
_METADATA = 3
_VERSION = 10


class _Uuid(AbstractType[UUID]):
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))


class _Partitions(AbstractType[int]):
    """How many there are; what is told of them is passed over. To read it takes 20 ms for a thousand, each time."""

    @classmethod
    def encode(cls, value: int) -> bytes:
        raise NotImplementedError

    @classmethod
    def decode(cls, data: BytesIO) -> int:
        count = UnsignedVarInt32.decode(data) - 1
        for _ in range(count):
            data.seek(2 + 4 + 4 + 4, SEEK_CUR)  # error_code, partition_index, leader_id, leader_epoch
            for _nodes in ("replica_nodes", "isr_nodes", "offline_replicas"):
                data.seek(4 * (UnsignedVarInt32.decode(data) - 1), SEEK_CUR)
            TaggedFields.decode(data)
        return count


_TEXT = CompactString("utf-8")


class _MetadataResponse(Response):
    API_KEY = _METADATA  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    API_VERSION = _VERSION  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(("node_id", Int32), ("host", _TEXT), ("port", Int32), ("rack", _TEXT), ("tags", TaggedFields)),
        ),
        ("cluster_id", _TEXT),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", _TEXT),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                ("partitions", _Partitions),
                ("topic_authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class _MetadataRequestV10(RequestStruct):
    FLEXIBLE_VERSION = True
    API_KEY = _METADATA
    API_VERSION = _VERSION
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Uuid), ("topic", _TEXT), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _MetadataRequest(Request[_MetadataRequestV10]):
    API_KEY = _METADATA

    def __init__(self, topics: Collection[str]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[_MetadataRequestV10]) -> _MetadataRequestV10:
        return request_struct_class([(_NONE, topic, {}) for topic in self._topics], False, False, False, {})


async def ask_topic_ids(client: AIOKafkaConsumer, partitions: Collection[TopicPartition]) -> dict[str, UUID]:
    """The ids of these partitions' topics, as `ask_topics` has them. Raises `KafkaError`."""
    return {name: id for name, (id, _) in (await ask_topics(client, partitions)).items()}


async def ask_topics(client: AIOKafkaConsumer, partitions: Collection[TopicPartition]) -> dict[str, tuple[UUID, int]]:
    """The ids of these partitions' topics, and how many partitions they have; one that Kafka tells no id of is absent:
    an old broker, or no such topic just now. A broker is asked that leads one of them, another may be away; each time
    any of these, since one may hang. Where the client knows another number of partitions, whose metadata may be a
    minute old, it asks for them anew in the background.

    Raises `KafkaError`.
    """
    inner: Any = client._client  # pyright: ignore[reportPrivateUsage]  # aiokafka lets nobody else send on its connections
    leaders = list({inner.cluster.leader_for_partition(tp) for tp in partitions} - {None, -1})
    if not leaders:
        raise KafkaConnectionError("no broker is known that leads one of the partitions")
    try:
        response: Any = await inner.send(random.choice(leaders), _MetadataRequest({tp.topic for tp in partitions}))
    except (IncompatibleBrokerVersion, NotImplementedError) as error:  # older than 2.8, or so new that it is gone
        log.debug("topics have no ids here: %r", error)
        return {}
    told = {name: (id, count) for error, name, id, _, count, *_ in response.topics if error == 0 and id != _NONE}
    if any(count != len(client.partitions_for_topic(name) or ()) for name, (_, count) in told.items()):
        inner.force_metadata_update()
    return told


class TopicIdWatch:
    """Notices that a topic was made anew under a running consumer.

    topic_id: tells which topic the offset of a partition belongs to, None where that is not known. displace: called
    with its partitions, which have to be placed again.
    """

    def __init__(
        self,
        client: AIOKafkaConsumer,
        partitions: Mapping[TopicPartition, Partition],
        topic_id: Callable[[TopicPartition], UUID | None],
        displace: Callable[[Collection[Partition]], None],
    ) -> None:
        self._client = client
        self._partitions = partitions
        self._topic_id = topic_id
        self._displace = displace

    async def run(self) -> None:
        """Look every five seconds, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            placed = [p for p in self._partitions.values() if p.state not in (State.UNPLACED, State.REFUSED)]
            if not placed:
                continue
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    now = await ask_topic_ids(self._client, [partition.tp for partition in placed])
            except (KafkaError, OSError) as error:  # TimeoutError is an OSError
                log.debug("the topics' ids could not be looked at: %r", error)
                continue
            changed = [p for p in placed if is_another(self._topic_id(p.tp), now.get(p.tp.topic))]
            if changed:
                log.warning("made anew: the topics of %s", ", ".join(partition.origin for partition in changed))
                self._displace(changed)


def is_another(stored: UUID | None, now: UUID | None) -> bool:
    """Whether two ids are known, and of two topics."""
    return stored is not None and now is not None and stored != now

"""Making and deleting topics for tests."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, for_code

from .errors import DevstackError

__all__ = ["create_topic", "delete_topics"]

SERVER_SECONDS = 30
log = logging.getLogger(__name__)


class _CreateTopicsAnswer(Protocol):
    """The part of Kafka's answer that is read here; aiokafka leaves it untyped."""

    topic_errors: Sequence[tuple[str, int, str | None]]


async def create_topic(
    bootstrap: str, name: str, *, partitions: int, replicas: int = 1, config: Mapping[str, str] | None = None
) -> None:
    """Create a topic and wait until every partition has a leader.

    Raises:
        DevstackError: Kafka refused, or some partition had no leader after 30 seconds.
    """
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        async with asyncio.timeout(SERVER_SECONDS):
            await admin.start()
            topic = NewTopic(name, partitions, replicas, topic_configs=dict(config or {}))
            answer = cast(_CreateTopicsAnswer, await admin.create_topics([topic]))
            for _, code, message in answer.topic_errors:
                if code:
                    raise DevstackError(f"topic {name} was not created: {for_code(code).__name__}: {message}")
            while not await _has_leaders(admin, name, partitions):
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise DevstackError(f"topic {name} was not ready after {SERVER_SECONDS} seconds") from error
    finally:
        await admin.close()


async def delete_topics(bootstrap: str, names: Sequence[str]) -> None:
    """Delete topics so that they cost the broker nothing any more; what fails is only logged."""
    if not names:
        return
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=5000)
    try:
        async with asyncio.timeout(10):
            await admin.start()
            await admin.delete_topics(list(names))
    except (KafkaError, TimeoutError) as error:
        log.warning("topics %s were not deleted: %r", ", ".join(names), error)
    finally:
        await admin.close()


async def _has_leaders(admin: AIOKafkaAdminClient, name: str, partitions: int) -> bool:
    described = (await admin.describe_topics([name]))[0]
    leaders = [partition["leader"] for partition in described["partitions"]]
    return described["error_code"] == 0 and len(leaders) == partitions and all(leader >= 0 for leader in leaders)

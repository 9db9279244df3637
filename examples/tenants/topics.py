"""``python -m examples.tenants.topics``: makes the topics, once, before the first process starts."""

import asyncio
from datetime import timedelta

from sidings.devstack.topics import create_topic

from .settings import Settings

__all__ = ["make_topics"]

_DELETED = {"cleanup.policy": "delete"}
# A tombstone stays long enough for a reader who was away: after Kafka's one day he would never learn of the deletion.
_COMPACTED = {"cleanup.policy": "compact", "delete.retention.ms": str(timedelta(days=30) // timedelta(milliseconds=1))}


async def make_topics(settings: Settings, *, partitions: int = 3) -> None:
    """Make all topics. They are compacted: the newest event of a key is all that is to be known of it. But an event of
    a user is also a part of a transaction, which would lack it for ever where a newer one has taken its place."""
    topics = settings.topics
    configs = {name: _DELETED if name == topics.users else _COMPACTED for name in topics.all()}
    await asyncio.gather(
        *(create_topic(settings.kafka, name, partitions=partitions, config=config) for name, config in configs.items())
    )


if __name__ == "__main__":
    asyncio.run(make_topics(Settings.model_validate({})))

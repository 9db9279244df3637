"""``python -m examples.tenants.topics``: makes the topics, once, before the first process starts."""

import asyncio

from sidings.devstack.topics import create_topic

from .settings import Settings

__all__ = ["make_topics"]


async def make_topics(settings: Settings, *, partitions: int = 3) -> None:
    """Make all topics. They are compacted: the newest event of a key is all that is to be known of it."""
    config = {"cleanup.policy": "compact"}
    made = (create_topic(settings.kafka, name, partitions=partitions, config=config) for name in settings.topics.all())
    await asyncio.gather(*made)


if __name__ == "__main__":
    asyncio.run(make_topics(Settings.model_validate({})))

"""A directory whose topic is deleted where brokers make the topics that somebody asks for, as is Kafka's default."""

import asyncio

from sidings.devstack.topics import create_topic, delete_topics

from .consumer_support import administering
from .directory_support import COMPACTED, a_directory, put, row
from .support import eventually


async def test_a_directory_makes_no_topic_in_place_of_its_own_that_was_deleted(own_kafka):
    """One with the brokers' defaults: it was not compacted, nobody could make the right one any more, and the directory
    forgot its rows for the sake of it."""
    kafka = await asyncio.to_thread(lambda: own_kafka(settings={"auto.create.topics.enable": "true"}))
    await create_topic(kafka.bootstrap, "other", partitions=1)
    await create_topic(kafka.bootstrap, "terminals", partitions=1, config=COMPACTED)
    await put(kafka.bootstrap, "terminals", {"t1": row("t1")})
    async with a_directory("terminals", kafka.bootstrap) as directory:
        await directory.wait_until()
        await delete_topics(kafka.bootstrap, ["terminals"])
        follower = directory._follower
        await eventually(lambda: "there is no topic 'terminals'" in str(follower.trouble), directory.problems)
        async with administering(kafka.bootstrap) as admin:
            assert await admin.list_topics() == ["other"]
        assert len(directory) == 1
        await create_topic(kafka.bootstrap, "terminals", partitions=1, config=COMPACTED)
        await put(kafka.bootstrap, "terminals", {"t2": row("t2")})
        await eventually(lambda: list(directory) == ["t2"], directory.problems)

"""Partitions that take nothing, as those that nobody leads: the others of their topic go on, and nothing is lost or out
of order."""

import asyncio
from typing import Any

import pytest
from sidings.devstack.topics import create_topic
from sidings.kafka.outbox.packing import Packer

from .consumer_support import administering
from .outbox_support import (
    arrived,
    assert_complete,
    emptied,
    never_retrieved,
    numbered,
    publish,
    publishing,
    records,
    relaying,
)
from .support import connected, eventually, fetch

PARTITIONS = range(6)


async def keys_of(kafka: Any, broker: int) -> set[bytes]:
    """Those of the partitions that a broker leads."""
    async with administering(kafka.bootstrap) as admin:
        [topic] = await admin.describe_topics(["etas"])
    led = {p["partition"] for p in topic["partitions"] if p["leader"] == broker}
    packer = Packer("test", {})
    return {key for n in range(40) if packer.partition_of("etas", key := b"k%d" % n, PARTITIONS) in led}


async def waiting(database: str) -> set[bytes]:
    rows = await fetch(database, "SELECT DISTINCT key FROM sidings.outbox WHERE topic = 'etas'")
    return {row["key"] for row in rows}


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_partitions_that_nobody_leads_hold_up_no_others_of_their_topic(
    database: str, own_kafka, caplog: pytest.LogCaptureFixture
) -> None:
    """With each try the others got one round, which had ever fewer messages of theirs, in the end none."""
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    await create_topic(kafka.bootstrap, "etas", partitions=len(PARTITIONS), replicas=1)
    stuck, count = await keys_of(kafka, 2), 0
    assert 10 <= len(stuck) <= 30

    async def more(messages: int) -> None:
        nonlocal count
        await publish(database, "etas", numbered(count, messages))
        count += messages

    async def others_left() -> bool:
        return await waiting(database) == stuck

    options: dict[str, Any] = {"delivery_seconds": 3.0, "window": 2_000, "lease_seconds": 3.0}
    async with relaying(database, kafka.bootstrap, **options) as relay, publishing(database) as (outbox, _):
        await more(400)
        await emptied(database)
        await asyncio.to_thread(kafka.broker(2).kill)
        for messages in (4_000, 8_000, 4_000):
            await more(messages)
            await eventually(others_left, seconds=90.0)
        assert [topic.topic for topic in await outbox.failing()] == ["etas"]
        assert sum(len(lane.queue) + lane.unaccounted for lane in relay.backlog.all_lanes()) <= 2_000
        async with relaying(database, kafka.bootstrap, **options) as other:  # which takes half of the slots
            await eventually(lambda: len(other.held) == len(relay.held) == 8, seconds=60.0)
            await more(8_000)
            await eventually(others_left, seconds=90.0)
        await eventually(lambda: len(relay.held) == 16, seconds=60.0)
        await more(4_000)
        await eventually(others_left, seconds=90.0)
        await asyncio.to_thread(kafka.start)
        await outbox.retry("etas", actor="test")
        await emptied(database, seconds=150.0)
        await eventually(lambda: not (relay.metrics.failing or relay.backlog.parts))

        async def works() -> bool:  # told a moment later
            return not await outbox.failing()

        await eventually(works)
        await more(400)
        await emptied(database)
    assert_complete(await records(kafka.bootstrap, "etas"), count)
    assert never_retrieved(caplog) == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("locked", [False, True])
async def test_a_person_has_them_tried_again_where_nothing_waits_for_the_others(
    database: str, own_kafka, locked: bool
) -> None:
    """Nothing was tried before the backoff's end: what was left of the topic counted as being tried, as its last round
    had failed, and had nothing to send; or nothing but what Kafka has, and somebody keeps locked."""
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    await create_topic(kafka.bootstrap, "etas", partitions=len(PARTITIONS), replicas=1)
    stuck = sorted(await keys_of(kafka, 2))
    [healthy, *_] = await keys_of(kafka, 1)
    kept = {healthy} if locked else set[bytes]()
    options: dict[str, Any] = {"delivery_seconds": 2.0, "backoff_seconds": 200.0, "max_backoff_seconds": 200.0}
    async with connected(database) as person, publishing(database) as (outbox, _):
        if locked:
            await publish(database, "etas", [(healthy.decode(), b"x")])
            await person.execute("BEGIN; SELECT FROM sidings.outbox FOR UPDATE")
        async with relaying(database, kafka.bootstrap, **options) as relay:
            await eventually(lambda: len(relay.held) == 16 and len(relay.backlog.locked) == locked)
            await asyncio.to_thread(kafka.broker(2).kill)
            await publish(database, "etas", [(key.decode(), b"x") for key in stuck])
            await eventually(outbox.failing, seconds=60.0)
            await outbox.retry("etas", actor="test")
            await eventually(lambda: bool(relay.backlog.parts), seconds=60.0)
            await eventually(lambda: relay.metrics.count("failed", "etas") == 2)
            await asyncio.to_thread(kafka.start)

            async def gone() -> bool:
                await outbox.retry("etas", actor="test")
                return await waiting(database) == kept

            await eventually(gone, seconds=60.0)
    assert await arrived(kafka.bootstrap, "etas") >= len(stuck)


# -- messages without a key --------------------------------------------------------------------------------------------


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("brokers", [2, 3], ids=["nobody leads them", "too few replicas"])
async def test_messages_without_a_key_go_to_partitions_that_take_something(
    database: str, own_kafka, brokers: int, mixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of their rounds went to any partition. So the topic stood still for `delivery_seconds`, again and again."""
    kafka = await asyncio.to_thread(own_kafka, brokers=brokers)
    config = {"min.insync.replicas": str(brokers - 1)}
    await create_topic(kafka.bootstrap, "etas", partitions=len(PARTITIONS), replicas=brokers - 1, config=config)
    count = 400

    async def gone() -> bool:
        return None not in await waiting(database)

    async with relaying(database, kafka.bootstrap, delivery_seconds=3.0):
        await publish(database, "etas", numbered(0, count))
        await emptied(database)
        await asyncio.to_thread(kafka.broker(brokers).kill)
        for number in range(60):
            some: list[tuple[str | None, bytes | None]] = [(None, b"%d" % number)]
            if mixed:
                some += numbered(count, 1)
                count += 1
            await publish(database, "etas", some)
            await asyncio.sleep(0.1)  # they come one by one, while a partition is found to take nothing
        await eventually(gone, caplog.text, seconds=60.0)
    failures = [record.getMessage() for record in caplog.records if record.getMessage().startswith("etas fails")]
    assert len(failures) <= 2, failures

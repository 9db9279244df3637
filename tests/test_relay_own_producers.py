"""The producers that topics which fail, or have had a message refused, have for themselves."""

import asyncio
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from aiokafka.errors import KafkaError
from sidings.devstack.topics import create_topic
from sidings.kafka.outbox import OutboxSettings, senders
from sidings.kafka.outbox.lane_senders import LaneSenders
from sidings.kafka.settings import KafkaSettings

from .consumer_support import administering
from .outbox_support import arrived, emptied, publish, relaying
from .support import SECONDS, connected, eventually


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_what_a_topics_own_producer_has_under_way_is_not_sent_after_its_slot_was_lost(
    database: str, own_kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new owner sends it, and newer messages of its key behind it; the former one's copy came last."""
    handed_over: list[asyncio.Future[object]] = []
    send = senders.Sender.send

    async def watched(sender: Any, *args: Any) -> asyncio.Future[object]:
        handed_over.append(await send(sender, *args))
        return handed_over[-1]

    monkeypatch.setattr(senders.Sender, "send", watched)
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    config = {"min.insync.replicas": "2", "max.message.bytes": "10000"}
    await create_topic(kafka.bootstrap, "etas", partitions=1, replicas=2, config=config)

    async def in_sync(count: int) -> bool:
        with suppress(KafkaError):  # it asks any broker
            async with administering(kafka.bootstrap) as admin:
                [etas] = await admin.describe_topics(["etas"])
            return len(etas["partitions"][0]["isr"]) == count
        return False

    async with (
        relaying(database, kafka.bootstrap, delivery_seconds=200.0, lease_seconds=1.0) as relay,
        connected(database) as heir,
    ):
        await publish(database, "etas", [("k", b"x" * 20_000)])  # it is refused
        await emptied(database)
        await asyncio.to_thread(kafka.broker(2).kill)
        await eventually(lambda: in_sync(1))
        handed_over.clear()
        await publish(
            database, "etas", [("k", b"x")]
        )  # the broker has too few replicas: aiokafka tries again and again
        await eventually(lambda: bool(handed_over))
        await heir.execute(
            "UPDATE sidings.origin SET owner = $1, epoch = epoch + 1, lease_until = now() + interval '1 hour' "
            "WHERE origin LIKE 'outbox/%'",
            uuid4(),
        )
        await eventually(lambda: relay.held == {})
        await asyncio.to_thread(kafka.start)
        await eventually(lambda: in_sync(2))
        await eventually(handed_over[0].done)
        assert await arrived(kafka.bootstrap, "etas") == 0


async def test_a_slot_that_is_lost_while_a_topics_own_producer_asks_for_the_topic_stops_the_topic_for_a_moment_only(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer was ended, and who waited for its metadata waited for ever: of the topic nothing more was sent."""
    small = await topic("small", config={"max.message.bytes": "10000"})
    own, lost = LaneSenders.own, list[str]()

    async def own_and_lost(of_topic: LaneSenders) -> senders.Sender:
        sender = await own(of_topic)
        if not lost:  # the message was refused, and is to be sent alone
            [slot] = [slot for slot in relay.backlog.slots.values() if slot.under_way]
            lost.append(slot.name)
            asyncio.get_running_loop().call_soon(relay._lose, slot)  # once somebody waits
        return sender

    monkeypatch.setattr(LaneSenders, "own", own_and_lost)
    async with relaying(database, sidings_kafka, lease_seconds=1.0, metadata_seconds=0.5) as relay:
        await publish(database, small, [("k", b"x" * 20_000), ("k", b"x")])
        await emptied(database)
    assert len(lost) == 1
    assert await arrived(sidings_kafka, small) == 1


async def test_a_topics_own_producer_that_it_needs_no_more_ends_although_the_relay_is_stopped_meanwhile(
    sidings_kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was closed by the topic's task, which a stop cancels: its connections lived on for as long as the process."""
    shared = senders.Senders(KafkaSettings(bootstrap=sidings_kafka), OutboxSettings())
    connecting, of_topic = asyncio.create_task(shared.run()), LaneSenders(shared)
    own = await of_topic.own()
    of_own: Any = own._producer
    sending, stop, stops = of_own._sender.sender_task, of_own.stop, asyncio.Event()

    async def hangs() -> None:
        stops.set()
        await (stop() if sending.done() else asyncio.Event().wait())

    monkeypatch.setattr(of_own, "stop", hangs)
    choosing = asyncio.create_task(of_topic.choose(failing=False))
    await asyncio.wait_for(stops.wait(), SECONDS)
    choosing.cancel()
    await eventually(sending.done, seconds=10)
    connecting.cancel()
    await shared.close()
    assert of_own._closed

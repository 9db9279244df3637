"""A broker that is neither up nor down, as one whose machine stands still, or to which nothing gets through: it keeps
nobody from the others, and what it led is read from whoever leads it next. A request may take two minutes here."""

import asyncio
import gc
import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, cast

import aiokafka.client
import pytest
from aiokafka import TopicPartition
from aiokafka.client import ConnectionGroup
from aiokafka.errors import KafkaError, SaslAuthenticationFailed
from sidings import KafkaSettings, KafkaUnavailable, Message, Transaction
from sidings.devstack.topics import create_topic
from sidings.kafka import Producer, membership
from sidings.kafka.brokers import _Client
from sidings.kafka.directory.reader import Reader
from sidings.kafka.outbox import NotPublished, OutboxSettings
from sidings.kafka.outbox.senders import Sender

from .consumer_support import Number, a_service, as_json, producing
from .outbox_support import sending
from .support import SECONDS, eventually
from .test_stateless import a_service as a_stateless_service

PARTITIONS = 6
REQUEST_SECONDS = 120.0
IN_TIME = 60.0
REPLICATED: dict[str, Any] = {"partitions": PARTITIONS, "replicas": 3}


@pytest.fixture(params=["says nothing", "cannot be connected to"])
def hanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that hangs; of several it is the first to be tried."""
    monkeypatch.setattr(random, "shuffle", lambda hosts: None)
    with ExitStack() as sockets:
        silent = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4 if request.param == "cannot be connected to" else 0):  # its queue is full
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(silent.getsockname())
        yield f"127.0.0.1:{silent.getsockname()[1]}"


async def test_an_address_that_hangs_keeps_nobody_from_the_next_one(hanging: str, sidings_kafka: str, topic) -> None:
    """The time for all of them was the first one's, each time that it came first."""
    name = await topic()
    settings = KafkaSettings(bootstrap=f"{hanging},{sidings_kafka}", request_seconds=8.0, rebalance_seconds=5.0)

    async def consumer() -> None:
        client = membership.make_client(settings, "test")
        try:
            await membership.connect(client, asyncio.Event(), settings.request_seconds)
        finally:
            await membership.close(client)

    async def directory() -> None:
        reader = Reader(settings, name)
        try:
            await reader.connect(asyncio.Event())
            assert (await reader.look_at_topic()).partitions == {0}
        finally:
            await reader.close()

    async def producer() -> None:
        sender = Sender(settings, OutboxSettings(), idempotent=True)
        await sender.start()
        await sender.close()

    await asyncio.gather(consumer(), directory(), producer())


async def test_the_address_that_a_broker_tells_and_that_leads_nowhere_is_told(own_kafka, monkeypatch) -> None:
    """As that of a Kafka in a container, which has a name there that nobody else knows."""
    monkeypatch.setattr("sidings.kafka.outbox.senders._START_SECONDS", 1.0)
    kafka = await asyncio.to_thread(own_kafka, settings={"advertised.listeners": "PLAINTEXT://127.0.0.1:1"})
    settings, told = KafkaSettings(bootstrap=kafka.bootstrap), r"broker 1 at 127\.0\.0\.1:1, .*advertised\.listeners"
    with pytest.raises(KafkaUnavailable, match=told):
        await Sender(settings, OutboxSettings(), idempotent=True).start()
    reader = Reader(settings, "terminals")
    try:
        await reader.connect(asyncio.Event())
        with pytest.raises(KafkaError, match=told):
            await reader.look_at_topic()
        assert "127.0.0.1:1" in reader._contact.unreached
    finally:
        await reader.close()


async def test_a_broker_that_alone_refuses_us_is_told_with_its_reason(own_kafka, monkeypatch) -> None:
    """As where a password was changed and brokers are restarted one by one. The others tell who leads what, so that
    Kafka seemed to be there, and to say nothing of some partitions, for no reason."""
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    await create_topic(kafka.bootstrap, "terminals", partitions=2)
    address = kafka.broker(2).address
    create = aiokafka.client.create_conn

    async def refusing(host: str, port: int, **options: Any) -> Any:
        if f"{host}:{port}" == address:
            raise SaslAuthenticationFailed("the password is wrong")
        return await create(host, port, **options)

    monkeypatch.setattr(aiokafka.client, "create_conn", refusing)
    told = rf": no connection to broker 2 at {address}, .*SaslAuthenticationFailed.*the password is wrong"
    settings = KafkaSettings(bootstrap=kafka.broker(1).address)
    reader, sender = Reader(settings, "terminals"), Sender(settings, OutboxSettings(), idempotent=False)
    try:
        await reader.connect(asyncio.Event())
        reader.assign([0, 1])
        for n in (0, 1):
            reader.seek(n, 0, None)
        await eventually(lambda: re.search(told, reader.why_silent), lambda: reader.why_silent)
        leads: Any = cast(Any, reader._client)._client.cluster.leader_for_partition
        of_2, of_1 = sorted((0, 1), key=lambda n: leads(TopicPartition("terminals", n)) != 2)
        assert reader._contact.silence([TopicPartition("terminals", of_1)]) == "", "it has nothing to do with these"
        await sender.start()
        await sender.partitions("terminals", SECONDS)
        await sender.append("terminals", value=b"1", partition=of_2)
        await eventually(lambda: re.search(told, str(sender.late("terminals", [of_2]))))
    finally:
        await sender.kill()
        await reader.close()


async def test_a_member_that_cannot_reach_its_coordinator_says_so(own_kafka, monkeypatch) -> None:
    """Its group puts it out, and it cannot be told: it goes on, beside whoever has its partitions now."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 3.0)
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    await create_topic(kafka.bootstrap, "positions", partitions=2)
    refused, create = list[str](), aiokafka.client.create_conn

    async def refusing(host: str, port: int, **options: Any) -> Any:
        if f"{host}:{port}" in refused:
            raise SaslAuthenticationFailed("the password is wrong")
        return await create(host, port, **options)

    monkeypatch.setattr(aiokafka.client, "create_conn", refusing)
    service = a_stateless_service(kafka.bootstrap, session_seconds=6.0)

    @service.consumer("positions", stateless=True, dead_letter="dead")
    async def handle(message: Message[Number]) -> None: ...

    async with service:
        await eventually(lambda: service._life.consumer.joined and not service.problems())
        client: Any = service._life.consumer._client
        coordinator = client._coordinator.coordinator_id
        address = kafka.broker(coordinator).address
        refused.append(address)
        client._client._conns[coordinator, ConnectionGroup.COORDINATION].close()
        told = rf"the group's coordinator has not answered .*broker {coordinator} at {address}, .*the password is wrong"
        await eventually(lambda: re.search(told, " ".join(service.problems())), service.problems)
        refused.clear()
        await eventually(lambda: not service.problems(), service.problems)


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_what_a_broker_that_hangs_led_is_read_from_its_next_leader(effects: str, own_kafka) -> None:
    """Each fetch from it was waited for, then a connection to it, or its word of who leads what: 40 s each time."""
    kafka = await asyncio.to_thread(own_kafka, brokers=3)
    for name in ("stored", "stateless"):
        await create_topic(kafka.bootstrap, name, **REPLICATED)
    await create_topic(kafka.bootstrap, "rows", **REPLICATED, config={"cleanup.policy": "compact"})
    service = a_service(effects, kafka.bootstrap, settings={"request_seconds": REQUEST_SECONDS})
    seen: set[tuple[str, int, int]] = set()

    @service.consumer("stored")
    async def stored(message: Message[Number], tx: Transaction) -> None:
        seen.add(("stored", message.partition, message.value.n))

    @service.consumer("stateless", stateless=True, dead_letter="dead")
    async def stateless(message: Message[Number]) -> None:
        seen.add(("stateless", message.partition, message.value.n))

    rows = service.directory("rows", model=Number)
    rows.on_change(lambda change: seen.add(("rows", int(change.key), change.new.n)))

    async def send(n: int) -> bool:
        servers = ",".join(broker.address for broker in kafka.brokers if broker.plan.node != hanging)
        with suppress(KafkaError, OSError):  # nobody may lead a partition for a moment
            async with asyncio.timeout(SECONDS), producing(servers, request_timeout_ms=2_000) as producer:
                for name in ("stored", "stateless", "rows"):
                    for p in range(PARTITIONS):
                        await producer.send_and_wait(name, as_json(n), key=str(p).encode(), partition=p)
                return True
        return False

    def all_seen(n: int) -> bool:
        return {(name, p, n) for name in ("stored", "stateless", "rows") for p in range(PARTITIONS)} <= seen

    def all_committed() -> bool:
        return all(p.committed == p.next_offset for p in service._life.consumer._stateless.partitions.values())

    hanging = None
    async with service:
        await eventually(lambda: not service.problems() and rows.ready, seconds=IN_TIME)
        assert await send(1)
        await eventually(lambda: all_seen(1), lambda: seen, seconds=IN_TIME)
        hanging = service._life.consumer._client._coordinator.coordinator_id  # it leads some, too
        await asyncio.to_thread(kafka.broker(hanging).pause)
        await eventually(lambda: send(2), seconds=IN_TIME)
        await eventually(lambda: all_seen(2), lambda: seen, seconds=IN_TIME)
        await eventually(all_committed, seconds=IN_TIME)
    gc.collect()  # commits that were given up have failed since, of which asyncio tells here, and in no other test


@pytest.mark.chaos
async def test_each_broker_is_asked_once_who_coordinates_the_group(own_kafka, monkeypatch) -> None:
    """Any of them was asked each time: of three the one that hangs three times in one case of 27, and waited for."""
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    settings = KafkaSettings(bootstrap=kafka.bootstrap, request_seconds=REQUEST_SECONDS)
    consumer = membership.make_client(settings, "test")
    client: Any = consumer._client

    async def coordinator() -> int | None:
        with suppress(KafkaError):  # the topic of the groups has to be made first
            return await client.coordinator_lookup(0, "test")
        return None

    await membership.connect(consumer, asyncio.Event(), SECONDS)
    try:
        found = await eventually(coordinator)
        assert [await client.ready(node) for node in (1, 2)] == [True, True]
        monkeypatch.setattr(random, "shuffle", lambda nodes: nodes.sort(reverse=True))
        await asyncio.to_thread(kafka.broker(2).pause)
        assert await asyncio.wait_for(coordinator(), SECONDS) == found
    finally:
        await asyncio.to_thread(kafka.resume)
        await membership.close(consumer)


@pytest.mark.chaos
async def test_nobody_is_told_that_there_is_no_topic_while_kafka_says_nothing(own_kafka) -> None:
    """Of a topic that a producer did not know yet it said so, as of one that is missing."""
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "known", partitions=1)
    async with sending(kafka.bootstrap, delivery_seconds=8.0) as producer:
        await producer.send("known", value=b"0")
        await create_topic(kafka.bootstrap, "other", partitions=1)
        await asyncio.to_thread(kafka.pause)
        try:
            with pytest.raises(KafkaUnavailable):
                await producer.send("other", value=b"1")
        finally:
            await asyncio.to_thread(kafka.resume)
        await eventually(lambda: arrives(producer, "other"))
        with pytest.raises(NotPublished):
            await producer.send("missing", value=b"2")


async def arrives(producer: Producer, topic: str) -> bool:
    with suppress(KafkaUnavailable):
        await producer.send(topic, value=b"1")
        return True
    return False


async def test_who_leads_a_partition_that_nobody_leads_is_not_asked_without_a_pause(
    topic, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of times a second, by each client, of the brokers that are left in an outage."""
    asked = list[float]()
    update = _Client._update_metadata

    async def noted(client: _Client, *arguments: Any) -> bool:
        asked.append(time.monotonic())
        return await update(client, *arguments)

    monkeypatch.setattr(_Client, "_update_metadata", noted)
    reader = Reader(KafkaSettings(bootstrap=sidings_kafka), await topic())
    await reader.connect(asyncio.Event())
    reader.assign([7])  # it has one partition
    reader.seek(7, 0, None)
    await eventually(lambda: len(asked) > 8)
    await reader.close()
    assert asked[8] - asked[3] >= 0.4


async def test_that_no_broker_tells_who_leads_what_is_told_ever_more_rarely(
    sidings_kafka: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten times a second, by each client, for as long as all brokers were away."""
    reader = Reader(KafkaSettings(bootstrap=sidings_kafka), "any")
    await reader.connect(asyncio.Event())
    client: Any = reader._client._client
    with monkeypatch.context() as away:
        away.setattr(client, "_get_conn", lambda *_, **__: asyncio.sleep(0))
        for _ in range(3):
            assert await client.force_metadata_update() is False
    assert await client.force_metadata_update()
    await reader.close()
    told = [record.getMessage() for record in caplog.records if "who leads what" in record.getMessage()]
    assert len(told) == 2
    assert "works again" in told[1]

"""Rights that are taken away while everything runs, by a broker with an authorizer: what they concern stands still and
says so, nothing else does, and it goes on when they are given back."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest
from sidings import Message, Transaction
from sidings.devstack.topics import create_topic
from sidings.kafka import fetch_loop, placing

from .consumer_support import Number, a_service, administering, produce
from .support import eventually

AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
_TOPIC, _GROUP, _LITERAL, _ALL, _READ, _DENY, _ALLOW = 2, 3, 3, 2, 3, 2, 3


@asynccontextmanager
async def forbidden(bootstrap: str, name: str, operation: int, kind: int = _TOPIC):
    """Nobody has the right to do this with the topic, or with the group."""
    rules = [(kind, name, _LITERAL, "User:ANONYMOUS", "*", *what) for what in ((_ALL, _ALLOW), (operation, _DENY))]
    async with administering(bootstrap) as admin:
        for rule in rules:
            assert (await admin._send_to_controller(CreateAclsRequest(*rule))).creation_responses[0][0] == 0
        yield
        for rule in reversed(rules):
            assert len((await admin._send_to_controller(DeleteAclsRequest(*rule))).filter_responses[0][2]) == 1


@pytest.mark.long
@pytest.mark.timeout(90)
async def test_a_topic_that_may_not_be_read_any_more_stops_no_other(effects, own_kafka, monkeypatch):
    monkeypatch.setattr(fetch_loop, "LOOK_AGAIN_SECONDS", 0.5)
    monkeypatch.setattr("sidings.kafka.stateless_loop.LOOK_AGAIN_SECONDS", 0.5)
    monkeypatch.setattr(placing, "_REFUSED_SECONDS", 0.5)
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=AUTHORIZER))
    topics = ("tables", "stateless", "other", "other-stateless")
    for topic in topics:
        await create_topic(kafka.bootstrap, topic, partitions=2)
    service = a_service(effects, kafka.bootstrap)
    handled = Counter[str]()
    gates = {2: asyncio.Event(), 3: asyncio.Event()}

    for topic in ("tables", "other"):

        @service.consumer(topic)
        async def handle(message: Message[Number], tx: Transaction) -> None:
            handled[message.topic] += 1

    for topic in ("stateless", "other-stateless"):

        @service.consumer(topic, stateless=True, concurrency=2, dead_letter="dead")
        async def handle_too(message: Message[Number]) -> None:
            handled[message.topic] += 1
            if message.value.n in gates:
                await gates[message.value.n].wait()

    async def one_more(*of: str) -> None:
        before = handled.copy()
        for topic in of:
            await produce(kafka.bootstrap, topic, [1], partition=handled[topic] % 2)
        await eventually(lambda: all(handled[topic] == before[topic] + 1 for topic in of), lambda: (of, handled))

    async with service:
        await one_more(*topics)
        for topic in topics[:2]:
            async with forbidden(kafka.bootstrap, topic, _READ):
                await eventually(lambda: f"no right to read the topic {topic!r}" in str(service.problems()))  # noqa: B023
                await one_more(*topics[2:])
            await eventually(lambda: service.problems() == [], service.problems)
            await one_more(*topics)

        # What is done of a topic that may not be read cannot be committed, either; that of the others can.
        partitions = service._life.consumer._stateless.partitions
        for n in gates:
            await produce(kafka.bootstrap, "stateless", [n], key=f"key-{n}", partition=0)
        refused, other = partitions[TopicPartition("stateless", 0)], partitions[TopicPartition("other-stateless", 0)]
        await eventually(lambda: len(refused.workers) == 2)
        async with forbidden(kafka.bootstrap, "stateless", _READ):
            gates[2].set()
            await eventually(lambda: refused.uncommitted_since is not None)
            await produce(kafka.bootstrap, "other-stateless", [1], partition=0)
            await eventually(lambda: other.committed == other.end == handled["other-stateless"] // 2 + 1)
            assert other.uncommitted_since is None
            gates[3].set()
        await eventually(lambda: service.problems() == [], service.problems)


@pytest.mark.timeout(90)
async def test_a_topic_that_may_not_be_read_from_the_start_stops_no_other(own_kafka, monkeypatch):
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=AUTHORIZER))
    for topic in ("refused", "other"):
        await create_topic(kafka.bootstrap, topic, partitions=2)
    service = a_service(None, kafka.bootstrap)
    seen = []
    for topic in ("refused", "other"):

        @service.consumer(topic, stateless=True, dead_letter="dead")
        async def handle(message: Message[Number]) -> None:
            seen.append(message.topic)

    async with forbidden(kafka.bootstrap, "refused", _READ), service:
        await produce(kafka.bootstrap, "other", [1], partition=0)
        await produce(kafka.bootstrap, "other", [1], partition=1)
        await eventually(lambda: seen == ["other"] * 2, service.problems, seconds=20)


@pytest.mark.timeout(90)
async def test_a_topic_that_was_stateless_and_may_not_be_read_any_more_stops_no_other(database, own_kafka):
    """Kafka takes no offset of it, and is to be told of all of them before they are placed."""
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=AUTHORIZER))
    topics, handled = ("refused", "other"), list[tuple[str, str, int]]()

    async def run(kind: str, n: int, *of: str, **options: Any) -> None:
        service = a_service(database if kind == "tables" else None, kafka.bootstrap, settings={"group": "g"})
        for topic in topics:
            if kind == "tables":

                @service.consumer(topic)
                async def handle(message: Message[Number], tx: Transaction) -> None:
                    handled.append((kind, message.topic, message.value.n))

            else:

                @service.consumer(topic, stateless=True, dead_letter="dead")
                async def handle_too(message: Message[Number]) -> None:
                    handled.append((kind, message.topic, message.value.n))

        async with service:
            for topic in of:
                await produce(kafka.bootstrap, topic, [n])
            expected = {(kind, topic, n) for topic in of}
            await eventually(lambda: expected <= set(handled), lambda: (handled, service.problems()), seconds=20)

    for topic in topics:
        await create_topic(kafka.bootstrap, topic, partitions=1)
    await run("tables", 0, *topics)
    await run("stateless", 1, *topics)
    async with forbidden(kafka.bootstrap, "refused", _READ):
        await run("tables", 2, "other")
    await run("tables", 3, *topics)
    assert [(kind, n) for kind, topic, n in handled if topic == "refused"] == [
        ("tables", 0), ("stateless", 1), ("tables", 3)
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(90)
async def test_who_may_not_read_a_group_or_a_directorys_topic_any_more_is_told_to_grant_it(own_kafka, monkeypatch):
    """Of the group `/health` told aiokafka's name of the error alone; of the topic, that Kafka did not answer."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 1.0)
    monkeypatch.setattr("sidings.kafka.directory.directory._UNREACHABLE_SECONDS", 1.0)
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=AUTHORIZER))
    for topic in ("events", "terminals"):
        await create_topic(kafka.bootstrap, topic, partitions=1)
    service = a_service(None, kafka.bootstrap, settings={"group": "readers"})
    service.directory("terminals", model=Number)
    seen = list[int]()

    @service.consumer("events", stateless=True, dead_letter="dead")
    async def handle(message: Message[Number]) -> None:
        seen.append(message.value.n)

    def told(*words: str) -> bool:
        return all(word in str(service.problems()) for word in words)

    async with service:
        await produce(kafka.bootstrap, "events", [1])
        await eventually(lambda: seen == [1])
        async with (
            forbidden(kafka.bootstrap, "readers", _READ, _GROUP),
            forbidden(kafka.bootstrap, "terminals", _READ),
        ):
            await eventually(lambda: told("readers: there is no right to read this consumer group: grant READ on it"))
            await eventually(lambda: told("directory 'terminals': there is no right to read the topic: grant READ"))
            assert not told("Kafka does not answer")
        await eventually(lambda: service.problems() == [], service.problems)

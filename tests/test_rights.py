"""Rights that are taken away while everything runs, by a broker with an authorizer: what they concern stands still and
says so, nothing else does, and it goes on when they are given back."""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest
from sidings import Job, KafkaSettings, Message, NotPublished, Transaction
from sidings.devstack.topics import create_topic
from sidings.kafka import fetch_loop, placing

from .consumer_support import TWICE_AND_PARK, Number, a_service, administering, produce
from .directory_support import COMPACTED
from .outbox_support import emptied, records
from .support import eventually

AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
_TOPIC, _GROUP, _CLUSTER, _LITERAL, _PREFIXED = 2, 3, 4, 3, 4
_ALL, _READ, _WRITE, _CREATE, _DESCRIBE, _DESCRIBE_CONFIGS, _DENY, _ALLOW = 2, 3, 4, 5, 8, 10, 2, 3


@asynccontextmanager
async def forbidden(bootstrap: str, name: str, *operations: int, kind: int = _TOPIC):
    """Nobody has the right to do this with the topic, or with the group."""
    what = [(_ALL, _ALLOW), *((operation, _DENY) for operation in operations)]
    async with ruled(bootstrap, *((kind, name, _LITERAL, *each) for each in what)):
        yield


@asynccontextmanager
async def ruled(bootstrap: str, *what: tuple[object, ...], user: str = "ANONYMOUS"):
    """These rules hold for this user; everybody has the name of nobody."""
    rules = [(*each[:3], f"User:{user}", "*", *each[3:]) for each in what]
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


@pytest.mark.long
@pytest.mark.timeout(90)
async def test_a_topic_that_may_not_even_be_seen_any_more_keeps_its_jobs(database, own_kafka, monkeypatch):
    """As where the one rule is taken away that allows READ, and DESCRIBE with it: brokers tell of no partition then, as
    if the topic had been deleted."""
    monkeypatch.setattr(fetch_loop, "LOOK_AGAIN_SECONDS", 0.5)
    monkeypatch.setattr(placing, "_REFUSED_SECONDS", 0.5)
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.5)
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=AUTHORIZER))
    for topic in ("positions", "legs", "other"):
        await create_topic(kafka.bootstrap, topic, partitions=1)
    service = a_service(
        database,
        kafka.bootstrap,
        topics=["legs"],
        settings={"fetch_seconds": 0.05, "metadata_seconds": 0.5},
        executor={"drain_seconds": 0.0},
    )
    running, done, gate = list[str](), list[str](), asyncio.Event()

    async def work(name: str) -> None:
        running.append(name)
        await gate.wait()
        done.append(name)

    @service.job()
    async def run(job: Job[Number]) -> None:
        await work(job.origin)

    @service.consumer("positions")
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await run.enqueue(tx, message.value)

    @service.consumer("other", stateless=True, concurrency=2, dead_letter="dead")
    async def handle_too(message: Message[Number]) -> None:
        await work(f"{message.topic} {message.value.n}") if message.value.n == 0 else done.append("other 1")

    async with service:
        await produce(kafka.bootstrap, "positions", [0])
        await produce(kafka.bootstrap, "other", [0])
        await eventually(lambda: service.executor.scheduler.origins.keys() == {"positions/0", "legs/0", "other/0"})
        async with service.transaction() as tx:
            await run.enqueue(tx, Number(n=0), origin=service.origin_for("k", "legs"))
        await eventually(lambda: sorted(running) == ["legs/0", "other 0", "positions/0"])
        async with (
            forbidden(kafka.bootstrap, "positions", _READ, _DESCRIBE),
            forbidden(kafka.bootstrap, "legs", _READ, _DESCRIBE),
        ):
            await eventually(lambda: "there is no right to see the topic legs, positions" in str(service.problems()))
            assert "create" not in str(service.problems())
            await produce(kafka.bootstrap, "other", [1], key="another")
            await eventually(lambda: done == ["other 1"])
            assert service.executor.scheduler.origins.keys() == {"positions/0", "legs/0", "other/0"}
            gate.set()
            await eventually(lambda: len(done) == 4)
            assert len(running) == 3, "none was cancelled, and began anew"
        await eventually(lambda: service.problems() == [], service.problems)
        await produce(kafka.bootstrap, "positions", [1])
        await eventually(lambda: done.count("positions/0") == 2)


@pytest.mark.long
@pytest.mark.timeout(90)
async def test_who_starts_without_the_right_to_see_a_topic_takes_nothing_from_others(database, own_kafka, monkeypatch):
    """It may be the group's leader soon, and knows no partition of the topic."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.5)
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=AUTHORIZER))
    await create_topic(kafka.bootstrap, "positions", partitions=4)
    seen = Counter[int]()

    def another() -> Any:
        settings = {"fetch_seconds": 0.05, "metadata_seconds": 0.5}
        service = a_service(database, kafka.bootstrap, settings=settings, executor={"drain_seconds": 0.0})

        @service.consumer("positions")
        async def handle(message: Message[Number], tx: Transaction) -> None:
            seen[message.value.n] += 1

        return service

    def held(service: Any) -> set[str]:
        return set(service.executor.scheduler.origins)

    first, second = another(), another()
    async with AsyncExitStack() as life, AsyncExitStack() as right:
        async with first:
            await eventually(lambda: len(held(first)) == 4)
            await right.enter_async_context(forbidden(kafka.bootstrap, "positions", _READ, _DESCRIBE))
            await eventually(lambda: "no right to see the topic positions" in str(first.problems()))
            await life.enter_async_context(second)
            await eventually(lambda: len(held(first)) == len(held(second)) == 2)
            await eventually(lambda: "no right to see the topic positions" in str(second.problems()))
            consumer, mine = second._life.consumer, held(second)
            client, generation = consumer._client, consumer._client._coordinator.generation
        await eventually(
            lambda: client._coordinator.generation > generation and consumer.vitals.rebalancing_since is None
        )
        assert {f"{topic}/{number}" for topic, number in client.assignment()} == held(second) == mine
        asked = list[float]()
        client._client.cluster.add_listener(lambda _: asked.append(time.monotonic()))
        await eventually(lambda: len(asked) == 3)
        assert asked[2] - asked[0] > 1.5, "with an error in the log each time, it asked ten times a second"
        await right.aclose()
        await eventually(lambda: len(held(second)) == 4)
        await produce(kafka.bootstrap, "positions", [1])
        await eventually(lambda: seen[1] == 1, second.problems)


@pytest.mark.timeout(90)
async def test_a_topic_that_may_not_be_read_from_the_start_stops_no_other(own_kafka, monkeypatch):
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=AUTHORIZER))
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.5)
    for topic in ("refused", "unseen", "other"):
        await create_topic(kafka.bootstrap, topic, partitions=2)
    service = a_service(None, kafka.bootstrap)
    seen = []
    for topic in ("refused", "unseen", "other", "missing"):

        @service.consumer(topic, stateless=True, dead_letter="dead")
        async def handle(message: Message[Number]) -> None:
            seen.append(message.topic)

    async with (
        forbidden(kafka.bootstrap, "refused", _READ),
        forbidden(kafka.bootstrap, "unseen", _READ, _DESCRIBE),
        service,
    ):
        await produce(kafka.bootstrap, "other", [1], partition=0)
        await produce(kafka.bootstrap, "other", [1], partition=1)
        await eventually(lambda: seen == ["other"] * 2, service.problems, seconds=20)
        await eventually(lambda: "no topic missing: create it" in str(service.problems()), service.problems)
        await eventually(lambda: "no right to see the topic unseen: grant" in str(service.problems()), service.problems)


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
            forbidden(kafka.bootstrap, "readers", _READ, kind=_GROUP),
            forbidden(kafka.bootstrap, "terminals", _READ),
        ):
            await eventually(lambda: told("readers: there is no right to read this consumer group: grant READ on it"))
            await eventually(lambda: told("directory 'terminals': there is no right to read the topic: grant READ"))
            assert not told("Kafka does not answer")
        await eventually(lambda: service.problems() == [], service.problems)


@pytest.mark.timeout(90)
async def test_a_missing_topic_that_may_not_be_made_is_told_as_missing_and_not_as_a_missing_right(
    database, own_kafka, monkeypatch
):
    """Brokers that make topics refuse with one code who may not, and who may not see them."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.5)
    settings = AUTHORIZER | {"auto.create.topics.enable": "true"}
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=settings))
    service = a_service(database, kafka.bootstrap, topics=["etas.positions"])
    await create_topic(kafka.bootstrap, "etas.there", partitions=1)
    async with (
        forbidden(kafka.bootstrap, "kafka-cluster", _CREATE, kind=_CLUSTER),
        ruled(kafka.bootstrap, (_TOPIC, "etas.", _PREFIXED, _WRITE, _ALLOW)),
        service,
    ):
        await service.producer.send("etas.there", key="k", value=b"1")
        with pytest.raises(NotPublished, match=r"'etas\.new' does not exist"):
            await service.producer.send("etas.new", key="k", value=b"1")
        await eventually(lambda: service.problems() == ["there is no topic etas.positions: create it"])


@pytest.mark.timeout(90)
async def test_the_rights_that_the_guide_names_are_enough(database, own_kafka, caplog):
    settings = {name: value for name, value in AUTHORIZER.items() if "acl" not in name}
    settings["super.users"] = "User:ANONYMOUS"
    kafka = await asyncio.to_thread(lambda: own_kafka(secure=True, settings=settings))
    rights = {
        "positions": [_READ],
        "steps": [_READ],
        "legs": [_DESCRIBE],
        "etas": [_WRITE],
        "dead": [_WRITE],
        "terminals": [_READ, _DESCRIBE_CONFIGS],
    }
    for topic in rights:
        await create_topic(kafka.bootstrap, topic, partitions=1, config=COMPACTED if topic == "terminals" else None)
    secured: Any = {
        "bootstrap": kafka.secure_bootstrap,
        "security_protocol": "SASL_SSL",
        "cafile": kafka.ca_file,
        "sasl_username": kafka.username,
        "sasl_password": kafka.password,
        "group": "readers",
    }
    service = a_service(database, KafkaSettings(**secured), topics=["legs"])
    terminals, done = service.directory("terminals", model=Number), list[str]()

    @service.job(group="n", home="legs")
    async def run(job: Job[Number]) -> None:
        done.append(job.origin)

    @service.consumer("positions")
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await run.enqueue(tx, message.value)
        await service.outbox.publish(tx, "etas", key="k", value=message.value)
        done.append(message.topic)

    @service.consumer("steps", stateless=True, retry=TWICE_AND_PARK, dead_letter="dead")
    async def handle_too(message: Message[Number]) -> None:
        done.append(message.topic)
        raise ValueError("to the dead letters")

    rules = [(_TOPIC, topic, _LITERAL, each, _ALLOW) for topic, those in rights.items() for each in those]
    async with (
        ruled(kafka.bootstrap, *rules, (_GROUP, "readers", _LITERAL, _READ, _ALLOW), user=kafka.username),
        service,
    ):
        for topic in ("positions", "steps", "terminals"):
            await produce(kafka.bootstrap, topic, [1])
        await eventually(lambda: {*done} == {"positions", "legs/0", "steps"} and "k" in terminals, service.problems)
        await emptied(database)
        await service.producer.send("etas", key="k", value=b"direct")
        assert len(await records(kafka.bootstrap, "etas")) == 2
        dead = service._life.consumer._stateless.partitions[TopicPartition("steps", 0)]
        await eventually(lambda: dead.committed == 1, service.problems)
        assert len(await records(kafka.bootstrap, "dead")) == 1
        await service.reset_offsets("positions", to="earliest", actor="test")
        await eventually(lambda: done.count("positions") == 2)
        assert service.problems() == []
    assert "uthoriz" not in caplog.text

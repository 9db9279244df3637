"""From Kafka's assignment to the executor's origins: the listener alone, and consumers that their users own."""

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from sidings import Job, Message, StaticAssignment, Transaction
from sidings.errors import ConfigurationError
from sidings.kafka import RebalanceListener

from .consumer_support import Number, a_service, as_json, effects_table, produce, producing, record
from .support import SECONDS, Ride, drained, eventually, value


class Assignments(list):
    """What an executor was told."""

    def __call__(self, origins, generation):
        self.append((sorted(origins), generation))


def partitions(*numbers: int) -> set[TopicPartition]:
    return {TopicPartition("p", number) for number in numbers}


async def test_a_revocation_alone_drains_nothing_and_the_assignment_is_complete():
    told = Assignments()
    listener = RebalanceListener(told, patience_seconds=SECONDS)
    listener.on_partitions_assigned(partitions(0, 1))
    listener.on_partitions_revoked(partitions(0, 1))
    assert [origins for origins, _ in told] == [["p/0", "p/1"]]
    listener.on_partitions_assigned(partitions(1, 2))
    assert [origins for origins, _ in told] == [["p/0", "p/1"], ["p/1", "p/2"]]
    assert told[0][1] < told[1][1]  # even where no consumer can be seen, generations grow


async def test_jobs_are_drained_when_no_assignment_follows_a_revocation():
    told = Assignments()
    listener = RebalanceListener(told, patience_seconds=0.05)
    listener.on_partitions_assigned(partitions(0))
    listener.on_partitions_revoked(partitions(0))
    await eventually(lambda: told[-1][0] == [])
    listener.on_partitions_assigned(partitions(0))
    assert told[-1][0] == ["p/0"]


async def test_a_closed_listener_passes_nothing_on():
    told = Assignments()
    listener = RebalanceListener(told, patience_seconds=0.01)
    listener.on_partitions_assigned(partitions(0))
    listener.on_partitions_revoked(partitions(0))
    listener.close()
    listener.on_partitions_assigned(partitions(0, 1))
    listener.on_partitions_revoked(partitions(0, 1))
    await asyncio.sleep(0.05)  # well past the patience
    assert len(told) == 1


@pytest.mark.parametrize("origins", [[], ["a/0", "a/0"], [""]])
def test_a_static_assignment_names_each_origin_once(origins):
    with pytest.raises(ConfigurationError, match="each once"):
        StaticAssignment(origins)


async def test_a_static_assignment_needs_no_kafka(database):
    service = a_service(database, assignment=StaticAssignment(["orders/0", "orders/1"]))
    ran: list[str] = []

    @service.job()
    async def follow_up(job: Job[Ride]) -> None:
        ran.append(job.origin)

    async with service:
        await service.executor.settled(SECONDS)
        assert set(service.executor.held) == {"orders/0", "orders/1"}
        async with service.transaction() as tx:
            await follow_up.enqueue(tx, Ride(), origin="orders/1")
        await eventually(lambda: ran == ["orders/1"])


async def test_a_second_instance_with_the_same_static_assignment_waits_for_the_first(database):
    def another():
        return a_service(database, assignment=StaticAssignment(["orders/0"]))

    async with another() as second:
        async with another() as first:
            holder = await eventually(lambda: next((s for s in (first, second) if s.executor.held), None))
            other = first if holder is second else second
            # It has asked for the origin, and did not get it.
            wanted = "SELECT wanted_by IS NOT NULL FROM sidings.origin"
            await eventually(lambda: value(database, wanted))
            assert other.executor.held == {}
            await holder.executor.stop() if holder is first else None
        await eventually(lambda: second.executor.held)


# -- consumers that their users own -----------------------------------------------------------------------------------


def a_consumer(bootstrap: str, group: str, *, enable_auto_commit: bool = False) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        heartbeat_interval_ms=300,
        enable_auto_commit=enable_auto_commit,
    )


async def test_a_users_own_consumer_assigns_the_origins_through_the_listener(database, topic, sidings_kafka):
    name = await topic(partitions=4)
    ran: list[str] = []

    def another():
        service = a_service(database)

        @service.job()
        async def follow_up(job: Job[Ride]) -> None:
            ran.append(job.origin)

        return service, follow_up

    first, follow_up = another()
    second, _ = another()
    ours, theirs = a_consumer(sidings_kafka, name), a_consumer(sidings_kafka, name)
    async with first, second:
        try:
            await ours.start()
            ours.subscribe([name], listener=first.executor.rebalance_listener)
            await eventually(lambda: len(first.executor.held) == 4)
            generation = first.executor._reconciler.generation
            await theirs.start()
            theirs.subscribe([name], listener=second.executor.rebalance_listener)
            await eventually(lambda: len(first.executor.held) == len(second.executor.held) == 2)
            # The group's own generation, so that it is the same on both sides, and grows.
            assert first.executor._reconciler.generation == second.executor._reconciler.generation > generation
            assert not set(first.executor.held) & set(second.executor.held)
            async with producing(sidings_kafka) as producer:
                await producer.send_and_wait(name, as_json(1), partition=0)
            fetched = await asyncio.wait_for(
                asyncio.gather(ours.getmany(timeout_ms=2000), theirs.getmany(timeout_ms=2000)), SECONDS
            )
            (message,) = [record for batch in fetched for records in batch.values() for record in records]
            async with first.transaction() as tx:
                await follow_up.enqueue(tx, Ride(), origin=f"{message.topic}/{message.partition}")
            await drained(database)
            assert ran == [f"{name}/0"]
        finally:
            await ours.stop()
            await theirs.stop()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_auto_commit_on_a_users_consumer_brings_the_service_down_with_the_reason(
    database, topic, sidings_kafka, caplog, when
):
    name = await topic()
    service = a_service(database)
    consumer = a_consumer(sidings_kafka, name, enable_auto_commit=True)
    await consumer.start()
    running = asyncio.create_task(service.run()) if when == "after" else None
    try:
        consumer.subscribe([name], listener=service.executor.rebalance_listener)
        await eventually(lambda: "make it with enable_auto_commit=False" in caplog.text)
        with pytest.raises(ConfigurationError, match="make it with enable_auto_commit=False"):
            await asyncio.wait_for(running or service.run(), SECONDS)
        assert service.executor.held == {}
    finally:
        await consumer.stop()


TWO = r"the service itself joins .*, for its consumers, topics= or a home: leave these out, or the listener"


@pytest.mark.parametrize("joined", ["topics=", "home"])
@pytest.mark.parametrize(("when", "group"), [("before", "another"), ("before", "test"), ("after", "another")])
async def test_a_users_consumer_beside_topics_that_the_service_joins_brings_it_down_with_the_reason(
    database, topic, sidings_kafka, when, group, joined
):
    """Each took the origins from the other, under the generation of a group that was not its own. In one group the
    service could not even join, as its assignor is another than aiokafka's default."""
    name = await topic()
    service = a_service(database, sidings_kafka, topics=[name] if joined == "topics=" else [])

    @service.job(group="transport", home=name if joined == "home" else None)
    async def follow_up(job: Job[Ride]) -> None: ...

    consumer = a_consumer(sidings_kafka, name if group == "another" else group)
    listener = service.executor.rebalance_listener
    await consumer.start()
    running = None
    if when == "after":
        running = asyncio.create_task(service.run())
        await eventually(lambda: service.executor.held)
    try:
        consumer.subscribe([name], listener=listener)
        if running is None:
            await eventually(lambda: listener._has_called)
        with pytest.raises(ConfigurationError, match=TWO):
            await asyncio.wait_for(running or service.run(), SECONDS)
    finally:
        await consumer.stop()


async def test_topics_are_joined_for_their_jobs_alone(database, topic, sidings_kafka):
    name = await topic(partitions=2)
    service = a_service(database, sidings_kafka, topics=[name])
    ran: list[str] = []

    @service.job()
    async def follow_up(job: Job[Ride]) -> None:
        ran.append(job.origin)

    async with service:
        await eventually(lambda: len(service.executor.held) == 2)
        async with service.transaction() as tx:
            await follow_up.enqueue(tx, Ride(), origin=f"{name}/1")
        await eventually(lambda: ran == [f"{name}/1"])
        assert service.problems() == []
    assert await value(database, "SELECT count(*) FROM sidings.consumer_offset") == 0


async def test_where_others_consume_a_topic_who_joins_it_for_its_jobs_alone_takes_none_of_it(
    database, topic, sidings_kafka
):
    """Such as a web server, whose job types have their home there. It got half of the partitions, and their messages
    were read by nobody, without a word."""
    name = await topic(partitions=4)
    await effects_table(database)
    ran: list[str] = []

    def an_instance(which: str) -> tuple[Any, Any]:
        service = a_service(database, sidings_kafka)

        @service.job(group="transport", home=name)
        async def follow_up(job: Job[Ride]) -> None:
            ran.append(which)

        return service, follow_up

    web, follow_up = an_instance("web")
    async with web:
        await eventually(lambda: len(web.executor.held) == 4)
        consuming, _ = an_instance("consuming")

        @consuming.consumer(name, model=Number)
        async def on_number(message: Message[Number], tx: Transaction) -> None:
            await record(message, tx)

        async with consuming:
            await eventually(lambda: len(consuming.executor.held) == 4)
            for partition in range(4):
                await produce(sidings_kafka, name, [partition], partition=partition)
            await eventually(lambda: value(database, "SELECT count(*) = 4 FROM effect"))
            async with web.transaction() as tx:
                await follow_up.enqueue(tx, Ride(transport="t"))
            await eventually(lambda: ran == ["consuming"])
            assert web.executor.held == {}
            assert web.problems() == web._life.not_ready() == []
        async with web.transaction() as tx:
            await follow_up.enqueue(tx, Ride(transport="t"))
        await eventually(lambda: ran == ["consuming", "web"])

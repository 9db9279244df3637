"""What happens to a consumer's loops, and to what they wait for, over a rebalance or when the client has failed."""

import asyncio
import contextlib
from collections.abc import Iterable

import pytest
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError
from sidings import Job, Message, Transaction
from sidings.devstack.topics import create_topic
from sidings.kafka import fetch_loop
from sidings.kafka.partition import State

from .consumer_support import Number, a_service, administering, numbers, offset_reaches, produce, record
from .support import SECONDS, Ride, eventually


@pytest.mark.chaos
async def test_a_partition_without_a_leader_holds_up_no_other_after_a_rebalance(effects, own_kafka, monkeypatch):
    """The topic's loop asked aiokafka for the positions of all that it had polled before the rebalance, and it gives
    none of a partition before that is placed."""
    monkeypatch.setattr("sidings.kafka.placing._TOGETHER_SECONDS", 1.0)
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 1.0)
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    await create_topic(kafka.bootstrap, "positions", partitions=6)
    async with administering(kafka.bootstrap) as admin:
        (described,) = await admin.describe_topics(["positions"])
    led = sorted(one["partition"] for one in described["partitions"] if one["leader"] == 1)
    assert 0 < len(led) < 6
    service = a_service(effects, kafka.bootstrap)
    service.consumer("positions", model=Number)(record)
    async with service:
        consumer = service._life.consumer
        await eventually(lambda: consumer.joined and not service.problems(), seconds=2 * SECONDS)
        for partition in range(6):
            await produce(kafka.bootstrap, "positions", [partition], partition=partition)
        await eventually(lambda: arrived(effects, range(6)))
        await asyncio.to_thread(kafka.broker(2).kill)
        cluster = consumer._client._client.cluster
        tps = [partition.tp for partition in consumer._partitions()]
        await eventually(lambda: sum(cluster.leader_for_partition(tp) == 1 for tp in tps) == len(led), seconds=60)
        await produce(kafka.bootstrap, "positions", [10 + led[0]], partition=led[0])
        await eventually(lambda: arrived(effects, [10 + led[0]]))
        coordinator = consumer._client._coordinator
        await eventually(lambda: coordinator.coordinator_id == 1)
        await consumer._stored.commit()  # as it does every five seconds
        begun, whose_turn = asyncio.Event(), consumer._stored.loops[0]._whose_turn

        def polling(ready):
            begun.set()
            return whose_turn(ready)

        monkeypatch.setattr(consumer._stored.loops[0], "_whose_turn", polling)
        await begun.wait()
        before = coordinator.generation
        coordinator.request_rejoin()  # as when a member comes or goes
        await eventually(lambda: coordinator.generation > before and not consumer.paused)
        await eventually(lambda: any("Kafka does not say" in problem for problem in service.problems()))
        for partition in led:
            await produce(kafka.bootstrap, "positions", [100 + partition], partition=partition)
        await eventually(lambda: arrived(effects, [100 + p for p in led]), service.problems, seconds=20)


async def test_a_refusal_that_comes_over_a_rebalance_pauses_nothing_for_ever(
    effects, topic, sidings_kafka, monkeypatch: pytest.MonkeyPatch
):
    """The client was told to pause the partition, which had just been placed again, and nobody let it go on."""
    monkeypatch.setattr(fetch_loop, "LOOK_AGAIN_SECONDS", 0.2)
    name = await topic()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": name})
    service.consumer(name, model=Number)(record)
    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(offset_reaches(effects, name, 1))
        consumer = service._life.consumer
        client = consumer._client
        getmany, (before,) = client.getmany, consumer._partitions()
        refused, later = asyncio.Event(), asyncio.Event()

        async def over_a_rebalance(*partitions, **options):
            if refused.is_set() or not options.get("max_records"):  # which is the look for errors
                if options.get("max_records"):
                    later.set()  # it has been told of the refusal, and goes on
                return await getmany(*partitions, **options)
            refused.set()
            client._coordinator.request_rejoin()
            await eventually(lambda: consumer._partitions()[0] is not before)
            await eventually(lambda: consumer._partitions()[0].state is State.READY)
            raise TopicAuthorizationFailedError(name)

        client.getmany = over_a_rebalance
        await eventually(later.is_set)
        await produce(sidings_kafka, name, [1])
        await eventually(offset_reaches(effects, name, 2), service.problems, seconds=10)


async def test_a_handler_that_swallows_its_cancellation_does_not_keep_a_client_that_has_failed(
    effects, sidings_kafka, topic
):
    """Its loop went on with the client, and nobody placed partitions, or looked for resets, any more."""
    name = await topic()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": name})
    entered = asyncio.Event()

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 0:
            entered.set()
            with contextlib.suppress(BaseException):
                await asyncio.sleep(20)
        await record(message, tx)

    await produce(sidings_kafka, name, [0])
    async with service:
        consumer = service._life.consumer
        await entered.wait()
        client = consumer._client
        client._coordinator._push_error_to_user(KafkaError("as of a heartbeat that was refused")).close()
        await eventually(lambda: numbers(effects))
        await eventually(lambda: consumer._client not in (client, None), service.problems, seconds=20)
        await produce(sidings_kafka, name, [1])
        await eventually(offset_reaches(effects, name, 2))


async def arrived(dsn: str, wanted: Iterable[int]) -> bool:
    return set(wanted) <= set(await numbers(dsn))


@pytest.mark.chaos
async def test_jobs_go_on_where_kafka_goes_away_within_a_rebalance(database, own_kafka, monkeypatch):
    """All of them were drained a minute later, and none ran before Kafka was back."""
    monkeypatch.setattr("sidings.kafka.membership._LOST_SECONDS", 1.0)
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "positions", partitions=2)
    service = a_service(database, kafka.bootstrap, topics=["positions"])
    service.executor.rebalance_listener._patience_seconds = 0.2
    ran: list[str] = []

    @service.job()
    async def follow_up(job: Job[Ride]) -> None:
        ran.append(job.origin)

    async with service:
        await eventually(lambda: len(service.executor.held) == 2)
        consumer = service._life.consumer
        client, held, revoked = consumer._client, dict(service.executor.held), consumer.on_partitions_revoked

        async def revoked_at_last(partitions):
            await revoked(partitions)
            await asyncio.to_thread(kafka.kill)

        consumer.on_partitions_revoked = revoked_at_last
        client._coordinator.request_rejoin()  # as when a member comes or goes
        await eventually(lambda: consumer._client is not client, seconds=2 * SECONDS)  # given up, after the patience
        async with service.transaction() as tx:
            for origin in held:
                await follow_up.enqueue(tx, Ride(), origin=origin)
        await eventually(lambda: sorted(ran) == sorted(held), lambda: service.executor.held)
        assert service.executor.held == held, "under the leases that it had"
        consumer.on_partitions_revoked = revoked
        await asyncio.to_thread(kafka.start)
        await eventually(lambda: not consumer.paused and not service.problems(), service.problems, seconds=2 * SECONDS)
        assert service.executor.held == held


async def test_what_a_rebalance_gives_to_others_is_yielded_by_a_member_that_hangs_in_it(
    database, topic, sidings_kafka, monkeypatch
):
    """It keeps what nobody else gets: no job is drained because the rebalance takes long."""
    name = await topic(partitions=2)
    settings = {"fetch_seconds": 0.05, "group": name, "rebalance_seconds": 1.0}
    first, second = (a_service(database, sidings_kafka, topics=[name], settings=settings) for _ in range(2))
    for service in first, second:
        service.executor.rebalance_listener._patience_seconds = 0.2
    async with first:
        await eventually(lambda: len(first.executor.held) == 2)
        consumer, told, go_on = first._life.consumer, [], asyncio.Event()
        monkeypatch.setattr(first.executor.rebalance_listener, "_assign", lambda *given: told.append(given))
        revoked = consumer.on_partitions_revoked

        async def hangs(partitions):
            await revoked(partitions)
            await go_on.wait()

        consumer.on_partitions_revoked = hangs
        async with second:
            try:
                await eventually(lambda: len(second.executor.held) == 2, lambda: second.problems(), seconds=2 * SECONDS)
                assert first.executor.held == {}
                assert told == [], "no assignment has come, and none was made up"
            finally:
                consumer.on_partitions_revoked = revoked
                go_on.set()

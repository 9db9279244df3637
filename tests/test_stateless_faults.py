"""Stateless consumers where something fails for a while: nothing is passed over, and what is well says so."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.errors import (
    CommitFailedError,
    GroupAuthorizationFailedError,
    IllegalStateError,
    KafkaError,
    OffsetMetadataTooLargeError,
)
from aiokafka.protocol.commit import OffsetFetchRequest, OffsetFetchResponse_v3
from aiokafka.structs import OffsetAndMetadata
from prometheus_client import CollectorRegistry
from sidings import InvalidMessage, KafkaUnavailable, Message, PostgresUnavailable, Retry, Snooze
from sidings.jobs.retry import CONFLICTS
from sidings.kafka.brokers import go_around_hanging_brokers
from sidings.kafka.dead_letters import DeadLetters
from sidings.kafka.fetch_loop import FetchLoop
from sidings.kafka.leader_epochs import LeaderEpochs
from sidings.kafka.metrics import ConsumerMetrics
from sidings.kafka.offsets import Move
from sidings.kafka.outbox import NotPublished
from sidings.kafka.partition import Partition
from sidings.kafka.stateless_handling import StatelessHandling
from sidings.kafka.stateless_offsets import GroupOffsets, committed_of, committed_stateless
from sidings.kafka.stateless_partition import Failing, StatelessPartition
from tenacity import stop_after_delay, wait_fixed, wait_none

from .consumer_support import Number, administering, delete_records, produce, producing, sample
from .support import eventually
from .test_stateless import TWICE, a_service, committed, everything
from .test_unreadable import produce_unreadable

TP = TopicPartition("positions", 0)


async def test_a_message_that_waits_for_its_next_attempt_is_not_passed_over_by_a_stop(topic, sidings_kafka):
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, retry=Retry(wait=wait_fixed(600)), dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        raise ConnectionError

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_retries_total") == 1)
        started = time.monotonic()
    assert time.monotonic() - started < 4, "it waited for the handler"
    assert sample(service, "sidings_consumer_messages_total") == 0
    assert await committed(sidings_kafka, name) == 0


@pytest.mark.parametrize("error", [Snooze(600), PostgresUnavailable("away")], ids=["snoozed", "away"])
async def test_nor_does_one_that_waits_without_having_failed_begin_again_at_a_stop(topic, sidings_kafka, error):
    """Again and again, since nothing lets it wait any more: nothing else of the service would run."""
    name, tried = await topic(), list[int]()
    await produce(sidings_kafka, name, [0])
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        tried.append(message.value.n)
        if len(tried) == 1:
            raise error
        await asyncio.sleep(0.1)
        raise Snooze(600)

    async with service:
        await eventually(lambda: tried)
    assert tried == [0]
    assert await committed(sidings_kafka, name) == 0


async def test_no_more_run_at_once_than_asked_for_however_they_arrive(topic, sidings_kafka):
    name, gate = await topic(), asyncio.Event()
    begun: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, concurrency=2, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        begun.append(message.value.n)
        await gate.wait()

    async with service:
        partitions = service._life.consumer._stateless.partitions
        for n in range(5):
            await produce(sidings_kafka, name, [n], key=f"key-{n}")
            await eventually(lambda n=n: partitions and len(partitions[TopicPartition(name, 0)].window) == n + 1)
        assert begun == [0, 1]
        gate.set()
        await eventually(lambda: begun == [0, 1, 2, 3, 4])


async def test_a_stop_takes_up_nothing_more(topic, sidings_kafka):
    name, gate = await topic(), asyncio.Event()
    begun: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, concurrency=1, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        begun.append(message.value.n)
        await gate.wait()

    await produce(sidings_kafka, name, range(3))

    async def open_the_gate() -> None:
        await eventually(lambda: partition.leaving.is_set())
        gate.set()

    async with service:
        await eventually(lambda: begun)
        [partition] = service._life.consumer._stateless.partitions.values()
        opening = asyncio.create_task(open_the_gate())
    await opening
    assert begun == [0]
    assert await committed(sidings_kafka, name) == 1


async def test_what_ends_beside_large_messages_that_wait_makes_no_room_for_more(topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.stateless_loop._MOST_BYTES", 200)
    name, gate, quick = await topic(), asyncio.Event(), asyncio.Event()
    done: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, concurrency=2, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        await (quick if message.key == b"quick" else gate).wait()
        done.append(message.value.n)

    async with producing(sidings_kafka) as producer:
        await producer.send_and_wait(name, b'{"n":0}', key=b"quick")
        await producer.send_and_wait(name, b'{"n":1}' + 300 * b" ", key=b"slow")
    async with service:
        partitions = service._life.consumer._stateless.partitions
        await eventually(lambda: partitions and partitions[TopicPartition(name, 0)].state.name == "FULL")
        [partition] = partitions.values()
        quick.set()
        await eventually(lambda: done == [0])
        await eventually(lambda: len(partition.window) == 1)
        assert partition.state.name == "FULL"
        gate.set()
        await eventually(lambda: done == [0, 1] and partition.state.name == "READY")


async def test_whatever_keeps_a_dead_letter_from_leaving_is_told_until_it_has_left(topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.stateless_handling._DEAD_LETTER_SECONDS", (0.01, 0.01))
    name, dead = await topic("positions"), await topic("dead")
    errors = [InvalidMessage("too large"), NotPublished("no such topic"), KafkaUnavailable("away")]
    send = DeadLetters.send
    told: list[str] = []

    async def refuse(self: DeadLetters, topic: str, record: Any, error: str) -> None:
        if errors:
            told.extend(service.problems())
            raise errors.pop(0)
        await send(self, topic, record, error)

    monkeypatch.setattr(DeadLetters, "send", refuse)
    await produce(sidings_kafka, name, range(2))
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, retry=TWICE, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        if message.value.n == 0:
            raise ValueError("bad luck")

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 2)
        assert ["too large" in told[0], "no such topic" in told[1], len(told)] == [True, True, 2]
        assert service.problems() == []
        assert sample(service, "sidings_consumer_paused_partitions") == 0
    assert [record.value for record in await everything(sidings_kafka, dead)] == [b'{"n":0}']


async def test_a_dead_letter_may_be_as_large_as_the_brokers_take(topic, sidings_kafka):
    """A message that is larger than what the service itself would send stopped its partition for good."""
    name, dead = await topic("positions"), await topic("dead")
    async with producing(sidings_kafka, max_request_size=2_000_000) as producer:
        await producer.send_and_wait(name, b"x" * 1_040_000, key=b"k")
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=dead)
    async def handle(message: Message[Number]) -> None: ...

    async with service:
        await eventually(
            lambda: sample(service, "sidings_consumer_messages_total", result="dead_letter"), service.problems
        )
    assert [len(record.value) for record in await everything(sidings_kafka, dead)] == [1_040_000]


async def test_a_policy_of_so_many_seconds_counts_them_from_the_first_attempt(topic, sidings_kafka, monkeypatch):
    name, dead = await topic("positions"), await topic("dead")
    await produce(sidings_kafka, name, [0])
    clock, began = [1_000.0], list[float]()
    monkeypatch.setattr("sidings.kafka.stateless_handling.time", SimpleNamespace(monotonic=lambda: clock[0]))
    service = a_service(sidings_kafka)
    for_a_while = Retry(wait=wait_none(), stop=stop_after_delay(200))

    @service.consumer(name, stateless=True, retry=for_a_while, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        began.append(clock[0])
        clock[0] += 50
        raise ConnectionError

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 1)
    assert began == [1_000, 1_050, 1_100, 1_150]


async def test_a_policy_of_so_many_seconds_does_not_count_an_outage_before_the_first_failure(topic, sidings_kafka):
    name, dead = await topic("positions"), await topic("dead")
    await produce(sidings_kafka, name, [0])
    service, tried = a_service(sidings_kafka), list[int]()

    @service.consumer(name, stateless=True, retry=Retry(wait=wait_none(), stop=stop_after_delay(600)), dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        tried.append(message.value.n)
        if len(tried) == 1:
            raise PostgresUnavailable("away")
        if len(tried) == 2:
            [partition] = service._life.consumer._stateless.partitions.values()
            partition.failing[0].since -= 3_600  # so long ago
            raise ConnectionError

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 1)
        assert sample(service, "sidings_consumer_messages_total", result="handled") == 1
        [partition] = service._life.consumer._stateless.partitions.values()
        await eventually(lambda: partition.failing_since is None, "it fails no more")
    assert tried == [0, 0, 0]


async def test_a_conflict_of_a_handlers_transactions_is_no_failure_unless_it_lasts(topic, sidings_kafka, monkeypatch):
    """As where a database for money has SERIALIZABLE as its default."""
    monkeypatch.setattr("sidings.kafka.stateless_handling.after_conflict", lambda conflicts: conflicts / 1_000)
    name, dead = await topic("positions"), await topic("dead")
    await produce(sidings_kafka, name, [0, 1])
    service, tried = a_service(sidings_kafka), list[int]()

    @service.consumer(name, stateless=True, retry=Retry(wait=wait_none(), stop=TWICE.stop), dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        tried.append(message.value.n)
        if message.value.n or len(tried) <= 10:
            raise CONFLICTS[len(tried) % len(CONFLICTS)]("could not serialize access")

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 2)
        assert sample(service, "sidings_consumer_messages_total", result="handled") == 1
        assert sample(service, "sidings_consumer_messages_total", result="dead_letter") == 1
        assert sample(service, "sidings_consumer_failures_total") == 2
    assert tried == [0] * 11 + [1] * 22


async def test_a_rebalance_forgives_no_failure(topic, sidings_kafka):
    """A message that ends badly after its second attempt would be tried for ever where rebalances are frequent."""
    name, dead = await topic(partitions=2), await topic("dead")
    await produce(sidings_kafka, name, [0])
    tried: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, retry=Retry(wait=wait_fixed(600), stop=TWICE.stop), dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        tried.append(message.offset)
        raise ConnectionError

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_retries_total") == 1)
        stateless = service._life.consumer._stateless
        former = stateless.partitions[TopicPartition(name, 0)]
        stateless.rest()
        stateless.assigned(list(stateless.partitions))  # as a rebalance does that leaves them here
        stateless.place()
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="dead_letter") == 1)
        assert stateless.partitions[TopicPartition(name, 0)] is not former
    assert tried == [0, 0]


async def test_what_ends_before_a_record_that_cannot_be_read_does_not_make_it_be_read_again_at_once(
    topic, sidings_kafka, monkeypatch
):
    """Each look at it begins the partition anew, and cancels what runs of it."""
    name, gate, looks = await topic(), asyncio.Event(), list[str]()
    refuse = FetchLoop._refuse

    def looked(self: FetchLoop, partition: Partition, error: Exception) -> None:
        looks.append(partition.origin)
        refuse(self, partition, error)

    monkeypatch.setattr(FetchLoop, "_refuse", looked)
    await produce(sidings_kafka, name, [0])
    await produce_unreadable(sidings_kafka, name, 0)
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        await gate.wait()

    async with service:
        await eventually(lambda: any("offset 1 cannot be read" in told for told in service.problems()))
        [partition] = service._life.consumer._stateless.partitions.values()
        assert partition.workers
        gate.set()
        await eventually(lambda: partition.committed == 1)
        assert len(looks) == 1


async def produce_one_by_one(kafka: str, topic: str) -> None:
    """In a batch each, so that not all of them are fetched together."""
    for n in range(10):
        await produce(kafka, topic, [n])


class Held:
    """A service of which some handlers wait: the first two for `go_on`, which makes room for more, all others for
    `gone`."""

    def __init__(self, kafka: str, topic: str) -> None:
        self.started, self.done = list[int](), list[int]()
        self.go_on, self.gone = asyncio.Event(), asyncio.Event()
        self.service = a_service(kafka, partition_fetch_bytes=1, max_records=4)

        @self.service.consumer(topic, stateless=True, dead_letter=f"{topic}.dlq")
        async def handle(message: Message[Number]) -> None:
            self.started.append(message.value.n)
            await (self.go_on if message.value.n < 2 else self.gone).wait()
            self.done.append(message.value.n)


async def test_what_was_read_before_retention_went_past_it_is_handled(topic, sidings_kafka, caplog):
    """Nobody could read it again. Of other partitions nothing is cancelled, either."""
    name = await topic(partitions=2)
    await produce_one_by_one(sidings_kafka, name)
    await produce(sidings_kafka, name, [20], partition=1)
    held = Held(sidings_kafka, name)
    async with held.service as service:
        partitions = await eventually(lambda: service._life.consumer._stateless.partitions)
        await eventually(lambda: len(partitions[TopicPartition(name, 0)].window) == 4 and 20 in held.started)
        async with administering(sidings_kafka) as admin:
            await admin.delete_records({TopicPartition(name, 0): RecordsToDelete(before_offset=-1)})
        held.go_on.set()
        await eventually(lambda: "out of the log's range" in caplog.text)
        held.gone.set()
        await produce(sidings_kafka, name, [10])
        await eventually(lambda: {10, 20} <= {*held.done})
        assert held.done[:2] == [0, 1]
        assert {2, 3} <= {*held.done}
        assert len(held.started) == len({*held.started}), "none was cancelled"
        assert sample(service, "sidings_consumer_missed_total") == 12 - len(held.done)


async def test_what_runs_when_retention_has_gone_past_it_has_its_time_when_the_service_stops(
    topic, sidings_kafka, caplog
):
    """It was cancelled at once, and nobody could read it again."""
    name = await topic()
    await produce_one_by_one(sidings_kafka, name)
    held = Held(sidings_kafka, name)
    async with held.service as service:
        partitions = await eventually(lambda: service._life.consumer._stateless.partitions)
        await eventually(lambda: len(partitions[TopicPartition(name, 0)].window) == 4)
        await delete_records(sidings_kafka, name, -1)
        held.go_on.set()
        await eventually(lambda: "out of the log's range" in caplog.text and 2 in held.started)
        asyncio.get_running_loop().call_later(0.5, held.gone.set)
    assert held.done == held.started


async def test_a_handler_that_has_ended_leaves_no_timer_behind(monkeypatch):
    """When that had run out, health would tell of the handler for ever: that it goes on after its timeout."""
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def noted(*arguments: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*arguments))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", noted)
    subscription: Any = SimpleNamespace(topic=TP.topic, timeout=600, run=lambda _: asyncio.sleep(0))
    item: Any = SimpleNamespace(message="it", record=SimpleNamespace(offset=0))
    nowhere: Any = None
    handling = StatelessHandling(subscription, nowhere, ConsumerMetrics("test", CollectorRegistry(), {TP.topic}))
    await handling._call(placed(), item)
    assert [timer.cancelled() for timer in timers] == [True]


# -- offsets: a client that fails at will ------------------------------------------------------------------------------


class Client:
    """A client whose commits end as `ends` says, one after another, and then well."""

    def __init__(self, *ends: Exception) -> None:
        self.ends = list(ends)
        self.told: list[dict[TopicPartition, int]] = []
        self.meanwhile: Any = lambda: None
        self._client = SimpleNamespace(send=None)

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        self.told.append(offsets)
        await asyncio.sleep(0)
        self.meanwhile()
        if self.ends:
            raise self.ends.pop(0)


def offsets_of(client: Any) -> GroupOffsets:
    metrics = ConsumerMetrics("test", CollectorRegistry(), {"positions"})
    return GroupOffsets(client, LeaderEpochs(client, {}), metrics, seconds=5)


def placed(offset: int = 0) -> StatelessPartition:
    partition = StatelessPartition(TP)
    partition.place(offset)
    return partition


async def test_offsets_that_were_not_committed_are_committed_later_and_told_meanwhile(monkeypatch):
    client = Client(KafkaError("away"), ValueError("a mistake of the client's"), OffsetMetadataTooLargeError())
    offsets, partition = offsets_of(client), placed()
    partition.end = 7
    await offsets.commit([partition])
    since = partition.uncommitted_since
    assert since is not None
    await offsets.commit([partition])
    await offsets.commit([partition])
    assert partition.uncommitted_since == since, "the first failure counts"
    assert partition.problem() is None
    monkeypatch.setattr("sidings.kafka.stateless_partition._COMMIT_SECONDS", -1.0)
    problem = partition.problem() or ""
    assert "could not be committed" in problem
    assert "the brokers' offset.metadata.max.bytes must let them" in problem, "it says why, and what to do"
    await offsets.commit([partition])
    assert client.told == [{TP: 7}] * 4
    assert partition.problem() is None
    await offsets.commit([partition])
    assert len(client.told) == 4, "there was nothing to commit"


@pytest.mark.parametrize("error", [CommitFailedError(), IllegalStateError("revoked")])
async def test_a_commit_that_comes_too_late_is_no_failure(error):
    offsets, partition = offsets_of(Client(error)), placed()
    partition.end = 7
    await offsets.commit([partition])
    assert partition.uncommitted_since is None


async def test_what_is_done_while_a_commit_is_under_way_is_not_taken_for_committed():
    client = Client()
    offsets, partition = offsets_of(client), placed()
    partition.end = 7

    def go_on() -> None:
        partition.end = partition.next_offset = 9

    client.meanwhile = go_on
    await offsets.commit([partition])
    await offsets.commit([partition])
    assert client.told == [{TP: 7}, {TP: 9}]


async def test_of_a_partition_that_is_not_placed_nothing_is_committed():
    client, partition = Client(), placed(3)
    partition.end = 7
    partition.look()
    partition.displace()
    await offsets_of(client).commit([partition])
    assert client.told == []


@pytest.mark.parametrize("error", [KafkaError("no right"), TimeoutError()])
async def test_where_to_start_is_not_taken_for_committed_where_kafka_refuses_it(error):
    """Of one topic, perhaps. ``start="latest"`` would be another place the next time."""
    other = TopicPartition("rides", 0)
    client = Client(error)
    offsets = offsets_of(client)
    with pytest.raises(type(error)):
        await offsets.create({TP: 3, other: 5})
    assert sorted(tp for told in client.told for tp in told) == [TP, other]
    client.ends = [error]
    with pytest.raises(type(error)):
        await offsets.jump(Move(TP, 3, 7))


FORMER, ANEW = UUID(int=1), UUID(int=2)


class Group(Client):
    """A client whose group has committed `offsets`, of a topic that has this `id`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.offsets: dict[TopicPartition, OffsetAndMetadata] = {}
        self.id: UUID | None = FORMER
        self._coordinator = self
        monkeypatch.setattr("sidings.kafka.stateless_offsets.ask_topic_ids", self.ids)

    async def ids(self, *_: object) -> dict[str, UUID]:
        return {} if self.id is None else {TP.topic: self.id}

    async def fetch_committed_offsets(self, _: object) -> dict[TopicPartition, OffsetAndMetadata]:
        return self.offsets


async def test_a_topic_that_was_made_anew_is_read_from_its_beginning_and_then_from_where_it_was_committed(monkeypatch):
    """Nothing had been committed of it, and ``start="latest"`` would pass over what it has; or it would be done again
    and again, as one that is another than was thought."""
    client = Group(monkeypatch)
    offsets, stored = offsets_of(client), f"leader epoch 3 of topic {ANEW}"
    client.id, client.offsets = None, {TP: OffsetAndMetadata(7, stored)}
    assert await offsets.load([TP]) == {TP: 7}, "Kafka does not say which it is"
    client.id = FORMER
    client.offsets = {TP: OffsetAndMetadata(7, "")}
    assert await offsets.load([TP]) == {TP: 7}
    client.id, client.offsets = ANEW, {}
    assert await offsets.load([TP]) == {TP: 0}
    assert offsets.topic_id(TP) == ANEW
    client.offsets = {TP: OffsetAndMetadata(4, stored)}
    assert await offsets.load([TP]) == {TP: 4}
    assert offsets.epoch(TP) == 3
    client.offsets = {TP: OffsetAndMetadata(7, f"leader epoch 3 of topic {FORMER}")}
    assert await offsets.load([TP]) == {TP: 0}, "it was committed before that was noticed"
    assert offsets.epoch(TP) is None


@pytest.mark.parametrize(
    ("committed", "began"),
    [
        (f"leader epoch 3 of topic {FORMER}, all handled from 5", 5),
        (f"leader epoch 3 of topic {FORMER}", 7),  # as of an earlier release
        ("", 7),
        (None, 7),
    ],
)
async def test_from_where_on_all_was_handled_outlives_a_restart(committed, began, monkeypatch):
    """From there on an ordinary consumer passes over what it has not handled itself, or handles it again."""
    client = Group(monkeypatch)
    client.offsets = {TP: OffsetAndMetadata(7, committed)}
    metrics = ConsumerMetrics("test", CollectorRegistry(), {TP.topic})
    given: Any = client
    epochs = LeaderEpochs(given, {})
    offsets, partition = GroupOffsets(given, epochs, metrics, seconds=5), placed(7)
    await offsets.load([TP])
    partition.end = 9
    epochs.begin(TP, 9, 4)
    await offsets.commit([partition])
    told: Any = client.told
    assert told == [{TP: (9, f"leader epoch 4 of topic {FORMER}, all handled from {began}")}]
    client.offsets = {TP: OffsetAndMetadata(*told[0][TP])}
    assert await committed_stateless(given, {TP: FORMER}) == {TP: (9, 4, began)}
    assert await committed_stateless(given, {TP: ANEW}) == {}, "of another topic it says nothing"
    client.offsets = {TP: OffsetAndMetadata(7, committed)}
    others = (await committed_stateless(given, {TP: FORMER})).values()
    assert list(others) == ([(7, 3, began)] if committed else [])


class Coordinator(Client):
    """A client whose group's coordinator answers a question for offsets with each of `answers`, one after another. It
    is looked for as often as `lookups` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: OffsetFetchResponse_v3) -> None:
        super().__init__()
        self.answers, self.lookups = list(answers), 0
        inner: Any = AIOKafkaClient(bootstrap_servers="127.0.0.1:1")
        go_around_hanging_brokers(inner)
        monkeypatch.setattr(AIOKafkaClient, "send", self.send)
        inner.coordinator_lookup, inner.ready = self.look_up, self.look_up
        self._coordinator: Any = GroupCoordinator(inner, SubscriptionState(), group_id="test", retry_backoff_ms=1)
        monkeypatch.setattr("sidings.kafka.stateless_offsets.ask_topic_ids", self.ids)

    async def ids(self, *_: object) -> dict[str, UUID]:
        return {}

    async def send(self, _: int, request: object, **__: object) -> OffsetFetchResponse_v3:
        assert isinstance(request, OffsetFetchRequest)
        return self.answers.pop(0)

    async def look_up(self, *_: object, group: object = None) -> int:
        self.lookups += group is None
        return 1


LOADING, NOT_AVAILABLE, NOT_COORDINATOR, NO_RIGHT, UNKNOWN = 14, 15, 16, 30, -1
AT_7 = OffsetFetchResponse_v3(0, [(TP.topic, [(TP.partition, 7, "", 0)])], 0)


async def loaded(client: Any) -> dict[TopicPartition, Any]:
    return dict(await offsets_of(client).load([TP]))


async def found(client: Any) -> dict[TopicPartition, Any]:
    return dict(await committed_of(client, [TP], {}))


@pytest.mark.parametrize("ask", [loaded, found])
@pytest.mark.parametrize(("code", "lookups"), [(LOADING, 1), (NOT_AVAILABLE, 2), (NOT_COORDINATOR, 2)])
async def test_a_coordinator_that_moves_or_loads_is_not_taken_for_a_group_without_offsets(
    ask, code, lookups, monkeypatch
):
    """Its refusal stands at the top of its answer, and no partitions do: where to start was committed over them."""
    client = Coordinator(monkeypatch, OffsetFetchResponse_v3(0, [], code), AT_7)
    assert await ask(client) == {TP: 7}
    assert client.lookups == lookups
    assert client.told == []
    await client._coordinator.close()


@pytest.mark.parametrize(("code", "error"), [(NO_RIGHT, GroupAuthorizationFailedError), (UNKNOWN, KafkaError)])
@pytest.mark.parametrize("ask", [loaded, found])
async def test_nor_is_one_that_refuses(ask, code, error, monkeypatch):
    client = Coordinator(monkeypatch, OffsetFetchResponse_v3(0, [], code))
    with pytest.raises(error):
        await ask(client)
    await client._coordinator.close()


async def test_a_consumer_that_starts_while_the_coordinator_moves_goes_on_where_the_group_was(
    topic, sidings_kafka, monkeypatch
):
    """With ``start="latest"`` it passed over all that was behind that, and for good."""
    name, handled, refused = await topic(), list[int](), list[int]()
    await produce(sidings_kafka, name, range(10))
    former = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, group_id=name, enable_auto_commit=False)
    await former.start()
    former.assign([TopicPartition(name, 0)])
    await former.commit({TopicPartition(name, 0): 0})
    await former.stop()
    send = AIOKafkaClient.send

    async def moving(client: AIOKafkaClient, node: Any, request: Any, **options: Any) -> Any:
        answer: Any = await send(client, node, request, **options)
        if isinstance(request, OffsetFetchRequest) and len(refused) < 2:  # aiokafka itself asks once, for nothing
            refused.append(node)
            return OffsetFetchResponse_v3(0, [], NOT_COORDINATOR)
        return answer

    monkeypatch.setattr(AIOKafkaClient, "send", moving)
    service = a_service(sidings_kafka, group=name)

    @service.consumer(name, stateless=True, start="latest", dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    async with service:
        await eventually(lambda: len(refused) == 2 and len(handled) >= 10, lambda: (refused, handled))
    assert handled == list(range(10))


async def test_a_jump_is_committed_at_once():
    client = Client()
    await offsets_of(client).jump(Move(TP, 3, 7))
    assert client.told == [{TP: 7}]


def test_a_partition_that_is_placed_anew_keeps_the_failures_of_what_comes_again_and_nothing_else():
    partition = placed()
    partition.failing = {offset: Failing(0.0, 1) for offset in (3, 5, 7)}
    partition.leaving.set()
    partition.stuck, partition.uncommitted_since = "it was stuck", 0.0
    window = partition.window
    partition.displace()
    partition.place(5)
    assert list(partition.failing) == [5, 7]
    assert partition.window is not window
    assert not partition.leaving.is_set()
    assert partition.problem() is None
    assert partition.committed == 5
    partition.place(0, anew=True)
    assert partition.failing == {}

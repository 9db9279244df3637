"""Logs that were cut off, as after an unclean leader election, and have grown again past what was read of them: nothing
that came in between is passed over. And a leader that only changes is no reason to stand still."""

import asyncio
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import IncompatibleBrokerVersion, KafkaConnectionError, KafkaError
from aiokafka.protocol.fetch import FetchRequest
from prometheus_client import CollectorRegistry
from sidings import Message, PostgresSettings
from sidings.devstack import Kafka
from sidings.devstack.topics import create_topic
from sidings.executor import Link
from sidings.kafka.leader_epochs import LeaderEpochs
from sidings.kafka.metrics import ConsumerMetrics
from sidings.kafka.offsets import Move, OffsetStore
from sidings.kafka.partition import Partition, State
from sidings.kafka.pauses import Pauses
from sidings.kafka.placing import Placer
from sidings.schema import load_sql

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    administering,
    as_json,
    numbers,
    offset_reaches,
    producing,
    record,
)
from .support import SECONDS, connected, eventually, fetch

SETTINGS = {"fetch_seconds": 0.05, "session_seconds": 30}
CUT, CLEAN = "cut", "clean"


def lose(kafka: Kafka, topic: str, offset: int) -> None:
    """The broker dies, and with it what it had not written to its disk yet: all from `offset` on. It goes on as the
    leader of a new epoch."""
    [segment] = kafka.directory.glob(f"broker-1/data/{topic}-0/*.log")
    kafka.kill()
    raw, at = segment.read_bytes(), 0
    while struct.unpack_from(">q", raw, at)[0] < offset:
        at += 12 + struct.unpack_from(">i", raw, at + 8)[0]
    with segment.open("r+b") as file:
        file.truncate(at)
    kafka.start()


async def send(bootstrap: str, topic: str, sent: range, partition: int = 0) -> None:
    """Each number is a batch of its own, as far as the log goes."""
    async with producing(bootstrap) as producer:
        for number in sent:
            await producer.send_and_wait(topic, as_json(number), partition=partition)


def ordinary(dsn: str, kafka: str, *topics: str, parked: int | None = None) -> Any:
    service = a_service(dsn, kafka, settings=SETTINGS)

    async def handle(message: Any, tx: Any) -> None:
        if message.topic == CUT and message.value.n == parked:
            raise RuntimeError("not yet")
        await record(message, tx)

    for topic in topics:
        service.consumer(topic, model=Number, retry=TWICE_AND_PARK)(handle)
    return service


def stateless(kafka: str, name: str, handled: list[int]) -> Any:
    service = a_service(None, kafka, name=name, settings=SETTINGS)

    @service.consumer(CUT, stateless=True, dead_letter=CLEAN)
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    return service


def refuses(service: Any, topic: str = CUT) -> Any:
    return lambda: any(f"{topic}/0: the log was cut off at 6, before" in problem for problem in service.problems())


async def renewed(service: Any) -> None:
    """Its connection fails, and it has another one."""
    consumer = service._life.consumer
    former = consumer._client

    async def fail() -> None:
        raise KafkaConnectionError("gone")

    consumer.spawn(fail())
    await eventually(lambda: consumer._client not in (former, None))


@pytest.mark.chaos
async def test_what_a_log_has_got_since_it_was_cut_off_is_not_passed_over(effects, own_kafka):
    kafka = await asyncio.to_thread(own_kafka)
    for topic in (CUT, CLEAN):
        await create_topic(kafka.bootstrap, topic, partitions=1)
        await send(kafka.bootstrap, topic, range(10))
    async with producing(kafka.bootstrap, transactional_id="t") as producer, producer.transaction():
        await producer.send(CLEAN, as_json(10), partition=0)  # a marker ends the log
    before: list[int] = []
    async with ordinary(effects, kafka.bootstrap, CUT, CLEAN, parked=8), stateless(kafka.bootstrap, "stopped", before):
        await eventually(offset_reaches(effects, CUT, 10))
        await eventually(offset_reaches(effects, CLEAN, 12))
        await eventually(lambda: len(before) == 10)
    live: list[int] = []
    running = stateless(kafka.bootstrap, "live", live)
    async with running:
        await eventually(lambda: len(live) == 10)
        # Nothing of this process runs meanwhile, so that it does not see the log while that is shorter.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lose, kafka, CUT, 6).result()
            for topic in (CUT, CLEAN):
                pool.submit(asyncio.run, send(kafka.bootstrap, topic, range(100, 110))).result()
        await eventually(refuses(running))
        await renewed(running)
        await eventually(refuses(running))
    assert live == [*range(10)]
    async with connected(effects) as connection:  # an earlier release has gone on, and knows nothing of epochs
        await connection.execute("UPDATE sidings.consumer_offset SET next_offset = 15 WHERE topic = 'clean'")
    after: list[int] = []
    service = ordinary(effects, kafka.bootstrap, CUT, CLEAN, parked=8)
    second = stateless(kafka.bootstrap, "stopped", after)
    async with service, second:
        await eventually(refuses(service))
        await eventually(refuses(second))
        await eventually(offset_reaches(effects, CLEAN, 22))
        assert await numbers(effects, "topic = 'clean'") == [*range(11), *range(103, 110)]
        assert await numbers(effects, "topic = 'cut'") == [*range(8), 9]
        [reset] = await service.reset_offsets(CUT, 6, partitions=[0], actor="alice")
        assert reset.cancelled == 0, "what was cut off is not delivered again: it is in that job alone"
        await eventually(offset_reaches(effects, CUT, 16))
        assert await numbers(effects, "topic = 'cut'") == [*range(8), 9, *range(100, 110)]
        assert service.problems() == []
    assert after == []


@pytest.mark.chaos
async def test_where_a_log_was_cut_off_under_a_running_consumer_is_told(effects, own_kafka, monkeypatch):
    """Kafka refuses the offset while the log is still shorter than that. Who begins at the earliest one then, as after
    the topic was made anew, handles all a second time."""
    monkeypatch.setattr("sidings.kafka.placing._REFUSED_SECONDS", 0.1)
    kafka = await asyncio.to_thread(own_kafka)
    for topic in (CUT, CLEAN):
        await create_topic(kafka.bootstrap, topic, partitions=1)
    await send(kafka.bootstrap, CUT, range(10))
    handled: list[int] = []
    service, second = ordinary(effects, kafka.bootstrap, CUT), stateless(kafka.bootstrap, "stateless", handled)
    async with service, second:
        await eventually(offset_reaches(effects, CUT, 10))
        await eventually(lambda: len(handled) == 10)
        await asyncio.to_thread(lose, kafka, CUT, 6)
        for running, remedy in ((service, "reset cut --partition 0 --to 6`"), (second, "cut:0 --to-offset 6)")):
            await eventually(refuses(running), running.problems)
            [problem] = [problem for problem in running.problems() if "cut off" in problem]
            assert problem.endswith(remedy)
            assert "earliest" not in problem
        await send(kafka.bootstrap, CUT, range(100, 110))
        await eventually(lambda: any("from 6 to 16" in problem for problem in service.problems()), service.problems)
        await service.reset_offsets(CUT, 6, partitions=[0], actor="alice")
        await eventually(offset_reaches(effects, CUT, 16))
        assert service.problems() == []
    assert await numbers(effects) == [*range(10), *range(100, 110)]


async def placement(bootstrap: str, topic: str) -> list[Any]:
    """Where Kafka has the partitions of a topic."""
    async with administering(bootstrap) as admin:
        [described] = await admin.describe_topics([topic])
    return sorted(described["partitions"], key=lambda partition: partition["partition"])


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_what_an_unclean_leader_has_got_is_not_passed_over(effects, own_kafka):
    kafka = await asyncio.to_thread(own_kafka, brokers=3)
    config = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    await create_topic(kafka.bootstrap, CUT, partitions=3, replicas=2, config=config)
    for partition in range(3):
        await send(kafka.bootstrap, CUT, range(6), partition)
    first = (await placement(kafka.bootstrap, CUT))[0]
    [behind] = set(first["replicas"]) - {first["leader"]}

    async def state(**expected: Any) -> bool:
        try:
            now = (await placement(kafka.bootstrap, CUT))[0]
        except (KafkaError, IndexError, ValueError):
            return False
        return expected.items() <= now.items()

    await asyncio.to_thread(kafka.broker(behind).kill)
    await eventually(lambda: state(leader=first["leader"], isr=[first["leader"]]))
    await send(kafka.bootstrap, CUT, range(6, 12))
    service = ordinary(effects, kafka.bootstrap, CUT)
    async with service:
        await eventually(offset_reaches(effects, CUT, 12))
    await asyncio.to_thread(kafka.broker(first["leader"]).kill)
    await asyncio.to_thread(kafka.broker(behind).start)
    await eventually(lambda: state(leader=behind), seconds=2 * SECONDS)
    await send(kafka.bootstrap, CUT, range(100, 120))
    service = ordinary(effects, kafka.bootstrap, CUT)
    async with service:
        await eventually(refuses(service), lambda: service.problems(), seconds=2 * SECONDS)
        await asyncio.to_thread(kafka.broker(first["leader"]).start)  # it follows the new leader
        assert await numbers(effects, "partition = 0") == [*range(12)]
        await service.reset_offsets(CUT, 6, partitions=[0], actor="alice")
        await eventually(offset_reaches(effects, CUT, 26))
        assert service.problems() == []
    assert await numbers(effects, "partition = 0") == [*range(12), *range(100, 120)]
    assert await numbers(effects, "partition = 1") == await numbers(effects, "partition = 2") == [*range(6)]


# -- one partition, and a leader that says what it is told to ----------------------------------------------------------

TP = TopicPartition(CUT, 0)
OUT_OF_RANGE, NOT_LEADER = 1, 6


class Leader:
    """Where its epochs end, or what it answers else; and what it was asked."""

    def __init__(self) -> None:
        self.ends: dict[int, Any] = {}
        self.asked: list[int] = []
        self.batches = self.damaged = b""
        self.meanwhile: Any = lambda: None
        self._client: Any = self  # what a client has
        self.epochs = LeaderEpochs(self, {})  # pyright: ignore[reportArgumentType]

    async def send(self, _node: int, request: Any, **_: Any) -> Any:
        if isinstance(request, FetchRequest):
            self.meanwhile()
            return SimpleNamespace(topics=[(CUT, [(0, 0, 100, 100, 0, [], -1, self.batches)])])
        [(_, [(_, _, epoch)])] = request._topics.items()
        self.asked.append(epoch)
        end = self.ends[epoch]
        if isinstance(end, Exception):
            raise end
        return SimpleNamespace(topics=[(CUT, [(end, 0, -1, -1) if end == NOT_LEADER else (0, 0, epoch, end)])])

    async def fetch(self, offset: int, *batches: tuple[int, int], form: int = 2) -> int:
        """Fetch from `offset` on; there are these batches, an offset and an epoch each. The error that comes of it."""
        self.batches = b"".join(struct.pack(">qiib", start, 60, epoch, form) + bytes(55) for start, epoch in batches)
        self.batches += self.damaged
        request = FetchRequest(0, 0, 0, 0, [(CUT, [(0, offset, 1)])])
        response = await self._client.send(1, request)
        [(_, [(_, error, *_, records)])] = response.topics
        assert bool(records) == (not error)
        return error


async def test_a_leader_is_asked_where_an_epoch_begins_and_only_there():
    leader = Leader()
    leader.ends = {3: 12, 4: 13}
    leader.epochs.begin(TP, 10, 3)
    assert await leader.fetch(10, (8, 3), (11, 3)) == 0
    assert await leader.fetch(12, (12, 4)) == 0
    assert await leader.fetch(13, (13, 5), (14, 6)) == 0
    assert await leader.fetch(15, (15, 6)) == 0
    assert leader.asked == [3, 4]
    assert [leader.epochs.before(TP, offset) for offset in (9, 12, 13, 14, 15)] == [3, 3, 4, 5, 6]


async def test_a_log_that_ends_before_what_was_read_is_read_no_further():
    leader = Leader()
    leader.ends = {3: 9}
    leader.epochs.begin(TP, 10, 3)
    assert await leader.fetch(10, (10, 5)) == OUT_OF_RANGE
    assert leader.epochs.cut(TP) == 9
    assert leader.epochs.before(TP, 11) == 3, "nothing of it counts as read"
    leader.epochs.begin(TP, 9, None)
    assert leader.epochs.cut(TP) is None
    assert await leader.fetch(9, (9, 5)) == 0


@pytest.mark.parametrize("failure", [NOT_LEADER, KafkaConnectionError("gone")])
async def test_where_the_leader_does_not_say_nothing_is_read_until_it_does(failure):
    leader = Leader()
    leader.ends = {3: failure}
    leader.epochs.begin(TP, 10, 3)
    if failure == NOT_LEADER:
        assert await leader.fetch(10, (10, 5)) == NOT_LEADER
    else:
        with pytest.raises(KafkaConnectionError):
            await leader.fetch(10, (10, 5))
    leader.ends = {3: 10}
    assert await leader.fetch(10, (10, 5)) == 0
    assert leader.asked == [3, 3]


@pytest.mark.parametrize("error", [IncompatibleBrokerVersion("too old"), NotImplementedError("too new")])
async def test_brokers_that_do_not_know_the_question_are_read_as_before(error):
    leader = Leader()
    leader.ends = {3: error}
    leader.epochs.begin(TP, 10, 3)
    assert await leader.fetch(10, (10, 5)) == 0


async def test_what_a_former_leader_answers_late_takes_nothing_back():
    leader = Leader()
    leader.ends = {4: -1}
    leader.epochs.begin(TP, 10, 3)
    assert await leader.fetch(10, (10, 3), (12, 4)) == 0
    assert await leader.fetch(10, (10, 3)) == 0
    assert leader.epochs.before(TP, 13) == 4
    assert await leader.fetch(13, (13, 4)) == 0
    assert leader.asked == []
    assert await leader.fetch(14, (14, 3)) == OUT_OF_RANGE, "its log does not hold what was read"
    assert leader.epochs.cut(TP) is None, "another leader's may"
    assert await leader.fetch(14, (14, 4)) == 0
    assert leader.asked == [4]


@pytest.mark.parametrize("end", [-1, 20], ids=["does not know the epoch", "has got as far again"])
async def test_a_log_whose_epochs_go_back_is_read_no_further(end, caplog):
    """In one log they only grow. Kafka was set back to a snapshot from before more elections, or the topic was made
    anew a moment ago. What had come meanwhile up to there was passed over without a word."""
    leader = Leader()
    leader.ends = {9: end}
    leader.epochs.begin(TP, 10, 9)
    assert await leader.fetch(10, (10, 6)) == OUT_OF_RANGE
    assert leader.asked == [9]
    assert leader.epochs.before(TP, 11) == 9, "nothing of it counts as read"
    assert leader.epochs.cut(TP) == (None if end < 0 else -1), "an epoch that begins behind a later one is another's"
    assert "cut off at" not in caplog.text


async def test_an_answer_to_what_is_no_longer_asked_for_says_nothing():
    leader = Leader()
    leader.epochs.begin(TP, 10, 3)
    leader.meanwhile = lambda: leader.epochs.begin(TP, 5, 2)
    assert await leader.fetch(10, (10, 4)) == 0
    assert leader.asked == []
    assert leader.epochs.before(TP, 11) == 2


async def test_an_answer_counts_although_the_same_place_was_sought_meanwhile():
    """So it does for aiokafka. A partition is placed anew when another one of its topic has failed, too."""
    leader = Leader()
    leader.ends = {3: 10}
    leader.epochs.begin(TP, 10, 3)
    leader.meanwhile = lambda: leader.epochs.begin(TP, 10, 3)
    assert await leader.fetch(10, (10, 4)) == 0
    assert leader.epochs.before(TP, 11) == 4
    assert await leader.fetch(11, (11, 4)) == 0
    leader.epochs.begin(TP, 10, 3)
    leader.ends = {3: 9}
    assert await leader.fetch(10, (10, 4)) == OUT_OF_RANGE, "nobody may read on there unasked"


async def test_what_is_read_in_one_epoch_takes_no_more_memory_the_more_it_is():
    leader = Leader()
    leader.epochs.begin(TP, 10, 3)
    for offset in range(10, 30):
        assert await leader.fetch(offset, (offset, 3)) == 0
    assert len(leader.epochs._read[TP].starts) == 1


async def test_what_was_read_before_a_log_was_cut_off_and_read_again_counts_no_more():
    """As where a batch was rolled back. The epoch of before, stored with an offset behind it, would tell of a cut."""
    leader = Leader()
    leader.ends = {3: 12}
    leader.epochs.begin(TP, 10, 3)
    assert await leader.fetch(10, (10, 3), (14, 4)) == 0
    leader.epochs.begin(TP, 12, 3)
    assert await leader.fetch(12, (12, 5)) == 0
    assert leader.epochs.before(TP, 15) == 5


async def test_an_answer_may_end_within_a_batch():
    """It has so many bytes, and no more."""
    leader = Leader()
    leader.epochs.begin(TP, 10, 3)
    for there in range(struct.calcsize(">qiib")):
        leader.damaged = struct.pack(">qiib", 11, 60, 3, 2)[:there]
        assert await leader.fetch(10, (10, 3)) == 0


@pytest.mark.parametrize("length", [-12, -100, 0])
async def test_a_batch_whose_length_is_damaged_is_left_to_who_reads_the_records(length):
    """Who looks for the next batch behind it would look for ever, and nothing else of the service would run."""
    leader = Leader()
    leader.epochs.begin(TP, 10, 3)
    leader.damaged = struct.pack(">qiib", 11, length, 3, 2) + bytes(55)
    assert await leader.fetch(10, (10, 3)) == 0


async def test_batches_of_before_kafka_0_11_have_no_epoch():
    leader = Leader()
    leader.epochs.begin(TP, 10, None)
    assert await leader.fetch(10, (10, 77), form=1) == 0
    assert leader.epochs.before(TP, 11) is None


async def test_batches_without_an_epoch_raise_no_doubt():
    """A topic may have a message format of before, or its brokers may have been updated one by one."""
    leader = Leader()
    leader.epochs.begin(TP, 10, 9)
    assert await leader.fetch(10, (10, 3), form=1) == 0
    assert await leader.fetch(11, (11, -1), (12, -1)) == 0
    assert await leader.fetch(13, (13, -1), (14, 9)) == 0
    assert leader.asked == []
    assert leader.epochs.before(TP, 15) == 9


async def test_an_offset_that_passes_deleted_records_has_no_epoch():
    leader, stored = Leader(), list[int | None]()
    leader.epochs.begin(TP, 10, 3)

    async def jump(move: Move) -> None:
        stored.append(leader.epochs.before(TP, move.next))

    partition = Partition(TP)
    placer = Placer(
        cast(Any, SimpleNamespace(seek=lambda *_: None, resume=lambda *_: None)),
        {TP: partition},
        {},
        cast(Any, SimpleNamespace(resets=lambda _: 0, topic_id=lambda _: None, epoch=lambda _: 3, jump=jump)),
        leader.epochs,
        ConsumerMetrics("test", CollectorRegistry(), {CUT}),
        request_seconds=1,
        on_placed=lambda: None,
        spawn=lambda _: None,
    )
    await placer._place(partition, 10, 20, 30)
    assert partition.next_offset == 20
    assert stored == [leader.epochs.before(TP, 20)] == [None]


class Refused:
    """A partition whose stored offset, 10, Kafka has just refused, and the leader that is asked about it. epoch: of the
    record before it; renewals: how often the client has asked who leads."""

    def __init__(self) -> None:
        self.leader = Leader()
        self.leader.cluster = SimpleNamespace(leader_for_partition=lambda _: 1)  # pyright: ignore[reportAttributeAccessIssue]
        self.leader.force_metadata_update = self._renew  # pyright: ignore[reportAttributeAccessIssue]
        self.epoch: int | None = 3
        self.resets = self.renewals = 0
        self.partition = Partition(TP)
        self.partition.outside = 10
        self.sought: list[int] = []
        client = SimpleNamespace(
            _client=self.leader, seek=lambda _, offset: self.sought.append(offset), resume=lambda _: None
        )
        offsets = SimpleNamespace(
            resets=lambda _: self.resets,
            topic_id=lambda _: None,
            epoch=lambda _: self.epoch,
            how_to_delete="delete it",
            how_to_move="move it to {offset}",
        )
        self.placer = Placer(
            cast(Any, client),
            {TP: self.partition},
            {},
            cast(Any, offsets),
            self.leader.epochs,
            ConsumerMetrics("test", CollectorRegistry(), {CUT}),
            request_seconds=1,
            on_placed=lambda: None,
            spawn=lambda _: None,
        )

    def _renew(self) -> None:
        self.renewals += 1

    async def look(self, end: int, answer: Any) -> str:
        """Place it where the log ends at `end`, and the leader answers so about the epoch. Returns why it is refused;
        nothing if it is placed."""
        self.leader.ends = {3: answer}
        await self.placer._place(self.partition, 10, 0, end)
        refused = self.partition.state is State.REFUSED
        assert self.sought == ([] if refused else [10])
        return self.partition.reason


@pytest.mark.parametrize("first", [-1, NOT_LEADER, KafkaConnectionError("gone")], ids=["behind", "follows", "gone"])
async def test_an_offset_that_a_leader_refuses_which_is_behind_is_read_on_where_another_has_it(first):
    """It stood still for good, with the advice to handle everything again."""
    refused = Refused()
    for looks in (1, 2):
        why = await refused.look(8, first)
        assert "the stored offset 10 lies beyond the end of the log (8), and its leader does not say" in why
        assert "made anew" not in why
        assert refused.renewals == looks
    assert await refused.look(12, 11) == ""
    assert refused.partition.next_offset == 10
    assert refused.partition.beyond is None


async def test_one_answer_that_may_be_of_another_leader_than_the_end_of_the_log_decides_nothing():
    """Metadata go to and fro as long as some brokers do not reach the others."""
    refused = Refused()
    assert "its leader does not say" in await refused.look(12, -1)
    assert await refused.look(12, 11) == ""


async def test_what_a_log_holds_is_read_on_though_an_offset_was_refused(caplog):
    assert await Refused().look(12, 10) == ""
    assert "is consumed" not in caplog.text


@pytest.mark.parametrize(
    ("end", "answer", "why"), [(8, 8, "the log was cut off at 8, "), (12, 9, "cut off at 9"), (12, -1, "was set back")]
)
async def test_a_cut_that_was_told_once_counts_although_the_log_grows_in_the_same_epoch(end, answer, why):
    """As where Kafka was set back to a snapshot. What has come meanwhile would be passed over."""
    refused = Refused()
    await refused.look(end, answer)
    assert why in await refused.look(end, answer)
    refused.partition.displace()
    assert why in await refused.look(15, 15)
    assert "made anew" not in refused.partition.reason
    refused.resets += 1
    assert await refused.look(15, 15) == "", "a person has decided"


async def test_an_offset_without_an_epoch_stays_refused_since_no_leader_can_tell():
    refused = Refused()
    refused.epoch = None
    assert "the topic was deleted and made anew" in await refused.look(8, 12)
    assert "which has grown (12), as after the topic was deleted and made anew" in await refused.look(12, 12)
    assert refused.leader.asked == []


async def test_a_partition_that_is_assigned_anew_while_its_leader_is_asked_is_not_sought():
    refused = Refused()

    def asked(_: object) -> int:
        refused.placer._partitions = {TP: Partition(TP)}
        return 1

    refused.leader.cluster.leader_for_partition = asked  # pyright: ignore[reportAttributeAccessIssue]
    refused.leader.ends = {3: 12}
    await refused.placer._place(refused.partition, 10, 0, 12)
    assert (refused.sought, refused.leader.asked) == ([], [3])


async def test_an_epoch_is_believed_beside_the_offset_and_the_topic_that_it_was_stored_with(database):
    leader, settings = Leader(), PostgresSettings(dsn=database)
    link = Link(settings, lambda: None)
    offsets = OffsetStore(link, settings, leader.epochs, {}, Pauses([]))

    async def epoch_after(change: str) -> int | None:
        async with connected(database) as connection:
            await connection.execute("DELETE FROM sidings.consumer_offset")
            await offsets.create({TP: 10})
            await offsets.load([TP])
            await offsets.adopt({TP: uuid4()})
            leader.epochs.begin(TP, 12, 7)
            await offsets.jump(Move(TP, 10, 12))
            await connection.execute(change)
        await offsets.load([TP])
        its_epoch = offsets.epoch(TP)
        of_a_reset = await fetch(database, load_sql("sidings.kafka", "load_epochs"), TP.topic)
        assert [row["leader_epoch"] for row in of_a_reset] == ([] if its_epoch is None else [its_epoch])
        return its_epoch

    try:
        assert await epoch_after("SELECT 1") == 7
        assert await epoch_after("UPDATE sidings.consumer_offset SET next_offset = 13") is None, "an earlier release"
        same = "SELECT sidings.reset_offsets(topic, '{0}', '{12}', 'alice', '', topic_id) FROM sidings.consumer_offset"
        assert await epoch_after(same) is None
        assert await epoch_after("UPDATE sidings.consumer_offset SET topic_id = NULL") is None, "another cluster"
        await offsets.adopt({TP: uuid4()})
        await offsets.load([TP])
        assert offsets.epoch(TP) is None
        its_id = "SELECT topic_id FROM sidings.consumer_offset"
        adopted = await fetch(database, its_id)
        await offsets.adopt({TP: uuid4()})
        assert await fetch(database, its_id) == adopted, "another one of its name would pass for it"
    finally:
        await link.close()

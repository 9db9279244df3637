"""A partition whose place in the log could not be found is looked at again, whatever it was that failed: nothing else
would wake who places it, and it stood still without a word."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError
from prometheus_client import CollectorRegistry
from sidings import PostgresUnavailable
from sidings.kafka import placing
from sidings.kafka.metrics import ConsumerMetrics
from sidings.kafka.offsets import Move, OffsetsMoved
from sidings.kafka.partition import Partition, State
from sidings.kafka.placing import Placer

from .support import eventually

TP, OTHER = TopicPartition("positions", 0), TopicPartition("positions", 1)
FIRST, STORED = 5, 3  # retention has deleted what is between


class Server:
    """Kafka and the stored offsets, of one partition. ends: how their answers end, by what is asked, and then well."""

    def __init__(self, ends: dict[str, list[Exception]]) -> None:
        self.ends = ends
        self.stored = STORED
        self._client: Any = SimpleNamespace(failed_at={})

    def _answer(self, what: str) -> None:
        if ends := self.ends.get(what):
            raise ends.pop(0)

    def assignment(self) -> set[TopicPartition]:
        return {TP}

    async def beginning_offsets(self, _: object) -> dict[TopicPartition, int]:
        self._answer("log")
        return {TP: FIRST}

    async def end_offsets(self, _: object) -> dict[TopicPartition, int]:
        return {TP: 9}

    async def load(self, _: object) -> dict[TopicPartition, int]:
        self._answer("load")
        return {TP: self.stored}

    async def jump(self, move: Move) -> None:
        self._answer("jump")
        self.stored = move.next

    def seek(self, *_: object) -> None: ...
    def resume(self, *_: object) -> None: ...
    def begin(self, *_: object) -> None: ...

    def resets(self, _: object) -> int:
        return 0

    def epoch(self, _: object) -> None: ...
    def topic_id(self, _: object) -> Any: ...


def a_placer(server: Any, partitions: dict[TopicPartition, Partition], **options: Any) -> Placer:
    return Placer(
        server,
        partitions,
        {TP.topic: cast(Any, SimpleNamespace(start="earliest"))},
        server,
        server,
        ConsumerMetrics("test", CollectorRegistry(), {TP.topic}),
        **{"request_seconds": 1, "on_placed": lambda: None, "spawn": lambda _: None} | options,
    )


@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
@pytest.mark.parametrize(
    "ends",
    [
        {"load": [PostgresUnavailable("away")]},
        {"jump": [KafkaError("a commit is refused")]},
        {"jump": [OffsetsMoved([TP])]},
        {"load": [asyncpg.PostgresError("no right")]},
        {"jump": [TimeoutError()]},
    ],
    ids=["no offset", "refused", "moved", "refused by Postgres", "not answered"],
)
async def test_a_partition_that_could_not_be_placed_is_placed_later(alone, ends, monkeypatch, caplog):
    """alone: by itself, since Kafka has not said at first where the logs of all begin."""
    monkeypatch.setattr("sidings.kafka.placing._AGAIN_SECONDS", 0.01)
    away = [KafkaConnectionError("nobody leads it")] * 2 if alone else []
    server: Any = Server({"log": away} | {what: list(errors) for what, errors in ends.items()})
    partition = Partition(TP)
    tasks: list[asyncio.Task[None]] = []
    placer = a_placer(server, {TP: partition}, spawn=lambda work: tasks.append(asyncio.create_task(cast(Any, work))))
    tasks.append(asyncio.create_task(placer.run()))
    try:
        placer.wake()
        await eventually(lambda: partition.state is State.READY, seconds=10)
        assert partition.next_offset == FIRST
        assert not any(server.ends.values())
        partition.displace()
        placer.wake()
        await eventually(lambda: partition.state is State.READY, "it is not placed again", seconds=10)
        await eventually(lambda: alone or "and works again" in caplog.text)
        assert not any(task.done() and task.exception() for task in tasks), "which would end the consumer"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Cluster(Server):
    """The same of two partitions, of which nobody leads `away`. asked: for which of them, each time."""

    def __init__(self, *away: TopicPartition) -> None:
        super().__init__({})
        self.away = away
        self.asked: list[set[TopicPartition]] = []

    def assignment(self) -> set[TopicPartition]:
        return {TP, OTHER}

    async def beginning_offsets(self, tps: Any) -> dict[TopicPartition, int]:
        self.asked.append(set(tps))
        if self.asked[-1] & set(self.away):
            raise KafkaConnectionError("nobody leads it")
        return dict.fromkeys(tps, 0)

    async def end_offsets(self, tps: Any) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 9)

    def partitions_for_topic(self, _: str) -> set[int]:
        return {0, 1}

    async def load(self, tps: Any) -> dict[TopicPartition, int]:
        self._answer("load")
        return dict.fromkeys(tps, STORED)


async def test_a_partition_that_nobody_leads_is_asked_for_alone_until_it_is_anothers(monkeypatch):
    """Together with others it would keep them from their places, each time that one of them needs one."""
    monkeypatch.setattr("sidings.kafka.placing._AGAIN_SECONDS", 0.01)
    cluster: Any = Cluster(OTHER)
    partitions = {tp: Partition(tp) for tp in (TP, OTHER)}
    alone: list[asyncio.Task[None]] = []
    placer = a_placer(cluster, partitions, spawn=lambda work: alone.append(asyncio.create_task(cast(Any, work))))
    running = asyncio.create_task(placer.run())
    try:
        placer.wake()
        await eventually(lambda: partitions[TP].state is State.READY)
        partitions[TP].displace()
        placer.wake()
        await eventually(lambda: partitions[TP].state is State.READY)
        assert cluster.asked.count({TP, OTHER}) == 1
        assert len(alone) == 2
        assert partitions[OTHER].reason.startswith("Kafka does not say where their logs begin and end")
        [asking] = [task for task in alone if not task.done()]
        partitions[OTHER] = Partition(OTHER)  # as a rebalance makes it
        await eventually(asking.done)
        cluster.away = ()
        await eventually(lambda: partitions[OTHER].state is State.READY)
    finally:
        for task in (running, *alone):
            task.cancel()
        await asyncio.gather(running, *alone, return_exceptions=True)


@pytest.mark.parametrize("early", ["covers", "has_shrunk"])
async def test_a_partition_waits_until_it_is_known_how_many_its_topic_has(monkeypatch, early):
    """Keys of it may have jobs elsewhere, and not everybody knows that. Nobody wakes who places it then."""
    monkeypatch.setattr("sidings.kafka.placing._EARLY_SECONDS", 0.01)
    cluster: Any = Cluster()
    partitions = {tp: Partition(tp) for tp in (TP, OTHER)}
    partitions[OTHER].enter(State.REFUSED, "the log was cut off")
    known = False
    topics = SimpleNamespace(
        covers=lambda _: known or early != "covers", has_shrunk=lambda *_: not known and early == "has_shrunk"
    )
    running = asyncio.create_task(a_placer(cluster, partitions, topics=topics).run())
    try:
        await eventually(lambda: "sidings.topic" in partitions[TP].reason)
        assert partitions[OTHER].reason == "the log was cut off"
        assert cluster.asked == []
        cluster.ends["load"] = [PostgresUnavailable("away")]
        known = True
        await eventually(lambda: not cluster.ends["load"])
        assert partitions[TP].reason == "", "it waits for something else now"
        await eventually(lambda: partitions[TP].state is State.READY)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Stored(Cluster):
    """Only one of the partitions has an offset; that of the other is refused, then it gets lost, then somebody else
    was faster to store one."""

    async def load(self, tps: Any) -> dict[TopicPartition, int]:
        return {tp: offset for tp, offset in {TP: STORED, OTHER: self.stored}.items() if tp in tps and offset >= 0}

    async def create(self, _: object) -> None:
        self._answer("create")
        self.stored = 7 if "lost" in self.ends else -1
        self.ends["lost"] = []


async def test_a_first_offset_that_is_refused_or_lost_keeps_no_other_from_its_place(caplog):
    server: Any = Stored()
    server.stored, server.ends = -1, {"create": [KafkaError("no right to commit")]}
    partitions = {tp: Partition(tp) for tp in (TP, OTHER)}
    placer = a_placer(server, partitions)
    running = asyncio.create_task(placer.run())
    try:
        placer.wake()
        await eventually(lambda: partitions[OTHER].state is State.READY)
        assert partitions[OTHER].next_offset == 7
        assert server.asked == [{TP, OTHER}, {OTHER}, {OTHER}]
        assert "partitions could not be placed yet, trying again: KafkaError('no right to commit')" in caplog.text
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("why", ["added", "another topic's", "none"])
async def test_a_group_is_said_to_have_no_offset_only_where_it_might_have_one(why, monkeypatch, caplog):
    """What was added since begins at its beginning, and of another topic's offset the log tells already."""

    async def committed_of(*_: object) -> dict[TopicPartition, None]:
        return {OTHER: None} if why == "another topic's" else {}

    async def begun(topics: set[str]) -> set[str]:
        return topics

    monkeypatch.setattr(placing, "committed_of", committed_of)
    caplog.set_level("INFO", "sidings.consumer")
    server: Any = Stored()
    server.stored, server.ends, server._group_id, server.how_to_move = -1, {"lost": []}, "former", "reset it"
    topics = SimpleNamespace(
        begun=begun,
        was_added=lambda _: why == "added",
        covers=lambda _: True,
        has_shrunk=lambda *_: False,
        has_grown=lambda _: False,
    )
    partitions = {tp: Partition(tp) for tp in (TP, OTHER)}
    placer = a_placer(server, partitions, topics=topics)
    placer._subscriptions = {TP.topic: cast(Any, SimpleNamespace(start="committed"))}

    async def create(starts: Any) -> None:
        server.stored = starts[OTHER]

    server.create = create
    running = asyncio.create_task(placer.run())
    try:
        placer.wake()
        await eventually(lambda: partitions[OTHER].state is State.READY)
        begins = "positions: no offset was stored for partitions 1: they begin at the earliest message"
        assert (begins in caplog.text) == (why != "none")
        assert ("the consumer group 'former' has no offset for partitions 1:" in caplog.text) == (why == "none")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_partition_whose_offset_cannot_be_moved_keeps_no_other_from_its_place():
    """As where a stateless consumer's Kafka takes no commit of that topic."""
    everything = [TopicPartition("positions", number) for number in range(6)]
    server: Any = Cluster()
    server.assignment = lambda: set(everything)

    async def beginnings(tps: Any) -> dict[TopicPartition, int]:
        return {tp: FIRST if tp == TP else 0 for tp in tps}

    async def jump(_: object) -> None:
        raise KafkaError("no right to commit")

    server.beginning_offsets, server.jump = beginnings, jump
    partitions = {tp: Partition(tp) for tp in everything}
    placer = a_placer(server, partitions)
    running = asyncio.create_task(placer.run())
    try:
        placer.wake()
        await eventually(lambda: all(partitions[tp].state is State.READY for tp in everything if tp != TP))
        assert partitions[TP].state is State.UNPLACED
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Shared(Cluster):
    """One whose group has had a stateless consumer of these partitions. done: what is sought, moved and committed, in
    order; refusals: how commits end first."""

    def __init__(self, *refusals: Exception) -> None:
        super().__init__()
        self.offsets = {TP: STORED, OTHER: STORED}
        self.ends = {"commit": list(refusals)}
        self.done: list[Any] = []

    async def load(self, tps: Any) -> dict[TopicPartition, int]:
        return {tp: self.offsets[tp] for tp in tps}

    def epoch(self, tp: object) -> Any:
        return 1 if tp == TP else None

    def topic_id(self, _: object) -> Any:
        return None

    async def adopt(self, _: object) -> None: ...

    def begin(self, *place: object) -> None:
        self.done.append(place)

    async def jump(self, move: Move) -> None:
        self.offsets[move.tp] = move.next
        self.done.append(move)

    async def commit(self, offsets: Any) -> None:
        self._answer("commit")
        self.done.append(offsets)


def stateless_before(monkeypatch: Any, found: dict[TopicPartition, Any]) -> None:
    """What a stateless consumer has left in Kafka, by partition."""

    async def told(_: object, tps: Any) -> dict[str, Any]:
        return {each.topic: (uuid4(), 2) for each in tps}

    async def committed_stateless(_: object, tps: Any) -> Any:
        return {each: place for each, place in found.items() if each in tps}

    monkeypatch.setattr(placing, "ask_topics", told)
    monkeypatch.setattr(placing, "committed_stateless", committed_stateless)


@pytest.mark.parametrize(
    ("tp", "committed", "goes_on"),
    [(TP, (9, 4, 0), 9), (TP, (2, 4, 0), STORED), (TP, (9, 4, STORED + 1), STORED), (OTHER, (9, 4, 0), STORED)],
    ids=["further", "not so far", "beginning behind", "set by a person"],
)
@pytest.mark.parametrize("refused", [None, KafkaError("no right"), TimeoutError()], ids=repr)
async def test_only_what_a_stateless_consumer_has_handled_since_is_passed_once_kafka_is_told(
    tp, committed, goes_on, refused, monkeypatch, caplog
):
    """Nothing goes back, which would be handled twice, and nothing that Kafka does not take keeps others waiting."""
    cluster: Any = Shared(*([] if refused is None else [refused]))
    stateless_before(monkeypatch, {tp: committed})
    partitions = {each: Partition(each) for each in (TP, OTHER)}
    placer = a_placer(cluster, partitions, adopt=cluster.adopt)
    running = asyncio.create_task(placer.run())
    try:
        placer.wake()
        await eventually(lambda: all(partition.state is State.READY for partition in partitions.values()))
        assert partitions[tp].next_offset == cluster.offsets[tp] == goes_on
        passed = [(tp, 9, 4), Move(tp, STORED, 9)] if goes_on == 9 else []
        assert cluster.done[: len(passed)] == passed
        assert [done for done in cluster.done if isinstance(done, Move)] == passed[1:]
        told, placed = cluster.done.index({tp: goes_on}), cluster.done.index((tp, goes_on, cluster.epoch(tp)))
        assert told < placed
        assert ("partitions could not be placed yet, trying again" in caplog.text) == (refused is not None)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_partition_waits_also_where_its_topics_count_is_told_while_it_is_placed(monkeypatch):
    """With the topic's id, by a client that knew the former count until then."""
    monkeypatch.setattr("sidings.kafka.placing._EARLY_SECONDS", 0.01)
    cluster: Any = Shared()
    stateless_before(monkeypatch, {})  # which tells of two
    cluster.partitions_for_topic = lambda _: {0, 1, 2}
    cluster.known = False
    loads: list[bool] = []

    async def load(tps: Any) -> dict[TopicPartition, int]:
        loads.extend([cluster.known] * len(tps))
        return dict.fromkeys(tps, STORED)

    cluster.load = load
    topics = SimpleNamespace(covers=lambda _: True, has_shrunk=lambda _, count: count == 2 and not cluster.known)
    partitions = {tp: Partition(tp) for tp in (TP, OTHER)}
    placer = a_placer(cluster, partitions, topics=topics, adopt=cluster.adopt)
    running = asyncio.create_task(placer.run())
    try:
        placer.wake()
        await eventually(lambda: all("sidings.topic" in partition.reason for partition in partitions.values()))
        assert loads == []
        cluster.known = True
        await eventually(lambda: all(partition.state is State.READY for partition in partitions.values()))
        assert all(loads)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_nothing_is_passed_of_a_topic_that_was_made_anew(monkeypatch):
    """What is stored belongs to another log: Kafka would be told of it, and whoever is stateless again go on there."""
    cluster: Any = Shared()
    cluster.topic_id, cluster.how_to_delete = lambda _: uuid4(), "delete it"
    stateless_before(monkeypatch, dict.fromkeys((TP, OTHER), (9, 4, 0)))
    partitions = {each: Partition(each) for each in (TP, OTHER)}
    placer = a_placer(cluster, partitions, adopt=cluster.adopt)
    running = asyncio.create_task(placer.run())
    try:
        placer.wake()
        await eventually(lambda: all(partition.state is State.REFUSED for partition in partitions.values()))
        assert cluster.done == []
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_answer_of_before_a_partition_was_assigned_anew_moves_it_no_more():
    """Where a person has set its offset back meanwhile, what is between would pass for a gap in the log."""
    server: Any = Server({"log": [KafkaConnectionError("nobody leads it")]})
    asked, answer, sought = asyncio.Event(), asyncio.Event(), list[int]()

    async def load(_: object) -> dict[TopicPartition, int]:
        if asked.is_set():
            return {TP: 6}
        asked.set()
        await answer.wait()
        return {TP: 8}

    server.load, server.seek = load, lambda _, offset: sought.append(offset)
    partitions, tasks = {TP: Partition(TP)}, list[asyncio.Task[None]]()
    placer = a_placer(server, partitions, spawn=lambda work: tasks.append(asyncio.create_task(cast(Any, work))))
    running = asyncio.create_task(placer.run())
    try:
        placer.wake()
        await eventually(asked.is_set, "it is asked for alone")
        partitions[TP] = Partition(TP)
        placer.wake()
        await eventually(lambda: partitions[TP].state is State.READY)
        answer.set()
        await asyncio.gather(*tasks)
        assert sought == [6]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

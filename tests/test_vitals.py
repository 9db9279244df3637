"""What a consumer shows of itself: its figures, and what its health check complains about, by a clock of the test's."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from prometheus_client import CollectorRegistry
from sidings import KafkaSettings
from sidings.kafka import Consumer, membership
from sidings.kafka.partition import Partition, State
from sidings.kafka.vitals import Vitals

from .support import eventually

NOW = 1_000.0
SEES_ALL = SimpleNamespace(cluster=SimpleNamespace(unauthorized_topics=set()))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidings.kafka.vitals.time", SimpleNamespace(monotonic=lambda: NOW))


def a_partition(number: int, state: State, *, seconds: float = 0, next_offset: int = 5, reason: str = "") -> Partition:
    """One that has been in this state for so long."""
    partition = Partition(TopicPartition("positions", number))
    partition.enter(state, reason)
    partition.since, partition.next_offset = NOW - seconds, next_offset
    partition.idle_at = partition.answered_at = NOW
    return partition


def of(
    partitions: list[Partition], *loops: Any, backlog: Any = None, highwater: Any = lambda _: None, paused: Any = ()
) -> Vitals:
    vitals = Vitals({"positions", "orders"}, {"positions"}, lambda: partitions, paused)
    client: Any = SimpleNamespace(partitions_for_topic=lambda _: {0}, highwater=highwater, _client=SEES_ALL)
    contact: Any = SimpleNamespace(
        lost_since=None, silence=lambda _: "", unreached="", throttling="", unheard=lambda: 0.0
    )
    vitals.connected(client, loops, backlog, contact)
    vitals.rebalance_ends()
    return vitals


def test_what_the_figures_are_of(clock):
    partitions = [
        a_partition(0, State.ASIDE, seconds=10),
        a_partition(1, State.ASIDE, seconds=3),
        a_partition(2, State.FULL, next_offset=20),
        a_partition(3, State.REFUSED, next_offset=12, reason="the log was cut off"),
        a_partition(4, State.UNPLACED, next_offset=-1),
        a_partition(5, State.READY),
        a_partition(6, State.READY),
        a_partition(7, State.READY),
    ]
    partitions[2].calls, partitions[5].calls = {21: NOW - 2, 20: NOW - 7}, {5: NOW - 1}
    told: dict[int, Any] = {0: 9, 3: 9, 4: 7, 5: AssertionError(), 6: AttributeError(), 7: 8}

    def highwater(tp: TopicPartition) -> int | None:
        if isinstance(found := told.get(tp.partition), Exception):
            raise found
        return found

    backlog = SimpleNamespace(waiting={TopicPartition("positions", 2): 30}, outage=None)
    vitals = of(partitions, backlog=backlog, highwater=highwater)
    vitals._ends = {TopicPartition("positions", 2): 30, TopicPartition("positions", 7): 6}
    figures: dict[str, Any] = {name.removeprefix("sidings_consumer_"): values for name, _, values in vitals.figures()}
    positions, none = ("positions", None), {("orders", None): 0.0}
    assert figures["paused_partitions"] == {positions: 2} | none
    assert figures["stalled_seconds"] == {positions: 10} | none
    assert figures["oldest_call_seconds"] == {positions: 7} | none
    assert figures["full_partitions"] == {positions: 1} | none
    assert figures["stopped_partitions"] == {positions: 1} | none
    assert figures["topic_paused"] == {positions: 0} | none
    assert figures["waiting_jobs"] == {("positions", 2): 30}
    assert {number: lag for (_, number), lag in figures["lag"].items()} == {0: 4, 2: 10, 3: 0, 7: 3}


def test_what_is_no_problem_yet_any_more_or_of_another_kind(clock):
    def an_outage(seconds: float, failed_before: float) -> Any:
        return SimpleNamespace(seconds=lambda: seconds, error="no right", failed_at=NOW - failed_before)

    def a_loop(turned_before: float, *outages: Any) -> Any:
        return SimpleNamespace(topic="positions", turned_at=NOW - turned_before, outages=outages, put_off=None)

    def problems(*partitions: Partition, loop: Any = None, backlog: Any = None) -> list[str]:
        return of(list(partitions), *([] if loop is None else [loop]), backlog=backlog).problems()

    def uncounted(seconds: float) -> Any:
        return SimpleNamespace(outage=an_outage(seconds, 1), waiting={})

    assert problems(loop=a_loop(59)) == []
    assert problems(loop=a_loop(61)) == ["the consumer of 'positions' is stuck for 61 s"]
    assert problems(loop=a_loop(1, an_outage(14, 1))) == []
    assert problems(loop=a_loop(1, an_outage(90, 61))) == [], "it has no more"
    assert problems(loop=a_loop(1, an_outage(16, 1))) == [
        "the consumer of 'positions' has got no further for 16 s: no right"
    ]
    assert problems(a_partition(0, State.UNPLACED, seconds=14)) == []
    waiting = [a_partition(0, State.UNPLACED, seconds=16), a_partition(1, State.UNPLACED, seconds=14)]
    some = "1 partitions (positions/0) have no place to read from yet"
    assert problems(*waiting) == [f"{some}: their stored offsets could not be read"]
    waiting[0].reason = "nobody leads it"
    assert problems(*waiting) == [f"{some}: nobody leads it"]
    full = a_partition(0, State.FULL, seconds=90)
    assert problems(full, backlog=uncounted(14)) == problems(backlog=uncounted(90)) == []
    assert problems(full, backlog=uncounted(16)) == [
        "positions/0: paused, and the jobs that wait could not be counted: no right"
    ]
    aside, before, ready = (a_partition(n, State.READY, seconds=90) for n in range(3))
    aside.state = State.ASIDE
    before.since = NOW - 59
    for partition in (aside, before, ready):
        partition.answered_at = NOW - 61
    assert problems(aside, before) == []
    assert problems(aside, before, ready) == ["Kafka has not answered for 60 s about positions/2"]
    ready.since, ready.answered_at = NOW - 61, NOW - 1
    assert problems(ready) == []


def test_of_a_topic_that_a_person_has_paused_nothing_is_expected_but_what_is_wrong_all_the_same(clock):
    """Where nothing is asked for, Kafka says nothing; and what is not tried gets no further."""
    outage: Any = SimpleNamespace(seconds=lambda: 90.0, error="no right", failed_at=NOW - 1)
    loop = SimpleNamespace(topic="positions", turned_at=NOW - 1, outages=[outage], put_off=outage)
    silent, deaf = a_partition(0, State.READY, seconds=90), a_partition(1, State.READY)
    silent.answered_at = NOW - 90
    refused = a_partition(2, State.REFUSED, reason="the log was cut off")
    deaf.deaf.add(7)
    unplaced = a_partition(3, State.UNPLACED, seconds=16)
    wrong = [
        "1 partitions (positions/3) have no place to read from yet: their stored offsets could not be read",
        "positions/1: the handler of offset 7 goes on, although it was cancelled at its timeout",
        "the log was cut off",
    ]
    by_itself = [
        "the consumer of 'positions' has got no further for 90 s: no right",
        "Kafka has not answered for 60 s about positions/0",
    ]
    partitions = [silent, deaf, refused, unplaced]
    assert sorted(of(partitions, loop).problems()) == sorted([*wrong, *by_itself])
    assert sorted(of(partitions, loop, paused={"orders"}).problems()) == sorted([*wrong, *by_itself])
    assert sorted(of(partitions, loop, paused={"positions"}).problems()) == sorted(wrong)


def test_a_topic_is_paused_once_nothing_of_it_is_under_way(clock):
    loops = [SimpleNamespace(topic="orders", in_flight=0), SimpleNamespace(topic="positions", in_flight=1)]
    for paused, figure in (set[str](), (0, 0)), ({"orders"}, (1, 0)), ({"orders", "positions"}, (1, 0)):
        figures = {name: values for name, _, values in of([], *loops, paused=paused).figures()}
        orders, positions = figure
        of_topics = {("positions", None): positions, ("orders", None): orders}
        assert figures["sidings_consumer_topic_paused"] == of_topics
    loops[1].in_flight = 0
    figures = {name: values for name, _, values in of([], *loops, paused={"positions"}).figures()}
    assert figures["sidings_consumer_topic_paused"] == {("positions", None): 1, ("orders", None): 0}


def test_a_coordinator_that_has_not_answered_for_long_is_told_of_but_not_beside_what_is_worse(clock):
    """Kafka gives the partitions to others, and the member that cannot be told goes on with them."""
    vitals = of([])
    contact: Any = vitals._contact
    contact.unheard, contact.unreached = lambda: 14.0, ": no connection to broker 2"
    assert vitals.problems() == []
    contact.unheard = lambda: 60.0
    [told] = vitals.problems()
    assert told == (
        "the group's coordinator has not answered for 60 s: others may have the partitions that this instance goes on "
        "with: no connection to broker 2"
    )
    vitals.rebalance_begins()
    assert vitals.problems() == [], "it goes on with none"
    vitals.rebalance_ends()
    contact.lost_since = NOW - 61
    assert ["none of the brokers" in told for told in vitals.problems()] == [True]


def test_a_connection_that_breaks_after_long_breaks_once_and_a_rebalance_tells_of_the_error_before_it(monkeypatch):
    now = NOW
    monkeypatch.setattr("sidings.kafka.vitals.time", SimpleNamespace(monotonic=lambda: now))
    vitals = of([])
    client, contact = vitals._client, vitals._contact
    assert client is not None
    assert contact is not None

    def breaks() -> None:
        vitals.disconnected(OSError("reset"))
        assert vitals.missing_topics() == [], "there is no client to ask"
        vitals.connected(client, (), None, contact)

    breaks()
    vitals.rebalance_ends()
    now += 3_600
    breaks()
    assert vitals.problems() == []
    now += 14
    assert vitals.problems() == []
    now += 2
    assert vitals.problems() == ["the connection to Kafka breaks again and again: OSError('reset')"]
    vitals.rebalance_ends()
    now += 6
    assert vitals.problems() == []
    breaks()
    now += 61
    assert vitals.problems()[-1] == "the group has been rebalancing for 61 s; the last error: OSError('reset')"
    vitals.rebalance_ends()
    vitals.rebalance_begins()
    now += 61
    assert vitals.problems() == ["the group has been rebalancing for 61 s"]


async def test_a_consumer_that_begins_long_after_it_was_made_is_well(monkeypatch):
    """It waits for directories, which may take minutes to load: then `/health` was bad at once, for untrue reasons."""
    now, connecting = NOW, asyncio.Event()
    monkeypatch.setattr("sidings.kafka.vitals.time", SimpleNamespace(monotonic=lambda: now))

    async def connect(*_: object) -> None:
        connecting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(membership, "connect", connect)
    settings = KafkaSettings(bootstrap="127.0.0.1:1")
    consumer = Consumer("test", settings, {}, ["positions"], None, None, prometheus=CollectorRegistry())
    now += 600
    running = asyncio.create_task(consumer.run())
    try:
        await connecting.wait()
        assert consumer.vitals.problems() == []
        client: Any = SimpleNamespace(partitions_for_topic=lambda _: {0}, _client=SEES_ALL)
        consumer.vitals.connected(client, (), None, membership.Contact(client))
        assert consumer.vitals.problems() == [], "nor has the group been rebalancing for so long"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_where_logs_end_of_which_nothing_is_read_is_known_of_all_whose_broker_answers(monkeypatch, caplog):
    """One that hangs, or fails in whatever way, is heard of by its own partitions alone, which keep what was known."""
    monkeypatch.setattr("sidings.kafka.vitals._ENDS_SECONDS", 0.02)
    partitions = [a_partition(n, State.FULL) for n in range(3)] + [a_partition(3, State.READY)]
    hanging, asked = False, list[set[int]]()
    unled = [["positions/1"], [], ["positions/1"], ["positions/1"], ["positions/1"], []]

    async def ends(tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        asked.append({tp.partition for tp in tps})
        if hanging and tps[0].partition == 0:
            await asyncio.Event().wait()
        if hanging and tps[0].partition == 1:
            raise RuntimeError("a client that is closing")
        return dict.fromkeys(tps, 7 if hanging else 6)

    cluster = SimpleNamespace(leader_for_partition=lambda tp: tp.partition)
    client: Any = SimpleNamespace(end_offsets=ends, _client=SimpleNamespace(cluster=cluster))
    vitals = of(partitions)
    vitals._contact = SimpleNamespace(lost_since=None, unled=lambda _: unled.pop(0) if unled else [])  # type: ignore[assignment]

    def known() -> list[int | None]:
        return [vitals._ends.get(partition.tp) for partition in partitions]

    watching = asyncio.create_task(vitals.watch_ends(client))
    try:
        await eventually(lambda: known() == [6, 6, 6, None])
        hanging = True
        await eventually(lambda: known() == [6, 6, 7, None])
        await eventually(lambda: not unled and "and works again" in caplog.text)
        assert all(len(numbers) == 1 for numbers in asked)
        vitals.disconnected()
        seen = len(asked)
        await eventually(lambda: len(asked) > seen + 6 or watching.done())
        assert not watching.done(), "the client is given up a moment later"
    finally:
        watching.cancel()
    assert caplog.text.count("what nobody leads could not be read, trying again: positions/1") == 1
    assert caplog.text.count("and works again") == 1

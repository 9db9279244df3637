"""Whole relays in a simulated world: what no fault, and no coincidence of faults, may do to what is promised."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sidings.kafka.outbox import Relay, lanes, rounds
from sidings.kafka.outbox.packing import Packer

from .outbox_world import SimSender, World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Two relays that share the slots, and nothing goes wrong of itself."""
    world = World(1, monkeypatch)
    try:
        world.pass_time(8.0)
        yield world
    finally:
        world.close()


def test_a_relay_that_loses_kafka_gives_its_slots_to_one_that_reaches_it(world: World) -> None:
    """It took its next messages, waited for Kafka with them, and could not give their slots away as long as it did."""
    away, there = world.nodes
    away.no_kafka = True
    world.pass_time(30.0)
    assert away.relay is not None
    assert there.relay is not None
    assert (len(away.relay.held), len(there.relay.held)) == (0, 16)
    world.settle()


def test_a_relay_that_finds_no_broker_for_a_failing_topic_leaves_the_slots_to_others(world: World) -> None:
    """The shared producer had nothing to send, all topics failing, and so the relay took itself for connected."""
    away, there = world.nodes
    world.failing.update(world.topics)
    world.pass_time(8.0)
    away.no_kafka = True
    world.failing.clear()
    world.pass_time(20.0)
    assert away.relay is not None
    assert there.relay is not None
    assert (len(away.relay.held), len(there.relay.held)) == (0, 16)
    world.settle()


def test_that_a_topic_works_again_is_told_when_postgres_is_back(world: World) -> None:
    """It was told once, when Postgres was away: the topic counted as failing until the relay ended."""
    world.failing.add("a")
    world.pass_time(8.0)
    assert "a" in {topic for topic, _ in world.primary.failing}  # and others, while they share its producer
    world.refused.add("topic_works")
    world.failing.clear()
    world.pass_time(8.0)
    assert "a" in {topic for topic, _ in world.primary.failing}
    world.refused.clear()
    world.pass_time(3.0, write=False)
    assert not world.primary.failing


def test_what_is_stored_while_a_read_is_under_way_is_sent_when_it_is_committed(world: World) -> None:
    """A read tells how far ids have been drawn, and may have taken its snapshot before: the mark must not pass such ids
    before it is known whose they are."""
    server = world.primary
    opened: list[tuple[int, bytes]] = []

    def store() -> None:
        if len(opened) < 8:  # each relay reads some times
            opened.append((server.begin(), b"late %d" % len(opened)))
            for slot in range(16):
                server.insert(opened[-1][0], slot, "a", b"key %d" % slot, opened[-1][1])

    def reads() -> int:
        return sum(world.statements[node.number, "read"] for node in world.nodes)

    world.wait_for(lambda: not world.waiting(set(world.topics)), 30.0, "all leave")
    server.meanwhile = store
    before = reads()
    world.wait_for(lambda: reads() > before + 16, 60.0, "some reads")
    for xid, value in opened:
        server.open.remove(xid)
        for slot in range(16):
            world.journal["a", b"key %d" % slot].append(value)
        world.wait_for(lambda: not world.waiting(set(world.topics)), 30.0, "what has been committed leaves")
    world.settle()


def test_a_slot_that_is_given_away_as_what_was_locked_is_deleted_is_none_that_was_lost(world: World) -> None:
    """It was released before the statement, which said so: all producers were closed, and what all topics had under way
    was sent again."""
    server, killed, given = world.primary, list[float](), list[str]()
    world.wait_for(lambda: not world.waiting(set(world.topics)), 30.0, "all leave")
    for slot in range(16):
        server.insert(xid := server.begin(), slot, "a", b"key %d" % slot, b"of slot %d" % slot)
        world.journal["a", b"key %d" % slot].append(b"of slot %d" % slot)
        server.open.remove(xid)
    server.locks = {row.id: world.time + 6.0 for row in server.committed()}
    relays = {node.relay.id: node.relay for node in world.nodes if node.relay}
    for relay in relays.values():
        relay._senders.kill_all = lambda: killed.append(world.time)  # type: ignore[attr-defined]
    world.wait_for(lambda: sum(len(relay.backlog.locked) for relay in relays.values()) == 16, 6.0, "all are tried")
    record = server._record

    def late(me: UUID, slots: list[int], names: list[str], epochs: list[int], *rest: Any) -> Any:
        backlog = relays[me].backlog
        for slot in [backlog.slots[number] for number in slots if number in backlog.slots]:
            backlog.forget(slot)
        relays[me]._slots._let_go()  # type: ignore[attr-defined]
        gone = [name for number, name in zip(slots, names, strict=True) if number not in backlog.slots]
        given.extend(gone)
        server._release(me, gone, [epochs[names.index(name)] for name in gone])
        return record(me, slots, names, epochs, *rest)

    server._record = late  # type: ignore[method-assign]
    world.wait_for(lambda: bool(given), 20.0, "some are given away")
    server._record = record  # type: ignore[method-assign]
    world.pass_time(5.0, write=False)
    assert killed == []
    world.settle()


def test_a_key_that_cannot_be_kept_as_one_in_doubt_holds_up_no_deletion(world: World) -> None:
    """What was sent of all topics was recorded no more, and sent again at each takeover."""
    world.directories.add("a")
    world.failing.add("a")
    world.pass_time(8.0)
    world.failing.clear()
    world.settle()


@pytest.mark.parametrize("first", ["read", "slots", "lease"])
def test_when_one_connection_has_met_the_server_that_took_over_the_others_follow(world: World, first: str) -> None:
    """The former primary lives on. What was read there, and leases that it grants, count for nothing; where only the
    slots were of the new server, nothing was ever read there, and no message left any more."""
    world.fail_over(lose=2.0, alive=True)
    for node in world.nodes:
        assert node.relay is not None
        link = node.relay._leases.link if first == "lease" else node.relay._links[first]  # type: ignore[attr-defined]
        link.drop()
    world.settle()


def test_relays_that_are_stopped_and_cut_off_by_a_failover_send_all_that_the_new_server_has(world: World) -> None:
    for alive in (False, True):
        world.fail_over(lose=2.0, alive=alive)
        world.cut()
        world.pass_time(10.0)
    world.settle()


@pytest.mark.parametrize("stuck", [{0}, {1}, {0, 1, 2}])
def test_partitions_that_take_nothing_hold_up_no_others_and_come_back(world: World, stuck: set[int]) -> None:
    """Those with odd numbers do not even answer."""
    world.stuck = {("a", partition) for partition in stuck}
    world.pass_time(30.0)
    while world.writing:
        world.end_one()
    world.wait_for(lambda: not world.waiting({"a", "b", "c"}), 60.0, "those of the other partitions leave")
    assert any(row.topic == "a" for row in world.primary.committed())
    before = sum(world.statements.values())
    world.pass_time(20.0, write=False)
    assert sum(world.statements.values()) - before < 1_200, "they are tried now and then"
    world.settle()


def test_partitions_that_take_nothing_hold_up_no_others_either_when_some_are_added(world: World) -> None:
    """Other keys go to them then, which were not apart, and each try left fewer of the others a place."""
    world.stuck = {("a", 0), ("a", 1)}
    world.pass_time(15.0)
    world.partitions = 5
    world.pass_time(30.0)
    while world.writing:
        world.end_one()
    place = partial(Packer("test", {}).partition_of, "a")

    def waiting() -> bool:
        rows = [row for row in world.primary.committed() if row.topic == "a" and row.key]
        return any({place(row.key, range(count)) for count in (4, 5)}.isdisjoint((0, 1)) for row in rows)

    world.wait_for(lambda: not waiting(), 20.0, "those of the other partitions leave")
    world.stuck.clear()
    world.wait_for(lambda: not world.waiting(set(world.topics)), 120.0, "all leave")
    relays = [node.relay for node in world.nodes]
    world.wait_for(lambda: not any(relay and relay.backlog.parts for relay in relays), 120.0, "all are together")


@pytest.mark.parametrize(("first", "last", "keys"), [({0, 2}, {1, 3}, True), ({1, 3}, {0, 2}, False)])
def test_messages_without_a_key_go_to_what_works_again_when_the_last_partitions_fail(
    world: World, first: set[int], last: set[int], keys: bool
) -> None:
    """What had failed before was still apart, since it joins when the topic works: they waited for what had not."""
    world.stuck = {("a", partition) for partition in first}
    world.pass_time(15.0)
    relays = [node.relay for node in world.nodes if node.relay]
    assert [relay.backlog.apart(relay.backlog.lanes["a"]) for relay in relays] == [first] * 2
    if not keys:
        while world.writing:
            world.end_one()
        world.wait_for(lambda: not world.waiting(set(world.topics)), 60.0, "those of the other partitions leave")
        for number in range(1_000):
            world.primary.insert(xid := world.primary.begin(), number % 16, "a", None, b"without a key %d" % number)
            world.journal["a", None].append(b"without a key %d" % number)
            world.primary.open.remove(xid)
    world.stuck = {("a", partition) for partition in last}
    world.pass_time(30.0, write=keys)
    while world.writing:
        world.end_one()
    world.wait_for(lambda: not world.waiting(set(world.topics)), 60.0, "those leave that can")
    world.stuck = {("a", partition) for partition in range(world.partitions)}
    world.pass_time(40.0)
    assert all(len(relay.backlog.parts) <= world.partitions for relay in relays), "it is no part for each failure"
    world.stuck.clear()
    world.settle()


@pytest.mark.parametrize(("first", "last", "told"), [({1, 2}, {0, 3}, {0}), ({0, 2}, {1, 3}, set[int]())])
def test_messages_without_a_key_do_so_when_the_last_partitions_never_fail_together(
    world: World, monkeypatch: pytest.MonkeyPatch, first: set[int], last: set[int], told: set[int]
) -> None:
    """Of one Kafka tells that nobody leads it, and nothing goes there; or rounds are too small for all of them."""
    monkeypatch.setattr(rounds, "_LEAST_BYTES", 16)
    monkeypatch.setattr(SimSender, "stuck", lambda *_: frozenset(p for p in told if ("a", p) in world.stuck))
    world.stuck = {("a", partition) for partition in first}
    world.pass_time(15.0)
    while world.writing:
        world.end_one()
    world.wait_for(lambda: not world.waiting(set(world.topics)), 60.0, "those of the other partitions leave")
    world.stuck = {("a", partition) for partition in last}
    for number in range(1_000):
        world.primary.insert(xid := world.primary.begin(), number % 16, "a", None, b"without a key %d" % number)
        world.journal["a", None].append(b"without a key %d" % number)
        world.primary.open.remove(xid)
    world.wait_for(lambda: not world.waiting(set(world.topics)), 90.0, "those leave that can")
    world.stuck.clear()
    world.settle()


def test_a_person_has_a_topic_tried_again_also_while_a_part_of_it_waits_to_join(world: World) -> None:
    """The part had failed last, and had nothing to send: it counted as being tried, and nothing else was."""
    relays = [node.relay for node in world.nodes if node.relay]
    for relay in relays:
        relay.settings.__dict__["max_backoff_seconds"] = 600.0

    def publish(count: int) -> None:
        for _ in range(count):
            number = len(world.journal["a", None])
            world.primary.insert(xid := world.primary.begin(), number % 16, "a", None, b"without a key %d" % number)
            world.journal["a", None].append(b"without a key %d" % number)
            world.primary.open.remove(xid)

    while world.writing:
        world.end_one()
    world.wait_for(lambda: not world.waiting(set(world.topics)), 60.0, "all leave")
    world.stuck = {("a", 0), ("a", 2)}
    while not any(relay.backlog.parts for relay in relays):
        publish(30)
        world.pass_time(0.1, write=False)
    world.stuck = {("a", partition) for partition in range(world.partitions)}
    publish(100)
    world.pass_time(300.0, write=False)
    world.stuck.clear()
    assert all(any(part.closing for part in relay.backlog.parts) for relay in relays)
    for topic, owner in world.primary.failing:
        world.primary.failing[topic, owner] = world.time
    world.wait_for(lambda: not world.waiting({"a"}), 10.0, "all leave")
    world.settle()


def test_a_topic_that_fails_as_a_whole_does_not_go_apart_as_a_whole(world: World) -> None:
    """A part with all that is published joins only when nothing of it waits."""
    world.stuck = {("a", 0)}
    world.pass_time(15.0)
    world.stuck = {("a", partition) for partition in range(world.partitions)}
    world.pass_time(40.0)
    relays = [node.relay for node in world.nodes if node.relay]
    for relay in relays:
        assert relay.backlog.apart(relay.backlog.lanes["a"]) < {*range(world.partitions)}
    world.stuck.clear()
    world.settle()


def test_nothing_is_left_of_topics_that_nobody_publishes_to_any_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kept a lane, a task and two histograms until the relay ended, and each read walked through all of them. The
    counters stay, or alerts would miss what they begin anew with."""
    monkeypatch.setattr(lanes, "_FORGET_SECONDS", 20.0)
    world.pass_time(8.0)
    relays = [node.relay for node in world.nodes if node.relay]

    def kept() -> int:
        return sum(len(relay.backlog.lanes) + len(relay._workers) + told(relay, "_count") for relay in relays)

    def told(relay: Relay, kind: str) -> int:
        return sum(one.name.endswith(kind) for metric in relay.metrics._own.collect() for one in metric.samples)

    world.wait_for(lambda: kept() == 2 * 3 * 4, 10.0, "of each topic a lane, a worker and two histograms")
    world.wait_for(lambda: kept() == 0, 60.0, "all are forgotten")
    assert [told(relay, "_total") for relay in relays] == [3 * 3] * 2
    world.pass_time(8.0)
    world.wait_for(lambda: kept() == 2 * 3 * 4, 10.0, "they are there again")
    world.settle()


ANY, SHARED_OUT_ANEW = (), ("crowd", "crowd", "burst")


@pytest.mark.parametrize("faults", [ANY, SHARED_OUT_ANEW], ids=["any", "shared out anew"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_nothing_is_lost_or_out_of_order_and_nothing_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, seed: int, faults: tuple[str, ...]
) -> None:
    in_a_world_of_faults(seed, faults, monkeypatch)


@pytest.mark.chaos
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("faults", [ANY, SHARED_OUT_ANEW], ids=["any", "shared out anew"])
def test_in_hundreds_of_worlds_nothing_is_lost_or_out_of_order_and_nothing_waits_for_ever(
    faults: tuple[str, ...],
) -> None:
    for seed in range(1_000, 1_300):
        with pytest.MonkeyPatch.context() as monkeypatch:
            in_a_world_of_faults(seed, faults, monkeypatch)


def in_a_world_of_faults(seed: int, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of faults; what follows from them is told with all that has happened."""
    world = World(seed, monkeypatch)
    try:
        if faults:
            world.faults, world.slowness, world.kafka_slowness, world.zeal = list(faults), 0.2, 0.3, 0.05
        world.vary()
        world.run(faults=25 if faults else 12)
        world.settle()
    except AssertionError as error:
        raise AssertionError("\n".join([f"seed {seed}: {error}", *world.log])) from error
    finally:
        world.close()

"""Whole relays in a simulated world: what no fault, and no coincidence of faults, may do to what is promised."""

from collections.abc import Iterator

import pytest

from .outbox_world import World


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
    assert {topic for topic, _ in world.primary.failing} == {"a"}
    world.refused.add("topic_works")
    world.failing.clear()
    world.pass_time(8.0)
    assert {topic for topic, _ in world.primary.failing} == {"a"}
    world.refused.clear()
    world.pass_time(3.0, write=False)
    assert not world.primary.failing


@pytest.mark.parametrize("seed", range(8))
def test_whatever_goes_wrong_nothing_is_lost_or_out_of_order_and_nothing_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    in_a_world_of_faults(seed, monkeypatch)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_in_hundreds_of_worlds_nothing_is_lost_or_out_of_order_and_nothing_waits_for_ever() -> None:
    for seed in range(1_000, 1_400):
        with pytest.MonkeyPatch.context() as monkeypatch:
            in_a_world_of_faults(seed, monkeypatch)


def in_a_world_of_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seed, monkeypatch)
    try:
        world.run(faults=8)
        world.settle()
    except AssertionError as error:
        raise AssertionError("\n".join([f"seed {seed}: {error}", *world.log])) from error
    finally:
        world.close()

"""Who gets which partitions: all of them, evenly, and with as few moves as that takes."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from struct import pack
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from hypothesis import given
from hypothesis import strategies as st
from sidings import KafkaSettings
from sidings.devstack.topics import create_topic
from sidings.kafka import membership
from sidings.kafka.assignor import Assignor, share

from .support import eventually

TOPICS = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 12).map(range), min_size=1)
MEMBERS = st.sets(st.sampled_from("123456789"), min_size=1)


def alike(members: Iterable[str], topics: Iterable[str]) -> dict[str, set[str]]:
    return {member: set(topics) for member in members}


def sizes(shares: dict[str, list[TopicPartition]]) -> list[int]:
    return sorted(map(len, shares.values()))


def all_of(topics: dict[str, Any]) -> list[TopicPartition]:
    return sorted(TopicPartition(topic, number) for topic in topics for number in topics[topic])


def told(topics: Iterable[str], unread: Iterable[str] = (), had: Iterable[TopicPartition] | None = None) -> Any:
    """What one of our members tells, as it is on the wire; unread: what it joins, and does not consume."""
    state = {} if had is None else {"member_assignment": list(had), "generation": 5}
    assignor: Any = type("Sticky", (Assignor,), {"unread": frozenset(unread), **state})
    return ConsumerProtocolMemberMetadata.decode(assignor.metadata(list(topics)).encode())


def assigned_by(assignor: Any, members: dict[str, Any], count: int = 4) -> dict[str, set[TopicPartition]]:
    """By the leader; of each topic there are `count` partitions."""

    class Cluster(ClusterMetadata):
        def topics(self, exclude_internal_topics=True):
            return {topic for metadata in members.values() for topic in metadata.subscription}

        def partitions_for_topic(self, topic):
            return set(range(count))

    return {member: set(own.partitions()) for member, own in assignor.assign(Cluster(), members).items()}


@given(st.data(), TOPICS, MEMBERS)
def test_each_partition_is_assigned_once_and_evenly_whatever_members_have_had(data, topics, members):
    possible = st.sampled_from([TopicPartition(topic, number) for topic in "abf" for number in range(15)])
    former = data.draw(st.dictionaries(st.sampled_from("123456789x"), st.lists(possible)))
    shares = share(topics, alike(members, topics), former)
    assert sorted(partition for partitions in shares.values() for partition in partitions) == all_of(topics)
    assert sizes(shares)[-1] - sizes(shares)[0] <= 1


@given(TOPICS, MEMBERS, MEMBERS)
def test_nothing_moves_but_from_those_who_leave_and_to_those_who_come(topics, before, after):
    former = share(topics, alike(before, topics), {})
    shares = share(topics, alike(sorted(after, reverse=True), topics), former)
    assert shares == share(topics, alike(sorted(after), topics), former), "members in another order"
    least, more = divmod(len(all_of(topics)), len(after))
    rooms = [least + 1] * more + [least] * (len(after) - more)
    staying = sorted((len(former[member]) for member in before & after), reverse=True)
    kept = sum(len(set(shares[member]) & set(former[member])) for member in before & after)
    assert kept == sum(map(min, staying, rooms))
    if before == after:
        assert shares == former


@given(st.data(), TOPICS, st.lists(st.sampled_from("123456789"), min_size=1, unique=True))
def test_where_topics_have_more_and_more_subscribers_nobody_could_take_one_of_somebody_who_has_two_more(
    data, topics, members
):
    counts = {topic: data.draw(st.integers(0, len(members))) for topic in topics}
    subscribed = {m: {topic for topic in topics if place < counts[topic]} for place, m in enumerate(members)}
    former = share(topics, alike(data.draw(MEMBERS), topics), {})
    shares = share(topics, subscribed, former)
    assigned = sorted(partition for partitions in shares.values() for partition in partitions)
    assert assigned == all_of({topic: topics[topic] for topic in topics if counts[topic]})
    for member, partitions in shares.items():
        for partition in partitions:
            assert partition.topic in subscribed[member]
            others = [len(shares[other]) for other in members if partition.topic in subscribed[other]]
            assert len(partitions) - min(others) <= 1


def test_who_comes_gets_some_of_each_topic():
    """aiokafka's gives it all of the last topic, which may be the one that has all the traffic."""
    topics = {"commands": range(60), "orders": range(60), "positions": range(60), "tenants": range(3)}
    former = share(topics, alike("ab", topics), {})
    shares = share(topics, alike("abc", topics), former)
    for partitions in shares.values():
        numbers = Counter(partition.topic for partition in partitions)
        assert numbers.pop("tenants") == 1
        assert all(19 <= number <= 21 for number in numbers.values())


def test_topics_of_one_partition_do_not_keep_the_others_from_being_mixed():
    topics = {"positions": range(20)} | {f"settings-{number}": range(1) for number in range(40)}
    shares = share(topics, alike("abcdef", topics), {})
    assert {Counter(partition.topic for partition in had)["positions"] for had in shares.values()} == {3, 4}


NONSENSE = [
    pack(">ii", -1, 5),
    pack(">ihsii", 1, 1, b"a", -1, 5),
    b"\xff" * 50,
    b"?",
    pack(">iii", 0, 5, -1),  # of what it does not consume
    pack(">iii", 0, 5, 9),
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=repr)
def test_a_member_that_tells_nonsense_of_what_it_has_had_gets_its_share(nonsense):
    had = StickyPartitionAssignor._metadata(["a"], [TopicPartition("a", 1)], 5)
    members = {"1": ConsumerProtocolMemberMetadata(0, ["a"], nonsense), "2": had}
    shares = assigned_by(Assignor, members, 3)
    assert {member: len(own) for member, own in shares.items()} == {"1": 1, "2": 2}


def test_of_a_topic_that_the_leader_may_not_see_members_keep_what_they_have_had():
    members = {
        name: StickyPartitionAssignor._metadata(["a"], [TopicPartition("a", number) for number in had], 5)
        for name, had in {"1": {0, 3}, "2": {5}}.items()
    }
    for refused, numbers in ((set[str](), set[int]()), ({"a"}, {0, 3, 5})):
        cluster = ClusterMetadata()
        cluster.unauthorized_topics = refused
        shares = Assignor.assign(cluster, members)
        assert {tp.partition for own in shares.values() for tp in own.partitions()} == numbers


def test_of_a_topic_that_some_consume_those_who_join_it_for_its_jobs_alone_get_nothing():
    """They got their share of it, and nobody read that."""
    members = {"1": told("ab"), "2": told("ab", unread="a"), "3": told("ab", unread="ab")}
    assert assigned_by(Assignor, members) == {
        "1": set(all_of({"a": range(4)})),
        "2": set(all_of({"b": range(4)})),
        "3": set(),
    }


def test_a_topic_that_nobody_consumes_is_shared_by_those_who_join_it_for_its_jobs():
    had = all_of({"a": [0, 3]})
    members = {"1": told("a", unread="a"), "2": told("a", unread="a", had=had)}
    assert assigned_by(Assignor, members) == {"1": set(all_of({"a": [1, 2]})), "2": set(had)}


def test_a_member_of_an_earlier_release_counts_as_one_that_consumes_what_it_joins():
    """As while a release is rolled out. If it does not, it keeps the jobs of these topics until it goes."""
    for had in (None, [TopicPartition("a", 0)]):
        earlier = StickyPartitionAssignor._metadata(["a"], had, 5)
        assert told("a", had=had).encode() == earlier.encode(), "who consumes all says what it has said"
        shares = assigned_by(Assignor, {"1": earlier, "2": told("a", unread="a"), "3": told("a")})
        assert {member: len(own) for member, own in shares.items()} == {"1": 2, "2": 0, "3": 2}


def test_an_earlier_release_reads_what_members_have_had_whatever_else_they_tell():
    had = all_of({"a": [2, 3]})
    members = {"1": told("a", unread="a", had=had), "2": told("a", unread="a")}
    assert assigned_by(type("Bare", (StickyPartitionAssignor,), {}), members)["1"] == set(had)


@given(st.data(), TOPICS, MEMBERS)
def test_every_partition_goes_to_one_that_consumes_its_topic_where_anybody_does(data, topics, members):
    chosen = st.sets(st.sampled_from(sorted(topics)))
    joined = {member: data.draw(chosen) for member in members}
    unread = {member: data.draw(chosen) for member in members}
    metadata = {member: told(joined[member], unread=unread[member]) for member in members}
    shares = assigned_by(Assignor, metadata, 3)
    there = {topic for names in joined.values() for topic in names}
    consumed = {topic for member in members for topic in joined[member] - unread[member]}
    assert sorted(tp for own in shares.values() for tp in own) == all_of(dict.fromkeys(there, range(3)))
    for member, own in shares.items():
        assert {tp.topic for tp in own} <= joined[member] - (unread[member] & consumed)


def test_fifty_thousand_partitions_are_shared_within_the_time_of_a_test():
    """aiokafka's takes seconds for 9,000, and grows with the square: the watchdog would end the process."""
    topics = {topic: range(10_000) for topic in "abcd"} | {f"of one/{number}": range(1) for number in range(10_000)}
    former = share(topics, alike("123456789", topics), {})
    shares = share(topics, alike("12345678x", topics), former)
    assert shares["x"] == former["9"]


async def test_members_with_the_assignor_of_aiokafka_and_with_ours_share_a_group(sidings_kafka: str):
    """As while a release is rolled out; whoever leads."""
    await create_topic(sidings_kafka, "shared", partitions=7)
    settings = KafkaSettings(bootstrap=sidings_kafka, session_seconds=6)

    def bare() -> AIOKafkaConsumer:
        assignor = type("Bare", (StickyPartitionAssignor,), {})
        options = settings.consumer_options() | {"group_id": "mixed", "enable_auto_commit": False}
        return AIOKafkaConsumer(**options, partition_assignment_strategy=[assignor])

    clients: list[AIOKafkaConsumer] = []

    def shared() -> bool:
        shares = [len(client.assignment()) for client in clients]
        return len({tp for client in clients for tp in client.assignment()}) == sum(shares) == 7 and (
            max(shares) - min(shares) <= 1
        )

    async def come(client: AIOKafkaConsumer) -> None:
        await client.start()
        client.subscribe(["shared"])
        clients.append(client)
        await eventually(shared)

    async def go() -> None:
        await clients.pop(0).stop()  # the leader is the one that has been there longest
        await eventually(shared)

    try:
        await come(bare())
        await come(membership.make_client(settings, "mixed"))
        had = clients[1].assignment()
        await go()
        assert clients[0].assignment() > had
        await come(bare())
        assert len(clients[0].assignment()) == 4
        await go()
        assert len(clients[0].assignment()) == 7
    finally:
        await asyncio.gather(*[client.stop() for client in clients])

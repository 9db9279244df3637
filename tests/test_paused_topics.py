"""A person pauses a topic: nothing more of it is handled, in any instance, and later all goes on where it stood."""

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sidings import Admin, Message, PostgresUnavailable, Retry, Transaction
from sidings.kafka.partition import State
from tenacity import stop_after_attempt, wait_none

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    delete_records,
    numbers,
    offset_reaches,
    produce,
    record,
    sample,
    stored_offsets,
)
from .support import connected, eventually, fetch, value


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr("sidings.kafka.reset._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("sidings.kafka.vitals._ENDS_SECONDS", 0.1)


@asynccontextmanager
async def administering(dsn: str):
    async with connected(dsn) as connection:
        yield Admin(connection, actor="alice")


async def pause(dsn: str, topic: str, *services: Any) -> None:
    """Pause it, and wait until these have seen it and nothing of it is under way."""
    async with administering(dsn) as admin:
        await admin.pause(topic=topic, reason="a repair")
    for service in services:
        await eventually(lambda service=service: gauge(service, topic) == 1)


async def resume(dsn: str, topic: str) -> None:
    async with administering(dsn) as admin:
        await admin.resume(topic=topic)


async def seen(service: Any, topic: str) -> None:
    await eventually(lambda: topic in service._life.consumer._stored.pauses)


def gauge(service: Any, topic: str) -> float | None:
    return sample(service, "sidings_consumer_topic_paused", topic=topic)


def states(service: Any, topic: str) -> list[State]:
    return [p.state for p in service._life.consumer._partitions() if p.tp.topic == topic]


def placed(service: Any, topic: str, count: int = 1):
    return lambda: states(service, topic) == count * [State.READY]


def two_topics(dsn: str, kafka: str, *names: str, max_records: int = 3) -> Any:
    """A service that records the messages of both."""
    service = a_service(dsn, kafka, settings={"fetch_seconds": 0.05, "max_records": max_records})
    for name in names:
        service.consumer(name, model=Number)(record)
    return service


async def others_go_on(dsn: str, kafka: str, topic: str, *, until: int, partition: int = 0) -> None:
    """Long enough for the one that is paused to have done something, if it did."""
    before = (await stored_offsets(dsn)).get((topic, partition), 0)
    for number in range(before, until):
        await produce(kafka, topic, [number], partition=partition)
        await eventually(offset_reaches(dsn, topic, number + 1, partition))


async def test_a_topic_is_paused_while_others_go_on_and_goes_on_where_it_stood(effects, topic, sidings_kafka, caplog):
    caplog.set_level(logging.INFO, "sidings.consumer")
    paused, other = await topic(partitions=2), await topic()
    service = two_topics(effects, sidings_kafka, paused, other)
    await produce(sidings_kafka, paused, range(5))
    async with service:
        await eventually(offset_reaches(effects, paused, 5))
        await pause(effects, paused, service)
        await produce(sidings_kafka, paused, range(5, 20))
        await produce(sidings_kafka, paused, range(7), partition=1)
        await others_go_on(effects, sidings_kafka, other, until=10)
        await eventually(lambda: sample(service, "sidings_consumer_lag", topic=paused) == 22)
        await produce(sidings_kafka, paused, range(20, 25))  # behind what the client has fetched, and fetches no more
        await eventually(lambda: sample(service, "sidings_consumer_lag", topic=paused) == 27)
        assert gauge(service, other) == 0
        assert {p: o for (t, p), o in (await stored_offsets(effects)).items() if t == paused} == {0: 5, 1: 0}
        assert service.problems() == []
        await resume(effects, paused)
        await eventually(offset_reaches(effects, paused, 25))
        await eventually(offset_reaches(effects, paused, 7, 1))
        await eventually(lambda: gauge(service, paused) == 0)
    assert await numbers(effects, f"topic = '{paused}' AND partition = 0") == list(range(25))
    assert await numbers(effects, f"topic = '{paused}' AND partition = 1") == list(range(7))
    assert await numbers(effects, f"topic = '{other}'") == list(range(10))
    told = [line for line in caplog.messages if "by order" in line]
    assert told == [
        f"{paused}: paused by order, nothing more of it is taken up; `sidings pauses` says by whom",
        f"{paused}: resumed by order, going on",
    ]


async def test_a_pause_from_before_the_start_counts_from_the_first_message_on(
    effects, topic, sidings_kafka, monkeypatch
):
    """Nobody looks before an hour is over: what is read when a partition gets its place has to tell of it."""
    monkeypatch.setattr("sidings.kafka.reset._LOOK_SECONDS", 3600.0)
    paused, other = await topic(), await topic()
    await produce(sidings_kafka, paused, range(4))
    await pause(effects, paused)
    async with two_topics(effects, sidings_kafka, paused, other) as service:
        await seen(service, paused)
        await others_go_on(effects, sidings_kafka, other, until=5)
        await eventually(placed(service, paused))
    assert await numbers(effects, f"topic = '{paused}'") == []
    assert (await stored_offsets(effects))[paused, 0] == 0
    await resume(effects, paused)
    async with two_topics(effects, sidings_kafka, paused, other):
        await eventually(offset_reaches(effects, paused, 4))
    assert await numbers(effects, f"topic = '{paused}'") == list(range(4))


async def test_of_a_new_consumer_that_is_paused_the_place_is_taken_all_the_same(effects, topic, sidings_kafka):
    """With ``start="latest"`` what comes during the pause would be lost."""
    name = await topic()
    await produce(sidings_kafka, name, [0, 1])
    await pause(effects, name)
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, start="latest")(record)
    async with service:
        await eventually(placed(service, name))
        await produce(sidings_kafka, name, [2, 3])
        await resume(effects, name)
        await eventually(offset_reaches(effects, name, 4))
    assert await numbers(effects) == [2, 3]


async def test_of_a_batch_that_is_under_way_what_was_begun_is_committed_and_no_more(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 2:
            begun.set()
            await go_on.wait()
        await record(message, tx)

    await produce(sidings_kafka, name, range(6))
    async with service:
        await begun.wait()
        async with administering(effects) as admin:
            await admin.pause(topic=name, reason="a repair")
        await seen(service, name)
        assert gauge(service, name) == 0
        go_on.set()
        await eventually(lambda: gauge(service, name) == 1)
        assert await numbers(effects) == [0, 1, 2]
        assert await stored_offsets(effects) == {(name, 0): 3}
        await resume(effects, name)
        await eventually(offset_reaches(effects, name, 6))
    assert await numbers(effects) == list(range(6))


async def test_a_message_that_fails_is_tried_no_more_while_its_topic_is_paused_and_its_failures_still_count(
    effects, topic, sidings_kafka
):
    name, other = await topic(), await topic()
    service = two_topics(effects, sidings_kafka, other)
    tries, mended = 0, False

    @service.consumer(name, retry=Retry(wait=wait_none(), stop=stop_after_attempt(100_000)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        if message.value.n == 1 and not mended:
            tries += 1
            raise ValueError("the carrier is closed")
        await record(message, tx)

    await produce(sidings_kafka, name, range(4))
    async with service:
        await eventually(lambda: tries > 4)
        [partition] = [p for p in service._life.consumer._partitions() if p.tp.topic == name]
        await pause(effects, name, service)
        await eventually(placed(service, name))  # in the main line, which rests
        assert sample(service, "sidings_consumer_stalled_seconds", topic=name) == 0
        before, failures = tries, partition.failures
        await others_go_on(effects, sidings_kafka, other, until=10)
        assert tries == before
        assert failures > 3
        await resume(effects, name)
        await eventually(lambda: tries > before + 2)
        assert partition.failures > failures
        mended = True
        await eventually(offset_reaches(effects, name, 4))
    assert await numbers(effects, f"topic = '{name}'") == list(range(4))
    assert await fetch(effects, "SELECT FROM sidings.job") == []


async def test_a_message_that_waits_for_its_turn_alone_does_not_get_it_once_its_topic_is_paused(
    effects, topic, sidings_kafka, monkeypatch
):
    """Those before it may take as long as their timeout."""
    name, other = await topic(), await topic()
    service = two_topics(effects, sidings_kafka, other)
    tries, waiting, free = 0, asyncio.Event(), asyncio.Event()

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("in the main line")
        await record(message, tx)

    @asynccontextmanager
    async def its_turn(siding: Any):
        waiting.set()
        await free.wait()
        yield

    monkeypatch.setattr("sidings.kafka.siding.Siding._slot", its_turn)
    await produce(sidings_kafka, name, [0, 1])
    async with service:
        await waiting.wait()
        await pause(effects, name, service)
        free.set()
        await eventually(placed(service, name))
        await others_go_on(effects, sidings_kafka, other, until=5)
        assert tries == 1
        await resume(effects, name)
        await eventually(offset_reaches(effects, name, 2))
    assert await numbers(effects, f"topic = '{name}'") == [0, 1]


async def test_a_second_instance_takes_over_partitions_of_a_paused_topic_and_handles_nothing_either(
    effects, topic, sidings_kafka
):
    name, other = await topic(partitions=4), await topic(partitions=2)
    first, second = (two_topics(effects, sidings_kafka, name, other) for _ in range(2))
    async with first:
        await eventually(placed(first, name, 4))
        await pause(effects, name, first)
        for partition in range(4):
            await produce(sidings_kafka, name, range(5), partition=partition, key=str(partition))
        async with second:
            await eventually(lambda: len(states(first, name)) == len(states(second, name)) == 2)
            await seen(second, name)
            await eventually(placed(first, name, 2))
            await eventually(placed(second, name, 2))
            for partition in range(2):
                await others_go_on(effects, sidings_kafka, other, until=4, partition=partition)
            assert await numbers(effects, f"topic = '{name}'") == []
            await resume(effects, name)
            for partition in range(4):
                await eventually(offset_reaches(effects, name, 5, partition))
    for partition in range(4):
        assert await numbers(effects, f"topic = '{name}' AND partition = {partition}") == list(range(5))


async def test_a_service_stops_at_once_while_a_topic_is_paused(effects, topic, sidings_kafka, caplog):
    name, failing = await topic(), await topic()
    service = two_topics(effects, sidings_kafka, name)
    tries = 0

    @service.consumer(failing, retry=Retry(wait=wait_none()))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        tries += 1
        raise ValueError("no")

    for each in (name, failing):
        await produce(sidings_kafka, each, range(3))
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        await eventually(lambda: tries > 3)
        for each in (name, failing):
            await pause(effects, each, service)
        await produce(sidings_kafka, name, range(3, 6))
    assert "were still under way" not in caplog.text
    assert await numbers(effects) == [0, 1, 2]
    assert (await stored_offsets(effects))[name, 0] == 3


async def test_a_reset_and_a_pause_do_not_undo_each_other(effects, topic, sidings_kafka):
    name, other = await topic(), await topic()
    await produce(sidings_kafka, name, range(5))
    async with two_topics(effects, sidings_kafka, name, other) as service:
        await eventually(offset_reaches(effects, name, 5))
        await pause(effects, name, service)
        await service.reset_offsets(name, 3, partitions=[0], actor="alice")
        await eventually(
            lambda: [p.next_offset for p in service._life.consumer._partitions() if p.tp.topic == name] == [3]
        )
        await others_go_on(effects, sidings_kafka, other, until=5)
        assert (await stored_offsets(effects))[name, 0] == 3
        await resume(effects, name)
        await eventually(offset_reaches(effects, name, 5))
    assert await numbers(effects, f"topic = '{name}'") == [0, 1, 2, 3, 4, 3, 4]


async def test_what_retention_deletes_meanwhile_is_told_of(effects, topic, sidings_kafka, caplog):
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    async with two_topics(effects, sidings_kafka, name) as service:
        await eventually(offset_reaches(effects, name, 3))
        await pause(effects, name, service)
    await produce(sidings_kafka, name, range(3, 8))
    await delete_records(sidings_kafka, name, 6)
    async with two_topics(effects, sidings_kafka, name) as service:
        await eventually(lambda: sample(service, "sidings_consumer_missed_total", topic=name) == 3)
        assert f"{name}/0: offsets 3 to 5 were deleted (retention)" in caplog.text
        await resume(effects, name)
        await eventually(offset_reaches(effects, name, 8))
    assert await numbers(effects) == [0, 1, 2, 6, 7]


async def test_messages_that_wait_as_jobs_go_on_unless_their_type_is_paused(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    mended = False

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 0 and not mended:
            raise ValueError("the carrier is closed")
        await record(message, tx)

    service.registry.get(f"message:{name}").retry = Retry(wait=wait_none())
    await produce(sidings_kafka, name, [0, 1], key="a")
    async with service:
        await eventually(offset_reaches(effects, name, 2))
        await pause(effects, name, service)
        await produce(sidings_kafka, name, [2], key="b")
        mended = True
        await eventually(lambda: no_jobs(effects))
        assert await numbers(effects) == [0, 1]


async def no_jobs(dsn: str) -> bool:
    return await value(dsn, "SELECT count(*) FROM sidings.job") == 0


async def test_while_postgres_does_not_tell_a_topic_stays_paused(effects, topic, sidings_kafka, monkeypatch):
    name, other = await topic(), await topic()
    async with two_topics(effects, sidings_kafka, name, other) as service:
        await eventually(placed(service, name))
        await pause(effects, name, service)
        await produce(sidings_kafka, name, range(3))
        link = service._life.consumer._stored._link
        failed = 0

        async def no_answer(*_: Any) -> Any:
            nonlocal failed
            failed += 1
            raise PostgresUnavailable("no answer")

        with monkeypatch.context() as away:
            away.setattr(link, "fetch", no_answer)
            await eventually(lambda: failed > 3)
        await others_go_on(effects, sidings_kafka, other, until=3)
        assert await numbers(effects, f"topic = '{name}'") == []
        await resume(effects, name)
        await eventually(offset_reaches(effects, name, 3))

"""Directories against a real Kafka: ready means all of it, whatever the log looks like; then always current."""

import asyncio
import threading
import time
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from prometheus_client import CollectorRegistry
from sidings import Changed, ConfigurationError, Directory, DirectoryBehind, DirectoryNotReady
from sidings.devstack.topics import create_topic
from sidings.kafka.directory import SQLite, follower
from sidings.kafka.directory.reader import Reader

from .consumer_support import add_partitions, administering, producing
from .directory_support import COMPACTED, Acquirer, a_directory, put, quick, row
from .support import SECONDS, eventually


async def transaction(kafka: str, topic: str, rows: dict[str, bytes | None], *, commit: bool, partition: int = 0):
    """Send rows in a transaction of its own: its marker takes an offset, too."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=f"{topic}-{partition}", acks="all")
    await asyncio.wait_for(producer.start(), SECONDS)
    try:
        await producer.begin_transaction()
        for key, value in rows.items():
            await producer.send_and_wait(topic, value, key=key.encode(), partition=partition)
        await (producer.commit_transaction() if commit else producer.abort_transaction())
    finally:
        await producer.stop()


async def test_ready_means_that_all_of_every_partition_is_applied(topic, sidings_kafka):
    """Partitions that end with a marker, with an aborted transaction, that are empty, or that have only that."""
    name = await topic("terminals", partitions=5, config=COMPACTED)
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(50)}, partition=0)
    await transaction(sidings_kafka, name, {"T-1": row("T-1", "b"), "T-2": None}, commit=True, partition=0)
    await put(sidings_kafka, name, {"T-100": row("T-100")}, partition=1)
    await transaction(sidings_kafka, name, {"T-100": None, "T-101": row("T-101")}, commit=False, partition=1)
    await transaction(sidings_kafka, name, {"T-200": row("T-200")}, commit=False, partition=2)
    await transaction(sidings_kafka, name, {"T-300": row("T-300")}, commit=True, partition=4)
    async with a_directory(name, sidings_kafka) as terminals:
        assert terminals.ready
        assert sorted(terminals, key=str) == sorted(
            [f"T-{n}" for n in range(50) if n != 2] + ["T-100", "T-300"], key=str
        )
        assert terminals["T-1"].acquirer_id == "b"
        assert terminals.positions() == await terminals.end_offsets() == {0: 53, 1: 4, 2: 2, 3: 0, 4: 2}
        assert terminals.errors() == []


def lag(directory: Directory[Any]) -> float | None:
    labels = {"service": "", "topic": directory.topic, "partition": "0"}
    return directory._prometheus.get_sample_value("sidings_directory_lag", labels)


async def test_an_open_transaction_is_not_waited_for(topic, sidings_kafka):
    name = await topic("terminals", config=COMPACTED)
    producer = AIOKafkaProducer(bootstrap_servers=sidings_kafka, transactional_id=name)
    await producer.start()
    try:
        await put(sidings_kafka, name, {"T-1": row("T-1")})
        await producer.begin_transaction()
        await producer.send_and_wait(name, row("T-2"), key=b"T-2")
        await put(sidings_kafka, name, {"T-3": row("T-3")})
        async with a_directory(name, sidings_kafka) as terminals:
            assert terminals.keys() == ["T-1"], "T-3 may not be seen before the transaction of T-2 ends"
            await eventually(lambda: lag(terminals) == 2, "somebody to be told of what is held up")
            await producer.commit_transaction()
            # Kafka answers before it has written the end of the transaction into the log: nothing waits for that.
            await eventually(lambda: terminals.keys() == ["T-1", "T-2", "T-3"], terminals.keys)
            await eventually(lambda: lag(terminals) == 0)
    finally:
        await producer.stop()


async def offsets_in(kafka: str, topic: str) -> list[int]:
    """What a plain consumer reads of partition 0."""
    async with AIOKafkaConsumer(bootstrap_servers=kafka) as consumer:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        [end] = (await consumer.end_offsets([partition])).values()
        found: list[int] = []
        while await consumer.position(partition) < end:
            for records in (await consumer.getmany(timeout_ms=100)).values():
                found += [record.offset for record in records]
        return found


async def test_gaps_that_compaction_has_left_are_passed(own_kafka):
    """The log is compacted down to its last segment, tombstones and all."""
    kafka = await asyncio.to_thread(own_kafka, settings={"log.cleaner.backoff.ms": "100"})
    config = COMPACTED | {"segment.ms": "200", "min.cleanable.dirty.ratio": "0.001", "delete.retention.ms": "0"}
    await create_topic(kafka.bootstrap, "terminals", partitions=1, config=config)
    now = round(time.time() * 1000)
    turns = [{f"T-{n}": row(f"T-{n}", str(turn)) for n in range(20)} for turn in range(3)]
    turns += [{f"T-{n}": None for n in range(20)}, {"T-99": row("T-99")}]
    async with producing(kafka.bootstrap) as producer:
        for turn, rows in enumerate(turns):  # a record of a later time closes the segment
            for key, value in rows.items():
                at = now - (len(turns) - turn) * 10_000
                await producer.send_and_wait("terminals", value, key.encode(), partition=0, timestamp_ms=at)
    async with asyncio.timeout(SECONDS):
        while len(left := await offsets_in(kafka.bootstrap, "terminals")) > 40:
            await asyncio.sleep(0.1)
    assert left[-1] == 80
    async with a_directory("terminals", kafka.bootstrap) as terminals:
        assert terminals.keys() == ["T-99"]
        assert terminals.positions() == {0: 81}


async def test_a_row_is_not_older_than_the_start_because_it_was_compacted_meanwhile(own_kafka, monkeypatch):
    """Its value of then went, for the sake of one that is younger than the end that was taken at the start."""
    monkeypatch.setattr("sidings.kafka.directory.reader._PARTITION_FETCH_BYTES", 1)  # one batch in each fetch
    kafka = await asyncio.to_thread(own_kafka, settings={"log.cleaner.backoff.ms": "100"})
    config = COMPACTED | {"segment.ms": "200", "min.cleanable.dirty.ratio": "0.001"}
    not_yet = config | {"min.compaction.lag.ms": "3600000"}
    await create_topic(kafka.bootstrap, "terminals", partitions=1, config=not_yet)
    now = round(time.time() * 1000)

    async def send(*rows: tuple[str, str]) -> None:
        nonlocal now
        async with producing(kafka.bootstrap) as producer:
            for key, text in rows:  # a record of a later time closes the segment
                now += 1_000
                value = row(key, text)
                await producer.send_and_wait("terminals", value, key.encode(), partition=0, timestamp_ms=now)

    fetch = Reader.fetch
    fetched: list[int] = []

    async def gated(self: Reader, seconds: float, most: int) -> Any:
        if fetched == [0]:
            await send(("T-1", "newest"), ("T-8", ""), ("T-9", ""))
            async with administering(kafka.bootstrap) as admin:
                await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, "terminals", config)])
            while 2 in await offsets_in(kafka.bootstrap, "terminals"):
                await asyncio.sleep(0.05)
        found = await fetch(self, seconds, most)
        fetched.extend(record.offset for records in found.values() for record in records)
        return found

    await send(("T-1", "old"), ("T-2", ""), ("T-1", "newer"), ("T-3", ""))
    monkeypatch.setattr(Reader, "fetch", gated)
    terminals = a_directory("terminals", quick(kafka.bootstrap, partition_fetch_bytes=1))
    told: list[Any] = []
    terminals.on_change(told.append)
    async with asyncio.timeout(2 * SECONDS), terminals:
        await terminals.wait_until(timeout=SECONDS)
        assert terminals["T-1"].acquirer_id == "newest"
        assert 2 not in fetched
        assert [change for change in told if change.key == "T-1"] == [], "it was ready too early"


async def test_it_follows_and_tells_of_changes(topic, sidings_kafka):
    name = await topic("terminals", partitions=2, config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1", "a"), "T-2": row("T-2", "b")})
    registry = CollectorRegistry()
    terminals = a_directory(name, sidings_kafka, prometheus=registry, service="tests")
    told: list[Changed[Acquirer]] = []

    @terminals.on_change
    def broken(change: Changed[Acquirer]) -> None:
        raise RuntimeError("a callback that fails")

    terminals.on_change(told.append)

    def figure(what: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sidings_directory_{what}", {"service": "tests", "topic": name} | labels)

    async with terminals:
        assert told == [], "the load is not told"
        seen = terminals.items()
        await put(sidings_kafka, name, {"T-1": row("T-1", "c"), "T-2": None, "T-3": row("T-3", isActive=False)})
        await put(sidings_kafka, name, {"T-4": row("T-4", "d")}, partition=1)
        await put(sidings_kafka, name, {"T-4": row("T-4", "d")}, partition=1)
        await terminals.wait_until(timeout=SECONDS)
        assert seen == [
            ("T-1", Acquirer(terminal_id="T-1", acquirer_id="a")),
            ("T-2", Acquirer(terminal_id="T-2", acquirer_id="b")),
        ]
        assert {change.key: (change.old, change.new) for change in told} == {
            "T-1": (seen[0][1], terminals["T-1"]),
            "T-2": (seen[1][1], None),
            "T-4": (None, terminals["T-4"]),
        }
        assert len(told) == 3, "the same value again is no change"
        assert "T-2" not in terminals
        assert terminals.get("T-2", "none") == "none"
        with pytest.raises(KeyError, match="T-3"):
            terminals["T-3"]
        assert (len(terminals), set(terminals), [value.acquirer_id for value in terminals.values()]) == (
            2,
            {"T-1", "T-4"},
            ["c", "d"],
        )
        assert figure("callback_failures_total") == 3
        assert [figure("records_total", result=result) for result in ("stored", "deleted", "bad")] == [5, 2, 0]
        assert (figure("ready"), figure("entries"), figure("errors")) == (1, 2, 0)
        assert (figure("offset", partition="0"), figure("end_offset", partition="1")) == (5, 2)
        await eventually(lambda: figure("lag", partition="0") == 0)
        assert 0 < (figure("start_seconds") or 0) < SECONDS
        assert terminals.problems() == terminals.not_ready() == []
    assert figure("ready") is None, "its figures end with it"
    with pytest.raises(ConfigurationError, match="started before"):
        await terminals.run()

    async def slow(change: Changed[Acquirer]) -> None: ...

    with pytest.raises(ConfigurationError, match="plain function"):
        terminals.on_change(slow)


async def test_a_bad_record_leaves_the_former_value_until_a_good_one_comes(topic, sidings_kafka):
    name = await topic("terminals")  # a compacted one takes no record without a key
    await put(sidings_kafka, name, {"T-1": row("T-1", "a")})
    await put(sidings_kafka, name, {"T-1": b"{broken", "T-2": b'{"terminalId": "T-2"}', "T-3": row("T-3")})
    async with producing(sidings_kafka) as producer:
        await producer.send_and_wait(name, row("T-4"), partition=0)
    async with a_directory(name, sidings_kafka) as terminals:
        assert terminals["T-1"].acquirer_id == "a"
        assert terminals.keys() == ["T-1", "T-3"]
        assert [(e.topic, e.partition, e.offset, e.key) for e in terminals.errors()] == [
            (name, 0, 1, "T-1"),
            (name, 0, 2, "T-2"),
            (name, 0, 4, None),
        ]
        await put(sidings_kafka, name, {"T-1": row("T-1", "b"), "T-2": None, "T-3": b"{"})
        await terminals.wait_until(7, timeout=SECONDS)
        assert terminals["T-1"].acquirer_id == "b"
        assert terminals["T-3"].acquirer_id == "a"
        assert [(e.offset, e.key) for e in terminals.errors()] == [(4, None), (7, "T-3")]


async def test_it_stops_while_it_waits_for_news(topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr(follower, "_POLL_SECONDS", 3_600.0)
    name = await topic("terminals", config=COMPACTED)
    async with asyncio.timeout(SECONDS), a_directory(name, sidings_kafka):
        await asyncio.sleep(0.1)  # it is loaded, so it waits


@pytest.mark.parametrize("ready", [True, False], ids=["at its end", "at its start"])
async def test_nothing_of_a_directory_stays_when_it_is_cancelled_again_and_again(
    topic, sidings_kafka, tmp_path, ready: bool
):
    """As anyio's cancel scopes do. Its client stayed, and its file was in use for as long as the process lived."""
    name, path = await topic("terminals", config=COMPACTED), tmp_path / "terminals.db"
    tasks, store = asyncio.all_tasks(), SQLite[Any](path)
    terminals = a_directory(name if ready else f"{name}-missing", sidings_kafka, storage=store)
    entering = asyncio.create_task(terminals.__aenter__())
    await eventually(lambda: terminals._follower.contact.is_set())
    leaving = entering
    if ready:
        await entering
        leaving = asyncio.create_task(terminals.__aexit__(None, None, None))
        await asyncio.sleep(0)
    while not leaving.done():
        leaving.cancel()
        await asyncio.sleep(0)
    assert leaving.cancelled()
    await eventually(lambda: asyncio.all_tasks() == tasks, asyncio.all_tasks)
    await eventually(lambda: not [thread for thread in threading.enumerate() if name in thread.name])
    async with a_directory(name, sidings_kafka, storage=SQLite[Any](path)):
        pass


async def test_wait_until_says_what_is_missing(topic, sidings_kafka):
    name = await topic("terminals", partitions=2, config=COMPACTED)
    async with a_directory(name, sidings_kafka) as terminals:
        with pytest.raises(DirectoryBehind, match="partition 1 at 0 of 3"):
            await terminals.wait_until(2, partition=1, timeout=0.05)
        waiting = asyncio.create_task(terminals.wait_until({0: 0, 1: 3}, timeout=SECONDS))
        await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(3)}, partition=1)
        await waiting
        assert len(terminals) == 3


async def test_partitions_that_are_added_are_taken_up(topic, sidings_kafka, caplog):
    name = await topic("terminals", config=COMPACTED)
    await put(sidings_kafka, name, {"T-1": row("T-1")})
    async with a_directory(name, sidings_kafka) as terminals:
        await add_partitions(sidings_kafka, name, 3)
        await eventually(lambda: set(terminals.positions()) == {0, 1, 2})
        await put(sidings_kafka, name, {"T-2": row("T-2")}, partition=2)
        await put(sidings_kafka, name, {"T-1": row("T-1", "b")}, partition=0)
        await terminals.wait_until({0: 2, 1: 0, 2: 1}, timeout=SECONDS)
        assert (terminals["T-1"].acquirer_id, terminals["T-2"].acquirer_id) == ("b", "a")
        assert "trying again" not in caplog.text, "nor is the connection lost over it"


async def test_a_topic_that_does_not_exist_is_waited_for_and_not_made(topic, sidings_kafka, caplog):
    name = await topic() + "-later"
    terminals = a_directory(name, sidings_kafka)
    running = asyncio.create_task(terminals.run())
    await eventually(lambda: "there is no topic" in caplog.text)
    with pytest.raises(DirectoryNotReady, match=f"there is no topic '{name}'"):
        terminals.get("T-1")
    assert name in terminals.not_ready()[0]
    assert terminals.progress == 0
    await create_topic(sidings_kafka, name, partitions=1, config={"cleanup.policy": "compact,delete"})
    await terminals.wait_ready(SECONDS)
    assert len(terminals) == 0
    assert terminals
    assert "has cleanup.policy=compact,delete: Kafka forgets" in caplog.text
    terminals.stop()
    await asyncio.wait_for(running, SECONDS)


async def test_a_load_that_takes_too_long_ends_and_says_how_far_it_is(topic, sidings_kafka, monkeypatch):
    name = await topic("terminals", partitions=2, config=COMPACTED)
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(30)}, partition=1)
    monkeypatch.setattr("sidings.kafka.directory.follower._CHUNK_RECORDS", 1)
    slow = a_directory(name, sidings_kafka, load_seconds=1.0, decoder=lambda _: time.sleep(0.1))
    with pytest.raises(DirectoryNotReady, match=r"partition 1 at \d+ of 30.*load_seconds=1.0"):
        async with slow:
            raise AssertionError
    with pytest.raises(DirectoryNotReady, match=r"there is no topic 'nowhere'.*load_seconds=0\.1"):
        async with a_directory("nowhere", sidings_kafka, load_seconds=0.1):
            raise AssertionError
    with pytest.raises(ConfigurationError, match="load_seconds=0"):
        a_directory(name, sidings_kafka, load_seconds=0)


@pytest.mark.long
async def test_it_waits_for_kafka_and_survives_the_broker(own_kafka):
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "terminals", partitions=2, config=COMPACTED)
    await put(kafka.bootstrap, "terminals", {"T-1": row("T-1")})
    await asyncio.to_thread(kafka.kill)
    terminals = a_directory(
        "terminals", quick(kafka.bootstrap, request_seconds=5, rebalance_seconds=4), load_seconds=60
    )
    running = asyncio.create_task(terminals.run())
    with pytest.raises(DirectoryNotReady, match="Kafka does not answer"):
        await terminals.wait_ready(2)
    await asyncio.to_thread(kafka.start)
    await terminals.wait_ready(60)
    await asyncio.to_thread(kafka.kill)
    assert terminals["T-1"].acquirer_id == "a", "what is known is known"
    waiting = asyncio.create_task(terminals.wait_until(timeout=60))
    await asyncio.to_thread(kafka.start)
    await waiting
    await put(kafka.bootstrap, "terminals", {"T-1": row("T-1", "b")})
    await eventually(lambda: terminals["T-1"].acquirer_id == "b")
    await put(kafka.bootstrap, "terminals", {"T-2": row("T-2")}, partition=1)
    await eventually(lambda: "T-2" in terminals)
    await eventually(lambda: terminals.problems() == [])
    terminals.stop()
    await asyncio.wait_for(running, SECONDS)

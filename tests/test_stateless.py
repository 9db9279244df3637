"""Stateless consumers against a real Kafka: at least once, in order per key, nothing lost, no Postgres anywhere."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.protocol.group import LeaveGroupRequest
from prometheus_client import CollectorRegistry
from sidings import (
    ConfigurationError,
    Discard,
    Job,
    KafkaSettings,
    Message,
    OffsetUnknown,
    Registry,
    Retry,
    Service,
    Snooze,
    Transaction,
)
from tenacity import stop_after_attempt, wait_none

from . import consumer_support
from .consumer_support import Number, Unshowable, delete_records, produce, produce_raw, producing, sample
from .guide import run
from .support import SECONDS, eventually

TWICE = Retry(wait=wait_none(), stop=stop_after_attempt(2))
AT_ONCE = Retry(wait=wait_none())


def a_service(kafka: str, *, name: str = "test", **settings: Any) -> Any:
    """A service without Postgres, and a Prometheus registry of its own as `service.samples`."""
    registry = CollectorRegistry()
    quick = KafkaSettings(bootstrap=kafka, **{"fetch_seconds": 0.05, "metadata_seconds": 5.0} | settings)
    service: Any = Service(name, kafka=quick, prometheus=registry)
    service.samples = registry
    return service


async def committed(kafka: str, topic: str, partition: int = 0, *, group: str = "test") -> int | None:
    """What Kafka knows of the group."""
    client = AIOKafkaConsumer(bootstrap_servers=kafka, group_id=group, enable_auto_commit=False)
    await client.start()
    try:
        return await client.committed(TopicPartition(topic, partition))
    finally:
        await client.stop()


async def everything(kafka: str, topic: str, partitions: int = 1) -> list[Any]:
    """All messages of a topic, as Kafka has them."""
    tps = [TopicPartition(topic, partition) for partition in range(partitions)]
    client = AIOKafkaConsumer(bootstrap_servers=kafka, enable_auto_commit=False, auto_offset_reset="earliest")
    await client.start()
    try:
        client.assign(tps)
        ends = await client.end_offsets(tps)
        found: list[Any] = []
        while any([await client.position(tp) < ends[tp] for tp in tps]):
            for records in (await client.getmany(timeout_ms=100)).values():
                found.extend(records)
        return found
    finally:
        await client.stop()


async def test_messages_are_handled_and_results_sent_without_any_postgres(topic, sidings_kafka):
    source, results = await topic("positions", partitions=2), await topic("etas")
    await produce(sidings_kafka, source, range(5), partition=0)
    await produce(sidings_kafka, source, range(5, 9), partition=1)
    service = a_service(sidings_kafka)

    @service.consumer(source, stateless=True, dead_letter=f"{source}.dlq")
    async def on_position(message: Message[Number]) -> None:
        await service.producer.send(results, key=message.key, value=message.value)

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 9)
        await eventually(lambda: sample(service, "sidings_consumer_lag") == 0)
        assert service.problems() == []
    assert [await committed(sidings_kafka, source, partition) for partition in (0, 1)] == [5, 4]
    sent = sorted(Number.model_validate_json(record.value).n for record in await everything(sidings_kafka, results))
    assert sent == list(range(9))
    again = a_service(sidings_kafka)
    seen: list[int] = []

    @again.consumer(source, stateless=True, dead_letter=f"{source}.dlq")
    async def go_on(message: Message[Number]) -> None:
        seen.append(message.value.n)

    async with again:
        await produce(sidings_kafka, source, [9])
        await eventually(lambda: seen)
    assert seen == [9], "what was committed is handled again"


async def test_keys_run_in_order_and_no_more_at_once_than_asked_for(topic, sidings_kafka):
    name = await topic()
    service = a_service(sidings_kafka)
    running: list[bytes] = []
    most, done = 0, defaultdict(list)

    @service.consumer(name, stateless=True, concurrency=3, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        nonlocal most
        assert message.key is not None
        assert message.key not in running, "two of one key at once"
        running.append(message.key)
        most = max(most, len(running))
        for _ in range(message.value.n % 4):
            await asyncio.sleep(0)
        running.remove(message.key)
        done[message.key].append(message.value.n)

    async with producing(sidings_kafka) as producer:
        for n in range(300):
            await producer.send(name, Number(n=n).model_dump_json().encode(), key=f"key-{n * n % 7}".encode())
        await producer.flush()
    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 300)
        assert sample(service, "sidings_consumer_failures_total") == 0
    assert most == 3
    assert sum(len(numbers) for numbers in done.values()) == 300
    assert all(numbers == sorted(numbers) for numbers in done.values())


async def test_the_committed_offset_waits_for_the_lowest_unfinished_message(topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.stateless._COMMIT_SECONDS", 0.05)
    name = await topic()
    go_on = asyncio.Event()
    done: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, concurrency=2, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        if message.value.n == 2:
            await go_on.wait()
        done.append(message.value.n)

    async with service:
        await produce(sidings_kafka, name, range(3), key="slow")
        await produce(sidings_kafka, name, range(3, 20), key="quick")
        await eventually(lambda: len(done) == 19)
        assert 2 not in done

        async def two_are_committed() -> bool:
            return await committed(sidings_kafka, name) == 2

        await eventually(two_are_committed)
        go_on.set()
        await eventually(lambda: len(done) == 20)
    assert await committed(sidings_kafka, name) == 20


async def test_a_stop_ends_in_time_and_commits_nothing_that_has_not_ended(topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.service.life._DRAIN_SECONDS", 0.2)
    name = await topic()
    cancelled: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, concurrency=5, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        if message.value.n == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.value.n)
                raise

    async with service:
        for n in range(4):
            await produce(sidings_kafka, name, [n], key=f"key-{n}")
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 3)
    assert cancelled == [1]
    assert await committed(sidings_kafka, name) == 1


async def test_what_cannot_be_handled_goes_unchanged_to_the_dead_letter_topic(topic, sidings_kafka):
    name, dead = await topic("positions"), await topic("dead")
    headers = [("twice", b"1"), ("twice", b"\xff"), ("none", None)]
    seen: list[int] = []
    async with producing(sidings_kafka) as producer:
        await producer.send_and_wait(
            name, b"\x00not json", key=b"\xfe", headers=headers, timestamp_ms=1_700_000_000_000
        )
        nothing = producer.create_batch()
        nothing.append(timestamp=None, key=None, value=None)
        nothing.close()
        await (await producer.send_batch(nothing, name, partition=0))
        await producer.send_and_wait(name, b'{"n": 13}', key=b"k")
        await producer.send_and_wait(name, b'{"n": 14}', key=b"k")
        await producer.send_and_wait(name, None, key=b"k")
    service = a_service(sidings_kafka, group=name)

    @service.consumer(name, stateless=True, retry=TWICE, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        seen.append(message.value.n)
        if message.value.n == 13:
            raise ValueError("bad luck " + "ä" * 5_000)

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 5)
        assert sample(service, "sidings_consumer_messages_total", result="dead_letter") == 4
        assert sample(service, "sidings_consumer_failures_total") == 2
    assert await committed(sidings_kafka, name, group=name) == 5
    assert seen == [13, 13, 14]
    letters = await everything(sidings_kafka, dead)
    assert [(m.key, m.value) for m in letters[:2]] == [(b"\xfe", b"\x00not json"), (None, b"")]
    assert [(m.key, m.value) for m in letters[2:]] == [(b"k", b'{"n": 13}'), (b"k", None)]
    assert list(letters[0].headers[:3]) == headers
    told = dict(letters[0].headers[3:])
    assert b"json" in told["sidings-error"].lower()
    assert told["sidings-topic"] == name.encode()
    assert told["sidings-group"] == name.encode()  # not the service's name
    assert (told["sidings-partition"], told["sidings-offset"], told["sidings-timestamp"]) == (
        b"0",
        b"0",
        b"1700000000000",
    )
    error = dict(letters[2].headers)["sidings-error"]
    assert error.startswith(b"ValueError: bad luck")
    assert error.decode().endswith("ä")
    assert len(error) == 1_999


async def test_dead_letters_are_brought_back_as_the_guide_says(database, topic, sidings_kafka):
    """Also of a topic whose producers choose other partitions, and where another group has handled the message: it
    knows the repeat by the id, which is the relay's, though the dead letter has got another."""
    name, dead = await topic("positions", partitions=3), await topic("dead", partitions=2)
    mended, seen, others = False, list[Message[Number]](), list[int]()
    async with producing(sidings_kafka) as producer:
        for n in range(6):
            headers = [("sidings-id", b"%d" % n), ("trace", b"t")]
            value, partition = Number(n=n).model_dump_json().encode(), n % 3
            await producer.send_and_wait(name, value, key=b"k%d" % n, partition=partition, headers=headers)
    service, other = a_service(sidings_kafka, group=name), consumer_support.a_service(database, sidings_kafka)

    @service.consumer(name, stateless=True, retry=TWICE, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        if message.value.n >= 3 and not mended:
            raise ValueError("another" if message.value.n == 5 else "bad luck")
        seen.append(message)

    @other.consumer(name, dedup=True)
    async def handle_once(message: Message[Number], tx: Transaction) -> None:
        others.append(message.value.n)

    bring_back = run("consumer.md", "Dead letters are brought back")["bring_back"]
    async with service, other:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="dead_letter") == 3)
        await eventually(lambda: len(others) == 6)
        mended = True
        await bring_back(sidings_kafka, dead, lambda told: b"bad luck" in told["sidings-error"])
        await eventually(lambda: len(seen) == 5)
        await bring_back(sidings_kafka, dead, lambda told: b"bad luck" in told["sidings-error"])
        duplicate = {"result": "duplicate", "topic": name}
        await eventually(lambda: sample(other, "sidings_consumer_messages_total", **duplicate) == 2)
    assert sorted((m.value.n, m.partition, m.key) for m in seen[3:]) == [(3, 0, b"k3"), (4, 1, b"k4")]
    assert [m.headers for m in sorted(seen[3:], key=lambda m: m.value.n)] == [
        (("sidings-id", b"3"), ("trace", b"t")),
        (("sidings-id", b"4"), ("trace", b"t")),
    ]
    assert sorted(others) == list(range(6))
    assert len(await everything(sidings_kafka, name, 3)) == 8
    seen.clear()
    service = a_service(sidings_kafka, group=name)
    handler = service.consumer(name, stateless=True, dead_letter=dead)(handle)
    service.consumer(dead, stateless=True, dead_letter=await topic("dead2"))(handler)
    async with service:
        await eventually(lambda: len(seen) == 3)
    assert sorted((m.value.n, m.topic, m.header("sidings-topic")) for m in seen) == [
        (n, dead, name.encode()) for n in (3, 4, 5)
    ]


async def test_a_large_dead_letter_is_brought_back_as_the_guide_says(topic, sidings_kafka):
    """And what stands behind it."""
    roomy = {"max.message.bytes": "4000000"}
    name, dead = await topic("positions", config=roomy), await topic("dead", config=roomy)
    values = [b"x" * 1_200_000, b"y"]
    async with producing(sidings_kafka, max_request_size=4_000_000) as producer:
        for value in values:
            await producer.send_and_wait(name, value, key=b"k")
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=dead)
    async def handle(message: Message[Number]) -> None: ...

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="dead_letter") == 2)
    await run("consumer.md", "Dead letters are brought back")["bring_back"](sidings_kafka, dead, lambda told: True)
    assert [m.value for m in await everything(sidings_kafka, name)] == values * 2


async def test_an_error_that_cannot_be_shown_goes_to_the_dead_letters_too(topic, sidings_kafka):
    name, dead = await topic("positions"), await topic("dead")
    await produce(sidings_kafka, name, range(3))
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, retry=TWICE, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        if message.value.n == 1:
            raise Unshowable

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 3)
    (letter,) = await everything(sidings_kafka, dead)
    assert dict(letter.headers)["sidings-error"].startswith(b"Unshowable: its text cannot be shown: AttributeError")


async def test_an_error_in_what_a_handler_returns_is_its_failure(topic, sidings_kafka):
    """As a gather with `return_exceptions=True` gives it: the message passed for handled."""
    name, dead = await topic("positions"), await topic("dead")
    await produce(sidings_kafka, name, range(3))
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, retry=TWICE, dead_letter=dead)
    async def handle(message: Message[Number]) -> list[object]:
        return [None, ValueError("no") if message.value.n == 1 else None]

    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 3)
    (letter,) = await everything(sidings_kafka, dead)
    assert dict(letter.headers)["sidings-error"].startswith(b"ValueError: no")


async def test_nothing_is_lost_while_the_dead_letter_topic_refuses_them(topic, sidings_kafka, monkeypatch):
    """The topic takes no message of that size: the partition stands still, says so, and goes on when it is mended."""
    monkeypatch.setattr("sidings.kafka.stateless_handling._DEAD_LETTER_SECONDS", (0.05, 0.05))
    name, dead = await topic("positions"), await topic("dead", config={"max.message.bytes": "200"})
    seen: list[int] = []
    await produce_raw(sidings_kafka, name, b"x" * 1_000, b'{"n": 1}')
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        seen.append(message.value.n)

    async with service:
        told = await eventually(service.problems)
        assert "stands still" in told[0]
        assert dead in told[0]
        assert sample(service, "sidings_consumer_paused_partitions") == 1
        assert seen == []
    assert await committed(sidings_kafka, name) == 0, "the offset has passed a message that is nowhere"
    roomy = await topic("dead")
    again = a_service(sidings_kafka)
    again.consumer(name, stateless=True, dead_letter=roomy)(handle)
    async with again:
        await eventually(lambda: seen == [1])
    assert await committed(sidings_kafka, name) == 2
    assert [m.value for m in await everything(sidings_kafka, roomy)] == [b"x" * 1_000]


async def test_a_message_that_fails_holds_up_its_key_and_not_the_others(topic, sidings_kafka):
    name = await topic()
    mended = asyncio.Event()
    done: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, concurrency=2, retry=AT_ONCE, dead_letter=f"{name}.dlq", timeout=0.05)
    async def handle(message: Message[Number]) -> None:
        if message.value.n == 0 and not mended.is_set():
            await asyncio.Event().wait()  # until its timeout
        done.append(message.value.n)

    async with service:
        await produce(sidings_kafka, name, [0, 1], key="bad")
        await produce(sidings_kafka, name, range(2, 10), key="good")
        await eventually(lambda: done == list(range(2, 10)))
        await eventually(lambda: sample(service, "sidings_consumer_retries_total") >= 2)
        assert sample(service, "sidings_consumer_paused_partitions") == 1
        mended.set()
        await eventually(lambda: done[8:] == [0, 1])
        await eventually(lambda: sample(service, "sidings_consumer_paused_partitions") == 0)


async def test_discard_snooze_and_errors_that_would_end_the_service_steer_a_message(topic, sidings_kafka):
    name = await topic()
    tried: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, retry=TWICE, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        n, first = message.value.n, message.value.n not in tried
        tried.append(n)
        if n == 0:
            raise Discard("not for us")
        if n == 1 and tried.count(1) < 4:
            raise Snooze(0.01)
        if n == 2 and first:
            raise asyncio.CancelledError
        if n == 3 and first:
            raise Retry.after(0.01)
        if n == 4 and first:
            raise SystemExit

    async with service:
        await produce(sidings_kafka, name, range(5))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 5)
        assert sample(service, "sidings_consumer_messages_total", result="discarded") == 1
        assert sample(service, "sidings_consumer_messages_total", result="handled") == 4
    assert tried == [0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("then", ["waits", "returns", "raises"])
async def test_a_handler_that_cancels_its_own_task_has_failed(topic, sidings_kafka, then):
    """Its worker was gone, and the partition waited for ever for a message that nobody handled. Where it awaits nothing
    more, all consumers of the service began anew with another client, again and again: with that message, too."""
    name, dead = await topic(), await topic("dead")
    tried, left_over = list[int](), list[int]()
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, retry=TWICE, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        task = asyncio.current_task()
        assert task is not None
        tried.append(message.value.n)
        left_over.append(task.cancelling())
        if message.value.n == 0:
            task.cancel()
            if then == "waits":
                await asyncio.sleep(0)
            elif then == "raises":
                raise ValueError

    async with service:
        await produce(sidings_kafka, name, range(2))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 2 or len(tried) > 3)
    assert (tried, left_over) == ([0, 0, 1], [0, 0, 0])
    assert [record.value for record in await everything(sidings_kafka, dead)] == [b'{"n":0}']


async def test_a_window_that_is_full_reads_no_more_and_goes_on_when_it_empties(topic, sidings_kafka):
    name = await topic()
    go_on = asyncio.Event()
    done: list[int] = []
    service = a_service(sidings_kafka, max_records=10)

    @service.consumer(name, stateless=True, concurrency=2, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        if message.value.n == 0:
            await go_on.wait()
        done.append(message.value.n)

    async with service:
        await produce(sidings_kafka, name, [0], key="slow")
        await produce(sidings_kafka, name, range(1, 100), key="quick")
        await eventually(lambda: len(done) >= 9)
        [partition] = service._life.consumer._stateless.partitions.values()
        await eventually(lambda: partition.state.name == "FULL" and not partition.window.startable)
        assert len(done) < 20, "it reads on without a bound"
        go_on.set()
        await eventually(lambda: len(done) == 100)


async def test_large_messages_that_wait_behind_one_are_not_read_without_a_bound(topic, sidings_kafka, monkeypatch):
    """A thousand of a megabyte each for every partition, where a thousand small ones do no harm."""
    monkeypatch.setattr("sidings.kafka.stateless_loop._MOST_BYTES", 200)
    name, go_on, done = await topic(), asyncio.Event(), list[int]()
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        await go_on.wait()
        done.append(message.value.n)

    async with service:
        await produce(sidings_kafka, name, [0], key="key")
        partitions = service._life.consumer._stateless.partitions
        await eventually(lambda: any(partition.workers for partition in partitions.values()))
        [partition] = partitions.values()
        for n in range(1, 50):
            await produce(sidings_kafka, name, [n], key="key")
            await eventually(lambda n=n: len(partition.window) == n + 1 or partition.state.name == "FULL")
        assert partition.state.name == "FULL"
        assert 200 <= partition.window.size < 220
        go_on.set()
        await eventually(lambda: done == list(range(50)))


async def test_gaps_and_markers_in_the_log_do_not_matter(topic, sidings_kafka, caplog, monkeypatch):
    monkeypatch.setattr("sidings.kafka.stateless._COMMIT_SECONDS", 0.05)
    name = await topic()
    done: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        done.append(message.value.n)

    async def all_is_committed(end: int) -> bool:
        return await committed(sidings_kafka, name) == end

    async with producing(sidings_kafka, transactional_id=f"{name}-producer") as producer, service:
        end = 0
        for n, how in enumerate(["commit", "abort", "commit", "abort"]):
            await producer.begin_transaction()
            await producer.send_and_wait(name, Number(n=n).model_dump_json().encode())
            await (producer.commit_transaction() if how == "commit" else producer.abort_transaction())
            end += 2  # the message and the marker
            await eventually(lambda end=end: all_is_committed(end), "the offset goes behind the marker")
    assert done == [0, 2]
    assert "stands at" not in caplog.text


@pytest.mark.parametrize(("start", "expected"), [("earliest", [0, 1, 2]), ("latest", [2]), ("committed", [0, 1, 2])])
async def test_the_start_is_chosen_where_nothing_is_committed(topic, sidings_kafka, start, expected):
    name = await topic()
    await produce(sidings_kafka, name, [0, 1])
    done: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq", start=start)
    async def handle(message: Message[Number]) -> None:
        done.append(message.value.n)

    async with service:
        [partition] = await eventually(lambda: service._life.consumer._stateless.partitions.values())
        await eventually(lambda: partition.placed)
        # Committed before anything is read, so that the next instance begins at the same place.
        assert await committed(sidings_kafka, name) is not None
        await produce(sidings_kafka, name, [2])
        await eventually(lambda: done == expected)


async def test_start_fail_ends_the_service_with_the_remedy(topic, sidings_kafka):
    service = a_service(sidings_kafka)

    @service.consumer(await topic(), stateless=True, dead_letter="dead", start="fail")
    async def handle(message: Message[Number]) -> None: ...

    with pytest.raises(OffsetUnknown, match="kafka-consumer-groups"):
        async with asyncio.timeout(SECONDS), service:
            await asyncio.Event().wait()


async def test_messages_that_retention_deleted_are_told_of_and_passed_over(topic, sidings_kafka, caplog):
    name = await topic()
    await produce(sidings_kafka, name, range(10))
    former = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, group_id="test", enable_auto_commit=False)
    former.assign([TopicPartition(name, 0)])
    await former.start()
    await former.commit({TopicPartition(name, 0): 2})
    await former.stop()
    await delete_records(sidings_kafka, name, 6)
    done: list[int] = []
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        done.append(message.value.n)

    async with service:
        await eventually(lambda: done == [6, 7, 8, 9])
        assert sample(service, "sidings_consumer_missed_total") == 4
    assert "offsets 2 to 5 were deleted" in caplog.text


async def test_a_position_that_somebody_moved_starts_over_and_loses_nothing(topic, sidings_kafka):
    """What runs is cancelled first: no message runs twice at once. The client stays."""
    name = await topic()
    at_work, begun, overlaps, go_on = set(), [], [], asyncio.Event()
    done: set[int] = set()
    service = a_service(sidings_kafka)

    @service.consumer(name, stateless=True, concurrency=2, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        n = message.value.n
        if n in at_work:
            overlaps.append(n)
        at_work.add(n)
        begun.append(n)
        try:
            if n == 1:
                await go_on.wait()
        finally:
            at_work.discard(n)
        done.add(n)

    async with service:
        await produce(sidings_kafka, name, [0, 2, 3, 4], key="quick")
        await produce(sidings_kafka, name, [1], key="slow")
        await eventually(lambda: done >= {0, 2, 3, 4} and 1 in at_work)
        client = service._life.consumer._client
        client.seek(TopicPartition(name, 0), 2)
        await eventually(lambda: begun.count(1) == 2)
        assert service._life.consumer._client is client
        go_on.set()
        await produce(sidings_kafka, name, [5], key="quick")
        await eventually(lambda: done == {0, 1, 2, 3, 4, 5})
    assert overlaps == []
    assert await committed(sidings_kafka, name) == 6


async def test_offsets_that_are_reset_while_an_instance_hangs_are_not_overwritten_by_it(topic, sidings_kafka):
    """The group has put it out, and is empty, as a tool that resets offsets demands."""
    name = await topic()
    await produce(sidings_kafka, name, range(5))
    done, go_on = list[int](), asyncio.Event()
    service = a_service(sidings_kafka, name=name)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        if message.value.n == 4:
            await go_on.wait()
        done.append(message.value.n)

    person = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, group_id=name, enable_auto_commit=False)
    person.assign([TopicPartition(name, 0)])
    await person.start()
    try:
        async with service:
            await eventually(lambda: done == [0, 1, 2, 3])
            member: Any = service._life.consumer._client._coordinator
            former = member.member_id
            answer: Any = await person._client.send(member.coordinator_id, LeaveGroupRequest(name, former))
            assert answer.error_code == 0
            await person.commit({TopicPartition(name, 0): 2})
            go_on.set()  # what it does before it knows, it wants to commit
            await eventually(lambda: member.member_id not in ("", former))
            await produce(sidings_kafka, name, [5])
            await eventually(lambda: 5 in done)
    finally:
        await person.stop()
    assert done == [0, 1, 2, 3, 4, 2, 3, 4, 5]


def test_wrong_declarations_are_refused_with_the_remedy(sidings_kafka):
    service = a_service(sidings_kafka)

    @Registry().job()
    async def refund(job: Job[Number]) -> None: ...

    async def fine(message: Message[Number]) -> None: ...
    async def with_tx(message: Message[Number], tx: Any) -> None: ...
    async def bare(message) -> None: ...
    def plain(message: Message[Number]) -> None: ...

    for handler, options, text in [
        (fine, {}, "dead_letter=None: name another topic"),
        (fine, {"dead_letter": "positions"}, "name another topic"),
        (fine, {"dead_letter": "d", "concurrency": 0}, "concurrency=0"),
        (fine, {"dead_letter": "d", "concurrency": "8"}, "concurrency='8': give a positive number of messages"),
        (fine, {"dead_letter": "d", "concurrency": None}, "concurrency=None"),
        (fine, {"dead_letter": "d", "batch": 5}, "excludes batch="),
        (fine, {"dead_letter": "d", "isolate": True}, "excludes"),
        (fine, {"dead_letter": "d", "retry": Retry(on_exhausted="hold")}, "='hold' with stateless=True: leave it out"),
        (fine, {"dead_letter": "d", "retry": Retry(on_exhausted="block")}, "given up goes to the topic dead_letter"),
        (fine, {"dead_letter": "d", "retry": Retry(on_exhausted=refund)}, "given up goes to the topic dead_letter"),
        (with_tx, {"dead_letter": "d"}, "no transaction"),
        (plain, {"dead_letter": "d"}, "async def"),
        (bare, {"dead_letter": "d"}, "annotate the handler's first parameter as Message"),
        (fine, {"stateless": False, "dead_letter": "d"}, "need stateless=True"),
        (with_tx, {"stateless": False}, "a consumer with stateless=True"),
    ]:
        with pytest.raises(ConfigurationError, match="(?s)" + text.replace("(", r"\(")):
            service.consumer("positions", **{"stateless": True} | options)(handler)
    service.consumer("positions", stateless=True, dead_letter="d")(fine)
    with pytest.raises(ConfigurationError, match="two consumers"):
        service.consumer("positions", stateless=True, dead_letter="d")(fine)


async def test_a_handler_that_ends_for_no_cancellation_is_told_where_its_partition_waits_for_it(
    topic, sidings_kafka, monkeypatch
):
    monkeypatch.setattr("sidings.kafka.stateless_loop._START_OVER_SECONDS", 0.1, raising=False)
    source = await topic("positions")
    service = a_service(sidings_kafka)
    begun, gate = asyncio.Event(), asyncio.Event()
    seen: list[int] = []

    @service.consumer(source, stateless=True, timeout=None, dead_letter=f"{source}.dlq")
    async def on_position(message: Message[Number]) -> None:
        begun.set()
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        seen.append(message.value.n)

    await produce(sidings_kafka, source, [0])
    async with service:
        await asyncio.wait_for(begun.wait(), SECONDS)
        stateless = service._life.consumer._stateless
        stateless.loops[0].displace(stateless.partitions.values())  # as where its place in the log is in doubt
        try:
            await eventually(lambda: "do not end" in "".join(service.problems()), service.problems, seconds=10)
        finally:
            gate.set()
        await produce(sidings_kafka, source, [1])
        await eventually(lambda: 1 in seen)
        await eventually(lambda: service.problems() == [], service.problems)


async def test_a_partition_that_starts_over_does_not_do_so_once_more_when_it_is_placed(
    topic, sidings_kafka, monkeypatch
):
    """As where a poll ends after its topic was seen to be made anew: while its new handlers ran it was displaced."""
    monkeypatch.setattr("sidings.kafka.stateless._COMMIT_SECONDS", 3_600.0)
    monkeypatch.setattr("sidings.kafka.stateless_loop._START_OVER_SECONDS", 0.1)
    source = await topic("positions")
    service = a_service(sidings_kafka)
    begun, gate, commits = asyncio.Event(), asyncio.Event(), asyncio.Event()
    done: list[int] = []

    @service.consumer(source, stateless=True, concurrency=2, dead_letter=f"{source}.dlq")
    async def on_position(message: Message[Number]) -> None:
        if message.value.n == 1:
            begun.set()
            await gate.wait()
        done.append(message.value.n)

    async with service:
        stateless = service._life.consumer._stateless
        [partition] = await eventually(lambda: list(stateless.partitions.values()))
        await produce(sidings_kafka, source, [0])
        await eventually(lambda: done == [0] and partition.placed)
        commit, asked = stateless._offsets.commit, 0

        async def slow_the_second_time(partitions: Any) -> None:
            nonlocal asked
            asked += 1
            if asked == 2:
                await commits.wait()
            await commit(partitions)

        monkeypatch.setattr(stateless._offsets, "commit", slow_the_second_time)
        [loop], placement = stateless.loops, partition.placement
        loop.displace([partition])
        loop.displace([partition])
        await eventually(lambda: partition.placement == placement + 1 and partition.placed)
        await produce(sidings_kafka, source, [1])
        await asyncio.wait_for(begun.wait(), SECONDS)
        commits.set()
        gate.set()
        await eventually(lambda: 1 in done)
        await produce(sidings_kafka, source, [2])
        await eventually(lambda: 2 in done)
        assert partition.placement == placement + 1
        assert done == [0, 1, 2]


async def test_a_partition_that_waits_for_its_place_goes_on_when_its_offset_is_refused_late(topic, sidings_kafka):
    """As by a poll that began before it was displaced."""
    source = await topic("positions")
    service = a_service(sidings_kafka)
    done: list[int] = []

    @service.consumer(source, stateless=True, dead_letter=f"{source}.dlq")
    async def on_position(message: Message[Number]) -> None:
        done.append(message.value.n)

    async with service:
        stateless = service._life.consumer._stateless
        [partition] = await eventually(lambda: list(stateless.partitions.values()))
        await produce(sidings_kafka, source, [0])
        await eventually(lambda: done == [0] and partition.placed)
        stateless.rest()
        service._life.consumer.displace([partition])  # as it ends to start over
        stateless.loops[0]._leave_log(partition)
        await produce(sidings_kafka, source, [1])
        await eventually(lambda: 1 in done, lambda: partition.state)


async def test_a_service_without_kafka_refuses_it_at_the_start():
    service = Service("test", prometheus=CollectorRegistry())

    @service.consumer("positions", stateless=True, dead_letter="d")
    async def handle(message: Message[Number]) -> None: ...

    with pytest.raises(ConfigurationError, match="give kafka="):
        await service.run()

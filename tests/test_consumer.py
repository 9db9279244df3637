"""The consumer's main line: effects once, whatever is delivered twice, fails, hangs or is missing."""

import asyncio
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaError
from sidings import (
    ConfigurationError,
    Discard,
    Job,
    Message,
    OffsetUnknown,
    PostgresSettings,
    PostgresUnavailable,
    Retry,
    Snooze,
    Transaction,
)
from sidings.devstack.topics import create_topic, delete_topics
from sidings.kafka.partition import State
from sidings.kafka.stored import Stored

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    as_json,
    delete_records,
    numbers,
    offset_reaches,
    produce,
    produce_raw,
    producing,
    record,
    sample,
    stored_offsets,
)
from .support import SECONDS, Ride, connected, drained, eventually, fetch, value


@pytest.mark.parametrize(
    ("timeout", "batch_seconds", "limit"), [(30.0, 0.5, "35500ms"), (100.0, 20, "125s"), (None, 20, "0")]
)
async def test_a_handler_may_be_idle_in_its_transaction_for_as_long_as_it_and_those_before_it_may_take(
    effects, topic, sidings_kafka, timeout, batch_seconds, limit
):
    """Postgres would close the connection under it, each time."""
    name, found = await topic(), list[str]()
    service = a_service(effects, sidings_kafka, settings={"batch_seconds": batch_seconds})

    @service.consumer(name, timeout=timeout)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        found.append(await tx.fetchval("SHOW idle_in_transaction_session_timeout"))

    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(lambda: found)
    assert found == [limit]


async def test_effects_jobs_and_offsets_commit_together(effects, topic, sidings_kafka):
    positions = await topic("positions", partitions=3)
    service = a_service(effects, sidings_kafka)
    ran: list[tuple[str, int]] = []

    @service.job(group="transport")
    async def follow_up(job: Job[Ride]) -> None:
        ran.append((job.origin, job.payload.number))

    @service.consumer(positions)
    async def on_position(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        await follow_up.enqueue(tx, Ride(transport=message.key_text or "", number=message.value.n))

    for partition in range(3):
        await produce(sidings_kafka, positions, range(partition * 10, partition * 10 + 10), partition=partition)
    async with service:
        await eventually(lambda: len(ran) == 30)
        await eventually(lambda: sample(service, "sidings_consumer_lag") == 0)
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 30)
    assert sorted(await numbers(effects)) == list(range(30))
    assert await stored_offsets(effects) == {(positions, partition): 10 for partition in range(3)}
    # A job belongs to the partition of the message that caused it, and jobs of one key keep its messages' order.
    assert [(f"{positions}/1", n) for n in range(10, 20)] == [r for r in ran if r[0].endswith("/1")]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_what_others_have_compressed_can_be_read(effects, topic, sidings_kafka, codec):
    name = await topic(config={"compression.type": codec})
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    await produce(sidings_kafka, name, range(5))
    async with service:
        await eventually(offset_reaches(effects, name, 5))
    assert await numbers(effects) == list(range(5))


async def test_a_message_shows_what_kafka_knows_of_it(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    seen: list[Message[Number]] = []

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        seen.append(message)

    headers = [("trace", b"1"), ("trace", b"2")]
    await produce_raw(
        sidings_kafka, name, as_json(7), key="schlüssel".encode(), headers=headers, timestamp_ms=1_700_000_000_000
    )
    async with service:
        await eventually(lambda: seen)
    message = seen[0]
    assert (message.value, message.topic, message.partition, message.offset) == (Number(n=7), name, 0, 0)
    assert (message.key_text, message.origin, message.header("trace")) == ("schlüssel", f"{name}/0", b"2")
    assert message.header("other") is None
    assert message.timestamp == datetime.fromtimestamp(1_700_000_000, UTC)


def test_a_message_whose_timestamp_is_no_date_has_none():
    """Producers may send any number; the handler that asked for the time failed, and its key stood still for ever."""
    years = {253_402_300_799_999: 9999, 253_402_300_800_000: None, 2**63 - 1: None, -1: None, 0: 1970}
    told = {sent: Message(None, timestamp_ms=sent).timestamp for sent in years}
    assert {sent: at and at.year for sent, at in told.items()} == years


async def test_a_handler_behind_a_wrapper_that_does_not_await_it_is_awaited(effects, topic, sidings_kafka):
    """Its messages passed for handled, and nothing had run."""
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, model=Number)
    async def wrapper(message: Message[Number], tx: Transaction) -> object:
        return record(message, tx)

    await produce(sidings_kafka, name, range(5))
    async with service:
        await eventually(offset_reaches(effects, name, 5))
    assert await numbers(effects) == list(range(5))


async def test_a_restart_goes_on_where_the_last_run_committed(effects, topic, sidings_kafka):
    name = await topic()
    await produce(sidings_kafka, name, range(5))
    for upto in (5, 8):
        service = a_service(effects, sidings_kafka)
        service.consumer(name, model=Number)(record)
        async with service:
            await eventually(offset_reaches(effects, name, upto))
        assert await committed_in_kafka(sidings_kafka, name) == upto  # told as well, for the sake of lag tools
        await produce(sidings_kafka, name, range(upto, upto + 3))
    assert await numbers(effects) == list(range(8))


async def committed_in_kafka(bootstrap: str, topic: str) -> int | None:
    client = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id="test", enable_auto_commit=False)
    await client.start()
    try:
        client.assign([TopicPartition(topic, 0)])
        return await asyncio.wait_for(client.committed(TopicPartition(topic, 0)), SECONDS)
    finally:
        await client.stop()


async def test_a_zombies_effects_are_undone(effects, topic, sidings_kafka):
    """While its handler is at work, somebody else moves the stored offset on, as the partition's next owner would."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    at_work, go_on = asyncio.Event(), asyncio.Event()

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        at_work.set()
        await go_on.wait()

    await produce(sidings_kafka, name, range(4))
    async with service:
        await asyncio.wait_for(at_work.wait(), SECONDS)
        async with connected(effects) as other:
            await other.execute("UPDATE sidings.consumer_offset SET next_offset = 3")
        go_on.set()
        await eventually(offset_reaches(effects, name, 4))
        await eventually(lambda: sample(service, "sidings_consumer_conflicts_total") == 1)
    assert await numbers(effects) == [3]  # 0 to 2 belong to the other one


async def test_a_message_that_is_delivered_again_changes_nothing(effects, topic, sidings_kafka):
    """The position goes back under the consumer's feet, as it does when a client forgets what it has read."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    await produce(sidings_kafka, name, range(10))
    async with service:
        await eventually(offset_reaches(effects, name, 10))
        consumer = service._life.consumer
        (tp,) = consumer._stored.partitions
        consumer._client.seek(tp, 0)
        await produce(sidings_kafka, name, range(10, 12))
        await eventually(offset_reaches(effects, name, 12))
    assert await numbers(effects) == list(range(12))


async def test_a_bad_message_does_not_fail_its_batch(effects, topic, sidings_kafka):
    name = await topic(partitions=3)
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        if message.value.n == 105:
            raise ValueError("bad")

    for partition in range(3):
        await produce(
            sidings_kafka, name, range(100 * partition, 100 * partition + 10), partition=partition, key=f"k{partition}"
        )
    async with service:
        for partition in range(3):
            await eventually(offset_reaches(effects, name, 10, partition))
        await eventually(lambda: sample(service, "sidings_consumer_failures_total") == 2)
        await eventually(lambda: sample(service, "sidings_consumer_retries_total") == 1)
        assert await value(effects, "SELECT count(*) FROM sidings.job") > 0
    good = [*range(10), *range(100, 105), *range(200, 210)]
    assert sorted(await numbers(effects)) == good  # 105 is parked, and its key's later messages behind it


async def test_a_failing_message_pauses_only_its_partition(effects, topic, sidings_kafka):
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)
    healed = asyncio.Event()

    @service.consumer(name, retry=Retry(wait=lambda _: 0.02))  # type: ignore[arg-type]
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 1 and not healed.is_set():
            raise ValueError("not yet")
        await record(message, tx)

    await produce(sidings_kafka, name, range(3), partition=0)
    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_failures_total") >= 3)
        for start in range(100, 130, 10):  # again and again, while partition 0 waits
            await produce(sidings_kafka, name, range(start, start + 10), partition=1)
            await eventually(offset_reaches(effects, name, start - 90, 1))
        await eventually(lambda: sample(service, "sidings_consumer_paused_partitions") == 1)
        await eventually(lambda: sample(service, "sidings_consumer_stalled_seconds") > 0)
        assert (await stored_offsets(effects))[name, 0] == 1
        healed.set()
        await eventually(offset_reaches(effects, name, 3, 0))
    assert await numbers(effects, "partition = 0") == [0, 1, 2]
    assert await numbers(effects, "partition = 1") == list(range(100, 130))


async def test_a_hanging_handler_is_cut_off_and_pauses_only_its_partition(effects, topic, sidings_kafka):
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, timeout=0.3, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 1:
            await tx.fetchval("SELECT pg_sleep(600)")
        await record(message, tx)

    await produce(sidings_kafka, name, range(2), partition=0)
    await produce(sidings_kafka, name, range(100, 120), partition=1)
    async with service:
        await eventually(offset_reaches(effects, name, 20, 1))
        await eventually(offset_reaches(effects, name, 2, 0))  # parked
        await eventually(lambda: sample(service, "sidings_jobs_total", outcome="retried") >= 1)
    assert sorted(await numbers(effects)) == [0, *range(100, 120)]


async def test_a_failure_that_shows_only_at_the_commit_is_found_one_by_one(effects, topic, sidings_kafka):
    name = await topic(partitions=2)
    async with connected(effects) as connection:
        await connection.execute(
            "ALTER TABLE effect ADD CONSTRAINT effect_number UNIQUE (number) DEFERRABLE INITIALLY DEFERRED"
        )
        await connection.execute("INSERT INTO effect (number, via) VALUES (3, 'before')")
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, retry=TWICE_AND_PARK)(record)
    await produce(sidings_kafka, name, range(6), partition=0, key=None)
    await produce(sidings_kafka, name, range(100, 106), partition=1, key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 6, 0))
        await eventually(offset_reaches(effects, name, 6, 1))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 1)
    assert sorted(await numbers(effects, "via = 'message'")) == [0, 1, 2, 4, 5, *range(100, 106)]


async def test_an_error_that_a_handler_swallows_does_not_hit_its_neighbours(effects, topic, sidings_kafka):
    """After it, the transaction is dead, and it is the next message's statement that fails."""
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 2:
            try:
                await tx.execute("SELECT 1/0")
            except Exception:
                return
        await record(message, tx)

    await produce(sidings_kafka, name, range(5), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 5))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 1)
    assert await numbers(effects) == [0, 1, 3, 4]


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
async def test_a_handler_that_raises_what_would_end_the_service_has_failed(effects, topic, sidings_kafka, error):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 1:
            raise error
        await record(message, tx)

    await produce(sidings_kafka, name, range(3), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 3))
    assert await numbers(effects) == [0, 2]


async def test_a_message_that_breaks_its_connection_is_parked_in_the_end(effects, topic, sidings_kafka):
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 1:
            await tx.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        await record(message, tx)

    await produce(sidings_kafka, name, range(3), key=None)
    await produce(sidings_kafka, name, range(100, 103), partition=1)
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        await eventually(offset_reaches(effects, name, 3, 1))
    assert sorted(await numbers(effects)) == [0, 2, 100, 101, 102]


async def test_a_handler_that_ends_its_transaction_itself_is_found_out(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 1:
            await tx.execute("ROLLBACK")
            return
        await record(message, tx)

    await produce(sidings_kafka, name, range(3), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        error = await value(effects, "SELECT payload ->> 'error' FROM sidings.job")
    assert error == "RuntimeError: a handler has ended the transaction: leave COMMIT and ROLLBACK to its consumer"
    assert await numbers(effects) == [0, 2]  # the effects of message 0 were not lost with the rollback


async def test_a_broken_retry_policy_loses_no_message(effects, topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.subscription._BROKEN_POLICY_SECONDS", 0.05)
    name = await topic()
    service = a_service(effects, sidings_kafka)
    tries = 0

    def broken(_: object) -> float:
        raise ZeroDivisionError

    @service.consumer(name, retry=Retry(wait=broken))  # type: ignore[arg-type]
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise ValueError("not yet")
        await record(message, tx)

    await produce(sidings_kafka, name, range(2))
    async with service:
        await eventually(offset_reaches(effects, name, 2))
    assert await numbers(effects) == [0, 1]


async def test_a_message_that_cannot_be_parked_yet_stays_where_it_is(effects, topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.siding._PARK_AGAIN_SECONDS", 0.05)
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        raise ValueError("bad")

    async with connected(effects) as connection:
        await connection.execute(f"ALTER TABLE sidings.job ADD CONSTRAINT full_now CHECK (type <> 'message:{name}')")
        await produce(sidings_kafka, name, [0])
        async with service:
            await eventually(lambda: sample(service, "sidings_consumer_failures_total") >= 4)
            assert await stored_offsets(effects) == {(name, 0): 0}
            await connection.execute("ALTER TABLE sidings.job DROP CONSTRAINT full_now")
            await eventually(offset_reaches(effects, name, 1))
    assert await value(effects, "SELECT count(*) FROM sidings.job") == 1


async def test_more_topics_than_connections_do_not_starve_each_other(effects, topic, sidings_kafka):
    names = [await topic(f"t{n}") for n in range(4)]
    service = a_service(PostgresSettings(dsn=effects, pool_size=1, connect_seconds=1), sidings_kafka)
    for name in names:
        service.consumer(name, model=Number, batch=None)(record)
        await produce(sidings_kafka, name, range(5))
    async with service, service.transaction() as tx:  # the only connection of the pool proper is taken
        for name in names:
            await eventually(offset_reaches(effects, name, 5))
        assert await tx.fetchval("SELECT count(*) FROM effect") == 20
        with pytest.raises(PostgresUnavailable, match="in use, one by the block that this one is in; see pool_size"):
            await use_up_all_connections(service)
    assert sample(service, "sidings_consumer_errors_total") == 0


async def use_up_all_connections(service) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(2):  # `pool_size` is one
            await stack.enter_async_context(service.transaction())


async def test_a_list_handler_gets_lists_of_one_partition_in_one_transaction(effects, topic, sidings_kafka):
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)
    lists: list[tuple[int, int]] = []

    @service.job()
    async def follow_up(job: Job[Ride]) -> None: ...

    @service.consumer(name, batch=4)
    async def handle(messages: list[Message[Number]], tx: Transaction) -> None:
        assert len({message.partition for message in messages}) == 1
        lists.append((messages[0].partition, len(messages)))
        await tx.executemany(
            'INSERT INTO effect (partition, "offset", number) VALUES ($1, $2, $3)',
            [(m.partition, m.offset, m.value.n) for m in messages],
        )
        await follow_up.enqueue_many(tx, [Ride(number=m.value.n) for m in messages])

    for partition in range(2):
        await produce(sidings_kafka, name, range(partition * 100, partition * 100 + 10), partition=partition)
    async with service:
        for partition in range(2):
            await eventually(offset_reaches(effects, name, 10, partition))
        assert sum(count for _, count in lists) == 20
        assert max(count for _, count in lists) == 4
        await drained(effects)
    assert sorted(await numbers(effects)) == [*range(10), *range(100, 110)]
    origins = await fetch(effects, "SELECT origin, count(*) FROM sidings.job_history GROUP BY origin ORDER BY origin")
    assert [tuple(row) for row in origins] == [(f"{name}/0", 10), (f"{name}/1", 10)]


async def test_a_list_handler_may_use_its_list_up(effects, topic, sidings_kafka):
    """What it enqueues last belongs to the messages all the same."""
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.job()
    async def follow_up(job: Job[Ride]) -> None: ...

    @service.consumer(name, batch=4, retry=TWICE_AND_PARK)
    async def handle(messages: list[Message[Number]], tx: Transaction) -> None:
        while messages:
            message = messages.pop()
            await follow_up.enqueue(tx, Ride(number=message.value.n), delay=3600)

    await produce_raw(sidings_kafka, name, *map(as_json, range(8)), headers=[("correlation_id", b"c")])
    async with service:
        await eventually(offset_reaches(effects, name, 8))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 8)
        assert sample(service, "sidings_consumer_messages_total", result="handled") == 8
    rows = await fetch(effects, "SELECT type, origin, headers ->> 'correlation_id' AS id FROM sidings.job")
    assert [tuple(row) for row in rows] == [("follow_up", f"{name}/0", "c")] * 8


async def test_a_failing_list_is_handled_message_by_message(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, batch=10, retry=TWICE_AND_PARK)
    async def handle(messages: list[Message[Number]], tx: Transaction) -> None:
        for message in messages:
            await record(message, tx)
            if message.value.n == 4:
                raise ValueError("bad")

    await produce(sidings_kafka, name, range(10), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 10))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 1)
    assert sorted(await numbers(effects)) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


async def test_discard_snooze_and_retry_after_steer_a_message(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    attempts: dict[int, list[float]] = defaultdict(list)

    @service.consumer(name, retry=Retry(wait=lambda _: 600.0))  # type: ignore[arg-type]
    async def handle(message: Message[Number], tx: Transaction) -> None:
        n = message.value.n
        attempts[n].append(time.monotonic())
        await record(message, tx)
        if n == 1:
            raise Discard("not wanted")
        if n == 2 and len(attempts[n]) < 4:
            raise Snooze(0.1)
        if n == 3 and len(attempts[n]) < 4:
            raise Retry.after(0.1)

    await produce(sidings_kafka, name, range(5))
    async with service:
        await eventually(offset_reaches(effects, name, 5))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="discarded") == 1)
    assert await numbers(effects) == [0, 2, 3, 4]
    # The first attempt is the main line's, behind which the second follows at once.
    assert all(later - earlier >= 0.1 for n in (2, 3) for earlier, later in pairwise(attempts[n][1:])), attempts


# -- gaps, and the ends of the log ------------------------------------------------------------------------------------


async def test_a_client_that_fails_is_replaced_by_another_one(effects, topic, sidings_kafka, monkeypatch):
    """Until the new one has its assignment, nothing of the former one's may be read."""
    name = await topic("positions", partitions=3)
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    getmany, fails = AIOKafkaConsumer.getmany, [KafkaError("a mistake inside of the client")]

    async def failing_once(self: AIOKafkaConsumer, *args: Any, **options: Any) -> Any:
        if fails and self.assignment():
            raise fails.pop()
        return await getmany(self, *args, **options)

    await produce(sidings_kafka, name, range(3))
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        monkeypatch.setattr(AIOKafkaConsumer, "getmany", failing_once)
        await eventually(lambda: not fails)
        await produce(sidings_kafka, name, range(3, 6))
        await eventually(offset_reaches(effects, name, 6))
    assert await numbers(effects) == list(range(6))


async def test_a_group_that_refuses_a_member_for_a_while_is_asked_again(effects, topic, sidings_kafka, monkeypatch):
    """As where the consumer that this service takes over from, with another assignor, has not ended yet."""
    monkeypatch.setattr("sidings.kafka.vitals._STUCK_SECONDS", 1.0)
    name = await topic("positions")
    settings = {"fetch_seconds": 0.05, "group": name}
    service = a_service(effects, sidings_kafka, settings=settings)
    service.consumer(name, model=Number)(record)
    former = AIOKafkaConsumer(
        name,
        bootstrap_servers=sidings_kafka,
        group_id=name,
        partition_assignment_strategy=[RangePartitionAssignor],
    )
    await asyncio.wait_for(former.start(), SECONDS)
    try:
        await produce(sidings_kafka, name, range(3))
        async with service:
            vitals = service._life.consumer.vitals
            await eventually(lambda: "InconsistentGroupProtocolError" in "".join(vitals.problems()), vitals.problems)
            assert "the group has a member whose assignor is not 'sticky'" in "".join(vitals.problems())
            await former.stop()
            await eventually(offset_reaches(effects, name, 3))
            assert "InconsistentGroupProtocolError" not in "".join(vitals.problems())
    finally:
        await former.stop()


@pytest.mark.long
async def test_health_is_good_while_slow_handlers_have_much_to_read(effects, topic, sidings_kafka, monkeypatch):
    """Of a partition that it has messages of the client asks for no more, and a batch of a thousand is one turn of the
    loop: Kafka had not answered, then, or the consumer was stuck."""
    monkeypatch.setattr("sidings.kafka.vitals._STUCK_SECONDS", 2.0)
    name, count = await topic(partitions=2), 40
    for partition in (0, 1):
        await produce(sidings_kafka, name, range(count), partition=partition)
    settings = {"fetch_seconds": 0.05, "max_records": count, "batch_seconds": 0.1}
    service = a_service(effects, sidings_kafka, settings=settings)
    handled: list[int] = []
    told: list[str] = []

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await asyncio.sleep(0.1)
        handled.append(message.partition)
        told.extend(service.problems()[:1])

    async with service:
        await eventually(lambda: len(handled) >= 2 * count, lambda: handled)
    assert len(told) < count / 4, told  # it was half of them; of a machine that stands still it may be a few


async def test_health_tells_of_a_broker_that_hangs_under_a_consumer_that_has_caught_up(effects, own_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.vitals._STUCK_SECONDS", 2.0)
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "positions", partitions=1)
    service = a_service(effects, kafka.bootstrap, settings={"fetch_seconds": 0.2})
    service.consumer("positions", model=Number)(record)
    async with service:
        await produce(kafka.bootstrap, "positions", [0])
        await eventually(lambda: numbers(effects))
        assert service.problems() == []
        await asyncio.to_thread(kafka.pause)
        try:
            told = "Kafka has not answered for 2 s about positions/0"
            await eventually(lambda: told in service.problems(), service.problems)
        finally:
            await asyncio.to_thread(kafka.resume)
        await eventually(lambda: service.problems() == [], service.problems)


async def test_a_session_that_brokers_do_not_take_is_told_by_its_setting(effects, topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.vitals._STUCK_SECONDS", 1.0)
    name = await topic("positions")
    service = a_service(effects, sidings_kafka, settings={"group": name, "session_seconds": 100_000})
    service.consumer(name, model=Number)(record)
    async with service:
        vitals = service._life.consumer.vitals
        await eventually(lambda: "InvalidSessionTimeoutError" in "".join(vitals.problems()), vitals.problems)
        assert "KafkaSettings.session_seconds must lie between" in "".join(vitals.problems())


async def test_a_group_that_is_full_is_told_by_the_brokers_setting(own_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 1.0)
    kafka = await asyncio.to_thread(own_kafka, settings={"group.max.size": "1"})
    await create_topic(kafka.bootstrap, "positions", partitions=2)
    first, second = (a_service(None, kafka.bootstrap) for _ in range(2))
    for service in (first, second):

        @service.consumer("positions", stateless=True, dead_letter="dead")
        async def handle(message: Message[Number]) -> None:
            pass

    async with first:
        await eventually(lambda: first._life.consumer.joined)
        async with second:
            problems = second._life.consumer.vitals.problems
            await eventually(lambda: "run fewer instances" in "".join(problems()), problems)
            assert "raise group.max.size" in "".join(problems())


async def test_gaps_in_the_log_do_not_matter(effects, topic, sidings_kafka):
    """Markers of transactions take offsets, and aborted messages are left out."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    async with producing(sidings_kafka, transactional_id=f"{name}-producer", acks="all") as producer:
        for batch in range(4):
            await producer.begin_transaction()
            for n in range(batch * 3, batch * 3 + 3):
                await producer.send_and_wait(name, as_json(n), partition=0)
            await (producer.abort_transaction() if batch == 2 else producer.commit_transaction())
            if batch == 1:
                async with service:
                    await eventually(offset_reaches(effects, name, 7))
    again = a_service(effects, sidings_kafka)
    again.consumer(name, model=Number)(record)
    async with again:
        await eventually(offset_reaches(effects, name, 15))
        await eventually(offset_reaches(effects, name, 16))  # behind the last marker too, so that there is no false lag
        await eventually(lambda: sample(again, "sidings_consumer_lag") == 0)
    assert sample(again, "sidings_consumer_conflicts_total") == 0
    assert await numbers(effects) == [*range(6), *range(9, 12)]


async def test_an_idle_partition_is_moved_behind_a_marker_at_its_end(effects, topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.lag._COMMIT_SECONDS", 0.1)
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    async with producing(sidings_kafka, transactional_id=f"{name}-producer", acks="all") as producer, service:
        await producer.begin_transaction()
        await producer.send_and_wait(name, as_json(0), partition=0)
        await producer.commit_transaction()
        await eventually(offset_reaches(effects, name, 2))
        await producer.begin_transaction()
        await producer.send_and_wait(name, as_json(1), partition=0)
        await producer.abort_transaction()
        await eventually(offset_reaches(effects, name, 4))
        await produce(sidings_kafka, name, [2])
        await eventually(offset_reaches(effects, name, 5))
    assert sample(service, "sidings_consumer_conflicts_total") == 0
    assert await numbers(effects) == [0, 2]


@pytest.mark.parametrize("before", [6, -1], ids=["some are left", "none is left"])
@pytest.mark.parametrize("stateless", [False, True], ids=["ordinary", "stateless"])
async def test_messages_that_retention_deletes_in_front_of_it_are_passed_over(
    effects, topic, sidings_kafka, stateless, before
):
    """Reading stands at an offset that is gone: the answer is an error, and aiokafka is told to decide nothing."""
    name = await topic()
    for n in range(10):  # in a batch each, so that not all of them have been fetched before
        await produce(sidings_kafka, name, [n])
    settings = {"fetch_seconds": 0.05, "partition_fetch_bytes": 1, "max_records": 1}
    service = a_service(None if stateless else effects, sidings_kafka, settings=settings)
    at_work, go_on, done = asyncio.Event(), asyncio.Event(), []

    async def handle(message: Message[Number], tx: Transaction | None = None) -> None:
        at_work.set()
        await go_on.wait()
        done.append(message.value.n)

    if stateless:

        @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
        async def alone(message: Message[Number]) -> None:
            await handle(message)

    else:
        service.consumer(name)(handle)

    async with service:
        await asyncio.wait_for(at_work.wait(), SECONDS)
        await delete_records(sidings_kafka, name, before)
        go_on.set()
        await produce(sidings_kafka, name, [10])
        await eventually(lambda: 10 in done)
        left = [6, 7, 8, 9] if before == 6 else []
        assert done == [*range(len(done) - len(left) - 1), *left, 10]
        assert sample(service, "sidings_consumer_missed_total") == 11 - len(done)


async def test_messages_that_retention_deleted_are_told_of_and_passed_over(effects, topic, sidings_kafka, caplog):
    name = await topic()
    await produce(sidings_kafka, name, range(10))
    async with connected(effects) as connection:
        await connection.execute(
            "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ($1, 0, 2)", name
        )
    await delete_records(sidings_kafka, name, 6)
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    async with service:
        await eventually(offset_reaches(effects, name, 10))
        await eventually(lambda: sample(service, "sidings_consumer_missed_total") == 4)
    assert await numbers(effects) == [6, 7, 8, 9]
    assert "offsets 2 to 5 were deleted (retention) before this service has read them" in caplog.text


async def test_an_offset_beyond_the_end_stops_the_partition_until_somebody_decides(
    effects, topic, sidings_kafka, monkeypatch
):
    monkeypatch.setattr("sidings.kafka.placing._REFUSED_SECONDS", 0.1)
    name = await topic(partitions=2)
    await produce(sidings_kafka, name, range(3), partition=0)
    await produce(sidings_kafka, name, range(100, 103), partition=1)
    async with connected(effects) as connection:
        await connection.execute(
            "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ($1, 0, 1000)", name
        )
        service = a_service(effects, sidings_kafka)
        service.consumer(name, model=Number)(record)
        async with service:
            await eventually(offset_reaches(effects, name, 3, 1))
            problem = await eventually(service.problems)
            assert f"{name}/0: the stored offset 1000 lies beyond the end of the log (3)" in problem[0]
            assert await numbers(effects) == [100, 101, 102]
            await connection.execute("DELETE FROM sidings.consumer_offset WHERE partition = 0")
            await eventually(offset_reaches(effects, name, 3, 0))
            assert service.problems() == []
    assert await numbers(effects, "partition = 0") == [0, 1, 2]


async def test_a_log_that_grows_past_an_offset_that_lay_beyond_its_end_loses_no_message_silently(
    effects, topic, sidings_kafka, monkeypatch
):
    monkeypatch.setattr("sidings.kafka.placing._REFUSED_SECONDS", 0.1)
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    async with connected(effects) as connection:
        await connection.execute(
            "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ($1, 0, 5)", name
        )
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    async with service:
        await eventually(lambda: any("lies beyond the end of the log (3)" in problem for problem in service.problems()))
        await produce(sidings_kafka, name, range(3, 8))
        await eventually(lambda: any("which has grown (8)" in problem for problem in service.problems()))
        consumer = service._life.consumer
        consumer.on_partitions_assigned(consumer._client.assignment())  # as after a rebalance
        await eventually(lambda: any("which has grown (8)" in problem for problem in service.problems()))
        assert await numbers(effects) == []
        await service.reset_offsets(name, 5, partitions=[0], actor="alice")  # where it stood: somebody has decided
        await eventually(offset_reaches(effects, name, 8))
    assert await numbers(effects) == [5, 6, 7]


async def test_an_offset_behind_an_open_transaction_is_none_beyond_the_end(effects, topic, sidings_kafka, caplog):
    """As another client has committed it that reads without regard to transactions, which is the default of all."""
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    async with producing(sidings_kafka, transactional_id=f"tx-{name}") as producer:
        await producer.begin_transaction()
        for n in (3, 4):
            await producer.send_and_wait(name, as_json(n), partition=0)
        async with connected(effects) as connection:
            await connection.execute(
                "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ($1, 0, 5)", name
            )
        async with service:
            partitions = service._life.consumer._stored.partitions
            await eventually(lambda: [partition.state for partition in partitions.values()] == [State.READY])
            await producer.abort_transaction()
            await produce(sidings_kafka, name, [5])
            await eventually(offset_reaches(effects, name, 7))
    assert await numbers(effects) == [5]
    assert "the end of the log" not in caplog.text


@pytest.mark.parametrize(("start", "expected"), [("earliest", [0, 1, 2, 3]), ("latest", [3]), ("committed", [2, 3])])
async def test_the_start_is_chosen_where_no_offset_is_stored(effects, topic, sidings_kafka, start, expected):
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    group = f"group-{name}"
    former = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, group_id=group, enable_auto_commit=False)
    await former.start()
    former.assign([TopicPartition(name, 0)])
    await former.commit({TopicPartition(name, 0): 2})
    await former.stop()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": group})
    service.consumer(name, model=Number, start=start)(record)
    async with service:
        await eventually(offset_reaches(effects, name, 0))
        await produce(sidings_kafka, name, [3])
        await eventually(offset_reaches(effects, name, 4))
    assert await numbers(effects) == expected


async def test_the_log_tells_where_partitions_begin_and_warns_where_the_group_has_no_offset(
    effects, topic, sidings_kafka, caplog
):
    """All that they still had was handled again without a word, as where the earlier consumer's group was misspelt."""
    caplog.set_level("INFO", "sidings.consumer")
    name = await topic(partitions=4)
    former = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, group_id=name, enable_auto_commit=False)
    await former.start()
    former.assign([TopicPartition(name, 0), TopicPartition(name, 2)])
    await former.commit({TopicPartition(name, 0): 0, TopicPartition(name, 2): 0})
    await former.stop()
    for upto in (1, 2):
        service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": name})
        service.consumer(name, model=Number, start="committed")(record)
        await produce(sidings_kafka, name, [upto], partition=3)
        async with service:
            await eventually(offset_reaches(effects, name, upto, partition=3))
    told = [each for each in caplog.records if f"{name}: " in each.message]
    warning, begins = told  # the second run has stored offsets, and nothing to tell
    assert (warning.levelname, begins.levelname) == ("WARNING", "INFO")
    assert begins.message.endswith("partitions 0, 2: they begin at the group's offset (start='committed')")
    assert f"the consumer group {name!r} has no offset for partitions 1, 3:" in warning.message
    assert "KafkaSettings.group" in warning.message
    assert warning.message.endswith(f"`sidings consumers reset {name} --partition PARTITION --to OFFSET`")


async def test_start_fail_brings_the_service_down_with_the_reason(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, start="fail")(record)
    with pytest.raises(OffsetUnknown, match="no offset is stored"):
        await asyncio.wait_for(service.run(), SECONDS)


async def test_a_topic_that_appears_later_is_consumed(effects, topic, sidings_kafka):
    there = await topic()
    missing = f"{there}-later"
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "metadata_seconds": 0.5})
    service.consumer(there, model=Number)(record)
    service.consumer(missing, model=Number)(record)
    await produce(sidings_kafka, there, range(2))
    try:
        async with service:
            await eventually(offset_reaches(effects, there, 2))
            await create_topic(sidings_kafka, missing, partitions=1)
            await produce(sidings_kafka, missing, range(2))
            await eventually(offset_reaches(effects, missing, 2))
    finally:
        await delete_topics(sidings_kafka, [missing])


@pytest.mark.parametrize("stateless", [True, False], ids=["stateless", "ordinary"])
async def test_a_poll_that_outlasts_a_rebalance_takes_nothing_of_another_topic(
    effects, topic, sidings_kafka, monkeypatch, caplog, stateless
):
    """An instance that has one topic waits for its messages, and meanwhile is given the other one, whose place the
    group has in Kafka, too. A loop that took them would drop them; if their own waited already, it took that for a
    gap in the log, so that they were lost."""
    monkeypatch.setattr("sidings.kafka.fetch_loop._POLL_SECONDS", 2.0)
    monkeypatch.setattr(Stored, "_wake", lambda _: None)  # so that the other topic's own loop comes second
    one, other = await topic("one"), await topic("other")

    def an_instance() -> Any:
        service = a_service(effects, sidings_kafka)
        service.consumer(other, model=Number)(record)
        if stateless:

            @service.consumer(one, stateless=True, dead_letter="dead")
            async def alone(message: Message[Number]) -> None: ...
        else:

            @service.consumer(one, decoder=bytes.fromhex)
            async def beside(message: Message[bytes], tx: Transaction) -> None: ...

        return service

    def ready(service: Any) -> list[str]:
        return [p.tp.topic for p in service._life.consumer._partitions() if p.state is State.READY]

    crew = [(an_instance(), AsyncExitStack()) for _ in range(2)]
    async with crew[0][1], crew[1][1]:
        for service, stack in crew:
            await stack.enter_async_context(service)
        await eventually(lambda: sorted(ready(crew[0][0]) + ready(crew[1][0])) == sorted([one, other]))
        (stays, _), (_, leaving) = crew if ready(crew[0][0]) == [one] else reversed(crew)
        await leaving.aclose()
        await produce(sidings_kafka, other, range(5))
        await eventually(lambda: len(ready(stays)) == 2)
        await produce(sidings_kafka, other, range(5, 7))
        await eventually(offset_reaches(effects, other, 7))
        assert await numbers(effects) == [*range(7)]
    assert [line for line in caplog.messages if "the client stands at" in line or "it is put back" in line] == []


async def test_what_a_poll_brings_of_another_topic_stays_its_own_loops(effects, topic, sidings_kafka, monkeypatch):
    """None should; but where aiokafka did, its loop would take what is missing for a gap in the log."""
    getmany: Any = AIOKafkaConsumer.getmany

    def of_all(client: Any, *names: TopicPartition, **options: Any) -> Any:
        return getmany(client, *[name for name in names if not name.topic], **options)

    monkeypatch.setattr(AIOKafkaConsumer, "getmany", of_all)
    topics = [await topic(name) for name in ("one", "other", "third")]
    seen: set[int] = set()
    service = a_service(effects, sidings_kafka)
    service.consumer(topics[0], model=Number)(record)
    service.consumer(topics[1], model=Number)(record)

    @service.consumer(topics[2], model=Number, stateless=True, dead_letter="dead")
    async def alone(message: Message[Number]) -> None:
        seen.add(message.value.n)

    async with service:
        for first in range(0, 150, 50):
            for name in topics:
                await produce(sidings_kafka, name, range(first, first + 50))
        for name in topics[:2]:
            await eventually(offset_reaches(effects, name, 150))
        await eventually(lambda: len(seen) == 150)
    assert sorted(await numbers(effects)) == sorted([*range(150)] * 2)


# -- declarations -----------------------------------------------------------------------------------------------------


async def test_wrong_declarations_are_refused_with_the_remedy(database):
    service = a_service(database, "127.0.0.1:1")

    async def good(message: Message[Number], tx: Transaction) -> None: ...

    def plain(message: Message[Number], tx: Transaction) -> None: ...

    async def lone(message: Message[Number]) -> None: ...

    async def untyped(message, tx) -> None: ...

    @service.job()
    async def refund(job: Job[Number]) -> None: ...

    for handler, options, text in [
        (plain, {}, "must be `async def`"),
        (lone, {}, "must take a message and a transaction"),
        (lone, {"model": Number}, "must take a message and a transaction"),  # failed with each message
        (untyped, {}, "annotate the handler's first parameter as Message"),
        (good, {"batch": 0}, "batch=0"),
        (good, {"batch": "5"}, "batch='5': give a positive number"),
        (good, {"timeout": 0}, "timeout=0"),
        (good, {"timeout": "30"}, "timeout='30': give a positive number of seconds, or None"),
        (good, {"timeout": float("nan")}, "timeout=nan"),
        (good, {"max_waiting": 1.5}, "max_waiting=1.5: give a positive number of jobs"),
        (good, {"start": "now"}, "start='now'"),
        (good, {"isolate": "no"}, "isolate='no': give True or False"),
        (good, {"isolate": True, "retry": Retry(on_exhausted="block")}, "with isolate=True: leave stop= out"),
        (good, {"retry": Retry(on_exhausted="block")}, "='block' without isolate=True: leave it out"),
        (good, {"retry": Retry(on_exhausted="hold")}, "='hold' without .*, or give isolate=True and 'hold'"),
        (good, {"retry": Retry(on_exhausted=refund)}, "on_exhausted=refund: a job follows only a job, .* leave it out"),
        (good, {"isolate": True, "retry": Retry(on_exhausted=refund)}, "let the handler enqueue a job whose type has"),
        (good, {"stateless": "no"}, "stateless='no': give True or False"),
        (good, {"decoder": "json"}, "decoder='json': give a plain function"),
        (good, {"decoder": lone}, "give a plain function, which is called with the message"),
        (good, {"decoder": lambda: None}, "it cannot be called with the message alone"),
        (good, {"dedup": lone}, "dedup=.* give a plain function"),
        (good, {"model": 5}, "model=5: give a type that pydantic can validate"),
        (good, {"model": "Number"}, "model='Number'"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            service.consumer("topic", **options)(handler)
    service.consumer("topic")(good)
    with pytest.raises(ConfigurationError, match="two consumers are declared"):
        service.consumer("topic")(good)
    with pytest.raises(ConfigurationError, match="give postgres="):
        a_service(None, "127.0.0.1:1").consumer("topic")(good)

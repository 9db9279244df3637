"""Offsets that are moved by order: nothing that was under way gets through, and from there on effects happen once."""

import asyncio
import itertools
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from sidings import (
    ActionRefused,
    Admin,
    ConfigurationError,
    Discard,
    Job,
    KafkaUnavailable,
    Message,
    OffsetOutOfRange,
    PostgresSettings,
    PostgresUnavailable,
    Retry,
    Snooze,
    Transaction,
)
from sidings.executor import Link
from sidings.kafka.offsets import OffsetStore
from sidings.kafka.outbox import MESSAGE_ID
from sidings.kafka.partition import Partition, State
from sidings.kafka.pauses import Pauses
from sidings.kafka.reset import ResetWatch
from tenacity import stop_after_attempt, wait_fixed

from .admin_support import a_job
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
from .support import SECONDS, Ride, connected, drained, eventually, fetch, jobs_left, value


async def test_the_place_may_be_named_in_any_way_while_no_instance_runs(effects, topic, sidings_kafka):
    name = await topic(partitions=2)
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=12)  # what is older than a week Kafka may delete
    for n in range(5):
        stamp = round((start + timedelta(hours=n)).timestamp() * 1000)
        await produce_raw(sidings_kafka, name, as_json(n), timestamp_ms=stamp)
    await produce(sidings_kafka, name, [9], partition=1)
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)

    async def reset(to, **options):
        done = await service.reset_offsets(name, to, actor="alice", **options)
        return [(one.partition, one.before, one.offset, one.cancelled) for one in done]

    assert await reset(3, partitions=[0]) == [(0, None, 3, 0)]
    assert await reset("earliest") == [(0, 3, 0, 0), (1, None, 0, 0)]
    assert await reset("latest") == [(0, 0, 5, 0), (1, 0, 1, 0)]
    assert await reset(start + timedelta(hours=1, milliseconds=1), partitions=[0]) == [(0, 5, 2, 0)]
    assert await reset(start + timedelta(days=1), partitions=[0]) == [(0, 2, 5, 0)]  # nothing is so young
    assert await reset(datetime(1960, 1, 1, tzinfo=UTC), partitions=[0]) == [(0, 5, 0, 0)]
    assert await reset("latest", partitions=[0]) == [(0, 0, 5, 0)]
    assert await reset(1, partitions=[0], reason="a test") == [(0, 5, 1, 0)]
    assert await stored_offsets(effects) == {(name, 0): 1, (name, 1): 1}
    last = (await fetch(effects, "SELECT * FROM sidings.audit ORDER BY id"))[-1]
    assert (last["actor"], last["action"], last["reason"]) == ("alice", "reset", "a test")
    assert json.loads(last["target"]) == {"origin": f"{name}/0"}
    its_id = str(await value(effects, "SELECT DISTINCT topic_id FROM sidings.consumer_offset"))
    assert json.loads(last["detail"]) == {"from": 5, "to": 1, "cancelled": 0, "topic_id": its_id}
    async with service:
        await eventually(offset_reaches(effects, name, 5))
    assert await numbers(effects) == [1, 2, 3, 4]


async def test_the_latest_place_is_before_what_an_open_transaction_may_yet_commit(effects, topic, sidings_kafka):
    name = await topic()
    await produce(sidings_kafka, name, [0, 1])
    service = a_service(effects, sidings_kafka)
    async with producing(sidings_kafka, transactional_id=name) as producer, producer.transaction():
        await asyncio.wait_for(producer.send_and_wait(name, as_json(2)), SECONDS)
        assert await service.reset_offsets(name, "latest", actor="alice") == [(0, None, 2, 0)]


async def test_a_server_that_takes_no_writes_is_said_to_have_reset_nothing(effects, topic, sidings_kafka):
    """It was not known, said the error, whether the reset had committed."""
    name = await topic()
    await fetch(effects, f'ALTER DATABASE "{effects.rpartition("/")[2]}" SET default_transaction_read_only = on')
    with pytest.raises(PostgresUnavailable, match="takes no writes, as a standby; nothing was reset"):
        await a_service(effects, sidings_kafka).reset_offsets(name, "latest", actor="alice")


async def test_another_isolation_level_of_the_database_changes_nothing_behind_pgbouncer(effects, topic, sidings_kafka):
    """It passes no settings of a session on, and each reset was refused, in the words of the function."""
    name = await topic()
    await produce(sidings_kafka, name, [0, 1])
    database = effects.rpartition("/")[2]
    await fetch(effects, f'ALTER DATABASE "{database}" SET default_transaction_isolation = serializable')
    service = a_service(PostgresSettings(dsn=effects, pgbouncer=True), sidings_kafka)
    assert await service.reset_offsets(name, "latest", actor="alice") == [(0, None, 2, 0)]
    assert await stored_offsets(effects) == {(name, 0): 2}


async def test_an_idle_instance_notices_and_reads_on_from_there(effects, topic, sidings_kafka):
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    await produce(sidings_kafka, name, range(5))
    await produce(sidings_kafka, name, range(10, 15), partition=1)
    async with service:
        await eventually(offset_reaches(effects, name, 5))
        await eventually(offset_reaches(effects, name, 5, 1))
        await service.reset_offsets(name, 3, partitions=[1], actor="alice")
        await eventually(offset_reaches(effects, name, 5, 1))
        await service.reset_offsets(name, "latest", actor="alice")
        await service.reset_offsets(name, 4, partitions=[0], actor="alice")
        await eventually(offset_reaches(effects, name, 5))
    assert await numbers(effects, "partition = 0") == [*range(5), 4]
    assert await numbers(effects, "partition = 1") == [*range(10, 15), 13, 14]


async def test_a_partition_that_waits_for_its_place_is_told_of_once_and_not_at_each_look(monkeypatch, caplog):
    """Its stored offset is read when Kafka has said where its log begins and ends, which may take long."""
    monkeypatch.setattr("sidings.kafka.reset._LOOK_SECONDS", 0.001)
    partition = Partition(TopicPartition("rides", 0))
    partition.place(5)
    looks = 0

    class Offsets:
        async def find_reset(self, _: object) -> list[TopicPartition]:
            nonlocal looks
            looks += 1
            return [partition.tp]

    watch = ResetWatch({partition.tp: partition}, Offsets(), lambda found: [each.displace() for each in found])
    watching = asyncio.create_task(watch.run())
    await eventually(lambda: looks > 3)
    watching.cancel()
    assert partition.state is State.UNPLACED
    assert partition.placement == 1
    assert caplog.text.count("rides/0") == 1


async def test_resets_are_looked_for_only_in_the_partitions_that_are_assigned(database: str, monkeypatch):
    """Of all that it had ever had an instance asked, each second, whatever it had after a rebalance."""
    monkeypatch.setattr("sidings.kafka.reset._LOOK_SECONDS", 0.001)
    asked: list[tuple[object, ...]] = []

    class Asking(Link):
        async def fetch(self, query: str, *args: object):
            if "AS paused" in query and "c.resets > 0" in query:
                asked.append(args)
            return await super().fetch(query, *args)

    kept, given_up = (Partition(TopicPartition("rides", number)) for number in range(2))
    settings, epochs, displaced = PostgresSettings(dsn=database), SimpleNamespace(), list[Partition]()
    link = Asking(settings)
    offsets = OffsetStore(link, settings, epochs, {}, Pauses([]))  # pyright: ignore[reportArgumentType]
    await offsets.create({kept.tp: 5, given_up.tp: 5})
    await offsets.load([kept.tp, given_up.tp])
    kept.place(5)
    watching = asyncio.create_task(ResetWatch({kept.tp: kept}, offsets, displaced.extend).run())
    try:
        await fetch(database, "UPDATE sidings.consumer_offset SET resets = 1")
        await eventually(lambda: displaced)
    finally:
        watching.cancel()
        await link.close()
    assert {*displaced} == {kept}
    assert [args for args in asked if args != (["rides"], "{0}")] == []


async def test_a_transaction_that_was_under_way_cannot_commit_not_even_back_at_its_own_offset(
    effects, topic, sidings_kafka
):
    """The offset comes to stand exactly where the transaction expects it: it is the number of resets that refuses."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    at_work, go_on, first = asyncio.Event(), asyncio.Event(), True

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal first
        await record(message, tx, "before" if first else "after")
        if message.value.n == 2:
            first = False
            at_work.set()
            await go_on.wait()

    await produce(sidings_kafka, name, range(3))
    async with service:
        await asyncio.wait_for(at_work.wait(), SECONDS)
        await service.reset_offsets(name, "earliest", actor="alice")
        assert await stored_offsets(effects) == {(name, 0): 0}
        go_on.set()
        await eventually(offset_reaches(effects, name, 3))
        await eventually(lambda: sample(service, "sidings_consumer_conflicts_total") == 1)
    assert await numbers(effects, "via = 'before'") == []
    assert await numbers(effects, "via = 'after'") == [0, 1, 2]


@pytest.mark.parametrize(
    "error", [None, Discard("not wanted"), ValueError("no")], ids=["handled", "discarded", "parked"]
)
async def test_a_message_that_is_tried_alone_when_its_partition_is_reset_takes_none_of_the_new_place_with_it(
    effects, topic, sidings_kafka, error
):
    """Its end moved the offset past the first message of the new place, which nobody had handled."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    tries, alone, fail, again, go_on = 0, *(asyncio.Event() for _ in range(4))

    @service.consumer(name, retry=Retry(wait=wait_fixed(0), stop=stop_after_attempt(1)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        if message.value.n == 3 and not fail.is_set():
            tries += 1
            if tries == 1:
                raise ValueError("in the main line")
            alone.set()
            await fail.wait()
            if error is not None:
                raise error
        if message.value.n == 0 and alone.is_set():
            again.set()
            await go_on.wait()
        await record(message, tx)

    await produce(sidings_kafka, name, range(5))
    async with service:
        await asyncio.wait_for(alone.wait(), SECONDS)
        await service.reset_offsets(name, "earliest", actor="alice")
        await asyncio.wait_for(again.wait(), SECONDS)
        fail.set()
        await eventually(lambda: not _running("Siding.settle"))
        go_on.set()
        await eventually(offset_reaches(effects, name, 5))
    assert await numbers(effects) == [0, 1, 2, *range(5)]
    assert await fetch(effects, "SELECT FROM sidings.job") == []


async def test_a_message_that_waits_for_its_turn_alone_when_its_partition_is_reset_takes_none_with_it(
    effects, topic, sidings_kafka
):
    name = await topic(partitions=3)
    service = a_service(PostgresSettings(dsn=effects, pool_size=2), sidings_kafka)  # two are tried alone at once
    tries, reset, fail, again, go_on = {100: 0, 101: 0, 3: 0}, *(asyncio.Event() for _ in range(4))
    meanwhile: list[int] = []

    @service.consumer(name, retry=Retry(wait=wait_fixed(0)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        n = message.value.n
        if n in tries and not fail.is_set():
            tries[n] += 1
            if tries[n] == 2:
                await fail.wait()
            raise ValueError("no")
        if reset.is_set() and not go_on.is_set():
            meanwhile.append(n)
        if n == 0 and reset.is_set():
            again.set()
            await go_on.wait()
        await record(message, tx)

    for number in (1, 2):
        await produce(sidings_kafka, name, [99 + number], partition=number)
    async with service:
        await eventually(lambda: (tries[100], tries[101]) == (2, 2))
        await produce(sidings_kafka, name, range(5))
        await eventually(lambda: len(_running("Siding.settle")) == 3)
        reset.set()
        await service.reset_offsets(name, "earliest", partitions=[0], actor="alice")
        await asyncio.wait_for(again.wait(), SECONDS)
        assert tries == {100: 2, 101: 2, 3: 1}
        fail.set()
        await eventually(lambda: not _running("Siding.settle"))
        assert sorted(meanwhile) == [0, 100, 101]
        go_on.set()
        await eventually(offset_reaches(effects, name, 5))
        assert sample(service, "sidings_consumer_conflicts_total") == 1, "what was read since is sound"
    assert await numbers(effects, "partition = 0") == [0, 1, 2, *range(5)]


async def test_a_message_that_is_tried_alone_when_its_partition_is_reset_counts_for_none_that_stands_aside_by_then(
    effects, topic, sidings_kafka
):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    tries, alone, fail = 0, asyncio.Event(), asyncio.Event()

    @service.consumer(name, retry=Retry(wait=wait_fixed(600), stop=stop_after_attempt(2)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        tries += 1
        if tries == 2:
            alone.set()
            await fail.wait()
        raise ValueError("no")

    await produce(sidings_kafka, name, [0])
    async with service:
        await asyncio.wait_for(alone.wait(), SECONDS)
        await service.reset_offsets(name, "earliest", actor="alice")
        await eventually(lambda: sample(service, "sidings_consumer_retries_total") == 1)
        fail.set()
        await eventually(lambda: len(_running("Siding.settle")) == 1)
        assert (tries, sample(service, "sidings_consumer_paused_partitions")) == (4, 1), "it waits for its next attempt"
        assert sample(service, "sidings_consumer_failures_total") == 1


async def test_a_message_that_waits_for_its_next_attempt_waits_no_more_when_its_partition_is_reset(
    effects, topic, sidings_kafka
):
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=Retry(wait=wait_fixed(600)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        raise Snooze(600) if message.value.n == 1 else ValueError("no")

    await produce(sidings_kafka, name, [0])
    await produce(sidings_kafka, name, [1], partition=1)
    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_paused_partitions") == 2)
        await service.reset_offsets(name, "latest", actor="alice")
        await eventually(lambda: not _running("Siding.settle"))


async def test_a_partition_that_is_displaced_while_a_batch_of_it_commits_goes_on_behind_it(
    effects, topic, sidings_kafka
):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    async with connected(effects) as connection:
        await connection.execute("""
            CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
            CREATE CONSTRAINT TRIGGER hangs AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION hang()""")
        await connection.execute("SELECT pg_advisory_lock(4711)")
        await produce(sidings_kafka, name, range(3))
        async with service:
            await eventually(lambda: value(effects, waiting))
            consumer = service._life.consumer
            consumer.displace(list(consumer._stored.partitions.values()))
            await connection.execute("SELECT pg_advisory_unlock(4711)")
            await eventually(offset_reaches(effects, name, 3))
            await produce(sidings_kafka, name, [3])
            await eventually(offset_reaches(effects, name, 4))
            assert sample(service, "sidings_consumer_errors_total", server="kafka") == 0, "its client was given up"
    assert await numbers(effects) == [0, 1, 2, 3]


def _running(what: str) -> list[str]:
    return [name for task in asyncio.all_tasks() if what in (name := task.get_name())]


async def test_under_load_every_message_from_the_new_offset_on_counts_once(effects, topic, sidings_kafka):
    """Two instances; messages keep coming, and the offsets are moved back and forth. The handler writes down under
    which number of resets it has committed: under each, the offsets are a range without gap or repetition."""
    name = await topic(partitions=2)

    def an_instance():
        service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "max_records": 7})

        @service.consumer(name)
        async def handle(message: Message[Number], tx: Transaction) -> None:
            await tx.execute(
                'INSERT INTO effect (partition, "offset", number) '
                "SELECT $2, $3, c.resets FROM sidings.consumer_offset c WHERE c.topic = $1 AND c.partition = $2",
                *(message.topic, message.partition, message.offset),
            )

        return service

    async def keep_sending() -> None:
        async with producing(sidings_kafka) as producer:
            while not enough.is_set():
                for n in range(20):
                    await producer.send(name, as_json(n), partition=n % 2)
                await asyncio.sleep(0.15)  # else they would take longer to be handled than the end is waited for
            await producer.flush()

    async def moved(partition: int) -> bool:
        return (
            await value(effects, 'SELECT count(*) FROM effect WHERE partition = $1 AND "offset" > 100', partition) > 0
        )

    enough = asyncio.Event()
    sending = asyncio.create_task(keep_sending())
    first, second = an_instance(), an_instance()
    starts: dict[tuple[int, int], int] = {(0, 0): 0, (1, 0): 0}
    ends: dict[tuple[int, int], int] = {}
    async with first, second:
        await eventually(lambda: moved(0))
        await eventually(lambda: moved(1))
        for number, (partition, to) in enumerate([(0, 50), (1, 0), (0, "latest"), (1, 100), (0, 0), (1, "latest")]):
            (done,) = await first.reset_offsets(name, to, partitions=[partition], actor="test")
            resets = number // 2 + 1
            ends[partition, resets - 1] = done.before
            starts[partition, resets] = done.offset

            async def goes_on(partition: int = partition, beyond: int = done.offset) -> bool:
                return (await stored_offsets(effects))[name, partition] > beyond

            await eventually(goes_on)
        enough.set()
        await asyncio.wait_for(sending, SECONDS)
        await eventually(lambda: sample(first, "sidings_consumer_lag") == sample(second, "sidings_consumer_lag") == 0)
    for (_, partition), offset in (await stored_offsets(effects)).items():
        ends[partition, 3] = offset
    rows = await fetch(effects, 'SELECT partition, number, "offset" FROM effect ORDER BY partition, number, "offset"')
    found: dict[tuple[int, int], list[int]] = {place: [] for place in starts}
    for row in rows:
        found[row["partition"], row["number"]].append(row["offset"])
    assert found == {place: list(range(start, ends[place])) for place, start in starts.items()}


async def test_messages_that_will_come_again_leave_no_job_behind_and_those_before_stay(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    healed = asyncio.Event()

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if not healed.is_set() and message.key is not None and message.key.startswith(b"bad"):
            raise ValueError("not yet")
        await record(message, tx)

    service.registry.get(f"message:{name}").retry = Retry(wait=wait_fixed(0.05))
    await produce(sidings_kafka, name, [0, 1], key="bad-1")
    await produce_raw(sidings_kafka, name, b"garbage", key=b"g")
    await produce(sidings_kafka, name, [3], key="good")
    await produce(sidings_kafka, name, [4], key="bad-2")
    await produce_raw(sidings_kafka, name, b"garbage", key=b"g")
    await produce(sidings_kafka, name, [6], key="bad-1")
    async with service:
        await eventually(offset_reaches(effects, name, 7))
        (done,) = await service.reset_offsets(name, 3, partitions=[0], actor="alice", reason="a test")
        assert done.cancelled == 3
        ended = await fetch(
            effects, "SELECT payload, error_message FROM sidings.job_history WHERE outcome = 'cancelled'"
        )
        assert sorted(json.loads(row["payload"])["offset"] for row in ended) == [4, 5, 6]
        assert {row["error_message"] for row in ended} == {
            "by alice: the consumer was reset, the message is delivered again: a test"
        }
        await eventually(offset_reaches(effects, name, 7))
        healed.set()

        async def only_garbage() -> bool:
            left = await fetch(effects, "SELECT payload FROM sidings.job")
            return sorted(json.loads(row["payload"])["offset"] for row in left) == [2, 5]

        await eventually(only_garbage)
    assert sorted(await numbers(effects)) == [0, 1, 3, 3, 4, 6]
    assert await numbers(effects, "key = 'bad-1'") == [0, 1, 6]


async def test_messages_that_wait_in_another_origin_since_partitions_were_added_are_found(
    database, sidings_kafka, topic
):
    name = await topic(partitions=3)
    for partition in range(3):
        await produce(sidings_kafka, name, range(5), partition=partition)
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.topic (topic, partitions) VALUES ($1, 3)", name)
        for origin, partition, offset, held in [(0, 2, 3, None), (0, 2, 1, None), (1, 2, 4, "why"), (1, 1, 4, None)]:
            await connection.execute(
                'INSERT INTO sidings.job (type, origin, "group", payload, held, position) '
                "VALUES ($1, $2, 'k', $3, $4, CASE WHEN $4::text IS NULL THEN nextval('sidings.job_position') END)",
                *(f"message:{name}", f"{name}/{origin}"),
                json.dumps({"topic": name, "partition": partition, "offset": offset, "timestamp": 0}),
                held,
            )
    service = a_service(database, sidings_kafka)
    done = await service.reset_offsets(name, 3, partitions=[2], actor="alice")
    assert done == [(2, None, 3, 2)]
    left = await fetch(database, "SELECT origin, payload FROM sidings.job ORDER BY id")
    assert [(row["origin"], json.loads(row["payload"])["offset"]) for row in left] == [
        (f"{name}/0", 1),
        (f"{name}/1", 4),
    ]


async def test_a_job_behind_a_parked_message_that_was_cancelled_does_not_wait_for_its_next_attempt(
    effects, topic, sidings_kafka
):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    ran = asyncio.Event()

    @service.job(group="transport")
    async def follow_up(job: Job[Ride]) -> None:
        ran.set()

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        raise ValueError("never")

    service.registry.get(f"message:{name}").retry = Retry(wait=wait_fixed(3_600))
    await produce(sidings_kafka, name, [0], key="a")
    async with service:
        await eventually(offset_reaches(effects, name, 1))
        await eventually(lambda: sample(service, "sidings_jobs_total", outcome="retried") == 1)
        async with service.transaction() as tx:
            await follow_up.enqueue(tx, Ride(transport="a"), origin=f"{name}/0")
        (done,) = await service.reset_offsets(name, "latest", actor="alice")
        assert done.cancelled == 0  # it lies before the new offset
        await produce(sidings_kafka, name, [1], key="b")
        await eventually(offset_reaches(effects, name, 2))
        (done,) = await service.reset_offsets(name, "earliest", actor="alice")
        assert done.cancelled == 2
        await asyncio.wait_for(ran.wait(), SECONDS)


async def test_whatever_stands_in_a_parked_message_it_is_found(effects, topic, sidings_kafka):
    """json keeps a NUL as \\u0000, and Postgres then refuses to read any field of it."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    seen: list[list[tuple[str, bytes | None]]] = []

    @service.consumer(name, isolate=True, retry=Retry(wait=wait_fixed(0.05)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        seen.append(list(message.headers))
        raise ValueError("never")

    headers = [("a\0b", b"\0"), ("\\u0000", b""), ("", b"x"), ("null", None), ("h" * 30_000, b"\xff")]
    await produce_raw(sidings_kafka, name, as_json(0), headers=headers)
    async with service:
        await eventually(lambda: seen)
        (done,) = await service.reset_offsets(name, "latest", actor="alice")
        assert done.cancelled == 0
        (done,) = await service.reset_offsets(name, "earliest", actor="alice")
        assert done.cancelled == 1
        seen.clear()
        await eventually(lambda: seen)
    assert seen[0] == headers


async def test_a_parked_message_that_runs_while_it_is_cancelled_is_undone(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    at_work, go_on, tries = asyncio.Event(), asyncio.Event(), 0

    @service.consumer(name, isolate=True)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        tries += 1
        await record(message, tx, f"try {tries}")
        if tries == 1:
            at_work.set()
            await go_on.wait()

    await produce(sidings_kafka, name, [0, 1])
    async with service:
        await asyncio.wait_for(at_work.wait(), SECONDS)
        await eventually(offset_reaches(effects, name, 2))
        (done,) = await service.reset_offsets(name, "earliest", actor="alice")
        assert done.cancelled == 2
        go_on.set()
        await eventually(offset_reaches(effects, name, 2))
        await drained(effects)
    assert await numbers(effects) == [0, 1]
    assert await numbers(effects, "via = 'try 1'") == []


async def test_with_dedup_what_is_delivered_again_is_handled_and_its_repeats_are_not(effects, topic, sidings_kafka):
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, dedup=lambda message: str(message.value.n))(record)
    await produce(sidings_kafka, name, [0, 1, 0, 2, 1])
    async with service:
        await eventually(offset_reaches(effects, name, 5))
        await produce(sidings_kafka, name, [2, 3], partition=1)
        await eventually(offset_reaches(effects, name, 2, 1))
        await service.reset_offsets(name, 1, partitions=[0], actor="alice")
        await eventually(offset_reaches(effects, name, 5))
        await service.reset_offsets(name, "earliest", partitions=[1], actor="alice")
        await eventually(offset_reaches(effects, name, 2, 1))
    assert await numbers(effects) == [0, 1, 2, 3, 1, 2, 3]


async def test_with_dedup_a_table_is_built_anew_from_repeats_whose_first_ones_are_gone_where_ids_have_a_prefix(
    effects, topic, sidings_kafka
):
    """As the guide says: without one such a repeat changes nothing, though nobody handles the first one again."""
    name = await topic()

    async def built(dedup: Any) -> list[int]:
        service = a_service(effects, sidings_kafka)
        service.consumer(name, model=Number, dedup=dedup)(record)
        await fetch(effects, "DELETE FROM effect")
        await service.reset_offsets(name, "earliest", actor="alice")
        async with service:
            await eventually(offset_reaches(effects, name, 4))
        return await numbers(effects)

    for number in (0, 0, 1, 1):
        await produce_raw(sidings_kafka, name, as_json(number), headers=[(MESSAGE_ID, b"id %d" % number)])
    assert await built(True) == [0, 1]
    await delete_records(sidings_kafka, name, 1)
    assert await built(True) == [1]
    assert await built(lambda message: (id := message.header("sidings-id")) and b"2 " + id) == [0, 1]


async def test_an_offset_beyond_the_end_is_put_right_by_a_reset(effects, topic, sidings_kafka):
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    async with connected(effects) as connection:
        await connection.execute(
            "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ($1, 0, 1000)", name
        )
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    async with service:
        await eventually(lambda: any("lies beyond the end" in problem for problem in service.problems()))
        await service.reset_offsets(name, "earliest", actor="alice")
        await eventually(offset_reaches(effects, name, 3))
        assert await numbers(effects) == [0, 1, 2]


async def test_a_lock_that_is_not_free_is_waited_for_and_then_told_of(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    await service.reset_offsets(name, "earliest", actor="alice")
    await fetch(effects, "ALTER FUNCTION sidings.reset_offsets SET lock_timeout = '250ms'")
    seen: set[int] = set()

    async def waiting() -> set[int]:  # each time over another connection
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        now = {row["pid"] for row in await fetch(effects, query)}
        seen.update(now)
        return now

    async def has_tried_again() -> bool:
        return bool(await waiting()) and len(seen) >= 2

    def reset() -> asyncio.Task[object]:
        return asyncio.create_task(service.reset_offsets(name, "latest", actor="alice"))

    async with connected(effects) as other:
        async with other.transaction():
            await other.execute("SELECT FROM sidings.consumer_offset FOR UPDATE")
            with pytest.raises(PostgresUnavailable, match="a lock that is needed was not free, try again"):
                await asyncio.wait_for(reset(), SECONDS)
            cut = reset()
            for pid in await eventually(waiting):
                await other.fetchval("SELECT pg_terminate_backend($1)", pid)
            with pytest.raises(PostgresUnavailable, match="not known whether the reset has committed"):
                await asyncio.wait_for(cut, SECONDS)
            seen.clear()
            resetting = reset()
            await eventually(has_tried_again)
        assert await asyncio.wait_for(resetting, SECONDS) == [(0, 0, 0, 0)]


async def test_wrong_orders_are_refused_with_the_remedy(effects, topic, sidings_kafka):
    name = await topic(partitions=2)
    await produce(sidings_kafka, name, range(3))
    service = a_service(effects, sidings_kafka)
    for to, options, error, text in [
        ("newest", {}, ConfigurationError, "to='newest': give an offset"),
        (True, {}, ConfigurationError, "to=True: give an offset"),
        (datetime(2026, 5, 1), {}, ConfigurationError, "has no time zone"),  # noqa: DTZ001
        (1, {}, ConfigurationError, r"give partitions=\[n\]"),
        (1, {"partitions": []}, ConfigurationError, r"give partitions=\[n\]"),
        ("latest", {"partitions": []}, ConfigurationError, "give at least one"),
        ("latest", {"partitions": 0}, ConfigurationError, "partitions=0: give a list of numbers, or None for all"),
        ("latest", {"partitions": ["0"]}, ConfigurationError, "give a list of numbers"),
        ("latest", {"partitions": [0, 7]}, ConfigurationError, r"partitions=\[0, 7\] cannot be reset"),
        (4, {"partitions": [0]}, OffsetOutOfRange, "there is no offset 4: its log goes from 0 to 3"),
        (-1, {"partitions": [0]}, OffsetOutOfRange, "there is no offset -1"),
        ("latest", {"actor": ""}, ConfigurationError, "name the person or program"),
    ]:
        with pytest.raises(error, match=text):
            await service.reset_offsets(name, to, **{"actor": "alice"} | options)
    with pytest.raises(ConfigurationError, match="does not exist"):
        await service.reset_offsets(f"{name}-other", "latest", actor="alice")

    async def alone(message: Message[Number]) -> None: ...

    service.consumer(f"{name}-alone", stateless=True, dead_letter="dead")(alone)
    with pytest.raises(ConfigurationError, match="a stateless consumer, are in Kafka: reset the group there"):
        await service.reset_offsets(f"{name}-alone", "latest", actor="alice")
    with pytest.raises(ConfigurationError, match="needs postgres="):
        await a_service(None, sidings_kafka).reset_offsets(name, "latest", actor="alice")
    away = a_service(effects, "127.0.0.1:1", settings={"request_seconds": 2, "rebalance_seconds": 1})
    with pytest.raises(KafkaUnavailable):
        await away.reset_offsets(name, "latest", actor="alice")
    assert await stored_offsets(effects) == {}


async def test_a_reset_to_where_a_log_was_cut_off_spares_the_job_of_the_first_message_behind(database: str):
    """What stood from there on has been lost, so it is not delivered again."""
    jobs = [
        await a_job(database, type="'message:t'", origin="t/0", payload=f"""'{{"partition": 0, "offset": {offset}}}'""")
        for offset in range(4, 9)
    ]
    reset = "SELECT cancelled FROM sidings.reset_offsets('t', '{0}', '{5}', 'alice', 'why', cuts => '{7}')"
    assert await value(database, reset) == 2
    left = await fetch(database, "SELECT id FROM sidings.job ORDER BY id")
    assert [row["id"] for row in left] == [jobs[0], *jobs[3:]]


async def test_a_reset_cancels_what_its_partitions_deliver_again_and_nothing_else(database: str):
    """Wherever it waits, in whatever state; an old message tells neither its topic nor the id of that."""
    its_id, other_id = "00000000-0000-0000-0000-00000000000a", "00000000-0000-0000-0000-00000000000b"
    states = [("1000", "NULL", "NULL"), ("NULL", "now()", "NULL"), ("NULL", "NULL", "'a person'")]
    tos, cuts = {0: 5, 1: 7, 3: 0, 4: 0}, {1: 9}  # 3 has been another topic's, 4 is new
    expected: Counter[int] = Counter()
    spared: set[str] = set()
    rows: list[str] = []
    for origin, (position, run_at, held) in itertools.product(("t/0", "t/1", "t/2", "u/0"), states):
        for partition, offset, (name, id) in itertools.product(
            range(5), (4, 5, 6, 7, 8, 9), ((None, None), ("t", its_id), ("t", other_id), ("u", None))
        ):
            if origin == "t/2" and offset > tos.get(partition, 100):
                continue  # of each partition it is only the first that is delivered again
            told = {"partition": partition, "offset": offset}
            told |= {"topic": name} if name else {}
            told |= {"topic_id": id} if id else {}
            payload = json.dumps(told)
            type = "message:t" if offset != 8 or origin != "t/1" else "message:tt"
            rows.append(f"('{type}', '{origin}', {position}, {run_at}, {held}, '{payload}')")
            its_own = type == "message:t" and name != "u" and id != other_id and partition not in (2, 3)
            looked_at = origin in ("t/0", "t/1", "t/2")
            if its_own and looked_at and tos[partition] <= offset < cuts.get(partition, 100):
                expected[partition] += 1
            else:
                spared.add(f"{type} {origin} {position} {held} {payload}")
    async with connected(database) as connection:
        await connection.execute(
            f"""INSERT INTO sidings.topic (topic, partitions) VALUES ('t', 3);
                INSERT INTO sidings.consumer_offset (topic, partition, next_offset, topic_id, resets, leader_epoch)
                VALUES ('t', 0, 20, '{its_id}', 3, 1), ('t', 1, 20, NULL, 0, 1), ('t', 2, 20, '{its_id}', 0, 1),
                       ('t', 3, 20, '{other_id}', 0, 1), ('u', 0, 20, '{its_id}', 0, 1);
                INSERT INTO sidings.executor (id) VALUES ('{its_id}'), ('{other_id}');
                INSERT INTO sidings.origin (origin, owner, epoch, lease_until)
                VALUES ('t/0', '{its_id}', 7, 'infinity'), ('t/1', '{other_id}', 8, 'infinity');
                INSERT INTO sidings.job (type, origin, position, run_at, held, payload) VALUES {", ".join(rows)}"""
        )
        done = await connection.fetch(
            "SELECT * FROM sidings.reset_offsets('t', $1, $2, 'alice', 'why', $3, $4)",
            *(list(tos), list(tos.values()), its_id, [cuts.get(partition) for partition in tos]),
        )
        left = await connection.fetch("SELECT * FROM sidings.job")
        offsets = await connection.fetch("SELECT * FROM sidings.consumer_offset ORDER BY topic, partition")
        fences = [row["fence"] for row in await connection.fetch("SELECT fence FROM sidings.executor")]
    assert min(fences) > 0, "a holder that does not know of it might start what was cancelled"
    assert [tuple(row) for row in done] == [
        (partition, None if partition == 4 else 20, expected[partition]) for partition in tos
    ]
    assert {
        f"{r['type']} {r['origin']} {r['position'] or 'NULL'} "
        + (f"'{r['held']}'" if r["held"] else "NULL")
        + f" {r['payload']}"
        for r in left
    } == spared
    assert [(r["next_offset"], r["resets"], str(r["topic_id"]), r["leader_epoch"]) for r in offsets] == [
        (5, 4, its_id, None),
        (7, 1, its_id, None),
        (20, 0, its_id, 1),
        (0, 1, its_id, None),
        (0, 1, its_id, None),
        (20, 0, its_id, 1),
    ]


@pytest.mark.parametrize("how", ["discarded", "parked"])
async def test_a_message_that_came_again_is_not_requeued_as_well(effects, topic, sidings_kafka, how):
    """It took effect twice, the second time behind all that is newer of its key."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    mended = asyncio.Event()
    once = Retry(stop=stop_after_attempt(1))
    declared = {"isolate": True, "retry": once} if how == "discarded" else {"retry": TWICE_AND_PARK}

    @service.consumer(name, model=Number, **declared)
    async def pay(message: Message[Number], tx: Transaction) -> None:
        if not mended.is_set():
            raise ValueError("not yet")
        await record(message, tx)

    async def left(count: int) -> bool:
        return await jobs_left(effects) == count

    await produce(sidings_kafka, name, [1, 2], key="k")
    async with service, connected(effects) as connection:
        await eventually(offset_reaches(effects, name, 2))
        await eventually(lambda: left(0 if how == "discarded" else 2))
        if how == "discarded":
            mended.set()
        [done] = await service.reset_offsets(name, "earliest", actor="alice")
        assert done.cancelled == (0 if how == "discarded" else 2)
        mended.set()
        await eventually(lambda: numbers(effects, "number = 2"))
        await drained(effects)
        admin = Admin(connection, actor="bob")
        ended = [attempt.job_id for attempt in await admin.ended()]
        outcomes = ["discarded", "cancelled"]
        for attempt in await admin.requeueable(outcomes=outcomes):
            await admin.requeue(attempt.job_id)
        await drained(effects)
        assert await numbers(effects) == [1, 2]
        refused = rf"job {ended[0]} is a message that is delivered again: alice reset {name}/0 to offset 0 at .* force"
        with pytest.raises(ActionRefused, match=refused):
            await admin.requeue(ended[0])
        assert len(ended) == 2
        assert {attempt.job_id for attempt in await admin.requeueable(outcomes=outcomes, force=True)} == set(ended)
        await admin.requeue(ended[0], force=True)


async def test_of_each_message_that_has_ended_it_is_known_whether_it_is_delivered_again(database: str):
    """As a reset would have cancelled it, had it still been there; and not what a further one has passed over."""
    its_id, other_id = "00000000-0000-0000-0000-00000000000a", "00000000-0000-0000-0000-00000000000b"
    expected: set[int] = set()
    ended = itertools.count(1)

    async def end(*types: str) -> list[tuple[int, dict[str, Any]]]:
        """A row of the history for each type and message; returns their ids with the payloads."""
        rows: list[tuple[int, str, str]] = []
        for type, partition, offset, (name, id) in itertools.product(
            types, range(5), (4, 5, 6, 7, 8, 9), ((None, None), ("t", its_id), ("t", other_id), ("u\0", None))
        ):
            told = {"partition": partition, "offset": offset}
            told |= {"topic": name} if name else {}
            told |= {"topic_id": id} if id else {}
            rows.append((next(ended), type, json.dumps(told)))
        async with connected(database) as connection:
            await connection.executemany(
                """INSERT INTO sidings.job_history
                       (job_id, enqueued_at, finished_at, attempt, outcome, priority, type, origin, payload)
                   VALUES ($1, clock_timestamp(), clock_timestamp(), 1, 'discarded', 0, $2, 't/0', $3)""",
                rows,
            )
        return [(id, {"type": type, **json.loads(payload)}) for id, type, payload in rows]

    async def reset(partition: int, to: int, id: str | None, cut: int | None = None) -> None:
        arguments = [partition], [to], id, [cut]
        await fetch(database, "SELECT sidings.reset_offsets('t', $1, $2, 'alice', NULL, $3, $4)", *arguments)

    await fetch(
        database,
        f"""INSERT INTO sidings.consumer_offset (topic, partition, next_offset, topic_id)
            SELECT 't', n, 20, CASE n WHEN 2 THEN '{other_id}'::uuid ELSE '{its_id}' END
            FROM generate_series(0, 4) n""",
    )
    before = await end("message:t", "message:renamed", "ride")
    await reset(0, 5, its_id)
    await reset(1, 7, None, cut=9)
    await reset(2, 4, its_id)  # until now it was another topic's offset
    await reset(3, 4, its_id)
    await fetch(database, "UPDATE sidings.consumer_offset SET next_offset = 6 WHERE partition = 3")
    await reset(3, 20, its_id)  # it was a mistake
    reaches = {0: (5, 100), 1: (7, 9), 2: (0, 0), 3: (4, 6), 4: (0, 0)}
    for id, message in before:
        named = message.get("topic", message["type"].removeprefix("message:"))
        first, end_of = reaches[message["partition"]]
        another = message.get("topic_id") == other_id and message["partition"] != 1  # whose reset does not know its id
        if message["type"] != "ride" and named == "t" and not another and first <= message["offset"] < end_of:
            expected.add(id)
    await end("message:t")  # what came after the reset, as what it brought
    async with connected(database) as connection:
        admin = Admin(connection, actor="bob")
        found = {row.job_id for row in await admin.requeueable(limit=10_000)}
        assert set(range(1, next(ended))) - found == expected
        for id in range(1, max(found) + 1):
            if id in expected:
                with pytest.raises(ActionRefused, match="is a message that is delivered again: alice reset t/"):
                    await admin.requeue(id)
            else:
                await admin.requeue(id)

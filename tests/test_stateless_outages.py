"""Stateless consumers while processes and servers die, and the group rebalances: nothing lost, each key in order."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiokafka import TopicPartition
from prometheus_client import CollectorRegistry
from sidings import Job, KafkaSettings, Message, OutboxSettings, Retry, Service, Transaction, migrate
from sidings.devstack.binaries import postgres_program
from sidings.devstack.postgres import Postgres
from sidings.devstack.topics import create_topic
from sidings.kafka.outbox.senders import Sender
from tenacity import stop_after_attempt

from .consumer_support import Number, as_json, effects_table, numbers, produce, producing, record, sample
from .support import SECONDS, Ride, connected, eventually, fetch
from .test_stateless import a_service, committed, everything

WORKER = Path(__file__).with_name("stateless_worker.py")


async def spawn(directory: Path, *arguments: str) -> asyncio.subprocess.Process:
    with (directory / f"worker-{random.random()}.log").open("w") as log:
        return await asyncio.create_subprocess_exec(sys.executable, str(WORKER), *arguments, stdout=log, stderr=log)


def by_key(records: list[Any]) -> dict[bytes, list[int]]:
    """The numbers of each key, in the order in which they came first."""
    found: dict[bytes, dict[int, None]] = {}
    for one in records:
        found.setdefault(one.key, {}).setdefault(Number.model_validate_json(one.value).n)
    return {key: list(seen) for key, seen in found.items()}


async def test_nothing_is_lost_while_processes_are_killed(topic, sidings_kafka, tmp_path):
    """Two instances, killed in turns in the middle of their work: every message leaves a result or is a dead letter,
    and each key's results come in order."""
    name, results, dead = await topic(partitions=2), await topic("results"), await topic("dead")
    count = 600
    async with producing(sidings_kafka) as producer:
        for n in range(count):
            await producer.send(name, as_json(n), key=f"key-{n % 2}-{n % 7}".encode(), partition=n % 2)
    arguments = (sidings_kafka, name, results, dead)
    crew = [await spawn(tmp_path, *arguments) for _ in range(2)]

    async def done() -> set[int]:
        letters = [*await everything(sidings_kafka, results), *await everything(sidings_kafka, dead)]
        return {Number.model_validate_json(letter.value).n for letter in letters}

    async def more_than(least: int) -> bool:
        return len(await done()) > least

    try:
        for turn in range(3):
            least = min(len(await done()) + 30, count - 1)
            await eventually(lambda least=least: more_than(least), "the survivors go on")
            crew[turn % 2].kill()
            assert await asyncio.wait_for(crew[turn % 2].wait(), SECONDS) == -signal.SIGKILL
            crew[turn % 2] = await spawn(tmp_path, *arguments)
        await eventually(lambda: more_than(count - 1), "all are done")
        for process in crew:
            process.terminate()
            assert await asyncio.wait_for(process.wait(), SECONDS) in (0, -signal.SIGTERM)
    finally:
        for process in crew:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert await done() == set(range(count))
    assert {n % 50 for ns in by_key(await everything(sidings_kafka, dead)).values() for n in ns} == {0}
    for key, found in by_key(await everything(sidings_kafka, results)).items():
        assert found == sorted(found), key
    assert [await committed(sidings_kafka, name, partition) for partition in (0, 1)] == [300, 300]


async def test_a_rebalance_lets_no_key_run_in_two_places_and_loses_nothing(topic, sidings_kafka, caplog):
    """What does not end in time is cancelled before its partition is given up, and handled again by the next owner.
    Its cancellation ends nothing else: a client made anew would be the next rebalance."""
    name = await topic(partitions=4)
    at_work: list[bytes] = []
    overlaps: list[bytes] = []
    cancelled: list[int] = []
    done: dict[bytes, dict[int, None]] = {}

    def another() -> Any:
        service = a_service(sidings_kafka, session_seconds=3.0, rebalance_seconds=3.0)

        @service.consumer(name, stateless=True, concurrency=3, dead_letter="dead", timeout=None)
        async def handle(message: Message[Number]) -> None:
            key = message.key or b""
            if key in at_work:
                overlaps.append(key)
            at_work.append(key)
            try:
                if message.value.n < 4 and message.value.n not in cancelled:
                    await asyncio.Event().wait()  # until the rebalance cuts it off
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                cancelled.append(message.value.n)
                raise
            finally:
                at_work.remove(key)
            done.setdefault(key, {})[message.value.n] = None

        return service

    async with producing(sidings_kafka) as producer:
        for n in range(200):
            await producer.send(name, as_json(n), key=f"key-{n % 12}".encode(), partition=n % 4)
    async with another():
        await eventually(lambda: len(at_work) >= 4 and sum(map(len, done.values())) > 50)
        async with another() as second:
            await eventually(lambda: sum(map(len, done.values())) == 200, lambda: done)
            await eventually(lambda: len(second._life.consumer._stateless.partitions) == 2)
    assert set(cancelled) >= {0, 1, 2, 3}
    assert overlaps == []
    assert "the connection to Kafka failed" not in caplog.text
    assert all(list(found) == sorted(found) for found in done.values()), done
    assert [await committed(sidings_kafka, name, partition) for partition in range(4)] == [50, 50, 50, 50]


async def test_what_a_handler_raises_when_a_rebalance_cancels_it_is_no_failure(topic, sidings_kafka):
    name, dead = await topic(), await topic("dead")
    begun = asyncio.Event()
    done: list[int] = []

    def another() -> Any:
        service = a_service(sidings_kafka, session_seconds=3.0, rebalance_seconds=3.0)
        once = Retry(stop=stop_after_attempt(1))

        @service.consumer(name, stateless=True, retry=once, dead_letter=dead)
        async def handle(message: Message[Number]) -> None:
            if not begun.is_set():
                begun.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise ConnectionError("it could not be closed") from None
            done.append(message.value.n)

        return service

    await produce(sidings_kafka, name, [0])
    async with another():
        await asyncio.wait_for(begun.wait(), SECONDS)
        async with another():
            await eventually(lambda: done == [0])
    assert await everything(sidings_kafka, dead) == []


async def test_a_handler_that_ends_in_time_is_not_cancelled_by_a_rebalance(topic, sidings_kafka):
    name = await topic(partitions=2)
    begun, go_on = asyncio.Event(), asyncio.Event()
    seen: list[int] = []

    def another() -> Any:
        service = a_service(sidings_kafka, session_seconds=3.0)

        @service.consumer(name, stateless=True, dead_letter="dead")
        async def handle(message: Message[Number]) -> None:
            seen.append(message.value.n)
            begun.set()
            await go_on.wait()

        return service

    await produce(sidings_kafka, name, [0])
    async with another() as first:
        await asyncio.wait_for(begun.wait(), SECONDS)
        async with another() as second:
            await eventually(lambda: first._life.consumer.vitals.rebalancing_since is not None)
            go_on.set()
            await eventually(
                lambda: second._life.consumer.joined and first._life.consumer.vitals.rebalancing_since is None
            )
            await produce(sidings_kafka, name, [1])
            await eventually(lambda: len(seen) >= 2)
    assert seen == [0, 1]


@pytest.mark.chaos
async def test_it_survives_the_broker(own_kafka):
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "positions", partitions=1)
    service = a_service(kafka.bootstrap, session_seconds=3.0)
    done: dict[int, None] = {}

    @service.consumer("positions", stateless=True, concurrency=2, dead_letter="dead")
    async def handle(message: Message[Number]) -> None:
        done[message.value.n] = None

    async with service:
        await produce(kafka.bootstrap, "positions", range(10))
        await eventually(lambda: len(done) == 10)
        await asyncio.to_thread(kafka.kill)
        await asyncio.to_thread(kafka.start)
        await produce(kafka.bootstrap, "positions", range(10, 20))
        await eventually(lambda: list(done) == list(range(20)))
        await eventually(lambda: service.problems() == [])

        async def all_is_committed() -> bool:
            return await committed(kafka.bootstrap, "positions") == 20

        await eventually(all_is_committed)


async def test_it_goes_on_while_postgres_is_down_beside_a_consumer_that_waits_for_it(
    own_postgres, topic, sidings_kafka
):
    postgres = own_postgres()
    await migrate(postgres.dsn, service="test")
    await effects_table(postgres.dsn)
    await asyncio.to_thread(postgres.stop)  # it starts so, too
    stateless, ordinary = await topic("stateless", partitions=2), await topic("ordinary", partitions=2)
    kafka = KafkaSettings(bootstrap=sidings_kafka, fetch_seconds=0.05)
    registry = CollectorRegistry()
    service: Any = Service("test", postgres=postgres.dsn, kafka=kafka, prometheus=registry)
    service.samples = registry
    service.consumer(ordinary, model=Number)(record)
    done: list[int] = []

    @service.consumer(stateless, stateless=True, dead_letter="dead")
    async def handle(message: Message[Number]) -> None:
        done.append(message.value.n)

    async def stored(count: int) -> bool:
        return len(await numbers(postgres.dsn)) == count

    async with service:
        await produce(sidings_kafka, ordinary, range(3))
        await produce(sidings_kafka, stateless, range(3))
        await eventually(lambda: done == [0, 1, 2])
        await asyncio.to_thread(postgres.start)
        await eventually(lambda: stored(3), "the ordinary consumer begins")
        for disturb, restore, start in [(postgres.stop, postgres.start, 3), (postgres.pause, postgres.resume, 6)]:
            await asyncio.to_thread(disturb)
            await produce(sidings_kafka, ordinary, range(start, start + 3))
            await produce(sidings_kafka, stateless, range(start, start + 3))
            await eventually(lambda start=start: len(done) == start + 3)
            await asyncio.to_thread(restore)
            await eventually(lambda start=start: stored(start + 3), "the ordinary consumer goes on")
        assert sample(service, "sidings_consumer_messages_total", topic=stateless, result="handled") == 9
    assert done == list(range(9))


async def test_no_message_is_blamed_where_its_handler_finds_postgres_away(own_postgres, topic, sidings_kafka, caplog):
    postgres = own_postgres()
    await migrate(postgres.dsn, service="test")
    await effects_table(postgres.dsn)
    await asyncio.to_thread(postgres.stop)
    name, dead = await topic(), await topic("dead")
    kafka = KafkaSettings(bootstrap=sidings_kafka, fetch_seconds=0.05)
    registry = CollectorRegistry()
    service: Any = Service("test", postgres=postgres.dsn, kafka=kafka, prometheus=registry)
    service.samples = registry
    calls: list[int] = []

    @service.consumer(name, stateless=True, dead_letter=dead, retry=Retry(stop=stop_after_attempt(1)))
    async def handle(message: Message[Number]) -> None:
        calls.append(message.value.n)
        async with service.transaction() as tx:
            await record(message, tx)

    async def stored() -> bool:
        return await numbers(postgres.dsn) == [0, 1]

    async with service:
        await produce(sidings_kafka, name, range(2))
        await eventually(lambda: len(calls) > 2)
        await asyncio.to_thread(postgres.start)
        await eventually(stored)
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", topic=name, result="handled") == 2)
    assert await everything(sidings_kafka, dead) == []
    told = [line for line in caplog.messages if "found Postgres or Kafka away" in line]
    assert len(told) == 2, "at the beginning of the outage, and at its end"


def shortly_before_a_wraparound(server: Postgres) -> None:
    """Start it with hardly any transaction ids left, as after two thousand million transactions."""
    data, next_id = server.directory / "data", 2**31 - 1_000_000
    status = data / "pg_xact" / f"{next_id >> 20:04X}"
    server.stop()
    status.write_bytes(bytes(1 << 18))
    owner = data.stat()
    os.chown(status, owner.st_uid, owner.st_gid)
    command = [postgres_program("pg_resetwal"), "--next-transaction-id", str(next_id), str(data)]
    user = {"user": owner.st_uid, "group": owner.st_gid} if owner.st_uid != os.getuid() else {}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **user)
    server.start()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_no_message_is_blamed_where_postgres_has_no_transaction_ids_left(
    own_postgres, topic, sidings_kafka, monkeypatch
):
    """The whole topic was drained into the dead-letter topic. A row that is too long for an index has the same code,
    and is its message's own. The old prepared transaction keeps the server's vacuum from making ids free."""
    monkeypatch.setattr("sidings.kafka.stateless_handling._AWAY_SECONDS", 0.05)
    # It starts with a million pages to write, for all ids since the prepared transaction.
    monkeypatch.setattr("sidings.devstack.postgres.START_SECONDS", 200)
    postgres = own_postgres({"autovacuum": "on", "autovacuum_naptime": "1s"})
    await migrate(postgres.dsn, service="test")
    await effects_table(postgres.dsn)
    await fetch(postgres.dsn, "CREATE TABLE indexed (text text STORAGE EXTERNAL PRIMARY KEY)")
    async with connected(postgres.dsn) as connection:
        await connection.execute("BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'forgotten'")
    await asyncio.to_thread(shortly_before_a_wraparound, postgres)
    name, dead = await topic(), await topic("dead")
    kafka, registry = KafkaSettings(bootstrap=sidings_kafka, fetch_seconds=0.05), CollectorRegistry()
    service: Any = Service("test", postgres=postgres.dsn, kafka=kafka, prometheus=registry)
    calls: list[int] = []

    @service.consumer(name, stateless=True, dead_letter=dead, retry=Retry(stop=stop_after_attempt(1)))
    async def handle(message: Message[Number]) -> None:
        calls.append(message.value.n)
        async with service.transaction() as tx:
            try:
                await record(message, tx)
            except asyncpg.ProgramLimitExceededError:
                if len(calls) == 2:
                    await tx.execute("SELECT 'it has failed'")
                raise
            if message.value.n == 1:
                too_long = "SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) n"
                await tx.execute(f"INSERT INTO indexed {too_long}")

    async def stored() -> bool:
        return await numbers(postgres.dsn) == [0, 2]

    async with service:
        await produce(sidings_kafka, name, range(3))
        await eventually(lambda: len(calls) > 2)
        await fetch(postgres.dsn, "ROLLBACK PREPARED 'forgotten'")
        await eventually(stored)
    letters = await everything(sidings_kafka, dead)
    assert [Number.model_validate_json(letter.value).n for letter in letters] == [1]


async def test_no_message_is_blamed_where_its_handler_finds_kafka_away(topic, sidings_kafka, monkeypatch):
    """As where the topic of its results has too few replicas in sync, and that of the dead letters has not."""
    monkeypatch.setattr("sidings.kafka.stateless_handling._AWAY_SECONDS", 0.01)
    name, results, dead = await topic(), await topic("results"), await topic("dead")
    kafka, registry = KafkaSettings(bootstrap=sidings_kafka, fetch_seconds=0.05), CollectorRegistry()
    service: Any = Service("test", kafka=kafka, prometheus=registry, outbox=OutboxSettings(delivery_seconds=0.2))
    service.samples = registry
    calls, sent, away, take = Counter[int](), set[int](), True, Sender.append

    async def append(sender: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if not away or topic != results:
            return await take(sender, topic, **message)
        sender._refusals[TopicPartition(topic, message["partition"])] = "NotEnoughReplicasError"  # as its broker says
        return asyncio.Future()

    monkeypatch.setattr(Sender, "append", append)

    @service.consumer(name, stateless=True, dead_letter=dead, concurrency=2, retry=Retry(stop=stop_after_attempt(2)))
    async def handle(message: Message[Number]) -> None:
        calls[message.value.n] += 1
        await service.producer.send(results, key=message.key, value=message.value)
        if message.value.n not in sent:
            sent.add(message.value.n)
            raise ValueError("its first failure")

    async with service:
        await produce(sidings_kafka, name, range(2))
        await eventually(lambda: calls[0] > 3)
        assert sample(service, "sidings_consumer_stalled_seconds", topic=name) > 0
        assert sample(service, "sidings_consumer_failures_total", topic=name) == 0
        away = False
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", topic=name, result="handled") == 2)
        assert sample(service, "sidings_consumer_stalled_seconds", topic=name) == 0
    assert await everything(sidings_kafka, dead) == []


async def test_one_topic_is_consumed_stateless_and_is_the_home_of_jobs(database, topic, sidings_kafka):
    """One member of the group: messages and jobs of a partition are in one process."""
    name = await topic("transports", partitions=2)
    service: Any = Service(
        "test", postgres=database, kafka=KafkaSettings(bootstrap=sidings_kafka), prometheus=CollectorRegistry()
    )
    ran: list[str] = []
    origins: dict[str, str] = {}

    @service.job(group="transport", home=name)
    async def follow_up(job: Job[Ride]) -> None:
        ran.append(job.payload.transport)

    @service.job()
    async def beside(job: Job[Ride]) -> None:
        origins[job.payload.transport] = job.origin

    @service.consumer(name, stateless=True, dead_letter="dead")
    async def handle(message: Message[Number]) -> None:
        async with service.transaction() as tx:
            await follow_up.enqueue(tx, Ride(transport=f"g-{message.value.n}"))
            await beside.enqueue(tx, Ride(transport=f"g-{message.value.n}"))

    @service.consumer(await topic("other"))
    async def other(message: Message[Number], tx: Transaction) -> None: ...

    async with service:
        await eventually(lambda: len(service.executor.held) == 3)
        await produce(sidings_kafka, name, range(5), partition=1)
        await eventually(lambda: sorted(ran) == [f"g-{n}" for n in range(5)])
        await eventually(lambda: origins == {f"g-{n}": f"{name}/1" for n in range(5)}, lambda: origins)

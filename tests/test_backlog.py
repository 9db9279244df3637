"""Back-pressure: too many waiting jobs of an origin pause its partition, and no other."""

import asyncio
import logging

import pytest
from sidings import Admin, Job, Message, PostgresSettings, Transaction
from sidings.schema import load_sql

from .consumer_support import (
    Number,
    a_service,
    numbers,
    offset_reaches,
    produce,
    record,
    sample,
    stored_offsets,
)
from .support import Ride, connected, drained, eventually, fetch


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr("sidings.kafka.backlog._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("sidings.kafka.vitals._ENDS_SECONDS", 0.5)


LIMIT = 10
FREE = LIMIT + 1  # messages that the handler takes without looking: the jobs of all of them make the partition full


def a_service_with_jobs(dsn, kafka, name, *, limit: int | None = LIMIT, **executor):
    """One job for each message, which waits for `gate`. From message FREE on, the handler itself waits until its
    partition is full, or the gate open: so it stops there, or one further, if that was under way already."""
    settings = {"fetch_seconds": 0.05, "max_records": 1}
    service = a_service(dsn, kafka, settings=settings, executor={"concurrency": 2, **executor})
    gate = asyncio.Event()

    @service.job(group="transport")
    async def follow_up(job: Job[Ride]) -> None:
        await gate.wait()

    @service.consumer(name, max_waiting=limit)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n >= FREE and limit is not None:
            await eventually(lambda: full(service) == 1 or gate.is_set())
        await record(message, tx)
        await follow_up.enqueue(tx, Ride(transport=message.key_text or "", number=message.value.n))

    return service, gate


def full(service) -> float:
    return sample(service, "sidings_consumer_full_partitions")


async def test_too_many_waiting_jobs_pause_their_partition_until_half_of_them_are_gone(
    effects, topic, sidings_kafka, caplog
):
    name = await topic(partitions=2)
    service, gate = a_service_with_jobs(effects, sidings_kafka, name)
    caplog.set_level(logging.INFO, "sidings.consumer")
    await produce(sidings_kafka, name, range(40))
    async with service:
        await eventually(offset_reaches(effects, name, FREE))
        await eventually(lambda: sample(service, "sidings_consumer_waiting_jobs", partition="0") == 11)  # one more
        assert f"{name}/0: paused, since more than 10 jobs of it wait" in caplog.text
        await produce(sidings_kafka, name, range(5), partition=1, key="other")  # the other partition goes on
        await eventually(offset_reaches(effects, name, 5, 1))
        stored = await stored_offsets(effects)
        assert stored[name, 0] in (FREE, FREE + 1)
        assert stored[name, 1] == 5
        assert full(service) == 1
        assert service.problems() == []
        gate.set()
        await eventually(offset_reaches(effects, name, 40))
        await drained(effects)
        await eventually(lambda: full(service) == 0)
        await eventually(lambda: sample(service, "sidings_consumer_waiting_jobs") == 0)
    assert await numbers(effects, "partition = 0") == list(range(40))
    assert f"{name}/0: goes on" in caplog.text


async def test_it_goes_on_at_half_and_not_before(effects, topic, sidings_kafka):
    """The jobs are taken away by hand, so that the number that waits is known."""
    name = await topic()
    service, gate = a_service_with_jobs(effects, sidings_kafka, name)
    keep = "DELETE FROM sidings.job WHERE id NOT IN (SELECT id FROM sidings.job ORDER BY position LIMIT $1)"
    await produce(sidings_kafka, name, range(40))
    async with service, connected(effects) as connection:

        async def six_are_left() -> bool:  # that of the message that was under way comes later
            await connection.execute(keep, 6)
            return sample(service, "sidings_consumer_waiting_jobs") == 6

        await eventually(lambda: full(service) == 1)
        await eventually(six_are_left)
        assert full(service) == 1
        assert (await stored_offsets(effects))[name, 0] in (FREE, FREE + 1)
        await connection.execute(keep, 5)
        await eventually(lambda: full(service) == 0)
        gate.set()
        await eventually(offset_reaches(effects, name, 40))


async def test_an_executor_that_is_paused_pauses_the_partition_too(effects, topic, sidings_kafka):
    name = await topic()
    service, gate = a_service_with_jobs(effects, sidings_kafka, name)
    async with connected(effects) as connection:
        admin = Admin(connection, actor="alice")
        await admin.pause(type="follow_up", reason="the carrier is down")
        await produce(sidings_kafka, name, range(40))
        async with service:
            await eventually(offset_reaches(effects, name, FREE))
            await eventually(lambda: full(service) == 1)
            gate.set()
            await admin.resume(type="follow_up", reason="it is up")
            await eventually(offset_reaches(effects, name, 40))
            await drained(effects)
    assert await numbers(effects) == list(range(40))


async def test_a_full_partition_whose_jobs_cannot_be_counted_is_told_of(effects, topic, sidings_kafka, monkeypatch):
    """It goes on when half of them are gone, which nobody can know. Nothing was said of it but in the log; and the next
    count came after 19 times as long as this one had waited for its lock."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.5)
    monkeypatch.setattr("sidings.kafka.backlog._RETRY_SECONDS", 1.0)
    name = await topic()
    service, gate = a_service_with_jobs(effects, sidings_kafka, name)
    await produce(sidings_kafka, name, range(40))
    async with service, connected(effects) as connection:
        await eventually(lambda: full(service) == 1)
        async with connection.transaction():
            await connection.execute("LOCK TABLE sidings.job")
            told = f"{name}/0: paused, and the jobs that wait could not be counted: "
            await eventually(lambda: any(problem.startswith(told) for problem in service.problems()))
        gate.set()
        await eventually(offset_reaches(effects, name, 40))
        assert service.problems() == []


async def test_counts_that_take_longer_than_a_call_may_pause_partitions_all_the_same(
    effects, topic, sidings_kafka, monkeypatch
):
    """As of hundreds of thousands of jobs in each of many partitions on a slow disk. No partition was ever counted, so
    none was paused, and those that were full never went on."""

    def slowly(package: str, name: str, schema: str) -> str:
        sql = load_sql(package, name, schema)
        assert "count(w.position) AS waiting" in sql
        return sql.replace("count(w.position)", "count(w.position) + length(pg_sleep(0.3)::text)")  # of each origin

    monkeypatch.setattr("sidings.kafka.backlog.load_sql", slowly)
    monkeypatch.setattr("sidings.kafka.backlog._SHARE", 1)
    name = await topic(partitions=4)
    service, gate = a_service_with_jobs(PostgresSettings(dsn=effects, call_seconds=1.0), sidings_kafka, name)
    for partition in range(4):
        await produce(sidings_kafka, name, range(FREE), partition=partition, key=f"k{partition}")
    async with service:
        await eventually(lambda: full(service) == 4)
        gate.set()
        await eventually(lambda: full(service) == 0)
        for partition in range(4):
            await eventually(offset_reaches(effects, name, FREE, partition))


async def test_a_partition_that_can_never_be_counted_keeps_no_other_from_being(
    effects, topic, sidings_kafka, monkeypatch
):
    """Each look ended with it: those behind it were never counted, so none of them was paused, and none went on."""

    def slowly(package: str, name: str, schema: str) -> str:
        sql = load_sql(package, name, schema)
        assert "count(w.position) AS waiting" in sql
        slow = "o.origin LIKE '%/0' OR o.origin LIKE '%/1' AND NOT EXISTS (SELECT FROM quick)"
        never = f"length(pg_sleep(CASE WHEN {slow} THEN 60 ELSE 0 END)::text)"
        return sql.replace("count(w.position)", f"count(w.position) + {never}")

    monkeypatch.setattr("sidings.kafka.backlog.load_sql", slowly)
    monkeypatch.setattr("sidings.kafka.backlog._RETRY_SECONDS", 0.1)
    monkeypatch.setattr("sidings.executor.link._MOST_PATIENCE", 1)
    name = await topic(partitions=4)
    service, gate = a_service_with_jobs(PostgresSettings(dsn=effects, call_seconds=0.5), sidings_kafka, name)
    for partition in range(4):
        await produce(sidings_kafka, name, range(FREE), partition=partition, key=f"k{partition}")
    await fetch(effects, "CREATE TABLE quick (n int)")
    async with service:
        await eventually(lambda: full(service) == 2)
        await eventually(lambda: len(service._life.consumer._stored.backlog._last) == 2)
        await fetch(effects, "INSERT INTO quick VALUES (1)")
        await eventually(lambda: full(service) == 3)
        gate.set()
        await eventually(lambda: full(service) == 0)


async def test_a_full_partition_is_full_after_a_restart_and_after_a_reset(effects, topic, sidings_kafka):
    name = await topic()
    first, _ = a_service_with_jobs(effects, sidings_kafka, name, shutdown_seconds=0.1)
    await produce(sidings_kafka, name, range(40))
    async with first:
        await eventually(offset_reaches(effects, name, FREE))
    second, gate = a_service_with_jobs(effects, sidings_kafka, name)
    async with second:
        await eventually(lambda: full(second) == 1)
        await second.reset_offsets(name, 35, partitions=[0], actor="alice")
        await eventually(lambda: full(second) == 1)
        gate.set()
        await eventually(offset_reaches(effects, name, 40))
        await drained(effects)
    seen = await numbers(effects)
    assert seen[:FREE] == list(range(FREE))
    assert seen[-5:] == list(range(35, 40))
    assert len(seen) == len(set(seen)) < 40


async def test_who_has_no_limit_is_not_counted(effects, topic, sidings_kafka):
    name = await topic()
    service, gate = a_service_with_jobs(effects, sidings_kafka, name, limit=None)
    await produce(sidings_kafka, name, range(50))
    async with service:
        await eventually(offset_reaches(effects, name, 50))
        assert service._life.consumer._stored.backlog is None
        assert full(service) == 0
        gate.set()
        await drained(effects)


async def test_a_count_ends_at_the_limit_and_begins_at_the_first_job_of_the_last_look(database):
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.job (type, origin, payload) "
            "SELECT 'x', 't/' || n % 2, '{}' FROM generate_series(1, 100) n"
        )
        await connection.execute(
            "INSERT INTO sidings.job (type, origin, run_at, position) VALUES ('x', 't/2', now(), NULL)"
        )
        positions = [row[0] for row in await connection.fetch("SELECT position FROM sidings.job WHERE origin = 't/1'")]
        query = load_sql("sidings.kafka", "waiting_jobs", "sidings")
        rows = await connection.fetch(query, ["t/0", "t/1", "t/2"], [0, positions[40], 0], [11, 30, 5])
    found = {row["origin"]: (row["waiting"], row["first"]) for row in rows}
    assert found == {"t/0": (11, positions[0] + 1), "t/1": (10, positions[40]), "t/2": (0, None)}


async def test_what_comes_into_a_full_partition_counts_as_lag(effects, topic, sidings_kafka):
    """Its client asks for nothing of it, and so was not told how far it had grown: the lag stayed 0."""
    name = await topic()
    service, gate = a_service_with_jobs(effects, sidings_kafka, name)
    await produce(sidings_kafka, name, range(FREE))
    async with service:
        await eventually(lambda: full(service) == 1)
        await produce(sidings_kafka, name, range(FREE, FREE + 10))
        await eventually(lambda: sample(service, "sidings_consumer_lag") == 10)
        gate.set()
        await eventually(offset_reaches(effects, name, FREE + 10))
        await eventually(lambda: sample(service, "sidings_consumer_lag") == 0)

"""Handlers that use `service.transaction()`, while their own database is away, or `service.producer`, while Kafka is,
and what Postgres undoes because of another transaction: no attempt fails of that."""

import asyncio
import logging
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiokafka.errors import UnknownError
from sidings import KafkaUnavailable, Message, PostgresUnavailable, StaticAssignment, Transaction
from sidings.executor import PostgresSettings
from sidings.jobs import Job, Retry
from sidings.jobs.retry import CONFLICTS
from sidings.jobs.transaction import is_closed
from sidings.kafka import OutboxSettings
from sidings.kafka.outbox.senders import Sender
from sidings.testing import drain
from tenacity import (
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_exponential,
    wait_fixed,
    wait_none,
)

from .consumer_support import Number, a_service, impatient, numbers, offset_reaches, produce, record, sample
from .support import ORIGIN, SECONDS, Ride, connected, drained, enqueue, eventually, fetch, history, value

LEASE = "SELECT lease_until FROM sidings.origin"
ONCE = Retry(wait=wait_none(), stop=stop_after_attempt(1))  # what counts as a failure ends the job


def of_jobs(dsn: str, **postgres: Any) -> Any:
    return a_service(PostgresSettings(dsn=dsn, **postgres), assignment=StaticAssignment([ORIGIN]))


@pytest.mark.parametrize(
    "kind", ["raised", "returned", "judged", "batch", pytest.param("policy of others", marks=pytest.mark.chaos)]
)
async def test_a_server_that_gives_handlers_no_connection_fails_no_job(
    database: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The executor keeps its own connections meanwhile, as where the role's are used up. With its last attempt the job
    was discarded, and nobody had done anything wrong."""
    service, called = of_jobs(database, connect_seconds=1), list[int]()
    retry = {
        "judged": Retry(
            wait=wait_none(),
            stop=stop_after_attempt(1),
            retry=retry_if_result(lambda result: isinstance(result, Exception)),
        ),
        "policy of others": Retry(retry=retry_if_exception_type(TimeoutError)),
    }.get(kind, ONCE)

    async def ride(job: Job[Ride]) -> object:
        called.append(job.id)
        try:
            async with service.transaction() as tx:
                await tx.execute("SELECT 1")
        except PostgresUnavailable as error:
            if kind in ("returned", "judged"):
                return error
            raise
        return None

    async def rides(jobs: list[Job[Ride]]) -> list[object]:
        return await asyncio.gather(*map(ride, jobs), return_exceptions=True)

    options: dict[str, Any] = {"batch": 10} if kind == "batch" else {}
    handler: Any = rides if kind == "batch" else ride
    job_type = service.job(name="ride", payload=Ride, retry=retry, **options)(handler)
    name, elsewhere = urlsplit(database).path.strip("/"), urlsplit(database)._replace(path="/postgres").geturl()
    async with service, connected(database) as inside, connected(elsewhere) as admin:
        await eventually(lambda: not service.problems())
        await enqueue(database, job_type, [Ride()])
        await drained(database)
        until = await value(database, LEASE)

        async def renewed() -> bool:
            return await value(database, LEASE) != until

        await eventually(renewed)  # by now the executor has its own connections
        await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            await inside.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'sidings handlers'"
            )
            async with inside.transaction():
                id = await job_type.enqueue(inside, Ride(), origin=ORIGIN)
            await eventually(lambda: called.count(id) >= 4)  # more often than a connection may break under it
        finally:
            await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
        await drained(database)
        assert sample(service, "sidings_jobs_total", outcome="snoozed") == called.count(id) - 1
    rows = await history(database, "job_id, attempt, outcome, error_class")
    assert [row["outcome"] for row in rows if row["job_id"] == id] == ["snoozed"] * (len(rows) - 2) + ["succeeded"]
    assert {row["error_class"] for row in rows if row["outcome"] == "snoozed"} == {"sidings.errors.PostgresUnavailable"}
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and f"job {id}" in r.getMessage()]
    assert "attempt 1 met an outage, no failure, again in " in told[0]


@pytest.mark.parametrize("transactional", [False, True])  # as parked messages are
async def test_the_waits_of_an_outage_are_the_policys_and_grow(database: str, transactional: bool) -> None:
    """Whom the handler calls before it comes to its transaction may be well, and is called again each time."""
    service, holding, over = of_jobs(database, pool_size=1), asyncio.Event(), asyncio.Event()

    @service.job(retry=Retry(wait=wait_exponential(multiplier=2, max=9), stop=ONCE.stop), transactional=transactional)
    async def ride(job: Job[Ride]) -> None:
        if job.attempt == 5:
            over.set()
            await holder
        async with service.transaction() as tx:
            await tx.execute("SELECT 1")

    async def hold() -> None:
        async with service.transaction():
            holding.set()
            await over.wait()

    await enqueue(database, ride, [Ride()])
    async with service.connected():
        holder = asyncio.create_task(hold())
        await asyncio.wait_for(holding.wait(), SECONDS)
        with impatient(service._parts.database.transactions):
            attempts = await drain(service, until=100)
    assert [(a.outcome, a.delay) for a in attempts] == [
        *(("snoozed", delay) for delay in (2.0, 4.0, 8.0, 9.0)),
        ("succeeded", None),
    ]
    assert attempts[0].error is not None
    assert attempts[0].error.message == "no connection to Postgres: all 1 connections are in use; see pool_size"


@pytest.mark.parametrize("cut", ["its connection is lost", "the server takes no writes"])
async def test_a_transactional_job_whose_own_transaction_is_cut_short_runs_again_after_a_second(
    database: str, cut: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = of_jobs(database)

    @service.job(retry=Retry(wait=wait_fixed(60)), transactional=True)
    async def ride(job: Job[Ride]) -> None:
        if job.attempt > 2:
            return
        if cut == "the server takes no writes":
            await job.tx.execute("DO $$ BEGIN RAISE SQLSTATE '53100'; END $$")  # its disk is full
        else:
            await fetch(database, f"SELECT pg_terminate_backend({await job.tx.fetchval('SELECT pg_backend_pid()')})")
        await job.tx.execute("CREATE TABLE effect ()")

    await enqueue(database, ride, [Ride()])
    async with service.connected():
        attempts = await drain(service, until=100)
    assert [(a.outcome, a.delay) for a in attempts] == [("snoozed", 1.0), ("snoozed", 1.0), ("succeeded", None)]
    told = "was lost" if cut == "its connection is lost" else "runs again: Postgres takes no writes"
    assert [r.levelname for r in caplog.records if told in r.getMessage()] == ["WARNING"] * 2


@pytest.mark.parametrize("asked", [True, False], ids=["by a statement", "by the commit"])
@pytest.mark.parametrize("always", [False, True], ids=["once", "each time"])
async def test_a_connection_that_breaks_under_a_handler_is_no_failure_unless_it_does_so_each_time(
    database: str, asked: bool, always: bool
) -> None:
    """As for a transactional handler: the third one is its own, which may hold a transaction for too long."""
    service = of_jobs(database)

    @service.job(retry=Retry(wait=wait_fixed(5), stop=stop_after_attempt(1)))
    async def ride(job: Job[Ride]) -> None:
        async with service.transaction() as tx:
            if always or job.attempt < 3:
                await fetch(database, f"SELECT pg_terminate_backend({await tx.fetchval('SELECT pg_backend_pid()')})")
                await eventually(lambda: is_closed(tx.connection))
                if asked:
                    await tx.fetchval("SELECT 1")

    await enqueue(database, ride, [Ride()])
    attempts = await drain(service, until=100)
    assert [a.outcome for a in attempts] == ["snoozed", "snoozed", "discarded" if always else "succeeded"]


@pytest.mark.parametrize("server", [True, False], ids=["the server's", "its own"])
async def test_a_server_that_takes_no_writes_is_waited_for_but_no_transaction_that_may_not_write(
    database: str, server: bool
) -> None:
    service, name = of_jobs(database), urlsplit(database).path.strip("/")
    await fetch(database, "CREATE TABLE effect ()")

    @service.job(retry=Retry(wait=wait_fixed(5), stop=stop_after_attempt(1)))
    async def ride(job: Job[Ride]) -> None:
        if server and job.attempt == 5:
            async with connected(database, default_transaction_read_only="off") as other:
                await other.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
        async with service.transaction() as tx:
            if not server:
                await tx.execute("SET TRANSACTION READ ONLY")
            await tx.execute("INSERT INTO effect DEFAULT VALUES")

    await enqueue(database, ride, [Ride()])
    async with service.connected():
        if server:
            await fetch(database, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        dsn = f"{database}?default_transaction_read_only=off"  # what records the attempts has to write
        attempts = await drain(dsn, service.registry, until=100)
    assert [a.outcome for a in attempts] == (
        ["snoozed"] * 4 + ["succeeded"] if server else ["snoozed"] * 2 + ["discarded"]
    )


async def test_an_error_that_was_made_of_an_outage_is_a_failure(database: str) -> None:
    """What a handler says counts: it has decided so."""
    service = of_jobs(database)

    @service.job(retry=ONCE)
    async def ride(job: Job[Ride]) -> None:
        raise ValueError("no") from PostgresUnavailable("away")

    await enqueue(database, ride, [Ride()])
    assert [a.outcome for a in await drain(service)] == ["discarded"]


async def test_a_handler_that_waits_for_what_it_has_itself_is_told_so_and_fails(database: str) -> None:
    """No server will ever help it: a block within a block needs two of the places."""
    service = of_jobs(database, pool_size=1)

    @service.job(retry=Retry(wait=wait_fixed(5), stop=stop_after_attempt(1)))
    async def ride(job: Job[Ride]) -> None:
        async with service.transaction():
            with impatient(service._parts.database.transactions):
                async with service.transaction():
                    pass

    await enqueue(database, ride, [Ride()])
    attempts = await drain(service, until=100)
    assert [a.outcome for a in attempts] == ["snoozed", "snoozed", "discarded"]
    assert attempts[0].error is not None
    assert attempts[0].error.message == (
        "no connection to Postgres: all 1 connections are in use, one by the block that this one is in; see pool_size"
    )


async def test_a_message_whose_handler_gets_no_other_connection_has_not_failed(
    effects: Any, topic: Any, sidings_kafka: str
) -> None:
    """Requests that hold all of the pool had messages parked that nothing was wrong with. Other partitions go on."""
    name = await topic(partitions=2)
    service = a_service(PostgresSettings(dsn=effects, pool_size=1), sidings_kafka)
    tried, over, holding = list[int](), asyncio.Event(), asyncio.Event()

    @service.consumer(name, retry=ONCE)
    async def on_number(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.partition)
        await record(message, tx)
        if message.partition == 0:
            async with service.transaction() as other:
                await other.fetchval("SELECT 1")

    async def hold() -> None:
        async with service.transaction():
            holding.set()
            await over.wait()

    async with service:
        await eventually(lambda: not service.problems())
        holder = asyncio.create_task(hold())
        await asyncio.wait_for(holding.wait(), SECONDS)
        with impatient(service._parts.database.transactions):
            await produce(sidings_kafka, name, [1], partition=0)
            await eventually(lambda: tried.count(0) >= 4)
            await produce(sidings_kafka, name, [2], partition=1)
            await eventually(offset_reaches(effects, name, 1, 1))
        over.set()
        await holder
        await eventually(offset_reaches(effects, name, 1, 0))
        assert sample(service, "sidings_consumer_failures_total") == 0
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 0
        assert sample(service, "sidings_consumer_errors_total", server="postgres") >= 2
    assert sorted(await numbers(effects)) == [1, 2]


@pytest.mark.parametrize("kind", ["raised", "returned", "batch", "transactional"])
async def test_a_kafka_that_does_not_answer_fails_no_job(database: str, kind: str) -> None:
    """With its last attempt the job was discarded, through an outage of the service's own Kafka."""
    service = of_jobs(database)

    async def ride(job: Job[Ride]) -> object:
        error = KafkaUnavailable("no broker answers", blameless=True)
        if job.attempt < 5 and kind != "returned":
            raise error
        return error if job.attempt < 5 else None

    async def rides(jobs: list[Job[Ride]]) -> list[object]:
        return await asyncio.gather(*map(ride, jobs), return_exceptions=True)

    retry = Retry(wait=wait_exponential(multiplier=2, max=9), stop=stop_after_attempt(1))
    options: dict[str, Any] = {"batch": {"batch": 10}, "transactional": {"transactional": True}}.get(kind, {})
    handler: Any = rides if kind == "batch" else ride
    await enqueue(database, service.job(name="ride", payload=Ride, retry=retry, **options)(handler), [Ride()])
    attempts = await drain(service, until=100)
    assert [(a.outcome, a.delay) for a in attempts] == [
        *(("snoozed", delay) for delay in (2.0, 4.0, 8.0, 9.0)),
        ("succeeded", None),
    ]


async def test_nor_does_a_message_whose_handler_sends_something(effects: str, topic: Any, sidings_kafka: str) -> None:
    """Message after message was parked, with all that followed of its key. Other partitions go on."""
    name = await topic(partitions=2)
    service, tried, away = a_service(effects, sidings_kafka), list[int](), [True]

    @service.consumer(name, retry=ONCE)
    async def on_number(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.partition)
        await record(message, tx)
        if message.partition == 0 and away:
            raise KafkaUnavailable("no broker answers", blameless=True)

    async with service:
        await produce(sidings_kafka, name, [1], partition=0)
        await eventually(lambda: tried.count(0) >= 4)
        await produce(sidings_kafka, name, [2], partition=1)
        await eventually(offset_reaches(effects, name, 1, 1))
        away.clear()
        await eventually(offset_reaches(effects, name, 1, 0))
        assert sample(service, "sidings_consumer_failures_total") == 0
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 0
        assert sample(service, "sidings_consumer_errors_total", server="kafka") >= 2
    assert sorted(await numbers(effects)) == [1, 2]


async def test_a_job_that_sends_more_than_comes_through_is_given_up(
    database: str, topic: Any, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sent the same again and again, for ever, with a Kafka in perfect health: its policy was not asked."""
    etas, append, sent = await topic(), Sender.append, list[bytes]()
    settings = OutboxSettings(delivery_seconds=0.5, routes={etas: "direct"})
    service = a_service(PostgresSettings(dsn=database), sidings_kafka, outbox=settings)

    async def late(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if message["key"] != b"large":
            return await append(self, topic, **message)
        sent.append(message["value"])
        return asyncio.get_running_loop().create_future()

    @service.job(retry=ONCE)
    async def ride(job: Job[Ride]) -> None:
        await service.outbox.publish_many(None, etas, [("small", b"x"), ("large", b"x")])

    monkeypatch.setattr(Sender, "append", late)
    await enqueue(database, ride, [Ride()])
    try:
        attempts = await drain(service, until=100, limit=10)
    finally:
        await service.producer.stop()
    assert [a.outcome for a in attempts] == ["snoozed", "snoozed", "discarded"]
    assert len(sent) == 3


@pytest.mark.parametrize("stateless", [False, True])
async def test_a_message_whose_handler_sends_more_than_comes_through_is_given_up(
    effects: str, topic: Any, sidings_kafka: str, stateless: bool
) -> None:
    """It sent the same again each second, for ever. The first call of a stored message, in its batch, counts for
    nothing; then Kafka is late twice."""
    name, dead, tried = await topic(), await topic(), list[int]()
    service = a_service(effects, sidings_kafka)

    async def send(message: Message[Number]) -> None:
        tried.append(message.value.n)
        if message.value.n == 0:
            raise KafkaUnavailable("Kafka did not acknowledge in time")

    async def stored(message: Message[Number], tx: Transaction) -> None:
        await send(message)

    if stateless:
        service.consumer(name, stateless=True, dead_letter=dead, retry=ONCE)(send)
    else:
        service.consumer(name, retry=ONCE)(stored)
    async with service:
        await produce(sidings_kafka, name, [0], key="a")
        given_up = "dead_letter" if stateless else "parked"
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result=given_up) == 1)
        assert sample(service, "sidings_consumer_failures_total") == 1
        assert sample(service, "sidings_consumer_errors_total", server="kafka") == 2
        calls = tried.count(0)
        await produce(sidings_kafka, name, [1], key="b")
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 1)
    assert calls in ((3,) if stateless else (4, 5)), "and once as a job"


@pytest.mark.parametrize("stateless", [False, True])
async def test_what_kafka_refuses_for_good_is_a_failure_of_the_message_that_sends_it(
    effects: str, topic: Any, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch, stateless: bool
) -> None:
    """For a reason that its client has no name for: the message was tried each second, and its partition waited."""
    name, dead, out, append = await topic(), await topic(), await topic(), Sender.append
    service = a_service(effects, sidings_kafka)

    async def refused(self: Sender, topic: str, **message: Any) -> "asyncio.Future[object]":
        if message["key"] != b"bad":
            return await append(self, topic, **message)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        answer.set_exception(UnknownError())
        return answer

    async def on_number(message: Message[Number]) -> None:
        await service.producer.send(out, key="bad" if message.value.n == 0 else "good", value=b"x")

    async def stored(message: Message[Number], tx: Transaction) -> None:
        await on_number(message)

    monkeypatch.setattr(Sender, "append", refused)
    if stateless:
        service.consumer(name, stateless=True, dead_letter=dead, retry=ONCE)(on_number)
    else:
        service.consumer(name, retry=ONCE)(stored)
    async with service:
        await produce(sidings_kafka, name, [0], key="a")
        await produce(sidings_kafka, name, [1], key="b")
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 2)
        given_up = "dead_letter" if stateless else "parked"
        assert sample(service, "sidings_consumer_messages_total", result=given_up) == 1
        assert sample(service, "sidings_consumer_failures_total") == 1
        assert sample(service, "sidings_consumer_errors_total", server="kafka") == 0


async def serializable(dsn: str) -> None:
    name = urlsplit(dsn).path.strip("/")
    await fetch(dsn, f'ALTER DATABASE "{name}" SET default_transaction_isolation = serializable')


class Skew:
    """What two transactions at once cannot do at SERIALIZABLE: each adds what the other has counted. at: where Postgres
    tells one of them, at the earliest."""

    def __init__(self, at: str) -> None:
        self._calls = 0
        self._at = at
        self._both = asyncio.Barrier(2)

    async def __call__(self, tx: Transaction, number: int) -> None:
        self._calls += 1
        first = self._calls <= 2
        assert await tx.fetchval("SHOW transaction_isolation") == "serializable"
        count = await tx.fetchval("SELECT count(*) FROM effect")
        if first and self._at == "statement":
            await self._both.wait()
        await tx.execute("INSERT INTO effect (number, key) VALUES ($1, $2)", number, str(count))
        if first and self._at == "commit":
            await self._both.wait()


@pytest.mark.parametrize("at", ["statement", "commit"])
@pytest.mark.parametrize("transactional", [True, False])
async def test_jobs_that_are_in_conflict_at_a_stricter_isolation_level_have_not_failed(
    effects: str, transactional: bool, at: str
) -> None:
    """Postgres undoes one of the two, as its normal business there: an attempt was used up, and the job discarded."""
    await serializable(effects)
    service, count = of_jobs(effects), Skew(at)

    @service.job(payload=Ride, retry=ONCE, transactional=transactional)
    async def ride(job: Job[Ride]) -> None:
        if transactional:
            await count(job.tx, job.payload.number)
        else:
            async with service.transaction() as tx:
                await count(tx, job.payload.number)

    async with service:
        await enqueue(effects, ride, [Ride(number=1), Ride(number=2)])
        await drained(effects)
    rows = await history(effects, "outcome, error_class")
    assert [row["outcome"] for row in rows if row["outcome"] != "snoozed"] == ["succeeded"] * 2
    assert {row["error_class"] for row in rows} == {None, "asyncpg.exceptions.SerializationError"}
    assert {(row["number"], row["key"]) for row in await fetch(effects, "SELECT number, key FROM effect")} in (
        {(1, "0"), (2, "1")},
        {(2, "0"), (1, "1")},
    )


@pytest.mark.parametrize("kind", CONFLICTS)
@pytest.mark.parametrize("returned", [False, True])
async def test_a_job_that_is_in_conflict_for_ever_fails_now_and_then(
    database: str, returned: bool, kind: type[Exception]
) -> None:
    """As where the handler raises by itself what Postgres raises of a conflict: its policy could not end it."""
    service = of_jobs(database)
    judging = retry_if_exception_type() | retry_if_result(lambda result: isinstance(result, Exception))

    @service.job(retry=Retry(wait=wait_none(), stop=stop_after_attempt(2), retry=judging))
    async def ride(job: Job[Ride]) -> object:
        error = kind("could not serialize access")
        if returned:
            return error
        raise error

    await enqueue(database, ride, [Ride()])
    attempts = await drain(service, until=100)
    assert [a.outcome for a in attempts] == [*["snoozed"] * 10, "retried", *["snoozed"] * 10, "discarded"]
    assert all(0 < (a.delay or 0) <= 2 for a in attempts if a.outcome == "snoozed")


ALTERED = {  # asyncpg's error, what a handler asks, and what somebody does then
    "InvalidCachedStatementError": ("SELECT * FROM effect", "ALTER TABLE effect ADD COLUMN b int"),
    "OutdatedSchemaCacheError": ("SELECT place FROM stop", "ALTER TYPE place ADD ATTRIBUTE z int"),
}


@pytest.mark.parametrize("error", ALTERED)
@pytest.mark.parametrize("transactional", [True, False])
async def test_a_table_that_is_altered_under_a_prepared_statement_fails_no_job(
    effects: str, transactional: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a migration of the service's own, while it runs. The policy was asked, and the job discarded."""
    monkeypatch.setattr("sidings.executor.spare._KEEP_SECONDS", SECONDS)  # of the connection that has prepared it
    query, altering = ALTERED[error]
    service = of_jobs(effects)

    @service.job(payload=Ride, retry=ONCE, transactional=transactional)
    async def ride(job: Job[Ride]) -> None:
        if transactional:
            await job.tx.fetch(query)
        else:
            async with service.transaction() as tx:
                await tx.fetch(query)

    async with service, connected(effects) as connection:
        await connection.execute(
            "CREATE TYPE place AS (x int, y int); CREATE TABLE stop (place place); INSERT INTO stop VALUES ((1, 2))"
        )
        await enqueue(effects, ride, [Ride()])
        await drained(effects)
        await connection.execute(f"{altering}; UPDATE stop SET place.y = 3")
        await enqueue(effects, ride, [Ride()])
        await drained(effects)
    rows = await history(effects, "outcome, error_class")
    assert [row["outcome"] for row in rows] == ["succeeded", "snoozed", "succeeded"]
    assert rows[1]["error_class"].endswith(error)


@pytest.mark.parametrize("at", ["statement", "commit"])
async def test_messages_that_are_in_conflict_at_a_stricter_isolation_level_have_not_failed(
    effects: str, topic: Any, sidings_kafka: str, at: str
) -> None:
    """With those of another topic, whose transaction commits first: a sound message was parked after as many attempts
    as its policy has."""
    await serializable(effects)
    service, tried = a_service(effects, sidings_kafka), list[int]()
    rides, etas = await topic("rides"), await topic("etas")

    @service.consumer(etas)
    async def on_eta(message: Message[Number], tx: Transaction) -> None:
        await tx.fetchval("SELECT count(*) FROM effect")
        await record(message, tx)

    @service.consumer(rides, retry=ONCE)
    async def on_ride(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.offset)
        await tx.fetchval("SELECT count(*) FROM effect")
        if at == "commit":
            await record(message, tx)
        if len(tried) < 4:
            await produce(sidings_kafka, etas, [len(tried)])
            await eventually(offset_reaches(effects, etas, len(tried)))
        if at == "statement":
            await record(message, tx)

    await produce(sidings_kafka, rides, [4])
    async with service:
        await eventually(offset_reaches(effects, rides, 1))
        assert sample(service, "sidings_consumer_failures_total") == 0
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 0
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 4)
    assert len(tried) == 4
    assert await numbers(effects) == [1, 2, 3, 4]


async def test_a_message_that_is_in_conflict_for_ever_fails_now_and_then(
    effects: str, topic: Any, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidings.kafka.siding.after_conflict", lambda conflicts: conflicts / 1_000)
    name, tried = await topic(), list[int]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=Retry(wait=wait_none(), stop=stop_after_attempt(2)))
    async def on_number(message: Message[Number], tx: Transaction) -> None:
        if not tried or tried[-1] < 23:  # one in the main line, and twice ten that do not count and one that does
            tried.append(len(tried) + 1)
            raise CONFLICTS[len(tried) % len(CONFLICTS)]("could not serialize access")

    await produce(sidings_kafka, name, [1])
    async with service:
        await eventually(offset_reaches(effects, name, 1))
        assert sample(service, "sidings_consumer_failures_total") == 2
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 1)
        await drained(effects)
    assert len(tried) == 23

"""Consumers where Postgres is away, or slow, beside their main line: that ends none of them, and loses nothing."""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError, OffsetOutOfRangeError
from sidings import Message, PostgresSettings, PostgresUnavailable, Retry, Transaction
from sidings.jobs.transaction import is_closed
from sidings.kafka.fetch_loop import FetchLoop
from sidings.kafka.lag import LagCommitter
from sidings.kafka.membership import AnyOf, Contact
from sidings.kafka.offsets import Move, OffsetsMoved
from sidings.kafka.partition import Item, Partition, State
from sidings.kafka.patience import Patience
from sidings.kafka.seen import SeenUpkeep
from sidings.kafka.vitals import Vitals
from tenacity import RetryCallState, stop_after_attempt, wait_fixed, wait_none

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    limit_statements,
    numbers,
    offset_reaches,
    produce,
    record,
    sample,
)
from .support import SECONDS, connected, eventually

TP = TopicPartition("positions", 0)


@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_a_handler_that_cancels_its_own_task_and_awaits_nothing_more_has_failed(
    effects, topic, sidings_kafka, how
):
    """All consumers of the service began anew with another client, again and again: with that message, too. With early
    Pythons 3.11 they did once more at the next time limit of a task whose handler had done so."""
    name, tried, left_over = await topic(), list[int](), list[int]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        task = asyncio.current_task()
        assert task is not None
        tried.append(message.value.n)
        left_over.append(task.cancelling())
        if message.value.n == 0 and len(tried) < 6:
            task.cancel()
            if how == "raises":
                raise ValueError

    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") or len(tried) > 5)
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 1
        assert sample(service, "sidings_consumer_errors_total", server="kafka") == 0, "its client was given up"
    assert not any(left_over)


@pytest.mark.parametrize("what", ["a stop", "a rebalance"])
async def test_messages_that_stand_aside_are_not_tried_again_once_a_stop_or_a_rebalance_has_begun(
    effects, topic, sidings_kafka, caplog, what
):
    """Of many some was always under way, so that both waited for as long as they may."""
    name, resting = await topic(partitions=12), asyncio.Event()
    tries, late = Counter[int](), Counter[int]()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": name})

    @service.consumer(name, retry=Retry(wait=wait_fixed(0.05)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        tries[message.value.n] += 1
        late[message.value.n] += resting.is_set()
        await asyncio.sleep(0.2)
        raise ValueError("no")

    for partition in range(12):
        await produce(sidings_kafka, name, [partition], partition=partition)
    async with service:
        consumer = service._life.consumer
        stands_aside = [State.ASIDE] * 12
        await eventually(lambda: [partition.state for partition in consumer._partitions()] == stands_aside)
        await eventually(lambda: len(tries) == 12 and min(tries.values()) > 2)
        if what == "a rebalance":
            revoked, quiet = consumer.on_partitions_revoked, list[bool]()

            async def on_partitions_revoked(partitions):
                consumer.vitals.rebalance_begins()  # as it does itself, at once
                resting.set()
                await revoked(partitions)
                quiet.append(not consumer._in_flight())
                resting.clear()

            consumer.on_partitions_revoked = on_partitions_revoked
            consumer._client._coordinator.request_rejoin()  # as when a member comes or goes
            await eventually(lambda: quiet)
            assert quiet == [True], "it waited in vain"
            assert max(late.values()) <= 1, "but for attempts that had begun, and waited for their transaction"
            late.clear()
            before = sum(tries.values())
            await eventually(lambda: sum(tries.values()) > before + 12, "they are tried again")
        consumer._stopping.set()  # as it does itself, at once
        resting.set()
    assert "were still under way" not in caplog.text
    assert max(late.values(), default=0) <= 1


async def test_a_connection_that_breaks_under_a_message_that_stands_aside_ends_nothing(effects, topic, sidings_kafka):
    name, tried = await topic(), list[int]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.value.n)
        if message.value.n == 0 and len(tried) == 1:
            raise ValueError("it fails in the main line")
        await record(message, tx)
        if message.value.n == 0 and len(tried) == 2:
            try:
                await tx.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            finally:
                await eventually(lambda: is_closed(tx.connection))

    async with service:
        await produce(sidings_kafka, name, [0, 1])
        await eventually(offset_reaches(effects, name, 2))
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 0
        assert sample(service, "sidings_consumer_errors_total", server="kafka") == 0, "its client was given up"
        assert sample(service, "sidings_consumer_errors_total", server="postgres") == 1
        assert sample(service, "sidings_consumer_failures_total") == 0, "it is none of the message's"
    assert await numbers(effects) == [0, 1]


async def test_a_handler_under_which_the_connection_is_closed_each_time_is_the_cause(effects, topic, sidings_kafka):
    """Also where it says nothing of it. All of its topic was handled again and again, and "the connection to Postgres
    broke" was all that was told."""
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        if message.value.n == 1:
            await tx.connection.close()

    await produce(sidings_kafka, name, range(3), key=None)
    await produce(sidings_kafka, name, [3, 4], key=None, partition=1)
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        await eventually(offset_reaches(effects, name, 2, partition=1))
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 1
    assert sorted(await numbers(effects)) == [0, 2, 3, 4]


async def test_health_does_not_tell_of_a_message_that_the_main_line_has_handled_since(
    effects, topic, sidings_kafka, monkeypatch
):
    """It stood aside when its connection broke. That nobody got further was told for a minute, when all was done."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.0)
    name, tried = await topic(), list[int]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.value.n)
        if len(tried) == 1:
            raise ValueError("it fails in the main line")
        await record(message, tx)
        if len(tried) == 2:
            await tx.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    async with service:
        await produce(sidings_kafka, name, [0])
        await eventually(offset_reaches(effects, name, 1))
        assert len(tried) == 3
        await eventually(lambda: service.problems() == [], service.problems, seconds=5.0)


async def take_no_writes(dsn: str) -> None:
    """What the handlers' next sessions find; that is how a server is kept from filling its disk."""
    async with connected(dsn) as connection:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'sidings handlers'"
        )


async def take_writes(dsn: str) -> None:
    async with connected(dsn, default_transaction_read_only="off") as connection:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')


async def test_a_server_that_takes_no_writes_is_no_messages_fault(effects, topic, sidings_kafka, caplog):
    """The consumer waits, as where Postgres is away, however its handler tells of it. Two tries were forgiven, and the
    third was the message's: it was parked if Postgres took writes again just then."""
    name, tried = await topic(), list[int]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=Retry(stop=stop_after_attempt(1)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.value.n)
        try:
            await record(message, tx)
        except asyncpg.ReadOnlySQLTransactionError as error:
            if len(tried) % 3 == 0:
                raise ExceptionGroup("of a task group", [error]) from None
            if len(tried) % 3 == 1:
                raise ValueError("not now") from None
            raise

    async with service:
        await produce(sidings_kafka, name, [0])
        await eventually(offset_reaches(effects, name, 1))
        await take_no_writes(effects)
        await produce(sidings_kafka, name, [1])
        await eventually(lambda: tried.count(1) >= 4)
        await take_writes(effects)
        await eventually(offset_reaches(effects, name, 2))
        assert sample(service, "sidings_consumer_failures_total") == 0
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 0
        assert sample(service, "sidings_consumer_errors_total", server="postgres") >= 3
    assert await numbers(effects) == [0, 1]
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and name in r.getMessage()]
    assert len(told) <= 4, told


@pytest.mark.parametrize("table", ["job", "consumer_offset"])
async def test_a_table_of_ours_that_somebody_has_locked_is_no_messages_fault(
    effects, topic, sidings_kafka, monkeypatch, caplog, table
):
    """With a `statement_timeout` shorter than our own patience Postgres ended what the consumer asks beside handlers.
    That counted as the messages' failure: sound ones were parked whose handler had not even been called."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.2)
    await limit_statements(effects, 0.5)
    name, failures = await topic(), "sidings_consumer_failures_total"
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, retry=TWICE_AND_PARK)(record)

    def told() -> bool:
        return "look at statement_timeout" in str(service.problems())

    async with service, connected(effects, statement_timeout="0") as other:
        await produce(sidings_kafka, name, [0])
        await eventually(offset_reaches(effects, name, 1))
        async with other.transaction():
            await other.execute(f"LOCK TABLE sidings.{table}")
            await produce(sidings_kafka, name, [1, 2])
            await eventually(lambda: told() or sample(service, failures), service.problems)
            if table == "job":  # else the partition is not read until its stored offset can be
                await eventually(lambda: sample(service, "sidings_consumer_errors_total", server="postgres") >= 3)
            assert sample(service, failures) == 0
        await eventually(offset_reaches(effects, name, 3))
        assert sample(service, failures) == 0
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 0
        await eventually(lambda: service.problems() == [], service.problems)
    assert await numbers(effects) == [0, 1, 2]
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "one by one" in r.getMessage()]
    assert len(lines) <= 1, "each try was told of"


async def test_a_batch_that_cannot_be_stored_in_the_time_that_there_is_goes_on_one_by_one(
    effects, topic, sidings_kafka
):
    """Else there would be no end to it: the next try has as much to store."""
    name = await topic()
    async with connected(effects) as connection:
        await connection.execute(
            """CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
               'BEGIN PERFORM pg_sleep(0.1); RETURN NEW; END';
               CREATE TRIGGER slow BEFORE INSERT ON sidings.job FOR EACH ROW EXECUTE FUNCTION slow()"""
        )
    await limit_statements(effects, 0.8)
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, isolate=True)(record)
    await produce(sidings_kafka, name, range(12))
    async with service:
        await eventually(offset_reaches(effects, name, 12))
        assert sample(service, "sidings_consumer_errors_total", server="postgres") == 0


async def test_a_handlers_own_statement_that_takes_too_long_is_its_failure(effects, topic, sidings_kafka):
    await limit_statements(effects, 0.5)
    name, tried = await topic(), list[int]()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.value.n)
        await tx.execute("SELECT pg_sleep(20)")

    async with service:
        await produce(sidings_kafka, name, [0])
        await eventually(offset_reaches(effects, name, 1))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 1)
        assert sample(service, "sidings_consumer_failures_total") == 2
        assert sample(service, "sidings_consumer_errors_total", server="postgres") == 0
    assert len(tried) >= 3


async def test_a_batch_that_was_undone_is_no_longer_told_of_once_its_partition_has_moved(
    effects, topic, sidings_kafka, monkeypatch
):
    """`/health` told of it until all that had been fetched was done: with slow handlers for a minute, though each
    half second something was committed."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.0)
    name, cut = await topic(partitions=1), list[int]()
    third, go_on = asyncio.Event(), asyncio.Event()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "batch_seconds": 0.001})

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if not cut:
            cut.append(message.value.n)
            await tx.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        if message.value.n == 3:
            third.set()
            await go_on.wait()
        await asyncio.sleep(0.002)
        await record(message, tx)

    def told() -> list[str]:
        return [problem for problem in service.problems() if "has got no further" in problem]

    await produce(sidings_kafka, name, range(5))
    async with service:
        await asyncio.wait_for(third.wait(), SECONDS)
        assert cut
        assert not told()
        go_on.set()
        await eventually(offset_reaches(effects, name, 5))
    assert await numbers(effects) == [0, 1, 2, 3, 4]


async def test_a_partition_whose_batches_are_undone_is_told_of_while_others_move(effects, topic, sidings_kafka, caplog):
    name, tried = await topic(partitions=2), list[int]()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "batch_seconds": 0.001})
    async with connected(effects) as connection:
        await connection.execute(
            """CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                RAISE disk_full USING MESSAGE = 'No space left on device'; END $$;
            CREATE TRIGGER no_room BEFORE INSERT ON effect FOR EACH ROW WHEN (NEW.number = 100)
            EXECUTE FUNCTION no_room()"""
        )

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.value.n)
        await asyncio.sleep(0.002)
        await record(message, tx)

    def works_again() -> bool:
        return any("works again" in r.getMessage() and r.getMessage().startswith(name) for r in caplog.records)

    await produce(sidings_kafka, name, [100], partition=1)
    async with service:
        await eventually(lambda: 100 in tried)
        await produce(sidings_kafka, name, range(5))
        await eventually(offset_reaches(effects, name, 5))
        count = tried.count(100)
        await eventually(lambda: tried.count(100) > count + 1)
        assert not works_again()
        async with connected(effects) as connection:
            await connection.execute("DROP TRIGGER no_room ON effect")
        await eventually(works_again)
    assert sorted(await numbers(effects)) == [0, 1, 2, 3, 4, 100]


@pytest.mark.parametrize("what", ["disk_full", "program_limit_exceeded"])
@pytest.mark.parametrize("where", ["handler", "another error", "offset"])
async def test_a_full_disk_is_no_messages_fault(effects, topic, sidings_kafka, monkeypatch, where, what):
    """It counted as a failure: with the last attempt the message was parked as soon as there was room again. And
    `/health` was good meanwhile, for it looked at Postgres only, not at what nobody could write there. The same where
    Postgres has no transaction ids left, before a wraparound."""
    monkeypatch.setattr("sidings.executor.link._GIVE_IDS", ("exec_stmt_raise",))  # the function that RAISE names
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.5)
    name, tried = await topic(), list[int]()
    service = a_service(effects, sidings_kafka)
    table, second = ("sidings.consumer_offset", "next_offset > 1") if where == "offset" else ("effect", "number > 0")
    async with connected(effects) as connection:
        await connection.execute(
            f"""CREATE TABLE full_disk ();
            CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF NEW.{second} AND to_regclass('full_disk') IS NOT NULL THEN
                    RAISE {what} USING MESSAGE = 'No space left on device';
                END IF; RETURN NEW; END $$;
            CREATE TRIGGER no_room BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION no_room()"""
        )

    @service.consumer(name, retry=Retry(stop=stop_after_attempt(1)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        tried.append(message.value.n)
        try:
            await record(message, tx)
        except (asyncpg.DiskFullError, asyncpg.ProgramLimitExceededError):
            if where == "another error":
                raise ValueError("not now") from None
            raise

    async with service:
        await produce(sidings_kafka, name, [0])
        await eventually(offset_reaches(effects, name, 1))
        await produce(sidings_kafka, name, [1])
        await eventually(lambda: tried.count(1) >= 5)
        told = rf"the consumer of '{name}' has got no further for \d+ s: .*(No space left on device|takes no writes)"
        await eventually(lambda: any(re.match(told, problem) for problem in service.problems()), service.problems)
        async with connected(effects) as connection:
            await connection.execute("DROP TABLE full_disk")
        await eventually(offset_reaches(effects, name, 2))
        await eventually(lambda: service.problems() == [], service.problems)
        assert sample(service, "sidings_consumer_failures_total") == 0
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 0
    assert await numbers(effects) == [0, 1]


async def test_a_handler_that_forbids_its_own_writes_has_failed(effects, topic, sidings_kafka):
    """Or one to whom another server says so: there is nothing to wait for."""
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 0:
            await tx.execute("SET default_transaction_read_only = on; SET TRANSACTION READ ONLY")
        await record(message, tx)

    await produce(sidings_kafka, name, range(2), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 2))
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 1
    assert await numbers(effects) == [1]


async def test_the_full_disk_of_another_server_is_the_messages_failure(effects, topic, sidings_kafka):
    """Nothing of its partition was handled any more, "Postgres takes no writes", as long as that server's lasted."""
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        if message.value.n == 1:
            async with connected(effects) as elsewhere:
                await elsewhere.execute("DO $$ BEGIN RAISE disk_full; END $$")

    await produce(sidings_kafka, name, range(3), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        assert sample(service, "sidings_consumer_messages_total", result="parked") == 1
    assert await numbers(effects) == [0, 2]


async def test_a_policy_of_so_many_seconds_counts_them_from_the_first_attempt(effects, topic, sidings_kafka):
    name, began, told = await topic(), list[float](), list[tuple[float, float]]()
    service = a_service(effects, sidings_kafka)

    def stop(state: RetryCallState) -> bool:
        told.append((state.seconds_since_start, time.monotonic()))
        return len(told) >= 3

    @service.consumer(name, retry=Retry(wait=wait_none(), stop=stop))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        began.append(time.monotonic())
        await asyncio.sleep(0.05)
        raise ConnectionError

    async with service:
        await produce(sidings_kafka, name, [0])
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 1)
        assert sample(service, "sidings_consumer_failures_total") == 3
    for number, (seconds, at) in enumerate(told[:3]):  # a job may have followed
        # The first was in the main line, and each waits for its transaction before it begins.
        assert began[1 + number] - began[1] <= seconds <= at - began[0]


async def test_days_of_ids_that_could_not_be_made_are_made_soon_after(monkeypatch):
    naps: list[float] = []
    upkeep = SeenUpkeep(PostgresSettings(dsn="postgresql://127.0.0.1:1/nowhere"), 7)

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr("sidings.kafka.seen.asyncio.sleep", nap)
    with pytest.raises(asyncio.CancelledError):
        await upkeep.run()
    assert naps == [60.0, 60.0]


class Client:
    """A client that notes what is committed."""

    def __init__(self, *ends: Exception) -> None:
        self.ends = list(ends)
        self.told: list[dict[TopicPartition, Any]] = []

    async def commit(self, offsets: dict[TopicPartition, Any]) -> None:
        self.told.append(offsets)
        if self.ends:
            raise self.ends.pop(0)


class Offsets:
    """Stored offsets whose moves end as `ends` says, one after another, and then well."""

    def __init__(self, *ends: Exception) -> None:
        self.ends = list(ends)
        self.moves: list[Move] = []
        self.meanwhile: Any = lambda: None

    def topic_id(self, _: TopicPartition) -> None: ...

    async def jump(self, move: Move) -> None:
        self.moves.append(move)
        self.meanwhile()
        if self.ends:
            raise self.ends.pop(0)


def a_committer(offsets: Any, client: Any, partition: Partition) -> LagCommitter:
    return LagCommitter(client, {TP: partition}, offsets, lambda: False)


def placed(offset: int, end: int | None = None) -> Partition:
    partition = Partition(TP)
    partition.place(offset)
    if end is not None:  # behind a gap
        partition.end = end
    return partition


async def test_a_gap_that_cannot_be_passed_yet_is_passed_later(monkeypatch):
    monkeypatch.setattr("sidings.kafka.lag._COMMIT_SECONDS", 0.001)
    offsets = Offsets(PostgresUnavailable("away"), asyncpg.LockNotAvailableError(), OffsetsMoved([TP]))
    partition, client = placed(5, end=9), Client()
    running = asyncio.create_task(a_committer(offsets, client, partition).run())
    await eventually(lambda: partition.next_offset == 9 or running.done())
    await eventually(lambda: client.told[-1] == {TP: 9})
    running.cancel()
    assert offsets.moves == [Move(TP, 5, 9)] * 4
    assert client.told[0] == {TP: 5}


async def test_a_gap_is_passed_only_where_nothing_has_come_between_two_looks():
    offsets, partition = Offsets(), placed(5, end=9)
    committer = a_committer(offsets, Client(), partition)
    await committer._pass_gaps()
    assert offsets.moves == [], "what is on its way may stand before it"
    offsets.meanwhile = lambda: partition.place(7)  # a batch, or a reset
    await committer._pass_gaps()
    assert offsets.moves == [Move(TP, 5, 9)]
    assert partition.next_offset == 7


@pytest.mark.parametrize("then", ["is handled", "is to be read again"])
async def test_what_nobody_has_handled_yet_is_no_gap(then):
    """The stored offset would pass a message whose handler takes long, or one that Postgres is too slow to place: its
    transaction could not commit any more, or it would not be read again."""
    offsets, partition = Offsets(), placed(5)
    record: Any = SimpleNamespace(offset=5)
    partition.items.append(Item(partition, record, None, None))
    partition.end = 9
    if then == "is to be read again":
        partition.displace()
    committer = a_committer(offsets, Client(), partition)
    for _ in range(3):
        await committer._pass_gaps()
    assert offsets.moves == []


async def test_a_gap_is_passed_by_a_poll_that_outlasts_a_rebalance(caplog):
    """The partition that has come back was read again from its stored offset, and was said to stand elsewhere."""

    class Idle(FetchLoop):
        in_flight = 0

        async def _handle(self, items: list[Item]) -> None: ...

    class Rebalanced(Client):
        at = 5

        async def position(self, tp: TopicPartition) -> int:
            return self.at

        def subscription(self) -> set[str]:
            return {TP.topic}

        def assignment(self) -> set[TopicPartition]:
            return {TP}

        async def getmany(self, *partitions: TopicPartition, **options: int) -> dict[TopicPartition, Any]:
            if self.at == 5:
                partitions_here[TP].displace()
                partitions_here[TP] = placed(5)
                self.at = 9
            return {}

    partitions_here = {TP: placed(5)}
    roof: Any = SimpleNamespace(paused=False, place=lambda: None)
    subscription: Any = SimpleNamespace(topic=TP.topic)
    client: Any = Rebalanced()
    loop = Idle(subscription, client, partitions_here, roof, max_records=10)
    for _ in range(2):
        await loop._poll(list(partitions_here.values()), interrupted=False)
    assert (partitions_here[TP].end, partitions_here[TP].state, caplog.messages) == (9, State.READY, [])


@pytest.mark.parametrize("ends", ["is interrupted", "is told of another partition"])
async def test_a_gap_is_passed_by_a_poll_that_brings_nothing_else(ends, caplog):
    """By one that a partition which stood aside ends, or that ends with another partition's error, too: else the next
    one found the client elsewhere, and a sound partition was placed anew."""
    other = TopicPartition(TP.topic, 1)

    class Idle(FetchLoop):
        in_flight = 0

        async def _handle(self, items: list[Item]) -> None: ...

    class Passing(Client):
        async def position(self, tp: TopicPartition) -> int:
            return at[tp]

        async def getmany(self, *partitions: TopicPartition, **options: int) -> dict[TopicPartition, Any]:
            at[TP] = 9
            if ends == "is told of another partition":
                raise OffsetOutOfRangeError({other: 7})
            loop.wake()
            await asyncio.Event().wait()
            raise AssertionError

    def displace(found: Iterable[Partition]) -> None:
        for partition in found:
            displaced.append(partition.tp)
            partition.displace()

    at, displaced = {TP: 5, other: 7}, list[TopicPartition]()
    partitions = {TP: placed(5), other: Partition(other)}
    partitions[other].place(7)
    roof: Any = SimpleNamespace(paused=False, displace=displace)
    subscription: Any = SimpleNamespace(topic=TP.topic)
    client: Any = Passing()
    loop = Idle(subscription, client, partitions, roof, max_records=10)
    await loop._poll(list(partitions.values()), interrupted=ends == "is interrupted")
    assert await loop._in_place(partitions[TP])
    assert (partitions[TP].end, partitions[TP].state) == (9, State.READY)
    assert displaced == ([] if ends == "is interrupted" else [other])
    assert "the client stands at" not in caplog.text


@pytest.mark.parametrize("stored", [6, 0], ids=["forward", "back"])
async def test_what_a_poll_brings_from_where_the_partition_stood_before_a_rebalance_is_not_handled(stored):
    """Another instance has handled it, or there is more before it: the offset would match, whatever is handled."""

    class Late(FetchLoop):
        in_flight = 0

        async def _handle(self, items: list[Item]) -> None: ...

    class Rebalanced(Client):
        at = 3

        async def position(self, tp: TopicPartition) -> int:
            return self.at

        async def getmany(self, *partitions: TopicPartition, **options: int) -> dict[TopicPartition, Any]:
            partitions_here[TP] = placed(stored)
            self.at = stored
            return {TP: [SimpleNamespace(offset=offset) for offset in (3, 4)]}

    partitions_here = {TP: placed(3)}
    displaced: list[Partition] = []
    roof: Any = SimpleNamespace(paused=False, displace=displaced.extend)
    nothing: Any = {"decode": lambda record: record, "passes_over": lambda _: False, "id_of": lambda *_: None}
    subscription: Any = SimpleNamespace(topic=TP.topic, **nothing)
    client: Any = Rebalanced()
    loop = Late(subscription, client, partitions_here, roof, max_records=10)
    await loop._poll(list(partitions_here.values()), interrupted=False)
    assert not partitions_here[TP].items
    assert displaced == [partitions_here[TP]]


async def test_a_poll_has_one_name_that_stands_for_all_partitions_it_is_for():
    """aiokafka compares each partition that has messages with each name, one after another."""
    one, other = TopicPartition("positions", 1), TopicPartition("rides", 0)
    names = (AnyOf([TP, one]),)
    assert [tp in names for tp in (TP, one, other)] == [True, True, False]
    assert [tp != names[0] for tp in (TP, one, other)] == [False, False, True]


async def test_an_outage_of_kafka_is_told_of_once_where_nothing_but_lag_tools_misses_it(caplog):
    """It left a traceback every few seconds."""
    caplog.set_level(logging.INFO, "sidings.consumer")
    committer = a_committer(Offsets(), Client(CommitFailedError(), *[KafkaError("away")] * 3), placed(5))
    for _ in range(5):
        await committer.commit()
    assert [(r.levelname, r.exc_info) for r in caplog.records] == [("WARNING", None)] * 2
    assert "trying again: KafkaError" in caplog.text
    assert "works again" in caplog.text


async def test_patience_leaves_no_timer_behind():
    timers: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def noted(*arguments: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*arguments))
        return timers[-1]

    loop.call_later = noted  # type: ignore[method-assign]
    try:
        with Patience(600) as patience:
            await patience.call(asyncio.sleep(0))
    finally:
        loop.call_later = call_later  # type: ignore[method-assign]
    assert [timer.cancelled() for timer in timers] == [True]


def test_health_counts_from_the_first_failure_until_there_is_a_connection_that_lasts(monkeypatch):
    clock = [1_000.0]
    monkeypatch.setattr("sidings.kafka.vitals.time.monotonic", lambda: clock[0])
    topics: dict[str, set[int] | None] = {"positions": {0}}
    cluster = SimpleNamespace(leader_for_partition=lambda tp: 1, unauthorized_topics=set())
    client: Any = SimpleNamespace(
        partitions_for_topic=topics.get,
        _client=SimpleNamespace(throttled=False, failed_at={}, heard_at=None, cluster=cluster),
    )
    contact = Contact(client)
    vitals = Vitals({"positions"}, {"positions"}, list)

    def after(seconds: float) -> list[str]:
        clock[0] += seconds
        return vitals.problems()

    for _ in range(4):
        assert after(5) == [] or clock[0] > 1_015.0
        vitals.disconnected(OSError("refused"))
    assert after(0) == ["the consumer has no connection to Kafka: OSError('refused')"]
    vitals.connected(client, (), None, contact)
    vitals.rebalance_ends()
    assert after(10) == []
    for _ in range(4):
        vitals.disconnected(OSError("reset"))
        vitals.connected(client, (), None, contact)
        vitals.rebalance_ends()
        clock[0] += 4.9
    assert after(0) == ["the connection to Kafka breaks again and again: OSError('reset')"]
    assert after(0.2) == [], "this one lasts"
    vitals.rebalance_begins()
    assert after(40) == []
    vitals.rebalance_begins()
    assert after(21) == ["the group has been rebalancing for 61 s"]
    vitals.rebalance_ends()
    vitals.disconnected()
    vitals.connected(client, (), None, contact)
    assert after(61) == ["the group has been rebalancing for 61 s"], "what was assigned is not its successor's"
    vitals.rebalance_ends()
    vitals.connected(client, (), None, contact)
    topics.clear()
    assert after(10) == []
    assert after(6) == ["there is no topic positions: create it"]
    topics["positions"] = {0}
    assert after(0) == []
    contact.lost_since = clock[0]
    assert after(10) == []
    silent = SimpleNamespace(
        tp=TP, origin="positions/0", state=State.READY, since=0.0, problem=lambda: None, put_off=0.0
    )
    silent.idle_at, silent.answered_at = clock[0], 0.0
    vitals._partitions = lambda: [silent]  # type: ignore[assignment, list-item]
    assert after(0) == ["Kafka has not answered for 60 s about positions/0"], "until more can be said"
    client._client.throttled = True
    assert after(0) == ["Kafka has not answered for 60 s about positions/0: it throttles this client (a quota)"]
    assert after(6) == ["none of the brokers that the consumer knows has answered for 16 s"]
    vitals.disconnected(OSError("given up"))
    assert after(0) == ["the consumer has no connection to Kafka: OSError('given up')"], "no moment of seeming health"

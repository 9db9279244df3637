"""`JobType.add`: jobs that are stored together before the transaction commits, in their order, all or none."""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
import pytest
from sidings import (
    EnqueueError,
    InvalidPayload,
    Job,
    Message,
    MissingGroup,
    MissingOrigin,
    NotInTransaction,
    PostgresSettings,
    Registry,
    Retry,
    Transaction,
)
from sidings.jobs.context import current_work
from sidings.kafka import Transactions, partition_for
from sidings.testing import enqueued
from tenacity import stop_after_attempt

from .consumer_support import TWICE_AND_PARK, Number, a_service, numbers, offset_reaches, produce
from .guide import run
from .support import ORIGIN, Ride, connected, drained, eventually, fetch, running, value

registry = Registry()


@registry.job(group="transport")
async def ride(job: Job[Ride]) -> None: ...


@registry.job(group="transport", policy="latest")
async def newest(job: Job[Ride]) -> None: ...


@registry.job()
async def alone(job: Job[Ride]) -> None: ...


@registry.job(group="transport", home="homes")
async def at_home(job: Job[Ride]) -> None: ...


HOMES = "INSERT INTO sidings.topic (topic, partitions) VALUES ('homes', 3)"
ROWS = """
    SELECT type, origin, "group", position IS NULL AS delayed, priority, headers::text, payload ->> 'number' AS number
    FROM sidings.job ORDER BY position, id
"""


@asynccontextmanager
async def a_pool(database: str, told: list[Any] | None = None) -> AsyncIterator[Transactions]:
    pool = Transactions(PostgresSettings(dsn=database, pool_size=1), [].append if told is None else told.append)
    await pool.start()
    yield pool
    await pool.stop()


@asynccontextmanager
async def watched(tx: Transaction) -> AsyncIterator[list[str]]:
    """The INSERTs of this transaction."""
    seen: list[str] = []

    def note(record: Any) -> None:
        if "INSERT INTO" in record.query:
            seen.append(record.query)

    with tx.opened().query_logger(note):
        yield seen


async def stored(database: str) -> list[int]:
    return [int(row["number"]) for row in await fetch(database, ROWS)]


# -- when they are stored ---------------------------------------------------------------------------------------------


async def test_jobs_of_two_types_that_take_turns_in_their_groups_become_two_statements(database: str) -> None:
    async with a_pool(database) as pool, pool.open() as tx, watched(tx) as seen:
        for number in range(100):
            await ride.add(tx, Ride(transport=f"t-{number}", number=2 * number), origin=ORIGIN)
            await newest.add(tx, Ride(transport=f"t-{number}", number=2 * number + 1), origin=ORIGIN)
        assert seen == []
        await tx.flush()
        await asyncio.sleep(0)  # the turn in which asyncpg tells of the last one
        assert len(seen) == 2
    rows = defaultdict[str, list[str]](list)
    for row in await fetch(database, ROWS):
        rows[row["group"]].append(row["type"])
    assert rows == {f"t-{number}": ["ride", "newest"] for number in range(100)}


async def test_they_exist_if_and_only_if_the_transaction_commits(database: str) -> None:
    async def work(pool: Transactions, number: int) -> None:
        async with pool.open() as tx:
            await ride.add(tx, Ride(transport="t", number=number), origin=ORIGIN)
            if number == 2:
                raise ZeroDivisionError

    async with a_pool(database) as pool:
        for number in range(1, 4):
            with suppress(ZeroDivisionError):
                await work(pool, number)
    assert await stored(database) == [1, 3]


async def test_a_thousand_are_stored_at_once(database: str) -> None:
    async with a_pool(database) as pool:
        async with pool.open() as tx:
            for number in range(1_001):
                await alone.add(tx, Ride(number=number), origin=ORIGIN)
            assert await tx.fetchval("SELECT count(*) FROM sidings.job") == 1_000
        assert await stored(database) == [*range(1_001)]
        async with pool.open() as tx:
            for _ in range(5):
                await alone.add(tx, Ride(transport="x" * (1 << 20)), origin=ORIGIN)
            assert await tx.fetchval("SELECT count(*) FROM sidings.job") == 1_001 + 4


@pytest.mark.parametrize("call", ["enqueue", "enqueue_many", "withdraw"])
async def test_what_stores_at_once_comes_behind_them(database: str, call: str) -> None:
    async with a_pool(database) as pool, pool.open() as tx:
        await ride.add(tx, Ride(transport="t", number=1), origin=ORIGIN)
        if call == "enqueue":
            await newest.enqueue(tx, Ride(transport="t", number=2), origin=ORIGIN)
        elif call == "enqueue_many":
            await newest.enqueue_many(tx, [Ride(transport="t", number=2)], origin=ORIGIN)
        else:
            await ride.withdraw(tx, 5_000)
        assert await tx.fetchval("SELECT min(payload ->> 'number') FROM sidings.job") == "1"
        await ride.add(tx, Ride(transport="t", number=3), origin=ORIGIN)
    assert await stored(database) == ([1, 3] if call == "withdraw" else [1, 2, 3])


async def test_the_executor_is_told_of_them(database: str) -> None:
    told: list[Any] = []
    async with a_pool(database, told) as pool:
        async with pool.open() as tx:
            await ride.add(tx, Ride(transport="t"), origin=ORIGIN)
        async with pool.open() as tx:
            for number in range(2):
                await ride.add(tx, Ride(transport=f"t-{number}"), origin=ORIGIN)
                await ride.add(tx, Ride(transport=f"t-{number}"), origin="other/1", delay=5)
    first = await value(database, "SELECT min(id) FROM sidings.job")
    assert told == [{ORIGIN: [first]}, {ORIGIN: [], "other/1": []}]


async def test_as_many_as_there_are_may_be_added_at_once(database: str) -> None:
    """Who adds the thousandth stores them all, and another two thousand have come before that is done."""
    async with a_pool(database) as pool, pool.open() as tx:
        payloads = [Ride(transport=f"t-{number % 2}", number=number) for number in range(3_000)]
        await asyncio.gather(*(ride.add(tx, payload, origin=ORIGIN) for payload in payloads))
    found = await stored(database)
    assert [number for number in found if number % 2] == [*range(1, 3_000, 2)]
    assert [number for number in found if not number % 2] == [*range(0, 3_000, 2)]


async def test_a_flush_whose_await_was_forgotten_does_not_commit(database: str) -> None:
    async def work(pool: Transactions) -> None:
        async with pool.open() as tx:
            await ride.add(tx, Ride(transport="t"), origin=ORIGIN)
            tx.flush()  # type: ignore[unused-coroutine]

    async with a_pool(database) as pool:
        with pytest.raises(RuntimeError, match=r"tx\.flush\(\) was called and not awaited"):
            await work(pool)
    assert await stored(database) == []


async def test_one_whose_await_was_forgotten_does_not_commit_the_others(database: str) -> None:
    async def work(pool: Transactions) -> None:
        async with pool.open() as tx:
            await alone.add(tx, Ride(), origin=ORIGIN)
            ride.add(tx, Ride(transport="t"), origin=ORIGIN)  # type: ignore[unused-coroutine]

    async with a_pool(database) as pool:
        with pytest.raises(RuntimeError, match=r"ride\.add\(\) was called and not awaited"):
            await work(pool)
    assert await stored(database) == []


# -- savepoints -------------------------------------------------------------------------------------------------------


async def test_a_savepoint_that_is_undone_takes_along_what_was_added_in_it(database: str) -> None:
    async with a_pool(database) as pool, pool.open() as tx:
        await ride.add(tx, Ride(transport="t", number=1), origin=ORIGIN)
        with suppress(ZeroDivisionError):
            async with tx.savepoint():
                await ride.add(tx, Ride(transport="t", number=2), origin=ORIGIN)
                async with tx.savepoint():
                    await ride.add(tx, Ride(transport="t", number=3), origin=ORIGIN)
                raise ZeroDivisionError
        async with tx.savepoint():
            await ride.add(tx, Ride(transport="t", number=4), origin=ORIGIN)
        await ride.add(tx, Ride(transport="t", number=5), origin=ORIGIN)
    assert await stored(database) == [1, 4, 5]


async def test_what_cannot_be_stored_is_undone_by_the_savepoint_that_it_was_added_in(database: str) -> None:
    async with a_pool(database) as pool, pool.open() as tx:
        await ride.add(tx, Ride(transport="t", number=1), origin=ORIGIN)
        with suppress(MissingOrigin):
            async with tx.savepoint():
                await at_home.add(tx, Ride(transport="t", number=2))
    assert await stored(database) == [1]


async def test_whatever_is_done_in_a_transaction_the_order_of_a_group_is_that_of_the_calls(database: str) -> None:
    await fetch(database, HOMES)
    async with a_pool(database) as pool:
        for seed in range(60):
            await check_order(database, pool, seed)


async def check_order(database: str, pool: Transactions, seed: int) -> None:
    """`levels` has the jobs of the transaction and of each open savepoint, by group and number."""
    rng = random.Random(seed)
    levels: list[list[tuple[str, int]]] = [[]]
    blocks: list[Any] = []

    async def leave(error: Exception | None) -> None:
        with suppress(ZeroDivisionError):
            await blocks.pop().__aexit__(type(error) if error else None, error, None)
        inner = levels.pop()
        levels[-1] += [] if error else inner

    async with pool.open() as tx:
        for number in range(40):
            match rng.choice(["add"] * 10 + ["enqueue", "enqueue_many", "begin", "release", "undo"]):
                case "begin":
                    blocks.append(tx.savepoint())
                    await blocks[-1].__aenter__()
                    levels.append([])
                case "release" | "undo" as how:
                    if blocks:
                        await leave(None if how == "release" else ZeroDivisionError())
                case call:
                    job_type: Any = rng.choice([ride, newest, alone, at_home])
                    payload = Ride(transport=rng.choice("ab"), number=number)
                    given: Any = [payload] if call == "enqueue_many" else payload
                    options = {"origin": None if job_type is at_home else "homes/1", "priority": rng.choice([0, 0, 5])}
                    await getattr(job_type, call)(tx, given, **options)
                    levels[-1].append(("" if job_type is alone else payload.transport, number))
        while blocks:
            await leave(None)
    expected, found = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for group, number in levels[0]:
        expected[group].append(number)
    for row in await fetch(database, ROWS):
        found[row["group"] or ""].append(int(row["number"]))
    await fetch(database, "DELETE FROM sidings.job")
    assert sorted(found.pop("", [])) == expected.pop("", []), seed  # which have no order
    assert found == expected, seed


async def test_those_of_others_are_stored_before_a_handler_may_take_the_connection(database: str) -> None:
    """A savepoint of asyncpg's, in which something else stored them, took them along when it was undone."""

    async def work(pool: Transactions, *, flush: bool) -> None:
        async with pool.open() as tx:
            await ride.add(tx, Ride(transport="t", number=1), origin=ORIGIN)
            if flush:
                await tx.flush()
            with suppress(ZeroDivisionError):
                async with tx.connection.transaction():
                    await ride.add(tx, Ride(transport="t", number=2), origin=ORIGIN)
                    await newest.enqueue(tx, Ride(transport="t", number=3), origin=ORIGIN)
                    raise ZeroDivisionError
            await ride.add(tx, Ride(transport="t", number=4), origin=ORIGIN)

    async with a_pool(database) as pool:
        with pytest.raises(RuntimeError, match=r"call `await tx\.flush\(\)` before you take `tx\.connection`"):
            await work(pool, flush=False)
        assert await stored(database) == []
        await work(pool, flush=True)
        assert await stored(database) == [1, 4]


async def test_a_savepoint_in_sql_undoes_what_was_added_in_it_and_nothing_else(database: str) -> None:
    async with a_pool(database) as pool, pool.open() as tx:
        await ride.add(tx, Ride(transport="t", number=1), origin=ORIGIN)
        await tx.execute("savepoint mine")
        await ride.add(tx, Ride(transport="t", number=2), origin=ORIGIN)
        await tx.execute("ROLLBACK TO mine")
        await ride.add(tx, Ride(transport="t", number=3), origin=ORIGIN)
    assert await stored(database) == [1, 3]


# -- what they are ----------------------------------------------------------------------------------------------------


async def test_the_example_of_the_guide(database: str) -> None:
    await fetch(database, "CREATE TABLE transport (id text PRIMARY KEY, eta timestamptz)")
    await fetch(database, "INSERT INTO transport (id) SELECT 't-' || n FROM generate_series(1, 3) n")
    await fetch(database, "INSERT INTO sidings.topic (topic, partitions) VALUES ('transports', 24)")
    etas = {f"t-{number}": datetime(2030, 1, number, tzinfo=UTC) for number in range(1, 4)}
    etas_changed = run("enqueueing.md", "", "Many jobs in one transaction")["etas_changed"]
    async with a_pool(database) as pool:
        await etas_changed(SimpleNamespace(transaction=pool.open), etas)
    assert {row["id"]: row["eta"] for row in await fetch(database, "SELECT id, eta FROM transport")} == etas
    assert sorted(row["group"] for row in await fetch(database, ROWS)) == sorted(etas)


async def test_each_is_as_if_it_had_been_enqueued(database: str) -> None:
    """With its own headers, due time, priority and group; those of its message's trace among them."""
    due = datetime.now(UTC) + timedelta(hours=2)

    async def store(tx: Transaction, call: str) -> None:
        for number, message in enumerate([a_message("a"), a_message("b"), a_message(None)]):
            token = current_work.set(message)
            payload = Ride(transport="t", number=number)
            await getattr(ride, call)(tx, payload)
            await getattr(ride, call)(tx, payload, headers={"own": str(number)}, priority=number)
            await getattr(ride, call)(tx, payload, group="g", origin="other/5")
            await getattr(ride, call)(tx, payload, run_at=due)
            await getattr(alone, call)(tx, payload, delay=timedelta(hours=1))
            await getattr(alone, call)(tx, payload, group="g")
            current_work.reset(token)

    def a_message(correlation_id: str | None) -> Message[None]:
        headers = [("correlation_id", correlation_id.encode())] if correlation_id else []
        return Message(None, topic="positions", partition=2, headers=headers)

    found: dict[str, list[Any]] = {}
    for call in ("enqueue", "add"):
        async with a_pool(database) as pool, pool.open() as tx:
            await store(tx, call)
        found[call] = sorted(map(repr, await fetch(database, ROWS)))
        assert await value(database, "SELECT count(*) FROM sidings.job WHERE run_at = $1", due) == 3
        hour = "SELECT count(*) FROM sidings.job WHERE run_at - now() BETWEEN interval '50 min' AND interval '1 h'"
        assert await value(database, hour) == 3
        await fetch(database, "DELETE FROM sidings.job")
    assert found["add"] == found["enqueue"]
    assert len(found["add"]) == 18


async def test_those_of_a_topic_that_has_grown_go_where_their_groups_have_jobs(database: str) -> None:
    """By the keys of their messages, which the groups are not."""
    keys = [key for key in (b"key-%d" % n for n in range(20)) if partition_for(key, 4) != partition_for(key, 6)]
    await fetch(database, "INSERT INTO sidings.topic (topic, partitions, former) VALUES ('positions', 6, '{4}')")
    own = Registry()
    own.has_grown = lambda _: True
    grown: Any = own.job(name="ride", group="transport", payload=Ride)(lambda job: None)

    async def store(call: str) -> list[Any]:
        async with a_pool(database) as pool, pool.open() as tx:
            for key in keys:
                for partitions in (4, 6):
                    partition = partition_for(key, partitions)
                    token = current_work.set(Message(None, topic="positions", partition=partition, key=key))
                    await getattr(grown, call)(tx, Ride(transport=f"of {key.decode()}", number=partitions))
                    current_work.reset(token)
        rows = sorted((row["group"], row["number"], row["origin"]) for row in await fetch(database, ROWS))
        await fetch(database, "DELETE FROM sidings.job")
        return rows

    assert await store("add") == (before := await store("enqueue"))
    for key in keys:
        assert len({origin for group, _, origin in before if group == f"of {key.decode()}"}) == 1


async def test_those_of_a_topic_that_has_grown_share_a_statement_where_their_groups_are_the_keys(
    database: str,
) -> None:
    await fetch(database, "INSERT INTO sidings.topic (topic, partitions, former) VALUES ('positions', 6, '{4}')")
    own = Registry()
    own.has_grown = lambda _: True
    grown: Any = own.job(name="ride", group="transport", payload=Ride)(lambda job: None)
    async with a_pool(database) as pool, pool.open() as tx, watched(tx) as seen:
        for number in range(20):
            key = f"key-{number}"
            token = current_work.set(Message(None, topic="positions", partition=3, key=key.encode()))
            await grown.add(tx, Ride(transport=key))
            current_work.reset(token)
        await tx.flush()
        await asyncio.sleep(0)
    assert len(seen) == 1


async def test_times_that_read_alike_in_autumn_are_an_hour_apart(database: str) -> None:
    first = datetime(2050, 10, 30, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    async with a_pool(database) as pool, pool.open() as tx:
        for run_at in (first, first.replace(fold=1)):
            await alone.add(tx, Ride(), origin=ORIGIN, run_at=run_at)
    due = [row["run_at"] for row in await fetch(database, "SELECT run_at FROM sidings.job ORDER BY run_at")]
    assert due[1] - due[0] == timedelta(hours=1)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (MissingOrigin, {"origin": None}),
        (EnqueueError, {"origin": "nowhere"}),
        (EnqueueError, {"delay": -1}),
        (EnqueueError, {"priority": 101}),
        (EnqueueError, {"headers": {"a": 1}}),
        (EnqueueError, {"group": "x" * 1_001}),
        (EnqueueError, {"group": "a\x1fb"}),
        (MissingGroup, {"group": None}),
        (InvalidPayload, {"payload": {"number": "none"}}),
    ],
)
async def test_what_cannot_be_a_job_is_refused_at_once_and_leaves_the_others(
    database: str, error: type[Exception], options: dict[str, Any]
) -> None:
    async with a_pool(database) as pool, pool.open() as tx:
        wrong = {"payload": Ride(transport="t", number=2), "origin": ORIGIN, **options}
        with pytest.raises(error):
            await ride.add(tx, **wrong)
        assert tx.connection  # which may be taken, as nothing is held back
        tx.holds = True
        await ride.add(tx, Ride(transport="t", number=1), origin=ORIGIN)
        with pytest.raises(error):
            await ride.add(tx, **wrong)
    assert await stored(database) == [1]


async def test_a_connection_is_refused_as_nobody_would_store_the_job(database: str) -> None:
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(EnqueueError, match=r"added only to a Transaction.*asyncpg.*call enqueue"):
            await ride.add(connection, Ride(transport="t"), origin=ORIGIN)  # type: ignore[arg-type]


async def test_a_transaction_that_is_over_is_refused(database: str) -> None:
    async with a_pool(database) as pool:
        async with pool.open() as tx:
            pass
        with pytest.raises(NotInTransaction):
            await ride.add(tx, Ride(transport="t"), origin=ORIGIN)


async def test_after_one_that_could_not_be_stored_nothing_commits(database: str) -> None:
    """Its code has caught the error, which another call has met."""

    async def work(pool: Transactions) -> None:
        async with pool.open() as tx:
            await at_home.add(tx, Ride(transport="t"))
            await alone.add(tx, Ride(), origin=ORIGIN)
            with pytest.raises(MissingOrigin, match="home in 'homes', whose partitions are not known"):
                await alone.enqueue(tx, Ride(), origin=ORIGIN)

    async with a_pool(database) as pool:
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await work(pool)
    assert await stored(database) == []


async def test_a_block_that_has_ended_its_transaction_stores_none_of_them(database: str) -> None:
    async def work(pool: Transactions) -> None:
        async with pool.open() as tx:
            await ride.add(tx, Ride(transport="t"), origin=ORIGIN)
            await tx.execute("COMMIT")

    async with a_pool(database) as pool:
        with pytest.raises(NotInTransaction):
            await work(pool)
    assert await stored(database) == []


# -- in handlers ------------------------------------------------------------------------------------------------------


async def test_a_transactional_job_stores_what_it_adds_with_its_end(database: str) -> None:
    own, attempts, seen = Registry(), 0, list[int]()

    @own.job(group="transport")
    async def second(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    @own.job(transactional=True, retry=Retry(stop=stop_after_attempt(2), wait=lambda _: 0.0))
    async def first(job: Job[Ride]) -> None:
        nonlocal attempts
        attempts += 1
        await second.add(job.tx, Ride(transport="t", number=attempts))
        if attempts == 1:
            raise ZeroDivisionError

    async with connected(database) as connection, connection.transaction():
        await first.enqueue(connection, Ride(), origin=ORIGIN)
    async with running(database, own):
        await drained(database)
    assert seen == [2]


async def test_a_test_sees_what_its_handler_has_added(database: str) -> None:
    async with connected(database) as connection, connection.transaction():
        tx = Transaction(connection)
        await ride.add(tx, Ride(transport="t", number=1), origin=ORIGIN)
        assert await enqueued(tx, ride) == [Ride(transport="t", number=1)]


async def test_those_of_a_batch_are_stored_together_and_a_message_that_fails_takes_only_its_own_along(
    effects: str, topic: Any, sidings_kafka: str
) -> None:
    name = await topic()
    service = a_service(effects, sidings_kafka)

    by_group = defaultdict[str, list[int]](list)

    @service.job(group="transport")
    async def follow_up(job: Job[Ride]) -> None:
        by_group[job.group or ""].append(job.payload.number)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await follow_up.add(tx, Ride(transport=f"t-{message.value.n % 5}", number=message.value.n))
        if message.value.n == 17:
            raise ValueError("bad")

    for group in range(5):
        await produce(sidings_kafka, name, range(group, 40, 5), key=f"t-{group}")
    async with service:
        await eventually(offset_reaches(effects, name, 40))
        await eventually(lambda: sum(map(len, by_group.values())) == 35)
    parked = {"t-2": [2, 7, 12]}  # the fourth, and those behind it
    assert by_group == {f"t-{group}": [*range(group, 40, 5)] for group in range(5)} | parked


async def test_a_message_that_is_parked_after_them_in_a_batch_comes_behind_them_in_its_group(
    effects: str, topic: Any, sidings_kafka: str
) -> None:
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.job(group="transport")
    async def follow_up(job: Job[Ride]) -> None: ...

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.key == b"parked":
            raise ValueError("bad")
        await follow_up.add(tx, Ride(transport="parked", number=message.value.n))

    for n, key in enumerate(["parked", "other", "parked", "other", "parked"]):
        await produce(sidings_kafka, name, [n], key=key)
    async with service:
        await eventually(offset_reaches(effects, name, 5))
    rows = await fetch(effects, "SELECT type, payload FROM sidings.job ORDER BY position")
    offsets = [Ride.model_validate_json(p).number if t == "follow_up" else json.loads(p)["offset"] for t, p in rows]
    assert sorted(offsets) == [0, 1, 2, 3, 4]
    assert offsets.index(1) < offsets.index(2)
    assert offsets.index(3) < offsets.index(4)


async def test_a_message_whose_job_cannot_be_stored_is_found_where_another_ones_handler_meets_the_error(
    effects: str, topic: Any, sidings_kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = await topic()
    service, calls = a_service(effects, sidings_kafka), list[int]()

    @service.job(group="transport", home="nowhere")
    async def homeless(job: Job[Ride]) -> None: ...

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        calls.append(message.value.n)
        if message.value.n == 2:
            await homeless.add(tx, Ride(transport="t"))
        async with tx.savepoint() if message.value.n == 4 else nullcontext():
            await tx.execute("INSERT INTO effect (number) VALUES ($1)", message.value.n)

    await produce(sidings_kafka, name, range(5), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 5))
    assert sorted(await numbers(effects)) == [0, 1, 3, 4]
    assert "offset 2: parked after 2 attempts: MissingOrigin" in caplog.text
    assert "offset 4" not in caplog.text
    assert max(map(calls.count, (0, 1))) <= 2

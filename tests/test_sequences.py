"""Sequences behind the tables: a logical replication, as for an upgrade between servers, carries rows only."""

import asyncio
from secrets import token_hex
from typing import Any

import pytest
from sidings.jobs import Job, Registry, Retry
from sidings.schema import load_sql
from tenacity import wait_fixed

from .outbox_support import emptied, publish, publishing, relaying
from .support import ORIGIN, Ride, connected, enqueue, eventually, running, value

BACK = "SELECT setval('sidings.job_position', 1, false), setval('sidings.job_id_seq', 1, false)"


async def test_jobs_run_where_the_sequences_were_behind_the_tables(database: str):
    """What got a position behind the reader's mark was found by the audit only, a minute later."""
    registry, ran, gate = Registry(), list[str](), asyncio.Event()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        if job.payload.transport == "busy":
            await gate.wait()
        ran.append(f"{job.payload.transport} {job.payload.number}")

    await enqueue(database, ride, [Ride(transport="gone")] * 500)
    await enqueue(database, ride, [Ride(transport="busy", number=n) for n in range(3)])
    async with connected(database) as connection:
        await connection.execute("DELETE FROM sidings.job WHERE payload ->> 'transport' = 'gone'")
        await connection.execute(BACK)
        await enqueue(database, ride, [Ride(transport="early", number=n) for n in range(3)])
        async with running(database, registry, audit_seconds=10_000) as executor:
            await eventually(lambda: len(ran) == 3 and executor.scheduler.origins[ORIGIN].high > 500)
            await enqueue(database, ride, [Ride(transport="late", number=n) for n in range(3)])
            await eventually(lambda: len(ran) == 6, "they have not been passed over")
            [moved_on] = await connection.fetch(
                "SELECT p.last_value, i.last_value FROM sidings.job_position p, sidings.job_id_seq i"
            )
            assert min(moved_on) >= 503
            await enqueue(database, ride, [Ride(transport="busy", number=3)])
            gate.set()
            await eventually(lambda: len(ran) == 10)
    assert ran[:3] == [f"early {n}" for n in range(3)]
    assert ran[3:6] == [f"late {n}" for n in range(3)]
    assert ran[6:] == [f"busy {n}" for n in range(4)]


@pytest.mark.parametrize("position", [2**62, 2**62 + 1, 2**63 - 1])
async def test_a_position_or_an_id_that_somebody_has_chosen_keeps_no_other_job_waiting(database: str, position: int):
    """After one near 2^63 nothing was read any more in that origin, by no executor, until the job was deleted and they
    were started anew: the sequence could not be moved past it."""
    registry, ran, gate = Registry(), list[int](), asyncio.Event()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(0.01)))
    async def ride(job: Job[Ride]) -> None:
        await gate.wait()
        if job.attempt == 1 and job.payload.number % 2:
            raise ValueError("a first attempt")
        ran.append(job.payload.number)

    async with running(database, registry, audit_seconds=10_000) as executor, connected(database) as connection:
        for n, chosen in enumerate((position, 2**63 - 1)):
            gate.clear()
            await enqueue(database, ride, [Ride(transport="a", number=10 * n + 1)])
            await connection.execute(
                f"""INSERT INTO sidings.job (id, type, origin, "group", payload, position) OVERRIDING SYSTEM VALUE
                    VALUES ({2**63 - 10 + n}, 'ride', '{ORIGIN}', 'a', '{{"number": {10 * n + 2}}}', {chosen}),
                           ({2**63 - 5 + n}, 'ride', '{ORIGIN}', NULL, '{{"number": {10 * n + 3}}}', {chosen - 1})"""
            )
            await eventually(lambda: len(executor.scheduler.origins[ORIGIN].running) == 2)
            await enqueue(database, ride, [Ride(transport=to, number=10 * n + 4) for to in "ab"])
            gate.set()
            await eventually(lambda n=n: len(ran) == 5 * (n + 1), lambda: ran)
        assert await connection.fetchval("SELECT last_value < 2::numeric ^ 62 + 3000000 FROM sidings.job_position")
        await enqueue(database, ride, [Ride(transport="a", number=30)])
        await eventually(lambda: ran[-1] == 30)
    assert sorted(ran) == [1, 2, 3, 4, 4, 11, 12, 13, 14, 14, 30]


async def test_a_job_that_runs_while_it_gets_another_position_stays_the_first_of_its_group(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Its group was read again from the position that it had had, and went on without it until the audit."""
    registry, ran, gate = Registry(), list[int](), asyncio.Event()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(0.01)))
    async def ride(job: Job[Ride]) -> None:
        ran.append(job.payload.number)
        if job.payload.number == 1 and job.attempt == 1:
            await gate.wait()
            raise ValueError("a first attempt")

    async with running(database, registry, audit_seconds=10_000) as executor, connected(database) as connection:
        reader, lanes, fetch = executor.reader, executor.scheduler.origins[ORIGIN].lanes, executor.reader._link.fetch

        async def slow(query: str, *arguments: object) -> object:
            if query == reader._renumber_sql:
                executor.cycles.signal()  # as something that has finished does
                await eventually(lambda: ran)
            return await fetch(query, *arguments)

        monkeypatch.setattr(reader._link, "fetch", slow)
        await connection.execute(
            f"""INSERT INTO sidings.job (type, origin, "group", payload, position)
                SELECT 'ride', '{ORIGIN}', 'a', jsonb_build_object('number', n), {2**62} + n
                FROM generate_series(1, 2) n"""
        )
        await eventually(lambda: "a" in lanes and lanes["a"].queue and lanes["a"].queue[0].position < 1_000)
        gate.set()
        await eventually(lambda: len(ran) == 3, lambda: ran)
    assert ran == [1, 1, 2]


async def test_a_job_that_gets_another_position_is_a_new_one_to_a_read_and_one_that_leaves_the_order_gets_none(
    database: str,
):
    """A read that has passed its new place looks there for rows of new transactions only. A job that failed meanwhile
    is delayed: with a position it would run before its time."""
    renumber = load_sql("sidings.executor", "renumber")
    async with connected(database) as connection, connected(database) as cycle:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)"
        epoch = await connection.fetchval(acquire, me)
        await connection.execute(
            f"""INSERT INTO sidings.job (type, origin, payload, position)
                SELECT 'ride', '{ORIGIN}', '{{}}', {2**62} + n FROM generate_series(1, 2) n"""
        )
        async with cycle.transaction():
            await cycle.execute("UPDATE sidings.job SET position = NULL, run_at = 'infinity' WHERE id = 1")
            renumbering = asyncio.create_task(connection.fetchval(renumber, me, [ORIGIN], [epoch], 2**62, 10))
            blocked = "SELECT cardinality(pg_blocking_pids($1)) > 0"
            await eventually(lambda: value(database, blocked, connection.get_server_pid()), "it waits for the cycle")
        assert await renumbering == 1
        rows = await connection.fetch("SELECT position, txid::text::bigint AS txid FROM sidings.job ORDER BY id")
        assert rows[0]["position"] is None
        assert rows[1]["position"] < 1_000
        assert rows[1]["txid"] > rows[0]["txid"]


async def test_of_positions_beyond_all_those_keep_theirs_that_the_sequence_has_given(database: str):
    """With new ones they would come behind jobs of their groups that were enqueued after them."""
    async with connected(database) as connection:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)"
        epoch = await connection.fetchval(acquire, me)
        await connection.execute(
            f"""SELECT setval('sidings.job_position', {2**62 + 100});
                INSERT INTO sidings.job (type, origin, payload, position)
                SELECT 'ride', '{ORIGIN}', '{{}}', {2**62} + n FROM unnest(ARRAY[50, 100, 7000, 2000, 900]) n"""
        )
        renumber = load_sql("sidings.executor", "renumber")
        done = [await connection.fetchval(renumber, me, [ORIGIN], [epoch], 2**62, 2) for _ in range(3)]
        rows = await connection.fetch("SELECT position FROM sidings.job ORDER BY id")
    assert done == [2, 1, 0]
    assert [row["position"] - 2**62 for row in rows] == [50, 100, 103, 102, 101]


async def test_messages_are_sent_where_the_sequence_was_behind_the_outbox(
    database: str, sidings_kafka: str, topic: Any
):
    """What got an id behind the mark of its slot was not sent before the relay's end."""
    name = await topic("etas")
    async with connected(database) as connection:
        await connection.execute("SELECT setval('sidings.outbox_id', 1000)")
        await publish(database, f"no-{name}", [(f"key {n}", b"old") for n in range(50)])  # waits for its topic
        await connection.execute("SELECT setval('sidings.outbox_id', 1, false)")
        await publish(database, name, [(f"key {n}", b"early") for n in range(50)])
        async with relaying(database, sidings_kafka) as relay:
            await emptied(database, name)
            await eventually(lambda: any(slot.high > 1_000 for slot in relay.backlog.slots.values()))
            await publish(database, name, [(f"key {n}", b"late") for n in range(50)])
            await emptied(database, name)
            assert await value(database, "SELECT last_value FROM sidings.outbox_id") > 1050


@pytest.mark.parametrize("refused", ["one by one", "with its topic"])
async def test_a_message_that_got_the_id_of_a_parked_one_is_parked_too(
    database: str, sidings_kafka: str, topic: Any, refused: str
):
    """It was deleted, and nobody had it any more."""
    name = f"no topic {token_hex(4)}" if refused == "with its topic" else await topic("etas")
    values = [b"x" * 2_000] * 3
    async with publishing(database) as (outbox, connection):
        for _ in range(2):
            await connection.execute("SELECT setval('sidings.outbox_id', 1, false)")
            for value in values:  # by a plain INSERT, where a topic may have any name
                await connection.execute(
                    "INSERT INTO sidings.outbox (slot, topic, key, value) VALUES (0, $1, 'key', $2)", name, value
                )
            async with relaying(database, sidings_kafka, max_message_bytes=1_024):
                await emptied(database)
        assert [parked.value for parked in await outbox.parked()] == values * 2


@pytest.mark.parametrize(
    ("package", "sequences", "arguments"),
    [("sidings.executor", ["job_position", "job_id_seq"], (1, 2**62)), ("sidings.kafka.outbox", ["outbox_id"], (1,))],
)
async def test_a_sequence_that_has_drawn_nothing_is_moved_past_the_first_of_all(
    database: str, package: str, sequences: list[str], arguments: tuple[int, ...]
):
    """It counted as there already, so that an executor tried again without a pause."""
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.outbox (slot, topic, value) VALUES (0, 'etas', '')")
        await connection.execute("INSERT INTO sidings.job (type, origin, payload) VALUES ('ride', $1, '{}')", ORIGIN)
        for sequence in sequences:
            assert await connection.fetchval(f"SELECT setval('sidings.{sequence}', 1, false)") == 1
        await connection.fetch(load_sql(package, "advance"), *arguments)
        for sequence in sequences:
            assert await connection.fetchval(f"SELECT nextval('sidings.{sequence}')") > 1_000_000


@pytest.mark.parametrize(
    ("package", "sequence", "arguments"),
    [("sidings.executor", "job_position", (1_000, 2**62)), ("sidings.kafka.outbox", "outbox_id", (1_000,))],
)
async def test_a_sequence_that_is_in_use_hands_nothing_out_twice_when_it_is_moved_on(
    database: str, package: str, sequence: str, arguments: tuple[int, ...]
):
    """Another executor has done so before, and jobs are stored again. It was set to what had been drawn by then."""
    advance, drawn, over = load_sql(package, "advance", "sidings"), list[int](), asyncio.Event()

    async def draw() -> None:
        async with connected(database) as connection:
            while not over.is_set():
                rows = await connection.fetch(f"SELECT nextval('sidings.{sequence}') FROM generate_series(1, 100)")
                drawn.extend(row[0] for row in rows)

    async with asyncio.TaskGroup() as group, connected(database) as connection:
        for _ in range(3):
            group.create_task(draw())
        for _ in range(500):
            await connection.fetch(advance, *arguments)
        over.set()
    assert len(set(drawn)) == len(drawn)

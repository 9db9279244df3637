"""The SQL beneath dedup: what counts as a duplicate, also around midnight, and what is dropped when."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from sidings import PostgresSettings
from sidings.kafka import seen
from sidings.kafka.seen import SeenUpkeep
from sidings.schema import load_sql

from .support import SECONDS, a_role, connected, eventually, fetch, value

RECORD = "SELECT sidings.record_seen($1, $2, $3, $4)"
NOON = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)
MIDNIGHT = datetime(2026, 3, 11, 0, 0, tzinfo=UTC)
Message = tuple[str, int, int]  # id, partition, offset


async def record(connection, *messages: Message, at: datetime = NOON) -> list[int]:
    """Record messages; returns the places of the duplicates among them, from 0."""
    ids, partitions, offsets = [m[0].encode() for m in messages], [m[1] for m in messages], [m[2] for m in messages]
    places = await connection.fetchval(RECORD, ids, partitions, offsets, at, timeout=SECONDS)
    return [place - 1 for place in places]


async def test_of_messages_with_one_id_the_first_counts(database):
    async with connected(database) as connection:
        assert await record(connection, ("a", 0, 1), ("b", 0, 2), ("a", 0, 3), ("a", 1, 1)) == [2, 3]
        assert await record(connection, ("b", 1, 7), ("c", 0, 4)) == [0]
        assert await record(connection, ("c", 0, 9), at=NOON + timedelta(days=3)) == [0]
        many = [(f"of {n % 10}", n % 3, n) for n in range(1_000)]
        assert await record(connection, *many) == [*range(10, 1_000)]


async def test_a_message_that_is_delivered_again_is_no_duplicate_of_itself(database):
    async with connected(database) as connection:
        assert await record(connection, ("a", 0, 1), ("a", 0, 2)) == [1]
        # After a reset both come again; also where the repeat comes first.
        assert await record(connection, ("a", 0, 1), ("a", 0, 2)) == [1]
        assert await record(connection, ("a", 0, 2), ("a", 0, 1)) == [0]


async def test_two_transactions_with_one_id_do_not_both_count_not_even_over_midnight(database):
    """The second waits for the first, and then knows: whichever day each of them writes into."""
    before, after = MIDNIGHT - timedelta(seconds=1), MIDNIGHT + timedelta(minutes=59)
    for first, second in ((NOON, NOON), (before, after), (after, before)):
        async with connected(database) as one, connected(database) as other:
            for ending, expected in (("rollback", []), ("commit", [0, 1])):
                transaction = one.transaction()
                await transaction.start()
                await record(one, ("a", 0, 1), ("b", 0, 2), at=first)
                waiting = asyncio.create_task(record(other, ("b", 1, 1), ("a", 1, 2), at=second))
                pid = other.get_server_pid()
                await eventually(lambda pid=pid: waits_for_a_lock(database, pid))
                await getattr(transaction, ending)()
                assert await asyncio.wait_for(waiting, SECONDS) == expected
                of_repeats = "SELECT count(*) FROM sidings.message_seen WHERE partition = 1"
                assert bool(expected) == (await other.fetchval(of_repeats) == 0), (
                    "else they would be none a second time"
                )
                await other.execute("DELETE FROM sidings.message_seen")


async def test_who_waits_for_an_id_has_recorded_none_that_comes_behind_it(database):
    """Else two transactions could wait for each other."""
    async with (
        connected(database) as one,
        connected(database) as second,
        connected(database, lock_timeout="5s") as third,
    ):
        await record(one, ("x", 0, 0))  # makes the day
        async with one.transaction():
            await record(one, ("a", 0, 1))
            waiting = asyncio.create_task(record(second, ("b", 1, 1), ("a", 1, 2)))
            await eventually(lambda: waits_for_a_lock(database, second.get_server_pid()))
            assert await record(third, ("b", 2, 1)) == []
        assert await asyncio.wait_for(waiting, SECONDS) == [0, 1]


async def waits_for_a_lock(dsn: str, pid: int) -> bool:
    query = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')"
    return await value(dsn, query, pid)


async def test_the_first_of_a_day_makes_its_table_and_only_one_does(database):
    async with connected(database) as one, connected(database) as other:
        transaction = one.transaction()
        await transaction.start()
        await record(one, ("a", 0, 1))
        waiting = asyncio.create_task(record(other, ("b", 1, 1)))
        await eventually(lambda: waits_for_a_lock(database, other.get_server_pid()))
        await transaction.commit()
        assert await asyncio.wait_for(waiting, SECONDS) == []
    assert await days(database) == ["message_seen_20260310"]


async def test_a_day_is_made_while_messages_are_recorded_and_they_are_while_it_is_made(database):
    """Else all consumers would wait for whoever makes it, and he for the longest of their handlers."""
    async with (
        connected(database) as consumer,
        connected(database, lock_timeout="1s") as other,
        connected(database, lock_timeout="1s") as upkeep,
    ):
        await record(consumer, ("x", 0, 0))  # makes the day
        async with consumer.transaction(), upkeep.transaction():
            await record(consumer, ("a", 0, 1))
            await upkeep.execute("SELECT sidings.make_seen_day($1)", MIDNIGHT.date())
            assert await record(other, ("b", 1, 1)) == []


async def test_of_two_that_keep_up_the_days_one_does_the_work(database):
    async with connected(database) as one, connected(database) as other:
        async with one.transaction():
            await one.execute("SELECT sidings.maintain_seen(7, $1)", NOON)
            await other.execute("SELECT sidings.maintain_seen(7, $1)", NOON)
            assert await days(database) == [], "it has waited for nothing, and made none"
        assert len(await days(database)) == 3


async def test_a_role_that_owns_no_tables_makes_the_days_that_consumers_need_and_runs_nothing_as_their_owner(database):
    today = datetime.now(UTC).date()
    async with a_role(database) as (role, dsn), connected(dsn) as its:
        async with connected(database) as owner:
            await owner.execute(f"CREATE SCHEMA evil AUTHORIZATION {role}")
        await its.execute(
            """CREATE FUNCTION evil.to_regclass(text) RETURNS regclass LANGUAGE plpgsql AS
                   $$ BEGIN RAISE EXCEPTION 'as %', current_user; END $$;
               SET search_path = evil, pg_catalog"""
        )
        for n in range(-2, 4):
            make = its.execute("SELECT sidings.make_seen_day($1)", today + timedelta(days=n))
            if n in (-2, 3):
                with pytest.raises(asyncpg.InsufficientPrivilegeError, match="is none to make now"):
                    await make
            else:
                await make
    assert await days(database) == [f"message_seen_{today + timedelta(days=n):%Y%m%d}" for n in range(-1, 3)]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Whether another instance is about it is looked at at once."""
    monkeypatch.setattr(seen, "_MEANWHILE_SECONDS", 0.1)


async def days(dsn: str) -> list[str]:
    query = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'sidings.message_seen'::regclass"
    return sorted(row[0].removeprefix("sidings.") for row in await fetch(dsn, query))


async def test_days_are_made_ahead_and_dropped_after_their_time(database):
    today = datetime.now(UTC).date()
    noon = datetime.combine(today, datetime.min.time(), UTC) + timedelta(hours=12)
    names = {n: f"message_seen_{today + timedelta(days=n):%Y%m%d}" for n in range(-5, 4)}
    async with connected(database) as connection:
        await connection.execute("SELECT sidings.make_seen_day($1::date)", today - timedelta(days=3))
        await connection.execute("SELECT sidings.make_seen_day($1::date)", today - timedelta(days=2))
        await connection.execute("SELECT sidings.maintain_seen(2, $1)", noon)
        assert await days(database) == [names[n] for n in (-2, 0, 1, 2)]
        # A transaction that has written keeps the old day; nobody waits for it for long.
        async with connected(database) as writer, writer.transaction():
            await record(writer, ("a", 0, 1), at=noon)
            await connection.execute("SELECT sidings.maintain_seen(1, $1)", noon)
            assert names[-2] in await days(database)
        await connection.execute("SELECT sidings.maintain_seen(1, $1)", noon)
        assert names[-2] not in await days(database)


async def test_in_the_first_hour_of_a_day_the_tables_are_there_that_messages_need(database):
    """That of the day before was not, where the schema was younger, or nothing had run for days: the first message made
    it in its handler's transaction, and all others waited for that one's end."""
    at = MIDNIGHT + timedelta(minutes=30)
    async with connected(database) as one, connected(database) as other:
        await one.execute("SELECT sidings.maintain_seen(1, $1)", at)
        made = await days(database)
        async with one.transaction():
            await record(one, ("a", 0, 1), at=at)
            await other.execute("SET lock_timeout = '500ms'")
            assert await record(other, ("b", 1, 1), at=at) == []
        assert await days(database) == made


@pytest.mark.parametrize(("made", "left"), [([8], []), ([9, 12, 30], []), ([7, 8, 30], [7, 8, 30]), ([-2, 9], [-2, 9])])
async def test_days_that_some_instance_may_need_are_left_to_it(database, monkeypatch, made, left):
    """One that asks for no ids may have a shorter `dedup_days` than another one that does."""

    async def nap(seconds: float) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("sidings.kafka.seen.asyncio.sleep", nap)
    today = datetime.now(UTC).date()
    async with connected(database) as connection:
        for ago in made:
            await connection.execute("SELECT sidings.make_seen_day($1::date)", today - timedelta(days=ago))
    with pytest.raises(asyncio.CancelledError):
        await SeenUpkeep(PostgresSettings(dsn=database), 7, asked=False).run()
    assert await days(database) == sorted(f"message_seen_{today - timedelta(days=ago):%Y%m%d}" for ago in left)


async def test_overdue_days_are_waited_for_longer_and_all_go_once_their_users_have_ended(database):
    """Of consumers with slow handlers one or another always had a transaction open for longer than was waited."""
    today = datetime.now(UTC).date()
    async with connected(database) as upkeep, connected(database) as consumer:
        await upkeep.execute("SELECT sidings.maintain_seen(7)")
        await upkeep.execute("SELECT sidings.make_seen_day($1::date - n) FROM generate_series(9, 13) n", today)
        text = await upkeep.fetchval("SELECT pg_get_functiondef('sidings.maintain_seen'::regproc)")
        assert text.count("interval '2 seconds'") == 2
        await upkeep.execute(text.replace("interval '2 seconds'", "interval '500 ms'"))  # over before the first is had
        transaction = consumer.transaction()
        await transaction.start()
        await record(consumer, ("a", 0, 1), at=datetime.now(UTC))
        maintaining = asyncio.create_task(upkeep.execute("SELECT sidings.maintain_seen(7)"))
        long = """SELECT EXISTS (SELECT FROM pg_locks
                                 WHERE pid = $1 AND NOT granted AND waitstart < clock_timestamp() - interval '1 s')"""
        await eventually(lambda: value(database, long, upkeep.get_server_pid()), "it waits for the consumer")
        await transaction.commit()
        await maintaining
    assert not [day for day in await days(database) if day < f"message_seen_{today - timedelta(7):%Y%m%d}"]


@pytest.mark.parametrize("overdue", [False, True])
async def test_overdue_days_are_tried_again_soon_by_all_instances_at_one_time(database, monkeypatch, overdue):
    """So that one of them makes consumers wait, and not each of them."""
    naps: list[tuple[float, float]] = []

    async def nap(seconds: float) -> None:
        if seconds != seen._MEANWHILE_SECONDS:
            naps.append((seconds, time.time()))
            raise asyncio.CancelledError

    old = datetime.now(UTC).date() - timedelta(days=9)
    async with connected(database) as connection:
        await connection.execute("SELECT sidings.make_seen_day($1)", old)
        if overdue:
            await connection.execute(f"CREATE VIEW report AS SELECT count(*) FROM sidings.message_seen_{old:%Y%m%d}")
    monkeypatch.setattr("sidings.kafka.seen.asyncio.sleep", nap)
    begun = time.time()
    with pytest.raises(asyncio.CancelledError):
        await SeenUpkeep(PostgresSettings(dsn=database), 7).run()
    [(seconds, ended)] = naps
    if overdue:
        assert 0 < seconds <= 600
        assert (ended + seconds + 0.001) // 600 * 600 >= begun + seconds - 0.001  # a tenth minute of the clock
    else:
        assert seconds == 3_600


async def test_days_that_another_instance_is_about_to_drop_are_not_told_of(database, monkeypatch, caplog):
    """All look at one time, and only one of them drops: the others asked to have all instances stopped."""
    old = datetime.now(UTC).date() - timedelta(days=9)
    async with connected(database) as connection, connection.transaction():
        await connection.execute("SELECT sidings.make_seen_day($1)", old)
    async with connected(database) as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute("SELECT sidings.maintain_seen(7)")

        async def nap(seconds: float) -> None:
            if seconds != seen._MEANWHILE_SECONDS:
                raise asyncio.CancelledError
            await transaction.commit()

        monkeypatch.setattr("sidings.kafka.seen.asyncio.sleep", nap)
        with pytest.raises(asyncio.CancelledError):
            await SeenUpkeep(PostgresSettings(dsn=database), 7).run()
    assert f"message_seen_{old:%Y%m%d}" not in await days(database)
    assert not caplog.text


@pytest.mark.parametrize("why", ["a role that owns no tables", "a view"])
async def test_a_day_that_cannot_be_dropped_keeps_no_other_from_being_dropped_or_made(database, caplog, why):
    """The first message of each day made its table in its handler's transaction, and all others waited for its end."""
    today = datetime.now(UTC).date()
    names = {n: f"message_seen_{today + timedelta(days=n):%Y%m%d}" for n in range(-9, 3)}
    async with connected(database) as connection, a_role(database) as (_, limited):
        for n in (-9, -8):
            await connection.execute("SELECT sidings.make_seen_day($1::date)", today + timedelta(days=n))
        await connection.execute(f"CREATE VIEW report AS SELECT count(*) FROM sidings.{names[-9]}")
        kept = (-9,) if why == "a view" else (-9, -8)
        upkeep = SeenUpkeep(PostgresSettings(dsn=database if why == "a view" else limited), keep_days=7)
        working = asyncio.create_task(upkeep.run())
        try:
            await eventually(lambda: "message ids" in caplog.text)
        finally:
            working.cancel()
            await asyncio.wait([working])
        there = set(await days(database)) - {names[-1]}  # of the first hour
        assert there == {names[n] for n in (*kept, 0, 1, 2)}
        assert f"1 days of message ids, from {today - timedelta(days=9)} on, are over dedup_days=7" in caplog.text


async def test_many_days_that_are_in_use_do_not_undo_the_days_ahead(database, caplog):
    """As in a backup, after `dedup_days` was made shorter: half a second for each was more than the statement has."""
    today = datetime.now(UTC).date()
    async with connected(database) as connection, connected(database) as backup:
        for n in range(-20, -8):
            await connection.execute("SELECT sidings.make_seen_day($1::date)", today + timedelta(days=n))
        async with backup.transaction():
            await backup.fetch("SELECT count(*) FROM sidings.message_seen")
            upkeep = SeenUpkeep(PostgresSettings(dsn=database, call_seconds=5.0), keep_days=7)
            working = asyncio.create_task(upkeep.run())
            try:
                await eventually(lambda: "message ids" in caplog.text)
            finally:
                working.cancel()
                await asyncio.wait([working])
        assert f"12 days of message ids, from {today - timedelta(days=20)} on" in caplog.text
        assert f"message_seen_{today + timedelta(days=2):%Y%m%d}" in await days(database)


async def test_many_days_are_kept_up_once_postgres_has_analysed_its_catalogs(database, caplog):
    """It goes through all tables then, and joins the days to them: it looked for a date in each table's name."""
    today = datetime.now(UTC).date()
    async with connected(database) as connection:
        await connection.execute("SELECT sidings.make_seen_day($1::date - n) FROM generate_series(1, 60) n", today)
        oldest = f"message_seen_{today - timedelta(60):%Y%m%d}"
        await connection.execute(f"CREATE VIEW report AS SELECT count(*) FROM sidings.{oldest}")
        await connection.execute("ANALYZE pg_inherits, pg_class")
    upkeep = SeenUpkeep(PostgresSettings(dsn=database), keep_days=58)
    working = asyncio.create_task(upkeep.run())
    try:
        await eventually(lambda: "message ids" in caplog.text)
    finally:
        working.cancel()
        await asyncio.wait([working])
    assert f"1 days of message ids, from {today - timedelta(60)} on, are over dedup_days=58" in caplog.text
    kept = [60, *range(58, -3, -1)]
    assert await days(database) == [f"message_seen_{today - timedelta(n):%Y%m%d}" for n in kept]


@pytest.mark.parametrize("rows", [0, 20_000])
async def test_ids_are_looked_up_and_recorded_through_the_index(database, rows):
    """A plan made on an empty table must not stay a sequential scan."""
    async with connected(database) as connection:
        await record(connection, ("first", 0, 0))
        await connection.execute("ANALYZE sidings.message_seen")  # so small that no index seems worth it
        for _ in range(6):  # until the plans are generic
            await record(connection, ("first", 0, 0), ("again", 0, 1))
        await connection.execute(
            "INSERT INTO sidings.message_seen SELECT '2026-03-10', int4send(n), 0, n FROM generate_series(1, $1) n",
            rows,
        )
        before = await sequential_scans(connection)
        await record(connection, *((f"new-{n}", 1, n) for n in range(50)))
        assert await sequential_scans(connection) == before


@pytest.mark.parametrize("rows", [0, 20_000])
async def test_ids_are_taken_back_through_the_index(database, rows):
    """Those of these very places, on all days; a plan made on empty tables must not stay a sequential scan."""
    async with connected(database) as connection:
        await record(connection, ("first", 0, 0))
        await connection.execute("ANALYZE sidings.message_seen")
        for _ in range(6):  # until the plans are generic
            async with connection.transaction():
                await take_back(connection, ("other", 0, 0))
        await connection.execute(
            "INSERT INTO sidings.message_seen SELECT '2026-03-10', int4send(n), 0, n FROM generate_series(1, $1) n",
            rows,
        )
        before = await sequential_scans(connection)
        async with connection.transaction():
            await record(connection, *((f"mine-{n}", 0, n) for n in range(50)))
            await take_back(connection, *((f"mine-{n}", 0, n) for n in range(25, 50)))
        assert await sequential_scans(connection) == before
        left = "SELECT count(*) FROM sidings.message_seen WHERE id LIKE 'mine-%'"
        assert await connection.fetchval(left) == 25


async def test_only_what_a_transaction_has_recorded_is_taken_back_and_only_at_its_place(database):
    """Another's may be handled: as that of the partition's next owner, whose offset need not be compared here."""
    async with connected(database) as connection:
        await record(connection, ("theirs", 0, 1))
        async with connection.transaction():
            await record(connection, ("theirs", 0, 1), ("a", 0, 2), ("b", 0, 3), ("a", 1, 4), ("c", 1, 5), ("c", 1, 6))
            await take_back(connection, ("theirs", 0, 1), ("b", 0, 3), ("a", 1, 4), ("c", 1, 5), ("c", 1, 6))
        rows = await connection.fetch('SELECT id, partition, "offset" FROM sidings.message_seen ORDER BY id')
        assert [tuple(row) for row in rows] == [(b"a", 0, 2), (b"theirs", 0, 1)]


async def test_an_id_that_is_taken_back_is_free_for_who_waits_for_it(database):
    async with connected(database) as one, connected(database) as other:
        transaction = one.transaction()
        await transaction.start()
        await record(one, ("a", 0, 1), ("b", 0, 2))
        waiting = asyncio.create_task(record(other, ("b", 1, 1), ("a", 1, 2)))
        await eventually(lambda: waits_for_a_lock(database, other.get_server_pid()))
        await take_back(one, ("b", 0, 2))
        await transaction.commit()
        assert await asyncio.wait_for(waiting, SECONDS) == [1]


async def take_back(connection, *messages: Message) -> None:
    """Messages to which the transaction that has recorded them does not come."""
    ids, partitions, offsets = zip(*messages, strict=True)
    sql = load_sql("sidings.kafka", "take_back_seen")
    await connection.execute(sql, [id.encode() for id in ids], partitions, offsets)


async def sequential_scans(connection) -> int:
    await connection.execute("SELECT pg_stat_force_next_flush()")
    return await connection.fetchval("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'message_seen_20260310'")


@pytest.mark.parametrize("former", ["0", "7s"])
async def test_only_ids_are_waited_for_shortly_and_a_handlers_own_statements_as_long_as_before(database, former):
    async with connected(database) as connection, connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = '{former}'")
        assert await connection.fetchval(load_sql("sidings.kafka", "record_seen"), [b"a"], [0], [1]) == []
        assert await connection.fetchval("SHOW lock_timeout") == former


async def test_a_repeat_at_the_same_offset_of_another_partition_is_a_duplicate(database):
    async with connected(database) as connection:
        for partition, repeats in ((0, []), (1, [1]), (0, [])):
            sql = "SELECT sidings.record_seen($1, $2, $3)"
            assert await connection.fetchval(sql, [b"id"], [partition], [5]) == repeats

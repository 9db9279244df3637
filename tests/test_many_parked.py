"""As many messages as a relay parks are released and discarded: some thousands at a time, as it has parked them."""

import asyncio
import re
from typing import Any

import pytest
from sidings import PostgresUnavailable
from sidings.errors import Busy
from sidings.executor import PostgresSettings
from sidings.kafka.outbox import Outbox, decisions
from sidings.schema import load_sql

from .cli_support import cli, refused
from .faulty_proxy import KINDS, Moment, proxied
from .outbox_support import publishing
from .support import connected, eventually, fetch, value

# A relay parks all that waits for a topic, and a statement has 10 s. A million and a half took longer, whoever tried.
LIMIT = """
    CREATE FUNCTION public.too_many() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF (SELECT count(*) FROM gone) > 5000 THEN
            RAISE EXCEPTION '% messages take longer than a statement may', (SELECT count(*) FROM gone);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER too_many AFTER DELETE ON sidings.outbox_parked REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION public.too_many();
    INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, value, error)
    SELECT nextval('sidings.outbox_id'), now(), n & 15, CASE WHEN n <= 12000 THEN 'etas' ELSE 'other' END,
           convert_to('k' || n % 7, 'UTF8'), convert_to(n::text, 'UTF8'), 'no such topic'
    FROM generate_series(1, 12010) n
"""


@pytest.mark.parametrize("by", ["topic", "ids"])
@pytest.mark.parametrize("verb", ["release", "discard"])
async def test_many_parked_messages_are_decided_on_in_parts(database: str, verb: str, by: str) -> None:
    async with connected(database) as connection:
        await connection.execute(LIMIT)
    ids = [row["id"] for row in await fetch(database, "SELECT id FROM sidings.outbox_parked WHERE topic = 'etas'")]
    async with publishing(database) as (outbox, _):
        decide = getattr(outbox, verb)
        done = await (decide("etas", actor="alice") if by == "topic" else decide(ids=[*ids, ids[0]], actor="alice"))
    assert done == sorted(ids)
    assert await value(database, "SELECT count(*) FROM sidings.outbox_parked") == 10, "those of the other topic"
    sent = [int(row["value"]) for row in await fetch(database, "SELECT value FROM sidings.outbox ORDER BY id")]
    assert sent == (list(range(1, 12_001)) if verb == "release" else []), "in the order that they had"
    audit = await fetch(database, "SELECT (detail ->> 'messages')::int AS n FROM sidings.audit ORDER BY id")
    assert sum(row["n"] for row in audit) == 12_000


# As if each were a megabyte: of more than four at once, or with the last one, a statement takes longer than it may.
LARGE = """
    CREATE FUNCTION public.too_large() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF (SELECT count(*) > {most} OR bool_or(id = {endless}) FROM gone) THEN
            PERFORM pg_sleep(1000);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER too_large AFTER DELETE ON sidings.outbox_parked REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION public.too_large();
    INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, value, error)
    SELECT n, now(), n & 15, 'etas', convert_to(n::text, 'UTF8'), 'no such topic' FROM generate_series(1, 16) n
"""


@pytest.mark.parametrize("by", ["topic", "ids"])
@pytest.mark.parametrize("verb", ["release", "discard"])
async def test_large_parked_messages_are_decided_on_in_smaller_parts(database: str, verb: str, by: str) -> None:
    """Each repetition sent the same 5,000, which took longer than a statement may."""
    async with connected(database) as connection:
        await connection.execute(LARGE.format(most=4, endless=0))
    outbox, ids = Outbox(PostgresSettings(dsn=database, call_seconds=1.0)), list(range(1, 17))
    decide = getattr(outbox, verb)
    try:
        done = await (decide("etas", actor="alice") if by == "topic" else decide(ids=ids, actor="alice"))
    finally:
        await outbox.close()
    assert done == ids
    assert await value(database, "SELECT count(*) FROM sidings.outbox_parked") == 0
    sent = [int(row["value"]) for row in await fetch(database, "SELECT value FROM sidings.outbox ORDER BY id")]
    assert sent == (ids if verb == "release" else []), "in the order that they had, and once"


async def test_where_a_later_part_fails_it_is_said_how_many_were_done(database: str) -> None:
    """An error of Postgres stood there alone, and nothing told of those before."""
    async with connected(database) as connection:
        await connection.execute(LARGE.format(most=4, endless=10))
    release = ("outbox", "release", "--topic", "etas", "--yes")
    text = await refused(database, *release, exit_code=3, SIDINGS_POSTGRES_CALL_SECONDS="1")
    left = await value(database, "SELECT array_agg(id ORDER BY id) FROM sidings.outbox_parked")
    assert left == list(range(10, 17))
    assert text.endswith("; 9 messages were done before: try again")


PARKED = """
    INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, value, error)
    SELECT n, now(), n & 15, 'etas', convert_to(n::text, 'UTF8'), 'no such topic' FROM generate_series(1, 16) n
"""
FULL = """
    CREATE FUNCTION public.no_room() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'no space left on device' USING ERRCODE = 'disk_full';
    END $$;
    CREATE TRIGGER no_room BEFORE DELETE ON sidings.outbox_parked
    FOR EACH ROW WHEN (OLD.id = 10) EXECUTE FUNCTION public.no_room();
"""


@pytest.fixture
async def parked(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with 16 parked messages, of which four are decided on at once."""
    await fetch(database, PARKED)
    monkeypatch.setattr(decisions, "_AT_ONCE", 4)
    monkeypatch.delitem(KINDS, "doubt")  # a release does that as well
    monkeypatch.setitem(KINDS, "decide", re.compile(r"DELETE FROM sidings\.outbox_parked"))
    monkeypatch.setitem(KINDS, "ask", re.compile(r"FROM sidings\.outbox_parked WHERE id = ANY"))
    return database


def tries(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is sent, and for how many messages."""
    sent, fetch = list[tuple[str, int]](), outbox._fetch

    async def noted(query: str, *arguments: Any) -> Any:
        sent.append((query, len(arguments[1]) if len(arguments) > 1 and isinstance(arguments[1], list) else 0))
        return await fetch(query, *arguments)

    monkeypatch.setattr(outbox, "_fetch", noted)
    return sent


async def in_the_outbox(dsn: str) -> list[int]:
    return [int(row["value"]) for row in await fetch(dsn, "SELECT value FROM sidings.outbox ORDER BY id")]


async def test_a_full_disk_ends_a_release_with_how_many_were_done(parked: str) -> None:
    """asyncpg's DiskFullError came out, and nothing told of those before."""
    async with connected(parked) as connection:
        await connection.execute(FULL)
    text = await refused(parked, "outbox", "discard", "--topic", "etas", "--yes", exit_code=3)
    ended = "Postgres has ended the statement (DiskFullError: no space left on device)"
    assert text == f"{ended}; 8 messages were done before: try again"


async def test_where_postgres_is_away_for_a_moment_no_smaller_parts_are_tried(
    parked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(parked) as proxy, publishing(proxy.dsn) as (outbox, _):
        sent = tries(outbox, monkeypatch)
        proxy.arm("decide", Moment.BEFORE)
        with pytest.raises(PostgresUnavailable, match=r"did not answer: .*; 0 messages were done before: try again$"):
            await outbox.release(ids=range(1, 17), actor="alice")
    assert sent[-2:] == [("release_parked", 4), ("still_parked", 4)]
    assert await in_the_outbox(parked) == []


@pytest.mark.parametrize("verb", ["release", "discard"])
async def test_a_part_that_was_done_though_its_answer_is_missing_counts_as_done(parked: str, verb: str) -> None:
    """It was said that nothing was done, and those that a repeat named were no parked messages."""
    async with proxied(parked) as proxy, publishing(proxy.dsn) as (outbox, _):
        fault = proxy.arm("decide", Moment.AFTER, 2)
        done = await getattr(outbox, verb)("etas", actor="alice")
    assert (fault.hits, done) == (2, list(range(1, 17)))
    assert await in_the_outbox(parked) == (done if verb == "release" else []), "once, in the order that they had"


async def test_of_a_part_whose_answer_is_missing_only_what_was_parked_counts_as_done(parked: str) -> None:
    async with proxied(parked) as proxy:
        fault = proxy.arm("decide", Moment.AFTER)
        result = await cli(proxy.dsn, "outbox", "release", 3, 2, 4711, "--yes", exit_code=1)
    assert (fault.hits, result.stdout) == (1, "message 2: released\nmessage 3: released\n")
    assert "no such parked message: 4711" in result.stderr


async def test_where_nobody_knows_whether_a_part_was_done_this_is_said(parked: str) -> None:
    async with proxied(parked) as proxy:

        def fail() -> None:
            proxy.arm("decide", Moment.AFTER)
            proxy.arm("ask", Moment.BEFORE)

        outbox = Outbox(PostgresSettings(dsn=proxy.dsn), wake=fail)
        with pytest.raises(PostgresUnavailable) as raised:
            await outbox.release("etas", actor="alice")
        await outbox.close()
    told = "; what became of 4 more is not known; 4 messages were done before: try again"
    assert str(raised.value).endswith(told), str(raised.value)
    assert await in_the_outbox(parked) == list(range(1, 9))


async def test_where_postgres_hangs_no_smaller_parts_are_tried(parked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of seven had its ten seconds."""
    async with proxied(parked) as proxy:
        settings = PostgresSettings(dsn=proxy.dsn, call_seconds=0.5, connect_seconds=0.5)
        outbox = Outbox(settings)
        fetch = outbox._fetch

        async def hanging(query: str, *arguments: Any) -> Any:
            if query == "release_parked":
                proxy.silence()
            return await fetch(query, *arguments)

        monkeypatch.setattr(outbox, "_fetch", hanging)
        sent = tries(outbox, monkeypatch)
        with pytest.raises(PostgresUnavailable, match="of 4 more is not known; 0 messages were done before"):
            await outbox.release("etas", actor="alice")
        await outbox.close()
    assert [each for each in sent if each[1]] == [("release_parked", 4), ("still_parked", 4)]


@pytest.mark.parametrize("ends", [True, False])
async def test_a_part_that_was_not_answered_and_goes_on_keeps_the_next_one_waiting(
    parked: str, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A smaller part meets its locks. What it has done by then is no more there for any other."""
    async with publishing(parked) as (outbox, connection):
        fetch, transaction, begun = outbox._fetch, connection.transaction(), asyncio.Event()
        await outbox.failing()
        outbox._link.long_seconds = 0.0  # any statement that fails has been long

        async def committed() -> None:
            await eventually(lambda: value(parked, "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"))
            await transaction.commit()

        async def unanswered(query: str, *arguments: Any) -> Any:
            if query == "release_parked" and not begun.is_set():
                begun.set()
                await transaction.start()
                await connection.fetch(load_sql("sidings.kafka.outbox", query, "sidings"), *arguments)
                raise PostgresUnavailable("it did not answer")
            return await fetch(query, *arguments)

        monkeypatch.setattr(outbox, "_fetch", unanswered)
        release = outbox.release("etas", actor="alice")
        if ends:
            done, _ = await asyncio.gather(release, committed())
            assert done == list(range(1, 17))
            assert sorted(await in_the_outbox(parked)) == done
        else:
            with pytest.raises(Busy) as raised:
                await release
            assert str(raised.value) == (
                "another transaction, perhaps one of this call's own that was not answered, keeps a parked message "
                "locked; 0 were done before: try again, or give the ids of others"
            )

"""As many messages as a relay parks are released and discarded: some thousands at a time, as it has parked them."""

import pytest
from sidings import PostgresUnavailable
from sidings.executor import PostgresSettings
from sidings.kafka.outbox import Outbox

from .cli_support import refused
from .outbox_support import publishing
from .support import connected, fetch, value

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


async def test_where_postgres_is_away_no_smaller_parts_are_tried(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(database) as connection:
        await connection.execute(LARGE.format(most=16, endless=0))
    tried: list[int] = []

    async def away(query: str, topic: str, some: list[int], *_: object) -> None:
        tried.append(len(some))
        raise PostgresUnavailable("it is away")

    async with publishing(database) as (outbox, _):
        monkeypatch.setattr(outbox, "_fetch", away)
        with pytest.raises(PostgresUnavailable, match="it is away; 0 messages were done before"):
            await outbox.release(ids=range(1, 17), actor="alice")
    assert tried == [16]

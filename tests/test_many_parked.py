"""As many messages as a relay parks are released and discarded: some thousands at a time, as it has parked them."""

import pytest

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

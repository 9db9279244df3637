-- What came of the sending, in one statement: acknowledged messages are deleted, refused ones are parked. The key-share lock
-- on (origin, owner, epoch) fences it: a slot that was taken over is left alone, and a takeover waits for this to commit.
-- Repeating it is harmless. On another timeline than the messages were read from, their ids may belong to others: it does
-- nothing then. Lock order: origin (by name), then outbox. Plan: nested loops into outbox_pkey.
-- $1 relay, $2 slots, $3 their origins, $4 epochs, $5 slots and $6 ids acknowledged, $7 slots, $8 ids and $9 errors of refused,
-- $10 timeline that they were read from
WITH mine AS MATERIALIZED (
    SELECT m.slot, o.origin FROM unnest($2::smallint[], $3::text[], $4::bigint[]) m (slot, origin, epoch)
    JOIN sidings.origin o ON o.origin = m.origin AND o.owner = $1 AND o.epoch = m.epoch
    WHERE sidings.timeline() = $10::text
    ORDER BY o.origin FOR KEY SHARE OF o
), sent AS (
    DELETE FROM sidings.outbox x USING unnest($5::smallint[], $6::bigint[]) u (slot, id)
    WHERE x.slot = u.slot AND x.id = u.id AND u.slot IN (SELECT slot FROM mine)
), refused AS (
    DELETE FROM sidings.outbox x USING unnest($7::smallint[], $8::bigint[], $9::text[]) u (slot, id, error)
    WHERE x.slot = u.slot AND x.id = u.id AND u.slot IN (SELECT slot FROM mine)
    RETURNING x.*, u.error
), parked AS (
    INSERT INTO sidings.outbox_parked
        (id, published_at, stamped_at, slot, topic, key, partition_key, value, headers, error)
    SELECT id, published_at, stamped_at, slot, topic, key, partition_key, value, headers, error FROM refused
    ON CONFLICT (id) DO NOTHING
)
SELECT slot FROM mine

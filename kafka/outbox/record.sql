-- What came of the sending, in one statement: acknowledged messages are deleted, refused ones are parked. The key-share lock
-- on (origin, owner, epoch) fences it: a slot that was taken over is left alone, and a takeover waits for this to commit.
-- Repeating it is harmless. On another timeline than the messages were read from, their ids may belong to others: it does
-- nothing then. A parked message that has the id of a refused one, from before the sequence was set back, keeps it.
-- Lock order: origin (by name), then outbox.
--
-- Plan: one index scan of outbox_pkey for each slot, which takes its ids as an array (Postgres 17 and later walk the leaf
-- pages once; before, it is a descent for each id, as a join of the ids is in all versions: 2.8 instead of 1.7 us of CPU
-- a message). The ids are sliced in CTEs of their own, so that their text is parsed once and not for each slot.
--
-- $1 relay, $2 slots, $3 their origins, $4 epochs, $5 and $6 first and last place of their ids in $7, $7 ids acknowledged, as
-- the text of an array, $8 slots, $9 ids and $10 errors of refused, $11 timeline that they were read from
WITH mine AS MATERIALIZED (
    SELECT m.slot, m.first, m.last, o.origin
    FROM unnest($2::smallint[], $3::text[], $4::bigint[], $5::int[], $6::int[]) m (slot, origin, epoch, first, last)
    JOIN sidings.origin o ON o.origin = m.origin AND o.owner = $1 AND o.epoch = m.epoch
    WHERE sidings.timeline() = $11::text
    ORDER BY o.origin FOR KEY SHARE OF o
), whole AS MATERIALIZED (
    SELECT $7::text::bigint[] AS ids
), shares AS MATERIALIZED (
    SELECT m.slot, w.ids[m.first:m.last] AS ids FROM mine m, whole w
), sent AS (
    DELETE FROM sidings.outbox x USING shares s WHERE x.slot = s.slot AND x.id = ANY (s.ids)
), refused AS (
    DELETE FROM sidings.outbox x USING unnest($8::smallint[], $9::bigint[], $10::text[]) u (slot, id, error)
    WHERE x.slot = u.slot AND x.id = u.id AND u.slot IN (SELECT slot FROM mine)
    RETURNING x.*, u.error
), parked AS (
    INSERT INTO sidings.outbox_parked
        (id, published_at, stamped_at, slot, topic, key, partition_key, value, headers, error)
    SELECT CASE WHEN r.nth > 1 OR EXISTS (SELECT FROM sidings.outbox_parked p WHERE p.id = r.id)
                THEN nextval('sidings.outbox_id') ELSE r.id END,
           r.published_at, r.stamped_at, r.slot, r.topic, r.key, r.partition_key, r.value, r.headers, r.error
    FROM (SELECT x.*, row_number() OVER (PARTITION BY x.id ORDER BY x.slot) AS nth FROM refused x) r
)
SELECT slot FROM mine

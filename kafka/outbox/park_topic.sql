-- Park what waits for a topic which cannot be sent to, in the slots that are ours; fenced like record.sql. Looks at some messages of
-- each slot, of whatever topic: it would step over millions of another topic's. Tells of each slot after which id to go on; null: that
-- was all, but what is locked by somebody else's transaction, which is parked by a later try. A name that is longer than any topic's
-- may be too large for the index: what is parked has its beginning, and the whole in the error.
-- $1 relay, $2 slots, $3 their origins, $4 epochs, $5 topic, $6 error, $7 how many, $8 ids that Kafka has, $9 after which id of each
-- slot, $10 how many messages of each slot to look at
--
-- Plan: index scans of outbox_pkey, up to the id at which each slot's look ends; tests/test_outbox.py holds that.
WITH mine AS MATERIALIZED (
    SELECT m.slot, m.after, o.origin FROM unnest($2::smallint[], $3::text[], $4::bigint[], $9::bigint[]) m (slot, origin, epoch, after)
    JOIN sidings.origin o ON o.origin = m.origin AND o.owner = $1 AND o.epoch = m.epoch
    ORDER BY o.origin FOR KEY SHARE OF o
), page AS MATERIALIZED (
    SELECT mine.slot, mine.after,
           (SELECT x.id FROM sidings.outbox x WHERE x.slot = mine.slot AND x.id > mine.after ORDER BY x.id OFFSET $10 - 1 LIMIT 1) AS upto
    FROM mine
), found AS MATERIALIZED (
    SELECT m.slot, m.id FROM page, LATERAL (SELECT x.slot, x.id FROM sidings.outbox x
                                            WHERE x.slot = page.slot AND x.id > page.after
                                              AND x.id <= coalesce(page.upto, 9223372036854775807)
                                              AND x.topic = $5 AND x.id <> ALL ($8::bigint[])
                                            ORDER BY x.id LIMIT $7 FOR UPDATE SKIP LOCKED) m
    LIMIT $7
), refused AS (
    DELETE FROM sidings.outbox x USING found f WHERE x.slot = f.slot AND x.id = f.id
    RETURNING x.*
), parked AS (
    INSERT INTO sidings.outbox_parked
        (id, published_at, stamped_at, slot, topic, key, partition_key, value, headers, error)
    SELECT CASE WHEN r.nth > 1 OR EXISTS (SELECT FROM sidings.outbox_parked p WHERE p.id = r.id)
                THEN nextval('sidings.outbox_id') ELSE r.id END,
           r.published_at, r.stamped_at, r.slot, CASE WHEN length(r.topic) > 249 THEN left(r.topic, 248) || '…' ELSE r.topic END,
           r.key, r.partition_key, r.value, r.headers,
           CASE WHEN length(r.topic) > 249 THEN $6::text || ': ' || r.topic ELSE $6::text END
    FROM (SELECT x.*, row_number() OVER (PARTITION BY x.id ORDER BY x.slot) AS nth FROM refused x) r
)
SELECT count.parked, page.slot,
       CASE WHEN count.parked < $7 THEN page.upto
            ELSE coalesce((SELECT max(f.id) FROM found f WHERE f.slot = page.slot), page.after) END AS upto
FROM page, (SELECT count(*) AS parked FROM refused) count

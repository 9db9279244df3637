-- Park what waits for a topic which cannot be sent to, in the slots that are ours; fenced like record.sql. Where it parks fewer
-- than $7, that was all but what somebody else's transaction keeps locked, which is parked by a later try.
-- $1 relay, $2 slots, $3 their origins, $4 epochs, $5 topic, $6 error, $7 how many, $8 ids that Kafka has
WITH mine AS MATERIALIZED (
    SELECT m.slot, o.origin FROM unnest($2::smallint[], $3::text[], $4::bigint[]) m (slot, origin, epoch)
    JOIN sidings.origin o ON o.origin = m.origin AND o.owner = $1 AND o.epoch = m.epoch
    ORDER BY o.origin FOR KEY SHARE OF o
), found AS MATERIALIZED (
    SELECT m.slot, m.id FROM mine, LATERAL (SELECT x.slot, x.id FROM sidings.outbox x
                                            WHERE x.slot = mine.slot AND x.topic = $5 AND x.id <> ALL ($8::bigint[])
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
           r.published_at, r.stamped_at, r.slot, r.topic, r.key, r.partition_key, r.value, r.headers, $6
    FROM (SELECT x.*, row_number() OVER (PARTITION BY x.id ORDER BY x.slot) AS nth FROM refused x) r
)
SELECT count(*) AS parked FROM refused

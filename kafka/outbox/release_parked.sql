-- Parked messages go back into the outbox, in the order that they had, behind all that waits there now: they get new ids,
-- since a relay has read past the old ones. One row of the audit for each topic, with the first hundred ids.
-- $1 topic (null: any), $2 ids, $3 who, $4 why
WITH released AS (
    DELETE FROM sidings.outbox_parked p WHERE p.id = ANY ($2::bigint[]) AND ($1::text IS NULL OR p.topic = $1)
    RETURNING p.*
), back AS (
    INSERT INTO sidings.outbox (slot, topic, key, partition_key, value, headers, stamped_at, published_at)
    SELECT slot, topic, key, partition_key, value, headers, coalesce(stamped_at, published_at), clock_timestamp()
    FROM (SELECT * FROM released ORDER BY id) r
), noted AS (
    INSERT INTO sidings.audit (actor, action, target, reason, detail)
    SELECT $3::text, 'release messages', jsonb_build_object('topic', r.topic), $4::text,
           jsonb_build_object('messages', count(*), 'ids', to_jsonb((array_agg(r.id ORDER BY r.id))[:100]))
    FROM released r GROUP BY r.topic
)
SELECT id FROM released ORDER BY id

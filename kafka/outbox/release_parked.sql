-- Parked messages go back into the outbox, in the order that they had, behind all that waits there now: they get new ids,
-- since a relay has read past the old ones. $1 topic (null: any), $2 ids (null: all)
WITH released AS (
    DELETE FROM sidings.outbox_parked p WHERE ($1::text IS NULL OR p.topic = $1) AND ($2::bigint[] IS NULL OR p.id = ANY ($2))
    RETURNING p.*
), back AS (
    INSERT INTO sidings.outbox (slot, topic, key, partition_key, value, headers, stamped_at, published_at)
    SELECT slot, topic, key, partition_key, value, headers, coalesce(stamped_at, published_at), clock_timestamp()
    FROM (SELECT * FROM released ORDER BY id) r
)
SELECT id FROM released ORDER BY id

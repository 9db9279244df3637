-- Parked messages go back into the outbox, in the order that they had, behind all that waits there now: they get new ids,
-- since a relay has read past the old ones. The time of their publication stays that, and no timestamp of their author's. One row of the
-- audit for each topic, with the first hundred ids.
--
-- Not those of directory tables: what a row was when it was parked would come behind what it is now, and stay. Their keys are in doubt,
-- and due at once, so a relay publishes what the table says of them. In the order of the keys, as doubt.sql.
-- $1 topic (null: any), $2 ids, $3 who, $4 why
WITH tables AS (
    SELECT d.topic FROM sidings.directory d JOIN pg_class c ON c.oid = d.relation
), released AS (
    DELETE FROM sidings.outbox_parked p WHERE p.id = ANY ($2::bigint[]) AND ($1::text IS NULL OR p.topic = $1)
    RETURNING p.*
), doubted AS (
    INSERT INTO sidings.directory_doubt (topic, key, since, due_at)
    SELECT k.topic, k.key, k.at - interval '5 seconds', k.at
    FROM (SELECT DISTINCT r.topic, r.key, statement_timestamp() AS at FROM released r
          WHERE r.key IS NOT NULL AND r.topic IN (SELECT t.topic FROM tables t)) k
    ORDER BY k.topic, k.key
    ON CONFLICT ON CONSTRAINT directory_doubt_pkey DO UPDATE SET since = excluded.since, due_at = excluded.due_at
), back AS (
    INSERT INTO sidings.outbox (slot, topic, key, partition_key, value, headers, stamped_at, published_at)
    SELECT slot, topic, key, partition_key, value, headers, stamped_at, published_at
    FROM (SELECT * FROM released r
          WHERE r.key IS NULL OR r.topic NOT IN (SELECT t.topic FROM tables t) ORDER BY id) r
), noted AS (
    INSERT INTO sidings.audit (actor, action, target, reason, detail)
    SELECT $3::text, 'release messages', jsonb_build_object('topic', r.topic), $4::text,
           jsonb_build_object('messages', count(*), 'ids', to_jsonb((array_agg(r.id ORDER BY r.id))[:100]))
    FROM released r GROUP BY r.topic
)
SELECT id FROM released ORDER BY id

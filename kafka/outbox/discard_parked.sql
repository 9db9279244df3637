-- Parked messages are given up for good. One row of the audit for each topic, with the first hundred ids.
-- $1 topic (null: any), $2 ids, $3 who, $4 why
WITH discarded AS (
    DELETE FROM sidings.outbox_parked p WHERE p.id = ANY ($2::bigint[]) AND ($1::text IS NULL OR p.topic = $1)
    RETURNING p.id, p.topic
), noted AS (
    INSERT INTO sidings.audit (actor, action, target, reason, detail)
    SELECT $3::text, 'discard messages', jsonb_build_object('topic', d.topic), $4::text,
           jsonb_build_object('messages', count(*), 'ids', to_jsonb((array_agg(d.id ORDER BY d.id))[:100]))
    FROM discarded d GROUP BY d.topic
)
SELECT id FROM discarded ORDER BY id

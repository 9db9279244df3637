-- Try a failing topic again now instead of when its backoff ends: its relays see it at their next heartbeat.
-- $1 topic, $2 who, $3 why
WITH tried AS (
    UPDATE sidings.outbox_topic SET retry_at = clock_timestamp() WHERE topic = $1 RETURNING topic
), noted AS (
    INSERT INTO sidings.audit (actor, action, target, reason)
    SELECT DISTINCT $2::text, 'retry topic', jsonb_build_object('topic', t.topic), $3::text FROM tried t
)
SELECT topic FROM tried

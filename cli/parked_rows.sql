-- Parked messages for a table: of what is long its beginning, and of a value its length, which is known without reading
-- it. $1 topic (null: all), $2 after this id, $3 at most so many
SELECT m.id, m.topic, substring(m.key FOR 200) AS key, octet_length(m.key) > 200 AS key_goes_on,
       octet_length(m.value) AS bytes, m.published_at, m.parked_at,
       CASE WHEN length(m.error) > 2000 THEN left(m.error, 2000) || '…' ELSE m.error END AS error
FROM sidings.outbox_parked m WHERE ($1::text IS NULL OR m.topic = $1) AND m.id > $2 ORDER BY m.id LIMIT $3

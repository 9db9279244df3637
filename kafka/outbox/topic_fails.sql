-- A topic fails, for everybody to see. Not where its name is longer than any topic's, and may be too large for the index: what waits
-- for it is parked at once. $1 topic, $2 relay, $3 retries, $4 seconds until the next try, $5 error
INSERT INTO sidings.outbox_topic (topic, relay, retries, retry_at, error)
SELECT $1, $2, $3, clock_timestamp() + $4 * interval '1 second', $5
WHERE length($1::text) <= 249 AND EXISTS (SELECT FROM sidings.outbox_relay r WHERE r.id = $2)
ON CONFLICT (topic, relay) DO UPDATE SET retries = excluded.retries, retry_at = excluded.retry_at, error = excluded.error

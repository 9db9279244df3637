-- Parked messages, the oldest first. $1 topic (null: all), $2 after this id, $3 at most so many
SELECT id, topic, key, value, headers::text AS headers, published_at, parked_at, error
FROM sidings.outbox_parked WHERE ($1::text IS NULL OR topic = $1) AND id > $2 ORDER BY id LIMIT $3

-- Which messages of a topic are parked, the oldest first. $1 topic, $2 after this id, $3 up to this one, $4 at most so many
SELECT id FROM sidings.outbox_parked WHERE topic = $1 AND id > $2 AND id <= $3 ORDER BY id LIMIT $4

-- Of these keys an old message may yet come: what the table says of them is published again, at first when what was written is
-- likely to have arrived. Nothing where the topic is no directory table's. In the order of the keys: relays do this side by side.
-- $1 topic, $2 keys, each once
INSERT INTO sidings.directory_doubt (topic, key, since, due_at)
SELECT d.topic, k.key, k.at, k.at + interval '5 seconds'
FROM sidings.directory d, (SELECT key, clock_timestamp() AS at FROM unnest($2::bytea[]) u (key)) k
WHERE d.topic = $1
ORDER BY k.key
ON CONFLICT ON CONSTRAINT directory_doubt_pkey DO UPDATE SET since = excluded.since, due_at = excluded.due_at
RETURNING 1

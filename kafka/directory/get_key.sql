-- The youngest of the rows that have the key: the last one in its part of the index entry_key.
SELECT partition, "offset", timestamp, message_key, value, headers FROM entry WHERE key = ?
ORDER BY timestamp DESC, partition DESC, "offset" DESC LIMIT 1

-- The youngest of the rows that have the key, or all of them (-1), the youngest first: the last ones in its part of the index
-- entry_key.
SELECT partition, "offset", timestamp, message_key, value, headers FROM entry WHERE key = ?
ORDER BY timestamp DESC, partition DESC, "offset" DESC LIMIT ?

-- The key is the row: one look into the primary key.
SELECT partition, "offset", timestamp, message_key, value, headers FROM entry WHERE row = ?

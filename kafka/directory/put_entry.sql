-- One statement for new and known rows; the row's place in the file stays, so that updates do not scatter it.
INSERT INTO entry (row, key, partition, "offset", timestamp, message_key, value, headers)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (row) DO UPDATE SET
    key = excluded.key, partition = excluded.partition, "offset" = excluded."offset",
    timestamp = excluded.timestamp, message_key = excluded.message_key, value = excluded.value,
    headers = excluded.headers

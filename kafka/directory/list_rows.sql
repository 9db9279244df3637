-- As they stand in the file: each key has one row.
SELECT partition, "offset", timestamp, message_key, value, headers, row FROM entry

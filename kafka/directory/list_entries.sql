-- Oldest first, so that of several rows with one key the youngest is met last.
SELECT partition, "offset", timestamp, message_key, value, headers, row FROM entry
ORDER BY timestamp, partition, "offset"

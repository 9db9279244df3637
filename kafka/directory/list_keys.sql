-- In the order of the index entry_key, so that of several rows with one key the youngest is met last, and nothing is sorted:
-- a sort comes before the first row, while all who read wait, and goes through a temporary file, as large as all rows.
SELECT partition, "offset", timestamp, message_key, value, headers, row FROM entry WHERE key IS NOT NULL
ORDER BY key, timestamp, partition, "offset"

-- Where the consumers go on. $1 topic or null
SELECT c.topic, c.partition, c.next_offset, c.resets FROM sidings.consumer_offset c
WHERE $1::text IS NULL OR c.topic = $1 ORDER BY c.topic, c.partition

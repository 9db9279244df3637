-- Where the consumers go on, and whether somebody has paused them. $1 topic or null
SELECT c.topic, c.partition, c.next_offset, c.resets, p.paused_by || ': ' || p.reason AS paused
FROM sidings.consumer_offset c LEFT JOIN sidings.topic_pause p ON p.topic = c.topic
WHERE $1::text IS NULL OR c.topic = $1 ORDER BY c.topic, c.partition

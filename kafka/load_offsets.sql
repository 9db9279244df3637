-- Where to go on. Index: consumer_offset_pkey.
-- $1 topics, $2 partitions
SELECT c.topic, c.partition, c.next_offset, c.resets, c.topic_id, sidings.timeline() AS timeline
FROM unnest($1::text[], $2::int[]) AS a (topic, partition)
JOIN sidings.consumer_offset c ON c.topic = a.topic AND c.partition = a.partition

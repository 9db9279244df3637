-- The rows of partitions that were assigned for the first time. They are made here and never by an upsert in the
-- handler's transaction: an upsert would accept any expectation of a zombie.
-- Whoever is first decides; the others read what it wrote. In order, so that two instances cannot deadlock.
-- $1 topics, $2 partitions, $3 offsets to start at
INSERT INTO sidings.consumer_offset (topic, partition, next_offset)
SELECT s.topic, s.partition, s.next_offset
FROM unnest($1::text[], $2::int[], $3::bigint[]) AS s (topic, partition, next_offset)
ORDER BY s.topic, s.partition
ON CONFLICT DO NOTHING

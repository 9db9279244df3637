-- The partition counts that a consumer has seen. $1 topics, $2 partitions, $3 partitioners
INSERT INTO sidings.topic AS t (topic, partitions, partitioner)
SELECT n.topic, n.partitions, n.partitioner
FROM unnest($1::text[], $2::int[], $3::text[]) AS n (topic, partitions, partitioner)
ORDER BY n.topic
ON CONFLICT (topic) DO UPDATE
SET partitions = excluded.partitions, partitioner = excluded.partitioner, seen_at = now()
WHERE (t.partitions, t.partitioner) IS DISTINCT FROM (excluded.partitions, excluded.partitioner)

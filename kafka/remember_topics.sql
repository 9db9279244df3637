-- The partition counts that a consumer has seen. A count only grows here, in two steps, whoever has seen how much: first the
-- old count becomes a former one, which makes every process look where a group has its jobs; when all know that ($4), the
-- new count takes effect. Of a topic that was made anew with fewer partitions the smaller count becomes a former one, too, so
-- that groups stay where they have jobs; nor is it consumed before all know that. Concurrent writers meet at the row and change
-- it once.
-- $1 topics, $2 partitions, $3 partitioners, $4 seconds until everybody has read the row
INSERT INTO sidings.topic AS t (topic, partitions, partitioner)
SELECT n.topic, n.partitions, n.partitioner
FROM unnest($1::text[], $2::int[], $3::text[]) AS n (topic, partitions, partitioner)
ORDER BY n.topic
ON CONFLICT (topic) DO UPDATE
SET partitions = CASE WHEN excluded.partitions > t.partitions AND t.partitions = ANY (t.former)
                      THEN excluded.partitions ELSE t.partitions END,
    former = CASE WHEN excluded.partitions > t.partitions AND t.partitions <> ALL (t.former)
                  THEN t.former || t.partitions
                  WHEN excluded.partitions < t.partitions AND excluded.partitions <> ALL (t.former)
                  THEN t.former || excluded.partitions ELSE t.former END,
    partitioner = excluded.partitioner,
    seen_at = clock_timestamp()
WHERE (excluded.partitions > t.partitions
       AND (t.partitions <> ALL (t.former) OR t.seen_at < clock_timestamp() - $4::float8 * interval '1 second'))
   OR (excluded.partitions < t.partitions AND excluded.partitions <> ALL (t.former))
   OR t.partitioner <> excluded.partitioner

-- All topics whose partitions are known: a few dozen.
SELECT t.topic, t.partitions, t.partitioner, t.former, date_part('epoch', clock_timestamp() - t.seen_at) AS age
FROM sidings.topic t

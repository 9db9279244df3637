-- Where to go on. An epoch that stands beside another offset is of before a reset, or before an earlier release went on. Index: consumer_offset_pkey.
-- A row for each that is asked for: where there is none, the timeline tells whether it may have got lost in a failover. With each the
-- topics that are paused, all of them.
-- $1 topics, $2 partitions
SELECT a.topic, a.partition, c.next_offset, c.resets, c.topic_id, sidings.timeline() AS timeline,
       (SELECT array_agg(p.topic) FROM sidings.topic_pause p) AS paused,
       CASE WHEN c.epoch_offset = c.next_offset AND c.topic_id IS NOT NULL THEN c.leader_epoch END AS leader_epoch
FROM unnest($1::text[], $2::int[]) AS a (topic, partition)
LEFT JOIN sidings.consumer_offset c ON c.topic = a.topic AND c.partition = a.partition

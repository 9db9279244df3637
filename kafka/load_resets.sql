-- How often partitions have been reset, the timeline, and which topics are paused: asked every second by every consumer, so it must cost
-- nothing while nobody resets. A row at least. Index: consumer_offset_resets, which holds only the rows that ever were, one probe for each partition.
-- $1 topics, $2 partitions, as the text of an array: of other arrays asyncpg asks what they are, on each new connection
SELECT server.timeline, server.paused, c.topic, c.partition, c.resets
FROM (SELECT sidings.timeline() AS timeline,
             (SELECT array_agg(p.topic) FROM sidings.topic_pause p) AS paused) AS server
LEFT JOIN (unnest($1::text[], $2::text::int[]) AS a (topic, partition)
           CROSS JOIN LATERAL (SELECT c.* FROM sidings.consumer_offset c
                               WHERE c.topic || '' = a.topic AND c.partition = a.partition AND c.resets > 0
                               ORDER BY c.era DESC LIMIT 1) AS c) ON true

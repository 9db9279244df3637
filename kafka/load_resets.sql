-- How often partitions have been reset, and the timeline: asked every second by every consumer, so it must cost nothing while nobody
-- resets. A row at least. Index: consumer_offset_resets, which holds only the rows that ever were.
SELECT server.timeline, c.topic, c.partition, c.resets
FROM (SELECT sidings.timeline() AS timeline) AS server LEFT JOIN sidings.consumer_offset c ON c.resets > 0

-- How often partitions have been reset: asked every second by every consumer, so it must cost nothing while nobody resets.
-- Index: consumer_offset_resets, which holds only the rows that ever were.
SELECT topic, partition, resets FROM sidings.consumer_offset WHERE resets > 0

-- The mark stays where a batch had no record of the partition.
INSERT INTO position (partition, next_offset, mark_offset, mark_timestamp) VALUES (?, ?, ?, ?)
ON CONFLICT (partition) DO UPDATE SET
    next_offset = excluded.next_offset,
    mark_offset = coalesce(excluded.mark_offset, mark_offset),
    mark_timestamp = coalesce(excluded.mark_timestamp, mark_timestamp)

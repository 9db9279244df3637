-- The mark stays where a batch had no record of the partition; not where reading goes back to it, or before it: what is
-- read on at the mark would never see what lies between.
INSERT INTO position (partition, next_offset, mark_offset, mark_timestamp) VALUES (?, ?, ?, ?)
ON CONFLICT (partition) DO UPDATE SET
    next_offset = excluded.next_offset,
    mark_offset = coalesce(excluded.mark_offset, CASE WHEN mark_offset < excluded.next_offset THEN mark_offset END),
    mark_timestamp = coalesce(
        excluded.mark_timestamp, CASE WHEN mark_offset < excluded.next_offset THEN mark_timestamp END
    )

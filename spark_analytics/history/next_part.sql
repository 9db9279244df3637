-- The number of the file of the partition that a day has now, which is locked, so that it stays that one. $1 day
SELECT coalesce(max(part), 0) + 1 FROM sidings.history_archive WHERE day = $1 AND dropped_at IS NOT NULL

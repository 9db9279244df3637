-- The number of the file of the next partition of a day, after those that are noted as dropped. $1 day
SELECT coalesce(max(part), 0) + 1 FROM sidings.history_archive WHERE day = $1 AND dropped_at IS NOT NULL

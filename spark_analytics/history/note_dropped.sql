-- The partition of the day $1 that was archived is gone, and not by retention: somebody has dropped or renamed it. Its file is all that
-- the archive has of it, and what has come since gets one of its own.
UPDATE sidings.history_archive SET dropped_at = clock_timestamp()
WHERE day = $1 AND dropped_at IS NULL AND to_regclass('sidings.job_history_' || to_char($1::date, 'YYYYMMDD')) IS NULL

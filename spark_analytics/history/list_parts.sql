-- What the archive has, a file a row: one for each partition that the day has had. The rows of a dropped one are in the archive alone.
SELECT day, part, rows, location, dropped_at IS NOT NULL AS dropped FROM sidings.history_archive ORDER BY day, part

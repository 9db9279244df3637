-- Enter a file of the archive, that of the partition that the day has now. $1 day, $2 part, $3 rows, $4 location
INSERT INTO sidings.history_archive AS a (day, part, rows, location) VALUES ($1, $2, $3, $4)
ON CONFLICT (day, part) DO UPDATE SET rows = excluded.rows, location = excluded.location, archived_at = clock_timestamp(), dropped_at = NULL

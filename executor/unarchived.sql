-- The days that retention keeps because they are not archived: how many, and the first. $1 days to keep. Few partitions are looked
-- at, and the end of a BRIN index.
SELECT count(*) AS days, min(day) AS first
FROM (
    SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '^job_history_\d{8}$'
    UNION
    SELECT DISTINCT (finished_at AT TIME ZONE 'UTC')::date FROM sidings.job_history_default
    WHERE finished_at < (now() AT TIME ZONE 'UTC')::date::timestamp AT TIME ZONE 'UTC'
) AS known
WHERE day < (now() AT TIME ZONE 'UTC')::date - $1::int
  AND (SELECT s.archive_history FROM sidings.service s) AND NOT sidings.history_archived(day)

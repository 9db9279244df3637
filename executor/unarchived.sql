-- What retention waits for, where the history is archived: the age of the oldest day that is not archived with all of its rows, in
-- seconds since its end; how many of these days are kept for longer than $1 days, and the first of them. Few partitions are looked at,
-- and the end of a BRIN index.
SELECT coalesce(date_part('epoch', now() - (min(day) + 1)::timestamp AT TIME ZONE 'UTC'), 0) AS seconds,
       count(*) FILTER (WHERE day < (now() AT TIME ZONE 'UTC')::date - $1::int) AS days, min(day) AS first
FROM (
    SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '^job_history_\d{8}$'
    UNION
    SELECT DISTINCT (finished_at AT TIME ZONE 'UTC')::date FROM sidings.job_history_default
    WHERE finished_at < (now() AT TIME ZONE 'UTC')::date::timestamp AT TIME ZONE 'UTC'
) AS known
WHERE day < (now() AT TIME ZONE 'UTC')::date
  AND (SELECT s.archive_history FROM sidings.service s) AND NOT sidings.history_archived(day)

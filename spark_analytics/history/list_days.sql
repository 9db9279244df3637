-- The days of the history that have a partition of their own, with an estimate of their rows.
SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day, c.relname AS name, greatest(c.reltuples, 0)::bigint AS rows
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '^job_history_\d{8}$'
ORDER BY day

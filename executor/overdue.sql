-- What maintain() could not do, of which it tells only Postgres' log: how many days of the history should have been dropped a day ago at
-- the latest, and the first of them; and how many bytes are in the default partition. $1 days that are kept
WITH divided AS (
    SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '^job_history_\d{8}$'
)
SELECT count(*) AS days, min(d.day) AS first, pg_relation_size('sidings.job_history_default') AS gathered
FROM divided d
WHERE d.day < (now() AT TIME ZONE 'UTC')::date - $1::int - 1
  AND (NOT (SELECT s.archive_history FROM sidings.service s) OR sidings.history_archived(d.day))

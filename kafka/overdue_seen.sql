-- What maintain_seen() could not do, of which it tells only Postgres' log: how many days of message ids should have been dropped a day
-- ago at the latest, and the first of them. $1 days to keep
SELECT count(*) AS days, min(d.day) AS first
FROM (SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
      WHERE i.inhparent = 'sidings.message_seen'::regclass) d
WHERE d.day < (now() AT TIME ZONE 'UTC')::date - $1::int - 1

-- What maintain_seen() could not do, of which it tells only Postgres' log: how many days of message ids should have been dropped a day
-- ago at the latest, and the first of them. By their names, as there. $1 days to keep
SELECT count(*) AS days, to_date(right(min(c.relname::text), 8), 'YYYYMMDD') AS first
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'sidings.message_seen'::regclass
  AND c.relname < 'message_seen_' || to_char((now() AT TIME ZONE 'UTC')::date - $1::int - 1, 'YYYYMMDD')

-- Where nobody asks for message ids any more: all days are dropped once the newest of them is old. An instance that asks makes
-- days ahead, so its ids are left alone, however long it keeps them. maintain_seen() makes days up to the day after
-- tomorrow: here that is the newest, so it makes none to stay. $1 days to keep, $2 the caller's date (UTC)
SELECT sidings.maintain_seen(-3, (d.newest - 2 + time '12:00') AT TIME ZONE 'UTC')
FROM (SELECT to_date(right(max(c.relname::text), 8), 'YYYYMMDD') AS newest
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
      WHERE i.inhparent = 'sidings.message_seen'::regclass) d
WHERE d.newest < least((now() AT TIME ZONE 'UTC')::date, $2::date) - $1::int

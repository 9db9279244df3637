-- Days of message ids: made ahead, dropped when they are old, by the caller's clock as well: the server's may be days ahead for a
-- moment. $1 days to keep, $2 the caller's date (UTC)
SELECT sidings.maintain_seen($1 + greatest(0, (now() AT TIME ZONE 'UTC')::date - $2::date))

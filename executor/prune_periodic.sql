-- Forget periodic jobs that no executor has had in its code, or origins that none has held, for a week. Run an hour after
-- the start of an executor at the earliest: what is still wanted has been seen by then, however long the service was down.
-- $1 the caller's clock: the server's may be days ahead for a moment
DELETE FROM sidings.periodic WHERE seen_at < least(clock_timestamp(), $1::timestamptz) - interval '7 days'

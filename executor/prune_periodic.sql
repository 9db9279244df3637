-- Forget periodic jobs that no executor has had in its code, or origins that none has held, for a week. Run an hour after
-- the start of an executor at the earliest: what is still wanted has been seen by then, however long the service was down.
DELETE FROM sidings.periodic WHERE seen_at < clock_timestamp() - interval '7 days'

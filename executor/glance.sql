-- Has anything been committed since? An equal snapshot of the same server shows the same rows. A look at all origins costs a
-- thousand times as much where a thousand of them are idle.
SELECT pg_current_snapshot()::text || ' ' || pg_postmaster_start_time()::text AS snapshot

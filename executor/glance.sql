-- Has anything been committed since? An equal snapshot of the same server shows the same rows; after a crash, which resets these
-- statistics, transaction ids that no commit had made durable are handed out again. A look at all origins costs a thousand times as
-- much where a thousand of them are idle.
SELECT concat(pg_current_snapshot(), ' ', pg_postmaster_start_time(), ' crash ', pg_stat_get_bgwriter_stat_reset_time()) AS snapshot

-- Acquire free origins and take over expired ones, as acquire.sql does, and tell whose answer this is: a former primary may live on and
-- grant leases that count nowhere, and a server that has just been promoted may lack the last renewals of all leases.
-- Always a row at least; its acquired is null where nothing was acquired.
-- $1 executor, $2 origins, $3 generation of our assignment, $4 lease, $5 the timeline on which expiry times are believed; null: on none;
-- $6 the timelines on which what nobody has may be had at once, null: on any; $7 those of $2 that may be had on others as well
--
-- A server that has just been promoted may lack the acquisition by somebody who runs jobs under a lease of the former primary: what is free
-- there, or the caller's own, is not asked for before such a lease has run out, but for what the caller itself held until the failover.
--
-- settled: no standby was promoted here within a lease. A promotion asks for a checkpoint at once: until that is done, the last one
-- is of the former timeline; then its start, kept in whole seconds, is later than the promotion. Where this server has not been a
-- standby since its start, nothing was promoted; `acquire` looks at the start itself.
-- registered: whether the executor has its row; without it nothing is acquired. `maintain` deletes that of one that has held nothing for
-- a day; it learnt of that when it held something again, which nobody could have then before that lease had run out.
SELECT server.timeline,
       pg_last_wal_replay_lsn() IS NULL
       OR EXISTS (SELECT FROM pg_control_checkpoint() c
                  WHERE upper(lpad(to_hex(c.timeline_id), 8, '0')) = server.timeline
                        AND c.checkpoint_time + $4 + interval '1 second' < clock_timestamp()) AS settled,
       e.id IS NOT NULL AS registered, a.acquired, a.acquired_epoch, a.losses, a.former
FROM (SELECT CASE WHEN NOT pg_is_in_recovery() THEN sidings.timeline() END AS timeline) AS server  -- a standby refuses `acquire`
LEFT JOIN sidings.executor e ON e.id = $1
LEFT JOIN LATERAL sidings.acquire($1, CASE WHEN e.id IS NULL THEN '{}'
                                           WHEN $6::text[] IS NULL OR server.timeline = ANY ($6) THEN $2::text[]
                                           ELSE $7::text[] END,
                                  $3, $4, coalesce(server.timeline = $5, false)) a ON true

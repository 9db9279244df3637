-- What has become of published messages. One statement, one snapshot: the row and its transaction are seen together.
-- Visibility is asked of the transaction (snapshots know nothing of subtransactions), the outcome of the subtransaction.
-- On another timeline than they were published on all these may be others', who got the ids of what was lost; after a crash too,
-- unless the transaction was seen to have committed before. A crash resets all statistics, a person mostly one kind of them:
-- where only one of the two times is another one, it was no crash.
-- $1 ids, $2 slots, $3 transaction ids, $4 ids of the subtransactions that wrote the rows
WITH server AS MATERIALIZED (  -- asked once, for however many messages
    SELECT pg_current_snapshot() AS seen,
           CASE WHEN NOT pg_is_in_recovery() THEN sidings.timeline() END AS timeline,
           CASE WHEN NOT pg_is_in_recovery() THEN
               concat_ws(' ', extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()),
                         extract(epoch FROM (pg_stat_get_archiver()).stats_reset)) END AS crash
)
SELECT u.number, u.id, x.id IS NOT NULL AS waiting, p.error,
       CASE WHEN pg_visible_in_snapshot(u.txid::text::xid8, s.seen) THEN pg_xact_status(u.subxid::text::xid8)
            ELSE 'in progress' END AS status,
       s.timeline, s.crash
FROM server s
CROSS JOIN unnest($1::bigint[], $2::smallint[], $3::bigint[], $4::bigint[]) WITH ORDINALITY u (id, slot, txid, subxid, number)
LEFT JOIN sidings.outbox x ON x.slot = u.slot AND x.id = u.id
LEFT JOIN sidings.outbox_parked p ON p.id = u.id

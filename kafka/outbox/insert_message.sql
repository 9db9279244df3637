-- One message in the caller's transaction: a bare INSERT, one index entry. xmin is the id of the *sub*transaction, so that a
-- rollback to a savepoint can be told from an acknowledgement; on another timeline both ids may be another's, and after a crash,
-- which takes ids back that no commit has made durable (executor/read.sql has the reasons for how it is told). Headers pass as text,
-- whatever codec a caller's connection has for json.
-- $1 topic, $2 key, $3 value, $4 headers, $5 partition key, $6 timestamp
INSERT INTO sidings.outbox (slot, topic, key, value, headers, partition_key, stamped_at)
VALUES (sidings.outbox_slot($1::text, coalesce($5::bytea, $2::bytea)), $1, $2, $3, $4::text::json, $5, $6)
RETURNING id, slot, txid::text::bigint AS txid, xmin::text::bigint AS xmin, (SELECT sidings.timeline()) AS timeline,
          (SELECT concat_ws(' ', extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()),
                            extract(epoch FROM (pg_stat_get_archiver()).stats_reset))) AS crash

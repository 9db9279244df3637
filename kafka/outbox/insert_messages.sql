-- Many messages of one topic in the caller's transaction, in the order of the arrays: unnest yields its rows in order, and the id
-- is computed row by row above it. They share their headers; where they do not: `insert_messages_with_headers.sql`.
-- $1 topic, $2 keys, $3 values, $4 headers
INSERT INTO sidings.outbox (slot, topic, key, value, headers)
SELECT sidings.outbox_slot($1::text, u.key), $1::text, u.key, u.value, $4::text::json
FROM unnest($2::bytea[], $3::bytea[]) AS u (key, value)
RETURNING id, slot, txid::text::bigint AS txid, xmin::text::bigint AS xmin, (SELECT sidings.timeline()) AS timeline,
          (SELECT concat_ws(' ', extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()),
                            extract(epoch FROM (pg_stat_get_archiver()).stats_reset))) AS crash

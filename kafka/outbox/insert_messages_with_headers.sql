-- `insert_messages.sql` for messages of which some have headers of their own.
-- $1 topic, $2 keys, $3 values, $4 headers of each
INSERT INTO sidings.outbox (slot, topic, key, value, headers)
SELECT sidings.outbox_slot($1::text, u.key), $1::text, u.key, u.value, u.headers::json
FROM unnest($2::bytea[], $3::bytea[], $4::text[]) AS u (key, value, headers)
RETURNING id, slot, txid::text::bigint AS txid, xmin::text::bigint AS xmin, (SELECT sidings.timeline()) AS timeline,
          (SELECT concat_ws(' ', extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()),
                            extract(epoch FROM (pg_stat_get_archiver()).stats_reset))) AS crash

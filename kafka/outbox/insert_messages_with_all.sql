-- `insert_messages.sql` for messages of which some have a partition key or a time of their own.
-- $1 topic, $2 keys, $3 values, $4 headers of each, $5 partition keys, $6 timestamps
INSERT INTO sidings.outbox (slot, topic, key, value, headers, partition_key, stamped_at)
SELECT sidings.outbox_slot($1::text, coalesce(u.partition_key, u.key)), $1::text, u.key, u.value, u.headers::json,
       u.partition_key, u.stamped_at
FROM unnest($2::bytea[], $3::bytea[], $4::text[], $5::bytea[], $6::timestamptz[])
     AS u (key, value, headers, partition_key, stamped_at)
RETURNING id, slot, txid::text::bigint AS txid, xmin::text::bigint AS xmin, (SELECT sidings.timeline()) AS timeline,
          (SELECT concat_ws(' ', extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()),
                            extract(epoch FROM (pg_stat_get_archiver()).stats_reset))) AS crash

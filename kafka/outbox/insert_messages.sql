-- Many messages in the caller's transaction, in the order of the arrays: unnest yields its rows in order, and the id is
-- computed row by row above it. $1 topics, $2 keys, $3 values, $4 headers, $5 partition keys, $6 timestamps
INSERT INTO sidings.outbox (slot, topic, key, value, headers, partition_key, stamped_at)
SELECT sidings.outbox_slot(u.topic, coalesce(u.partition_key, u.key)), u.topic, u.key, u.value, u.headers::json, u.partition_key,
       u.stamped_at
FROM unnest($1::text[], $2::bytea[], $3::bytea[], $4::text[], $5::bytea[], $6::timestamptz[])
     AS u (topic, key, value, headers, partition_key, stamped_at)
RETURNING id, slot, txid::text::bigint AS txid, xmin::text::bigint AS xmin

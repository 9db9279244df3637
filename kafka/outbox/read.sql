-- THE READ: late rows, refills and forward rows of all held slots in ONE snapshot; the reader of jobs works the same way,
-- and executor/read.sql has the reasons. Sent in autocommit: age() answers too low inside a transaction with an id.
--
-- $1 slots, $2 their high marks, $3 their page sizes,
-- $4 snapshot of the previous read (null at first), $5 ids open in it, $6 their marks, $7 mark of the ids from its xmax on,
-- $8 topics to leave out of the forward part,
-- $9 slots, $10 topics, $11 after, $12 up to: the shares to refill, $13 rows a refill, $14 most late rows of a slot,
-- $15 most bytes of a refill's or a forward row, $16 of all late ones together,
-- $17 most rows, of whatever topic, that a refill or the forward part of a slot looks at. They would step over millions of another
-- topic's, or of those that are left out: where a refill has looked at so many, and found fewer than it wants, a row with part 8 tells
-- up to which id; of the forward part one with part 4 does, with their number.
--
-- A row that is larger comes as part + 4, bare, with its size as its timestamp: the client takes nothing from there on, and asks for
-- fewer. The size of value and keys is known without their being unpacked, or fetched from where large ones stand; so is that of
-- headers which are not compressed, as nearly none are below 2 kB.
--
-- Plan: index scans of outbox_pkey, each with its LIMIT inside; never a sequential scan, never a sort over the table;
-- tests/test_relay.py holds that. Nothing at or below the marks is touched but late rows, so dead entries there cost
-- nothing, however long some transaction keeps vacuum from removing them.
--
-- The header's row has in place of a time how far ids have been drawn, which may be later than the snapshot; so the mark passes what
-- the read *before* has told.
--
-- A row whose id is yet to come was brought from another server, by a dump or a logical replication: it is not late. As to the
-- crash in the header, see executor/read.sql.
--
-- A timestamp that is infinite is the largest number, which the relay parks: an error here would hold up all slots.
WITH s AS MATERIALIZED (
    SELECT pg_current_snapshot() AS snapshot,
           pg_snapshot_xmax(pg_current_snapshot())::text::bigint + age(pg_snapshot_xmax(pg_current_snapshot())::xid)
               AS next_xid
), late AS MATERIALIZED (
    SELECT least((SELECT min(u.mark) FROM unnest($5::bigint[], $6::bigint[]) u (xid, mark), s
                  WHERE pg_visible_in_snapshot(u.xid::text::xid8, s.snapshot)),
                 (SELECT $7::bigint FROM s
                  WHERE pg_snapshot_xmax(s.snapshot) > pg_snapshot_xmax($4::text::pg_snapshot))) AS mark
)
SELECT 0::smallint AS part, pg_backend_pid() AS ref, s.next_xid AS id, s.snapshot::text AS topic, NULL::bytea AS key,
       NULL::bytea AS partition_key, NULL::bytea AS value,
       CASE WHEN pg_is_in_recovery() THEN 'standby'
            ELSE concat(extract(epoch FROM pg_postmaster_start_time()),  -- as text, a time would depend on the session
                        ' crash ', extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()), ' timeline ', sidings.timeline()) END AS headers,
       (SELECT q.last_value - (NOT q.is_called)::int FROM sidings.outbox_id q) AS timestamp_ms, NULL::bigint AS published_us
FROM s, late
UNION ALL
SELECT CASE WHEN m.total > $16 THEN 5 ELSE 1 END, m.ref::int, m.id, m.topic,
       CASE WHEN m.total <= $16 THEN m.key END, CASE WHEN m.total <= $16 THEN m.partition_key END,
       CASE WHEN m.total <= $16 THEN m.value END, CASE WHEN m.total <= $16 THEN m.headers::text END,
       CASE WHEN m.total > $16 THEN m.size
            WHEN isfinite(m.stamped_at) THEN (date_part('epoch', m.stamped_at) * 1e3)::bigint
            WHEN m.stamped_at IS NOT NULL THEN 9223372036854775807 END,
       (date_part('epoch', m.published_at) * 1e6)::bigint
FROM (SELECT m.*, o.ref, sum(m.size) OVER (ROWS UNBOUNDED PRECEDING) AS total
      FROM s, late, unnest($1::smallint[], $2::bigint[]) WITH ORDINALITY o (slot, high, ref),
           LATERAL (SELECT *, coalesce(octet_length(m.value), 0) + coalesce(octet_length(m.key), 0)
                           + coalesce(octet_length(m.partition_key), 0)
                           + coalesce(CASE WHEN pg_column_compression(m.headers) IS NULL THEN pg_column_size(m.headers)
                                           ELSE octet_length(m.headers::text) END, 0) AS size
                    FROM sidings.outbox m
                    WHERE m.slot = o.slot AND m.id > late.mark AND m.id <= o.high AND m.txid < pg_snapshot_xmax(s.snapshot)
                      AND NOT pg_visible_in_snapshot(m.txid, $4::text::pg_snapshot)
                    ORDER BY m.id LIMIT $14) m
      WHERE late.mark IS NOT NULL) m
UNION ALL
SELECT CASE WHEN m.size > $15 THEN 6 ELSE 2 END, g.ref::int, m.id, m.topic,
       CASE WHEN m.size <= $15 THEN m.key END, CASE WHEN m.size <= $15 THEN m.partition_key END,
       CASE WHEN m.size <= $15 THEN m.value END, CASE WHEN m.size <= $15 THEN m.headers::text END,
       CASE WHEN m.size > $15 THEN m.size
            WHEN isfinite(m.stamped_at) THEN (date_part('epoch', m.stamped_at) * 1e3)::bigint
            WHEN m.stamped_at IS NOT NULL THEN 9223372036854775807 END,
       (date_part('epoch', m.published_at) * 1e6)::bigint
FROM unnest($9::smallint[], $10::text[], $11::bigint[], $12::bigint[]) WITH ORDINALITY g (slot, topic, after, upto, ref),
     LATERAL (SELECT *, coalesce(octet_length(m.value), 0) + coalesce(octet_length(m.key), 0)
                     + coalesce(octet_length(m.partition_key), 0)
                     + coalesce(CASE WHEN pg_column_compression(m.headers) IS NULL THEN pg_column_size(m.headers)
                                     ELSE octet_length(m.headers::text) END, 0) AS size
              FROM (SELECT * FROM sidings.outbox m WHERE m.slot = g.slot AND m.id > g.after AND m.id <= g.upto
                    ORDER BY m.id LIMIT $17) m
              WHERE m.topic = g.topic
              ORDER BY m.id LIMIT $13) m
UNION ALL
SELECT CASE WHEN m.size > $15 THEN 7 ELSE 3 END, o.ref::int, m.id, m.topic,
       CASE WHEN m.size <= $15 THEN m.key END, CASE WHEN m.size <= $15 THEN m.partition_key END,
       CASE WHEN m.size <= $15 THEN m.value END, CASE WHEN m.size <= $15 THEN m.headers::text END,
       CASE WHEN m.size > $15 THEN m.size
            WHEN isfinite(m.stamped_at) THEN (date_part('epoch', m.stamped_at) * 1e3)::bigint
            WHEN m.stamped_at IS NOT NULL THEN 9223372036854775807 END,
       (date_part('epoch', m.published_at) * 1e6)::bigint
FROM unnest($1::smallint[], $2::bigint[], $3::int[]) WITH ORDINALITY o (slot, high, page, ref),
     LATERAL (SELECT *, coalesce(octet_length(m.value), 0) + coalesce(octet_length(m.key), 0)
                     + coalesce(octet_length(m.partition_key), 0)
                     + coalesce(CASE WHEN pg_column_compression(m.headers) IS NULL THEN pg_column_size(m.headers)
                                     ELSE octet_length(m.headers::text) END, 0) AS size
              FROM (SELECT * FROM sidings.outbox m WHERE m.slot = o.slot AND m.id > o.high
                    ORDER BY m.id LIMIT greatest(o.page, $17)) m
              WHERE m.topic <> ALL ($8::text[])
              ORDER BY m.id LIMIT o.page) m
UNION ALL
SELECT 4, o.ref::int, m.id, NULL, NULL, NULL, NULL, NULL, m.looked, NULL
FROM unnest($1::smallint[], $2::bigint[], $3::int[]) WITH ORDINALITY o (slot, high, page, ref),
     LATERAL (SELECT max(m.id) AS id, count(*) AS looked
              FROM (SELECT m.id FROM sidings.outbox m WHERE m.slot = o.slot AND m.id > o.high
                    ORDER BY m.id LIMIT greatest(o.page, $17)) m) m
WHERE cardinality($8::text[]) > 0 AND o.page > 0
UNION ALL
SELECT 8, g.ref::int, m.id, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM unnest($9::smallint[], $10::text[], $11::bigint[], $12::bigint[]) WITH ORDINALITY g (slot, topic, after, upto, ref),
     LATERAL (SELECT m.id FROM sidings.outbox m WHERE m.slot = g.slot AND m.id > g.after AND m.id <= g.upto
              ORDER BY m.id OFFSET $17 - 1 LIMIT 1) m
WHERE (SELECT count(*)
       FROM (SELECT FROM (SELECT m.topic FROM sidings.outbox m WHERE m.slot = g.slot AND m.id > g.after AND m.id <= g.upto
                          ORDER BY m.id LIMIT $17) m
             WHERE m.topic = g.topic LIMIT $13) m) < $13

-- THE READ: late rows, refills and forward rows of all held origins in ONE snapshot. In snapshots of their own they
-- overtake each other (docs/model/reads.py). Sent in autocommit: age() answers too low inside a transaction with an id.
--
-- $1 origins, $2 their high marks, $3 their page sizes, $4 whether to report how far was scanned (some lane left out),
-- $5 snapshot of the previous read (null at first), $6 ids open in it, $7 their marks, $8 mark of the ids from its xmax on,
-- $9 origins, $10 groups, $11 after, $12 up to: the lanes to refill, $13 rows a refill,
-- $14 lanes to leave out of the forward part, written origin || chr(31) || group; null: none
-- $16 most late rows of an origin: one transaction may have stored a million jobs; the origin is read from 0 again then
-- $15 executor: its fence and what is paused come in the same snapshot as the jobs, so no job is known before its pause
-- $17 most bytes of a payload that a refill or a forward row brings, $18 of all late ones together
-- $19 digest of the pauses that the client knows; null: of none. Only others are brought: 5,000 are 280 kB
--
-- numbers: attempt, failures, losses, priority and policy; null where they are 1, 0, 0, 0 and 0, as they nearly always are:
-- the client takes longer over a column than Postgres over this comparison.
--
-- A row whose payload is larger than there is room for comes as part + 4, with the payload's size in its place: the client takes
-- nothing from there on, and asks for fewer. Sizes are those of the text as it is sent, and of rows that are too large as they are
-- stored already (a header of 4 bytes apart) that one: they are not unpacked for nothing. What is not compressed has the size that it
-- is stored with, and nearly nothing is below 2 kB; to make text of it only to ask for its length took 0.2 µs a job. Late rows are
-- few, mostly, and must not be left for later: theirs are summed up. For the other parts a sum costs more than the row itself
-- (1.8 µs instead of 1.1).
--
-- The header's row: id is the first transaction id not handed out; type, what the server is: its start, its last crash (which
-- resets these statistics, while a backend's crash does not change the start) and its timeline. After a crash, ids and positions
-- that no commit had made durable are handed out again. ref: the process that answers. A person may reset the statistics, too, but
-- no process lives through a crash. position: how far positions have been drawn, which may be later than the snapshot; so the mark
-- passes what the read *before* has told.
--
-- A row whose transaction id is yet to come was brought from another server, by a dump or a logical replication: it is not late.
--
-- Plan: nested loops from unnest() into index scans on job_scan (forward, late) and job_group (refill), each with its
-- LIMIT inside. Never a sequential scan of job, never a sort over it; tests/test_query_plans.py holds that. Nothing at or
-- below the marks is touched but late rows, so dead entries there cost nothing.
WITH s AS MATERIALIZED (
    SELECT pg_current_snapshot() AS snapshot,
           -- The first id not handed out. xmax alone is the last *completed* id + 1: ids above it may be at work.
           pg_snapshot_xmax(pg_current_snapshot())::text::bigint + age(pg_snapshot_xmax(pg_current_snapshot())::xid)
               AS next_xid
), late AS MATERIALIZED (   -- the mark from which late rows can stand; null when no transaction has ended
    SELECT least((SELECT min(u.mark) FROM unnest($6::bigint[], $7::bigint[]) u (xid, mark), s
                  WHERE pg_visible_in_snapshot(u.xid::text::xid8, s.snapshot)),
                 (SELECT $8::bigint FROM s
                  WHERE pg_snapshot_xmax(s.snapshot) > pg_snapshot_xmax($5::text::pg_snapshot))) AS mark
)
SELECT 0::smallint AS part, pg_backend_pid() AS ref, s.next_xid AS id,
       CASE WHEN pg_is_in_recovery() THEN 'standby'
            ELSE concat(extract(epoch FROM pg_postmaster_start_time()),  -- as text, a time would depend on the session
                        ' crash ', extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()), ' timeline ', sidings.timeline()) END AS type,
       NULL::text AS "group", (SELECT q.last_value - (NOT q.is_called)::int FROM sidings.job_position q) AS position,
       NULL::int[] AS numbers,
       date_part('epoch', clock_timestamp()) AS run_at, NULL::float8 AS enqueued_at, NULL::float8 AS first_started_at,
       jsonb_build_object('fence', (SELECT e.fence FROM sidings.executor e
                                    WHERE uuid_send(e.id) = uuid_send($15) ORDER BY e.era DESC LIMIT 1),
                          'paused', paused.digest, 'pauses', CASE WHEN paused.digest IS DISTINCT FROM $19::text THEN
                              (SELECT jsonb_agg(jsonb_build_array(p.kind, p.type, p.origin, p."group")) FROM sidings.pause p) END)
           AS headers, to_json(s.snapshot::text) AS payload
FROM s, (SELECT sum(hash_record_extended(ROW (p.type, p.origin, p."group"), 0))::text AS digest FROM sidings.pause p) paused
UNION ALL
SELECT CASE WHEN j.size <= $18 THEN 1 ELSE 5 END, j.ref::int, j.id, j.type, j."group", j.position,
       CASE WHEN j.attempt <> 1 OR j.failures <> 0 OR j.losses <> 0 OR j.priority <> 0 OR j.policy <> 0
            THEN ARRAY[j.attempt, j.failures, j.losses, j.priority, j.policy] END,
       date_part('epoch', j.run_at), date_part('epoch', j.enqueued_at), date_part('epoch', j.first_started_at), j.headers,
       CASE WHEN j.size <= $18 THEN j.payload END
FROM (SELECT j.*, sum(CASE WHEN j.stored <= $18 THEN coalesce(octet_length(j.payload::text), 0) ELSE j.stored END)
                      OVER (ROWS UNBOUNDED PRECEDING) AS size
      FROM (SELECT j.*, o.ref, sum(coalesce(pg_column_size(j.payload), 0)) OVER (ROWS UNBOUNDED PRECEDING) AS stored
            FROM s, late, unnest($1::text[], $2::bigint[]) WITH ORDINALITY o (origin, high, ref),
                 LATERAL (SELECT * FROM sidings.job j
                          WHERE j.origin = o.origin AND j.position > late.mark AND j.position <= o.high
                            AND j.txid < pg_snapshot_xmax(s.snapshot)
                            AND NOT pg_visible_in_snapshot(j.txid, $5::text::pg_snapshot)
                          ORDER BY j.position LIMIT $16) j
            WHERE late.mark IS NOT NULL) j) j
UNION ALL
SELECT CASE WHEN pg_column_size(j.payload) - 4 > $17 THEN 6 WHEN pg_column_compression(j.payload) IS NULL THEN 2
            WHEN octet_length(j.payload::text) > $17 THEN 6 ELSE 2 END,
       g.ref::int, j.id, j.type, j."group", j.position,
       CASE WHEN j.attempt <> 1 OR j.failures <> 0 OR j.losses <> 0 OR j.priority <> 0 OR j.policy <> 0
            THEN ARRAY[j.attempt, j.failures, j.losses, j.priority, j.policy] END,
       date_part('epoch', j.run_at), date_part('epoch', j.enqueued_at), date_part('epoch', j.first_started_at), j.headers,
       CASE WHEN pg_column_size(j.payload) - 4 > $17 THEN to_json(pg_column_size(j.payload))
            WHEN pg_column_compression(j.payload) IS NULL THEN j.payload
            WHEN octet_length(j.payload::text) > $17 THEN to_json(octet_length(j.payload::text)) ELSE j.payload END
FROM unnest($9::text[], $10::text[], $11::bigint[], $12::bigint[]) WITH ORDINALITY g (origin, "group", after, upto, ref),
     LATERAL (SELECT * FROM sidings.job j
              WHERE j.origin = g.origin AND j."group" = g."group" AND j.position > g.after AND j.position <= g.upto
              ORDER BY j.position LIMIT $13) j
UNION ALL
SELECT CASE WHEN pg_column_size(j.payload) - 4 > $17 THEN 7 WHEN pg_column_compression(j.payload) IS NULL THEN 3
            WHEN octet_length(j.payload::text) > $17 THEN 7 ELSE 3 END,
       o.ref::int, j.id, j.type, j."group", j.position,
       CASE WHEN j.attempt <> 1 OR j.failures <> 0 OR j.losses <> 0 OR j.priority <> 0 OR j.policy <> 0
            THEN ARRAY[j.attempt, j.failures, j.losses, j.priority, j.policy] END,
       date_part('epoch', j.run_at), date_part('epoch', j.enqueued_at), date_part('epoch', j.first_started_at), j.headers,
       CASE WHEN pg_column_size(j.payload) - 4 > $17 THEN to_json(pg_column_size(j.payload))
            WHEN pg_column_compression(j.payload) IS NULL THEN j.payload
            WHEN octet_length(j.payload::text) > $17 THEN to_json(octet_length(j.payload::text)) ELSE j.payload END
FROM unnest($1::text[], $2::bigint[], $3::int[]) WITH ORDINALITY o (origin, high, page, ref),
     LATERAL (SELECT * FROM sidings.job j
              WHERE j.origin = o.origin AND j.position > o.high
                AND ($14::text[] IS NULL OR j."group" IS NULL OR j.policy = 2 OR j.origin || chr(31) || j."group" <> ALL ($14))
              ORDER BY j.position LIMIT o.page) j
UNION ALL
SELECT 4, o.ref::int, NULL, NULL, NULL,
       (SELECT j.position FROM sidings.job j WHERE j.origin = o.origin AND j.position > o.high
        ORDER BY j.position DESC LIMIT 1),
       NULL, NULL, NULL, NULL, NULL, NULL
FROM unnest($1::text[], $2::bigint[], $4::boolean[]) WITH ORDINALITY o (origin, high, report, ref)
WHERE o.report

-- Delayed jobs whose time has come get their position, in due order: nextval() runs above a materialised sort, and the
-- transaction id is taken first (CASE). They get a new txid as well, or the reader would take them for rows it has seen.
-- One of policy latest (1) that a newer one of its group and type has followed ends as superseded instead, also when the
-- newer one is not due yet: so a delay debounces.
-- The key-share lock on (origin, epoch) keeps a superseded owner out. Returns how many, the types of those that ended, and when
-- the next one is due; and whether a LIMIT has cut something off.
-- A job that somebody else has locked is left for another time, as are those of its group that are due after it: to wait for
-- it would hold up all others. The next look begins there; or where the LIMIT has cut off what is due in an origin, if that is
-- earlier: at the last job taken. It begins at a moment and an id, compared as one by the index: of millions that are due at one
-- moment those that have been promoted, and cannot be removed yet, would be stepped over each time.
-- Of jobs that are due at the same moment the first by id: else what the LIMIT leaves for the next time might stand before others of
-- its group.
-- Plan: job_due, one probe per origin, then job_pkey; job_group for those of policy latest, from its end: there the newest
-- stands, before all that has ended in the group and cannot be removed yet. EXISTS would have no order. statement_timestamp(), because
-- a volatile clock_timestamp() cannot end an index scan: every later job of the origin would be read. num_nonnulls(),
-- because "IS NULL AND IS NULL" would let the planner join by a scan of all of job_due. What is due at
-- 'infinity' never is, and PostgreSQL before 17 does not calculate with that.
-- Of many origins that have something due each has less room: a statement that takes too long commits nothing. Only these are
-- counted, so that a backlog of one origin is promoted as fast among a thousand.
-- $1 executor, $2 origins, $3 epochs, $4 most jobs per origin, and of all twenty times as many, $5 types that leave no history,
-- $6 and $7 only what became due then, from that id on, or later; null: whenever
WITH mine AS MATERIALIZED (
    SELECT o.origin, o.epoch FROM unnest($2::text[], $3::bigint[]) m (origin, epoch)
    JOIN LATERAL (SELECT min(j.run_at) AS due FROM sidings.job j
                  WHERE j.origin = m.origin AND j.position IS NULL AND j.held IS NULL
                    AND (j.run_at, j.id) >= (coalesce($6::timestamptz, '-infinity'), coalesce($7::bigint, '-9223372036854775808'))) d
      ON d.due <= statement_timestamp()
    JOIN sidings.origin o ON o.origin = m.origin AND o.epoch = m.epoch AND o.owner = $1
    FOR KEY SHARE OF o
), room AS MATERIALIZED (
    SELECT least($4::bigint, greatest(1, 20 * $4 / nullif(count(*), 0))) AS per_origin FROM mine
), first AS MATERIALIZED (
    SELECT j.id, j.run_at, j.policy, j.origin, j."group", j.type, mine.epoch FROM mine,
         LATERAL (SELECT * FROM sidings.job j
                  WHERE j.origin = mine.origin AND j.position IS NULL AND j.held IS NULL AND j.run_at <= statement_timestamp()
                    AND (j.run_at, j.id) >= (coalesce($6::timestamptz, '-infinity'), coalesce($7::bigint, '-9223372036854775808'))
                  ORDER BY j.run_at, j.id LIMIT (SELECT per_origin FROM room)) j
), cut AS MATERIALIZED (
    SELECT run_at, id FROM (SELECT *, row_number() OVER (PARTITION BY origin ORDER BY run_at, id) AS ref FROM first) f
    WHERE ref = (SELECT per_origin FROM room)
), due AS MATERIALIZED (
    SELECT f.* FROM first f,
         LATERAL (SELECT FROM sidings.job j
                  WHERE j.id = f.id AND num_nonnulls(j.position, j.held) = 0 AND j.run_at <= statement_timestamp()
                  FOR UPDATE SKIP LOCKED) free
), locked AS MATERIALIZED (
    SELECT f.* FROM first f WHERE f.id NOT IN (SELECT id FROM due)
), followed AS MATERIALIZED (
    SELECT d.id, d.epoch FROM due d
    WHERE d.policy = 1 AND (SELECT n.id FROM sidings.job n
                            WHERE n.origin = d.origin AND n."group" = d."group" AND n.type = d.type
                              AND n.policy = 1 AND n.held IS NULL AND n.id > d.id
                            ORDER BY n.position DESC LIMIT 1) IS NOT NULL
), numbered AS MATERIALIZED (
    SELECT d.id, CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END AS position
    FROM (SELECT id FROM due e
          WHERE id NOT IN (SELECT id FROM followed)
            AND NOT EXISTS (SELECT FROM locked l WHERE l.origin = e.origin AND l."group" = e."group"
                            AND 2 NOT IN (l.policy, e.policy) AND (l.run_at, l.id) < (e.run_at, e.id))
          ORDER BY run_at, id) d
), promoted AS (
    UPDATE sidings.job j SET position = n.position, txid = pg_current_xact_id()
    FROM numbered n WHERE j.id = n.id
    RETURNING j.id
), superseded AS (
    DELETE FROM sidings.job j USING followed d WHERE j.id = d.id
    RETURNING j.*, d.epoch
), history AS (
    INSERT INTO sidings.job_history
        (job_id, epoch, enqueued_at, due_at, finished_at, executor, attempt, outcome, priority, type, origin, "group",
         correlation_id, headers, payload)
    SELECT u.id, u.epoch, u.enqueued_at, u.run_at, clock_timestamp(), $1, u.attempt, 'superseded', u.priority, u.type, u.origin,
           u."group", u.headers ->> 'correlation_id', u.headers, coalesce(u.payload, 'null')   -- without any it is erased, and not requeued
    FROM superseded u WHERE u.type <> ALL ($5::text[])
), begins AS (
    SELECT run_at, id FROM locked UNION ALL SELECT run_at, id FROM cut
    UNION ALL SELECT statement_timestamp(), '-9223372036854775808'
    ORDER BY run_at, id LIMIT 1
)
SELECT CASE WHEN run_at < '0001-01-02' THEN '-infinity' ELSE run_at END AS looked_at,   -- before the year 1 Python has no time
       id AS looked_at_id,
       EXISTS (SELECT FROM cut) AS more,
       (SELECT count(*) FROM promoted) + (SELECT count(*) FROM superseded) AS promoted,
       ARRAY(SELECT u.type FROM superseded u) AS superseded,
       (SELECT date_part('epoch', min(d.due) - statement_timestamp())
        FROM unnest($2::text[]) m (origin),
             LATERAL (SELECT min(j.run_at) AS due FROM sidings.job j
                      WHERE j.origin = m.origin AND j.position IS NULL AND j.held IS NULL
                        AND j.run_at > statement_timestamp() AND j.run_at < 'infinity') d) AS next_due_in
FROM begins

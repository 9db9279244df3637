-- Delayed jobs whose time has come get their position, in due order: nextval() runs above a materialised sort, and the
-- transaction id is taken first (CASE). They get a new txid as well, or the reader would take them for rows it has seen.
-- The key-share lock on (origin, epoch) keeps a superseded owner out. Returns how many, and when the next one is due.
-- Plan: job_due, one probe per origin, then job_pkey. statement_timestamp(), because a volatile clock_timestamp() cannot
-- end an index scan: every later job of the origin would be read. num_nonnulls(), because "IS NULL AND IS NULL" would let
-- the planner join by a scan of all of job_due.
-- $1 executor, $2 origins, $3 epochs, $4 most jobs per origin
WITH mine AS MATERIALIZED (
    SELECT o.origin FROM unnest($2::text[], $3::bigint[]) m (origin, epoch)
    JOIN LATERAL (SELECT min(j.run_at) AS due FROM sidings.job j
                  WHERE j.origin = m.origin AND j.position IS NULL AND j.held IS NULL) d ON d.due <= statement_timestamp()
    JOIN sidings.origin o ON o.origin = m.origin AND o.epoch = m.epoch AND o.owner = $1
    FOR KEY SHARE OF o
), due AS MATERIALIZED (
    SELECT j.id, j.run_at FROM mine,
         LATERAL (SELECT j.id, j.run_at FROM sidings.job j
                  WHERE j.origin = mine.origin AND j.position IS NULL AND j.held IS NULL AND j.run_at <= statement_timestamp()
                  ORDER BY j.run_at LIMIT $4) j
    ORDER BY j.run_at, j.id
), numbered AS MATERIALIZED (
    SELECT d.id, CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END AS position
    FROM (SELECT id FROM due ORDER BY run_at, id) d
), promoted AS (
    UPDATE sidings.job j SET position = n.position, txid = pg_current_xact_id()
    FROM numbered n WHERE j.id = n.id AND num_nonnulls(j.position, j.held) = 0
    RETURNING j.id
)
SELECT (SELECT count(*) FROM promoted) AS promoted,
       (SELECT date_part('epoch', min(d.due) - statement_timestamp())
        FROM unnest($2::text[]) m (origin),
             LATERAL (SELECT min(j.run_at) AS due FROM sidings.job j
                      WHERE j.origin = m.origin AND j.position IS NULL AND j.held IS NULL
                        AND j.run_at > statement_timestamp()) d) AS next_due_in
